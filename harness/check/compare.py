"""Compare one tensor with the truth, in units of PyTorch's own error.

    error = max |got - truth| / max |truth|
    limit = 2 * baseline * s + floor + propagated / max |truth|

The truth is the same function in higher precision, `baseline` the error of PyTorch in the kernel's dtype. The
tolerance so follows the data; the only constant is the floor, a few units in the last place. s is above 1, up
to 8, for sums that a spec declares `atomic` (`allowance`). `propagated` is the effect of the rounding of
saved quantities that are correct themselves. `Reference.compare_all` gets both from the spec. A tensor is
correct if its error is within the limit, NaN and infinity are where the truth has them, and every element was
written.

A truth that is a difference of equal terms is 0, or rounding noise, and cannot scale its own error: for a *
(g - g) a correct kernel returns 0 or a unit in the last place of a * g, depending on fused multiply-adds. If
max |truth| is below one such unit of the terms, `error` is relative to the size of the terms, for PyTorch's
result too.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.spec.puzzle import Arrays, Case

# The spacing of numbers just above 1. Whole numbers are right or wrong: theirs is less than any that differ.
EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    **dict.fromkeys(("bool", "uint8", "int32", "int64"), 2.0**-64),
}
FLOOR = {
    "float64": 64 * EPSILON["float64"],
    "float32": 4 * EPSILON["float32"],
    "float16": EPSILON["float16"] / 2,
    "bfloat16": EPSILON["bfloat16"] / 2,
    **dict.fromkeys(("bool", "uint8", "int32", "int64"), 2.0**-64),
}


@dataclass(frozen=True)
class TensorResult:
    """The comparison of one tensor.

    Attributes:
        ok: Whether the error is within the limit and no element is unexpectedly non-finite.
        error: max |got - truth| / max |truth|, or relative to the size of the terms if these cancel;
            absolute if the truth is all zero and no size is known.
        baseline: The same for PyTorch in the kernel's dtype.
        limit: The largest `error` allowed.
        difference: max |got - PyTorch| over finite elements, as reports print it for a gradient.
        worst: Index of the largest error.
        nonfinite: Number of elements that are NaN or infinite where the truth is not, or the reverse.
        unwritten: Number of elements that still hold the poison of the buffer.
    """

    ok: bool
    error: float
    baseline: float
    limit: float
    difference: float
    worst: tuple[int, ...] = ()
    nonfinite: int = 0
    unwritten: int = 0

    @property
    def ratio(self) -> float:
        """The error in units of PyTorch's own; infinite if PyTorch's is 0."""
        if self.baseline == 0:
            return 0.0 if self.error == 0 else float("inf")
        return self.error / self.baseline


@dataclass
class Repeats:
    """Results of repeated runs of one gradient; `atomic` if blocks add to it in no fixed order."""

    runs: int
    bit_equal: bool
    spread_ulps: float
    wrong_runs: int
    atomic: bool = False

    @property
    def ok(self) -> bool:
        """Check that every run was within the limit, and bit-identical if the order of sums is fixed."""
        return not self.wrong_runs and (self.bit_equal or self.atomic)


def allowance(atomic: bool, rows: int) -> float:
    """Return s, the factor allowed for a sum over `rows` by atomics in any order."""
    return min(8.0, max(1.0, math.sqrt(rows) / 8)) if atomic else 1.0


def relative_error(got: np.ndarray, truth: np.ndarray, scale: float = 0.0) -> float:
    """Return max |got - truth| / scale, by default max |truth|; absolute if that is 0; 0 for empty tensors."""
    if truth.size == 0:
        return 0.0
    scale = scale or np.abs(truth).max()
    with np.errstate(over="ignore"):  # an error of infinity is one
        return float(np.abs(got - truth).max() / (scale if scale > 0 else 1))


def compare(
    got: np.ndarray,
    truth: np.ndarray,
    baseline: np.ndarray,
    dtype: str,
    *,
    allowance: float = 1.0,
    poison: np.ndarray | None = None,
    terms: float = 0.0,
    propagated: float = 0.0,
) -> TensorResult:
    """Compare one tensor with the truth and with PyTorch.

    Args:
        got: The kernel's output, in float64 or wider.
        truth: The same shape, from higher precision.
        baseline: The same shape, PyTorch's result in `dtype`.
        dtype: The kernel's output dtype, a key of EPSILON.
        allowance: s in the limit.
        poison: True where the buffer still holds its fill value.
        terms: The size of the terms whose difference the tensor is; 0 if nothing cancels.
        propagated: The effect of the rounding of the tensor's inputs, themselves within their limits.

    A NaN or infinity counts if the truth has none, and the reverse; if both have one in the same place, the
    element is correct unless they are infinities of opposite sign. NaN and infinity count as equal, since the
    order of additions decides: a compensated sum turns an infinite sum into inf - inf.
    """
    truth = np.asarray(truth)
    truth = truth if truth.dtype.kind == "f" else truth.astype(np.float64)
    finite = np.isfinite(truth)
    opposite = np.isinf(got) & np.isinf(truth) & (np.signbit(got) != np.signbit(truth))
    same = np.equal(got, truth) | (~finite & ~np.isfinite(got) & ~opposite)
    nonfinite = int(np.sum(np.isfinite(got) != finite) + np.sum(opposite))
    unwritten = int(poison.sum()) if poison is not None else 0
    both = finite & np.isfinite(got)
    comparable = both & np.isfinite(baseline)
    zero = truth.dtype.type(0)
    clean_got, clean_truth = np.where(both, got, zero), np.where(both, truth, zero)
    scale, floor = cancelled_scale(clean_truth, terms, dtype)
    error = relative_error(clean_got, clean_truth, scale)
    baseline_error = relative_error(np.where(comparable, baseline, clean_truth), clean_truth, scale)
    all_zero = truth.size == 0 or not (scale or np.any(clean_truth))
    limit = floor + (0.0 if all_zero else 2 * baseline_error * allowance)
    limit += propagated / float(scale or np.abs(clean_truth).max(initial=0.0) or 1)
    apart = clean_got - np.where(comparable, baseline, clean_got)
    difference = float(np.abs(apart).max()) if truth.size else 0.0
    distance = np.abs(clean_got - clean_truth)
    distance = np.where(both | same, distance, np.inf)
    worst = (
        tuple(int(i) for i in np.unravel_index(int(np.argmax(distance)), truth.shape)) if truth.size else ()
    )
    ok = error <= limit and nonfinite == 0 and unwritten == 0
    return TensorResult(ok, error, baseline_error, limit, difference, worst, nonfinite, unwritten)


def cancelled_scale(truth: np.ndarray, terms: float, dtype: str) -> tuple[float, float]:
    """Return the scale of errors and the floor: the size of the terms if the truth is lost in their
    rounding, else 0.

    Kernels of a 16-bit type compute in float32, so their terms cancel to float32's last place too.
    """
    arithmetic = "float64" if dtype == "float64" else "float32"
    if truth.size and np.abs(truth).max() < EPSILON[arithmetic] * terms < math.inf:
        return terms, FLOOR[arithmetic]
    return 0.0, FLOOR[dtype]


def got_and_expected(got: float, expected: float, limit: float, digits: int = 7) -> str:
    """Return "got 1.5, expected 1.25"; of two that are equal to so many digits also their difference, and the
    limit."""
    one, other = distinct_digits(got, expected, digits)
    off = f": off by {abs(got - expected):.1e}, the limit {limit:.1e}" if one != f"{got:.{digits}g}" else ""
    return f"got {one}, expected {other}{off}"


def distinct_digits(one: float, other: float, digits: int) -> tuple[str, str]:
    """Format two numbers, with as many digits as distinguish them."""
    texts = ((f"{one:.{count}g}", f"{other:.{count}g}") for count in range(digits, 17))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{one:.17g}", f"{other:.17g}"))


def describe_wrong_bits(got: float, expected: float) -> str:
    """Describe the wrong bits of a 32-bit word, the lowest by its value."""
    wrong = [bit for bit in range(32) if (int(got) ^ int(expected)) >> bit & 1]
    first = f"bit {wrong[0]} is {int(got) >> wrong[0] & 1}, expected {int(expected) >> wrong[0] & 1}"
    return first if len(wrong) == 1 else f"{first}; {len(wrong)} of its 32 bits are wrong"


def spread_in_ulps(runs_min: np.ndarray, runs_max: np.ndarray, dtype: str) -> float:
    """Return the largest spread between repeated results, in units in the last place of the larger magnitude."""
    magnitude = np.maximum(np.abs(runs_min), np.abs(runs_max))
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1)))
    ulp = EPSILON[dtype] * 2.0**exponent
    return float(((runs_max - runs_min) / ulp).max()) if runs_min.size else 0.0


# ---- Evidence for the diagnosis ------------------------------------------------------------------------------


NEARER = 8
"""A formula explains a result that is this many times nearer to it than to the truth."""
FAR = 1000
"""And one that is this many times nearer may be as far from it as ROUNDING."""
ROUNDING = 2e-5


@dataclass(frozen=True)
class Evidence:
    """One wrong quantity in one case.

    Attributes:
        case: The case; `arrays` its inputs in float64.
        got, truth: The tensor that was written, in float64, and the expected one.
        unwritten: True where nothing was written.
        verdict: The comparison.
        dtype: The kernel's output dtype.
    """

    case: Case
    arrays: Arrays
    got: np.ndarray
    truth: np.ndarray
    unwritten: np.ndarray
    verdict: TensorResult
    dtype: str = "float32"

    @cached_property
    def scale(self) -> float:
        """Return the scale of errors: the largest finite truth, or 1 if all of it is zero."""
        return largest(self.truth) or 1.0

    @cached_property
    def magnitude(self) -> float:
        """The largest finite magnitude in the truth (1 if all of it is zero) and the result."""
        return max(self.scale, largest(self.got))

    @cached_property
    def error(self) -> float:
        """The largest distance from the truth; infinite if one of the two is not a number."""
        with np.errstate(all="ignore"):
            return float(apart_from(self.got, self.truth).max())

    @property
    def tolerance(self) -> float:
        """Return the largest distance between a result and a formula that explains it."""
        return (2 * self.verdict.limit + 8 * EPSILON[self.dtype]) * self.magnitude

    def equals(self, formula: np.ndarray, numbers_only: bool = False) -> float | None:
        """Return the distance of the result from a formula's, relative to the largest value; None if it is
        too far.

        A formula with one axis more than the result lists alternatives. NaN must be in the same places; with
        `numbers_only` only the numbers of the result are compared. A result far from the truth gets a larger
        tolerance, since it may have summed far more terms than it should.
        """
        with np.errstate(all="ignore"):
            apart = apart_from(self.got, np.asarray(formula, np.float64))
            if apart.ndim > self.got.ndim:
                apart = apart.min(0)
        if numbers_only:
            apart = np.where(np.isfinite(self.got), apart, 0.0)
        distance = float(apart.max(initial=0.0))
        near = distance <= self.tolerance and distance * NEARER <= self.error
        far = distance <= ROUNDING * self.magnitude and distance * FAR <= self.error
        return distance / self.magnitude if near or far else None

    @property
    def wrong(self) -> np.ndarray:
        """True for elements beyond the limit, not written, or not finite where the truth is."""
        with np.errstate(invalid="ignore"):
            far = np.abs(self.got - self.truth) > self.verdict.limit * self.scale
        return np.where(np.isfinite(self.truth), far, False) | self.misplaced | self.unwritten

    @property
    def misplaced(self) -> np.ndarray:
        """True where only one of result and truth is a number, or they are opposite infinities."""
        opposite = np.isinf(self.got) & np.isinf(self.truth) & (self.got != self.truth)
        return (np.isfinite(self.got) != np.isfinite(self.truth)) | opposite


def largest(array: np.ndarray) -> float:
    """Return the largest finite magnitude, or 0."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def severity(evidence: Evidence) -> float:
    """Return the error in units of the limit."""
    return evidence.verdict.error / evidence.verdict.limit


def apart_from(got: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return |got - other|: 0 where neither is a number, infinite where one of them is not."""
    apart = np.abs(got - other)
    if np.isfinite(apart).all():
        return apart
    numbers = np.isfinite(got) & np.isfinite(other)
    neither = ~np.isfinite(got) & ~np.isfinite(other)
    return np.where(numbers, apart, np.where(neither, 0.0, np.inf))
