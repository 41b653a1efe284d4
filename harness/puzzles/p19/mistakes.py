"""The derivation of puzzle 19's eight quantities in NumPy, and their known mistakes.

Shapes: vector [n], matrix and half_matrix [rows, columns], offset, half_vector and weight [columns].
"""

import numpy as np

from harness.puzzles import formulas
from harness.spec.derivation import Derivation, Mistake, Step, derive_by
from harness.spec.rounding import round_to_dtype

EPS = 1e-5
TILE = 32
"""Elements of a tile, THREADS in the kernels."""
ROW_THREADS = 64
"""Threads that share one row."""
SLAB_ROWS = 4
"""Rows of a slab in the first of the two stages, of all but the last."""


def tiles(v: Derivation) -> list[np.ndarray]:
    """Split the vector into tiles; the last may be shorter."""
    return [v.vector[start : start + TILE] for start in range(0, len(v.vector), TILE)]


def squares_mean(v: Derivation) -> np.ndarray:
    return (v.matrix**2).mean(-1, keepdims=True)


STEPS = {
    "mapped": lambda v: 2 * v.vector + 1,
    "shifted": lambda v: v.matrix + v.offset,
    "products": lambda v: v.half_matrix @ v.half_vector,
    "row_sums": lambda v: v.matrix.sum(-1),
    "mirrored": lambda v: np.concatenate([tile[::-1] for tile in tiles(v)]),
    "column_sums": lambda v: v.matrix.sum(0),
    "staged_sums": lambda v: v.matrix.sum(0),
    "rstd": lambda v: 1 / np.sqrt(squares_mean(v) + EPS),
    "normalised": lambda v: v.matrix * v.rstd * v.weight,
}
derive = derive_by(STEPS)


def offset_by_row(v: Derivation) -> np.ndarray:
    """Return the offset indexed by the row, 0 out of its bounds."""
    rows, columns = v.matrix.shape
    by_row = np.zeros(rows)
    by_row[: min(rows, columns)] = v.offset[: min(rows, columns)]
    return v.matrix + by_row[:, None]


def in_bfloat16(v: Derivation) -> np.ndarray:
    """Return the products with every sum rounded to bfloat16, with and without rounded terms, as
    alternatives."""
    totals = np.zeros((2, len(v.half_matrix)))
    for column, factor in zip(v.half_matrix.T, v.half_vector, strict=True):
        terms = column * factor
        totals = np.stack([round_to_dtype(totals[0] + round_to_dtype(terms, "bfloat16"), "bfloat16"),
                           round_to_dtype(totals[1] + terms, "bfloat16")])  # fmt: skip
    return totals


def of_a_row(change: Step) -> Step:
    """Return a step that computes a row sum, [rows, 1], as the output [rows]."""
    return lambda v: change(v)[..., 0]


def in_slabs(v: Derivation, count) -> np.ndarray:
    """Return the column sums over `count(rows of a slab)` rows of each slab, in both stages."""

    def stage(matrix: np.ndarray, slab_rows: int) -> np.ndarray:
        slabs = [matrix[first : first + slab_rows] for first in range(0, len(matrix), slab_rows)]
        return np.stack([slab[: count(len(slab))].sum(0) for slab in slabs])

    partial_sums = stage(v.matrix, SLAB_ROWS)
    return stage(partial_sums, len(partial_sums))[0]


def own_shares(v: Derivation) -> np.ndarray:
    """Return for every column the sum of squares of its own thread, [rows, columns]."""
    thread = np.arange(v.matrix.shape[-1]) % ROW_THREADS
    # No matrix product: infinity times 0 would reach every thread.
    return np.where(thread[:, None] == thread, (v.matrix**2)[:, :, None], 0.0).sum(1)


