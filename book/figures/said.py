"""What pages say of records: each record as a function of columns, and what is derived from several numbers of one.

A page calls these functions in its references (`book/build/references.py`), so that its sentences cannot say anything else
than its tables.
"""

import math
import re

from book.figures import (
    attention_times,
    bench_results,
    every_size,
    heroes,
    ring_results,
    worklog,
    worklog_results,
)
from book.figures.timing_pages import duration
from book.measure import record
from harness.puzzles.p25 import layout

CITATION = dict(
    re.findall(r"^([\w-]+): (.+)$", (record.ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
)
VERSION, RELEASED = CITATION["version"], CITATION["date-released"]
"""The workbook's, as it is to be cited."""
UNTRAINED = math.log(256)
"""The loss of a model over bytes that has never seen a text."""


class Rows:
    """A record in an expression: its numbers by column and by the values of other columns."""

    def __init__(self, name: str):
        self.name = name

    @property
    def gpu(self) -> str:
        """What measured it, in a word: H200."""
        return record.rows(self.name)[0]["device"].removeprefix("NVIDIA ").split()[0]

    def all(self, number: str, /, **where: object) -> list[float]:
        """The numbers of every row with these values, rows without a number left out. Raises LookupError where none is."""
        wanted = {key.rstrip("_"): str(value) for key, value in where.items()}
        rows = record.rows(self.name)
        if unknown := {number, *wanted} - rows[0].keys():
            raise LookupError(f"{self.name} has no column {', '.join(sorted(unknown))}")
        matching = [
            float(row[number]) for row in rows if row[number] and all(row[k] == v for k, v in wanted.items())
        ]
        if not matching:
            raise LookupError(
                f"{self.name}: no row with {', '.join(f'{k} = {v}' for k, v in wanted.items())}"
            )
        return matching

    def __call__(self, number: str, /, **where: object) -> float:
        """The one number with these values. Raises LookupError where there is none or more than one."""
        matching = self.all(number, **where)
        if len(matching) > 1:
            raise LookupError(f"{self.name}: {len(matching)} rows with these values, not one")
        return matching[0]


# ---- The steps of puzzle 28 ----------------------------------------------------------------------------------

SLAB = worklog.SLAB
median, passes, of_step, brief = (
    worklog_results.median,
    worklog_results.passes,
    worklog_results.of_step,
    duration,
)


# ---- Training and every size --------------------------------------------------------------------------------


def beside(column: str = "graph", least: float = 0) -> list[float]:
    """The layer's time over its fastest peer's at every size of the record `sizes` where it takes that many microseconds or more."""
    return [one.ratio for one in every_size.beside(record.rows("sizes"), column) if one.time >= least]


def odd_sizes(least: int = 0, most: int = 10**9) -> list[float]:
    """As `beside`, where a row fills no whole vectors and the number of rows lies between these."""
    return [
        one.ratio
        for one in every_size.beside(record.rows("sizes"), "graph")
        if least <= one.dims[0] <= most and any(width % 8 for width in one.dims[1:])
    ]


def two_branches() -> dict[every_size.Size, float]:
    """The time of two branches over that of one, by size."""
    rows = every_size.by_branches(record.rows("branches"))
    return {size: float(two["us"]) / float(one["us"]) for size, one, two, _ in rows}


def of_products(*size: int) -> float:
    """The layer's time over the three bare products' at one of the benchmark's sizes, as graphs."""
    by_name = bench_results.select(record.rows("bench"), "both", "graph")[size[0], size[1], size[2]]
    return float(by_name["fast"]["ratio_to_floor"])


def gains_shrink() -> bool:
    """Whether the layer gains less over plain PyTorch the larger the product is, in the record `bench`."""
    selected = bench_results.select(record.rows("bench"), "both", "graph")
    by_size = sorted(selected.items(), key=lambda item: item[0][0] * item[0][1] * item[0][2])
    gains = [float(at["eager"]["median_us"]) / float(at["fast"]["median_us"]) for _, at in by_size]
    return gains == sorted(gains, reverse=True)


def apart(model: str) -> float:
    """How far the losses of a training run are from plain PyTorch's on average."""
    models = {
        name: [float(row["loss"]) for row in rows]
        for name, rows in bench_results.training("training").items()
    }
    plain = models["plain PyTorch"]
    return sum(abs(a - b) for a, b in zip(models[model], plain, strict=True)) / len(plain)


# ---- Attention ----------------------------------------------------------------------------------------------


def of_peer(
    peer: str, d: int, causal: bool = False, who: str = "attention", ragged: bool = False
) -> list[float]:
    """Attention's time over a peer's, forward and backward as a graph, at every length with such heads."""
    times = attention_times.read()
    sizes = times.sizes("graph", d, causal, ragged)
    return [
        times.microseconds(size, "graph", who) / times.microseconds(size, "graph", peer) for size in sizes
    ]


def of_nine_products(length: int, d: int, who: str = "attention") -> float:
    """Time over that of the nine products that the kernels make, at a large product's rate."""
    times, size = attention_times.read(), (length, d, False, "bfloat16")
    return times.microseconds(size, "graph", who) / attention_times.predicted(times, size)["done"]


# ---- The ring -----------------------------------------------------------------------------------------------


def ring_time(size: int, balanced: bool, length: int = 2048, tile: int = 16) -> int:
    """Return the tiles of the busiest rank of each step of a causal ring, all steps together."""
    ranks = [layout.tiles(rank, size, length, balanced, tile) for rank in range(size)]
    return sum(map(max, zip(*ranks, strict=True)))


def ring_errors(direction: str = "forward") -> list[float]:
    """The largest error of an output, or of a dK, after each step of the run that the ring's player shows."""
    forward, _where, _added, backward = heroes.ring_run()
    return forward if direction == "forward" else backward


def ring_speedup(kernels: str, d: int, length: int, ranks: int) -> float:
    """How many times as fast a ring is as one GPU."""
    ring = ring_results.Ring([row for name in ring_results.RINGS for row in record.rows(name)])
    one, whole = (ring.ms(who, kernels, n, length, d) for who, n in (("one GPU", 1), ("ring", ranks)))
    if not one or not whole:
        raise LookupError(f"no ring of {ranks} with {kernels}, d = {d}, {length} positions")
    return one / whole
