"""Compare one tensor with the truth, in units of PyTorch's own error.

    error = max |got - truth| / max |truth|
    limit = 2 * baseline * s + floor + propagated_error / max |truth|

The truth is the same function in higher precision, `baseline` the error of PyTorch in the kernel's dtype, so
that the tolerance follows the data; the only constant is the floor, a few units in the last place. s is 1, or
up to 8 for sums by atomics (`compute_tolerance_factor`). `propagated_error` is the effect of rounding in
saved quantities that are themselves correct. `Reference.compare_all` gets both from the spec. A tensor is
correct if its error is within the limit, it is non-finite exactly where the truth is, and every element was
written.

A truth that is a difference of equal terms is 0, or rounding noise, and cannot scale its own error: for a *
(g - g) a correct kernel returns 0 or a unit in the last place of a * g, depending on fused multiply-adds. If
max |truth| is below one such unit of the terms, `error` is relative to the magnitude of the terms, also for
PyTorch's result.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.spec.puzzle import Arrays, Case

# The spacing of numbers just above 1; for integers, a value below any difference.
EPSILON = {
    **{"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7},
    **dict.fromkeys(("bool", "uint8", "int32", "int64"), 2.0**-64),
}
FLOOR_FACTORS = {"float64": 64, "float32": 4, "float16": 0.5, "bfloat16": 0.5}
FLOOR = {dtype: FLOOR_FACTORS.get(dtype, 1) * epsilon for dtype, epsilon in EPSILON.items()}


@dataclass(frozen=True)
class TensorResult:
    """The comparison of one tensor.

    Attributes:
        ok: Whether the error is within the limit, every element is written, and non-finite ones match.
        error: max |got - truth| / max |truth|, or relative to the magnitude of the terms if these cancel;
            absolute if the truth is all zero and no magnitude is known.
        baseline: The `error` of PyTorch in the kernel's dtype.
        limit: The largest `error` allowed.
        difference: max |got - PyTorch| over finite elements, as reports print it for a gradient.
        worst: Index of the largest error.
        num_nonfinite: Number of elements that are NaN or infinite where the truth is not, or the reverse.
        num_unwritten: Number of elements that still have the buffer's poison value.
    """

    ok: bool
    error: float
    baseline: float
    limit: float
    difference: float
    worst: tuple[int, ...] = ()
    num_nonfinite: int = 0
    num_unwritten: int = 0

    @property
    def ratio(self) -> float:
        """The error relative to PyTorch's; infinite if only PyTorch's is 0."""
        if self.baseline == 0:
            return 0.0 if self.error == 0 else float("inf")
        return self.error / self.baseline


@dataclass
class Repeats:
    """Results of repeated runs of one gradient; `atomic` if blocks add to it with atomics, in any order."""

    runs: int
    bit_equal: bool
    spread_ulps: float
    wrong_runs: int
    atomic: bool = False

    @property
    def ok(self) -> bool:
        return not self.wrong_runs and (self.bit_equal or self.atomic)


def compute_tolerance_factor(atomic: bool, num_terms: int) -> float:
    """Return s, the tolerance multiplier for atomic sums of `num_terms` terms, whose order varies."""
    return min(8.0, max(1.0, math.sqrt(num_terms) / 8)) if atomic else 1.0


def compute_relative_error(got: np.ndarray, truth: np.ndarray, scale: float = 0.0) -> float:
    """Return max |got - truth| / scale; the scale defaults to max |truth|, or to 1 if that is 0."""
    if truth.size == 0:
        return 0.0
    scale = scale or np.abs(truth).max()
    with np.errstate(over="ignore"):  # the error may be infinite
        return float(np.abs(got - truth).max() / (scale if scale > 0 else 1))


def compare(
    got: np.ndarray,
    truth: np.ndarray,
    baseline: np.ndarray,
    dtype: str,
    *,
    tolerance_factor: float = 1.0,
    unwritten_mask: np.ndarray | None = None,
    term_magnitude: float = 0.0,
    propagated_error: float = 0.0,
) -> TensorResult:
    """Compare one tensor with the truth and with PyTorch.

    Args:
        got: The kernel's output, in float64 or wider.
        truth: The same shape, from higher precision.
        baseline: The same shape, PyTorch's result in `dtype`.
        dtype: The kernel's output dtype, a key of EPSILON.
        tolerance_factor: s in the limit.
        unwritten_mask: True where the buffer still contains its fill value.
        term_magnitude: The magnitude of the cancelling terms of the tensor; 0 if nothing cancels.
        propagated_error: The effect of rounding in the tensor's inputs, which are within their own limits.

    An element is wrong if only one of result and truth is finite, or if they are infinities of opposite sign.
    NaN and infinity count as equal, since which of them occurs depends on the order of additions: a
    compensated sum turns an infinite sum into inf - inf.
    """
    truth = np.asarray(truth)
    truth = truth if truth.dtype.kind == "f" else truth.astype(np.float64)
    finite = np.isfinite(truth)
    opposite = np.isinf(got) & np.isinf(truth) & (np.signbit(got) != np.signbit(truth))
    equal = np.equal(got, truth) | (~finite & ~np.isfinite(got) & ~opposite)
    num_nonfinite = int(np.sum(np.isfinite(got) != finite) + np.sum(opposite))
    num_unwritten = int(unwritten_mask.sum()) if unwritten_mask is not None else 0
    both_finite = finite & np.isfinite(got)
    comparable = both_finite & np.isfinite(baseline)
    zero = truth.dtype.type(0)
    clean_got, clean_truth = np.where(both_finite, got, zero), np.where(both_finite, truth, zero)
    scale, floor = choose_scale(clean_truth, term_magnitude, dtype)
    error = compute_relative_error(clean_got, clean_truth, scale)
    baseline_error = compute_relative_error(np.where(comparable, baseline, clean_truth), clean_truth, scale)
    all_zero = truth.size == 0 or not (scale or np.any(clean_truth))
    limit = floor + (0.0 if all_zero else 2 * baseline_error * tolerance_factor)
    limit += propagated_error / float(scale or np.abs(clean_truth).max(initial=0.0) or 1)
    differences = clean_got - np.where(comparable, baseline, clean_got)
    difference = float(np.abs(differences).max()) if truth.size else 0.0
    errors = np.abs(clean_got - clean_truth)
    errors = np.where(both_finite | equal, errors, np.inf)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), truth.shape)) if truth.size else ()
    ok = error <= limit and num_nonfinite == 0 and num_unwritten == 0
    return TensorResult(ok, error, baseline_error, limit, difference, worst, num_nonfinite, num_unwritten)


def choose_scale(truth: np.ndarray, term_magnitude: float, dtype: str) -> tuple[float, float]:
    """Return the scale of errors and the floor; the scale is 0 unless the truth is below the terms' rounding.

    Kernels for a 16-bit dtype compute in float32, so their terms also have float32 rounding errors.
    """
    arithmetic = "float64" if dtype == "float64" else "float32"
    if truth.size and np.abs(truth).max() < EPSILON[arithmetic] * term_magnitude < math.inf:
        return term_magnitude, FLOOR[arithmetic]
    return 0.0, FLOOR[dtype]


def format_got_and_expected(got: float, expected: float, limit: float, digits: int = 7) -> str:
    """Return "got 1.5, expected 1.25", with the difference and the limit if the first `digits` are equal."""
    got_text, expected_text = format_distinct(got, expected, digits)
    suffix = (
        f": off by {abs(got - expected):.1e}, the limit {limit:.1e}"
        if got_text != f"{got:.{digits}g}"
        else ""
    )
    return f"got {got_text}, expected {expected_text}{suffix}"


def format_distinct(got: float, expected: float, digits: int) -> tuple[str, str]:
    texts = ((f"{got:.{count}g}", f"{expected:.{count}g}") for count in range(digits, 17))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{got:.17g}", f"{expected:.17g}"))


def describe_wrong_bits(got: float, expected: float) -> str:
    wrong_bits = [bit for bit in range(32) if (int(got) ^ int(expected)) >> bit & 1]
    first = f"bit {wrong_bits[0]} is {int(got) >> wrong_bits[0] & 1}, expected {int(expected) >> wrong_bits[0] & 1}"
    return first if len(wrong_bits) == 1 else f"{first}; {len(wrong_bits)} of its 32 bits are wrong"


def compute_spread_in_ulps(runs_min: np.ndarray, runs_max: np.ndarray, dtype: str) -> float:
    """Return the largest spread between repeated results, in units in the last place of the larger magnitude."""
    magnitude = np.maximum(np.abs(runs_min), np.abs(runs_max))
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1)))
    ulp = EPSILON[dtype] * 2.0**exponent
    return float(((runs_max - runs_min) / ulp).max()) if runs_min.size else 0.0


# ---- Evidence for the diagnosis ------------------------------------------------------------------------------


MIN_IMPROVEMENT = 8
"""A formula explains a result if the distance from it is this many times smaller than from the truth."""
MIN_LOOSE_IMPROVEMENT = 1000
"""With a distance this many times smaller, a formula explains a result within LOOSE_TOLERANCE."""
LOOSE_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Evidence:
    """One wrong quantity in one case, in float64; `arrays` are the inputs, `dtype` is the output's."""

    case: Case
    arrays: Arrays
    got: np.ndarray
    truth: np.ndarray
    unwritten_mask: np.ndarray
    result: TensorResult
    dtype: str = "float32"

    @cached_property
    def scale(self) -> float:
        return max_abs(self.truth) or 1.0

    @cached_property
    def magnitude(self) -> float:
        return max(self.scale, max_abs(self.got))

    @cached_property
    def error(self) -> float:
        with np.errstate(all="ignore"):
            return float(compute_distances(self.got, self.truth).max())

    @property
    def tolerance(self) -> float:
        """The largest distance between a result and a formula that explains it."""
        return (2 * self.result.limit + 8 * EPSILON[self.dtype]) * self.magnitude

    def match_formula(self, formula: np.ndarray, finite_elements_only: bool = False) -> float | None:
        """Return the relative distance of the result from a formula's values, or None without a match.

        An extra leading axis of `formula` lists alternatives. NaN must be at the same indices; with
        `finite_elements_only`, only the finite elements of the result are compared. A result far from the
        truth gets a larger tolerance, since it may be a sum of too many terms.
        """
        with np.errstate(all="ignore"):
            distances = compute_distances(self.got, np.asarray(formula, np.float64))
            if distances.ndim > self.got.ndim:
                distances = distances.min(0)
        if finite_elements_only:
            distances = np.where(np.isfinite(self.got), distances, 0.0)
        distance = float(distances.max(initial=0.0))
        fits = distance <= self.tolerance and distance * MIN_IMPROVEMENT <= self.error
        fits_loosely = (
            distance <= LOOSE_TOLERANCE * self.magnitude and distance * MIN_LOOSE_IMPROVEMENT <= self.error
        )
        return distance / self.magnitude if fits or fits_loosely else None

    @property
    def wrong_mask(self) -> np.ndarray:
        """Mask of elements that are beyond the limit, in `nonfinite_mismatch`, or not written."""
        with np.errstate(invalid="ignore"):
            beyond = np.abs(self.got - self.truth) > self.result.limit * self.scale
        return (
            np.where(np.isfinite(self.truth), beyond, False) | self.nonfinite_mismatch | self.unwritten_mask
        )

    @property
    def nonfinite_mismatch(self) -> np.ndarray:
        """Mask of elements where only one of result and truth is finite, or they are opposite infinities."""
        opposite = np.isinf(self.got) & np.isinf(self.truth) & (self.got != self.truth)
        return (np.isfinite(self.got) != np.isfinite(self.truth)) | opposite


def max_abs(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def compute_severity(evidence: Evidence) -> float:
    return evidence.result.error / evidence.result.limit


def compute_distances(got: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return |got - other|: 0 where neither is finite, infinite where only one is."""
    distances = np.abs(got - reference)
    if np.isfinite(distances).all():
        return distances
    both_finite = np.isfinite(got) & np.isfinite(reference)
    both_nonfinite = ~np.isfinite(got) & ~np.isfinite(reference)
    return np.where(both_finite, distances, np.where(both_nonfinite, 0.0, np.inf))
