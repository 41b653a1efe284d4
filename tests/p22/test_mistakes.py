"""The checker without a compiler: no known mistake survives the cases, in any dtype, were it computed without an error."""

import numpy as np
import pytest

from harness.check.compare import judge
from harness.check.reference import Reference
from harness.devices.targets import cpu
from harness.puzzles.p22 import mistakes, transfer_mistakes
from harness.puzzles.p22 import spec as p22
from harness.puzzles.p22.mistakes import derive
from harness.spec.derivation import Mistake

CASES = p22.cases()
MISTAKES = (*mistakes.MISTAKES, *transfer_mistakes.MISTAKES)
QUANTITIES = [quantity for call in p22.PUZZLE.calls_of(["unfused", "rmsnorm"]) for quantity in call.op.writes]


DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.fixture(scope="module")
def references():
    """Inputs, truth and baseline of each dtype, made once."""
    return {dtype: Reference(p22.PUZZLE, dtype, 0) for dtype in DTYPES}


def rejected(reference, mistake, case) -> bool:
    """Whether the values of a mistake, rounded once, are wrong in some quantity of a case."""
    truth, baseline = reference.truth(case, cpu()), reference.baseline(case, cpu())
    with np.errstate(all="ignore"):
        derivation = derive(reference.arrays(case), mistake.changes)
        for quantity in QUANTITIES:
            dtype = p22.PUZZLE.written_dtype(quantity, reference.dtype)
            values = np.asarray(getattr(derivation, quantity), np.float64)
            values = values[-1] if values.ndim > truth[quantity].ndim else values  # of alternatives the last
            terms = reference.terms(case).get(quantity, 0.0)
            got = p22.rounded(values, dtype)
            if not judge(got, truth[quantity], baseline[quantity], dtype, terms=terms).ok:
                return True
    return False


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_known_mistake_is_rejected(references, dtype):
    survivors = [
        mistake.id
        for mistake in MISTAKES
        if not any(rejected(references[dtype], mistake, case) for case in CASES)
    ]
    assert not survivors


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_makes_no_mistake_is_right(references, dtype):
    nothing = Mistake("none", "as it should be", {})
    assert not any(rejected(references[dtype], nothing, case) for case in CASES)
