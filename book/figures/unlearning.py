"""The figures of the page "A step that unlearns": one run and one vector to go through by hand, and a table of many runs."""

import html
import json
import math
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
    "of_absent": "bytes absent from the batch",
}
"""Column of the record -> the bytes whose probability it has."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 200, 26, 26, 40
RISE = 0.25
"""Nats by which an update raises the loss of its own batch, to count."""


def path() -> list[Row]:
    """The places on the way of the run."""
    return record.rows("unlearning_path")


def chart(
    places: Sequence[float], losses: Sequence[float], ticks: Sequence[float], axis: str, words: str
) -> str:
    """A line of losses, with a vertex for each place. The losses have whole numbers as ticks, and a line for an untrained model."""
    high, low = math.ceil(max(losses)), math.floor(min(losses))

    def x(place: float) -> float:
        return LEFT + (place - places[0]) / (places[-1] - places[0]) * (WIDTH - LEFT - 12)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'

    def level(loss: float, more: str) -> str:
        return f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="currentColor" {more}/>'

    untrained = math.log(256)
    line = " ".join(f"{x(place):.1f},{y(loss):.1f}" for place, loss in zip(places, losses, strict=True))
    parts = [text(0, 12, "loss of one batch, in nats", "start")]
    for loss in range(low, high + 1, 1 + (high - low) // 6):
        parts += [level(loss, 'opacity=".15"'), text(LEFT - 6, y(loss) + 4, str(loss), "end")]
    parts += [level(untrained, 'opacity=".7" stroke-dasharray="3 3"')]
    parts += [text(LEFT + 8, y(untrained) - 5, f"untrained: {untrained:.2f}", "start")]
    parts += [text(x(place), HEIGHT - BOTTOM + 16, f"{place:g}".replace("-", "−")) for place in ticks]
    parts += [text(WIDTH / 2, HEIGHT - 6, axis)]
    return (
        f'<svg class="narrow" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(words)}" fill="currentColor" font-size="12">'
        f'{"".join(parts)}<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
    )


def predictions(rows: Sequence[Row]) -> dict:
    """What a model predicts in each row: the names of the bytes, and their shares. The untrained shares are those before the first update."""

    def shares(row: Row) -> list[float]:
        named = [float(row[name]) for name in SHARES]
        return [*named, 1 - sum(named)]

    return {
        "names": [*SHARES.values(), "all others"], "shares": [shares(row) for row in rows], "untrained": shares(path()[0]),
    }  # fmt: skip


def with_data(picture: str, data: dict) -> str:
    """A still picture, and the data of the moving one."""
    return f'{picture}\n<script type="application/json">{json.dumps(data)}</script>'


def path_player() -> str:
    """The loss of one batch along the run."""
    rows = path()
    points = [[float(row[name]) for name in COLUMNS] for row in rows]
    places, losses, *_ = zip(*points, strict=True)
    words = f"The loss of one batch over the updates: {losses[0]:.1f} at first, {max(losses):.1f} after update 15, {losses[-1]:.1f} in the end."
    picture = chart(places, losses, range(1, 18, 2), "updates", words)
    return with_data(picture, {"points": points, **predictions(rows)})


def scales_player() -> str:
    """The loss for each scale of the shared vector."""
    rows = record.rows("unlearning_scales")
    scales, losses = ([float(row[name]) for row in rows] for name in ("scale", "loss"))
    words = f"The loss over the scale of the shared vector: {losses[0]:.1f} at 1, {losses[scales.index(0)]:.1f} at 0, {losses[-1]:.1f} at −1."
    picture = chart(scales, losses, (1, 0.5, 0, -0.5, -1), "scale of the shared vector", words)
    return with_data(picture, {"points": list(zip(scales, losses, strict=True)), **predictions(rows)})


def runs_table() -> str:
    """A line for each text, size and warm-up."""
    lines = []
    grouped = record.by(record.rows("unlearning"), "text", "size", "warm_up")
    for (text, size, warm_up), rows in grouped.items():
        largest = max(rows, key=lambda row: float(row["rise"]))
        losses = " → ".join(
            f"{float(largest[name]):.2f}" for name in ("before_loss", "after_loss", "next_loss")
        )
        begins = "none" if warm_up == "1" else warm_up
        texts = {"book": "this book", "PyTorch": "PyTorch's documentation"}
        worst = [largest["update"], losses] if float(largest["rise"]) > RISE else ["–", "–"]
        count = sum(int(row["unlearning"]) > 0 for row in rows)
        lines.append([f"{texts[text]}, {size}", begins, str(count), *worst])
    head = [
        "text and model", "steps of warm-up", f"runs of {len(rows)} with such a step", "update of the largest jump",
        "loss before, after, and one update later",
    ]  # fmt: skip
    return table(head, lines, "lrrrl")


FILES = {
    "unlearning.html": path_player, "unlearning_runs.md": runs_table, "unlearning_scales.html": scales_player,
}  # fmt: skip
