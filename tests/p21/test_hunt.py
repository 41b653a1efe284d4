"""The hunt in PyTorch: right ones pass, what is given is unsolved, what is said of wrong ones."""

import re

import pytest
import torch

from harness.check import zoo
from harness.check.python_files import load
from harness.learner import blanks
from harness.puzzles.p21 import hunt
from harness.puzzles.p21.hunt import HuntChecker, detections, function_of
from harness.puzzles.p21.spec import HUNT, PUZZLE
from harness.puzzles.p21.subjects import WANTED
from harness.toolchain import roots

SOLUTION = roots.solutions() / "p21" / "hunt.py"
BUGS = {bug.name: bug for bug in zoo.load("p21")}
IN_PYTORCH = [bug for bug in BUGS.values() if bug.rung == "torch"]
NOT_SEEN = {
    "dropout_mask_from_result",
    "standardise_stale_statistics",
    "scale_bfloat16_sum",
    "lowrank_none_for_all",
}
"""What no usual check sees; the chapter says so."""


@pytest.fixture(scope="module")
def checker() -> HuntChecker:
    return HuntChecker(PUZZLE, PUZZLE.rung("torch"))


@pytest.fixture
def alone(monkeypatch):
    """Verdicts without the usual checks, which take most of the time."""
    monkeypatch.setattr(hunt, "detections", lambda subject: {})


def test_the_solution_is_right(checker):
    results = checker.check(SOLUTION)
    assert [result.gate for result in results] == list(HUNT)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    sums = {gate for gate, wanted in WANTED.items() if wanted.sums}
    assert {r.gate.id for r in results if r.summary == f"{len(hunt.DECISIVE)} checks"} == sums


def test_what_is_given_is_unsolved_and_would_be_wrong(checker, tmp_path, alone):
    path = tmp_path / "hunt.py"
    path.write_text(blanks.skeleton(SOLUTION.read_text()))
    assert {result.state for result in checker.check(path)} == {"unsolved"}
    unmarked = re.sub(rf" \({blanks.AS_GIVEN}: \w+\)", "", path.read_text())
    path.write_text(unmarked)
    assert {result.state for result in checker.check(path)} == {"wrong"}


def test_what_is_given_shows_its_failing_verdict_where_it_is_asked_for_alone(checker, tmp_path):
    path = tmp_path / "hunt.py"
    path.write_text(blanks.skeleton(SOLUTION.read_text()))
    (result,) = checker.check(path, ["addbias"])
    assert (result.state, result.mistake, result.hint) == ("unsolved", None, "addbias-1")
    numbers = re.search(
        r"the gradient of input 1 at \[\d\]: got (\S+), expected (\S+), ", result.diagnosis[0]
    )
    assert numbers and float(numbers[1]) == pytest.approx(15 * float(numbers[2]), rel=1e-4), (
        "15 rows, added up twice"
    )
    assert result.diagnosis[2].startswith("seen by: gradcheck float64, ")
    assert not any(r.diagnosis for r in checker.check(path, ["addbias", "scale"])), (
        "a list is not read one by one"
    )


def test_the_other_gates_of_a_wrong_file_stay_right(checker, alone):
    bug = BUGS["softmax_diagonal"]
    states = {r.gate.id: r.state for r in checker.check(bug.target(), ["softmax", "sigmoid", "addbias"])}
    assert states == {"softmax": "wrong", "sigmoid": "correct", "addbias": "correct"}


def test_there_are_enough_and_every_gate_has_one_that_is_given():
    given = [bug for bug in BUGS.values() if not bug.old]
    assert len(given) >= 16 and sum(not bug.rung for bug in given) >= 4
    assert {bug.gate for bug in given} == {gate.id for gate in PUZZLE.gates} - {"check"}
    assert len([bug for bug in IN_PYTORCH if bug.old]) >= 8, "those that are held back"
    assert all(len(bug.story.splitlines()) == 1 and bug.story.endswith(".") for bug in BUGS.values())
    assert all(bug.source.startswith("https://") for bug in BUGS.values() if bug.source)


# ---- Which checks see what ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrix() -> dict[str, dict[str, bool]]:
    """The usual checks on all that the learner is given."""
    return {
        bug.name: detections(WANTED[bug.gate].subject(function_of(bug.gate, load(bug.target())).apply))
        for bug in IN_PYTORCH
        if not bug.old
    }


def test_the_matrix_says_what_the_chapter_says(matrix):
    assert {name for name, catches in matrix.items() if not any(catches.values())} == NOT_SEEN
    only_opcheck = {
        name for name, catches in matrix.items() if catches["opcheck"] and sum(catches.values()) == 1
    }
    assert only_opcheck == {"silu_contiguous_gradient"}, "gradcheck hands in contiguous gradients"
    assert not matrix["crossentropy_gradient_ignored"]["allclose on ones"]
    assert not matrix["attention_query_scale"]["allclose on ones"], "equal keys: their gradients cancel"
    assert not matrix["linear_attribute_never_set"]["gradcheck float64"]
    assert all(
        any(catches[column] for catches in matrix.values())
        for column in hunt.USUAL
        if column != "repeat runs"
    )


def test_a_right_one_is_accused_by_no_usual_check():
    solution = load(SOLUTION)
    for gate in ("silu", "rmsnorm", "lowrank"):
        assert not any(detections(WANTED[gate].subject(function_of(gate, solution).apply)).values())


def test_the_command_shows_all_of_it(monkeypatch, capsys):
    from harness import cli

    names = iter(range(1000))
    monkeypatch.setattr(hunt, "detections", lambda subject: {c: next(names) % 2 == 0 for c in hunt.USUAL})
    assert cli.main(["p21", "--matrix"]) == 0
    said = capsys.readouterr().out
    assert all(bug.name.replace("_", " ") in said for bug in IN_PYTORCH)
    assert "gradcheck float64: sees 23 of 46" in said


def test_a_verdict_names_what_sees_it_and_what_does_not(checker):
    (result,) = checker.check(BUGS["dropout_mask_from_result"].target(), ["dropout"])
    assert result.diagnosis == [
        "at_zero: where an input is exactly 0: the gradient of input 0 at [2, 4, 4]: got 0, expected 3.82336, off by 1.0e+00 of the largest element",
        "seen by: none",
        f"not seen by: {', '.join(hunt.USUAL)}",
    ]


# ---- What a learner may do ----------------------------------------------------------------------------------


def test_a_class_that_is_gone_or_raises_is_a_verdict(checker, tmp_path, alone):
    path = tmp_path / "hunt.py"
    text = SOLUTION.read_text()
    path.write_text(text.replace("class Sigmoid(Function)", "class Sigmoids(Function)"))
    (result,) = checker.check(path, ["sigmoid"])
    assert result.state == "wrong" and "no class Sigmoid(torch.autograd.Function)" in result.diagnosis[0]
    path.write_text(text.replace("return dy * y * (1 - y)", "return dy * z"))
    (result,) = checker.check(path, ["sigmoid"])
    assert result.diagnosis[0] == "inputs_unchanged: NameError: name 'z' is not defined"


def test_autograd_sums_what_was_broadcast():
    """A gradient in the shape of the result is summed by autograd: what the hints and the chapter say of addbias."""

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            return x + bias

        @staticmethod
        def backward(ctx, dy):
            return dy, dy

    bias = torch.zeros(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Add.apply(torch.ones(5, 3), bias).sum(), bias)
    assert gradient.tolist() == [5.0] * 3
