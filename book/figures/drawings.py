"""The book's drawings: the data flow of a pass, and what threads and blocks do, drawn with the kernels' own constants."""

from collections.abc import Sequence
from functools import partial

from book.figures.figures import LEGIBLE, NARROW, Drawing, kernel_constant, svgs, wide
from book.measure import ledger
from book.measure.ledger import GPT2_SMALL
from harness.puzzles.p19.spec import DIMS

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
    top, line = 32, 58
    drawing.text(75, 18, "launches")
    drawing.text(245, 18, "memory")
    drawing.text(409, 18, "fused")
    for y, words in ((54, "reads"), (216, "writes")):
        drawing.text(418, top + y, words, anchor="start")
    for number, step in enumerate(launches):
        drawing.labelled(5, top + line * number, 140, 34, step.name, code=True)
    for number, (start, end, names) in enumerate(between):
        y = top + 28 + line * start
        earlier = sum(other == end for _, other, _ in between[:number])
        drawing.labelled(185, y, 125, 30, ", ".join(map(sign, names)), shade=0.35)
        drawing.arrow(146, top + 22 + line * start, 184, y + 10)
        drawing.arrow(184, y + 22, 146, top + 8 + 8 * earlier + line * end, faint=True)
    fused = ledger.LAUNCHES["forward", "fused"][0]
    for y, height, words, shade in (
        (top, 34, (", ".join(map(sign, fused.reads)),), 0.35),
        (top + 70, 126, ("one launch,", "one thread", "for a row"), 0.06),
        (top + 232, 34, (", ".join(map(sign, fused.writes)),), 0.35),
    ):
        drawing.labelled(342, y, 134, height, *words, shade=shade)
        if y > top:
            drawing.arrow(409, y - 34, 409, y - 2)
    y = top + line * 5 + 6
    drawing.text(145, y, f"moves {bytes_moved['unfused']:.0f} MB at least")
    drawing.text(410, y, f"{bytes_moved['fused']:.0f} MB at least")
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


def normalisations() -> str:
    """Which elements of a matrix of rows share their statistics: in BatchNorm, LayerNorm and RMSNorm."""
    rows, columns, cell = 4, 8, 20
    kinds = [
        ("BatchNorm", "mean and variance of a column,", "over the batch", lambda r, h: h == 2),
        ("LayerNorm", "mean and variance of a row", "", lambda r, h: r == 1),
        ("RMSNorm", "mean square of a row", "(no mean is subtracted)", lambda r, h: r == 1),
    ]
    drawing = Drawing(
        312,
        "Three matrices of 4 rows by 8 columns. "
        + "; ".join(
            f"{name}: {' '.join(what).strip()}, {'a column' if name == 'BatchNorm' else 'a row'} is marked"
            for name, *what, _ in kinds
        ),
    )
    for i, (name, first, second, shares) in enumerate(kinds):
        left, top = 44, 28 + 96 * i
        drawing.squares(left, top, (rows, columns), cell, lambda r, h, of=shares: 0.55 if of(r, h) else 0.06)
        for line, words in enumerate((f"{name}:", first, second)):
            drawing.text(left + columns * cell + 20, top + 22 + 18 * line, words, anchor="start")
    drawing.text(124, 18, "columns h →")
    drawing.text(20, 62, "↓")
    drawing.text(20, 46, "rows")
    return drawing.svg()


def block_orders(blocks: int = 16) -> str:
    """The race of a block that clears a sum to which all add 1: the sum after each block, in two orders."""
    drawing = wide(
        190,
        f"{blocks} blocks in natural order: the sum grows to {blocks}. In reverse order block 0 comes last, clears the sum, "
        "and it ends at 1.",
    )
    cell = 42
    for line, order in enumerate((range(blocks), range(blocks - 1, -1, -1))):
        top = 30 + 90 * line
        drawing.text(24, top - 10, f"{('natural', 'reversed')[line]} order", anchor="start", size=12)
        total: int | None = None  # what the buffer holds before: nobody knows
        for at, block in enumerate(order):
            total = 1 if block == 0 else None if total is None else total + 1
            shade, thick = (LEGIBLE, 2) if block == 0 else (0.06, 1)
            words = str(block), "?" if total is None else f"= {total}"
            drawing.labelled(24 + cell * at, top, cell - 5, 44, *words, shade=shade, thick=thick, size=12)
    return drawing.svg()


