"""In every puzzle with kernels, each known mistake is rejected in some case, and correct formulas in none."""

import pytest
from known_mistakes import is_rejected

from harness.check.reference import Reference
from harness.puzzles.p22 import derive_rung
from harness.puzzles.p27 import derivation
from harness.puzzles.p27.spec import FAR_CASE, LONG_CASE
from harness.spec.cases import is_nonfinite
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Puzzle

KERNEL_PUZZLES = [puzzle for puzzle in map(find_puzzle, list_puzzle_names()) if puzzle.mojo_rung]
OTHER_MISTAKES = (*derive_rung.MISTAKES, *derivation.MISTAKES)
BELOW_BFLOAT16_PRECISION = {"p-rounded-to-float16", "added-in-float16"}
"""Not detectable in bfloat16, which has three bits less than float16."""
ROUNDED_EXPONENTIALS = {
    f"{of}of-{kind}" for of in ("", "sums-", "total-") for kind in ("bfloat16", "float16")
}
"""Exponentials rounded to 16 bits, which the rounding of a 16-bit result can hide."""


UNDETECTED = {"bfloat16": BELOW_BFLOAT16_PRECISION, "float64": {"largest-from-0"}}
"""dtype -> mistakes that no case detects. A maximum that starts at 0 needs the case FAR, missing for float64."""


def list_cases(puzzle: Puzzle, dtype: str) -> list:
    """Return the cases; for puzzle 27 only those with formulas that are exact in the dtype."""
    if puzzle.name != "p27":
        return [*puzzle.list_cases(None), *puzzle.gate_cases]
    more_cases = (LONG_CASE,) if dtype == "float64" else (LONG_CASE, FAR_CASE)
    return [case for case in (*puzzle.list_cases(None), *more_cases) if not is_nonfinite(case.values)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("puzzle", KERNEL_PUZZLES, ids=lambda puzzle: puzzle.name)
def test_known_mistakes_are_rejected(puzzle, dtype):
    reference, cases = Reference(puzzle, dtype, 0), list_cases(puzzle, dtype)
    quantities = [*dict.fromkeys(quantity for call in puzzle.calls for quantity in call.op.writes)]

    def is_detected(mistake: Mistake) -> bool:
        return any(is_rejected(reference, quantities, mistake, case) for case in cases)

    assert not is_detected(Mistake("none", "without a mistake", {}))
    survivors = {m.id for m in puzzle.mistakes if m not in OTHER_MISTAKES and not is_detected(m)}
    if dtype in ("bfloat16", "float16"):
        survivors -= ROUNDED_EXPONENTIALS
    assert survivors == UNDETECTED.get(dtype, set()) & {m.id for m in puzzle.mistakes}
