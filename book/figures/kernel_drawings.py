"""Drawings for the kernels of puzzles 19, 20, 23 and 27: who owns what, and how threads and blocks join what they have."""

import numpy as np

from book.figures.figures import LEGIBLE, NARROW, Drawing, kernel_constant, svgs

MINUS = str.maketrans("-", "−")


def bfloat16(number: int) -> int:
    """A whole number below 512 rounded to bfloat16, which has eight significant bits; a tie goes to the even digit."""
    unit = max(1, 1 << (number.bit_length() - 8))
    return round(number / unit) * unit


def cast_sums(start: int = 253, steps: int = 5) -> str:
    """A sum of ones in bfloat16 and in float32, around the number at which the first stops growing."""
    drawing = Drawing(134, "")
    told = []
    for line, (name, rounded) in enumerate((("bfloat16", bfloat16), ("float32", int))):
        y, total, totals = 26 + 56 * line, start, []
        drawing.text(4, y + 21, name, anchor="start", code=True)
        for step in range(steps):
            x = 84 + 82 * step
            drawing.labelled(x, y, 46, 32, str(total), shade=0.3 if totals and total == totals[-1] else 0.06)
            totals.append(total)
            if step + 1 < steps:
                drawing.arrow(x + 48, y + 20, x + 80, y + 20)
                drawing.text(x + 64, y + 14, "+ 1", size=12)
            total = rounded(total + 1)
        told.append(f"{name}: {', '.join(map(str, totals))}")
    drawing.text(84 + 82 * 3.5, 16, "no longer grows")
    drawing.label = f"A total to which 1 is added, step by step. {'; '.join(told)}."
    return drawing.svg()


def tile_reversed(threads: int = 8) -> str:
    """A tile turned round by a block: each thread stores one element, waits, and loads the opposite one."""
    drawing = Drawing(
        264,
        f"A block of {threads} threads. Thread t copies element t of the vector into place t of the tile, waits at the barrier, and "
        f"copies place {threads - 1} - t into element t of the result.",
    )
    cell, left = 44, 116
    rows = ((24, "vector", 0.06), (100, "tile", 0.25), (216, "mirrored", 0.06))
    for y, name, shade in rows:
        drawing.text(106, y + 20, name, anchor="end", code=True)
        for t in range(threads):
            value = chr(ord("a") + (threads - 1 - t if name == "mirrored" else t))
            drawing.labelled(left + cell * t, y, cell - 4, 30, value, shade=shade)
    for t in range(threads):
        x, opposite = left + cell * t + 20, left + cell * (threads - 1 - t) + 20
        drawing.text(x, 16, f"t = {t}", size=12)
        drawing.arrow(x, 56, x, 98)
        drawing.arrow(opposite, 152, x, 214, faint=t not in (0, threads - 1))
    for y, words in ((80, "1. store"), (152, "2. barrier()"), (196, "3. load")):
        drawing.text(4, y, words, anchor="start")
    drawing.segment(left, 148, left + cell * threads - 4, 148, thick=3)
    for t in range(threads):
        drawing.segment(left + cell * t + 20, 131, left + cell * t + 20, 145)
    return drawing.svg()


