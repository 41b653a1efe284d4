"""Time and memory of attention by sequence length, from the record `attention_claims`."""

from book.figures.charts import LogChart
from book.measure import record
from harness.puzzles.p23 import claim_rows

LINES = {
    claim_rows.AUTOGRAD: ("autograd", "circle", ""),
    claim_rows.CUSTOM: ("custom backward pass", "square", "6 4"),
    claim_rows.LAYER: ("this puzzle's layer", "diamond", ""),
    claim_rows.SDPA: ("PyTorch's SDPA", "triangle", "2 3"),
}
LINE = 14
"""Pixels between two names."""


def chart(rows: list[claim_rows.Row], unit: str, value, label: str) -> str:
    """A line for each candidate of the fair method; who ran out of memory ends where it did."""
    measured = [row for row in rows if row.method == claim_rows.FAIR and not row.failed]
    lengths = sorted({row.length for row in measured})
    values = [value(row) for row in measured]
    drawing = LogChart(
        (720, 400),
        label,
        x=(lengths[0] * 0.9, lengths[-1] * 2.6),
        y=(min(values) * 0.6, max(values) * 1.8),
        x_name="sequence length",
        y_name=unit,
        x_ticks={length: str(length) for length in lengths},
    )
    ends = {}
    for who, (name, shape, dash) in LINES.items():
        points = [(row.length, value(row)) for row in measured if row.who == who]
        if points:
            drawing.curve(points, dash=dash)
            for point in points:
                drawing.marker(*point, shape)
            ends[name] = points[-1]
    # From the top down, no name closer to the one above it than a line of text.
    free = 0.0
    for name, point in sorted(ends.items(), key=lambda end: -end[1][1]):
        _, height = drawing.place(*point)
        drawing.note(point[0], point[1], name, dy=max(height, free) - height + 4)
        free = max(height, free) + LINE
    return drawing.svg()


def time() -> str:
    """Milliseconds of a forward and a backward pass."""
    rows = [claim_rows.row_of(row) for row in record.rows("attention_claims")]
    label = "Milliseconds of a forward and a backward pass of attention over the sequence length, four implementations."
    return chart(rows, "ms", lambda row: row.ms, label)


def memory() -> str:
    """The peak of memory above the inputs."""
    rows = [claim_rows.row_of(row) for row in record.rows("attention_claims")]
    label = "Peak memory in GiB of a forward and a backward pass over the sequence length: two curves grow with its square."
    return chart(rows, "GiB at the peak", lambda row: row.peak / 2**30, label)


PICTURES = {"time": time, "memory": memory}
