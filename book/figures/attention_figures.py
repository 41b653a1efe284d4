"""Figures of puzzles 23, 24 and 25: attention, attention along a curve, attention over several ranks.

Each is at most NARROW wide, so that a phone can show it. Numbers are computed here with NumPy, counted by the puzzles' own code, or
measured; nothing needs torch.
"""

import re

import numpy as np

from book.figures import attention_heroes, order_figures
from book.figures.backward_figures import LOGITS, softmax
from book.figures.figures import LEGIBLE, Drawing, bars, svgs
from book.figures.layer_figures import slopes
from book.measure import outputs
from harness.puzzles.p24 import orders
from harness.puzzles.p25 import layout
from harness.puzzles.p25.balance import TILE

RANKS = 4

# ---- Puzzle 23 ----------------------------------------------------------------------------------------------


def three_products() -> str:
    """One kernel for three forms of a product: which factor changes places while its tile is loaded."""
    drawing = Drawing(
        250,
        "NN: O = P V reads both factors as they lie. NT: S = Q Kᵀ turns the second while it is loaded. TN: dV = Pᵀ dO turns the first. "
        "In shared memory all three look the same.",
    )
    forms = (
        ("NN", "O = P V", False, False),
        ("NT", "S = Q Kᵀ", False, True),
        ("TN", "dV = Pᵀ dO", True, False),
    )
    for number, (name, product, left, right) in enumerate(forms):
        x = 10 + 162 * number
        drawing.text(x + 66, 18, f"{name}: {product}")
        for side, turned in ((0, left), (1, right)):
            at = x + 70 * side
            drawing.text(at + 30, 40, "turned" if turned else "as it lies")
            for k in range(4):
                # The stripe that neighbouring threads read: along a row of what is stored.
                drawing.box(at + 2, 50 + 14 * k, 56, 12, shade=0.55 if k == 1 else 0.06)
            drawing.arrow(at + 30, 110, at + 30, 134)
            for k in range(4):
                if turned:
                    drawing.box(at + 2 + 14 * k, 138, 12, 54, shade=0.55 if k == 1 else 0.06)
                else:
                    drawing.box(at + 2, 138 + 14 * k, 56, 12, shade=0.55 if k == 1 else 0.06)
    drawing.text(240, 214, "above: in memory, read along rows")
    drawing.text(240, 234, "below: in shared memory, a[row, k] and b[k, column]")
    return drawing.svg()


def softmax_jacobian() -> np.ndarray:
    """dp_j/ds_i of a row."""
    return slopes(softmax, np.array(LOGITS)).T


def softmax_heat() -> str:
    """The Jacobian of a softmax of six scores, in numbers."""
    p, J = softmax(np.array(LOGITS)), softmax_jacobian()
    drawing = Drawing(
        330,
        f"p is {', '.join(f'{value:.2f}' for value in p)}. The Jacobian has positive numbers on its diagonal, negative ones elsewhere, "
        "and each row adds up to 0.",
    )
    cell, left, top = 58, 92, 52
    for j, value in enumerate(p):
        drawing.text(left + cell * (j + 0.5), 38, f"{value:.2f}")
    drawing.text(left - 12, 38, "p", anchor="end")
    for i, row in enumerate(J):
        drawing.text(left - 8, top + 42 * i + 26, f"by s{i + 1}", anchor="end")
        for j, value in enumerate(row):
            drawing.labelled(
                left + cell * j, top + 42 * i, cell - 4, 38, f"{value + 0.0:.3f}".replace("-", "−"),
                shade=0.08 + 1.6 * abs(float(value)) if i == j else min(0.5, 1.6 * abs(float(value))), thick=2 if i == j else 0.6,
            )  # fmt: skip
    drawing.text(240, top + 42 * 6 + 18, "each row adds up to 0: what one gains the others lose")
    return drawing.svg()


