"""The fast variant on the CPU: right in every case and dtype, across the edges of its blocks, and to the last bit.

Its parts that a size can leave half full: a vector (16), a tile (12 rows, 32 columns), a run of k (128), a panel of k
(512), a block of rows (at most 192), and a chunk of rows of the packed LayerNorm output (4 Mi elements).
"""

import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.check.compare import EPSILON
from harness.check.ran import Compiled, of_variant
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import cpu
from harness.spec.puzzle import Case
from harness.toolchain.packages import run_mojo

pytestmark = pytest.mark.compiles

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTITIES = (
    "output", "mean", "rstd", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias",
)  # fmt: skip


@pytest.fixture(scope="module")
def fast_program(cpu_graphs):
    """dtype -> the CPU graph of the fast variant."""
    return lambda dtype: cpu_graphs()[f"fast_{dtype}"]


def wrong(puzzle, program, dtype, case, seed=0) -> dict[str, tuple[float, float]]:
    """Quantity -> error and limit, of those that are not within their limit in one case."""
    reference = Reference(puzzle, dtype, seed)
    outputs = graphs.execute(puzzle, program, cpu(), reference.inputs(case))
    verdicts = reference.compared(case, cpu(), "fast", of_variant(outputs, "fast"), list(QUANTITIES))
    return {name: (verdict.error, verdict.limit) for name, verdict in verdicts.items() if not verdict.ok}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_of_the_puzzle(puzzle, fast_program, dtype):
    for case in puzzle.cases(None):
        for seed in range(3):
            assert not wrong(puzzle, fast_program(dtype), dtype, case, seed), (case.name, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims",
    [
        pytest.param((1, 25, 33, 129), id="one more than a block of rows, two tiles of columns, a run"),
        pytest.param((5, 40, 512, 31), id="a whole panel of k, and less than a tile of columns"),
        pytest.param((3, 7, 1025, 513), id="one more than two panels, and than one"),
        pytest.param((2, 3, 1, 4), id="one column, whose dx cancels"),
        pytest.param((2, 1600, 17, 24), id="blocks of the largest size, the last one not full"),
    ],
)
def test_sizes_at_the_edges(puzzle, fast_program, dtype, dims):
    assert not wrong(puzzle, fast_program(dtype), dtype, Case("edges", "", dims, "hard"))


def test_more_rows_than_one_chunk_of_the_packed_layernorm_output(puzzle, fast_program):
    assert not wrong(
        puzzle, fast_program("float32"), "float32", Case("chunks", "", (3, 1400, 1030, 9), "hard")
    )


def test_statistics_keep_their_digits_far_from_zero(puzzle, fast_program):
    """A mean 10,000 deviations away, as E[x^2] - mean^2 could not do in float32."""
    x = np.random.default_rng(0).standard_normal((1, 5, 1037)).astype(np.float32) + np.float32(1e4)
    inputs = Reference(puzzle, "float32", 0).inputs(Case("far", "", (1, 5, 1037, 3), "hard"))
    inputs["input"] = x
    outputs = graphs.execute(puzzle, fast_program("float32"), cpu(), inputs)
    exact = x.astype(np.longdouble)
    mean = exact.mean(-1)
    rstd = 1 / np.sqrt(((exact - mean[..., None]) ** 2).mean(-1) + 1e-5)
    np.testing.assert_allclose(outputs["fast.mean"], mean.astype(np.float64), rtol=1.2e-7)
    np.testing.assert_allclose(outputs["fast.rstd"], rstd.astype(np.float64), rtol=2e-7)


def test_a_nan_stays_in_its_row(puzzle, fast_program):
    """Rows share tiles and packed panels, but no arithmetic."""
    inputs = Reference(puzzle, "float32", 0).inputs(Case("nan", "", (2, 20, 40, 50), "hard"))
    clean = graphs.execute(puzzle, fast_program("float32"), cpu(), inputs)
    clean = {name: tensor.copy() for name, tensor in clean.items()}
    inputs["input"][1, 3, 7] = float("nan")
    marred = graphs.execute(puzzle, fast_program("float32"), cpu(), inputs)
    for name in ("fast.output", "fast.grad_input"):
        assert np.isnan(marred[name][1, 3]).all()
        marred[name][1, 3] = clean[name][1, 3]
        assert np.array_equal(marred[name], clean[name])


