"""Puzzle 28's worklog in pictures: for each step the lanes of a warp over what they load, before and after.

Where a lane reads is computed from the kernels' own constants. `worklog_results.py` has the tables and the climb.
"""

import html
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from book.figures.figures import Drawing, Steps, kernel_constant

constant = partial(kernel_constant, puzzle="p28")
LANES, KEPT, SLAB, TILE = (constant(name) for name in ("LANES", "PER_THREAD", "SLAB_ROWS", "TILE"))
BLOCK, EACH = constant("BLOCK"), constant("THREAD_TILE")
WIDTH, SECTOR, FLOAT, VECTOR = 768, 32, 4, constant("VECTOR_BYTES")
"""Elements of a row of GPT-2 small; bytes of a sector, of a float32, and of the widest load."""
HOT = "var(--links)"


class Lanes(Steps):
    """A drawing "before" a step and one "after" it, side by side; the lanes at work have the colour of links.

    Args:
        width: How far the drawing reaches to the right: two have to fit beside each other.
        frames: "before", and the frames of "after": more than one where the picture moves.
    """

    def __init__(self, height: int, label: str, width: int, frames: int = 2):
        super().__init__(height, label, still=frames - 1)
        self.width = width
        self.groups: list[tuple[slice, range]] = []
        """Parts, and the frames that they belong to; all other parts belong to every frame."""

    @contextmanager
    def during(self, first: int, last: int | None = None) -> Iterator[None]:
        """What is drawn inside belongs to the frames from `first` to `last`, or to `first` alone."""
        start = len(self.parts)
        yield
        self.groups.append(
            (slice(start, len(self.parts)), range(first, (first if last is None else last) + 1))
        )

    def frame(self, number: int) -> str:
        """The drawing of one frame."""
        left_out = {
            at
            for parts, frames in self.groups
            if number not in frames
            for at in range(len(self.parts))[parts]
        }
        drawing = Drawing(self.height, f"{self.label} {self.words[number]}", self.width)
        drawing.parts = [part for at, part in enumerate(self.parts) if at not in left_out]
        return drawing.svg().strip()

    def after(self) -> str:
        """What stands on the right: a drawing and its words, or a drawing in steps."""
        if self.still == 1:
            return f"{self.frame(1)}<p>{html.escape(self.words[1])}</p>"
        steps = Steps(self.height, self.label, still=self.still - 1)
        steps.width, start, steps.words = self.width, 0, self.words[1:]
        for parts, frames in [*self.groups, (slice(len(self.parts), None), range(0))]:
            steps.parts += self.parts[start : parts.start]
            start = parts.stop
            if frames and frames[-1]:
                with steps.during(frames[0] - 1, frames[-1] - 1):
                    steps.parts += self.parts[parts]
        return steps.hero("")

    def pair(self, caption: str) -> str:
        """Both drawings, each with its words, and a caption."""
        before = f"{self.frame(0)}<p>{html.escape(self.words[0])}</p>"
        return (
            f'<figure class="pair"><div><div>{before}</div><div>{self.after().strip()}</div></div>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
        )

    def grid(self, x: float, y: float, columns: int, rows: int, wide: float, high: float) -> None:
        """Thin lines around cells."""
        down = "".join(f"M{x + wide * i:g} {y:g}v{high * rows:g}" for i in range(columns + 1))
        across = "".join(f"M{x:g} {y + high * i:g}h{wide * columns:g}" for i in range(rows + 1))
        self.parts.append(
            f'<path d="{down}{across}" stroke="currentColor" stroke-opacity="0.3" fill="none"/>'
        )

    def fill(
        self, x: float, y: float, wide: float, high: float, cells: Iterable[tuple[int, int]], opacity: float = 0.9
    ) -> None:  # fmt: skip
        """Coloured cells (row, column) of a grid, a rectangle for each run in a row."""
        runs: list[list[int]] = []
        for row, column in sorted(cells):
            if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
                runs[-1][2] += 1
            else:
                runs.append([row, column, 1])
        path = "".join(
            f"M{x + wide * column:g} {y + high * row:g}h{wide * count:g}v{high:g}h{-wide * count:g}z"
            for row, column, count in runs
        )
        self.parts.append(f'<path d="{path}" style="fill:{HOT}" fill-opacity="{opacity:g}"/>')

    def rays(self, ends: Iterable[tuple[float, float, float, float]], opacity: float) -> None:
        """Thin lines, each from (x0, y0) to (x1, y1)."""
        path = "".join(f"M{x0:g} {y0:g}L{x1:g} {y1:g}" for x0, y0, x1, y1 in ends)
        self.parts.append(
            f'<path d="{path}" stroke="currentColor" stroke-opacity="{opacity:g}" fill="none"/>'
        )

    def frames(self, x: float, y: float, *frames: tuple[str, ...]) -> None:
        """The words of each frame, and the lines that it has inside the picture, from (x, y) downwards."""
        for number, (words, *lines) in enumerate(frames):
            self.words.append(words)
            with self.during(number):
                for line, note in enumerate(lines):
                    self.text(x, y + 22 * line, note, size=14, anchor="start")


