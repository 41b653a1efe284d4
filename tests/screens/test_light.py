"""What answers at once loads neither torch nor MAX: the list, the hints, a puzzle's spec."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "max", "mojo", "triton", "sympy")


@pytest.mark.parametrize(
    "code",
    [
        "import harness.puzzles.p22",
        "from harness.cli import main; main(['list'])",
        "from harness.cli import main; main(['hint', 'p22', 'dx-1'])",
    ],
)
def test_nothing_heavy_is_loaded(code):
    loaded = f"import sys; {code}; print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "", done.stderr
