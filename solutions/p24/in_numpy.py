"""Puzzle 24 in NumPy: the Hilbert curve by bits, the gradient of a permutation, and the tiles that a window needs.

One function per gate, checked separately; its arguments are passed by name. Cells are numbered row by row,
 cell = row * width + column; order[i] is the cell at step i. `workbook p24 --rung numpy` checks it, `--draw`
draws any order.
"""

import numpy as np


def index(steps, side):
    """Return the cell at each step of the curve through side x side cells, a power of two: [side * side].

    Two bits of a step select a quarter of a square: 0 top left, 1 bottom left, 2 bottom right, 3 top right. The curve
    is transformed in two quarters: in the first, row and column are swapped; in the last, both are also counted from
    the other end.
    """
    rest, size = steps, 1
    row = column = np.zeros_like(steps)
    while size < side:
        # BLANK-START index: from quarter = rest & 3, turn the square of `size` so far, then move it to its quarter
        quarter = rest & 3
        right = quarter >> 1
        low = (quarter ^ right) & 1
        row, column = (np.where(quarter == 3, size - 1 - each, each) for each in (row, column))
        row, column = np.where(low, row, column), np.where(low, column, row)
        row, column = row + size * low, column + size * right
        # BLANK-END index
        rest, size = rest >> 2, 2 * size
    return row * side + column


def inverse(cells, side):
    """Return the step of each cell, [side * side]: the inverse of `index`, from the largest square to the smallest."""
    row, column = np.divmod(cells, side)
    step, size = np.zeros_like(cells), side // 2
    while size > 0:
        # BLANK-START inverse: the quarter's number, put after step's digits; then row and column inside it, turned back
        low, right = row // size, column // size
        quarter = 3 * right ^ low
        step = 4 * step + quarter
        row, column = row % size, column % size
        row, column = (np.where(quarter == 3, size - 1 - each, each) for each in (row, column))
        row, column = np.where(low, row, column), np.where(low, column, row)
        # BLANK-END inverse
        size = size // 2
    return step


def gather(tensor, order):
    """Return rows in the order of the steps, [B, N, L, d]: row order[i] becomes row i. (Provided.)"""
    return tensor[:, :, order]


def dgather(grad_gathered, order):
    """Return the gradient of the tensor that was gathered, [B, N, L, d]."""
    grad_input = np.zeros_like(grad_gathered)
    # BLANK-START dgather: where did row i of the gathered tensor come from?
    grad_input[:, :, order] = grad_gathered
    # BLANK-END dgather
    return grad_input


def tiles(order, width, radius, tile):
    """Return which tiles of keys each tile of queries needs, [t, t]: those with a pair within `radius` on the grid.

    A tile is `tile` consecutive positions of the order. The distance of two cells is the larger of the distances of
    their rows and of their columns, and a window ends at the edge of the grid.
    """
    L = len(order)
    count = -(-L // tile)
    needed = np.zeros((count, count), bool)
    # BLANK-START tiles: for every pair of tiles, whether any pair of their positions is near
    rows, columns = np.divmod(order, width)
    down = np.abs(rows[:, None] - rows)
    right = np.abs(columns[:, None] - columns)
    queries, keys = np.nonzero(np.maximum(down, right) <= radius)
    needed[queries // tile, keys // tile] = True
    # BLANK-END tiles
    return needed
