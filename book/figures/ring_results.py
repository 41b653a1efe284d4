"""Puzzle 25 on several GPUs: tables and pictures of what the ring took, from the records.

`book.measure.ring` times the rings and traces them. More GPUs are simulated from the trace of two, and called that.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from book.figures.charts import Axis, Series, plot, spans
from book.figures.markdown_table import table
from book.measure import record

RINGS = ("ring_two", "ring_four")
TWO, FOUR = (record.FOLDER / f"{name}_trace.jsonl" for name in RINGS)
"""Beside the records: what each GPU does when, a line of JSON for each ring."""
ONE, WHOLE, PARALLEL = "one GPU", "ring", "context parallel"
Row = dict[str, str]
Interval = tuple[float, float]


# ---- The ring -----------------------------------------------------------------------------------------------


class Ring:
    """The measured rows by candidate and size."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.by = {
            (
                row["candidate"], row["kernels"], int(row["ranks"]), int(row["length"]), int(row["d"]),
                row["causal"] == "1",
            ): row
            for row in rows
            if row["ms"]
        }  # fmt: skip

    def ms(
        self, candidate: str, kernels: str, ranks: int, length: int, d: int, causal: bool = True
    ) -> float | None:
        """Milliseconds, None where that was not measured."""
        row = self.by.get((candidate, kernels, ranks, length, d, causal))
        return float(row["ms"]) if row else None

    def sizes(self, causal: bool = True) -> list[tuple[str, int, int, int]]:
        """(kernels, d, length, ranks) of every ring that was measured, in order."""
        measured = {
            (kernels, d, length, ranks)
            for candidate, kernels, ranks, length, d, mask in self.by
            if candidate == WHOLE and mask == causal
        }
        return sorted(measured, key=lambda each: (each[0] != "flash", -each[1], *each[2:]))


def times_table(ring: Ring, causal: bool = True) -> str:
    """What forward and backward take on one GPU and on several, beside context parallel."""
    rows = []
    for kernels, d, length, ranks in ring.sizes(causal):
        one = ring.ms(ONE, kernels, 1, length, d, causal)
        whole, peer = (ring.ms(each, kernels, ranks, length, d, causal) for each in (WHOLE, PARALLEL))
        assert one is not None and whole is not None
        speed = [f"{one / whole:.2f}", f"{one / whole / ranks:.1%}", f"{1e3 * length / whole:,.0f}"]
        times = [f"{one:,.1f} ms", f"{whole:,.1f} ms"]
        rows.append(
            [
                kernels, str(d), f"{length:,}", str(ranks), *times, *speed,
                f"{peer / whole:.3f}" if peer else "",
            ]
        )  # fmt: skip
    head = [
        "kernels", "d", "S", "GPUs", "one GPU", "ring", "times as fast", "of the ideal", "tokens a second",
    ]  # fmt: skip
    return table([*head, "context parallel / ring"], rows, "lrrrrrrrrr")


def memory_table(ring: Ring) -> str:
    """Gibibytes on each GPU at the peak."""

    def bytes_of(candidate: str, kernels: str, ranks: int, length: int, d: int) -> str:
        row = ring.by.get((candidate, kernels, ranks, length, d, True))
        return f"{int(row['bytes_a_rank']) / 2**30:.2f}" if row else ""

    sizes = dict.fromkeys((kernels, length, d) for kernels, d, length, ranks in ring.sizes() if ranks == 4)
    rows = [
        [kernels, str(d), f"{length:,}"]
        + [
            bytes_of(who, kernels, ranks, length, d)
            for who, ranks in ((ONE, 1), *((WHOLE, n) for n in (2, 4)), *((PARALLEL, n) for n in (2, 4)))
        ]
        for kernels, length, d in sizes
    ]
    head = [
        "kernels", "d", "S", "one GPU", "ring, 2", "ring, 4", "context parallel, 2", "context parallel, 4",
    ]  # fmt: skip
    return table(head, rows, "lrrrrrrr")


