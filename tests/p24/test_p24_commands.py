"""The output of `p24 --draw` and `p24 --count`, and rejected arguments."""

import numpy as np
import pytest

from harness import cli
from harness.puzzles.p24 import counting, orders


@pytest.fixture
def p24(capsys):
    """Return a function that runs `p24` in this process and returns exit code and output."""

    def call(*arguments):
        code = cli.main(["p24", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out + err

    return call


def trace_curve(lines):
    """Follow a drawing's lines from the first ring; return the cells as (row, column)."""
    directions = {"─": "lr", "│": "ud", "┌": "rd", "┐": "ld", "└": "ru", "┘": "lu"}
    moves = {"r": (0, 1), "l": (0, -1), "d": (1, 0), "u": (-1, 0)}
    cell, previous, cells = (0, 0), None, [(0, 0)]
    while True:
        symbol = lines[cell[0]][2 * cell[1]]
        if symbol == "o":
            options = [
                direction
                for direction, (down, right) in moves.items()
                if (
                    direction in "rl"
                    and lines[cell[0]][max(0, 2 * cell[1] + right) : 2 * cell[1] + right + 1] == "─"
                )
                or (
                    direction in "ud"
                    and 0 <= cell[0] + down < len(lines)
                    and {"u": "d", "d": "u"}[direction]
                    in directions.get(lines[cell[0] + down][2 * cell[1] : 2 * cell[1] + 1], "")
                )
            ]
        else:
            options = list(directions[symbol])
        options = [direction for direction in options if direction != previous]
        if not options or (symbol == "o" and len(cells) > 1):
            return cells
        down, right = moves[options[0]]
        previous = {"r": "l", "l": "r", "u": "d", "d": "u"}[options[0]]
        cell = cell[0] + down, cell[1] + right
        cells.append(cell)


@pytest.mark.parametrize("side", [4, 8, 16])
def test_drawn_line_follows_the_curve(p24, side):
    code, output = p24("--draw", "--size", side, side)
    title, *lines = output.splitlines()
    assert code == 0 and title == f"hilbert order of {side} x {side} cells"
    assert [row * side + column for row, column in trace_curve(lines)] == orders.make_hilbert_order(
        side, side
    ).tolist()


def test_steps_between_distant_cells_are_not_drawn(p24):
    code, output = p24("--draw", "--order", "row-major", "--size", 2, 3)
    assert code == 0 and output.splitlines()[1:] == ["o───o", "o───o"]


def test_steps_are_drawn_as_numbers(p24):
    code, output = p24("--draw", "--size", 4, 4, "--numbers")
    assert code == 0
    printed = np.array([row.split() for row in output.splitlines()[1:]], int)
    assert np.array_equal(np.argsort(printed.ravel()), [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3])


@pytest.mark.parametrize(
    ("side", "radius", "ratio"), [(64, 4, 1.15), (64, 8, 2.10), (128, 4, 2.14), (128, 8, 3.98)]
)
def test_count_prints_the_ratio_to_row_major(p24, side, radius, ratio):
    code, output = p24("--count", "--sides", side, "--radii", radius)
    row = next(line for line in output.splitlines() if line.startswith("row-major"))
    assert code == 0 and f"{ratio:.2f} x" in row


@pytest.mark.parametrize("name", orders.ORDERS)
def test_counts_match_sets_of_cells(name):
    """Compare with the set of required cells of each tile."""
    H, W, radius, tile = 7, 9, 2, 8
    order = orders.ORDERS[name](H, W)
    groups = [order[first : first + tile].tolist() for first in range(0, H * W, tile)]
    step = {cell: i for i, cell in enumerate(order.tolist())}
    needs = [
        {
            step[row * W + column]
            for cell in group
            for row in range(max(0, cell // W - radius), min(H, cell // W + radius + 1))
            for column in range(max(0, cell % W - radius), min(W, cell % W + radius + 1))
        }
        for group in groups
    ]
    tiles = [{position // tile for position in need} for need in needs]
    costs = counting.count_costs(order, W, radius, tile)
    assert costs.tile_pairs == sum(map(len, tiles)) and costs.max_tile_pairs == len(groups) ** 2
    assert costs.needed_keys == np.mean([len(need) for need in needs])
    assert costs.key_runs == np.mean([sum(at - 1 not in need for at in need) for need in needs])
    assert costs.loaded_keys == np.mean([sum(len(groups[j]) for j in members) for members in tiles])


@pytest.mark.parametrize("dim", [1, 2, 4, 24, 64])
def test_sectors_of_a_warp_load_are_counted(dim):
    order = orders.make_hilbert_order(8, 8)
    sector_counts = []
    for first in range(0, 64 * dim, 32):
        elements = range(first, first + 32)
        sector_counts.append(len({(int(order[i // dim]) * dim + i % dim) * 4 // 32 for i in elements}))
    assert counting.count_sectors(order, dim, 4) == np.mean(sector_counts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draw", "--size", 0, 4), "--size 0 4: sides must be 1 to 1024"),
        (("--draw", "--order", "peano"), "invalid choice: 'peano'"),
        (("--count", "--sides", 512), "--sides 512: must be 1 to 256"),
        (("--count", "--tile", 0), "--tile 0: must be at least 1"),
        (("--count", "--radii", -1), "--radii -1: must be at least 0"),
    ],
)
def test_invalid_arguments_are_reported(p24, arguments, message):
    code, output = p24(*arguments)
    assert code == 2 and output.startswith("error: ") and message in output and output.count("\n") == 1
