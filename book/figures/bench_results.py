"""The rows of the record `bench` and its like: selected by pass and size, and written as tables write them."""

from collections.abc import Iterable

from book.measure.record import Row

Size = tuple[int, int, int]

OURS = "fast"
SHORT = {"eager": "eager", "compile": "compile", "liger": "Liger"}
"""The peers, as a narrow column names them."""


def size(row: Row) -> Size:
    """M, H and O of a row."""
    return int(row["M"]), int(row["H"]), int(row["O"])


def select(rows: Iterable[Row], direction: str, column: str) -> dict[Size, dict[str, Row]]:
    """The rows of a pass in a column that hold a time: size -> candidate -> row."""
    selected: dict[Size, dict[str, Row]] = {}
    for row in rows:
        if (row["pass"], row["column"]) == (direction, column) and row["median_us"]:
            selected.setdefault(size(row), {})[row["candidate"]] = row
    return selected


def time_text(microseconds: float) -> str:
    """Microseconds, or milliseconds from ten thousand on, with what is significant."""
    if microseconds >= 10_000:
        return f"{microseconds / 1000:,.1f} ms"
    return f"{microseconds:,.0f} µs" if microseconds >= 1000 else f"{microseconds:,.1f} µs"


def bold_ratio(ratio: float) -> str:
    """A ratio with two digits, bold above 1.00."""
    return f"**{ratio:.2f}**" if round(ratio, 2) > 1 else f"{ratio:.2f}"
