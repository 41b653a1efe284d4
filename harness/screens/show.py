"""`pNN --show`: takes a picture of a gate's run, prints it, and writes the page that steps through it."""

import json as json_format
from pathlib import Path

from rich.console import Console, RenderableType

from harness.check.gates import Checker, RungChecker
from harness.check.options import Options, locate
from harness.check.picture import Picture, take
from harness.check.results import GateResult
from harness.console import page_width, shown
from harness.errors import BadUse, DamagedFile, Unsolved, unknown_gate
from harness.learner.progress import Progress
from harness.learner.work import Work, package_blanks
from harness.screens import picture as screen
from harness.screens import picture_page
from harness.spec.puzzle import Gate, Puzzle
from harness.spec.rungs import name_of
from harness.toolchain.cache import cache_folder
from harness.toolchain.disk import check_target, write_target
from harness.toolchain.packages import OpPackage

SAID = "Recording every access of your kernels and of the solution's (a few seconds where they are not cached) ..."


def show(console: Console, options: Options) -> int:
    """One picture, of the gate at hand where `options` names none; returns 0 where the gate is correct, else 1."""
    gate, html, json = options.show or options.gate or "", options.html, options.json
    puzzle = options.puzzle
    if options.device not in ("auto", "virtual", "all"):
        raise BadUse(f"--show: pictures are made on the virtual GPU, not with --device {options.device}")
    if html:
        check_target("--html", html)
    package = locate(options)
    chosen = kernel_gate(puzzle, gate) if gate else attempted(puzzle, package, options.root == "problems")
    width = page_width(console)
    console.width = width or console.width
    console.print(SAID, soft_wrap=not width)
    cases = puzzle.cases(options.dims) if options.dims else None
    checker = Checker(puzzle, dtype=options.dtype, seed=options.seed, blocks=options.blocks)
    picture = take(puzzle, package, chosen, cases=cases, checker=checker)
    for line in screen.lines(picture, write_page(picture, html)):
        console.print(
            line, soft_wrap=isinstance(line, str) or bool(getattr(line, "no_wrap", False)) or not width
        )
    if json == "-":
        print(json_format.dumps(picture_page.data(picture)))
    elif json:
        write_target("--json", json, json_format.dumps(picture_page.data(picture)) + "\n")
    return 0 if picture.right else 1


def lines_for_watch(
    work: Work, gate: str, result: GateResult, checker: RungChecker | None
) -> list[RenderableType]:
    """The picture of a learner's gate that has just been checked."""
    if not work.in_package:
        kernel_gate(work.puzzle, gate)
        raise BadUse(f"{gate}: the {name_of(work.rung.id)} rung has no kernel to show")
    warm = checker if isinstance(checker, Checker) else None
    picture = take(work.puzzle, work.package, work.gate(gate), result=result, checker=warm)
    return list(screen.lines(picture, write_page(picture)))


def write_page(picture: Picture, html: Path | None = None) -> Path:
    """Writes the page and returns its file."""
    name = f"{picture.puzzle.name}_{picture.gate.id}.html"
    target = html or cache_folder("pictures") / name
    write_target("--html", target, picture_page.page(picture))
    return target


def kernel_gate(puzzle: Puzzle, id: str) -> Gate:
    """A gate that has a kernel. Raises BadUse for one of another rung, or of none."""
    gates = {gate.id: gate for gate in puzzle.kernel_gates}
    if id in gates:
        return gates[id]
    if id in {gate.id for gate in puzzle.gates}:
        rung = name_of(puzzle.rung_of(id).id)
        raise BadUse(
            f"--show {id}: a gate of the {rung} rung, which has no kernel; there is {', '.join(gates)}"
        )
    raise BadUse(f"--show {id}: {unknown_gate(id, gates)}")


def attempted(puzzle: Puzzle, package: OpPackage, learners: bool) -> Gate:
    """The first gate with something in its blank that has not passed, else the first with something in it.

    Raises Unsolved where no blank has been attempted.
    """
    blanks = package_blanks(package, puzzle)
    gates = [gate for gate in puzzle.kernel_gates if gate.id not in blanks or blanks[gate.id].size]
    if not gates:
        raise Unsolved(
            f"--show: nothing to show yet: no blank of {shown(package.path / puzzle.source)} has been attempted"
        )
    if not learners:
        return gates[0]
    try:
        states = Work(puzzle, puzzle.rung("mojo")).states(Progress.load())
    except DamagedFile:
        states = {}
    return next((gate for gate in gates if states.get(gate.id) != "passed"), gates[0])
