"""Implement `pNN --show`: trace a gate's run, print its story, and write the page that steps through it."""

import json as json_format
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.check.checker import Checker, RungChecker
from harness.check.picture import Picture, take
from harness.check.results import GateResult
from harness.console import page_width, shown
from harness.errors import BadUse, DamagedFile, Unsolved, unknown_gate
from harness.learner.progress import Progress
from harness.learner.work import Work, package_blanks
from harness.screens import picture_page, story
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import name_of
from harness.toolchain.cache import cache_folder
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
"""Style and sign of each kind of sentence."""
SAID = "Recording every access of your kernels and of the solution's (a few seconds where they are not cached) ..."


@dataclass(frozen=True)
class Show:
    """A picture of a gate's run, "" for the current gate, and the files of its page and data; `cases` and
    `settings` as in `harness.screens.checking.GateCheck`."""

    work: Work
    gate: str
    cases: list[Case] | None
    settings: Mapping[str, Any]
    html: Path | None = None
    json: str | None = None

    def run(self, console: Console) -> int:
        """Trace the run, print its story and write its page; return 0 if the gate is correct, else 1."""
        puzzle, json = self.work.puzzle, self.json
        if self.html:
            check_target("--html", self.html)
        package = self.work.whole_package()
        chosen = kernel_gate(puzzle, self.gate) if self.gate else choose_gate(self.work, package)
        width = page_width(console)
        console.width = width or console.width
        console.print(SAID, soft_wrap=not width)
        checker = Checker(puzzle, **{**self.settings, "repeat": 1})
        picture = take(puzzle, package, chosen, cases=self.cases, checker=checker)
        for line in lines(picture, write_page(picture, self.html)):
            console.print(line, soft_wrap=bool(line.no_wrap) or not width)
        if json == "-":
            print(json_format.dumps(picture_page.data(picture)))
        elif json:
            write_target("--json", json, json_format.dumps(picture_page.data(picture)) + "\n")
        return 0 if picture.right else 1


def lines_for_watch(work: Work, gate: str, result: GateResult, checker: RungChecker | None) -> list[Text]:
    """Return the story of a learner's gate that has just been checked."""
    if not work.in_package:
        kernel_gate(work.puzzle, gate)
        raise BadUse(f"{gate}: the {name_of(work.rung.id)} rung has no kernel to show")
    warm = checker if isinstance(checker, Checker) else None
    picture = take(work.puzzle, work.package, work.gate(gate), result=result, checker=warm)
    return list(lines(picture, write_page(picture)))


def lines(picture: Picture, page: Path | None = None) -> Iterator[Text]:
    """Yield the story: each sentence with its sign, and below it the line of source that it speaks of, unless
    it was just shown."""
    puzzle, case = picture.puzzle, picture.case
    where = f"in '{case.name}' ({puzzle.say_dims(case.dims)}), on the virtual GPU"
    yield Text(f"{puzzle.name} · {picture.gate.id}: {picture.gate.about}   {where}", style="bold")
    text = None
    for sentence in story.tell(picture):
        style, sign = STYLES[sentence.kind]
        yield Text(f" {sign} {sentence.text}", style=style)
        source = picture_page.source_line(sentence)
        if source and sentence.line != text:
            yield Text(f"     {'   '.join(source)}", style="cyan")
        text = sentence.line or text
    if dropped := picture.mine.accesses.dropped:
        yield Text(f"cut: {dropped:,} further accesses are not recorded", style="yellow")
    if page:  # whole, so that a terminal makes a link of it
        yield Text(f"step by step, in a browser: {shown(page)}", style="dim", no_wrap=True)


def write_page(picture: Picture, html: Path | None = None) -> Path:
    """Write the page and return its file."""
    name = f"{picture.puzzle.name}_{picture.gate.id}.html"
    target = html or cache_folder("pictures") / name
    write_target("--html", target, picture_page.page(picture))
    return target


def kernel_gate(puzzle: Puzzle, id: str) -> Gate:
    """Return a gate with a kernel. Raises BadUse for one of another rung, or an unknown one."""
    gates = {gate.id: gate for gate in puzzle.kernel_gates}
    if id in gates:
        return gates[id]
    if id in {gate.id for gate in puzzle.gates}:
        rung = name_of(puzzle.rung_of(id).id)
        raise BadUse(
            f"--show {id}: a gate of the {rung} rung, which has no kernel; there is {', '.join(gates)}"
        )
    raise BadUse(f"--show {id}: {unknown_gate(id, gates)}")


def choose_gate(work: Work, package: OpPackage) -> Gate:
    """Return the first attempted gate that has not passed, else the first attempted one.

    Raises Unsolved if no blank has been attempted.
    """
    puzzle, blanks = work.puzzle, package_blanks(package, work.puzzle)
    gates = [gate for gate in puzzle.kernel_gates if gate.id not in blanks or blanks[gate.id].size]
    if not gates:
        raise Unsolved(
            f"--show: nothing to show yet: no blank of {shown(package.path / puzzle.source)} has been attempted"
        )
    if not work.is_learners:
        return gates[0]
    try:
        states = work.states(Progress.load())
    except DamagedFile:
        states = {}
    return next((gate for gate in gates if states.get(gate.id) != "passed"), gates[0])
