"""Puzzle 21's check of learners' tests: the solution's test catches every bug, and bad tests are rejected."""

import re

import pytest
import torch

from harness.check import zoo
from harness.check.gradients import random_like
from harness.check.python_files import load_module
from harness.check.results import GateResult
from harness.errors import DamagedFile
from harness.puzzles.p21 import catch
from harness.puzzles.p21.catch import CatchChecker, InvalidCheck, run_on_all_ops
from harness.puzzles.p21.correct_ops import list_correct_ops
from harness.puzzles.p21.hunt import DECISIVE_CHECKS
from harness.puzzles.p21.spec import PUZZLE
from harness.toolchain import roots

SOLUTION = roots.get_solutions() / "p21" / "catch.py"
RUNG = PUZZLE.find_rung("catch")
BUGS = [bug for bug in zoo.load_wrong_solutions("p21") if bug.rung == "catch"]


def check_test(path, timeout_s: float = catch.OP_TIMEOUT_S) -> GateResult:
    (gate,) = PUZZLE.list_gates(RUNG)
    return CatchChecker(PUZZLE, RUNG).make_result(gate, run_on_all_ops(path, "p21", timeout_s))


def write_test(tmp_path, body: str):
    """Write a file that defines `check` with this body; return its path."""
    path = tmp_path / "catch.py"
    path.write_text(
        f'import torch\n\ndef check(op):\n    """A test."""\n    # BLANK-START check: t\n    {body}\n    # BLANK-END check\n'
    )
    return path


def test_reference_test_catches_all_without_false_alarms():
    """Run the test in a subprocess, like a learner's."""
    (result,) = CatchChecker(PUZZLE, RUNG).check(SOLUTION)
    assert result.state == "correct", result.diagnosis
    assert (
        result.summary == "caught 46 of 46 wrong ops (33 of them held back), no false alarm in 23 correct ops"
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bad_test_is_rejected_with_a_reason(bug):
    result = check_test(bug.build_target(), 20.0 if bug.mistake != "too-slow" else 0.3)
    assert (result.state, result.mistake) == ("wrong", bug.mistake), result.diagnosis


def test_correct_ops_are_correct():
    """Limit the error in the widest dtype, and in other dtypes relative to PyTorch's error."""
    for op in list_correct_ops(load_module(SOLUTION.with_name("hunt.py"))):
        for dtype in op.dtypes:

            def gradients(function, float64_inputs, op=op, dtype=dtype):
                inputs = [
                    t.detach().to(float64_inputs if t.is_floating_point() else t.dtype)
                    for t in op.inputs("odd", 5, dtype)
                ]
                leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
                out = function(*inputs)
                out = out[0] if isinstance(out, tuple) else out
                (incoming,) = random_like((out.detach().to(dtype),))
                return torch.autograd.grad(out, leaves, incoming.to(float64_inputs), materialize_grads=True)

            for got, truth in zip(
                gradients(op.function, dtype), gradients(op.reference, torch.float64), strict=True
            ):
                bound = 8 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item()) * 4
                assert (got.double() - truth).abs().max() <= bound, op.name


def test_check_that_returns_none_catches_nothing(tmp_path):
    result = check_test(write_test(tmp_path, "return None"))
    assert result.mistake == "missed" and result.hint == "check-1"
    assert result.diagnosis[0] == ("caught 0 of 46 wrong ops: 0 of 13 in your folder, 0 of 33 held back")
    assert any(
        line.startswith("not caught, wrong for a random gradient, at some sizes: addbias_reduced_twice, ")
        and line.endswith(" held back")
        for line in result.diagnosis
    )
    hidden = {bug.name for bug in zoo.load_wrong_solutions("p21") if bug.rung == "torch" and bug.old}
    assert not hidden & {*re.findall(r"\w+", " ".join(result.diagnosis))}
    assert re.fullmatch(r"\.\.\. and \d+ that are wrong in other kinds of call", result.diagnosis[-1])


def test_wrong_ops_fail_in_the_specified_call():
    """Each wrong op fails in the kind of call that its zoo entry specifies."""
    mistakes = {bug.name: bug.mistake for bug in zoo.load_wrong_solutions("p21") if bug.rung == "torch"}
    kinds_of_checks = {check.__name__: kind for check, kind in DECISIVE_CHECKS.items()}
    kinds = {op.name: catch.find_failing_call_kind(op, gate) for op, gate, _ in catch.load_wrong_ops("p21")}
    assert kinds == {name: kinds_of_checks[mistake] for name, mistake in mistakes.items()}


def test_check_that_rejects_every_op_is_reported(tmp_path):
    result = check_test(write_test(tmp_path, "return 'wrong'"))
    assert result.mistake == "false-alarm" and result.hint == "check-2"
    assert result.diagnosis[0] == "false alarm on softmax: wrong"
    assert result.diagnosis[3] == "... and 20 more false alarms in 23 correct ops"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "false alarm on softmax: {path}:6: ZeroDivisionError: division by zero"),
        ("assert torch.autograd.gradcheck(op.function, op.inputs())", "Expected float64|float32|relu|GradcheckError"),
        ("return False", "false alarm on softmax: check returned False"),
    ],
)  # fmt: skip
def test_failure_on_a_correct_op_is_reported(tmp_path, body, message):
    path = write_test(tmp_path, body)
    report = "\n".join(check_test(path).diagnosis)
    assert any(word in report for word in message.format(path=path).split("|")), report


def test_check_that_returns_true_catches_nothing(tmp_path):
    assert check_test(write_test(tmp_path, "return True")).mistake == "missed"


def test_invalid_return_value_is_rejected(tmp_path):
    with pytest.raises(
        InvalidCheck, match="check returned int; it should raise an exception or return a message"
    ):
        run_on_all_ops(write_test(tmp_path, "return 3"), "p21")
    path = tmp_path / "other.py"
    path.write_text("checks = None\n")
    with pytest.raises(InvalidCheck, match="there is no function check"):
        run_on_all_ops(path, "p21")


def test_hanging_test_is_stopped_at_its_line(tmp_path):
    result = check_test(write_test(tmp_path, "while True: pass"), 0.2)
    assert result.mistake == "too-slow"
    assert (
        result.diagnosis[0].startswith("on softmax ")
        and "catch.py:6: timed out after 0.2 s" in result.diagnosis[0]
    )


def test_exception_does_not_hide_the_time_limit(tmp_path):
    body = "\n    ".join(
        ["while True:", "    try:", "        while True: pass", "    except Exception: pass"]
    )
    assert check_test(write_test(tmp_path, body), 0.2).mistake == "too-slow"


def test_exiting_test_is_reported(tmp_path):
    (result,) = CatchChecker(PUZZLE, RUNG).check(write_test(tmp_path, "__import__('os')._exit(7)"))
    assert (result.state, result.mistake) == ("wrong", "no-verdict")
    assert result.diagnosis == ["ended without an answer (exit code 7)"]


def test_printed_output_of_a_test_is_hidden(tmp_path, capsys):
    check_test(write_test(tmp_path, "print('loud')"))
    assert "loud" not in capsys.readouterr().out


def test_untouched_file_is_unsolved_and_invalid_file_is_damaged(tmp_path):
    checker = CatchChecker(PUZZLE, RUNG)
    (result,) = checker.check(write_test(tmp_path, "# FILL IN"))
    assert result.state == "unsolved"
    with pytest.raises(DamagedFile, match=r"catch.py:6: "):
        checker.check(write_test(tmp_path, "return ]"))
