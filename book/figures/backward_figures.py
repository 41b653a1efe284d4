"""Figures of puzzles 20, 21 and 26: first backward passes, checks that see them or do not, and graphs that are rewritten.

Each is at most NARROW wide, so that a phone can show it. Numbers are computed here with NumPy or come from recorded runs; nothing
needs torch.
"""

import math
import re

import numpy as np

from book.figures.charts import Axis, LogChart, ratio_dots
from book.figures.every_size import beside_compile
from book.figures.figures import LEGIBLE, NARROW, Drawing, bar_rows, in_words, side_by_side, svgs
from book.figures.layer_figures import bars_of, inductor_counts
from book.measure import outputs, record

# ---- Puzzle 20 ----------------------------------------------------------------------------------------------

LOGITS = (1.0, 0.2, -0.6, 1.4, -1.0, 0.0)
ARRIVES = (0.6, -0.4, 0.9, -0.8, 0.3, 0.5)
"""A row of logits, and the gradient that arrives at its softmax."""


def softmax(rows: np.ndarray) -> np.ndarray:
    """The probabilities of rows."""
    exponentials = np.exp(rows - rows.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def softmax_row() -> str:
    """A row of probabilities, the gradient that arrives, and what of it reaches the logits."""
    P, dP = softmax(np.array(LOGITS)), np.array(ARRIVES)
    dS = P * (dP - (dP * P).sum())
    rows = {"P, the output": P, "dP, what arrives": dP, "dS, at the logits: adds up to 0": dS}
    drawing = Drawing(
        342,
        "Softmax backward on six numbers. "
        + "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in row)}" for name, row in rows.items()),
    )
    for number, (name, row) in enumerate(rows.items()):
        top = 110 * number
        drawing.text(10, top + 18, name, anchor="start")
        bars_of(drawing, 10, top + 74, 460, 24, row, None)
    return drawing.svg()


RELU_ROW = (0.3, -1.2, 0.0, 2.1, -0.4, 0.8, -2.0, 1.5)
"""A row of inputs of a ReLU."""


def relu_ways() -> str:
    """What five ways to remember a ReLU's mask keep of one row, to scale: 32 bits are as wide as a number."""
    x = np.array(RELU_ROW)
    ways = (
        ("the input", 32, x),
        ("the output", 32, x.clip(0)),
        ("a bool", 8, x > 0),
        ("a bit", 1, x > 0),
        ("sign and mean", 32, np.append(np.sign(x), np.sign(x).mean())),
    )
    sizes = {name: f"{bits * len(kept) // 8} byte{'s' * (bits > 1)}" for name, bits, kept in ways}
    drawing = Drawing(
        44 * len(ways) + 2, "A ReLU keeps of eight numbers: " + ", ".join(map(" ".join, sizes.items())) + "."
    )
    for number, (name, bits, kept) in enumerate(ways):
        y, wide = 44 * number + 4, 33 * bits / 32
        drawing.text(96, y + 14, name, anchor="end")
        drawing.text(96, y + 30, sizes[name], anchor="end", size=13)
        drawing.box(104, y, wide * len(kept), 32, radius=0)
        for place, value in enumerate(kept):
            passes = place < len(x) and x[place] > 0
            shade = (LEGIBLE if bits == 32 else 0.8) * passes
            drawing.box(104 + wide * place, y, wide, 32, shade=shade, thick=bits > 1, radius=0)
            if bits == 32:
                drawing.text(104 + wide * (place + 0.5), y + 21, f"{value:.1f}".replace("-", "−"), size=13)
    return drawing.svg()


def ballot() -> str:
    """Thirty-two lanes vote whether their element is above 0, and each gets the word of all answers."""
    values = np.random.default_rng(20).standard_normal(32)
    bits = values > 0
    word = sum(1 << lane for lane in range(32) if bits[lane])
    drawing = Drawing(
        190,
        f"32 lanes of a warp, {bits.sum()} of them with an element above 0. Their vote is one word of 32 bits, {word:#010x}, and a "
        "bit of it is all that the backward pass needs of an element.",
    )
    drawing.text(240, 18, "32 lanes of a warp: is my element above 0?")
    for lane in range(32):
        x = 16 + 14 * lane
        drawing.box(x, 28, 12, 26, shade=0.6 if bits[lane] else 0.04)
        drawing.arrow(x + 6, 56, 240 + (lane - 15.5) * 4, 88, faint=True)
    drawing.labelled(140, 90, 200, 32, f"vote: {word:#010x}", code=True, shade=0.35)
    drawing.arrow(240, 124, 240, 144)
    drawing.text(240, 160, "one word of 4 bytes is kept")
    drawing.text(240, 180, "instead of 32 floats, 128 bytes")
    return drawing.svg()


