"""Puzzle 23's extension module for a Hopper, the file itself, on the virtual GPU: wgmma and the TMA forward and backward, and
attention in a window of a grid."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.toolchain import extension

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("p23_extension_run.py")

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the virtual GPU's driver is for Linux"),
    pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="MAX would find the real GPU's driver"),
]


def test_hopper_s_kernels_are_right_on_the_virtual_gpu_without_a_finding():
    """Addresses, order of arguments, strides, scratch memory, tensor maps, barriers; ragged lengths and shared heads; windows in
    three orders, with tiles that a block passes over."""
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
    assert found["findings"] == []
    kernels = ("hopper_forward", "hopper_keys_hopper_key", "hopper_numbers", "hopper_query", "fast_delta")
    assert all(any(kernel in name for name in found["launches"]) for kernel in kernels)
    assert len(found["launches"]) == len(kernels), found["launches"]
    of_types, *of_sizes = found["refused"]
    assert "a window wants 16-bit types on NVIDIA's tensor cores" in of_types
    assert len(of_sizes) == 2 and all(
        "heads of at most 128 elements in whole chunks" in text for text in of_sizes
    )
    for case, errors in found["errors"].items():
        assert errors.pop("lse") < 1e-6, case
        # A few units of the 16-bit type, and not of a wider one.
        assert 1e-4 < max(errors.values()) < 8e-3, (case, errors)
