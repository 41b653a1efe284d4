"""Errors caused by an earlier error refer to it; independent errors are explained."""

import pytest
from changed_solutions import write_edited_solution

from harness.check.checker import load_checker
from harness.check.diagnose import find_first_wrong, redirect_gates, redirect_quantities, redirect_repeats
from harness.check.results import Diagnosis, GateResult
from harness.learner.exercise import Exercise
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.spec.puzzle import Gate
from harness.toolchain import roots

DEPENDENCIES = {"b": ("a",), "c": ("b",), "d": ("a", "b")}


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("a", "a", None),
        ("b", "ab", "a"),
        ("c", "abc", "a"),
        ("c", "bc", "b"),
        ("c", "ac", None),
        ("d", "bd", "b"),
        ("d", "abd", "a"),
    ],
)
def test_first_wrong_dependency_is_blamed(name, wrong, expected):
    """ "c" depends only on "b", so a wrong "a" does not affect it if "b" is correct."""
    assert find_first_wrong(name, DEPENDENCIES, wrong) == expected


def test_gate_after_a_wrong_one_refers_to_it():
    results = [
        GateResult(Gate(id), state, diagnosis=[f"{id} is wrong"], mistake=id, hint=f"{id}-2")
        for id, state in (("a", "wrong"), ("b", "wrong"), ("c", "correct"), ("d", "unsolved"))
    ]
    redirect_gates(results, DEPENDENCIES)
    assert [r.diagnosis for r in results[:2]] == [
        ["a is wrong"],
        ["computed from a, which is wrong: fix that first"],
    ]
    assert (results[1].mistake, results[1].hint) == (None, "a-2")
    assert [r.mistake for r in results[2:]] == ["c", "d"]


def check_edited(tmp_path, *edits):
    """Check the PyTorch rung's solution after some edits; return the results by gate."""
    rung, path = P23.find_rung("torch"), write_edited_solution(P23, "torch", tmp_path, *edits)
    cases = [case for case in P23.list_cases(None) if case.name in ("chapter", "hard values", "odd sizes")]
    return {
        r.gate.id: r
        for r in load_checker(Exercise(P23, rung, roots.get_solutions())).check(path, cases=cases)
    }


MISSING_MASK = ("scores = scale * (query @ key.mT) + mask", "scores = scale * (query @ key.mT)")
MISSING_SUM = ("(dP - (dP * P).sum(-1, keepdim=True))", "dP")


def test_wrong_gradients_after_a_wrong_output_are_not_explained(tmp_path):
    results = check_edited(tmp_path, MISSING_MASK)
    assert results["output"].mistake == "mask-forgotten"
    assert results["dsoftmax"].diagnosis == ["computed from output, which is wrong: fix that first"]
    assert results["dsoftmax"].hint == results["output"].hint


@pytest.mark.parametrize(
    ("edit", "mistake"),
    [
        (MISSING_SUM, "row-sum-forgotten"),
        (("dmask = dS.sum((0, 1))", "dmask = dS.mean((0, 1))"), "times-a-constant"),
    ],
)
def test_wrong_gradient_after_correct_output_is_explained(tmp_path, edit, mistake):
    results = check_edited(tmp_path, edit)
    assert results["output"].state == "correct"
    assert results["dsoftmax"].mistake == mistake


def test_wrong_gradients_are_blamed_on_inputs_of_their_op():
    """The fused backward pass depends on lse and, through delta, on the output."""
    diagnoses = {
        "lse": Diagnosis("lse", [], "lse-without-log", "online-2", frozenset({"lse"})),
        "grad_query": Diagnosis("dQ", [], None, "flash_dQ-1"),
        "grad_value": Diagnosis("dV", [], "scale-in-the-chain", "flash_dKdV-2", frozenset({"grad_value"})),
    }
    redirect_quantities(diagnoses, P23, "fused")
    assert diagnoses["lse"].lines == ["lse"]
    assert diagnoses["grad_query"].lines == ["computed from lse, which is wrong: fix that first"]
    assert diagnoses["grad_query"].hint is None and diagnoses["grad_query"].mistake is None
    assert diagnoses["grad_value"].lines == ["dV"], "its last step is wrong, independently of lse"


def test_mistake_in_two_quantities_is_explained_once():
    steps = frozenset({"weights"})
    diagnoses = {
        "output": Diagnosis("O", [], "largest-not-subtracted", "online-2", steps),
        "lse": Diagnosis("lse", [], "largest-not-subtracted", "online-2", steps),
    }
    redirect_repeats(diagnoses, P23)
    assert diagnoses["output"].lines == ["O"]
    assert diagnoses["lse"].lines == ["the mistake is the same as that in output: fix that first"]
