"""What the checkers of rungs in Python share: the learner's file run, its exceptions in a line, the diagnosis of a gate."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.check.diagnose import Evidence, diagnose
from harness.check.results import GateResult
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.spec.puzzle import Puzzle


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


def describe(error: BaseException, path: Path) -> str:
    """An exception in one line, with the line of the learner's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}:{frames[-1].lineno}: " if frames else ""
    words = " ".join(str(error).split())
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
        seen = diagnose(puzzle, quantity, found, name=puzzle.printed(quantity), gate=ladder)
        result.state = "wrong"
        result.diagnosis += seen.lines
        result.mistake, result.hint = result.mistake or seen.mistake, result.hint or seen.hint
