"""Puzzle 25 on several GPUs: tables and pictures of what the ring took, from the records.

`book.measure.ring` times the rings and traces them. More GPUs are simulated from the trace of two, and called that.
"""

from book.figures.charts import Axis, Series, plot
from book.measure import record

RINGS = ("ring_two", "ring_four")
TWO, FOUR = (record.FOLDER / f"{name}_trace.jsonl" for name in RINGS)
"""Beside the records: what each GPU does when, a line of JSON for each ring."""
ONE, WHOLE, PARALLEL = "one GPU", "ring", "context parallel"
Row = dict[str, str]


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


def ideal() -> str:
    """Draw the chart of the records."""
    return ideal_chart(Ring([row for name in RINGS for row in record.rows(name)]))


FILES = {"ring_ideal.svg": ideal}
