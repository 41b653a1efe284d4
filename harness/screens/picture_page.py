"""Render a picture as one HTML file that steps through the run; `--json` writes the same data."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harness.check.accesses import Accesses, LaunchTrace, Line, Thread
from harness.check.picture import Picture
from harness.screens import story
from harness.screens.picture_html import fill_template

MAX_ACCESSES = 40_000
"""Maximum number of a launch's accesses in a page."""
COLUMNS = 32
"""Number of cells per row of a long vector."""
CONTEXT_LINES = 3
"""Number of source lines shown before and after each line that accesses memory."""


def render_page(picture: Picture) -> str:
    return fill_template(make_data(picture))


def find_source_line(sentence: story.Sentence) -> list[str] | None:
    """Return ["kernel.mojo:12", text of the line] for a sentence about a source line, else None."""
    code = story.read_line(sentence.line)
    if not code or sentence.line is None or sentence.kind not in ("fault", "finding", "instead"):
        return None
    return [f"{Path(sentence.line.file).name}:{sentence.line.number}", code]


# ---- One thread ---------------------------------------------------------------------------------------------


def find_error_blank(picture: Picture) -> str:
    """Return the blank that caused the error, to draw only its accesses, or "" to draw the entire launch."""
    line = picture.line
    return line.blank if line and line.blank in picture.learner.accesses.regions else ""


def classify_cells(picture: Picture, thread: Thread, blank: str = "") -> dict[str, dict[int, str]]:
    """Return tensor -> element -> how one thread uses it: "read", "written", "added", "extra" (the solution's
    thread does not use it), "missing" (only the solution's does) or "target" (the wrong element); written
    tensors come last."""
    runs = (picture.learner.accesses, picture.solution.accesses)
    learner_kinds, solution_kinds = (list_access_kinds(run, thread, blank) for run in runs)
    cells: dict[str, dict[int, str]] = {}
    written_tensors = {
        name for run in (learner_kinds, solution_kinds) for name, _, is_write in run if is_write
    }
    for key in sorted({*learner_kinds, *solution_kinds}, key=lambda key: (key[0] in written_tensors, key[0])):
        name, element, _ = key
        cell_states = cells.setdefault(name, {})
        if key not in learner_kinds:
            cell_states[element] = "missing"
        elif key not in solution_kinds and not picture.is_correct:
            cell_states[element] = "extra"
        else:
            cell_states.setdefault(element, {"R": "read", "W": "written", "A": "added"}[learner_kinds[key]])
    if (
        picture.root_cause
        and picture.root_cause.element.tensor in cells
        and picture.root_cause.thread == thread
    ):
        cells[picture.root_cause.element.tensor][picture.root_cause.element.index] = "target"
    return cells


def list_access_kinds(run: Accesses, thread: Thread, blank: str) -> dict[tuple[str, int, bool], str]:
    """Map (tensor, element, whether it is written) to the kind of a thread's access."""
    mask = run.select_thread(thread)
    if blank and blank in run.regions:
        mask &= run.region == run.regions.index(blank)
    kinds = {}
    for row in np.flatnonzero(mask).tolist():
        element = run.get_element(row)
        kind = str(run.kind[row])
        kinds[element.tensor, element.index, kind != "R"] = kind
    return kinds


