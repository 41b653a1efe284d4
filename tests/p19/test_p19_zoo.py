"""Puzzle 19's solution and other correct kernels pass."""

import re
import shutil
from pathlib import Path

import pytest
from recordings import make_order

from harness.check.checker import Checker
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

GATES = [gate.id for gate in PUZZLE.gates]
SOLUTION = roots.make_op_package(roots.get_solutions(), "p19")
RAMP = (SOLUTION.path / "ramp.mojo").read_text()


def make_package(source: str, folder: Path) -> OpPackage:
    package = OpPackage(shutil.copytree(SOLUTION.path, folder / "op"))
    (package.path / "ramp.mojo").write_text(source)
    return package


def write_alternative() -> str:
    """Return the solution with alternative indices, guards and summation order in its blanks."""
    segments = re.split(
        r"^(\w+)\n", Path(__file__).with_name("p19_other_ramp.txt").read_text(), flags=re.MULTILINE
    )[1:]
    bodies = {id: tuple(body.splitlines()) for id, body in zip(segments[::2], segments[1::2], strict=True)}
    assert list(bodies) == GATES
    return blanks.join_segments(blanks.split_blanks(RAMP), bodies)


def list_orders(folder, tests):
    packages = {"solution": SOLUTION, "alternative": make_package(write_alternative(), folder)}
    return {
        name: make_order("p19", PUZZLE.list_cases(None), GATES, package) for name, package in packages.items()
    }


@pytest.mark.compiles
def test_correct_variants_pass_in_all_cases(recorded):
    for order in recorded.values():
        results = Checker(PUZZLE).check(order.package)
        assert [result.gate.id for result in results] == GATES
        for result in results:
            assert result.state == "correct", "\n".join(result.diagnosis)
            assert len(result.comparisons) == len(PUZZLE.list_cases(None))
