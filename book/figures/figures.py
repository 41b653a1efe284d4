"""The book's figures, drawn from recorded runs and the kernels' constants, as SVG that takes the text colour.

A figure is one line of SVG without empty lines, so that a page can include it; its label is its alternative text.
"""

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from book.figures import recorded_pictures
from book.measure import ledger

ROOT = Path(__file__).absolute().parents[2]
FONT = 13
NARROW = 480
"""Widest drawing that is shown as it is on a page and, a little smaller, on a phone, with letters that can be read."""
LEGIBLE = 0.3
"""Strongest shade behind words: the contrast is above 4.5 in every theme."""


class Drawing:
    """A growing SVG. Coordinates are pixels of a drawing that scales with the page."""

    role = "img"
    """To those who do not see it: one picture with a label, or a "group" of links."""

    def __init__(self, height: int, label: str, width: int = NARROW):
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        shade: float = 0,
        thick: float = 1,
        radius: float = 2,
    ) -> None:
        """A rectangle with its upper left corner at (x, y), filled with `shade` of the text colour."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="currentColor"'
            f' fill-opacity="{shade:g}" stroke="currentColor" stroke-width="{thick:g}" rx="{radius:g}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = FONT, code=False
    ) -> None:
        """Words with their baseline at y."""
        family = ' font-family="Source Code Pro, monospace"' if code else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="currentColor"{family}>'
            f"{html.escape(words)}</text>"
        )

    def labelled(
        self, x: float, y: float, width: float, height: float, *lines: str, shade: float = 0.06, size: int = FONT,
        code: bool = False, thick: float = 1,
    ) -> None:  # fmt: skip
        """A box with lines of words in its middle; one that is to stand out more than words allow has a thick line."""
        self.box(x, y, width, height, shade=min(shade, LEGIBLE), thick=2 if shade > LEGIBLE else thick)
        step = size + 4
        first = y + height / 2 + size * 0.36 - step * (len(lines) - 1) / 2
        for number, words in enumerate(lines):
            self.text(x + width / 2, first + step * number, words, size=size, code=code)

    def segment(
        self, x0: float, y0: float, x1: float, y1: float, *, opacity: float = 1, dash: str = "", thick: float = 1
    ) -> None:  # fmt: skip
        """A line between two pixels; `dash` as in SVG."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="currentColor"'
            f' stroke-opacity="{opacity:g}" stroke-width="{thick:g}"{dashes}/>'
        )

    def polyline(
        self, points: Iterable[tuple[float, float]], *, opacity: float = 1, dash: str = "", thick: float = 1
    ) -> None:
        """Straight lines from pixel to pixel; `dash` as in SVG."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{places}" fill="none" stroke="currentColor" stroke-opacity="{opacity:g}"'
            f' stroke-width="{thick:g}"{dashes}/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, faint: bool = False) -> None:
        """A line with a small head at (x1, y1)."""
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        head = " ".join(
            f"{x1 - 7 * ux + side * 3.5 * uy:.1f},{y1 - 7 * uy - side * 3.5 * ux:.1f}" for side in (1, -1)
        )
        opacity = 0.45 if faint else 1
        self.parts.append(
            f'<g opacity="{opacity}"><line x1="{x0:g}" y1="{y0:g}" x2="{x1 - 5 * ux:.1f}" y2="{y1 - 5 * uy:.1f}"'
            f' stroke="currentColor"/><polygon points="{x1:g},{y1:g} {head}" fill="currentColor"/></g>'
        )

    def svg(self) -> str:
        """The finished figure on one line."""
        narrow = ' class="narrow"' if self.width <= NARROW else ""
        return (
            f'<svg{narrow} xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="{self.role}" aria-label="{html.escape(self.label)}">'
            f"{''.join(self.parts)}</svg>\n"
        )


wide = partial(Drawing, width=720)
"""A drawing as wide as a page; a phone shows it small, and larger at a tap."""


class Steps(Drawing):
    """A drawing whose parts are there at some steps; `words` are one sentence or two for each step.

    Args:
        still: The step that is shown without scripts and on paper: the one that says most. With scripts the first is shown, step 0.
    """

    def __init__(self, height: int, label: str, *, still: int):
        super().__init__(height, label)
        self.still = still
        self.words: list[str] = []

    @contextmanager
    def during(self, first: int, last: int | None = None) -> Iterator[None]:
        """What is drawn inside is there from step `first` to step `last`, or at `first` alone."""
        last = first if last is None else last
        shown = "visible" if first <= self.still <= last else "hidden"
        self.parts.append(f'<g data-from="{first}" data-to="{last}" visibility="{shown}">')
        yield
        self.parts.append("</g>")

    def hero(self, caption: str, opening: str = "") -> str:
        """The box: the drawing, the words of all steps, and a caption. `opening` says in the first step what one looks at."""
        self.words[0] = f"{opening} {self.words[0]}".strip()
        steps = "".join(f"<li>{html.escape(words)}</li>" for words in self.words)
        return (
            f'<div class="hero" data-still="{self.still}"><figure>{self.svg().strip()}<figcaption>{html.escape(caption)}</figcaption></figure>'
            f'<ol class="hero-steps">{steps}</ol></div>\n'
        )


def svgs(*drawn: Callable[[], str]) -> dict[str, Callable[[], str]]:
    """Files of the build, each with the name of the function that draws it."""
    return {f"{draw.__name__}.svg": draw for draw in drawn}


NumberRow = tuple[str, str, np.ndarray, str]
"""Its name, how it is made, its numbers, and what its step says."""


def number_rows(
    drawing: Steps,
    rows: Sequence[NumberRow],
    left: int,
    cell: int,
    turn: int,
    framed: Callable[[str, int], bool],
) -> None:
    """A row of numbers at each step, shaded by their size, the newest in a frame, `framed` numbers with a thick line; the names and
    places of all rows are there from the start. The backward pass begins at row `turn`, below a broken line."""
    last = len(rows) - 1
    for number, (name, how, values, words) in enumerate(rows):
        y = 24 + 44 * number + 12 * (number >= turn)
        drawing.words.append(words)
        drawing.text(4, y + 18, name, anchor="start", size=15)
        drawing.text(36, y + 18, how, anchor="start")
        for i in range(len(values)):
            drawing.box(left + cell * i, y, cell - 3, 30, shade=0.02, thick=0.4)
        with drawing.during(number, last):
            for i, value in enumerate(values):
                written = f"{round(float(value), 2) + 0.0:.2f}".replace("-", "−")
                shade, thick = LEGIBLE * abs(value) / np.abs(values).max(), 3 if framed(name, i) else 1
                drawing.labelled(left + cell * i, y, cell - 3, 30, written, shade=shade, thick=thick)
        with drawing.during(number):
            drawing.box(left - 4, y - 4, cell * len(values) + 5, 38, thick=2.5, radius=5)
    drawing.segment(4, 23 + 44 * turn, NARROW - 4, 23 + 44 * turn, dash="4 4", opacity=0.6)


def kernel_constant(name: str, puzzle: str = "p22") -> int:
    """A compile-time constant of a solution's kernels, read from their source."""
    folder = ROOT / "solutions" / puzzle / "op"
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.mojo")))
    matched = re.search(rf"^comptime {name} = (\d+)$", source, re.M)
    assert matched, name
    return int(matched[1])


