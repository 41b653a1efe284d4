"""`p24 --draw`: draw a traversal order of a grid of any size as a path through its cells."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import UsageError
from harness.puzzles.p24 import orders

MAX_SIDE = 1024
"""The largest side that is drawn."""
ENDPOINT = "o"
CHARACTERS = {
    frozenset(): ENDPOINT,
    **{frozenset(direction): ENDPOINT for direction in ("u", "d", "l", "r")},
    frozenset("lr"): "─",
    frozenset("ud"): "│",
    frozenset("rd"): "┌",
    frozenset("ld"): "┐",
    frozenset("ru"): "└",
    frozenset("lu"): "┘",
}
"""Directions from a cell to its neighbours on the path -> its character; the ends are rings."""
DIRECTIONS = {(0, 1): "r", (0, -1): "l", (1, 0): "d", (-1, 0): "u"}
OPPOSITE = {"r": "l", "l": "r", "d": "u", "u": "d"}


def draw(order: np.ndarray, width: int) -> Iterator[str]:
    """Yield the lines of a drawing; steps between neighbours are drawn, jumps are gaps."""
    directions: list[set[str]] = [set() for _ in order]
    points = np.stack(np.divmod(order, width), 1).tolist()
    for cell, next_cell in pairwise(points):
        direction = DIRECTIONS.get((next_cell[0] - cell[0], next_cell[1] - cell[1]))
        if direction:
            directions[cell[0] * width + cell[1]].add(direction)
            directions[next_cell[0] * width + next_cell[1]].add(OPPOSITE[direction])
    for first in range(0, len(order), width):
        row = directions[first : first + width]
        cells = (CHARACTERS[frozenset(sides)] + ("─" if "r" in sides else " ") for sides in row)
        yield "".join(cells).rstrip()


def format_numbers(order: np.ndarray, width: int) -> Iterator[str]:
    steps = orders.invert_order(order).reshape(-1, width)
    digits = len(str(steps.max()))
    for row in steps.tolist():
        yield " ".join(f"{step:>{digits}}" for step in row)


# ---- The command --------------------------------------------------------------------------------------------


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    parser = Parser(prog="p24 --draw", description="Draw an order of a grid.")
    parser.add_argument("--order", default="hilbert", choices=orders.ORDERS, help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[8, 8], metavar=("H", "W"), help="rows and columns: 8 8"
    )
    parser.add_argument(
        "--numbers", action="store_true", help="print each cell's step instead of drawing the curve"
    )
    flags = parser.parse_args(arguments)
    height, width = flags.size
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise UsageError(f"--size {height} {width}: sides must be 1 to {MAX_SIDE}")
    order = orders.ORDERS[flags.order](height, width)
    title = f"{flags.order} order of {height} x {width} cells"
    print_lines(console, [title, *(format_numbers if flags.numbers else draw)(order, width)])
    return 0
