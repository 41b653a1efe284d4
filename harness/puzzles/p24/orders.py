"""Orders of the cells of a grid by name: row by row, along the Z-order and the Hilbert curve, and square by square.

What an order is, its inverse, and the tiles that a window needs of it: `harness.nn.orders`. Loads NumPy alone.
"""

from collections.abc import Callable

import numpy as np

from harness.nn.orders import hilbert, inverse, shifted, sides, window_tiles

__all__ = [
    "ORDERS",
    "SQUARE",
    "hilbert",
    "inverse",
    "row_major",
    "shifted",
    "tiled",
    "window_tiles",
    "z_order",
]
SQUARE = 8
"""Side of the squares of the tiled order: 64 positions."""


def row_major(height: int, width: int) -> np.ndarray:
    """Row by row: the cells as they are stored."""
    height, width = sides(height, width)
    return np.arange(height * width)


def z_order(height: int, width: int) -> np.ndarray:
    """By Morton code, the bits of row and column in turn (Morton, 1966); the codes outside of the grid are left out."""
    rows, columns = np.divmod(row_major(height, width), width)
    code = np.zeros_like(rows)
    for bit in range(max(height, width).bit_length()):
        code |= (rows >> bit & 1) << 2 * bit + 1 | (columns >> bit & 1) << 2 * bit
    return np.argsort(code)


def tiled(height: int, width: int, side: int = SQUARE) -> np.ndarray:
    """Square by square, row by row in each; squares at the right and at the bottom may be cut off."""
    rows, columns = np.divmod(row_major(height, width), width)
    return np.lexsort((columns, rows, columns // side, rows // side))


ORDERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "row-major": row_major,
    "z-order": z_order,
    "hilbert": hilbert,
    "tiled": tiled,
}
"""The orders by name."""
