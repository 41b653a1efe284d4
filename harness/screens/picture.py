"""A picture in the terminal: the story, the launches in a line each, and what the thread at fault touches, cell by cell."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from harness.check.accesses import LaunchTrace, Line, Place, Thread
from harness.check.picture import Picture
from harness.console import shown
from harness.screens import story
from harness.screens.story import Sentence

ROWS, COLUMNS = 16, 32
"""Cells of a tensor that a terminal shows; the rest is counted."""
STYLES = {
    "wrong": ("bold red", "✗"),
    "finding": ("bold red", "!"),
    "way": ("", "←"),
    "fault": ("bold yellow", "→"),
    "instead": ("yellow", " "),
    "right": ("green", "✓"),
}
CELLS = {
    "nothing": ("·", "dim"),
    "read": ("r", "bold blue"),
    "written": ("w", "bold green"),
    "added": ("a", "bold magenta"),
    "extra": ("x", "bold white on red"),
    "missing": ("o", "bold black on yellow"),
    "target": ("#", "bold white on red"),
}
LEGEND = {
    "read": "read",
    "written": "written",
    "added": "added to, atomically",
    "extra": "read or written here, not by the solution",
    "missing": "left out here: the solution reads or writes it",
    "target": "the wrong element that it writes",
}


def lines(picture: Picture, page: Path | None = None) -> Iterator[RenderableType]:
    """The picture from top to bottom; `page` is the file of the page that steps through the run, if there is one."""
    puzzle, case = picture.puzzle, picture.case
    yield Text(
        f"{puzzle.name} · {picture.gate.id}: {picture.gate.about}   in '{case.name}' ({puzzle.say_dims(case.dims)}), "
        "on the virtual GPU",
        style="bold",
    )
    said = None
    for sentence in story.tell(picture):
        yield from sentence_lines(sentence, said)
        said = sentence.line or said
    yield Text("")
    yield from launch_lines(picture)
    yield Text("")
    yield from thread_picture(picture)
    dropped = picture.mine.accesses.dropped
    if dropped:
        yield Text(f"cut: {dropped:,} further accesses are not recorded", style="yellow")
    if page:
        # Whole, so that a terminal makes a link of it.
        yield Text(f"step by step, in a browser: {shown(page)}", style="dim", no_wrap=True)


def sentence_lines(sentence: Sentence, said: Line | None) -> Iterator[Text]:
    """A sentence with its sign, and below it the line of source that it speaks of, unless it was just `said`."""
    style, sign = STYLES[sentence.kind]
    yield Text(f" {sign} {sentence.text}", style=style)
    code = story.code(sentence.line)
    if sentence.line and sentence.line != said and code and sentence.kind in ("fault", "finding", "instead"):
        yield Text(f"     {Path(sentence.line.file).name}:{sentence.line.number}   {code}", style="cyan")


# ---- Launches -----------------------------------------------------------------------------------------------


def launch_lines(picture: Picture) -> Iterator[RenderableType]:
    """A line for each launch: geometry, what it reads and writes, and what it wastes."""
    run, here = picture.mine.accesses, picture.who
    table = Table.grid(padding=(0, 1))
    for number, launch in enumerate(run.launches):
        mark = "▶" if here and here.launch == number else " "
        text = Text()
        for kind, verb, style in (
            ("R", "reads", "blue"),
            ("W", "writes", "green"),
            ("A", "adds to", "magenta"),
        ):
            if touched(launch, kind):
                text.append(f"{verb} ", style="dim").append(f"{touched(launch, kind)} ", style=style)
        for words in marks(picture, number):
            text.append(f"! {words} ", style="bold red")
        shape = f"grid {sizes_text(launch.grid)}, block {sizes_text(launch.block)}"
        table.add_row(mark, str(number + 1), Text(launch.name, style="bold"), shape, text)
    yield table


def sizes_text(sizes: tuple[int, int, int]) -> str:
    """A grid or block without the axes after its last that counts: "(4, 4)", "128"."""
    axes = max((axis for axis in range(3) if sizes[axis] > 1), default=0) + 1
    return str(sizes[0]) if axes == 1 else str(sizes[:axes])


def touched(launch: LaunchTrace, kind: str) -> str:
    """The tensors that a launch accesses in one way, in the order of their first access."""
    return ", ".join(dict.fromkeys(step.tensor for step in launch.events.steps if step.kind == kind))


def marks(picture: Picture, number: int) -> Iterator[str]:
    """What is wrong with a launch, or wasted in it: findings, bank conflicts, accesses that are not coalesced."""
    launch = picture.mine.accesses.launches[number]
    counts: dict[str, int] = {}
    for finding in launch.findings:
        if finding.is_error:
            counts[finding.kind] = counts.get(finding.kind, 0) + finding.count
    yield from (f"{kind} ({count})" for kind, count in counts.items())
    cost = story.launch_cost(picture.mine.accesses, number)
    if cost.conflicts:
        yield f"bank conflicts ({cost.conflicts} extra cycles)"
    if cost.moved > 2 * cost.least:
        yield f"{cost.moved} sectors where {cost.least} would do"


# ---- One thread ---------------------------------------------------------------------------------------------


def thread_picture(picture: Picture) -> Iterator[RenderableType]:
    """What the followed thread touches in its launch, tensor by tensor, beside what the solution's thread does."""
    followed = picture.who
    if followed is None:
        return
    launch = picture.mine.accesses.launches[followed.launch]
    blank = followed_blank(picture)
    words = f" in blank {blank}" if blank else ""
    where = ", ".join(story.thread_words(launch, followed.block, followed.thread))
    yield Text(f" {launch.name}: what {where} touches{words}", style="bold")
    cells = thread_cells(picture, followed, blank)
    used = {what for marked in cells.values() for what in marked.values()}
    yield Columns([tensor_block(picture, name, marked) for name, marked in cells.items()], padding=(0, 3))
    legend = Text(" ")
    for what, words in LEGEND.items():
        if what in used:
            sign, style = CELLS[what]
            legend.append(f" {sign} ", style=style).append(f" {words}  ", style="dim")
    yield legend


