"""Checks that a puzzle's cases tell a known mistake from what is right, by its formulas alone: no kernel, no compiler."""

from collections.abc import Sequence

import numpy as np

from harness.check.compare import Evidence, compare
from harness.check.diagnose import diagnose
from harness.check.reference import Reference
from harness.devices.targets import cpu
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Case, Puzzle
from harness.spec.rounding import round_to_dtype


def is_rejected(reference: Reference, quantities: Sequence[str], mistake: Mistake, case: Case) -> bool:
    """Tell whether a mistake's values, rounded once, are wrong in some quantity of a case."""
    puzzle = reference.puzzle
    truth, baseline = reference.truth(case, cpu()), reference.baseline(case, cpu())
    with np.errstate(all="ignore"):
        derivation = puzzle.derive(reference.arrays(case), mistake.changes)
        for quantity in quantities:
            dtype = puzzle.written_dtype(quantity, reference.dtype)
            values = np.asarray(getattr(derivation, quantity), np.float64)
            values = values[-1] if values.ndim > truth[quantity].ndim else values  # of alternatives the last
            terms = reference.terms(case).get(quantity, 0.0)
            got = round_to_dtype(values, dtype)
            if not compare(got, truth[quantity], baseline[quantity], dtype, terms=terms).ok:
                return True
    return False


def diagnose_values(puzzle: Puzzle, quantity: str, wrong, cases: Sequence[str] = (), dtype: str = "float32"):
    """Diagnose a kernel that writes `wrong(derivation)` for a quantity, rounded once; by NumPy alone.

    Truth is the puzzle's longdouble reference, the baseline the same, rounded. Judged on all cases, or on those named.
    """
    evidence = []
    for case in puzzle.cases(None):
        if (cases and case.name not in cases) or case.world_size > 1:
            continue
        arrays = puzzle.inputs(case, dtype, 0)
        with np.errstate(all="ignore"):
            truth = np.asarray(puzzle.exact(arrays)[quantity], np.float64)
            got = round_to_dtype(
                np.asarray(wrong(puzzle.derive(arrays, {})), np.float64).reshape(truth.shape), "float32"
            )
            right = round_to_dtype(truth, "float32")
        terms = puzzle.terms(arrays).get(quantity, 0.0)
        verdict = compare(got, truth, right, "float32", terms=terms)
        if not verdict.ok:
            evidence.append(Evidence(case, arrays, got, truth, np.zeros(truth.shape, bool), verdict))
    assert evidence, "no case shows it"
    return diagnose(puzzle, quantity, evidence, name=quantity, gate="G")
