"""Puzzle 23's kernels: the GPU kernels on the virtual GPU in three dtypes, the CPU path in four, and awkward sizes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from max.driver import CPU

from harness.check import tensors
from harness.check.gates import Checker
from harness.devices import graphs
from harness.devices.recorder import Order, RecordedLaunch, record_many
from harness.devices.replay import Replay
from harness.devices.targets import cpu
from harness.learner.work import Work
from harness.puzzles.p23 import spec as p23
from harness.spec.ops import Argument, Call
from harness.spec.puzzle import Case

pytestmark = pytest.mark.compiler

DTYPES = ("float32", "bfloat16", "float16", "float64")
CASES = p23.cases()
AWKWARD = [
    Case(f"awkward {dims}", "", dims, "hard")
    for dims in ((1, 1, 5, 6, 1), (5, 1, 3, 17, 16), (1, 3, 33, 2, 31), (1, 1, 2, 300, 8))
]
EMPTY = {"no batch": (0, 2, 3, 4, 5), "no query": (1, 2, 0, 4, 5), "no key": (1, 2, 3, 0, 5)}


# ---- The kernels on the virtual GPU -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(puzzle, solution):
    """dtype -> None: records the solution at every size that is checked here, once."""
    dims = tuple(dict.fromkeys(case.dims for case in [*CASES, *AWKWARD]))
    empty = tuple(EMPTY.values())

    def record(dtype: str):
        return record_many(
            [Order(solution, dims, ("unfused",), small_grid=True), Order(solution, empty)], "p23", dtype
        )

    return record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_solution_is_right_in_every_case(puzzle, solution, recorded, dtype):
    recorded(dtype)
    results = Checker(puzzle, dtype=dtype).check(solution, None, [*CASES, *AWKWARD])
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]
    assert not any(result.findings for result in results)


def test_the_learners_file_compiles_and_is_unsolved(puzzle):
    results = Checker(puzzle).check(Work(puzzle, puzzle.mojo_rung).package)
    assert {result.state for result in results} == {"unsolved"}


@pytest.mark.parametrize("name", EMPTY)
def test_no_launch_is_empty_and_none_is_left_out(puzzle, recorded, name):
    """A grid of 0 blocks is an error on a GPU; a product without summands still has its zeros to write."""
    dims = EMPTY[name]
    recording = recorded("float32")[1]
    launches = [event for event in recording.cases["unfused", dims] if isinstance(event, RecordedLaunch)]
    assert all(min(launch.grid) >= 1 for launch in launches)
    written = {launch.name for launch in launches}
    assert written == {"no batch": set(), "no query": {"dV", "dK"}, "no key": {"output", "dQ"}}[name]


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_sum_over_gives_nought(puzzle, programs, name):
    dims = EMPTY[name]
    inputs = {key: torch.zeros(shape) for key, shape in shapes_of_inputs(puzzle, dims).items()}
    outputs = tensors.execute(puzzle, programs["float32"], cpu(), inputs, dims)
    for label, tensor in outputs.items():
        assert tuple(tensor.shape) == puzzle.shapes(dims)[label.split(".")[1]]
        assert not tensor.any(), f"{label} is 0 where it has elements"


def shapes_of_inputs(puzzle, dims):
    """Input -> its shape."""
    sizes = dict(zip(puzzle.dim_names, dims, strict=True))
    reads = {name: argument for call in puzzle.calls for name, argument in call.op.reads.items()}
    written = puzzle.shapes(dims)
    return {
        name: tuple(sizes[size] for size in argument.shape)
        for name, argument in reads.items()
        if name not in written
    }


def test_two_runs_are_bit_equal(puzzle, recorded):
    case = next(case for case in CASES if case.name == "many queries")
    recording = recorded("float32")[0]
    inputs = tensors.Reference(puzzle, "float32", 0).inputs(case)
    first, second = (Replay(recording, puzzle, "float32").run("unfused", case, inputs) for _ in range(2))
    assert all(torch.equal(first[name].view(torch.int32), second[name].view(torch.int32)) for name in first)


# ---- The CPU path -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(puzzle, solution):
    """dtype -> the graph of every step on the CPU, all compiled as one unit."""
    return graphs.load_each(
        solution, dict.fromkeys(DTYPES, puzzle.calls), {dtype: dtype for dtype in DTYPES}, CPU()
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", [*CASES, *AWKWARD], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_path_is_right(puzzle, programs, dtype, case, seed):
    reference = tensors.Reference(puzzle, dtype, seed)
    outputs = tensors.execute(puzzle, programs[dtype], cpu(), reference.inputs(case), case.dims)
    quantities = [name.split(".")[1] for name in outputs]
    assert len(quantities) == 8
    verdicts = tensors.judge_variant(puzzle, reference, case, cpu(), "unfused", outputs, quantities)
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


def test_a_size_that_does_not_fit_is_named(solution):
    """The ops with every size a symbol of its own, so that the op itself must compare them."""
    symbols = (f"size_{number}" for number in itertools.count())
    sizes = {"B": 2, "N": 3, "S": 4, "T": 5, "d": 6}
    calls, buffers, mismatches = [], {}, []
    for op in p23.STEPS:
        renamed = {}
        for kind in ("writes", "reads"):
            arguments = getattr(op, kind)
            renamed[kind] = {
                f"{op.name}/{name}": Argument(tuple(next(symbols) for _ in argument.shape), argument.dtype)
                for name, argument in arguments.items()
            }
            for name, argument in arguments.items():
                buffers[f"{op.name}/{name}"] = torch.zeros([sizes[size] for size in argument.shape])
        first = next(name for name in op.reads if name in ("query", "scores", "probabilities"))
        for name, argument in {**op.writes, **op.reads}.items():
            decides = {first: (0, 1, 2, 3), "value": (3,)}.get(name, ())
            decides = (2,) if name == "key" else decides
            mismatches += [
                (f"{op.name}/{name}", axis) for axis in range(len(argument.shape)) if axis not in decides
            ]
        calls.append(Call(replace(op, **renamed)))
    program = graphs.load(solution, tuple(calls), "float32", CPU())
    program.run(buffers)
    for name, axis in mismatches:
        wrong = list(buffers[name].shape)
        wrong[axis] += 1
        short = name.split("/")[1]
        words = f"{short} has size {wrong[axis]} along axis {axis}, expected {wrong[axis] - 1}"
        with pytest.raises(ValueError, match=words):
            program.run({**buffers, name: torch.zeros(wrong)})


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((1, 1, 2, 3, 0), "the head dimension must be at least 1, got 0"),
        ((1, 1, 1, 1, 16 * 65535 + 1), "must be at most 1048560, got 1 and 1048561"),
    ],
)
def test_sizes_that_no_kernel_covers_are_refused(puzzle, programs, dims, words):
    shapes = {**puzzle.shapes(dims), **shapes_of_inputs(puzzle, dims)}
    buffers = {name: torch.zeros(shapes[name.split(".")[-1]]) for name in programs["float32"].arguments}
    with pytest.raises(ValueError, match=words):
        programs["float32"].run(buffers)


def test_float64_has_float64_digits(puzzle, programs):
    case = CASES[1]
    reference = tensors.Reference(puzzle, "float64", 2)
    outputs = tensors.execute(puzzle, programs["float64"], cpu(), reference.inputs(case), case.dims)
    for name, truth in reference.truth(case, cpu()).items():
        if f"unfused.{name}" in outputs:
            got = outputs[f"unfused.{name}"].numpy()
            assert np.abs(got - truth).max() < 1e-13 * np.abs(truth[np.isfinite(truth)]).max(), name
