"""Puzzle 23's kernels on the virtual GPU, in three dtypes and at edge-case sizes."""

import functools
from dataclasses import replace

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import Checker
from harness.check.reference import Reference
from harness.devices.recorder import RecordedLaunch, RecordedTensor, record
from harness.devices.replay import Replay
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p23 import spec as p23
from harness.spec.puzzle import Case
from harness.toolchain import roots

pytestmark = pytest.mark.compiles

CASES = p23.cases()
EDGE_CASES = [
    Case(f"awkward {dims}", "", dims, "hard")
    for dims in ((1, 1, 5, 6, 1), (5, 1, 3, 17, 16), (1, 3, 33, 2, 31), (1, 1, 2, 300, 8))
]
EMPTY = {"no batch": (0, 2, 3, 4, 5), "no query": (1, 2, 0, 4, 5), "no key": (1, 2, 3, 0, 5)}


# ---- The kernels on the virtual GPU -------------------------------------------------------------------------


def list_orders(folder, tests):
    cases = [*CASES, *p23.GATE_CASES]
    all_cases = [*cases, *EDGE_CASES, *(Case(name, "", dims, "") for name, dims in EMPTY.items())]
    orders = {
        dtype: make_order("p23", all_cases, ["fused", "unfused"], dtype=dtype)
        for dtype in {"float32", *list_values(tests, "dtype")}
    }
    for name in list_values(tests, "edited"):
        package = solve(p23.PUZZLE, folder / name, *EDITED[name]).package
        orders[name] = make_order("p23", cases, ["unfused"], package)
    return orders


@pytest.fixture(scope="module")
def recordings(recorded):
    """Return a cached function dtype -> recording of the solution for all variants and sizes in this file."""
    return functools.cache(lambda dtype: record(recorded[dtype]))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
@pytest.mark.usefixtures("recorded")
def test_solution_is_correct_in_all_cases(puzzle, solution, dtype):
    results = Checker(puzzle, dtype=dtype).check(solution, None, [*CASES, *p23.GATE_CASES, *EDGE_CASES])
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    assert not any(result.findings for result in results)


def test_block_max_starts_from_the_lowest_finite_number(recordings):
    """A row of -inf must not give NaN, as the hint explains."""
    recording = recordings("float32")
    lowest_values = {
        name: "0fFF7FFFFF" in recording.ptx[symbol] for symbol, name in recording.map_kernel_names().items()
    }
    assert lowest_values["softmax"] and not lowest_values["flash_forward"]


SUM = "block.sum[block_size=ROW_THREADS](partial)"


UP_TO_DSOFTMAX, UP_TO_OUTPUT = ("matmul", "softmax", "dsoftmax"), ("matmul", "softmax", "output")
EDITED = {
    "before dP": (UP_TO_DSOFTMAX, (SUM, SUM)),
    "after a dP that writes nothing": (UP_TO_DSOFTMAX, (SUM, SUM), {"dP": ("    pass",)}),
    "wrong before dP": (UP_TO_DSOFTMAX, (SUM, "partial")),
    "n and k of a launch": (UP_TO_OUTPUT, ("n=d, k=T", "n=T, k=d")),
    "the kernel": (
        UP_TO_OUTPUT,
        ("element(A, row0 + y, k0 + x, M, K)", "A[unsafe_offset=(row0 + y) * K + k0 + x]"),
    ),
}
"""Exercise -> the arguments of `solve`."""


def solve(
    puzzle, folder, ids: tuple[str, ...], edit: tuple[str, str], more_bodies: dict | None = None
) -> Exercise:
    """Create an exercise with the edited solution in the blanks `ids`, and the code `more_bodies` in others."""
    blanks.generate_problems(roots.get_solutions() / "p23", folder / "p23")
    exercise = replace(Exercise(puzzle, puzzle.mojo_rung), root=folder)
    skeleton, solution = (
        blanks.read_source(exercise.path),
        blanks.find_blanks(blanks.read_source(exercise.solution)),
    )
    bodies = {id: tuple(line.replace(*edit) for line in solution[id].body) for id in ids} | (
        more_bodies or {}
    )
    exercise.path.write_text(blanks.join_segments(blanks.split_blanks(skeleton), bodies))
    return exercise


