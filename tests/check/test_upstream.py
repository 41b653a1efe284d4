"""Blame in order: what is wrong because something before it is says so and nothing else; what is wrong by itself is explained."""

import pytest

from harness.check.checker import make_checker
from harness.check.diagnose import blame_gates, blame_quantities, first_wrong, point_back
from harness.check.results import Diagnosis, GateResult
from harness.learner.work import Work
from harness.puzzles.p23.spec import PUZZLE as P23
from harness.spec.puzzle import Gate
from harness.toolchain import roots

NEEDS = {"b": ("a",), "c": ("b",), "d": ("a", "b")}


@pytest.mark.parametrize(
    ("name", "wrong", "first"),
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
def test_the_first_wrong_one_is_blamed(name, wrong, first):
    """ "c" is computed from "b" alone: where "b" is right, "a" has spoilt nothing of it."""
    assert first_wrong(name, NEEDS, wrong) == first


def test_a_gate_behind_a_wrong_one_says_that_and_nothing_else():
    results = [
        GateResult(Gate(id), state, diagnosis=[f"{id} is wrong"], mistake=id, hint=f"{id}-2")
        for id, state in (("a", "wrong"), ("b", "wrong"), ("c", "correct"), ("d", "unsolved"))
    ]
    blame_gates(results, NEEDS)
    assert [r.diagnosis for r in results[:2]] == [
        ["a is wrong"],
        ["computed from a, which is wrong: fix that first"],
    ]
    assert (results[1].mistake, results[1].hint) == (None, "a-2")
    assert [r.mistake for r in results[2:]] == ["c", "d"]


# ---- Puzzle 23 in PyTorch, one autograd.Function for all gates ----------------------------------------------


def judged(tmp_path, *edits):
    """The verdicts of the PyTorch rung on the solution with some lines replaced."""
    rung = P23.rung("torch")
    text = (roots.solutions() / "p23" / rung.file).read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / rung.file
    path.write_text(text, encoding="utf-8")
    cases = [case for case in P23.cases(None) if case.name in ("chapter", "hard values", "odd sizes")]
    return {r.gate.id: r for r in make_checker(Work(P23, rung, roots.solutions())).check(path, cases=cases)}


MASK_FORGOTTEN = ("scores = scale * (query @ key.mT) + mask", "scores = scale * (query @ key.mT)")
SUM_FORGOTTEN = ("(dP - (dP * P).sum(-1, keepdim=True))", "dP")


def test_a_wrong_output_is_the_only_thing_that_is_explained(tmp_path):
    results = judged(tmp_path, MASK_FORGOTTEN)
    assert results["output"].mistake == "mask-forgotten"
    assert results["dsoftmax"].diagnosis == ["computed from output, which is wrong: fix that first"]
    assert results["dsoftmax"].hint == results["output"].hint


@pytest.mark.parametrize(
    ("edit", "mistake"),
    [
        (SUM_FORGOTTEN, "row-sum-forgotten"),
        (("dmask = dS.sum((0, 1))", "dmask = dS.mean((0, 1))"), "times-a-constant"),
    ],
)
def test_a_wrong_gradient_after_a_right_output_is_explained_by_itself(tmp_path, edit, mistake):
    results = judged(tmp_path, edit)
    assert results["output"].state == "correct"
    assert results["dsoftmax"].mistake == mistake


# ---- Whole runs ---------------------------------------------------------------------------------------------


def test_a_runs_gradients_are_blamed_on_what_their_op_reads():
    """The fused backward pass reads the output's lse, and delta, which is made of the output."""
    diagnoses = {
        "lse": Diagnosis("lse", [], "lse-without-log", "online-2", frozenset({"lse"})),
        "grad_query": Diagnosis("dQ", [], None, "flash_dQ-1"),
        "grad_value": Diagnosis("dV", [], "scale-in-the-chain", "flash_dKdV-2", frozenset({"grad_value"})),
    }
    blame_quantities(diagnoses, P23, "fused")
    assert diagnoses["lse"].lines == ["lse"]
    assert diagnoses["grad_query"].lines == ["computed from lse, which is wrong: fix that first"]
    assert diagnoses["grad_query"].hint is None and diagnoses["grad_query"].mistake is None
    assert diagnoses["grad_value"].lines == ["dV"], "its own last step is wrong, and lse has not spoilt it"


def test_one_mistake_in_two_quantities_is_explained_once():
    steps = frozenset({"weights"})
    diagnoses = {
        "output": Diagnosis("O", [], "largest-not-subtracted", "online-2", steps),
        "lse": Diagnosis("lse", [], "largest-not-subtracted", "online-2", steps),
    }
    point_back(diagnoses, P23)
    assert diagnoses["output"].lines == ["O"]
    assert diagnoses["lse"].lines == ["the mistake is the same as that in output: fix that first"]
