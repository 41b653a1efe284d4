"""Drawings in steps, one for a chapter: a reader goes through them by button, key or finger; without scripts one step is a still.

Each is drawn from a run: of the solution's own functions, of a recorded output, or of a counter of the virtual GPU. In the SVG a
group is shown from its step `data-from` to its step `data-to`; theme/workbook.js does the rest.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from book.figures import online_steps
from book.figures.data_charts import said, slopes, x_hat
from book.figures.figures import LEGIBLE, NARROW, ROOT, Steps, player_start, two_digits
from book.measure import outputs
from harness.check.python_files import load_module
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p24 import orders


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
        "No warp has run yet. All four warps share the tile; the result is what they load from it."
    ]
    for tick in range(1, last + 1):
        warp = (tick - 1) // 2
        if tick % 2:
            drawing.words.append(f"On both sides, warp {warp} stores its numbers.")
            continue
        taken = (
            f"Without a barrier, warp {warp} reads the elements of warp {others[warp]}"
            + (", which are stored." if sides[0][tick][warp] == "right" else ", which are not stored yet.")
        )  # fmt: skip
        with_it = (
            "With a barrier, it waits."
            if tick < last
            else "With a barrier, it is the last to arrive, and all four warps take the correct numbers."
        )
        drawing.words.append(f"{taken} {with_it}")
    return drawing.hero(
        "Four warps reverse a row. Each box stands for a warp's 32 numbers; the number in the box names the warp that stored them, and ? stands for the previous contents of the tile. A GPU may run the warps in this order."
    )


def graph() -> str:
    """Puzzle 20's graph, walked there and back by the solution's own functions; at x the two paths add up."""
    module = load_module(ROOT / "solutions" / "p20" / "graph.py")
    values = module["forward"](2.0)
    along = module["edges"](values)
    gradients = module["backward"](along)
    places = {"x": (66, 120), "a": (186, 50), "b": (186, 190), "c": (306, 120), "y": (420, 120)}
    formulas = {
        "x": "x",
        "a": "a = x^2",
        "b": "b = 2x",
        "c": "c = a + b",
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
            f"Forward: {formulas[name]}{' has the value' if name == 'x' else ' is'} {values[name]:g}."
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
            "The backward pass begins with gradient 1"
            if name == "y"
            else f"The gradient here is {gradients[name]:g}"
        )
        drawing.words.append(
            f"Backward, node {name}. {start}, and each edge into {name} multiplies it: {parts}."
        )
    x, y = places["x"]
    one, other = arrived["x"]
    with drawing.during(last - 1, last - 1):
        drawing.text(x, y + 23, f"gradient {other:g}?", size=12)
    with drawing.during(last):
        drawing.text(x, y + 23, f"gradient {gradients['x']:g}", size=12)
    drawing.words += [
        f"Backward, node x. It has received two parts, {one:g} and {other:g}. If you assign instead of adding, only the last part remains: {other:g}.",
        f"The sum of the parts is {gradients['x']:g}, the gradient of x.",
    ]
    return drawing.hero(
        "The numbers come from a run of the solution at x = 2.",
        "Values go from x to y, then gradients come back.",
    )


NumberRow = tuple[str, str, np.ndarray, str]
"""Its name, how it is made, its numbers, and what its step says."""


def number_rows(
    rows: Sequence[NumberRow], turn: int, left: int, cell: int, heads: Sequence[str],
    framed: Callable[[str, int], bool] = lambda name, i: False, what: str = "",
) -> Steps:  # fmt: skip
    """A row of numbers at each step, shaded by their size, the newest in a frame, `framed` numbers with a thick line; the names and
    places of all rows are there from the start. The backward pass begins at row `turn`, below a broken line."""
    last = len(rows) - 1
    drawing = Steps(
        44 * len(rows) + 36, what + said({name: values for name, _, values, _ in rows}), still=last
    )
    for i, head in enumerate(heads):
        drawing.text(left + cell * i + cell // 2 - 2, 14, head)
    for number, (name, how, values, words) in enumerate(rows):
        y = 24 + 44 * number + 12 * (number >= turn)
        drawing.words.append(words)
        drawing.text(4, y + 18, name, anchor="start", size=15)
        drawing.text(36, y + 18, how, anchor="start")
        for i in range(len(values)):
            drawing.box(left + cell * i, y, cell - 3, 30, shade=0.02, thick=0.4)
        with drawing.during(number, last):
            for i, value in enumerate(values):
                shade, thick = LEGIBLE * abs(value) / np.abs(values).max(), 3 if framed(name, i) else 1
                x = left + cell * i
                drawing.labelled(x, y, cell - 3, 30, two_digits(value), shade=shade, thick=thick)
        with drawing.during(number):
            drawing.box(left - 4, y - 4, cell * len(values) + 5, 38, thick=2.5, radius=5)
    drawing.segment(4, 23 + 44 * turn, NARROW - 4, 23 + 44 * turn, dash="4 4", opacity=0.6)
    return drawing


def printed() -> str:
    """A row, normalised, and its gradient twice: by the diagonal of the slopes alone, and by all of them."""
    start = player_start()
    x, g = np.array(start["x"]), np.array(start["g"])
    J = slopes(x_hat, x, 1e-4)
    diagonal, full = np.diag(J) * g, J.T @ g
    turned = [i for i in range(len(x)) if diagonal[i] * full[i] < 0]
    rows = (
        ("x", "", x, f"A row of {len(x)} numbers goes through LayerNorm and back. The darker a number, the larger it is in its row, whatever its sign."),
        ("x̂", "", x_hat(x), "x̂ is x minus the mean of the row, divided by its standard deviation. If you add 1 to every x, x̂ does not change."),
        ("g", "", g, "The backward pass begins with g, the gradient at x̂."),
        ("diagonal", "", diagonal, f"The diagonal formula multiplies each g by the rate at which its own x changes its own x̂. The result sums to {diagonal.sum():.2f}, as if adding 1 to every x changed x̂."),
        ("dx", "", full, f"The correct gradient counts the effect of each x on all eight x̂, and sums to {abs(round(full.sum(), 3)):g}. The diagonal formula gets the signs of elements {' and '.join(map(str, turned))} wrong."),
    )  # fmt: skip
    heads = [str(i) for i in range(len(x))]
    drawing = number_rows(rows, 2, 88, 48, heads, lambda name, i: name == "diagonal" and i in turned)
    return drawing.hero(
        "The forward pass is above the line, and the backward pass is below it. The rates of change are finite differences. A thick frame around one number marks a wrong sign."
    )


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


def shorten(call: str) -> str:
    """Return a call with at most four digits of a constant."""
    return re.sub(r"(\d\.\d{4})\d+", r"\1…", call)


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
        f"A graph of {len(before)} nodes, of which {new[1]} replaces {len(gone)}. For {AT:g} both graphs return "
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
                        f'<path d="M{side:g} {y0 + high / 2:g}Q{side + 44:g} {(y + y0 + high) / 2:g} {side + 12:g} {y + high / 2:g}" '
                        'fill="none" stroke="currentColor"/>'
                    )
                    drawing.arrow(side + 14, y + high / 2 - 2, side, y + high / 2)
                else:
                    drawing.arrow(x, y0 + high, x, y)
        with drawing.during(0, until):
            drawing.labelled(x - wide / 2, y, wide, high, shorten(what), f"{values[name]:.4f}", code=True)
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
    swept = [(name, shorten(what)) for name, what, *_ in reversed(gone)]
    drawing.words = [
        f"PyTorch passes GELU to the backend as {len(gone)} operations. For an input of {AT:g} the graph returns {values['output']:.4f}.",
        f"The backend runs the {len(gone)} marked nodes on a hundred numbers, and the results agree with those of GELU.",
        f"The new node, {new[0]}, reads {before[0][0]}, and the output now reads {new[0]}. No node uses the last old node, {swept[0][1]}, any more.",
        *(
            f"The backend erases {call}. "
            + (f"Now no node uses {source}." if at in inputs_of[name] else f"No node uses {source} either.")
            for (name, call), (at, source) in pairwise(swept)
        ),
        f"{len(after)} nodes are left: {', '.join(name for name, *_ in after)}. The graph still returns {values['output']:.4f}.",
    ]
    return drawing.hero(
        f"The figure shows the rewrite “{title}” of p26 --rewrites step by step. Each box shows a call and its result for x = {AT:g}."
    )


RANKS, LENGTH = 4, 16


TILE = 2
"""Queries and keys of a tile; the kernel's have 16."""


