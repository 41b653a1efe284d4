"""A puzzle's mathematics as named steps in NumPy, and known mistakes as changes of one step.

    Derivation(STEPS, arrays).grad_input                       the correct result
    Derivation(STEPS, arrays, mistake.changes).grad_input      the result with this mistake

Only the steps that a quantity needs are computed, so that evaluating many mistakes is cheap.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Step = Callable[["Derivation"], np.ndarray]
Steps = Mapping[str, Step]
Arrays = Mapping[str, np.ndarray]


class Derivation:
    """The values of the steps, as attributes that are computed on first use.

    Args:
        steps: Name -> function of this Derivation, which may use the inputs and other steps.
        arrays: The inputs by name; they take precedence over a step of the same name.
        changes: Replacements of steps or inputs, by name.
    """

    def __init__(self, steps: Steps, arrays: Arrays, changes: Steps | None = None):
        changed = changes or {}
        self._steps = {**steps, **changed}
        self._arrays = arrays
        self.__dict__.update({name: array for name, array in arrays.items() if name not in changed})

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in self._steps:
            raise AttributeError(f"the derivation has no step {name!r}")
        with np.errstate(invalid="ignore"):  # a case may contain NaN and infinity
            value = self.__dict__[name] = self._steps[name](self)
        return value

    def get_original(self, name: str) -> np.ndarray:
        return self._arrays[name]


class Derive(Protocol):
    """A function that returns a puzzle's Derivation of input arrays, in `dtype`, with some steps changed."""

    def __call__(
        self, arrays: Arrays, changes: Steps | None = None, dtype: type = np.float64
    ) -> Derivation: ...


def convert_floats(arrays: Arrays, dtype: type) -> dict[str, np.ndarray]:
    """Return the arrays with floats converted to `dtype`; integers and bools are unchanged."""
    return {name: a.astype(dtype) if a.dtype.kind == "f" else a for name, a in arrays.items()}


def make_derive(steps: Steps) -> Derive:
    return lambda arrays, changes=None, dtype=np.float64: Derivation(
        steps, convert_floats(arrays, dtype), changes
    )


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        id: Its name in the zoo, for example "mean-term-dropped".
        description: The end of the sentence "your dx equals the reference ...".
        changes: Step -> its replacement. A value with an extra leading axis lists alternatives; each element
            of the result may equal any one of them.
        needs_all_wrong: Whether it is ruled out if any quantity that it changes is correct.
        hint: Number of the hint that helps: 1 the idea, 2 the part that is often missed, 3 nearly the code.
    """

    id: str
    description: str
    changes: Steps
    hint: int = 2
    needs_all_wrong: bool = False
