"""What holds of every puzzle's rungs and hints: solutions are right, untouched files unsolved, no hint gives a solution away."""

import re

import pytest

from harness.check.checker import Checker, make_checker
from harness.learner import blanks, hints
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.toolchain import roots

OWN = ("p21", "p22", "p25")
"""Puzzles whose files of tests ask more of the same."""
RUNGS = [
    pytest.param(name, rung.id, id=f"{name}-{rung.id}", marks=[pytest.mark.compiles] if name == "p26" else [])
    for name in puzzle_names()
    if name not in OWN
    for rung in find_puzzle(name).rungs
    if rung.language == "Python"
]


@pytest.mark.parametrize(("name", "rung"), RUNGS)
def test_a_solution_in_python_is_right_and_an_untouched_file_unsolved(name, rung, tmp_path):
    puzzle = find_puzzle(name)
    rung = puzzle.rung(rung)
    checker = make_checker(Work(puzzle, rung, roots.solutions()))
    solution = roots.solutions() / name / rung.file
    right = checker.check(solution)
    assert {r.gate.id: r.state for r in right} == dict.fromkeys(rung.gates, "correct"), [
        r.diagnosis for r in right
    ]
    assert name == "p26" or all(result.summary or result.comparisons for result in right)
    given = tmp_path / rung.file
    given.write_text(blanks.skeleton(solution.read_text()))
    assert {result.state for result in checker.check(given)} == {"unsolved"}


IN_MOJO = [name for name in puzzle_names() if find_puzzle(name).mojo_rung]
AWKWARD = ("p22", "p23", "p24")
"""Puzzles whose files of tests judge the kernels in more cases."""


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in IN_MOJO if name not in (*AWKWARD, "p19", "p28")])
def test_the_kernels_of_a_solution_are_right_on_the_virtual_gpu(name, dtype):
    """Those of puzzles 19 and 28 are judged with what their runs print."""
    puzzle = find_puzzle(name)
    results = Checker(puzzle, dtype=dtype).check(roots.op_package(roots.solutions(), name))
    assert {r.gate.id: r.state for r in results} == {gate.id: "correct" for gate in puzzle.kernel_gates}, [
        r.diagnosis for r in results
    ]


@pytest.mark.compiles
@pytest.mark.parametrize("name", [name for name in IN_MOJO if name not in ("p19", "p22", "p28")])
def test_the_kernels_as_they_are_given_compile_and_are_unsolved(name, tmp_path):
    blanks.generate(roots.solutions() / name, tmp_path / name)
    assert {r.state for r in Checker(find_puzzle(name)).check(tmp_path / name / "op")} == {"unsolved"}


@pytest.mark.parametrize("name", puzzle_names())
def test_untouched_files_are_unsolved(name, command_line):
    finished = command_line("verify", name)
    assert finished.code == 3, finished.out


@pytest.mark.parametrize(
    "name", [name for name in puzzle_names() if name != "p21"]
)  # a hunt gives no ladders
def test_the_chapter_has_every_hint_ladder(name):
    pages = (roots.CHECKOUT / "book/src").glob(f"puzzle_{name[1:]}/*.md")
    shown = {
        ladder
        for page in pages
        for ladder in re.findall(r"\{\{#(?:hints|step) p\d\d:([\w-]+)\}\}", page.read_text())
    }
    assert shown == set(hints.ladders(name))


@pytest.mark.parametrize("name", puzzle_names())
def test_no_hint_gives_a_whole_solution_of_several_lines_away(name):
    for rung in find_puzzle(name).rungs:
        bodies = blanks.find((roots.solutions() / name / rung.file).read_text())
        for gate in rung.gates:
            body = {line.strip() for line in bodies[gate].body if line.strip()}
            for hint in hints.ladders(name).get(gate, ()):
                assert not (len(body) > 1 and body <= {line.strip() for line in hint.code.splitlines()}), (
                    hint.id
                )
