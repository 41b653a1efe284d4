"""Charts of numbers from NumPy, from recorded outputs and from the record `museum_curves`; none needs torch."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from book.figures.charts import Axis, Series, bars, plot, rows_of_bars, spans
from book.figures.figures import player_start, svgs
from book.measure import outputs, record
from harness.puzzles.p25 import layout

RANKS, TILE = 4, 16


def said(rows: dict[str, np.ndarray]) -> str:
    """Return vectors in words, for a label."""
    return "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in row)}" for name, row in rows.items())


# ---- Rows of numbers ----------------------------------------------------------------------------------------


def x_hat(rows: np.ndarray) -> np.ndarray:
    """Rows [..., H] minus their mean, over their deviation."""
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)


def slopes(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """How fast each output [i] of a function of rows grows with each x [j], by central differences: no formula."""
    moved = step * np.eye(len(x))
    return ((function(x + moved) - function(x - moved)) / (2 * step)).T


def one_moves_all(which: int = 2) -> str:
    """One element of a row moves, and every element of x_hat with it."""
    x = np.array(player_start()["x"])
    first = "a row x; one element grows (bars at a quarter of the scale below)"
    rows = {first: x, "how fast each element of x̂ changes": slopes(x_hat, x)[:, which]}
    label = f"Element {which} of a row grows, and every element of x_hat changes. {said(rows)}"
    return rows_of_bars(label, rows, [which], reduced={first: 4})


def rms_moves(which: int = 2) -> str:
    """One element of a row moves: what LayerNorm's x_hat does, and what RMSNorm's does."""
    x = np.array(player_start()["x"])
    unshifted = lambda rows: rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5)  # noqa: E731
    first = "x (bars at a quarter of the scale below)"
    rows = {
        first: x,
        "how fast x̂ changes: LayerNorm": slopes(x_hat, x)[:, which],
        "how fast x̂ changes: RMSNorm": slopes(unshifted, x)[:, which],
    }
    return rows_of_bars(f"Element {which} of a row grows. {said(rows)}", rows, [which], reduced={first: 4})


def gradient_parts() -> str:
    """A gradient at x_hat, its part along 1, its part along x_hat, and the rest, which is dx / rstd."""
    start = player_start()
    normal, g = x_hat(np.array(start["x"])), np.array(start["g"])
    c2, c1 = g.mean(), (g * normal).mean()
    rows = {
        "g": g, "c2, along 1": np.full_like(g, c2), "c1 x̂, along x̂": c1 * normal,
        "rest = dx / rstd": g - c2 - c1 * normal,
    }  # fmt: skip
    return rows_of_bars(f"A gradient and its three parts. {said(rows)}", rows, height=84)


def softmax(rows: np.ndarray) -> np.ndarray:
    """The probabilities of rows."""
    exponentials = np.exp(rows - rows.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def softmax_row() -> str:
    """A row of probabilities, the gradient that arrives, and what of it reaches the logits."""
    P = softmax(np.array((1.0, 0.2, -0.6, 1.4, -1.0, 0.0)))
    dP = np.array((0.6, -0.4, 0.9, -0.8, 0.3, 0.5))
    rows = {
        "P, the output": P,
        "dP, what arrives": dP,
        "dS, at the logits: adds up to 0": P * (dP - (dP * P).sum()),
    }
    return rows_of_bars(f"Softmax backward on six numbers. {said(rows)}", rows)


def wrong_dq() -> str:
    """The gradient of a query by the hunt's first bug and by the mended code, as recorded."""
    found = re.findall(r"^(given|mended) +(.+)$", outputs.load("hunt_dq").text, re.M)
    names = {"given": "row 0 of dq, by the code above", "mended": "row 0 of dq, by the corrected code"}
    rows = {names[way]: np.array([float(element) for element in elements.split()]) for way, elements in found}
    return rows_of_bars(
        f"A row of a gradient. {said(rows)}. Signs and proportions agree, and the size does not.", rows
    )


