"""The figures of the page "A step that unlearns": one run to go through by hand, and a table of many."""

import html
import json
from collections.abc import Sequence

from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Row

COLUMNS = ("place_updates", "loss", "along_size", "across_size")
SHARES = {
    "of_20": "space",
    "of_74": "t",
    "of_65": "e",
    "of_6f": "o",
    "of_6e": "n",
    "of_absent": "other bytes",
}
"""Column of the record -> the bytes whose probability it has."""
WIDTH, HEIGHT = 560, 300
RISE = 0.25
"""Nats by which an update raises the loss of its own batch, to count."""


def path() -> list[Row]:
    """The places on the way of the run."""
    return record.rows("unlearning_path")


def still() -> str:
    """The loss of one batch along the run, as it is seen without scripts."""
    rows = path()
    places, losses = ([float(row[name]) for row in rows] for name in COLUMNS[:2])
    left, top = 50, 20

    def at(place: float, loss: float) -> str:
        x = left + (place - places[0]) / (places[-1] - places[0]) * (WIDTH - left - 20)
        y = top + (max(losses) - loss) / (max(losses) - min(losses)) * (HEIGHT - top - 50)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(at(*point) for point in zip(places, losses, strict=True))
    ticks = "".join(
        f'<text x="{at(place, 0).split(",")[0]}" y="{HEIGHT - 22}" text-anchor="middle" font-size="14">{place:.0f}</text>'
        for place in places
        if place == int(place)
    )
    marks = "".join(
        f'<text x="{left - 8}" y="{at(places[0], loss).split(",")[1]}" text-anchor="end" font-size="14">{loss:.1f}</text>'
        for loss in (min(losses), max(losses))
    )
    words = f"The loss of one batch over the updates: {losses[0]:.1f} at first, {max(losses):.1f} after update 15, {losses[-1]:.1f} in the end."
    return (
        f'<svg class="narrow" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(words)}" fill="currentColor">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/>{ticks}{marks}'
        f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle" font-size="14">updates</text></svg>'
    )


def player() -> str:
    """The still picture, and the data of the moving one."""
    rows = path()
    data = {
        "points": [[float(row[name]) for name in COLUMNS] for row in rows],
        "shares": [[float(row[name]) for name in SHARES] for row in rows],
        "names": list(SHARES.values()),
    }
    return f'{still()}\n<script type="application/json" class="unlearning-data">{json.dumps(data)}</script>'


def share(rows: Sequence[Row]) -> str:
    """How many of some runs have an update that unlearns."""
    return f"{sum(int(row['unlearning']) > 0 for row in rows)} of {len(rows)}"


def runs_table() -> str:
    """A line for each text, size and warm-up."""
    lines = []
    grouped = record.by(record.rows("unlearning"), "text", "size", "warm_up")
    for (text, size, warm_up), rows in grouped.items():
        largest = max(rows, key=lambda row: float(row["rise"]))
        losses = " → ".join(
            f"{float(largest[name]):.2f}" for name in ("before_loss", "after_loss", "next_loss")
        )
        begins = "none" if warm_up == "1" else f"{warm_up} steps"
        texts = {"book": "this book", "PyTorch": "PyTorch's documentation"}
        lines.append(
            [texts[text], size, begins, share(rows), losses if float(largest["rise"]) > RISE else "–"]
        )
    head = [
        "text",
        "model",
        "warm-up",
        "runs with such a step",
        "the worst: loss before, after, one update later",
    ]
    return table(head, lines, "lllrr")


FILES = {"unlearning.html": player, "unlearning_runs.md": runs_table}
