"""Puzzle 22's kernels: the CPU path against the reference in every dtype, and compilation for all GPU targets.

All values come from the graphs that a run of the puzzle uses: one for each dtype, shared by every test.
"""

import functools
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.check.compare import EPSILON, compute_relative_error
from harness.check.execution import select_variant_outputs
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import make_cpu_target
from harness.puzzles.p22 import spec as p22
from harness.spec import ops, rounding
from harness.spec.puzzle import Case
from harness.toolchain.cache import compute_digest, get_cache_folder
from harness.toolchain.packages import OpPackage

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
WRONG_SCOPE = ROOT / "tests" / "p22" / "wrong_scope"
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def check_values(puzzle, program):
    """Return a function (case, dtype, seed) -> both variants' outputs and {"variant.quantity": result}."""

    def run(case: Case, dtype: str, seed: int = 0):
        reference = Reference(puzzle, dtype, seed)
        outputs = graphs.execute(puzzle, program(dtype), make_cpu_target(), reference.get_inputs(case))
        results = {}
        for variant in puzzle.default_variants:
            quantities = [name.split(".")[1] for name in outputs if name.startswith(f"{variant}.")]
            of_variant = reference.compare_all(
                case, make_cpu_target(), variant, select_variant_outputs(outputs, variant), quantities
            )
            results |= {f"{variant}.{quantity}": result for quantity, result in of_variant.items()}
        return outputs, results

    return run


def select_failures(results) -> dict:
    return {name: result for name, result in results.items() if not result.ok}


# ---- Correct values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_cases_match_the_reference(check_values, dtype):
    for case in p22.cases():
        _, results = check_values(case, dtype)
        assert len(results) == 2 * 8 + 1, "output, mean, rstd and five gradients twice, and the row sums"
        assert not select_failures(results), case.name


