"""Check the NumPy rung: one Python function for each gate of a backward pass, without torch or MAX.

Each function gets correct values for all its arguments. The truth is in longdouble, the baseline in float64.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.check.compare import TensorResult, compare
from harness.check.diagnose import Evidence
from harness.check.python_files import CaseChecker, Module, make_tuple
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import NumpyRung

OVERWRITTEN_MESSAGE = "an argument is overwritten, and it is read again after the call: make a new array (`a = a - b`, not `a -= b`)"
"""Message for code that writes to a read-only argument."""


class NumpyChecker(CaseChecker):
    """A checker of one file's functions that computes the inputs and truth of each case once."""

    rung: NumpyRung

    def __init__(self, puzzle: Puzzle, rung: NumpyRung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self._cases: dict[Case, tuple[Arrays, Arrays]] = {}

    def _compute_outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Arrays:
        function = module.get(gate.id)
        if not callable(function):
            raise ValueError(f"there is no function {gate.id}()")
        _, truth = self._load_case(case)
        with np.errstate(all="ignore"):
            returned = function(*self._make_arguments(gate, function, case))
        if returned is None:
            raise ValueError(f"{gate.id}() returns nothing: a `return` is missing")
        quantities = self.rung.returns.get(gate.id, gate.quantities)
        pack = self.rung.packers.get(quantities[0])
        expected = len(inspect.signature(pack).parameters if pack else quantities)
        values = [np.asarray(value, np.float64) for value in make_tuple(returned, gate.id, expected)]
        if len(values) != expected:
            raise ValueError(f"{gate.id}() should return {expected} array{'s' * (expected != 1)}")
        values = [pack(*values)] if pack else values
        for quantity, value in zip(quantities, values, strict=True):
            if value.shape != truth[quantity].shape:
                name = self.puzzle.get_printed_name(quantity)
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, expected {list(truth[quantity].shape)}"
                )
        return dict(zip(quantities, values, strict=True))

    def _make_arguments(self, gate: Gate, function: Callable[..., object], case: Case) -> list[np.ndarray]:
        """Return read-only copies of the derivation steps that a function takes."""
        derivation = self.puzzle.derive(self._load_case(case)[0], {})
        names = inspect.signature(function).parameters
        step_names = self.rung.step_names
        steps = [step_names.get(f"{gate.id}.{name}", step_names.get(name, name)) for name in names]
        arguments = [np.array(getattr(derivation, step)) for step in steps]
        for argument in arguments:
            argument.flags.writeable = False
        return arguments

    def _describe_error(self, error: Exception, path: Path) -> str:
        description = super()._describe_error(error, path)
        return f"{description}: {OVERWRITTEN_MESSAGE}" if "read-only" in str(error) else description

    def _load_case(self, case: Case) -> tuple[Arrays, Arrays]:
        if case not in self._cases:
            arrays = self.puzzle.make_inputs(case, "float64", self.seed)
            self._cases[case] = arrays, self.puzzle.compute_exact(arrays)
        return self._cases[case]

    def _compare_quantity(self, case: Case, quantity: str, got: np.ndarray) -> TensorResult:
        arrays, truth = self._load_case(case)
        return compare(got, truth[quantity], getattr(self.puzzle.derive(arrays, {}), quantity), "float64")

    def _make_evidence(self, case: Case, quantity: str, got: np.ndarray, result: TensorResult) -> Evidence:
        arrays, truths = self._load_case(case)
        truth = np.asarray(truths[quantity], np.float64)
        return Evidence(case, arrays, got, truth, np.zeros(got.shape, bool), result, "float64")
