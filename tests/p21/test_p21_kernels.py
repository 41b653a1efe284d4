"""The four kernels of the hunt: right in every dtype, unsolved as given; and one run of everything."""

import os
import re
import subprocess
import sys

import pytest

from harness.check import zoo
from harness.check.checker import Checker
from harness.puzzles.p21.spec import PUZZLE
from harness.toolchain import roots

NARROW = next(bug for bug in zoo.load("p21") if bug.dtype == "bfloat16")


@pytest.mark.compiles
def test_a_gate_that_is_right_in_float32_alone_is_wrong():
    """Its kernels are compiled, and a case of them is run, in bfloat16 too; what a learner is told says so."""
    alone = Checker(PUZZLE).check(NARROW.package(), [NARROW.gate])
    (result,) = Checker(PUZZLE, other="bfloat16").check(NARROW.package(), [NARROW.gate])
    assert [r.state for r in alone] == ["correct"] and result.state == "wrong"
    assert result.diagnosis[0] == "right in float32, and wrong in bfloat16:"
    assert result.mistake == NARROW.mistake, result.diagnosis


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
