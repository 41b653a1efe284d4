"""`p24 --draw` and `p24 --count`: what they print, and what they refuse."""

import numpy as np
import pytest

from harness import cli
from harness.puzzles.p24 import counting, orders


@pytest.fixture
def p24(capsys):
    """Runs `p24` in this process: exit code and all that is printed."""

    def call(*arguments):
        code = cli.main(["p24", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out + err

    return call


def followed(lines):
    """The cells of a drawing, from its first ring on along the lines, by row and column."""
    ways = {"─": "lr", "│": "ud", "┌": "rd", "┐": "ld", "└": "ru", "┘": "lu"}
    moves = {"r": (0, 1), "l": (0, -1), "d": (1, 0), "u": (-1, 0)}
    at, came, cells = (0, 0), None, [(0, 0)]
    while True:
        sign = lines[at[0]][2 * at[1]]
        if sign == "o":
            options = [
                way
                for way, (down, right) in moves.items()
                if (way in "rl" and lines[at[0]][max(0, 2 * at[1] + right) : 2 * at[1] + right + 1] == "─")
                or (
                    way in "ud"
                    and 0 <= at[0] + down < len(lines)
                    and {"u": "d", "d": "u"}[way]
                    in ways.get(lines[at[0] + down][2 * at[1] : 2 * at[1] + 1], "")
                )
            ]
        else:
            options = list(ways[sign])
        options = [way for way in options if way != came]
        if not options or (sign == "o" and len(cells) > 1):
            return cells
        down, right = moves[options[0]]
        came = {"r": "l", "l": "r", "u": "d", "d": "u"}[options[0]]
        at = at[0] + down, at[1] + right
        cells.append(at)


@pytest.mark.parametrize("side", [4, 8, 16])
def test_the_drawn_line_is_the_curve(p24, side):
    code, said = p24("--draw", "--size", side, side)
    title, *lines = said.splitlines()
    assert code == 0 and title == f"hilbert order of {side} x {side} cells"
    assert [row * side + column for row, column in followed(lines)] == orders.hilbert(side, side).tolist()


def test_a_jump_ends_a_line(p24):
    code, said = p24("--draw", "--order", "row-major", "--size", 2, 3)
    assert code == 0 and said.splitlines()[1:] == ["o───o", "o───o"]


def test_steps_as_numbers(p24):
    code, said = p24("--draw", "--size", 4, 4, "--numbers")
    assert code == 0
    printed = np.array([row.split() for row in said.splitlines()[1:]], int)
    assert np.array_equal(np.argsort(printed.ravel()), [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3])


@pytest.mark.parametrize(
    ("side", "radius", "ratio"), [(64, 4, 1.15), (64, 8, 2.10), (128, 4, 2.14), (128, 8, 3.98)]
)
def test_the_counted_ratios(p24, side, radius, ratio):
    code, said = p24("--count", "--sides", side, "--radii", radius)
    row = next(line for line in said.splitlines() if line.startswith("row-major"))
    assert code == 0 and f"{ratio:.2f} x" in row


@pytest.mark.parametrize("name", orders.ORDERS)
def test_a_count_is_what_its_words_say(name):
    """Against sets, cell by cell."""
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
    tiles = [{at // tile for at in need} for need in needs]
    counted = counting.count(order, W, radius, tile)
    assert counted.pairs == sum(map(len, tiles)) and counted.all_pairs == len(groups) ** 2
    assert counted.needed == np.mean([len(need) for need in needs])
    assert counted.runs == np.mean([sum(at - 1 not in need for at in need) for need in needs])
    assert counted.loaded == np.mean([sum(len(groups[j]) for j in each) for each in tiles])


@pytest.mark.parametrize("dim", [1, 2, 4, 24, 64])
def test_sectors_of_a_warp_s_load(dim):
    order = orders.hilbert(8, 8)
    asked = []
    for first in range(0, 64 * dim, 32):
        elements = range(first, first + 32)
        asked.append(len({(int(order[i // dim]) * dim + i % dim) * 4 // 32 for i in elements}))
    assert counting.sectors(order, dim, 4) == np.mean(asked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draw", "--size", 0, 4), "--size 0 4: sides must be 1 to 1024"),
        (("--draw", "--order", "peano"), "invalid choice: 'peano'"),
        (("--count", "--sides", 512), "--sides 512: must be 1 to 256"),
        (("--count", "--tile", 0), "--tile 0: must be at least 1"),
        (("--count", "--radii", -1), "--radii -1: must be at least 0"),
    ],
)
def test_bad_use(p24, arguments, words):
    code, said = p24(*arguments)
    assert code == 2 and said.startswith("error: ") and words in said and said.count("\n") == 1