def head() -> dict[str, np.ndarray]:
    """One head of puzzle 23's case "hard values", with the exact gradients, in float64."""
    given = online_steps.arrays()
    exact = p23.PUZZLE.compute_exact(given)
    return {
        name: np.asarray(array[0, 0], np.float64)
        for name, array in {**given, **exact}.items()
        if array.ndim > 2
    }


QUERY = 1
"""Of the row that is walked through: it sees every key."""


def one_row() -> str:
    """A query's scores, weights and output, and on the way back the gradient at each of them, in numbers."""
    of = head()
    scale = 1 / np.sqrt(of["query"].shape[1])
    S, P, O, dO, dP, dS, dQ = (
        of[name][QUERY]
        for name in (
            "scores", "probabilities", "output", "grad_output", "grad_probabilities", "grad_scores", "grad_query",
        )
    )  # fmt: skip
    S, delta = S + online_steps.arrays()["mask"][QUERY], float(of["delta"][QUERY])
    rows = (
        ("S", "q·k/√d + M", S, f"Each of the {len(S)} keys has a score: the dot product of this query with the key, times {scale:g}, plus the mask."),
        ("P", "softmax", P, f"Softmax turns the scores into weights that add up to {P.sum():g}. Key {P.argmax()} has the largest, {P.max():.2f}."),
        ("O", "P V", O, f"The output is the mean of the values with these weights, {len(O)} numbers. The forward pass ends here."),
        ("dO", "arrives", dO, "The backward pass begins with the gradient of the output."),
        ("dP", "dO·v", dP, f"The dot product of dO and a value is the gradient of a weight. The mean of these gradients, weighted by P, is delta, {delta:.2f}, which is also the dot product of dO and O."),
        ("dS", "P (dP − D)", dS, f"Softmax's backward pass multiplies each weight by the difference between its gradient and delta, D. The score of key {dS.argmax()} has the largest gradient, and that of key {dS.argmin()} the lowest. The gradients add up to {abs(round(dS.sum(), 5)):g}."),
        ("dQ", "dS K / √d", dQ, "The gradient of the query is the sum of the keys, weighted by dS."),
    )  # fmt: skip
    heads = ["key 0", *(str(t) for t in range(1, len(S)))]
    drawing = number_rows(rows, 3, 120, 42, heads, what="One row of attention. ")
    return drawing.hero(
        f"Query {QUERY} of one head of test data goes forward above the line and back below it; the harness computes every number. "
        "The darker a cell, the larger its number within the row, whatever its sign.",
        "One query goes through attention and back.",
    )


