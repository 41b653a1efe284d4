"""Puzzle 21's kernels in bfloat16, and a run of all gates."""

import os
import re
import subprocess
import sys

import pytest
from recordings import make_order

from harness.check import zoo
from harness.check.checker import Checker
from harness.puzzles.p21.spec import PUZZLE
from harness.toolchain import roots

BFLOAT16_BUG = next(bug for bug in zoo.load_wrong_solutions("p21") if bug.dtype == "bfloat16")


def list_orders(folder, tests):
    cases = [*PUZZLE.list_cases(None), *PUZZLE.gate_cases]
    variants = [gate.variant for gate in PUZZLE.kernel_gates if gate.id == BFLOAT16_BUG.gate]
    return {
        dtype: make_order("p21", cases, variants, BFLOAT16_BUG.build_package(), dtype)
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.compiles
@pytest.mark.usefixtures("recorded")
def test_gate_correct_only_in_float32_fails():
    float32_only = Checker(PUZZLE).check(BFLOAT16_BUG.build_package(), [BFLOAT16_BUG.gate])
    (result,) = Checker(PUZZLE, second_dtype="bfloat16").check(
        BFLOAT16_BUG.build_package(), [BFLOAT16_BUG.gate]
    )
    assert [r.state for r in float32_only] == ["correct"] and result.state == "wrong"
    assert result.diagnosis[0] == "correct in float32, but wrong in bfloat16:"
    assert result.mistake == BFLOAT16_BUG.mistake, result.diagnosis


@pytest.mark.slow
@pytest.mark.compiles
def test_all_gates_pass_through_the_command_line():
    result = subprocess.run(
        [sys.executable, "-m", "harness", "p21", "--solution"],
        cwd=roots.CHECKOUT, env={**os.environ, "PYTHONPATH": str(roots.CHECKOUT)}, capture_output=True, text=True,
    )  # fmt: skip
    output = result.stdout
    assert result.returncode == 0, output + result.stderr
    assert "Fix it, in PyTorch:" in output and len(re.findall(r"correct: \d+ checks", output)) == 13
    assert "caught 46 of 46 wrong ops" in output
    assert "- CPU " not in output and "- Virtual GPU Backward:  ✅ CORRECT" in output
    assert "Forward" not in output and "Overall Result: ✅ ALL CORRECT" in output
