"""Puzzle 19: the reference is the mathematics, every known mistake differs from it, and the kernels' constants are the spec's."""

import re

import numpy as np
import pytest
import torch
from known_mistakes import diagnose_values
from typed import present

from harness.puzzles.p19 import mistakes
from harness.puzzles.p19.spec import GATES, OPS, PUZZLE
from harness.toolchain import roots

CASES = PUZZLE.cases(None)
QUANTITIES = list(PUZZLE.forward)


def test_rmsnorm_is_pytorchs():
    arrays = PUZZLE.inputs(CASES[1], "float64", 0)
    x, gamma = torch.tensor(arrays["matrix"]), torch.tensor(arrays["weight"])
    wanted = torch.nn.functional.rms_norm(x, gamma.shape, gamma, mistakes.EPS)
    np.testing.assert_allclose(PUZZLE.exact(arrays)["normalised"].astype(float), wanted.numpy(), rtol=1e-12)


def test_a_sum_of_every_thread_is_named_and_another_wrong_sum_is_not():
    assert (
        diagnose_values(PUZZLE, "column_sums", lambda v: 64 * v.matrix.sum(0)).mistake
        == "every-thread-adds-all"
    )
    assert (
        diagnose_values(PUZZLE, "row_sums", lambda v: 64 * v.matrix.sum(-1)).mistake
        == "row-every-thread-adds-all"
    )
    other = diagnose_values(PUZZLE, "column_sums", lambda v: 63 * v.matrix.sum(0))
    assert other.lines[0] == "your column_sums is exactly 63 times what it should be: see hint G-1"


@pytest.mark.parametrize(
    ("name", "file", "value"),
    [
        ("THREADS", "ramp", mistakes.TILE),
        ("ROW_THREADS", "ramp", mistakes.ROW_THREADS),
        ("EPS", "ramp", mistakes.EPS),
        ("SLAB_ROWS", "launches", mistakes.SLAB_ROWS),
    ],
)
def test_the_kernels_have_the_constants_of_the_spec(name, file, value):
    source = (roots.solutions() / "p19" / "op" / f"{file}.mojo").read_text()
    assert float(present(re.search(rf"^comptime {name} = (\S+)$", source, re.M))[1]) == value


def test_every_gate_is_a_variant_with_a_quantity_of_its_own():
    assert PUZZLE.separate
    assert [gate.id for gate in GATES] == list(OPS) == list(PUZZLE.variants)
    assert [gate.quantities for gate in GATES] == [tuple(op.writes) for op in OPS.values()]


def test_blanks_are_as_short_as_promised():
    from harness.learner import blanks

    by_id = blanks.find(blanks.read(roots.solutions() / "p19" / "op" / "ramp.mojo"))
    assert [blank.id for blank in by_id.values()] == [gate.id for gate in GATES]
    assert all(2 <= blank.size <= 6 for blank in by_id.values())
