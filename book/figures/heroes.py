"""Drawings in steps, one for a chapter: a reader goes through them by button, key or finger; without scripts one step is a still.

Each is drawn from a run: of the solution's own functions, of a recorded output, or of a counter of the virtual GPU. In the SVG a
group is shown from its step `data-from` to its step `data-to`; theme/workbook.js does the rest.
"""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from book.figures.attention_heroes import one_row, reads, ring, tiles, walk
from book.figures.figures import LEGIBLE, NARROW, ROOT, Steps, number_rows, player_start
from book.figures.layer_figures import slopes, x_hat
from book.figures.tape_figures import tape_steps, writes
from book.measure import outputs
from harness.check.python_files import load

# ---- Puzzle 19: a barrier, and what a warp's load costs -----------------------------------------------------------


def opposite() -> list[int]:
    """Whose numbers each warp took, as the recorded run of `mirrored_row` printed it."""
    text = outputs.load("mirrored_mended").text
    return [int(other) for other in re.findall(r"^warp \d+ took the numbers of warp (\d+) ", text, re.M)]


def arrivals(order: Sequence[int], opposite: Sequence[int]) -> tuple[list[list[str]], list[list[str]]]:
    """What each warp has, tick by tick, without the barrier and with it, where the warps come in this order.

    A warp stores at one tick. Without a barrier it loads at the next, and what it takes is right if the opposite warp has stored.
    """
    count = len(order)
    bare, held = [[""] * count], [[""] * count]
    for number, warp in enumerate(order):
        bare.append([*bare[-1]])
        bare[-1][warp] = "stores"
        bare.append([*bare[-1]])
        bare[-1][warp] = "right" if opposite[warp] in order[: number + 1] else "wrong"
        held.append([*held[-1]])
        held[-1][warp] = "stores"
        held.append(["waits" if state == "stores" else state for state in held[-1]])
    held[-1] = ["right"] * count
    return bare, held


def one_barrier() -> str:
    """Four warps reverse a row, one after the other: without a barrier between storing and loading, and with it."""
    others = opposite()
    count = len(others)
    sides = arrivals(range(count), others)
    last = 2 * count
    wrong = 32 * sides[0][-1].count("wrong")
    drawing = Steps(
        226,
        f"{count} warps store 32 numbers each in a tile and take those of the opposite warp. Without a barrier {wrong} of "
        f"{32 * count} numbers are wrong in this order of the warps, with it none.",
        still=last,
    )
    for number, (side, title) in enumerate(zip(sides, ("without a barrier", "with a barrier"), strict=True)):
        left = 58 + 214 * number
        drawing.text(left + 102, 16, title, size=17)
        for warp in range(count):
            drawing.text(left + 52 * warp + 24, 42, str(warp), size=16)
            drawing.box(left + 52 * warp, 94, 48, 32, shade=0.04)
            drawing.box(left + 52 * warp, 184, 48, 32, shade=0.04)
        for tick, states in enumerate(side):
            with drawing.during(tick):
                for warp, state in enumerate(states):
                    x, taken = left + 52 * warp, state in ("right", "wrong")
                    if state:
                        drawing.labelled(x, 50, 48, 30, "takes" if taken else state, size=15)
                        drawing.labelled(x, 94, 48, 32, str(warp), size=16, shade=0.3)
                    if taken:
                        drawing.arrow(left + 52 * others[warp] + 24, 128, x + 24, 182, faint=True)
                        right = state == "right"
                        drawing.labelled(
                            x, 184, 48, 32, str(others[warp]) if right else "?", size=16,
                            shade=0.3 if right else 0,
                        )  # fmt: skip
    for y, words in ((42, "warp"), (70, "does"), (115, "tile"), (205, "result")):
        drawing.text(52, y, words, anchor="end", size=16)
    drawing.words = [
        "Nothing has run. The tile is in memory that all four warps share; the result is what they take out of it."
    ]
    for tick in range(1, last + 1):
        warp = (tick - 1) // 2
        if tick % 2:
            drawing.words.append(f"Warp {warp} comes and stores its numbers, on both sides.")
            continue
        taken = (
            f"Without a barrier warp {warp} goes on to the place of warp {others[warp]}"
            + (" and finds its numbers." if sides[0][tick][warp] == "right" else ", where nobody has stored yet.")
        )  # fmt: skip
        with_it = (
            "With one it waits."
            if tick < last
            else "With one it is the last to arrive, and all four take the right numbers."
        )
        drawing.words.append(f"{taken} {with_it}")
    return drawing.hero(
        "A row reversed by four warps. A recorded run says whose numbers each warp takes. The order, one warp after the "
        "other, is one of those that a GPU may choose."
    )


