"""What the page about every size shows: drawn sizes beside the peers, and the branches of a graph, from the records `sizes` and `branches`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from book.figures.bench_results import OURS, Row, Size, select, size
from book.figures.charts import Axis, Series, plot
from book.measure import record

MODELS = {(4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 4096), (16384, 4096, 12288)}
"""The benchmark's four sizes, which were measured in the same run and are not drawn."""
PEERS = ("eager", "compile")


@dataclass(frozen=True)
class Beside:
    """The layer beside the fastest peer at one size."""

    dims: Size
    time: float
    peer: str
    ratio: float


def beside(rows: list[Row], column: str) -> Iterator[Beside]:
    """Each drawn size that a column has, the ratio taken of the medians. Raises KeyError where a peer of the page is missing."""
    for dims, by_name in select(rows, "both", column).items():
        times = {name: float(row["median_us"]) for name, row in by_name.items()}
        if dims not in MODELS and OURS in times:
            fastest = min(PEERS, key=times.__getitem__)
            yield Beside(dims, times[OURS], fastest, times[OURS] / times[fastest])


def drawn_sizes() -> str:
    """The layer's time over the fastest peer's as a CUDA graph, by the number of rows; hollow where rows fill no whole vectors."""
    sizes = list(beside(record.rows("sizes"), "graph"))
    whole, odd = (
        [one for one in sizes if any(width % 8 for width in one.dims[1:]) == hollow]
        for hollow in (False, True)
    )
    spans = [(min(ratios), max(ratios)) for ratios in ([one.ratio for one in some] for some in (whole, odd))]
    label = (
        "The layer's time over the fastest alternative's as a CUDA graph. Where rows fill whole vectors, from {:.2f} to {:.2f}; elsewhere "
        "from {:.2f} to {:.2f}"
    ).format(*spans[0], *spans[1])
    low, high = min(spans)[0] / 1.06, max(*(top for _, top in spans), 1) * 1.06
    ticks = {tick: f"{tick:g}" for tick in (0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5) if low < tick < high}
    dots = [
        Series("", [(float(one.dims[0]), one.ratio) for one in some], "", "o", some is odd)
        for some in (whole, odd)
    ]
    ratio = Axis("time / fastest alternative's time", True, (low, high), ticks)
    return plot(label, dots, Axis("number of rows"), ratio, level=1)


def by_branches(rows: list[Row]) -> Iterator[tuple[Size, Row, Row, Row]]:
    """Each size, small ones first, with the fastest way of one branch, the fastest of two, and the one that is chosen."""
    sizes: dict[Size, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row["us"])):
        sizes.setdefault(size(row), []).append(row)
    for dims, ways in sorted(sizes.items(), key=lambda item: math.prod(item[0])):
        one, two = (next(row for row in ways if row["branches"] == count) for count in "12")
        yield dims, one, two, next(row for row in ways if row["chosen"])


FILES = {"drawn_sizes.svg": drawn_sizes}