def glossary() -> str:
    """Lane, warp, block, grid on the left; register, shared memory, L2, memory on the right."""
    drawing = wide(
        300,
        "Threads: a lane in a warp of 32, warps in a block, blocks in a grid. Memory: registers of a lane, shared memory of a "
        "block, the L2 cache and the memory of the whole grid.",
    )
    levels = (
        ("lane", "one thread", "registers", "255 of 32 bits at most for a thread"),
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


def bytes_and_error(points: list[tuple[str, float, float]]) -> str:
    """Ways to keep activations: megabytes to the right, error of the worst gradient upward, by powers of ten.

    `points` are (name, megabytes, error). Those of the compiler, hollow, have their name below, the others above.
    """
    label = "; ".join(f"{name}: {size:g} MB, error {error:.0e}" for name, size, error in points)
    drawing = Drawing(300, f"Bytes kept against the error of the worst gradient. {label}")
    left, bottom, width, height = 48, 262, 370, 230
    most = max(size for _, size, _ in points)
    low, high = -7, -2
    drawing.arrow(left, bottom, left + width + 50, bottom)
    drawing.arrow(left, bottom, left, bottom - height - 24)
    drawing.text(left + 10, 12, "error of the worst gradient", anchor="start", size=12)
    for power in range(low, high + 1):
        y = bottom - height * (power - low) / (high - low)
        drawing.text(left - 6, y + 4, f"1e{power}", anchor="end", size=12)
    for size in sorted({size for _, size, _ in points}):
        drawing.text(left + width * size / most, bottom + 18, f"{size:g} MB", size=12)
    drawing.text(left + width / 2, bottom + 36, "kept between the passes", size=12)
    for name, size, error in points:
        x = left + width * size / most
        y = bottom - height * (math.log10(error) - low) / (high - low)
        compiled = name.startswith("compiled, ")
        drawing.box(x - 5, y - 5, 10, 10, shade=0 if compiled else 0.8)
        drawing.text(x, y + (18 if compiled else -10), name.removeprefix("compiled, "), size=12)
    return drawing.svg()


def grid() -> str:
    """Which block owns which row, and every element that one block reads and writes in the fused backward kernel.

    Drawn from a recorded run of the solution, like everything that `--show` draws.
    """
    run = recorded_pictures.load("fused_backward")
    columns, rows, _ = run["grid"]
    chosen = (1, rows - 1)
    block = str(chosen[0] + columns * chosen[1])
    touched = {
        kind: {name: t for name, t in run["tensors"].items() if block in t.get(kind, {})} for kind in "RWA"
    }
    label = "; ".join(f"{verb} {said(touched[kind], kind, block)}" for kind, verb in VERBS.items())
    drawing = wide(262, f"A grid of {columns} by {rows} blocks, one for each row. Block {chosen} {label}.")
    cell, left, top = 34, 30, 62
    drawing.text(left + rows * cell / 2, 22, f"grid [B, S] = [{columns}, {rows}]")
    drawing.text(left + rows * cell / 2, 46, "block_idx.y, the position s", size=11)
    for b in range(columns):
        drawing.text(left - 12, top + b * cell + cell / 2 + 4, str(b), size=11)
        for s in range(rows):
            drawing.box(
                left + s * cell,
                top + b * cell,
                cell - 4,
                cell - 4,
                shade=LEGIBLE if (b, s) == chosen else 0.06,
            )
            drawing.text(left + s * cell + cell / 2 - 2, top + b * cell + cell / 2 + 2, f"{b},{s}", size=10)
    drawing.text(left + rows * cell / 2, top + columns * cell + 18, "one block, one thread, one row", size=11)
    drawing.text(
        left + rows * cell / 2, top + columns * cell + 36, f"right: what block {chosen} touches", size=11
    )
    places = {"R": (200, 16), "W": (200, 152), "A": (330, 152)}
    for kind, verb in VERBS.items():
        x, y = places[kind]
        drawing.text(x, y, verb, anchor="start", size=12)
        for name, tensor in sorted(touched[kind].items(), key=lambda item: -math.prod(item[1]["shape"])):
            width = cells(drawing, x, y + 12, name, tensor["shape"], tensor[kind][block], SHADES[kind])
            x += width
            if x > 640:
                x, y = places[kind][0], y + 106
    return drawing.svg()


VERBS = {"R": "reads", "W": "writes", "A": "adds to, with atomics"}
SHADES = {"R": 0.35, "W": 0.85, "A": 0.6}
SMALL_CELL = 5.5


def cells(
    drawing: Drawing, x: float, y: float, name: str, shape: list[int], ranges: list[list[int]], shade: float
) -> float:
    """A tensor as small cells, those in `ranges` filled; its last axis lies along x. Returns the width it takes."""
    columns = shape[-1]
    touched = {element for first, last in ranges for element in range(first, last + 1)}
    drawing.text(x, y + 6, name.removeprefix("sums_"), anchor="start", size=10, code=True)
    for element in range(math.prod(shape)):
        row, column = divmod(element, columns)
        drawing.box(
            x + column * SMALL_CELL, y + 11 + row * SMALL_CELL, SMALL_CELL - 1, SMALL_CELL - 1,
            shade=shade if element in touched else 0.05, thick=0.25, radius=0.5,
        )  # fmt: skip
    return max(columns * SMALL_CELL, 6.1 * len(name.removeprefix("sums_"))) + 14


def said(tensors: dict[str, dict], kind: str, block: str) -> str:
    """How much of each tensor a block touches."""
    return ", ".join(
        f"{count(tensor[kind][block])} of {math.prod(tensor['shape'])} elements of {name}"
        for name, tensor in tensors.items()
    )


def count(ranges: list[list[int]]) -> int:
    """How many elements are in some ranges."""
    return sum(last - first + 1 for first, last in ranges)


def all_to_one(
    drawing: Drawing, sources: list[str], wide: float, targets: list[str], cell: float, one: int
) -> None:
    """Blocks in a line, sums below, and an arrow from every block to the same sum."""
    left = (drawing.width - len(targets) * cell) / 2
    for number, name in enumerate(sources):
        x = drawing.width / len(sources) * (number + 0.5)
        drawing.labelled(x - wide / 2, 26, wide, 24, name, shade=0.12, size=11)
        aside = (number - len(sources) / 2) * 1.5
        drawing.arrow(x, 52, left + (one + 0.5) * cell + aside, 128, faint=True)
    for number, name in enumerate(targets):
        shade = LEGIBLE if number == one else 0.06
        drawing.labelled(left + number * cell, 130, cell - 3, 26, name, shade=shade, size=11)


def fan_in() -> str:
    """All rows add to every element of dgamma, as recorded."""
    tensor = recorded_pictures.load("fused_backward")["tensors"]["sums_ln_weight"]
    (H,), target = tensor["shape"], 3
    adding = [
        b for b, ranges in tensor["A"].items() if any(first <= target <= last for first, last in ranges)
    ]
    rows = len(adding)
    drawing = wide(
        190,
        f"{rows} blocks in a line above, {H} elements of dgamma below; every block points at element {target}.",
    )
    drawing.text(360, 16, f"{rows} blocks, one for each row")
    all_to_one(drawing, [str(row) for row in range(rows)], 30, [f"h={h}" for h in range(H)], 46, target)
    drawing.text(360, 178, f"dgamma [H]: each element receives {rows} atomic additions")
    return drawing.svg()


def dealt(drawing: Drawing, threads: dict[int, tuple[list[str], str]], total: str) -> None:
    """Some threads of many: what each adds up, what it calls its share, and the sum of all shares."""
    for (thread, (items, share)), x in zip(threads.items(), (110, 250, 390, 600), strict=True):
        drawing.text(x, 18, f"thread {thread}", size=12)
        for k, item in enumerate(items):
            drawing.labelled(x - 44, 28 + k * 24, 88, 20, item, size=11)
        drawing.arrow(x, 32 + 24 * len(items), x, 126)
        drawing.labelled(x - 44, 128, 88, 24, share, shade=0.25, size=11)
        drawing.arrow(x, 154, 360 + (x - 360) * 0.12, 188)
    for y in (62, 146):
        drawing.text(495, y, "…", size=20)
    drawing.labelled(270, 190, 180, 28, total, shade=1, size=12)


def two_stage() -> str:
    """How the unfused kernels sum a column in a fixed order."""
    lanes = kernel_constant("COLUMN_TILE")
    drawing = wide(
        230,
        f"Rows are dealt out to {lanes} threads in turn; each thread adds its rows in order, then one thread adds the "
        f"{lanes} partial sums in order.",
    )
    mine = {
        lane: [f"row {row}" for row in range(lane, 2 * lanes + 3, lanes)] for lane in (0, 1, 2, lanes - 1)
    }
    dealt(drawing, {lane: (rows, f"partial {lane}") for lane, rows in mine.items()}, "sum of column")
    drawing.text(10, 80, "stage 1", anchor="start", size=11)
    drawing.text(10, 180, "stage 2", anchor="start", size=11)
    return drawing.svg()


def normalisations() -> str:
    """Which elements of a matrix of rows share their statistics: in BatchNorm, LayerNorm and RMSNorm."""
    rows, columns, cell = 4, 8, 22
    kinds = [
        ("BatchNorm", "mean and variance of a column, over the batch", lambda r, h: h == 2),
        ("LayerNorm", "mean and variance of a row", lambda r, h: r == 1),
        ("RMSNorm", "mean square of a row, no mean taken away", lambda r, h: r == 1),
    ]
    drawing = wide(
        190,
        "Three matrices of 4 rows by 8 columns. "
        + "; ".join(
            f"{name}: {what}, {'a column' if name == 'BatchNorm' else 'a row'} is marked"
            for name, what, _ in kinds
        ),
    )
    for i, (name, what, shares) in enumerate(kinds):
        left, top = 30 + 240 * i, 44
        drawing.text(left + columns * cell / 2, 22, name)
        for row in range(rows):
            for h in range(columns):
                shade = 0.55 if shares(row, h) else 0.06
                drawing.box(left + h * cell, top + row * cell, cell - 3, cell - 3, shade=shade)
        drawing.text(left + columns * cell / 2, top + rows * cell + 18, "columns h →, rows ↓", size=11)
        first, _, rest = what.partition(", ")
        drawing.text(left + columns * cell / 2, top + rows * cell + 36, first, size=11)
        drawing.text(left + columns * cell / 2, top + rows * cell + 51, rest, size=11)
    return drawing.svg()


def player_start() -> dict[str, list[float]]:
    """The row and the gradient with which the page's player begins; the still picture shows the same."""
    script = (ROOT / "book" / "theme" / "players.js").read_text(encoding="utf-8")
    return {
        name: [float(value) for value in values.split(",")]
        for name, values in re.findall(r"(\w): \[([-\d., ]+)\]", script.split("START =")[1].split(";")[0])
    }


def gradient_parts() -> str:
    """A gradient at x_hat, its part along 1, its part along x_hat, and the rest, which is dx / rstd."""
    start = player_start()
    x, g = np.array(start["x"]), np.array(start["g"])
    x_hat = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    c2, c1 = g.mean(), (g * x_hat).mean()
    rows = {
        "g": g,
        "c2, along 1": np.full_like(g, c2),
        "c1 x̂, along x̂": c1 * x_hat,
        "rest = dx / rstd": g - c2 - c1 * x_hat,
    }
    left, column, height = 190, 60, 62
    label = "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in row)}" for name, row in rows.items())
    drawing = wide(height * len(rows), f"A gradient and its three parts. {label}")
    most = max(float(np.abs(row).max()) for row in rows.values())
    for r, (name, row) in enumerate(rows.items()):
        middle = height * r + height / 2
        drawing.text(20, middle + 4, name, anchor="start", size=12)
        drawing.box(left, middle - 0.25, column * len(g), 0.5, shade=0.5, thick=0)
        for i, value in enumerate(row):
            size = abs(float(value)) / most * (height / 2 - 4)
            y = middle if value < 0 else middle - size
            drawing.box(left + column * i + 14, y, 32, size, shade=0.2 if value < 0 else 0.55)
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
            x = 24 + cell * at
            drawing.box(
                x, top, cell - 5, 44, shade=LEGIBLE if block == 0 else 0.06, thick=2 if block == 0 else 1
            )
            drawing.text(x + cell / 2 - 2, top + 18, str(block), size=12)
            drawing.text(x + cell / 2 - 2, top + 36, "?" if total is None else f"= {total}", size=11)
    return drawing.svg()


