"""The checker of puzzle 22's derive rung: finite differences in float64 instead of formulas.

The truth is central differences of x_hat and of sum(g * x_hat), extrapolated. The baseline is the formula in
float64, so that the limit is the accuracy of finite differences.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.check.numpy_rung import NumpyChecker
from harness.check.results import Cases, GateIds, GateResult, OnFirst
from harness.puzzles.p22.ops import EPS
from harness.spec.derivation import Derivation
from harness.spec.puzzle import Arrays, Case

STEP = 1e-2
"""The larger of the two steps of a difference, in units of the row's deviation."""


def difference(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Return the derivative of `function(x + t * along)` by t at 0: central differences of two steps,
    extrapolated (Richardson)."""
    t = STEP * x.std() / np.abs(along).max()
    coarse, fine = ((function(x + s * along) - function(x - s * along)) / (2 * s) for s in (t, t / 2))
    return (4 * fine - coarse) / 3


def normalise(x: np.ndarray) -> np.ndarray:
    """Return x_hat of one row by its definition."""
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + EPS)


def by_differences(v: Derivation) -> Arrays:
    """Return the truth of the five gates for the row of a case, without a formula.

    c2 and c1 come from the gradient at x: the mean of g - gradient / rstd, which is c2 + x_hat * c1, and its
    part along x_hat.
    """
    x, g = np.asarray(v.row_x), np.asarray(v.row_g)
    units = np.eye(len(x))
    gradient = np.array([difference(lambda row: g @ normalise(row), x, unit) for unit in units])
    x_hat = normalise(x)
    rest = g - gradient / v.row_scale
    return {
        "dmean": np.array([difference(np.mean, x, unit) for unit in units]),
        "dvar": np.array([difference(np.var, x, unit) for unit in units]),
        "jvp": difference(normalise, x, v.row_v),
        "row_c2": rest.mean(keepdims=True),
        "row_c1": (rest @ x_hat / (x_hat @ x_hat)).reshape(1),
    }


class DeriveChecker(NumpyChecker):
    """Checks each function of `derive.py` separately, on one row of every case with finite inputs."""

    def check(
        self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """Return the result of each function, as the NumPy rung's checker does."""
        cases = self.puzzle.cases(None) if cases is None else cases
        finite = [
            case
            for case in cases
            if all(
                np.isfinite(array).all() for array in self.puzzle.inputs(case, "float64", self.seed).values()
            )
        ]
        return super().check(path, gates, finite)

    def _case(self, case: Case) -> tuple[Arrays, Arrays]:
        """Return the inputs of a case, and the finite differences."""
        if case not in self._known:
            arrays = self.puzzle.inputs(case, "float64", self.seed)
            self._known[case] = arrays, by_differences(self.puzzle.derive(arrays, {}))
        return self._known[case]