def ideal_chart(ring: Ring) -> str:
    """Percent of the ideal over the length, with d = 128."""
    lengths = sorted({length for _, _, length, _ in ring.sizes()})
    styles = {
        ("flash", 2): ("o", "-"),
        ("cuDNN", 2): ("s", "--"),
        ("flash", 4): ("^", ":"),
        ("cuDNN", 4): ("D", "-."),
    }
    series = []
    for (kernels, ranks), (marker, dash) in styles.items():
        points = []
        for length in lengths:
            one, whole = (ring.ms(who, kernels, n, length, 128) for who, n in ((ONE, 1), (WHOLE, ranks)))
            if one and whole:
                points.append((float(length), one / whole / ranks))
        series.append(Series(f"{ranks} GPUs, {kernels}", points, dash, marker))
    return plot(
        "Throughput of the ring on two and four GPUs in percent of the ideal, over the length of the sequence. It rises from 85 "
        "and 60 to 75 percent at 32,768 positions to above 95 percent on two GPUs and about 90 on four.",
        series,
        Axis("positions", ticks={float(length): f"{length // 1024}k" for length in lengths}),
        Axis("of the ideal", False, (0.5, 1), {value / 10: f"{value * 10}%" for value in range(5, 11)}),
    )


# ---- What the GPUs do when ----------------------------------------------------------------------------------


def traces(path: Path) -> dict[tuple[str, int, int], list[list[tuple[str, float, float]]]]:
    """(kernels, d, length) -> of each rank its kernels: kind, start and end in microseconds; causal rings only."""
    by_run = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        trace = json.loads(line)
        if trace["causal"] and "kernels_by_rank" in trace:
            key = trace["kernels"], trace["d"], trace["length"]
            by_run[key] = [
                [(kind, start, end) for kind, start, end in rank] for rank in trace["kernels_by_rank"]
            ]
    return by_run


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time without overlaps."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def common(one: list[Interval], other: list[Interval]) -> float:
    """How long two unions are both under way."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def of_kind(kernels: list[tuple[str, float, float]], *kinds: str) -> list[Interval]:
    """When any kernel of some kinds runs."""
    return union([(start, end) for kind, start, end in kernels if kind in kinds])


def length_of(intervals: list[Interval]) -> float:
    """The sum of a union's lengths."""
    return sum(end - start for start, end in intervals)


def where_table() -> str:
    """Where a GPU's time goes, of the rank that began last, and which share of the transfers runs behind computing."""
    rows = []
    for (kernels, d, length), ranks in sorted(
        traces(FOUR).items(), key=lambda each: (each[0][0] != "flash", *each[0][1:])
    ):
        rank = min(
            ranks, key=lambda kernels: max(end for _, _, end in kernels)
        )  # it waited for nobody to begin
        whole = max(end for _, _, end in rank)
        attention, elements = (length_of(of_kind(rank, kind)) for kind in ("attention", "elements"))
        transfers, computing = of_kind(rank, "transfer"), of_kind(rank, "attention", "elements")
        bare = length_of(transfers) - common(transfers, computing)
        cells = (whole, attention, elements, length_of(transfers), bare)
        hidden = 1 - bare / length_of(transfers)
        rows.append(
            [kernels, str(d), f"{length:,}", *(f"{each / 1e3:,.2f}" for each in cells), f"{hidden:.0%}"]
        )
    head = [
        "kernels", "d", "S", "ms in all", "attention", "element by element", "transfers", "of these bare",
        "hidden",
    ]  # fmt: skip
    return table(head, rows, "lrrrrrrrr")


def timeline(ranks: list[list[tuple[str, float, float]]]) -> str:
    """Two lines for each GPU: what it computes, and what travels."""
    lanes = {"computes": {"attention": 0.75, "elements": 0.35}, "transfers": {"transfer": 0.9}}
    lines = {
        f"GPU {rank}, {lane}": [
            (start / 1e3, end / 1e3, shades[kind]) for kind, start, end in kernels if kind in shades
        ]
        for rank, kernels in enumerate(ranks)
        for lane, shades in lanes.items()
    }
    last = max(end for parts in lines.values() for _, end, _ in parts)
    return spans(f"Kernels of {len(ranks)} GPUs within {last:.1f} ms", lines, "ms", width=900)


