"""Result types of a check: per case, per variant and per gate. Loads neither torch nor MAX."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.check.compare import Repeats, TensorResult
from harness.errors import unknown_gate
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung

if TYPE_CHECKING:
    from harness.check.limits import Measured
    from harness.vgpu import Finding


@dataclass
class Comparison:
    """One case: the verdict of every quantity that was compared."""

    case: Case
    verdicts: dict[str, TensorResult]


def correct_in_all(comparisons: Iterable[Comparison]) -> set[str]:
    """Return the quantities that are right in every case in which they were compared."""
    verdicts = [item for comparison in comparisons for item in comparison.verdicts.items()]
    return {quantity for quantity, _ in verdicts} - {
        quantity for quantity, verdict in verdicts if not verdict.ok
    }


@dataclass
class Diagnosis:
    """The description of an error, the id of the known mistake (or None), and the hint to read next, as "dx-2" (or None).

    `sentence` names the mistake, or says that no known mistake fits; `values` are wrong elements and where they are; `steps` are
    those that the known mistake changes.
    """

    sentence: str = ""
    values: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    steps: frozenset[str] = frozenset()

    @property
    def lines(self) -> list[str]:
        """The words: a name comes first, since screens are short."""
        sentence = [self.sentence] if self.sentence else []
        return [*sentence, *self.values] if self.mistake else [*self.values, *sentence]

    def by_itself(self, quantity: str) -> bool:
        """Return whether a quantity's own last step alone is wrong, and all that it is computed from right."""
        return set(self.steps) == {quantity}


@dataclass
class GateResult:
    """The verdict on one gate of any rung.

    Attributes:
        gate: Which one.
        state: "unsolved" (the blank is untouched), "wrong" or "correct".
        comparisons: One for each case, with the verdicts of the gate's quantities; empty where nothing was compared.
        findings: The virtual GPU's memory, race and barrier findings that belong to the gate, errors only.
        diagnosis: What is wrong, line by line; empty unless wrong, or unsolved with wrong code that was given.
        mistake: The id of the known mistake that the result equals, or None.
        hint: The hint to read next, as "dx-2"; None unless wrong.
        summary: What a line says after "correct" where there are no comparisons to count.
        by_itself: Whether its values are right but for a known mistake in its own last step.
        picture: What the learner's own run looks like, line by line, below the verdict, right or wrong.
        repeats: What repeated runs of one case showed, by quantity.
        costs: What its kernels cost by each of its limits, in the cases that are counted, where the values are right.
    """

    gate: Gate
    state: str
    comparisons: list[Comparison] = field(default_factory=list)
    findings: list["Finding"] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    summary: str = ""
    by_itself: bool = False
    picture: list[str] = field(default_factory=list)
    repeats: dict[str, Repeats] = field(default_factory=dict)
    costs: "list[Measured]" = field(default_factory=list)


OnFirst = Callable[[list[GateResult]], None] | None
"""Takes the verdicts on the first case, while the others are run."""
GateIds = Sequence[str] | None
"""Some gates of a rung; None for all of them."""
Cases = list[Case] | None
"""Some cases; None for those of the puzzle."""
NARROW = "bfloat16"
"""In what a few cases of a gate of kernels that is right are judged too."""


@dataclass
class VariantResult:
    """One variant on one device.

    Attributes:
        variant: Its name.
        comparisons: One for each case.
        unsolved: Quantity -> the untouched blanks that it waits for.
        repeats: What repeated runs of one case showed, by quantity.
        diagnoses: A wrong quantity -> what is wrong.
        findings: All that the virtual GPU found, notes among them; `errors` those that count: while a blank is untouched,
            the kernels after it read what it has not written, which is no mistake of the learner's.
        failure: Why it stopped, if it did.
        gates: The verdict on each attempted gate of its kernels.
    """

    variant: str
    comparisons: list[Comparison] = field(default_factory=list)
    unsolved: dict[str, tuple[str, ...]] = field(default_factory=dict)
    repeats: dict[str, Repeats] = field(default_factory=dict)
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)
    findings: list["Finding"] = field(default_factory=list)
    errors: list["Finding"] = field(default_factory=list)
    failure: str = ""
    gates: list[GateResult] = field(default_factory=list)

    def ok(self, quantity: str) -> bool:
        """Return whether a quantity is right in every case (an unsolved one is not wrong)."""
        return all(c.verdicts[quantity].ok for c in self.comparisons if quantity in c.verdicts)

    def state(self, quantities: Iterable[str]) -> str:
        """Return "wrong", "unsolved" or "correct": the result of several quantities together."""
        quantities = list(quantities)
        if self.failure or not all(self.ok(quantity) for quantity in quantities):
            return "wrong"
        if any(not self.repeats[q].ok for q in quantities if q in self.repeats):
            return "wrong"
        if any(not cost.ok for gate in self.gates if {*gate.gate.own} & {*quantities} for cost in gate.costs):
            return "wrong"
        return "unsolved" if any(quantity in self.unsolved for quantity in quantities) else "correct"


def provided_code_gates(gates: Sequence[str] | None, blanks: Mapping[str, Blank]) -> set[str]:
    """Return the gates that are judged although their blanks are untouched: one that is asked for alone and
    was given with wrong code."""
    return (
        {id for id in gates if id in blanks and blanks[id].is_provided}
        if gates and len(gates) == 1
        else set()
    )


UNKNOWN = "no known mistake gives these values"
"""How a line begins that says that nothing is known of a quantity."""


def leave_out_unknown(result: GateResult) -> None:
    """Leave out that nothing is known of one quantity where a mistake has a name."""
    if result.mistake:
        result.diagnosis = [line for line in result.diagnosis if not line.startswith(UNKNOWN)]


def leave_unsolved(result: GateResult) -> GateResult:
    """Return the verdict on code as it was given: what is wrong with it, which is not the learner's mistake;
    the first hint comes next."""
    result.state, result.mistake = "unsolved", None
    result.hint = result.hint and f"{result.hint.rpartition('-')[0]}-1"
    return result


def exit_code(results: Iterable[GateResult], wanted: Iterable[str]) -> int:
    """Return 1 where a gate is wrong or a requested one has no result, 3 where one is unsolved, 0 where all
    are correct."""
    states = {result.gate.id: result.state for result in results}
    outcomes = {states.get(id, "wrong") for id in wanted} | {*states.values()}
    return 1 if outcomes - {"correct", "unsolved"} else 3 if "unsolved" in outcomes else 0


def requested_gates(puzzle: Puzzle, rung: Rung, ids: Sequence[str] | None) -> list[Gate]:
    """Return the gates of a rung that are asked for, in its order; None asks for all. Raises BadUse, naming
    those there are."""
    for id in ids or ():
        if id not in rung.gates:
            raise unknown_gate(id, rung.gates)
    return [gate for gate in puzzle.gates_of(rung) if ids is None or gate.id in ids]
