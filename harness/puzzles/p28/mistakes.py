"""NumPy formulas of puzzle 28's quantities, and common mistakes on the way to a fast kernel, for the diagnosis.

Shapes: input, dln and ln_out [rows, hidden], ln_weight and ln_bias [hidden], mean and rstd [rows], linear_weight [outputs,
hidden]; dy_16 [rows, outputs], bias_16 [outputs]; ln_out_16 and weight_16 have the shapes of ln_out and linear_weight.
"""

import numpy as np

from harness.puzzles.formulas import EPS
from harness.spec.derivation import Derivation, Mistake, Step, derive_by


def mean(array: np.ndarray) -> np.ndarray:
    """Return the mean of every row, [rows, 1]."""
    return array.mean(-1, keepdims=True)


def layernorm(v: Derivation) -> np.ndarray:
    away = v.input - v.row_mean
    return away / np.sqrt(v.row_variance + EPS) * v.ln_weight + v.ln_bias


def product(v: Derivation) -> np.ndarray:
    return v.ln_out @ v.linear_weight.T


FORWARD = ("rows_out", "once_out", "vectors_out", "shuffles_out")
PRODUCTS = ("tiled_out", "registers_out")
NARROW_PRODUCTS = ("copies_out", "tensor_out")
STEPS: dict[str, Step] = {
    "row_mean": lambda v: mean(v.input),
    "row_variance": lambda v: mean((v.input - v.row_mean) ** 2),
    **dict.fromkeys(FORWARD, layernorm),
    "column_rstd": lambda v: v.rstd[:, None],
    "x_hat": lambda v: (v.input - v.mean[:, None]) * v.column_rstd,
    "g": lambda v: v.dln * v.ln_weight,
    "c1": lambda v: mean(v.g * v.x_hat),
    "c2": lambda v: mean(v.g),
    "grad_input": lambda v: v.column_rstd * (v.g - v.c2 - v.x_hat * v.c1),
    "grad_ln_weight": lambda v: (v.dln * v.x_hat).sum(0),
    "grad_ln_bias": lambda v: v.dln.sum(0),
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(NARROW_PRODUCTS, lambda v: v.ln_out_16 @ v.weight_16.T),
    "grad_ln_out": lambda v: v.dy_16 @ v.weight_16,
    "grad_linear_weight": lambda v: v.dy_16.T @ v.ln_out_16,
    "grad_linear_bias": lambda v: v.dy_16.sum(0),
    "output": lambda v: v.ln_out_16 @ v.weight_16.T + v.bias_16,
}
derive = derive_by(STEPS)


def forward(id: str, words: str, change: Step, hint: int = 2) -> tuple[Mistake, ...]:
    """Return a mistake for each of the forward steps."""
    return tuple(Mistake(f"{name}-{id}", words, {f"{name}_out": change}, hint) for name in
                 (each.removesuffix("_out") for each in FORWARD))  # fmt: skip


def padded_variance(v: Derivation) -> np.ndarray:
    """Compute LayerNorm with padding of the row to a multiple of 1024 included in the variance as zeros."""
    width = v.input.shape[-1]
    behind = -(-width // 1024) * 1024 - width
    variance = v.row_variance + behind / width * v.row_mean**2
    return (v.input - v.row_mean) / np.sqrt(variance + EPS) * v.ln_weight + v.ln_bias


MISTAKES = (
    *forward("eps-forgotten", "without eps",
             lambda v: (v.input - v.row_mean) / np.sqrt(v.row_variance) * v.ln_weight + v.ln_bias),
    *forward("beta-forgotten", "without beta",
             lambda v: (v.input - v.row_mean) / np.sqrt(v.row_variance + EPS) * v.ln_weight, 3),
    *forward("padding-in-the-variance",
             "with zeros behind the end of the row in the variance: (0 - mean) ** 2 is not 0", padded_variance),
    Mistake("mean-term-dropped", "without the term c2", {"grad_input": lambda v: v.column_rstd * (v.g - v.x_hat * v.c1)}),
    Mistake("variance-term-dropped", "without the term x_hat * c1",
            {"grad_input": lambda v: v.column_rstd * (v.g - v.c2)}),
    Mistake("slab-of-one-row", "of the first row of each slab alone",
            {"grad_ln_weight": lambda v: (v.dln * v.x_hat)[::16].sum(0)}),
    Mistake("last-tile-only", "of the last tile of columns alone: the total begins anew",
            {"tiled_out": lambda v: last_tile(v, 32)}),
    Mistake("bias-forgotten", "without the bias", {"output": lambda v: v.ln_out_16 @ v.weight_16.T}, 2),
    Mistake("bias-twice", "with the bias twice", {"output": lambda v: v.ln_out_16 @ v.weight_16.T + 2 * v.bias_16}),
    Mistake("bias-gradient-of-the-last-rows", "of the last 16 rows alone: the total begins anew",
            {"grad_linear_bias": lambda v: last_rows(v.dy_16)}, 2),
)  # fmt: skip


def last_rows(dy: np.ndarray) -> np.ndarray:
    """Sum over the last 16 rows of whole tiles of 32, with zeros past the end."""
    return dy[(len(dy) + 31) // 32 * 32 - 16 :].sum(0)


def last_tile(v: Derivation, tile: int) -> np.ndarray:
    """Multiply the last tile of columns alone."""
    first = (v.ln_out.shape[-1] - 1) // tile * tile
    return v.ln_out[:, first:] @ v.linear_weight[:, first:].T
