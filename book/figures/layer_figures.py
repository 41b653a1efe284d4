"""Figures of the layer's own pages: the introduction, autograd, puzzle 22, and the pages on fusing, sizes and compiling.

Each is at most NARROW wide, so that a phone can show it. Numbers come from recorded runs, measurements and the shapes; nothing here
needs torch.
"""

import ast
import math
import re
from collections.abc import Callable

import numpy as np

from book.figures import bench_results, curve_chart, every_size
from book.figures.charts import Axis, LogChart, ratio_dots
from book.figures.figures import LEGIBLE, ROOT, Drawing, bar_rows, player_start, svgs
from book.measure import ledger, outputs, record
from book.measure.ledger import GPT2_SMALL

SIGNS = {
    "gamma": "γ",
    "beta": "β",
    "dgamma": "dγ",
    "dbeta": "dβ",
    "bias": "b",
    "linear_weight_t": "W transposed",
}
"""Names of the ledger that a reader knows by another sign."""


def sign(name: str) -> str:
    """A tensor of the ledger as the pages write it."""
    return SIGNS.get(name, name)


# ---- Introduction and autograd ------------------------------------------------------------------------------


def two_halves() -> str:
    """LayerNorm and Linear forward, and the second half that somebody has to write: one gradient for each thing that went in."""
    forward = ledger.LAUNCHES["forward", "fused"][0].reads
    fused = ledger.LAUNCHES["backward", "fused"]
    gradients = {name.removeprefix("d"): name for step in fused[1:] for name in step.writes}
    gradients["bias"] = gradients.pop("b")
    assert set(gradients) == set(forward)
    drawing = Drawing(
        312,
        "Forward: x through LayerNorm with γ and β, then Linear with W and b, to y and the loss. Backward, from dy: "
        + ", ".join(sign(gradients[name]) for name in forward)
        + ", one gradient for each thing that went in.",
    )
    layers = {"LayerNorm": (112, ("gamma", "beta")), "Linear": (262, ("W", "bias"))}
    for y, words in ((104, "forward"), (228, "backward")):
        drawing.text(10, y - 34, words, anchor="start")
    drawing.labelled(10, 84, 56, 40, "x")
    drawing.labelled(414, 84, 56, 40, "loss")
    drawing.labelled(10, 208, 56, 40, "dx", shade=0.4)
    drawing.labelled(414, 208, 56, 40, "dy")
    for name, (x, parameters) in layers.items():
        drawing.labelled(x, 84, 110, 40, name)
        drawing.labelled(x, 208, 110, 40, "its backward", "pass", shade=0.4)
        for number, parameter in enumerate(parameters):
            at = x + 8 + 52 * number
            drawing.labelled(at, 10, 42, 30, sign(parameter))
            drawing.arrow(at + 21, 42, at + 21, 82)
            drawing.arrow(at + 21, 250, at + 21, 272)
            drawing.labelled(at, 274, 42, 30, sign(gradients[parameter]), shade=0.4)
    for x0, x1 in ((66, 112), (222, 262), (372, 414)):
        drawing.arrow(x0, 104, x1, 104)
        drawing.arrow(x1, 228, x0, 228)
    drawing.text(242, 96, "ln")
    drawing.text(393, 96, "y")
    drawing.text(242, 220, "dln")
    return drawing.svg()


def recorded_graph() -> dict[str, tuple[float, float]]:
    """Name -> value and gradient, as the program of the page printed them."""
    lines = outputs.load("autograd_graph").text.splitlines()[1:]
    return {name: (float(value), float(gradient)) for name, value, gradient in map(str.split, lines)}