def tiles_walk() -> Iterator[tuple[str, int, int, np.ndarray, tuple[float, ...]]]:
    """Each tile in the order of the two kernels: what is summed, first query, first key, its weights [TILE, TILE], and how far
    each sum of its owner still is from the exact gradient."""
    of = head()
    q, k, v, dO = (of[name] for name in ("query", "key", "value", "grad_output"))
    scale, count = 1 / np.sqrt(q.shape[1]), len(q)
    lse = np.where(np.isneginf(of["lse"]), 0, of["lse"])[
        :, None
    ]  # as the kernel does for a row that sees no key
    mask, delta = online_steps.arrays()["mask"], (dO * of["output"]).sum(-1)
    exact = {"dQ": (of["grad_query"],), "dK and dV": (of["grad_key"], of["grad_value"])}
    for what, gradients in exact.items():
        for own in range(0, count, TILE):
            totals = [np.zeros((TILE, q.shape[1])) for _ in gradients]
            for other in range(0, count, TILE):
                s, t = (own, other) if what == "dQ" else (other, own)
                rows, keys = slice(s, s + TILE), slice(t, t + TILE)
                P = np.exp(scale * q[rows] @ k[keys].T + mask[rows, keys] - lse[rows])
                dS = P * (dO[rows] @ v[keys].T - delta[rows, None])
                added = (dS @ k[keys] * scale,) if what == "dQ" else (dS.T @ q[rows] * scale, P.T @ dO[rows])
                errors = []
                for total, term, gradient in zip(totals, added, gradients, strict=True):
                    total += term
                    errors.append(float(np.abs(total - gradient[own : own + TILE]).max()))
                yield what, s, t, P, tuple(errors)


