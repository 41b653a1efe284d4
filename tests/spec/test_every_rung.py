"""Every rung: solutions are correct, untouched files are unsolved, and hints contain no whole solution."""

import re

import pytest
from marks import get_parameters
from recordings import make_order

from harness.check.checker import Checker, load_checker
from harness.learner import blanks, hints
from harness.learner.exercise import Exercise
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.toolchain import roots

SEPARATELY_TESTED = ("p21", "p22", "p25")
"""Puzzles with more thorough tests elsewhere."""
RUNGS = [
    pytest.param(name, rung.id, id=f"{name}-{rung.id}", marks=[pytest.mark.compiles] if name == "p26" else [])
    for name in list_puzzle_names()
    if name not in SEPARATELY_TESTED
    for rung in find_puzzle(name).rungs
    if rung.language == "Python"
]


@pytest.mark.parametrize(("name", "rung"), RUNGS)
def test_python_solution_passes_and_untouched_file_is_unsolved(name, rung, tmp_path):
    puzzle = find_puzzle(name)
    rung = puzzle.find_rung(rung)
    checker = load_checker(Exercise(puzzle, rung, roots.get_solutions()))
    solution = roots.get_solutions() / name / rung.file
    expected = checker.check(solution)
    assert {r.gate.id: r.state for r in expected} == dict.fromkeys(rung.gates, "correct"), [
        r.diagnosis for r in expected
    ]
    assert name == "p26" or all(result.summary or result.comparisons for result in expected)
    untouched = tmp_path / rung.file
    untouched.write_text(blanks.make_skeleton(solution.read_text()))
    assert {result.state for result in checker.check(untouched)} == {"unsolved"}


MOJO_PUZZLES = [name for name in list_puzzle_names() if find_puzzle(name).mojo_rung]
SEPARATELY_TESTED_KERNELS = ("p22", "p23", "p24")
"""Puzzles with tests of the kernels in more cases elsewhere."""


def list_orders(folder, tests):
    orders = {}
    for name, dtype in (get_parameters(test).values() for test in tests):
        puzzle = find_puzzle(name)
        variants = sorted({gate.variant for gate in puzzle.kernel_gates})
        cases = [*puzzle.list_cases(None), *puzzle.gate_cases]
        orders[f"{name} {dtype}"] = make_order(name, cases, variants, dtype=dtype)
    return orders


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
@pytest.mark.parametrize(
    "name", [name for name in MOJO_PUZZLES if name not in (*SEPARATELY_TESTED_KERNELS, "p19", "p28")]
)
def test_solution_kernels_pass_on_the_virtual_gpu(name, dtype):
    """The kernels of puzzles 19 and 28 are covered by other tests."""
    puzzle = find_puzzle(name)
    results = Checker(puzzle, dtype=dtype).check(roots.make_op_package(roots.get_solutions(), name))
    assert {r.gate.id: r.state for r in results} == {gate.id: "correct" for gate in puzzle.kernel_gates}, [
        r.diagnosis for r in results
    ]


@pytest.mark.compiles
@pytest.mark.parametrize("name", [name for name in MOJO_PUZZLES if name not in ("p19", "p22", "p28")])
def test_provided_kernels_compile_and_are_unsolved(name, tmp_path):
    blanks.generate_problems(roots.get_solutions() / name, tmp_path / name)
    assert {r.state for r in Checker(find_puzzle(name)).check(tmp_path / name / "op")} == {"unsolved"}


@pytest.mark.parametrize("name", list_puzzle_names())
def test_untouched_files_are_unsolved(name, command_line):
    result = command_line("verify", name)
    assert result.code == 3, result.out


@pytest.mark.parametrize(
    "name", [name for name in list_puzzle_names() if name != "p21"]
)  # a bug hunt has no hints
def test_chapter_has_all_hints(name):
    pages = (roots.CHECKOUT / "book/src").glob(f"puzzle_{name[1:]}/*.md")
    gates_with_hints = {
        ladder
        for page in pages
        for ladder in re.findall(r"\{\{#(?:hints|step) p\d\d:([\w-]+)\}\}", page.read_text())
    }
    assert gates_with_hints == set(hints.load_ladders(name))


@pytest.mark.parametrize("name", list_puzzle_names())
def test_hints_do_not_contain_whole_solutions(name):
    for rung in find_puzzle(name).rungs:
        bodies = blanks.find_blanks((roots.get_solutions() / name / rung.file).read_text())
        for gate in rung.gates:
            body = {line.strip() for line in bodies[gate].body if line.strip()}
            for hint in hints.load_ladders(name).get(gate, ()):
                assert not (len(body) > 1 and body <= {line.strip() for line in hint.code.splitlines()}), (
                    hint.id
                )


@pytest.mark.parametrize("name", list_puzzle_names())
def test_mistakes_have_existing_hints(name):
    puzzle, ladders = find_puzzle(name), hints.load_ladders(name).values()
    shortest = min(map(len, ladders)) if ladders else 0
    assert {mistake.hint for mistake in puzzle.mistakes} <= {*range(1, shortest + 1)}