EDGE_CASES = [
    (2, 3, 4, 1),
    (1, 1, 2, 1),
    (1, 2, 4096, 5),  # the row is summed in 128 chunks
    (3, 17, 33, 19),
    (13, 1, 31, 65),
    (1, 129, 2, 3),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_case_sizes_match_the_reference(check_values, dtype):
    for dims in EDGE_CASES:
        _, results = check_values(Case("awkward", "", dims, "hard"), dtype, 1)
        assert not select_failures(results), dims


@pytest.mark.parametrize("dims", [(1, 70000, 4, 4), (70000, 1, 4, 4)], ids=str)
def test_more_rows_than_the_grid_y_limit(check_values, dims):
    """A grid has at most 65535 blocks along y, so the kernels split the rows; the CPU path is their reference."""
    _, results = check_values(Case("long", "", dims, "hard"), "float32")
    assert not select_failures(results)


@pytest.mark.parametrize("dims", [(2, 3, 1, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_element_rows_normalize_to_zero(check_values, dtype, dims):
    """x_hat = 0, so output = beta * W + bias, rstd = 1 / sqrt(eps), dgamma = 0, and in dx the terms g and c2 cancel."""
    case = Case("one element", "", dims, "hard")
    arrays = p22.inputs(case, dtype, 0)
    outputs, results = check_values(case, dtype, 0)
    outputs = {name: rounding.to_float64(array) for name, array in outputs.items()}
    # The exact dx is 0, so its error is relative to the cancelling terms.
    assert not select_failures({name: v for name, v in results.items() if not name.endswith("grad_input")})
    g = np.abs(arrays["grad_output"] @ arrays["linear_weight"] * arrays["ln_weight"]).max()
    output = arrays["ln_bias"] * arrays["linear_weight"][:, 0] + arrays["linear_bias"]
    for variant in ("fused", "unfused"):
        assert compute_relative_error(outputs[f"{variant}.output"], output) <= 2 * EPSILON[dtype]
        rstd = outputs[f"{variant}.rstd"]
        assert (
            compute_relative_error(rstd, np.full_like(rstd, 1e5**0.5))
            <= 2 * EPSILON[ops.get_accum_dtype(dtype)]
        )
        assert not outputs[f"{variant}.grad_ln_weight"].any()
        assert np.abs(outputs[f"{variant}.grad_input"]).max() <= 4 * EPSILON[dtype] * 1e5**0.5 * g


@pytest.mark.parametrize("case", p22.cases()[:4], ids=lambda case: case.name)
def test_float64_has_float64_precision(check_values, case):
    _, results = check_values(case, "float64", 2)
    assert max(result.error for result in results.values()) < 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_are_bit_equal(check_values, dtype):
    case = p22.cases()[4]
    first, second = (check_values(case, dtype)[0] for _ in range(2))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_bit_equal_in_both_variants(check_values, dtype):
    outputs, _ = check_values(p22.cases()[3], dtype)
    for name in ("mean", "rstd"):
        assert np.array_equal(outputs[f"fused.{name}"], outputs[f"unfused.{name}"])


@pytest.mark.parametrize("dims", [(0, 3, 5, 4), (2, 0, 5, 4)], ids=str)
def test_zero_rows_give_zero_parameter_gradients(puzzle, program, dims):
    inputs = Reference(puzzle, "float32", 0).get_inputs(Case("empty", "", dims, "plain"))
    outputs = graphs.execute(puzzle, program("float32"), make_cpu_target(), inputs)
    for variant in ("fused", "unfused"):
        assert outputs[f"{variant}.output"].shape == (*dims[:2], 4)
        for name in ("grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias"):
            assert outputs[f"{variant}.{name}"].size and not outputs[f"{variant}.{name}"].any(), name


# ---- Mismatched sizes --------------------------------------------------------------------------------------


def get_axis_size(size: str | int, **sizes: int) -> int:
    """Return the size of an axis: a number, or a symbol's value, by default B, S, H, O = 2, 3, 5, 7."""
    return size if isinstance(size, int) else {"B": 2, "S": 3, "H": 5, "O": 7, "rows": 6, **sizes}[size]


@pytest.fixture(scope="module")
def unbound_program(cpu_graphs):
    """The graph of the training ops with a separate symbol for each size, and arguments in the puzzle's shapes for
    B, S, H, O = 2, 3, 5, 7."""
    buffers = {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for op in (p22.FORWARD, p22.BACKWARD, p22.ROW_SUMS):
        for name, argument in {**op.writes, **op.reads}.items():
            buffers[f"{op.name}/{name}"] = torch.zeros([get_axis_size(size) for size in argument.shape])
    return cpu_graphs()["unbound"], buffers


def list_compared_axes():
    """Return every axis of every tensor that the ops compare with another tensor."""
    for op in (p22.FORWARD, p22.BACKWARD, p22.ROW_SUMS):
        for name, argument in {**op.writes, **op.reads}.items():
            for axis, size in enumerate(argument.shape):
                decides = name == "input" or (name == "linear_weight" and axis == 0)
                if not decides:
                    yield op.name, name, axis, get_axis_size(size)


@pytest.mark.parametrize(("op", "name", "axis", "expected"), list(list_compared_axes()))
def test_mismatched_size_is_named(unbound_program, op, name, axis, expected):
    program, buffers = unbound_program
    wrong_shape = list(buffers[f"{op}/{name}"].shape)
    wrong_shape[axis] += 1
    with pytest.raises(ValueError) as raised:
        program.run({**buffers, f"{op}/{name}": torch.zeros(wrong_shape)})
    message = f"{name} has size {expected + 1} along axis {axis}, expected {expected}"
    assert message in str(raised.value)


def test_matching_sizes_run(unbound_program):
    program, buffers = unbound_program
    program.run(buffers)


@pytest.mark.parametrize(("hidden", "output"), [(0, 7), (5, 0)])
def test_zero_hidden_and_output_sizes_are_refused(puzzle, program, hidden, output):
    """NumPy cannot compute a reference for these sizes, so the graph runs on tensors made here."""
    buffers = {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for call in puzzle.calls:
        for name, argument in {**call.op.writes, **call.op.reads}.items():
            buffers[name] = torch.zeros([get_axis_size(size, H=hidden, O=output) for size in argument.shape])
    kernels = program("float32")
    with pytest.raises(
        ValueError, match=f"hidden_dim and output_dim must be at least 1, got {hidden} and {output}"
    ):
        kernels.run({name: buffers[name.split(".")[-1]].clone() for name in kernels.arguments})


def test_too_many_columns_are_refused(puzzle, program):
    too_many = 16 * 65535 + 1
    case = Case("too wide", "", (1, 1, too_many, 1), "plain")
    inputs = Reference(puzzle, "float32", 0).get_inputs(case)
    with pytest.raises(ValueError, match=f"must be at most {too_many - 1}, got {too_many} and 1"):
        graphs.execute(puzzle, program("float32"), make_cpu_target(), inputs)


# ---- Compiles for other GPUs --------------------------------------------------------------------------------


def run_cached(home: Path, parts: list[str], *command: str) -> subprocess.CompletedProcess:
    """Run a compile with an empty home folder and cache what it printed.

    MAX and Mojo cache compiled code in the home folder, and code that came with an error is cached without it: only a
    clean compile prints every message. `parts` is the cache key: everything that the outcome depends on.
    """
    file = get_cache_folder("gpu-compiles") / f"{compute_digest([*parts, version('max')])}.json"
    if not file.is_file():
        environment = {
            **os.environ,
            "WORKBOOK_CACHE": str(file.parents[1]),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
        }
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=550, env=environment
        )
        if "compiled" not in result.stdout and "accepted" not in result.stdout:
            return result  # it did not finish: nothing to cache
        temporary_file = file.with_suffix(f".{os.getpid()}")
        temporary_file.write_text(json.dumps([result.returncode, result.stdout, result.stderr]))
        temporary_file.replace(file)
    return subprocess.CompletedProcess(command, *json.loads(file.read_text()))


def compile_graph(home: Path, api: str, arch: str, package: OpPackage):
    """Compile the graph for a virtual device, and an op with a wrong scope next to it, in a separate process."""
    program = ROOT / "tests" / "p22" / "p22_compile_graph.py"
    spec = ROOT / "harness" / "puzzles" / "p22" / "spec.py"
    wrong_scope = OpPackage(WRONG_SCOPE)
    parts = [package.digest, wrong_scope.digest, program.read_text(), spec.read_text(), api, arch]
    folders = map(str, (package.path, wrong_scope.path))
    return run_cached(home, parts, sys.executable, str(program), api, arch, *folders)


def compile_launches(home: Path, target: str, package: OpPackage):
    """Compile every kernel for a target through the code that launches it."""
    program = ROOT / "tests" / "p22" / "p22_launches.mojo"
    mojo = str(Path(sys.executable).with_name("mojo"))
    flags = (f"--target-accelerator={target}", "-D", f"TARGET={target}", "-I", str(package.path.parent))
    return run_cached(home, [package.digest, program.read_text(), target], mojo, "run", *flags, str(program))


def list_errors(result: subprocess.CompletedProcess) -> list[str]:
    """Return the compiler's error lines; the exit code may be 0."""
    lines = [line for line in result.stderr.splitlines() if "error:" in line.lower()]
    if result.returncode and not lines:
        lines = [f"exit code {result.returncode}: {result.stderr[-2000:]}"]
    return lines


@pytest.fixture(scope="module")
def compiles(solution, tmp_path_factory):
    """Return a cached function that compiles for a target and returns the completed process."""
    home = tmp_path_factory.mktemp("home")

    @functools.cache
    def compile_target(target: str) -> subprocess.CompletedProcess:
        if target == "gfx942":
            return compile_graph(home, "hip", target, solution)
        return compile_launches(home, target, solution)

    return compile_target


def is_in_wrong_scope(line: str) -> bool:
    """Return whether an error is about the kernel that is invalid on AMD GPUs."""
    return f"in function ops_{OpPackage(WRONG_SCOPE).digest}" in line


@pytest.mark.slow
def test_graph_compiles_for_amd(compiles):
    result = compiles("gfx942")
    assert not [line for line in list_errors(result) if not is_in_wrong_scope(line)]
    assert result.stdout == "compiled 5 calls with 25 arguments for gfx942\n"


@pytest.mark.slow
def test_wrong_atomic_scope_is_reported(compiles):
    result = compiles("gfx942")
    assert result.returncode == 0
    (error,) = [line for line in list_errors(result) if is_in_wrong_scope(line)]
    assert "unsupported atomic synchronization scope" in error


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mi300x", "sm_80", "apple-m4"])
def test_kernels_compile_in_three_dtypes(compiles, target):
    result = compiles(target)
    assert not list_errors(result)
    launches = parse_launch_lines(result)
    source = (ROOT / "solutions/p22/op/launches.mojo").read_text()
    assert all(int(line[-1]) > 500 for line in launches), "every kernel has code"
    for dtype in ("float32", "bfloat16", "float16"):
        names = {line[3] for line in launches if line[1] == dtype}
        assert len(names) == len(set(find_launch_names(source))), dtype


def parse_launch_lines(result) -> list[list[str]]:
    """Return the fields of each `launch` line: launch, dtype, variant, name, grid x and y, block x and y,
    bytes of code."""
    return [line.split() for line in result.stdout.splitlines() if line.startswith("launch ")]


def find_launch_names(source: str) -> list[str]:
    return re.findall(r"launcher\.launch\[.*?\]\(\s*\"(\w+)\"", source)


@pytest.mark.slow
def test_launch_sizes_are_within_all_target_limits(compiles):
    """The recorded sizes are 3 x 70000 rows, H = 37, O = 53: more rows than grid y allows."""
    launches = parse_launch_lines(compiles("mi300x"))
    for line in launches:
        grid_x, grid_y, block_x, block_y = map(int, line[4:8])
        assert 1 <= grid_x < 2**31 and 1 <= grid_y <= 65535 and block_x * block_y <= 1024, line
    one_launch = [line for line in launches if line[1:4] == ["float32", "fused", "minimal_fused_forward"]]
    assert [line[4:6] for line in one_launch] == [["3", "65535"]]


@pytest.mark.slow
def test_ledger_matches_the_launches(compiles):
    """The ledger's allocated bytes match the workspaces requested by the launch code."""
    requested_bytes = {}
    for line in compiles("mi300x").stdout.splitlines():
        if line.startswith("workspace "):
            _, dtype, variant, _, size = line.split()
            requested_bytes[dtype, variant] = requested_bytes.get((dtype, variant), 0) + int(size)
    for dtype in ("float32", "bfloat16", "float16"):
        ledger = p22.ledger((3, 70000, 37, 53), dtype)
        for variant in ("fused", "unfused"):
            assert requested_bytes[dtype, variant] == sum(ledger.temporaries[variant].values()), (
                dtype,
                variant,
            )


@pytest.mark.slow
def test_sizes_beyond_memory_are_rejected(compiles):
    lines = compiles("mi300x").stdout.splitlines()
    assert "refused batch_size * seq_len must be at most 2147483647, got 65536 * 32768" in lines
    assert "accepted 65536 32767 1 1" in lines
