"""Puzzle 25 on several GPUs: what the ring took, from the records that `book.measure.ring` makes."""

from book.figures.charts import Axis, Series, plot
from book.measure.record import Rows

RINGS = Rows("ring_two"), Rows("ring_four")
ONE, WHOLE = "one GPU", "ring"


def milliseconds(candidate: str, kernels: str, ranks: int, length: int, d: int) -> float | None:
    """The time of both causal passes, None where that was not measured."""
    which = {
        "candidate": candidate,
        "kernels": kernels,
        "ranks": ranks,
        "length": length,
        "d": d,
        "causal": 1,
    }
    measured = [row["ms"] for ring in RINGS for row in ring.select(**which) if row["ms"]]
    return float(measured[-1]) if measured else None


def ideal() -> str:
    """Percent of the ideal over the length, with d = 128."""
    rings = [row for ring in RINGS for row in ring.select(candidate=WHOLE, causal=1) if row["ms"]]
    lengths = sorted({int(row["length"]) for row in rings})
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
            one = milliseconds(ONE, kernels, 1, length, 128)
            whole = milliseconds(WHOLE, kernels, ranks, length, 128)
            if one and whole:
                points.append((float(length), one / whole / ranks))
        series.append(Series(f"{ranks} GPUs, {kernels}", points, dash, marker))
    return plot(
        "Throughput of the ring on two and four GPUs in percent of the ideal, over the length of the sequence. It rises from 85 "
        "and 60 to 75 percent at 32,768 positions to above 95 percent on two GPUs and about 90 on four.",
        series,
        Axis("positions", ticks={float(length): f"{length // 1024}k" for length in lengths}),
        Axis(
            "percentage of ideal speed",
            False,
            (0.5, 1),
            {value / 10: f"{value * 10}%" for value in range(5, 11)},
        ),
    )


FILES = {"ring_ideal.svg": ideal}
