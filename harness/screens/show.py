"""Implement `pNN --show`: trace a gate's run, describe it, and write an HTML page of its steps."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.check.checker import Checker, RungChecker
from harness.check.options import Options
from harness.check.picture import Picture, make_picture
from harness.check.results import GateResult
from harness.console import format_path, get_page_width
from harness.errors import DamagedFile, Unsolved, UsageError, make_unknown_gate_error
from harness.learner.exercise import Exercise, read_package_blanks
from harness.learner.progress import Progress
from harness.screens import picture_page, story
from harness.spec.puzzle import Gate, Puzzle
from harness.spec.rungs import get_rung_name
from harness.toolchain.cache import get_cache_folder
from harness.toolchain.disk import check_target, write_target
from harness.toolchain.packages import OpPackage

STYLES = {
    "wrong": ("bold red", "✗"),
    "finding": ("bold red", "!"),
    "way": ("", "←"),
    "fault": ("bold yellow", "→"),
    "instead": ("yellow", " "),
    "right": ("green", "✓"),
}
"""Kind of sentence -> style and sign."""
RECORDING_MESSAGE = "Recording every access of your kernels and of the solution's (a few seconds where they are not cached) ..."


def show(console: Console, options: Options) -> int:
    """Trace a gate's run, print its description and write its page; return 0 if it is correct, else 1."""
    exercise, gate = options.exercise, options.show or options.gate
    if options.html:
        check_target("--html", options.html)
    package = exercise.load_package()
    selected_gate = find_kernel_gate(exercise.puzzle, gate) if gate else choose_gate(exercise, package)
    width = get_page_width(console)
    console.width = width or console.width
    console.print(RECORDING_MESSAGE, soft_wrap=not width)
    checker = Checker(exercise.puzzle, **{**options.checker_options, "repeat": 1})
    picture = make_picture(exercise.puzzle, package, selected_gate, cases=options.cases, checker=checker)
    for line in format_picture(picture, write_page(picture, options.html)):
        console.print(line, soft_wrap=bool(line.no_wrap) or not width)
    if options.json == "-":
        print(json.dumps(picture_page.make_data(picture)))
    elif options.json:
        write_target("--json", options.json, json.dumps(picture_page.make_data(picture)) + "\n")
    return 0 if picture.is_correct else 1


def show_in_watch(
    exercise: Exercise, gate: str, result: GateResult, checker: RungChecker | None
) -> list[Text]:
    if not exercise.is_mojo:
        find_kernel_gate(exercise.puzzle, gate)
        raise UsageError(f"{gate}: the {get_rung_name(exercise.rung.id)} rung has no kernel to show")
    reusable_checker = checker if isinstance(checker, Checker) else None
    picture = make_picture(
        exercise.puzzle, exercise.package, exercise.find_gate(gate), result=result, checker=reusable_checker
    )
    return list(format_picture(picture, write_page(picture)))


def format_picture(picture: Picture, page_path: Path | None = None) -> Iterator[Text]:
    """Yield the sentences of the description, each with its source line unless that was just printed."""
    puzzle, case = picture.puzzle, picture.case
    location = f"in '{case.name}' ({puzzle.format_dims(case.dims)}), on the virtual GPU"
    yield Text(f"{puzzle.name} · {picture.gate.id}: {picture.gate.description}   {location}", style="bold")
    shown_line = None
    for sentence in story.tell_story(picture):
        style, sign = STYLES[sentence.kind]
        yield Text(f" {sign} {sentence.text}", style=style)
        source = picture_page.find_source_line(sentence)
        if source and sentence.line != shown_line:
            yield Text(f"     {'   '.join(source)}", style="cyan")
        shown_line = sentence.line or shown_line
    if dropped := picture.learner.accesses.num_dropped:
        yield Text(f"cut: {dropped:,} further accesses are not recorded", style="yellow")
    if page_path:  # an absolute path, so that terminals make it a link
        yield Text(f"step by step, in a browser: {format_path(page_path)}", style="dim", no_wrap=True)


def write_page(picture: Picture, html: Path | None = None) -> Path:
    name = f"{picture.puzzle.name}_{picture.gate.id}.html"
    target = html or get_cache_folder("pictures") / name
    write_target("--html", target, picture_page.render_page(picture))
    return target


def find_kernel_gate(puzzle: Puzzle, id: str) -> Gate:
    """Return a gate of the kernels. Raises UsageError for an unknown gate or one of another rung."""
    gates = {gate.id: gate for gate in puzzle.kernel_gates}
    if id in gates:
        return gates[id]
    if id in {gate.id for gate in puzzle.gates}:
        description = f"a gate of the {get_rung_name(puzzle.find_gate_rung(id).id)} rung, which has no kernel"
        raise UsageError(f"--show {id}: {description}; there is {', '.join(gates)}")
    raise UsageError(f"--show {id}: {make_unknown_gate_error(id, gates)}")


def choose_gate(exercise: Exercise, package: OpPackage) -> Gate:
    """Return the first attempted gate that has not passed, else the first attempted one.

    Raises Unsolved if no blank has been attempted.
    """
    puzzle, blanks = exercise.puzzle, read_package_blanks(package, exercise.puzzle)
    gates = [gate for gate in puzzle.kernel_gates if gate.id not in blanks or blanks[gate.id].size]
    if not gates:
        source = format_path(package.path / puzzle.source)
        raise Unsolved(f"--show: nothing to show yet: no blank of {source} has been attempted")
    if not exercise.is_learner_file:
        return gates[0]
    try:
        states = exercise.get_states(Progress.load())
    except DamagedFile:
        states = {}
    return next((gate for gate in gates if states.get(gate.id) != "passed"), gates[0])
