"""`p24 --count`: count what windowed attention costs for each order of positions.

Tiled attention computes every pair of a query tile and a key tile with at least one pair of cells within the
window, and loads all keys of these key tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from harness.console import Parser, print_lines
from harness.errors import UsageError
from harness.puzzles.p24 import orders

MAX_SIDE = 256
"""The largest side of a grid: memory grows with tiles times cells."""
LANES = 32
SECTOR_BYTES = 32
"""Bytes per memory transaction."""


@dataclass(frozen=True)
class Cost:
    """The cost of one order, for one grid, radius and tile.

    Attributes:
        tile_pairs: Number of computed pairs of tiles, out of `max_tile_pairs`.
        needed_keys: Mean number of keys visible to at least one query of a tile.
        key_runs: Mean number of contiguous runs of positions that these keys form.
        loaded_keys: Mean number of keys in the key tiles loaded for a query tile.
    """

    tile_pairs: int
    max_tile_pairs: int
    needed_keys: float
    key_runs: float
    loaded_keys: float


def count_costs(order: np.ndarray, width: int, radius: int, tile: int) -> Cost:
    tiles = orders.find_window_tiles(order, width, radius, tile)
    visible = find_visible_keys(order, width, radius, tile)
    starts = visible[:, :1].sum() + (visible[:, 1:] & ~visible[:, :-1]).sum()
    sizes = np.bincount(np.arange(len(order)) // tile)
    return Cost(
        tile_pairs=int(tiles.sum()),
        max_tile_pairs=tiles.size,
        needed_keys=float(visible.sum() / len(tiles)),
        key_runs=float(starts / len(tiles)),
        loaded_keys=float((tiles @ sizes).mean()),
    )


def find_visible_keys(order: np.ndarray, width: int, radius: int, tile: int) -> np.ndarray:
    """Return which keys, in step order, are visible to at least one query of each tile: bool [tiles, cells]."""
    step = orders.invert_order(order)
    visible = np.zeros((-(-len(order) // tile), len(order)), bool)
    for neighbour, cell in orders.iterate_neighbours(step.reshape(-1, width), radius):
        visible[cell // tile, neighbour] = True
    return visible


def count_sectors(order: np.ndarray, dim: int, itemsize: int) -> float:
    """Return the mean number of sectors per load of a warp whose 32 threads gather successive elements.

    A row has `dim` elements of `itemsize` bytes; element i of the gathered rows is in row order[i // dim].
    """
    elements = np.arange(len(order) * dim // LANES * LANES)
    addresses = (order[elements // dim] * dim + elements % dim) * itemsize // SECTOR_BYTES
    warps = np.sort(addresses.reshape(-1, LANES), axis=1)
    return float((1 + (np.diff(warps, axis=1) != 0).sum(1)).mean()) if len(warps) else 0.0


# ---- The command --------------------------------------------------------------------------------------------


def main(console: Console, arguments: Sequence[str] = ()) -> int:
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
        if not 1 <= side <= MAX_SIDE:
            raise UsageError(f"--sides {side}: must be 1 to {MAX_SIDE}")
    for name in ("tile", "dim", "bytes"):
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name} {getattr(flags, name)}: must be at least 1")
    if min(flags.radii) < 0:
        raise UsageError(f"--radii {min(flags.radii)}: must be at least 0")
    print_lines(console, list_report_lines(flags))
    return 0


def list_report_lines(flags) -> Iterator[str]:
    row_bytes = flags.dim * flags.bytes
    yield f"tiles of {flags.tile} positions, rows of {flags.dim} x {flags.bytes} bytes; means over the tiles of queries"
    for side in flags.sides:
        for radius in flags.radii:
            yield ""
            yield f"{side} x {side} cells, radius {radius}: each cell sees up to {min(2 * radius + 1, side) ** 2} of {side**2}"
            yield format_row(
                "order", "tile pairs", "of all", "/ hilbert", "keys", "runs", "K bytes", "loaded", "sectors"
            )
            traversals = {name: make_order(side, side) for name, make_order in orders.ORDERS.items()}
            costs = {name: count_costs(order, side, radius, flags.tile) for name, order in traversals.items()}
            for name, cost in costs.items():
                yield format_row(
                    name,
                    f"{cost.tile_pairs:,}",
                    f"{cost.tile_pairs / cost.max_tile_pairs:.1%}",
                    f"{cost.tile_pairs / costs['hilbert'].tile_pairs:.2f} x",
                    f"{cost.needed_keys:,.0f}",
                    f"{cost.key_runs:.1f}",
                    f"{cost.needed_keys * row_bytes:,.0f}",
                    f"{cost.loaded_keys * row_bytes:,.0f}",
                    f"{count_sectors(traversals[name], flags.dim, flags.bytes):.1f}",
                )


def format_row(name: str, *cells: str) -> str:
    return f"{name:<11}" + "".join(f"{cell:>12}" for cell in cells)
