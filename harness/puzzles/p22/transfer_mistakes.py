"""The known mistakes of puzzle 22's last gate, RMSNorm + Linear, mostly carried over from LayerNorm."""

import numpy as np

from harness.puzzles.p22.derivation import each_row
from harness.spec.derivation import Derivation, Mistake


def own_rows(v: Derivation) -> dict[str, np.ndarray]:
    """Return the contribution of single rows to the two parameter gradients, [rows, ...]."""
    scaled = v.rms_x_hat * v.ln_weight
    return {
        "grad_rms_weight": each_row(v.dln * v.rms_x_hat),
        "rms_grad_weight": each_row(v.grad_output[..., :, None] * scaled[..., None, :]),
    }


MISTAKES = (
    Mistake("rms-mean-term-kept",
            "with the mean of g taken away: that is LayerNorm's term of the mean, and RMSNorm has no mean",
            {"rms_grad_input": lambda v: v.rms_rstd * (v.g - v.c2 - v.rms_x_hat * v.rms_c)}),
    Mistake("rms-term-missing", "with rstd held fixed: every x_i moves the rstd of its whole row",
            {"rms_grad_input": lambda v: v.rms_rstd * v.g}, 1),
    Mistake("rms-term-summed", "with a sum over the row where a mean belongs",
            {"rms_c": lambda v: (v.g * v.rms_x_hat).sum(-1, keepdims=True)}),
    Mistake("rms-gamma-forgotten",
            "without gamma: g is the gradient at x_hat, not that at the output of RMSNorm",
            {"rms_grad_input": lambda v: v.rms_rstd * (v.dln - v.rms_x_hat * (v.dln * v.rms_x_hat).mean(-1, keepdims=True))}),
    Mistake("rms-weight-from-x-hat", "with x_hat instead of x_hat * gamma, which is what Linear gets",
            {"rms_grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.rms_x_hat)}),
    Mistake("rms-gamma-twice", "with gamma in it: the gradient of gamma is made of dln, not of g",
            {"grad_rms_weight": lambda v: (v.g * v.rms_x_hat).sum((0, 1))}),
    Mistake("rms-centred", "with the x_hat of LayerNorm: RMSNorm takes no mean away",
            {"grad_rms_weight": lambda v: (v.dln * v.x_hat).sum((0, 1)),
             "rms_grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.x_hat * v.ln_weight),
             "rms_grad_input": lambda v: v.row_rstd * (v.g - v.x_hat * v.c1)}),
    Mistake("rms-overwritten",
            "of one row only, in each element: what the other rows added is overwritten or lost",
            {name: lambda v, name=name: own_rows(v)[name] for name in ("grad_rms_weight", "rms_grad_weight")},
            3),
)  # fmt: skip
