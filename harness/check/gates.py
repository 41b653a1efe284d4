"""Gates: each blank of a puzzle judged by itself, without MAX and without a GPU, in one warm process.

The kernels are recorded (one run of the Mojo compiler for all cases, and for those kernels alone that have changed) and
replayed on the virtual GPU. What needs torch is imported, and PyTorch asked for the right results, while the compiler
runs: this module itself is light. A gate whose blank is untouched is not run. A gate is judged on its own quantities;
where something that one launch saves for another is wrong, every launch is judged again from what is right, so that no
gate is blamed for an earlier one.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.check.diagnose import OUTSIDE, OUTSIDE_CAUSES, SURE, diagnose, first_causes, from_findings
from harness.check.results import Comparison, GateResult, right_in_all, wanted_gates
from harness.check.source_faults import Fault, arguments_of, faults
from harness.check.upstream import blame_gates
from harness.devices.recorder import Order, Recording, record_dtypes
from harness.devices.targets import Target
from harness.errors import EnvironmentProblem
from harness.learner.blanks import Blank
from harness.learner.work import package_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung
from harness.toolchain.mojo_items import Items
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding, VirtualGPUError
from harness.vgpu.checks.findings import by_cause, plural
from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.ptx.parser import Location

if TYPE_CHECKING:
    import torch

    from harness.check.reference import Reference

# Races are about the code, not the formula: the last hint helps.
RACE_RUNG = 3
# Steps that a launch may take on the virtual GPU: the cases need 5000, an endless loop is stopped within seconds.
STEPS = 100_000
SHOWN = 3
# An untouched blank leaves its output unwritten: what later kernels then read is no mistake of theirs.
UNWRITTEN = ("uninitialised read", "output never written")


@dataclass
class Outcome:
    """What one variant did in every case: what it wrote, what was found, and why it stopped, if it did."""

    outputs: dict[str, dict[str, "torch.Tensor"]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: VirtualGPUError | None = None


class Checker:
    """Judges gates again and again: truth and baseline are computed once, recordings are cached by content.

    Attributes:
        on_first: Called with the verdicts on the first case alone, before the other cases are run.
        spent: Where the time of the last check went: what -> how long it took.
        other: Judges what is right on a few cases in another dtype too, whose kernels the same program compiles; or None.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        rung: Rung | None = None,
        *,
        dtype: str = "float32",
        seed: int = 0,
        other: str = "",
    ):
        self.puzzle = puzzle
        self.rung = rung or puzzle.rung("mojo")
        self.dtype = dtype
        self.seed = seed
        self.target = Target("virtual", None, "virtual GPU (sm_90a)")
        self.on_first: Callable[[list[GateResult]], None] | None = None
        self.spent: dict[str, float] = {}
        self.other = Checker(puzzle, self.rung, dtype=other, seed=seed) if other else None

    @cached_property
    def reference(self) -> "Reference":
        """Inputs, truth and baseline of the cases."""
        from harness.check.reference import Reference

        return Reference(self.puzzle, self.dtype, self.seed)

    def check(
        self, path: Path | OpPackage, gates: Sequence[str] | None = None, cases: list[Case] | None = None
    ) -> list[GateResult]:
        """The verdict on each gate, in the puzzle's order.

        Args:
            path: The op package; read anew at every call.
            gates: Their ids, or None for all. Raises BadUse for an unknown one.
            cases: None for the puzzle's.

        Raises CompileFailed where the package does not compile, DamagedFile where its blank markers are broken.
        """
        # A fresh one: it remembers the hash of what it has read.
        package = OpPackage(path.path if isinstance(path, OpPackage) else path)
        wanted = wanted_gates(self.puzzle, self.rung, gates)
        if cases is None:
            cases = [*self.puzzle.cases(None), *self.puzzle.gate_cases]
        cases = [case for case in cases if case.world_size == 1]
        found = package_blanks(package, self.puzzle)
        empty = {id for id, blank in found.items() if blank.size == 0}
        variants = sorted({gate.variant for gate in wanted if gate.id not in empty})
        self.spent = {}
        narrow = [case for case in cases if case.in_16_bits] if self.other else []
        recording, *others = self._recorded(package, cases, variants, narrow)
        if self.on_first and variants and len(cases) > 1:
            with self._timed("first case"):
                first = self._results(recording, cases[:1], wanted, variants, package, found)
            self.on_first(first)
        with self._timed("all cases"):
            results = self._results(recording, cases, wanted, variants, package, found)
        if not (self.other and others):
            return results
        right = [result.gate for result in results if result.state == "correct"]
        with self._timed(f"in {self.other.dtype}"):
            again = self.other._results(others[0], narrow, right, variants, package, found)
        wrong = {result.gate.id: result for result in again if result.state == "wrong"}
        for result in wrong.values():
            result.diagnosis.insert(0, f"right in {self.dtype}, and wrong in {self.other.dtype}:")
        return [wrong.get(result.gate.id, result) for result in results]

    def _results(
        self,
        recording: Recording,
        cases: list[Case],
        wanted: list[Gate],
        variants: list[str],
        package: OpPackage,
        found: dict[str, Blank],
    ) -> list[GateResult]:
        """The verdict on each wanted gate in these cases."""
        empty = {id for id, blank in found.items() if blank.size == 0}
        of = {name: [case for case in cases if case.variant in ("", name)] for name in variants}
        outcomes = {variant: self._outcome(recording, variant, of[variant]) for variant in variants}
        source = (package.path / self.puzzle.source).resolve()
        for outcome in outcomes.values():
            outcome.findings = [in_the_kernels_words(each, recording, source) for each in outcome.findings]
        # Every attempted gate of these variants is judged, so that what lies in no blank is put down to the right one.
        attempted = [g for g in self.gates if g.variant in variants and g.id not in empty]
        judged = {gate.id: self._judge(gate, of[gate.variant], outcomes[gate.variant]) for gate in attempted}
        for gate in attempted:
            rivals = [r for r in judged.values() if r.gate.variant == gate.variant]
            self._finish(judged[gate.id], rivals, outcomes[gate.variant], package, found, empty)
        blame_gates(list(judged.values()), self.rung.needs)
        return [judged.get(gate.id) or GateResult(gate, "unsolved") for gate in wanted]

    @property
    def gates(self) -> list[Gate]:
        """The gates of the kernels."""
        return self.puzzle.gates_of(self.rung)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds what the block takes to `spent`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - started

    def _recorded(
        self, package: OpPackage, cases: list[Case], variants: list[str], narrow: Sequence[Case] = ()
    ) -> list[Recording]:
        """The recording, and one of the `narrow` cases in the other dtype; while the compiler runs, PyTorch is imported and
        asked for what is right.

        Raises what `record` does, and that without waiting for PyTorch to answer all.
        """
        if not variants:
            return [Recording()]
        orders = [self._order(package, cases, variants)]
        if self.other and narrow:
            orders.append(self.other._order(package, narrow, variants))
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            with self._timed("compiler"):
                recording = pool.submit(record_dtypes, orders, self.puzzle.name)
                self._prepare(cases, recording)
                if self.other:
                    self.other._prepare(narrow, recording)
                return recording.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, cases: Sequence[Case], recording: "Future[list[Recording]]") -> None:
        """Makes truth and baseline of the cases, in order, until the recording is there."""
        with self._timed("beside it PyTorch"):
            for case in cases:
                if recording.done():
                    return
                self.reference.truth(case, self.target)
                self.reference.baseline(case, self.target)

    def _order(self, package: OpPackage, cases: Sequence[Case], variants: list[str]) -> Order:
        dims = tuple(dict.fromkeys(case.dims for case in cases))
        return Order(package, dims, tuple(variants), small_grid=True, dtype=self.dtype)

    def _outcome(self, recording: Recording, variant: str, cases: list[Case]) -> Outcome:
        """Runs a variant on every case; where it saved something wrong a second time, each launch from what is right."""
        outcome, saved = self._replay(recording, variant, cases), self.puzzle.saved(variant)
        if outcome.failure is None and not all(
            verdict.ok for case in cases for verdict in self._verdicts(case, variant, outcome, saved).values()
        ):
            again = self._replay(recording, variant, cases, given=True)
            again.findings = outcome.findings
            return again
        return outcome

    def _replay(self, recording: Recording, variant: str, cases: list[Case], given: bool = False) -> Outcome:
        from harness.devices.replay import Replay
        from harness.vgpu import Checks

        replay = Replay(recording, self.puzzle, self.dtype, checks=Checks(counters=False))
        outcome = Outcome()
        for case in cases:
            replay.gpu.steps = STEPS + self.puzzle.multiply_adds(case.dims)
            try:
                outcome.outputs[case.name] = replay.run(
                    variant, case, self.reference.inputs(case), self._saved(case, variant) if given else {}
                )
            except UnsupportedInstruction as error:
                raise EnvironmentProblem(str(error)) from error
            except VirtualGPUError as error:
                outcome.failure = error
                break
        outcome.findings = [finding for finding in by_cause(replay.gpu.findings) if finding.is_error]
        return outcome

    def _saved(self, case: Case, variant: str) -> dict[str, "torch.Tensor"]:
        """What the forward pass hands to the backward pass, as it should be."""
        import torch

        truth = self.reference.truth(case, self.target)
        return {
            quantity: torch.tensor(truth[quantity]).to(
                getattr(torch, self.puzzle.written_dtype(quantity, self.dtype))
            )
            for quantity in self.puzzle.saved(variant)
        }

    def _verdicts(self, case: Case, variant: str, outcome: Outcome, quantities: Sequence[str]) -> dict:
        from harness.check import tensors

        outputs = {f"{variant}.{name}": tensor for name, tensor in outcome.outputs[case.name].items()}
        return tensors.judge_variant(
            self.puzzle, self.reference, case, self.target, variant, outputs, list(quantities)
        )

    def _judge(self, gate: Gate, cases: list[Case], outcome: Outcome) -> GateResult:
        """The verdict by values alone."""
        quantities = (*gate.own, *gate.given)
        result = GateResult(gate, "correct")
        result.comparisons = [
            Comparison(case, self._verdicts(case, gate.variant, outcome, quantities))
            for case in cases
            if case.name in outcome.outputs
        ]
        if wrong_quantities(result) or outcome.failure:
            result.state = "wrong"
        return result

    def _finish(
        self,
        result: GateResult,
        rivals: list[GateResult],
        outcome: Outcome,
        package: OpPackage,
        found: dict[str, Blank],
        empty: set[str],
    ) -> None:
        """Adds the findings that belong to a gate, and the diagnosis.

        A finding belongs to the gate in whose blank it is. Where the compiler has merged lines, so that it has none, it
        belongs with the other findings of its kernel. One in no blank belongs to the gates with wrong values, or to all
        of them where no value is wrong.
        """
        source = (package.path / self.puzzle.source).resolve()
        waiting = any(g.id in empty and g.variant == result.gate.variant for g in self.gates)
        blamed = [r.gate.id for r in rivals if wrong_quantities(r)] or [r.gate.id for r in rivals]
        placed = [
            (finding, [id for id, blank in found.items() if touches(finding, source, blank)])
            for finding in outcome.findings
        ]
        for finding, owners in placed:
            if not owners and has_merged_line(finding):
                owners = [id for other, ids in placed for id in ids if other.kernel == finding.kernel]
            if not owners and waiting and finding.kind in UNWRITTEN:
                continue
            if result.gate.id in (owners or blamed):
                result.findings.append(finding)
        if result.state == "wrong" or result.findings:
            result.state = "wrong"
            blank = found.get(result.gate.id)
            slips = faults(source, blank) if blank else []
            self._explain(result, wrong_quantities(result), outcome, source, blank, slips)

    def _explain(
        self,
        result: GateResult,
        wrong: list[str],
        outcome: Outcome,
        source: Path,
        blank: Blank | None,
        slips: list[Fault],
    ) -> None:
        """Fills in the diagnosis: what the text shows, the gate's own quantities, then findings, then given code.

        Of several causes the first is named, and what follows from it is left out.
        """
        from harness.check.reference import evidence

        gate = result.gate
        result.hint = f"{gate.id}-1"
        if outcome.failure:
            result.diagnosis.append(str(outcome.failure))
        causes = first_causes(result.findings)
        astray = any(finding.kind in OUTSIDE for finding in causes)
        known = {mistake.id for mistake in self.puzzle.mistakes}
        for quantity in wrong:
            found = [
                evidence(
                    self.puzzle,
                    self.reference,
                    c.case,
                    self.target,
                    quantity,
                    outcome.outputs[c.case.name][quantity],
                    c.verdicts[quantity],
                )
                for c in result.comparisons
                if not c.verdicts[quantity].ok
            ]
            own = quantity in gate.own
            seen = diagnose(
                self.puzzle,
                quantity,
                found,
                name=self.puzzle.printed(quantity),
                gate=gate.id if own else None,
                right=right_in_all(result.comparisons),
            )
            if seen.steps and seen.mistake == result.mistake:
                result.diagnosis.append(f"{self.puzzle.printed(quantity)} shows the same mistake")
                continue
            # What an index outside of its tensor does to values has no name of its own.
            vague = seen.mistake not in known and (astray or bool(slips))
            result.diagnosis += seen.lines[:-1] if vague else seen.lines
            if not own:
                result.diagnosis.append(
                    f"{quantity} does not come from this blank but from code outside of it"
                )
            result.mistake = result.mistake or (None if vague else seen.mistake)
            result.hint = seen.hint if own and seen.mistake else result.hint
        if right := [q for q in gate.own if q not in wrong] if wrong else []:
            result.diagnosis.append(f"{', '.join(right)} itself is right in every case")
        cause = from_findings(causes)
        if slips and result.mistake not in known and not (cause and cause[0] in SURE):
            result.mistake, result.hint = slips[0].mistake, f"{gate.id}-{RACE_RUNG}"
            result.diagnosis[:0] = [f"{source}:{slip.line}: {slip.words}" for slip in slips[:SHOWN]]
            result.diagnosis.append(f"see hint {result.hint}")
            return
        for finding in causes[:SHOWN]:
            result.diagnosis += finding_lines(finding, source, blank)
        if len(causes) > SHOWN:
            result.diagnosis.append(f"... and {plural(len(causes) - SHOWN, 'more finding')}")
        # A formula that gives these very values says more than that its index leaves a tensor.
        if cause and not (result.mistake in known and cause in OUTSIDE_CAUSES):
            summed = any((gate.variant, quantity) in self.puzzle.atomic for quantity in gate.quantities)
            rung = (
                2 if cause in OUTSIDE_CAUSES else 1 if cause[0] == "overwritten" and not summed else RACE_RUNG
            )
            result.mistake, result.hint = cause[0], f"{gate.id}-{rung}"
            result.diagnosis.append(f"{cause[1]}: see hint {result.hint}")


