"""Run the gates of a learner's Python file, describe its exceptions in a line, and diagnose results."""

import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.check.compare import TensorResult
from harness.check.diagnose import Evidence, blame_gates, diagnose
from harness.check.results import (
    Comparison,
    GateResult,
    OnFirst,
    correct_in_all,
    leave_out_unknown,
    leave_unsolved,
    provided_code_gates,
    requested_gates,
)
from harness.devices.targets import CPU
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.work import rung_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rounding import as_array
from harness.spec.rungs import Rung

if TYPE_CHECKING:  # it needs torch, and the NumPy rung none
    from harness.check.reference import Reference

SECONDS = 120.0
"""Time limit of a file or a gate; the slowest takes 2 in NumPy, some 20 in PyTorch."""
LEFT = "the code exited the process, so it was not checked"
"""Message for code that exits the process, whatever its exit code: without a result nothing is correct."""


Module = dict[str, Any]
"""The names defined in a learner's file."""


def ignore_step(kind: str, value: object) -> None:
    """Ignore a checker's steps."""


class PythonChecker:
    """Checks the gates of one Python file, each alone; subclasses implement `_check_gate`.

    Attributes:
        on_step: Called with each step: ("begun", (gate id or None for the file itself, time limit in
            seconds)), ("judged", the result).
    """

    on_step: Callable[[str, object], None] = staticmethod(ignore_step)

    def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0):
        self.puzzle = puzzle
        self.rung = rung
        self.seed = seed

    def limit(self, cases: list[Case]) -> float:
        """Return the time limit in seconds for the file, or for a gate of it, in a subprocess."""
        return SECONDS

    def check(
        self,
        path: Path,
        gates: Sequence[str] | None = None,
        cases: list[Case] | None = None,
        *,
        on_first: OnFirst | None = None,
    ) -> list[GateResult]:
        """Return the result of each gate of the file at `path`; `gates` are ids, `cases` default to the
        puzzle's.

        All cases of a gate are checked together, so `on_first` is never called.

        Raises DamagedFile, naming file and line, if the file cannot be read, has broken markers or is not
        Python.
        """
        requested = requested_gates(self.puzzle, self.rung, gates)
        by_id = rung_blanks(path, self.rung)
        provided = provided_code_gates(gates, by_id)
        cases = self.puzzle.cases(None) if cases is None else cases
        self.on_step("begun", (None, self.limit(cases)))
        module = load(path)
        results: list[GateResult] = []
        for gate in requested:
            self.on_step("begun", (gate.id, self.limit(cases)))
            checked = by_id[gate.id].size or gate.id in provided
            result = (
                self._check_safely(gate, module, path, cases) if checked else GateResult(gate, "unsolved")
            )
            results.append(leave_unsolved(result) if gate.id in provided else result)
            self.on_step("judged", results[-1])
        blame_gates(results, self.rung.needs)
        return results

    def _check_safely(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        """Return the result of one gate; code that exits the process is wrong."""
        try:
            return self._check_gate(gate, module, path, cases)
        except Exception:
            raise
        except BaseException as error:
            if by_keyboard(error):
                raise
            return self.wrong(gate, [describe_leaving(error, path)])

    def wrong(
        self,
        gate: Gate,
        lines: list[str],
        mistake: str | None = None,
        *,
        hint: int = 1,
        of: str = "",
        **more: Any,
    ) -> GateResult:
        """Return the result of a wrong gate, with the hint that helps, from its own ladder or that of `of`;
        `more` as in GateResult."""
        ladder = self.puzzle.ladder(self.rung, of or gate.id)
        return GateResult(gate, "wrong", diagnosis=lines, mistake=mistake, hint=f"{ladder}-{hint}", **more)

    def _check_gate(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        """Return the result of one gate with a filled blank; `module` has the names of the file."""
        raise NotImplementedError


class CaseChecker(PythonChecker):
    """Checks the values of a gate's function in each case, then runs further checks of the puzzle."""

    where = ""
    """The current check, for messages about exceptions of the learner's code."""

    def _check_gate(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        result = GateResult(gate, "correct")
        wrong: dict[str, list[Evidence]] = {}
        try:
            for case in cases:
                self.where = f"in case '{case.name}'"
                self._compare(result, case, self._outputs(gate, module, path, case), wrong)
            if not wrong:
                self._check_further(gate, path, cases)
        except Exception as error:  # an exception of the learner's code is a result
            words = f"{self.where}: {self._describe_error(error, path)}"
            return self.wrong(gate, [words], comparisons=result.comparisons)
        explain(result, self.puzzle, wrong, self.puzzle.ladder(self.rung, gate.id))
        return result

    def _compare(
        self, result: GateResult, case: Case, outputs: Mapping[str, Any], wrong: dict[str, list[Evidence]]
    ) -> None:
        """Add the results of one case, and the evidence against wrong quantities."""
        results = {quantity: self._compare_quantity(case, quantity, got) for quantity, got in outputs.items()}
        result.comparisons.append(Comparison(case, results))
        for quantity, outcome in results.items():
            if not outcome.ok:
                evidence = self._evidence(case, quantity, outputs[quantity], outcome)
                wrong.setdefault(quantity, []).append(evidence)

    def _outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Mapping[str, Any]:
        """Return the outputs of a gate's function in a case, by quantity. Raises its exceptions, and
        ValueError for outputs that cannot be compared."""
        raise NotImplementedError

    def _reference_of(self, case: Case) -> "Reference":
        """Return the reference that a case is compared with, from PyTorch's tensors."""
        raise NotImplementedError

    def _compare_quantity(self, case: Case, quantity: str, got: Any) -> TensorResult:
        return self._reference_of(case).compare_quantity(case, CPU, quantity, as_array(got))

    def _evidence(self, case: Case, quantity: str, got: Any, verdict: TensorResult) -> Evidence:
        return self._reference_of(case).evidence(case, CPU, quantity, as_array(got), verdict)

    def _check_further(self, gate: Gate, path: Path, cases: list[Case]) -> None:
        """Raise a Fault for errors that values do not show."""

    def _describe_error(self, error: Exception, path: Path) -> str:
        """Describe an exception of the learner's code in a line."""
        return describe(error, path)


def load(path: Path) -> Module:
    """Return the names defined in a Python file, read again at every call. Raises DamagedFile if it does not
    run."""
    return run(blanks.read(path), path)


def run(text: str, path: Path) -> Module:
    """Return the names defined by the text of a Python file. Raises DamagedFile if it does not run."""
    namespace: Module = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), namespace)
    except SyntaxError as error:
        raise DamagedFile(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:
        raise DamagedFile(describe(error, path)) from error
    except BaseException as error:
        if by_keyboard(error):
            raise
        raise DamagedFile(describe_leaving(error, path)) from error
    return namespace


def as_tuple(returned: object, name: str, count: int) -> tuple[object, ...]:
    """Return a function's result as a tuple. Raises ValueError unless it has `count` elements."""
    if isinstance(returned, list) and count > 1:
        raise ValueError(f"{name}() returns a list: return a tuple, `return a, b`")
    return cast(tuple[object, ...], returned) if isinstance(returned, tuple) else (cast(object, returned),)


def by_keyboard(error: BaseException) -> bool:
    """Check whether an exception is a real Ctrl-C; in a process that ignores the signal, the file raised it
    itself."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def describe_leaving(error: BaseException, path: Path) -> str:
    """Describe SystemExit and the like, which pass `except Exception`, in one line."""
    return f"{describe(error, path).removesuffix(': ')}: {LEFT}"


def describe(error: BaseException, path: Path, longest: int | None = None) -> str:
    """Return an exception in one line, with the line of the learner's file that raised it.

    Its own words end after `longest` characters; the file's path, of any length, is not among them.
    """
    where = line_of(error, path)
    words = " ".join(str(error).split())[:longest]
    return (
        f"{where}{words}"
        if type(error) is ValueError and not where
        else f"{where}{type(error).__name__}: {words}"
    )


def line_of(error: BaseException, path: Path) -> str:
    """Return the line of a file that raised an exception, as "PATH:12: "; "" if none did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}: " if frames else ""


def explain(
    result: GateResult, puzzle: Puzzle, evidence: Mapping[str, Sequence[Evidence]], ladder: str
) -> None:
    """Mark a result as wrong if a quantity is, with the explanation; `ladder` is the gate's hint ladder."""
    for quantity, by_case in evidence.items():
        diagnosis = diagnose(
            puzzle,
            quantity,
            by_case,
            name=puzzle.printed_name(quantity),
            gate=ladder,
            right=correct_in_all(result.comparisons),
        )
        result.by_itself = diagnosis.by_itself(quantity) and result.state != "wrong"
        result.state = "wrong"
        result.diagnosis += diagnosis.lines
        result.mistake, result.hint = result.mistake or diagnosis.mistake, result.hint or diagnosis.hint
    leave_out_unknown(result)
