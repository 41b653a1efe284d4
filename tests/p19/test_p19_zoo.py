"""Every wrong kernel of the ramp is rejected and named; the solution and kernels that are right in another way are not.

The eight kernels know nothing of each other, so that wrong kernels of different gates share a package: there are as many
packages as a gate has wrong kernels at most, and one Mojo program records them all.
"""

import re
import shutil
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

import pytest
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import OpPackage

WRONG = zoo.load("p19")
GATES = [gate.id for gate in PUZZLE.gates]
SOLUTION = roots.op_package(roots.solutions(), "p19")
RAMP = (SOLUTION.path / "ramp.mojo").read_text()


def together(kernels: list[zoo.WrongKernel]) -> list[list[zoo.WrongKernel]]:
    """The wrong kernels in groups that hold at most one of each gate."""
    by_gate = defaultdict(list)
    for kernel in kernels:
        by_gate[kernel.gate].append(kernel)
    return [[kernel for kernel in group if kernel] for group in zip_longest(*by_gate.values())]


def package_of(source: str) -> OpPackage:
    """A copy of the solution with another ramp.mojo, in the cache, so that what is compiled of it can be kept too."""

    def make(staged: Path) -> None:
        shutil.copytree(SOLUTION.path, staged)
        (staged / "ramp.mojo").write_text(source)

    target = cache_folder("zoo", digest([SOLUTION.digest, source])) / "ramp"
    return OpPackage(keep(target, make, "a wrong kernel"))


def edited(group: list[zoo.WrongKernel]) -> str:
    """The solution with the edits of several wrong kernels."""
    source = RAMP
    for kernel in group:
        assert source.count(kernel.old) == 1 and kernel.file == "ramp.mojo", kernel.name
        source = source.replace(kernel.old, kernel.new)
    return source


def written_otherwise() -> str:
    """The solution whose blanks hold other right code: other indices, other guards, another order of additions."""
    pieces = re.split(
        r"^(\w+)\n", Path(__file__).with_name("p19_other_ramp.txt").read_text(), flags=re.MULTILINE
    )[1:]
    bodies = {id: tuple(body.splitlines()) for id, body in zip(pieces[::2], pieces[1::2], strict=True)}
    assert list(bodies) == GATES
    return blanks.join(blanks.split(RAMP), bodies)


@pytest.fixture(scope="module")
def results(request):
    """The name of a wrong kernel -> the verdict on its gate; "solution" and "otherwise" -> those on all gates."""
    groups = together(chosen(request, "kernel"))
    wrong = [package_of(edited(group)) for group in groups]
    packages = [SOLUTION, package_of(written_otherwise()), *wrong]
    dims = tuple(dict.fromkeys(case.dims for case in PUZZLE.cases(None)))
    record_many([Order(p, dims, tuple(GATES), small_grid=True) for p in packages], "p19", "float32")
    checker = Checker(PUZZLE)
    judged = [{r.gate.id: r for r in checker.check(package)} for package in packages]
    named = {
        kernel.name: verdicts[kernel.gate]
        for group, verdicts in zip(groups, judged[2:], strict=True)
        for kernel in group
    }
    return named | {"solution": judged[0], "otherwise": judged[1]}


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(results, kernel):
    result = results[kernel.name]
    assert result.state == "wrong"
    assert not kernel.mistake or result.mistake == kernel.mistake, "\n".join(result.diagnosis)
    assert result.hint.startswith(f"{kernel.gate}-")


@pytest.mark.compiler
@pytest.mark.parametrize("which", ["solution", "otherwise"])
def test_what_is_right_passes_in_every_case(results, which):
    assert [result.gate.id for result in results[which].values()] == GATES
    for result in results[which].values():
        assert result.state == "correct", "\n".join(result.diagnosis)
        assert len(result.comparisons) == len(PUZZLE.cases(None))


def test_every_gate_has_several_wrong_kernels():
    names = [kernel.gate for kernel in WRONG]
    assert all(names.count(gate) >= 3 for gate in GATES)
