"""Puzzle 19: the reference, known mistakes, the kernels' constants, and the command line."""

import json
import re

import numpy as np
import pytest
import torch
from known_mistakes import diagnose_values
from typed import unwrap

from harness.puzzles.p19 import mistakes
from harness.puzzles.p19.spec import GATES, OPS, PUZZLE
from harness.toolchain import roots

CASES = PUZZLE.list_cases(None)
QUANTITIES = list(PUZZLE.forward)


def test_rmsnorm_matches_pytorch():
    arrays = PUZZLE.make_inputs(CASES[1], "float64", 0)
    x, gamma = torch.tensor(arrays["matrix"]), torch.tensor(arrays["weight"])
    expected = torch.nn.functional.rms_norm(x, gamma.shape, gamma, mistakes.EPS)
    np.testing.assert_allclose(
        PUZZLE.compute_exact(arrays)["normalised"].astype(float), expected.numpy(), rtol=1e-12
    )


def test_sum_over_all_threads_is_named():
    columns = diagnose_values(PUZZLE, "column_sums", lambda v: 64 * v.matrix.sum(0))
    rows = diagnose_values(PUZZLE, "row_sums", lambda v: 64 * v.matrix.sum(-1))
    assert (columns.mistake, rows.mistake) == ("every-thread-adds-all", "row-every-thread-adds-all")
    diagnosis = diagnose_values(PUZZLE, "column_sums", lambda v: 63 * v.matrix.sum(0))
    assert diagnosis.lines[0] == "your column_sums is exactly 63 times what it should be: see hint G-1"


@pytest.mark.parametrize(
    ("name", "file", "value"),
    [
        ("THREADS", "ramp", mistakes.TILE),
        ("ROW_THREADS", "ramp", mistakes.ROW_THREADS),
        ("EPS", "ramp", mistakes.EPS),
        ("SLAB_ROWS", "launches", mistakes.SLAB_ROWS),
    ],
)
def test_kernel_constants_match_the_spec(name, file, value):
    source = (roots.get_solutions() / "p19" / "op" / f"{file}.mojo").read_text()
    assert float(unwrap(re.search(rf"^comptime {name} = (\S+)$", source, re.M))[1]) == value


def test_each_gate_has_its_variant_and_quantity():
    assert PUZZLE.has_separate_variants
    assert [gate.id for gate in GATES] == list(OPS) == list(PUZZLE.variants)
    assert [gate.quantities for gate in GATES] == [tuple(op.writes) for op in OPS.values()]


def test_blanks_are_short():
    from harness.learner import blanks

    by_id = blanks.find_blanks(blanks.read_source(roots.get_solutions() / "p19" / "op" / "ramp.mojo"))
    assert [blank.id for blank in by_id.values()] == [gate.id for gate in GATES]
    assert all(2 <= blank.size <= 6 for blank in by_id.values())


@pytest.mark.slow
@pytest.mark.compiles
def test_solution_is_correct_with_a_line_per_kernel(command_line, tmp_path):
    target = tmp_path / "run.json"
    result = command_line("p19", "--solution", "--device", "virtual", "--json", target)
    assert result.code == 0, result.out + result.err
    (device,) = json.loads(target.read_text())["devices"]
    assert list(device["variants"]) == [gate.id for gate in GATES] and not [
        f for f in device["findings"] if f["error"]
    ]
    for gate in GATES:
        variant = device["variants"][gate.id]
        assert variant["state"] == "correct" and len(variant["cases"]) == len(PUZZLE.list_cases(None)), (
            gate.id
        )
        assert all(list(results) == [gate.quantities[0]] for results in variant["cases"].values())
    for quantity in PUZZLE.forward:
        assert sum(line.startswith(f"   {quantity}: ") and line.endswith(" ✅") for line in result.lines) == 1
    assert {"   - Virtual GPU Forward:  ✅ CORRECT", "   Overall Result: ✅ ALL CORRECT"} <= {*result.lines}


def test_irrelevant_flags_are_rejected(command_line):
    result = command_line("p19", "--backward")
    assert result.code == 2 and "--backward" in result.err
    assert "--backward" not in command_line("p19", "--help").out
    assert all(f"--{gate.id}" in command_line("p19", "--help").out for gate in GATES)
