"""The drawings in steps of attention: the backward pass in tiles, a curve to walk, the ring.

Like those in heroes.py, each is drawn from a run.
"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np

from book.figures import online_steps
from book.figures.figures import NARROW, ROOT, Drawing, Steps, number_rows
from harness.check import zoo
from harness.check.python_files import load
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p24 import orders

RANKS, LENGTH = 4, 16
SIDE = 8


# ---- Puzzle 23: the backward pass in tiles ------------------------------------------------------------------------

TILE = 2
"""Queries and keys of a tile; the kernel's have 16."""


def head() -> dict[str, np.ndarray]:
    """One head of puzzle 23's case "hard values", with the exact gradients, in float64."""
    given = online_steps.arrays()
    exact = p23.PUZZLE.exact(given)
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
        ("S", "q·k/√d + M", S, f"A score for each of the {len(S)} keys: the product of this query with the key, times {scale:g}, plus the mask."),
        ("P", "softmax", P, f"Softmax: weights that add up to {P.sum():g}. Key {P.argmax()} has the largest, {P.max():.2f}."),
        ("O", "P V", O, f"The output: the mean of the values with these weights, {len(O)} numbers. The forward pass ends here."),
        ("dO", "arrives", dO, "Backward. The gradient of the output arrives."),
        ("dP", "dO·v", dP, f"Its product with each value is the gradient of the weight. The mean of these with the weights is delta, {delta:.2f}, which is also dO times O."),
        ("dS", "P (dP − D)", dS, f"Softmax's backward: the weight times the distance from delta, D. Key {dS.argmax()} is above it and its score has the largest gradient, key {dS.argmin()} the lowest; the sum is {abs(round(dS.sum(), 5)):g}."),
        ("dQ", "dS K / √d", dQ, "The keys with these as their weights are the gradient of the query."),
    )  # fmt: skip
    drawing = Steps(
        44 * len(rows) + 44,
        "One row of attention. "
        + "; ".join(
            f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, _, values, _ in rows
        ),
        still=len(rows) - 1,
    )
    for t in range(len(S)):
        drawing.text(140 + 42 * t, 14, f"key {t}" if t == 0 else str(t))
    number_rows(drawing, rows, 120, 42, 3, lambda name, i: False)
    return drawing.hero(
        f"Query {QUERY} of a head of the case “hard values”, forward above the line and back below it: every number is that of the harness. "
        "The stronger the shade, the larger the number in its row, whatever its sign.",
        "One query on its way through attention, and back.",
    )


def tiles_walk() -> Iterator[tuple[str, int, int, np.ndarray, float]]:
    """Each tile in the order of the two kernels: what is summed, first query, first key, its weights [TILE, TILE], and how far
    the sum of its owner still is from the exact gradient."""
    of = head()
    q, k, v, dO = (of[name] for name in ("query", "key", "value", "grad_output"))
    scale, count = 1 / np.sqrt(q.shape[1]), len(q)
    lse = np.where(np.isneginf(of["lse"]), 0, of["lse"])[
        :, None
    ]  # as the kernel does for a row that sees no key
    mask, delta = online_steps.arrays()["mask"], (dO * of["output"]).sum(-1)
    exact = {"dQ": of["grad_query"], "dK and dV": of["grad_key"]}
    for what in exact:
        for own in range(0, count, TILE):
            total = np.zeros((TILE, q.shape[1]))
            for other in range(0, count, TILE):
                s, t = (own, other) if what == "dQ" else (other, own)
                rows, keys = slice(s, s + TILE), slice(t, t + TILE)
                P = np.exp(scale * q[rows] @ k[keys].T + mask[rows, keys] - lse[rows])
                dS = P * (dO[rows] @ v[keys].T - delta[rows, None])
                total += scale * (dS @ k[keys] if what == "dQ" else dS.T @ q[rows])
                yield what, s, t, P, float(np.abs(total - exact[what][own : own + TILE]).max())


