"""Time and memory of attention by sequence length, from the rows that `p23 --claims --csv` kept.

The build of the book draws both charts in the colour of its text. `python -m book.figures.claims_chart [FOLDER]` writes them
for the README (default: docs/), light or dark as the reader's system is.
"""

import sys
from pathlib import Path

from book.figures.charts import LogChart
from harness.puzzles.p23 import claim_rows

BOOK = Path(__file__).absolute().parent.parent

MEASURED = BOOK / "measurements" / "attention_claims_h200.csv"
TRAINED = BOOK / "measurements" / "attention_training_h200.csv"
"""What `p22 --demo gpt2 --attention --csv` wrote."""
LINES = {
    claim_rows.AUTOGRAD: ("autograd", "circle", ""),
    claim_rows.CUSTOM: ("custom backward pass", "square", "6 4"),
    claim_rows.LAYER: ("this puzzle's layer", "diamond", ""),
    claim_rows.SDPA: ("PyTorch's SDPA", "triangle", "2 3"),
}
LINE = 14
"""Pixels between two names."""
STYLE = (
    "<style>svg{color:#24292f;background:#ffffff}@media (prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}"
    "</style>"
)


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
    rows = claim_rows.read(MEASURED)
    label = "Milliseconds of a forward and a backward pass of attention over the sequence length, four implementations."
    return chart(rows, "ms", lambda row: row.ms, label)


def memory() -> str:
    """The peak of memory above the inputs."""
    rows = claim_rows.read(MEASURED)
    label = "Peak memory in GiB of a forward and a backward pass over the sequence length: two curves grow with its square."
    return chart(rows, "GiB at the peak", lambda row: row.peak / 2**30, label)


PICTURES = {"time": time, "memory": memory}


def write(folder: Path) -> None:
    """Both charts as files of their own."""
    for name, draw in PICTURES.items():
        text = draw()
        head, _, rest = text.partition(">")
        (folder / f"attention_{name}.svg").write_text(f"{head}>{STYLE}{rest}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else BOOK.parent / "docs")
