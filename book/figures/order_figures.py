"""Pictures and tables of puzzle 24: orders of a grid, what a tile of queries reads, and the times of attention in a window in each order.

The pictures are drawn from the orders themselves; the times come from the record `orders`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from book.figures.charts import bars
from book.figures.figures import wide
from book.figures.markdown_table import table
from book.measure import record
from harness.puzzles.p24 import orders
from harness.puzzles.p24.counting import count, sectors
from harness.puzzles.p24.spec import ledger

SIZES = ((64, 4), (64, 8), (128, 4), (128, 8))
TILES = (64, 128)
BY_ARITHMETIC = ("row-major", "z-order", "tiled")
"""Orders whose masks FlexAttention can have without a table."""
Times = dict[tuple[int, int, str, str], float]
"""(side, radius, candidate, pass) -> milliseconds."""


# ---- Pictures -----------------------------------------------------------------------------------------------


def curves(side: int = 16, cell: int = 10) -> str:
    """The four orders of a small grid."""
    drawing = wide(
        side * cell + 30,
        f"Four orders of {side} x {side} cells as lines: row by row, Z-order, Hilbert's curve, and squares of 8 x 8",
    )
    for number, (name, make) in enumerate(orders.ORDERS.items()):
        left = 12 + 180 * number
        rows, columns = np.divmod(make(side, side), side)
        drawing.polyline(zip(left + cell * columns, 8 + cell * rows, strict=True), thick=1.5)
        drawing.text(left + side * cell / 2, side * cell + 24, name, size=18)
    return drawing.svg()


def times_chart() -> str:
    """Milliseconds of the kernels on tensor cores in each order, on the large grid with the smaller window, beside dense attention."""
    measured_times = measured()
    times = {name: own(measured_times, 128, 4, name)[0] for name in orders.ORDERS}
    times["dense, every key"] = measured_times[128, 4, "SDPA, every key", "both"]
    told = ", ".join(f"{name} {time:.2f} ms" for name, time in times.items())
    rows = [(name, time, f"{time:.2f} ms", name in orders.ORDERS) for name, time in times.items()]
    return bars(f"Forward and backward on a grid of 128 x 128 with a radius of 4: {told}", {"": rows})


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
    "order_bars.svg": times_chart,
    "order_ratios.md": ratios,
    "order_peers.md": peers,
    "order_times.md": times,
    "order_counted_and_timed.md": counted_and_timed,
}