def tiles() -> str:
    """The scores of one head, a tile at a time, never two tiles at once; beside them the tile's weights in numbers."""
    of, walk_ = head(), list(tiles_walk())
    count, cell, left, top, last = len(of["query"]), 22, 64, 46, len(walk_)
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
    for i in range(count):
        drawing.text(34, top + cell * i + 16, f"{of['lse'][i]:.2f}")
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
            with drawing.during(done, last):
                drawing.box(*box, shade=0.4, thick=0)
    drawing.words = [
        "The weight of each query and key, the darker the larger: a plain backward pass reads them all from memory. "
        "Here the forward pass has kept one number a query instead, lse."
    ]
    for number, (what, s, t, P, error) in enumerate(walk_, start=1):
        with drawing.during(number):
            for (i, j), weight in np.ndenumerate(P):
                shade = 0.05 + 0.25 * float(weight)
                drawing.box(
                    left + cell * (t + j), top + cell * (s + i), cell - 2, cell - 2, shade=shade, thick=2
                )
                drawing.labelled(close + 58 * j, top + 58 * i, 56, 56, f"{weight:.3f}", size=16, shade=shade)
        owner = f"queries {s} and {s + 1}" if what == "dQ" else f"keys {t} and {t + 1}"
        verdict = "is exact" if error < 1e-5 else f"is still off by {error:.2f}"
        for y, line in ((190, what.split()[0]), (210, owner), (230, verdict)):
            with drawing.during(number):
                drawing.text(close + 57, y, line, size=14)
        first = "Delta, the row sum of dO times O, is there too. " if number == 1 else ""
        drawing.words.append(
            f"{first}Queries {s} and {s + 1} meet keys {t} and {t + 1}: four weights, computed from lse, used and dropped. "
            f"{what.split()[0]} of {owner} {verdict}."
        )
    return drawing.hero(
        "The two backward kernels on one head of the workbook's test case “hard values”, tile by tile. Only the weights of one tile exist; on the right they are in numbers."
    )


# ---- Puzzle 24: a curve to walk ------------------------------------------------------------------------------


def spread(cells: np.ndarray) -> tuple[int, int]:
    """Height and width of the smallest rectangle around some cells of the grid."""
    rows, columns = np.divmod(cells, SIDE)
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


