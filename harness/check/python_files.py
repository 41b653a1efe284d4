"""What the checkers of rungs in Python share: the learner's file run gate by gate, its exceptions in a line, a diagnosis."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.check.diagnose import Evidence, diagnose
from harness.check.results import GateResult, right_in_all, wanted_gates
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.work import rung_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung


class PythonChecker:
    """Judges the gates of one file, each alone; what is right or wrong about one is the subclass's `_judge`."""

    def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0):
        self.puzzle = puzzle
        self.rung = rung
        self.seed = seed

    def check(
        self, path: Path, gates: Sequence[str] | None = None, cases: list[Case] | None = None
    ) -> list[GateResult]:
        """The verdict on each gate of the file at `path`; `gates` are ids, `cases` the puzzle's own where None.

        Raises DamagedFile, naming file and line, where the file cannot be read, has broken markers or is no Python.
        """
        wanted = wanted_gates(self.puzzle, self.rung, gates)
        found = rung_blanks(path, self.rung)
        module = load(path)
        cases = self.puzzle.cases(None) if cases is None else cases
        return [
            GateResult(gate, "unsolved")
            if found[gate.id].size == 0
            else self._judge(gate, module, path, cases)
            for gate in wanted
        ]

    def _judge(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        """The verdict on one gate whose blank is filled; `module` is what the file defines."""
        raise NotImplementedError


def load(path: Path) -> dict:
    """What a Python file defines, read anew at every call. Raises DamagedFile where it does not run."""
    namespace: dict = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(blanks.read(path), str(path), "exec"), namespace)
    except SyntaxError as error:
        raise DamagedFile(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:
        raise DamagedFile(describe(error, path)) from error
    return namespace


def describe(error: BaseException, path: Path, longest: int | None = None) -> str:
    """An exception in one line, with the line of the learner's file that raised it.

    Its own words end after `longest` characters; the file's path, of any length, is not among them.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}:{frames[-1].lineno}: " if frames else ""
    words = " ".join(str(error).split())[:longest]
    return (
        f"{where}{words}"
        if type(error) is ValueError and not frames
        else f"{where}{type(error).__name__}: {words}"
    )


def explain(
    result: GateResult, puzzle: Puzzle, evidence: Mapping[str, Sequence[Evidence]], ladder: str
) -> None:
    """Marks a result as wrong where a quantity is, and says what is; `ladder` is the gate's hint ladder."""
    for quantity, found in evidence.items():
        seen = diagnose(
            puzzle,
            quantity,
            found,
            name=puzzle.printed(quantity),
            gate=ladder,
            right=right_in_all(result.comparisons),
        )
        result.state = "wrong"
        result.diagnosis += seen.lines
        result.mistake, result.hint = result.mistake or seen.mistake, result.hint or seen.hint
