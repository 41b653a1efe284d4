"""The checkers of puzzle 24 are checked: right answers pass, and every wrong one is rejected at its gate, by name."""

import pytest

from harness.check import zoo
from harness.check.checkers import make_checker
from harness.learner.work import Work
from harness.puzzles.p24.spec import PUZZLE
from harness.toolchain import roots

WRONG = zoo.load("p24")
PYTHON = [wrong for wrong in WRONG if wrong.file.endswith(".py")]


@pytest.fixture(scope="module")
def checkers():
    """One for each rung in Python: truth and baseline are computed once."""
    rungs = [rung for rung in PUZZLE.rungs if rung.language == "Python"]
    return {rung.id: make_checker(Work(PUZZLE, rung)) for rung in rungs}


@pytest.mark.parametrize("wrong", PYTHON, ids=lambda wrong: wrong.name)
def test_a_wrong_formula_is_rejected_for_the_right_reason(wrong, checkers):
    results = checkers[wrong.rung].check(wrong.target())
    states = {result.gate.id for result in results if result.state == "wrong"}
    assert states == {wrong.gate, *wrong.also}, [line for r in results for line in r.diagnosis]
    found = next(result for result in results if result.gate.id == wrong.gate)
    assert found.mistake == wrong.mistake, "\n".join(found.diagnosis)


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_the_rungs_in_python_are_right(rung, checkers):
    results = checkers[rung].check(roots.solutions() / "p24" / PUZZLE.rung(rung).file)
    assert [result.gate.id for result in results] == list(PUZZLE.rung(rung).gates)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    assert all(len(result.comparisons) == len(PUZZLE.cases(None)) for result in results)


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_the_rungs_in_python_start_unsolved(rung, checkers):
    path = roots.CHECKOUT / "problems" / "p24" / PUZZLE.rung(rung).file
    if not path.is_file():
        pytest.skip("problems/ is not there")
    assert {result.state for result in checkers[rung].check(path)} == {"unsolved"}


def test_the_zoo_covers_every_gate():
    assert {wrong.gate for wrong in WRONG} == {gate.id for gate in PUZZLE.gates}
    assert len({wrong.mistake for wrong in WRONG}) >= 12
    assert all(len(wrong.story.splitlines()) == 1 for wrong in WRONG)
