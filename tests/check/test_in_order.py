"""Each gate passes if its blank and all earlier blanks are solved and the later ones untouched."""

import re
import shutil

import pytest

from harness.check.checker import load_checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain.packages import OpPackage

WORKS = [Work(find_puzzle(name), rung) for name in list_puzzle_names() for rung in find_puzzle(name).rungs]
IN_PYTHON = [work for work in WORKS if not isinstance(work.rung, MojoRung)]
IN_MOJO = [work for work in WORKS if isinstance(work.rung, MojoRung)]


def solve_up_to(work, gate):
    """Return the text of a file with all blanks up to a gate's solved."""
    solution = work.solution.read_text()
    order = list(work.rung.gates)
    bodies = {id: blanks.find_blanks(solution)[id].body for id in order[: order.index(gate) + 1]}
    return blanks.join_pieces(blanks.split_blanks(blanks.make_skeleton(solution)), bodies)


def describe_failures(results):
    return [
        (result.gate.id, result.diagnosis or result.state) for result in results if result.state != "correct"
    ]


@pytest.mark.parametrize("work", IN_PYTHON, ids=lambda work: f"{work.puzzle.name}-{work.rung.id}")
def test_python_gates_pass_in_order(work, tmp_path):
    checker = load_checker(work)
    path = tmp_path / work.path.name
    failures = []
    for gate in work.rung.gates[:-1]:  # other tests check the complete solution
        path.write_text(solve_up_to(work, gate))
        failures += describe_failures(checker.check(path, [gate]))
    assert not failures


@pytest.mark.parametrize("work", IN_MOJO, ids=lambda work: work.puzzle.name)
def test_untouched_blank_leaves_a_function_body(work):
    """Mojo rejects a body of only a docstring, and with it the whole file; only the first gate may leave one."""
    skeleton = blanks.make_skeleton(work.solution.read_text())
    bare = re.findall(
        r'"""\n +# BLANK-START (\w+): .*\n +# FILL IN .*\n +# BLANK-END \w+\n(?! +\S)', skeleton
    )
    assert {*bare} <= {work.rung.gates[0]}


@pytest.mark.compiles
@pytest.mark.parametrize(
    "work",
    [IN_MOJO[0], *(pytest.param(work, marks=pytest.mark.slow) for work in IN_MOJO[1:])],
    ids=lambda work: work.puzzle.name,
)
def test_mojo_gates_pass_in_order(work, tmp_path):
    """Use the two smallest cases; other tests check other sizes with the solution."""
    puzzle = work.puzzle
    cases = sorted(puzzle.cases(None), key=lambda case: puzzle.multiply_adds(case.dims))[:2]
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    packages = {}
    for gate in work.gates[:-1]:
        folder = tmp_path / gate.id / "op"
        shutil.copytree(work.solution.parent, folder)
        (folder / work.solution.name).write_text(solve_up_to(work, gate.id))
        packages[gate.id] = OpPackage(folder), gate.variant
    record_many(
        [
            Order(package, puzzle.name, dims, (variant,), small_grid=True)
            for package, variant in packages.values()
        ]
    )
    checker = load_checker(work)
    assert not [
        fault
        for id, (package, _) in packages.items()
        for fault in describe_failures(checker.check(package, [id], cases))
    ]
