"""Custom ops on the virtual GPU through MAX and PyTorch; other tests replay recorded launches."""

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
from harness.check.execution import select_variant_outputs
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain import roots

device = Accelerator()
target = Target("virtual", device, device.architecture_name)
package = roots.make_op_package(roots.get_solutions(), "p22")
program = graphs.load(package, PUZZLE.list_calls(("fused",)), "float32", device, kind="virtual")
reference = Reference(PUZZLE, "float32", 0)
passed = {}
for case in PUZZLE.list_cases(None):
    if case.name in ("chapter", "odd sizes"):
        outputs = select_variant_outputs(graphs.execute(PUZZLE, program, target, reference.get_inputs(case), case.dims), "fused")
        results = reference.compare_all(case, target, "fused", outputs, list(outputs))
        passed[case.name] = {name: result.ok for name, result in results.items()}
print(json.dumps([device.architecture_name, torch.cuda.is_available(), passed]))
"""


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_custom_ops_are_correct_on_the_virtual_gpu_through_max():
    command = [sys.executable, "-m", "harness.vgpu.cli", "exec", "--", sys.executable, "-c", PROGRAM]
    completed = subprocess.run(command, cwd=roots.CHECKOUT, capture_output=True, text=True, timeout=580)
    assert completed.returncode == 0, completed.stderr
    architecture, cuda, passed = json.loads(completed.stdout.splitlines()[-1])
    assert (architecture, cuda) == ("sm_90a", False)
    # The only output is the summary: no warning about PyTorch's library, no failed call.
    assert re.fullmatch(r"virtual GPU: sm_90a: \d+ launches, 0 errors, 0 notes\n", completed.stderr), (
        completed.stderr
    )
    assert set(passed) == {"chapter", "odd sizes"}
    quantities = {
        "output", "mean", "rstd", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias",
    }  # fmt: skip
    for results in passed.values():
        assert quantities <= set(results) and all(results.values()), results
