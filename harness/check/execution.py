"""Run a variant on one device and collect outputs and sanitizer findings.

The CPU and a real GPU run a MAX graph; the virtual GPU replays recorded launches, and MAX is not even
imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.check.source_faults import with_kernel_names
from harness.console import tell
from harness.devices.recorder import Recording
from harness.devices.targets import VIRTUAL, Target
from harness.errors import EnvironmentProblem
from harness.spec.puzzle import Arrays, Case
from harness.vgpu import Finding
from harness.vgpu.checks.findings import by_cause
from harness.vgpu.errors import UnsupportedInstruction, VirtualGPUError

if TYPE_CHECKING:
    from harness.check.reference import Reference
    from harness.devices.graphs import Program
    from harness.devices.replay import Replay
    from harness.vgpu import Launch

# Steps that a launch may take on the virtual GPU: the cases need 5000, an endless loop is stopped within seconds.
STEPS = 100_000


@dataclass
class Outcome:
    """One variant in every case: outputs, findings, and the error that stopped it.

    `corrected`: some saved quantities were wrong and were replaced by correct ones. `launches` are those of
    counted cases, with their counters.
    """

    outputs: dict[str, Arrays] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: VirtualGPUError | None = None
    corrected: bool = False
    launches: "dict[str, list[Launch]]" = field(default_factory=dict)


class Device(Protocol):
    """A device for kernels; these are cached, or were compiled now in so many seconds."""

    target: Target
    cached: bool
    seconds: float

    def outcome(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome:
        """Run a variant on every case."""
        ...

    def outputs(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        """Run a variant on one case again; returns its outputs by quantity."""
        ...


class GraphDevice:
    """A device with a MAX graph of all variants; the first variant that needs a case runs it."""

    def __init__(self, program: "Program", target: Target):
        self.program, self.target = program, target
        self.cached, self.seconds = program.cached, program.seconds
        self._ran: dict[Case, Arrays] = {}

    def outcome(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome:
        for number, case in enumerate(cases, 1):
            if case not in self._ran:
                tell(f"{self.target.label}: case {number} of {len(cases)} ({case.name})")
                self._ran[case] = self._execute(case, reference)
        return Outcome({case.name: variant_outputs(self._ran[case], variant) for case in cases})

    def outputs(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        return variant_outputs(self._execute(case, reference), variant)

    def _execute(self, case: Case, reference: "Reference") -> Arrays:
        from harness.devices import graphs

        inputs = reference.inputs(case)
        return graphs.execute(reference.puzzle, self.program, self.target, inputs, case.dims)


def variant_outputs(outputs: Arrays, variant: str) -> Arrays:
    """Return the outputs of one variant, by quantity, from the outputs of a graph by "variant.quantity"."""
    named = {name.partition("."): tensor for name, tensor in outputs.items()}
    return {quantity: tensor for (prefix, _, quantity), tensor in named.items() if prefix == variant}


class VirtualDevice:
    """The virtual GPU with recorded launches.

    If a variant saves a wrong quantity, each launch is replayed from correct inputs, so that it is not blamed
    for an earlier one. Findings use the tensor names of the kernels in `source`.
    """

    target = VIRTUAL

    def __init__(
        self,
        recording: Recording,
        source: Path,
        blocks: str = "natural",
        cached: bool = True,
        seconds: float = 0.0,
    ):
        self.recording, self.source, self.blocks = recording, source, blocks
        self.cached, self.seconds = cached, seconds
        self._replays: dict[str, Replay] = {}

    def outcome(self, variant: str, cases: Sequence[Case], reference: "Reference") -> Outcome:
        outcome, saved = self._replay(variant, cases, reference), reference.puzzle.saved_quantities(variant)
        if outcome.failure is None and not all(
            result.ok
            for case in cases
            for result in reference.compare_all(
                case, self.target, variant, outcome.outputs[case.name], saved
            ).values()
        ):
            again = self._replay(variant, cases, reference, wrong=outcome)
            again.findings = outcome.findings
            return again
        return outcome

    def outputs(self, variant: str, case: Case, reference: "Reference") -> Arrays:
        """Return the outputs of a case, on the virtual GPU that ran the variant last."""
        return self._replays[variant].run(variant, case, reference.inputs(case))

    def _replay(
        self, variant: str, cases: Sequence[Case], reference: "Reference", wrong: Outcome | None = None
    ) -> Outcome:
        from harness.devices.poison import unwritten
        from harness.devices.replay import Replay
        from harness.vgpu import Checks

        puzzle, checks = reference.puzzle, Checks(counters=False)
        replay = Replay(self.recording, puzzle, reference.dtype, blocks=self.blocks, checks=checks)
        self._replays[variant] = replay
        outcome = Outcome(corrected=wrong is not None)
        limited = any(gate.limits for gate in puzzle.kernel_gates if gate.variant == variant)
        for number, case in enumerate(cases, 1):
            tell(f"{variant} on the virtual GPU: case {number} of {len(cases)} ({case.name})")
            replay.gpu.steps = STEPS + puzzle.multiply_adds(case.dims)
            replay.gpu.checks = Checks(counters=limited and case.counted)
            before_case = len(replay.gpu.launches)
            saved = reference.saved_arrays(case, self.target, variant) if wrong else {}
            before = wrong.outputs[case.name] if wrong else {}
            unmade = [name for name in saved if unwritten(before[name]).all()]
            try:
                outcome.outputs[case.name] = replay.run(variant, case, reference.inputs(case), saved, unmade)
                if replay.gpu.checks.counters:
                    outcome.launches[case.name] = replay.gpu.launches[before_case:]
            except UnsupportedInstruction as error:
                raise EnvironmentProblem(str(error)) from error
            except VirtualGPUError as error:
                outcome.failure = error
                break
        outcome.findings = [
            with_kernel_names(finding, self.recording, self.source)
            for finding in by_cause(replay.gpu.findings)
        ]
        return outcome
