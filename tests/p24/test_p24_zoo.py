"""The checkers of puzzle 24 are checked: right answers pass, and every wrong one is rejected at its gate, by name.

The wrong kernels are recorded by one Mojo program; those of the rungs in Python need no compiler.
"""

import pytest
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker, make_checker
from harness.devices.recorder import Order, record_many
from harness.learner.work import Work
from harness.puzzles.p24.spec import PUZZLE
from harness.toolchain import roots

WRONG = zoo.load("p24")
PYTHON = [wrong for wrong in WRONG if wrong.file.endswith(".py")]
KERNELS = [wrong for wrong in WRONG if wrong not in PYTHON]
USUAL = ("chapter", "hard values", "row by row", "squares", "odd sizes")
"""The cases that a wrong kernel is judged by unless it needs others."""
VARIANT = {gate.id: gate.variant for gate in PUZZLE.gates}


def cases_for(kernel):
    """The cases that a wrong kernel is judged by."""
    return [case for case in PUZZLE.cases(None) if case.name in (kernel.cases or USUAL)]


@pytest.fixture(scope="module")
def checker(request):
    """One for every wrong kernel, which finds the recordings of the chosen ones in the cache."""
    record_many(
        [
            Order(
                each.package(),
                tuple(dict.fromkeys(case.dims for case in cases_for(each))),
                (VARIANT[each.gate],),
                small_grid=True,
            )
            for each in chosen(request, "kernel")
        ],
        "p24",
        "float32",
    )
    return Checker(PUZZLE)


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, checker):
    gates = [gate.id for gate in PUZZLE.kernel_gates if gate.variant == VARIANT[kernel.gate]]
    results = {result.gate.id: result for result in checker.check(kernel.package(), gates, cases_for(kernel))}
    named = results[kernel.gate]
    assert {id for id, result in results.items() if result.state == "wrong"} == {kernel.gate, *kernel.also}
    assert not kernel.mistake or named.mistake == kernel.mistake, "\n".join(named.diagnosis)
    assert named.hint.startswith(f"{kernel.gate}-")


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
    judged = next(result for result in results if result.gate.id == wrong.gate)
    assert judged.mistake == (wrong.mistake or None), "\n".join(judged.diagnosis)


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
    assert {wrong.gate for wrong in KERNELS} == {gate.id for gate in PUZZLE.kernel_gates}
    assert len(KERNELS) >= 12 and len({wrong.mistake for wrong in WRONG}) >= 20
    assert all(len(wrong.story.splitlines()) == 1 for wrong in WRONG)
