"""Known mistakes of puzzle 24, as changes to its derivation; the first of equal ones is reported."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p24 import orders
from harness.puzzles.p24.derivation import (
    compute_distances,
    find_pairs_in_window,
    find_tiles,
    gather,
    scatter,
    split_into_tiles,
)
from harness.spec.derivation import Derivation, Mistake, Step
from harness.spec.puzzle import Arrays, Symptom

TEXTBOOK_ORDER = (0, 1, 3, 2, 7, 6, 4, 5, 14, 15, 13, 12, 8, 9, 11, 10)
"""The order of a 4 x 4 grid as textbooks print it; its steps 1 and 2 are not neighbours."""


# ---- The curve ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuarterTurns:
    """The quarters that are transposed, flipped (coordinate c becomes `get_last(size, side)` - c), or in the right half."""

    transpose_quarters: tuple[int, ...] = (0, 3)
    flip_quarters: tuple[int, ...] = (3,)
    get_last: Callable[[int, int], int] = lambda size, side: size - 1
    right_quarters: tuple[int, ...] = (2, 3)

    def transform(self, quarter: np.ndarray, row: np.ndarray, column: np.ndarray, last_index: int):
        """Return row and column within a quarter's square, transformed like the quarter."""
        flipped = np.isin(quarter, self.flip_quarters)
        row, column = (np.where(flipped, last_index - coordinate, coordinate) for coordinate in (row, column))
        transposed = np.isin(quarter, self.transpose_quarters)
        return np.where(transposed, column, row), np.where(transposed, row, column)


def compute_wrong_index(v: Derivation, turns: QuarterTurns) -> np.ndarray:
    """Return the index computed from bits, smallest squares first, with wrong turns."""
    side = int(v.side)
    bits, size = np.arange(side**2), 1
    row = column = np.zeros_like(bits)
    while size < side:
        quarter = bits & 3
        row, column = turns.transform(quarter, row, column, turns.get_last(size, side))
        row = row + size * np.isin(quarter, (1, 2))
        column = column + size * np.isin(quarter, turns.right_quarters)
        bits, size = bits >> 2, 2 * size
    return row * side + column


