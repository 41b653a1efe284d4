"""The limits of puzzle 28 are fair: other right and fast ways than the solution's keep them, each in its gate."""

import shutil
import textwrap
import tomllib
from pathlib import Path

import pytest

from harness.check.checker import Checker
from harness.learner import blanks
from harness.puzzles.p28.spec import GATES, PUZZLE
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

SOLUTION = roots.solutions() / "p28" / "op"
WAYS = tomllib.loads(Path(__file__).with_name("ways.toml").read_text("utf-8"))["way"]
CASES = [case for case in PUZZLE.cases(None) if case.counted or case.name in ("hard values", "9 x 515 x 65")]


def package_of(way: dict, folder: Path) -> OpPackage:
    """The solution's package with a way in the place of a blank's code."""
    package = folder / "op"
    shutil.copytree(SOLUTION, package, symlinks=False)
    file = package / "fast.mojo"
    text = file.read_text("utf-8")
    indent = blanks.find(text)[way["gate"]].indent
    body = tuple(textwrap.indent(way["body"], indent).splitlines())
    text = blanks.join(blanks.split(text), {way["gate"]: body})
    for old, new in way.get("edits", ()):  # of given code, where results lie elsewhere
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text, "utf-8")
    return OpPackage(package)


def test_ways_are_of_most_steps():
    assert len(WAYS) >= 10 and len({way["gate"] for way in WAYS} & {gate.id for gate in GATES}) >= 8


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['gate']}: {way['about']}")
def test_another_fast_way_passes(way, tmp_path):
    for dtype in ("float32", "bfloat16"):
        [result] = Checker(PUZZLE, dtype=dtype).check(package_of(way, tmp_path / dtype), [way["gate"]], CASES)
        assert result.state == "correct", (dtype, result.diagnosis)
