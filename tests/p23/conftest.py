"""Fixtures for puzzle 23's tests: the puzzle and its solution's op package."""

import pytest

from harness.puzzles.p23.spec import PUZZLE
from harness.toolchain import roots


@pytest.fixture(scope="session")
def puzzle():
    """Puzzle 23."""
    return PUZZLE


@pytest.fixture(scope="session")
def solution():
    """The solution's op package."""
    return roots.make_op_package(roots.get_solutions(), "p23")
