"""Import cost: quick commands import neither torch nor MAX, attention no dynamo, and layers no puzzle."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "max", "mojo", "triton", "sympy")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import harness.puzzles.p22", HEAVY),
        ("from harness.cli import main; main(['list'])", HEAVY),
        ("from harness.cli import main; main(['hint', 'p22', 'dx-1'])", HEAVY),
        (
            "import harness.devices.on_max",
            ("harness.spec.puzzle", "harness.spec.rungs", "harness.devices.targets"),
        ),
        ("import harness.devices.graphs, harness.check.runs", ("torch",)),
        ("from harness.nn import attention", ("torch._dynamo", "torch._inductor", "sympy")),
    ],
)
def test_light_commands_import_nothing_heavy(code, heavy):
    program = f"import sys; {code}; loaded = {{*{heavy}}} & {{*sys.modules}}; assert not loaded, loaded"
    completed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
