"""Derivation of puzzle 22 in NumPy, and helpers for its known mistakes.

Shapes: input, x_hat, ln_out, dln, g [B, S, H]; grad_output [B, S, O]; row_mean, row_rstd, c1, c2 [B, S, 1].
`input_dln` is the gradient of the LayerNorm output that the row sums read when they are checked separately.
"""

from collections.abc import Callable, Mapping

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p22 import derive_rung
from harness.puzzles.p22.ops import EPS
from harness.spec.derivation import Derivation, Step, convert_floats

Mean = Callable[[Derivation, np.ndarray], np.ndarray]
"""(derivation, dln) -> one of the two means of every row, [B, S, 1]."""


def compute_row_means(v: Derivation, dln: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    g = dln * v.ln_weight
    return (g * v.x_hat).mean(-1, keepdims=True), g.mean(-1, keepdims=True)


def stack_means(c1: np.ndarray, c2: np.ndarray) -> np.ndarray:
    return np.concatenate([c1, c2], -1).reshape(-1, 2)


def replace_means(c1: Mean | None = None, c2: Mean | None = None, change_dx: bool = True) -> dict[str, Step]:
    """Return steps that replace c1 or c2 in the row sums and, with `change_dx`, in dx."""
    get_c1 = c1 or (lambda v, dln: compute_row_means(v, dln)[0])
    get_c2 = c2 or (lambda v, dln: compute_row_means(v, dln)[1])
    changes: dict[str, Step] = {
        "row_sums": lambda v: stack_means(get_c1(v, v.input_dln), get_c2(v, v.input_dln))
    }
    for name, mean in (("c1", c1), ("c2", c2)):
        if mean and change_dx:
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
    "row_sums": lambda v: stack_means(*compute_row_means(v, v.input_dln)),
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
    arguments = convert_floats(arrays, dtype)
    arguments["input_dln"] = arguments.pop("dln")
    return Derivation(STEPS, arguments, changes)


def get_row_length(v: Derivation) -> int:
    return v.input.shape[-1]


def zero_tail(array: np.ndarray, multiple: int) -> np.ndarray:
    result = array.copy()
    result[..., array.shape[-1] // multiple * multiple :] = 0
    return result


def flatten_rows(array: np.ndarray) -> np.ndarray:
    """Reshape [B, S, ...] to [B * S, ...], where each row is an alternative of a `Mistake`."""
    return array.reshape(-1, *array.shape[2:])


def list_row_contributions(v: Derivation) -> dict[str, np.ndarray]:
    """Return each row's contribution to each parameter gradient, [rows, ...]."""
    return {
        "grad_bias": flatten_rows(v.grad_output),
        "grad_weight": flatten_rows(v.grad_output[..., :, None] * v.ln_out[..., None, :]),
        "grad_ln_weight": flatten_rows(v.dln * v.x_hat),
        "grad_ln_bias": flatten_rows(v.dln),
    }


def make_parameter_steps(compute_gradient) -> dict:
    """Return steps that replace each of the four parameter gradients by `compute_gradient(derivation, name)`."""
    names = ("grad_bias", "grad_weight", "grad_ln_weight", "grad_ln_bias")
    return {name: lambda v, name=name: compute_gradient(v, name) for name in names}