def rows_and_columns(rows: int = 4, columns: int = 6) -> str:
    """The two sums of a LayerNorm's backward pass over one matrix: along a row for dx, down a column for the parameters."""
    drawing = Drawing(
        176,
        f"A matrix of {rows} rows and {columns} columns, twice. On the left a block adds along its row; on the right a thread adds down its column.",
    )
    cell = 32
    for left, words, own in (
        (8, "dx: a block for each row", lambda r, c: r == 1),
        (256, "dweight: a thread for each column", lambda r, c: c == 2),
    ):
        drawing.text(left, 16, words, anchor="start")
        for r in range(rows):
            for c in range(columns):
                drawing.box(
                    left + cell * c, 28 + cell * r, cell - 3, cell - 3, shade=LEGIBLE if own(r, c) else 0.03
                )
    drawing.arrow(12, 28 + 1.46 * cell, 8 + columns * cell - 8, 28 + 1.46 * cell)
    drawing.arrow(256 + 2.46 * cell, 32, 256 + 2.46 * cell, 28 + rows * cell - 6)
    return drawing.svg()


ASKED = (
    ("a call", "define", "what is y?"),
    ("torch.compile", "fake", "which shape?"),
    ("autograd, forward", "save", "what do you need later?"),
    ("loss.backward()", "gradient", "what is dx?"),
    ("a second derivative", "second", "what is that of dx?"),
    ("torch.autocast", "autocast", "in which dtype?"),
    ("torch.func.vmap", "vmap", "where is the batch?"),
)
"""Who asks an operator what, and the blank that answers."""


def operator_asked() -> str:
    """The seven parts of a registered operator between those who ask and two kernels."""
    drawing = Drawing(
        42 * len(ASKED) + 4,
        "An operator is seven answers. "
        + "; ".join(f"{who} asks {what} {blank} answers" for who, blank, what in ASKED)
        + ". Two of them call a kernel.",
    )
    for number, (who, blank, what) in enumerate(ASKED):
        y = 42 * number + 4
        drawing.text(2, y + 14, who, anchor="start", code="." in who, size=13)
        drawing.text(2, y + 30, what, anchor="start", size=13)
        drawing.arrow(166, y + 17, 206, y + 17)
        drawing.labelled(
            210, y + 2, 96, 30, blank, code=True, shade=0.2 if blank in ("define", "gradient") else 0.06
        )
    kernels = {"softmax": 21, "softmax_backward": 21 + 42 * 3}
    for kernel, y in kernels.items():
        drawing.arrow(308, y, 332, y)
        drawing.labelled(336, y - 17, 142, 34, kernel, code=True, shade=LEGIBLE)
    drawing.text(407, 75, "kernels of yours,", size=13)
    drawing.text(407, 91, "blind to strides", size=13)
    return drawing.svg()


BLOCK = {"input": 2048 * 512, "norm": 2048 * 512, "into GELU": 2048 * 2048, "out of GELU": 2048 * 2048}
"""The elements of what the block of `saving_less.py` has between its operations, float32."""
KEPT = {
    "everything, or a budget of 1": list(BLOCK),
    "a budget of one half": ["input", "into GELU"],
    "a checkpoint, or a budget of 0": ["input"],
}
"""Which of them are kept, by way; a run of the example with hooks that look at values says so."""


def block_kept() -> str:
    """A block's activations to scale, filled where a way keeps them and hollow where it makes them again."""
    statistics = 2 * 2048  # too little to draw; LayerNorm is made again from them, or from the input
    totals = {
        way: (sum(BLOCK[name] for name in kept) + statistics * (len(kept) > 1)) * 4 / 1e6
        for way, kept in KEPT.items()
    }
    drawing = Drawing(
        76 * len(KEPT),
        "Kept of a block: "
        + "; ".join(f"{way}: {', '.join(kept)}, {totals[way]:.1f} MB" for way, kept in KEPT.items()),
    )
    scale = 460 / sum(BLOCK.values())
    for number, (way, kept) in enumerate(KEPT.items()):
        x, y = 10, 76 * number + 22
        drawing.text(10, y - 6, f"{way}: {totals[way]:.1f} MB", anchor="start")
        for name, size in BLOCK.items():
            kept_here = {"shade": LEGIBLE, "thick": 1} if name in kept else {"shade": 0, "thick": 0.3}
            drawing.labelled(x, y, scale * size - 3, 34, name, **kept_here)
            x += scale * size
    return drawing.svg()


