"""Traversal orders of a grid: bijectivity, steps between neighbors, and the tiles of a window."""

import numpy as np
import pytest

from harness.puzzles.p24 import orders

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 23, 30)
GRIDS = [(H, W) for H in SIDES for W in SIDES]


def compute_steps(traversal, width):
    """Return the row and column distances of all steps, [cells - 1] each."""
    rows, columns = np.divmod(traversal, width)
    return np.abs(np.diff(rows)), np.abs(np.diff(columns))


@pytest.mark.parametrize("name", orders.ORDERS)
def test_order_is_a_bijection(name):
    for H, W in GRIDS:
        order = orders.ORDERS[name](H, W)
        assert np.array_equal(np.sort(order), np.arange(H * W)), (H, W)
        assert np.array_equal(orders.invert_order(order)[order], np.arange(H * W)), (H, W)
        assert np.array_equal(orders.invert_order(orders.invert_order(order)), order), (H, W)


def test_hilbert_curve_steps_to_neighbors():
    """The curve has one diagonal step if the longer side is odd and the shorter one even."""
    for H, W in GRIDS:
        down, right = compute_steps(orders.make_hilbert_order(H, W), W)
        assert np.maximum(down, right).max(initial=1) == 1, (H, W)
        diagonal = max(H, W) % 2 == 1 and min(H, W) % 2 == 0
        assert (down + right > 1).sum() == diagonal, (H, W)


def test_curve_of_16_cells():
    assert orders.make_hilbert_order(4, 4).tolist() == [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3]


@pytest.mark.parametrize("side", [2, 4, 8, 16, 32])
def test_aligned_runs_fill_aligned_squares(side):
    """On a Hilbert curve each aligned run of 4^k steps fills an aligned square."""
    rows, columns = np.divmod(orders.make_hilbert_order(side, side), side)
    size = 1
    while size < side:
        squares = (rows // size * side + columns // size).reshape(-1, size**2)
        assert (squares == squares[:, :1]).all(), size
        size *= 2


def test_z_order_interleaves_row_and_column_bits():
    assert orders.make_z_order(4, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert orders.make_z_order(2, 3).tolist() == [0, 1, 3, 4, 2, 5]


def test_squares_are_clipped_at_the_edge():
    assert orders.make_tiled_order(3, 3, side=2).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("grid", [(0, 4), (4, 0), (-1, 4)])
@pytest.mark.parametrize("name", orders.ORDERS)
def test_empty_grid_has_an_empty_order(name, grid):
    with pytest.raises(
        ValueError, match=f"height and width: expected at least 1, got {grid[0]} and {grid[1]}"
    ):
        orders.ORDERS[name](*grid)


@pytest.mark.parametrize("name", orders.ORDERS)
@pytest.mark.parametrize(
    ("H", "W", "radius", "tile"), [(8, 8, 1, 16), (5, 7, 2, 8), (3, 29, 4, 16), (6, 6, 9, 5), (4, 4, 0, 16)]
)
def test_window_tiles_match_the_definition(name, H, W, radius, tile):
    """Compare with the definition for each pair of cells."""
    order = orders.ORDERS[name](H, W)
    count = -(-H * W // tile)
    needed = np.zeros((count, count), bool)
    for i, cell in enumerate(order.tolist()):
        for j, neighbour in enumerate(order.tolist()):
            if max(abs(cell // W - neighbour // W), abs(cell % W - neighbour % W)) <= radius:
                needed[i // tile, j // tile] = True
    assert np.array_equal(orders.find_window_tiles(order, W, radius, tile), needed)
