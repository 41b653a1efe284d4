"""Each gate passes if its blank and all earlier ones are solved and later ones are untouched."""

import re
import shutil

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import load_checker
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain.packages import OpPackage

EXERCISES = [
    Exercise(find_puzzle(name), rung) for name in list_puzzle_names() for rung in find_puzzle(name).rungs
]
PYTHON_EXERCISES = [exercise for exercise in EXERCISES if not isinstance(exercise.rung, MojoRung)]
MOJO_EXERCISES = [exercise for exercise in EXERCISES if isinstance(exercise.rung, MojoRung)]


def solve_up_to(exercise, gate):
    """Return a file's text with all blanks up to a gate solved."""
    solution = exercise.solution.read_text()
    gates = list(exercise.rung.gates)
    bodies = {id: blanks.find_blanks(solution)[id].body for id in gates[: gates.index(gate) + 1]}
    return blanks.join_segments(blanks.split_blanks(blanks.make_skeleton(solution)), bodies)


def describe_failures(results):
    return [
        (result.gate.id, result.diagnosis or result.state) for result in results if result.state != "correct"
    ]


@pytest.mark.parametrize(
    "exercise", PYTHON_EXERCISES, ids=lambda exercise: f"{exercise.puzzle.name}-{exercise.rung.id}"
)
def test_python_gates_pass_in_order(exercise, tmp_path):
    checker = load_checker(exercise)
    path = tmp_path / exercise.path.name
    failures = []
    for gate in exercise.rung.gates[:-1]:  # other tests check the complete solution
        path.write_text(solve_up_to(exercise, gate))
        failures += describe_failures(checker.check(path, [gate]))
    assert not failures


@pytest.mark.parametrize("exercise", MOJO_EXERCISES, ids=lambda exercise: exercise.puzzle.name)
def test_untouched_blank_leaves_a_valid_function_body(exercise):
    """Mojo rejects a function body with only a docstring; only the first gate's blank may leave one."""
    skeleton = blanks.make_skeleton(exercise.solution.read_text())
    bare = re.findall(
        r'"""\n +# BLANK-START (\w+): .*\n +# FILL IN .*\n +# BLANK-END \w+\n(?! +\S)', skeleton
    )
    assert {*bare} <= {exercise.rung.gates[0]}


def list_smallest_cases(puzzle):
    """Return the two smallest cases; other tests run the solution at other sizes."""
    return sorted(puzzle.list_cases(None), key=lambda case: puzzle.count_multiply_adds(case.dims))[:2]


def list_orders(folder, tests):
    orders = {}
    for exercise in list_values(tests, "exercise"):
        name, cases = exercise.puzzle.name, list_smallest_cases(exercise.puzzle)
        for gate in exercise.gates[:-1]:
            package = OpPackage(shutil.copytree(exercise.solution.parent, folder / name / gate.id / "op"))
            (package.path / exercise.solution.name).write_text(solve_up_to(exercise, gate.id))
            orders[f"{name} {gate.id}"] = make_order(name, cases, [gate.variant], package)
    return orders


@pytest.mark.compiles
@pytest.mark.parametrize(
    "exercise",
    [MOJO_EXERCISES[0], *(pytest.param(exercise, marks=pytest.mark.slow) for exercise in MOJO_EXERCISES[1:])],
    ids=lambda exercise: exercise.puzzle.name,
)
def test_mojo_gates_pass_in_order(exercise, recorded):
    checker, cases = load_checker(exercise), list_smallest_cases(exercise.puzzle)
    results = [
        result
        for gate in exercise.gates[:-1]
        for order in [recorded[f"{exercise.puzzle.name} {gate.id}"]]
        for result in checker.check(order.package, [gate.id], cases)
    ]
    assert not describe_failures(results)
