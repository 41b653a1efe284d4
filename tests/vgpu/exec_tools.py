"""Run `vgpu exec` as a separate process, for the driver's tests."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VGPU = [sys.executable, "-m", "harness.vgpu.cli"]


def run_vgpu(*arguments: str, timeout: float = 100, **options) -> subprocess.CompletedProcess:
    """Run `vgpu exec ARGUMENTS`, with a time limit that no test should reach."""
    return subprocess.run(
        [*VGPU, "exec", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