def merging() -> str:
    """Two softmaxes of three scores, and the softmax of all six that they make with their shares."""
    blocks = np.array(((0.4, 1.6, -0.5), (0.9, 2.2, 0.1)))
    shares = softmax(np.log(np.exp(blocks).sum(-1)))
    rows = {
        f"weights within each block; shares of A and B: {shares[0]:.2f}, {shares[1]:.2f}": softmax(
            blocks
        ).ravel(),
        "times the block's share: weights in the softmax over both blocks": softmax(blocks.ravel()),
    }
    return rows_of_bars(f"Six scores in two blocks of three. {said(rows)}", rows, range(3, 6))


# ---- Bars ---------------------------------------------------------------------------------------------------


def share_bars(label: str, shares: dict[str, tuple[float, str]]) -> str:
    """Draw shares of a whole, each with its words."""
    return bars(
        f"{label}: " + ", ".join(f"{name} {words}" for name, (_, words) in shares.items()),
        {"": [(name, share, words, True) for name, (share, words) in shares.items()]},
    )


def times(x: np.ndarray, number: float) -> np.ndarray:
    """A float16 tensor times a number."""
    return (x.astype(np.float32) * np.float32(number)).astype(np.float16)


def same_bits(first: float, second: float) -> float:
    """The share of all finite float16 numbers x for which x * first * second has the bits of x * (first * second), as PyTorch computes
    them: the number is a float32, and each product is rounded to float16."""
    with np.errstate(all="ignore"):
        x = np.arange(2**16, dtype=np.uint16).view(np.float16)
        x = x[np.isfinite(x)]
        twice, once = times(times(x, first), second), times(x, first * second)
    return float((twice.view(np.uint16) == once.view(np.uint16)).mean())


def folds() -> str:
    """Which pairs of constants fold without changing a bit, tried on every number of float16."""
    products = ((2.0, 3.0), (3.0, 5.0), (0.1, 10.0), (2.0, 0.5))
    shares = {f"x * {a:g} * {b:g}": same_bits(a, b) for a, b in products}
    percent = lambda share: "100%" if share == 1 else f"{min(99.9, 100 * share):.1f}%"  # noqa: E731
    return share_bars(
        "Share of all finite float16 numbers whose bits stay when two products become one",
        {name: (share, percent(share)) for name, share in shares.items()},
    )


def relu_ways() -> str:
    """Bits that puzzle 20's four ReLUs keep for an element in float32; the output is another layer's too."""
    bits = {"the input": 32, "the output": 32, "a bool": 8, "a bit": 1}
    return bars(
        f"Bits kept for each element: {', '.join(f'{name} {size}' for name, size in bits.items())}.",
        {
            "": [
                (name, size, f"{size} bits" if size > 1 else "1 bit", name != "the output")
                for name, size in bits.items()
            ]
        },
    )


def kept_by_way() -> str:
    """Bytes kept for the backward pass by PyTorch's functions, compiled ones and custom ones, as recorded."""
    kept: dict[str, dict[str, float]] = {}
    text = outputs.load("worth_it").text
    for function, way, size in re.findall(
        r"^(\w+) +(eager|compiled|custom) +[\d.]+ ms +([\d.]+) MB", text, re.M
    ):
        kept.setdefault(function, {})[way] = float(size)
    groups = {
        name: [(way, size, f"{size:.2f} MB", way == "custom") for way, size in ways.items()]
        for name, ways in kept.items()
        if name != "attention"  # a later puzzle's
    }
    told = "; ".join(
        f"{name} {', '.join(f'{way} {size:g}' for way, size in ways.items())}" for name, ways in kept.items()
    )
    return bars(f"Megabytes kept for the backward pass: {told}", groups)


def tape_height() -> str:
    """What lies on the tape after each part of the recorded step of the solution, forward and backward."""
    run = re.findall(r"^ {6}(\S.{13,}?) +([\d.]+) KiB", outputs.load("tape_gates").text, re.M)
    parts = [(name.strip(), float(held)) for name, held in run]
    groups = {
        way: [
            (name.removesuffix(" back"), held, f"{held:g} KiB", True)
            for name, held in parts
            if name.endswith(" back") == back
        ]
        for way, back in (("forward", False), ("backward", True))
    }
    return bars("KiB on the tape: " + ", ".join(f"{name} {held:g}" for name, held in parts), groups)


