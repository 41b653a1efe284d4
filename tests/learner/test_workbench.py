"""A learner's commands on a copy of the checkout: hints, progress, the NumPy rung, verify and list."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkouts import ROOT, damage
from typed import unwrap

from harness.check.numpy_rung import NumpyChecker
from harness.check.python_files import load_module
from harness.learner import blanks, hints, progress
from harness.learner.exercise import Exercise
from harness.puzzles.p22.spec import PUZZLE
from harness.screens.exercise import describe_unsaved, format_hint
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import NumpyRung
from harness.toolchain import roots

SOLUTION = ROOT / "solutions" / "p22"


def make_numpy_checker() -> NumpyChecker:
    """Return the checker of puzzle 22's NumPy functions."""
    rung = PUZZLE.find_rung("numpy")
    assert isinstance(rung, NumpyRung)
    return NumpyChecker(PUZZLE, rung)


# ---- Hints --------------------------------------------------------------------------------------------------


def test_only_later_hints_have_code():
    for name, ladder in hints.load_ladders("p22").items():
        assert [hint.id for hint in ladder] == [f"{name}-{n}" for n in range(1, len(ladder) + 1)]
        assert bool(ladder[-1].code) == (name != "transfer") and not ladder[0].code


@pytest.mark.parametrize("puzzle", list_puzzle_names())
def test_hint_lines_fit_80_columns(puzzle):
    for ladder in hints.load_ladders(puzzle).values():
        for number, hint in enumerate(ladder, start=1):
            rows = [line.plain for line in format_hint(hint, number, len(ladder), width=80)]
            assert max(map(len, rows)) <= 80, (hint.id, max(rows, key=len))


def test_hint_code_uses_kernel_names():
    source = "\n".join(path.read_text() for path in (SOLUTION / "op").glob("*.mojo"))
    known = set(re.findall(r"\w+", source))
    for name, ladder in hints.load_ladders("p22").items():
        if name in PUZZLE.main_rung.gates:
            for hint in ladder:
                code = re.sub(r"#.*", "", hint.code)
                assert set(re.findall(r"[A-Za-z_]\w*", code)) <= known, hint.id


def test_hint_advances_each_time(checkout):
    heads = [checkout.run("hint", "p22", "dx", "--rung", "mojo").out.splitlines() for _ in range(4)]
    assert [lines[0] for lines in heads] == [
        "Hint dx-1 (1 of 3)", "Hint dx-2 (2 of 3)", "Hint dx-3 (3 of 3)", "Hint dx-3 (3 of 3)",
    ]  # fmt: skip
    assert "--spoil" in heads[3][-1] and "--spoil" not in heads[2][-1]
    assert json.loads((checkout.path / progress.FILE_NAME).read_text())["hints"] == {"p22 dx": 3}


def test_numpy_hints_are_selected_by_rung(checkout):
    assert checkout.run("hint", "p22", "dx-2").out.startswith("Hint dx-2 (2 of 3)")
    assert checkout.run("hint", "p22", "dx", "--rung", "mojo").out.startswith("Hint dx-3 (3 of 3)")
    assert checkout.run("hint", "p22", "numpy-db-3").out.startswith("Hint numpy-db-3 (3 of 3)")
    assert checkout.run("hint", "p22", "--rung", "numpy").out.startswith("Hint numpy-db-3 (3 of 3)")
    # The first blank of the first rung that is not solved.
    assert checkout.run("hint", "p22").out.startswith("Hint dmean-1 (1 of 3)")


def test_shared_blank_name_refers_to_the_current_rung(checkout):
    assert checkout.run("hint", "p22", "dx").out.startswith("Hint numpy-dx-1"), "the first unsolved one"
    checkout.fill(checkout.kernels, "db")
    os.utime(checkout.kernels, (2e9, 2e9))
    assert checkout.run("hint", "p22", "dx").out.startswith("Hint dx-1")
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("(0, 1)", "0"))
    os.utime(checkout.numpy, (3e9, 3e9))
    assert checkout.run("hint", "p22", "dx").out.startswith("Hint numpy-dx-2")
    assert checkout.run("hint", "p22", "dx-2").out.startswith("Hint dx-2"), "the hint of one rung"
    assert checkout.run("hint", "p22", "ln").out.startswith("Hint ln-1"), "only one file has it"


