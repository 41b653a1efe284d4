"""The whole ramp: the solution is right on the virtual GPU, and what the command line says of it."""

import json
import subprocess
import sys

import pytest

from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots

GATES = [gate.id for gate in PUZZLE.gates]


def harness(*arguments: str) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments], cwd=roots.CHECKOUT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """What `p19 --solution` prints and writes, on the virtual GPU."""
    target = tmp_path_factory.mktemp("run") / "run.json"
    finished = harness("p19", "--solution", "--json", str(target))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, json.loads(target.read_text())


@pytest.mark.compiles
def test_the_solution_is_right(solved):
    _, run = solved
    assert [device["device"] for device in run["devices"]] == ["virtual"]
    for device in run["devices"]:
        assert list(device["variants"]) == GATES and not [f for f in device["findings"] if f["error"]]
        for name, variant in device["variants"].items():
            assert variant["state"] == "correct", name
            assert len(variant["cases"]) == len(PUZZLE.cases(None))
            quantity = PUZZLE.gates[GATES.index(name)].quantities[0]
            assert all(list(verdicts) == [quantity] for verdicts in variant["cases"].values())


@pytest.mark.compiles
def test_the_report_has_a_line_for_each_kernel(solved):
    lines = solved[0].splitlines()
    for quantity in PUZZLE.forward:
        assert sum(line.startswith(f"   {quantity}: ") and line.endswith(" ✅") for line in lines) == 1
    assert "   - Virtual GPU Forward:  ✅ CORRECT" in lines
    assert "   Overall Result: ✅ ALL CORRECT" in lines


# ---- The command line, without a compiler ------------------------------------------------------------------


def test_flags_that_the_ramp_has_no_use_for_are_unknown(command_line):
    finished = command_line("p19", "--backward")
    assert finished.code == 2 and "--backward" in finished.err
    assert "--backward" not in command_line("p19", "--help").out
    assert all(f"--{gate}" in command_line("p19", "--help").out for gate in GATES)


def test_an_untouched_ramp_is_unsolved(command_line):
    finished = command_line("verify", "p19")
    assert finished.code == 3, finished.out
