"""Write a picture as one HTML file that steps through the run, without network access or other files.

The page is `picture_page.html` with the data of the two runs; `--json` writes the same `data`.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness.check.accesses import Accesses, LaunchTrace, Line, Place, Thread
from harness.check.picture import Picture, Side
from harness.screens import story
from harness.screens.picture_html import page_from

MOST = 40_000
"""Accesses of a launch that a page holds."""
COLUMNS = 32
"""Cells in a row of a long vector."""
AROUND = 3
"""Lines of source shown before and after those that touch memory."""


def page(picture: Picture) -> str:
    """Return the page of a picture."""
    return page_from(data(picture))


def source_line(sentence: story.Sentence) -> list[str] | None:
    """Return ["kernel.mojo:12", the line] of a sentence that is about one."""
    code = story.code(sentence.line)
    if not code or sentence.line is None or sentence.kind not in ("fault", "finding", "instead"):
        return None
    return [f"{Path(sentence.line.file).name}:{sentence.line.number}", code]


def title(picture: Picture) -> str:
    """Return puzzle and gate."""
    return f"{picture.puzzle.name} · {picture.gate.id}"


def about(picture: Picture) -> str:
    """Return the gate and the case that are shown."""
    case = picture.case
    return f"{picture.gate.about}, in the case '{case.name}': {picture.puzzle.say_dims(case.dims)}"


# ---- One thread ---------------------------------------------------------------------------------------------


def followed_blank(picture: Picture) -> str:
    """Return the blank of the fault: only its accesses are drawn; "" draws the whole launch."""
    line = picture.line
    return line.blank if line and line.blank in picture.mine.accesses.regions else ""


def thread_cells(picture: Picture, thread: Thread, blank: str = "") -> dict[str, dict[int, str]]:
    """Return, by tensor and element, how one thread uses it: "read", "written", "added", "extra" (the
    solution does not), "missing" (only the solution does) or "target" (the wrong element); written
    tensors come last."""
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
    """Return (tensor, element, whether it is written) -> the kind of a thread's access."""
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
    """Check whether a tensor is written by either thread."""
    return any(name == key[0] and wrote for run in (mine, theirs) for name, _, wrote in run)