def glossary() -> str:
    """Lane, warp, block, grid on the left; register, shared memory, L2, memory on the right."""
    drawing = wide(
        300,
        "Threads: a lane in a warp of 32, warps in a block, blocks in a grid. Memory: registers of a lane, shared memory of a "
        "block, the L2 cache and the memory of the whole grid.",
    )
    levels = (
        ("lane", "one thread", "registers", "at most 255 a thread, 32 bits each"),
        ("warp", "32 lanes, one instruction", "shuffles", "from lane to lane, no memory"),
        ("block", "up to 1,024 threads, one multiprocessor", "shared memory", "up to 227 KB on Hopper"),
        ("grid", "blocks in no fixed order", "L2, then memory", "50 MB, then 141 GB on an H200"),
    )
    for number, (threads, what, store, much) in enumerate(levels):
        y, width = 14 + 72 * number, 90 + 70 * number
        drawing.box(20, y, width, 40, shade=0.06)
        cells = 1 if number == 0 else 32 if number == 1 else 8
        for cell in range(cells):
            step = (width - 12) / max(cells, 8)
            drawing.box(
                26 + cell * step, y + 8, max(step - 2, 1.5), 24, shade=0.5 if number == 0 else 0.25, thick=0.5
            )
        drawing.text(20, y + 56, f"{threads}: {what}", anchor="start", size=12)
        drawing.arrow(20 + width + 6, y + 20, 416, y + 20, faint=True)
        drawing.box(420, y, 280, 40, shade=0.06)
        drawing.text(430, y + 25, store, anchor="start")
        drawing.text(692, y + 25, much, anchor="end", size=10)
    return drawing.svg()


def dealt(drawing: Drawing, threads: dict[int, tuple[list[str], str]], total: str) -> None:
    """Some threads of many: what each adds up, what it calls its share, and the sum of all shares."""
    for (thread, (items, share)), x in zip(threads.items(), (56, 160, 264, 424), strict=True):
        drawing.text(x, 18, f"thread {thread}")
        for k, item in enumerate(items):
            drawing.labelled(x - 46, 28 + k * 26, 92, 22, item)
        drawing.arrow(x, 32 + 26 * len(items), x, 126)
        drawing.labelled(x - 46, 128, 92, 24, share, shade=0.25)
        drawing.arrow(x, 154, 240 + (x - 240) * 0.12, 188)
    for y in (58, 146):
        drawing.text(344, y, "…", size=20)
    drawing.labelled(150, 190, 180, 28, total, shade=1)


def two_stage() -> str:
    """How the unfused kernels sum a column in a fixed order."""
    lanes = kernel_constant("COLUMN_TILE")
    drawing = Drawing(
        226,
        f"Rows are dealt out to {lanes} threads in turn; each thread adds its rows in order, then one thread adds the "
        f"{lanes} partial sums in order.",
    )
    mine = {
        lane: [f"row {row}" for row in range(lane, 2 * lanes + 3, lanes)] for lane in (0, 1, 2, lanes - 1)
    }
    dealt(drawing, {lane: (rows, f"partial {lane}") for lane, rows in mine.items()}, "sum of column")
    drawing.text(344, 104, "stage 1")
    drawing.text(342, 209, "stage 2", anchor="start")
    return drawing.svg()


WIDE = 150  # columns of the row that a block adds up in the picture of `reduce`: more than it has threads


constant = partial(kernel_constant, puzzle="p19")


def cells(
    drawing: Drawing, x: float, y: float, count: int, size: float, *, shade: float = 0.06, height: float = 0
) -> None:
    """A row of `count` cells."""
    for k in range(count):
        drawing.box(x + k * size, y, size - 1, height or size - 1, shade=shade, thick=0.6)


