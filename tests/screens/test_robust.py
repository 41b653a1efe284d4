"""What a terminal, a folder or a slip of the fingers does to a command: one line, and the exit code that is documented."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.check.checker import make_checker
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.console import printable
from harness.devices.targets import cpu
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens import report
from harness.screens import work as screen
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.toolchain.roots import CHECKOUT

P24 = find_puzzle("p24")
NUMPY = Work(P24, P24.rung("numpy"))


def said(finished, code):
    """The one line that a command ends with."""
    assert finished.code == code and finished.err.startswith("error: ") and finished.err.count("\n") == 1
    return finished.err


@pytest.mark.parametrize(
    "arguments", [("p24", "--gate", "\x1b[31mx\x07"), ("hint", "p24", "\x1b[2J"), ("p\x1b2",)]
)
def test_control_characters_are_written_out(command_line, arguments):
    line = said(command_line(*arguments), 2)
    assert "\\x1b" in line and not [sign for sign in line[:-1] if ord(sign) < 32 or ord(sign) == 127]


def test_printable_keeps_what_is_no_control_character():
    assert printable("a\tb\n✅ é\u00a0x") == "a\tb\n✅ é\u00a0x"
    assert printable("\x00\r\x1b\x7f\x9b") == "\\x00\\r\\x1b\\x7f\\x9b"


def test_what_a_learner_s_code_says_does_not_reach_the_terminal_as_a_command():
    gate = P24.gates[0]
    result = GateResult(gate, "wrong", diagnosis=["ValueError: \x1b[2J\x07"])
    lines = [str(line) for line in report.result_lines(result, P24, NUMPY.path, {})]
    lines += [str(line) for line in report.first_lines([result])]
    assert sum("ValueError: \\x1b[2J\\x07" in line for line in lines) == 2
    assert not any("\x1b" in line or "\x07" in line for line in lines)


@pytest.mark.parametrize("puzzle", puzzle_names())
@pytest.mark.parametrize("gate", ["", "nope"])
@pytest.mark.parametrize("command", ["", "diff", "hint"])
def test_an_unknown_gate_is_answered_by_the_gates_of_every_rung(command_line, puzzle, gate, command):
    arguments = (command, puzzle, gate) if command else (puzzle, "--gate", gate)
    line = said(command_line(*arguments), 2)
    there = line.rpartition("there is ")[2].strip().split(", ")
    every = {gate for rung in find_puzzle(puzzle).rungs for gate in rung.gates}
    assert f"unknown gate {gate!r}" in line and set(there) == every and len(there) == len(every)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("p24", "--gate", "inde"), "unknown gate 'inde' (did you mean index?); there is index, "),
        (("hint", "p26", "swp"), "unknown gate 'swp' (did you mean swap?); there is "),
        (("p22", "dx"), "unrecognized arguments: dx; got: p22 dx"),
        (
            ("p22", "--bakward"),
            "unrecognized arguments: --bakward; got: p22 --bakward (did you mean --backward?)",
        ),
        (
            ("p22", "backward"),
            "unrecognized arguments: backward; got: p22 backward (did you mean --backward?)",
        ),
        (("p22", "--show", "dxx"), "--show dxx: unknown gate 'dxx' (did you mean dx?)"),
        (
            ("verify", "p24", "--rung", "nope"),
            "--rung nope: no such rung of p24; there is numpy, torch, mojo",
        ),
        (("verify", "--rung", "nope"), "--rung nope: no such rung of any puzzle; there is "),
    ],
)
def test_what_was_meant(command_line, arguments, words):
    assert words in said(command_line(*arguments), 2)


@pytest.mark.parametrize("more", [(), ("--gate", "dx"), ("--show", "dx"), ("--profile",)])
def test_the_package_of_another_puzzle_is_named_before_anything_is_compiled(command_line, more):
    line = said(command_line("p22", "--ops", "solutions/p20/op", *more), 4)
    assert (
        line
        == "error: solutions/p20/op is not a package of p22: it registers no op 'layernorm_linear_train'\n"
    )


def test_a_working_directory_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    start = f"import os; os.rmdir({str(gone)!r}); os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'harness', 'list'])"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=gone, env=environment, capture_output=True, text=True
    )
    words = "error: the working directory does not exist any more: change into another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (5, "", words)


def test_ctrl_c_while_it_imports_is_one_line(tmp_path):
    """A module that the command line imports first stands in for the moment of the signal."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "harness", "list"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_checker_without_a_word_on_a_gate_is_no_success(command_line, monkeypatch):
    class Silent:
        def check(self, path, gates=None, cases=None, *, on_first=None):
            return [GateResult(P24.gates[0], "correct")]

    monkeypatch.setattr("harness.screens.checking.create_checker", lambda work, **options: Silent())
    line = said(command_line("p24", "--rung", "numpy", "--solution"), 1)
    assert line == "error: solutions/p24/in_numpy.py: no result for inverse, dgather, tiles\n"


def test_an_optional_rung_alone_is_not_passed_by_leaving_it(command_line, monkeypatch, tmp_path):
    from harness.toolchain import roots

    monkeypatch.setattr(roots, "problems", lambda: tmp_path)
    blanks.generate(CHECKOUT / "solutions" / "p22", tmp_path / "p22")
    finished = command_line("verify", "p22", "--rung", "derive")
    assert finished.code == 3 and "gates are left; nothing attempted is wrong" in finished.out


def test_cases_of_one_name_and_other_sizes_are_other_cases():
    """One checker, asked twice, as a program does that tries sizes in turn."""
    puzzle = find_puzzle("p22")
    case = puzzle.cases(None)[0]
    larger = replace(case, dims=tuple(size + 1 for size in case.dims))
    reference = Reference(puzzle, "float32", 0)
    for each in (case, larger):
        shape = reference.inputs(each)["input"].shape
        assert tuple(shape) == each.dims[:3]
        for values in (reference.truth(each, cpu()), reference.baseline(each, cpu())):
            assert values["grad_input"].shape == tuple(shape)
    for rung in ("numpy", "derive"):
        work = Work(puzzle, puzzle.rung(rung))
        checker = make_checker(work)
        for each in (case, larger):
            assert all(result.state == "correct" for result in checker.check(work.solution, None, [each]))


def test_what_a_damaged_file_recommends_can_be_typed(tmp_path):
    file = tmp_path / "problems" / "p24" / "in_numpy.py"
    file.parent.mkdir(parents=True)
    file.write_text("def index(): pass\n")
    with pytest.raises(DamagedFile, match=r"are gone .*`workbook reset p24` puts the file back"):
        Work(P24, P24.rung("numpy"), tmp_path / "problems").blanks()
    file.write_bytes("ok = 1\nname = 'Gauß'\n".encode("latin-1"))
    words = "line 2, column 12: the byte 0xdf is not UTF-8 text; `workbook reset p24` puts"
    with pytest.raises(DamagedFile, match=words):
        blanks.read(file)


def test_what_is_said_of_a_solved_file_reads_well(monkeypatch):
    """Of every rung: titles are sentences of their own, "The printer", "Fix it, in Mojo"."""
    monkeypatch.setattr(Work, "states", lambda self, progress: dict.fromkeys(self.rung.gates, "passed"))
    monkeypatch.setattr(screen, "is_solved", lambda work, progress: True)
    for work in screen.steps():
        line = screen.next_step(work, Progress.load())
        count = len(work.gates)
        assert line.startswith(f"{work.puzzle.name}, {work.rung.words}: {count} of {count}, solved. ")
        for slip in ("the The", "  ", " ;", " ,", " .", ".."):
            assert slip not in line, line
