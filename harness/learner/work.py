"""Locate a learner's files, their blanks, and the next gate."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import CompileFailed, unknown_gate
from harness.learner import blanks, layout
from harness.learner.blanks import Blank
from harness.learner.progress import Progress
from harness.spec.puzzle import Gate, Puzzle
from harness.spec.rungs import MojoRung, Rung, name_of
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage, mojo_files


@dataclass(frozen=True)
class Work:
    """The file of one rung of a puzzle, under a root: by default the learner's folder `problems/`. `ops` is
    an op package elsewhere."""

    puzzle: Puzzle
    rung: Rung
    root: Path | None = None
    ops: Path | None = None

    @property
    def path(self) -> Path:
        """The learner's file."""
        if self.ops:
            return self.ops / self.puzzle.source
        return (self.root or roots.problems()) / self.puzzle.name / self.rung.file

    @property
    def solution(self) -> Path:
        """The file it was made from."""
        return roots.solutions() / self.puzzle.name / self.rung.file

    @property
    def in_package(self) -> bool:
        """Return whether the file belongs to an op package."""
        return isinstance(self.rung, MojoRung)

    @property
    def is_learners(self) -> bool:
        """Check whether the file is the learner's own, so that a pass counts as progress."""
        return self.root is None and self.ops is None

    @property
    def package(self) -> OpPackage:
        """The learner's op package. Raises DamagedFile for a missing or dangling link, and CompileFailed,
        before anything is compiled, for the package of another puzzle."""
        if self.ops:
            package = OpPackage(self.ops)
            requested, there = [call.op.name for call in self.puzzle.calls], package.registers()
            if there and not there & {*requested}:
                words = (
                    f"{self.ops} is not a package of {self.puzzle.name}: it registers no op {requested[0]!r}"
                )
                raise CompileFailed(words)
            return package
        layout.notes(self.puzzle.name, self.root)
        return OpPackage(self.path.parent)

    def whole_package(self) -> OpPackage:
        """Return the op package of a file with all of its blanks. Raises DamagedFile in one line otherwise."""
        self.blanks()
        return self.package

    @property
    def target(self) -> Path:
        """Return the checker's input: the file, or its op package."""
        return self.package.path if self.in_package else self.path

    @property
    def files(self) -> list[Path]:
        """The files that require a new check when they change."""
        return mojo_files(self.path.parent) if self.in_package else [self.path]

    @property
    def gates(self) -> list[Gate]:
        """The gates whose blanks this file holds, in the order in which they are taken."""
        return self.puzzle.gates_of(self.rung)

    def gate(self, id: str) -> Gate:
        """Return one of its gates."""
        return next(gate for gate in self.gates if gate.id == id)

    def blanks(self) -> dict[str, Blank]:
        """Return the blanks of the learner's file. Raises DamagedFile if it cannot be read or a blank is
        missing."""
        if self.ops:
            return package_blanks(self.package, self.puzzle)
        return rung_blanks(self.path, self.rung)

    def ladder(self, gate: str) -> str:
        """Return the name of a gate's hint ladder, "dx" or "numpy-dx"."""
        return self.puzzle.ladder(self.rung, gate)

    def key(self, gate: str) -> str:
        """Return the name of a gate in the progress file."""
        return f"{self.puzzle.name} {self.ladder(gate)}"

    def states(self, progress: Progress) -> dict[str, str]:
        """Return gate -> "passed", "changed", "begun" or "unsolved"."""
        blanks = self.blanks()
        return {gate.id: progress.state(self.key(gate.id), blanks[gate.id]) for gate in self.gates}

    def next_gate(self, progress: Progress, after: str | None = None) -> Gate | None:
        """Return the first gate that has not passed, starting after `after` and wrapping around; None if all
        have."""
        states = self.states(progress)
        order = [gate.id for gate in self.gates]
        start = order.index(after) + 1 if after else 0
        for gate in self.gates[start:] + self.gates[:start]:
            if states[gate.id] != "passed" and gate.id != after:
                return gate
        return None


def check_gate(puzzle: Puzzle, rung: str | None, id: str | None) -> None:
    """Raise BadUse for a gate that a rung does not hold, naming those it has; without a rung, for one that no
    rung holds.

    Every command checks its gate here. Without a gate nothing is wrong.
    """
    named = puzzle.rung(rung) if rung else None
    there = named.gates if named else [*puzzle.main_rung.gates, *(gate.id for gate in puzzle.gates)]
    if id is not None and id not in there:
        raise unknown_gate(id, dict.fromkeys(there), f"the {name_of(named.id)} rung" if named else "")


def rung_blanks(path: Path, rung: Rung) -> dict[str, Blank]:
    """Return the blanks of a rung's file. Raises DamagedFile if it cannot be read or a blank is missing."""
    return blanks.complete(blanks.find(blanks.read(path), str(path)), rung.gates, str(path))


def package_blanks(package: OpPackage, puzzle: Puzzle) -> dict[str, Blank]:
    """Return the blanks of a package's source file; empty for the package of another puzzle.

    Raises DamagedFile if the file cannot be read, or only some of the blanks are there.
    """
    source = package.path / puzzle.source
    if not source.exists():
        return {}
    by_id = blanks.find(blanks.read(source), str(source))
    return blanks.complete(by_id, [gate.id for gate in puzzle.kernel_gates], str(source)) if by_id else by_id
