"""NumPy formulas of puzzle 28's quantities, and common mistakes in writing fast kernels, for the diagnosis.

Shapes: input, dln and ln_out [rows, hidden], ln_weight and ln_bias [hidden], mean and rstd [rows], linear_weight [outputs,
hidden]; dy_16 [rows, outputs], bias_16 [outputs]; ln_out_16 and weight_16 have the shapes of ln_out and linear_weight.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from harness.puzzles.formulas import EPS
from harness.puzzles.rows import mean
from harness.spec.derivation import Derivation, Mistake, Step, make_derive

LANES = 32


def compute_layernorm(v: Derivation) -> np.ndarray:
    deviation = v.input - v.row_mean
    return deviation / np.sqrt(v.row_variance + EPS) * v.ln_weight + v.ln_bias


def compute_product(v: Derivation) -> np.ndarray:
    return v.ln_out @ v.linear_weight.T


FORWARD_OUTPUTS = ("rows_out", "once_out", "vectors_out", "shuffles_out")
PRODUCT_OUTPUTS = ("tiled_out", "registers_out")
BF16_PRODUCT_OUTPUTS = ("copies_out", "tensor_out")
STEPS: dict[str, Step] = {
    "row_mean": lambda v: mean(v.input),
    "row_variance": lambda v: mean((v.input - v.row_mean) ** 2),
    **dict.fromkeys(FORWARD_OUTPUTS, compute_layernorm),
    "column_rstd": lambda v: v.rstd[:, None],
    "x_hat": lambda v: (v.input - v.mean[:, None]) * v.column_rstd,
    "g": lambda v: v.dln * v.ln_weight,
    "c1": lambda v: mean(v.g * v.x_hat),
    "c2": lambda v: mean(v.g),
    "grad_input": lambda v: v.column_rstd * (v.g - v.c2 - v.x_hat * v.c1),
    "grad_ln_weight": lambda v: (v.dln * v.x_hat).sum(0),
    "grad_ln_bias": lambda v: v.dln.sum(0),
    **dict.fromkeys(PRODUCT_OUTPUTS, compute_product),
    **dict.fromkeys(BF16_PRODUCT_OUTPUTS, lambda v: v.ln_out_16 @ v.weight_16.T),
    "grad_ln_out": lambda v: v.dy_16 @ v.weight_16,
    "grad_linear_weight": lambda v: v.dy_16.T @ v.ln_out_16,
    "grad_linear_bias": lambda v: v.dy_16.sum(0),
    "output": lambda v: v.ln_out_16 @ v.weight_16.T + v.bias_16,
}
derive = make_derive(STEPS)


def make_forward_mistakes(id: str, description: str, change: Step, hint: int = 2) -> tuple[Mistake, ...]:
    return tuple(Mistake(f"{name}-{id}", description, {f"{name}_out": change}, hint) for name in
                 (output.removesuffix("_out") for output in FORWARD_OUTPUTS))  # fmt: skip


def swap_quarters(v: Derivation) -> np.ndarray:
    """Multiply with the upper right and lower left quarters of the weight's 16 x 16 tiles swapped."""
    (outputs, hidden), weight = v.weight_16.shape, v.weight_16
    padded = np.pad(weight, ((0, -outputs % 16), (0, -hidden % 16)))
    quarters = padded.reshape(-1, 2, 8, padded.shape[1] // 16, 2, 8).swapaxes(1, 4)
    a = np.pad(v.ln_out_16, ((0, 0), (0, -hidden % 16)))
    return (a @ quarters.reshape(padded.shape).T)[:, :outputs]


def compute_with_padded_variance(v: Derivation) -> np.ndarray:
    """Compute LayerNorm with the zeros that pad a row to a multiple of 1024 included in the variance."""
    width = v.input.shape[-1]
    padding = -(-width // 1024) * 1024 - width
    variance = v.row_variance + padding / width * v.row_mean**2
    return (v.input - v.row_mean) / np.sqrt(variance + EPS) * v.ln_weight + v.ln_bias


Reduction = Callable[[np.ndarray], np.ndarray]
"""A wrong warp reduction: the lanes' parts [..., LANES] -> the sums that the lanes then hold."""


def make_shuffle_down(*distances: int) -> Reduction:
    """Return a sum by shuffle_down, in which a lane without a partner gets its own value."""

    def reduce(sums: np.ndarray) -> np.ndarray:
        for distance in distances:
            partner = np.arange(LANES) + distance
            sums = sums + sums[..., np.where(partner < LANES, partner, np.arange(LANES))]
        return sums

    return reduce


REDUCTIONS: tuple[tuple[str, str, Reduction], ...] = (
    ("not-added-over-the-warp", "with each lane's own part in place of the warp's sum", lambda sums: sums),
    *(("sum-in-one-lane", "with the warp's sum in lane 0 only: shuffle_down does not return it to the other lanes", reduce)
      for reduce in (make_shuffle_down(16, 8, 4, 2, 1), make_shuffle_down(1, 2, 4, 8, 16))),
)  # fmt: skip


def compute_lane_mean(array: np.ndarray, width: int, reduce: Reduction) -> np.ndarray:
    """Return the row mean held by each column's lane; lanes load vectors of `width` elements."""
    rows, columns = array.shape
    padded = np.pad(array, ((0, 0), (0, -columns % (LANES * width))))
    parts = padded.reshape(rows, -1, LANES, width).sum((1, 3))
    return reduce(parts)[:, np.arange(columns) // width % LANES] / columns


def list_lane_mistakes() -> Iterator[Mistake]:
    """Yield wrong sums over a warp, for each width of a lane's vectors."""
    for id, description, reduce in REDUCTIONS:
        for width in (1, 4, 8):
            mean = partial(compute_lane_mean, width=width, reduce=reduce)

            def layernorm(v: Derivation, mean: Reduction = mean) -> np.ndarray:
                deviation = v.input - mean(v.input)
                return deviation / np.sqrt(mean(deviation**2) + EPS) * v.ln_weight + v.ln_bias

            def dx(v: Derivation, mean: Reduction = mean) -> np.ndarray:
                return v.column_rstd * (v.g - mean(v.g) - v.x_hat * mean(v.g * v.x_hat))

            yield from make_forward_mistakes(id, description, layernorm)
            yield Mistake(f"dx-{id}", description, {"grad_input": dx}, 2)


def transpose_submatrices(matrix: np.ndarray) -> np.ndarray:
    """Transpose each part of 8 x 8 elements in place, and pad with zeros to whole parts."""
    rows, columns = matrix.shape
    padded = np.pad(matrix, ((0, -rows % 8), (0, -columns % 8)))
    parts = padded.reshape(padded.shape[0] // 8, 8, padded.shape[1] // 8, 8)
    return parts.swapaxes(1, 3).reshape(padded.shape)


def compute_dln_without_transpose(v: Derivation) -> np.ndarray:
    weight = transpose_submatrices(v.weight_16)
    return np.pad(v.dy_16, ((0, 0), (0, -v.dy_16.shape[1] % 8))) @ weight[:, : v.weight_16.shape[1]]


def compute_dweight_without_transpose(v: Derivation) -> np.ndarray:
    outputs, hidden = v.weight_16.shape
    return (transpose_submatrices(v.dy_16).T @ transpose_submatrices(v.ln_out_16))[:outputs, :hidden]


MISTAKES = (
    *make_forward_mistakes("eps-forgotten", "without eps",
             lambda v: (v.input - v.row_mean) / np.sqrt(v.row_variance) * v.ln_weight + v.ln_bias),
    *make_forward_mistakes("beta-forgotten", "without beta",
             lambda v: (v.input - v.row_mean) / np.sqrt(v.row_variance + EPS) * v.ln_weight, 3),
    *make_forward_mistakes("padding-in-the-variance",
             "with zeros past the end of the row in the variance: (0 - mean) ** 2 is not 0", compute_with_padded_variance),
    Mistake("mean-term-dropped", "without the term c2", {"grad_input": lambda v: v.column_rstd * (v.g - v.x_hat * v.c1)}),
    Mistake("variance-term-dropped", "without the term x_hat * c1",
            {"grad_input": lambda v: v.column_rstd * (v.g - v.c2)}),
    Mistake("slab-of-one-row", "of the first row of each slab only",
            {"grad_ln_weight": lambda v: (v.dln * v.x_hat)[::16].sum(0)}),
    Mistake("last-tile-only", "of the last tile of columns only: the total restarts at 0",
            {"tiled_out": lambda v: multiply_last_tile(v, 32)}),
    Mistake("quarters-of-b-exchanged", "with two 8 x 8 quarters of every 16 x 16 elements of b swapped: ld_matrix[8] in a's order",
            {"tensor_out": swap_quarters}, 2),
    *list_lane_mistakes(),
    Mistake("means-exchanged", "with c1 and c2 exchanged",
            {"grad_input": lambda v: v.column_rstd * (v.g - v.c1 - v.x_hat * v.c2)}),
    Mistake("parts-not-turned", "with the elements of every 8 x 8 part of W transposed: ld_matrix without transpose=True",
            {"grad_ln_out": compute_dln_without_transpose}, 2),
    Mistake("parts-not-turned", "with the elements of every 8 x 8 part of dy and ln_out transposed: ld_matrix without transpose=True",
            {"grad_linear_weight": compute_dweight_without_transpose}, 2),
    Mistake("bias-gradient-of-a-quarter", "of one lane's rows only: four lanes share a fragment's row, and their sums are not added",
            {"grad_linear_bias": lambda v: v.dy_16[np.isin(np.arange(len(v.dy_16)) % 16, (0, 1, 8, 9))].sum(0)}, 2),
    Mistake("bias-forgotten", "without the bias", {"output": lambda v: v.ln_out_16 @ v.weight_16.T}, 2),
    Mistake("bias-twice", "with the bias twice", {"output": lambda v: v.ln_out_16 @ v.weight_16.T + 2 * v.bias_16}),
    Mistake("bias-gradient-of-the-last-rows", "of the last 16 rows only: the total restarts at 0",
            {"grad_linear_bias": lambda v: sum_last_rows(v.dy_16)}, 2),
)  # fmt: skip


def sum_last_rows(dy: np.ndarray) -> np.ndarray:
    """Sum the last 16 rows after padding with zeros to a multiple of 32 rows."""
    return dy[(len(dy) + 31) // 32 * 32 - 16 :].sum(0)


def multiply_last_tile(v: Derivation, tile: int) -> np.ndarray:
    first = (v.ln_out.shape[-1] - 1) // tile * tile
    return v.ln_out[:, first:] @ v.linear_weight[:, first:].T
