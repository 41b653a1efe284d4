"""The figures of the page "A step that unlearns": one run and one vector to go through by hand, and a table of many runs."""

import json
import math
import statistics
from collections.abc import Callable, Sequence

from book.figures.charts import Axis, Series, plot
from book.figures.figures import Drawing
from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Row

COLUMNS = ("place_updates", "loss", "along_size", "across_size", "spread", "size")
SHARES = {
    "of_20": "space",
    "of_74": "t",
    "of_65": "e",
    "of_6f": "o",
    "of_6e": "n",
    "of_others": "another byte",
}
"""Column of the record -> the next bytes whose probability it has."""
WIDTH = 340
KINDS = {
    "qkv": "attention: q, k, v", "query": "↳ queries", "key": "↳ keys", "value": "↳ values", "join": "attention: out",
    "widen": "MLP: in", "narrow": "MLP: out", "token": "token table", "position": "positions", "ln_1": "first LayerNorm",
    "ln_2": "second LayerNorm", "ln_f": "last LayerNorm",
}  # fmt: skip
"""Kind of parameter -> what the chart calls it."""
RISE = 0.25
"""Nats by which an update raises the loss of its own batch, to count."""


def chart(
    places: Sequence[float],
    losses: Sequence[float],
    ticks: Sequence[float],
    axis: str,
    words: str,
    dots: Sequence[tuple[float, float, str]] = (),
    warp: Callable[[float], float] = float,
    base: float = 0,
) -> str:
    """A line of losses, with a vertex for each place. The losses have whole numbers as ticks, and a line for an untrained model.

    `dots` are other runs: place, loss, and whether the vector is "restored", "not restored" or "flipped", or the run "followed".
    `warp` makes the axis of places other than linear. With a `base`, the losses and dots are rises above it.
    """
    high, low = math.ceil(max([*losses, *(loss for _, loss, _ in dots)])), math.floor(min(losses) + 0.05)
    left, right, top, bottom = 26, WIDTH - 12, 26, 200
    start, end = warp(places[0]), warp(places[-1])
    across = lambda place: left + (warp(place) - start) / (end - start) * (right - left)  # noqa: E731
    up = lambda loss: top + (high - loss) / (high - low) * (bottom - top)  # noqa: E731
    untrained = math.log(256) - base
    drawing = Drawing(240, words, WIDTH)
    name = "rise of the loss, in nats" if base else "loss of one batch, in nats"
    drawing.text(0, 12, name, anchor="start", size=12)
    for loss in range(low, high + 1, 1 + (high - low) // 6):
        drawing.segment(left, up(loss), right, up(loss), opacity=0.15)
        drawing.text(left - 6, up(loss) + 4, str(loss), anchor="end", size=12)
    drawing.segment(left, up(untrained), right, up(untrained), opacity=0.7, dash="3 3")
    drawing.text(left + 8, up(untrained) - 5, f"untrained: {untrained:.2f}", anchor="start", size=12)
    for place, loss, kind in dots:
        x, y, look = across(place), up(loss), f'class="unlearning-dot{" filled" * (kind != "not restored")}"'
        if kind in ("flipped", "followed"):
            drawing.parts.append(f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {look}/>')
        else:
            drawing.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}/>')
        if kind == "followed":
            drawing.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="unlearning-dot"/>')
            drawing.text(x - 14, y + 4, "the followed run", anchor="end", size=12)
    for place in ticks:
        drawing.text(across(place), bottom + 16, f"{place:g}".replace("-", "−"), size=12)
    drawing.text(WIDTH / 2, 234, axis, size=12)
    drawing.polyline(zip(map(across, places), map(up, losses), strict=True), thick=2)
    return drawing.svg().strip()


def predictions(rows: Sequence[Row]) -> dict:
    """The probabilities of the next byte in each row, and those before the first update."""
    first, *shares = (
        [float(row[name]) for name in SHARES] for row in (record.rows("unlearning_path")[0], *rows)
    )
    return {"names": [*SHARES.values()], "shares": shares, "untrained": first}


def with_data(picture: str, data: dict) -> str:
    """A still picture, and the data of the moving one."""
    return f'{picture}\n<script type="application/json">{json.dumps(data)}</script>'


def path_player() -> str:
    """The loss of one batch along the run."""
    rows = record.rows("unlearning_path")
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
    return float(row["cosine"]) < 0


def is_restored(row: Row) -> bool:
    """Return whether the old shared vector undoes at least nine tenths of a run's rise."""
    return share_undone(row, "restored") >= 0.9


def scales_player() -> str:
    """The loss for each ratio of the shared vector, and where the step leaves the vector and the loss of each run."""
    causes = record.rows("unlearning_causes")
    followed = max(causes, key=rise)
    scale = ratio(followed, "before")
    rows = record.rows("unlearning_scales")
    ratios, losses = [float(row["scale"]) * scale for row in rows], [float(row["loss"]) for row in rows]
    words = f"The loss over the ratio: {losses[0]:.1f} at {ratios[0]:.1f}, {losses[ratios.index(0)]:.1f} at 0, {losses[-1]:.1f} at −{-ratios[-1]:.1f}."
    dots = []
    for row in causes:
        flipped = has_turned(row)
        at = -ratio(row, "after") if flipped else ratio(row, "after")
        kind = "flipped" if flipped else "restored" if is_restored(row) else "not restored"
        dots.append((at, rise(row), "followed" if row is followed else kind))
    rises = [loss - losses[0] for loss in losses]
    ticks = 5, 2, 1, 0, -1, -2, -5
    picture = chart(ratios, rises, ticks, "ratio: length over spread", words, dots, math.asinh, losses[0])
    points = [[*point, float(row["scale"])] for *point, row in zip(ratios, losses, rows, strict=True)]
    return with_data(picture, {"points": points, **predictions(rows)})


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
        "text and model", "steps of warm-up", f"runs of {len(rows)} with a jump", "update of the largest jump",
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
    """Kind of parameter -> the share of the rise that its old values undo in each run, the largest median first, parts of a kind after it."""
    by_kind = record.by(record.rows("unlearning_parts"), "kind").items()
    shares = {kind: [share_undone(row, "undone") for row in rows] for (kind,), rows in by_kind}
    middle = {kind: -statistics.median(each) for kind, each in shares.items()}
    thirds = "query", "key", "value"
    order = lambda kind: (middle["qkv" if kind in thirds else kind], kind in thirds, middle[kind])  # noqa: E731
    return {kind: shares[kind] for kind in sorted(shares, key=order)}


def parts_chart() -> str:
    """A ring for each run and kind of parameter: the share of the rise that its old values undo; a thick line for the median.

    The followed run has blue dots."""
    shares = shares_undone()
    names = {float(number): KINDS.get(kind, kind) for number, kind in enumerate(shares)}
    dots = [(share, at) for at, each in enumerate(shares.values()) for share in each]
    runs = record.Rows("unlearning_parts").select(kind="qkv")
    followed = runs.index(max(runs, key=rise))
    blue = [(each[followed], at) for at, each in enumerate(shares.values())]
    edges = [Series("", [(at, -0.5), (at, len(names) - 0.5)], width=1, shade=0.7) for at in (0, 1)]
    medians = [statistics.median(each) for each in shares.values()]
    marks = [Series("", [(x, at - 0.3), (x, at + 0.3)], width=3.5) for at, x in enumerate(medians)]
    picture = plot(
        "; ".join(
            f"{name}: median {median:.0%}" for name, median in zip(names.values(), medians, strict=True)
        ),
        [
            *edges,
            Series("", dots, "", "o", True, width=1, shade=0.5),
            *marks,
            Series("", blue, "", "o", colour="b"),
        ],
        Axis("share of the rise that old parameters undo", False, None, {0: "0%", 0.5: "50%", 1: "100%"}),
        Axis("", False, (len(names) - 0.5, -0.5), names),
        height=26 * len(names) + 50,
    )
    return picture.replace(">↳ values<", '><tspan font-weight="bold">↳ values</tspan><')


def settings_table() -> str:
    """A line for each learning rate, with and without clipping: in how many runs without warm-up a step counts."""
    lines = []
    usual = record.Rows("unlearning_settings").select(beta=0.95)
    for (clip,), rows in record.by(usual, "clip").items():
        for rate in sorted({float(row["at_rate"]) for row in rows}, reverse=True):
            cells = []
            for size in ("small", "large"):
                some = [row for row in rows if float(row["at_rate"]) == rate and row["size"] == size]
                cells += [
                    str(sum(float(row["rise"]) > RISE for row in some)),
                    f"{sum(float(row['end_loss']) for row in some) / len(some):.2f}",
                ]
            lines.append([f"{rate:g}", "none" if clip == "inf" else f"{float(clip):g}", *cells])
    head = ["learning rate", "clipping"]
    head += [
        column for size in ("small", "large") for column in (f"{size}: jumps, of 8 runs", "loss at step 60")
    ]
    return table(head, lines, "rrrrrr")


FILES = {
    "unlearning.html": path_player, "unlearning_runs.md": runs_table, "unlearning_scales.html": scales_player,
    "unlearning_parts.svg": parts_chart, "unlearning_settings.md": settings_table,
}  # fmt: skip
