"""Who works in order is never stuck: a gate passes with its blank and those before it solved, and those after it untouched."""

import re
import shutil

import pytest

from harness.check.checker import make_checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain.packages import OpPackage

WORKS = [Work(find_puzzle(name), rung) for name in puzzle_names() for rung in find_puzzle(name).rungs]
IN_PYTHON = [work for work in WORKS if not isinstance(work.rung, MojoRung)]
IN_MOJO = [work for work in WORKS if isinstance(work.rung, MojoRung)]


def solved_up_to(work, gate):
    """A learner's file with the solution's lines in the blanks up to a gate, in the order in which gates are taken."""
    solution = work.solution.read_text()
    order = list(work.rung.gates)
    bodies = {id: blanks.find(solution)[id].body for id in order[: order.index(gate) + 1]}
    return blanks.join(blanks.split(blanks.skeleton(solution)), bodies)


def said(results):
    """What is not right."""
    return [
        (result.gate.id, result.diagnosis or result.state) for result in results if result.state != "correct"
    ]


@pytest.mark.parametrize("work", IN_PYTHON, ids=lambda work: f"{work.puzzle.name}-{work.rung.id}")
def test_every_gate_in_python_passes_in_its_turn(work, tmp_path):
    checker = make_checker(work)
    path = tmp_path / work.path.name
    wrong = []
    for gate in work.rung.gates[:-1]:  # with the last one's it is the solution, which other tests check
        path.write_text(solved_up_to(work, gate))
        wrong += said(checker.check(path, [gate]))
    assert not wrong


@pytest.mark.parametrize("work", IN_MOJO, ids=lambda work: work.puzzle.name)
def test_an_untouched_blank_leaves_a_function_with_a_body(work):
    """Mojo compiles none that has nothing but its docstring, and with it no other gate; the first comes before all others."""
    given = blanks.skeleton(work.solution.read_text())
    bare = re.findall(r'"""\n +# BLANK-START (\w+): .*\n +# FILL IN .*\n +# BLANK-END \w+\n(?! +\S)', given)
    assert {*bare} <= {work.rung.gates[0]}


@pytest.mark.compiles
@pytest.mark.parametrize(
    "work",
    [IN_MOJO[0], *(pytest.param(work, marks=pytest.mark.slow) for work in IN_MOJO[1:])],
    ids=lambda work: work.puzzle.name,
)
def test_every_kernel_s_gate_passes_in_its_turn(work, tmp_path):
    """On the two smallest cases: what other sizes ask is asked of the solution elsewhere."""
    puzzle = work.puzzle
    cases = sorted(puzzle.cases(None), key=lambda case: puzzle.multiply_adds(case.dims))[:2]
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    packages = {}
    for gate in work.gates[:-1]:
        folder = tmp_path / gate.id / "op"
        shutil.copytree(work.solution.parent, folder)
        (folder / work.solution.name).write_text(solved_up_to(work, gate.id))
        packages[gate.id] = OpPackage(folder), gate.variant
    record_many(
        [Order(package, dims, (variant,), small_grid=True) for package, variant in packages.values()],
        puzzle.name,
        "float32",
    )
    checker = make_checker(work)
    assert not [
        fault for id, (package, _) in packages.items() for fault in said(checker.check(package, [id], cases))
    ]
