"""Puzzle 22's derive rung: five derivatives on one row, and their known mistakes.

The formulas here are only for the diagnosis; `derive_checker.py` compares with finite differences.
"""

import numpy as np

from harness.spec.derivation import Derivation, Mistake
from harness.spec.puzzle import Gate, list_gate_ids
from harness.spec.rungs import NumpyRung

GATES = (
    Gate("dmean", "", ("dmean",), "d mu / d x_j"),
    Gate("dvar", "", ("dvar",), "d sigma^2 / d x_j"),
    Gate("jvp", "", ("jvp",), "how x_hat changes when x moves along v"),
    Gate("c2", "", ("row_c2",), "the number subtracted from every g_j"),
    Gate("c1", "", ("row_c1",), "the factor of x_hat_j"),
)


def select_row(array: np.ndarray) -> np.ndarray:
    """Return the fourth row of [B, S, n], whose variance is tiny in adversarial inputs, or the last if fewer."""
    rows = array.reshape(-1, array.shape[-1])
    return rows[min(3, len(rows) - 1)]


STEPS = {
    "row_x": lambda v: select_row(v.input),
    "row_v": lambda v: select_row(v.input_dln),
    "row_g": lambda v: select_row(v.input_dln * v.ln_weight),
    "row_x_hat": lambda v: select_row(v.x_hat),
    "row_scale": lambda v: select_row(v.row_rstd)[0],
    "dmean": lambda v: np.full(len(v.row_x), 1 / len(v.row_x)),
    "dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / len(v.row_x),
    "jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - v.row_x_hat * (v.row_v * v.row_x_hat).mean()),
    "row_c2": lambda v: v.row_g.mean(keepdims=True),
    "row_c1": lambda v: (v.row_g * v.row_x_hat).mean(keepdims=True),
}
"""Steps of the puzzle's derivation that only this rung uses."""


def reshape_scalar(number: np.ndarray) -> np.ndarray:
    if number.size != 1:
        raise ValueError(f"expected one number for the whole row, not an array of shape {list(number.shape)}")
    return number.reshape(1)


RUNG = NumpyRung(
    id="derive",
    file="derive.py",
    checker=".derive_checker:DeriveChecker",
    title="Derivation",
    note="optional, before the formulas",
    optional=True,
    gates=list_gate_ids(GATES),
    step_names={"x": "row_x", "v": "row_v", "g": "row_g", "x_hat": "row_x_hat", "rstd": "row_scale"},
    packers={"row_c2": reshape_scalar, "row_c1": reshape_scalar},
)


# ---- Known mistakes -----------------------------------------------------------------------------------------


def get_row_size(v: Derivation) -> int:
    return len(v.row_x)


def compute_variance_term(v: Derivation) -> np.ndarray:
    """Return the variance term of the Jacobian-vector product."""
    return v.row_x_hat * (v.row_v * v.row_x_hat).mean()


MISTAKES = (
    Mistake("dmean-not-divided", "of the row's sum: the mean divides it by H",
            {"dmean": lambda v: np.ones(get_row_size(v))}),
    Mistake("dmean-held-fixed", "with mu held fixed: mu depends on every x_j",
            {"dmean": lambda v: np.zeros(get_row_size(v))}, hint=1),
    Mistake("dmean-times-x", "with x_j still in it: mu is linear in x_j, so its derivative is a constant",
            {"dmean": lambda v: v.row_x / get_row_size(v)}, hint=1),
    Mistake("dvar-two-missing", "without the factor 2 of the square",
            {"dvar": lambda v: (v.row_x - v.row_x.mean()) / get_row_size(v)}),
    Mistake("dvar-not-divided", "of the sum of squares: the variance divides it by H",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean())}),
    Mistake("dvar-not-centred", "of the mean of x^2: mu is not subtracted",
            {"dvar": lambda v: 2 * v.row_x / get_row_size(v)}),
    Mistake("dvar-others-missing",
            "without the other elements' deviations: x_j moves mu, and mu moves every deviation; the sum of these terms "
            "is missing",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / get_row_size(v) * (1 - 1 / get_row_size(v))}),
    Mistake("dvar-unbiased", "of the unbiased variance, which divides by H - 1; LayerNorm divides by H",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / max(1, get_row_size(v) - 1)}),
    Mistake("jvp-mean-term-missing", "without the mean term: mu moves too, by the mean of v",
            {"jvp": lambda v: v.row_scale * (v.row_v - compute_variance_term(v))}),
    Mistake("jvp-variance-term-missing", "without the variance term: rstd moves too when x moves",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean())}),
    Mistake("jvp-both-terms-missing", "with mu and rstd held fixed: the mean term and the variance term are missing",
            {"jvp": lambda v: v.row_scale * v.row_v}, hint=1),
    Mistake("jvp-variance-term-sign", "with the variance term added: rstd falls when the variance grows",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() + compute_variance_term(v))}),
    Mistake("jvp-variance-term-summed", "with a sum instead of a mean in the variance term",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - get_row_size(v) * compute_variance_term(v))}),
    Mistake("jvp-x-hat-missing", "without the factor x_hat of the variance term, which differs for each element",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - (v.row_v * v.row_x_hat).mean())}),
    Mistake("jvp-rstd-missing", "without rstd: x_hat is a deviation times rstd",
            {"jvp": lambda v: v.row_v - v.row_v.mean() - compute_variance_term(v)}),
    Mistake("jvp-diagonal", "of the diagonal only: x_hat_i depends on every x_j, not only on x_i",
            {"jvp": lambda v: v.row_scale * v.row_v * (1 - 1 / get_row_size(v) - v.row_x_hat**2 / get_row_size(v))}),
    Mistake("c2-summed", "with a sum instead of a mean: d mu / d x_j contains 1 / H",
            {"row_c2": lambda v: v.row_g.sum(keepdims=True)}),
    Mistake("c2-unbiased", "divided by H - 1: mu divides by H, and so does its derivative",
            {"row_c2": lambda v: v.row_g.sum(keepdims=True) / max(1, get_row_size(v) - 1)}),
    Mistake("c2-exchanged", "of c1: c2 comes from the mean term, which has no x_hat",
            {"row_c2": lambda v: (v.row_g * v.row_x_hat).mean(keepdims=True)}),
    Mistake("c2-missing", "without the mean term", {"row_c2": lambda v: np.zeros(1)}, hint=1),
    Mistake("c1-summed", "with a sum instead of a mean: d sigma^2 / d x_j contains 1 / H",
            {"row_c1": lambda v: (v.row_g * v.row_x_hat).sum(keepdims=True)}),
    Mistake("c1-unbiased", "divided by H - 1: LayerNorm's variance divides by H, and so does its derivative",
            {"row_c1": lambda v: (v.row_g * v.row_x_hat).sum(keepdims=True) / max(1, get_row_size(v) - 1)}),
    Mistake("c1-x-hat-missing", "of c2: c1 comes from the variance term, in which every g_i is multiplied by x_hat_i",
            {"row_c1": lambda v: v.row_g.mean(keepdims=True)}),
    Mistake("c1-missing", "without the variance term", {"row_c1": lambda v: np.zeros(1)}, hint=1),
    Mistake("c1-two-kept", "with the 2 of the squared deviation, which cancels with the 1/2 of the root's derivative",
            {"row_c1": lambda v: 2 * (v.row_g * v.row_x_hat).mean(keepdims=True)}),
)  # fmt: skip