def kept_by_way() -> str:
    """Bytes that four functions keep for their backward pass: PyTorch's, compiled, and the leanest custom one, as recorded."""
    found = re.findall(
        r"^(\w+) +(eager|compiled|custom, \w+) +[\d.]+ ms +([\d.]+) MB",
        outputs.load("worth_it").text,
        re.M,
    )
    kept: dict[str, dict[str, float]] = {}
    for function, way, size in found:
        ways = kept.setdefault(function, {})
        way = way.split(",")[0]
        ways[way] = min(float(size), ways.get(way, math.inf))
    drawing = Drawing(
        88 * len(kept) + 4,
        "Megabytes kept for the backward pass: "
        + "; ".join(
            f"{name} " + ", ".join(f"{way} {size}" for way, size in ways.items())
            for name, ways in kept.items()
        ),
    )
    largest = max(size for ways in kept.values() for size in ways.values())
    for number, (function, ways) in enumerate(kept.items()):
        drawing.text(2, 88 * number + 44, function, anchor="start")
        rows = [(way, size, f"{size:g} MB", 0.35 if way == "custom" else 0.1) for way, size in ways.items()]
        bar_rows(drawing, 88 * number + 6, rows, 230 / largest, left=148, step=26)
    return drawing.svg()


# ---- Puzzle 21 ----------------------------------------------------------------------------------------------


def wrong_dq() -> str:
    """The gradient of a query by the hunt's first bug and by the mended code, as recorded."""
    rows = {
        name: np.array([float(element) for element in elements.split()])
        for name, elements in re.findall(r"^(given|mended) +(.+)$", outputs.load("hunt_dq").text, re.M)
    }
    drawing = Drawing(
        318,
        "A row of a gradient, six numbers. "
        + "; ".join(f"{name}: " + ", ".join(f"{value:.2f}" for value in row) for name, row in rows.items())
        + ". Signs and proportions agree, and the size does not.",
    )
    most = max(float(np.abs(row).max()) for row in rows.values())
    for top, (name, words) in zip((4, 170), (("given", "as given"), ("mended", "mended")), strict=True):
        drawing.text(10, top + 14, words, anchor="start")
        height = 50 * float(np.abs(rows[name]).max()) / most
        bars_of(drawing, 10, top + 86, 460, height, rows[name], None)
    drawing.height = 296
    return drawing.svg()


def checks_see() -> str:
    """How many of the wrong backward passes each common check sees, as recorded."""
    rows = [
        (name, int(caught), int(of))
        for name, caught, of in re.findall(
            r"^(.+): sees (\d+) of (\d+)$", outputs.load("hunt_matrix").text, re.M
        )
    ]
    drawing = Drawing(
        34 * len(rows) + 12,
        "Wrong backward passes that a check sees: "
        + ", ".join(f"{name} {caught} of {of}" for name, caught, of in rows),
    )
    for number, (name, caught, of) in enumerate(rows):
        y = 8 + 34 * number
        drawing.text(150, y + 18, name, anchor="end")
        drawing.box(160, y, 240, 26)
        drawing.box(160, y, 240 * caught / of, 26, shade=0.4)
        drawing.text(408, y + 18, f"{caught} of {of}", anchor="start")
    return drawing.svg()


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


