"""The checker without a compiler: no known mistake survives the cases, in any dtype, were it computed without an error."""

import pytest
from known_mistakes import rejected

from harness.check.reference import Reference
from harness.puzzles.p22 import mistakes, transfer_mistakes
from harness.puzzles.p22 import spec as p22
from harness.spec.derivation import Mistake

CASES = p22.cases()
MISTAKES = (*mistakes.MISTAKES, *transfer_mistakes.MISTAKES)
QUANTITIES = [quantity for call in p22.PUZZLE.calls_of(["unfused", "rmsnorm"]) for quantity in call.op.writes]


DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def references():
    """Inputs, truth and baseline of each dtype, made once."""
    return {dtype: Reference(p22.PUZZLE, dtype, 0) for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_known_mistake_is_rejected(references, dtype):
    survivors = [
        mistake.id
        for mistake in MISTAKES
        if not any(rejected(references[dtype], QUANTITIES, mistake, case) for case in CASES)
    ]
    assert not survivors


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_makes_no_mistake_is_right(references, dtype):
    nothing = Mistake("none", "as it should be", {})
    assert not any(rejected(references[dtype], QUANTITIES, nothing, case) for case in CASES)
