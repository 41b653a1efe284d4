"""What the diagnosis is given: one quantity in one case where it is wrong, and how two tensors are compared."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.check.compare import EPSILON, Verdict
from harness.spec.puzzle import Arrays, Case

NEARER = 8
"""A formula explains a result that is this many times nearer to it than to the truth."""
FAR = 1000
"""And one that is this many times nearer may be as far from it as ROUNDING."""
ROUNDING = 2e-5


@dataclass(frozen=True)
class Evidence:
    """One quantity in one case where it is wrong.

    Attributes:
        case: The case; `arrays` its inputs in float64.
        got, truth: The tensor that was written, in float64, and what it should be.
        unwritten: True where nothing was written.
        verdict: By how much it is wrong.
        dtype: What the kernel writes.
    """

    case: Case
    arrays: Arrays
    got: np.ndarray
    truth: np.ndarray
    unwritten: np.ndarray
    verdict: Verdict
    dtype: str = "float32"

    @cached_property
    def scale(self) -> float:
        """What errors are measured against: the largest finite truth, or 1 where all of it is zero."""
        return largest(self.truth) or 1.0

    @cached_property
    def magnitude(self) -> float:
        """The largest finite value, of the truth (1 where all of it is zero) and of what was written."""
        return max(self.scale, largest(self.got))

    @cached_property
    def error(self) -> float:
        """The largest distance from the truth; infinite where one of the two is no number."""
        with np.errstate(all="ignore"):
            return float(apart_from(self.got, self.truth).max())

    @property
    def tolerance(self) -> float:
        """How far a result may be from a formula that explains it."""
        return (2 * self.verdict.limit + 8 * EPSILON[self.dtype]) * self.magnitude

    def equals(self, formula: np.ndarray, numbers_only: bool = False) -> float | None:
        """How far the result is from a formula's, relative to the largest value; None where it is too far.

        A formula with one axis more than the result lists alternatives. What is no number must be so in both;
        with `numbers_only` only what is a number in the result need be the formula's. Of a result that is far from the truth
        more rounding is allowed: it may have added up far more than it should.
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
        """True where an element by itself is beyond the limit, not written, or not finite where the truth is."""
        with np.errstate(invalid="ignore"):
            far = np.abs(self.got - self.truth) > self.verdict.limit * self.scale
        return np.where(np.isfinite(self.truth), far, False) | self.misplaced | self.unwritten

    @property
    def misplaced(self) -> np.ndarray:
        """True where one of got and truth is a number and the other is not, or they are opposite infinities."""
        opposite = np.isinf(self.got) & np.isinf(self.truth) & (self.got != self.truth)
        return (np.isfinite(self.got) != np.isfinite(self.truth)) | opposite


def largest(array: np.ndarray) -> float:
    """The largest finite magnitude, 0 where there is none."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def severity(evidence: Evidence) -> float:
    """Error in units of the limit."""
    return evidence.verdict.error / evidence.verdict.limit


def apart_from(got: np.ndarray, other: np.ndarray) -> np.ndarray:
    """|got - other|, 0 where neither is a number, infinite where one of them is none."""
    apart = np.abs(got - other)
    if np.isfinite(apart).all():
        return apart
    numbers = np.isfinite(got) & np.isfinite(other)
    neither = ~np.isfinite(got) & ~np.isfinite(other)
    return np.where(numbers, apart, np.where(neither, 0.0, np.inf))
