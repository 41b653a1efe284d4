"""Puzzle 28's limits accept other correct and efficient variants of each step."""

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

SOLUTION = roots.get_solutions() / "p28" / "op"
VARIANTS = tomllib.loads(Path(__file__).with_name("variants.toml").read_text("utf-8"))["variant"]
CASES = [
    case
    for case in PUZZLE.list_cases(None)
    if case.checks_limits or case.name in ("hard values", "9 x 515 x 65")
]


def build_variant(variant: dict, folder: Path) -> OpPackage:
    """Create the solution's package with a blank replaced by a variant."""
    package = folder / "op"
    shutil.copytree(SOLUTION, package, symlinks=False)
    file = package / "fast.mojo"
    text = file.read_text("utf-8")
    indent = blanks.find_blanks(text)[variant["gate"]].indent
    body = tuple(textwrap.indent(variant["body"], indent).splitlines())
    text = blanks.join_segments(blanks.split_blanks(text), {variant["gate"]: body})
    file.write_text(text, "utf-8")
    for name, old, new in variant.get("edits", ()):  # of the given code, where it expects another layout
        text = (package / name).read_text("utf-8")
        assert text.count(old) == 1, old
        (package / name).write_text(text.replace(old, new), "utf-8")
    return OpPackage(package)


def test_variants_cover_most_steps():
    assert (
        len(VARIANTS) >= 10
        and len({variant["gate"] for variant in VARIANTS} & {gate.id for gate in GATES}) >= 8
    )


def test_edits_of_variants_apply(tmp_path):
    for number, variant in enumerate(VARIANTS):
        build_variant(variant, tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant['gate']}: {variant['about']}")
def test_efficient_variant_passes(variant, tmp_path):
    for dtype in ("float32", "bfloat16"):
        [result] = Checker(PUZZLE, dtype=dtype).check(
            build_variant(variant, tmp_path / dtype), [variant["gate"]], CASES
        )
        assert result.state == "correct", (dtype, result.diagnosis)
