"""Run a variant on one device, by a MAX graph or by replay without MAX, and collect outputs and findings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.check.source_errors import use_kernel_names
from harness.console import report_progress
from harness.devices.recorder import Recording
from harness.devices.targets import VIRTUAL, Target
from harness.errors import EnvironmentProblem
from harness.spec.puzzle import Arrays, Case
from harness.vgpu import Finding
from harness.vgpu.checks.findings import group_by_cause
from harness.vgpu.errors import UnsupportedInstruction, VirtualGPUError

if TYPE_CHECKING:
    from harness.check.reference import Reference
    from harness.devices.graphs import Program
    from harness.devices.replay import Replay
    from harness.vgpu import Launch

# Step limit of a launch on the virtual GPU: cases need 5000, and an endless loop stops within seconds.
MAX_STEPS = 100_000


@dataclass
class Outcome:
    """Results of one variant in every case: outputs, findings, and the error that stopped it.

    `has_corrected_inputs`: wrong saved quantities were replaced with correct ones. `launches` are those of
    cases that check limits, with their counters.
    """

    outputs: dict[str, Arrays] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: VirtualGPUError | None = None
    has_corrected_inputs: bool = False
    launches: "dict[str, list[Launch]]" = field(default_factory=dict)


class Device(Protocol):
    """A device with its kernels, which were `cached` or took `compile_seconds` to compile."""

    target: Target
    cached: bool
    compile_seconds: float

    def run_cases(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome: ...

    def run_case(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        """Run a variant on one case again and return its outputs by quantity."""
        ...


class GraphDevice:
    """A device with one MAX graph of all variants, so that each case runs only once."""

    def __init__(self, program: "Program", target: Target):
        self.program, self.target = program, target
        self.cached, self.compile_seconds = program.cached, program.load_time_s
        self._results: dict[Case, Arrays] = {}

    def run_cases(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome:
        for number, case in enumerate(cases, 1):
            if case not in self._results:
                report_progress(f"{self.target.label}: case {number} of {len(cases)} ({case.name})")
                self._results[case] = self._execute(case, reference)
        return Outcome({case.name: select_variant_outputs(self._results[case], variant) for case in cases})

    def run_case(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        return select_variant_outputs(self._execute(case, reference), variant)

    def _execute(self, case: Case, reference: "Reference") -> Arrays:
        from harness.devices import graphs

        inputs = reference.get_inputs(case)
        return graphs.execute(reference.puzzle, self.program, self.target, inputs, case.dims)


def select_variant_outputs(outputs: Arrays, variant: str) -> Arrays:
    """Return one variant's outputs by quantity, from a graph's outputs by "variant.quantity"."""
    split_names = {name.partition("."): tensor for name, tensor in outputs.items()}
    return {quantity: tensor for (prefix, _, quantity), tensor in split_names.items() if prefix == variant}


class VirtualDevice:
    """The virtual GPU with recorded launches.

    If a variant saves a wrong quantity, each launch is replayed with correct inputs, so that it is not blamed
    for an error of an earlier launch. Findings use the tensor names of the kernels in `source`.
    """

    target = VIRTUAL

    def __init__(
        self,
        recording: Recording,
        source: Path,
        blocks: str = "natural",
        cached: bool = True,
        compile_seconds: float = 0.0,
    ):
        self.recording, self.source, self.blocks = recording, source, blocks
        self.cached, self.compile_seconds = cached, compile_seconds
        self._replays: dict[str, Replay] = {}

    def run_cases(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome:
        outcome = self._replay(variant, cases, reference)
        saved_quantities = reference.puzzle.list_saved_quantities(variant)
        for case in cases if outcome.failure is None else ():
            outputs = outcome.outputs[case.name]
            results = reference.compare_all(case, self.target, variant, outputs, saved_quantities)
            if not all(result.ok for result in results.values()):
                second_outcome = self._replay(variant, cases, reference, first_outcome=outcome)
                second_outcome.findings = outcome.findings
                return second_outcome
        return outcome

    def run_case(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        return self._replays[variant].run(variant, case, reference.get_inputs(case))

    def _replay(
        self,
        variant: str,
        cases: Sequence[Case],
        reference: "Reference",
        first_outcome: Outcome | None = None,
    ) -> Outcome:
        from harness.devices.poison import find_unwritten
        from harness.devices.replay import Replay
        from harness.vgpu import Checks

        puzzle, checks = reference.puzzle, Checks(counters=False)
        replay = Replay(self.recording, puzzle, reference.dtype, block_order=self.blocks, checks=checks)
        self._replays[variant] = replay
        outcome = Outcome(has_corrected_inputs=first_outcome is not None)
        has_limits = any(gate.limits for gate in puzzle.kernel_gates if gate.variant == variant)
        for number, case in enumerate(cases, 1):
            report_progress(f"{variant} on the virtual GPU: case {number} of {len(cases)} ({case.name})")
            replay.gpu.max_steps = MAX_STEPS + puzzle.count_multiply_adds(case.dims)
            replay.gpu.checks = Checks(counters=has_limits and case.checks_limits)
            first_launch = len(replay.gpu.launches)
            saved_arrays = reference.get_saved_arrays(case, self.target, variant) if first_outcome else {}
            first_outputs = first_outcome.outputs[case.name] if first_outcome else {}
            unwritten_names = [name for name in saved_arrays if find_unwritten(first_outputs[name]).all()]
            try:
                inputs = reference.get_inputs(case)
                outcome.outputs[case.name] = replay.run(variant, case, inputs, saved_arrays, unwritten_names)
                if replay.gpu.checks.counters:
                    outcome.launches[case.name] = replay.gpu.launches[first_launch:]
            except UnsupportedInstruction as error:
                raise EnvironmentProblem(str(error)) from error
            except VirtualGPUError as error:
                outcome.failure = error
                break
        findings = group_by_cause(replay.gpu.findings)
        outcome.findings = [use_kernel_names(finding, self.recording, self.source) for finding in findings]
        return outcome
