"""The checker of puzzle 23 is checked: every wrong solution is rejected at its gate, for the right reason.

The wrong kernels are recorded by one Mojo program and judged in this one process; those of the rungs in Python need no
compiler.
"""

import pkgutil

import pytest
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.puzzles.p23.spec import PUZZLE
from harness.toolchain import roots

WRONG = zoo.load("p23")
KERNELS = [wrong for wrong in WRONG if wrong.file.endswith(".mojo")]
PYTHON = [wrong for wrong in WRONG if wrong not in KERNELS]
USUAL = ("hard values", "odd sizes", "square")
"""The cases that a wrong kernel is judged by unless it needs others."""
VARIANT = {gate.id: gate.variant for gate in PUZZLE.gates}


def cases_for(puzzle, kernel):
    """The cases that a kernel is judged by."""
    every = [*puzzle.cases(None), *puzzle.gate_cases]
    return [case for case in every if case.name in (kernel.cases or USUAL)]


@pytest.fixture(scope="module")
def checkers(puzzle, request):
    """A warm checker of each dtype; the chosen kernels are recorded together, and it finds them in the cache."""
    orders = [
        Order(
            kernel.package(),
            dims_of(cases_for(puzzle, kernel)),
            (VARIANT[kernel.gate],),
            small_grid=True,
            dtype=kernel.dtype,
        )
        for kernel in chosen(request, "kernel")
    ]
    record_many(orders, puzzle.name)
    return {dtype: Checker(puzzle, dtype=dtype) for dtype in {kernel.dtype for kernel in KERNELS}}


def checker_of(puzzle, rung):
    """What judges a rung's file."""
    return pkgutil.resolve_name(rung.checker)(puzzle, rung)


def dims_of(cases):
    """The sizes to record, each once."""
    return tuple(dict.fromkeys(case.dims for case in cases))


def named(results, wrong) -> None:
    """Asserts that the gates of a wrong solution, and no others, are wrong, and that its mistake is named."""
    states = {result.gate.id for result in results if result.state == "wrong"}
    assert states == {wrong.gate, *wrong.also}, [line for r in results for line in r.diagnosis]
    judged = next(result for result in results if result.gate.id == wrong.gate)
    assert not wrong.mistake or judged.mistake == wrong.mistake, "\n".join(judged.diagnosis)


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, puzzle, checkers):
    gates = [id for id, variant in VARIANT.items() if variant == VARIANT[kernel.gate]]
    results = checkers[kernel.dtype].check(kernel.package(), gates, cases_for(puzzle, kernel))
    named(results, kernel)
    hint = next(result for result in results if result.gate.id == kernel.gate).hint
    assert hint.startswith(f"{kernel.gate}-")


@pytest.mark.parametrize("wrong", PYTHON, ids=lambda wrong: wrong.name)
def test_a_wrong_formula_is_rejected_for_the_right_reason(wrong, puzzle):
    named(checker_of(puzzle, wrong.of_rung).check(wrong.target()), wrong)


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


def test_the_zoo_is_large_and_covers_every_gate(puzzle):
    assert len(KERNELS) >= 35
    assert {kernel.gate for kernel in KERNELS} == {gate.id for gate in puzzle.gates}
    assert len({wrong.mistake for wrong in WRONG}) >= 25
    assert all(len(wrong.story.splitlines()) == 1 for wrong in WRONG)
    assert {wrong.rung for wrong in PYTHON} == {"numpy", "torch"}
