"""The known mistakes of puzzle 24, as changes of its derivation.

Shapes are those of `derivation.py`. If two mistakes give the same values in every failing case, the first is
named.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.p24 import orders
from harness.puzzles.p24.derivation import apart, gather, in_tiles, near, scatter, tiles_with
from harness.spec.derivation import Derivation, Mistake, Step
from harness.spec.puzzle import Arrays, Symptom

PRINTED = (0, 1, 3, 2, 7, 6, 4, 5, 14, 15, 13, 12, 8, 9, 11, 10)
"""The order of a 4 x 4 grid as textbooks print it; its steps 1 and 2 are not neighbours."""


# ---- The curve ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """The turns of a quarter by its bits: which exchange row and column, which count from the other end,
    `edge`(size, side), and which are in the right half."""

    exchange: tuple[int, ...] = (0, 3)
    flip: tuple[int, ...] = (3,)
    edge: Callable[[int, int], int] = lambda size, side: size - 1
    right: tuple[int, ...] = (2, 3)

    def turn(self, quarter: np.ndarray, row: np.ndarray, column: np.ndarray, edge: int):
        """Return row and column inside of a quarter's square, turned like the quarter."""
        for part in ("flip", "exchange"):
            here = np.isin(quarter, getattr(self, part))
            if part == "flip":
                row, column = (np.where(here, edge - each, each) for each in (row, column))
            else:
                row, column = np.where(here, column, row), np.where(here, row, column)
        return row, column


def curve(v: Derivation, turns: Turns) -> np.ndarray:
    """Return the index by bits, from the smallest square to the whole, with other turns."""
    side = int(v.side)
    rest, size = np.arange(side**2), 1
    row = column = np.zeros_like(rest)
    while size < side:
        quarter = rest & 3
        row, column = turns.turn(quarter, row, column, turns.edge(size, side))
        row, column = row + size * np.isin(quarter, (1, 2)), column + size * np.isin(quarter, turns.right)
        rest, size = rest >> 2, 2 * size
    return row * side + column


