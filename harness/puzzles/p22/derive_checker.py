"""Checker of puzzle 22's derive rung, which compares with extrapolated central differences in float64.

The baseline is the formula in float64, so that the accuracy of the finite differences sets the tolerance.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.check.numpy_rung import NumpyChecker
from harness.check.results import Cases, FirstCaseCallback, GateIds, GateResult
from harness.puzzles.p22.ops import EPS
from harness.spec.derivation import Derivation
from harness.spec.puzzle import Arrays, Case

STEP_SIZE = 1e-2
"""The larger of two step sizes, in units of the row's standard deviation."""


def compute_directional_derivative(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, direction: np.ndarray
) -> np.ndarray:
    """Return d/dt of `function(x + t * direction)` at t = 0, by Richardson-extrapolated central differences."""
    t = STEP_SIZE * x.std() / np.abs(direction).max()
    coarse, fine = ((function(x + s * direction) - function(x - s * direction)) / (2 * s) for s in (t, t / 2))
    return (4 * fine - coarse) / 3


def normalise(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + EPS)


def compute_by_differences(v: Derivation) -> Arrays:
    """Return the expected values of the five gates on a case's row, by finite differences.

    c2 and c1 come from the gradient of x: g - gradient / rstd is c2 + x_hat * c1, whose mean is c2 and whose
    component along x_hat is c1.
    """
    x, g = np.asarray(v.row_x), np.asarray(v.row_g)
    basis = np.eye(len(x))
    gradient = np.array(
        [compute_directional_derivative(lambda row: g @ normalise(row), x, direction) for direction in basis]
    )
    x_hat = normalise(x)
    correction = g - gradient / v.row_scale
    return {
        "dmean": np.array([compute_directional_derivative(np.mean, x, direction) for direction in basis]),
        "dvar": np.array([compute_directional_derivative(np.var, x, direction) for direction in basis]),
        "jvp": compute_directional_derivative(normalise, x, v.row_v),
        "row_c2": correction.mean(keepdims=True),
        "row_c1": (correction @ x_hat / (x_hat @ x_hat)).reshape(1),
    }


class DeriveChecker(NumpyChecker):
    """Checks each function of `derive.py` separately, on one row of every case with finite inputs."""

    def check(
        self,
        path: Path,
        gates: GateIds = None,
        cases: Cases = None,
        *,
        on_first_case: FirstCaseCallback = None,
    ) -> list[GateResult]:
        def is_finite(case: Case) -> bool:
            inputs = self.puzzle.make_inputs(case, "float64", self.seed)
            return all(np.isfinite(array).all() for array in inputs.values())

        cases = self.puzzle.list_cases(None) if cases is None else cases
        return super().check(path, gates, [case for case in cases if is_finite(case)])

    def _load_case(self, case: Case) -> tuple[Arrays, Arrays]:
        if case not in self._cases:
            arrays = self.puzzle.make_inputs(case, "float64", self.seed)
            self._cases[case] = arrays, compute_by_differences(self.puzzle.derive(arrays, {}))
        return self._cases[case]
