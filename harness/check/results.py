"""Define the results of a check, per case, variant and gate, without importing torch or MAX."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.check.compare import Repeats, TensorResult
from harness.errors import make_unknown_gate_error
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung

if TYPE_CHECKING:
    from harness.check.limits import MeasuredCost
    from harness.vgpu import Finding, Launch


@dataclass
class Comparison:
    """The comparison of each quantity in one case."""

    case: Case
    results: dict[str, TensorResult]


def find_correct_quantities(comparisons: Iterable[Comparison]) -> set[str]:
    """Return the quantities that are correct in every case that compares them."""
    results = [item for comparison in comparisons for item in comparison.results.items()]
    return {quantity for quantity, _ in results} - {quantity for quantity, result in results if not result.ok}


@dataclass
class Diagnosis:
    """The description of an error: `sentence` describes the mistake, or states that none is known.

    `mistake` is its id or None, `hint` the next hint, such as "dx-2"; `changed_steps` are those it changes.
    """

    sentence: str = ""
    values: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    changed_steps: frozenset[str] = frozenset()

    @property
    def lines(self) -> list[str]:
        """The lines to print; the name of a known mistake comes first, since screens are short."""
        sentence = [self.sentence] if self.sentence else []
        return [*sentence, *self.values] if self.mistake else [*self.values, *sentence]

    def is_own_step(self, quantity: str) -> bool:
        return set(self.changed_steps) == {quantity}


@dataclass
class GateResult:
    """The result of one gate of any rung.

    Attributes:
        gate: The gate.
        state: "unsolved" (the blank is untouched), "wrong" or "correct".
        comparisons: One for each case, with the gate's quantities; empty if nothing was compared.
        findings: The virtual GPU's memory, race and barrier errors that are attributed to the gate.
        diagnosis: Lines about the error; empty unless wrong, or unsolved with provided wrong code.
        mistake: The id of the known mistake that explains the result, or None.
        hint: The next hint, such as "dx-2"; None unless wrong.
        summary: Text after "correct" if there are no comparisons to count.
        is_own_mistake: Whether the only error is a known mistake in the quantity's own last step.
        picture: A drawing of the learner's run, line by line, printed after the result.
        repeats: Results of repeated runs of one case, by quantity.
        costs: Costs under the gate's limits in counted cases, if the values are correct.
    """

    gate: Gate
    state: str
    comparisons: list[Comparison] = field(default_factory=list)
    findings: list["Finding"] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    summary: str = ""
    is_own_mistake: bool = False
    picture: list[str] = field(default_factory=list)
    repeats: dict[str, Repeats] = field(default_factory=dict)
    costs: "list[MeasuredCost]" = field(default_factory=list)


FirstCaseCallback = Callable[[list[GateResult]], None] | None
"""Called with the results of the first case, before the others run."""
GateIds = Sequence[str] | None
"""Ids of gates of a rung; None for all of them."""
Cases = list[Case] | None
"""Cases to check; None for the puzzle's."""
LOW_PRECISION_DTYPE = "bfloat16"
"""The dtype in which a correct kernel gate is also checked, in a few cases."""


@dataclass
class VariantResult:
    """One variant on one device.

    Attributes:
        variant: Its name.
        comparisons: One for each case.
        unsolved: Quantity -> the untouched blanks that it depends on.
        repeats: Results of repeated runs of one case, by quantity.
        diagnoses: Wrong quantity -> its diagnosis.
        findings: All findings of the virtual GPU, including notes; `errors` are those that make it wrong,
            without reads of memory that an untouched blank leaves unwritten.
        failure: The error that stopped it, or "".
        gates: The result of each attempted gate of its kernels.
        launches: The launches of counted cases on the virtual GPU, with their counters.
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

    def is_correct(self, quantity: str) -> bool:
        """Check whether a quantity is correct in every case that compares it; True for an unsolved one."""
        return all(c.results[quantity].ok for c in self.comparisons if quantity in c.results)

    def get_state(self, quantities: Iterable[str]) -> str:
        """Return the joint result of several quantities: "wrong", "unsolved" or "correct"."""
        quantities = list(quantities)
        if self.failure or not all(self.is_correct(quantity) for quantity in quantities):
            return "wrong"
        if any(not self.repeats[q].ok for q in quantities if q in self.repeats):
            return "wrong"
        if any(
            not cost.ok
            for gate in self.gates
            if {*gate.gate.own_quantities} & {*quantities}
            for cost in gate.costs
        ):
            return "wrong"
        return "unsolved" if any(quantity in self.unsolved for quantity in quantities) else "correct"


def select_provided_gates(gates: Sequence[str] | None, blanks: Mapping[str, Blank]) -> set[str]:
    """Return the only requested gate if its blank has untouched provided code, which is checked anyway."""
    alone = gates if gates and len(gates) == 1 else ()
    return {id for id in alone if id in blanks and blanks[id].is_provided}


UNKNOWN = "no known mistake gives these values"
"""Start of the line about a quantity that no known mistake explains."""


def drop_unknown(result: GateResult) -> None:
    if result.mistake:
        result.diagnosis = [line for line in result.diagnosis if not line.startswith(UNKNOWN)]


def mark_unsolved(result: GateResult) -> GateResult:
    """Mark the result of untouched provided code as unsolved, with its errors and the first hint."""
    result.state, result.mistake = "unsolved", None
    result.hint = result.hint and f"{result.hint.rpartition('-')[0]}-1"
    return result


def compute_exit_code(results: Iterable[GateResult], expected: Iterable[str]) -> int:
    """Return 1 if a gate is wrong or a requested one has no result, 3 if one is unsolved, else 0."""
    states = {result.gate.id: result.state for result in results}
    outcomes = {states.get(id, "wrong") for id in expected} | {*states.values()}
    return 1 if outcomes - {"correct", "unsolved"} else 3 if "unsolved" in outcomes else 0


def select_gates(puzzle: Puzzle, rung: Rung, ids: Sequence[str] | None) -> list[Gate]:
    """Return the requested gates of a rung, in its order; None requests all. Raises UsageError."""
    for id in ids or ():
        if id not in rung.gates:
            raise make_unknown_gate_error(id, rung.gates)
    return [gate for gate in puzzle.list_gates(rung) if ids is None or gate.id in ids]