def wrong_quantities(result: GateResult) -> list[str]:
    """The quantities of a gate, its own first, that are wrong in some case."""
    quantities = (*result.gate.own, *result.gate.given)
    return [q for q in quantities if any(not c.verdicts[q].ok for c in result.comparisons)]


def in_the_kernels_words(finding: Finding, recording: Recording, source: Path) -> Finding:
    """A finding that calls a tensor what the kernel's argument is called: the launch may have another name for it."""
    arguments = recording.arguments(finding.kernel)
    chain = finding.instr.loc.chain() if finding.instr and finding.instr.loc else ()
    lines = [at.line for at in chain if Path(at.file) == source]
    if not lines:
        return finding
    kernel = Items({source.name: source.read_text("utf-8", "replace")}).enclosing(source.name, lines[-1])
    pairs = zip(arguments, arguments_of(kernel), strict=False) if kernel else ()
    names = {tensor: name for tensor, name in pairs if tensor}
    return finding.renamed(lambda tensor: names.get(tensor, tensor))


def touches(finding: Finding, source: Path, blank: Blank) -> bool:
    """Whether a finding, or the other place of a race, comes from a blank, be it through a helper."""
    for instr in (finding.instr, finding.other_instr):
        for at in instr.loc.chain() if instr and instr.loc else ():
            if within(at, source, blank):
                return True
    return False


