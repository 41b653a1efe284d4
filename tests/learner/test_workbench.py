"""The learner's commands on a copy of the checkout: hints, progress, the NumPy rung, verify, the list, from rung to rung."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkouts import ROOT, damage
from typed import present

from harness.check.numpy_rung import NumpyChecker
from harness.learner import blanks, hints, progress
from harness.learner.work import Work
from harness.puzzles.p22.spec import PUZZLE
from harness.screens.work import hint_lines, unsaved_lines
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import NumpyRung
from harness.toolchain import roots

SOLUTION = ROOT / "solutions" / "p22"


def numpy_checker() -> NumpyChecker:
    """What judges puzzle 22's functions in NumPy."""
    rung = PUZZLE.rung("numpy")
    assert isinstance(rung, NumpyRung)
    return NumpyChecker(PUZZLE, rung)


# ---- Hints --------------------------------------------------------------------------------------------------


def test_every_blank_has_a_ladder_of_at_least_three_rungs():
    ladders = hints.ladders("p22")
    kernels = blanks.find((SOLUTION / "op" / PUZZLE.source).read_text())
    numpy = blanks.find((SOLUTION / "backward.py").read_text())
    derive = blanks.find((SOLUTION / "derive.py").read_text())
    assert set(ladders) == {*kernels, *derive, *(f"numpy-{id}" for id in numpy)}
    for name, ladder in ladders.items():
        assert len(ladder) >= 3
        assert [hint.id for hint in ladder] == [f"{name}-{n}" for n in range(1, len(ladder) + 1)]
        assert bool(ladder[-1].code) == (name != "transfer") and not ladder[0].code


@pytest.mark.parametrize("puzzle", puzzle_names())
def test_every_line_of_a_hint_fits_a_terminal_of_80_columns(puzzle):
    for ladder in hints.ladders(puzzle).values():
        for number, hint in enumerate(ladder, start=1):
            rows = [line.plain for line in hint_lines(hint, number, len(ladder), width=80)]
            assert max(map(len, rows)) <= 80, (hint.id, max(rows, key=len))


def test_code_in_hints_uses_names_of_the_kernels():
    source = "\n".join(path.read_text() for path in (SOLUTION / "op").glob("*.mojo"))
    known = set(re.findall(r"\w+", source))
    for name, ladder in hints.ladders("p22").items():
        if name in PUZZLE.main_rung.gates:
            for hint in ladder:
                code = re.sub(r"#.*", "", hint.code)
                assert set(re.findall(r"[A-Za-z_]\w*", code)) <= known, hint.id


def test_every_mistake_points_to_a_rung_that_exists():
    shortest = min(len(ladder) for ladder in hints.ladders("p22").values())
    assert {mistake.hint for mistake in PUZZLE.mistakes} <= set(range(1, shortest + 1))


def test_hint_shows_the_next_rung_each_time(checkout):
    heads = [checkout.run("hint", "p22", "dx", "--rung", "mojo").stdout.splitlines() for _ in range(4)]
    assert [lines[0] for lines in heads] == [
        "Hint dx-1 (1 of 3)", "Hint dx-2 (2 of 3)", "Hint dx-3 (3 of 3)", "Hint dx-3 (3 of 3)",
    ]  # fmt: skip
    assert "--spoil" in heads[3][-1] and "--spoil" not in heads[2][-1]
    assert json.loads((checkout.path / progress.FILE).read_text())["hints"] == {"p22 dx": 3}


def test_a_rung_by_its_name_and_the_numpy_ladder(checkout):
    assert checkout.run("hint", "p22", "dx-2").stdout.startswith("Hint dx-2 (2 of 3)")
    assert checkout.run("hint", "p22", "dx", "--rung", "mojo").stdout.startswith("Hint dx-3 (3 of 3)")
    assert checkout.run("hint", "p22", "numpy-db-3").stdout.startswith("Hint numpy-db-3 (3 of 3)")
    assert checkout.run("hint", "p22", "--rung", "numpy").stdout.startswith("Hint numpy-db-3 (3 of 3)")
    # The first blank of the first rung that is not solved.
    assert checkout.run("hint", "p22").stdout.startswith("Hint dmean-1 (1 of 3)")