def ballot(past: int = 5) -> str:
    """A warp's vote on x <= 0: lane by lane an answer, all of them one word, and each lane's bit of it on the way back."""
    word = kernel_constant("WORD", "p20")
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, word - past))
    answers = np.append(x > 0, np.zeros(past, bool))
    value = sum(1 << lane for lane in np.flatnonzero(answers))
    drawing = Drawing(
        226,
        f"{word} lanes, of which {answers.sum()} hold an x above 0, vote: the word is {value:#010x}. The last {past} lanes are past the "
        "end of the tensor and vote 0. Backward, a lane reads its own bit: dx is dy where it is 1, and 0 elsewhere.",
    )
    cell, left = 13.2, 52
    for y, words in ((18, "not"), (34, "x <= 0"), (98, "word"), (166, "dx")):
        drawing.text(46, y + 15, words, anchor="end")
    for lane, answer in enumerate(answers):
        at = left + cell * lane
        inside = lane < len(x)
        drawing.box(at, 26, cell - 1.5, 22, shade=0.45 * answer, thick=0.8 if inside else 0.3)
        drawing.segment(at + 6, 50, at + 6, 95, opacity=0.8 if answer else 0.25)
        drawing.labelled(at, 98, cell - 1.5, 22, str(int(answer)), size=12, shade=LEGIBLE * answer)
        if inside:
            drawing.segment(at + 6, 122, at + 6, 163, opacity=0.8 if answer else 0.25)
            size = 22 * abs(dy[lane]) / np.abs(dy).max() if answer else 0
            drawing.box(at, 188 - size, cell - 1.5, size, shade=0.45, thick=0.8)
    drawing.segment(left, 188, left + cell * len(x), 188)
    drawing.text(left + 6, 18, "lane 0")
    drawing.text(left + cell * (word - 1) + 6, 18, f"{word - 1}")
    for y, words in ((160, "past"), (176, "the end")):
        drawing.text(left + cell * (word - past / 2), y, words)
    drawing.text(left, 216, f"mask = {value:#010x}, one word for {word} elements", anchor="start")
    return drawing.svg()


def two_owners(rows: int = 5, columns: int = 7) -> str:
    """LayerNorm's two backward kernels: a block for each row of dx, a thread for each column of the weight's gradient."""
    drawing = Drawing(
        214,
        "The same matrix twice. Left: a block handles a row, its threads share the columns, and two sums over the row lead to a row of "
        "dx. Right: a thread handles a column and loops over all rows; its two sums are an element of dweight and of dbias.",
    )
    cell, top, mine = 24, 48, 2
    for number, (left, title) in enumerate(((12, "a block for each row"), (280, "a thread for each column"))):
        drawing.text(left + cell * columns / 2, 18, title)
        shade = lambda *at, which=number: 0.45 if at[which] == mine else 0.04  # noqa: E731
        drawing.squares(left, top, (rows, columns), cell, shade)
    y, end = top + cell * mine + 11, 12 + cell * columns
    drawing.arrow(end, y, end + 26, y)
    drawing.text(end + 32, y - 4, "2 sums,", anchor="start")
    drawing.text(end + 32, y + 14, "dx", anchor="start")
    x = 280 + cell * mine + 11
    drawing.arrow(x, top - 20, x, top - 2, faint=True)
    drawing.arrow(x, top + cell * rows, x, top + cell * rows + 22)
    drawing.text(x, top + cell * rows + 38, "dweight, dbias")
    return drawing.svg()