def test_without_rows_the_parameter_gradients_are_zero(puzzle, fast_program):
    inputs = Reference(puzzle, "float32", 0).inputs(Case("some", "", (2, 3, 40, 50), "hard"))
    inputs = {name: tensor[:0] if tensor.ndim == 3 else tensor for name, tensor in inputs.items()}
    outputs = graphs.execute(puzzle, fast_program("float32"), cpu(), inputs)
    for name in ("grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias"):
        assert outputs[f"fast.{name}"].size and not outputs[f"fast.{name}"].any(), name
    assert outputs["fast.output"].shape == (0, 3, 50)


# ---- Other processors ---------------------------------------------------------------------------------------


def numbers(count: int, step: int) -> np.ndarray:
    """What tests/p22/p22_fast_cpu.mojo computes with."""
    return (np.arange(count) * step % 61) / 32 - 1


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs Linux on x86")
@pytest.mark.parametrize("processor", ["x86-64", pytest.param("haswell", marks=pytest.mark.slow)])
def test_processors_with_narrower_vectors_and_fewer_registers(puzzle, solution, processor):
    """SSE has vectors of 4 float32, AVX2 of 8, both 16 registers: other tiles than those of AVX-512 and NEON."""
    if processor == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    finished = run_mojo(
        "run",
        "--target-cpu",
        processor,
        "-I",
        str(solution.path.parent),
        str(ROOT / "tests/p22/p22_fast_cpu.mojo"),
    )
    assert finished.returncode == 0, finished.stderr
    arrays = {
        "input": numbers(35 * 37, 7919).reshape(1, 35, 37),
        "ln_weight": numbers(37, 31),
        "ln_bias": numbers(37, 37),
        "linear_weight": numbers(70 * 37, 7907).reshape(70, 37),
        "linear_bias": numbers(70, 41),
        "grad_output": numbers(35 * 70, 7001).reshape(1, 35, 70),
        "dln": np.zeros((1, 35, 37)),
    }
    truth = puzzle.exact(arrays)
    compared = set()
    for line in finished.stdout.splitlines():
        dtype, name, *values = line.split()
        apart = np.abs(np.array(values, np.float64) - truth[name].ravel()).max() / np.abs(truth[name]).max()
        assert apart < (1 if "16" in dtype else 16) * EPSILON[dtype], (dtype, name)
        compared.add((dtype, name))
    assert len(compared) == len(DTYPES) * 6


@pytest.mark.slow
def test_it_compiles_for_arm(solution, tmp_path):
    finished = run_mojo(
        "build", "--emit", "asm", "--target-triple", "aarch64-unknown-linux-gnu", "--target-cpu", "neoverse-n1",
        "-I", str(solution.path.parent), str(ROOT / "tests/p22/p22_fast_cpu.mojo"), "-o", str(tmp_path / "arm.s"),
    )  # fmt: skip
    assert finished.returncode == 0 and "error:" not in finished.stderr, finished.stderr
    assert "fmla" in (tmp_path / "arm.s").read_text(), "the innermost loop multiplies vectors"


# ---- The same bits ------------------------------------------------------------------------------------------

MANY_BLOCKS = Case("many blocks", "", (2, 350, 129, 200), "hard")


def test_every_run_gives_the_same_bits(puzzle, fast_program):
    reference = Reference(puzzle, "float32", 0)
    program = fast_program("float32")
    device = Compiled(program, cpu())
    again = partial(device.outputs, "fast", MANY_BLOCKS, reference)
    by_quantity = reference.repeated(again, MANY_BLOCKS, cpu(), "fast", QUANTITIES, 20)
    assert all(repeats.bit_equal and not repeats.wrong_runs for repeats in by_quantity.values())


DIGEST = """
import hashlib, os, sys
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from harness.devices import graphs
from harness.check.reference import Reference
from harness.devices.graphs import load
from harness.devices.targets import cpu
from harness.toolchain.packages import OpPackage
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.puzzle import Case
from pathlib import Path
package = OpPackage(Path("solutions/p22/op"))
program = load(package, PUZZLE.variants["fast"], "float32", cpu().device)
inputs = Reference(PUZZLE, "float32", 0).inputs(Case("many blocks", "", (2, 350, 129, 200), "hard"))
outputs = graphs.execute(PUZZLE, program, cpu(), inputs)
state = hashlib.sha256()
for name in sorted(outputs):
    state.update(outputs[name].tobytes())
print(state.hexdigest())
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to one CPU"
)
def test_one_cpu_gives_the_same_bits_as_all(fast_program):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one CPU only")
    fast_program("float32")  # the two processes find it in the cache
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST, cpus], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for cpus in ("one", "all")
    ]
    assert len(digests[0].strip()) == 64 and digests[0] == digests[1]