def test_a_name_that_several_files_share_means_the_one_that_somebody_is_at(checkout):
    assert checkout.run("hint", "p22", "dx").stdout.startswith("Hint numpy-dx-1"), "the first unsolved one"
    checkout.fill(checkout.kernels, "db")
    os.utime(checkout.kernels, (2e9, 2e9))
    assert checkout.run("hint", "p22", "dx").stdout.startswith("Hint dx-1")
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("(0, 1)", "0"))
    os.utime(checkout.numpy, (3e9, 3e9))
    assert checkout.run("hint", "p22", "dx").stdout.startswith("Hint numpy-dx-2")
    assert checkout.run("hint", "p22", "dx-2").stdout.startswith("Hint dx-2"), "a rung has a name of its own"
    assert checkout.run("hint", "p22", "ln").stdout.startswith("Hint ln-1"), "one file alone has it"


def test_a_hint_without_a_name_is_for_the_blank_that_was_begun_last(checkout):
    checkout.fill(checkout.numpy, "dgamma", change=lambda line: line.replace("return", "return 2 *"))
    assert checkout.run("hint", "p22").stdout.startswith("Hint numpy-dgamma-1")
    assert checkout.run("hint", "p22", "--rung", "mojo").stdout.startswith("Hint ln-1")
    checkout.fill(checkout.kernels, "db")
    os.utime(checkout.kernels, (2e9, 2e9))
    assert checkout.run("hint", "p22").stdout.startswith("Hint db-1")
    checkout.numpy.write_text("# BLANK-END db\n")  # damaged: no blank can be told
    assert checkout.run("hint", "p22").stdout.startswith("Hint db-2")


def test_after_an_error_without_a_name_the_next_rung_is_offered_not_the_first_again(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("(0, 1)", "0"))
    said = checkout.run("p22", "--rung", "numpy", "--gate", "db").stdout
    assert "has shape [4, 16], expected [16]" in said
    asked = said.splitlines()[-1].strip().removeprefix("next: workbook ").split()
    heads = [checkout.run(*asked).stdout.splitlines()[0] for _ in range(2)]
    assert heads == ["Hint numpy-db-1 (1 of 3)", "Hint numpy-db-2 (2 of 3)"]


def test_damaged_hints_are_named(tmp_path):
    (tmp_path / "p22").mkdir()
    (tmp_path / "p22" / "hints.toml").write_text("[[dx]]\nwords = 1\n")
    with pytest.raises(hints.BadUse, match=r"hints.toml is damaged: 'text'"):
        hints.ladders("p22", tmp_path)
    with pytest.raises(hints.BadUse, match="no hints for p23"):
        hints.ladders("p23", tmp_path)


# ---- Progress -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"passed": 1, "hints": {}}', '{"passed": {}, "hints": {"a": "b"}}']
)
def test_a_damaged_progress_file_is_a_fresh_start(tmp_path, text):
    (tmp_path / progress.FILE).write_text(text)
    assert progress.Progress.load(tmp_path).passed == {}


def test_progress_that_cannot_be_saved_stops_nothing(tmp_path):
    tracker = progress.Progress.load(tmp_path / "nowhere")
    tracker.read_hint("p22 dx", 1)
    assert tracker.hints == {"p22 dx": 1}
    (line,) = unsaved_lines(tracker)
    assert "not noted" in line.plain and "nowhere" in line.plain and "No such file" in line.plain
    (tmp_path / "nowhere").mkdir()
    tracker.read_hint("p22 dW", 2)
    assert progress.Progress.load(tmp_path / "nowhere").hints == {"p22 dx": 1, "p22 dW": 2}
    assert unsaved_lines(tracker) == []


def test_progress_of_two_terminals_is_put_together(tmp_path):
    """A watch holds its progress for hours; what other commands note meanwhile stays."""
    blank = blanks.Blank("dx", "task", "", ("x = 1",), 3)
    watching, other = progress.Progress.load(tmp_path), progress.Progress.load(tmp_path)
    other.note("p20 drelu", blank, True)
    other.read_hint("p27 layernorm", 2)
    watching.note("p22 dx", blank, True)
    watching.read_hint("p27 layernorm", 1)
    kept = progress.Progress.load(tmp_path)
    assert {*kept.passed} == {"p20 drelu", "p22 dx"} and kept.hints == {"p27 layernorm": 2}
    other.note("p20 drelu", blank, False)
    watching.note("p22 dW", blank, True)
    assert {*progress.Progress.load(tmp_path).passed} == {"p22 dx", "p22 dW"}


