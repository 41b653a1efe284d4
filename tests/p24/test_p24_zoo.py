"""The rungs of puzzle 24 in Python: the solutions are right, and what is given is unsolved."""

import pytest

from harness.check.checker import make_checker
from harness.learner.work import Work
from harness.puzzles.p24.spec import PUZZLE
from harness.toolchain import roots


@pytest.fixture(scope="module")
def checkers():
    """One for each rung in Python: truth and baseline are computed once."""
    rungs = [rung for rung in PUZZLE.rungs if rung.language == "Python"]
    return {rung.id: make_checker(Work(PUZZLE, rung)) for rung in rungs}


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
