"""Derivation of puzzle 19's eight quantities in NumPy, and known mistakes in them.

Shapes: vector [n], matrix and half_matrix [rows, columns], offset, half_vector and weight [columns].
"""

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.formulas import EPS
from harness.spec.derivation import Derivation, Mistake, Step, make_derive
from harness.spec.rounding import round_to_dtype

TILE = 32
"""Elements per tile; `THREADS` in the kernels."""
ROW_THREADS = 64
"""Threads that share one row."""
SLAB_ROWS = 4
"""Rows per slab in the first of two stages; the last slab may be shorter."""


def split_into_tiles(v: Derivation) -> list[np.ndarray]:
    return [v.vector[start : start + TILE] for start in range(0, len(v.vector), TILE)]


def compute_mean_square(v: Derivation) -> np.ndarray:
    return (v.matrix**2).mean(-1, keepdims=True)


STEPS = {
    "mapped": lambda v: 2 * v.vector + 1,
    "shifted": lambda v: v.matrix + v.offset,
    "products": lambda v: v.half_matrix @ v.half_vector,
    "row_sums": lambda v: v.matrix.sum(-1),
    "mirrored": lambda v: np.concatenate([tile[::-1] for tile in split_into_tiles(v)]),
    "column_sums": lambda v: v.matrix.sum(0),
    "staged_sums": lambda v: v.matrix.sum(0),
    "rstd": lambda v: 1 / np.sqrt(compute_mean_square(v) + EPS),
    "normalised": lambda v: v.matrix * v.rstd * v.weight,
}
derive = make_derive(STEPS)


def add_offset_by_row(v: Derivation) -> np.ndarray:
    rows, columns = v.matrix.shape
    row_offsets = np.zeros(rows)
    row_offsets[: min(rows, columns)] = v.offset[: min(rows, columns)]
    return v.matrix + row_offsets[:, None]


def accumulate_in_bfloat16(v: Derivation) -> np.ndarray:
    """Return the products accumulated in bfloat16, [2, rows]: first with each term rounded before it is added, then without."""
    totals = np.zeros((2, len(v.half_matrix)))
    for column, factor in zip(v.half_matrix.T, v.half_vector, strict=True):
        terms = column * factor
        totals = np.stack([round_to_dtype(totals[0] + round_to_dtype(terms, "bfloat16"), "bfloat16"),
                           round_to_dtype(totals[1] + terms, "bfloat16")])  # fmt: skip
    return totals


def drop_last_axis(change: Step) -> Step:
    """Return a step that reshapes `change`'s row sums, [rows, 1], to the output [rows]."""
    return lambda v: change(v)[..., 0]


def sum_in_slabs(v: Derivation, count_rows) -> np.ndarray:
    """Return the column sums in two stages that add only the first `count_rows(rows)` rows of each slab."""

    def sum_slabs(matrix: np.ndarray, slab_rows: int) -> np.ndarray:
        slabs = [matrix[first : first + slab_rows] for first in range(0, len(matrix), slab_rows)]
        return np.stack([slab[: count_rows(len(slab))].sum(0) for slab in slabs])

    partial_sums = sum_slabs(v.matrix, SLAB_ROWS)
    return sum_slabs(partial_sums, len(partial_sums))[0]