SHOWN = (1, 2, 3, 4, 8, 12, 16, 17, 18, 19, 20, 24, 28, 32)
"""Of the tiles in their order those that the drawing stops at: all of a kernel's first block, and the last of the others."""


def tiles() -> str:
    """The scores of one head, a tile at a time, never two tiles at once; beside them the tile's weights in numbers."""
    of, walk_, shown = head(), list(tiles_walk()), SHOWN
    count, cell, left, top, last = len(of["query"]), 22, 64, 46, len(shown)
    delta = (of["grad_output"] * of["output"]).sum(-1)
    right, close = left + cell * count, 360
    drawing = Steps(
        306,
        f"A head of {count} queries and {count} keys in tiles of {TILE} x {TILE}: for each query lse and delta are kept, the weights of one "
        "tile exist at a time, first along the rows for dQ, then down the columns for dK and dV.",
        still=6,
    )
    drawing.text(34, 36, "lse")
    drawing.text((left + right) / 2, 18, "keys")
    drawing.text(right + 26, 36, "delta")
    drawing.text(right + 64, 36, "dQ")
    drawing.text(left - 8, top + cell * count + 26, "dK, dV", anchor="end")
    with drawing.during(1, last):
        drawing.text(close + 58, 36, "weights of the tile")
    drawing.text(54, 18, "queries")
    for i in range(count):
        drawing.text(34, top + cell * i + 16, f"{of['lse'][i]:.2f}".replace("-", "−").replace("inf", "∞"))
        drawing.text(57, top + cell * i + 16, str(i), size=12)
        drawing.text(left + cell * i + 10, 38, str(i), size=12)
        with drawing.during(1, last):
            drawing.text(right + 26, top + cell * i + 16, f"{delta[i]:.2f}")
        for j in range(count):
            place = (left + cell * j, top + cell * i, cell - 2, cell - 2)
            drawing.box(*place, shade=0.02, thick=0.4)
            with drawing.during(0):
                drawing.box(*place, shade=0.05 + 0.5 * float(of["probabilities"][i, j]), thick=0.4)
    side = TILE * cell - 4
    for i in range(0, count, TILE):
        done_row = count // TILE * (i // TILE + 1)
        done_column = done_row + count * count // TILE**2
        for done, box in (
            (done_row, (right + 50, top + cell * i, 28, side)),
            (done_column, (left + cell * i, top + cell * count + 8, side, 28)),
        ):
            drawing.box(*box)
            with drawing.during(sum(number < done for number in shown) + 1, last):
                drawing.box(*box, shade=0.4, thick=0)
    drawing.words = [
        "Each square is the weight of one query and one key; larger weights are darker. A plain backward pass reads all weights from "
        "memory. Here the forward pass has instead kept one number for each query, its lse."
    ]
    for number, (what, s, t, P, errors) in enumerate((walk_[at - 1] for at in shown), start=1):
        with drawing.during(number):
            for (i, j), weight in np.ndenumerate(P):
                shade = 0.05 + 0.25 * float(weight)
                drawing.box(
                    left + cell * (t + j), top + cell * (s + i), cell - 2, cell - 2, shade=shade, thick=2
                )
                drawing.labelled(close + 58 * j, top + 58 * i, 56, 56, f"{weight:.3f}", size=16, shade=shade)
        owner = f"queries {s} and {s + 1}" if what == "dQ" else f"keys {t} and {t + 1}"
        sums = dict(zip(what.split(" and "), errors, strict=True))
        if max(errors) < 1e-5:
            told, verdicts = f"{what} of {owner} {'is' if what == 'dQ' else 'are'} complete.", ("complete",)
        else:
            told = ", and that in ".join(f"{name} of {owner} is {error:.2f}" for name, error in sums.items())
            told = f"the largest error in {told}."
            verdicts = ("error", *(f"{name} {error:.2f}" for name, error in sums.items()))
        for line, words in enumerate((what, owner, *verdicts)):
            with drawing.during(number):
                drawing.text(close + 57, 190 + 20 * line, words, size=14)
        first = {
            1: "The first kernel also reads delta, the row sum of dO times O. It computes the four weights of each tile from lse, uses them, and "
            "drops them. ",
            3: "The error of an unfinished sum can also grow. ",
            8: "The second kernel's first block handles keys 0 and 1. ",
        }
        tile = f"After the tile of queries {s} and {s + 1} and keys {t} and {t + 1}, "
        drawing.words.append(f"{first.get(number, '')}{tile}{told}")
    return drawing.hero(
        "The two backward kernels work on one head of test data. The figure stops at each tile of a kernel's first block, and at the last tile "
        "of the other blocks. Only one tile's weights exist at a time; their numbers are on the right. Query 4 attends to no key, so its lse is −∞."
    )


