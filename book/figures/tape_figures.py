"""The figures of puzzle 27: what each part puts on the tape, and how many bytes lie there at each part of a step."""

import math
import re
from itertools import pairwise

import numpy as np

from book.figures.figures import NARROW, ROOT, Drawing, Steps, bar_rows, compared, svgs
from book.measure import outputs, record
from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.p27.kernels import sorted_places as sorted_by_token

PARTS = (
    ("loss", "p, targets"), ("head", "x"), ("ln_f", "x, mean, rstd"), ("narrow", "x"), ("gelu", "x"),
    ("widen", "x"), ("ln_2", "x, mean, rstd"), ("join", "x"), ("attention", "q, k, v, P"), ("qkv", "x"),
    ("ln_1", "x, mean, rstd"), ("embedding", "tokens"),
)  # fmt: skip
"""The parts from the loss down, with what each keeps; from narrow to ln_1 they make a block."""
ROW = 30


def tape() -> str:
    """The whole model: gradients come down on the right in the order in which values went up on the left."""
    height = ROW * len(PARTS) + 58
    label = "From the embedding up to the loss each part keeps what its way back needs: " + "; ".join(
        f"{name} keeps {kept}" for name, kept in reversed(PARTS)
    )
    drawing = Drawing(height, f"{label}. The gradients come down in the opposite order.")
    drawing.text(105, 20, "forward")
    drawing.text(255, 20, "kept on the tape")
    drawing.text(405, 20, "backward")
    first, last = (next(i for i, (n, _) in enumerate(PARTS) if n == name) for name in ("narrow", "ln_1"))
    drawing.box(28, 28 + ROW * first, 424, ROW * (last - first + 1), shade=0.05)
    for number, (name, kept) in enumerate(PARTS):
        y = 30 + ROW * number
        drawing.text(105, y + 19, name, code=True)
        drawing.labelled(185, y + 2, 140, ROW - 6, kept, code=True)
        drawing.text(405, y + 19, name, code=True)
    top, bottom = 34, 24 + ROW * len(PARTS)
    drawing.arrow(45, bottom, 45, top)
    drawing.arrow(465, top, 465, bottom)
    for which in ((first, 5), (6, last)):
        low, high = (40 + ROW * i for i in which)
        drawing.segment(14, low - 4, 14, high + 16, thick=2)
    drawing.text(240, height - 6, "shaded: a block; thick lines: the stream beside its two branches")
    return drawing.svg()


WRITTEN = (
    ("loss", "(p − y) / n", 27), ("head", "dlogits W", 27), ("ln_f", "rstd (g − c2 − x̂ c1)", 22), ("narrow", "dy W", 22),
    ("gelu", "dy (s + 2x s (1 − s) u′)", 27), ("widen", "dy W", 22), ("ln_2", "rstd (g − c2 − x̂ c1)", 22),
    ("join", "dy W", 22), ("attention", "dS = P ⊙ (dP − δ)", 23), ("qkv", "dy W", 22),
    ("ln_1", "rstd (g − c2 − x̂ c1)", 22), ("embedding", "add up the rows that were read", 27),
)  # fmt: skip
"""The parts of `PARTS`, each with what it passes down and the puzzle in which its backward pass was written."""


def written() -> str:
    """The model from the loss down: what each part passes on, and in which puzzle it was written."""
    height = ROW * len(WRITTEN) + 40
    label = "The backward pass of a GPT, from the loss down: " + "; ".join(
        f"{name}: {what}, puzzle {puzzle}" for name, what, puzzle in WRITTEN
    )
    drawing = Drawing(height, label)
    for x, words in ((78, "part"), (247, "what it passes down"), (420, "puzzle")):
        drawing.text(x, 20, words)
    for number, (name, what, puzzle) in enumerate(WRITTEN):
        y = 32 + ROW * number
        drawing.text(78, y + 17, name, code=True)
        drawing.labelled(140, y, 214, ROW - 6, what)
        drawing.text(420, y + 17, str(puzzle))
    drawing.arrow(28, 34, 28, 28 + ROW * len(WRITTEN))
    for first, last in ((3, 6), (7, 10)):
        drawing.segment(12, 38 + ROW * first, 12, 50 + ROW * last, thick=2)
    return drawing.svg()


SIX_SLOPES = (
    "numpy_dgelu_first_term", "", "numpy_dgelu_no_x", "numpy_dgelu_brackets", "numpy_dgelu_sigmoid",
    "numpy_dgelu_second_term",
)  # fmt: skip
"""The wrong slopes of GELU that are drawn without their names, and the solution, ""."""


