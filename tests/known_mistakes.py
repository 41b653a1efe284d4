"""Check with NumPy formulas only that a puzzle's cases reveal known mistakes."""

from collections.abc import Sequence

import numpy as np

from harness.check.compare import Evidence, compare
from harness.check.diagnose import diagnose
from harness.check.reference import Reference
from harness.devices.targets import make_cpu_target
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Case, Puzzle
from harness.spec.rounding import round_to_dtype


def is_rejected(reference: Reference, quantities: Sequence[str], mistake: Mistake, case: Case) -> bool:
    """Return whether the rounded values of a mistake fail in any quantity of a case."""
    puzzle = reference.puzzle
    truth, baseline = (
        reference.get_truth(case, make_cpu_target()),
        reference.get_baseline(case, make_cpu_target()),
    )
    with np.errstate(all="ignore"):
        derivation = puzzle.derive(reference.get_arrays(case), mistake.changes)
        for quantity in quantities:
            dtype = puzzle.get_output_dtype(quantity, reference.dtype)
            values = np.asarray(getattr(derivation, quantity), np.float64)
            values = values[-1] if values.ndim > truth[quantity].ndim else values  # the last alternative
            terms = reference.get_term_magnitudes(case).get(quantity, 0.0)
            got = round_to_dtype(values, dtype)
            if not compare(got, truth[quantity], baseline[quantity], dtype, term_magnitude=terms).ok:
                return True
    return False


def diagnose_values(puzzle: Puzzle, quantity: str, wrong, cases: Sequence[str] = (), dtype: str = "float32"):
    """Diagnose a kernel that writes `wrong(derivation)` for a quantity, rounded once, with NumPy only.

    The truth is the puzzle's longdouble reference, the baseline its rounded values; `cases` are names of
    cases.
    """
    evidence = []
    for case in puzzle.list_cases(None):
        if (cases and case.name not in cases) or case.world_size > 1:
            continue
        arrays = puzzle.make_inputs(case, dtype, 0)
        with np.errstate(all="ignore"):
            truth = np.asarray(puzzle.compute_exact(arrays)[quantity], np.float64)
            got = round_to_dtype(
                np.asarray(wrong(puzzle.derive(arrays, {})), np.float64).reshape(truth.shape), "float32"
            )
            expected = round_to_dtype(truth, "float32")
        terms = puzzle.compute_term_magnitudes(arrays).get(quantity, 0.0)
        result = compare(got, truth, expected, "float32", term_magnitude=terms)
        if not result.ok:
            evidence.append(Evidence(case, arrays, got, truth, np.zeros(truth.shape, bool), result))
    assert evidence, "no case shows it"
    return diagnose(puzzle, quantity, evidence, name=quantity, gate="G")