def two_passes() -> str:
    """Which tiles of the scores a block of each backward kernel walks over, and what it owns."""
    drawing = Drawing(
        260,
        "Scores as tiles, queries down, keys across. A block of the first kernel owns a row of tiles, all keys for 16 queries, and sums "
        "dQ. A block of the second owns a column, all queries for 16 keys, and sums dK and dV.",
    )
    cell = 30
    for number, (title, owns) in enumerate((("a block owns queries", "dQ"), ("a block owns keys", "dK, dV"))):
        left, top = 66 + 222 * number, 56
        drawing.text(left + 75, 18, title)
        drawing.text(left + 75, 46, "keys →")
        for row in range(5):
            for column in range(5):
                own = row == 1 if number == 0 else column == 2
                drawing.box(
                    left + cell * column, top + cell * row, cell - 3, cell - 3, shade=0.5 if own else 0.05
                )
        if number == 0:
            drawing.arrow(left + 4, top + cell * 1.45, left + cell * 5 - 6, top + cell * 1.45)
            drawing.arrow(left + cell * 5, top + cell * 1.45, left + cell * 5 + 26, top + cell * 1.45)
            drawing.text(left + cell * 5 + 14, top + cell * 1.45 + 22, owns)
        else:
            drawing.arrow(left + cell * 2.45, top + 4, left + cell * 2.45, top + cell * 5 - 6)
            drawing.arrow(left + cell * 2.45, top + cell * 5, left + cell * 2.45, top + cell * 5 + 22)
            drawing.text(left + cell * 2.45, top + cell * 5 + 38, owns)
    drawing.text(32, 132, "queries", anchor="middle")
    drawing.text(32, 148, "↓", anchor="middle")
    drawing.text(141, 228, "every tile is made")
    drawing.text(141, 246, "in both kernels")
    return drawing.svg()


def never_stored(side: int = 8, tile: int = 2) -> str:
    """What is in memory between the passes: every score, or one number for each query; a tile is there for a moment."""
    drawing = Drawing(
        262,
        f"Scores of {side} queries and {side} keys. On the left all {side * side} are kept between the passes. On the right {side} numbers "
        f"are kept, one for each query, and {tile} x {tile} scores at a time are made and dropped.",
    )
    cell = 21
    for left, title in ((54, "every score is kept"), (256, "one number a query is kept")):
        drawing.text(left + cell * side / 2 + (14 if left > 54 else 0), 18, title)
        drawing.text(left + cell * side / 2, 44, "keys →")
        for row in range(side):
            for column in range(side):
                here = left > 54 and 2 <= row < 2 + tile and 4 <= column < 4 + tile
                shade = 0.5 if left == 54 else 0.12 if here else 0
                drawing.box(
                    left + cell * column, 52 + cell * row, cell - 3, cell - 3, shade=shade,
                    thick=2 if here else 0.4,
                )  # fmt: skip
            if left > 54:
                drawing.box(left + cell * side + 10, 52 + cell * row, cell - 3, cell - 3, shade=0.5)
    drawing.text(24, 130, "queries")
    drawing.text(24, 146, "↓")
    drawing.text(54 + cell * side / 2, 242, "the plain kernels")
    drawing.text(256 + cell * side / 2 + 14, 242, "flash attention; framed: a tile")
    return drawing.svg()


def collapse() -> str:
    """Delta of a query two ways: through a row of dP and a row of P, as long as the keys are many, or from two rows of the head."""
    said = outputs.load("flash_rows").text
    ((keys, short, long),) = re.findall(
        r"(\d+) numbers, where P has .*?^delta two ways, query 0: (\S+) and (\S+)$", said, re.M | re.S
    )
    drawing = Drawing(
        268,
        f"Two ways to delta. Long: a row of dO times all values gives a row of dP, {keys} numbers; each times its weight, and the sum is {long}. "
        f"Short: a row of dO times the same row of O, and the sum is {short}.",
    )

    def row(x: float, y: float, cells: int, wide: float, name: str, shade: float) -> None:
        for number in range(cells):
            drawing.box(x + wide * number, y, wide - 2, 20, shade=shade, thick=0.6)
        drawing.text(x + wide * cells / 2, y - 6, name)

    drawing.text(4, 16, "the long way, over all keys", anchor="start", size=14)
    row(4, 48, 6, 12, "dO", 0.25)
    drawing.text(92, 62, "×", size=16)
    for line in range(6):
        for key in range(24):
            drawing.box(108 + 7 * key, 36 + 7 * line, 6, 6, shade=0.04, thick=0.4)
    drawing.text(192, 92, "V, transposed: every key")
    drawing.text(290, 62, "=", size=16)
    row(306, 48, 24, 7, "dP", 0.12)
    row(306, 92, 24, 7, "times P", 0.12)
    drawing.text(390, 134, f"sum = {float(long):.4f}", size=14)
    drawing.segment(4, 156, 476, 156, opacity=0.3)
    drawing.text(4, 184, "the short way: no key is read", anchor="start", size=14)
    row(4, 220, 6, 12, "dO", 0.25)
    drawing.text(92, 234, "·", size=20)
    row(108, 220, 6, 12, "O", 0.25)
    drawing.text(390, 236, f"sum = {float(short):.4f}", size=14)
    return drawing.svg()


