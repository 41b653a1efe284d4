"""Findings of the virtual GPU as a learner reads them: wrong Mojo in a blank of puzzle 19, judged by its gate."""

import shutil
import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest

from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.screens.report import result_lines
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

ENTRIES = tomllib.loads(Path(__file__).with_name("learner_findings.toml").read_text())["entry"]
SOLUTION = roots.op_package(roots.solutions(), "p19")
CASES = [PUZZLE.cases(None)[0], Case("wide", "more columns than a block has threads", (131, 3, 150), "hard")]
"""Cases of these texts alone, so that they say the same whatever cases the puzzle has."""


def groups() -> list[list[dict]]:
    """The entries in groups that hold at most one of each gate: a package can hold a group."""
    of_gate = {entry["gate"]: [e for e in ENTRIES if e["gate"] == entry["gate"]] for entry in ENTRIES}
    return [[entry for entry in group if entry] for group in zip_longest(*of_gate.values())]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return the lines printed about the gate of each entry, by the entry's name."""
    packages = []
    for number, group in enumerate(groups()):
        folder = tmp_path_factory.mktemp("learner") / str(number) / "op"
        shutil.copytree(SOLUTION.path, folder)
        source = folder / PUZZLE.source
        bodies = {entry["gate"]: tuple(entry["code"].strip("\n").split("\n")) for entry in group}
        source.write_text(blanks.join(blanks.split(blanks.skeleton(source.read_text())), bodies))
        packages.append(OpPackage(folder))
    dims = tuple(case.dims for case in CASES)
    orders = [
        Order(package, dims, tuple(sorted(entry["gate"] for entry in group)), small_grid=True)
        for package, group in zip(packages, groups(), strict=True)
    ]
    record_many(orders, "p19", "float32")
    checker, out = Checker(PUZZLE), {}
    for package, group in zip(packages, groups(), strict=True):
        results = {r.gate.id: r for r in checker.check(package, [e["gate"] for e in group], CASES)}
        for entry in group:
            out[entry["name"]] = said(results[entry["gate"]], PUZZLE, package.path / PUZZLE.source)
    return out


def said(result, puzzle, source: Path) -> list[str]:
    """Return the lines printed of a verdict, with the file by its name."""
    lines = [line.plain for line in result_lines(result, puzzle, source, {})]
    return [line.replace(f"{source.resolve().parent}/", "").strip() for line in lines]


@pytest.mark.compiles
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_a_finding_is_said_with_its_place_and_hint(printed, entry):
    wanted = entry["said"].strip("\n").split("\n")
    assert [line for line in printed[entry["name"]] if line in wanted] == wanted