def balance(length: int = 2048) -> str:
    """Tiles of each rank at each step of a causal ring; a step lasts as long as its busiest rank."""
    lines, told = {}, []
    for name, balanced in (("plain", False), ("zig-zag", True)):
        ranks = [layout.count_tiles(rank, RANKS, length, balanced, TILE) for rank in range(RANKS)]
        steps = [max(each) for each in zip(*ranks, strict=True)]
        for rank, tiles in enumerate(ranks):
            starts = [sum(steps[:step]) for step in range(RANKS)]
            lines[f"{name}, rank {rank}"] = [
                (at, at + count, 0.35 + 0.3 * (step % 2))
                for step, (at, count) in enumerate(zip(starts, tiles, strict=True))
            ]
        told.append(
            f"{name}: {', '.join(f'rank {rank} {sum(tiles):,}' for rank, tiles in enumerate(ranks))}, "
            f"in the time of {sum(steps):,}"
        )
    return spans(f"Tiles that each rank computes. {'; '.join(told)}", lines, "time, in tiles")


# ---- Curves -------------------------------------------------------------------------------------------------


def difference_errors(dtype: type) -> list[tuple[float, float]]:
    """(eps, error) of a central difference of tanh at 40 points, in a dtype, against its derivative in float64; the median."""
    x = np.linspace(-2, 2, 40)
    slope = 1 - np.tanh(x) ** 2
    points = []
    for power in range(-11, 0):
        eps = 10.0**power
        up, down = (np.tanh((x + sign * eps).astype(dtype)).astype(np.float64) for sign in (1, -1))
        points.append((eps, float(np.median(np.abs((up - down) / (2 * eps) - slope)))))
    return [(eps, error) for eps, error in points if error > 0]


def differences() -> str:
    """The error of a central difference over its step: too large a step on the right, rounding on the left."""
    curves = {"float32": difference_errors(np.float32), "float64": difference_errors(np.float64)}
    told = "; ".join(f"{name} {dict(points)[1e-6]:.0e}" for name, points in curves.items())
    return plot(
        f"Errors of central differences of tanh over the step. At gradcheck's step of 1e-06: {told}.",
        [Series(name, points, "--" if name == "float32" else "-") for name, points in curves.items()],
        Axis("step ε"),
        Axis("error of the difference"),
    )


def algebra_errors(dtype: str) -> dict[str, list[tuple[float, float]]]:
    """Way -> (mean over deviation, error), from the recorded run; a mean of 0 has no place on the axis."""
    head, *lines = outputs.load("algebra").text.splitlines()
    names = re.split(r" {2,}", head.replace("unrounded one-pass", "unrounded  one-pass"))[2:]
    by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for line in lines:
        which, mean, *errors = line.split()
        if which == dtype and float(mean) > 0:
            for name, error in zip(names, errors, strict=True):
                by_name[name].append((float(mean), float(error)))
    return by_name


def cancellation() -> str:
    """The error of the product with LayerNorm after it, over the mean of the rows, in float32."""
    errors = algebra_errors("float32")
    ways = {"in order": "-", "after": "--", "one-pass variance": ":"}
    told = "; ".join(f"{way}: {', '.join(f'{error:.1e}' for _, error in errors[way])}" for way in ways)
    return plot(
        f"Errors in float32 where the mean of a row is 1, 10, 100 and 1000 standard deviations. {told}",
        [Series(way, errors[way], dash) for way, dash in ways.items()],
        Axis("mean of a row, in standard deviations"),
        Axis("error / largest output"),
    )