@pytest.mark.parametrize(
    ("edited", "states"),
    [
        ("before dP", {"dP": "unsolved", "dsoftmax": "correct"}),
        ("after a dP that writes nothing", {"dP": "wrong", "dsoftmax": "correct"}),
        ("wrong before dP", {"dP": "unsolved", "dsoftmax": "wrong"}),
    ],
)
def test_gate_can_be_checked_before_its_input_is_solved(puzzle, recorded, edited, states):
    results = Checker(puzzle).check(recorded[edited].package, ["dP", "dsoftmax"])
    assert {result.gate.id: result.state for result in results} == states
    if states["dsoftmax"] == "wrong":
        assert "block.sum is missing" in " ".join(results[-1].diagnosis)


@pytest.mark.parametrize(
    ("edited", "states"),
    [
        ("n and k of a launch", {"matmul": "correct", "output": "wrong"}),
        ("the kernel", {"matmul": "wrong", "output": "correct"}),
    ],
)
def test_bug_is_attributed_to_its_launch(puzzle, recorded, edited, states):
    results = Checker(puzzle).check(
        recorded[edited].package, ["matmul", "output"], puzzle.list_cases(None)[:3]
    )
    assert {result.gate.id: result.state for result in results} == states
    advice = "matmul's code is right where matmul launches it: the sizes or the tensors of this launch do not fit each other"
    assert (advice in results[1].diagnosis) == (states["output"] == "wrong")
    assert advice not in results[0].diagnosis
    assert results[1].hint == ("output-2" if states["output"] == "wrong" else None)


@pytest.mark.parametrize("name", EMPTY)
def test_no_launch_has_an_empty_grid(puzzle, recordings, name):
    """A grid of 0 blocks is an error on a GPU, and a matmul over an empty dimension must write zeros."""
    dims = EMPTY[name]
    cases = recordings("float32").cases
    launches = {
        variant: [event for event in cases[variant, dims] if isinstance(event, RecordedLaunch)]
        for variant in ("unfused", "fused")
    }
    assert all(min(launch.grid) >= 1 for variant_launches in launches.values() for launch in variant_launches)
    written = {variant: {launch.name for launch in some} for variant, some in launches.items()}
    product = {"transposed_product"}
    without_key = {"output", "dQ", *product}
    assert (
        written["unfused"]
        == {"no batch": set(), "no query": {"dV", "dK", *product}, "no key": without_key}[name]
    )
    by_query = {"flash_forward", "delta", "flash_query"}
    assert written["fused"] == {"no batch": set(), "no query": {"flash_key_value"}, "no key": by_query}[name]


@pytest.mark.parametrize("variant", p23.PUZZLE.default_variants)
def test_two_runs_are_bit_equal(puzzle, recordings, variant):
    case = next(case for case in CASES if case.name == "many queries")
    recording = recordings("float32")
    inputs = Reference(puzzle, "float32", 0).get_inputs(case)
    first, second = (Replay(recording, puzzle, "float32").run(variant, case, inputs) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_scores_are_not_stored(puzzle, recordings):
    """The flash kernels store each output element once and use no workspace."""
    case = next(case for case in EDGE_CASES if case.dims == (1, 1, 2, 300, 8))
    recording = recordings("float32")
    replay = Replay(recording, puzzle, "float32")
    outputs = replay.run("fused", case, Reference(puzzle, "float32", 0).get_inputs(case))
    stored_bytes = sum(launch.counters.global_store.bytes for launch in replay.gpu.launches)
    assert stored_bytes == sum(array.nbytes for array in outputs.values())
    assert not any(launch.counters.global_atomic.bytes for launch in replay.gpu.launches)
    written = {
        launch.name: [t for t, c in launch.counters.tensors.items() if c.written]
        for launch in replay.gpu.launches
    }
    assert written == {
        "flash_forward": ["output", "lse"],
        "delta": ["delta"],
        "flash_query": ["grad_query"],
        "flash_key_value": ["grad_key", "grad_value"],
    }
    assert not any(
        isinstance(event, RecordedTensor) and event.is_workspace
        for event in recording.cases["fused", case.dims]
    )