def difference_chart() -> str:
    """The error of a central difference over its step: too large a step on the right, rounding on the left."""
    curves = {"float32": difference_errors(np.float32), "float64": difference_errors(np.float64)}
    least = {name: min(points, key=lambda point: point[1]) for name, points in curves.items()}
    chosen = {name: dict(points).get(1e-6) for name, points in curves.items()}
    drawing = LogChart(
        320,
        "Errors of central differences of tanh over the step. "
        + "; ".join(f"{name}: least {error:.0e} at {eps:.0e}" for name, (eps, error) in least.items())
        + f". At gradcheck's step of 1e-06 it is {chosen['float64']:.0e} in float64 and {chosen['float32']:.0e} in float32.",
        Axis("step ε", 1e-12, 1, {10.0**power: f"1e{power}" for power in (-11, -8, -6, -4, -2)}),
        Axis(
            "error of the difference",
            1e-13,
            30,
            {10.0**power: f"1e{power}" if power else "1" for power in range(-12, 1, 3)},
        ),
    )
    for name, points in curves.items():
        drawing.curve(points, dash="6 4" if name == "float32" else "", thick=2)
        drawing.note(*points[2], name, dx=8, dy=-6)
    return drawing.svg()


def where_wrong() -> str:
    """The model of the page: gradients after each layer on the way back, and what gradcheck says of each layer alone."""
    sizes = dict(
        re.findall(
            r"^after (\w+) +shape \[.*\]  largest ([\d.e+-]+)$", outputs.load("debug_hooks").text, re.M
        )
    )
    verdicts = dict(
        re.findall(r"^(\w+)  +(passes|Jacobian mismatch)", outputs.load("debug_bisect").text, re.M)
    )
    layers = list(verdicts)
    drawing = Drawing(
        190,
        "Four layers. "
        + "; ".join(
            f"{name}: largest gradient {float(sizes[name]):.2f}, {verdicts[name]}" for name in layers
        ),
    )
    drawing.text(240, 18, "gradients come from the right")
    for number, name in enumerate(layers):
        x = 8 + 117 * number
        wrong = verdicts[name] != "passes"
        drawing.labelled(x, 60, 74, 44, name, shade=0.6 if wrong else 0.06)
        drawing.arrow(x + 113, 82, x + 76, 82)
        drawing.text(x + 95, 48, f"{float(sizes[name]):.2f}")
        drawing.text(x + 37, 128, "mismatch" if wrong else "passes")
    drawing.text(240, 160, "above: the largest element, by hooks")
    drawing.text(240, 180, "below: gradcheck on each layer alone")
    return drawing.svg()


# ---- Puzzle 26 ----------------------------------------------------------------------------------------------


def backend_path() -> str:
    """Where a backend stands between a model and the code that runs."""
    drawing = Drawing(
        250,
        "A model goes to Dynamo, which hands a graph to your backend; the rewritten graph goes on to AOTAutograd, which makes a "
        "forward and a backward graph of it, and these to Inductor.",
    )
    steps = (
        ("the model", "Python, nobody changes it", 0.06),
        ("Dynamo's graph", "layer_norm, linear", 0.06),
        ("your backend", "finds, checks, rewrites", 0.45),
        ("AOTAutograd", "forward and backward graph", 0.06),
        ("Inductor", "kernels, calls of a library", 0.06),
    )
    for number, (name, what, shade) in enumerate(steps):
        y = 6 + 49 * number
        drawing.labelled(20, y, 150, 32, name, shade=shade)
        drawing.text(190, y + 21, what, anchor="start")
        if number + 1 < len(steps):
            drawing.arrow(95, y + 33, 95, y + 48)
    return drawing.svg()


def level_nodes() -> dict[str, list[str]]:
    """What the pair is made of at each level, from the recorded graphs."""
    first, *parts = re.split(r"^AOTAutograd, (.*):$", outputs.load("backend_levels").text, flags=re.M)
    nodes = {"Dynamo": re.findall(r"^    (\w+) ", first, re.M)}
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        for direction, names in re.findall(r"^  (\w+): (.*?)\n    returns", part, re.M | re.S):
            level = "AOTAutograd" if title == "no table" else title
            nodes[f"{level}, {direction}"] = re.findall(r"\w+", names)
    return nodes


def levels_chart() -> str:
    """The same pair at each level, node by node."""
    levels = level_nodes()
    drawing = Drawing(
        0,
        "Nodes of LayerNorm and Linear: "
        + ", ".join(f"{name} {len(nodes)}" for name, nodes in levels.items())
        + ". Only those of Dynamo's graph, and LayerNorm's own in AOTAutograd's, are called by their names.",
    )
    y = 18
    for name, nodes in levels.items():
        drawing.text(2, y, f"{name}: {len(nodes)}", anchor="start", size=14)
        x, y = 2.0, y + 8
        for node in nodes:
            wide = 7.9 * len(node) + 12
            if x + wide > NARROW - 2:
                x, y = 2.0, y + 26
            named = "layer_norm" in node or node == "linear"
            drawing.labelled(x, y, wide, 22, node, code=True, shade=LEGIBLE if named else 0.04)
            x += wide + 4
        y += 48
    drawing.height = y - 14
    return drawing.svg()


