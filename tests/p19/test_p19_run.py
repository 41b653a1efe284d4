"""The whole ramp: the solution is right on the virtual GPU, and what the command line says of it."""

import json

import pytest

from harness.puzzles.p19.spec import PUZZLE

GATES = [gate.id for gate in PUZZLE.gates]


@pytest.mark.compiles
def test_the_solution_is_right_and_has_a_line_for_each_kernel(command_line, tmp_path):
    target = tmp_path / "run.json"
    finished = command_line("p19", "--solution", "--device", "virtual", "--json", target)
    assert finished.code == 0, finished.out + finished.err
    (device,) = json.loads(target.read_text())["devices"]
    assert list(device["variants"]) == GATES and not [f for f in device["findings"] if f["error"]]
    for gate in PUZZLE.gates:
        variant = device["variants"][gate.id]
        assert variant["state"] == "correct" and len(variant["cases"]) == len(PUZZLE.cases(None)), gate.id
        assert all(list(verdicts) == [gate.quantities[0]] for verdicts in variant["cases"].values())
    for quantity in PUZZLE.forward:
        assert (
            sum(line.startswith(f"   {quantity}: ") and line.endswith(" ✅") for line in finished.lines) == 1
        )
    assert {"   - Virtual GPU Forward:  ✅ CORRECT", "   Overall Result: ✅ ALL CORRECT"} <= {*finished.lines}


def test_flags_that_the_ramp_has_no_use_for_are_unknown(command_line):
    finished = command_line("p19", "--backward")
    assert finished.code == 2 and "--backward" in finished.err
    assert "--backward" not in command_line("p19", "--help").out
    assert all(f"--{gate}" in command_line("p19", "--help").out for gate in GATES)
