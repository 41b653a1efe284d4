"""float32 attention of puzzle 23's extension module for a Hopper, the file itself, on the virtual GPU: pairs of float16 by wgmma."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.toolchain import extension

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("p23_pairs_run.py")
EPS = 2.0**-23

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the virtual GPU's driver is for Linux"),
    pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="MAX would find the real GPU's driver"),
]


def test_hopper_s_kernels_for_pairs_are_right_on_the_virtual_gpu_without_a_finding():
    """Addresses, counted scratch memory, copies in bulk, barriers; ragged lengths and shared heads; and the plain path."""
    built = extension.build("sm_90a", puzzle="p23")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(built.path), "sm_90a"],
        capture_output=True,
        text=True,
        timeout=550,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["findings"] == [] and found["plain"]
    for case, errors in found["errors"].items():
        assert max(errors.values()) < 6 * EPS, (case, errors)
    same = [found["errors"][case] for case in found["errors"] if "same" in case or case.startswith("ragged")]
    assert same[0] == same[1] != same[2], "another order of blocks changes nothing, other kernels some bits"
    for case, launches in found["launches"].items():
        by_wgmma = any("fast_pairs_hopper" in name for name in launches)
        assert by_wgmma != any("fast_pairs_kernels" in name for name in launches)
        assert by_wgmma == ("portable" not in case), launches
