"""Turn the outputs of any device into results per quantity and per gate."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.check.accesses import Source
from harness.check.compare import Evidence
from harness.check.diagnose import (
    CERTAIN_MISTAKES,
    OUT_OF_BOUNDS_KINDS,
    PRIMARY_MISTAKES,
    diagnose,
    drop_secondary_findings,
    find_cause,
    redirect_gates,
    redirect_quantities,
    redirect_repeats,
)
from harness.check.execution import Device, Outcome
from harness.check.limits import format_amount, measure_costs
from harness.check.reference import Reference
from harness.check.results import (
    Comparison,
    Diagnosis,
    GateResult,
    VariantResult,
    drop_unknown,
    find_correct_quantities,
    mark_unsolved,
)
from harness.check.source_errors import (
    SourceError,
    find_source_errors,
    format_finding,
    has_merged_line,
    involves_blank,
)
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Gate
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding
from harness.vgpu.checks.findings import format_count

# A ladder's second hint is about the code rather than the formula: a guard, a barrier, an atomic, a cast.
CODE_HINT = 2
MAX_CAUSES = 3
# An untouched blank leaves its output unwritten; later kernels that read it are correct.
UNWRITTEN_KINDS = ("uninitialised read", "output never written")


@dataclass
class Grader:
    """A grader of one state of a learner's package, on any device.

    Attributes:
        gates: Gates to report if attempted; empty for all.
        quantities: Quantities to compare in addition to those of attempted gates.
        repeated_quantities: Quantities to compare in `num_runs` runs of one case.
        provided_ids: Gates to check with the provided code.
    """

    reference: Reference
    package: OpPackage
    blanks: Mapping[str, Blank]
    variants: Sequence[str] = ()
    cases: Sequence[Case] = ()
    gates: Sequence[Gate] = ()
    quantities: Sequence[str] = ()
    repeated_quantities: Sequence[str] = ()
    num_runs: int = 1
    provided_ids: Collection[str] = ()

    def __post_init__(self):
        self.puzzle = self.reference.puzzle
        self.source = (self.package.path / self.puzzle.source).resolve()
        self.untouched = {id for id, blank in self.blanks.items() if blank.size == 0} - {*self.provided_ids}

    def grade_device(self, device: Device) -> dict[str, VariantResult]:
        results = {name: self.grade_variant(device, name) for name in self.variants}
        self.attribute_errors(results)
        return results

    def attribute_errors(self, results: Mapping[str, VariantResult]) -> None:
        """Attribute the errors on one device to gates, across variants, and drop unrequested gates."""
        gates = [gate for result in results.values() for gate in result.gates]
        redirect_gates(gates, self.puzzle.mojo_rung.dependencies if self.puzzle.mojo_rung else {})
        for result in results.values():
            result.gates = [gate for gate in result.gates if not self.gates or gate.gate in self.gates]
        for gate in gates:
            if gate.gate.id in self.provided_ids:
                mark_unsolved(gate)

    def grade_gates(self, device: Device) -> list[GateResult]:
        """Return the result of each gate on one device; a gate that is not attempted is unsolved."""
        graded = self.grade_device(device).values()
        results = {gate.gate.id: gate for result in graded for gate in result.gates}
        return [results.get(gate.id) or GateResult(gate, "unsolved") for gate in self.gates]

    def grade_variant(self, device: Device, name: str) -> VariantResult:
        cases = [case for case in self.cases if case.variant in ("", name)]
        gates = [g for g in self.puzzle.kernel_gates if g.variant == name and device.target.kind != "cpu"]
        attempted = [gate for gate in gates if gate.id not in self.untouched]
        unsolved = {q: (gate.id,) for gate in gates if gate.id in self.untouched for q in gate.own_quantities}
        outcome = device.run_cases(name, cases, self.reference)
        names = [q for gate in attempted for q in (*gate.own_quantities, *gate.provided_quantities)]
        quantities = [q for q in dict.fromkeys((*self.quantities, *names)) if q not in unsolved]
        comparisons = [
            Comparison(case, self.reference.compare_all(case, device.target, name, outputs, quantities))
            for case in cases
            if (outputs := outcome.outputs.get(case.name)) is not None
        ]
        diagnoses = self._diagnose_quantities(device, outcome, comparisons, gates)
        if not outcome.has_corrected_inputs and not outcome.failure:
            redirect_quantities(diagnoses, self.puzzle, name)
        result = VariantResult(name, comparisons, {q: unsolved[q] for q in self.quantities if q in unsolved})
        result.findings, result.failure = outcome.findings, str(outcome.failure or "")
        result.launches = outcome.launches
        errors = [finding for finding in result.findings if finding.is_error]
        result.gates = [grade_values(gate, comparisons, result.failure) for gate in attempted]
        self._assign_findings(errors, result.gates, has_unsolved=bool(unsolved))
        reported = [finding for gate in result.gates for finding in gate.findings]
        result.errors = [f for f in errors if f in reported or not (unsolved and f.kind in UNWRITTEN_KINDS)]
        for gate in result.gates:
            if gate.state == "wrong":
                self._explain(gate, diagnoses, result.failure)
                drop_unknown(gate)
            else:
                self._check_costs(gate, outcome, cases)
        redirect_repeats(diagnoses, self.puzzle)
        result.diagnoses = diagnoses
        if self.num_runs > 1 and not result.failure:
            self._check_repeats(device, result, cases[min(1, len(cases) - 1)])
        return result

    def _check_costs(self, result: GateResult, outcome: Outcome, cases: Sequence[Case]) -> None:
        """Check the cost limits of a gate with correct values."""
        source = Source(self.source, self.blanks)
        for case in self.puzzle.list_limit_cases(result.gate.variant):
            if case in cases and (launches := outcome.launches.get(case.name)):
                dtype = self.reference.dtype
                result.costs += measure_costs(self.puzzle, result.gate, case, launches, dtype, source)
        if result.costs:
            cost = result.costs[0]
            maximum = format_amount(cost.limit.maximum)
            result.summary = f"{cost.limit.table_label} {format_amount(cost.value)}, at most {maximum}"
        exceeded = [cost for cost in result.costs if not cost.ok]
        if exceeded:
            first = exceeded[0]
            result.state, result.mistake = "wrong", first.limit.id
            result.hint = f"{result.gate.id}-{first.limit.hint}"
            result.diagnosis += ["the values are correct, but cost too much:"]
            result.diagnosis += [line for cost in exceeded for line in cost.lines]

    def _check_repeats(self, device: Device, result: VariantResult, case: Case) -> None:
        """Add the results of repeated runs of one case, for the solved quantities of a variant.

        A gate whose sums have a fixed order is wrong unless all runs are bit-equal.
        """
        name, outputs = result.variant, self.puzzle.list_outputs(result.variant)
        quantities = [q for q in self.repeated_quantities if q in outputs and q not in result.unsolved]
        run_again = partial(device.run_case, name, case, self.reference)
        compare_repeats = self.reference.compare_repeats
        result.repeats = compare_repeats(run_again, case, device.target, name, quantities, self.num_runs)
        for gate in result.gates:
            gate.repeats = {q: runs for q, runs in result.repeats.items() if q in gate.gate.own_quantities}
            if gate.state == "correct" and not all(repeats.ok for repeats in gate.repeats.values()):
                gate.state, gate.hint = "wrong", f"{gate.gate.id}-{CODE_HINT}"

    def _diagnose_quantities(
        self, device: Device, outcome: Outcome, comparisons: Sequence[Comparison], gates: Sequence[Gate]
    ) -> dict[str, Diagnosis]:
        right, puzzle = find_correct_quantities(comparisons), self.puzzle
        hints = {quantity: gate.id for gate in gates for quantity in gate.own_quantities}
        wrong: dict[str, list[Evidence]] = {}
        for c in comparisons:
            for q, result in c.results.items():
                if not result.ok:
                    got = outcome.outputs[c.case.name][q]
                    evidence = self.reference.make_evidence(c.case, device.target, q, got, result)
                    wrong.setdefault(q, []).append(evidence)
        return {
            q: diagnose(puzzle, q, cases, name=puzzle.get_printed_name(q), gate=hints.get(q), correct=right)
            for q, cases in wrong.items()
        }

    def _assign_findings(
        self, findings: Sequence[Finding], gates: Sequence[GateResult], has_unsolved: bool
    ) -> None:
        """Assign findings to the gates of a variant.

        A finding is assigned to the gate of its blank or, if it occurs only in gates that reuse the blank, to
        the gate that launched it. If the compiler merged its line with another, it goes to the gates of the
        kernel's other findings. A finding outside the blanks goes to the gates with wrong values or, if there
        are none, to all gates.
        """
        default_owners = [r.gate.id for r in gates if list_wrong_quantities(r)] or [r.gate.id for r in gates]
        owners_by_finding: list[tuple[Finding, list[str]]] = []
        for finding in findings:
            ids = [id for id, blank in self.blanks.items() if involves_blank(finding, self.source, blank)]
            owners_by_finding.append((finding, ids))
        for finding, owners in owners_by_finding:
            if not owners and has_merged_line(finding):
                owners = [id for f, ids in owners_by_finding for id in ids if f.kernel == finding.kernel]
            if any(self._is_shared(finding, id, findings) for id in owners):
                owners = [finding.kernel]
            if not owners and has_unsolved and finding.kind in UNWRITTEN_KINDS:
                continue
            for result in gates:
                if result.gate.id in (owners or default_owners):
                    result.findings.append(finding)
                    result.state = "wrong"

    def _is_shared(self, finding: Finding, owner: str, findings: Sequence[Finding]) -> bool:
        """Check whether a finding in a gate's blank occurs only in launches of gates that reuse its code."""
        launches = {other.kernel for other in findings if other.location == finding.location}
        return all(owner in self._get_dependencies(launch) for launch in launches)

    def _get_dependencies(self, gate: str) -> Sequence[str]:
        return self.puzzle.mojo_rung.dependencies.get(gate, ()) if self.puzzle.mojo_rung else ()

    def _explain(self, result: GateResult, diagnoses: Mapping[str, Diagnosis], failure: str) -> None:
        """Complete a diagnosis: failure, wrong and correct quantities, causes in the source or findings."""
        gate, wrong = result.gate, list_wrong_quantities(result)
        blank = self.blanks.get(gate.id)
        source_errors = find_source_errors(self.source, blank) if blank else []
        result.hint = f"{gate.id}-1"
        if failure:
            result.diagnosis.append(failure)
        causes = drop_secondary_findings(result.findings)
        is_out_of_bounds = any(finding.kind in OUT_OF_BOUNDS_KINDS for finding in causes)
        known_ids = {mistake.id for mistake in self.puzzle.mistakes}
        for quantity in wrong:
            diagnosis, is_own = diagnoses[quantity], quantity in gate.own_quantities
            if diagnosis.changed_steps and diagnosis.mistake == result.mistake:
                result.diagnosis.append(f"{self.puzzle.get_printed_name(quantity)} shows the same mistake")
                continue
            # The effect of an out-of-bounds index on values is not a known mistake.
            has_cause = is_out_of_bounds or bool(source_errors)
            is_vague = (has_cause and diagnosis.mistake not in known_ids) or gate.id in self.provided_ids
            result.diagnosis += diagnosis.values if is_vague else diagnosis.lines
            if not is_own:
                result.diagnosis.append(
                    f"{quantity} does not come from this blank but from code outside of it"
                )
            result.mistake = result.mistake or (None if is_vague else diagnosis.mistake)
            result.hint = diagnosis.hint if is_own and diagnosis.mistake and diagnosis.hint else result.hint
        if correct := [q for q in gate.own_quantities if q not in wrong] if wrong else []:
            itself = "itself is" if len(correct) == 1 else "themselves are"
            result.diagnosis.append(f"{', '.join(correct)} {itself} right in every case")
        if gate.id not in self.provided_ids:  # finding the mistake is the exercise
            self._add_causes(result, causes, source_errors, known_ids)

    def _add_causes(
        self,
        result: GateResult,
        causes: Sequence[Finding],
        source_errors: Sequence[SourceError],
        known_ids: set[str],
    ) -> None:
        """Add the causes from the source, or otherwise from the findings, and select the hint."""
        gate, blank = result.gate, self.blanks.get(result.gate.id)
        cause = find_cause(causes)
        if source_errors and result.mistake not in known_ids and not (cause and cause[0] in CERTAIN_MISTAKES):
            result.mistake, result.hint = source_errors[0].mistake, f"{gate.id}-{CODE_HINT}"
            result.diagnosis[:0] = [
                f"{self.source}:{e.line}: {e.message}" for e in source_errors[:MAX_CAUSES]
            ]
            result.diagnosis.append(f"see hint {result.hint}")
            return
        for finding in causes[:MAX_CAUSES]:
            result.diagnosis += format_finding(finding, self.source, blank)
        if len(causes) > MAX_CAUSES:
            result.diagnosis.append(f"... and {format_count(len(causes) - MAX_CAUSES, 'more finding')}")
        is_own_launch = any(finding.kernel == gate.id for finding in causes)
        for owner in self._get_dependencies(gate.id) if is_own_launch else ():
            result.diagnosis.append(
                f"{owner}'s code is right where {owner} launches it: the sizes or the tensors of this launch do not fit each other"
            )
        if not cause:
            return
        # A formula that gives exactly these values is a more specific diagnosis than a memory finding.
        if result.mistake in known_ids and cause[0] not in PRIMARY_MISTAKES:
            result.diagnosis.append(cause[1])
            return
        uses_atomics = any((gate.variant, q) in self.puzzle.atomic_sums for q in gate.quantities)
        hint_number = 1 if cause[0] == "overwritten" and not uses_atomics else CODE_HINT
        result.mistake, result.hint = cause[0], f"{gate.id}-{hint_number}"
        result.diagnosis.insert(0, f"{cause[1]}: see hint {result.hint}")


def grade_values(gate: Gate, comparisons: Sequence[Comparison], failure: str) -> GateResult:
    quantities = (*gate.own_quantities, *gate.provided_quantities)
    result = GateResult(gate, "correct")
    result.comparisons = [
        Comparison(c.case, {q: c.results[q] for q in quantities if q in c.results}) for c in comparisons
    ]
    if list_wrong_quantities(result) or failure:
        result.state = "wrong"
    return result


def list_wrong_quantities(result: GateResult) -> list[str]:
    quantities = (*result.gate.own_quantities, *result.gate.provided_quantities)
    return [q for q in quantities if any(q in c.results and not c.results[q].ok for c in result.comparisons)]