ROWS, COLUMNS = 16, 8
"""Of the chapter's x: a row of eight float32 values is one sector of 32 bytes."""


def sectors(launch: str) -> float:
    """Sectors for each request of a launch, as the virtual GPU counted them."""
    matched = re.search(rf"^ +{launch} +.* ([\d.]+) +\d+$", outputs.load("profile").text, re.M)
    assert matched, launch
    return float(matched[1])


def clock() -> str:
    """The first load of two launches of puzzle 22, a sector at each tick."""
    requests = {"row_statistics": round(sectors("row_statistics")), "layernorm": round(sectors("layernorm"))}
    ticks = max(requests.values())
    drawing = Steps(
        330,
        f"The first load of a warp over a matrix of {ROWS} rows and {COLUMNS} columns. With a thread for each row it touches "
        f"{requests['row_statistics']} sectors, with a thread for each column {requests['layernorm']}.",
        still=ticks,
    )
    cell = 14
    for number, (name, title) in enumerate(
        (("row_statistics", "a thread for each row"), ("layernorm", "a thread for each column"))
    ):
        left, top = 50 + 232 * number, 46
        drawing.text(left + 70, 16, title)
        drawing.text(left + 70, 34, name, code=True)
        needed = requests[name]
        for row in range(ROWS):
            for column in range(COLUMNS):
                wanted = column == 0 if name == "row_statistics" else row == 0
                drawing.box(
                    left + 17 * column, top + 15 * row, cell, 12, shade=0.05, thick=2 if wanted else 0.4
                )
            if row < needed:
                with drawing.during(row + 1, ticks):
                    drawing.box(left - 3, top + 15 * row - 2, 17 * COLUMNS + 3, 15, shade=0.28, thick=0)
        for tick in range(ticks + 1):
            come = min(tick, needed)
            with drawing.during(tick):
                drawing.text(left + 66, top + 15 * ROWS + 18, f"{come} of {needed} sectors")
                drawing.text(
                    left + 66,
                    top + 15 * ROWS + 36,
                    "the warp goes on" if come == needed else "the warp waits",
                )
    drawing.words = ["Nothing has arrived. The elements that the threads ask for have a thick line."]
    for tick in range(1, ticks + 1):
        drawing.words.append(
            "Tick 1. On the right one sector held all that the warp asked for, and it goes on. On the left one thread has its element."
            if tick == 1
            else f"Tick {tick}. On the left {tick} of {ticks} threads have their element; the warp waits for the others."
            if tick < ticks
            else f"Tick {tick}. On the left the last thread has its element: {ticks} sectors have come, {32 * ticks} bytes; {4 * ticks} of them were asked for."
        )
    return drawing.hero(
        "A load as its sectors arrive, one at a tick. The numbers of sectors are the virtual GPU's, for two "
        "kernels of puzzle 22: the statistics of rows, and LayerNorm.",
        "The same matrix twice, and the first load of a warp.",
    )


# ---- Puzzle 20: a graph of five nodes -------------------------------------------------------------------------


