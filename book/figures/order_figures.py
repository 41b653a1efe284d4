"""Pictures and tables of puzzle 24: orders of a grid, what a tile of queries reads, and the times of attention in a window in each order.

The pictures are drawn from the orders themselves; the times come from the record `orders`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

from book.figures.figures import ROOT, Drawing
from book.figures.markdown_table import table
from book.measure import record
from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.p24 import orders
from harness.puzzles.p24.counting import count, keys_of_tiles, sectors
from harness.puzzles.p24.drawing import steps
from harness.puzzles.p24.spec import ledger

GAP, PITCH = 24, 12
"""Units between two panels, and from cell to cell."""
SHADES = {"query": 1.0, "seen": 0.6, "loaded": 0.25, "other": 0.06}
"""What a cell is to a tile of queries -> how dark its square is: a drawing has one colour, that of the page's text."""
SIZES = ((64, 4), (64, 8), (128, 4), (128, 8))
TILES = (64, 128)
BY_ARITHMETIC = ("row-major", "z-order", "tiled")
"""Orders whose masks FlexAttention can have without a table."""
Times = dict[tuple[int, int, str, str], float]
"""(side, radius, candidate, pass) -> milliseconds."""


# ---- Pictures -----------------------------------------------------------------------------------------------


def panels(parts: dict[str, Iterator[str]], side: int, label: str) -> str:
    """Drawings of square grids beside each other, each with its name below, on one line."""
    size = side * PITCH
    width = len(parts) * (size + GAP) - GAP
    text = width / 32  # can still be read where the whole is as wide as a phone
    height = size + 1.4 * text
    shown = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" aria-label="{label}" '
        f'fill="currentColor" font-size="{text:g}" text-anchor="middle">'
    ]
    for number, (name, drawn) in enumerate(parts.items()):
        shown.append(f'<g transform="translate({number * (size + GAP)} 0)">{"".join(drawn)}')
        shown.append(f'<text x="{size / 2:g}" y="{size + text:g}">{name}</text></g>')
    return "".join([*shown, "</svg>\n"])


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
            wide = sum(1 for _ in cells)
            yield (
                f'<rect fill-opacity="{SHADES[name]}" x="{column * PITCH}" y="{row * PITCH}" '
                f'width="{wide * PITCH}" height="{PITCH}"/>'
            )
            column += wide


def curves(side: int = 16) -> str:
    """The four orders of a small grid."""
    parts = {name: curve(make(side, side), side) for name, make in orders.ORDERS.items()}
    label = f"Four orders of {side} x {side} cells as lines: row by row, Z-order, Hilbert's curve, and squares of 8 x 8"
    return panels(parts, side, label)


def growth(sides: tuple[int, ...] = (2, 4, 8, 16)) -> str:
    """Hilbert's curve, each four times the one before; all as large as the last, and of lines as wide as its own."""
    largest = sides[-1]
    parts = {}
    for side in sides:
        scale = largest / side
        lines = "".join(curve(orders.hilbert(side, side), side))
        lines = lines.replace('stroke-width="2"', f'stroke-width="{2 / scale:g}"')
        parts[f"{side} x {side}"] = iter([f'<g transform="scale({scale:g})">{lines}</g>'])
    return panels(parts, largest, "Hilbert curves through squares of 2, 4, 8 and 16 cells a side")


def reads(side: int, radius: int, tile: int = 64) -> str:
    """What the middle tile of queries reads in row-major and in Hilbert order."""
    names = ("row-major", "hilbert")
    parts = {}
    for name in names:
        order = orders.ORDERS[name](side, side)
        which = side**2 // tile // 2 + side // 16
        parts[name] = accesses(order, side, radius, tile, which)
    label = (
        f"The cells of one tile of {tile} queries on a grid of {side} x {side}, the keys within {radius} of them, and the "
        "other keys of the tiles that hold these: in row-major order stripes, in Hilbert order a square"
    )
    return panels(parts, side, label)


SIX_WALKS = (
    "numpy_index_flip_forgotten", "numpy_index_exchanged", "numpy_index_turn_forgotten", "numpy_index_plain_bits", "",
    "numpy_index_inverse_meant",
)  # fmt: skip
"""The wrong curves that are drawn without their names, and the solution, ""."""


def walk_of(name: str, side: int = 8) -> np.ndarray:
    """The cell at each step, by a run of a wrong `index` of the museum, or of the solution's."""
    (path,) = [wrong.target() for wrong in zoo.load("p24") if wrong.name == name] or [
        ROOT / "solutions" / "p24" / "in_numpy.py"
    ]
    return load(path)["index"](np.arange(side**2), side)