def grid_shape(shape: Iterable[int], size: int) -> tuple[int, int]:
    """Return a tensor as rows and columns: the last axis are the columns; a long vector is wrapped."""
    shape = tuple(shape)
    if len(shape) > 1 and shape[-1]:
        return math.prod(shape[:-1]), shape[-1]
    columns = min(size, COLUMNS) or 1
    return -(-size // columns), columns


# ---- The data -----------------------------------------------------------------------------------------------


def data(picture: Picture) -> dict:
    """Return the picture as plain data.

    `runs` are the learner's and the solution's. A run has launches, a launch has `steps`, each [kind, tensor,
    line, first access, accesses, bank conflicts, sectors, least sectors, whether it is in the followed
    `blank`], and its accesses by column: `b` is the block, `t` the thread, `e` the element, `v` the value; a
    kind is R, W, A (atomic) or B (barrier). `tensors` and `lines` are numbered consecutively.
    """
    followed = picture.thread
    names = list(dict.fromkeys([*picture.mine.accesses.tensors, *picture.theirs.accesses.tensors]))
    lines: dict[Line, int] = {}
    runs = [
        run_data(side, picture, names, lines if side is picture.mine else None)
        for side in (picture.mine, picture.theirs)
    ]
    return {
        "title": title(picture),
        "about": about(picture),
        "device": "virtual GPU (sm_90a)",
        "right": picture.right,
        "story": [
            {
                "kind": s.kind,
                "text": s.text,
                "source": source_line(s),
                "step": where(picture.mine.accesses, s.step),
            }
            for s in story.tell(picture)
        ],
        "tensors": [tensor_data(picture, name) for name in names],
        "lines": [[Path(line.file).name, line.number, line.blank] for line in lines],
        "source": source_data(lines),
        "runs": runs,
        "followed": followed and [followed.launch, followed.block, followed.thread],
        "blank": followed_blank(picture),
        "cells": followed and cell_data(picture, followed, names),
    }


def where(run: Accesses, step: int | None) -> list[int] | None:
    """Return a step of a run as [launch, step of the launch]."""
    if step is None:
        return None
    launch = run.launch_of(step)
    return [launch, step - run.launches[launch].first_step]


def tensor_data(picture: Picture, name: str) -> dict:
    """Return one tensor: its shape as rows and columns, its wrong elements."""
    both = (side.accesses.tensors.get(name) for side in (picture.mine, picture.theirs))
    tensor = next(t for t in both if t is not None)
    shape = list(picture.shapes.get(name) or [tensor.size])
    rows, columns = grid_shape(shape, tensor.size)
    wrong = next((w for w in picture.wrong if w.quantity == name), None)
    place = picture.fault.place if picture.fault else None
    return {
        "name": name,
        "space": tensor.space,
        "shape": shape,
        "size": tensor.size,
        "rows": rows,
        "columns": columns,
        "wrong": list(wrong.elements) if wrong else [],
        "target": place.element if place and place.tensor == name else None,
    }


def cell_data(picture: Picture, followed: Thread, names: list[str]) -> dict:
    """Return the differences of the two threads by tensor: [elements accessed only here, elements missing
    here]."""
    if picture.right:
        return {}
    cells = thread_cells(picture, followed, followed_blank(picture))
    return {
        names.index(name): [
            [e for e, what in marked.items() if what == kind] for kind in ("extra", "missing")
        ]
        for name, marked in cells.items()
        if {"extra", "missing"} & {*marked.values()}
    }


def run_data(side: Side, picture: Picture, names: list[str], lines: dict[Line, int] | None) -> list[dict]:
    """Return the launches of a run; `lines` numbers its source lines, None omits them."""
    launches = range(len(side.accesses.launches))
    return [launch_data(side.accesses, number, picture, names, lines) for number in launches]


def launch_data(
    run: Accesses, number: int, picture: Picture, names: list[str], lines: dict[Line, int] | None
) -> dict:
    """Return one launch; with too many accesses, only those of the followed block."""
    launch = run.launches[number]
    events, followed, blank = launch.events, picture.thread, followed_blank(picture)
    keep, cut = select_accesses(launch, followed.block if followed and followed.launch == number else 0)
    steps = []
    offset = np.concatenate([[0], np.cumsum(keep)])
    for n, step in enumerate(events.steps):
        first, last = int(offset[step.first]), int(offset[step.last])
        if step.kind == "barrier":
            steps.append(["B", -1, -1, first, 0, 0, 0, 0, 1])
        elif last > first:
            line = run.line(launch.first_step + n)
            code = lines.setdefault(line, len(lines)) if lines is not None and line else -1
            cost = story.step_cost(run, launch.first_step + n)
            here = int(bool(blank) and run.blank(launch.first_step + n) == blank)
            steps.append([step.kind, names.index(step.tensor), code, first, last - first, *cost, here])
        else:
            steps.append(None)
    return {
        "name": launch.name,
        "grid": launch.grid,
        "block": launch.block,
        "steps": steps,
        "cut": cut,
        "marks": [[f.kind, f.message, bool(f.is_error)] for f in launch.findings],
        "b": events.block[keep].tolist(),
        "t": events.thread[keep].tolist(),
        "e": events.element[keep].tolist(),
        "v": [float(f"{v:.5g}") if math.isfinite(v) else None for v in events.value[keep].tolist()],
    }


def select_accesses(launch: LaunchTrace, block: int) -> tuple[np.ndarray, str]:
    """Return the accesses of a launch that the page shows, and a line about the omitted ones."""
    events = launch.events
    total = len(events.block) + events.dropped
    keep = np.ones(len(events.block), bool)
    if len(keep) > MOST:
        keep = events.block == block
        keep &= np.cumsum(keep) <= MOST
    shown = int(keep.sum())
    if shown == total:
        return keep, ""
    whose = "" if shown == len(keep) else f", those of block {launch.block_index(block)},"
    return keep, f"{shown:,} of {total:,} accesses of this launch{whose} are drawn"


def source_data(lines: dict[Line, int]) -> dict[str, dict[int, str]]:
    """Return the lines of source that touch memory and those around them: file -> number -> text."""
    out: dict[str, dict[int, str]] = {}
    for line in lines:
        try:
            text = Path(line.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        shown = out.setdefault(Path(line.file).name, {})
        for number in range(max(line.number - AROUND, 1), min(line.number + AROUND, len(text)) + 1):
            shown[number] = text[number - 1]
    return {name: dict(sorted(shown.items())) for name, shown in out.items()}