def slope_of(name: str, x: np.ndarray, dx: float = 1.0) -> np.ndarray:
    """What a wrong `dgelu` of the museum, or the solution's, makes of x and of a gradient that is `dx` everywhere."""
    (path,) = [wrong.target() for wrong in zoo.load("p27") if wrong.name == name] or [
        ROOT / "solutions" / "p27" / "in_numpy.py"
    ]
    return load(path)["dgelu"](x, np.full_like(x, dx))


def six_slopes() -> str:
    """Six slopes of GELU by runs of the NumPy file, each over GELU itself."""
    x = np.linspace(-4, 4, 161)
    gelu = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    drawing = Drawing(
        300,
        "Six slopes of GELU, numbered, each over GELU itself. Slope 1 never falls below 0, 3 is 0.9 at 0, and 6 goes to 0 on "
        "the right; 2, 4 and 5 look alike.",
    )
    for number, name in enumerate(SIX_SLOPES):
        left, zero = 8 + 160 * (number % 3), 116 + 146 * (number // 3)

        def place(at: float, value: float, left: float = left, zero: float = zero) -> tuple[float, float]:
            return left + 18 * (at + 4), zero - 60 * value

        drawing.text(left + 72, zero - 94, str(number + 1))
        drawing.segment(left, zero, left + 144, zero, opacity=0.4)
        drawing.segment(left + 72, zero + 20, left + 72, zero - 84, opacity=0.4)
        for level in (0.5, 1):
            drawing.segment(left, zero - 60 * level, left + 144, zero - 60 * level, opacity=0.15)
        low = gelu < 1.35
        drawing.polyline(map(place, x[low], gelu[low]), dash="3 4", opacity=0.7)
        drawing.polyline(map(place, x, slope_of(name, x)), thick=2)
    return drawing.svg()


def live() -> list[tuple[str, float]]:
    """(part, KiB on the tape after it) of the recorded run of the solution."""
    text = outputs.load("tape_gates").text
    return [
        (name.strip(), float(held))
        for name, held in re.findall(r"^ {6}(\S.{13,}?) +([\d.]+) KiB", text, re.M)
    ]


def losses() -> list[float]:
    """The loss of every step of the recorded training run."""
    return [float(row["loss"]) for row in record.rows("training_by_hand")]


def samples() -> list[tuple[int, float, str]]:
    """Steps of that run with their losses and what the model wrote then: a dot for bytes that are not printable ASCII."""
    return [
        (int(row["step"]), float(row["loss"]), re.sub(r"(\\x[0-9a-f]{2}|[^ -~])+", "·", row["wrote"]))
        for row in record.rows("training_by_hand")
        if row["wrote"]
    ]


def samples_list() -> str:
    """The same as a list: a table would not let code wrap."""
    return "".join(
        f"- after {step} step{'s' * (step > 1)}, at a loss of {loss:.2f}: `{wrote.replace('`', chr(39))}`\n"
        for step, loss, wrote in samples()
    )


def loss_by_hand() -> str:
    """The curve of that run below what a model knows that knows nothing, with the means of its ends."""
    curve, nothing = losses(), math.log(256)
    first, last = (sum(part) / 10 for part in (curve[:10], curve[-10:]))
    drawing = Drawing(
        300,
        f"The loss falls from {first:.3f} in the first ten steps to {last:.3f} in the last ten of {len(curve)}, most of it in the first "
        f"hundred; a model that knows nothing has log 256, {nothing:.3f}.",
    )
    left, right, scale, bottom = 40, 470, 40, 262

    def place(step: float, loss: float) -> tuple[float, float]:
        return left + (right - left) * step / len(curve), bottom - scale * loss

    for loss in range(7):
        _, y = place(0, loss)
        drawing.segment(left, y, right, y, opacity=0.2 if loss else 1)
        drawing.text(left - 10, y + 4, str(loss), anchor="end")
    _, y = place(0, nothing)
    drawing.segment(left, y, right, y, dash="6 4", thick=2)
    drawing.text(right, y - 8, f"knows nothing: log 256 = {nothing:.3f}", anchor="end", size=14)
    drawing.polyline((place(step, loss) for step, loss in enumerate(curve, 1)), thick=1.5)
    drawing.text(left + 40, place(0, first)[1] + 12, f"first ten steps: {first:.3f}", anchor="start", size=14)
    drawing.text(right, place(0, last)[1] - 18, f"last ten: {last:.3f}", anchor="end", size=14)
    for step in range(0, len(curve) + 1, 100):
        drawing.text(place(step, 0)[0], bottom + 18, str(step))
    drawing.text((left + right) / 2, bottom + 35, "step", size=14)
    return drawing.svg()


def first_steps(part: int = 1) -> dict[str, list[record.Row]]:
    """Seed -> the first steps of its run in the record, at the command's learning rate or at a part of it."""
    rows = record.rows("first_steps")
    rate, runs = max(float(row["rate"]) for row in rows) / part, {}
    for row in rows:
        if math.isclose(float(row["rate"]), rate):
            runs.setdefault(row["seed"], []).append(row)
    return runs


def highest_rise(run: list[record.Row]) -> tuple[float, int]:
    """By how much the loss rises at most from one step to the next, and which step that is, counted from 0."""
    losses = [float(row["loss"]) for row in run]
    return max((after - before, step) for step, (before, after) in enumerate(pairwise(losses), 1))


def turned(run: list[record.Row]) -> float:
    """The cosine of the vector that all places share with that of the step before, where the loss rises most."""
    return float(run[highest_rise(run)[1]]["turn"])


def jumping(part: int = 1) -> list[list[record.Row]]:
    """The runs whose loss rises by more than 1 in a step; the one whose shared vector turns furthest comes first."""
    return sorted((run for run in first_steps(part).values() if highest_rise(run)[0] > 1), key=turned)


def first_block(seed: str) -> list[float]:
    """The size before each step of what all places share after the first block, with a minus where it points the other way."""
    sign, sizes = 1.0, []
    for row in record.rows("first_block"):
        if row["seed"] == seed:
            sign = math.copysign(sign, sign * float(row["turn"]))
            sizes.append(sign * float(row["size"]))
    return sizes


def through_zero() -> str:
    """The heavy run's first block around the jump: the vector shrinks, goes through zero, and comes back."""
    heavy = jumping()[0]
    at, sizes = highest_rise(heavy)[1], first_block(heavy[0]["seed"])
    steps = range(at - 4, at + 3)
    told = ", ".join(f"{sizes[step]:.2f} at step {step + 1}" for step in steps)
    drawing = Drawing(
        216, f"The size of what all places share after the first block, signed by its direction: {told}."
    )
    left, wide, zero, scale = 56, 60, 118, 40
    drawing.segment(left - 16, zero, left + wide * len(steps), zero)
    for place, step in enumerate(steps):
        x, size = left + wide * place, sizes[step]
        drawing.box(
            x, min(zero, zero - scale * size), 36, max(1.0, scale * abs(size)), shade=1 if step == at else 0.3
        )
        drawing.text(x + 18, zero - scale * size + (16 if size < 0 else -6), f"{size:.2f}", size=14)
        drawing.text(x + 18, 196, str(step + 1), size=14)
    drawing.text(left - 18, 196, "step", anchor="end", size=14)
    return drawing.svg()


def loss_jumps() -> str:
    """The losses of all runs of the record, and below where the vector that all places share turns; one run is heavy."""
    runs, nothing, heavy = first_steps(), math.log(256), jumping()[0][0]["seed"]
    rise, at = highest_rise(runs[heavy])
    drawing = Drawing(
        410,
        f"The losses of {len(runs)} runs, step by step; in {len(jumping())} of them the loss rises by more than 1 in one step. The heavy run "
        f"rises by {rise:.1f} at step {at + 1}. The vector that all places share has there a cosine of {turned(runs[heavy]):.2f} with that of the "
        "step before; elsewhere it is close to 1.",
    )
    left, right = 40, 470

    def panel(column: str, zero: float, scale: float, marks: tuple[float, ...]) -> None:
        """An axis with marks, and the lines of a column over the steps."""
        for mark in marks:
            y = zero - scale * mark
            drawing.segment(left, y, right, y, opacity=0.2 if mark else 1)
            drawing.text(left - 8, y + 4, f"{mark:g}", anchor="end")
        for seed, run in sorted(runs.items(), key=lambda named: named[0] == heavy):
            points = (
                (left + (right - left) * int(row["step"]) / len(run), zero - scale * float(row[column]))
                for row in run
            )
            drawing.polyline(points, thick=3 if seed == heavy else 1, opacity=1 if seed == heavy else 0.3)

    panel("loss", 252, 24, (0, 2, 4, 6, 8))
    drawing.segment(left, 252 - 24 * nothing, right, 252 - 24 * nothing, dash="6 4", thick=2)
    drawing.text(left + 6, 232, f"loss; dashed: knows nothing, {nothing:.2f}", anchor="start", size=14)
    panel("turn", 324, 44, (-1, 0, 1))
    drawing.text(left + 6, 360, "cosine with the step before", anchor="start", size=14)
    for step in range(0, len(runs[heavy]) + 1, 5):
        drawing.text(left + (right - left) * step / len(runs[heavy]), 390, str(step))
    return drawing.svg()


TOKENS = (2, 0, 3, 2, 3, 3, 0, 2)
"""Of the places of the figure; nobody reads row 1."""


def sorted_places() -> str:
    """Places with their tokens, the same sorted, and the row of the table that each stretch belongs to."""
    by_token = sorted_by_token(np.array(TOKENS), max(TOKENS) + 1)
    order, starts = by_token["order"].tolist(), by_token["starts"].tolist()
    stretches = [order[a:b] for a, b in pairwise(starts)]
    label = "; ".join(
        f"row {row} adds up the places {', '.join(map(str, s)) or 'none'}" for row, s in enumerate(stretches)
    )
    drawing = Drawing(
        186, f"Eight places with the tokens {', '.join(map(str, TOKENS))}, sorted by token: {label}."
    )
    drawing.text(NARROW / 2, 18, "places, each with its token")
    drawing.text(NARROW / 2, 178, "order: the same places, sorted; below each stretch the row of the table")
    side = 52
    for place, token in enumerate(TOKENS):
        left, now = 32 + side * place, 32 + side * order.index(place)
        drawing.labelled(left, 28, 44, 26, str(token), code=True)
        drawing.arrow(left + 22, 54, now + 22, 96)
        drawing.labelled(now, 98, 44, 26, str(place), code=True)
    for row, (first, end) in enumerate(pairwise(starts)):
        if first < end:
            drawing.segment(34 + side * first, 132, 24 + side * end, 132, thick=2)
            drawing.text(28 + side * (first + end) / 2, 150, f"row {row}")
    return drawing.svg()


def by_hand_beside() -> str:
    """A step of GPT-2 by hand beside PyTorch's two, in time and in memory, as recorded."""
    ways = {"autograd": "eager PyTorch", "torch.compile": "torch.compile", "by hand": "by hand"}
    steps = {row["what"]: row for row in record.rows("step_by_hand")}
    measures = [
        ("A step of GPT-2 (124M)", {way: float(steps[way]["median_us"]) / 1e3 for way in ways}, "ms"),
        ("its peak of memory", {way: int(steps[way]["peak_bytes"]) / 2**30 for way in ways}, "GiB"),
    ]
    return compared("", measures, ways)


def step_kinds() -> str:
    """The kinds of kernel of a step of GPT-2 by hand, each with its time and its floor, as recorded."""
    kinds = [
        (row["what"], float(row["median_us"]) / 1e3, float(row["floor_us"]) / 1e3)
        for row in record.rows("step_by_hand")
        if row["floor_us"]
    ]
    drawing = Drawing(
        34 * len(kinds) + 30,
        "Milliseconds of a step by kind of kernel, and the least time that each kind can take: "
        + "; ".join(f"{what} {time:.2f}, floor {floor:.2f}" for what, time, floor in kinds)
        + ".",
    )
    scale = 220 / max(time for _, time, _ in kinds)
    times = [(what, time, f"{time / floor:.1f} times", 0.08) for what, time, floor in kinds]
    bar_rows(drawing, 6, times, scale, left=150, step=34)
    bar_rows(drawing, 6, [("", floor, "", 0.35) for _, _, floor in kinds], scale, left=150, step=34)
    drawing.text(158, 34 * len(kinds) + 22, "solid: the floor; the number: time over floor", anchor="start")
    return drawing.svg()


# ---- In steps -----------------------------------------------------------------------------------------------


def tape_steps() -> str:
    """What lies on the tape after each part of the recorded step: a column for each part there and back, the piles side by side."""
    run = live()
    most = max(held for _, held in run)
    peak = next(number for number, (_, held) in enumerate(run) if held == most)
    drawing = Steps(
        344,
        f"Columns that grow part by part to {most:g} KiB at {run[peak][0]} and shrink in the opposite order to {run[-1][1]:g}.",
        still=peak,
    )
    scale, bottom, wide = 190 / most, 244, 30
    for words, first, end in (("forward", 0, peak), ("backward", peak + 1, len(run) - 1)):
        left, right = 20 + 32 * first, 20 + 32 * end + wide
        drawing.text((left + right) / 2, 16, words, size=14)
        drawing.arrow(left, 24, right, 24)
    drawing.segment(10, bottom, NARROW - 10, bottom, thick=2)
    kept = [held - before for (_, before), (_, held) in pairwise([("", 0.0), *run[: peak + 1]])]
    for number, (name, held) in enumerate(run):
        x, part = 20 + 32 * number, name.removesuffix(" back")
        way = "backward" if name.endswith(" back") else "forward"
        left, pile, level = held, [], bottom
        for piece in kept:  # from the bottom; whatever is on the tape was put there in this order
            if left > 0:
                pile.append(min(piece, left))
                left -= piece
        for piece in pile:
            level -= scale * piece
            drawing.box(x, level, wide, scale * piece, thick=0.5, radius=0)
            with drawing.during(number, len(run) - 1):
                drawing.box(x, level, wide, scale * piece, shade=0.2, thick=0.5, radius=0)
        drawing.parts.append(f'<g transform="translate({x + 20} {bottom + 8}) rotate(-90)">')
        drawing.text(0, 0, part, anchor="end", code=True)
        drawing.parts.append("</g>")
        with drawing.during(number):
            drawing.box(x, level, wide, max(bottom - level, 1), shade=0.35, thick=2.5, radius=0)
            drawing.text(
                min(max(x + wide / 2, 44), NARROW - 44),
                level - 6 if level > 60 else 38,
                f"{held:g} KiB",
                size=14,
            )
        if way == "forward":
            top = " This is the peak." if number == peak else ""
            drawing.words.append(
                f"Forward, {name}: it keeps what its backward will need, {kept[number]:g} KiB. The tape holds {held:g} KiB.{top}"
            )
        else:
            drawing.words.append(
                f"Backward, {part}: it takes its own from the top. The tape still holds {held:g} KiB."
            )
    return drawing.hero(
        "The tape of a recorded step of the solution, three blocks of 4 x 32 tokens: what lies on it after each part, bottom first. What was put "
        "down last is taken first. The blocks are nearly all of it.",
        "Nothing lies on the tape before the first part runs.",
    )


LINE = 56
"""Characters of a line of what the model writes."""


def writes() -> str:
    """What the model of the recorded training run writes after some of its steps, below the curve of its loss so far."""
    curve = losses()
    written = samples()
    drawing = Steps(
        282,
        "The loss of a training run, and what the model writes: "
        + "; ".join(f"after {step} steps, at {loss:.2f}, {wrote[:LINE]}" for step, loss, wrote in written),
        still=len(written) - 1,
    )
    left, right, bottom, scale = 30, NARROW - 10, 170, 26

    def place(step: int) -> tuple[float, float]:
        return left + (right - left) * step / len(curve), bottom - scale * curve[step - 1]

    for loss in range(0, 7, 2):
        drawing.segment(left, bottom - scale * loss, right, bottom - scale * loss, opacity=0.2 if loss else 1)
        drawing.text(left - 8, bottom - scale * loss + 4, str(loss), anchor="end")
    drawing.text(left + (right - left) / 2, 30, "loss")
    drawing.text(right, bottom + 18, f"step {len(curve)}", anchor="end")
    points = [place(step) for step in range(1, len(curve) + 1)]
    drawing.polyline(points, opacity=0.25)
    for number, (step, own, wrote) in enumerate(written):
        with drawing.during(number):
            drawing.polyline(points[:step], thick=2)
            x, y = place(step)
            drawing.box(x - 4, y - 4, 8, 8, shade=0.75, thick=2, radius=4)
            drawing.text(min(x + 10, right - 60), y - 10, f"{own:.2f}", anchor="start", size=14)
            for line, first in enumerate(range(0, 3 * LINE, LINE)):
                drawing.text(left, 214 + 22 * line, wrote[first : first + LINE], anchor="start", code=True)
        drawing.words.append(
            f"After {step} step{'s' * (step > 1)}, {step * 1024:,} bytes in excerpts of this book that may repeat, the loss is {own:.2f}. Given “The gradient”, the model continues as shown below."
        )
    return drawing.hero(
        f"A recorded run of the solution, on a CPU: {len(curve)} steps of 16 x 64 bytes, every gradient by hand.",
        "Above, the loss; below, what the model writes.",
    )


FILES = svgs(
    by_hand_beside,
    step_kinds,
    sorted_places,
    loss_by_hand,
    loss_jumps,
    through_zero,
    written,
    six_slopes,
) | {
    "tape_of_gpt.svg": tape,
    "samples_by_hand.md": samples_list,
}
