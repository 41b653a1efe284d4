"""Puzzle 19's solution and other correct kernels pass."""

import re
import shutil
from pathlib import Path

import pytest

from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, compute_digest, keep_file
from harness.toolchain.packages import OpPackage

GATES = [gate.id for gate in PUZZLE.gates]
SOLUTION = roots.make_op_package(roots.solutions(), "p19")
RAMP = (SOLUTION.path / "ramp.mojo").read_text()


def make_package(source: str) -> OpPackage:
    """Create a cached copy of the solution with this ramp.mojo; its compiled kernels are cached, too."""

    def make(staged: Path) -> None:
        shutil.copytree(SOLUTION.path, staged)
        (staged / "ramp.mojo").write_text(source)

    target = cache_folder("zoo", compute_digest([SOLUTION.digest, source])) / "ramp"
    return OpPackage(keep_file(target, make, "a wrong kernel"))


def write_alternative() -> str:
    """Return the solution with alternative indices, guards and summation order in its blanks."""
    pieces = re.split(
        r"^(\w+)\n", Path(__file__).with_name("p19_other_ramp.txt").read_text(), flags=re.MULTILINE
    )[1:]
    bodies = {id: tuple(body.splitlines()) for id, body in zip(pieces[::2], pieces[1::2], strict=True)}
    assert list(bodies) == GATES
    return blanks.join_pieces(blanks.split_blanks(RAMP), bodies)


@pytest.mark.compiles
def test_correct_variants_pass_in_all_cases():
    packages = [SOLUTION, make_package(write_alternative())]
    dims = tuple(dict.fromkeys(case.dims for case in PUZZLE.cases(None)))
    record_many([Order(package, "p19", dims, tuple(GATES), small_grid=True) for package in packages])
    for results in map(Checker(PUZZLE).check, packages):
        assert [result.gate.id for result in results] == GATES
        for result in results:
            assert result.state == "correct", "\n".join(result.diagnosis)
            assert len(result.comparisons) == len(PUZZLE.cases(None))
