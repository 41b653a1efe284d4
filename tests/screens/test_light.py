"""What answers at once loads neither torch nor MAX: the list, the hints, a puzzle's spec. Attention loads no compiler of
torch's, and what runs a layer nothing of puzzles."""

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
        ("from harness.nn import attention", ("torch._dynamo", "torch._inductor", "sympy")),
    ],
)
def test_nothing_heavy_is_loaded(code, heavy):
    loaded = f"import sys; {code}; print(*(name for name in {heavy} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "", done.stderr
