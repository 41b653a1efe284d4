"""What a check tells while it goes on, and the line that shows it. Without a compiler: what runs the cases is a stand-in."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from typed import stand_in

from harness.check.execution import GraphDevice, VirtualDevice
from harness.check.reference import Reference
from harness.check.subprocess_checker import SubprocessChecker
from harness.console import listening, live, tell
from harness.devices.graphs import Program
from harness.devices.recorder import Recording
from harness.devices.targets import Target
from harness.learner.work import Work
from harness.screens.checking import compile_callbacks
from harness.spec.catalogue import find_puzzle
from harness.spec.puzzle import Case, Puzzle

CASES = [Case(name, "", (1,), "plain") for name in ("chapter", "wide")]
REFERENCE = stand_in(
    Reference, dtype="float32", puzzle=stand_in(Puzzle, rungs=(), multiply_adds=lambda dims: 1)
)
PROGRAM = stand_in(Program, cached=True, seconds=0.0)


def test_a_graph_tells_its_cases_once(monkeypatch):
    monkeypatch.setattr(
        GraphDevice, "_execute", lambda self, case, reference: {"fused.y": case.name, "unfused.y": "other"}
    )
    device, told = GraphDevice(PROGRAM, Target("cpu", None, "")), []
    with listening(told.append):
        outcome = device.outcome("fused", CASES, REFERENCE)
        device.outcome("unfused", CASES, REFERENCE)
    assert outcome.outputs == {"chapter": {"y": "chapter"}, "wide": {"y": "wide"}}
    assert told == ["CPU: case 1 of 2 (chapter)", "CPU: case 2 of 2 (wide)"]


def test_the_virtual_gpu_tells_its_cases(monkeypatch):
    machine = SimpleNamespace(
        gpu=SimpleNamespace(steps=0, findings=[], launches=[]), run=lambda *arguments: {}
    )
    monkeypatch.setattr("harness.devices.replay.Replay", lambda *arguments, **options: machine)
    monkeypatch.setattr(Puzzle, "saved_quantities", lambda self, variant: [])
    monkeypatch.setattr(Reference, "inputs", lambda self, case: {})
    monkeypatch.setattr(Reference, "compare_all", lambda *arguments: {})
    device, told = VirtualDevice(Recording(), Path("op.mojo")), []
    with listening(told.append):
        device.outcome("fused", CASES, REFERENCE)
    assert told == [
        f"fused on the virtual GPU: case {n} of 2 ({case.name})" for n, case in enumerate(CASES, 1)
    ]


def test_a_file_in_python_tells_its_gates(tmp_path):
    puzzle = find_puzzle("p24")
    work = Work(puzzle, puzzle.rung("numpy"), tmp_path)
    work.path.parent.mkdir(parents=True)
    work.path.write_text(work.solution.read_text())
    told = []
    with listening(told.append):
        results = SubprocessChecker(work).check(work.path)
    assert told == [f"{result.gate.id}, gate {n} of 4" for n, result in enumerate(results, 1)]


def shown(console: Console) -> str:
    """What a console has printed, without its colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(console))


def printed(console: Console) -> str:
    """What a console has printed."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_line_is_on_a_terminal_alone_and_goes_away():
    terminal, pipe = (Console(file=io.StringIO(), force_terminal=there, width=80) for there in (True, False))
    for console in (terminal, pipe):
        with live(console, ticking=False):
            tell("fused on the virtual GPU: case 3 of 18 (wide)")
        tell("heard by nobody")
    assert "checking: fused on the virtual GPU: case 3 of 18 (wide) 0:00:0" in shown(terminal)
    assert "heard by nobody" not in shown(terminal) and not shown(pipe).strip()
    assert printed(terminal).endswith("\x1b[2K"), "the last thing that it does is to erase its line"


def test_what_compiles_is_a_line_that_stays_in_a_pipe():
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with live(console) as bars:
        on_compile, on_ready = compile_callbacks(console, bars)
        for kind in ("virtual", "cpu"):
            on_compile(Target(kind, None, ""))
            on_ready(Target(kind, None, ""))
    first, second = shown(console).strip().splitlines()
    assert first.startswith("Compiling the Mojo kernels for the Virtual GPU (seconds") and first.endswith(
        "..."
    )
    assert second.startswith("Compiling the Mojo kernels for the CPU through MAX (half a minute")