def compute_grid_shape(shape: Iterable[int], size: int) -> tuple[int, int]:
    """Return the numbers of rows and columns to draw; columns are the last axis, long vectors wrap."""
    shape = tuple(shape)
    if len(shape) > 1 and shape[-1]:
        return math.prod(shape[:-1]), shape[-1]
    columns = min(size, COLUMNS) or 1
    return -(-size // columns), columns


# ---- The data -----------------------------------------------------------------------------------------------


def make_data(picture: Picture) -> dict:
    """Return the picture as JSON data.

    `runs` are the learner's and the solution's; each is a list of launches. A launch has `steps`, each [kind,
    tensor, line, first access, number of accesses, bank conflicts, sectors, minimum number of sectors,
    whether it is in the followed `blank`], and its accesses as columns: block `b`, thread `t`, element `e`,
    value `v`. A kind is R, W, A (atomic) or B (barrier). Tensors and lines are indices into `tensors` and
    `lines`.
    """
    followed, case = picture.thread, picture.case
    names = list(dict.fromkeys([*picture.learner.accesses.tensors, *picture.solution.accesses.tensors]))
    lines: dict[Line, int] = {}
    runs = [
        [
            make_launch_data(run.accesses, number, picture, names, line_numbers)
            for number in range(len(run.accesses.launches))
        ]
        for run, line_numbers in ((picture.learner, lines), (picture.solution, None))
    ]
    return {
        "title": f"{picture.puzzle.name} · {picture.gate.id}",
        "about": f"{picture.gate.description}, in the case '{case.name}': {picture.puzzle.format_dims(case.dims)}",
        "device": "virtual GPU (sm_90a)",
        "right": picture.is_correct,
        "story": [
            {
                "kind": s.kind,
                "text": s.text,
                "source": find_source_line(s),
                "step": locate_step(picture.learner.accesses, s.step),
            }
            for s in story.tell_story(picture)
        ],
        "tensors": [make_tensor_data(picture, name) for name in names],
        "lines": [[Path(line.file).name, line.number, line.blank] for line in lines],
        "source": read_source_lines(lines),
        "runs": runs,
        "followed": followed and [followed.launch, followed.block, followed.thread],
        "blank": find_error_blank(picture),
        "cells": followed and make_cell_data(picture, followed, names),
    }


def locate_step(run: Accesses, step: int | None) -> list[int] | None:
    if step is None:
        return None
    launch = run.find_launch(step)
    return [launch, step - run.launches[launch].first_step]


def make_tensor_data(picture: Picture, name: str) -> dict:
    """Return the data of one tensor: its shape, the grid to draw, and its wrong elements."""
    candidates = (run.accesses.tensors.get(name) for run in (picture.learner, picture.solution))
    tensor = next(t for t in candidates if t is not None)
    shape = list(picture.shapes.get(name) or [tensor.size])
    rows, columns = compute_grid_shape(shape, tensor.size)
    wrong = next((w for w in picture.wrong if w.quantity == name), None)
    target = picture.root_cause.element if picture.root_cause else None
    return {
        "name": name,
        "space": tensor.space,
        "shape": shape,
        "size": tensor.size,
        "rows": rows,
        "columns": columns,
        "wrong": list(wrong.elements) if wrong else [],
        "target": target.index if target and target.tensor == name else None,
    }


def make_cell_data(picture: Picture, followed: Thread, names: list[str]) -> dict:
    """Map each tensor to [elements that only the learner's thread accesses, only the solution's thread]."""
    if picture.is_correct:
        return {}
    cells = classify_cells(picture, followed, find_error_blank(picture))
    return {
        names.index(name): [
            [e for e, cell_kind in states.items() if cell_kind == kind] for kind in ("extra", "missing")
        ]
        for name, states in cells.items()
        if {"extra", "missing"} & {*states.values()}
    }


def make_launch_data(
    run: Accesses, number: int, picture: Picture, names: list[str], lines: dict[Line, int] | None
) -> dict:
    """Return the data of one launch; if it has too many accesses, only those of the followed block."""
    launch = run.launches[number]
    events, followed, blank = launch.events, picture.thread, find_error_blank(picture)
    mask, note = select_accesses(launch, followed.block if followed and followed.launch == number else 0)
    steps = []
    offset = np.concatenate([[0], np.cumsum(mask)])
    for n, step in enumerate(events.steps):
        first, last = int(offset[step.first]), int(offset[step.last])
        if step.kind == "barrier":
            steps.append(["B", -1, -1, first, 0, 0, 0, 0, 1])
        elif last > first:
            line = run.get_line(launch.first_step + n)
            code = lines.setdefault(line, len(lines)) if lines is not None and line else -1
            cost = story.compute_step_cost(run, launch.first_step + n)
            in_blank = int(bool(blank) and run.get_blank(launch.first_step + n) == blank)
            steps.append([step.kind, names.index(step.tensor), code, first, last - first, *cost, in_blank])
        else:
            steps.append(None)
    return {
        "name": launch.name,
        "grid": launch.grid,
        "block": launch.block,
        "steps": steps,
        "cut": note,
        "marks": [[f.kind, f.message, bool(f.is_error)] for f in launch.findings],
        "b": events.block[mask].tolist(),
        "t": events.thread[mask].tolist(),
        "e": events.element[mask].tolist(),
        "v": [float(f"{v:.5g}") if math.isfinite(v) else None for v in events.value[mask].tolist()],
    }


def select_accesses(launch: LaunchTrace, block: int) -> tuple[np.ndarray, str]:
    """Return the mask of the accesses that the page shows, and a note if some are omitted."""
    events = launch.events
    total = len(events.block) + events.dropped
    mask = np.ones(len(events.block), bool)
    if len(mask) > MAX_ACCESSES:
        mask = events.block == block
        mask &= np.cumsum(mask) <= MAX_ACCESSES
    count = int(mask.sum())
    if count == total:
        return mask, ""
    owner = "" if count == len(mask) else f", those of block {launch.get_block_index(block)},"
    return mask, f"{count:,} of {total:,} accesses of this launch{owner} are drawn"


def read_source_lines(lines: dict[Line, int]) -> dict[str, dict[int, str]]:
    """Map file -> line number -> text, for the lines that access memory and the lines around them."""
    by_file: dict[str, dict[int, str]] = {}
    for line in lines:
        try:
            text = Path(line.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        shown = by_file.setdefault(Path(line.file).name, {})
        first, last = max(line.number - CONTEXT_LINES, 1), min(line.number + CONTEXT_LINES, len(text))
        shown.update((number, text[number - 1]) for number in range(first, last + 1))
    return {name: dict(sorted(shown.items())) for name, shown in by_file.items()}