def walked_graph(product: bool = False) -> Steps:
    """Puzzle 20's graph, walked there and back by the solution's own functions; at x the two paths add up.

    With `product` the third node is the product of a and b, which changes the edges into it.
    """
    module = load(ROOT / "solutions" / "p20" / "graph.py")
    values = module["forward"](2.0)
    along = module["edges"](values)
    if product:
        c = values["a"] * values["b"]
        values |= {"c": c, "y": along["c->y"] * c}
        along |= {"a->c": values["b"], "b->c": values["a"]}
    gradients = module["backward"](along)
    places = {"x": (66, 120), "a": (186, 50), "b": (186, 190), "c": (306, 120), "y": (420, 120)}
    formulas = {
        "x": "x",
        "a": "a = x^2",
        "b": "b = 2x",
        "c": "c = a b" if product else "c = a + b",
        "y": "y = 3c",
    }
    forward, back = list(places), ["y", "c", "b", "a"]
    last = len(forward) + len(back) + 1
    drawing = Steps(
        250,
        "A graph of five nodes, x to a and b, both to c, c to y. "
        + "; ".join(f"{name} is {values[name]:g} with gradient {gradients[name]:g}" for name in places),
        still=last,
    )
    for edge in along:
        (x0, y0), (x1, y1) = (places[name] for name in edge.split("->"))
        drawing.arrow(x0 + 48, y0, x1 - 48, y1)
    for number, (name, (x, y)) in enumerate(places.items()):
        drawing.box(x - 46, y - 32, 92, 64, shade=0.06)
        drawing.text(x, y - 14, formulas[name], code=True)
        with drawing.during(number, last):
            drawing.text(x, y + 5, f"{values[name]:g}")
        drawing.words.append(
            f"Forward. {formulas[name]}{' goes in with' if name == 'x' else ' is'} {values[name]:g}."
        )
    into = {name: [edge for edge in along if edge.endswith(f"->{name}")] for name in places}
    arrived: dict[str, list[float]] = {name: [] for name in places}
    for number, name in enumerate(back, start=len(forward)):
        x, y = places[name]
        with drawing.during(number, last):
            drawing.text(x, y + 23, f"gradient {gradients[name]:g}", size=12)
        for edge in into[name]:
            source = edge.split("->")[0]
            x0, y0 = places[source]
            arrived[source].append(gradients[name] * along[edge])
            with drawing.during(number, last):
                level = y == y0
                aside = 0 if level else -24 if x0 < x - 100 and y != 120 else 16
                above = -9 if level else 16 if max(y, y0) > 120 else -11
                drawing.text((x + x0) / 2 + aside, (y + y0) / 2 + above, f"×{along[edge]:g}")
        parts = ", ".join(
            f"{gradients[name]:g} times {along[edge]:g} is {gradients[name] * along[edge]:g} at {edge.split('->')[0]}"
            for edge in into[name]
        )
        start = (
            "The walk begins with gradient 1" if name == "y" else f"The gradient here is {gradients[name]:g}"
        )
        drawing.words.append(f"Backward, {name}. {start}, and each edge into {name} multiplies it: {parts}.")
    x, y = places["x"]
    one, other = arrived["x"]
    with drawing.during(last - 1, last - 1):
        drawing.text(x, y + 23, f"gradient {other:g}?", size=12)
    with drawing.during(last):
        drawing.text(x, y + 23, f"gradient {gradients['x']:g}", size=12)
    drawing.words += [
        f"x. Two parts have arrived, {one:g} and {other:g}. If you assign instead of adding, only the last to come survives: {other:g}.",
        f"Added up they are {gradients['x']:g}, and that is the gradient of x.",
    ]
    return drawing


def graph() -> str:
    """The walk, step by step."""
    return walked_graph().hero(
        "The numbers are those of the solution's own run at x = 2.",
        "Values go from x to y, then gradients come back.",
    )


def graph_of_product() -> str:
    """The same walk where the two paths are multiplied."""
    return walked_graph(product=True).hero(
        "The same walk with a product as the third node, at x = 2.",
        "The edges into c now carry the other factor.",
    )


# ---- Puzzle 21: which check sees what -------------------------------------------------------------------------


def seen_by_checks() -> tuple[list[str], dict[str, list[bool]]]:
    """The wrong backward passes, and check -> whether it sees each, from the recorded matrix of `p21 --matrix`."""
    head, *lines = outputs.load("hunt_matrix").text.splitlines()
    names = re.split(r"  +", head)[1:]
    wrong = [line for line in lines if not re.search(r": sees \d", line)]
    rows = [re.findall(r"seen|·", line) for line in wrong]
    assert all(len(row) == len(names) for row in rows)
    seen = {name: [row[number] == "seen" for row in rows] for number, name in enumerate(names)}
    return [re.split(r"  +", line)[0] for line in wrong], seen