def six_walks(side: int = 8) -> str:
    """Six walks through a small grid, one of them right; a dot where each begins."""
    drawing = Drawing(
        352,
        "Six walks through 8 x 8 cells, numbered. Walks 2 and 5 never jump: 2 begins to the right, 5 begins downwards.",
    )
    for number, name in enumerate(SIX_WALKS):
        left, top = 10 + 158 * (number % 3), 28 + 176 * (number // 3)
        drawing.text(left + 72, top - 10, str(number + 1))
        drawing.box(left, top, 144, 144, shade=0.04, thick=0.4, radius=0)
        places = [
            (left + 18 * column + 9, top + 18 * row + 9)
            for row, column in np.argwhere(np.ones((side, side)))[walk_of(name, side)].tolist()
        ]
        for (x0, y0), (x1, y1) in pairwise(places):
            jump = max(abs(x1 - x0), abs(y1 - y0)) > 18
            drawing.segment(x0, y0, x1, y1, thick=0.7 if jump else 2, dash="2 2" if jump else "")
        drawing.box(places[0][0] - 5, places[0][1] - 5, 10, 10, shade=1, radius=5)
    return drawing.svg()


# ---- Tables -------------------------------------------------------------------------------------------------


def by_size(head: Iterable[str], cells: Callable[[int, int], Iterable[str]]) -> str:
    """A table with a line for each grid and radius; `cells` has the rest of a line."""
    rows = [[f"{side} x {side}", str(radius), *cells(side, radius)] for side, radius in SIZES]
    head = ["grid", "radius", *head]
    return table(head, rows, "l".ljust(len(head), "r"))


def ratios() -> str:
    """Pairs of tiles that row-major order makes of those of Hilbert order, by grid, radius and tile."""
    rows = []
    for side, radius in SIZES:
        for tile in TILES:
            counted = [f"{pairs_of(name, side, radius, tile):,}" for name in orders.ORDERS]
            rows.append(
                [f"{side} x {side}", f"{radius}", f"{tile}", *counted, f"{ratio(side, radius, tile):.2f}"]
            )
    return table(["grid", "radius", "tile", *orders.ORDERS, "row-major over Hilbert"], rows, "l" + 7 * "r")


def measured() -> Times:
    """Of the candidates that ran; of two runs the later one."""
    return {
        (int(each["side"]), int(each["radius"]), each["candidate"], each["pass"]): float(each["median_us"])
        / 1e3
        for each in record.rows("orders")
        if each["median_us"]
    }


def own(measured_times: Times, side: int, radius: int, name: str) -> tuple[float, int]:
    """This project's kernels, forward and backward, in an order: milliseconds, and the tile that is its best."""
    return min((measured_times[side, radius, f"Mojo, {name}, {tile}", "both"], tile) for tile in TILES)


def flex(measured_times: Times, side: int, radius: int, name: str) -> float:
    """FlexAttention, likewise: with the mask that is its best, by a table or by arithmetic."""
    masks = [name, *([f"{name} by arithmetic"] if name in BY_ARITHMETIC else [])]
    return min(measured_times[side, radius, f"Flex, {mask}, 128", "both"] for mask in masks)


def times() -> str:
    """These kernels in each order, each at its best tile; dense attention beside them."""
    measured_times = measured()
    dense = ("SDPA, every key", "SDPA, masked")

    def cells(side: int, radius: int) -> Iterator[str]:
        yield from (f"{own(measured_times, side, radius, name)[0]:.2f}" for name in orders.ORDERS)
        yield from (f"{measured_times[side, radius, name, 'both']:.2f}" for name in dense)

    return by_size([*orders.ORDERS, "dense, every key", "dense, masked"], cells)


def peers() -> str:
    """FlexAttention in each order, with how many times as long as these kernels it takes; NATTEN's window at the end."""
    measured_times = measured()
    natten = ("row-major", "z-order")

    def cells(side: int, radius: int) -> Iterator[str]:
        for name in orders.ORDERS:
            time = flex(measured_times, side, radius, name)
            yield f"{time:.2f} ({time / own(measured_times, side, radius, name)[0]:.2f})"
        for name in natten:
            yield f"{measured_times[side, radius, f'Flex, NATTEN {name}, 128', 'both']:.2f}"

    return by_size([*orders.ORDERS, *(f"NATTEN, {name}" for name in natten)], cells)


def ratio(side: int, radius: int, tile: int) -> float:
    """Counted tile pairs, row-major over Hilbert order."""
    return pairs_of("row-major", side, radius, tile) / pairs_of("hilbert", side, radius, tile)


@functools.cache
def pairs_of(name: str, side: int, radius: int, tile: int) -> int:
    """Counted tile pairs of an order."""
    return count(orders.ORDERS[name](side, side), side, radius, tile).pairs


def counted_and_timed() -> str:
    """The counted ratio of row-major over Hilbert order beside the measured one: these kernels, then FlexAttention."""
    measured_times = measured()

    def cells(side: int, radius: int) -> Iterator[str]:
        ours = [own(measured_times, side, radius, name)[0] for name in ("row-major", "hilbert")]
        theirs = [flex(measured_times, side, radius, name) for name in ("row-major", "hilbert")]
        for tile, taken in zip(TILES, (ours, theirs), strict=True):
            counted, timed = ratio(side, radius, tile), taken[0] / taken[1]
            yield from (f"{counted:.2f}", f"{timed:.2f}", f"{timed / counted:.2f}")

    return by_size(["tiles of 64", "time", "of it", "tiles of 128", "FlexAttention", "of it"], cells)


def arithmetic() -> str:
    """FlexAttention with masks that compute rows and columns beside masks that read them from a table."""
    measured_times = measured()
    names = [mask for name in BY_ARITHMETIC for mask in (name, f"{name} by arithmetic")]
    return by_size(
        (f"{name}, {way}" for name in BY_ARITHMETIC for way in ("table", "arithmetic")),
        lambda side, radius: (
            f"{measured_times[side, radius, f'Flex, {name}, 128', 'both']:.2f}" for name in names
        ),
    )


# ---- The claims ---------------------------------------------------------------------------------------------

LARGE = (8, 12, 128, 128, 64, 4, 64)
"""What sizes are said of: B, N, H, W, d, r, T."""


def claims() -> str:
    """What an order might be thought to do, each with a count or a time and a verdict."""
    side, radius = LARGE[2], LARGE[5]
    measured_times = measured()
    gather = {
        name: measured_times[side, radius, f"gather of Q, K and V, {name}", "forward"]
        for name in orders.ORDERS
    }
    scatter = {
        name: measured_times[side, radius, f"scatter of O, {name}", "forward"] for name in orders.ORDERS
    }
    whole, _ = own(measured_times, side, radius, "hilbert")
    counts = {name: count(make(side, side), side, radius, 64) for name, make in orders.ORDERS.items()}
    row_bytes = LARGE[4] * 2
    kept = ledger(LARGE, "bfloat16")
    eager, ours = sum(kept.saved_eager.values()), sum(kept.saved_ours.values())
    asked = {name: sectors(make(side, side), LARGE[4], 2) for name, make in orders.ORDERS.items()}
    errors = rounding()
    rows = [
        [
            "avoid recomputing?",
            f"a backward pass that gathers Q, K and V again: {gather['hilbert']:.2f} ms, of {whole:.2f} ms for "
            "forward and backward",
            "**No.** It recomputes a gather; reading through the index needs none",
        ],
        [
            "fuse operations?",
            f"a gather of Q, K and V takes {gather['hilbert'] / measured_times[side, radius, 'copy of Q, K and V', 'forward']:.1f} times a "
            "copy of them; the kernels here launch one forward and two backward, and no gather",
            "**Where it is done.** An order does not fuse anything; kernels that take an index do",
        ],
        [
            "save memory?",
            f"kept for the backward pass: {mib(eager)} MiB with gathered copies and a dense mask, {mib(ours)} MiB with the index",
            "**The missing mask's, not the curve's.** The difference is the dense mask; row-major order keeps as little",
        ],
        [
            "make sums more exact?",
            f"float32 against float64, 256 cells: {errors['row-major']:.0e} in row-major order, {errors['hilbert']:.0e} in Hilbert order",
            "**No.** The same numbers are added in another order",
        ],
        [
            "read fewer keys?",
            f"K bytes that a tile needs: {counts['row-major'].needed * row_bytes:,.0f} row by row, "
            f"{counts['hilbert'].needed * row_bytes:,.0f} in Hilbert order, {counts['tiled'].needed * row_bytes:,.0f} in squares of 8 x 8",
            "**In a window, yes, and not only Hilbert's.** Without a window every tile needs every key",
        ],
        [
            "make writing cheaper?",
            f"sectors that a warp asks for: {asked['row-major']:.1f} and {asked['hilbert']:.1f}; a scatter of O takes "
            f"{scatter['row-major']:.2f} and {scatter['hilbert']:.2f} ms",
            "**No.** Rows are longer than a sector",
        ],
    ]
    return table(["does an order…", "counted or timed", "verdict"], rows)


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.0f}"


def rounding(side: int = 16, d: int = 64) -> dict[str, float]:
    """The largest error of dense attention in float32, with the keys in each order, relative to the largest output."""
    random = np.random.default_rng(24)
    query, key, value = random.standard_normal((3, side * side, d))

    def attend(query, key, value):
        scores = query @ key.T / np.sqrt(np.float32(d))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights @ value / weights.sum(-1, keepdims=True)

    right = attend(query, key, value)
    errors = {}
    for name, make in orders.ORDERS.items():
        order = make(side, side)
        got = attend(*(each[order].astype(np.float32) for each in (query, key, value)))
        errors[name] = float(np.abs(got - right[order]).max() / np.abs(right).max())
    return errors


FILES = {
    "order_arithmetic.md": arithmetic,
    "order_claims.md": claims,
    "order_curves.svg": curves,
    "order_growth.svg": growth,
    "six_walks.svg": six_walks,
    "order_reads.svg": functools.partial(reads, 64, 4),
    "order_ratios.md": ratios,
    "order_peers.md": peers,
    "order_times.md": times,
    "order_counted_and_timed.md": counted_and_timed,
}