def totals_of(logits: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """What each thread has after its columns, t, t + threads and so on: the largest logit, and the sum of exponentials shifted by it."""
    largest, total = np.full(threads, -np.inf), np.zeros(threads)
    for first in range(0, len(logits), threads):
        grown = np.maximum(largest, logits[first : first + threads])
        total = total * np.exp(largest - grown) + np.exp(logits[first : first + threads] - grown)
        largest = grown
    return largest, total


def row_in_one_pass(threads: int = 4) -> str:
    """A row of logits, read once: each thread's m and l, all of them brought to the block's m, and the row's lse."""
    logits = np.round(np.random.default_rng(2).normal(size=3 * threads) * 2, 1)
    largest, total = totals_of(logits, threads)
    m = largest.max()
    shares = total * np.exp(largest - m)
    drawing = Drawing(
        330,
        f"{threads} threads share {len(logits)} logits. Each ends with its largest logit and its total; the totals are rescaled to the block's "
        f"largest, {m:.1f}, and added: {shares.sum():.3f}. Their logarithm plus {m:.1f} is the lse, {m + np.log(shares.sum()):.3f}.",
    )
    width, left = 92, 100
    for y, words in ((52, "logits"), (144, "m of thread"), (172, "ℓ of thread"), (238, "ℓ rescaled")):
        drawing.text(4, y, words, anchor="start")
    for t in range(threads):
        x = left + width * t
        drawing.text(x + 42, 18, f"thread {t}")
        for step, logit in enumerate(logits[t::threads]):
            top = logit == largest[t]
            drawing.labelled(
                x, 28 + 28 * step, 84, 24, f"{logit:.1f}".translate(MINUS), shade=LEGIBLE if top else 0.04
            )
        drawing.labelled(x, 126, 84, 24, f"{largest[t]:.1f}".translate(MINUS), shade=LEGIBLE)
        drawing.labelled(x, 154, 84, 24, f"{total[t]:.3f}", shade=0.12)
        drawing.arrow(x + 42, 180, x + 42, 218)
        factor = f"{largest[t] - m:.1f}".translate(MINUS)
        drawing.text(x + 47, 204, f"e^({factor})", anchor="start", size=12)
        drawing.labelled(x, 220, 84, 24, f"{shares[t]:.3f}", shade=0.12)
        drawing.arrow(x + 42, 246, left + width * threads / 2 - 4, 280, faint=True)
    drawing.labelled(
        left, 282, width * threads - 8, 36,
        f"lse = m + log ℓ = {m:.1f} + log {shares.sum():.3f} = {m + np.log(shares.sum()):.3f}", shade=LEGIBLE,
    )  # fmt: skip
    return drawing.svg()


def norm_in_two_stages() -> str:
    """All gradients as one line: a sum of squares for each chunk, then one block adds these sums."""
    chunk, lengths = kernel_constant("CHUNK", "p27"), (1, 1, 1, 0.4)
    drawing = Drawing(
        232,
        f"All gradients, one after the other, in chunks of {chunk}, the last one shorter. Stage 1: a block for each chunk writes the sum of its "
        "squares. Stage 2: one block adds these sums and takes the root. Then every gradient is multiplied by one factor.",
    )
    x = 8.0
    for number, length in enumerate(lengths):
        wide, centre = 136 * length, x + 68 * length
        drawing.labelled(
            x, 28, wide - 3, 28, f"{chunk}" if length == 1 else "rest", shade=0.06 + 0.12 * (number % 2)
        )
        drawing.arrow(centre, 58, centre, 90)
        drawing.labelled(centre - 24, 92, 48, 28, f"sum {number}", shade=LEGIBLE)
        drawing.arrow(centre, 122, 236, 156)
        x += wide
    drawing.text(8, 18, "all gradients: a block for each chunk", anchor="start")
    drawing.text(128, 178, "one block:", anchor="end")
    drawing.labelled(136, 158, 200, 30, "norm = root of the sum", shade=LEGIBLE)
    drawing.text(236, 214, "every gradient times limit / norm, at most 1")
    assert x <= NARROW
    return drawing.svg()


def token_rows(text: str = "banana", table: str = "abcn") -> str:
    """Positions sorted by token: those of one token are one stretch, which one block adds up."""
    tokens = [table.index(token) for token in text]
    order, starts = np.argsort(tokens, kind="stable"), np.searchsorted(sorted(tokens), range(len(table) + 1))
    drawing = Drawing(
        266,
        f"The tokens of {text}, sorted: order is {', '.join(map(str, order))}, starts {', '.join(map(str, starts))}.",
    )
    cell, left = 60, 104
    for y, words in (
        (24, "position"),
        (52, "token"),
        (140, "order"),
        (227, "gradient"),
    ):
        drawing.text(4, y, words, anchor="start")
    for at, (token, position) in enumerate(zip(text, order, strict=True)):
        drawing.text(left + cell * at + 27, 24, str(at))
        drawing.labelled(left + cell * at, 32, 54, 30, token)
        drawing.arrow(left + cell * position + 27, 63, left + cell * at + 27, 119)
        drawing.labelled(left + cell * at, 120, 54, 30, str(position), shade=LEGIBLE * (tokens[position] % 2))
    x = 66.0
    for row, (token, start, end) in enumerate(zip(table, starts, starts[1:], strict=False)):
        terms = " + ".join(f"dy[{position}]" for position in order[start:end]) or "0: no position"
        wide = 14 + 6 * len(terms)
        drawing.labelled(x, 200, wide, 46, f"row {token}", terms, shade=LEGIBLE * (row % 2))
        if end > start:
            drawing.arrow(left + cell * (start + end) / 2 - 3, 151, x + wide / 2, 199)
        drawing.text(x + wide / 2, 262, f"starts: {start}", size=11)
        x += wide + 4
        if table[row + 1 : row + 2] > chr(ord(token) + 1):
            drawing.text(x + 8, 227, "…")
            x += 20
    return drawing.svg()


def tiled_product(shape: tuple[int, int, int] = (3, 4, 3), at: tuple[int, int, int] = (1, 1, 1)) -> str:
    """A block of the tiled product with the tiles that it copies at one k0, and the copy of a factor that is stored transposed."""
    rows, depth, columns = shape
    row, k, column = at
    side = kernel_constant("TILE", "p23")
    drawing = Drawing(
        270,
        f"A block owns one tile of {side} by {side} of the output. At each k0 it copies a tile of A's row of tiles and a tile of B's column of "
        "tiles into shared memory. Where A is stored transposed, neighbouring threads read along a row and write down a column of a_tile.",
    )
    cell, left, top, right, low = 24, 14, 34, 138, 158
    drawing.squares(
        left, low, (rows, depth), cell, lambda i, j: (0.5 if j == k else 0.2) if i == row else 0.03
    )
    drawing.squares(
        right, top, (depth, columns), cell, lambda i, j: (0.5 if i == k else 0.2) if j == column else 0.03
    )
    drawing.squares(right, low, (rows, columns), cell, lambda i, j: 0.5 if (i, j) == (row, column) else 0.03)
    drawing.text(left + cell * (k + 0.5) - 1, low + cell * rows + 13, "k0", code=True, size=12)
    drawing.text(
        right + cell * columns + 2, top + cell * (k + 0.5) + 3, "k0", anchor="start", code=True, size=12
    )
    drawing.text(left + cell * depth / 2, low + cell * rows + 32, "A [M, K]")
    drawing.text(right + cell * columns / 2, top - 8, "B [K, N]")
    drawing.text(right + cell * columns / 2, low + cell * rows + 32, "output [M, N]")
    drawing.text(60, 32, "shared memory")
    for x, name in ((2, "a_tile"), (62, "b_tile")):
        drawing.labelled(x, 44, 56, 42, name, code=True, size=12, shade=0.12)
    drawing.arrow(left + cell * (k + 0.5), low + cell * row + 2, 34, 88)
    drawing.arrow(right + cell * column + 2, top + cell * (k + 0.5) - 3, 120, 66)
    drawing.arrow(94, 88, right + cell * column + 4, low + cell * row + 4)
    few, each, stored, tile, upper = 4, 26, 250, 374, 58
    drawing.text((stored + tile + each * few) / 2, 18, "A stored transposed: [K, M]")
    drawing.text(stored + each * few / 2, 46, "in memory")
    drawing.text(tile + each * few / 2, 46, "a_tile", code=True)
    for x, names in (
        (stored, lambda i, j: j if i == k else None),
        (tile, lambda i, j: i if j == k else None),
    ):
        for i in range(few):
            for j in range(few):
                thread = names(i, j)
                words = () if thread is None else (str(thread),)
                drawing.labelled(
                    x + each * j,
                    upper + each * i,
                    each - 3,
                    each - 3,
                    *words,
                    shade=LEGIBLE if words else 0.03,
                )
    drawing.arrow(
        stored + each * few - 1, upper + each * (k + 0.5) - 2, tile - 3, upper + each * (k + 0.5) - 2
    )
    for x, lines in (
        (stored + each * few / 2, ("thread (x, y) reads", "[k0+y, row0+x]")),
        (tile + each * few / 2, ("and writes", "a_tile[x, y]")),
    ):
        drawing.text(x, 186, lines[0], size=12)
        drawing.text(x, 205, lines[1], size=12, code=True)
    drawing.text(NARROW - 4, 232, "numbers: x of the threads with y = 1", anchor="end", size=12)
    return drawing.svg()


FILES = svgs(
    cast_sums, tile_reversed, ballot, two_owners, tiled_product, row_in_one_pass, norm_in_two_stages, token_rows,
)  # fmt: skip