PRODUCTS = ((2.0, 3.0), (3.0, 5.0), (0.1, 10.0), (2.0, 0.5))


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
    shares = {f"x * {a:g} * {b:g}": same_bits(a, b) for a, b in PRODUCTS}
    drawing = Drawing(
        38 * len(shares) + 10,
        "Share of all finite float16 numbers whose bits stay when two products become one: "
        + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()),
    )
    for number, (name, share) in enumerate(shares.items()):
        y = 6 + 38 * number
        drawing.text(140, y + 18, name, anchor="end", code=True)
        drawing.box(150, y, 240, 26)
        drawing.box(150, y, 240 * share, 26, shade=0.4)
        drawing.text(398, y + 18, percent(share), anchor="start")
    return drawing.svg()


def percent(share: float) -> str:
    """A share in percent; 100 % is all of them and nothing less."""
    return "100%" if share == 1 else f"{min(99.9, 100 * share):.1f}%"


def stale_code() -> str:
    """A module's graph, its code and its result at 3, at the three moments that the example printed."""
    moments = re.findall(
        r"^(.+?) +graph: (\w+) +code: (.+?) {2,}f\(3\) = (\d+)$", outputs.load("stale_code").text, re.M
    )
    drawing = Drawing(
        184,
        "; ".join(f"{when}: the graph has {graph}, the code {code}, the result is {result}"
                  for when, graph, code, result in moments),
    )  # fmt: skip
    for number, (when, graph, code, result) in enumerate(moments):
        x, agree = 66 + 140 * number, graph == moments[0][1] or number == len(moments) - 1
        drawing.text(x + 62, 16, when, size=14)
        drawing.labelled(x, 28, 124, 34, graph, code=True, shade=0.2 if graph != moments[0][1] else 0.06)
        drawing.labelled(x, 88, 124, 34, code, code=True, shade=0.2 if code != moments[0][2] else 0.06)
        drawing.segment(x + 62, 62, x + 62, 88, dash="" if agree else "3 4", thick=2)
        drawing.arrow(x + 62, 122, x + 62, 146)
        drawing.text(x + 62, 166, f"f(3) = {result}", size=14, code=True)
    for y, words in ((50, "graph"), (110, "code")):
        drawing.text(54, y, words, anchor="end", size=14)
    return drawing.svg()


def kernels_chart() -> str:
    """Five functions as they run: nodes in the frames of their kernels, and the tensors in memory before, between and after."""
    counts = inductor_counts()
    drawing = Drawing(
        42 * len(counts),
        "Nodes and kernels of a function: "
        + "; ".join(
            f"{name}: {nodes} in the graph, {own} of Inductor's, {calls} of a library"
            for name, (nodes, own, calls) in counts.items()
        ),
    )
    for number, (name, (nodes, _own, calls)) in enumerate(counts.items()):
        x, y = 170, 6 + 42 * number
        drawing.text(x - 12, y + 20, name, anchor="end")
        parts = name.split(", then ")
        for place, part in enumerate(parts):
            library = part == "Linear"
            inside = 1 if library else nodes - calls
            drawing.box(x, y + 8, 14, 14, shade=LEGIBLE if place == 0 else 1, radius=7)
            drawing.arrow(x + 15, y + 15, x + 31, y + 15)
            drawing.box(x + 32, y, 18 * inside + 8, 30, shade=0.3 if library else 0.04)
            for k in range(inside):
                drawing.box(x + 38 + 18 * k, y + 8, 14, 14)
            x += 40 + 18 * inside
            drawing.arrow(x, y + 15, x + 16, y + 15)
            x += 17
        drawing.box(x, y + 8, 14, 14, shade=LEGIBLE, radius=7)
    return drawing.svg()


def swaps_chart() -> str:
    """The layer's time over torch.compile's at the sizes of the newest records, over the work of the product."""
    ratios = beside_compile()
    label = f"The layer's time over torch.compile's at {len(ratios)} sizes: from {min(ratios.values()):.2f} to {max(ratios.values()):.2f}."
    points = [(float(math.prod(dims)), ratio, "circle", ratio > 1) for dims, ratio in ratios.items()]
    return ratio_dots(label, "time / torch.compile's", points)


