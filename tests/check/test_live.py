"""A check's progress messages and status line, with stubs in place of compiled code."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from typed import make_stub, read_output

from harness.check.execution import GraphDevice, VirtualDevice
from harness.check.reference import Reference
from harness.check.subprocess_checker import SubprocessChecker
from harness.console import receive_progress, report_progress, show_progress
from harness.devices.graphs import Program
from harness.devices.recorder import Recording
from harness.devices.targets import Target
from harness.learner.exercise import Exercise
from harness.screens.checking import make_compile_callbacks
from harness.spec.catalogue import find_puzzle
from harness.spec.puzzle import Case, Puzzle

CASES = [Case(name, "", (1,), "plain") for name in ("chapter", "wide")]
REFERENCE = make_stub(
    Reference, dtype="float32", puzzle=make_stub(Puzzle, rungs=(), count_multiply_adds=lambda dims: 1)
)
PROGRAM = make_stub(Program, cached=True, load_time_s=0.0)


def test_graph_reports_each_case_once(monkeypatch):
    monkeypatch.setattr(
        GraphDevice, "_execute", lambda self, case, reference: {"fused.y": case.name, "unfused.y": "other"}
    )
    device, messages = GraphDevice(PROGRAM, Target("cpu", None, "")), []
    with receive_progress(messages.append):
        outcome = device.run_cases("fused", CASES, REFERENCE)
        device.run_cases("unfused", CASES, REFERENCE)
    assert outcome.outputs == {"chapter": {"y": "chapter"}, "wide": {"y": "wide"}}
    assert messages == ["CPU: case 1 of 2 (chapter)", "CPU: case 2 of 2 (wide)"]


def test_virtual_gpu_reports_its_cases(monkeypatch):
    machine = SimpleNamespace(
        gpu=SimpleNamespace(steps=0, findings=[], launches=[]), run=lambda *arguments: {}
    )
    monkeypatch.setattr("harness.devices.replay.Replay", lambda *arguments, **options: machine)
    monkeypatch.setattr(Puzzle, "list_saved_quantities", lambda self, variant: [])
    monkeypatch.setattr(Reference, "get_inputs", lambda self, case: {})
    monkeypatch.setattr(Reference, "compare_all", lambda *arguments: {})
    device, messages = VirtualDevice(Recording(), Path("op.mojo")), []
    with receive_progress(messages.append):
        device.run_cases("fused", CASES, REFERENCE)
    assert messages == [
        f"fused on the virtual GPU: case {n} of 2 ({case.name})" for n, case in enumerate(CASES, 1)
    ]


def test_python_file_reports_its_gates(tmp_path):
    puzzle = find_puzzle("p24")
    work = Exercise(puzzle, puzzle.find_rung("numpy"), tmp_path)
    work.path.parent.mkdir(parents=True)
    work.path.write_text(work.solution.read_text())
    messages = []
    with receive_progress(messages.append):
        results = SubprocessChecker(work).check(work.path)
    assert messages == [f"{result.gate.id}, gate {n} of 4" for n, result in enumerate(results, 1)]


def strip_escapes(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read_output(console))


def test_status_line_is_shown_on_terminals_and_erased():
    terminal, pipe = (Console(file=io.StringIO(), force_terminal=on, width=80) for on in (True, False))
    for console in (terminal, pipe):
        with show_progress(console, auto_refresh=False):
            report_progress("fused on the virtual GPU: case 3 of 18 (wide)")
        report_progress("without a listener")
    assert "checking: fused on the virtual GPU: case 3 of 18 (wide) 0:00:0" in strip_escapes(terminal)
    assert "without a listener" not in strip_escapes(terminal) and not strip_escapes(pipe).strip()
    assert read_output(terminal).endswith("\x1b[2K"), "the line is erased at the end"


def test_compile_message_is_printed_in_a_pipe():
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with show_progress(console) as bars:
        on_compile, on_ready = make_compile_callbacks(console, bars)
        for kind in ("virtual", "cpu"):
            on_compile(Target(kind, None, ""))
            on_ready(Target(kind, None, ""))
    first, second = strip_escapes(console).strip().splitlines()
    assert re.fullmatch(r"Compiling the Mojo kernels for the Virtual GPU \(seconds.*\.\.\.", first)
    assert second.startswith("Compiling the Mojo kernels for the CPU through MAX (half a minute")