def lifetimes(launches: list[ledger.Launch], last: tuple[str, ...]) -> str:
    """Which launch of a pass makes which tensor, and until when it is read; those in `last` are the results.

    A launch is a line, a tensor a column: a full box writes, an open one reads.
    """
    temporary = list(dict.fromkeys(name for step in launches for name in step.writes if name not in last))
    columns = [*temporary, *last]
    left, top, cell, gap, line = 210, 74, 54, 22, 30
    xs = {name: left + cell * (i + 0.5) + gap * (name in last) for i, name in enumerate(columns)}
    drawing = Drawing(
        top + line * len(launches) + 6,
        "; ".join(
            f"launch {number}, {step.name}, writes {', '.join(step.writes)}"
            + (f" and reads {', '.join(kept)}" if (kept := [n for n in step.reads if n in temporary]) else "")
            for number, step in enumerate(launches, start=1)
        ),
        width=round(left + cell * len(columns) + gap + 20),
    )
    drawing.text(left + cell * len(temporary) / 2, 16, "within the pass", size=12)
    drawing.text(left + gap + cell * (len(temporary) + len(last) / 2), 16, "gradients", size=12)
    for i, name in enumerate(columns):
        drawing.text(xs[name], 40 + 16 * (i % 2), name, size=11, code=True)
    levels = {name: [] for name in columns}
    for number, step in enumerate(launches):
        y = top + line * number + line / 2
        drawing.text(10, y + 4, f"{number + 1}  {step.name}", anchor="start", size=12, code=True)
        for name in columns:
            if name in (*step.reads, *step.writes):
                levels[name].append(y)
    for name, ys in levels.items():
        if len(ys) > 1:
            drawing.box(xs[name] - 1.5, ys[0], 3, ys[-1] - ys[0], shade=0.35, thick=0, radius=0)
    for number, step in enumerate(launches):
        y = top + line * number + line / 2
        for names, shade in ((step.writes, 0.85), (step.reads, 0.0)):
            for name in (each for each in names if each in columns):
                drawing.box(xs[name] - 8, y - 8, 16, 16, shade=shade, thick=1.5)
    return drawing.svg()