def compute_wrong_inverse(v: Derivation, turns: QuarterTurns) -> np.ndarray:
    """Return the step of each cell computed from bits, largest squares first, with wrong turns."""
    side = int(v.side)
    row, column = np.divmod(np.arange(side**2), side)
    step, size = np.zeros_like(row), side // 2
    while size:
        quarter = 3 * (column // size) ^ (row // size)
        row, column, step = row % size, column % size, 4 * step + quarter
        row, column = turns.transform(quarter, row, column, turns.get_last(size, side))
        size //= 2
    return step


def reverse_digits(v: Derivation) -> np.ndarray:
    """Return the step of each cell with the quarters' digits in reverse order."""
    step, side = orders.invert_order(orders.make_hilbert_order(int(v.side), int(v.side))), int(v.side)
    reverse = np.zeros_like(step)
    while side > 1:
        reverse, step, side = 4 * reverse + step % 4, step // 4, side // 2
    return reverse


def get_hilbert_order(v: Derivation) -> np.ndarray:
    return orders.make_hilbert_order(int(v.side), int(v.side))


def swap_axes(v: Derivation) -> np.ndarray:
    row, column = np.divmod(get_hilbert_order(v), int(v.side))
    return column * int(v.side) + row


def get_textbook_index(v: Derivation) -> np.ndarray:
    """Return the index that textbooks print for a 4 x 4 grid, and the correct one for other grids."""
    return np.array(TEXTBOOK_ORDER) if v.side == 4 else get_hilbert_order(v)


def make_order_steps(get_index: Step) -> dict[str, Step]:
    return {"index": get_index, "inverse": lambda v: orders.invert_order(get_index(v))}


WRONG_TURNS = (
    ("turn-forgotten", "with quarters that are never turned", QuarterTurns((), ())),
    ("exchange-forgotten", "with row and column not swapped in the first and the last quarter", QuarterTurns(())),
    ("flip-forgotten",
     "with the last quarter not flipped: its row and column are swapped, and must also count from the other end",
     QuarterTurns(flip_quarters=())),
    ("last-quarter-not-exchanged", "with quarter 3 flipped, but its row and column not swapped",
     QuarterTurns((0,))),
    ("last-quarter-not-turned", "with quarter 3 not turned", QuarterTurns((0,), ())),
    ("first-quarter-not-turned", "with quarter 0 not turned", QuarterTurns((3,))),
    ("first-quarter-flipped", "with quarter 0 flipped too", QuarterTurns(flip_quarters=(0, 3))),
    ("flip-in-the-whole", "with the last quarter counted from the far side of the whole square, not of the quarter",
     QuarterTurns(get_last=lambda size, side: side - 1)),
    ("end-one-too-far", "with quarter 3 counted from size, not from size - 1, the last index",
     QuarterTurns(get_last=lambda size, side: size)),
    ("right-half-too-late", "with quarter 2 in the left half: the right half has quarters 2 and 3", QuarterTurns(right_quarters=(3,))),
)  # fmt: skip
CURVE_MISTAKES = (
    Mistake("inverse-for-index",
            "with index and inverse swapped: index[step] is a cell, inverse[cell] is a step",
            make_order_steps(lambda v: orders.invert_order(get_hilbert_order(v)))),
    Mistake("printed-sequence",
            "with 0 1 3 2 7 6 4 5 ... for 4 x 4: a permutation, but its steps are not between neighbours",
            make_order_steps(get_textbook_index)),
    *(
        Mistake(id, description,
                {"index": lambda v, t=turns: compute_wrong_index(v, t), "inverse": lambda v, t=turns: compute_wrong_inverse(v, t)},
                3 if "end" in id else 2)
        for id, description, turns in WRONG_TURNS
    ),
    Mistake("row-and-column-exchanged", "with row and column swapped", make_order_steps(swap_axes), 3),
    Mistake("digits-reversed",
            "with the quarters' digits in reverse order: the largest squares have the highest two bits",
            make_order_steps(lambda v: orders.invert_order(reverse_digits(v)))),
    Mistake("z-order", "with the bits of row and column interleaved: that is the Z-order, whose steps jump",
            make_order_steps(lambda v: orders.make_z_order(int(v.side), int(v.side))), 1),
    Mistake("row-by-row", "row by row", make_order_steps(lambda v: v.steps), 1),
)  # fmt: skip

# ---- Permutations -------------------------------------------------------------------------------------------

PERMUTATION_MISTAKES = (
    Mistake("permuted-alike",
            "gathered again with the same index: the backward pass of a permutation is its inverse",
            {"grad_input": lambda v: gather(v.grad_gathered, v.order)}),
    Mistake("not-permuted", "not permuted, still in step order",
            {"grad_input": lambda v: v.grad_gathered}),
    Mistake("permuted-twice", "scattered twice",
            {"grad_input": lambda v: scatter(scatter(v.grad_gathered, v.order), v.order)}),
    Mistake("order-backwards", "with the order reversed",
            {"grad_input": lambda v: scatter(v.grad_gathered, v.order[::-1])}),
    Mistake("first-batch-alone", "of the first batch element only, and 0 in the others",
            {"grad_input": lambda v: scatter(v.grad_gathered, v.order) * (np.arange(len(v.input)) == 0)[:, None, None, None]}),
    Mistake("one-column-too-far", "with the columns of a row shifted by one",
            {"grad_input": lambda v: np.roll(scatter(v.grad_gathered, v.order), 1, -1)}),
    Mistake("one-head", "with the first head's rows for all heads",
            {"grad_input": lambda v: np.broadcast_to(scatter(v.grad_gathered, v.order)[:1, :1], v.input.shape)},
            3),
)  # fmt: skip

# ---- Windows ------------------------------------------------------------------------------------------------


def get_distances(v: Derivation) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.divmod(v.order, v.width)
    return compute_distances(rows), compute_distances(columns)


def wrap_columns(v: Derivation) -> np.ndarray:
    """Return the pairs within a window for which the grid's left and right edges are adjacent."""
    rows, columns = get_distances(v)
    return np.maximum(rows, np.minimum(columns, v.width - columns)) <= v.radius


def drop_last_tile(v: Derivation) -> np.ndarray:
    tiles = find_tiles(v.in_window, int(v.tile))
    tiles[:, -1] = False
    return tiles


def find_full_tiles(v: Derivation) -> np.ndarray:
    tile = int(v.tile)
    inside = split_into_tiles(np.ones_like(v.in_window), tile)
    return np.asarray((split_into_tiles(v.in_window, tile) | ~inside).all((2, 3)))


def use_step_as_query_cell(v: Derivation) -> np.ndarray:
    """Return the pairs [L, L] within the window if the query's step is used as its cell."""
    cells, steps = np.divmod(v.order, v.width), np.divmod(np.arange(len(v.order)), v.width)
    distances = (np.abs(step[:, None] - cell) for step, cell in zip(steps, cells, strict=True))
    return np.maximum(*distances) <= v.radius


def find_pairs_by_signed_distance(v: Derivation, *axes: int) -> np.ndarray:
    """Return the pairs within the window if distances along `axes` (0 rows, 1 columns) keep their sign."""
    cells = np.divmod(v.order, v.width)
    distances = (cells[k][:, None] - cells[k] if k in axes else compute_distances(cells[k]) for k in (0, 1))
    return np.maximum(*distances) <= v.radius


def find_pairs_by_added_coordinates(v: Derivation, axis: int) -> np.ndarray:
    """Return the pairs within the window if coordinates along `axis` (0 rows, 1 columns) are added, not subtracted."""
    distances, cells = list(get_distances(v)), np.divmod(v.order, v.width)
    distances[axis] = cells[axis][:, None] + cells[axis]
    return np.maximum(*distances) <= v.radius


def swap_division(v: Derivation) -> np.ndarray:
    """Return the pairs within the window if the width is divided by the cell; cell 0 gets row and column 0."""
    rows, columns = (np.where(v.order, q, 0) for q in np.divmod(v.width, np.where(v.order, v.order, 1)))
    return np.maximum(compute_distances(rows), compute_distances(columns)) <= v.radius


WRONG_PAIRS: tuple[tuple[str, str, Step, int], ...] = (
    ("window-in-one-dimension", "with the window measured along the steps: neighbours on the grid may be far apart on the curve",
     lambda v: compute_distances(np.arange(len(v.order))) <= v.radius, 1),
    ("window-in-cells", "with the window measured in row-major cell numbers: the neighbour below is a whole row away",
     lambda v: compute_distances(v.order) <= v.radius, 1),
    ("wrapped-at-the-edge", "with a window that wraps around the edge of the grid", wrap_columns, 2),
    ("diamond", "with the sum of both distances: the window is a square, so the larger distance counts",
     lambda v: sum(get_distances(v)) <= v.radius, 2),
    ("rows-alone", "with only the row distance", lambda v: get_distances(v)[0] <= v.radius, 2),
    ("radius-short", "with a window one too narrow: it includes neighbours at distance radius",
     lambda v: find_pairs_in_window(v.order, v.width, v.radius - 1), 2),
    ("euclidean", "with the Euclidean distance: the window is a square, so the larger distance counts",
     lambda v: sum(distance**2 for distance in get_distances(v)) <= v.radius**2, 2),
    ("columns-alone", "with only the column distance", lambda v: get_distances(v)[1] <= v.radius, 2),
    ("either-distance", "with the smaller distance: both must be within the window",
     lambda v: np.minimum(*get_distances(v)) <= v.radius, 2),
    ("radius-long", "with a window one too wide", lambda v: find_pairs_in_window(v.order, v.width, v.radius + 1), 2),
    ("diameter", "with a window of radius 2 * radius", lambda v: find_pairs_in_window(v.order, v.width, 2 * v.radius), 2),
    ("half-radius", "with a window of half the radius", lambda v: find_pairs_in_window(v.order, v.width, v.radius // 2), 2),
    ("sign-kept", "with distances that keep their sign: abs() is missing", lambda v: find_pairs_by_signed_distance(v, 0, 1), 2),
    ("sign-of-rows-kept", "with a row distance that keeps its sign: abs() is missing", lambda v: find_pairs_by_signed_distance(v, 0), 2),
    ("sign-of-columns-kept", "with a column distance that keeps its sign: abs() is missing", lambda v: find_pairs_by_signed_distance(v, 1), 2),
    ("rows-added", "with the rows of both cells added, not subtracted", lambda v: find_pairs_by_added_coordinates(v, 0), 2),
    ("columns-added", "with the columns of both cells added, not subtracted", lambda v: find_pairs_by_added_coordinates(v, 1), 2),
    ("divided-by-cells", "with the width divided by the cell: row and column are cell // width and cell % width", swap_division, 2),
    ("far-for-near", "with the pairs that are too far apart", lambda v: ~v.in_window, 2),
    ("without-itself", "without the cell itself: its distance is 0", lambda v: v.in_window & ~np.eye(len(v.in_window), dtype=bool), 2),
    ("earlier-keys-alone", "with only the keys up to the query's step: there is no causal mask", lambda v: np.tril(v.in_window), 2),
    ("order-inverted", "with the inverse of the order: order[s] is the cell at step s",
     lambda v: find_pairs_in_window(np.argsort(v.order), v.width, v.radius), 2),
    ("height-for-width", "with the grid's height instead of its width",
     lambda v: find_pairs_in_window(v.order, len(v.order) // v.width, v.radius), 2),
    ("square-grid", "with sqrt(L) instead of the width",
     lambda v: find_pairs_in_window(v.order, np.asarray(int(len(v.order) ** 0.5)), v.radius), 2),
    ("tile-for-width", "with the tile size instead of the width", lambda v: find_pairs_in_window(v.order, v.tile, v.radius), 2),
    ("order-forgotten-for-queries", "with the query's step instead of its cell: both cells are order[s]", use_step_as_query_cell, 2),
    ("order-forgotten-for-keys", "with the key's step instead of its cell: both cells are order[s]",
     lambda v: use_step_as_query_cell(v).T, 2),
    ("order-forgotten", "in row-major order, without the order",
     lambda v: find_pairs_in_window(np.arange(len(v.order)), v.width, v.radius), 1),
)  # fmt: skip
"""Id, description, the pairs within the wrong window, hint."""
WINDOW_MISTAKES = (
    *(
        Mistake(id, description, {"tiles": lambda v, pairs=pairs: find_tiles(pairs(v), int(v.tile))}, hint)
        for id, description, pairs, hint in WRONG_PAIRS
    ),
    Mistake("every-tile", "with every tile: only tiles with a near pair are needed",
            {"tiles": lambda v: np.ones_like(find_tiles(v.in_window, int(v.tile)))}),
    Mistake("one-tile-short", "without the last tile of keys", {"tiles": drop_last_tile}, 3),
    Mistake("first-of-a-tile",
            "from only the first query and the first key of each tile: any near pair in the tile is enough",
            {"tiles": lambda v: split_into_tiles(v.in_window, int(v.tile))[:, :, 0, 0]}),
    Mistake("every-pair", "with only the tiles in which every pair is near: one near pair is enough", {"tiles": find_full_tiles}),
    Mistake("later-keys-alone",
            "with only the tiles of later keys: earlier keys within the window are visible too",
            {"tiles": lambda v: np.triu(find_tiles(v.in_window, int(v.tile)))}),
)  # fmt: skip

# ---- Attention on gathered tensors --------------------------------------------------------------------------

ATTENTION_MISTAKES = (
    Mistake("permuted-alike", "gathered again instead of scattered",
            {"grad_query": lambda v: gather(v.dQ, v.order), "grad_key": lambda v: gather(v.dK, v.order),
             "grad_value": lambda v: gather(v.dV, v.order)}),
    Mistake("not-put-back",
            "still in step order: the tensor is in cell order, and so must be its gradient",
            {"grad_query": lambda v: v.dQ, "grad_key": lambda v: v.dK, "grad_value": lambda v: v.dV}),
    Mistake("grad-output-not-gathered",
            "with the output's gradient not gathered, still in cell order",
            {"dO": lambda v: v.grad_output}, 1),
    *(
        Mistake(f"delta-{name}", description, {"dot": lambda v, terms=terms: terms(v).sum(-1, keepdims=True)})
        for name, description, terms in (
            ("of-value", "with the row sum of dO * V, not of dO * O", lambda v: v.dO * v.V),
            ("of-grad-output", "with the row sum of dO * dO, not of dO * O", lambda v: v.dO**2),
            ("of-output", "with the row sum of O, without dO", lambda v: v.O),
            ("mean", "with the mean of dO * O over the head dimension, not the sum", lambda v: v.dO * v.O / v.O.shape[-1]),
        )
    ),
    *formulas.list_softmax_backward_mistakes("dS", "P", "dP", "dot", 128),
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)",
            {"dQ": lambda v: v.dS @ v.K, "dK": lambda v: v.dS.swapaxes(-1, -2) @ v.Q}),
    Mistake("scores-not-transposed", "with dS not transposed", {"dK": lambda v: v.scale * (v.dS @ v.Q)}, 3),
)  # fmt: skip


def explain_wrong_curve(quantity: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain a wrong index or inverse by numbers outside the grid, repeated numbers, or a wrong quarter."""
    if quantity not in ("index", "inverse"):
        return None
    position, item = ("step", "cell") if quantity == "index" else ("cell", "step")
    numbers = got.astype(np.int64)
    outside = numbers[(numbers < 0) | (numbers >= len(numbers))]
    if len(outside):
        return Symptom("outside", f"contains {item} {outside[0]}, outside the grid's {len(numbers)}")
    unique, counts = np.unique(numbers, return_counts=True)
    if len(unique) < len(numbers):
        repeated = unique[counts > 1][0]
        indices = " and ".join(str(index) for index in np.flatnonzero(numbers == repeated)[:2])
        missing = np.setdiff1d(np.arange(len(numbers)), unique)[0]
        times = "twice" if counts[counts > 1][0] == 2 else f"{counts[counts > 1][0]} times"
        return Symptom(
            "comes-twice",
            f"is not a permutation: it contains {item} {repeated} {times}, at {position}s {indices}, but not {item} {missing}",
        )
    pair = (numbers, truth.astype(np.int64))
    return explain_wrong_quarter(*(pair if quantity == "index" else map(orders.invert_order, pair)))


def explain_wrong_quarter(order: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain a wrong order by a misplaced quarter or, if there is none, by a wrongly turned one."""
    if len(order) < 4:
        return None
    got, expected = np.split(order, 4), np.split(truth, 4)
    cells = [set(part) for part in expected]
    visited = [cells.index(set(part)) if set(part) in cells else None for part in got]
    for quarter, visited_quarter in enumerate(visited):
        if visited_quarter not in (quarter, None):
            return Symptom(
                "quarter-misplaced", f"visits quarter {visited_quarter} instead of quarter {quarter}"
            )
    for quarter in range(4):
        if visited == [0, 1, 2, 3] and (got[quarter] != expected[quarter]).any():
            return Symptom(
                "quarter-turned",
                f"has the correct cells in quarter {quarter}, but in the wrong order: the quarter is turned wrongly",
            )
    return None


MISTAKES = (*CURVE_MISTAKES, *PERMUTATION_MISTAKES, *WINDOW_MISTAKES, *ATTENTION_MISTAKES)
