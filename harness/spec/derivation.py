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


class Derivation:
    """The value of each step is an attribute, computed on first use.

    Args:
        steps: Name -> function of the derivation; may use the inputs and any other step.
        arrays: The inputs by name; they take precedence over a step of the same name.
        changes: Steps that replace those of the same name, inputs included.
    """

    def __init__(
        self,
        steps: Mapping[str, Step],
        arrays: Mapping[str, np.ndarray],
        changes: Mapping[str, Step] | None = None,
    ):
        changed = changes or {}
        self._steps = {**steps, **changed}
        self._arrays = arrays
        self.__dict__.update({name: array for name, array in arrays.items() if name not in changed})

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in self._steps:
            raise AttributeError(f"the derivation has no step {name!r}")
        with np.errstate(invalid="ignore"):  # a case may hold NaN and infinity
            value = self.__dict__[name] = self._steps[name](self)
        return value

    def original(self, name: str) -> np.ndarray:
        """Return an input unchanged, for a change of that input."""
        return self._arrays[name]


class Derive(Protocol):
    """Function that makes a puzzle's derivation of its input arrays, with the numbers in `dtype` and some steps changed."""

    def __call__(
        self,
        arrays: Mapping[str, np.ndarray],
        changes: Mapping[str, Step] | None = None,
        dtype: type = np.float64,
    ) -> Derivation: ...


def as_dtype(arrays: Mapping[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    """Return the arrays with floating-point numbers in another dtype; whole numbers and truth values stay as they are."""
    return {name: a.astype(dtype) if a.dtype.kind == "f" else a for name, a in arrays.items()}


def derive_by(steps: Mapping[str, Step]) -> Derive:
    """Return the derivation that has these steps, of a puzzle whose input arrays are taken as they come."""
    return lambda arrays, changes=None, dtype=np.float64: Derivation(steps, as_dtype(arrays, dtype), changes)


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Attributes:
        id: Its name in the zoo, for example "mean-term-dropped".
        words: Ends the sentence "your dx equals the reference ...".
        changes: Step -> its replacement. A quantity with one axis more than the tensor lists alternatives:
            each element may be any one of them.
        together: It spoils every quantity that it changes: if one of them is correct, it is another mistake.
        hint: The hint of the gate's ladder that helps: 1 the idea, 2 the part that is often missed, 3 nearly
            the code.
    """

    id: str
    words: str
    changes: Mapping[str, Step]
    hint: int = 2
    together: bool = False
