"""The figures of puzzle 27: what each part puts on the tape, and how many bytes lie there at each part of a step."""

import math
import re

import outputs
from figures import NARROW, Drawing, bars

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
    height = ROW * len(PARTS) + 44
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


def live_bytes() -> str:
    """The bars of the recorded run."""
    found = live()
    most = max(held for _, held in found)
    label = "KiB on the tape after each part: " + ", ".join(f"{name} {held:g}" for name, held in found)
    drawing = Drawing(NARROW, 24 * len(found) + 8, label)
    for number, (name, held) in enumerate(found):
        y = 4 + 24 * number
        drawing.text(124, y + 15, name, anchor="end", size=13, code=True)
        drawing.box(132, y, 250 * held / most, 18, shade=0.35 if held == most else 0.15)
        drawing.text(140 + 250 * held / most, y + 15, f"{held:g} KiB", anchor="start", size=13)
    return drawing.svg()


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


FILES = {"tape_of_gpt.svg": tape, "tape_bytes.svg": live_bytes, "loss_by_hand.svg": loss_by_hand}