def fast_block(rows: int = 128, tile: int = 64, warps: int = 4, tiles: int = 5, at: int = 2) -> str:
    """What a block of the fast kernels does at one moment: its rows, by warp, and the tiles of the other side."""
    drawing = Drawing(
        216,
        f"A block owns {rows} queries, {rows // warps} for each of {warps} warps, and walks over the keys in tiles of {tile}. While tile "
        f"{at} is multiplied, tile {at + 1} is copied into shared memory. Earlier tiles are done, later ones are still in memory.",
    )
    drawing.text(70, 18, f"{rows} queries")
    drawing.text(312, 18, f"keys, in tiles of {tile}")
    top, height, left, width = 30, 32, 148, 66
    for warp in range(warps):
        drawing.labelled(10, top + height * warp, 120, height - 3, f"warp {warp}: {rows // warps}", shade=0.2)
        for number in range(tiles):
            shade = {at: 0.5, at + 1: 0.15}.get(number, 0.03)
            drawing.box(left + width * number, top + height * warp, width - 3, height - 3, shade=shade)
    for number, words in ((0, "done"), (at, "multiplied"), (at + 1, "copied"), (at + 2, "in memory")):
        drawing.text(left + width * (number + 0.5) - 1, top + height * warps + 16, words)
    drawing.segment(left + width * at, 182, left + width * (at + 2) - 3, 182)
    drawing.text(left + width * (at + 1) - 1, 200, "two tiles in shared memory")
    return drawing.svg()


