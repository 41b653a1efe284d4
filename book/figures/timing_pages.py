"""What the chapter on measuring shows: one product timed in several ways, and what a profiler says, from the records."""

import re

from book.figures.charts import bars
from book.figures.markdown_table import table
from book.measure.record import Rows, rows

WAYS = Rows("timing_ways")


def duration(microseconds: float) -> str:
    """Microseconds or milliseconds, with three digits."""
    number, unit = (microseconds, "µs") if microseconds < 999.5 else (microseconds / 1000, "ms")
    digits = f"{number:#.3g}".rstrip(".")
    return f"{digits} {unit}"


def ways_chart() -> str:
    """The same product by every way of timing."""
    shown = {
        "not synchronised": "product, not synchronised",
        "synchronised": "product, synchronised",
        "events, 1 call": "product, events around one call",
        "events, 100 calls": "product, events around 100 calls",
        "graph of 100": "product, a graph of 100",
        "L2 flushed": "product, L2 flushed before each",
    }
    times = {name: WAYS("median_us", what=what) for name, what in shown.items()}
    words = "; ".join(f"{name} {duration(time)}" for name, time in times.items())
    drawn = [(name, time, duration(time), False) for name, time in times.items()]
    return bars(f"What one product takes, by the way of timing it: {words}.", {"": drawn})


def power_chart() -> str:
    """A large product rested, under load, and of zeros under load, with the driver's watts and clock where the product ran."""
    shown = {
        "random, rested": "large product, rested",
        "random, after 4 s": "large product, after 4 s of it",
        "zeros, after 4 s": "large product of zeros, after 4 s of it",
    }
    drawn = []
    for name, what in shown.items():
        (row,) = WAYS.select(what=what)
        time, said = float(row["median_us"]), re.findall(r"([\d.]+) W, (\d+) MHz", row["note"])
        watts, clock = max((float(watts), int(clock)) for watts, clock in said)  # an idle GPU has a line too
        words = (
            duration(time) if name.endswith("rested") else f"{duration(time)}, {watts:.0f} W, {clock:,} MHz"
        )
        drawn.append((name, time, words, False))
    spoken = "; ".join(f"{name} {words}" for name, _, words, _ in drawn)
    return bars(f"A large product on one GPU: {spoken}.", {"": drawn})


def profiler_table() -> str:
    """The kernels of LayerNorm, then Linear, forward and backward, as PyTorch's profiler names and times them."""
    body = [[f"`{row['kernel']}`", row["calls"], row["us"]] for row in rows("profiler")]
    return table(["kernel", "calls", "µs"], body, "lrr")


FILES = {"timing_ways.svg": ways_chart, "timing_power.svg": power_chart, "profiler.md": profiler_table}
