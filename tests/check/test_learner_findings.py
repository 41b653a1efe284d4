"""Messages about the virtual GPU's findings for incorrect Mojo in puzzle 19's blanks."""

import shutil
import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest
from recordings import make_order

from harness.check.checker import Checker
from harness.learner import blanks
from harness.puzzles.p19.spec import PUZZLE
from harness.screens.report import format_gate
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

ENTRIES = tomllib.loads(Path(__file__).with_name("learner_findings.toml").read_text())["entry"]
SOLUTION = roots.make_op_package(roots.get_solutions(), "p19")
CASES = [
    PUZZLE.list_cases(None)[0],
    Case("wide", "more columns than a block has threads", (131, 3, 150), "hard"),
]
"""Fixed cases, so that messages do not depend on the puzzle's."""


def group_by_package() -> list[list[dict]]:
    """Group the entries with at most one per gate, so that a package contains a whole group."""
    by_gate = {entry["gate"]: [e for e in ENTRIES if e["gate"] == entry["gate"]] for entry in ENTRIES}
    return [[entry for entry in group if entry] for group in zip_longest(*by_gate.values())]


def list_orders(folder, tests):
    orders = {}
    for number, group in enumerate(group_by_package()):
        package = OpPackage(shutil.copytree(SOLUTION.path, folder / str(number) / "op"))
        source = package.path / PUZZLE.source
        bodies = {entry["gate"]: tuple(entry["code"].strip("\n").split("\n")) for entry in group}
        source.write_text(
            blanks.join_segments(blanks.split_blanks(blanks.make_skeleton(source.read_text())), bodies)
        )
        orders[str(number)] = make_order("p19", CASES, sorted(bodies), package)
    return orders


@pytest.fixture(scope="module")
def printed_lines(recorded):
    """Map each entry's name to the printed lines."""
    checker, out = Checker(PUZZLE), {}
    for order, group in zip(recorded.values(), group_by_package(), strict=True):
        results = {r.gate.id: r for r in checker.check(order.package, order.variants, CASES)}
        for entry in group:
            out[entry["name"]] = get_printed_lines(
                results[entry["gate"]], PUZZLE, order.package.path / PUZZLE.source
            )
    return out


def get_printed_lines(result, puzzle, source: Path) -> list[str]:
    """Return the lines printed for a result, with paths relative to the package."""
    lines = [line.plain for line in format_gate(result, puzzle, source, {})]
    return [line.replace(f"{source.resolve().parent}/", "").strip() for line in lines]


@pytest.mark.compiles
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["name"])
def test_finding_is_reported_with_location_and_hint(printed_lines, entry):
    expected = entry["printed"].strip("\n").split("\n")
    assert [line for line in printed_lines[entry["name"]] if line in expected] == expected