def checks() -> str:
    """The wrong backward passes by name: what each check sees, and what the checks so far have seen together."""
    bugs, matrix = seen_by_checks()
    count, line = len(bugs), 22
    half, last, so_far = -(-count // 2), len(matrix) + 1, [False] * count
    drawing = Steps(
        half * line + 34,
        f"{count} wrong backward passes and {len(matrix)} checks, one check after the other. "
        + "; ".join(f"{name} sees {sum(caught)}" for name, caught in matrix.items()),
        still=last,
    )
    boxes = [(2 + 239 * (n // half), 30 + line * (n % half), 236, line - 3) for n in range(count)]
    drawing.words = [f"{count} boxes, each a wrong backward pass. No check has run yet."]
    for box in boxes:
        drawing.box(*box, thick=0.4)
    for step, (name, caught) in enumerate(matrix.items(), start=1):
        new = 0
        for number, box in enumerate(boxes):
            if caught[number] and not so_far[number]:
                new, so_far[number] = new + 1, True
                with drawing.during(step, last):
                    drawing.box(*box, shade=LEGIBLE, thick=0)
            if caught[number]:
                with drawing.during(step):
                    drawing.box(*box, thick=2.5)
        with drawing.during(step):
            drawing.text(NARROW / 2, 18, f"{name}: sees {sum(caught)}, {new} of them new", size=14)
        more = (
            f"{new} of them missed by every check before it"
            if new
            else "none of them missed by the checks before it"
        )
        drawing.words.append(
            f"{name} sees {sum(caught)}, with a thick line, {more}. Shaded: {sum(so_far)} so far."
        )
    for bug, (x, y, *_) in zip(bugs, boxes, strict=True):
        drawing.text(x + 8, y + 14, bug, anchor="start")
    with drawing.during(last):
        drawing.text(NARROW / 2, 18, f"not shaded: {so_far.count(False)} that no check sees", size=14)
        for number, box in enumerate(boxes):
            if not so_far[number]:
                drawing.box(*box, thick=2.5)
    drawing.words.append(
        f"All {len(matrix)} checks together see {sum(so_far)}. {so_far.count(False)} of {count} go through every one of them."
    )
    return drawing.hero(
        "Seven checks in common use, one after the other, as the matrix was recorded. The held-back mistakes are among the names."
    )


# ---- Puzzle 22: the formula of a tutorial's text --------------------------------------------------------------------


def printed() -> str:
    """A row, normalised, and its gradient twice: by the diagonal of the slopes alone, as in a tutorial's text, and by all of them."""
    start = player_start()
    x, g = np.array(start["x"]), np.array(start["g"])
    J = slopes(x_hat, x, 1e-4)
    diagonal, full = np.diag(J) * g, J.T @ g
    turned = [i for i in range(len(x)) if diagonal[i] * full[i] < 0]
    rows = (
        ("x", "", x, f"A row of {len(x)} numbers on its way through LayerNorm, and back. Shade: how large each is."),
        ("x̂", "", x_hat(x), "Normalised: minus its mean, over its deviation. Add 1 to every x, and nothing changes here."),
        ("g", "", g, "Backward. The gradient at x̂ arrives."),
        ("tutorial", "", diagonal, f"A tutorial's formula: each g times the slope of its own x̂. It adds up to {diagonal.sum():.2f}, as if adding 1 to every x did something."),
        ("dx", "", full, f"The gradient: each x moves all eight x̂. It adds up to {abs(round(full.sum(), 3)):g}. Elements {', '.join(map(str, turned))} had the wrong sign."),
    )  # fmt: skip
    drawing = Steps(
        44 * len(rows) + 36,
        "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, _, values, _ in rows),
        still=len(rows) - 1,
    )
    for i in range(len(x)):
        drawing.text(110 + 48 * i, 14, str(i))
    number_rows(drawing, rows, 88, 48, 2, lambda name, i: name == "tutorial" and i in turned)
    return drawing.hero(
        "Forward above the line, back below it. The slopes are differences, so no formula is used. Thick frames: the sign is wrong."
    )


# ---- Puzzle 26: a graph being rewritten -------------------------------------------------------------------------

Node = tuple[str, str, list[str], str]
"""Name, what it computes, names of what goes in, and the sign of the print: kept, gone or new."""


def printed_graphs(title: str) -> tuple[list[Node], list[Node]]:
    """The graph before and after a rewrite, as `p26 --rewrites` printed it."""
    text = outputs.load("backend_rewrites").text
    part = next(each for each in text.split("\n\n") if each.startswith(title))
    before, after = part.split("  after\n")
    graphs = []
    for printed in (before, after):
        nodes = re.findall(r"^   ([ +-]) (\S+) = ([^\[<\n]+?)(?: \[[^\]]*\])?(?: <- (.*))?$", printed, re.M)
        graphs.append(
            [(name, what, inputs.split(", ") if inputs else [], sign) for sign, name, what, inputs in nodes]
        )
    return graphs[0], graphs[1]


def values_at(nodes: list[Node], x: float) -> dict[str, float]:
    """What each node of a graph of pointwise calls computes of one number."""
    does = {"mul": lambda a, b: a * b, "add": lambda a, b: a + b, "pow": lambda a, b: a**b, "tanh": math.tanh}
    values: dict[str, float] = {}
    for name, what, inputs, _ in nodes:
        call, constant = re.findall(r"^(\w+)(?:\((.*)\))?$", what)[0]
        given = [*(values[source] for source in inputs), *([float(constant)] if constant else [])]
        values[name] = x if call == "input" else given[0] if call == "output" else does[call](*given)
    return values


AT = 2.0
"""What goes through the graph in the picture."""


def rewriting(title: str = "gelu: with x**3") -> str:
    """GELU written out becomes one call: found from its end, replaced, and what nobody uses any more swept away."""
    before, after = printed_graphs(title)
    gone = [node for node in before if node[3] == "-"]
    (new,) = [node for node in after if node[3] == "+"]
    values, inputs_of = values_at(before, AT), {name: inputs for name, _, inputs, _ in before}
    depth: dict[str, int] = {}
    for name, inputs in inputs_of.items():
        depth[name] = 1 + max((depth[source] for source in inputs), default=-1)
    chain = ["output"]  # the longest way, drawn from top to bottom; what is not on it stands to its left
    while inputs_of[chain[-1]]:
        chain.append(max(inputs_of[chain[-1]], key=lambda source: depth[source]))
    last, line, wide, high = len(gone) + 2, 50, 132, 34
    middle = line * (len(chain) - 1) / 2 + high / 2 + 4
    places = {name: (212.0, 4.0 + line * depth[name]) for name in chain}
    places |= {name: (70.0, middle - high / 2) for name in inputs_of if name not in places}
    drawing = Steps(
        line * (len(chain) - 1) + high + 10,
        f"A graph of {len(before)} nodes; {len(gone)} of them are found to be {new[1]}, which takes their place. Of {AT:g} both make "
        f"{values['output']:.4f}.",
        still=1,
    )
    removed = {name: len(gone) + 1 - number for number, (name, *_) in enumerate(gone)}  # from the end upward
    for name, what, inputs, _ in before:
        (x, y), until = places[name], removed.get(name, last)
        with drawing.during(0, 1 if name == "output" else until):
            for source in inputs:
                x0, y0 = places[source]
                if x < x0:
                    drawing.arrow(x0 - wide / 2, y0 + high / 2, x, y)
                elif x > x0:
                    drawing.arrow(x0, y0 + high, x - wide / 2, y + high / 2)
                elif y - y0 > line:
                    side = x + wide / 2
                    drawing.parts.append(
                        f'<path d="M{side:g} {y0 + high / 2:g}Q{side + 44:g} {(y + y0 + high) / 2:g} {side + 2:g} {y + high / 2:g}" '
                        'fill="none" stroke="currentColor"/>'
                    )
                else:
                    drawing.arrow(x, y0 + high, x, y)
        with drawing.during(0, until):
            short = re.sub(r"(\d\.\d{4})\d+", r"\1…", what)
            drawing.labelled(x - wide / 2, y, wide, high, short, f"{values[name]:.4f}", code=True)
        if name in removed:
            with drawing.during(1, until):
                drawing.box(x - wide / 2, y, wide, high, shade=0.18, thick=2.5)
    (x, top), (_, end) = places[before[0][0]], places["output"]
    with drawing.during(2, last):
        drawing.labelled(
            350, middle - 24, 124, 48, new[1].removesuffix(".default"), f"{values['output']:.4f}",
            shade=0.3, code=True, thick=2,
        )  # fmt: skip
        drawing.arrow(x + wide / 2, top + high / 2, 412, middle - 24)
        drawing.arrow(412, middle + 24, x + wide / 2, end + high / 2)
    swept = [name for name, *_ in reversed(gone)]
    drawing.words = [
        f"GELU written out, as PyTorch hands it over; {AT:g} goes through it, and {values['output']:.4f} comes out.",
        f"A hundred numbers went through the {len(gone)} marked nodes, and what came out is GELU. That is the match.",
        f"{new[0]} takes {before[0][0]}, and the output now uses it. Nobody uses {swept[0]} any more.",
        *(
            f"The sweep: {earlier} is gone. The next that nobody uses is {name}."
            for earlier, name in pairwise(swept)
        ),
        f"{len(after)} nodes are left: {', '.join(name for name, *_ in after)}. What comes out is still {values['output']:.4f}.",
    ]
    return drawing.hero(
        f"The rewrite “{title}” as p26 --rewrites prints it, one step at a time. Below each call is what it makes of x = {AT:g}."
    )


SWAP = "swap: GPT-2's Conv1D after a LayerNorm"
OLD = ("layer_norm", "view", "addmm")
"""The nodes that the swap makes needless, in their order."""
STANDS = {
    "x": (60, 18, 60), "ln.weight, ln.bias": (296, 6, 108), "c": (386, 18, 44), "w": (446, 18, 44),
    "layer_norm": (76, 96, 116), "view": (76, 152, 116), "addmm": (76, 208, 116),
    "reshape": (206, 96, 96), "t": (446, 96, 44), "layernorm_linear_default": (338, 152, 180), "getitem": (338, 208, 100),
    "view_1": (206, 268, 100), "output": (206, 318, 100),
}  # fmt: skip
"""Where a node of the swap stands: the middle of its upper edge, and its width. Two parameters share a box."""
INPUTS = ("x", "c", "ln.weight, ln.bias", "w")


def together(nodes: list[Node]) -> list[Node]:
    """The nodes of the swap with the two parameters of LayerNorm as one."""
    one = INPUTS[2].split(", ")
    return [
        (
            INPUTS[2] if name == one[0] else name,
            what,
            [INPUTS[2] if source == one[0] else source for source in inputs if source != one[1]],
            sign,
        )
        for name, what, inputs, sign in nodes
        if name != one[1]
    ]


def swapping() -> str:
    """LayerNorm, a reshape and GPT-2's addmm become one operator, node by node, as the rewrite's recorded graphs have them."""
    before, after = map(together, printed_graphs(SWAP))
    came = {"reshape": 3, "t": 4, "layernorm_linear_default": 5, "getitem": 5}
    last = 7
    drawing = Steps(
        352,
        "A graph in which addmm reads a view of layer_norm's result. One operator takes the place of both; the view becomes a reshape of x, "
        "and the weight is transposed.",
        still=5,
    )

    def joined(source: str, name: str) -> None:
        x0, y0, _ = STANDS[source]
        x1, y1, wide = STANDS[name]
        side = max(-wide / 2 + 12, min(wide / 2 - 12, (x0 - x1) / 2))
        high = 44 if "," in source else 24
        drawing.arrow(x0, y0 + high, x1 + side, y1, faint=source in INPUTS and source != "x")

    for (name, _, inputs, _), ends in (
        (node, end) for nodes, end in ((before, True), (after, False)) for node in nodes
    ):
        old, new = name in OLD, name in came
        if ends or new or name == "view_1":
            for source in inputs:
                turned = name == "view_1"
                first = came.get(name, 6 if turned and not ends else 0)
                with drawing.during(first, 5 if turned and ends else last - 1 if old else last):
                    joined(source, name)
        if not (ends or new):
            continue
        with drawing.during(came.get(name, 0), last - 1 if old else last):
            x, y, wide = STANDS[name]
            short = name.removesuffix("_default").removesuffix("_1")
            drawing.labelled(
                x - wide / 2, y, wide, 44 if "," in name else 24, *short.split(", "), code=True,
                shade=0.25 if new else 0.04, thick=2 if new else 1,
            )  # fmt: skip
        if old:
            with drawing.during(1, last - 1):
                drawing.box(x - wide / 2, y, wide, 24, thick=2.5)
    drawing.words = [
        "The graph as Dynamo hands it over. GPT-2's Conv1D is a view, an addmm and a view back.",
        "find begins at the product, addmm. Its input is a view, which keeps the rows; before that comes a LayerNorm. A pair.",
        "refuse asks: is anything written between the two, and is the weight a matrix? Nothing speaks against the swap.",
        "swap begins. What the view did to the normalised rows now happens to x.",
        "The weight of an addmm is stored as [H, O], the operator's as [O, H]: it is transposed.",
        "The operator takes x, the parameters of both layers, and normalises for itself. Its first result is the output.",
        "The view that followed reads the new output. Nobody reads addmm any more.",
        "addmm, its view and the LayerNorm are gone, and with them the normalised rows that were kept for the backward pass.",
    ]
    return drawing.hero(
        "The rewrite of GPT-2's Conv1D after a LayerNorm, from the graphs that p26 --rewrites prints."
    )


HEROES: dict[str, Callable[[], str]] = {
    "barrier": one_barrier,
    "clock": clock,
    "graph": graph,
    "graph_of_product": graph_of_product,
    "checks": checks,
    "printed": printed,
    "one_row": one_row,
    "tiles": tiles,
    "reads": reads,
    "walk": walk,
    "ring_steps": ring,
    "rewriting": rewriting,
    "swapping": swapping,
    "tape_steps": tape_steps,
    "writes": writes,
}
FILES = {
    **{f"hero_{name}.html": draw for name, draw in HEROES.items()},
    "graph_walked.svg": lambda: walked_graph().svg(),
}