def followed_blank(picture: Picture) -> str:
    """The blank that the fault lies in: only what it touches is drawn; "" draws the whole launch."""
    line = picture.line
    return line.blank if line and line.blank in picture.mine.accesses.regions else ""


def thread_cells(picture: Picture, thread: Thread, blank: str = "") -> dict[str, dict[int, str]]:
    """Tensor -> element -> what it is, a key of CELLS, for one thread; written tensors stand last."""
    mine, theirs = (access_kinds(side.accesses, thread, blank) for side in (picture.mine, picture.theirs))
    cells: dict[str, dict[int, str]] = {}
    order = sorted({*mine, *theirs}, key=lambda key: (not_read(mine, theirs, key), key[0]))
    for key in order:
        name, element, _ = key
        table = cells.setdefault(name, {})
        if key not in mine:
            table[element] = "missing"
        elif key not in theirs and not picture.right:
            table[element] = "extra"
        else:
            table.setdefault(element, {"R": "read", "W": "written", "A": "added"}[mine[key]])
    if picture.fault and picture.fault.place.tensor in cells and picture.fault.who == thread:
        cells[picture.fault.place.tensor][picture.fault.place.element] = "target"
    return cells


def access_kinds(run, thread: Thread, blank: str) -> dict[tuple[str, int, bool], str]:
    """(tensor, element, whether it is written) -> how a thread accesses it."""
    mask = run.by(thread)
    if blank and blank in run.regions:
        mask &= run.region == run.regions.index(blank)
    out = {}
    for row in np.flatnonzero(mask).tolist():
        place: Place = run.place(row)
        kind = str(run.kind[row])
        out[place.tensor, place.element, kind != "R"] = kind
    return out


def not_read(mine: dict, theirs: dict, key: tuple) -> bool:
    """Whether a tensor is written by either thread."""
    return any(name == key[0] and wrote for run in (mine, theirs) for name, _, wrote in run)


def tensor_block(picture: Picture, name: str, marked: dict[int, str]) -> Text:
    """One tensor as a grid of cells under its name, around what is marked."""
    size = picture.mine.accesses.tensors[name].size if name in picture.mine.accesses.tensors else 0
    size = size or picture.theirs.accesses.tensors[name].size
    rows, columns = grid_shape(picture.shapes.get(name, ()), size)
    interesting = [e for e, what in marked.items() if what in ("extra", "missing", "target")] or list(marked)
    inside = [e for e in interesting if 0 <= e < size] or [0]
    top = window(min(inside) // columns, max(inside) // columns, rows, ROWS)
    left = window(min(e % columns for e in inside), max(e % columns for e in inside), columns, COLUMNS)
    text = Text(f"{name} {list(picture.shapes.get(name) or (size,))}\n", style="bold")
    touched = {e // columns for e in marked}
    for row in range(top, min(top + ROWS, rows)):
        if row not in touched and row - 1 not in touched and row > top:
            if row + 1 == min(top + ROWS, rows) or row + 1 in touched:
                text.append("⋮\n", style="not bold dim")
            continue
        for column in range(left, min(left + COLUMNS, columns)):
            sign, style = CELLS[marked.get(row * columns + column, "nothing")]
            text.append(sign, style=f"not bold {style}" if style == "dim" else style).append(
                " ", style="not bold"
            )
        text.append("\n")
    rest = size - min(rows, ROWS) * min(columns, COLUMNS)
    if rest > 0:
        text.append(f"from [{top}, {left}]; {rest} more\n", style="dim not bold")
    outside = [e for e in marked if not 0 <= e < size]
    if outside:
        text.append(f"! element {outside[0]}, out of bounds\n", style="bold red")
    return text


def grid_shape(shape: Iterable[int], size: int) -> tuple[int, int]:
    """A tensor as rows and columns: the last axis are the columns; a long vector is wrapped."""
    shape = tuple(shape)
    if len(shape) > 1 and shape[-1]:
        return math.prod(shape[:-1]), shape[-1]
    columns = min(size, COLUMNS) or 1
    return -(-size // columns), columns


def window(first: int, last: int, size: int, room: int) -> int:
    """Where a window of `room` of `size` begins that shows `first`, and `last` if it can."""
    if size <= room:
        return 0
    middle = (first + min(last, first + room - 1)) // 2
    return min(max(middle - room // 2, 0), size - room)