def autograd_nodes() -> str:
    """The page's small graph: values forward, the local derivative on each edge, gradients backward."""
    recorded = recorded_graph()
    value = {name: pair[0] for name, pair in recorded.items()}
    edges = {
        ("w", "u"): value["x"], ("x", "u"): value["w"], ("u", "v"): 1.0, ("b", "v"): 1.0, ("v", "L"): 2 * value["v"],
    }  # fmt: skip
    places = {"w": (52, 40), "x": (52, 150), "u": (178, 95), "b": (178, 205), "v": (304, 95), "L": (428, 95)}
    formulas = {"u": "u = w x", "v": "v = u + b", "L": "L = v²"}
    drawing = Drawing(
        245,
        "A graph: w and x make u, u and b make v, v makes L. "
        + "; ".join(f"{name} is {v:g}, its gradient {g:g}" for name, (v, g) in recorded.items()),
    )
    for (start, end), slope in edges.items():
        (x0, y0), (x1, y1) = places[start], places[end]
        drawing.arrow(x0 + 46, y0, x1 - 46, y1 + (8 if y0 > y1 else -8 if y0 < y1 else 0))
        aside, below = (
            (8, -10) if y0 < y1 else (0, -10) if y0 == y1 else (-20, 8) if start == "b" else (10, 22)
        )
        drawing.text((x0 + x1) / 2 + aside, (y0 + y1) / 2 + below, f"×{slope:g}")
    for name, (x, y) in places.items():
        v, g = recorded[name]
        drawing.labelled(
            x - 45, y - 32, 90, 64, formulas.get(name, name), f"{v:g}", f"gradient {g:g}", shade=0.06
        )
    return drawing.svg()


# ---- Puzzle 22 ----------------------------------------------------------------------------------------------


def through_memory() -> str:
    """The launches of the unfused forward pass and what they leave in memory for each other; the fused one beside them."""
    launches = ledger.LAUNCHES["forward", "unfused"]
    last = {tensor: number for number, step in enumerate(launches) for tensor in step.reads}
    between = [
        (number, last[step.writes[0]], step.writes)
        for number, step in enumerate(launches)
        if last.get(step.writes[0], 0) > number
    ]
    bytes_moved = {who: ledger.moved("forward", who, GPT2_SMALL) / 1e6 for who in ("unfused", "fused")}
    drawing = Drawing(
        356,
        "Unfused: "
        + "; ".join(
            f"{launches[start].name} writes {', '.join(map(sign, names))}, which {launches[end].name} reads"
            for start, end, names in between
        )
        + f". Fused: one launch, nothing in between. At least {bytes_moved['unfused']:.0f} MB are moved, and {bytes_moved['fused']:.0f}.",
    )
    drawing.text(75, 18, "launches")
    drawing.text(245, 18, "memory")
    drawing.text(415, 18, "fused")
    top, line = 32, 58
    for number, step in enumerate(launches):
        drawing.labelled(5, top + line * number, 140, 34, step.name, code=True)
    for start, end, names in between:
        y = top + 28 + line * start
        drawing.labelled(185, y, 125, 30, ", ".join(map(sign, names)), shade=0.35)
        drawing.arrow(146, top + 22 + line * start, 184, y + 10)
        drawing.arrow(184, y + 22, 146, top + 12 + line * end, faint=True)
    drawing.labelled(360, top, 112, line * 4 + 34, "one launch,", "one thread", "for a row")
    y = top + line * 5 + 6
    drawing.text(145, y, f"moves {bytes_moved['unfused']:.0f} MB at least")
    drawing.text(410, y, f"{bytes_moved['fused']:.0f} MB at least")
    return drawing.svg()


def x_hat(rows: np.ndarray) -> np.ndarray:
    """Rows [..., H] minus their mean, over their deviation."""
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)


