"""`p24 --count`: the cost of windowed attention for each order of positions, counted from the orders
themselves.

A tile is a number of successive positions of the order. Tiled attention computes every pair of a query tile
and a key tile that holds a pair of cells within the window, and loads all keys of these tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.puzzles.p24 import orders

LARGEST = 256
"""The largest side that is counted: it takes a bit for each tile and cell."""
LANES = 32
SECTOR = 32
"""Bytes that memory hands out at once."""


@dataclass(frozen=True)
class Count:
    """The cost of one order, for one grid, radius and tile.

    Attributes:
        pairs: Pairs of tiles that are computed, of `all_pairs`.
        needed: Keys that some query of a tile sees, the mean over the tiles.
        runs: Contiguous runs of positions that these keys form, the mean over the tiles.
        loaded: Keys of the tiles that a tile of queries computes, the mean.
    """

    pairs: int
    all_pairs: int
    needed: float
    runs: float
    loaded: float


def count(order: np.ndarray, width: int, radius: int, tile: int) -> Count:
    tiles = orders.window_tiles(order, width, radius, tile)
    visible = keys_of_tiles(order, width, radius, tile)
    starts = visible[:, :1].sum() + (visible[:, 1:] & ~visible[:, :-1]).sum()
    sizes = np.bincount(np.arange(len(order)) // tile)
    return Count(
        pairs=int(tiles.sum()),
        all_pairs=tiles.size,
        needed=float(visible.sum() / len(tiles)),
        runs=float(starts / len(tiles)),
        loaded=float((tiles @ sizes).mean()),
    )


def keys_of_tiles(order: np.ndarray, width: int, radius: int, tile: int) -> np.ndarray:
    """Return which keys some query of a tile sees, by their step: bool [tiles, cells]."""
    step = orders.inverse(order)
    visible = np.zeros((-(-len(order) // tile), len(order)), bool)
    for there, here in orders.neighbour_values(step.reshape(-1, width), radius):
        visible[here // tile, there] = True
    return visible


def sectors(order: np.ndarray, dim: int, size: int) -> float:
    """Return the mean number of sectors of a warp's load, if 32 threads gather successive elements.

    `dim` elements of `size` bytes make a row; element i of the gathered rows is in row order[i // dim].
    """
    elements = np.arange(len(order) * dim // LANES * LANES)
    at = (order[elements // dim] * dim + elements % dim) * size // SECTOR
    warps = np.sort(at.reshape(-1, LANES), axis=1)
    return float((1 + (np.diff(warps, axis=1) != 0).sum(1)).mean()) if len(warps) else 0.0


# ---- The command --------------------------------------------------------------------------------------------


def main(console: Console, arguments: Sequence[str] = ()) -> int:
    """Print the cost of each order over grids and radii. Raise BadUse."""
    parser = Parser(prog="p24 --count", description="Count what each order costs over grids and radii.")
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[16, 32, 64, 128], metavar="S", help="sides of square grids"
    )
    parser.add_argument(
        "--radii", type=int, nargs="+", default=[4, 8], metavar="R", help="radii of the window"
    )
    parser.add_argument("--tile", type=int, default=64, metavar="T", help="positions in a tile: %(default)s")
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="elements of a row: %(default)s")
    parser.add_argument("--bytes", type=int, default=2, metavar="E", help="bytes of an element: %(default)s")
    flags = parser.parse_args(arguments)
    for side in flags.sides:
        if not 1 <= side <= LARGEST:
            raise BadUse(f"--sides {side}: must be 1 to {LARGEST}")
    for name, smallest in (("tile", 1), ("dim", 1), ("bytes", 1)):
        if getattr(flags, name) < smallest:
            raise BadUse(f"--{name} {getattr(flags, name)}: must be at least {smallest}")
    if min(flags.radii) < 0:
        raise BadUse(f"--radii {min(flags.radii)}: must be at least 0")
    print_lines(console, report(flags))
    return 0


def report(flags) -> Iterator[str]:
    """Yield the lines of the tables, one for each grid and radius."""
    row = flags.dim * flags.bytes
    yield f"tiles of {flags.tile} positions, rows of {flags.dim} x {flags.bytes} bytes; means over the tiles of queries"
    for side in flags.sides:
        for radius in flags.radii:
            yield ""
            yield f"{side} x {side} cells, radius {radius}: each cell sees up to {min(2 * radius + 1, side) ** 2} of {side**2}"
            yield line(
                "order", "tile pairs", "of all", "/ hilbert", "keys", "runs", "K bytes", "loaded", "sectors"
            )
            counts = {
                name: count(make(side, side), side, radius, flags.tile)
                for name, make in orders.ORDERS.items()
            }
            for name, traffic in counts.items():
                yield line(
                    name,
                    f"{traffic.pairs:,}",
                    f"{traffic.pairs / traffic.all_pairs:.1%}",
                    f"{traffic.pairs / counts['hilbert'].pairs:.2f} x",
                    f"{traffic.needed:,.0f}",
                    f"{traffic.runs:.1f}",
                    f"{traffic.needed * row:,.0f}",
                    f"{traffic.loaded * row:,.0f}",
                    f"{sectors(orders.ORDERS[name](side, side), flags.dim, flags.bytes):.1f}",
                )


def line(name: str, *cells: str) -> str:
    return f"{name:<11}" + "".join(f"{cell:>12}" for cell in cells)
