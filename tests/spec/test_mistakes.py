"""Known mistakes of every puzzle with kernels, by its formulas: each is rejected by some case, and what is right by none."""

import pytest
from known_mistakes import is_rejected

from harness.check.reference import Reference
from harness.puzzles.p22 import derive_rung
from harness.puzzles.p27 import derivation
from harness.puzzles.p27.spec import FAR, LONG
from harness.spec.cases import is_not_finite
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.derivation import Mistake
from harness.spec.puzzle import Puzzle

OF_KERNELS = [puzzle for puzzle in map(find_puzzle, puzzle_names()) if puzzle.mojo_rung]
OF_OTHER_RUNGS = (*derive_rung.MISTAKES, *derivation.MISTAKES)
FINER = {"p-rounded-to-float16", "added-in-float16"}
"""No mistakes in bfloat16, which has three binary digits fewer than float16."""
ROUNDED = {f"{of}of-{kind}" for of in ("", "sums-", "total-") for kind in ("bfloat16", "float16")}
"""Mistakes of exponentials rounded to 16 bits: a result of 16 bits has the same rounding, and may hide them."""


HIDDEN = {"bfloat16": FINER, "float64": {"largest-from-0"}}
"""By dtype: mistakes that no case shows. Only FAR, of kernels whose lse is float32, shows a largest logit that begins at 0."""


def cases_of(puzzle: Puzzle, dtype: str) -> list:
    """Return all cases; of puzzle 27 those whose truth in this dtype is the formulas'."""
    if puzzle.name != "p27":
        return [*puzzle.cases(None), *puzzle.gate_cases]
    own = (LONG,) if dtype == "float64" else (LONG, FAR)
    return [case for case in (*puzzle.cases(None), *own) if not is_not_finite(case.values)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("puzzle", OF_KERNELS, ids=lambda puzzle: puzzle.name)
def test_every_known_mistake_is_rejected_and_what_is_right_is_not(puzzle, dtype):
    reference, cases = Reference(puzzle, dtype, 0), cases_of(puzzle, dtype)
    quantities = [*dict.fromkeys(quantity for call in puzzle.calls for quantity in call.op.writes)]

    def seen(mistake: Mistake) -> bool:
        return any(is_rejected(reference, quantities, mistake, case) for case in cases)

    assert not seen(Mistake("none", "as it should be", {}))
    survivors = {m.id for m in puzzle.mistakes if m not in OF_OTHER_RUNGS and not seen(m)}
    if dtype in ("bfloat16", "float16"):
        survivors -= ROUNDED
    assert survivors == HIDDEN.get(dtype, set()) & {m.id for m in puzzle.mistakes}