def map_picture() -> str:
    """Which thread owns which element, and the threads to spare."""
    threads, n = constant("THREADS"), DIMS[0]
    blocks = -(-n // threads)
    spare = blocks * threads - n
    drawing = Drawing(
        176,
        f"{blocks} blocks of {threads} threads in a line, {n} elements below. Every thread points at the element of its own "
        f"number; the last {spare} threads have none.",
    )
    left = 6
    size = (NARROW - 2 * left) / (blocks * threads)
    for block in range(blocks):
        x = left + block * threads * size
        drawing.text(x + threads * size / 2, 16, f"block {block}")
        mine = max(0, min(threads, n - block * threads))
        cells(drawing, x, 26, mine, size, shade=0.3, height=18)
        cells(drawing, x + mine * size, 26, threads - mine, size, shade=0, height=18)
        drawing.box(x - 1, 24, threads * size, 22, thick=1.4)
    for i in (0, threads + 2, n - 1):
        x = left + (i + 0.5) * size
        drawing.arrow(x, 50, x, 94)
        near = i < n - 1
        drawing.text(x + (6 if near else -6), 76, f"thread {i}", anchor="start" if near else "end")
    cells(drawing, left, 98, n, size, height=18)
    drawing.text(left, 136, f"vector and mapped, {n} elements", anchor="start")
    x = left + (n + spare / 2) * size
    drawing.text(x, 72, f"{spare} threads have")
    drawing.text(x, 90, "no element: guard")
    drawing.text(
        left, 164, f"global_idx.x = block_idx.x * {threads} + thread_idx.x", anchor="start", code=True
    )
    return drawing.svg()


def index_picture() -> str:
    """Square blocks over a matrix, and one thread with its two indices."""
    side, (_, rows, columns) = constant("BLOCK_SIDE"), DIMS
    across, down = -(-columns // side), -(-rows // side)
    row, column = 2, side + 3
    drawing = Drawing(
        236,
        f"A matrix of {rows} rows and {columns} columns under {down} by {across} blocks of {side} by {side} threads. The thread "
        f"with global_idx.y = {row} and global_idx.x = {column} owns the element in row {row} and column {column}; threads "
        "below the last row and right of the last column own none.",
    )
    size, left, top = 11, 4, 28
    for r in range(down * side):
        inside = columns if r < rows else 0
        cells(drawing, left, top + r * size, inside, size, shade=0.12)
    for b in range(down):
        for a in range(across):
            drawing.box(
                left + a * side * size - 1, top + b * side * size - 1, side * size, side * size, thick=1.2
            )
            drawing.text(left + (a + 0.5) * side * size, top - 8 if b == 0 else top + down * side * size + 16,
                         f"block ({a}, {b})")  # fmt: skip
    drawing.box(left + column * size, top + row * size, size - 1, size - 1, shade=0.75)
    x = left + across * side * size + 10
    drawing.arrow(left + column * size + size, top + row * size + 5, x, top + row * size + 5)
    for y, words in (
        (row * size + 4, f"global_idx.x = {column}"),
        (row * size + 22, f"global_idx.y = {row}"),
    ):
        drawing.text(x + 6, top + y, words, anchor="start", code=True)
    for line, words in enumerate(
        (
            "threads without an element:",
            f"{across * side - columns} columns too many,",
            f"{down * side - rows} rows too many",
        )
    ):
        drawing.text(x + 6, top + 96 + 18 * line, words, anchor="start")
    return drawing.svg()


def reduce_picture() -> str:
    """The threads of a block add up shares of a row, the block adds up the shares."""
    threads = constant("ROW_THREADS")
    drawing = Drawing(
        244,
        f"A row of {WIDE} columns. Thread t of {threads} adds up the columns t, t + {threads} and t + {2 * threads}, where there "
        "are any; block.sum adds up the shares, and thread 0 writes the total.",
    )
    mine = {t: [f"column {column}" for column in range(t, WIDE, threads)] for t in (0, 1, 2, threads - 1)}
    dealt(drawing, {thread: (columns, "share") for thread, columns in mine.items()}, "block.sum: the total")
    drawing.text(240, 238, "every thread of the block has it; thread 0 writes it")
    return drawing.svg()


def stages_picture() -> str:
    """Slabs of rows, their sums, and the sum of these."""
    slab, (_, rows, columns) = constant("SLAB_ROWS"), DIMS
    slabs = -(-rows // slab)
    drawing = Drawing(
        196,
        f"A matrix of {rows} rows in {slabs} slabs of {slab} rows, the last one shorter. The first launch makes a line of sums of "
        "each slab, the second adds up these lines.",
    )
    size, top = 6.4, 30
    left, middle, right = 4, 176, 348
    for x, words in ((left, f"slabs of {slab} rows"), (middle, "partial sums"), (right, "sums")):
        drawing.text(x, 18, words, anchor="start")
    y: float = top
    centre = top + (rows * size + slabs * 10) / 2
    for block in range(slabs):
        mine = min(slab, rows - block * slab)
        for r in range(mine):
            cells(drawing, left, y + r * size, columns, size, shade=0.06 + 0.1 * (block % 2))
        line = y + mine * size / 2
        drawing.arrow(left + columns * size + 4, line, middle - 4, line)
        cells(drawing, middle, line - 5, columns, size, shade=0.3, height=9)
        drawing.arrow(middle + columns * size + 4, line, right - 4, centre + (block - 1) * 4)
        y += mine * size + 10
    cells(drawing, right, centre - 5, columns, size, shade=0.5, height=9)
    drawing.text(left, 160, "stage 1: a thread for each column of each slab", anchor="start")
    drawing.text(left, 182, "stage 2: the same kernel, one slab of all partial sums", anchor="start")
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
        if number == 0:
            drawing.squares(left, top, (5, 5), cell, lambda row, column: 0.5 if row == 1 else 0.05)
            drawing.arrow(left + 4, top + cell * 1.45, left + cell * 5 - 6, top + cell * 1.45)
            drawing.arrow(left + cell * 5, top + cell * 1.45, left + cell * 5 + 26, top + cell * 1.45)
            drawing.text(left + cell * 5 + 14, top + cell * 1.45 + 22, owns)
        else:
            drawing.squares(left, top, (5, 5), cell, lambda row, column: 0.5 if column == 2 else 0.05)
            drawing.arrow(left + cell * 2.45, top + 4, left + cell * 2.45, top + cell * 5 - 6)
            drawing.arrow(left + cell * 2.45, top + cell * 5, left + cell * 2.45, top + cell * 5 + 22)
            drawing.text(left + cell * 2.45, top + cell * 5 + 38, owns)
    drawing.text(32, 132, "queries", anchor="middle")
    drawing.text(32, 148, "↓", anchor="middle")
    drawing.text(141, 228, "both kernels")
    drawing.text(141, 246, "compute every tile")
    return drawing.svg()


def three_paths() -> str:
    """The ways by which an x of a row reaches the x̂ of the row."""
    drawing = Drawing(
        168, "An x reaches its own x̂ directly, and every x̂ through the mean and through the variance."
    )
    places = {"x": (6, 64), "mean μ": (200, 4), "variance σ²": (110, 126), "rstd": (270, 126), "x̂": (396, 64)}
    for name, (x, y) in places.items():
        drawing.labelled(x, y, 78 if len(name) < 8 else 100, 36, name)
    drawing.arrow(86, 82, 394, 82)
    drawing.text(239, 76, "only its own x̂")
    for x0, y0, x1, y1 in (
        (70, 62, 198, 22),
        (280, 22, 410, 62),
        (60, 102, 108, 140),
        (212, 144, 268, 144),
        (350, 144, 420, 102),
    ):
        drawing.arrow(x0, y0, x1, y1)
    drawing.text(370, 34, "every x̂", anchor="start")
    drawing.text(400, 134, "every x̂", anchor="start")
    return drawing.svg()


def blocks_add() -> str:
    """Blocks of the fused backward kernel: each stores its own row of dx, all add to the same sums."""
    drawing = Drawing(
        214,
        "Four blocks. Each stores a row of dx of its own; all four add to the same dW, db, dγ and dβ by atomics.",
    )
    for number in range(4):
        y = 30 + 46 * number
        drawing.labelled(170, y, 140, 36, f"block ({number // 2}, {number % 2})", shade=0.06)
        drawing.labelled(6, y, 110, 36, f"row {number} of dx", shade=0.2)
        drawing.arrow(168, y + 18, 118, y + 18)
        drawing.arrow(312, y + 18, 372, 106)
    drawing.labelled(374, 60, 102, 92, "dW", "db", "dγ", "dβ", shade=LEGIBLE)
    drawing.text(240, 18, "one thread for each row")
    drawing.text(61, 18, "stores")
    drawing.text(425, 48, "atomic_add")
    return drawing.svg()


def outer_product(dy: Sequence[float], ln_out: Sequence[float]) -> str:
    """What one block adds to dW: the product of every dy of its row and every ln_out."""
    words = "Each square of dW is the product of the dy to its left and the ln_out above it."
    drawing = Drawing(36 + 18 * (len(dy) + 1), words, 350)
    vectors = [[abs(value) for value in vector] for vector in (dy, ln_out)]
    largest = [max(vector) for vector in vectors]
    shares = [[value / most for value in vector] for vector, most in zip(vectors, largest, strict=True)]
    drawing.text(62, 18, "ln_out", anchor="end")
    drawing.squares(74, 4, (1, len(ln_out)), 18, lambda _, h: 0.8 * shares[1][h])
    drawing.text(34, 46, "dy", anchor="end")
    drawing.squares(44, 33, (len(dy), 1), 18, lambda o, _: 0.8 * shares[0][o])
    drawing.squares(74, 33, (len(dy), len(ln_out)), 18, lambda o, h: 0.8 * shares[0][o] * shares[1][h])
    drawing.text(228, 46, "what this block", anchor="start")
    drawing.text(228, 63, "adds to dW, [O, H]", anchor="start")
    caption = f"{words} The darker a square, the larger its number, whatever its sign."
    return f"<figure>{drawing.svg().strip()}<figcaption>{caption}</figcaption></figure>\n"


def gpt() -> str:
    """A GPT as a stream with two branches for each block."""
    drawing = Drawing(
        196,
        "The stream goes from the embedding through three blocks to a LayerNorm and the head. In a block two branches leave the stream and "
        "are added to it again: LayerNorm and attention, then LayerNorm, Linear, GELU and Linear.",
    )
    y = 150
    drawing.box(92, 26, 292, 152, shade=0.05)
    drawing.text(238, 18, "a block, repeated")
    drawing.labelled(6, y - 18, 78, 36, "embedding")
    drawing.labelled(392, y - 26, 84, 52, "LayerNorm,", "head")
    for x, parts in ((104, ("attention", "LayerNorm")), (246, ("Linear", "GELU", "Linear", "LayerNorm"))):
        for number, name in enumerate(reversed(parts)):
            drawing.labelled(x, 110 - 25 * number, 84, 22, name, size=12)
        last = 110 - 25 * (len(parts) - 1)
        drawing.arrow(x + 42, y, x + 42, 134)
        drawing.segment(x + 86, last + 11, x + 116, last + 11)
        drawing.arrow(x + 116, last + 11, x + 116, y - 9)
        drawing.box(x + 108, y - 8, 16, 16, radius=8)
        drawing.text(x + 116, y + 5, "+")
    for x0, x1 in ((84, 212), (228, 354), (370, 392)):
        drawing.segment(x0, y, x1, y, thick=3)
    drawing.text(238, 192, "the residual stream")
    return drawing.svg()


def fast_block(rows: int = 128, tile: int = 64, warps: int = 4, tiles: int = 5, at: int = 2) -> str:
    """What a block of the fast kernels does at one moment: its rows, by warp, and the tiles of the other side."""
    drawing = Drawing(
        216,
        f"A block owns {rows} queries, {rows // warps} for each of {warps} warps, and loops over the keys in tiles of {tile}. While tile "
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
    drawing.text(240, height - 6, "shaded: a block")
    return drawing.svg()


def backend_path() -> str:
    """Where a backend stands between a model and the code that runs."""
    drawing = Drawing(
        250,
        "A model goes to Dynamo, which passes a graph to your backend; the rewritten graph goes to AOTAutograd, which makes a "
        "forward and a backward graph for Inductor.",
    )
    steps = (
        ("the model", "Python, unchanged", 0.06),
        ("Dynamo's graph", "layer_norm, linear", 0.06),
        ("your backend", "finds, checks, rewrites", 0.45),
        ("AOTAutograd", "forward and backward graph", 0.06),
        ("Inductor", "kernels, library calls", 0.06),
    )
    for number, (name, what, shade) in enumerate(steps):
        y = 6 + 49 * number
        drawing.labelled(20, y, 150, 32, name, shade=shade)
        drawing.text(190, y + 21, what, anchor="start")
        if number + 1 < len(steps):
            drawing.arrow(95, y + 33, 95, y + 48)
    return drawing.svg()


def callers() -> str:
    """The operator of puzzle 20 around its kernels, and who calls it: each asks for what one blank answers."""
    asks = (
        ("define", "your program", "y = softmax(x)"), ("fake", "torch.compile", "which shape?"),
        ("save", "autograd", "what to keep?"), ("gradient", "loss.backward()", "dx from dy?"),
        ("second", "2nd derivative", "gradient of dx?"), ("autocast", "autocast", "which dtype?"),
        ("vmap", "vmap", "which axis?"),
    )  # fmt: skip
    drawing = Drawing(316, "; ".join(f"{who} asks: {what} Blank: {blank}" for blank, who, what in asks) + ".")
    drawing.labelled(187, 94, 106, 214, shade=0.06, thick=2)
    drawing.text(240, 120, "your operator,")
    drawing.text(240, 137, "register.py")
    drawing.labelled(197, 176, 86, 84, "two kernels:", "addresses", "and counts", shade=0.2)
    for number, (blank, *words) in enumerate(asks):
        if number == 0:
            drawing.labelled(175, 6, 130, 46, *words)
            drawing.arrow(240, 55, 240, 91)
            drawing.text(248, 78, blank, anchor="start", code=True)
            continue
        left, y = number <= 3, 94 + 84 * ((number - 1) % 3)
        drawing.labelled(2 if left else 368, y, 110, 46, *words)
        start, end = (116, 183) if left else (364, 297)
        drawing.arrow(start, y + 27, end, y + 27)
        drawing.text((start + end) / 2, y + 18, blank, code=True, size=12)
    return drawing.svg()


def lost_addition() -> str:
    """Two blocks that add 1 to one sum: by load, add and store, and by one atomic addition."""
    drawing = Drawing(
        232,
        "By load, add and store both blocks read 5 and store 6. By atomics the sum goes from 5 to 6 and to 7.",
    )
    panels = (
        ("load, add, store", "one addition is lost",
         [("", "5", ""), ("loads 5", "5", ""), ("", "5", "loads 5"), ("stores 6", "6", ""), ("", "6", "stores 6")]),
        ("atomic_add", "none is lost", [("", "5", ""), ("adds 1", "6", ""), ("", "7", "adds 1")]),
    )  # fmt: skip
    for number, (title, end, moments) in enumerate(panels):
        left = 4 + 240 * number
        drawing.text(left + 116, 16, title, code=number == 1)
        for x, name in ((38, "block 0"), (116, "the sum"), (194, "block 1")):
            drawing.text(left + x, 40, name, size=12)
        for line, (first, total, second) in enumerate(moments):
            y = 50 + 30 * line
            drawing.labelled(left + 96, y, 40, 24, total, shade=0.25)
            for x, words, side in ((2, first, 75), (158, second, 157)):
                if words:
                    drawing.labelled(left + x, y, 72, 24, words, size=12)
                    ends = (left + side, y + 12, left + (95 if x == 2 else 137), y + 12)
                    drawing.arrow(*(ends if not words.startswith("loads") else ends[2:] + ends[:2]))
        drawing.text(left + 116, 224, end)
    return drawing.svg()


FILES = svgs(
    two_halves, through_memory, backward_flow, normalisations, block_orders, glossary, two_stage, two_passes,
    fast_block, backend_path, three_paths, blocks_add, gpt, callers, lost_addition,
) | {
    "ramp_map.svg": map_picture, "ramp_index.svg": index_picture, "ramp_reduce.svg": reduce_picture,
    "ramp_stages.svg": stages_picture, "tape_of_gpt.svg": tape,
}  # fmt: skip