def slots(lengths: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """For each block of a grid that knows only the total: its sequence, and how many rows it gets of it."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    first = [start // rows + i for i, start in enumerate(starts)]
    found = []
    for block in range(sum(lengths) // rows + len(lengths)):
        own = max(i for i, slot in enumerate(first) if slot <= block)
        found.append((own, min(max(lengths[own] - rows * (block - first[own]), 0), rows)))
    return found


def slot_picture(lengths: tuple[int, ...] = (5, 3, 6), rows: int = 4) -> str:
    """Sequences that lie one after another, and the blocks of a grid that find their rows."""
    blocks = slots(lengths, rows)
    words = ", ".join(f"block {i} {count} of sequence {own}" for i, (own, count) in enumerate(blocks))
    drawing = Drawing(196, f"Sequences of {lengths} rows in blocks of {rows}. Rows: {words}.")
    cell, shades = 460 / sum(lengths), (0.3, 0.06, 0.18)
    drawing.text(10, 16, "rows of all sequences, one after another", anchor="start")
    row = 0
    for sequence, length in enumerate(lengths):
        for _ in range(length):
            drawing.labelled(10 + cell * row, 26, cell - 3, 26, str(sequence), shade=shades[sequence])
            row += 1
    drawing.text(10, 92, f"the grid: {len(blocks)} blocks of up to {rows} rows", anchor="start")
    wide = 460 / len(blocks)
    for block, (own, count) in enumerate(blocks):
        drawing.box(10 + wide * block, 102, wide - 8, 48, shade=0)
        drawing.text(10 + wide * (block + 0.5) - 4, 168, f"block {block}")
        drawing.text(
            10 + wide * (block + 0.5) - 4, 186, f"{count} row{'s' * (count > 1)}" if count else "returns"
        )
        for place in range(count):
            drawing.box(16 + wide * block + 16 * place, 116, 13, 20, shade=shades[own])
    return drawing.svg()


def padding(lengths: tuple[int, ...] = tuple(range(1, 9))) -> str:
    """The scores of sequences of unequal lengths in squares that are padded to the longest, to scale."""
    longest, side = max(lengths), 108
    work = sum(length**2 for length in lengths) / (len(lengths) * longest**2)
    rows = sum(lengths) / (len(lengths) * longest)
    drawing = Drawing(
        2 * (side + 12) + 4,
        f"Sequences of {', '.join(map(str, lengths))} eighths of the longest, as squares of scores that are padded to it: "
        f"{rows:.0%} of the rows and {work:.0%} of the scores are those of the sequences.",
    )
    for number, length in enumerate(lengths):
        x, y = 2 + (side + 14) * (number % 4), 2 + (side + 12) * (number // 4)
        own = side * length / longest
        drawing.box(x, y, side, side, radius=0, thick=0.6)
        drawing.box(x, y, own, own, shade=0.5, radius=0, thick=0.6)
    return drawing.svg()


def two_digits(x: float = np.pi) -> str:
    """The binary digits of a float32 number, and those of the two float16 numbers that stand for it."""
    single = np.float32(x)
    high = np.float16(single)
    low = np.float16(single - np.float32(high))
    unit = 2.0 ** np.floor(np.log2(x))
    lost = abs(float(single) - float(high) - float(low)) / float(single)

    def places(value: float, digits: int) -> tuple[int, str]:
        """The place of the first digit, counted from that of x, and the digits."""
        first = int(np.floor(np.log2(unit)) - np.floor(np.log2(value)))
        return first, f"{round(float(value) / unit * 2.0 ** (first + digits - 1)):b}"

    rows = (("float32", single, 24), ("float16", high, 11), ("float16", low, 11))
    drawing = Drawing(
        136,
        f"{single:.7f} in 24 binary digits is nearly {float(high):.7f} and {float(low):.7f} in 11 digits each; {lost:.0e} of it is lost.",
    )
    for number, (kind, value, digits) in enumerate(rows):
        y = 4 + 44 * number
        drawing.text(2, y + 12, ("x", "x_h", "x_l")[number], anchor="start")
        drawing.text(2, y + 28, kind, anchor="start")
        first, written = places(float(value), digits)
        for place, digit in enumerate(written):
            shade = (0.06, LEGIBLE, 0.16)[number]
            drawing.labelled(58 + 17.4 * (first + place), y, 16, 32, digit, shade=shade, code=True)
    return drawing.svg()


def halves() -> str:
    """The product of two numbers, each cut in two, as an area; not to scale."""
    drawing = Drawing(
        220,
        "x is cut into x_h and x_l, y into y_h and y_l. x_h y_h is the product but for its last digits; x_h y_l and x_l y_h are up to 2 "
        "to the -11 of it, x_l y_l up to 2 to the -22, and is left out.",
    )
    columns, rows = ((104, 190, "x_h"), (300, 172, "x_l")), ((34, 110, "y_h"), (150, 54, "y_l"))
    sizes = (("x_h y_h", "x_l y_h: up to 2⁻¹¹"), ("x_h y_l: up to 2⁻¹¹", "left out: 2⁻²²"))
    for j, (y, height, side) in enumerate(rows):
        drawing.text(88, y + height / 2 + 5, side, anchor="end")
        for i, (x, width, name) in enumerate(columns):
            if not j:
                drawing.text(x + width / 2, 22, name)
            drawing.labelled(x, y, width, height, sizes[j][i], shade=0 if i and j else LEGIBLE / (1 + i + j))
    return drawing.svg()


# ---- Puzzle 24 ----------------------------------------------------------------------------------------------


def gather_and_scatter(side: int = 4, shown: int = 8) -> str:
    """The first rows of a gather along Hilbert's curve, and where the backward pass puts their gradients."""
    order = [int(cell) for cell in orders.hilbert(side, side)[:shown]]
    cells = max(order) + 1
    drawing = Drawing(
        230,
        f"Forward, gathered row i is row o(i) of x, o = {', '.join(map(str, order))}. Backward, the gradient of row i is written to row "
        "o(i): the same arrows, the other way.",
    )
    width = 460 / cells
    for top, words in ((0, "forward: reads x at o(i)"), (120, "backward: writes dx at o(i)")):
        drawing.text(10, top + 16, words, anchor="start")
        for cell in range(cells):
            drawing.labelled(
                10 + width * cell, top + 24, width - 4, 24, str(cell),
                shade=0.35 if cell in order else 0.03,
            )  # fmt: skip
        for step, cell in enumerate(order):
            x0, x1 = 10 + width * (cell + 0.45), 10 + width * (step + 0.45)
            ends = (x0, top + 50, x1, top + 78) if top == 0 else (x1, top + 78, x0, top + 50)
            drawing.arrow(*ends)
            drawing.labelled(10 + width * step, top + 80, width - 4, 24, str(step), shade=0.12)
    return drawing.svg()


def tile_masks(side: int = 64, radius: int = 4, tile: int = 64) -> str:
    """Which pairs of tiles a window needs, in two orders."""
    parts = {
        name: orders.window_tiles(orders.ORDERS[name](side, side), side, radius, tile)
        for name in ("row-major", "hilbert")
    }
    count = len(parts["hilbert"])
    drawing = Drawing(
        280,
        f"Pairs of tiles of {tile} positions that a window of radius {radius} needs on a grid of {side} x {side}: "
        + ", ".join(f"{name} {int(mask.sum())} of {mask.size}" for name, mask in parts.items()),
    )
    cell = 216 / count
    for number, (name, mask) in enumerate(parts.items()):
        left = 12 + 240 * number
        drawing.text(left + 108, 18, name)
        drawing.box(left - 1, 27, 218, 218)
        for row, needed in enumerate(mask):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], needed.astype(int), [0]])))
            for first, end in edges.reshape(-1, 2):
                drawing.box(
                    left + cell * first, 28 + cell * row, cell * (end - first), cell, shade=0.6, thick=0,
                    radius=0,
                )  # fmt: skip
        drawing.text(left + 108, 266, f"{int(mask.sum())} of {mask.size} pairs")
    return drawing.svg()


