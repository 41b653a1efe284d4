"""The solution of the ramp is right, and so are kernels that are right in another way."""

import re
import shutil
from pathlib import Path

import pytest

from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import OpPackage

GATES = [gate.id for gate in PUZZLE.gates]
SOLUTION = roots.op_package(roots.solutions(), "p19")
RAMP = (SOLUTION.path / "ramp.mojo").read_text()


def package_of(source: str) -> OpPackage:
    """A copy of the solution with another ramp.mojo, in the cache, so that what is compiled of it can be kept too."""

    def make(staged: Path) -> None:
        shutil.copytree(SOLUTION.path, staged)
        (staged / "ramp.mojo").write_text(source)

    target = cache_folder("zoo", digest([SOLUTION.digest, source])) / "ramp"
    return OpPackage(keep(target, make, "a wrong kernel"))


def written_otherwise() -> str:
    """The solution whose blanks hold other right code: other indices, other guards, another order of additions."""
    pieces = re.split(
        r"^(\w+)\n", Path(__file__).with_name("p19_other_ramp.txt").read_text(), flags=re.MULTILINE
    )[1:]
    bodies = {id: tuple(body.splitlines()) for id, body in zip(pieces[::2], pieces[1::2], strict=True)}
    assert list(bodies) == GATES
    return blanks.join(blanks.split(RAMP), bodies)


@pytest.mark.compiles
def test_what_is_right_passes_in_every_case():
    packages = [SOLUTION, package_of(written_otherwise())]
    dims = tuple(dict.fromkeys(case.dims for case in PUZZLE.cases(None)))
    record_many([Order(each, dims, tuple(GATES), small_grid=True) for each in packages], "p19", "float32")
    for results in map(Checker(PUZZLE).check, packages):
        assert [result.gate.id for result in results] == GATES
        for result in results:
            assert result.state == "correct", "\n".join(result.diagnosis)
            assert len(result.comparisons) == len(PUZZLE.cases(None))
