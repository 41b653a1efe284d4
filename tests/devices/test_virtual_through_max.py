"""The custom ops on the virtual GPU through MAX: runs replay recorded launches, and this keeps the way that PyTorch takes."""

import json
import subprocess
import sys

import pytest

from harness.toolchain import roots

# In a process of its own: a process that has the virtual GPU as its device keeps it.
PROGRAM = """
import json
from harness.vgpu.driver import inprocess
gpu = inprocess.start()
from max.driver import Accelerator
from harness.devices import graphs
from harness.check.ran import of_variant
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
        outputs = of_variant(graphs.execute(PUZZLE, program, target, reference.inputs(case), case.dims), "fused")
        verdicts = reference.compared(case, target, "fused", outputs, list(outputs))
        right[case.name] = {name: verdict.ok for name, verdict in verdicts.items()}
errors = [str(error) for error in inprocess.device().errors]
print(json.dumps([device.architecture_name, right, [f.kind for f in gpu.findings if f.is_error], errors]))
"""


@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_the_custom_ops_are_right_on_the_virtual_gpu_through_max():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=roots.CHECKOUT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    architecture, right, findings, errors = json.loads(done.stdout.splitlines()[-1])
    assert (architecture, findings, errors) == ("sm_90a", [], [])
    assert set(right) == {"chapter", "odd sizes"}
    written = {
        "output", "mean", "rstd", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias",
    }  # fmt: skip
    for verdicts in right.values():
        assert written <= set(verdicts) and all(verdicts.values()), verdicts