# Mistakes are matched by values, so each changes one quantity; the likeliest come first.
MISTAKES = (
    Mistake("one-forgotten", "without the + 1", {"mapped": lambda v: 2 * v.vector}, hint=1),
    Mistake("two-forgotten", "without the factor 2", {"mapped": lambda v: v.vector + 1}, hint=1),
    Mistake("index-within-the-block",
            "of the first block in every block: thread_idx.x starts at 0 in each block",
            {"mapped": lambda v: 2 * np.resize(v.vector[:TILE], len(v.vector)) + 1}),
    Mistake("offset-forgotten", "without the offset", {"shifted": lambda v: v.matrix}, hint=1),
    Mistake("offset-by-row", "with b[row] instead of b[column]", {"shifted": add_offset_by_row}),
    Mistake("offset-once", "with b[0] in every column", {"shifted": lambda v: v.matrix + v.offset[0]}),
    Mistake("summed-in-bfloat16",
            "summed in bfloat16: the total has the tensor's dtype, and each addition rounds it to 8 significant bits",
            {"products": accumulate_in_bfloat16}),
    Mistake("multiplied-in-bfloat16",
            "with every product rounded to bfloat16 before it is added: cast the factors, not their product",
            {"products": lambda v: round_to_dtype(v.half_matrix * v.half_vector, "bfloat16").sum(-1)}),
    Mistake("factor-forgotten", "without the factor w[c]", {"products": lambda v: v.half_matrix.sum(-1)},
            hint=1),
    *(
        mistake
        for mistake in formulas.list_sum_mistakes(
            lambda v: v.half_matrix * v.half_vector, ROW_THREADS, {"products": drop_last_axis}, "products-"
        )
        if "-term-" in mistake.id
    ),
    *(
        mistake
        for mistake in formulas.list_sum_mistakes(lambda v: v.matrix, ROW_THREADS, {"row_sums": drop_last_axis}, "row-")
        if "own-" not in mistake.id
    ),
    Mistake("every-thread-adds-all",
            f"{ROW_THREADS} times too large, once for each thread of a block: every thread adds up every column instead of its own share",
            {"column_sums": lambda v: ROW_THREADS * v.matrix.sum(0)}, 3),
    Mistake("not-mirrored", "unchanged: every thread reads the tile element that it wrote itself",
            {"mirrored": lambda v: v.vector}, hint=1),
    Mistake("rotated", "reversed and shifted by one: the last element of a tile has index count - 1",
            {"mirrored": lambda v: np.concatenate([np.roll(tile[::-1], 1) for tile in split_into_tiles(v)])}),
    Mistake("whole-vector-mirrored", "with the whole vector reversed, not each of its tiles",
            {"mirrored": lambda v: v.vector[::-1]}),
    Mistake("slab-without-its-last-row",
            "with the last row of every slab left out: range(first, end) already excludes `end`",
            {"staged_sums": lambda v: sum_in_slabs(v, lambda rows: rows - 1)}),
    Mistake("slab-with-one-row", "of one row of each slab: the loop over its rows is missing",
            {"staged_sums": lambda v: sum_in_slabs(v, lambda rows: 1)}),
    Mistake("not-divided", "with the sum of the squares instead of their mean",
            {"rstd": lambda v: 1 / np.sqrt((v.matrix**2).sum(-1, keepdims=True) + EPS)}),
    Mistake("eps-forgotten", "without eps", {"rstd": lambda v: 1 / np.sqrt(compute_mean_square(v))}),
    Mistake("eps-outside-root", "with eps added outside the root",
            {"rstd": lambda v: 1 / (np.sqrt(compute_mean_square(v)) + EPS)}),
    Mistake("root-forgotten", "without the root", {"rstd": lambda v: 1 / (compute_mean_square(v) + EPS)}),
    Mistake("divided-by-rstd", "divided by rstd instead of multiplied",
            {"normalised": lambda v: v.matrix / v.rstd * v.weight}),
    Mistake("square-forgotten", "with the sum of the elements instead of the sum of their squares",
            {"rstd": lambda v: 1 / np.sqrt(v.matrix.mean(-1, keepdims=True) + EPS)}),
    Mistake("own-share-only", "with every thread's own share of the squares instead of the row's sum",
            {"rstd": lambda v: 1 / np.sqrt(formulas.sum_per_thread(v.matrix**2, ROW_THREADS) / v.matrix.shape[-1] + EPS)}),
    Mistake("gamma-forgotten", "without gamma", {"normalised": lambda v: v.matrix * v.rstd}, hint=1),
    Mistake("mean-subtracted", "with the mean subtracted first: that is LayerNorm",
            {"rstd": lambda v: 1 / np.sqrt(v.matrix.var(-1, keepdims=True) + EPS),
             "normalised": lambda v: (v.matrix - v.matrix.mean(-1, keepdims=True)) * v.rstd * v.weight},
            hint=1),
)  # fmt: skip
