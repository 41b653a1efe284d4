"""Puzzle 22's kernels: the CPU path against the reference in every dtype and awkward size, and compiles for every GPU.

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

from harness.check.compare import EPSILON, relative_error
from harness.check.execution import variant_outputs
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import cpu
from harness.puzzles.p22 import spec as p22
from harness.spec import ops, rounding
from harness.spec.puzzle import Case
from harness.toolchain.cache import cache_folder, digest
from harness.toolchain.packages import OpPackage

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
WRONG_SCOPE = ROOT / "tests" / "p22" / "wrong_scope"
DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def judged(puzzle, program):
    """(case, dtype, seed) -> what both variants wrote, and "variant.quantity" -> verdict."""

    def run(case: Case, dtype: str, seed: int = 0):
        reference = Reference(puzzle, dtype, seed)
        outputs = graphs.execute(puzzle, program(dtype), cpu(), reference.inputs(case))
        verdicts = {}
        for variant in puzzle.default_variants:
            quantities = [name.split(".")[1] for name in outputs if name.startswith(f"{variant}.")]
            judged = reference.compare_all(
                case, cpu(), variant, variant_outputs(outputs, variant), quantities
            )
            verdicts |= {f"{variant}.{quantity}": verdict for quantity, verdict in judged.items()}
        return outputs, verdicts

    return run


def wrong(verdicts) -> dict:
    """The verdicts that are not ok."""
    return {name: verdict for name, verdict in verdicts.items() if not verdict.ok}


# ---- Right values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", p22.cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_cases(judged, dtype, case):
    _, verdicts = judged(case, dtype)
    assert len(verdicts) == 2 * 8 + 1, "output, mean, rstd and five gradients twice, and the row sums"
    assert not wrong(verdicts)


@pytest.mark.parametrize(
    "dims",
    [
        (2, 3, 4, 1),
        (1, 1, 2, 1),
        (1, 2, 4096, 5),  # the row is summed in 128 chunks
        (3, 17, 33, 19),
        (13, 1, 31, 65),
        (1, 129, 2, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_sizes(judged, dtype, dims):
    _, verdicts = judged(Case("awkward", "", dims, "hard"), dtype, 1)
    assert not wrong(verdicts)


@pytest.mark.parametrize("dims", [(1, 70000, 4, 4), (70000, 1, 4, 4)], ids=str)
def test_more_rows_than_a_grid_dimension(judged, dims):
    """A grid ends at 65535 along y; the CPU path is the reference of the kernels that go round that."""
    _, verdicts = judged(Case("long", "", dims, "hard"), "float32")
    assert not wrong(verdicts)


@pytest.mark.parametrize("dims", [(2, 3, 1, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("values", ["plain", "hard"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_one_element_normalises_to_nought(judged, dtype, values, dims):
    """x_hat = 0, so output = beta * W + bias, rstd = 1 / sqrt(eps), dgamma = 0, and in dx the terms g and c2 cancel."""
    case = Case("one element", "", dims, values)
    arrays = p22.inputs(case, dtype, 0)
    outputs, verdicts = judged(case, dtype, 0)
    outputs = {name: rounding.values(array) for name, array in outputs.items()}
    # An error of dx counts against the terms that cancel; the truth itself is 0.
    assert not wrong({name: v for name, v in verdicts.items() if not name.endswith("grad_input")})
    g = np.abs(arrays["grad_output"] @ arrays["linear_weight"] * arrays["ln_weight"]).max()
    output = arrays["ln_bias"] * arrays["linear_weight"][:, 0] + arrays["linear_bias"]
    for variant in ("fused", "unfused"):
        assert relative_error(outputs[f"{variant}.output"], output) <= 2 * EPSILON[dtype]
        rstd = outputs[f"{variant}.rstd"]
        assert relative_error(rstd, np.full_like(rstd, 1e5**0.5)) <= 2 * EPSILON[ops.accum_dtype(dtype)]
        assert not outputs[f"{variant}.grad_ln_weight"].any()
        assert np.abs(outputs[f"{variant}.grad_input"]).max() <= 4 * EPSILON[dtype] * 1e5**0.5 * g


@pytest.mark.parametrize("case", p22.cases()[:4], ids=lambda case: case.name)
def test_float64_has_float64_digits(judged, case):
    _, verdicts = judged(case, "float64", 2)
    assert max(verdict.error for verdict in verdicts.values()) < 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_are_bit_equal(judged, dtype):
    case = p22.cases()[4]
    first, second = (judged(case, dtype)[0] for _ in range(2))
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_bit_equal_in_both_variants(judged, dtype):
    outputs, _ = judged(p22.cases()[3], dtype)
    for name in ("mean", "rstd"):
        assert np.array_equal(outputs[f"fused.{name}"], outputs[f"unfused.{name}"])


@pytest.mark.parametrize("dims", [(0, 3, 5, 4), (2, 0, 5, 4)], ids=str)
def test_no_rows_give_zero_parameter_gradients(puzzle, program, dims):
    inputs = Reference(puzzle, "float32", 0).inputs(Case("empty", "", dims, "plain"))
    outputs = graphs.execute(puzzle, program("float32"), cpu(), inputs)
    for variant in ("fused", "unfused"):
        assert outputs[f"{variant}.output"].shape == (*dims[:2], 4)
        for name in ("grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias"):
            assert outputs[f"{variant}.{name}"].size and not outputs[f"{variant}.{name}"].any(), name


# ---- Sizes that do not belong together ----------------------------------------------------------------------


def sized(size: str | int, **sizes: int) -> int:
    """An axis of a shape for B, S, H, O = 2, 3, 5, 7, or others by name."""
    return size if isinstance(size, int) else {"B": 2, "S": 3, "H": 5, "O": 7, "rows": 6, **sizes}[size]


@pytest.fixture(scope="module")
def unrelated(cpu_graphs):
    """The graph of the training ops with every size a symbol of its own, and its arguments with the shapes of the puzzle
    for B, S, H, O = 2, 3, 5, 7."""
    buffers = {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for op in (p22.FORWARD, p22.BACKWARD, p22.ROW_SUMS):
        for name, argument in {**op.writes, **op.reads}.items():
            buffers[f"{op.name}/{name}"] = torch.zeros([sized(size) for size in argument.shape])
    return cpu_graphs()["unbound"], buffers


def mismatches():
    """Every axis of every tensor that the ops compare with another tensor."""
    for op in (p22.FORWARD, p22.BACKWARD, p22.ROW_SUMS):
        for name, argument in {**op.writes, **op.reads}.items():
            for axis, size in enumerate(argument.shape):
                decides = name == "input" or (name == "linear_weight" and axis == 0)
                if not decides:
                    yield op.name, name, axis, sized(size)


@pytest.mark.parametrize(("op", "name", "axis", "expected"), list(mismatches()))
def test_a_size_that_does_not_fit_is_named(unrelated, op, name, axis, expected):
    program, buffers = unrelated
    wrong_shape = list(buffers[f"{op}/{name}"].shape)
    wrong_shape[axis] += 1
    with pytest.raises(ValueError) as raised:
        program.run({**buffers, f"{op}/{name}": torch.zeros(wrong_shape)})
    wanted = f"{name} has size {expected + 1} along axis {axis}, expected {expected}"
    assert wanted in str(raised.value)


def test_sizes_that_fit_run(unrelated):
    program, buffers = unrelated
    program.run(buffers)


@pytest.mark.parametrize(("hidden", "output"), [(0, 7), (5, 0)])
def test_hidden_and_output_of_nought_are_refused(puzzle, program, hidden, output):
    """The chapter's graph; NumPy cannot make the reference of such a case, so the tensors are made here."""
    buffers = {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for call in puzzle.calls:
        for name, argument in {**call.op.writes, **call.op.reads}.items():
            buffers[name] = torch.zeros([sized(size, H=hidden, O=output) for size in argument.shape])
    loaded = program("float32")
    with pytest.raises(
        ValueError, match=f"hidden_dim and output_dim must be at least 1, got {hidden} and {output}"
    ):
        loaded.run({name: buffers[name.split(".")[-1]].clone() for name in loaded.arguments})


def test_more_columns_than_a_grid_covers_are_refused(puzzle, program):
    too_many = 16 * 65535 + 1
    case = Case("too wide", "", (1, 1, too_many, 1), "plain")
    inputs = Reference(puzzle, "float32", 0).inputs(case)
    with pytest.raises(ValueError, match=f"must be at most {too_many - 1}, got {too_many} and 1"):
        graphs.execute(puzzle, program("float32"), cpu(), inputs)


# ---- Compiles for GPUs that are not here --------------------------------------------------------------------


def kept(home: Path, parts: list[str], *command: str) -> subprocess.CompletedProcess:
    """Runs a compile with an empty home folder, and keeps what it printed for the same content.

    MAX and Mojo cache compiled code in the home folder, and code that came with an error is cached without it: only a
    compile from nothing says everything. `parts` name all that the outcome depends on.
    """
    file = cache_folder("gpu-compiles") / f"{digest([*parts, version('max')])}.json"
    if not file.is_file():
        environment = {
            **os.environ,
            "WORKBOOK_CACHE": str(file.parents[1]),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
        }
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=550, env=environment)
        if "compiled" not in done.stdout and "accepted" not in done.stdout:
            return done  # it did not come to an end: nothing to keep
        staged = file.with_suffix(f".{os.getpid()}")
        staged.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
        staged.replace(file)
    return subprocess.CompletedProcess(command, *json.loads(file.read_text()))


