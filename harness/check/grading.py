"""Turn device outputs into results per quantity and per gate, whatever the device.

Every attempted gate of a variant is checked with its own quantities, so that an error outside the blanks is
put down to the right gate. The first of several causes is named; errors that follow from it are left out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.check.accesses import Source
from harness.check.compare import Evidence
from harness.check.diagnose import (
    FIRST_CAUSES,
    OUTSIDE,
    SURE,
    blame_gates,
    blame_quantities,
    diagnose,
    first_causes,
    from_findings,
    point_back,
)
from harness.check.execution import Device, Outcome
from harness.check.limits import amount, measure
from harness.check.reference import Reference
from harness.check.results import (
    Comparison,
    Diagnosis,
    GateResult,
    VariantResult,
    correct_in_all,
    leave_out_unknown,
    leave_unsolved,
)
from harness.check.source_faults import Fault, faults, finding_lines, has_merged_line, touches
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Gate
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.checks.findings import plural

# Of mistakes in the code rather than in the formula a ladder's second rung speaks: a guard, a barrier, an atomic, a cast.
CODE_RUNG = 2
SHOWN = 3
# An untouched blank leaves its output unwritten: reads of it by later kernels are not their mistake.
UNWRITTEN = ("uninitialised read", "output never written")


@dataclass
class Grader:
    """Results of one state of a learner's package on each device.

    Attributes:
        reference: Inputs, truth and baseline of the cases.
        package, blanks: The code to check.
        variants, cases: The variants to run, and their cases.
        gates: Gates to report if attempted; empty for all.
        quantities: Quantities to compare in addition to those of attempted gates.
        repeated, runs: Quantities to compare in repeated runs of one case, and the number of runs.
        given: Gates to check with the provided code.
    """

    reference: Reference
    package: OpPackage
    blanks: Mapping[str, Blank]
    variants: Sequence[str] = ()
    cases: Sequence[Case] = ()
    gates: Sequence[Gate] = ()
    quantities: Sequence[str] = ()
    repeated: Sequence[str] = ()
    runs: int = 1
    given: Collection[str] = ()

    def __post_init__(self):
        self.puzzle = self.reference.puzzle
        self.source = (self.package.path / self.puzzle.source).resolve()
        self.empty = {id for id, blank in self.blanks.items() if blank.size == 0} - {*self.given}

    def on(self, device: Device) -> dict[str, VariantResult]:
        """Return the result of each variant on one device."""
        results = {name: self.variant(device, name) for name in self.variants}
        self.settle(results)
        return results

    def settle(self, results: Mapping[str, VariantResult]) -> None:
        """Assign the errors on one device to gates, of whatever variant."""
        gates = [gate for result in results.values() for gate in result.gates]
        blame_gates(gates, self.puzzle.mojo_rung.needs if self.puzzle.mojo_rung else {})
        for result in results.values():
            result.gates = [gate for gate in result.gates if not self.gates or gate.gate in self.gates]
        for gate in gates:
            if gate.gate.id in self.given:
                leave_unsolved(gate)

    def by_gate(self, device: Device) -> list[GateResult]:
        """Return the result of each gate on one device, whatever its variant; a gate that is not attempted
        is unsolved."""
        results = {gate.gate.id: gate for result in self.on(device).values() for gate in result.gates}
        return [results.get(gate.id) or GateResult(gate, "unsolved") for gate in self.gates]

    def variant(self, device: Device, name: str) -> VariantResult:
        """Return the result of one variant. The CPU path has no blanks, and so no gates."""
        cases = [case for case in self.cases if case.variant in ("", name)]
        mine = [g for g in self.puzzle.kernel_gates if g.variant == name and device.target.kind != "cpu"]
        attempted = [gate for gate in mine if gate.id not in self.empty]
        waiting = {q: (gate.id,) for gate in mine if gate.id in self.empty for q in gate.own}
        outcome = device.outcome(name, cases, self.reference)
        checked = [q for gate in attempted for q in (*gate.own, *gate.given)]
        requested = [q for q in dict.fromkeys((*self.quantities, *checked)) if q not in waiting]
        comparisons = [
            Comparison(case, self.reference.compare_all(case, device.target, name, outputs, requested))
            for case in cases
            if (outputs := outcome.outputs.get(case.name)) is not None
        ]
        diagnoses = self._diagnoses(device, outcome, comparisons, mine)
        if not outcome.corrected and not outcome.failure:
            blame_quantities(diagnoses, self.puzzle, name)
        result = VariantResult(name, comparisons, {q: waiting[q] for q in self.quantities if q in waiting})
        result.findings, result.failure = outcome.findings, str(outcome.failure or "")
        result.launches = outcome.launches
        errors = [finding for finding in result.findings if finding.is_error]
        result.gates = [by_values(gate, comparisons, result.failure) for gate in attempted]
        self._share(errors, result.gates, waits=bool(waiting))
        reports = [finding for gate in result.gates for finding in gate.findings]
        result.errors = [f for f in errors if f in reports or not (waiting and f.kind in UNWRITTEN)]
        for gate in result.gates:
            if gate.state == "wrong":
                self._explain(gate, diagnoses, result.failure)
                leave_out_unknown(gate)
            else:
                self._count(gate, outcome, cases)
        point_back(diagnoses, self.puzzle)
        result.diagnoses = diagnoses
        if self.runs > 1 and not result.failure:
            self._repeat(device, result, cases[min(1, len(cases) - 1)])
        return result

    def _count(self, result: GateResult, outcome: Outcome, cases: Sequence[Case]) -> None:
        """Check the cost limits of a gate with correct values."""
        source = Source(self.source, self.blanks)
        counted = [case for case in cases if case.name in outcome.launches]
        for case in [case for case in counted if case.variant] or counted:  # its own, if it has one
            launches = outcome.launches[case.name]
            result.costs += measure(self.puzzle, result.gate, case, launches, self.reference.dtype, source)
        if result.costs:
            own = result.costs[0]
            result.summary = f"{own.limit.short} {amount(own.value)}, at most {amount(own.limit.most)}"
        over = [cost for cost in result.costs if not cost.ok]
        if over:
            first = over[0]
            result.state, result.mistake = "wrong", first.limit.id
            result.hint = f"{result.gate.id}-{first.limit.hint}"
            result.diagnosis += ["the values are right, and cost too much:"]
            result.diagnosis += [line for cost in over for line in cost.lines]

    def _repeat(self, device: Device, result: VariantResult, hard: Case) -> None:
        """Add the results of repeated runs of the first case, for the solved quantities of a variant.

        If the order of sums is fixed the bits must be equal, or the gate is wrong.
        """
        name, written = result.variant, self.puzzle.writes(result.variant)
        requested = [q for q in self.repeated if q in written and q not in result.unsolved]
        again = partial(device.outputs, name, hard, self.reference)
        result.repeats = self.reference.compare_repeats(
            again, hard, device.target, name, requested, self.runs
        )
        for gate in result.gates:
            gate.repeats = {q: repeats for q, repeats in result.repeats.items() if q in gate.gate.own}
            if gate.state == "correct" and not all(repeats.ok for repeats in gate.repeats.values()):
                gate.state, gate.hint = "wrong", f"{gate.gate.id}-{CODE_RUNG}"

    def _diagnoses(
        self, device: Device, outcome: Outcome, comparisons: Sequence[Comparison], gates: Sequence[Gate]
    ) -> dict[str, Diagnosis]:
        """Return the diagnosis of each wrong quantity of a variant."""
        right, puzzle = correct_in_all(comparisons), self.puzzle
        hints = {quantity: gate.id for gate in gates for quantity in gate.own}
        wrong: dict[str, list[Evidence]] = {}
        for c in comparisons:
            for q, result in c.verdicts.items():
                if not result.ok:
                    got = outcome.outputs[c.case.name][q]
                    shown = self.reference.evidence(c.case, device.target, q, got, result)
                    wrong.setdefault(q, []).append(shown)
        return {
            q: diagnose(puzzle, q, cases, name=puzzle.printed_name(q), gate=hints.get(q), right=right)
            for q, cases in wrong.items()
        }

    def _share(self, findings: Sequence[Finding], gates: Sequence[GateResult], waits: bool) -> None:
        """Assign findings to the gates of a variant.

        A finding belongs to the gate of the blank that it is in, or to the only gate whose launch shows it.
        If the compiler has merged its line away, it belongs with the other findings of its kernel. A finding
        outside the blanks belongs to the gates with wrong values, or to all gates if no value is wrong.
        """
        blamed = [r.gate.id for r in gates if wrong_quantities(r)] or [r.gate.id for r in gates]
        placed = [
            (finding, [id for id, blank in self.blanks.items() if touches(finding, self.source, blank)])
            for finding in findings
        ]
        for finding, owners in placed:
            if not owners and has_merged_line(finding):
                owners = [id for other, ids in placed for id in ids if other.kernel == finding.kernel]
            if any(self._is_shared(finding, id, findings) for id in owners):
                owners = [finding.kernel]
            if not owners and waits and finding.kind in UNWRITTEN:
                continue
            for result in gates:
                if result.gate.id in (owners or blamed):
                    result.findings.append(finding)
                    result.state = "wrong"

    def _is_shared(self, finding: Finding, owner: str, findings: Sequence[Finding]) -> bool:
        """Check whether a finding in a gate's blank appears only in other gates' launches of the same
        kernel."""
        launches = {other.kernel for other in findings if other.where == finding.where}
        return all(owner in self._needs(launch) for launch in launches)

    def _needs(self, gate: str) -> Sequence[str]:
        """Return the gates whose code a gate runs."""
        return self.puzzle.mojo_rung.needs.get(gate, ()) if self.puzzle.mojo_rung else ()

    def _explain(self, result: GateResult, diagnoses: Mapping[str, Diagnosis], failure: str) -> None:
        """Fill in the diagnosis: source faults, the gate's own quantities, then findings, then provided
        code."""
        gate, wrong = result.gate, wrong_quantities(result)
        blank = self.blanks.get(gate.id)
        slips = faults(self.source, blank) if blank else []
        result.hint = f"{gate.id}-1"
        if failure:
            result.diagnosis.append(failure)
        causes = first_causes(result.findings)
        astray = any(finding.kind in OUTSIDE for finding in causes)
        known = {mistake.id for mistake in self.puzzle.mistakes}
        for quantity in wrong:
            diagnosis, own = diagnoses[quantity], quantity in gate.own
            if diagnosis.steps and diagnosis.mistake == result.mistake:
                result.diagnosis.append(f"{self.puzzle.printed_name(quantity)} shows the same mistake")
                continue
            # The effect of an index outside its tensor on values has no name.
            vague = (diagnosis.mistake not in known and (astray or bool(slips))) or gate.id in self.given
            result.diagnosis += diagnosis.values if vague else diagnosis.lines
            if not own:
                result.diagnosis.append(
                    f"{quantity} does not come from this blank but from code outside of it"
                )
            result.mistake = result.mistake or (None if vague else diagnosis.mistake)
            result.hint = diagnosis.hint if own and diagnosis.mistake and diagnosis.hint else result.hint
        if right := [q for q in gate.own if q not in wrong] if wrong else []:
            itself = "itself is" if len(right) == 1 else "themselves are"
            result.diagnosis.append(f"{', '.join(right)} {itself} right in every case")
        if gate.id not in self.given:  # the learner is to find out what is wrong
            self._causes(result, causes, slips, known)

    def _causes(
        self, result: GateResult, causes: Sequence[Finding], slips: Sequence[Fault], known: set[str]
    ) -> None:
        """Add the causes in the source, else those of the findings, and the hint that helps."""
        gate, blank = result.gate, self.blanks.get(result.gate.id)
        cause = from_findings(causes)
        if slips and result.mistake not in known and not (cause and cause[0] in SURE):
            result.mistake, result.hint = slips[0].mistake, f"{gate.id}-{CODE_RUNG}"
            result.diagnosis[:0] = [f"{self.source}:{slip.line}: {slip.words}" for slip in slips[:SHOWN]]
            result.diagnosis.append(f"see hint {result.hint}")
            return
        for finding in causes[:SHOWN]:
            result.diagnosis += finding_lines(finding, self.source, blank)
        if len(causes) > SHOWN:
            result.diagnosis.append(f"... and {plural(len(causes) - SHOWN, 'more finding')}")
        lent = self._needs(gate.id) if any(finding.kernel == gate.id for finding in causes) else ()
        for owner in lent:
            result.diagnosis.append(
                f"{owner}'s code is right where {owner} launches it: the sizes or the tensors of this launch do not fit each other"
            )
        if not cause:
            return
        # A formula that gives exactly these values explains more than a memory finding.
        if result.mistake in known and cause[0] not in FIRST_CAUSES:
            result.diagnosis.append(cause[1])
            return
        summed = any((gate.variant, quantity) in self.puzzle.atomic for quantity in gate.quantities)
        rung = 1 if cause[0] == "overwritten" and not summed else CODE_RUNG
        result.mistake, result.hint = cause[0], f"{gate.id}-{rung}"
        result.diagnosis.insert(0, f"{cause[1]}: see hint {result.hint}")


def by_values(gate: Gate, comparisons: Sequence[Comparison], failure: str) -> GateResult:
    """Return the result of a gate by values alone."""
    mine = (*gate.own, *gate.given)
    result = GateResult(gate, "correct")
    result.comparisons = [
        Comparison(c.case, {q: c.verdicts[q] for q in mine if q in c.verdicts}) for c in comparisons
    ]
    if wrong_quantities(result) or failure:
        result.state = "wrong"
    return result


def wrong_quantities(result: GateResult) -> list[str]:
    """Return the quantities of a gate, its own first, that are wrong in some case."""
    quantities = (*result.gate.own, *result.gate.given)
    return [
        q for q in quantities if any(q in c.verdicts and not c.verdicts[q].ok for c in result.comparisons)
    ]