def saving_less() -> str:
    """Bytes against error of one block's activations, from the recorded run of the example; hollow: compiled."""
    found = re.findall(r"^(\S.*?) +([\d.]+) MB +(\S+)$", outputs.load("saving_less").text, re.M)
    points = [(name, float(size), float(error)) for name, size, error in found]
    return plot(
        "Bytes kept against the error of the worst gradient. "
        + "; ".join(f"{n}: {s:g} MB, {e:.0e}" for n, s, e in points),
        [Series("", [(size, error)], "", "s", name.startswith("compiled, ")) for name, size, error in points],
        Axis("MB kept between the passes", log=False, ends=(0, 1.25 * max(size for _, size, _ in points))),
        Axis("error of the worst gradient", ends=(1e-7, 1e-2)),
        notes=[
            ((size, error * (0.5 if name.startswith("compiled, ") else 1)), name.removeprefix("compiled, "))
            for name, size, error in points
        ],  # words of hollow points stand lower, clear of the others
    )


def descent(column: int, name: str, ticks: Sequence[float]) -> str:
    """One quantity of both rows of the recorded descent over the steps; on logarithmic axes there is no step 0."""
    lines = re.findall(r"^ +\d.*$", outputs.load("row_descent").text, re.M)
    rows = [row for row in ([float(number) for number in line.split()] for line in lines) if row[0]]
    ends = rows[-1][column], rows[-1][column + 2]
    return plot(
        f"{name} over {rows[-1][0]:.0f} steps: it ends at {ends[0]:g} by the gradient and at {ends[1]:g} by "
        "the diagonal formula.",
        [
            Series("LayerNorm's gradient", [(row[0], row[column]) for row in rows], width=2.6),
            Series("diagonal formula", [(row[0], row[column + 2]) for row in rows], "--"),
        ],
        Axis("step"),
        Axis(name, ticks={tick: f"{tick:g}" for tick in ticks}),
    )


# ---- Losses of training runs with a wrong kernel ------------------------------------------------------------

WINNER = "dx_means_over_output"
"""A wrong kernel of puzzle 22 whose run ends below the right one's."""
Curve = list[tuple[float, float]]


def wrong_runs() -> dict[str, tuple[Curve, Curve]]:
    """Wrong kernel -> the first seed's right run and its own: losses, each at its step."""
    first, runs = record.rows("museum_curves")[0]["seed"], {}
    for (bug,), rows in record.by(record.Rows("museum_curves").select(seed=first), "bug").items():
        right, own = ([(float(row["step"]), float(row[name])) for row in rows] for name in ("right", "wrong"))
        runs[bug] = right, own
    return runs


def one_is_wrong() -> str:
    """The right run and the one of WINNER, without saying which is which."""
    curves = dict(zip("AB", wrong_runs()[WINNER], strict=True))
    told = "; ".join(f"{name} ends at {curve[-1][1]:.2g}" for name, curve in curves.items())
    return plot(
        f"Two falling losses, A and B: {told}",
        [
            Series(name, curve, dash, width=2)
            for (name, curve), dash in zip(curves.items(), ("-", "--"), strict=True)
        ],
        Axis("step"),
        Axis("loss"),
    )


def wrong_losses() -> str:
    """The losses of all wrong runs, thin, and of the right one, thick. What leaves the picture is cut off."""
    every = wrong_runs()
    right = next(iter(every.values()))[0]
    runs = [own for _, own in every.values()]
    fall, below = (sum(own[-1][1] < end for own in runs) for end in (right[0][1], right[-1][1]))
    return plot(
        f"Losses of {len(runs)} runs with a wrong kernel each: {fall} fall, and {below} end below the right run's.",
        [*(Series("", own, width=1, shade=0.5) for own in runs), Series("", right, width=4)],
        Axis("step"),
        Axis("loss", ends=(0.003, 2)),
    )


FILES = svgs(
    one_moves_all, rms_moves, gradient_parts, softmax_row, wrong_dq, merging, relu_ways, folds, kept_by_way, balance,
    tape_height, differences, cancellation, saving_less, one_is_wrong, wrong_losses,
) | {
    "descent_loss.svg": lambda: descent(1, "loss", (1, 2, 4, 8)),
    "descent_mean.svg": lambda: descent(2, "mean of the row", (0.1, 1, 10)),
}  # fmt: skip
