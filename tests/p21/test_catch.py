"""A test of backward passes is itself tested: the reference one finds all, and each wrong one fails for its own reason."""

import re

import pytest
import torch

from harness.check import zoo
from harness.check.gradients import random_like
from harness.check.python_files import load
from harness.check.results import GateResult
from harness.errors import DamagedFile
from harness.puzzles.p21 import catch
from harness.puzzles.p21.catch import CatchChecker, NoTest, tries
from harness.puzzles.p21.hunt import DECISIVE
from harness.puzzles.p21.rights import correct_ops
from harness.puzzles.p21.spec import PUZZLE
from harness.toolchain import roots

SOLUTION = roots.solutions() / "p21" / "catch.py"
RUNG = PUZZLE.rung("catch")
BUGS = [bug for bug in zoo.load("p21") if bug.rung == "catch"]


def judged(path, seconds: float = catch.SECONDS) -> GateResult:
    """The verdict in this process."""
    (gate,) = PUZZLE.gates_of(RUNG)
    return CatchChecker(PUZZLE, RUNG).result_of(gate, tries(path, "p21", seconds))


def written(tmp_path, body: str):
    """A file whose test has this body."""
    path = tmp_path / "catch.py"
    path.write_text(
        f'import torch\n\ndef check(op):\n    """A test."""\n    # BLANK-START check: t\n    {body}\n    # BLANK-END check\n'
    )
    return path


def test_the_reference_test_catches_all_and_accuses_nobody():
    """In a process of its own, as for a learner."""
    (result,) = CatchChecker(PUZZLE, RUNG).check(SOLUTION)
    assert result.state == "correct", result.diagnosis
    assert (
        result.summary == "caught 46 of 46 wrong ones (33 of them held back), no false alarm in 23 right ones"
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_wrong_test_is_rejected_for_its_own_reason(bug):
    result = judged(bug.target(), 20.0 if bug.mistake != "too-slow" else 0.3)
    assert (result.state, result.mistake) == ("wrong", bug.mistake), result.diagnosis


def test_every_right_one_is_right():
    """By a comparison of its own: the largest error in the widest dtype, and in every other one beside PyTorch's."""
    for op in correct_ops(load(SOLUTION.with_name("hunt.py"))):
        for dtype in op.dtypes:

            def gradients(function, wide, op=op, dtype=dtype):
                inputs = [
                    t.detach().to(wide if t.is_floating_point() else t.dtype)
                    for t in op.inputs("odd", 5, dtype)
                ]
                leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
                out = function(*inputs)
                out = out[0] if isinstance(out, tuple) else out
                (incoming,) = random_like((out.detach().to(dtype),))
                return torch.autograd.grad(out, leaves, incoming.to(wide), materialize_grads=True)

            for ours, truth in zip(
                gradients(op.function, dtype), gradients(op.reference, torch.float64), strict=True
            ):
                bound = 8 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item()) * 4
                assert (ours.double() - truth).abs().max() <= bound, op.name


def test_a_test_that_says_nothing_catches_nothing(tmp_path):
    result = judged(written(tmp_path, "return None"))
    assert result.mistake == "missed" and result.hint == "check-1"
    assert result.diagnosis[0] == (
        "caught 0 of 46 wrong ones: 0 of 13 of those in your folder, 0 of 33 held back"
    )
    assert any(
        line.startswith(
            "not caught, wrong for a random gradient, at some of its sizes: addbias_reduced_twice, "
        )
        and line.endswith(" held back")
        for line in result.diagnosis
    )
    held_back = {bug.name for bug in zoo.load("p21") if bug.rung == "torch" and bug.old}
    assert not held_back & {*re.findall(r"\w+", " ".join(result.diagnosis))}
    assert re.fullmatch(r"\.\.\. and \d+ that are wrong in other kinds of call", result.diagnosis[-1])


def test_each_wrong_one_is_wrong_in_a_kind_of_call_that_its_entry_names():
    """The zoo's entries say which check rejects each."""
    of = {bug.name: bug.mistake for bug in zoo.load("p21") if bug.rung == "torch"}
    words = {check.__name__: kind for check, kind in DECISIVE.items()}
    kinds = {op.name: catch.failing_call_kind(op, gate) for op, gate, _ in catch.wrong_ops("p21")}
    assert kinds == {name: words[mistake] for name, mistake in of.items()}


def test_a_test_that_accuses_everybody_is_told_so(tmp_path):
    result = judged(written(tmp_path, "return 'wrong'"))
    assert result.mistake == "false-alarm" and result.hint == "check-2"
    assert result.diagnosis[0] == "false alarm on softmax: wrong"
    assert result.diagnosis[3] == "... and 20 more false alarms in 23 right ones"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1 / 0", "false alarm on softmax: {path}:6: ZeroDivisionError: division by zero"),
        ("assert torch.autograd.gradcheck(op.function, op.inputs())", "Expected float64|float32|relu|GradcheckError"),
        ("return False", "false alarm on softmax: check returned False"),
    ],
)  # fmt: skip
def test_what_a_test_raises_is_what_it_says(tmp_path, body, words):
    path = written(tmp_path, body)
    said = "\n".join(judged(path).diagnosis)
    assert any(word in said for word in words.format(path=path).split("|")), said


def test_a_test_may_return_true(tmp_path):
    assert judged(written(tmp_path, "return True")).mistake == "missed"


def test_a_test_without_an_answer_is_refused(tmp_path):
    with pytest.raises(NoTest, match="check returned int; it should raise, or return a line"):
        tries(written(tmp_path, "return 3"), "p21")
    path = tmp_path / "other.py"
    path.write_text("checks = None\n")
    with pytest.raises(NoTest, match="there is no function check"):
        tries(path, "p21")


def test_one_that_hangs_is_stopped_at_its_line(tmp_path):
    result = judged(written(tmp_path, "while True: pass"), 0.2)
    assert result.mistake == "too-slow"
    assert (
        result.diagnosis[0].startswith("on softmax ")
        and "catch.py:6: stopped after 0.2 s" in result.diagnosis[0]
    )


def test_an_exception_of_the_learner_s_does_not_hide_the_limit(tmp_path):
    body = "\n    ".join(
        ["while True:", "    try:", "        while True: pass", "    except Exception: pass"]
    )
    assert judged(written(tmp_path, body), 0.2).mistake == "too-slow"


def test_one_that_ends_the_process_costs_a_line(tmp_path):
    (result,) = CatchChecker(PUZZLE, RUNG).check(written(tmp_path, "__import__('os')._exit(7)"))
    assert (result.state, result.mistake) == ("wrong", "no-verdict")
    assert result.diagnosis == ["ended without an answer (exit code 7)"]


def test_what_it_prints_is_not_shown(tmp_path, capsys):
    judged(written(tmp_path, "print('loud')"))
    assert "loud" not in capsys.readouterr().out


def test_an_untouched_one_is_unsolved_and_a_broken_one_is_damaged(tmp_path):
    checker = CatchChecker(PUZZLE, RUNG)
    (result,) = checker.check(written(tmp_path, "# FILL IN"))
    assert result.state == "unsolved"
    with pytest.raises(DamagedFile, match=r"catch.py:6: "):
        checker.check(written(tmp_path, "return ]"))
