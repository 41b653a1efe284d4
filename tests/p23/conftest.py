"""Fixtures for puzzle 23's tests: the puzzle and its solution's op package."""

import pytest

from harness.puzzles.p23.spec import PUZZLE
from harness.toolchain import roots


@pytest.fixture(scope="session")
def puzzle():
    return PUZZLE


@pytest.fixture(scope="session")
def solution():
    return roots.make_op_package(roots.get_solutions(), "p23")