def step_of(v: Derivation, turns: Turns) -> np.ndarray:
    """Return the step of each cell by bits, from the whole square to the smallest, with other turns."""
    side = int(v.side)
    row, column = np.divmod(np.arange(side**2), side)
    step, size = np.zeros_like(row), side // 2
    while size:
        quarter = 3 * (column // size) ^ (row // size)
        row, column, step = row % size, column % size, 4 * step + quarter
        row, column = turns.turn(quarter, row, column, turns.edge(size, side))
        size //= 2
    return step


def wrong_end(v: Derivation) -> np.ndarray:
    """Return the step of each cell with the quarters' digits in reverse order."""
    step, side = orders.inverse(orders.hilbert(int(v.side), int(v.side))), int(v.side)
    reverse = np.zeros_like(step)
    while side > 1:
        reverse, step, side = 4 * reverse + step % 4, step // 4, side // 2
    return reverse


def hilbert(v: Derivation) -> np.ndarray:
    return orders.hilbert(int(v.side), int(v.side))


def exchange_axes(v: Derivation) -> np.ndarray:
    row, column = np.divmod(hilbert(v), int(v.side))
    return column * int(v.side) + row


def textbook_index(v: Derivation) -> np.ndarray:
    """Return the correct index, but for a 4 x 4 grid the one that textbooks print."""
    return np.array(PRINTED) if v.side == 4 else hilbert(v)


def order_of(index: Step) -> dict[str, Step]:
    """Return steps with another index of all cells, and its inverse."""
    return {"index": index, "inverse": lambda v: orders.inverse(index(v))}


WRONG_TURNS = (
    ("turn-forgotten", "with quarters that are never turned", Turns((), ())),
    ("exchange-forgotten", "with row and column not exchanged in the first and the last quarter", Turns(())),
    ("flip-forgotten",
     "with the last quarter not turned round: row and column are exchanged there, and must be counted from the other end",
     Turns(flip=())),
    ("last-quarter-not-exchanged", "with quarter 3 turned round, but its row and column not exchanged",
     Turns((0,))),
    ("last-quarter-not-turned", "with quarter 3 not turned", Turns((0,), ())),
    ("first-quarter-not-turned", "with quarter 0 not turned", Turns((3,))),
    ("first-quarter-flipped", "with quarter 0 turned round too", Turns(flip=(0, 3))),
    ("flip-in-the-whole", "with the last quarter counted from the far side of the whole square, not of its own",
     Turns(edge=lambda size, side: side - 1)),
    ("end-one-too-far", "with quarter 3 counted from size, not from size - 1, the last one",
     Turns(edge=lambda size, side: size)),
    ("right-half-too-late", "with quarter 2 in the left half: the right one begins with it", Turns(right=(3,))),
)  # fmt: skip
CURVE = (
    Mistake("inverse-for-index",
            "with index and inverse exchanged: one says which cell comes at a step, the other at which step a cell comes",
            order_of(lambda v: orders.inverse(hilbert(v)))),
    Mistake("printed-sequence",
            "with 0 1 3 2 7 6 4 5 ... for 4 x 4: a permutation, but its steps do not go to neighbours",
            order_of(textbook_index)),
    *(
        Mistake(id, words,
                {"index": lambda v, t=turns: curve(v, t), "inverse": lambda v, t=turns: step_of(v, t)},
                3 if "end" in id else 2)
        for id, words, turns in WRONG_TURNS
    ),
    Mistake("row-and-column-exchanged", "with row and column exchanged", order_of(exchange_axes), 3),
    Mistake("digits-reversed",
            "with the quarters' digits in the reverse order: the largest square has the highest two bits",
            order_of(lambda v: orders.inverse(wrong_end(v)))),
    Mistake("z-order", "by the bits of row and column in turn: that is the Z-order, whose steps jump",
            order_of(lambda v: orders.z_order(int(v.side), int(v.side))), 1),
    Mistake("row-by-row", "row by row", order_of(lambda v: v.steps), 1),
)  # fmt: skip

# ---- Permutations -------------------------------------------------------------------------------------------

PERMUTATIONS = (
    Mistake("permuted-alike",
            "gathered once more by the same index: the backward of a permutation is its inverse",
            {"grad_input": lambda v: gather(v.grad_gathered, v.order)}),
    Mistake("not-permuted", "as it came in, in the order of the steps",
            {"grad_input": lambda v: v.grad_gathered}),
    Mistake("permuted-twice", "put back twice",
            {"grad_input": lambda v: scatter(scatter(v.grad_gathered, v.order), v.order)}),
    Mistake("order-backwards", "with the order taken from its end",
            {"grad_input": lambda v: scatter(v.grad_gathered, v.order[::-1])}),
    Mistake("first-batch-alone", "of the first sequence alone, and 0 in the others",
            {"grad_input": lambda v: scatter(v.grad_gathered, v.order) * (np.arange(len(v.input)) == 0)[:, None, None, None]}),
    Mistake("one-column-too-far", "with the columns of a row moved by one",
            {"grad_input": lambda v: np.roll(scatter(v.grad_gathered, v.order), 1, -1)}),
    Mistake("one-head", "with the rows of the first head for all of them",
            {"grad_input": lambda v: np.broadcast_to(scatter(v.grad_gathered, v.order)[:1, :1], v.input.shape)},
            3),
)  # fmt: skip

# ---- Windows ------------------------------------------------------------------------------------------------


def distances(v: Derivation) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances of two steps' cells along rows and along columns, [L, L] each."""
    rows, columns = np.divmod(v.order, v.width)
    return apart(rows), apart(columns)


def wrap_columns(v: Derivation) -> np.ndarray:
    """Return pairs within the window if the left edge of the grid is next to its right one."""
    rows, columns = distances(v)
    return np.maximum(rows, np.minimum(columns, v.width - columns)) <= v.radius


def without_last(v: Derivation) -> np.ndarray:
    """Return the correct tiles without the last one of keys."""
    tiles = tiles_with(v.near, int(v.tile))
    tiles[:, -1] = False
    return tiles


def tiles_of_all(v: Derivation) -> np.ndarray:
    """Return tiles whose every pair is within the window."""
    tile = int(v.tile)
    inside = in_tiles(np.ones_like(v.near), tile)
    return np.asarray((in_tiles(v.near, tile) | ~inside).all((2, 3)))


def one_step_for_cell(v: Derivation) -> np.ndarray:
    """Return pairs within the window if the step of the query is used as its cell, [L, L]."""
    cells, steps = np.divmod(v.order, v.width), np.divmod(np.arange(len(v.order)), v.width)
    far = (np.abs(step[:, None] - cell) for step, cell in zip(steps, cells, strict=True))
    return np.maximum(*far) <= v.radius


def keep_sign(v: Derivation, *parts: int) -> np.ndarray:
    """Return pairs within the window if the distances of some parts, rows 0 and columns 1, keep their sign."""
    cells = np.divmod(v.order, v.width)
    far = (cells[k][:, None] - cells[k] if k in parts else apart(cells[k]) for k in (0, 1))
    return np.maximum(*far) <= v.radius


def add_distances(v: Derivation, part: int) -> np.ndarray:
    """Return pairs within the window if a part, rows 0 or columns 1, of both cells is added, not subtracted."""
    far, cells = list(distances(v)), np.divmod(v.order, v.width)
    far[part] = cells[part][:, None] + cells[part]
    return np.maximum(*far) <= v.radius


def divided_by_cells(v: Derivation) -> np.ndarray:
    """Return pairs within the window if the width is divided by the cell, 0 by the first one."""
    rows, columns = (np.where(v.order, part, 0) for part in np.divmod(v.width, np.where(v.order, v.order, 1)))
    return np.maximum(apart(rows), apart(columns)) <= v.radius


WRONG_PAIRS: tuple[tuple[str, str, Step, int], ...] = (
    ("window-in-one-dimension", "with the window measured along the steps: neighbours on the grid may be far apart on the curve",
     lambda v: apart(np.arange(len(v.order))) <= v.radius, 1),
    ("window-in-cells", "with the window measured along the cells as they are stored: a neighbour below is a whole row away",
     lambda v: apart(v.order) <= v.radius, 1),
    ("wrapped-at-the-edge", "with a window that goes round the edge of the grid", wrap_columns, 2),
    ("diamond", "with the sum of both distances: the window is a square, and the larger of them counts",
     lambda v: sum(distances(v)) <= v.radius, 2),
    ("rows-alone", "with the distance of the rows alone", lambda v: distances(v)[0] <= v.radius, 2),
    ("radius-short", "with a window one short: a neighbour at distance radius belongs to it",
     lambda v: near(v.order, v.width, v.radius - 1), 2),
    ("euclidean", "with the length of the straight line: the window is a square, and the larger of both distances counts",
     lambda v: sum(far**2 for far in distances(v)) <= v.radius**2, 2),
    ("columns-alone", "with the distance of the columns alone", lambda v: distances(v)[1] <= v.radius, 2),
    ("either-distance", "with the smaller of both distances: both must be within the window",
     lambda v: np.minimum(*distances(v)) <= v.radius, 2),
    ("radius-long", "with a window one too wide", lambda v: near(v.order, v.width, v.radius + 1), 2),
    ("diameter", "with a window of radius 2 * radius", lambda v: near(v.order, v.width, 2 * v.radius), 2),
    ("half-radius", "with a window of half the radius", lambda v: near(v.order, v.width, v.radius // 2), 2),
    ("sign-kept", "with distances that keep their sign: abs() is missing", lambda v: keep_sign(v, 0, 1), 2),
    ("sign-of-rows-kept", "with a distance of rows that keeps its sign: abs() is missing", lambda v: keep_sign(v, 0), 2),
    ("sign-of-columns-kept", "with a distance of columns that keeps its sign: abs() is missing", lambda v: keep_sign(v, 1), 2),
    ("rows-added", "with the rows of both cells added, not one minus the other", lambda v: add_distances(v, 0), 2),
    ("columns-added", "with the columns of both cells added, not one minus the other", lambda v: add_distances(v, 1), 2),
    ("divided-by-cells", "with the width divided by the cell: row and column are cell // width and cell % width", divided_by_cells, 2),
    ("far-for-near", "with the pairs that are too far apart", lambda v: ~v.near, 2),
    ("without-itself", "without the cell itself: its distance is 0", lambda v: v.near & ~np.eye(len(v.near), dtype=bool), 2),
    ("earlier-keys-alone", "with the keys up to the query's own step alone: no causal mask is meant", lambda v: np.tril(v.near), 2),
    ("order-inverted", "with the inverse of the order: order[s] is the cell at step s",
     lambda v: near(np.argsort(v.order), v.width, v.radius), 2),
    ("height-for-width", "with the height of the grid for its width",
     lambda v: near(v.order, len(v.order) // v.width, v.radius), 2),
    ("square-grid", "with the side of a square of as many cells for the width",
     lambda v: near(v.order, np.asarray(int(len(v.order) ** 0.5)), v.radius), 2),
    ("tile-for-width", "with the size of a tile for the width", lambda v: near(v.order, v.tile, v.radius), 2),
    ("order-forgotten-for-queries", "with the step itself for the cell of the query: both cells are order[s]", one_step_for_cell, 2),
    ("order-forgotten-for-keys", "with the step itself for the cell of the key: both cells are order[s]",
     lambda v: one_step_for_cell(v).T, 2),
    ("order-forgotten", "of the grid as it is stored, without the order",
     lambda v: near(np.arange(len(v.order)), v.width, v.radius), 1),
)  # fmt: skip
"""(id, words, the pairs within the window, hint)."""
WINDOWS = (
    *(
        Mistake(id, words, {"tiles": lambda v, pairs=pairs: tiles_with(pairs(v), int(v.tile))}, hint)
        for id, words, pairs, hint in WRONG_PAIRS
    ),
    Mistake("every-tile", "with every tile: only those with a near pair are needed",
            {"tiles": lambda v: np.ones_like(tiles_with(v.near, int(v.tile)))}),
    Mistake("one-tile-short", "without the last tile of keys", {"tiles": without_last}, 3),
    Mistake("first-of-a-tile",
            "from the first query and the first key of each tile: one near pair anywhere in it is enough",
            {"tiles": lambda v: in_tiles(v.near, int(v.tile))[:, :, 0, 0]}),
    Mistake("every-pair", "with the tiles whose every pair is near: one is enough", {"tiles": tiles_of_all}),
    Mistake("later-keys-alone",
            "with the tiles of later keys alone: the dK/dV pass walks the same pairs from the other side",
            {"tiles": lambda v: np.triu(tiles_with(v.near, int(v.tile)))}),
)  # fmt: skip

# ---- Attention on gathered tensors --------------------------------------------------------------------------

THROUGH = (
    Mistake("permuted-alike", "gathered once more where it should be put back",
            {"grad_query": lambda v: gather(v.dQ, v.order), "grad_key": lambda v: gather(v.dK, v.order),
             "grad_value": lambda v: gather(v.dV, v.order)}),
    Mistake("not-put-back",
            "in the order of the steps: it is the gradient of a tensor that is stored in the order of the cells",
            {"grad_query": lambda v: v.dQ, "grad_key": lambda v: v.dK, "grad_value": lambda v: v.dV}),
    Mistake("grad-output-not-gathered",
            "with the gradient of the output read as it came, in the order of the cells",
            {"dO": lambda v: v.grad_output}, 1),
    *(
        Mistake(f"delta-{name}", words, {"dot": lambda v, terms=terms: terms(v).sum(-1, keepdims=True)})
        for name, words, terms in (
            ("of-value", "with the row sum of dO * V, not of dO * O", lambda v: v.dO * v.V),
            ("of-grad-output", "with the row sum of dO * dO, not of dO * O", lambda v: v.dO**2),
            ("of-output", "with the row sum of O, without dO", lambda v: v.O),
            ("mean", "with the mean of dO * O over a head, not the sum", lambda v: v.dO * v.O / v.O.shape[-1]),
        )
    ),
    *formulas.softmax_backward("dS", "P", "dP", "dot", 128),
    Mistake("scale-forgotten", "without the scale 1 / sqrt(d)",
            {"dQ": lambda v: v.dS @ v.K, "dK": lambda v: v.dS.swapaxes(-1, -2) @ v.Q}),
    Mistake("scores-not-transposed", "with dS not transposed", {"dK": lambda v: v.scale * (v.dS @ v.Q)}, 3),
)  # fmt: skip


def curve_symptom(quantity: str, arrays: Arrays, got: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain a wrong index or inverse: numbers outside of the grid, repeated, or a quarter in another order."""
    if quantity not in ("index", "inverse"):
        return None
    here, what = ("step", "cell") if quantity == "index" else ("cell", "step")
    numbers = got.astype(np.int64)
    outside = numbers[(numbers < 0) | (numbers >= len(numbers))]
    if len(outside):
        return Symptom("outside", f"names {what} {outside[0]}, which is outside of the grid's {len(numbers)}")
    distinct, count = np.unique(numbers, return_counts=True)
    if len(distinct) < len(numbers):
        twice = distinct[count > 1][0]
        places = " and ".join(str(place) for place in np.flatnonzero(numbers == twice)[:2])
        never = np.setdiff1d(np.arange(len(numbers)), distinct)[0]
        times = "twice" if count[count > 1][0] == 2 else f"{count[count > 1][0]} times"
        return Symptom(
            "comes-twice",
            f"is no order: {what} {twice} comes {times}, at {here}s {places}, and {what} {never} never",
        )
    return wrong_quarter(
        *(each if quantity == "index" else orders.inverse(each) for each in (numbers, truth.astype(np.int64)))
    )


def wrong_quarter(order: np.ndarray, truth: np.ndarray) -> Symptom | None:
    """Explain the quarters of a wrong order: one in another's place, or each in its own and one turned."""
    if len(order) < 4:
        return None
    mine, right = np.split(order, 4), np.split(truth, 4)
    cells = [set(each) for each in right]
    at = [cells.index(set(each)) if set(each) in cells else None for each in mine]
    for quarter, there in enumerate(at):
        if there not in (quarter, None):
            return Symptom(
                "quarter-misplaced",
                f"goes through quarter {there} where it should go through quarter {quarter}",
            )
    for quarter in range(4):
        if at == [0, 1, 2, 3] and (mine[quarter] != right[quarter]).any():
            return Symptom(
                "quarter-turned",
                f"has the right cells in quarter {quarter}, in another order: it is turned otherwise",
            )
    return None


MISTAKES = (*CURVE, *PERMUTATIONS, *WINDOWS, *THROUGH)
