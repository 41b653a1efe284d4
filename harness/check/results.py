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
    from harness.vgpu import Finding, Launch


@dataclass
class Comparison:
    """One case: the comparison of every quantity."""

    case: Case
    verdicts: dict[str, TensorResult]


def correct_in_all(comparisons: Iterable[Comparison]) -> set[str]:
    """Return the quantities that are correct in every case that compares them."""
    results = [item for comparison in comparisons for item in comparison.verdicts.items()]
    return {quantity for quantity, _ in results} - {quantity for quantity, result in results if not result.ok}


@dataclass
class Diagnosis:
    """The description of an error, the id of the known mistake (or None), and the next hint, as "dx-2" (or
    None).

    `sentence` names the mistake, or says that none is known; `values` describes wrong elements and their
    places; `steps` are those that the known mistake changes.
    """

    sentence: str = ""
    values: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    steps: frozenset[str] = frozenset()

    @property
    def lines(self) -> list[str]:
        """The lines to print; a name comes first, since screens are short."""
        sentence = [self.sentence] if self.sentence else []
        return [*sentence, *self.values] if self.mistake else [*self.values, *sentence]

    def by_itself(self, quantity: str) -> bool:
        """Check whether only the last step of a quantity is wrong, and all its inputs are correct."""
        return set(self.steps) == {quantity}


@dataclass
class GateResult:
    """The result of one gate of any rung.

    Attributes:
        gate: Its id.
        state: "unsolved" (the blank is untouched), "wrong" or "correct".
        comparisons: One for each case, with the gate's quantities; empty if nothing was compared.
        findings: The virtual GPU's memory, race and barrier findings that belong to the gate, errors only.
        diagnosis: What is wrong, line by line; empty unless wrong, or unsolved with provided wrong code.
        mistake: The id of the known mistake that gives the result, or None.
        hint: The next hint, as "dx-2"; None unless wrong.
        summary: Text after "correct" if there are no comparisons to count.
        by_itself: Whether the only error is a known mistake in the quantity's own last step.
        picture: A drawing of the learner's run, line by line, printed after the result.
        repeats: Results of repeated runs of one case, by quantity.
        costs: Costs by the gate's limits in counted cases, if the values are correct.
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
"""Called with the results of the first case while the others run."""
GateIds = Sequence[str] | None
"""Some gates of a rung; None for all of them."""
Cases = list[Case] | None
"""Some cases; None for those of the puzzle."""
NARROW = "bfloat16"
"""The dtype of a few extra cases of a correct kernel gate."""


@dataclass
class VariantResult:
    """One variant on one device.

    Attributes:
        variant: Its name.
        comparisons: One for each case.
        unsolved: Quantity -> the untouched blanks that it depends on.
        repeats: Results of repeated runs of one case, by quantity.
        diagnoses: A wrong quantity -> what is wrong.
        findings: All findings of the virtual GPU, notes included; `errors` are those that count: kernels
            after an untouched blank read unwritten memory, which is not the learner's mistake.
        failure: The error that stopped it, or None.
        gates: The result of each attempted gate of its kernels.
        launches: Those of counted cases on the virtual GPU, with their counters.
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
    launches: "dict[str, list[Launch]]" = field(default_factory=dict)

    def ok(self, quantity: str) -> bool:
        """Check whether a quantity is correct in every case; an unsolved one is not wrong."""
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
    """Return the gates to check although their blanks are untouched: one requested by itself, with provided
    wrong code."""
    return (
        {id for id in gates if id in blanks and blanks[id].is_provided}
        if gates and len(gates) == 1
        else set()
    )


UNKNOWN = "no known mistake gives these values"
"""Start of a line about a quantity without a known mistake."""


def leave_out_unknown(result: GateResult) -> None:
    """Drop lines without a known mistake if another has a name."""
    if result.mistake:
        result.diagnosis = [line for line in result.diagnosis if not line.startswith(UNKNOWN)]


def leave_unsolved(result: GateResult) -> GateResult:
    """Return the result of untouched wrong code: unsolved, with its errors and the first hint."""
    result.state, result.mistake = "unsolved", None
    result.hint = result.hint and f"{result.hint.rpartition('-')[0]}-1"
    return result


def exit_code(results: Iterable[GateResult], expected: Iterable[str]) -> int:
    """Return 1 if a gate is wrong or a requested one has no result, 3 if one is unsolved, 0 if all are
    correct."""
    states = {result.gate.id: result.state for result in results}
    outcomes = {states.get(id, "wrong") for id in expected} | {*states.values()}
    return 1 if outcomes - {"correct", "unsolved"} else 3 if "unsolved" in outcomes else 0


def requested_gates(puzzle: Puzzle, rung: Rung, ids: Sequence[str] | None) -> list[Gate]:
    """Return the requested gates of a rung, in its order; None requests all. Raises BadUse, listing the
    existing ones."""
    for id in ids or ():
        if id not in rung.gates:
            raise unknown_gate(id, rung.gates)
    return [gate for gate in puzzle.gates_of(rung) if ids is None or gate.id in ids]
