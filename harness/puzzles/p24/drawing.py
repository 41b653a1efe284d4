"""`p24 --draw`: an order of a grid of any size as a line through its cells, in the terminal or as an SVG.

With a radius and a tile the SVG shows what attention in a window reads: the cells of one tile of queries, the keys that they
see, and the other keys of the tiles that are loaded for them.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np
from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.nn import orders
from harness.puzzles.p24.counting import keys_of_tiles
from harness.toolchain.disk import write_target

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
PITCH = 12
"""Units of an SVG from cell to cell."""
SHADES = {"query": 1.0, "seen": 0.6, "loaded": 0.25, "other": 0.06}
"""What a cell is to a tile of queries -> how dark its square is: a drawing has one colour, that of the page's text."""


# ---- In the terminal ----------------------------------------------------------------------------------------


def text(order: np.ndarray, width: int) -> Iterator[str]:
    """The lines of a drawing: steps between neighbours are lines, a jump ends one."""
    ways: list[set[str]] = [set() for _ in order]
    for here, there in steps(order, width):
        way = DIRECTIONS.get((there[0] - here[0], there[1] - here[1]))
        if way:
            ways[here[0] * width + here[1]].add(way)
            ways[there[0] * width + there[1]].add(OPPOSITE[way])
    for first in range(0, len(order), width):
        row = ways[first : first + width]
        yield "".join(LINES[frozenset(way)] + ("─" if "r" in way else " ") for way in row).rstrip()


def steps(order: np.ndarray, width: int) -> Iterator[tuple[list[int], list[int]]]:
    """Each step as the row and column where it begins and where it ends."""
    points = np.stack(np.divmod(order, width), 1).tolist()
    yield from pairwise(points)


def numbers(order: np.ndarray, width: int) -> Iterator[str]:
    """The step at which each cell comes, as a grid of numbers."""
    steps = orders.inverse(order).reshape(-1, width)
    digits = len(str(steps.max()))
    for row in steps.tolist():
        yield " ".join(f"{step:>{digits}}" for step in row)


# ---- As an SVG ----------------------------------------------------------------------------------------------


def curve(order: np.ndarray, width: int) -> Iterator[str]:
    """The line through the cells; a step to a cell that is no neighbour is thin and broken."""
    run: list[list[int]] = [list(map(int, divmod(int(order[0]), width)))]
    for here, there in steps(order, width):
        if max(abs(here[0] - there[0]), abs(here[1] - there[1])) > 1:
            yield polyline(run)
            yield polyline([here, there], 'stroke-width="0.7" stroke-dasharray="2 2"')
            run = []
        run.append(there)
    yield polyline(run)


def polyline(points: Sequence[Sequence[int]], style: str = 'stroke-width="2"') -> str:
    """A line through the middles of cells."""
    middle = PITCH // 2
    path = " ".join(f"{column * PITCH + middle},{row * PITCH + middle}" for row, column in points)
    return f'<polyline fill="none" stroke="currentColor" {style} points="{path}"/>'


def accesses(order: np.ndarray, width: int, radius: int, tile: int, which: int) -> Iterator[str]:
    """The cells by what they are to a tile of queries: its own, the keys that it sees, and the rest of the tiles of these.

    Cells of one kind that are beside each other are one bar.
    """
    step = orders.inverse(order)
    visible = keys_of_tiles(order, width, radius, tile)[which]
    loaded = np.isin(np.arange(len(order)) // tile, np.flatnonzero(visible) // tile)

    def kind(at: int) -> str:
        return (
            "query" if at // tile == which else "seen" if visible[at] else "loaded" if loaded[at] else "other"
        )

    for row, steps_of_row in enumerate(step.reshape(-1, width).tolist()):
        column = 0
        for name, cells in groupby(map(kind, steps_of_row)):
            count = sum(1 for _ in cells)
            yield (
                f'<rect fill-opacity="{SHADES[name]}" x="{column * PITCH}" y="{row * PITCH}" '
                f'width="{count * PITCH}" height="{PITCH}"/>'
            )
            column += count


def svg(parts: Iterator[str], height: int, width: int, title: str) -> str:
    """A drawing of a grid."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * PITCH} {height * PITCH}" role="img" '
        f'fill="currentColor"><title>{title}</title>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


# ---- The command --------------------------------------------------------------------------------------------


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Draws an order of a grid. Raises BadUse."""
    parser = Parser(prog="p24 --draw", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--order", default="hilbert", choices=orders.ORDERS, help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[8, 8], metavar=("H", "W"), help="rows and columns: 8 8"
    )
    parser.add_argument("--numbers", action="store_true", help="print the step of each cell, not the line")
    parser.add_argument("--svg", metavar="FILE", help="write an SVG")
    parser.add_argument(
        "--radius", type=int, metavar="R", help="in the SVG, what a window of this radius reads"
    )
    parser.add_argument("--tile", type=int, default=64, metavar="T", help="positions in a tile: %(default)s")
    parser.add_argument(
        "--which", type=int, metavar="I", help="the tile of queries that is shown: the middle one"
    )
    flags = parser.parse_args(arguments)
    height, width = flags.size
    if not (1 <= height <= LARGEST and 1 <= width <= LARGEST):
        raise BadUse(f"--size {height} {width}: sides must be 1 to {LARGEST}")
    order = orders.ORDERS[flags.order](height, width)
    title = f"{flags.order} order of {height} x {width} cells"
    if flags.svg is None:
        if flags.radius is not None:
            raise BadUse("--radius: what a window reads is shown in an SVG: give --svg FILE too")
        print_lines(console, [title, *(numbers if flags.numbers else text)(order, width)])
        return 0
    parts = curve(order, width) if flags.radius is None else reads(flags, order, width)
    write_target("--svg", flags.svg, svg(parts, height, width, title))
    print_lines(console, [f"{title}: {flags.svg}"])
    return 0


def reads(flags, order: np.ndarray, width: int) -> Iterator[str]:
    """The parts of a picture of what one tile reads. Raises BadUse."""
    count = -(-len(order) // max(1, flags.tile))
    which = (count // 2 if flags.which is None else flags.which) if flags.tile > 0 else -1
    if flags.radius < 0 or not 0 <= which < count:
        raise BadUse(
            f"--radius, --tile, --which: a radius of 0 or more, and a tile that there is, 0 to {count - 1}"
        )
    return accesses(order, width, flags.radius, flags.tile, which)
