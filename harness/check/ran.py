"""What a device makes of a variant's cases: outputs and findings. Judging them is `harness.check.judge`'s.

The CPU and a real GPU run a MAX graph; the virtual GPU replays recorded launches, and MAX is not even imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.check.live import tell
from harness.check.places import in_the_kernels_words
from harness.devices.recorder import Recording
from harness.devices.targets import VIRTUAL, Target
from harness.errors import EnvironmentProblem
from harness.spec.puzzle import Case
from harness.vgpu import Finding
from harness.vgpu.checks.findings import by_cause
from harness.vgpu.errors import UnsupportedInstruction, VirtualGPUError

if TYPE_CHECKING:
    import torch

    from harness.check.reference import Reference
    from harness.devices.graphs import Program
    from harness.devices.replay import Replay

Tensors = dict[str, "torch.Tensor"]

# Steps that a launch may take on the virtual GPU: the cases need 5000, an endless loop is stopped within seconds.
STEPS = 100_000


@dataclass
class Outcome:
    """What one variant did in every case: what it wrote, what was found, and why it stopped, if it did.

    `given`: what the launches save for others was wrong, so that each was given what is right.
    """

    outputs: dict[str, Tensors] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: VirtualGPUError | None = None
    given: bool = False


class Device(Protocol):
    """Where kernels run."""

    target: Target

    def outcome(self, variant: str, cases: Sequence[Case]) -> Outcome:
        """Runs a variant on every case."""
        ...

    def outputs(self, variant: str, case: Case) -> Tensors:
        """Runs a variant on one case once more; what it wrote, by quantity."""
        ...


class Compiled:
    """A device with a MAX graph, which runs all of its variants at once; each case is run when the first of them asks."""

    def __init__(self, program: "Program", reference: "Reference", target: Target):
        self.program, self.reference, self.target = program, reference, target
        self._ran: dict[Case, Tensors] = {}

    def outcome(self, variant: str, cases: Sequence[Case]) -> Outcome:
        for number, case in enumerate(cases, 1):
            if case not in self._ran:
                tell(f"{self.target.label}: case {number} of {len(cases)} ({case.name})")
                self._ran[case] = self._execute(case)
        return Outcome({case.name: of_variant(self._ran[case], variant) for case in cases})

    def outputs(self, variant: str, case: Case) -> Tensors:
        return of_variant(self._execute(case), variant)

    def _execute(self, case: Case) -> Tensors:
        from harness.check import tensors

        inputs = self.reference.inputs(case)
        return tensors.execute(self.reference.puzzle, self.program, self.target, inputs, case.dims)


def of_variant(outputs: Tensors, variant: str) -> Tensors:
    """Of what a graph wrote, by "variant.quantity", that of one variant by quantity."""
    named = {name.partition("."): tensor for name, tensor in outputs.items()}
    return {quantity: tensor for (prefix, _, quantity), tensor in named.items() if prefix == variant}


class Simulated:
    """The virtual GPU with recorded launches. Where a variant saves something wrong it runs again, each launch from what
    is right, so that no launch is blamed for an earlier one. Findings call tensors what the kernels in `source` call them."""

    target = VIRTUAL

    def __init__(self, recording: Recording, reference: "Reference", source: Path, blocks: str = "natural"):
        self.recording, self.reference, self.source, self.blocks = recording, reference, source, blocks
        self._replays: dict[str, Replay] = {}

    def outcome(self, variant: str, cases: Sequence[Case]) -> Outcome:
        from harness.check.reference import judge_variant

        outcome, puzzle = self._replay(variant, cases), self.reference.puzzle
        saved = puzzle.saved(variant)
        if outcome.failure is None and not all(
            verdict.ok
            for case in cases
            for verdict in judge_variant(
                self.reference, case, self.target, variant, outcome.outputs[case.name], saved
            ).values()
        ):
            again = self._replay(variant, cases, given=True)
            again.findings = outcome.findings
            return again
        return outcome

    def outputs(self, variant: str, case: Case) -> Tensors:
        return self._machine(variant).run(variant, case, self.reference.inputs(case))

    def _machine(self, variant: str) -> "Replay":
        """The machine that has run a variant last."""
        if variant not in self._replays:
            self._replays[variant] = self._new_machine()
        return self._replays[variant]

    def _new_machine(self) -> "Replay":
        from harness.devices.replay import Replay
        from harness.vgpu import Checks

        reference, checks = self.reference, Checks(counters=False)
        return Replay(self.recording, reference.puzzle, reference.dtype, blocks=self.blocks, checks=checks)

    def _replay(self, variant: str, cases: Sequence[Case], given: bool = False) -> Outcome:
        replay = self._replays[variant] = self._new_machine()
        outcome = Outcome(given=given)
        for number, case in enumerate(cases, 1):
            tell(f"{variant} on the virtual GPU: case {number} of {len(cases)} ({case.name})")
            replay.gpu.steps = STEPS + self.reference.puzzle.multiply_adds(case.dims)
            saved = self.reference.saved(case, self.target, variant) if given else {}
            try:
                outcome.outputs[case.name] = replay.run(variant, case, self.reference.inputs(case), saved)
            except UnsupportedInstruction as error:
                raise EnvironmentProblem(str(error)) from error
            except VirtualGPUError as error:
                outcome.failure = error
                break
        outcome.findings = [
            in_the_kernels_words(finding, self.recording, self.source)
            for finding in by_cause(replay.gpu.findings)
        ]
        return outcome