def finding_lines(finding: Finding, source: Path, blank: Blank | None) -> list[str]:
    """A finding in lines, at the places in the blank that it comes from, be it through a helper."""
    lines = finding.text().splitlines()
    for before, there, instr in (
        ("at ", finding.where, finding.instr),
        ("the other place: ", finding.other, finding.other_instr),
    ):
        chain = instr.loc.chain() if instr and instr.loc else ()
        own = next((at for at in chain if blank and within(at, source, blank)), None)
        if own and there and not there.startswith(f"{own.file}:{own.line}:"):
            place = f"{own.file}:{own.line}:{own.column}"
            words = f"{before}{place} (in a helper, {there})"
            lines = [
                line.replace(f"{before}{there}", words) for line in lines if line != f"  called from {place}"
            ]
    if blank and (line := used_in_the_loop(finding, source)):
        lines.insert(1, f"  the compiler has moved it out of the loop: it stands in line {line}")
    return [line.replace(f"{Path.cwd()}/", "") for line in lines]


def used_in_the_loop(finding: Finding, source: Path) -> int | None:
    """The line that uses the tensor of a finding, where the place is the head of a loop and only one line in that does."""
    chain = finding.instr.loc.chain() if finding.instr and finding.instr.loc else ()
    number = next((at.line for at in chain if Path(at.file) == source), 0)
    text = source.read_text("utf-8", "replace").split("\n") if number and source.is_file() else []
    if (
        number > len(text)
        or not text
        or not re.match(r"\s*for \w+ in ", text[number - 1])
        or not finding.tensor
    ):
        return None
    uses = re.compile(rf"\b{re.escape(finding.tensor)}\[")
    depth = len(text[number - 1]) - len(text[number - 1].lstrip())
    found = []
    for line, code in enumerate(text[number:], start=number + 1):
        if code.strip() and len(code) - len(code.lstrip()) <= depth:
            break
        found += [line] if uses.search(code) else []
    return found[0] if len(found) == 1 and not uses.search(text[number - 1]) else None


def within(at: Location, source: Path, blank: Blank) -> bool:
    """Whether a place in the sources lies in a blank of a file."""
    return blank.line <= at.line < blank.line + len(blank.body) and Path(at.file) == source


def has_merged_line(finding: Finding) -> bool:
    """Whether the compiler has merged the finding's instruction out of several places: it says line 0."""
    at = finding.instr.loc if finding.instr else None
    return any(frame.line == 0 for frame in (at.chain() if at else ()))
