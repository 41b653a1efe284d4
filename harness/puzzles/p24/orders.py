"""Orders of the cells of a grid: row-major, Z-order, Hilbert, and tiled; and which tiles of an order a window
needs.

An order of a grid of `height` rows and `width` columns is an int64 array [height * width]: the cell, row *
width + column, at each step. Its inverse, the step of each cell, is `inverse`. Importing it loads only NumPy.
"""

import functools
from collections.abc import Callable

import numpy as np

SQUARE = 8
"""Side of the squares of the tiled order: 64 positions."""
Point = tuple[int, int]
"""A row and a column, or a step of so many."""


def check_grid(height: int, width: int) -> None:
    """Raise ValueError for a grid without cells."""
    if min(height, width) < 1:
        raise ValueError(f"height and width: expected at least 1, got {height} and {width}")


def inverse(order: np.ndarray) -> np.ndarray:
    """Return the step of each cell, [cells]."""
    steps = np.empty_like(order)
    steps[order] = np.arange(len(order))
    return steps


# ---- The curve -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def hilbert(height: int, width: int) -> np.ndarray:
    """Return the order of a Hilbert curve, generalised to rectangles as in Červený, "Generalized Hilbert
    space-filling curve" (2018).

    For a square whose side is a power of two it is Hilbert's own. Neighbours on the curve are neighbours on
    the grid, but for one diagonal step where the longer side is odd and the shorter is even. It begins at the
    top left and ends at the other end of the longer side, the top right of a square. Do not write to the
    array.
    """
    check_grid(height, width)
    right, down = (0, 1), (1, 0)
    if width >= height:
        points = walk((0, 0), right, width, down, height)
    else:
        points = walk((0, 0), down, height, right, width)
    order = np.array([row * width + column for row, column in points])
    order.setflags(write=False)
    return order


def walk(start: Point, along: Point, length: int, across: Point, depth: int) -> list[Point]:
    """Return the cells of a rectangle, from the corner `start` to the corner at the other end of its side
    `along`.

    `along` and `across` are unit steps, `length` and `depth` the numbers of cells in these directions. A long
    rectangle is cut in two along its length; any other is walked in three parts: away from the side, along
    the far half, and back to the side. Parts begin after an even number of cells where possible, so that the
    ends meet.
    """
    if depth == 1:
        return [move_point(start, along, i) for i in range(length)]
    if length == 1:
        return [move_point(start, across, i) for i in range(depth)]
    half = even_half(length)
    if 2 * length > 3 * depth:
        middle = move_point(start, along, half)
        return walk(start, along, half, across, depth) + walk(middle, along, length - half, across, depth)
    low = even_half(depth)
    end = move_point(move_point(start, along, length - 1), across, low - 1)
    back = (-along[0], -along[1])
    return (
        walk(start, across, low, along, half)
        + walk(move_point(start, across, low), along, length, across, depth - low)
        + walk(end, (-across[0], -across[1]), low, back, length - half)
    )


def move_point(point: Point, step: Point, count: int) -> Point:
    """Return a point moved by `count` steps."""
    return point[0] + count * step[0], point[1] + count * step[1]


def even_half(size: int) -> int:
    """Return about a half, even where the size is more than 2."""
    half = size // 2
    return half + half % 2 if size > 2 else half


# ---- All orders --------------------------------------------------------------------------------------------


def row_major(height: int, width: int) -> np.ndarray:
    """Return the row-major order, in which cells are stored."""
    check_grid(height, width)
    return np.arange(height * width)


def z_order(height: int, width: int) -> np.ndarray:
    """Return the order by Morton code, row and column bits interleaved (Morton, 1966), without codes outside
    of the grid."""
    rows, columns = np.divmod(row_major(height, width), width)
    code = np.zeros_like(rows)
    for bit in range(max(height, width).bit_length()):
        code |= (rows >> bit & 1) << 2 * bit + 1 | (columns >> bit & 1) << 2 * bit
    return np.argsort(code)


def order_tiled(height: int, width: int, side: int = SQUARE) -> np.ndarray:
    """Return the order by squares, row-major in each; squares at the right and at the bottom may be cut off."""
    rows, columns = np.divmod(row_major(height, width), width)
    return np.lexsort((columns, rows, columns // side, rows // side))


ORDERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "row-major": row_major,
    "z-order": z_order,
    "hilbert": hilbert,
    "tiled": order_tiled,
}
"""The orders by name."""


# ---- Windows ------------------------------------------------------------------------------------------------


def window_tiles(order: np.ndarray, width: int, radius: int, tile: int) -> np.ndarray:
    """Return which tiles of queries need which tiles of keys, if a position sees all cells up to `radius`
    away.

    The distance of two cells is the larger of those of their rows and of their columns; a window ends at the
    grid's edge.

    Args:
        order: [cells], the cell of each position.
        width: Columns of the grid.
        radius: At least 0.
        tile: Positions in a tile; the last may have fewer.

    Returns:
        bool [tiles, tiles], the query's tile first.
    """
    count = -(-len(order) // tile)
    tiles = np.zeros((count, count), bool)
    owner = inverse(order) // tile
    for there, here in neighbour_values(owner.reshape(-1, width), radius):
        tiles[here, there] = True
    return tiles


def neighbour_values(grid: np.ndarray, radius: int):
    """Yield the values of a grid [rows, columns] at each neighbour and at the cell, neighbour first, by
    neighbour."""
    rows, columns = grid.shape
    for down in range(-min(radius, rows - 1), min(radius, rows - 1) + 1):
        for right in range(-min(radius, columns - 1), min(radius, columns - 1) + 1):
            yield grid[part(down, rows), part(right, columns)], grid[part(-down, rows), part(-right, columns)]


def part(shift: int, size: int) -> slice:
    """Return the indices of an axis that are left after a shift."""
    return slice(max(0, shift), size + min(0, shift))
