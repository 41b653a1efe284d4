"""`p24 --draw`: draw an order of a grid of any size as a line through its cells, in the terminal."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.puzzles.p24 import orders

LARGEST = 1024
"""The largest side that is drawn."""
ENDS = "o"
LINES = {
    frozenset(): ENDS,
    **{frozenset(one): ENDS for one in ("u", "d", "l", "r")},
    frozenset("lr"): "─",
    frozenset("ud"): "│",
    frozenset("rd"): "┌",
    frozenset("ld"): "┐",
    frozenset("ru"): "└",
    frozenset("lu"): "┘",
}
"""The directions in which a cell's neighbours on the line are -> the sign of the cell; an end of a line is a ring."""
DIRECTIONS = {(0, 1): "r", (0, -1): "l", (1, 0): "d", (-1, 0): "u"}
OPPOSITE = {"r": "l", "l": "r", "d": "u", "u": "d"}


def text(order: np.ndarray, width: int) -> Iterator[str]:
    """Yield the lines of a drawing: steps between neighbours are drawn, a jump is a gap."""
    directions: list[set[str]] = [set() for _ in order]
    for here, there in steps(order, width):
        direction = DIRECTIONS.get((there[0] - here[0], there[1] - here[1]))
        if direction:
            directions[here[0] * width + here[1]].add(direction)
            directions[there[0] * width + there[1]].add(OPPOSITE[direction])
    for first in range(0, len(order), width):
        row = directions[first : first + width]
        yield "".join(
            LINES[frozenset(direction)] + ("─" if "r" in direction else " ") for direction in row
        ).rstrip()


def steps(order: np.ndarray, width: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each step as the rows and columns of its two ends."""
    points = np.stack(np.divmod(order, width), 1).tolist()
    yield from pairwise(points)


def numbers(order: np.ndarray, width: int) -> Iterator[str]:
    steps = orders.inverse(order).reshape(-1, width)
    digits = len(str(steps.max()))
    for row in steps.tolist():
        yield " ".join(f"{step:>{digits}}" for step in row)


# ---- The command --------------------------------------------------------------------------------------------


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Draw an order of a grid. Raise BadUse."""
    parser = Parser(prog="p24 --draw", description="Draw an order of a grid.")
    parser.add_argument("--order", default="hilbert", choices=orders.ORDERS, help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[8, 8], metavar=("H", "W"), help="rows and columns: 8 8"
    )
    parser.add_argument("--numbers", action="store_true", help="print the step of each cell, not the line")
    flags = parser.parse_args(arguments)
    height, width = flags.size
    if not (1 <= height <= LARGEST and 1 <= width <= LARGEST):
        raise BadUse(f"--size {height} {width}: sides must be 1 to {LARGEST}")
    order = orders.ORDERS[flags.order](height, width)
    title = f"{flags.order} order of {height} x {width} cells"
    print_lines(console, [title, *(numbers if flags.numbers else text)(order, width)])
    return 0