def test_hint_without_a_name_is_for_the_last_edited_blank(checkout):
    checkout.fill(checkout.numpy, "dgamma", change=lambda line: line.replace("return", "return 2 *"))
    assert checkout.run("hint", "p22").out.startswith("Hint numpy-dgamma-1")
    assert checkout.run("hint", "p22", "--rung", "mojo").out.startswith("Hint ln-1")
    checkout.fill(checkout.kernels, "db")
    os.utime(checkout.kernels, (2e9, 2e9))
    assert checkout.run("hint", "p22").out.startswith("Hint db-1")
    checkout.numpy.write_text("# BLANK-END db\n")  # damaged, so no blank is known
    assert checkout.run("hint", "p22").out.startswith("Hint db-2")


def test_unknown_mistake_offers_the_next_hint(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("(0, 1)", "0"))
    output = checkout.run("p22", "--rung", "numpy", "--gate", "db").out
    assert "has shape [4, 16], expected [16]" in output
    arguments = output.splitlines()[-1].strip().removeprefix("next: workbook ").split()
    heads = [checkout.run(*arguments).out.splitlines()[0] for _ in range(2)]
    assert heads == ["Hint numpy-db-1 (1 of 3)", "Hint numpy-db-2 (2 of 3)"]


def test_damaged_hints_are_reported(tmp_path):
    (tmp_path / "p22").mkdir()
    (tmp_path / "p22" / "hints.toml").write_text("[[dx]]\nwords = 1\n")
    with pytest.raises(hints.UsageError, match=r"hints.toml is damaged: 'text'"):
        hints.load_ladders("p22", tmp_path)
    with pytest.raises(hints.UsageError, match="no hints for p23"):
        hints.load_ladders("p23", tmp_path)


# ---- Progress -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"passed": 1, "hints": {}}', '{"passed": {}, "hints": {"a": "b"}}']
)
def test_damaged_progress_file_is_ignored(tmp_path, text):
    (tmp_path / progress.FILE_NAME).write_text(text)
    assert progress.Progress.load(tmp_path).passed == {}


def test_unsaved_progress_does_not_stop_a_run(tmp_path):
    tracker = progress.Progress.load(tmp_path / "nowhere")
    tracker.record_hint("p22 dx", 1)
    assert tracker.hints == {"p22 dx": 1}
    (line,) = describe_unsaved(tracker)
    assert "not saved" in line.plain and "nowhere" in line.plain and "No such file" in line.plain
    (tmp_path / "nowhere").mkdir()
    tracker.record_hint("p22 dW", 2)
    assert progress.Progress.load(tmp_path / "nowhere").hints == {"p22 dx": 1, "p22 dW": 2}
    assert describe_unsaved(tracker) == []


def test_progress_of_two_terminals_is_merged(tmp_path):
    """A watch preserves progress saved by other commands."""
    blank = blanks.Blank("dx", "task", "", ("x = 1",), 3)
    watching, other = progress.Progress.load(tmp_path), progress.Progress.load(tmp_path)
    other.record_result("p20 drelu", blank, True)
    other.record_hint("p27 layernorm", 2)
    watching.record_result("p22 dx", blank, True)
    watching.record_hint("p27 layernorm", 1)
    saved = progress.Progress.load(tmp_path)
    assert {*saved.passed} == {"p20 drelu", "p22 dx"} and saved.hints == {"p27 layernorm": 2}
    other.record_result("p20 drelu", blank, False)
    watching.record_result("p22 dW", blank, True)
    assert {*progress.Progress.load(tmp_path).passed} == {"p22 dx", "p22 dW"}