# ---- More GPUs, simulated -----------------------------------------------------------------------------------


def steps_of(kernels: Sequence[tuple[str, float, float]]) -> list[float]:
    """Microseconds of a rank of two: its own block and the other's, forward and backward, and the gradients' way home.

    Each of the four blocks is begun by the longest of its attention kernels; the last transfer is the way home.
    """
    attention = sorted((start, end) for kind, start, end in kernels if kind == "attention")
    longest = max(end - start for start, end in attention)
    blocks = [start for start, end in attention if end - start > longest / 8]
    if len(blocks) != 4:
        raise ValueError(f"expected the kernels of four blocks, found {len(blocks)}")
    home = max(start for kind, start, _ in kernels if kind == "transfer")
    end = max(end for _, _, end in kernels)
    edges = [0.0, *blocks[1:], home, end]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def simulated(ranks: Sequence[Sequence[tuple[str, float, float]]], bare: float, count: int) -> float:
    """Milliseconds of a ring of `count` ranks, from a trace of two whose parts have the same length.

    A rank's first step is its own block, and each of the others is like the second of two, the slower rank's. The first and the
    last step are those of the rank that began last: the other's hold its wait for it. `bare` are the milliseconds that the
    transfers of one step add where they run behind computing, measured on two.
    """
    owns, others, backs, others_back, homes = zip(*map(steps_of, ranks), strict=True)
    microseconds = min(owns) + min(backs) + min(homes)
    microseconds += (count - 1) * (max(others) + max(others_back))
    return microseconds / 1e3 + (count - 2) * bare


def simulated_table(ring: Ring) -> str:
    """What four and eight GPUs would take, from the measured two; of four, what they took."""
    rows = []
    for (kernels, d, length), ranks in traces(TWO).items():
        whole, blocks = (ring.ms(each, kernels, 2, length, d) for each in (WHOLE, "ring, blocks alone"))
        assert whole is not None
        home = min(steps_of(rank)[-1] for rank in ranks) / 1e3
        bare = max(0.0, whole - blocks - home) if blocks else 0.0
        for count in (4, 8):
            S = length // 2 * count
            one, measured = ring.ms(ONE, kernels, 1, S, d), ring.ms(WHOLE, kernels, count, S, d)
            if one:
                simulated_ms = simulated(ranks, bare, count)
                rows.append(
                    [
                        kernels,
                        str(d),
                        f"{S:,}",
                        str(count),
                        f"{simulated_ms:,.1f} ms",
                        f"{one / simulated_ms / count:.1%}",
                        f"{measured:,.1f} ms" if measured else "",
                    ]
                )
    rows.sort(key=lambda row: (row[3], row[0] != "flash", -int(row[1]), len(row[2]), row[2]))
    return table(["kernels", "d", "S", "GPUs", "simulated", "of the ideal", "measured"], rows, "lrrrrrr")


def source(name: str) -> str:
    """Where numbers are from."""
    rows = record.rows(name)
    first = rows[0]
    lengths = ", ".join(
        f"{length:,}" for length in sorted({int(row["length"]) for row in rows if row["candidate"] == WHOLE})
    )
    return (
        f"{lengths} positions: {max(int(row['ranks']) for row in rows)} × {first['device']} of one host, NVLink, driver "
        f"{first['driver']}, PyTorch {first['torch']}, {first['date']}."
    )


def pages() -> dict[str, Any]:
    """What the chapter includes, by file name."""
    ring = Ring([row for name in RINGS for row in record.rows(name)])
    return {
        "ring_source.md": "\n".join(map(source, RINGS)) + "\n",
        "ring_times.md": times_table(ring),
        "ring_full.md": times_table(ring, causal=False),
        "ring_memory.md": memory_table(ring),
        "ring_ideal.svg": ideal_chart(ring),
        "ring_where.md": where_table(),
        "ring_timeline.svg": timeline(traces(FOUR)["flash", 64, 32768]),
        "ring_simulated.md": simulated_table(ring),
    }