def bar_rows(
    drawing: Drawing,
    y: float,
    rows: Iterable[tuple[str, float, str, float]],
    scale: float,
    *,
    left: float = 118,
    size: int = 13,
    step: int = 28,
    past: float = 0,
) -> float:
    """Bars of (name, value, how it is written, shade) from y down; the y below. Names end at `left`, words begin past a length."""
    for name, value, written, shade in rows:
        length = max(1.0, scale * value)
        drawing.text(left, y + step / 2 + 2, name, anchor="end", size=size)
        drawing.box(left + 8, y, length, step - 5, shade=shade)
        drawing.text(left + 16 + max(length, past), y + step / 2 + 2, written, anchor="start", size=size)
        y += step
    return y


Measures = Sequence[tuple[str, dict[str, float], str]]
"""Of each its title, its size by way, and its unit."""


def side_by_side(drawing: Drawing, y: float, measures: Measures, ways: dict[str, str]) -> None:
    """Bars from y on for each measure; `ways` names the ways, the last of which is ours and shaded."""
    for title, sizes, unit in measures:
        drawing.text(2, y, title, anchor="start", size=14)
        rows = [
            (ways[way], size, f"{size:.1f} {unit}", 0.35 if way == list(ways)[-1] else 0.1)
            for way, size in sizes.items()
        ]
        y = bar_rows(drawing, y + 9, rows, 250 / max(sizes.values())) + 25


