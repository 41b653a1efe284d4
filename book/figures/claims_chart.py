"""Attention's backward pass by hand beside autograd's, from the record `attention_claims`: three charts, three tables."""

from collections.abc import Callable

from book.figures.charts import Axis, Series, plot
from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Row

LINES = {
    "autograd": ("autograd", "o", "-"),
    "custom": ("custom backward pass", "s", "--"),
    "SDPA": ("PyTorch's SDPA", "^", ":"),
}


def lengths(rows: list[Row]) -> list[int]:
    """Every length that was measured, the shortest first."""
    return sorted({int(row["length"]) for row in rows})


# ---- Charts -------------------------------------------------------------------------------------------------


def chart(unit: str, value: Callable[[Row], float], label: str) -> str:
    """A line for each candidate of the fair method; who ran out of memory ends where it did."""
    measured = [
        row for row in record.rows("attention_claims") if row["method"] == "fair" and not row["failed"]
    ]
    series = [
        Series(name, points, dash, marker)
        for who, (name, marker, dash) in LINES.items()
        if (points := [(float(row["length"]), value(row)) for row in measured if row["who"] == who])
    ]
    ticks = {float(length): f"{length:,}" for length in lengths(measured)}
    return plot(label, series, Axis("sequence length", ticks=ticks), Axis(unit), height=360)


def time() -> str:
    """Milliseconds of a forward and a backward pass."""
    label = "Milliseconds of both passes of attention over the sequence length, three implementations."
    return chart("ms", lambda row: float(row["ms"]), label)


def memory() -> str:
    """The peak of memory above the inputs."""
    label = "Peak memory in GiB of a forward and a backward pass over the sequence length: two curves grow with its square."
    return chart("GiB at the peak", lambda row: float(row["peak"]) / 2**30, label)


PICTURES = {"time": time, "memory": memory}


# ---- Tables -------------------------------------------------------------------------------------------------


def text(number: float | None) -> str:
    """A time or a size in three digits; None is out of memory."""
    return "OOM" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def both(autograd: float | None, custom: float | None, ratio: bool = False) -> str:
    """Autograd and the custom pass, and on request how many times as long autograd takes."""
    words = f"{text(autograd)} and {text(custom)}"
    return f"{words}: {autograd / custom:.3g}×" if ratio and autograd and custom else words


def measured(
    rows: list[Row], length: int, method: str, column: str, per: float = 1.0
) -> dict[str, float | None]:
    """Candidate -> its number at a length, by a method; None for who came to nothing."""
    return {
        row["who"]: None if row["failed"] else float(row[column]) / per
        for row in rows
        if (row["length"], row["method"]) == (str(length), method)
    }


def times_table(rows: list[Row]) -> str:
    """Milliseconds of a forward and a backward pass: autograd and the custom pass, twice; then the others."""
    body = []
    for length in lengths(rows):
        own, fair = (measured(rows, length, method, "ms") for method in ("own", "fair"))
        ways = [(way["autograd"], way["custom"]) for way in (own, fair)]
        body.append([f"{length:,}", *(both(*way, ratio=True) for way in ways), text(fair["SDPA"])])
    head = ["length", "timed carelessly", "timed fairly", "SDPA"]
    return table(head, body, "r" * len(head))


def memory_table(rows: list[Row]) -> str:
    """GiB at the peak: autograd and the custom pass, twice; then the others."""
    body = []
    for length in lengths(rows):
        own, fair = (measured(rows, length, method, "peak", 2**30) for method in ("own", "fair"))
        ways = [(way["autograd"], way["custom"]) for way in (own, fair)]
        body.append([f"{length:,}", *(both(*way) for way in ways), text(fair["SDPA"])])
    head = ["length", "measured carelessly", "measured fairly", "SDPA"]
    return table(head, body, "r" * len(head))


def kept_table(rows: list[Row]) -> str:
    """MiB that are kept from the forward to the backward pass, query, key and value among them."""
    body = []
    for length in lengths(rows):
        kept = measured(rows, length, "fair", "kept", 2**20)
        body.append([f"{length:,}", *(text(kept[who]) for who in LINES)])
    return table(["length", *(name for name, _, _ in LINES.values())], body, "r" * (len(LINES) + 1))


TABLES = {"times": times_table, "memory": memory_table, "kept": kept_table}


def pages() -> dict[str, str]:
    """File -> table."""
    rows = record.rows("attention_claims")
    return {f"claims_{name}.md": make(rows) for name, make in TABLES.items()}
