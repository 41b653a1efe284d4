"""The custom ops on the virtual GPU through MAX: runs replay recorded launches, and this keeps the way that PyTorch takes."""

import json
import re
import subprocess
import sys

import pytest

from harness.toolchain import roots

PROGRAM = """
import json
import torch
from max.driver import Accelerator
from harness.check.execution import variant_outputs
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain import roots

device = Accelerator()
target = Target("virtual", device, device.architecture_name)
package = roots.op_package(roots.solutions(), "p22")
program = graphs.load(package, PUZZLE.calls_of(("fused",)), "float32", device, kind="virtual")
reference = Reference(PUZZLE, "float32", 0)
right = {}
for case in PUZZLE.cases(None):
    if case.name in ("chapter", "odd sizes"):
        outputs = variant_outputs(graphs.execute(PUZZLE, program, target, reference.inputs(case), case.dims), "fused")
        verdicts = reference.compare_all(case, target, "fused", outputs, list(outputs))
        right[case.name] = {name: verdict.ok for name, verdict in verdicts.items()}
print(json.dumps([device.architecture_name, torch.cuda.is_available(), right]))
"""


@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_the_custom_ops_are_right_on_the_virtual_gpu_through_max():
    command = [sys.executable, "-m", "harness.vgpu.cli", "exec", "--", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=roots.CHECKOUT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    architecture, cuda, right = json.loads(done.stdout.splitlines()[-1])
    assert (architecture, cuda) == ("sm_90a", False)
    # No word of PyTorch about the library that it finds, no failed call: one line, which sums up.
    assert re.fullmatch(r"virtual GPU: sm_90a: \d+ launches, 0 errors, 0 notes\n", done.stderr), done.stderr
    assert set(right) == {"chapter", "odd sizes"}
    written = {
        "output", "mean", "rstd", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias",
    }  # fmt: skip
    for verdicts in right.values():
        assert written <= set(verdicts) and all(verdicts.values()), verdicts
