"""A learner's own files: where they are, what stands in their blanks, which gate comes next."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import BadUse
from harness.learner import blanks, layout
from harness.learner.blanks import Blank
from harness.learner.hints import NUMPY
from harness.learner.progress import Progress
from harness.spec.puzzle import Gate, Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage, mojo_files


@dataclass(frozen=True)
class Work:
    """One of a puzzle's two files with blanks: the Mojo kernels, or the NumPy rung."""

    puzzle: Puzzle
    numpy: bool = False
    problems: Path | None = None

    def __post_init__(self):
        if self.numpy and self.puzzle.numpy_rung is None:
            raise BadUse(f"{self.puzzle.name} has no NumPy rung")

    @property
    def path(self) -> Path:
        """The learner's file."""
        return (self.problems or roots.problems()) / self.puzzle.name / self._file

    @property
    def solution(self) -> Path:
        """The file it was made from."""
        return roots.solutions() / self.puzzle.name / self._file

    @property
    def _file(self) -> str:
        return self.puzzle.numpy_rung.file if self.numpy else f"op/{self.puzzle.source}"

    @property
    def package(self) -> OpPackage:
        """The learner's op package. Raises DamagedFile where a link in it is missing or leads nowhere."""
        layout.notes(self.puzzle.name, self.problems)
        return OpPackage(self.path.parent)

    @property
    def files(self) -> list[Path]:
        """Every file whose change asks for another check."""
        return [self.path] if self.numpy else mojo_files(self.path.parent)

    @property
    def gates(self) -> list[Gate]:
        """The gates whose blanks this file holds, in the order in which they are taken."""
        if not self.numpy:
            return list(self.puzzle.gates)
        by_id = {gate.id: gate for gate in self.puzzle.gates}
        return [by_id[id] for id in self.puzzle.numpy_rung.returns]

    def gate(self, id: str) -> Gate:
        """One gate. Raises BadUse, naming those there are."""
        for gate in self.gates:
            if gate.id == id:
                return gate
        raise BadUse(f"unknown gate {id!r}; there is {', '.join(gate.id for gate in self.gates)}")

    def blanks(self) -> dict[str, Blank]:
        """The blanks of the learner's file. Raises DamagedFile where it cannot be read or a blank is gone."""
        found = blanks.find(blanks.read(self.path), str(self.path))
        return blanks.complete(found, [gate.id for gate in self.gates], str(self.path))

    def ladder(self, gate: str) -> str:
        """The name of a gate's hint ladder, "dx" or "numpy-dx"."""
        return f"{NUMPY}-{gate}" if self.numpy else gate

    def key(self, gate: str) -> str:
        """What a gate is called in the progress file."""
        return f"{self.puzzle.name} {self.ladder(gate)}"

    def states(self, progress: Progress) -> dict[str, str]:
        """Gate -> "passed", "changed", "begun" or "unsolved"."""
        found = self.blanks()
        return {gate.id: progress.state(self.key(gate.id), found[gate.id]) for gate in self.gates}

    def next_gate(self, progress: Progress, after: str | None = None) -> Gate | None:
        """The first gate that has not passed, looking from behind `after` and round again; None where all have."""
        states = self.states(progress)
        order = [gate.id for gate in self.gates]
        start = order.index(after) + 1 if after else 0
        for gate in self.gates[start:] + self.gates[:start]:
            if states[gate.id] != "passed" and gate.id != after:
                return gate
        return None
