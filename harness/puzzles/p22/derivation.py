"""The derivation of puzzle 22 in NumPy, and helpers for its known mistakes.

Shapes: input, x_hat, ln_out, dln, g [B, S, H]; grad_output [B, S, O]; row_mean, row_rstd, c1, c2 [B, S, 1].
`given_dln` is the gradient at the LayerNorm output that the row sums start from when they are checked alone.
"""

from collections.abc import Callable, Mapping

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p22 import derive_rung
from harness.puzzles.p22.ops import EPS
from harness.spec.derivation import Derivation, Step, as_dtype

Mean = Callable[[Derivation, np.ndarray], np.ndarray]
"""One of the two means of every row, [B, S, 1], of the derivation and dln."""


def row_sums(v: Derivation, dln: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return c1 and c2 of every row, [B, S, 1] each."""
    g = dln * v.ln_weight
    return (g * v.x_hat).mean(-1, keepdims=True), g.mean(-1, keepdims=True)


def pack(c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    """Pack c1 and c2 as the kernel writes them, [B * S, 2]."""
    return np.concatenate([c1, c2], -1).reshape(-1, 2)


def means(c1: Mean | None = None, c2: Mean | None = None, inside: bool = True) -> dict[str, Step]:
    """Return steps that replace c1 or c2 by another function of the derivation and dln, in the row sums, and
    `inside` of dx too."""
    one = c1 or (lambda v, dln: row_sums(v, dln)[0])
    two = c2 or (lambda v, dln: row_sums(v, dln)[1])
    changes: dict[str, Step] = {"row_sums": lambda v: pack(one(v, v.given_dln), two(v, v.given_dln))}
    for name, mean in (("c1", c1), ("c2", c2)):
        if mean and inside:
            changes[name] = lambda v, mean=mean: mean(v, v.dln)
    return changes


STEPS = {
    **formulas.LAYERNORM,
    "scaled": lambda v: v.x_hat * v.ln_weight,
    "ln_out": lambda v: v.scaled + v.ln_bias,
    "product": lambda v: v.ln_out @ v.linear_weight.T,
    "output": lambda v: v.product + v.linear_bias,
    "dln": lambda v: v.grad_output @ v.linear_weight,
    "g": lambda v: v.dln * v.ln_weight,
    "grad_ln_weight": lambda v: (v.dln * v.x_hat).sum((0, 1)),
    "grad_ln_bias": lambda v: v.dln.sum((0, 1)),
    "grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.ln_out),
    "grad_bias": lambda v: v.grad_output.sum((0, 1)),
    "row_sums": lambda v: pack(*row_sums(v, v.given_dln)),
    "rms_rstd": lambda v: 1 / np.sqrt((v.input**2).mean(-1, keepdims=True) + EPS),
    "rms_x_hat": lambda v: v.input * v.rms_rstd,
    "rms_c": lambda v: (v.g * v.rms_x_hat).mean(-1, keepdims=True),
    "rms_grad_input": lambda v: v.rms_rstd * (v.g - v.rms_x_hat * v.rms_c),
    "grad_rms_weight": lambda v: (v.dln * v.rms_x_hat).sum((0, 1)),
    "rms_grad_weight": lambda v: np.einsum("bso,bsh->oh", v.grad_output, v.rms_x_hat * v.ln_weight),
    **derive_rung.STEPS,
}


def derive(
    arrays: Mapping[str, np.ndarray], changes: Mapping[str, Step] | None = None, dtype: type = np.float64
) -> Derivation:
    """Run the derivation on the puzzle's input arrays, in float64 or another dtype."""
    arguments = as_dtype(arrays, dtype)
    arguments["given_dln"] = arguments.pop("dln")
    return Derivation(STEPS, arguments, changes)


def values(v: Derivation) -> int:
    return v.input.shape[-1]


def truncate(array: np.ndarray, multiple: int) -> np.ndarray:
    """Replace what follows the last whole multiple along the last axis by zeros."""
    kept = array.copy()
    kept[..., array.shape[-1] // multiple * multiple :] = 0
    return kept


def each_row(array: np.ndarray) -> np.ndarray:
    """Reshape [B, S, ...] to [B * S, ...]: every row alone, as alternatives."""
    return array.reshape(-1, *array.shape[2:])


def one_row_only(v: Derivation) -> dict[str, np.ndarray]:
    """Return the contribution of single rows to each parameter gradient, [rows, ...]."""
    return {
        "grad_bias": each_row(v.grad_output),
        "grad_weight": each_row(v.grad_output[..., :, None] * v.ln_out[..., None, :]),
        "grad_ln_weight": each_row(v.dln * v.x_hat),
        "grad_ln_bias": each_row(v.dln),
    }


def parameter_gradients(function) -> dict:
    """Return the same change for each of the four parameter gradients; `function` takes the derivation and a
    name."""
    names = ("grad_bias", "grad_weight", "grad_ln_weight", "grad_ln_bias")
    return {name: lambda v, name=name: function(v, name) for name in names}
