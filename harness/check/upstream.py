"""What is wrong because something before it is: of those that one wrong value spoils, only the first is explained.

Gates and quantities alike have names, and a spec says which are computed from which. One whose values are those of a
mistake in its own last step, and right otherwise, is wrong by itself, whatever is before it.
"""

from collections.abc import Collection, Mapping, Sequence

from harness.check.diagnose import Diagnosis
from harness.check.results import GateResult
from harness.spec.puzzle import Puzzle

Needs = Mapping[str, Sequence[str]]
"""Name -> the names that it is computed from."""


def first_wrong(name: str, needs: Needs, wrong: Collection[str]) -> str | None:
    """The first wrong thing that another one is computed from, through any number of wrong ones; None without any."""
    before = next((each for each in needs.get(name, ()) if each in wrong), None)
    return before and (first_wrong(before, needs, wrong) or before)


def sentence(before: str) -> str:
    """What is said of something that is computed from something wrong."""
    return f"computed from {before}, which is wrong: mend that first"


def blame_gates(results: Sequence[GateResult], needs: Needs) -> None:
    """Lets a wrong gate that is computed from another wrong one say that and nothing else; `needs` maps gates."""
    wrong = {result.gate.id: result for result in results if result.state == "wrong"}
    for id, result in wrong.items():
        before = first_wrong(id, needs, wrong)
        if before and not result.by_itself:
            result.diagnosis, result.findings = [sentence(before)], []
            result.mistake, result.hint = None, wrong[before].hint


def blame_quantities(diagnoses: dict[str, Diagnosis], puzzle: Puzzle, variant: str) -> None:
    """Does the same for the wrong quantities of a variant, which are computed from what their op reads."""
    calls = puzzle.variants[variant]
    needs = {quantity: tuple(call.op.reads) for call in calls for quantity in call.op.writes}
    for quantity, diagnosis in diagnoses.items():
        before = first_wrong(quantity, needs, diagnoses)
        if before and not diagnosis.by_itself(quantity):
            diagnoses[quantity] = Diagnosis(sentence(puzzle.printed(before)))


def point_back(diagnoses: dict[str, Diagnosis], puzzle: Puzzle) -> None:
    """Lets a quantity that shows the same mistake as an earlier one of the same run say that and nothing else."""
    named: dict[str, str] = {}
    for quantity, diagnosis in diagnoses.items():
        if diagnosis.steps and diagnosis.mistake:
            first = named.setdefault(diagnosis.mistake, quantity)
            if first != quantity:
                words = f"the mistake is the same as that in {puzzle.printed(first)}: mend that first"
                diagnoses[quantity] = Diagnosis(words)