def test_concurrent_progress_is_not_lost(tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.learner.progress import Progress\n"
        "progress = Progress.load(Path(sys.argv[1]))\n"
        "for n in range(20): progress.record_hint(f'{sys.argv[2]} {n}', 1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen([*command, str(n)], cwd=ROOT) for n in range(4)]
    assert [rung.wait() for rung in running] == [0] * 4
    assert len(progress.Progress.load(tmp_path).hints) == 80


def test_edited_passed_blank_counts_as_changed(tmp_path):
    passed = blanks.Blank("dx", "task", "", ("x = 1",), 3)
    tracker = progress.Progress.load(tmp_path)
    assert tracker.get_state("p22 dx", passed) == "begun"
    tracker.record_result("p22 dx", passed, True)
    reloaded = progress.Progress.load(tmp_path)
    assert reloaded.get_state("p22 dx", passed) == "passed"
    assert reloaded.get_state("p22 dx", blanks.Blank("dx", "task", "", ("x = 1  ",), 9)) == "passed"
    assert reloaded.get_state("p22 dx", blanks.Blank("dx", "task", "", ("x = 2",), 3)) == "changed"
    assert reloaded.get_state("p22 dx", blanks.Blank("dx", "task", "", ("# x",), 3)) == "unsolved"
    reloaded.record_result("p22 dx", passed, False)
    assert progress.Progress.load(tmp_path).get_state("p22 dx", passed) == "begun"


# ---- The NumPy rung -----------------------------------------------------------------------------------------


def test_numpy_rung_is_about_ten_lines():
    by_id = blanks.find_blanks((SOLUTION / "backward.py").read_text())
    assert sum(blank.size for blank in by_id.values()) <= 12


def test_numpy_rung_is_unsolved_then_wrong_then_correct(checkout):
    untouched = checkout.run("p22", "--rung", "numpy")
    assert untouched.code == 3 and untouched.out.count("⏳") == 5
    checkout.fill(checkout.numpy, "dx", change=lambda line: line.replace(" - c2", ""))
    wrong = checkout.run("p22", "--rung", "numpy")
    assert wrong.code == 1 and wrong.out.count("⏳") == 4
    assert re.search(r"❌ dx +wrong in (all )?\d+ (of \d+ )?cases", wrong.out)
    assert re.search(r"grad_input\[0, 0, 0\] got \S+, expected ", wrong.out)
    assert "without the mean term" in wrong.out and "hint p22 numpy-dx-2" in wrong.out
    checkout.fill(checkout.numpy, "db", "dW", "dgamma", "row_sums", "dx")
    correct = checkout.run("p22", "--rung", "numpy")
    assert correct.code == 0 and correct.out.count("✅") == 5
    assert "] 5/5  NumPy rung" in checkout.run("list", "p22").out


@pytest.mark.parametrize(
    ("blank", "body", "message"),
    [
        ("db", "return dy.sum(0)", "grad_linear_bias has shape [4, 16], expected [16]"),
        ("db", "total = dy.sum((0, 1))", "db() returns nothing: a `return` is missing"),
        ("db", "return dz.sum((0, 1))", "NameError: name 'dz' is not defined"),
        ("db", "return dy.sum((0, 5))", "AxisError"),
        ("dgamma", "return dln.sum((0, 1))", "dgamma() should return 2 arrays"),
        ("row_sums", "return dln", "row_sums() should return 2 arrays"),
        ("row_sums", "return dln.mean(-1), dln.mean(-1)", "c1 has shape [4, 4], expected [B, S, 1] (keepdims=True)"),
        ("dx", "return dln * np.nan", "are NaN"),
    ],
)  # fmt: skip
def test_numpy_function_errors_are_reported(tmp_path, blank, body, message):
    text = blanks.make_skeleton((SOLUTION / "backward.py").read_text())
    path = tmp_path / "backward.py"
    path.write_text(blanks.join_segments(blanks.split_blanks(text), {blank: (f"    {body}",)}))
    (result,) = make_numpy_checker().check(path, [blank])
    assert result.state == "wrong" and unwrap(result.hint).startswith(f"numpy-{blank}-")
    assert any(message in line for line in result.diagnosis), result.diagnosis


def test_numpy_function_must_not_write_to_arguments(tmp_path):
    path = tmp_path / "backward.py"
    text = (SOLUTION / "backward.py").read_text()
    path.write_text(
        text.replace("    return dy.sum((0, 1))", "    total = dy.sum((0, 1))\n    dy *= 0\n    return total")
    )
    checker = make_numpy_checker()
    results = checker.check(path) + checker.check(path)
    assert [result.state for result in results] == ["wrong", *["correct"] * 4] * 2
    assert (
        "an argument is overwritten" in results[0].diagnosis[0] and "backward.py:" in results[0].diagnosis[0]
    )


def test_numpy_backward_pass_returns_all_gradients():
    arrays = PUZZLE.make_inputs(PUZZLE.list_cases(None)[0], "float64", 5)
    exact = PUZZLE.compute_exact(arrays)
    x, gamma, beta, W = (arrays[name] for name in ("input", "ln_weight", "ln_bias", "linear_weight"))
    mean, rstd = (exact[name].reshape(*x.shape[:2], 1) for name in ("mean", "rstd"))
    module = load_module(SOLUTION / "backward.py")
    gradients = module["backward"](arrays["grad_output"], x, mean, rstd, gamma, beta, W)
    names = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
    for gradient, name in zip(gradients, names, strict=True):
        assert np.allclose(gradient.astype(float), exact[name].astype(float), rtol=1e-12, atol=1e-12), name


# ---- verify -------------------------------------------------------------------------------------------------


def test_verify_of_an_unsolved_file_prints_one_line(checkout):
    result = checkout.run("verify", "p22")
    assert result.code == 3
    files = ["derive.py", "backward.py", "op/layernorm_linear.mojo"]
    descriptions = ["it is optional", "it is optional", f"{len(PUZZLE.kernel_gates)} to solve"]
    *lines, last = result.out.splitlines()
    assert [line.partition("problems/p22/")[2] for line in lines] == [
        f"{file}: untouched ({description})" for file, description in zip(files, descriptions, strict=True)
    ]
    assert "gates are left; nothing attempted is wrong" in last


@pytest.mark.compiles
def test_verify_locates_unsolved_blanks(checkout):
    checkout.fill(checkout.kernels, "db")
    result = checkout.run("verify", "p22")
    assert result.code == 3 and "✅ db" in result.out
    assert result.out.count("⏳ ") == len(PUZZLE.kernel_gates) - 1 + 1
    line = blanks.find_blanks(checkout.kernels.read_text())["dx"].line
    assert f"problems/p22/op/layernorm_linear.mojo:{line}\n" in result.out


def test_verify_counts_wrong_numpy_gates(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("sum", "mean"))
    result = checkout.run("verify", "p22")
    assert result.code == 1 and "❌ db" in result.out and "❌ something is wrong" in result.out


@pytest.mark.compiles
def test_verify_explains_the_first_compile_error(checkout):
    checkout.fill(checkout.kernels, "db", change=lambda line: line.replace("dy[", "dz["))
    result = checkout.run("verify", "p22")
    assert result.code == 4
    assert "problems/p22/op/layernorm_linear.mojo:" in result.out and str(checkout.path) not in result.out
    assert "-> Nothing called `dz`" in result.out and "❌ the kernels do not compile" in result.out
    verbose = checkout.run("verify", "p22", "--verbose")
    assert verbose.out.count("use of unknown declaration 'dz'") > 1


def test_verify_continues_after_a_damaged_file(checkout):
    damage(checkout.numpy, "one marker deleted")
    result = checkout.run("verify", "p22")
    assert result.code == 2
    assert "blank dx has no BLANK-END" in result.out and "layernorm_linear.mojo: untouched" in result.out


# ---- From one rung to the next ------------------------------------------------------------------------------


def test_solved_rung_suggests_the_next_one(checkout):
    def get_first_line() -> str:
        return checkout.run("list", "p22").out.splitlines()[0]

    assert get_first_line() == f"next: p22, {find_puzzle('p22').rungs[0].label}, dmean: workbook watch p22"
    checkout.fill(checkout.numpy, "db")
    assert "What now" not in checkout.run("p22", "--rung", "numpy").out
    assert get_first_line() == "next: p22, NumPy rung, dW: workbook watch p22", "the rung in progress"
    checkout.fill(checkout.numpy, "db", "dW", "dgamma", "row_sums", "dx")
    output = checkout.run("p22", "--rung", "numpy").out.splitlines()[-1]
    assert output.startswith("   p22, NumPy rung: 5 of 5, solved. What now: p22, ")
    assert output.endswith("`workbook watch p22`") and "problems/p22/op/layernorm_linear.mojo" in output
    assert get_first_line() == "next: p22, Mojo kernels, ln: workbook watch p22", (
        "the rung after the solved one"
    )
    assert "What now" not in checkout.run("p22", "--rung", "numpy", "--gate", "db").out, "printed once"


def test_list_expands_only_the_current_puzzle(checkout):
    checkout.fill(checkout.numpy, "db")
    assert checkout.run("p22", "--rung", "numpy", "--gate", "db").code == 0
    first, *lines, last = checkout.run("list").out.splitlines()
    assert first == "next: p22, NumPy rung, dW: workbook watch p22"
    assert "      ✅ db        passed                   the gradient of the linear bias" in lines
    assert not [line for line in lines if " dmean " in line], "another file of the puzzle has only its bar"
    assert [line for line in lines if "Mojo kernels: problems/p22/op/layernorm_linear.mojo" in line]
    others = [puzzle for puzzle in map(find_puzzle, list_puzzle_names()) if puzzle.name != "p22"]
    for puzzle in others:
        assert [line for line in lines if line.startswith(puzzle.name) and puzzle.title in line]
        assert not [line for line in lines if line.startswith(f"{puzzle.name}  {puzzle.title}")]
    assert (
        last
        == f"gates of another puzzle: `workbook list {list_puzzle_names()[-1]}`; of all: `workbook list --all`"
    )
    all_lines = checkout.run("list", "--all").out
    assert all(f"\n{puzzle.name}  {puzzle.title}\n" in all_lines for puzzle in others)


def test_after_puzzle_27_training_is_suggested(monkeypatch, tmp_path):
    from harness.screens.exercise import describe_next_step

    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    (tmp_path / "solutions").symlink_to(ROOT / "solutions")
    saved, puzzle = progress.Progress.load(), find_puzzle("p27")
    for rung in puzzle.rungs:
        exercise = Exercise(puzzle, rung)
        exercise.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(exercise.solution, exercise.path)
        for gate in exercise.gates:
            assert "--train" not in describe_next_step(exercise, saved)
            saved.record_result(exercise.get_progress_key(gate.id), exercise.read_blanks()[gate.id], True)
    assert describe_next_step(exercise, saved).endswith("(--train --help: its flags): `workbook p27 --train`")


def test_only_the_puzzles_cases_count_as_passed(checkout):
    checkout.fill(checkout.numpy, "db")
    result = checkout.run("p22", "--rung", "numpy", "--gate", "db", "--dims", "2", "3", "5", "7")
    assert result.code == 0 and "not saved as passed: only these sizes were checked" in result.out
    assert "begun, not passed yet" in checkout.run("list", "p22").out
    assert checkout.run("p22", "--rung", "numpy", "--gate", "db").code == 0
    assert "begun, not passed yet" not in checkout.run("list", "p22").out


def test_verbose_lists_all_cases_of_a_gate(checkout, puzzle):
    from harness.check.compare import TensorResult
    from harness.check.results import Comparison, GateResult
    from harness.screens.report import format_cases
    from harness.vgpu import Finding

    bad = TensorResult(False, 2e-3, 1e-7, 1e-6, 2e-3)
    result = GateResult(puzzle.gates[0], "wrong", [Comparison(puzzle.list_cases(None)[0], {"output": bad})])
    result.findings.append(Finding("shared race", "two meet", "a.mojo:1:1"))
    lines = [line.plain.strip() for line in format_cases(result)]
    assert lines == [
        "❌ chapter: output: error 2.0e-03, the limit 1.0e-06", "error: shared race at a.mojo:1:1", "two meet",
    ]  # fmt: skip