def walk(window: int = 16) -> str:
    """Two orders of a grid, walked together."""
    cell, top = 26, 30
    named = {
        "row-major": orders.ORDERS["row-major"](SIDE, SIDE),
        "Hilbert": orders.ORDERS["hilbert"](SIDE, SIDE),
    }
    last = SIDE * SIDE - 1
    drawing = Steps(
        290, f"A grid of {SIDE} x {SIDE} cells walked row by row and along Hilbert's curve; the last {window} cells are shaded.",
        still=last // 2,
    )  # fmt: skip
    boxes: dict[str, list[tuple[int, int]]] = {}
    for number, (name, order) in enumerate(named.items()):
        left = 14 + 240 * number
        drawing.text(left + cell * SIDE / 2, 18, name)
        points = [(left + cell * (c % SIDE) + 13, top + cell * (c // SIDE) + 13) for c in order.tolist()]
        boxes[name] = [spread(order[max(0, step - window + 1) : step + 1]) for step in range(last + 1)]
        for x, y in points:
            drawing.box(x - 12, y - 12, 24, 24, shade=0.03, thick=0.4)
        for step, (x, y) in enumerate(points):
            with drawing.during(step, min(step + window - 1, last)):
                drawing.box(x - 12, y - 12, 24, 24, shade=0.25, thick=0)
            with drawing.during(step):
                drawing.box(x - 7, y - 7, 14, 14, shade=0.8, thick=0, radius=7)
            if step:
                with drawing.during(step, last):
                    drawing.segment(*points[step - 1], x, y, thick=2)
    drawing.text(NARROW / 2, 268, f"shaded: the last {window} cells")
    for step in range(last + 1):
        (rows, columns), (high, wide) = (boxes[name][step] for name in named)
        last_cells = f"the last {min(step + 1, window)} cells" if step else "the first cell"
        drawing.words.append(
            f"The smallest rectangle around {last_cells} is {rows} x {columns} row by row, and {high} x {wide} along the curve."
        )
    return drawing.hero(
        "What lies close together in the order is a stripe on the left and a patch on the right.",
        "Two orders of the same cells, at their first.",
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
    loads = [orders.window_tiles(order, width, radius, tile) for order in named.values()]
    counts = [each.sum(1) for each in loads]
    so_far = [each.cumsum() for each in counts]
    totals, steps = [each[-1] for each in so_far], width * width // tile
    still = int(np.flatnonzero((counts[0] == counts[0].max()) & (counts[1] == counts[1].max()))[-1])
    drawing = Steps(
        330,
        f"A grid of {width} x {width} cells, walked in tiles of {tile} cells; a cell sees those within {radius} rows and columns. Row by row "
        f"{totals[0]} pairs of tiles are computed, along Hilbert's curve {totals[1]}.",
        still=still,
    )
    for panel, (name, order) in enumerate(named.items()):
        left = 6 + 252 * panel
        drawing.text(left + cell * width / 2, 18, name, size=15)
        drawing.box(left, top, cell * width, cell * width, thick=1.5, radius=0)
        middles = [(left + cell * (c % width + 0.5), top + cell * (c // width + 0.5)) for c in order.tolist()]
        drawing.polyline(middles, opacity=0.45)
        by_tile = order.reshape(steps, tile)
        for step in range(steps):
            loaded, own = by_tile[loads[panel][step]].ravel(), by_tile[step]
            with drawing.during(step):
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
    for step, (rows, curve, of_rows, of_curve) in enumerate(zip(*counts, *so_far, strict=True)):
        end = f" That is {totals[0] / totals[1]:.2f} times as many." if step == steps - 1 else ""
        drawing.words.append(
            f"The {tile} queries see keys in {rows} tiles row by row, in {curve} along the curve. "
            f"So far {of_rows} and {of_curve} tiles are read.{end}"
        )
    return drawing.hero(
        f"Strongest: {tile} queries. Around them: the tiles of keys that are loaded for them, because a cell in them lies "
        f"within {radius} rows and columns. The bars count what has been read.",
        f"Two orders of the same grid, each cut into {steps} tiles of {tile} cells. Strongest: the first tile, as queries. Fainter: the tiles that hold its keys.",
    )


# ---- Puzzle 25: the ring, forward and backward -----------------------------------------------------------------


@cache
def ring_run() -> tuple[list[float], list[list[int]], list[list[tuple[int, ...]]], list[float]]:
    """A ring of four, run step by step with the solution's own functions and compared with attention on one device.

    Returns the forward error after each step, whose block is at each rank at each step, which ranks have added to the dK and dV
    that lie at each rank after each step of the backward pass, and the error of the dK that lies there, of its owner's.
    """
    ring = load(ROOT / "solutions" / "p25" / "in_numpy.py")
    generator = np.random.default_rng(0)
    q, k, v, dO = generator.standard_normal((4, 1, 1, LENGTH, 4))
    held = [[each] for each in ring["cut"](LENGTH, RANKS)]
    whole = [[(0, LENGTH)]]
    out, lse = ring["ring_forward"]([q], [k], [v], whole, 0.5, False)
    _, dK, _ = ring["ring_backward"]([dO], [q], [k], [v], out, lse, whole, 0.5, False)
    parts = [np.split(each, RANKS, 2) for each in (q, k, v, dO, out[0], dK[0])]
    turn, blocks, owners = ring["turn"], list(zip(parts[1], parts[2], strict=True)), list(range(RANKS))
    merged = [(np.zeros_like(each), np.full(each.shape[:-1], -np.inf)) for each in parts[0]]
    errors, where = [], []
    for _step in range(RANKS):
        where.append(owners)
        for rank, block in enumerate(blocks):
            more = ring["block_forward"](parts[0][rank], *block, held[rank], held[owners[rank]], 0.5, False)
            merged[rank] = ring["merge"](*merged[rank], *more)
        errors.append(
            max(float(np.abs(mine[0] - exact).max()) for mine, exact in zip(merged, parts[4], strict=True))
        )
        blocks, owners = turn(blocks), turn(owners)
    blocks, owners = list(zip(parts[1], parts[2], strict=True)), list(range(RANKS))
    travelling = [np.zeros_like(each) for each in parts[1]]
    added: list[tuple[int, ...]] = [()] * RANKS
    backward, back_errors = [], []
    for _step in range(RANKS):
        for rank, block in enumerate(blocks):
            delta = (parts[3][rank] * parts[4][rank]).sum(-1)
            more = ring["block_backward"](
                parts[3][rank], parts[0][rank], *block, merged[rank][1], delta, held[rank],
                held[owners[rank]], 0.5, False,
            )  # fmt: skip
            travelling[rank] = travelling[rank] + more[1]
            added[rank] = (*added[rank], rank)
        exact = [parts[5][owner] for owner in owners]
        backward.append(list(added))
        back_errors.append(max(float(np.abs(a - b).max()) for a, b in zip(travelling, exact, strict=True)))
        blocks, owners, travelling, added = turn(blocks), turn(owners), turn(travelling), turn(added)
    backward.append(list(added))
    back_errors.append(max(float(np.abs(a - b).max()) for a, b in zip(travelling, parts[5], strict=True)))
    return errors, where, backward, back_errors


SIX_RINGS = (
    "numpy_backwards", "numpy_local_index", "numpy_not_renormalised", "", "numpy_step_too_few", "numpy_mask_turned",
)  # fmt: skip
"""The wrong rings that are drawn without their names, and the solution, ""."""


def weights_of(name: str) -> np.ndarray:
    """What each query takes from each key, [query, key], by a run of a wrong ring of the museum, or of the solution.

    All scores are equal and the values are a unit matrix, so the output is the matrix of weights.
    """
    (path,) = [wrong.target() for wrong in zoo.load("p25") if wrong.name == name] or [
        ROOT / "solutions" / "p25" / "in_numpy.py"
    ]
    ring = load(path)
    held = [[each] for each in ring["cut"](LENGTH, RANKS)]
    zeros = [np.zeros((1, 1, LENGTH // RANKS, LENGTH))] * RANKS
    values = list(np.split(np.eye(LENGTH)[None, None], RANKS, 2))
    out, _ = ring["ring_forward"](zeros, zeros, values, held, 1.0, True)
    return np.concatenate(out, 2)[0, 0]


def six_rings() -> str:
    """The weights of six causal rings, one of them right: a row for each query, darker where it takes more than it should."""
    side, apart = 8, 162
    drawing = Drawing(
        326,
        "Six squares of 16 queries by 16 keys, numbered. In square 4 the lower left triangle is evenly grey, and nothing else is.",
    )
    for number, name in enumerate(SIX_RINGS):
        x0, y0 = 8 + apart * (number % 3), 24 + apart * (number // 3)
        drawing.text(x0 + side * LENGTH / 2, y0 - 8, str(number + 1))
        for (query, key), weight in np.ndenumerate(weights_of(name)):
            if weight:
                shade = min(1, weight * (query + 1) / 2.5)
                drawing.box(
                    x0 + side * key, y0 + side * query, side, side, shade=round(shade, 2), thick=0, radius=0
                )
        for edge in range(RANKS + 1):
            at = side * edge * LENGTH / RANKS
            drawing.segment(x0 + at, y0, x0 + at, y0 + side * LENGTH, opacity=0.4)
            drawing.segment(x0, y0 + at, x0 + side * LENGTH, y0 + at, opacity=0.4)
    return drawing.svg()


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
        start, stop = (0.42, 0.54) if y1 > y else (0.46, 0.58)  # from below a pile to above the next, or back
        ends = (x + 0.34 * (x1 - x), y + start * (y1 - y), x + 0.66 * (x1 - x), y + stop * (y1 - y))
        with drawing.during(0, RANKS - 2):
            drawing.arrow(*ends)
        with drawing.during(RANKS, last - 1):
            drawing.arrow(*ends)
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
                "the output is that of one device"
                if step == RANKS - 1
                else f"the largest error of an output is still {error:.2f}"
            )
            drawing.words.append(f"{words}; {done}.")
        elif step < last:
            left = back_errors[step - RANKS]
            tail = (
                f"dK is still off by {left:.2f}."
                if step < last - 1
                else "Every part is in, but each sum lies one rank before its owner."
            )
            drawing.words.append(
                f"Backward, step {step - RANKS}. Every rank adds its part to the dK and dV of the block that it has. {tail}"
            )
        else:
            drawing.words.append(
                "One transfer more, of the gradients alone: each rank has the dK and dV of its own block, with a part from every rank."
            )
    return drawing.hero(
        "The errors are those of a run of the NumPy solution on 16 positions.",
        "Four devices, called ranks, each with its own queries and, shaded, its own block of keys and values.",
    )