def in_words(measures: Measures, ways: dict[str, str]) -> str:
    """What `side_by_side` draws, for a label."""
    return "; ".join(
        f"{title}: " + ", ".join(f"{ways[way]} {size:.1f} {unit}" for way, size in sizes.items())
        for title, sizes, unit in measures
    )


def compared(what: str, measures: Measures, ways: dict[str, str]) -> str:
    """A picture of two measures."""
    drawing = Drawing(232, f"{what}{in_words(measures, ways)}.")
    side_by_side(drawing, 18, measures, ways)
    return drawing.svg()


def bars(
    rows: Sequence[tuple[str, float, str, float]], label: str, *, left: float = 150, longest: float = 220
) -> str:
    """Horizontal bars, the rows of `bar_rows`."""
    drawing = Drawing(28 * len(rows) + 10, label)
    scale = longest / (max(value for _, value, _, _ in rows) or 1)
    bar_rows(drawing, 8, rows, scale, left=left)
    return drawing.svg()


Spans = Sequence[tuple[float, float, float]]
"""Start, end and shade of each."""


def over_time(
    lines: Sequence[tuple[str, Spans]], label: str, ticks: Mapping[float, str], width: int = NARROW
) -> str:
    """A line for each name, with what happens in it over time."""
    left, step = 150, 24
    drawing = Drawing(34 + step * len(lines), label, width=width)
    scale = (width - left - 10) / max(end for _, spans in lines for _, end, _ in spans)
    for line, (name, spans) in enumerate(lines):
        drawing.text(left - 8, 16 + step * line, name, anchor="end")
        for start, end, shade in spans:
            wide = max(scale * (end - start), 0.6)
            drawing.box(left + scale * start, 3 + step * line, wide, 17, shade=shade, thick=0, radius=0)
    for time, words in ticks.items():
        drawing.text(left + scale * time, 26 + step * len(lines), words)
    return drawing.svg()


FILES = svgs(normalisations, gradient_parts, block_orders, grid, fan_in, two_stage, glossary)
