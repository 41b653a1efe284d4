"""Attention's backward pass by hand beside autograd's, from the record `attention_claims`: two charts."""

from collections.abc import Callable

from book.figures.charts import Axis, Series, plot
from book.measure.record import Row, Rows

SDPA = ("PyTorch's SDPA", "^", ":")
TIME = {"autograd": ("autograd", "o", "-"), "custom": ("custom backward pass", "s", "--"), "SDPA": SDPA}
MEMORY = {
    "custom": ("autograd, and a custom pass that keeps P", "o", "-"),
    "SDPA": SDPA,
    "two passes": ("puzzle 23's flash kernels", "s", "--"),
}
"""The lines of each chart."""


def chart(
    lines: dict[str, tuple[str, str, str]], unit: str, value: Callable[[Row], float], label: str
) -> str:
    """A line for each of some candidates of the fair method; who ran out of memory ends where it did."""
    measured = Rows("attention_claims").select(method="fair", failed="")
    series = [
        Series(name, points, dash, marker)
        for who, (name, marker, dash) in lines.items()
        if (points := [(float(row["length"]), value(row)) for row in measured if row["who"] == who])
    ]
    ticks = {float(row["length"]): f"{int(row['length']):,}" for row in measured}
    return plot(label, series, Axis("sequence length", ticks=ticks), Axis(unit), height=360)


def time() -> str:
    """Milliseconds of a forward and a backward pass."""
    label = "Milliseconds of both passes of attention over the sequence length, three implementations."
    return chart(TIME, "time (ms)", lambda row: float(row["ms"]), label)


def memory() -> str:
    """The peak of memory above the inputs."""
    autograd, custom = (
        Rows("attention_claims").all("peak", method="fair", who=who) for who in ("autograd", "custom")
    )
    assert autograd == custom  # one line for both
    label = "Peak memory in GiB of a forward and a backward pass over the sequence length: one curve grows with its square, two with the length."
    return chart(MEMORY, "peak memory (GiB)", lambda row: float(row["peak"]) / 2**30, label)


FILES = {"attention_time.svg": time, "attention_memory.svg": memory}
