"""Puzzle 22's derive rung: five steps of the calculus on one row, and their known mistakes.

The learner gets no formula, and `derive_checker.py` compares with finite differences; the formulas here are
for the diagnosis, which names the missing term.
"""

import numpy as np

from harness.spec.derivation import Derivation, Mistake
from harness.spec.puzzle import Gate, ids
from harness.spec.rungs import NumpyRung

GATES = (
    Gate("dmean", "", ("dmean",), "d mu / d x_j"),
    Gate("dvar", "", ("dvar",), "d sigma^2 / d x_j"),
    Gate("jvp", "", ("jvp",), "how x_hat moves where x moves along v"),
    Gate("c2", "", ("row_c2",), "what is taken from every g_j"),
    Gate("c1", "", ("row_c1",), "what x_hat_j is multiplied with"),
)


def one_row(array: np.ndarray) -> np.ndarray:
    """Return the fourth row of [B, S, n], or the last of fewer, [n]: with adversarial inputs it has a tiny
    variance."""
    rows = array.reshape(-1, array.shape[-1])
    return rows[min(3, len(rows) - 1)]


STEPS = {
    "row_x": lambda v: one_row(v.input),
    "row_v": lambda v: one_row(v.given_dln),
    "row_g": lambda v: one_row(v.given_dln * v.ln_weight),
    "row_x_hat": lambda v: one_row(v.x_hat),
    "row_scale": lambda v: one_row(v.row_rstd)[0],
    "dmean": lambda v: np.full(len(v.row_x), 1 / len(v.row_x)),
    "dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / len(v.row_x),
    "jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - v.row_x_hat * (v.row_v * v.row_x_hat).mean()),
    "row_c2": lambda v: v.row_g.mean(keepdims=True),
    "row_c1": lambda v: (v.row_g * v.row_x_hat).mean(keepdims=True),
}
"""Steps that the puzzle's derivation has for this rung alone."""


def one_number(number: np.ndarray) -> np.ndarray:
    if number.size != 1:
        raise ValueError(
            f"one number is wanted for the whole row, not an array of shape {list(number.shape)}"
        )
    return number.reshape(1)


RUNG = NumpyRung(
    id="derive",
    file="derive.py",
    checker=".derive_checker:DeriveChecker",
    title="Derivation",
    about="optional, before the formulas",
    optional=True,
    gates=ids(GATES),
    names={"x": "row_x", "v": "row_v", "g": "row_g", "x_hat": "row_x_hat", "rstd": "row_scale"},
    pack={"row_c2": one_number, "row_c1": one_number},
)


# ---- Known mistakes -----------------------------------------------------------------------------------------


def size(v: Derivation) -> int:
    return len(v.row_x)


def along_x_hat(v: Derivation) -> np.ndarray:
    """Return the term of the Jacobian-vector product that comes through the variance."""
    return v.row_x_hat * (v.row_v * v.row_x_hat).mean()


MISTAKES = (
    Mistake("dmean-not-divided", "of the sum of the row: the mean divides it by H",
            {"dmean": lambda v: np.ones(size(v))}),
    Mistake("dmean-held-fixed", "with mu held fixed: mu is made of all x_j",
            {"dmean": lambda v: np.zeros(size(v))}, hint=1),
    Mistake("dmean-times-x", "with x_j left in it: mu is linear in x_j, and its derivative is a constant",
            {"dmean": lambda v: v.row_x / size(v)}, hint=1),
    Mistake("dvar-two-missing", "without the factor 2 of the square",
            {"dvar": lambda v: (v.row_x - v.row_x.mean()) / size(v)}),
    Mistake("dvar-not-divided", "of the sum of the squares: their mean divides it by H",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean())}),
    Mistake("dvar-not-centred", "of the mean of x^2: mu is missing in the deviation",
            {"dvar": lambda v: 2 * v.row_x / size(v)}),
    Mistake("dvar-others-missing",
            "without the deviations of the other elements: x_j moves mu, and mu moves all of them; their terms add up to "
            "the one that is missing here",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / size(v) * (1 - 1 / size(v))}),
    Mistake("dvar-unbiased", "of the variance that divides by H - 1; LayerNorm's divides by H",
            {"dvar": lambda v: 2 * (v.row_x - v.row_x.mean()) / max(1, size(v) - 1)}),
    Mistake("jvp-mean-term-missing", "without the term of the mean: mu moves too, by the mean of v",
            {"jvp": lambda v: v.row_scale * (v.row_v - along_x_hat(v))}),
    Mistake("jvp-variance-term-missing", "without the term of the variance: rstd moves too where x moves",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean())}),
    Mistake("jvp-both-terms-missing", "with mu and rstd held fixed: both terms are missing, that of the mean and that of "
            "the variance",
            {"jvp": lambda v: v.row_scale * v.row_v}, hint=1),
    Mistake("jvp-variance-term-sign", "with the term of the variance added: rstd falls where the variance grows",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() + along_x_hat(v))}),
    Mistake("jvp-variance-term-summed", "with a sum in the term of the variance where a mean belongs",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - size(v) * along_x_hat(v))}),
    Mistake("jvp-x-hat-missing", "without the x_hat in front of the term of the variance: it is another one for each element",
            {"jvp": lambda v: v.row_scale * (v.row_v - v.row_v.mean() - (v.row_v * v.row_x_hat).mean())}),
    Mistake("jvp-rstd-missing", "without rstd: x_hat is a deviation times rstd",
            {"jvp": lambda v: v.row_v - v.row_v.mean() - along_x_hat(v)}),
    Mistake("jvp-diagonal", "of the diagonal alone: x_hat_i depends on every x_j, not on x_i only",
            {"jvp": lambda v: v.row_scale * v.row_v * (1 - 1 / size(v) - v.row_x_hat**2 / size(v))}),
    Mistake("c2-summed", "with a sum where a mean belongs: d mu / d x_j has a 1 / H in it",
            {"row_c2": lambda v: v.row_g.sum(keepdims=True)}),
    Mistake("c2-unbiased", "divided by H - 1: mu divides by H, and so does its derivative",
            {"row_c2": lambda v: v.row_g.sum(keepdims=True) / max(1, size(v) - 1)}),
    Mistake("c2-exchanged", "of c1: c2 comes from the term of the mean, in which no x_hat is",
            {"row_c2": lambda v: (v.row_g * v.row_x_hat).mean(keepdims=True)}),
    Mistake("c2-missing", "without the term of the mean", {"row_c2": lambda v: np.zeros(1)}, hint=1),
    Mistake("c1-summed", "with a sum where a mean belongs: d sigma^2 / d x_j has a 1 / H in it",
            {"row_c1": lambda v: (v.row_g * v.row_x_hat).sum(keepdims=True)}),
    Mistake("c1-unbiased", "divided by H - 1: LayerNorm's variance divides by H, and so does its derivative",
            {"row_c1": lambda v: (v.row_g * v.row_x_hat).sum(keepdims=True) / max(1, size(v) - 1)}),
    Mistake("c1-x-hat-missing", "of c2: c1 comes from the term of the variance, in which every g_i meets its x_hat_i",
            {"row_c1": lambda v: v.row_g.mean(keepdims=True)}),
    Mistake("c1-missing", "without the term of the variance", {"row_c1": lambda v: np.zeros(1)}, hint=1),
    Mistake("c1-two-kept", "with the 2 of the squared deviation, which the derivative of the root takes away again",
            {"row_c1": lambda v: 2 * (v.row_g * v.row_x_hat).mean(keepdims=True)}),
)  # fmt: skip