def order_bars() -> str:
    """Milliseconds of the kernels on tensor cores in each order, on the large grid with the smaller window, beside dense attention."""
    measured_times = order_figures.measured()
    times = {name: order_figures.own(measured_times, 128, 4, name)[0] for name in orders.ORDERS}
    times["dense, every key"] = measured_times[128, 4, "SDPA, every key", "both"]
    label = "Forward and backward on a grid of 128 x 128 with a radius of 4: " + ", ".join(
        f"{name} {time:.2f} ms" for name, time in times.items()
    )
    rows = [(name, time, f"{time:.2f} ms", 0.3) for name, time in times.items()]
    return bars(rows, label, left=124, longest=250)


# ---- Puzzle 25 ----------------------------------------------------------------------------------------------


SCORES = (0.4, 1.6, -0.5, 0.9, 2.2, 0.1)
BLOCK = 3


def merged() -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """The softmax of all six scores, the softmax of each block of three, and the share of each block."""
    scores = np.array(SCORES)
    blocks = [scores[:BLOCK], scores[BLOCK:]]
    sums = np.array([np.log(np.exp(block).sum()) for block in blocks])
    shares = np.exp(sums - np.log(np.exp(sums).sum()))
    return softmax(scores), [softmax(block) for block in blocks], shares


def merging() -> str:
    """Two softmaxes of three scores, their shares, and the softmax of all six that they make."""
    whole, parts, shares = merged()
    drawing = Drawing(
        300,
        "Six scores in two blocks of three. Within the blocks the weights are "
        + "; ".join(", ".join(f"{value:.2f}" for value in part) for part in parts)
        + f". The shares of the blocks are {shares[0]:.2f} and {shares[1]:.2f}. Weight times share is the weight in the whole softmax: "
        + ", ".join(f"{value:.2f}" for value in whole),
    )
    column, scale = 74, 80.0
    for title, top, values in (
        ("weights within each block", 0, np.concatenate(parts)),
        ("times the share: the whole", 150, whole),
    ):
        drawing.text(12, top + 18, title, anchor="start")
        for i, value in enumerate(values):
            x = 12 + column * i + 12 * (i >= BLOCK)
            size = scale * float(value)
            drawing.box(x, top + 116 - size, column - 8, size, shade=0.5 if i >= BLOCK else 0.15)
            drawing.text(x + (column - 8) / 2, top + 132, f"{value:.2f}")
        if top == 0:
            for number, share in enumerate(shares):
                drawing.text(
                    12 + (column * BLOCK + 12) * number + 108,
                    150,
                    f"block {'AB'[number]}, share {share:.2f}",
                )
    return drawing.svg()


