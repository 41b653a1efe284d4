"""The pictures of puzzle 19, one for each kernel of the ramp, drawn with the kernels' own constants and the chapter's sizes."""

from functools import partial

from book.figures.figures import LEGIBLE, Drawing, all_to_one, dealt, kernel_constant, wide
from harness.puzzles.p19.spec import DIMS

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
    drawing = wide(
        170,
        f"{blocks} blocks of {threads} threads in a line, {n} elements below. Every thread points at the element of its own "
        f"number; the last {spare} threads have none.",
    )
    size, left = 7, 24
    for block in range(blocks):
        x = left + block * threads * size
        drawing.text(x + threads * size / 2, 18, f"block {block}", size=12)
        mine = max(0, min(threads, n - block * threads))
        cells(drawing, x, 26, mine, size, shade=0.3, height=18)
        cells(drawing, x + mine * size, 26, threads - mine, size, shade=0, height=18)
        drawing.box(x - 1, 24, threads * size, 22, thick=1.4)
    for i in (0, threads + 8, n - 1):
        x = left + i * size + 3
        drawing.arrow(x, 50, x, 94)
        drawing.text(x + 6, 76, f"thread {i}", anchor="start", size=11)
    cells(drawing, left, 98, n, size, height=18)
    drawing.text(left, 134, f"vector and mapped, {n} elements", anchor="start", size=12)
    x = left + (n + spare / 2) * size
    drawing.text(x, 98, f"{spare} threads to spare:", size=11)
    drawing.text(x, 114, "the guard", size=11)
    drawing.text(
        left,
        158,
        f"global_idx.x = block_idx.x * {threads} + thread_idx.x",
        anchor="start",
        size=12,
        code=True,
    )
    return drawing.svg()


