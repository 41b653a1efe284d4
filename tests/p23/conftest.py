"""Shared by puzzle 23's tests: the puzzle, its solution's op package, and its extension module on the virtual GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.puzzles.p23.spec import PUZZLE
from harness.toolchain import extension, roots


@pytest.fixture(scope="session")
def puzzle():
    """Puzzle 23."""
    return PUZZLE


@pytest.fixture(scope="session")
def solution():
    """The solution's op package."""
    return roots.op_package(roots.solutions(), "p23")


@pytest.fixture(scope="session")
def module_on_virtual_gpu() -> Callable[[str], dict]:
    """Name of a program in this folder -> what it finds: it gets the module for a Hopper, in a process of its own."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the virtual GPU's driver is for Linux")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("MAX would find the real GPU's driver")

    def run(program: str) -> dict:
        built = extension.build("sm_90a", puzzle="p23")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(program)), str(built.path), "sm_90a"],
            capture_output=True,
            text=True,
            timeout=550,
            cwd=roots.CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(roots.CHECKOUT)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