def graph_for(home: Path, api: str, arch: str, package: OpPackage):
    """Compiles the graph for a virtual device, and an op with a wrong scope beside it, in a process of its own."""
    program = ROOT / "tests" / "p22" / "p22_compile_graph.py"
    spec = ROOT / "harness" / "puzzles" / "p22" / "spec.py"
    wrong_scope = OpPackage(WRONG_SCOPE)
    parts = [package.digest, wrong_scope.digest, program.read_text(), spec.read_text(), api, arch]
    folders = map(str, (package.path, wrong_scope.path))
    return kept(home, parts, sys.executable, str(program), api, arch, *folders)


def launches_for(home: Path, target: str, package: OpPackage):
    """Compiles every kernel for a target through the code that launches it."""
    program = ROOT / "tests" / "p22" / "p22_launches.mojo"
    mojo = str(Path(sys.executable).with_name("mojo"))
    flags = (f"--target-accelerator={target}", "-D", f"TARGET={target}", "-I", str(package.path.parent))
    return kept(home, [package.digest, program.read_text(), target], mojo, "run", *flags, str(program))


def errors_in(finished: subprocess.CompletedProcess) -> list[str]:
    """What went wrong in a compile: the compiler's error lines, which may come with an exit code of 0."""
    lines = [line for line in finished.stderr.splitlines() if "error:" in line.lower()]
    if finished.returncode and not lines:
        lines = [f"exit code {finished.returncode}: {finished.stderr[-2000:]}"]
    return lines


