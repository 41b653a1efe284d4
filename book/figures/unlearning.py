"""The figures of the page "A step that unlearns": one run and one vector to go through by hand, and a table of many runs."""

import html
import json
import math
import statistics
from collections.abc import Sequence

from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Row, Rows

COLUMNS = ("place_updates", "loss", "along_size", "across_size")
SHARES = {
    "of_20": "space",
    "of_74": "t",
    "of_65": "e",
    "of_6f": "o",
    "of_6e": "n",
    "of_others": "another byte",
}
"""Column of the record -> the next bytes whose probability it has."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 200, 26, 26, 40
KINDS = {
    "qkv": "attention: q, k, v", "query": "attention: queries", "key": "attention: keys", "value": "attention: values", "join": "attention: out",
    "widen": "MLP: in", "narrow": "MLP: out", "token": "token table", "position": "positions", "ln_1": "first LayerNorm",
    "ln_2": "second LayerNorm", "ln_f": "last LayerNorm",
}  # fmt: skip
"""Kind of parameter -> what the chart calls it."""
RISE = 0.25
"""Nats by which an update raises the loss of its own batch, to count."""


def path() -> list[Row]:
    """The places on the way of the run."""
    return record.rows("unlearning_path")


def chart(
    places: Sequence[float],
    losses: Sequence[float],
    ticks: Sequence[float],
    axis: str,
    words: str,
    marks: Sequence[float] = (),
) -> str:
    """A line of losses, with a vertex for each place. The losses have whole numbers as ticks, and a line for an untrained model.

    Short strokes on the lower edge mark some places.
    """
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
    parts += [f'<path d="M{x(place):.1f} {HEIGHT - BOTTOM}v-14" class="unlearning-mark"/>' for place in marks]
    parts += [text(x(place), HEIGHT - BOTTOM + 16, f"{place:g}".replace("-", "−")) for place in ticks]
    parts += [text(WIDTH / 2, HEIGHT - 6, axis)]
    return (
        f'<svg class="narrow" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(words)}" fill="currentColor" font-size="12">'
        f'{"".join(parts)}<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
    )


def predictions(rows: Sequence[Row]) -> dict:
    """The probabilities of the next byte in each row, and those before the first update."""
    first, *shares = ([float(row[name]) for name in SHARES] for row in (path()[0], *rows))
    return {"names": [*SHARES.values()], "shares": shares, "untrained": first}


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


def ratio(row: Row, when: str) -> float:
    """The shared vector's length over the spread of the positions, before or after a run's worst step, from `unlearning_causes`."""
    return float(row[f"{when}_size"]) / float(row[f"{when}_spread"])


def has_turned(row: Row) -> bool:
    """Whether a run's worst step turns the shared vector by more than a right angle."""
    return (
        Rows("unlearning")("last_cosine", **{name: row[name] for name in ("text", "size", "warm_up", "seed")})
        < 0
    )


def scales_player() -> str:
    """The loss for each scale of the shared vector, and where the step leaves the vector of each run."""
    causes = record.rows("unlearning_causes")
    followed = ratio(max(causes, key=rise), "before")
    marks = [max(-1, (-1) ** has_turned(row) * ratio(row, "after") / followed) for row in causes]
    rows = record.rows("unlearning_scales")
    scales, losses = ([float(row[name]) for row in rows] for name in ("scale", "loss"))
    words = f"The loss over the scale of the shared vector: {losses[0]:.1f} at 1, {losses[scales.index(0)]:.1f} at 0, {losses[-1]:.1f} at −1."
    picture = chart(scales, losses, (1, 0.5, 0, -0.5, -1), "scale of the shared vector", words, marks)
    return with_data(
        picture, {"points": list(zip(scales, losses, strict=True)), "ratio": followed, **predictions(rows)}
    )


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


def rise(row: Row) -> float:
    """Return what a run's worst step adds to the loss of its batch."""
    return float(row["after_loss"]) - float(row["before_loss"])


def share_undone(row: Row, what: str) -> float:
    """Return the share of that rise which is not in another loss of the row."""
    return (float(row["after_loss"]) - float(row[f"{what}_loss"])) / rise(row)


def shares_undone() -> dict[str, list[float]]:
    """Kind of parameter -> the share of the rise that its old values undo in each run, the largest median first."""
    by_kind = record.by(record.rows("unlearning_parts"), "kind").items()
    shares = {kind: [share_undone(row, "undone") for row in rows] for (kind,), rows in by_kind}
    return dict(sorted(shares.items(), key=lambda item: -statistics.median(item[1])))


def parts_chart() -> str:
    """A dot for each run and kind of parameter: the share of the rise that its old values undo."""
    shares = shares_undone()
    parts, left, width, high = [], 132, 200, 26 + 20 * len(shares)
    for share in (0, 0.5, 1):
        x = left + share * width / 1.4
        parts.append(f'<path d="M{x:.0f} 22V{high - 6}" stroke="currentColor" opacity=".25"/>')
        parts.append(f'<text x="{x:.0f}" y="{high + 8}" text-anchor="middle">{share:.0%}</text>')
    for number, (kind, each) in enumerate(shares.items()):
        y = 32 + 20 * number
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{KINDS.get(kind, kind)}</text>')
        for share in each:
            x = left + min(max(share, -0.03), 1.4) * width / 1.4
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="var(--links)" fill-opacity=".45"/>')
        x = left + statistics.median(each) * width / 1.4
        parts.append(f'<path d="M{x:.1f} {y - 8}v16" class="unlearning-mark"/>')
    words = "; ".join(
        f"{KINDS.get(kind, kind)}: median {statistics.median(each):.0%}" for kind, each in shares.items()
    )
    return (
        f'<svg class="parts" viewBox="0 0 {WIDTH} {high + 14}" role="img" aria-label="{words}" fill="currentColor" font-size="12">'
        f'<text x="2" y="12">share of the rise that old parameters undo</text>{"".join(parts)}</svg>'
    )


def settings_table() -> str:
    """A line for each learning rate and setting of AdamW: in how many runs without warm-up a step counts."""
    lines = []
    for (beta, clip), rows in record.by(record.rows("unlearning_settings"), "beta", "clip").items():
        for rate in sorted({float(row["at_rate"]) for row in rows}, reverse=True):
            cells = []
            for size in ("small", "large"):
                some = [row for row in rows if float(row["at_rate"]) == rate and row["size"] == size]
                cells += [
                    str(sum(float(row["rise"]) > RISE for row in some)),
                    f"{sum(float(row['end_loss']) for row in some) / len(some):.2f}",
                ]
            lines.append([f"{rate:g}", beta, "none" if clip == "inf" else f"{float(clip):g}", *cells])
    head = [
        "learning rate",
        "β₂",
        "clipping",
        "small: runs of 8",
        "loss at step 60",
        "large: runs of 8",
        "loss at step 60",
    ]
    return table(head, lines, "rrrrrrr")


FILES = {
    "unlearning.html": path_player, "unlearning_runs.md": runs_table, "unlearning_scales.html": scales_player,
    "unlearning_parts.html": parts_chart, "unlearning_settings.md": settings_table,
}  # fmt: skip
