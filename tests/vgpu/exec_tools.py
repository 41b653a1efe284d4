"""Runs `vgpu exec` as a process of its own, for the tests of the driver."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VGPU = [sys.executable, "-m", "harness.vgpu.cli"]


def vgpu(*arguments: str, timeout: float = 100, **options) -> subprocess.CompletedProcess:
    """`vgpu exec ARGUMENTS`, with a time limit that no test should reach."""
    return subprocess.run(
        [*VGPU, "exec", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