def test_many_processes_note_at_once_and_lose_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from harness.learner.progress import Progress\n"
        "progress = Progress.load(Path(sys.argv[1]))\n"
        "for n in range(20): progress.read_hint(f'{sys.argv[2]} {n}', 1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen([*command, str(n)], cwd=ROOT) for n in range(4)]
    assert [each.wait() for each in running] == [0] * 4
    assert len(progress.Progress.load(tmp_path).hints) == 80


def test_a_passed_blank_that_is_edited_counts_as_changed(tmp_path):
    passed = blanks.Blank("dx", "task", "", ("x = 1",), 3)
    tracker = progress.Progress.load(tmp_path)
    assert tracker.state("p22 dx", passed) == "begun"
    tracker.note("p22 dx", passed, True)
    again = progress.Progress.load(tmp_path)
    assert again.state("p22 dx", passed) == "passed"
    assert again.state("p22 dx", blanks.Blank("dx", "task", "", ("x = 1  ",), 9)) == "passed"
    assert again.state("p22 dx", blanks.Blank("dx", "task", "", ("x = 2",), 3)) == "changed"
    assert again.state("p22 dx", blanks.Blank("dx", "task", "", ("# x",), 3)) == "unsolved"
    again.note("p22 dx", passed, False)
    assert progress.Progress.load(tmp_path).state("p22 dx", passed) == "begun"


# ---- The NumPy rung -----------------------------------------------------------------------------------------


def test_the_numpy_rung_is_about_ten_lines():
    by_id = blanks.find((SOLUTION / "backward.py").read_text())
    assert sum(blank.size for blank in by_id.values()) <= 12


def test_numpy_unsolved_then_wrong_then_right(checkout):
    untouched = checkout.run("p22", "--rung", "numpy")
    assert untouched.returncode == 3 and untouched.stdout.count("⏳") == 5
    checkout.fill(checkout.numpy, "dx", change=lambda line: line.replace(" - c2", ""))
    wrong = checkout.run("p22", "--rung", "numpy")
    assert wrong.returncode == 1 and wrong.stdout.count("⏳") == 4
    assert re.search(r"❌ dx +wrong in (all )?\d+ (of \d+ )?cases", wrong.stdout)
    assert re.search(r"grad_input\[0, 0, 0\] got \S+, expected ", wrong.stdout)
    assert "without the mean term" in wrong.stdout and "hint p22 numpy-dx-2" in wrong.stdout
    checkout.fill(checkout.numpy, "db", "dW", "dgamma", "row_sums", "dx")
    right = checkout.run("p22", "--rung", "numpy")
    assert right.returncode == 0 and right.stdout.count("✅") == 5
    assert "] 5/5  NumPy rung" in checkout.run("list", "p22").stdout