def runs(cells: np.ndarray, width: int, side: float, left: float, top: float) -> str:
    """An SVG path of some cells, a rectangle for each run in a row."""
    mask = np.zeros((width, width + 2), np.int8)
    mask[cells // width, cells % width + 1] = 1
    starts, stops = (np.argwhere(np.diff(mask, axis=1) == turn) for turn in (1, -1))
    return "".join(
        f"M{left + side * x:g} {top + side * y:g}h{side * (end - x):g}v{side:g}H{left + side * x:g}z"
        for (y, x), (_, end) in zip(starts.tolist(), stops.tolist(), strict=True)
    )


def reads(width: int = 32, radius: int = 4, tile: int = 16) -> str:
    """Two orders of one grid: for each tile of queries the tiles of keys that attention in a window has to load."""
    cell, top = 6.75, 40
    named = {
        "row by row": orders.ORDERS["row-major"](width, width),
        "along the curve": orders.ORDERS["hilbert"](width, width),
    }
    loads = [orders.find_window_tiles(order, width, radius, tile) for order in named.values()]
    counts = [each.sum(1) for each in loads]
    so_far = [each.cumsum() for each in counts]
    totals, steps = [each[-1] for each in so_far], width * width // tile
    shown = range(steps // 16 - 1, steps, steps // 16)
    drawing = Steps(
        330,
        f"A grid of {width} x {width} cells, walked in tiles of {tile} cells; a cell sees those within {radius} rows and columns. Row by row "
        f"{totals[0]} pairs of tiles are computed, along Hilbert's curve {totals[1]}.",
        still=len(shown) - 1,
    )
    for panel, (name, order) in enumerate(named.items()):
        left = 6 + 252 * panel
        drawing.text(left + cell * width / 2, 18, name, size=15)
        drawing.box(left, top, cell * width, cell * width, thick=1.5, radius=0)
        middles = [(left + cell * (c % width + 0.5), top + cell * (c // width + 0.5)) for c in order.tolist()]
        drawing.polyline(middles, opacity=0.45)
        by_tile = order.reshape(steps, tile)
        for number, step in enumerate(shown):
            loaded, own = by_tile[loads[panel][step]].ravel(), by_tile[step]
            with drawing.during(number):
                for cells, opacity in ((loaded, 0.35), (own, 0.9)):
                    drawing.parts.append(
                        f'<path d="{runs(cells, width, cell, left, top)}" fill="currentColor" fill-opacity="{opacity}"/>'
                    )
                x, total = left + cell * width / 2, so_far[panel][step]
                drawing.text(x, top + cell * width + 26, f"reads {counts[panel][step]} tiles", size=15)
                drawing.text(x, top + cell * width + 50, f"so far {total}", size=15)
                drawing.box(
                    left, top + cell * width + 60, cell * width * total / max(totals), 10, shade=0.5, thick=0
                )
    for step in shown:
        rows, curve, of_rows, of_curve = (each[step] for each in (*counts, *so_far))
        end = f" The left order reads {totals[0] / totals[1]:.2f} times as many." if step == steps - 1 else ""
        drawing.words.append(
            f"Row by row, the keys of the {tile} queries are in {rows} tiles; along the curve, they are in {curve} tiles. "
            f"So far, {of_rows} and {of_curve} tiles have been read.{end}"
        )
    return drawing.hero(
        f"Black cells are the {tile} queries of a tile, and grey cells are the tiles of keys that they need. Bars count the tiles read so far.",
        f"The two orders of the grid are each cut into {steps} tiles of {tile} cells; every fourth tile is shown.",
    )


@cache
def ring_run() -> tuple[list[float], list[list[int]], list[list[tuple[int, ...]]], list[float]]:
    """A ring of four, run step by step with the solution's own functions and compared with attention on one device.

    Returns the forward error after each step, whose block is at each rank at each step, which ranks have added to the dK and dV
    that lie at each rank after each step of the backward pass, and the error of the dK that lies there, of its owner's.
    """
    ring = load_module(ROOT / "solutions" / "p25" / "in_numpy.py")
    generator = np.random.default_rng(0)
    q, k, v, dO = generator.standard_normal((4, 1, 1, LENGTH, 4))
    held = [[each] for each in ring["cut"](LENGTH, RANKS)]
    whole = [[(0, LENGTH)]]
    out, lse = ring["ring_forward"]([q], [k], [v], whole, 0.5, False)
    _, dK, _ = ring["ring_backward"]([dO], [q], [k], [v], out, lse, whole, 0.5, False)
    queries, keys, values, gradients, outputs_, exact = (
        np.split(each, RANKS, 2) for each in (q, k, v, dO, out[0], dK[0])
    )
    blocks = list(zip(range(RANKS), keys, values, strict=True))
    merged = [(np.zeros_like(each), np.full(each.shape[:-1], -np.inf)) for each in queries]
    errors, where = [], []
    for _ in range(RANKS):
        where.append([owner for owner, *_ in blocks])
        for rank, (owner, *block) in enumerate(blocks):
            more = ring["block_forward"](queries[rank], *block, held[rank], held[owner], 0.5, False)
            merged[rank] = ring["merge"](*merged[rank], *more)
        errors.append(largest_error((mine for mine, _ in merged), outputs_))
        blocks = ring["rotate"](blocks)
    sums: list[tuple[np.ndarray, tuple[int, ...]]] = [(np.zeros_like(each), ()) for each in keys]
    backward, back_errors = [], []
    for step in range(RANKS + 1):
        if step < RANKS:
            for rank, (owner, *block) in enumerate(blocks):
                delta = (gradients[rank] * outputs_[rank]).sum(-1)
                ranges = held[rank], held[owner]
                given = gradients[rank], queries[rank], *block, merged[rank][1], delta, *ranges
                more, (total, added) = ring["block_backward"](*given, 0.5, False), sums[rank]
                sums[rank] = total + more[1], (*added, rank)
        backward.append([added for _, added in sums])
        back_errors.append(
            largest_error((total for total, _ in sums), (exact[owner] for owner, *_ in blocks))
        )
        blocks, sums = ring["rotate"](blocks), ring["rotate"](sums)
    return errors, where, backward, back_errors


def largest_error(found: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> float:
    """The largest difference of any element."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, exact, strict=True))


def ring() -> str:
    """Four steps forward, four backward, and the transfer that brings the gradients home."""
    errors, where, backward, back_errors = ring_run()
    last = 2 * RANKS
    drawing = Steps(
        374,
        f"Four ranks in a circle, in {last + 1} steps: blocks of keys and values go round once forward and once backward, the "
        "gradients of a block go with it and one transfer further.",
        still=RANKS + 1,
    )
    places = [
        (240 - 165 * math.cos(turn), 184 - 126 * math.sin(turn))
        for turn in (math.pi / 2 * rank for rank in range(RANKS))
    ]
    for rank, (x, y) in enumerate(places):
        drawing.labelled(x - 68, y - 56, 136, 32, f"rank {rank}: Q, dO {rank}")
        x1, y1 = places[(rank + 1) % RANKS]
        for first, until, bottom in (
            (0, RANKS - 2, 10),
            (RANKS, last - 1, 48),
        ):  # the piles are higher on the way back
            side, level = (68 if x1 > x else -68), (-56 if rank < RANKS // 2 else bottom)
            ends = [
                (x1 - side, y1 - 20),
                (x + side * 0.6, y + level),
            ]  # a side of one pile, top or bottom of the other
            if rank % 2:
                ends = [(x1 - side * 0.6, y1 + level), (x + side, y - 20)]
            with drawing.during(first, until):
                drawing.arrow(*ends[1], *ends[0])
        for step in range(last + 1):
            with drawing.during(step):
                if step < last:
                    drawing.labelled(
                        x - 68, y - 22, 136, 32, f"K, V of {where[step % RANKS][rank]}", shade=0.3
                    )
                if step >= RANKS:
                    adders = ", ".join(map(str, backward[step - RANKS][rank]))
                    drawing.labelled(x - 68, y + 12, 136, 36, "dK, dV, parts of", adders, shade=0.12, size=12)
    for step in range(last + 1):
        forward = step < RANKS
        title = "forward" if forward else "backward" if step < last else "home"
        with drawing.during(step):
            drawing.text(240, 176, title, size=14)
            drawing.text(240, 194, f"step {step % RANKS}" if step < last else "dK, dV", size=14)
        if forward:
            error = errors[step]
            words = f"Forward, step {step}. Every rank merges {'one more' if step else 'its own'} block into its output"
            done = (
                "the output equals that of one device"
                if step == RANKS - 1
                else f"the largest error of an output is still {error:.2f}"
            )
            drawing.words.append(f"{words}; {done}.")
        elif step < last:
            left = back_errors[step - RANKS]
            tail = (
                f"dK is still off by {left:.2f}."
                if step < last - 1
                else "Every sum is complete, but it is at the rank before its owner."
            )
            drawing.words.append(
                f"Backward, step {step - RANKS}. Every rank adds its part to the dK and dV of the block that it has. {tail}"
            )
        else:
            drawing.words.append(
                "After one more transfer, of the gradients only, each rank has the dK and dV of its own block, with a part from every rank."
            )
    return drawing.hero(
        "The errors come from a run of the NumPy solution on 16 positions.",
        "Each of four devices, called ranks, has its own queries and (shaded) its own block of keys and values.",
    )


FILES = {
    "hero_barrier.html": one_barrier, "hero_graph.html": graph, "hero_printed.html": printed, "hero_one_row.html": one_row,
    "hero_tiles.html": tiles, "hero_reads.html": reads, "hero_ring_steps.html": ring, "hero_rewriting.html": rewriting,
}  # fmt: skip
