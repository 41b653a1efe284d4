"""Traversal orders of a grid's cells, and the tiles that a window needs in each. Imports only NumPy.

An order of `height` rows and `width` columns is int64 [height * width]: the cell, row * width + column, at
each step. `invert_order` returns the step of each cell.
"""

import functools
from collections.abc import Callable

import numpy as np

SQUARE_SIDE = 8
"""Side of the tiled order's squares, which have 64 positions."""
Point = tuple[int, int]
"""A row and a column, or a step in rows and columns."""


def check_grid(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise ValueError(f"height and width: expected at least 1, got {height} and {width}")


def invert_order(order: np.ndarray) -> np.ndarray:
    steps = np.empty_like(order)
    steps[order] = np.arange(len(order))
    return steps


# ---- The curve -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def make_hilbert_order(height: int, width: int) -> np.ndarray:
    """Return the order of a Hilbert curve on a rectangle, after Červený, "Generalized Hilbert space-filling
    curve" (2018). The array is read-only.

    For a square whose side is a power of two, it is Hilbert's original curve. Neighbours on the curve are
    neighbours on the grid, except for one diagonal step if the longer side is odd and the shorter even. The
    curve begins at the top left and ends at the other end of the longer side, for a square at the top right.
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
    """Return the cells of a rectangle, from the corner `start` to the other end of its side `along`.

    `along` and `across` are unit steps, `length` and `depth` the numbers of cells in these directions. A long
    rectangle is halved along its length; any other is walked in three parts: away from the side, along the
    far half, and back to the side. Parts have an even number of cells if possible, so that their ends meet.
    """
    if depth == 1:
        return [move_point(start, along, i) for i in range(length)]
    if length == 1:
        return [move_point(start, across, i) for i in range(depth)]
    half = get_even_half(length)
    if 2 * length > 3 * depth:
        middle = move_point(start, along, half)
        return walk(start, along, half, across, depth) + walk(middle, along, length - half, across, depth)
    low = get_even_half(depth)
    end = move_point(move_point(start, along, length - 1), across, low - 1)
    reverse = (-along[0], -along[1])
    return (
        walk(start, across, low, along, half)
        + walk(move_point(start, across, low), along, length, across, depth - low)
        + walk(end, (-across[0], -across[1]), low, reverse, length - half)
    )


def move_point(point: Point, step: Point, count: int) -> Point:
    return point[0] + count * step[0], point[1] + count * step[1]


def get_even_half(size: int) -> int:
    """Return half the size, rounded up to an even number if the size is more than 2."""
    half = size // 2
    return half + half % 2 if size > 2 else half


# ---- All orders --------------------------------------------------------------------------------------------


def make_row_major_order(height: int, width: int) -> np.ndarray:
    check_grid(height, width)
    return np.arange(height * width)


def make_z_order(height: int, width: int) -> np.ndarray:
    """Return the cells sorted by their Morton code (Morton, 1966)."""
    rows, columns = np.divmod(make_row_major_order(height, width), width)
    code = np.zeros_like(rows)
    for bit in range(max(height, width).bit_length()):
        code |= (rows >> bit & 1) << 2 * bit + 1 | (columns >> bit & 1) << 2 * bit
    return np.argsort(code)


def make_tiled_order(height: int, width: int, side: int = SQUARE_SIDE) -> np.ndarray:
    """Return the cells square by square, row-major within each; squares at the right and bottom may be cut off."""
    rows, columns = np.divmod(make_row_major_order(height, width), width)
    return np.lexsort((columns, rows, columns // side, rows // side))


ORDERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "row-major": make_row_major_order,
    "z-order": make_z_order,
    "hilbert": make_hilbert_order,
    "tiled": make_tiled_order,
}


# ---- Windows ------------------------------------------------------------------------------------------------


def find_window_tiles(order: np.ndarray, width: int, radius: int, tile: int) -> np.ndarray:
    """Return which key tiles each query tile needs: bool [query tiles, key tiles].

    `order` [cells] is the cell at each position, in a grid of `width` columns. A position sees all cells of the
    grid up to `radius` rows and columns away. The last tile may have fewer than `tile` positions.
    """
    num_tiles = -(-len(order) // tile)
    tiles = np.zeros((num_tiles, num_tiles), bool)
    tile_of_cell = invert_order(order) // tile
    for neighbour, cell in iterate_neighbours(tile_of_cell.reshape(-1, width), radius):
        tiles[cell, neighbour] = True
    return tiles


def iterate_neighbours(grid: np.ndarray, radius: int):
    """Yield the grid's values at the neighbours and at the cells, for each shift within `radius`."""
    rows, columns = grid.shape
    for down in range(-min(radius, rows - 1), min(radius, rows - 1) + 1):
        for right in range(-min(radius, columns - 1), min(radius, columns - 1) + 1):
            yield (
                grid[get_shifted_slice(down, rows), get_shifted_slice(right, columns)],
                grid[get_shifted_slice(-down, rows), get_shifted_slice(-right, columns)],
            )


def get_shifted_slice(shift: int, size: int) -> slice:
    return slice(max(0, shift), size + min(0, shift))