@pytest.mark.parametrize(
    ("blank", "body", "words"),
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
def test_what_a_numpy_function_may_do_wrong(tmp_path, blank, body, words):
    text = blanks.skeleton((SOLUTION / "backward.py").read_text())
    path = tmp_path / "backward.py"
    path.write_text(blanks.join(blanks.split(text), {blank: (f"    {body}",)}))
    (result,) = numpy_checker().check(path, [blank])
    assert result.state == "wrong" and present(result.hint).startswith(f"numpy-{blank}-")
    assert any(words in line for line in result.diagnosis), result.diagnosis


def test_a_numpy_function_that_writes_to_an_argument_is_wrong_and_spoils_no_other(tmp_path):
    path = tmp_path / "backward.py"
    text = (SOLUTION / "backward.py").read_text()
    path.write_text(
        text.replace("    return dy.sum((0, 1))", "    total = dy.sum((0, 1))\n    dy *= 0\n    return total")
    )
    checker = numpy_checker()
    results = checker.check(path) + checker.check(path)
    assert [result.state for result in results] == ["wrong", *["correct"] * 4] * 2
    assert (
        "an argument is overwritten" in results[0].diagnosis[0] and "backward.py:" in results[0].diagnosis[0]
    )


def test_the_whole_numpy_backward_pass_agrees_with_finite_differences():
    from harness.check.python_files import load

    module = load(SOLUTION / "backward.py")
    random = np.random.default_rng(5)
    B, S, H, O = 2, 3, 5, 4
    x, gamma, beta, W = (random.standard_normal(shape) for shape in ((B, S, H), (H,), (H,), (O, H)))
    dy = random.standard_normal((B, S, O))

    def loss(x, gamma, beta, W, b):
        mean = x.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return (dy * (((x - mean) * rstd * gamma + beta) @ W.T + b)).sum()

    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    gradients = module["backward"](dy, x, mean, rstd, gamma, beta, W)
    values = [x, gamma, beta, W, np.zeros(O)]
    for which, gradient in enumerate(gradients):
        step = random.standard_normal(values[which].shape)
        moved = [
            [v + sign * 1e-6 * step if k == which else v for k, v in enumerate(values)] for sign in (1, -1)
        ]
        numeric = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert numeric == pytest.approx((gradient * step).sum(), rel=1e-6)


# ---- verify -------------------------------------------------------------------------------------------------


def test_verify_of_an_untouched_file_is_one_line(checkout):
    finished = checkout.run("verify", "p22")
    assert finished.returncode == 3
    files = ["derive.py", "backward.py", "op/layernorm_linear.mojo"]
    words = ["it is optional", "it is optional", f"{len(PUZZLE.kernel_gates)} to solve"]
    *lines, last = finished.stdout.splitlines()
    assert [line.partition("problems/p22/")[2] for line in lines] == [
        f"{file}: untouched ({what})" for file, what in zip(files, words, strict=True)
    ]
    assert "gates are left; nothing attempted is wrong" in last


@pytest.mark.compiles
def test_verify_of_a_file_with_one_solved_blank_says_where_each_other_is(checkout):
    checkout.fill(checkout.kernels, "db")
    finished = checkout.run("verify", "p22")
    assert finished.returncode == 3 and "✅ db" in finished.stdout
    assert finished.stdout.count("⏳ ") == len(PUZZLE.kernel_gates) - 1 + 1
    line = blanks.find(checkout.kernels.read_text())["dx"].line
    assert f"problems/p22/op/layernorm_linear.mojo:{line}\n" in finished.stdout


def test_verify_counts_what_is_wrong_in_numpy(checkout):
    checkout.fill(checkout.numpy, "db", change=lambda line: line.replace("sum", "mean"))
    finished = checkout.run("verify", "p22")
    assert (
        finished.returncode == 1 and "❌ db" in finished.stdout and "❌ something is wrong" in finished.stdout
    )


@pytest.mark.compiles
def test_verify_of_a_kernel_that_does_not_compile_explains_the_first_error(checkout):
    checkout.fill(checkout.kernels, "db", change=lambda line: line.replace("dy[", "dz["))
    finished = checkout.run("verify", "p22")
    assert finished.returncode == 4
    assert (
        "problems/p22/op/layernorm_linear.mojo:" in finished.stdout
        and str(checkout.path) not in finished.stdout
    )
    assert "-> Nothing called `dz`" in finished.stdout and "❌ the kernels do not compile" in finished.stdout
    verbose = checkout.run("verify", "p22", "--verbose")
    assert verbose.stdout.count("use of unknown declaration 'dz'") > 1


def test_verify_of_a_damaged_file_goes_on_with_the_others(checkout):
    damage(checkout.numpy, "one marker deleted")
    finished = checkout.run("verify", "p22")
    assert finished.returncode == 2
    assert (
        "blank dx has no BLANK-END" in finished.stdout
        and "layernorm_linear.mojo: untouched" in finished.stdout
    )


# ---- From one rung to the next ------------------------------------------------------------------------------


def test_the_end_of_a_rung_says_what_now_and_the_list_says_what_is_next(checkout):
    def upcoming() -> str:
        return checkout.run("list", "p22").stdout.splitlines()[0]

    assert upcoming() == f"next: p22, {find_puzzle('p22').rungs[0].words}, dmean: workbook watch p22"
    checkout.fill(checkout.numpy, "db")
    assert "What now" not in checkout.run("p22", "--rung", "numpy").stdout
    assert upcoming() == "next: p22, NumPy rung, dW: workbook watch p22", "somebody is at it"
    checkout.fill(checkout.numpy, "db", "dW", "dgamma", "row_sums", "dx")
    said = checkout.run("p22", "--rung", "numpy").stdout.splitlines()[-1]
    assert said.startswith("   p22, NumPy rung: 5 of 5, solved. What now: p22, ")
    assert said.endswith("`workbook watch p22`") and "problems/p22/op/layernorm_linear.mojo" in said
    assert upcoming() == "next: p22, Mojo kernels, ln: workbook watch p22", "after what is solved"
    assert "What now" not in checkout.run("p22", "--rung", "numpy", "--gate", "db").stdout, "said once"


def test_the_list_unfolds_the_puzzle_at_hand_and_gives_each_other_a_line(checkout):
    checkout.fill(checkout.numpy, "db")
    assert checkout.run("p22", "--rung", "numpy", "--gate", "db").returncode == 0
    first, *lines, last = checkout.run("list").stdout.splitlines()
    assert first == "next: p22, NumPy rung, dW: workbook watch p22"
    assert "      ✅ db        passed                   the gradient of the linear bias" in lines
    assert not [line for line in lines if " dmean " in line], (
        "of another file of the puzzle no more than its bar"
    )
    assert [line for line in lines if "Mojo kernels: problems/p22/op/layernorm_linear.mojo" in line]
    others = [puzzle for puzzle in map(find_puzzle, puzzle_names()) if puzzle.name != "p22"]
    for puzzle in others:
        assert [line for line in lines if line.startswith(puzzle.name) and puzzle.title in line]
        assert not [line for line in lines if line.startswith(f"{puzzle.name}  {puzzle.title}")]
    assert (
        last
        == f"gates of another puzzle: `workbook list {puzzle_names()[-1]}`; of all: `workbook list --all`"
    )
    every = checkout.run("list", "--all").stdout
    assert all(f"\n{puzzle.name}  {puzzle.title}\n" in every for puzzle in others)


def test_after_puzzle_27_its_model_is_trained(monkeypatch, tmp_path):
    from harness.screens.work import next_step

    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    (tmp_path / "solutions").symlink_to(ROOT / "solutions")
    noted, puzzle = progress.Progress.load(), find_puzzle("p27")
    for rung in puzzle.rungs:
        work = Work(puzzle, rung)
        work.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(work.solution, work.path)
        for gate in work.gates:
            assert "--train" not in next_step(work, noted)
            noted.note(work.key(gate.id), work.blanks()[gate.id], True)
    assert next_step(work, noted).endswith("(--train --help: its flags): `workbook p27 --train`")


def test_only_the_puzzle_s_own_cases_count_as_passed(checkout):
    checkout.fill(checkout.numpy, "db")
    small = checkout.run("p22", "--rung", "numpy", "--gate", "db", "--dims", "2", "3", "5", "7")
    assert small.returncode == 0 and "not noted as passed: only these sizes were checked" in small.stdout
    assert "begun, not passed yet" in checkout.run("list", "p22").stdout
    assert checkout.run("p22", "--rung", "numpy", "--gate", "db").returncode == 0
    assert "begun, not passed yet" not in checkout.run("list", "p22").stdout


def test_after_the_last_rung_of_all_nothing_is_left(checkout):
    from harness.screens.work import next_step, steps

    noted = progress.Progress.load()
    for step in steps():
        if step.puzzle.name == "p22":
            step.path.write_text(blanks.fill(step.path.read_text(), step.solution.read_text()))
            for gate in step.gates:
                noted.note(step.key(gate.id), step.blanks()[gate.id], True)
    last = [step for step in steps() if step.puzzle.name == "p22"][-1]
    said = next_step(last, noted)
    left = [step for step in steps() if step.puzzle.name != "p22" and not step.rung.optional]
    assert ("Nothing is left" in said) == (not left) and ("What now" in said) == bool(left)


def test_verbose_adds_every_case_to_a_gate(checkout, puzzle):
    from harness.check.compare import TensorResult
    from harness.check.results import Comparison, GateResult
    from harness.screens.report import case_lines
    from harness.vgpu import Finding

    bad = TensorResult(False, 2e-3, 1e-7, 1e-6, 2e-3)
    result = GateResult(puzzle.gates[0], "wrong", [Comparison(puzzle.cases(None)[0], {"output": bad})])
    result.findings.append(Finding("shared race", "two meet", "a.mojo:1:1"))
    lines = [line.plain.strip() for line in case_lines(result)]
    assert lines == [
        "❌ chapter: output: error 2.0e-03, the limit 1.0e-06", "error: shared race at a.mojo:1:1", "two meet",
    ]  # fmt: skip