SHORT = {
    "attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down",
    "attention.output.dense": "out", "intermediate.dense": "up", "output.dense": "down",
    "mlp.fc1": "up", "mlp.fc2": "down",
}  # fmt: skip
"""Names of Linear layers that do not say themselves what they are."""


def short_name(name: str) -> str:
    """What a Linear layer of a block makes, in a word: q, k, v, out, gate, up or down."""
    last = name.rpartition(".")[2].removesuffix("_proj")
    return SHORT.get(name) or {"query": "q", "key": "k", "value": "v", "o": "out"}.get(last, last)


def swapped_layers() -> str:
    """A block of each model in the order in which it runs, as the example printed it: norms as bars, what is swapped shaded."""
    blocks = [line.split() for line in outputs.load("backend_models").text.splitlines()]
    counts = {
        name: (sum("*" in word for word in words), sum("Norm" not in word for word in words))
        for name, *words in blocks
    }
    told = (f"{name} {swapped} of {linear} Linear layers" for name, (swapped, linear) in counts.items())
    drawing = Drawing(52 * len(blocks) + 6, "What the backend swaps in a block: " + ", ".join(told))
    for row, (model, *words) in enumerate(blocks):
        x, y = 62.0, 10 + 52 * row
        drawing.text(2, y + 23, model, anchor="start")
        for word in words:
            if "Norm" in word:
                drawing.box(x, y, 12, 36, shade=1 if word == "LayerNorm" else 0, radius=2)
                x += 18
            else:
                name = short_name(word.rstrip("*"))
                wide = 14 + 8 * len(name)
                drawing.labelled(x, y, wide, 36, name, shade=0.35 if "*" in word else 0)
                x += wide + 6
        drawing.text(NARROW - 2, y + 23, "{} of {}".format(*counts[model]), anchor="end")
    return drawing.svg()


def swap_gains() -> str:
    """A pair and what it keeps between the passes, before and after the swap; below, a step of GPT-2 by the record."""
    ways = {
        "torch.compile": "Inductor alone",
        "mojo_workbook, LayerNorms alone": "with the swaps",
    }  # the last is shaded
    steps = {row["way"]: row for row in record.rows("gpt2_step") if row["setting"] == "autocast"}
    measures = [
        ("the peak of a step", {way: int(steps[way]["peak_mib"]) / 1024 for way in ways}, "GiB"),
        ("its time", {way: float(steps[way]["median_ms"]) for way in ways}, "ms"),
    ]
    drawing = Drawing(
        330,
        "Before the swap x goes into layer_norm and its result into linear, and both tensors are kept; after it x goes into one "
        f"operator and x alone is kept. A step of GPT-2: {in_words(measures, ways)}.",
    )
    before, after = (
        (("x", True), ("layer_norm", False), ("ln", True), ("linear", False)),
        (("x", True), ("layernorm_linear", False)),
    )
    for y, title, chain in ((4, "before", before), (62, "after", after)):
        drawing.text(2, y + 26, title, anchor="start")
        x = 62.0
        for number, (name, kept) in enumerate(chain):
            wide = 8 * len(name) + 18
            drawing.labelled(x, y + 6, wide, 30, name, shade=LEGIBLE if kept else 0.04, code=True)
            if number + 1 < len(chain):
                drawing.arrow(x + wide + 1, y + 21, x + wide + 25, y + 21)
            x += wide + 26
    drawing.text(62, 126, "shaded: a tensor as large as x that is kept for the backward pass", anchor="start")
    side_by_side(
        drawing, 160, [(f"GPT-2 (124M), {what}", sizes, unit) for what, sizes, unit in measures], ways
    )
    return drawing.svg()


FILES = svgs(
    softmax_row, relu_ways, operator_asked, rows_and_columns, block_kept, ballot, kept_by_way, wrong_dq, checks_see,
    where_wrong, backend_path, folds, stale_code, swapped_layers, swap_gains,
) | {
    "differences.svg": difference_chart, "levels.svg": levels_chart, "kernels.svg": kernels_chart,
    "swaps.svg": swaps_chart,
}  # fmt: skip
