"""Locate a learner's files, their blanks, and the next gate."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import CompileFailed, make_unknown_gate_error
from harness.learner import blanks, layout
from harness.learner.blanks import Blank
from harness.learner.progress import Progress
from harness.spec.puzzle import Gate, Puzzle
from harness.spec.rungs import MojoRung, Rung, get_rung_name
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage, list_mojo_files


@dataclass(frozen=True)
class Exercise:
    """The file for one rung of a puzzle, in the op package `ops` or under `root` (default: `problems/`)."""

    puzzle: Puzzle
    rung: Rung
    root: Path | None = None
    ops: Path | None = None

    @property
    def path(self) -> Path:
        if self.ops:
            return self.ops / self.puzzle.source
        return (self.root or roots.get_problems()) / self.puzzle.name / self.rung.file

    @property
    def solution(self) -> Path:
        """The solution from which the learner's file was generated."""
        return roots.get_solutions() / self.puzzle.name / self.rung.file

    @property
    def is_mojo(self) -> bool:
        return isinstance(self.rung, MojoRung)

    @property
    def is_learner_file(self) -> bool:
        return self.root is None and self.ops is None

    @property
    def package(self) -> OpPackage:
        """The op package. Raises DamagedFile for a missing link, CompileFailed for another puzzle's package."""
        if self.ops:
            package, expected = OpPackage(self.ops), [call.op.name for call in self.puzzle.calls]
            registered = package.find_registered_ops()
            if registered and not registered & {*expected}:
                message = f"is not a package of {self.puzzle.name}: it registers no op {expected[0]!r}"
                raise CompileFailed(f"{self.ops} {message}")
            return package
        layout.check_layout(self.puzzle.name, self.root)
        return OpPackage(self.path.parent)

    def load_package(self) -> OpPackage:
        """Return the op package. Raises DamagedFile if its file lacks a blank."""
        self.read_blanks()
        return self.package

    @property
    def target(self) -> Path:
        return self.package.path if self.is_mojo else self.path

    @property
    def files(self) -> list[Path]:
        """Files that determine the result of a check."""
        return list_mojo_files(self.path.parent) if self.is_mojo else [self.path]

    @property
    def gates(self) -> list[Gate]:
        return self.puzzle.list_gates(self.rung)

    def find_gate(self, id: str) -> Gate:
        return next(gate for gate in self.gates if gate.id == id)

    def read_blanks(self) -> dict[str, Blank]:
        """Return the blanks of the learner's file. Raises DamagedFile."""
        if self.ops:
            return read_package_blanks(self.package, self.puzzle)
        return read_rung_blanks(self.path, self.rung)

    def get_ladder_name(self, gate: str) -> str:
        """Return the name of a gate's hint ladder, "dx" or "numpy-dx"."""
        return self.puzzle.get_ladder_name(self.rung, gate)

    def get_progress_key(self, gate: str) -> str:
        return f"{self.puzzle.name} {self.get_ladder_name(gate)}"

    def get_states(self, progress: Progress) -> dict[str, str]:
        """Map each gate to "passed", "changed", "begun" or "unsolved"."""
        blanks, ids = self.read_blanks(), [gate.id for gate in self.gates]
        return {id: progress.get_state(self.get_progress_key(id), blanks[id]) for id in ids}

    def find_next_gate(self, progress: Progress, previous: str | None = None) -> Gate | None:
        """Return the next gate after `previous`, wrapping around, that has not passed, or None."""
        states = self.get_states(progress)
        order = [gate.id for gate in self.gates]
        start = order.index(previous) + 1 if previous else 0
        for gate in self.gates[start:] + self.gates[:start]:
            if states[gate.id] != "passed" and gate.id != previous:
                return gate
        return None


def validate_gate(puzzle: Puzzle, rung: str | None, id: str | None) -> None:
    """Raise UsageError for a gate that is not in the rung or, without a rung, not in the puzzle."""
    selected_rung = puzzle.find_rung(rung) if rung else None
    known_gates = (
        selected_rung.gates
        if selected_rung
        else [*puzzle.main_rung.gates, *(gate.id for gate in puzzle.gates)]
    )
    if id is not None and id not in known_gates:
        raise make_unknown_gate_error(
            id,
            dict.fromkeys(known_gates),
            f"the {get_rung_name(selected_rung.id)} rung" if selected_rung else "",
        )


def read_rung_blanks(path: Path, rung: Rung) -> dict[str, Blank]:
    """Return the blanks of a rung's file. Raises DamagedFile if it cannot be read or a blank is missing."""
    by_id = blanks.find_blanks(blanks.read_source(path), str(path))
    return blanks.require_blanks(by_id, rung.gates, str(path))


def read_package_blanks(package: OpPackage, puzzle: Puzzle) -> dict[str, Blank]:
    """Return the blanks of a package's source file; empty for the package of another puzzle.

    Raises DamagedFile if the file cannot be read or has only some of the blanks.
    """
    source = package.path / puzzle.source
    if not source.exists():
        return {}
    by_id = blanks.find_blanks(blanks.read_source(source), str(source))
    expected = [gate.id for gate in puzzle.kernel_gates] if by_id else []
    return blanks.require_blanks(by_id, expected, str(source))
