"""Invalid input, damaged files and interrupts print one line and exit with the documented code."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.check.checker import load_checker
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.console import escape_controls
from harness.devices.targets import make_cpu_target
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.learner.progress import Progress
from harness.screens import exercise as screen
from harness.screens import report
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.toolchain.roots import CHECKOUT

P24 = find_puzzle("p24")
NUMPY = Exercise(P24, P24.find_rung("numpy"))


def get_error_line(finished, code):
    """Return the only line of a command's standard error."""
    assert finished.code == code and finished.err.startswith("error: ") and finished.err.count("\n") == 1
    return finished.err


@pytest.mark.parametrize(
    "arguments", [("p24", "--gate", "\x1b[31mx\x07"), ("hint", "p24", "\x1b[2J"), ("p\x1b2",)]
)
def test_control_characters_are_escaped(command_line, arguments):
    line = get_error_line(command_line(*arguments), 2)
    assert "\\x1b" in line and not [sign for sign in line[:-1] if ord(sign) < 32 or ord(sign) == 127]


def test_printable_preserves_other_characters():
    assert escape_controls("a\tb\n✅ é\u00a0x") == "a\tb\n✅ é\u00a0x"
    assert escape_controls("\x00\r\x1b\x7f\x9b") == "\\x00\\r\\x1b\\x7f\\x9b"


def test_learner_output_cannot_control_the_terminal():
    gate = P24.gates[0]
    result = GateResult(gate, "wrong", diagnosis=["ValueError: \x1b[2J\x07"])
    lines = [str(line) for line in report.format_gate(result, P24, NUMPY.path, {})]
    lines += [str(line) for line in report.format_first_results([result])]
    assert sum("ValueError: \\x1b[2J\\x07" in line for line in lines) == 2
    assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_first_case_has_no_check_mark():
    """A race may occur only in a later case with several tiles."""
    [line] = report.format_first_results([GateResult(P24.gates[0], "correct")])
    assert (
        "nothing wrong in the first case" in line.plain
        and "✅" not in line.plain
        and "green" not in str(line.style)
    )


@pytest.mark.parametrize("puzzle", list_puzzle_names())
@pytest.mark.parametrize("gate", ["", "nope"])
@pytest.mark.parametrize("command", ["", "diff", "hint"])
def test_unknown_gate_lists_all_gates(command_line, puzzle, gate, command):
    arguments = (command, puzzle, gate) if command else (puzzle, "--gate", gate)
    line = get_error_line(command_line(*arguments), 2)
    listed = line.rpartition("there is ")[2].strip().split(", ")
    every = {gate for rung in find_puzzle(puzzle).rungs for gate in rung.gates}
    assert f"unknown gate {gate!r}" in line and set(listed) == every and len(listed) == len(every)


@pytest.mark.parametrize("more", [(), ("--gate", "dx"), ("--show", "dx"), ("--profile",)])
def test_package_of_another_puzzle_is_rejected_before_compiling(command_line, more):
    line = get_error_line(command_line("p22", "--ops", "solutions/p20/op", *more), 4)
    assert (
        line
        == "error: solutions/p20/op is not a package of p22: it registers no op 'layernorm_linear_train'\n"
    )


def test_deleted_working_directory_is_reported(tmp_path):
    folder = tmp_path / "deleted"
    folder.mkdir()
    start = f"import os; os.rmdir({str(folder)!r}); os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'harness', 'list'])"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    completed = subprocess.run(
        [sys.executable, "-c", start], cwd=folder, env=environment, capture_output=True, text=True
    )
    words = "error: the working directory does not exist any more: change into another one\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (5, "", words)


def test_ctrl_c_during_import_is_one_line(tmp_path):
    """A stub of `rich`, the command line's first import, sends the signal."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "harness", "list"]
    completed = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "", "interrupted\n")


def test_missing_gate_result_is_a_failure(command_line, monkeypatch):
    class IncompleteChecker:
        def check(self, path, gates=None, cases=None, *, on_first_case=None):
            return [GateResult(P24.gates[0], "correct")]

    monkeypatch.setattr(
        "harness.screens.checking.create_checker", lambda exercise, **options: IncompleteChecker()
    )
    line = get_error_line(command_line("p24", "--rung", "numpy", "--solution"), 1)
    assert line == "error: solutions/p24/in_numpy.py: no result for inverse, dgather, tiles\n"


def test_unsolved_optional_rung_is_not_passed(command_line, monkeypatch, tmp_path):
    from harness.toolchain import roots

    monkeypatch.setattr(roots, "get_problems", lambda: tmp_path)
    blanks.generate_problems(CHECKOUT / "solutions" / "p22", tmp_path / "p22")
    result = command_line("verify", "p22", "--rung", "derive")
    assert result.code == 3 and "gates are left; nothing attempted is wrong" in result.out


def test_cases_are_distinguished_by_size():
    """Call the same checker for two sizes of a case."""
    puzzle = find_puzzle("p22")
    case = puzzle.list_cases(None)[0]
    larger = replace(case, dims=tuple(size + 1 for size in case.dims))
    reference = Reference(puzzle, "float32", 0)
    for sized_case in (case, larger):
        shape = reference.get_inputs(sized_case)["input"].shape
        assert tuple(shape) == sized_case.dims[:3]
        for values in (
            reference.get_truth(sized_case, make_cpu_target()),
            reference.get_baseline(sized_case, make_cpu_target()),
        ):
            assert values["grad_input"].shape == tuple(shape)
    for rung in ("numpy", "derive"):
        exercise = Exercise(puzzle, puzzle.find_rung(rung))
        checker = load_checker(exercise)
        for sized_case in (case, larger):
            assert all(
                result.state == "correct" for result in checker.check(exercise.solution, None, [sized_case])
            )


def test_suggested_command_for_a_damaged_file_works(tmp_path):
    file = tmp_path / "problems" / "p24" / "in_numpy.py"
    file.parent.mkdir(parents=True)
    file.write_text("def index(): pass\n")
    with pytest.raises(DamagedFile, match=r"are gone .*`workbook reset p24` puts the file back"):
        Exercise(P24, P24.find_rung("numpy"), tmp_path / "problems").read_blanks()
    file.write_bytes("ok = 1\nname = 'Gauß'\n".encode("latin-1"))
    words = "line 2, column 12: the byte 0xdf is not UTF-8 text; `workbook reset p24` puts"
    with pytest.raises(DamagedFile, match=words):
        blanks.read_source(file)


def test_solved_file_message(monkeypatch):
    """Test every rung, since titles have different forms ("The printer", "Fix it, in Mojo")."""
    monkeypatch.setattr(
        Exercise, "get_states", lambda self, progress: dict.fromkeys(self.rung.gates, "passed")
    )
    monkeypatch.setattr(screen, "is_solved", lambda exercise, progress: True)
    for exercise in screen.list_all_exercises():
        line = screen.describe_next_step(exercise, Progress.load())
        count = len(exercise.gates)
        assert line.startswith(f"{exercise.puzzle.name}, {exercise.rung.label}: {count} of {count}, solved. ")
        assert ("Nothing is left" in line) != any(demo.finale for demo in exercise.puzzle.demos)
        for typo in ("the The", "  ", " ;", " ,", " .", ".."):
            assert typo not in line, line