def travellers() -> str:
    """Where the block of rank 0 and its gradients are at each step of the backward pass."""
    drawing = Drawing(
        265,
        f"The block of rank 0 is at rank i at step i and stays at rank {RANKS - 1}. Its gradients go with it, take one transfer more, and "
        "are home at rank 0.",
    )
    left, column, line = 96, 94, 40
    for rank in range(RANKS):
        drawing.text(left + column * rank + 42, 18, f"rank {rank}")
    for step in range(RANKS + 1):
        y = 28 + (line + 6) * step
        drawing.text(left - 12, y + 25, f"step {step}" if step < RANKS else "home", anchor="end")
        for rank in range(RANKS):
            here = rank == step % RANKS
            if not here:
                drawing.box(left + column * rank, y, 84, line - 4, shade=0.02, thick=0.4)
            elif step < RANKS:
                drawing.labelled(left + column * rank, y, 84, line - 4, "K V, dK dV", shade=0.3)
            else:
                drawing.labelled(left + column * rank, y, 84, line - 4, "dK dV", shade=0.6)
        if step > 0:
            x0, x1 = (left + column * (each % RANKS) + 42 for each in (step - 1, step))
            drawing.arrow(x0, y - 10, x1, y, faint=True)
    return drawing.svg()


def nobody_first() -> str:
    """What every rank does at a step: all send first and wait for each other, or all begin both."""
    drawing = Drawing(
        290,
        "Where every rank sends before it receives, each waits in send for the next one, and none ever receives. Where every rank "
        "begins both, attends to the block that it has, and waits then, the ring moves on.",
    )
    drawing.text(8, 18, "send, then receive: each waits for the next", anchor="start")
    drawing.text(8, 164, "begin both, attend, then wait", anchor="start")
    for rank in range(RANKS):
        for top in (26, 172):
            drawing.text(58, top + 18 + 28 * rank, f"rank {rank}", anchor="end")
        drawing.box(68, 28 + 28 * rank, 400, 22, shade=LEGIBLE)
        drawing.text(268, 44 + 28 * rank, f"send, until rank {(rank + 1) % RANKS} receives")
        y = 174 + 28 * rank
        for x, width, words, shade in (
            (68, 80, "begin", LEGIBLE),
            (150, 240, f"attend to block {rank}", 0.06),
            (392, 76, "wait", LEGIBLE),
        ):
            drawing.box(x, y, width, 22, shade=shade)
            drawing.text(x + width / 2, y + 16, words)
    return drawing.svg()


def balances(length: int = 2048) -> dict[str, list[list[int]]]:
    """Order -> for each rank the tiles that it computes at each step of a causal ring."""
    return {
        name: [layout.tiles(rank, RANKS, length, balanced, TILE) for rank in range(RANKS)]
        for name, balanced in (("plain", False), ("zig-zag", True))
    }


def balance_chart() -> str:
    """Tiles of each rank at each step, plain and zig-zag; a step lasts as long as its busiest rank."""
    by_layout = balances()
    lasts = {name: sum(map(max, zip(*ranks, strict=True))) for name, ranks in by_layout.items()}
    drawing = Drawing(
        300,
        "Tiles that each of four ranks computes at each step. "
        + "; ".join(
            f"{name}: {', '.join(f'rank {rank} {sum(tiles):,}' for rank, tiles in enumerate(ranks))}, the ring takes the time of {lasts[name]:,}"
            for name, ranks in by_layout.items()
        ),
    )
    scale = 350 / max(lasts.values())
    for number, (name, ranks) in enumerate(by_layout.items()):
        top = 148 * number
        drawing.text(8, top + 16, f"{name}: the time of {lasts[name]:,} tiles", anchor="start")
        steps = [max(each) for each in zip(*ranks, strict=True)]
        for rank, tiles in enumerate(ranks):
            y = top + 26 + 28 * rank
            drawing.text(62, y + 16, f"rank {rank}", anchor="end")
            for step, count in enumerate(tiles):
                x = 72 + scale * sum(steps[:step])
                drawing.box(x, y, scale * steps[step] - 2, 22, shade=0)
                if count:
                    drawing.box(x, y, scale * count - 2, 22, shade=0.3 + 0.1 * (step % 2))
            drawing.text(72 + scale * sum(steps) + 6, y + 16, f"{sum(tiles):,}", anchor="start")
    return drawing.svg()


FILES = svgs(
    three_products, softmax_heat, two_passes, never_stored, collapse, fast_block, halves, padding,
    two_digits, gather_and_scatter, tile_masks, order_bars, attention_heroes.six_rings, merging,
    travellers, nobody_first,
) | {"slots.svg": slot_picture, "balance.svg": balance_chart}  # fmt: skip
