"""Whether a puzzle's cases tell a known mistake from what is right, by its formulas alone: no kernel, no compiler."""

from collections.abc import Sequence

import numpy as np

from harness.check.compare import judge
from harness.check.reference import Reference
from harness.devices.targets import cpu
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Case
from harness.spec.rounding import rounded


def rejected(reference: Reference, quantities: Sequence[str], mistake: Mistake, case: Case) -> bool:
    """Whether the values of a mistake, rounded once, are wrong in some quantity of a case."""
    puzzle = reference.puzzle
    truth, baseline = reference.truth(case, cpu()), reference.baseline(case, cpu())
    with np.errstate(all="ignore"):
        derivation = puzzle.derive(reference.arrays(case), mistake.changes)
        for quantity in quantities:
            dtype = puzzle.written_dtype(quantity, reference.dtype)
            values = np.asarray(getattr(derivation, quantity), np.float64)
            values = values[-1] if values.ndim > truth[quantity].ndim else values  # of alternatives the last
            terms = reference.terms(case).get(quantity, 0.0)
            got = rounded(values, dtype)
            if not judge(got, truth[quantity], baseline[quantity], dtype, terms=terms).ok:
                return True
    return False
