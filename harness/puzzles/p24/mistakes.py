"""The mistakes that people make in puzzle 24, as changes of its derivation.

Shapes are those of `derivation.py`. Where two mistakes give the same values in every failing case, the first is named.
"""

import numpy as np

from harness.nn import orders
from harness.puzzles.p24.derivation import apart, gathered, in_tiles, placed, tiles_with
from harness.spec.derivation import Derivation, Mistake

PRINTED = (0, 1, 3, 2, 7, 6, 4, 5, 14, 15, 13, 12, 8, 9, 11, 10)
"""What texts print for the order of a 4 x 4 grid; the steps 1 and 2 of it are no neighbours."""


# ---- The curve ----------------------------------------------------------------------------------------------


def curve(v: Derivation, *, exchange: bool = True, flip: bool = True, far: bool = False) -> np.ndarray:
    """The index by bits, from the smallest square to the whole, with parts of a quarter's turn left out.

    `exchange` is of row and column in the first and the last quarter, `flip` of both in the last one, in the square of that
    size; `far`: from the side of the whole one.
    """
    side = int(v.side)
    rest, size = np.arange(side**2), 1
    row = column = np.zeros_like(rest)
    while size < side:
        quarter = rest & 3
        right, low = quarter >> 1, (quarter ^ quarter >> 1) & 1
        edge = (side if far else size) - 1
        if flip:
            row, column = (np.where(quarter == 3, edge - each, each) for each in (row, column))
        if exchange:
            row, column = np.where(low, row, column), np.where(low, column, row)
        row, column = row + size * low, column + size * right
        rest, size = rest >> 2, 2 * size
    return row * side + column


def step_of(v: Derivation, *, exchange: bool = True, flip: bool = True) -> np.ndarray:
    """The step of each cell by bits, from the whole square to the smallest, with parts of a quarter's turn left out."""
    side = int(v.side)
    row, column = np.divmod(np.arange(side**2), side)
    step, size = np.zeros_like(row), side // 2
    while size:
        low, right = row // size, column // size
        quarter = 3 * right ^ low
        row, column, step = row % size, column % size, 4 * step + quarter
        if flip:
            row, column = (np.where(quarter == 3, size - 1 - each, each) for each in (row, column))
        if exchange:
            row, column = np.where(low, row, column), np.where(low, column, row)
        size //= 2
    return step


def wrong_end(v: Derivation) -> np.ndarray:
    """The step of each cell with the quarters' digits in the reverse order."""
    step, side = orders.inverse(orders.hilbert(int(v.side), int(v.side))), int(v.side)
    reverse = np.zeros_like(step)
    while side > 1:
        reverse, step, side = 4 * reverse + step % 4, step // 4, side // 2
    return reverse


def hilbert(v: Derivation) -> np.ndarray:
    """The right index."""
    return orders.hilbert(int(v.side), int(v.side))


def exchanged(v: Derivation) -> np.ndarray:
    """The right index with row and column exchanged."""
    row, column = np.divmod(hilbert(v), int(v.side))
    return column * int(v.side) + row


def printed(v: Derivation) -> np.ndarray:
    """The right index, but of a 4 x 4 grid what texts print."""
    return np.array(PRINTED) if v.side == 4 else hilbert(v)


CURVE = (
    Mistake(
        "inverse-for-index",
        "with index and inverse exchanged: one says which cell comes at a step, the other at which step a cell comes",
        {"index": lambda v: orders.inverse(hilbert(v)), "inverse": hilbert},
    ),
    Mistake(
        "printed-sequence",
        "with 0 1 3 2 7 6 4 5 ..., which texts print for 4 x 4: no order whose steps are neighbours",
        {"index": printed, "inverse": lambda v: orders.inverse(printed(v))},
    ),
    Mistake(
        "turn-forgotten",
        "with quarters that are never turned",
        {
            "index": lambda v: curve(v, exchange=False, flip=False),
            "inverse": lambda v: step_of(v, exchange=False, flip=False),
        },
    ),
    Mistake(
        "exchange-forgotten",
        "with row and column not exchanged in the first and the last quarter",
        {"index": lambda v: curve(v, exchange=False), "inverse": lambda v: step_of(v, exchange=False)},
    ),
    Mistake(
        "flip-forgotten",
        "with the last quarter not turned round: row and column are exchanged there, and must be counted from the other end",
        {"index": lambda v: curve(v, flip=False), "inverse": lambda v: step_of(v, flip=False)},
    ),
    Mistake(
        "flip-in-the-whole",
        "with the last quarter counted from the far side of the whole square, not of its own",
        {"index": lambda v: curve(v, far=True)},
        3,
    ),
    Mistake(
        "row-and-column-exchanged",
        "with row and column exchanged",
        {"index": exchanged, "inverse": lambda v: orders.inverse(exchanged(v))},
        3,
    ),
    Mistake(
        "digits-reversed",
        "with the quarters' digits in the reverse order: the largest square has the highest two bits",
        {"inverse": wrong_end},
    ),
    Mistake(
        "z-order",
        "by the bits of row and column in turn: that is the Z-order, whose steps jump",
        {
            "index": lambda v: orders.z_order(int(v.side), int(v.side)),
            "inverse": lambda v: orders.inverse(orders.z_order(int(v.side), int(v.side))),
        },
        1,
    ),
    Mistake("row-by-row", "row by row", {"index": lambda v: v.steps, "inverse": lambda v: v.steps}, 1),
)

# ---- Permutations -------------------------------------------------------------------------------------------