READS = (
    "Before: each thread has a row. At its first load the warp reads a column, and each lane's sector brings seven elements that no lane asked for.",
    "After: each warp has a row. The 32 lanes read neighbouring elements, and the lanes asked for every byte that moves.",
)
"""What puzzle 28 says of a warp's two ways to read."""
COALESCED = (
    "If each thread has a row, the warp's first load reads a column, and each lane's sector brings seven elements that no lane asked for.",
    "If each warp has a row, its lanes read neighbouring elements: the load is coalesced, and a lane asked for every byte that moves.",
)
"""What puzzle 19 says of them, where nothing has been changed yet."""


def rows(told: tuple[str, str] = READS) -> str:
    """A warp's first load: of one column, a thread to a row; and of one row, a thread to a column."""
    wide, high, left, top, shown = 10.5, 6.5, 56, 14, 32
    of_sector = SECTOR // FLOAT
    asked = [[(lane, 0) for lane in range(LANES)], [(0, lane) for lane in range(LANES)]]
    sectors = [{(row, column // of_sector) for row, column in cells} for cells in asked]
    drawing = Lanes(top + int(high * shown) + 84, "32 lanes load from 32 rows, then from one row.", 400)
    drawing.grid(left, top, shown, shown, wide, high)
    for number, (cells, touched) in enumerate(zip(asked, sectors, strict=True)):
        moved = {(row, of_sector * s + i) for row, s in touched for i in range(of_sector)}
        with drawing.during(number):
            drawing.fill(left, top, wide, high, moved, 0.3)
            drawing.fill(left, top, wide, high, cells)
    frames = [
        (
            words, f"asked for: {LANES * FLOAT} bytes",
            f"moved: {len(s)} sectors, {len(s) * SECTOR:,} bytes,", f"{len(s) * SECTOR // (LANES * FLOAT)} × what was asked for",
        )
        for words, s in zip(told, sectors, strict=True)
    ]  # fmt: skip
    drawing.frames(left, top + high * shown + 24, *frames)
    for lane in (0, LANES - 1):
        with drawing.during(0):
            drawing.text(left - 4, top + high * lane + 8, f"lane {lane}", anchor="end", size=12)
        with drawing.during(1):
            drawing.text(left + wide * (lane + 0.5), top - 4, str(lane), size=12)
    with drawing.during(1):
        drawing.text(left - 4, top - 4, "lane", anchor="end", size=12)
    return drawing.pair(
        "Strong colour marks what a warp's 32 lanes ask for at their first load, in float32. Pale colour marks the rest of each sector."
    )


def once() -> str:
    """Three readings of a row, and one into the lanes' registers."""
    drawing = Lanes(300, "A row read three times, then once into registers.", 472)
    left, wide, each = 24, 13.5, WIDTH // LANES
    users = [(90, "mean"), (240, "variance"), (390, "output")]
    drawing.labelled(left, 8, wide * LANES, 28, f"a row of x in memory: {WIDTH} elements", shade=0.1)
    for x, name in users:
        drawing.labelled(x - 56, 226, 112, 30, name, shade=0.06)
    with drawing.during(0):
        for x, _ in users:
            drawing.arrow(x, 36, x, 226)
    with drawing.during(1):
        drawing.arrow(240, 36, 240, 62)
        drawing.fill(left, 64, wide, 3.5, np.ndindex(each, LANES), 0.45)
        for x, _ in users:
            drawing.arrow(x, 66 + 3.5 * KEPT, x, 226, faint=True)
        drawing.grid(left, 64, LANES, KEPT, wide, 3.5)
    drawing.frames(
        70, 286,
        ("Before: each loop reads the row again.",
         "3 readings of every element"),
        (f"After: lane l keeps elements l, l + {LANES}, l + {2 * LANES}, ... in registers, and all three loops read the registers.",
         f"1 reading; {each} of a lane's {KEPT} places are full"),
    )  # fmt: skip
    return drawing.pair("After the step, a column of the grid is one lane's registers.")


def vectors() -> str:
    """128 neighbouring elements in four requests, and in one."""
    width, wide, left = VECTOR // FLOAT, 13.5, 24
    drawing = Lanes(210, "Four requests of 32 elements, then one of 128.", 472)
    for line in range(width):
        drawing.grid(left, 30 + 36 * line, LANES, 1, wide, 24)
    taken = [[(line, lane) for line in range(width)] for lane in (0, 5)]  # one element of each request
    packed = [[divmod(width * lane + i, LANES) for i in range(width)] for lane in (0, 5)]
    for number, lanes in enumerate((taken, packed)):
        with drawing.during(number):
            for cells, opacity in zip(lanes, (0.9, 0.45), strict=True):
                for line, column in cells:
                    drawing.fill(left, 30 + 36 * line, wide, 24, [(0, column)], opacity)
            if number == 0:
                for line in range(width):
                    drawing.box(left - 3, 27 + 36 * line, wide * LANES + 6, 30, thick=2, radius=5)
            else:
                drawing.box(left - 3, 27, wide * LANES + 6, 36 * width - 6, thick=2, radius=5)
    drawing.text(left, 18, "128 float32 elements, in four lines", anchor="start", size=14)
    drawing.frames(
        left, 198,
        ("Before: each load brings a lane 4 bytes, so the warp sends four requests.",
         f"{width} requests: lane 0 strong, lane 5 pale"),
        ("After: a lane loads four neighbours, 16 bytes, at once, and the warp sends one request.",
         "1 request, as many bytes as before"),
    )  # fmt: skip
    return drawing.pair(
        "A frame is one request. In bfloat16, where 16 bytes are eight elements, eight requests become one."
    )


def shuffles() -> str:
    """Sums through shared memory, then five exchanges between lanes."""
    steps, wide, left, top, high = LANES.bit_length() - 1, 13.5, 24, 26, 44
    label = "A sum through shared memory, then in five steps of shuffles."
    drawing = Lanes(top + high * steps + 70, label, 472, steps + 1)
    at = lambda lane: left + wide * (lane + 0.5)  # noqa: E731
    drawing.text(left, 16, "a part of the sum in each of 32 lanes", anchor="start", size=14)
    drawing.grid(left, top, LANES, 1, wide, 14)
    with drawing.during(0):
        drawing.labelled(left, top + 74, wide * LANES, 30, f"shared memory: {LANES} words", shade=0.15)
        drawing.segment(left, top + 128, left + wide * LANES, top + 128, dash="6 4", thick=2)
        drawing.text(left + wide * LANES / 2, top + 122, "barrier", size=14)
        drawing.rays([(at(lane), top + 14, at(lane), top + 74) for lane in range(LANES)], 0.4)
        drawing.rays([(at(lane), top + 104, at(9), top + 196) for lane in range(LANES)], 0.25)
        drawing.grid(left, top + 196, LANES, 1, wide, 14)
        drawing.fill(left, top + 196, wide, 14, [(0, 9)])
    for step in range(steps):
        distance, y = 1 << step, top + 14 + high * step
        with drawing.during(step + 1, steps):
            drawing.rays([(at(lane), y, at(lane ^ distance), y + high - 14) for lane in range(LANES)], 0.45)
            drawing.rays([(at(lane), y, at(lane), y + high - 14) for lane in range(LANES)], 0.2)
            drawing.grid(left, y + high - 14, LANES, 1, wide, 14)
            drawing.fill(left, y + high - 14, wide, 14, [(0, 0)])
        with drawing.during(step + 1):
            drawing.fill(left, top, wide, 14, [(0, lane) for lane in range(2 * distance)], 0.5)
    before = (
        "Before: each lane stores a word, waits, and reads the words of all 32 lanes. Lane 9 is shown.",
        "1 word stored and 32 read by each lane, 2 barriers",
    )
    after = (
        (
            f"Step {step + 1}: every lane adds the sum of the lane at distance {1 << step}. Lane 0's sum now holds the parts of {2 << step} lanes.",
            f"distance {1 << step}: {2 << step} lanes in each sum, no shared memory",
        )
        for step in range(steps)
    )
    drawing.frames(left, top + high * steps + 50, before, *after)
    return drawing.pair("After each step, the top row marks the lanes whose parts are in lane 0's sum.")


def dx() -> str:
    """x, dln and gamma read twice; then once, into three grids of registers."""
    drawing = Lanes(292, "x, dln and gamma read twice, then once.", 472)
    rows_, users = ((84, "a row of x"), (240, "a row of dln"), (396, "gamma")), ((160, "c1, c2"), (320, "dx"))
    for x, name in rows_:
        drawing.labelled(x - 70, 8, 140, 28, name, shade=0.1)
    for x, name in users:
        drawing.labelled(x - 60, 218, 120, 30, name)
    for x, name in rows_:
        with drawing.during(0):
            for user, _ in users:
                drawing.arrow(x, 36, user + (x - 240) / 8, 218)
        with drawing.during(1):
            drawing.arrow(x, 36, x, 60)
            drawing.fill(x - 64, 62, 4, 3.2, np.ndindex(WIDTH // LANES, LANES), 0.45)
            drawing.grid(x - 64, 62, LANES, KEPT, 4, 3.2)
            drawing.text(x, 180, f"{name.split()[-1]}, kept", size=14)
            for user, _ in users:
                drawing.arrow(x, 186, user + (x - 240) / 8, 218, faint=True)
    drawing.frames(
        100, 282,
        ("Before: the loop for c1 and c2 reads all three, and the loop for dx reads them again.",
         "2 readings of x, dln and gamma"),
        ("After: each lane keeps its part of all three in registers. Shuffles add up the sums, and dx needs no further reading.",
         "1 reading of each"),
    )  # fmt: skip
    return drawing.pair("The loop for dx cannot begin before both sums contain the last element of the row.")


def dgamma() -> str:
    """All rows add to one place; then each slab to its own, and a second stage adds up the slabs."""
    slabs, lines, high, wide, left, top = 4, 16, 3, 7, 24, 22
    drawing = Lanes(290, "Atomics of all rows at one sum, then partial sums of slabs.", 480, 3)
    count = slabs * SLAB
    drawing.text(left, 14, f"{count} rows, 32 columns of one warp", anchor="start", size=14)
    for slab in range(slabs):
        drawing.grid(left, top + (high * lines + 8) * slab, LANES, lines, wide, high)
    bottom = top + (high * lines + 8) * slabs
    for slab in range(slabs):
        y = top + (high * lines + 8) * slab
        with drawing.during(0):
            drawing.rays([(left + wide * LANES, y + high * row, 360, 130) for row in range(0, lines, 3)], 0.4)
        with drawing.during(1, 2):
            drawing.fill(left, y, wide, high, [(row, 6) for row in range(lines)], 0.6)
            drawing.arrow(left + wide * LANES, y + high * lines / 2, 300, y + high * lines / 2)
            drawing.labelled(300, y + 10, 76, 28, "sums", shade=0.15)
        with drawing.during(2):
            drawing.arrow(376, y + high * lines / 2, 414, 130 + 6 * (slab - 1.5))
    with drawing.during(0):
        drawing.labelled(360, 106, 100, 48, "dgamma", "dbeta", shade=0.15)
    with drawing.during(2):
        drawing.labelled(414, 100, 64, 60, "dgamma", "dbeta", shade=0.15)
    y = bottom + 22
    drawing.frames(
        left, y,
        (f"Before: every row adds to the same sum with atomics. {count} additions queue at each column, in a different order in every run.",
         f"{count} atomics at each column"),
        (f"First stage: each slab of {SLAB} rows has its own sums, and one warp adds up the slab.",
         f"{slabs} slabs, {slabs} sums per column, no atomics"),
        ("Second stage: another launch adds up the slabs' sums, in a fixed order.",
         "bitwise identical in every run"),
    )  # fmt: skip
    return drawing.pair(
        f"After the step, the coloured cells are one of the columns that a lane adds up, in slabs of {SLAB} rows. A line of the grid stands for {SLAB // lines} rows."
    )


def product(label: str, wide: float, cells: int, thin: bool) -> tuple[Lanes, float, float, float, float]:
    """A picture of a product: a on the left, b above, results where they meet; where the results are, and where a and b begin."""
    span, left, top = cells * wide, 30.0, 24.0
    x, y = left + span + 12, top + span + 14
    drawing = Lanes(int(y + span) + 24, label, 450)
    for at_x, at_y, name in (
        (left, y, "a, stored along →"),
        (x, top, "b, transposed: stored along ↓"),
        (x, y, "results"),
    ):
        drawing.grid(at_x, at_y, *((cells, cells, wide, wide) if thin else (1, 1, span, span)))
        name_y = at_y + span + 16 if name == "results" else at_y - 4
        drawing.text(at_x, name_y, name, anchor="start", size=13)
    return drawing, x, y, left, top


def tiled() -> str:
    """A warp's results, and what it reads of a and b at one k; then tiles that serve a whole block."""
    wide, row, k = 6.2, 5, 9
    drawing, x, y, left, top = product("A product from memory, then through tiles.", wide, TILE, True)
    drawing.fill(x, y, wide, wide, [(row, lane) for lane in range(LANES)])
    with drawing.during(0):
        drawing.fill(left, y, wide, wide, [(row, k)])
        drawing.fill(x, top, wide, wide, [(k, lane) for lane in range(LANES)])
    with drawing.during(1):
        for at_x, at_y in ((left, y), (x, top)):
            drawing.fill(at_x, at_y, wide, wide, np.ndindex(TILE, TILE), 0.35)
            drawing.box(at_x, at_y, TILE * wide, TILE * wide, thick=2.5)
        drawing.fill(left, y, wide, wide, [(row, i) for i in range(TILE)])
    drawing.frames(
        30, 100,
        ("Before: 32 lanes compute 32 results in one row. For each k, they read one element of a and 32 elements of b, which lie in 32 rows of memory.",
         "2 elements from memory", "for each multiply-add"),
        (f"After: the block copies {TILE} × {TILE} elements of each matrix into shared memory, row by row, and all {TILE} × {TILE} results use these copies.",
         "2 elements from memory", f"for {TILE} multiply-adds"),
    )  # fmt: skip
    return drawing.pair(
        "The coloured results belong to one warp. After the step, a thick frame is a tile in shared memory."
    )


def registers() -> str:
    """One result of a thread, and its 4 × 4."""
    wide, apart, size = 3.1, BLOCK // EACH, 8
    drawing, x, y, left, top = product("A thread with one result, then with 4 × 4.", wide, BLOCK, False)
    k_of_a, k_of_b = left + 8 * wide, top + 8 * wide
    rows, columns = (
        [first + wide * i * apart for i in range(EACH)] for first in (y + 3 * wide, x + 5 * wide)
    )
    stripes = [(r + i * apart, c) for r in (2, 3) for i in range(EACH) for c in range(BLOCK)]
    drawing.fill(x, y, wide, wide, stripes, 0.25)
    for number, (ys, xs) in enumerate(((rows[:1], columns[:1]), (rows, columns))):
        with drawing.during(number):
            for at_y in ys:
                drawing.segment(k_of_a, at_y, xs[-1], at_y, opacity=0.35)
                drawing.fill(k_of_a - size / 2, at_y - size / 2, size, size, [(0, 0)])
            for at_x in xs:
                drawing.segment(at_x, k_of_b, at_x, ys[-1], opacity=0.35)
                for at_y in (k_of_b, *ys):
                    drawing.fill(at_x - size / 2, at_y - size / 2, size, size, [(0, 0)])
    drawing.frames(
        30, 100,
        ("Before: two numbers come from shared memory for every multiply-add.",
         "2 loads for 1", f"multiply-add: {2 * FLOAT} bytes"),
        (f"After: {EACH} numbers of a and {EACH} of b go into registers, and every pair is multiplied.",
         f"{2 * EACH} loads for {EACH * EACH}", f"multiply-adds: {2 * EACH * FLOAT / EACH**2:g} bytes each"),
    )  # fmt: skip
    return drawing.pair(
        f"A block computes {BLOCK} × {BLOCK} results. The squares, {apart} apart, belong to one thread, and the stripes to its warp."
    )


def copies() -> str:
    """Copy and multiplication in turn, then at once."""
    drawing = Lanes(236, "Copies and multiplications in turn, then at the same time.", 480)
    unit, left, tiles = 50, 78, 4
    for y, name in ((36, "copy"), (96, "multiply")):
        drawing.text(left - 8, y + 26, name, anchor="end", size=14)
        drawing.segment(left, y + 44, 476, y + 44, opacity=0.3)
    for number, starts in enumerate(
        ([(2 * i, 2 * i + 1) for i in range(tiles)], [(i, i + 1) for i in range(tiles)])
    ):
        with drawing.during(number):
            for tile, (copied, multiplied) in enumerate(starts):
                drawing.labelled(left + unit * copied, 36, unit - 2, 40, str(tile), shade=0.15, size=15)
                x = left + unit * multiplied
                drawing.parts.append(
                    f'<rect x="{x}" y="96" width="{unit - 2}" height="40" rx="2" style="fill:{HOT}" fill-opacity="0.35" stroke="currentColor"/>'
                )
                drawing.text(x + unit / 2 - 1, 121, str(tile), size=15)
            end = left + unit * (starts[-1][1] + 1)
            drawing.segment(end, 20, end, 160, dash="5 4", thick=2)
    drawing.text(left, 184, "time →", anchor="start", size=14)
    drawing.frames(
        left, 216,
        ("Before: the block copies a tile, waits, and multiplies. While a copy is on its way, no thread multiplies.",
         "nothing is hidden"),
        ("After: while the block multiplies one tile, the next is on its way into a second buffer. The block has to wait only for the first tile.",
         "every copy but the first is hidden"),
    )  # fmt: skip
    return drawing.pair(
        "This sketch has four tiles and shows copying and multiplying as equally long; it is not a measurement."
    )


def tensor(lane: int = 5) -> str:
    """Which elements of the 16 x 8 results, and of the factors, a lane holds at an `mma`."""
    wide, high, left, top = 26, 16, 40, 24
    drawing = Lanes(474, f"The fragments of an mma; those of lane {lane} are coloured.", 460)
    x, y = left + 16 * 12 + 14, top + 16 * 9 + 14
    row, column = lane // 4, 2 * (lane % 4)
    drawing.grid(left, y, 16, 16, 12, high)
    drawing.grid(x, top, 8, 16, wide, 9)
    drawing.grid(x, y, 8, 16, wide, high)
    for at_x, at_y, name in ((left, y, "a: 16 rows of 16 elements"), (x, top, "b, transposed: 8 rows")):
        drawing.text(at_x, at_y - 5, name, anchor="start", size=13)
    results = [(r, c) for r in (row, row + 8) for c in (column, column + 1)]
    drawing.fill(x, y, wide, high, results, 0.45)
    for r, c in np.ndindex(16, 8):
        drawing.text(x + wide * (c + 0.5), y + high * r + 13, str(4 * (r % 8) + c // 2), size=13)
    with drawing.during(0):
        drawing.fill(left, y, 12, high, [(r, 3) for r in (row, row + 8)])
        drawing.fill(x, top, wide, 9, [(3, c) for c in (column, column + 1)])
    with drawing.during(1):
        deep = (column, column + 1, column + 8, column + 9)
        drawing.fill(left, y, 12, high, [(r, k) for r in (row, row + 8) for k in deep])
        drawing.fill(x, top, wide, 9, [(k, row) for k in deep])
    below = y + 16 * high + 24
    drawing.frames(
        left, below,
        (f"Before: for each k, lane {lane} takes two elements of a and two of b for its four results, and multiplies them one by one.",
         "64 instructions of the warp for 2,048 multiply-adds"),
        (f"After: lane {lane} supplies eight elements of a and four of b. Its elements of b do not belong to the columns of its results: the tensor core distributes them.",
         "1 instruction of the warp for 2,048 multiply-adds"),
    )  # fmt: skip
    return drawing.pair("The number in a result is the lane that holds it. Lane 5's elements are coloured.")


def layouts() -> str:
    """What `ld_matrix` gives each lane of 8 x 8 elements, as they lie and transposed."""
    wide, high, left, top = 26, 24, 24, 112
    drawing = Lanes(346, "Three transposes in memory, then none: ld_matrix transposes 8 × 8 elements.", 472)
    of_lane: list[Callable[[int, int], int]] = [lambda r, c: 4 * r + c // 2, lambda r, c: 4 * c + r // 2]
    launches = (
        ["copy dYᵀ", "copy Wᵀ", "copy lnᵀ", "dln = dY W", "dW = dYᵀ ln"],
        ["dln = dY W", "dW = dYᵀ ln"],
    )
    for number, names in enumerate(launches):
        with drawing.during(number):
            for i, name in enumerate(names):
                drawing.labelled(24 + 88 * i, 34, 84, 34, name, shade=0.3 if "=" in name else 0.06, size=12)
    drawing.text(24, 24, "launches", anchor="start", size=14)
    for place, (words, lane_of) in enumerate(zip(("as stored", "transposed"), of_lane, strict=True)):
        x = left + place * (8 * wide + 16)
        with drawing.during(place, 1):
            drawing.text(x, top - 8, f"ld_matrix, {words}", anchor="start", size=14)
            drawing.grid(x, top, 8, 8, wide, high)
            drawing.fill(x, top, wide, high, [at for at in np.ndindex(8, 8) if lane_of(*at) == 5], 0.45)
            for r, c in np.ndindex(8, 8):
                drawing.text(x + wide * (c + 0.5), top + high * r + 17, str(lane_of(r, c)), size=12)
    y = top + 8 * high + 28
    drawing.frames(
        left, y,
        ("Before: ld_matrix gives a lane two neighbours of a row, so three matrices are transposed in memory first.",
         "3 launches that only copy, and 2 products"),
        ("After: the tile is copied as it is stored, and ld_matrix gives a lane two neighbours of a column, as it would from a transposed matrix.",
         "2 products"),
    )  # fmt: skip
    return drawing.pair(
        "A square is an element of a tile in shared memory. Its number is the lane that gets the element. Lane 5 is coloured."
    )


def epilogue() -> str:
    """The output through memory three times, then once; and the blocks that add up dY."""
    drawing = Lanes(330, "The output crosses memory three times, then once.", 472)
    drawing.labelled(24, 34, 432, 40, "results in registers", shade=0.15, size=15)
    drawing.labelled(24, 150, 432, 34, "memory", shade=0.06, size=15)
    with drawing.during(0):
        for x, up, words in ((90, False, "y without b"), (230, True, "y, to add b"), (370, False, "y")):
            drawing.arrow(x, *((150, x, 74) if up else (74, x, 150)))
            drawing.text(x + 8, 116, words, anchor="start", size=14)
    with drawing.during(1):
        drawing.arrow(240, 74, 240, 150)
        drawing.text(248, 116, "y", anchor="start", size=14)
    drawing.text(24, 24, "the forward product", anchor="start", size=14)
    columns, rows_, wide, high = WIDTH // constant("BLOCK_COLUMNS"), 8, 30, 10
    drawing.text(24, 212, "blocks of dW: inputs across, outputs down", anchor="start", size=14)
    drawing.grid(24, 220, columns, rows_, wide, high)
    drawing.text(24 + wide * columns / 2, 316, "…", size=18)
    with drawing.during(1):
        drawing.fill(24, 220, wide, high, [(r, 0) for r in range(rows_)], 0.6)
    drawing.frames(
        280, 262,
        ("Before: the output is stored, loaded to add the bias, and stored again. Another launch reads dY again, for db.",
         "y is moved 3 times,", "dY is read again"),
        ("After: the bias is added in registers. The blocks in column 0 have every fragment of dY in registers once, and an mma with ones adds them up.",
         "y is moved once,", "dY is not read again"),
    )  # fmt: skip
    return drawing.pair("After the step, the coloured blocks add up the columns of dY, which gives db.")


PICTURES = (rows, once, vectors, shuffles, dx, dgamma, tiled, registers, copies, tensor, layouts, epilogue)
FILES = {f"pair_worklog_{draw.__name__}.html": draw for draw in PICTURES}
FILES["pair_coalesced.html"] = partial(rows, COALESCED)
