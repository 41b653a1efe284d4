"""The rungs of puzzle 23 in Python: the solutions are right, and what is given is unsolved."""

import pkgutil

import pytest

from harness.toolchain import roots


def checker_of(puzzle, rung):
    """What judges a rung's file."""
    return pkgutil.resolve_name(rung.checker)(puzzle, rung)


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_the_rungs_in_python_are_right(rung, puzzle):
    rung = puzzle.rung(rung)
    results = checker_of(puzzle, rung).check(roots.solutions() / "p23" / rung.file)
    assert [result.gate.id for result in results] == list(rung.gates)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]


@pytest.mark.parametrize("rung", ["numpy", "torch"])
def test_the_rungs_in_python_start_unsolved(rung, puzzle):
    rung = puzzle.rung(rung)
    path = roots.CHECKOUT / "problems" / "p23" / rung.file
    if not path.is_file():
        pytest.skip("problems/ is not there")
    results = checker_of(puzzle, rung).check(path)
    assert {result.state for result in results} == {"unsolved"}
