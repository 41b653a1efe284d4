"""The stepper of the online softmax: one row of puzzle 23's case "hard values", two keys at a time, on real numbers.

The kernel takes 16 keys at a time; a row of eight keys would be done in one step.
"""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from book.figures.figures import Drawing
from harness.puzzles.p23 import spec as p23

CASE = "hard values"
KEYS = 2
"""Keys of a step."""
PROSE = ("after", "all", "rows", "times")
"""Words in the labels of a stepper that are no variables."""


@dataclass(frozen=True)
class Tile:
    """What a row has come to after some keys: this tile's scores and weights [KEYS], and the sums over all so far.

    Attributes:
        first: The tile's first key.
        largest, total: m and l.
        rescale: What the sums were multiplied by, e^(m - m').
        sums: a, [d].
    """

    first: int
    scores: np.ndarray
    weights: np.ndarray
    largest: float
    rescale: float
    total: float
    sums: np.ndarray


def row() -> tuple[int, int, int]:
    """Batch, head and query of a row whose largest score grows at every step but one, and which has a hidden key."""
    scores = masked_scores()
    largest = np.maximum.accumulate(scores.reshape(*scores.shape[:3], -1, KEYS).max(-1), -1)
    grown = largest[..., 1:] > largest[..., :-1]
    rows = grown.sum(-1) + (np.isneginf(scores).sum(-1) == 1)
    b, n, s = np.unravel_index(rows.argmax(), rows.shape)
    return int(b), int(n), int(s)


def arrays() -> dict[str, np.ndarray]:
    """The inputs of the case."""
    return p23.inputs(next(case for case in p23.cases() if case.name == CASE), "float32", 0)


def masked_scores() -> np.ndarray:
    """The scores with the mask added, [B, N, S, T]."""
    given = arrays()
    return given["query"] @ given["key"].swapaxes(-1, -2) / np.sqrt(given["query"].shape[-1]) + given["mask"]


def tiles() -> list[Tile]:
    """The row, tile by tile, as the kernel has it."""
    b, n, s = row()
    scores, values = masked_scores()[b, n, s], arrays()["value"][b, n]
    largest, total, sums = -np.inf, 0.0, np.zeros(values.shape[-1])
    walked = []
    for first in range(0, len(scores), KEYS):
        tile = scores[first : first + KEYS]
        grown = max(largest, tile.max())
        shift = grown if grown > -np.inf else 0.0
        rescale, weights = np.exp(largest - shift), np.exp(tile - shift)
        total = total * rescale + weights.sum()
        sums = sums * rescale + weights @ values[first : first + KEYS]
        largest = grown
        walked.append(Tile(first, tile, weights, float(largest), float(rescale), float(total), sums))
    return walked


def walked(number: int) -> str:
    """Return the picture and the table of a tile."""
    done = tiles()
    return picture(done, number) + step(done[number])


def quotient() -> str:
    """Return the table of what the row comes to."""
    last = tiles()[-1]
    rows = {"sums": last.sums, "output = sums / total": last.sums / last.total}
    return table(rows, f"lse = largest + log(total) = {last.largest + np.log(last.total):.4f}")


def picture(done: list[Tile], number: int) -> str:
    """Scores, m and the sums after a tile; the next tile's scores have outlines."""
    tile, before = done[number], done[number - 1] if number else None
    now = [tile.total, *tile.sums]
    old = [before.total, *before.sums] if before else [0.0] * len(now)
    drawing = Drawing(
        236,
        f"m is {tile.largest:.2f}, the factor {tile.rescale:.2f}; the total goes from {old[0]:.2f} to {now[0]:.2f}.",
        width=380,
    )
    scores = np.concatenate([each.scores for each in done])
    seen = scores[np.isfinite(scores)]
    low, high = seen.min(), seen.max()
    height = lambda score: 50 + 116 * (high - score) / (high - low)  # noqa: E731
    zero = height(0)
    drawing.text(82, 16, "scores of the keys")
    drawing.text(6, zero + 5, "0")
    drawing.segment(14, zero, 152, zero)
    for largest, words, dash in ((before.largest if before else -np.inf, "", "4 4"), (tile.largest, "m", "")):
        if np.isfinite(largest):
            drawing.segment(14, height(largest), 152, height(largest), dash=dash, thick=1 if dash else 2.5)
            drawing.text(161, height(largest) + 4, words)
    for key, score in enumerate(scores):
        x, after = 15 + 17 * key, key - tile.first - KEYS
        drawing.text(x + 7, 186, str(key))
        shade = 0.12 if key < tile.first else 0 if after >= 0 else 0.45
        if np.isfinite(score) and after < KEYS:
            top = min(height(score), zero)
            drawing.box(x, top, 13, abs(height(score) - zero), shade=shade)
        elif after < KEYS:
            drawing.text(x + 7, zero - 3, "×")
    unit = 170 / max(max(each.total, *np.abs(each.sums)) for each in done)
    drawing.text(282, 16, f"sums, factor {tile.rescale:.2f}")
    for row, (was, value) in enumerate(zip(old, now, strict=True)):
        y, kept = 30 + 32 * row, was * tile.rescale
        drawing.text(192, y + 17, f"a{row - 1}" if row else "ℓ", anchor="end")
        drawing.box(200, y, unit * was, 10, thick=0.8)
        drawing.box(200, y + 12, unit * value, 10, shade=0.12, thick=0)
        drawing.box(200, y + 12, unit * kept, 10, shade=0.45, thick=0.8)
        drawing.segment(200 + unit * value, y + 10, 200 + unit * value, y + 24, thick=3)
    for x, lines in (
        (90, ("light: seen; dark: this tile", "outlined: next; dashed: old m")),
        (282, ("outlined: old; dark: rescaled", "light, up to the tick: new")),
    ):
        for line, words in enumerate(lines):
            drawing.text(x, 211 + 16 * line, words, size=12)
    return f"<figure>{drawing.svg().strip()}</figure>\n"


def step(tile: Tile) -> str:
    """A tile's table."""
    rows = {"score": tile.scores, "weight": tile.weights, "sums": tile.sums}
    note = f"largest = {tile.largest:.4f}, rescale = {tile.rescale:.4f}, total = {tile.total:.4f}"
    return table(rows, f"keys {tile.first} to {tile.first + len(tile.scores) - 1}: {note}")


def table(rows: dict[str, np.ndarray], note: str = "", digits: dict[str, int] | None = None) -> str:
    """Vectors, one row each, for inclusion inside HTML; the names in its label light up a row's lines of the code beside it."""

    def written(value: float, places: int) -> str:
        return "-inf" if np.isneginf(value) else f"{round(float(value), places) + 0.0:.{places}f}"

    def names(label: str) -> str:
        words = (word for word in re.findall(r"[A-Za-z_]\w*", label) if word not in PROSE)
        return " ".join(dict.fromkeys("x" if word == "input" else word for word in words))

    lines = (
        f'<tr data-names="{names(label)}"><th>{label}</th>'
        f"{''.join(f'<td>{written(value, (digits or {}).get(label, 3))}</td>' for value in values)}</tr>"
        for label, values in rows.items()
    )
    remark = f"<p>{note}</p>" if note else ""
    return f'<div class="table-wrapper"><table>{"".join(lines)}</table></div>{remark}\n'


FILES = {f"online_{number + 1}.html": partial(walked, number) for number in range(4)} | {
    "online_quotient.html": quotient
}