def index_picture() -> str:
    """Square blocks over a matrix, and one thread with its two indices."""
    side, (_, rows, columns) = constant("SIDE"), DIMS
    across, down = -(-columns // side), -(-rows // side)
    row, column = 2, side + 3
    drawing = wide(
        300,
        f"A matrix of {rows} rows and {columns} columns under {down} by {across} blocks of {side} by {side} threads. The thread "
        f"with global_idx.y = {row} and global_idx.x = {column} owns the element in row {row} and column {column}; threads "
        "below the last row and right of the last column own none.",
    )
    size, left, top = 15, 60, 34
    for r in range(down * side):
        inside = columns if r < rows else 0
        cells(drawing, left, top + r * size, inside, size, shade=0.12)
    for b in range(down):
        for a in range(across):
            drawing.box(
                left + a * side * size - 1, top + b * side * size - 1, side * size, side * size, thick=1.2
            )
            drawing.text(left + (a + 0.5) * side * size, top - 8 if b == 0 else top + down * side * size + 14,
                         f"block ({a}, {b})", size=11)  # fmt: skip
    drawing.box(left + column * size, top + row * size, size - 1, size - 1, shade=0.75)
    x = left + across * side * size + 16
    drawing.arrow(left + column * size + size, top + row * size + 7, x, top + row * size + 7)
    drawing.text(
        x + 6, top + row * size + 4, f"column = global_idx.x = {column}", anchor="start", size=12, code=True
    )
    drawing.text(
        x + 6, top + row * size + 22, f"row = global_idx.y = {row}", anchor="start", size=12, code=True
    )
    drawing.text(x + 6, top + 110, "threads without an element:", anchor="start", size=12)
    drawing.text(x + 6, top + 128, f"{across * side - columns} columns too many,", anchor="start", size=12)
    drawing.text(x + 6, top + 144, f"{down * side - rows} rows too many", anchor="start", size=12)
    return drawing.svg()


def cast_picture() -> str:
    """The digits of bfloat16 and of float32, and what they make of 256 + 1."""
    drawing = wide(
        150,
        "bfloat16 has 1 bit of sign, 8 of exponent and 7 of fraction, float32 1, 8 and 23. In bfloat16 256 + 1 is 256, in "
        "float32 257.",
    )
    for i, (name, fraction, result) in enumerate((("bfloat16", 7, "256"), ("float32", 23, "257"))):
        y = 34 + i * 56
        drawing.text(90, y + 12, name, anchor="end", size=12, code=True)
        for start, count, shade in ((0, 1, 0.45), (1, 8, 0.06), (9, fraction, 0.25)):
            cells(drawing, 100 + start * 13, y, count, 13, shade=shade, height=18)
        drawing.text(100 + 13 * (9 + fraction / 2), y + 32, f"{fraction} digits after the first", size=11)
        drawing.text(540, y + 13, f"256 + 1 = {result}", anchor="start", code=True)
    drawing.text(100 + 13 / 2, 24, "sign", size=11)
    drawing.text(100 + 13 * 5, 24, "exponent", size=11)
    return drawing.svg()


def reduce_picture() -> str:
    """The threads of a block add up shares of a row, the block adds up the shares."""
    threads = constant("ROW_THREADS")
    drawing = wide(
        250,
        f"A row of {WIDE} columns. Thread t of {threads} adds up the columns t, t + {threads} and t + {2 * threads}, where there "
        "are any; block.sum adds up the shares, and thread 0 writes the total.",
    )
    mine = {t: [f"column {column}" for column in range(t, WIDE, threads)] for t in (0, 1, 2, threads - 1)}
    dealt(drawing, {thread: (columns, "mine") for thread, columns in mine.items()}, "block.sum: the total")
    drawing.text(360, 238, "every thread of the block has it; thread 0 writes it", size=11)
    return drawing.svg()


def atomic_picture() -> str:
    """All rows add to every column's sum."""
    _, rows, columns = DIMS
    drawing = wide(
        200,
        f"{rows} blocks, one for each row, above {columns} sums; every block adds to every sum, shown for column 6.",
    )
    drawing.text(360, 16, f"{rows} blocks, one for each row, in no order")
    all_to_one(drawing, [f"row {row}" for row in range(rows)], 52, [str(c) for c in range(columns)], 30, 6)
    words = f"column_sums: each receives {rows} additions, and each addition is read, add, write in one step"
    drawing.text(360, 182, words)
    return drawing.svg()


def stages_picture() -> str:
    """Slabs of rows, their sums, and the sum of these."""
    slab, (_, rows, columns) = constant("SLAB_ROWS"), DIMS
    slabs = -(-rows // slab)
    drawing = wide(
        240,
        f"A matrix of {rows} rows in {slabs} slabs of {slab} rows, the last one shorter. The first launch makes a line of sums of "
        "each slab, the second adds up these lines.",
    )
    size, top = 11, 34
    left, middle, right = 20, 280, 500
    drawing.text(left, 20, f"matrix, slabs of {slab} rows", anchor="start", size=12)
    drawing.text(middle, 20, "partial sums", anchor="start", size=12)
    drawing.text(right, 20, "sums", anchor="start", size=12)
    y = top
    centre = top + (rows * size + slabs * 8) / 2
    for block in range(slabs):
        mine = min(slab, rows - block * slab)
        for r in range(mine):
            cells(drawing, left, y + r * size, columns, size, shade=0.06 + 0.1 * (block % 2))
        line = y + mine * size / 2
        drawing.arrow(left + columns * size + 4, line, middle - 6, line)
        cells(drawing, middle, line - 5, 16, size, shade=0.3)
        drawing.arrow(middle + 16 * size + 6, line, right - 6, centre + (block - 1) * 4)
        y += mine * size + 8
    cells(drawing, right, centre - 5, 16, size, shade=0.5)
    drawing.text(
        middle,
        top + rows * size + 54,
        "stage 1: a thread for each column of each slab",
        anchor="middle",
        size=12,
    )
    drawing.text(
        middle, top + rows * size + 74, "stage 2: the same kernel, one slab of all partial sums", size=12
    )
    return drawing.svg()


def rmsnorm_picture() -> str:
    """Two walks over a row with a reduction in between."""
    drawing = wide(
        190,
        "A row of x is read once for the sum of its squares, which a reduction over the block turns into one number, rstd; the "
        "row is read again, multiplied with rstd and gamma, and written as y.",
    )
    size = 13
    for x, y, count, words, shade in ((20, 40, 20, "x, one row", 0.06), (440, 40, 20, "x again", 0.06)):
        cells(drawing, x, y, count, size, shade=shade)
        drawing.text(x, y - 8, words, anchor="start", size=12)
    for k in range(0, 20, 4):
        drawing.arrow(20 + k * size + 6, 56, 150 + (k - 8) * 3, 96, faint=True)
        drawing.arrow(440 + k * size + 6, 56, 440 + k * size + 6, 126, faint=True)
    drawing.box(70, 98, 160, 28, shade=0.3)
    drawing.text(150, 116, "sum of squares", size=12)
    drawing.arrow(232, 112, 278, 112)
    drawing.box(280, 98, 110, 28, shade=LEGIBLE, thick=2)
    drawing.text(335, 116, "rstd", code=True)
    drawing.arrow(392, 112, 436, 112)
    cells(drawing, 440, 128, 20, size, shade=0.25)
    drawing.text(440, 160, "y = x * rstd * gamma", anchor="start", size=12, code=True)
    drawing.text(150, 150, "the whole block, with barriers", size=11)
    drawing.text(335, 150, "each thread has it", size=11)
    return drawing.svg()


def mojo_picture() -> str:
    """What the two threads of the program on the page about Mojo read, of two rows of five numbers."""
    drawing = Drawing(
        112,
        "Two rows of five numbers, 0 to -9. Thread 0 owns the first row, thread 1 the second, and each reads columns 0, 2 and 4.",
    )
    for r in range(2):
        drawing.text(8, 44 * r + 30, f"thread {r}: row {r}", anchor="start")
        for h in range(5):
            shade = LEGIBLE * (h % 2 == 0)
            drawing.labelled(
                140 + 66 * h, 44 * r + 8, 62, 34, f"{-(5 * r + h)}".replace("-", "−"), shade=shade
            )
    for h in range(5):
        drawing.text(171 + 66 * h, 108, f"h = {h}")
    return drawing.svg()


PICTURES = {
    "mojo": mojo_picture,
    "map": map_picture,
    "index": index_picture,
    "cast": cast_picture,
    "reduce": reduce_picture,
    "atomic": atomic_picture,
    "stages": stages_picture,
    "rmsnorm": rmsnorm_picture,
}