@pytest.fixture(scope="module")
def compiles(solution, tmp_path_factory):
    """Target -> the finished process of a compile for it, started when it is first asked for."""
    home = tmp_path_factory.mktemp("home")

    @functools.cache
    def finished(target: str) -> subprocess.CompletedProcess:
        if target == "gfx942":
            return graph_for(home, "hip", target, solution)
        return launches_for(home, target, solution)

    return finished


def of_wrong_scope(line: str) -> bool:
    """Whether an error names the kernel that is wrong on AMD's GPUs: the compiler names it after its package."""
    return f"in function ops_{OpPackage(WRONG_SCOPE).digest}" in line


@pytest.mark.slow
def test_the_whole_graph_compiles_for_amd(compiles):
    finished = compiles("gfx942")
    assert not [line for line in errors_in(finished) if not of_wrong_scope(line)]
    assert finished.stdout == "compiled 5 calls with 25 arguments for gfx942\n"


@pytest.mark.slow
def test_a_wrong_atomic_scope_is_seen_though_the_compile_claims_success(compiles):
    finished = compiles("gfx942")
    assert finished.returncode == 0
    (error,) = [line for line in errors_in(finished) if of_wrong_scope(line)]
    assert "unsupported atomic synchronization scope" in error


@pytest.mark.parametrize(
    "target", ["mi300x", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "apple-m4"))]
)
def test_every_kernel_compiles_in_three_dtypes(compiles, target):
    finished = compiles(target)
    assert not errors_in(finished)
    launched = launch_lines(finished)
    source = (ROOT / "solutions/p22/op/launches.mojo").read_text()
    assert all(int(line[-1]) > 500 for line in launched), "every kernel has code"
    for dtype in ("float32", "bfloat16", "float16"):
        names = {line[3] for line in launched if line[1] == dtype}
        assert len(names) == len(set(launch_names(source))), dtype


def launch_lines(finished) -> list[list[str]]:
    """The words of each `launch` line: launch, dtype, variant, name, grid x and y, block x and y, bytes of code."""
    return [line.split() for line in finished.stdout.splitlines() if line.startswith("launch ")]


def launch_names(source: str) -> list[str]:
    """The names that the launch code gives its launches."""
    return re.findall(r"launcher\.launch\[.*?\]\(\s*\"(\w+)\"", source)


def test_every_grid_and_block_is_within_what_all_targets_allow(compiles):
    """The recorded sizes are 3 x 70000 rows, H = 37, O = 53: more rows than a grid has along y."""
    launched = launch_lines(compiles("mi300x"))
    for line in launched:
        grid_x, grid_y, block_x, block_y = map(int, line[4:8])
        assert 1 <= grid_x < 2**31 and 1 <= grid_y <= 65535 and block_x * block_y <= 1024, line
    one_launch = [line for line in launched if line[1:4] == ["float32", "fused", "minimal_fused_forward"]]
    assert [line[4:6] for line in one_launch] == [["3", "65535"]]


def test_the_ledger_is_what_the_launches_ask_for(compiles):
    """Bytes allocated in between: the printed ledger against the workspaces that the launch code requests."""
    asked = {}
    for line in compiles("mi300x").stdout.splitlines():
        if line.startswith("workspace "):
            _, dtype, variant, _, size = line.split()
            asked[dtype, variant] = asked.get((dtype, variant), 0) + int(size)
    for dtype in ("float32", "bfloat16", "float16"):
        ledger = p22.ledger((3, 70000, 37, 53), dtype)
        for variant in ("fused", "unfused"):
            assert asked[dtype, variant] == sum(ledger.between[variant].values()), (dtype, variant)


def test_sizes_that_no_memory_holds_are_refused(compiles):
    lines = compiles("mi300x").stdout.splitlines()
    assert "refused batch_size * seq_len must be at most 2147483647, got 65536 * 32768" in lines
    assert "accepted 65536 32767 1 1" in lines