PERMUTATIONS = (
    Mistake(
        "permuted-alike",
        "gathered once more by the same index: the backward of a permutation is its inverse",
        {"grad_input": lambda v: gathered(v.grad_gathered, v.order)},
    ),
    Mistake(
        "not-permuted", "as it came in, in the order of the steps", {"grad_input": lambda v: v.grad_gathered}
    ),
    Mistake(
        "one-head",
        "with the rows of the first head for all of them",
        {"grad_input": lambda v: np.broadcast_to(placed(v.grad_gathered, v.order)[:1, :1], v.input.shape)},
        3,
    ),
)

# ---- Windows ------------------------------------------------------------------------------------------------


def distances(v: Derivation) -> tuple[np.ndarray, np.ndarray]:
    """How far the cells of two steps are apart along rows and along columns, [L, L] each."""
    rows, columns = np.divmod(v.order, v.width)
    return apart(rows), apart(columns)


def wrapped(v: Derivation) -> np.ndarray:
    """Pairs within the window where the left edge of the grid is next to its right one."""
    rows, columns = distances(v)
    return np.maximum(rows, np.minimum(columns, v.width - columns)) <= v.radius


def first_of_each(v: Derivation) -> np.ndarray:
    """Tiles by their first query and their first key alone."""
    return in_tiles(v.near, int(v.tile))[:, :, 0, 0]


def without_last(v: Derivation) -> np.ndarray:
    """The right tiles without the last one of keys."""
    tiles = tiles_with(v.near, int(v.tile))
    tiles[:, -1] = False
    return tiles


def tiles_of_all(v: Derivation) -> np.ndarray:
    """Tiles whose every pair is within the window."""
    tile = int(v.tile)
    inside = in_tiles(np.ones_like(v.near), tile)
    return np.asarray((in_tiles(v.near, tile) | ~inside).all((2, 3)))


WINDOWS = (
    Mistake(
        "window-in-one-dimension",
        "with the window measured along the steps: neighbours on the grid may be far apart on the curve",
        {"tiles": lambda v: tiles_with(apart(np.arange(len(v.order))) <= v.radius, int(v.tile))},
        1,
    ),
    Mistake(
        "window-in-cells",
        "with the window measured along the cells as they are stored: a neighbour below is a whole row away",
        {"tiles": lambda v: tiles_with(apart(v.order) <= v.radius, int(v.tile))},
        1,
    ),
    Mistake(
        "wrapped-at-the-edge",
        "with a window that goes round the edge of the grid",
        {"tiles": lambda v: tiles_with(wrapped(v), int(v.tile))},
    ),
    Mistake(
        "diamond",
        "with the sum of both distances: the window is a square, and the larger of them counts",
        {"tiles": lambda v: tiles_with(sum(distances(v)) <= v.radius, int(v.tile))},
    ),
    Mistake(
        "rows-alone",
        "with the distance of the rows alone",
        {"tiles": lambda v: tiles_with(distances(v)[0] <= v.radius, int(v.tile))},
    ),
    Mistake(
        "radius-short",
        "with a window one short: a neighbour at distance radius belongs to it",
        {"tiles": lambda v: tiles_with(np.maximum(*distances(v)) < v.radius, int(v.tile))},
    ),
    Mistake("one-tile-short", "without the last tile of keys", {"tiles": without_last}, 3),
    Mistake(
        "first-of-a-tile",
        "from the first query and the first key of each tile: one near pair anywhere in it is enough",
        {"tiles": first_of_each},
    ),
    Mistake(
        "every-pair",
        "with the tiles whose every pair is near: one is enough",
        {"tiles": tiles_of_all},
    ),
    Mistake(
        "later-keys-alone",
        "with the tiles of later keys alone: the dK/dV pass walks the same pairs from the other side",
        {"tiles": lambda v: np.triu(tiles_with(v.near, int(v.tile)))},
    ),
    Mistake(
        "order-forgotten",
        "of the grid as it is stored, without the order",
        {
            "tiles": lambda v: orders.window_tiles(
                np.arange(len(v.order)), int(v.width), int(v.radius), int(v.tile)
            )
        },
        1,
    ),
)

# ---- Attention on gathered tensors --------------------------------------------------------------------------

THROUGH = (
    Mistake(
        "permuted-alike",
        "gathered once more where it should be put back",
        {
            "grad_query": lambda v: gathered(v.dQ, v.order),
            "grad_key": lambda v: gathered(v.dK, v.order),
            "grad_value": lambda v: gathered(v.dV, v.order),
        },
    ),
    Mistake(
        "not-put-back",
        "in the order of the steps: it is the gradient of a tensor that is stored in the order of the cells",
        {"grad_query": lambda v: v.dQ, "grad_key": lambda v: v.dK, "grad_value": lambda v: v.dV},
    ),
    Mistake(
        "grad-output-not-gathered",
        "with the gradient of the output read as it came, in the order of the cells",
        {"dO": lambda v: v.grad_output},
        1,
    ),
    Mistake(
        "row-sum-forgotten",
        "without delta, the row sum of dO * O",
        {"dot": lambda v: np.zeros_like(v.O[..., :1])},
    ),
    Mistake(
        "scale-forgotten",
        "without the scale 1 / sqrt(d)",
        {"dQ": lambda v: v.dS @ v.K, "dK": lambda v: v.dS.swapaxes(-1, -2) @ v.Q},
    ),
    Mistake(
        "scores-not-transposed",
        "with dS not transposed",
        {"dK": lambda v: v.scale * (v.dS @ v.Q)},
        3,
    ),
)

MISTAKES = (*CURVE, *PERMUTATIONS, *WINDOWS, *THROUGH)