# Mistakes are matched by values, so each changes one quantity; the likeliest come first.
MISTAKES = (
    Mistake("one-forgotten", "without the + 1", {"mapped": lambda v: 2 * v.vector}, hint=1),
    Mistake("two-forgotten", "without the factor 2", {"mapped": lambda v: v.vector + 1}, hint=1),
    Mistake("index-within-the-block",
            "of the first block in every block: thread_idx.x counts the threads of a block from 0",
            {"mapped": lambda v: 2 * np.resize(v.vector[:TILE], len(v.vector)) + 1}),
    Mistake("offset-forgotten", "without the offset", {"shifted": lambda v: v.matrix}, hint=1),
    Mistake("offset-by-row", "with b[row] instead of b[column]", {"shifted": offset_by_row}),
    Mistake("offset-once", "with b[0] in every column", {"shifted": lambda v: v.matrix + v.offset[0]}),
    Mistake("summed-in-bfloat16",
            "added up in bfloat16: the total is of the tensor's type, and each addition rounds it to 8 binary digits",
            {"products": in_bfloat16}),
    Mistake("multiplied-in-bfloat16",
            "with every product rounded to bfloat16 before it is added: cast the factors, not their product",
            {"products": lambda v: round_to_dtype(v.half_matrix * v.half_vector, "bfloat16").sum(-1)}),
    Mistake("factor-forgotten", "without the factor w[c]", {"products": lambda v: v.half_matrix.sum(-1)},
            hint=1),
    *(
        mistake
        for mistake in formulas.sums(
            lambda v: v.half_matrix * v.half_vector, ROW_THREADS, {"products": of_a_row}, "products-"
        )
        if "-term-" in mistake.id
    ),
    *(
        mistake
        for mistake in formulas.sums(lambda v: v.matrix, ROW_THREADS, {"row_sums": of_a_row}, "row-")
        if "own-" not in mistake.id
    ),
    Mistake("every-thread-adds-all",
            f"{ROW_THREADS} times too large, once for each thread of a block: every thread adds up every column, and none has a share " "of its own",
            {"column_sums": lambda v: ROW_THREADS * v.matrix.sum(0)}, 3),
    Mistake("not-mirrored", "as it came: every thread reads the element of the tile that it has written itself",
            {"mirrored": lambda v: v.vector}, hint=1),
    Mistake("rotated", "turned round and moved by one: the last element of a tile is number count - 1",
            {"mirrored": lambda v: np.concatenate([np.roll(tile[::-1], 1) for tile in tiles(v)])}),
    Mistake("whole-vector-mirrored", "with the whole vector turned round, not each of its tiles",
            {"mirrored": lambda v: v.vector[::-1]}),
    Mistake("slab-without-its-last-row",
            "with the last row of every slab left out: range(first, end) ends before `end` by itself",
            {"staged_sums": lambda v: in_slabs(v, lambda rows: rows - 1)}),
    Mistake("slab-with-one-row", "of one row of each slab: the loop over its rows is missing",
            {"staged_sums": lambda v: in_slabs(v, lambda rows: 1)}),
    Mistake("not-divided", "with the sum of the squares instead of their mean",
            {"rstd": lambda v: 1 / np.sqrt((v.matrix**2).sum(-1, keepdims=True) + EPS)}),
    Mistake("eps-forgotten", "without eps", {"rstd": lambda v: 1 / np.sqrt(squares_mean(v))}),
    Mistake("eps-outside-root", "with eps added outside of the root",
            {"rstd": lambda v: 1 / (np.sqrt(squares_mean(v)) + EPS)}),
    Mistake("root-forgotten", "without the root", {"rstd": lambda v: 1 / (squares_mean(v) + EPS)}),
    Mistake("divided-by-rstd", "divided by rstd, which is multiplied",
            {"normalised": lambda v: v.matrix / v.rstd * v.weight}),
    Mistake("square-forgotten", "with the sum of the elements instead of the sum of their squares",
            {"rstd": lambda v: 1 / np.sqrt(v.matrix.mean(-1, keepdims=True) + EPS)}),
    Mistake("own-share-only", "with every thread's own share of the squares instead of the row's sum",
            {"rstd": lambda v: 1 / np.sqrt(own_shares(v) / v.matrix.shape[-1] + EPS)}),
    Mistake("gamma-forgotten", "without gamma", {"normalised": lambda v: v.matrix * v.rstd}, hint=1),
    Mistake("mean-subtracted", "with the mean taken away first: that is LayerNorm",
            {"rstd": lambda v: 1 / np.sqrt(v.matrix.var(-1, keepdims=True) + EPS),
             "normalised": lambda v: (v.matrix - v.matrix.mean(-1, keepdims=True)) * v.rstd * v.weight},
            hint=1),
)  # fmt: skip
