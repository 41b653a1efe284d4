"""Known mistakes of puzzle 22's last gate, RMSNorm + Linear, most of them LayerNorm's formulas."""

import numpy as np

from harness.puzzles.p22.derivation import flatten_rows
from harness.spec.derivation import Derivation, Mistake


def list_row_contributions(v: Derivation) -> dict[str, np.ndarray]:
    """Return each row's contribution to the two parameter gradients, [rows, ...]."""
    scaled = v.rms_x_hat * v.ln_weight
    return {
        "grad_rms_weight": flatten_rows(v.dln * v.rms_x_hat),
        "rms_grad_weight": flatten_rows(v.grad_output[..., :, None] * scaled[..., None, :]),
    }


MISTAKES = (
    Mistake("rms-mean-term-kept",
            "with the mean of g subtracted: that is LayerNorm's mean term, and RMSNorm has no mean",
            {"rms_grad_input": lambda v: v.rms_rstd * (v.g - v.c2 - v.rms_x_hat * v.rms_c)}),
    Mistake("rms-term-missing", "with rstd held fixed: every x_i moves the rstd of its whole row",
            {"rms_grad_input": lambda v: v.rms_rstd * v.g}, 1),
    Mistake("rms-term-summed", "with a sum over the row instead of a mean",
            {"rms_c": lambda v: (v.g * v.rms_x_hat).sum(-1, keepdims=True)}),
    Mistake("rms-gamma-forgotten",
            "without gamma: g is the gradient of x_hat, not of RMSNorm's output",
            {"rms_grad_input": lambda v: v.rms_rstd * (v.dln - v.rms_x_hat * (v.dln * v.rms_x_hat).mean(-1, keepdims=True))}),
    Mistake("rms-weight-from-x-hat", "with x_hat instead of x_hat * gamma, the input of Linear",
            {"rms_grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.rms_x_hat)}),
    Mistake("rms-gamma-twice", "with gamma multiplied in: gamma's gradient uses dln, not g",
            {"grad_rms_weight": lambda v: (v.g * v.rms_x_hat).sum((0, 1))}),
    Mistake("rms-centred", "with LayerNorm's x_hat: RMSNorm does not subtract the mean",
            {"grad_rms_weight": lambda v: (v.dln * v.x_hat).sum((0, 1)),
             "rms_grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.x_hat * v.ln_weight),
             "rms_grad_input": lambda v: v.row_rstd * (v.g - v.x_hat * v.c1)}),
    Mistake("rms-overwritten",
            "of only one row in each element: the other rows' terms are overwritten or lost",
            {name: lambda v, name=name: list_row_contributions(v)[name] for name in ("grad_rms_weight", "rms_grad_weight")},
            3),
)  # fmt: skip
