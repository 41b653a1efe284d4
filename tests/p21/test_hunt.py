"""Puzzle 21's PyTorch rung: the solution passes, provided code is unsolved, and wrong code is diagnosed."""

import re

import pytest
import torch

from harness.check import zoo
from harness.check.python_files import load_module
from harness.learner import blanks
from harness.puzzles.p21 import hunt
from harness.puzzles.p21.hunt import HuntChecker, find_function, run_usual_checks
from harness.puzzles.p21.spec import HUNT_GATES, PUZZLE
from harness.puzzles.p21.subjects import REFERENCES
from harness.toolchain import roots

SOLUTION = roots.get_solutions() / "p21" / "hunt.py"
BUGS = {bug.name: bug for bug in zoo.load_wrong_solutions("p21")}
PYTORCH_BUGS = [bug for bug in BUGS.values() if bug.rung == "torch"]
UNDETECTED = {
    "dropout_mask_from_result",
    "standardise_stale_statistics",
    "scale_bfloat16_sum",
    "lowrank_none_for_all",
}
"""Wrong backward passes that no standard check detects, as the chapter states."""


@pytest.fixture(scope="module")
def checker() -> HuntChecker:
    return HuntChecker(PUZZLE, PUZZLE.find_rung("torch"))


@pytest.fixture
def without_standard_checks(monkeypatch):
    """Skip the standard checks, which are slow and do not affect results."""
    monkeypatch.setattr(hunt, "run_usual_checks", lambda subject: {})


def test_solution_is_correct(checker):
    results = checker.check(SOLUTION)
    assert [result.gate for result in results] == list(HUNT_GATES)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    sums = {gate for gate, reference in REFERENCES.items() if reference.sums_rows}
    assert {r.gate.id for r in results if r.summary == f"{len(hunt.DECISIVE_CHECKS)} checks"} == sums


def test_provided_code_is_unsolved_and_wrong(checker, tmp_path, without_standard_checks):
    path = tmp_path / "hunt.py"
    path.write_text(blanks.make_skeleton(SOLUTION.read_text()))
    assert {result.state for result in checker.check(path)} == {"unsolved"}
    text = re.sub(rf" \({blanks.HASH_LABEL}: \w+\)", "", path.read_text())
    path.write_text(text)
    assert {result.state for result in checker.check(path)} == {"wrong"}


def test_provided_code_shows_its_result_if_requested(checker, tmp_path):
    path = tmp_path / "hunt.py"
    path.write_text(blanks.make_skeleton(SOLUTION.read_text()))
    (result,) = checker.check(path, ["addbias"])
    assert (result.state, result.mistake, result.hint) == ("unsolved", None, "addbias-1")
    numbers = re.search(
        r"the gradient of input 1 at \[\d\]: got (\S+), expected (\S+), ", result.diagnosis[0]
    )
    assert numbers and float(numbers[1]) == pytest.approx(15 * float(numbers[2]), rel=1e-4), (
        "15 rows, added up twice"
    )
    assert result.diagnosis[2].startswith("detected by: gradcheck float64, ")
    assert not any(r.diagnosis for r in checker.check(path, ["addbias", "scale"])), (
        "with several gates, unsolved ones get no diagnosis"
    )


def test_other_gates_of_a_wrong_file_pass(checker, without_standard_checks):
    bug = BUGS["softmax_diagonal"]
    states = {
        r.gate.id: r.state for r in checker.check(bug.build_target(), ["softmax", "sigmoid", "addbias"])
    }
    assert states == {"softmax": "wrong", "sigmoid": "correct", "addbias": "correct"}


def test_each_gate_provides_a_wrong_op():
    provided_bugs = [bug for bug in BUGS.values() if not bug.old]
    assert len(provided_bugs) >= 16 and sum(not bug.rung for bug in provided_bugs) >= 4
    assert {bug.gate for bug in provided_bugs} == {gate.id for gate in PUZZLE.gates} - {"check"}
    assert len([bug for bug in PYTORCH_BUGS if bug.old]) >= 8, "ops that are not shown to the learner"
    assert all(len(bug.story.splitlines()) == 1 and bug.story.endswith(".") for bug in BUGS.values())
    assert all(bug.source.startswith("https://") for bug in BUGS.values() if bug.source)


# ---- Detection matrix of the standard checks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrix() -> dict[str, dict[str, bool]]:
    """Results of the standard checks for all wrong code given to the learner."""
    return {
        bug.name: run_usual_checks(
            REFERENCES[bug.gate].make_subject(find_function(bug.gate, load_module(bug.build_target())).apply)
        )
        for bug in PYTORCH_BUGS
        if not bug.old
    }


def test_matrix_matches_the_chapter(matrix):
    assert {name for name, catches in matrix.items() if not any(catches.values())} == UNDETECTED
    only_opcheck = {
        name for name, catches in matrix.items() if catches["opcheck"] and sum(catches.values()) == 1
    }
    assert only_opcheck == {"silu_contiguous_gradient"}, "gradcheck passes contiguous gradients"
    assert not matrix["crossentropy_gradient_ignored"]["allclose on ones"]
    assert not matrix["attention_query_scale"]["allclose on ones"], "equal keys: their gradients cancel"
    assert not matrix["linear_attribute_never_set"]["gradcheck float64"]
    assert all(
        any(catches[column] for catches in matrix.values())
        for column in hunt.USUAL_CHECKS
        if column != "repeat runs"
    )


def test_standard_checks_pass_correct_ops():
    solution = load_module(SOLUTION)
    for gate in ("silu", "rmsnorm", "lowrank"):
        assert not any(
            run_usual_checks(REFERENCES[gate].make_subject(find_function(gate, solution).apply)).values()
        )


def test_command_prints_the_matrix(monkeypatch, capsys):
    from harness import cli

    names = iter(range(1000))
    monkeypatch.setattr(
        hunt, "run_usual_checks", lambda subject: {c: next(names) % 2 == 0 for c in hunt.USUAL_CHECKS}
    )
    assert cli.main(["p21", "--matrix"]) == 0
    output = capsys.readouterr().out
    assert all(bug.name.replace("_", " ") in output for bug in PYTORCH_BUGS)
    assert "gradcheck float64: sees 23 of 46" in output


def test_result_lists_the_checks_that_detect_it(checker):
    (result,) = checker.check(BUGS["dropout_mask_from_result"].build_target(), ["dropout"])
    assert result.diagnosis == [
        "at_zero: where an input is exactly 0: the gradient of input 0 at [2, 4, 4]: got 0, expected 3.82336, off by 1.0e+00 of the largest element",
        "detected by: none",
        f"not detected by: {', '.join(hunt.USUAL_CHECKS)}",
    ]


# ---- Learners' errors ----------------------------------------------------------------------------------


def test_missing_or_raising_class_is_a_result(checker, tmp_path, without_standard_checks):
    path = tmp_path / "hunt.py"
    text = SOLUTION.read_text()
    path.write_text(text.replace("class Sigmoid(Function)", "class Sigmoids(Function)"))
    (result,) = checker.check(path, ["sigmoid"])
    assert result.state == "wrong" and "no class Sigmoid(torch.autograd.Function)" in result.diagnosis[0]
    path.write_text(text.replace("return dy * y * (1 - y)", "return dy * z"))
    (result,) = checker.check(path, ["sigmoid"])
    assert result.diagnosis[0] == "inputs_unchanged: NameError: name 'z' is not defined"


def test_broadcast_gradients_are_summed():
    """Autograd reduces a gradient of the output's shape, as the hints and the chapter state for addbias."""

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
