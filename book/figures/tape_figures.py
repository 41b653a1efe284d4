"""The figures of puzzle 27: what each part puts on the tape, and how many bytes lie there at each part of a step."""

import itertools
import math
import re

import numpy as np

from book.figures.figures import NARROW, Drawing, bars
from book.measure import outputs
from harness.puzzles.p27.kernels import sorted_places as sorted_by_token

PARTS = (
    ("loss", "p, targets"),
    ("head", "x"),
    ("ln_f", "x, mean, rstd"),
    ("narrow", "x"),
    ("gelu", "x"),
    ("widen", "x"),
    ("ln_2", "x, mean, rstd"),
    ("join", "x"),
    ("attention", "q, k, v, P"),
    ("qkv", "x"),
    ("ln_1", "x, mean, rstd"),
    ("embedding", "tokens"),
)
"""The parts from the loss down, with what each keeps; from narrow to ln_1 they make a block."""
ROW = 30


def tape() -> str:
    """The whole model: gradients come down on the right in the order in which values went up on the left."""
    height = ROW * len(PARTS) + 58
    label = "From the embedding up to the loss each part keeps what its way back needs: " + "; ".join(
        f"{name} keeps {kept}" for name, kept in reversed(PARTS)
    )
    drawing = Drawing(NARROW, height, f"{label}. The gradients come down in the opposite order.")
    drawing.text(105, 20, "forward", size=13)
    drawing.text(255, 20, "kept on the tape", size=13)
    drawing.text(405, 20, "backward", size=13)
    first, last = (next(i for i, (n, _) in enumerate(PARTS) if n == name) for name in ("narrow", "ln_1"))
    drawing.box(28, 28 + ROW * first, 424, ROW * (last - first + 1), shade=0.05)
    for number, (name, kept) in enumerate(PARTS):
        y = 30 + ROW * number
        drawing.text(105, y + 19, name, size=13, code=True)
        drawing.labelled(185, y + 2, 140, ROW - 6, kept, size=13, code=True)
        drawing.text(405, y + 19, name, size=13, code=True)
    top, bottom = 34, 24 + ROW * len(PARTS)
    drawing.arrow(45, bottom, 45, top)
    drawing.arrow(465, top, 465, bottom)
    for which in ((first, 5), (6, last)):
        low, high = (40 + ROW * i for i in which)
        drawing.segment(14, low - 4, 14, high + 16, thick=2)
    drawing.text(240, height - 6, "shaded: a block; thick lines: the stream beside its two branches", size=13)
    return drawing.svg()


def live() -> list[tuple[str, float]]:
    """(part, KiB on the tape after it) of the recorded run of the solution."""
    text = outputs.load("tape_gates").text
    return [
        (name.strip(), float(held))
        for name, held in re.findall(r"^ {6}(\S.{13,}?) +([\d.]+) KiB", text, re.M)
    ]


def loss_by_hand() -> str:
    """The losses that the recorded training run names."""
    said = re.search(
        r"^loss ([\d.]+) in the first ten steps, ([\d.]+) in the last ten of (\d+)$",
        outputs.load("train_by_hand").text,
        re.M,
    )
    assert said
    rows = [
        ("knows nothing", math.log(256)),
        ("first ten steps", float(said[1])),
        (f"last ten of {said[3]}", float(said[2])),
    ]
    label = "Loss of the recorded training run: " + ", ".join(f"{name} {loss:.3f}" for name, loss in rows)
    return bars(
        [(name, loss, f"{loss:.3f}") for name, loss in rows],
        label,
        width=NARROW,
        left=130,
        longest=280,
        size=13,
    )


TOKENS = (2, 0, 3, 2, 3, 3, 0, 2)
"""Of the places of the figure; nobody reads row 1."""


def sorted_places() -> str:
    """Places with their tokens, the same sorted, and the row of the table that each stretch belongs to."""
    by_token = sorted_by_token(np.array(TOKENS), max(TOKENS) + 1)
    order, starts = by_token["order"].tolist(), by_token["starts"].tolist()
    stretches = [order[a:b] for a, b in itertools.pairwise(starts)]
    label = "; ".join(
        f"row {row} adds up the places {', '.join(map(str, s)) or 'none'}" for row, s in enumerate(stretches)
    )
    drawing = Drawing(
        NARROW, 186, f"Eight places with the tokens {', '.join(map(str, TOKENS))}, sorted by token: {label}."
    )
    drawing.text(NARROW / 2, 18, "places, each with its token", size=13)
    drawing.text(
        NARROW / 2, 178, "order: the same places, sorted; below each stretch the row of the table", size=13
    )
    side = 52
    for place, token in enumerate(TOKENS):
        left, now = 32 + side * place, 32 + side * order.index(place)
        drawing.labelled(left, 28, 44, 26, str(token), size=13, code=True)
        drawing.arrow(left + 22, 54, now + 22, 96)
        drawing.labelled(now, 98, 44, 26, str(place), size=13, code=True)
    for row, (first, end) in enumerate(itertools.pairwise(starts)):
        if first < end:
            drawing.segment(34 + side * first, 132, 24 + side * end, 132, thick=2)
            drawing.text(28 + side * (first + end) / 2, 150, f"row {row}", size=13)
    return drawing.svg()


FILES = {
    "sorted_places.svg": sorted_places,
    "tape_of_gpt.svg": tape,
    "loss_by_hand.svg": loss_by_hand,
}