def slopes(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """How fast each output [i] of a function of rows grows with each x [j], by central differences: no formula."""
    moved = step * np.eye(len(x))
    return ((function(x + moved) - function(x - moved)) / (2 * step)).T


def column_change(which: int) -> tuple[np.ndarray, np.ndarray]:
    """The player's row, and how fast each element of its x_hat grows with element `which`."""
    x = np.array(player_start()["x"])
    return x, slopes(x_hat, x)[:, which]


def bars_of(
    drawing: Drawing, left: float, middle: float, width: float, height: float, values: np.ndarray, chosen: int | None
) -> None:  # fmt: skip
    """Upright bars around a line, with their numbers; the chosen one darker."""
    column, most = width / len(values), float(np.abs(values).max())
    drawing.segment(left, middle, left + width, middle, opacity=0.5)
    for i, value in enumerate(values):
        size = abs(float(value)) / most * height
        y = middle if value < 0 else middle - size
        drawing.box(left + column * i + 4, y, column - 8, size, shade=0.7 if i == chosen else 0.2)
        at = middle + size + 15 if value < 0 else middle - size - 5
        drawing.text(left + column * (i + 0.5), at, f"{value:.2f}".replace("-", "−"))


def one_moves_all(which: int = 2) -> str:
    """One element of a row moves, and every element of x_hat with it."""
    x, change = column_change(which)
    drawing = Drawing(
        300,
        f"A row of {len(x)} numbers. Where element {which + 1} grows, x_hat changes by "
        + ", ".join(f"{value:.2f}" for value in change)
        + " for each unit: every element moves.",
    )
    drawing.text(10, 18, "a row x; one element is moved", anchor="start")
    bars_of(drawing, 8, 82, 464, 40, x, which)
    drawing.text(10, 168, "how fast each element of x̂ moves with it", anchor="start")
    bars_of(drawing, 8, 240, 464, 36, change, which)
    return drawing.svg()


def three_parts() -> dict[str, np.ndarray]:
    """The Jacobian of the essay's row, without its factor rstd, by its three paths, from the recorded numbers."""
    rows = re.findall(r"^ *(-?\d+\.\d) +(-?\d+\.\d{3}) ", outputs.load("one_row").text, re.M)
    normalised = np.array([float(number) for _, number in rows])
    count = len(normalised)
    return {
        "directly": np.eye(count),
        "through the mean": np.full((count, count), -1 / count),
        "through the variance": -np.outer(normalised, normalised) / count,
    }


def three_paths() -> str:
    """Three matrices and their sum, the Jacobian of a row of eight: an entry is a square, filled where it is positive."""
    parts = three_parts()
    J = sum(parts.values(), np.zeros((8, 8)))
    drawing = Drawing(
        448,
        "The Jacobian of eight numbers as a sum of three matrices of eight by eight: ones on the diagonal; the same small negative number "
        "everywhere; and minus an outer product, whose signs form blocks. In the sum no entry is zero.",
    )
    cell = 20
    for number, (words, matrix) in enumerate([*parts.items(), ("all three: the Jacobian", J)]):
        left, top = 22 + 240 * (number % 2), 30 + 218 * (number // 2)
        drawing.text(left + 4 * cell, top - 10, words)
        drawing.box(left - 2, top - 2, 8 * cell + 4, 8 * cell + 4, thick=0.5)
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                side = max((cell - 2) * min(abs(value), 1) ** 0.5, 0)
                if side > 0.5:
                    at = (cell - side) / 2
                    drawing.box(
                        left + cell * j + at, top + cell * i + at, side, side,
                        shade=0.75 if value > 0 else 0, thick=1, radius=1,
                    )  # fmt: skip
        if number < 3:
            drawing.text(left + 8 * cell + 28, top + 4 * cell + 8, "+" if number < 2 else "=", size=22)
    return drawing.svg()


def backward_flow() -> str:
    """From dy to the five gradients: what stays in its row, and what is a sum over all rows."""
    drawing = Drawing(
        330,
        "From dy, O numbers a row, through W to dln and through γ to g, H numbers a row, and by two means over the row to dx. On "
        "the way every row adds to db and dW, and to dγ and dβ: sums over all B S rows.",
    )
    drawing.text(120, 18, "in each row by itself")
    drawing.text(395, 18, "sums over all rows")
    steps = (("dy", "O numbers"), ("dln", "H numbers"), ("g", "H numbers"), ("dx", "H numbers"))
    ways = ("times W", "times γ", "minus two means, times rstd")
    for number, (name, size) in enumerate(steps):
        y = 32 + 76 * number
        drawing.labelled(10, y, 130, 44, name, size, shade=0.4 if name == "dx" else 0.06)
        if number < len(ways):
            drawing.arrow(75, y + 46, 75, y + 74)
            drawing.text(86, y + 65, ways[number], anchor="start")
    for y, sums in ((32, ("db [O]", "dW [O, H]")), (108, ("dγ [H]", "dβ [H]"))):
        for number, name in enumerate(sums):
            x = 300 + 90 * number
            drawing.labelled(x, y, 84, 44, name, shade=0.4)
        drawing.arrow(142, y + 22, 298, y + 22)
    drawing.text(220, 48, "times 1 or ln")
    drawing.text(220, 124, "times x̂ or 1")
    return drawing.svg()


def example_numbers() -> dict[str, np.ndarray]:
    """The inputs of the page's example, read from its source."""
    source = (ROOT / "book" / "examples" / "parameter_gradients.py").read_text(encoding="utf-8")
    region = source.split("ANCHOR: numbers")[1].split("ANCHOR_END")[0]
    return {
        name: np.array(ast.literal_eval(numbers))
        for name, numbers in re.findall(r"^(\w+) = torch\.tensor\((\[.*\]), dtype", region, re.M)
    }


def row_shares() -> list[np.ndarray]:
    """What each row of the example contributes to dW: an outer product."""
    given = example_numbers()
    shares = []
    for x, dy in zip(given["x"], given["dy"], strict=True):
        ln = x_hat(x) * given["gamma"] + given["beta"]
        shares.append(np.outer(dy, ln))
    return shares


def two_rows() -> str:
    """dW of the example as the sum of what its two rows contribute."""
    shares = row_shares()
    parts = {"row 1": shares[0], "row 2": shares[1], "dW": sum(shares, np.zeros_like(shares[0]))}
    drawing = Drawing(
        150,
        "; ".join(f"{name}: {np.round(part, 2).tolist()}" for name, part in parts.items())
        + ". dW is the sum of both.",
    )
    width, cell = 150, 44
    for number, (name, part) in enumerate(parts.items()):
        left = 8 + (width + 14) * number
        drawing.text(left + 66, 20, name if name == "dW" else f"{name}: dy ⊗ ln")
        for o, line in enumerate(part):
            for h, value in enumerate(line):
                drawing.labelled(
                    left + cell * h, 34 + 40 * o, cell - 3, 36, f"{round(value, 2) + 0.0:.2f}".replace("-", "−"),
                    shade=0.35 if name == "dW" else 0.06,
                )  # fmt: skip
        if number:
            drawing.text(left - 17, 78, "+" if number == 1 else "=", size=16)
    drawing.text(240, 138, "a row of dW for each output o, a column for each h")
    return drawing.svg()


def saved_names() -> tuple[list[str], list[str]]:
    """What the operator keeps for its backward pass, and what of its forward pass it does not."""
    source = (ROOT / "harness" / "nn" / "autograd.py").read_text(encoding="utf-8")
    matched = re.search(r"ctx\.save_for_backward\(([^)]*)\)", source)
    assert matched
    kept = re.findall(r"\w+", matched[1])
    return kept, ["output", "ln_out", "linear_bias"]


def kept_between() -> str:
    """The forward operator, what is kept of it, and the backward operator."""
    kept, dropped = saved_names()
    B, S, H, O = GPT2_SMALL
    size = {
        "x": B * S * H, "statistics": 2 * B * S, "ln_weight": H, "ln_bias": H, "linear_weight": O * H,
        "output": B * S * O, "ln_out": B * S * H, "linear_bias": O,
    }  # fmt: skip
    drawing = Drawing(
        92 + 26 * max(len(kept), len(dropped)),
        "Kept between the passes: "
        + ", ".join(f"{name} {megabytes(4 * size[name])}" for name in kept)
        + ". Not kept: "
        + ", ".join(f"{name} {megabytes(4 * size[name])}" for name in dropped),
    )
    drawing.labelled(5, 8, 110, 40, "forward")
    drawing.labelled(365, 8, 110, 40, "backward")
    drawing.arrow(118, 28, 363, 28)
    drawing.text(240, 20, "what is kept")
    for x, title, names, shade in ((5, "kept", kept, LEGIBLE), (255, "not kept", dropped, 0)):
        drawing.text(x, 72, title, anchor="start")
        for number, name in enumerate(names):
            y = 80 + 26 * number
            drawing.box(x, y, 220, 24, shade=shade)
            drawing.text(x + 8, y + 17, name, anchor="start", code=True)
            drawing.text(x + 212, y + 17, megabytes(4 * size[name]), anchor="end")
    return drawing.svg()


def megabytes(size: int) -> str:
    """Bytes as MB or kB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def rms_flow() -> str:
    """The forward pass of RMSNorm and Linear: what each number is made of."""
    drawing = Drawing(
        170,
        "A row x goes two ways into x_hat: directly, and through the mean of its squares and rstd. x_hat times γ, times W, is y.",
    )
    drawing.labelled(5, 90, 60, 40, "x")
    drawing.labelled(95, 16, 128, 40, "mean of x²")
    drawing.labelled(255, 16, 70, 40, "rstd")
    drawing.labelled(255, 90, 70, 40, "x̂")
    drawing.labelled(405, 90, 70, 40, "y")
    drawing.arrow(40, 88, 96, 54)
    drawing.arrow(225, 36, 253, 36)
    drawing.arrow(290, 58, 290, 88)
    drawing.arrow(67, 110, 253, 110)
    drawing.arrow(327, 110, 403, 110)
    drawing.text(160, 102, "directly")
    drawing.text(365, 102, "γ, then W")
    drawing.text(298, 78, "times", anchor="start")
    drawing.text(240, 160, "one row; γ and W are shared by all rows")
    return drawing.svg()


# ---- Fusing, sizes, compiling, wrong kernels ----------------------------------------------------------------


def inductor_counts() -> dict[str, tuple[int, int, int]]:
    """Function -> nodes of its graph, kernels of Inductor's and calls of a library, as recorded."""
    text = outputs.load("inductor_kernels").text
    counts = re.findall(r"^(.+?) +(\d+) in the graph, (\d+) of Inductor's, (\d+) of a library$", text, re.M)
    return {name: (int(nodes), int(own), int(calls)) for name, nodes, own, calls in counts}


def compiled_pair() -> str:
    """What torch.compile makes of the pair, and what an operator is to it; below, what is kept by recorded runs."""
    _, own, calls = inductor_counts()["LayerNorm, then Linear"]
    kept = re.findall(r"^(.+?) +([\d.]+) MB:", outputs.load("compile_saved").text, re.M)
    drawing = Drawing(
        316,
        f"torch.compile makes {own} kernel of LayerNorm, which writes the LayerNorm output to memory, and {calls} call of a library of "
        "Linear. An operator of your own is a box. Kept for the backward pass: "
        + "; ".join(f"{who} {size} MB" for who, size in kept),
    )
    drawing.text(5, 18, "torch.compile", anchor="start")
    drawing.labelled(5, 28, 120, 44, "LayerNorm:", f"{own} kernel")
    drawing.labelled(180, 28, 120, 44, "LayerNorm", "output, in memory", shade=0.35)
    drawing.labelled(355, 28, 120, 44, "Linear: a call", "of a library")
    drawing.arrow(127, 50, 178, 50)
    drawing.arrow(302, 50, 353, 50)
    drawing.text(5, 104, "an operator of your own", anchor="start")
    drawing.labelled(5, 114, 470, 36, "a box: its shapes are known by the fake version")
    drawing.text(5, 184, "kept for the backward pass, without parameters", anchor="start")
    rows = [(who, float(size), f"{size} MB", 0.35) for who, size in kept]
    bar_rows(drawing, 194, rows, 220 / max(size for _, size, _, _ in rows), left=162, step=38)
    return drawing.svg()


WAYS = {"in order": "", "after": "7 4", "one-pass variance": "2 3"}
"""Columns of the recorded run that the chart shows -> how they are dashed."""


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
    drawing = LogChart(
        310,
        "Errors in float32 where the mean of a row is 1, 10, 100 and 1000 deviations. "
        + "; ".join(f"{way}: {', '.join(f'{error:.1e}' for _, error in errors[way])}" for way in WAYS),
        Axis(
            "mean of a row, in deviations",
            0.8,
            6000,
            {value: f"{value:,.0f}" for value in (1.0, 10.0, 100.0, 1000.0)},
        ),
        Axis(
            "error, of the largest output",
            1e-7,
            1,
            {10.0**power: f"1e{power}" if power else "1" for power in (-6, -4, -2, 0)},
        ),
    )
    for way, dash in WAYS.items():
        drawing.curve(errors[way], dash=dash, thick=2)
        x, y = errors[way][-1]
        drawing.note(
            x, y, {"in order": "in order", "after": "after", "one-pass variance": "one pass"}[way], dx=6
        )
    return drawing.svg()


def drawn_sizes() -> str:
    """The layer's time over the fastest peer's as a CUDA graph, by the number of rows; hollow where rows fill no whole vectors."""
    points = []
    for one in every_size.beside(record.rows("sizes"), "graph"):
        rows, *widths = one.dims
        points.append((float(rows), one.ratio, "circle", any(width % 8 for width in widths)))
    label = "The layer's time over the fastest peer's as a CUDA graph. " + "; ".join(
        f"{words} from {min(ratios):.2f} to {max(ratios):.2f}"
        for words, odd in (("where rows fill whole vectors,", False), ("elsewhere", True))
        for ratios in [[ratio for _, ratio, _, hollow in points if hollow == odd]]
    )
    return ratio_dots(label, "time / fastest peer's time", points, "number of rows")


def cross_entropy_chart() -> str:
    """Time over memory of GPT-2's head, with a curve through the chunks."""
    at = {row["way"]: row for row in record.rows("cross_entropy") if (row["H"], row["V"]) == ("768", "50304")}
    places = {way: (float(row["peak_mib"]), float(row["ms"])) for way, row in at.items()}
    chunks = {int(way.removeprefix("chunks of ")): way for way in places if way.startswith("chunks")}
    drawing = LogChart(
        320,
        "Both passes of GPT-2's head with its loss: "
        + "; ".join(f"{way} {ms:.1f} ms, {mib:,.0f} MiB" for way, (mib, ms) in places.items()),
        Axis("MiB at the peak", 150, 20000, {float(mib): f"{mib:,}" for mib in (200, 500, 1000, 2000, 5000)}),
        Axis("ms", 2, 10, {float(ms): str(ms) for ms in (2, 3, 4, 6, 8)}),
    )
    drawing.curve([places[way] for _, way in sorted(chunks.items())])
    for rows, way in chunks.items():
        drawing.marker(*places[way], "square")
        if rows in (min(chunks), max(chunks)):  # beside the others there is no room
            drawing.note(*places[way], f"{rows:,} rows", dx=8, dy=-5 if rows == min(chunks) else 16)
    for way, name, shape in (
        ("products", "three bare products", "circle"),
        ("eager", "eager PyTorch", "circle"),
        ("compile", "torch.compile", "triangle"),
    ):
        drawing.marker(*places[way], shape, hollow=True)
        drawing.note(*places[way], name)
    return drawing.svg()


def fused_over_unfused() -> dict[str, float]:
    """What the fused kernels take of what the unfused ones take, seen in three ways."""
    moved = [ledger.moved("forward", who, GPT2_SMALL) for who in ("fused", "unfused")]
    asked = re.search(r"bytes moved +([\d,]+) +([\d,]+)", outputs.load("profile").text)
    assert asked
    fused, unfused = (int(count.replace(",", "")) for count in asked.groups())
    B, S, H, O = GPT2_SMALL
    times = bench_results.waited_passes("float32")[(B * S, H, O), "forward"]
    return {
        "bytes that must move": moved[0] / moved[1],
        "bytes that threads ask for": fused / unfused,
        "time on an H200": times["fused"] / times["unfused"],
    }


def three_views() -> str:
    """Fused over unfused in three ways, on a logarithmic axis around 1."""
    ratios = fused_over_unfused()
    where = ("forward, GPT-2 small", "both passes, chapter's sizes", "forward, GPT-2 small")
    drawing = Drawing(
        196,
        "Fused kernels over unfused ones: "
        + ", ".join(f"{name} {ratio:.2g} times" for name, ratio in ratios.items()),
    )
    one, decade = 262, 80
    drawing.segment(one, 8, one, 160, opacity=0.6)
    drawing.text(one, 182, "as much as unfused")
    for number, ((name, ratio), sizes) in enumerate(zip(ratios.items(), where, strict=True)):
        y = 12 + 50 * number
        length = decade * math.log10(ratio)
        drawing.text(6, y + 14, name, anchor="start")
        drawing.text(6, y + 32, sizes, anchor="start")
        drawing.box(min(one, one + length), y + 6, abs(length), 24, shade=0.35)
        drawing.text(max(one, one + length) + 8, y + 23, f"{ratio:.2g} times", anchor="start")
    return drawing.svg()


def racing_warps() -> str:
    """The blocks of the page's program and their warps: whose stores nobody has ordered before the last block's loads."""
    source = (ROOT / "book" / "examples" / "brightest.mojo").read_text(encoding="utf-8")
    size = {
        name: int(value)
        for name, value in re.findall(r"^comptime (WIDTH|HEIGHT|BLOCK) = (\d+)$", source, re.M)
    }
    pixels, threads = size["WIDTH"] * size["HEIGHT"], size["BLOCK"]
    blocks, warps = pixels // threads, threads // 32
    racing = (blocks - 1) * (warps - 1) * 32
    drawing = Drawing(
        250,
        f"{blocks} blocks of {warps} warps. In each block but the last the fence of the first warp covers its own stores; the other "
        f"{warps - 1} warps' stores race with the loads of the last block: {racing} pixels.",
    )
    left, column, line = 66, 34, 30
    drawing.text(left + column * blocks / 2, 18, f"block 0 to {blocks - 1}")
    for warp in range(warps):
        drawing.text(left - 8, 46 + line * warp, f"warp {warp}", anchor="end")
        for block in range(blocks):
            races = warp > 0 and block < blocks - 1
            drawing.box(
                left + column * block, 28 + line * warp, column - 4, line - 4, shade=0.6 if races else 0.08
            )
    y = 28 + line * warps + 24
    for number, (shade, words) in enumerate(
        (
            (0.6, f"stored without order: {racing} pixels"),
            (0.08, "covered by the fence, or the last block's own"),
        )
    ):
        drawing.box(left, y + 28 * number, 22, 18, shade=shade)
        drawing.text(left + 32, y + 14 + 28 * number, words, anchor="start")
    drawing.text(left, y + 76, "drawn: block 11 counts last", anchor="start")
    return drawing.svg()


FILES = svgs(
    two_halves, autograd_nodes, through_memory, one_moves_all, three_paths, backward_flow, two_rows,
    kept_between, rms_flow, compiled_pair, cancellation, drawn_sizes, three_views, racing_warps,
    curve_chart.one_is_wrong,
) | {"cross_entropy.svg": cross_entropy_chart, "wrong_losses.svg": curve_chart.together}  # fmt: skip
