"""Shared by puzzle 23's tests: the puzzle, its solution's op package, and its extension module on the virtual GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
from extension_runs import Run, on_virtual_gpu

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
def module_on_virtual_gpu() -> Callable[..., Run]:
    """Name of a program in this folder, and an order of the blocks -> what it finds: it gets the module for a Hopper."""

    def run(program: str, blocks: str = "natural") -> Run:
        module = extension.build("sm_90a", puzzle="p23").path
        return on_virtual_gpu(Path(__file__).with_name(program), module, arch="sm_90a", blocks=blocks)

    return run
