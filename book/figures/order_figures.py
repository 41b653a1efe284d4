"""The pictures and the table of puzzle 24: orders of a grid, and which tiles a window needs of them."""

import functools

import numpy as np

from book.figures.figures import Drawing, wide
from book.figures.heroes import runs
from book.figures.markdown_table import table
from harness.puzzles.p24 import orders
from harness.puzzles.p24.counting import count_costs

SIZES = ((64, 4), (64, 8), (128, 4), (128, 8))
TILES = (64, 128)


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


def masks(side: int = 32, radius: int = 4, tile: int = 16) -> str:
    """The masks of tiles of two orders of a grid: a row for each tile of queries, a column for each tile of keys."""
    names, cell = ("row-major", "hilbert"), 3.4
    needed = [orders.find_window_tiles(orders.ORDERS[name](side, side), side, radius, tile) for name in names]
    told = [
        f"{name}: {mask.sum():,} of {mask.size:,} pairs" for name, mask in zip(names, needed, strict=True)
    ]
    drawing = Drawing(254, f"Two masks of tiles, pairs to compute in black. {'; '.join(told)}.")
    for number, (mask, words) in enumerate(zip(needed, told, strict=True)):
        count = len(mask)
        left, top = 11 + 240 * number, 6
        drawing.box(left, top, cell * count, cell * count, thick=1, radius=0)
        path = runs(np.flatnonzero(mask), count, cell, left, top)
        drawing.parts.append(f'<path d="{path}" fill="currentColor"/>')
        drawing.text(left + cell * count / 2, top + cell * count + 22, words, size=13)
    return drawing.svg()


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


def ratio(side: int, radius: int, tile: int) -> float:
    """Counted tile pairs, row-major over Hilbert order."""
    return pairs_of("row-major", side, radius, tile) / pairs_of("hilbert", side, radius, tile)


@functools.cache
def pairs_of(name: str, side: int, radius: int, tile: int) -> int:
    """Counted tile pairs of an order."""
    return count_costs(orders.ORDERS[name](side, side), side, radius, tile).tile_pairs


FILES = {
    "order_curves.svg": curves,
    "order_masks.svg": masks,
    "order_ratios.md": ratios,
}
