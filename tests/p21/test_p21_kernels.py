"""The four kernels of the hunt: right in every dtype, unsolved as given; and one run of everything."""

import os
import re
import subprocess
import sys

import pytest

from harness.check import zoo
from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.puzzles.p21.spec import KERNELS, PUZZLE, cases
from harness.toolchain import roots

NARROW = next(bug for bug in zoo.load("p21") if bug.dtype == "bfloat16")
DIMS = tuple(dict.fromkeys(case.dims for case in cases()))


@pytest.fixture(scope="module")
def recorded():
    """The solution, recorded; the checker finds it in the cache."""
    package = roots.op_package(roots.solutions(), "p21")
    record_many([Order(package, DIMS, ("kernels",), small_grid=True)], "p21", "float32")
    return Checker(PUZZLE)


@pytest.mark.compiles
def test_the_solution_is_right(recorded):
    results = recorded.check(roots.op_package(roots.solutions(), "p21"))
    assert [result.gate for result in results] == list(KERNELS)
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_solution_is_right_in_other_dtypes(dtype):
    results = Checker(PUZZLE, dtype=dtype).check(roots.op_package(roots.solutions(), "p21"))
    assert {result.state for result in results} == {"correct"}, [r.diagnosis for r in results]


@pytest.mark.compiles
def test_a_gate_that_is_right_in_float32_alone_is_wrong(recorded):
    """Its kernels are compiled, and a case of them is run, in bfloat16 too; what a learner is told says so."""
    alone = recorded.check(NARROW.package(), [NARROW.gate])
    (result,) = Checker(PUZZLE, other="bfloat16").check(NARROW.package(), [NARROW.gate])
    assert [r.state for r in alone] == ["correct"] and result.state == "wrong"
    assert result.diagnosis[0] == "right in float32, and wrong in bfloat16:"
    assert result.mistake == NARROW.mistake, result.diagnosis


@pytest.mark.compiles
def test_what_is_given_is_unsolved(recorded, tmp_path):
    package = tmp_path / "p21" / "op"
    blanks.generate(roots.solutions() / "p21", package.parent)
    assert {result.state for result in recorded.check(package)} == {"unsolved"}


@pytest.mark.compiles
def test_everything_is_right_through_the_command_line():
    finished = subprocess.run(
        [sys.executable, "-m", "harness", "p21", "--solution"],
        cwd=roots.CHECKOUT, env={**os.environ, "PYTHONPATH": str(roots.CHECKOUT)}, capture_output=True, text=True,
    )  # fmt: skip
    said = finished.stdout
    assert finished.returncode == 0, said + finished.stderr
    assert "Fix it, in PyTorch:" in said and len(re.findall(r"correct: \d+ checks", said)) == 13
    assert "caught 46 of 46 wrong ones" in said
    assert "- CPU " not in said and "- Virtual GPU Backward:  ✅ CORRECT" in said
    assert "Forward" not in said and "Overall Result: ✅ ALL CORRECT" in said


# ---- The mathematics ----------------------------------------------------------------------------------------
