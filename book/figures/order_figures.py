"""The picture and the table of puzzle 24: orders of a grid, and which tiles a window needs of them."""

import functools

import numpy as np

from book.figures.figures import wide
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
    "order_ratios.md": ratios,
}
