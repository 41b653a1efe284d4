"""Check the gates of a learner's Python file, describe exceptions in one line, and diagnose results."""

import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.check.compare import TensorResult
from harness.check.diagnose import Evidence, diagnose, redirect_gates
from harness.check.results import (
    Comparison,
    FirstCaseCallback,
    GateResult,
    drop_unknown,
    find_correct_quantities,
    mark_unsolved,
    select_gates,
    select_provided_gates,
)
from harness.devices.targets import CPU
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.exercise import read_rung_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rounding import as_array
from harness.spec.rungs import Rung

if TYPE_CHECKING:  # it imports torch, which the NumPy rung does not need
    from harness.check.reference import Reference

DEFAULT_TIME_LIMIT = 120.0
"""Time limit of a file or a gate in seconds; the slowest takes 2 s in NumPy, about 20 s in PyTorch."""
EXITED = "the code exited the process, so it was not checked"
"""Message for code that exits the process; even with exit code 0 it has no result."""


Module = dict[str, Any]
"""The names defined in a learner's file."""


def ignore_step(kind: str, value: object) -> None: ...


class PythonChecker:
    """A checker of the gates of one Python file, one at a time; subclasses implement `_check_gate`.

    Attributes:
        on_step: Called with each step: ("begun", (gate id or None for the file itself, time limit in
            seconds)), ("checked", the result).
    """

    on_step: Callable[[str, object], None] = staticmethod(ignore_step)

    def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0):
        self.puzzle = puzzle
        self.rung = rung
        self.seed = seed

    def get_time_limit(self, cases: list[Case]) -> float:
        """Return the limit in seconds for loading the file, or for checking one gate, in a subprocess."""
        return DEFAULT_TIME_LIMIT

    def check(
        self,
        path: Path,
        gates: Sequence[str] | None = None,
        cases: list[Case] | None = None,
        *,
        on_first_case: FirstCaseCallback | None = None,
    ) -> list[GateResult]:
        """Return the result of each gate of the file at `path`, one gate after another.

        Raises DamagedFile, with file and line, if the file cannot be read, has broken markers or is
        not Python.
        """
        selected_gates = select_gates(self.puzzle, self.rung, gates)
        by_id = read_rung_blanks(path, self.rung)
        provided = select_provided_gates(gates, by_id)
        cases = self.puzzle.list_cases(None) if cases is None else cases
        self.on_step("begun", (None, self.get_time_limit(cases)))
        module = load_module(path)
        results: list[GateResult] = []
        for gate in selected_gates:
            self.on_step("begun", (gate.id, self.get_time_limit(cases)))
            result = GateResult(gate, "unsolved")
            if by_id[gate.id].size or gate.id in provided:
                result = self._check_safely(gate, module, path, cases)
            results.append(mark_unsolved(result) if gate.id in provided else result)
            self.on_step("checked", results[-1])
        redirect_gates(results, self.rung.dependencies)
        return results

    def _check_safely(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        """Return the result of one gate, which is wrong if its code exits the process."""
        try:
            return self._check_gate(gate, module, path, cases)
        except Exception:
            raise
        except BaseException as error:
            if is_keyboard_interrupt(error):
                raise
            return self.make_wrong_result(gate, [describe_exit(error, path)])

    def make_wrong_result(
        self,
        gate: Gate,
        lines: list[str],
        mistake: str | None = None,
        *,
        hint: int = 1,
        ladder_gate: str = "",
        **fields: Any,
    ) -> GateResult:
        """Return the result of a wrong gate, with a hint of its own ladder or of `ladder_gate`'s."""
        ladder = self.puzzle.get_ladder_name(self.rung, ladder_gate or gate.id)
        return GateResult(gate, "wrong", diagnosis=lines, mistake=mistake, hint=f"{ladder}-{hint}", **fields)

    def _check_gate(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        """Return the result of one gate with a filled blank; `module` contains the file's names."""
        raise NotImplementedError


class CaseChecker(PythonChecker):
    """A checker of the values of each gate's function in each case, then of further properties."""

    context = ""
    """The current check in words, for messages about exceptions in the learner's code."""

    def _check_gate(self, gate: Gate, module: Module, path: Path, cases: list[Case]) -> GateResult:
        result = GateResult(gate, "correct")
        wrong: dict[str, list[Evidence]] = {}
        try:
            for case in cases:
                self.context = f"in case '{case.name}'"
                self._compare(result, case, self._compute_outputs(gate, module, path, case), wrong)
            if not wrong:
                self._check_properties(gate, path, cases)
        except Exception as error:  # an exception in the learner's code is a result
            message = f"{self.context}: {self._describe_error(error, path)}"
            return self.make_wrong_result(gate, [message], comparisons=result.comparisons)
        add_diagnoses(result, self.puzzle, wrong, self.puzzle.get_ladder_name(self.rung, gate.id))
        return result

    def _compare(
        self, result: GateResult, case: Case, outputs: Mapping[str, Any], wrong: dict[str, list[Evidence]]
    ) -> None:
        """Add the results of one case, and evidence for each wrong quantity."""
        results = {quantity: self._compare_quantity(case, quantity, got) for quantity, got in outputs.items()}
        result.comparisons.append(Comparison(case, results))
        for quantity, outcome in results.items():
            if not outcome.ok:
                evidence = self._make_evidence(case, quantity, outputs[quantity], outcome)
                wrong.setdefault(quantity, []).append(evidence)

    def _compute_outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Mapping[str, Any]:
        """Return a gate function's outputs by quantity. Raises its exceptions, ValueError for bad outputs."""
        raise NotImplementedError

    def _get_reference(self, case: Case) -> "Reference":
        raise NotImplementedError

    def _compare_quantity(self, case: Case, quantity: str, got: Any) -> TensorResult:
        return self._get_reference(case).compare_quantity(case, CPU, quantity, as_array(got))

    def _make_evidence(self, case: Case, quantity: str, got: Any, result: TensorResult) -> Evidence:
        return self._get_reference(case).make_evidence(case, CPU, quantity, as_array(got), result)

    def _check_properties(self, gate: Gate, path: Path, cases: list[Case]) -> None:
        """Raise an exception for an error that the values do not reveal."""

    def _describe_error(self, error: Exception, path: Path) -> str:
        return describe_exception(error, path)


def load_module(path: Path) -> Module:
    """Return the names defined in a Python file, read again at every call. Raises DamagedFile."""
    return run_source(blanks.read_source(path), path)


def run_source(text: str, path: Path) -> Module:
    """Return the names defined by the text of a Python file. Raises DamagedFile if it does not run."""
    namespace: Module = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(text, str(path), "exec"), namespace)
    except SyntaxError as error:
        raise DamagedFile(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    except Exception as error:
        raise DamagedFile(describe_exception(error, path)) from error
    except BaseException as error:
        if is_keyboard_interrupt(error):
            raise
        raise DamagedFile(describe_exit(error, path)) from error
    return namespace


def make_tuple(returned: object, name: str, count: int) -> tuple[object, ...]:
    """Return a function's result as a tuple. Raises ValueError if a list is returned for several results."""
    if isinstance(returned, list) and count > 1:
        raise ValueError(f"{name}() returns a list: return a tuple, `return a, b`")
    return cast(tuple[object, ...], returned) if isinstance(returned, tuple) else (cast(object, returned),)


def is_keyboard_interrupt(error: BaseException) -> bool:
    """Check for a real Ctrl-C; if SIGINT is ignored, the learner's code raised the exception itself."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def describe_exit(error: BaseException, path: Path) -> str:
    return f"{describe_exception(error, path).removesuffix(': ')}: {EXITED}"


def describe_exception(error: BaseException, path: Path, max_length: int | None = None) -> str:
    """Describe an exception in one line, with the line of the learner's file that raised it.

    The message is cut to `max_length` characters, not counting the file's path.
    """
    location = locate_error(error, path)
    message = " ".join(str(error).split())[:max_length]
    kind = "" if type(error) is ValueError and not location else f"{type(error).__name__}: "
    return f"{location}{kind}{message}"


def locate_error(error: BaseException, path: Path) -> str:
    """Return the line of a file that raised an exception, as "PATH:12: "; "" if none did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}: " if frames else ""


def add_diagnoses(
    result: GateResult, puzzle: Puzzle, evidence: Mapping[str, Sequence[Evidence]], ladder: str
) -> None:
    """Mark a result as wrong if a quantity is, and add its diagnosis; `ladder` is the gate's hint ladder."""
    for quantity, by_case in evidence.items():
        name, right = puzzle.get_printed_name(quantity), find_correct_quantities(result.comparisons)
        diagnosis = diagnose(puzzle, quantity, by_case, name=name, gate=ladder, correct=right)
        result.is_own_mistake = diagnosis.is_own_step(quantity) and result.state != "wrong"
        result.state = "wrong"
        result.diagnosis += diagnosis.lines
        result.mistake, result.hint = result.mistake or diagnosis.mistake, result.hint or diagnosis.hint
    drop_unknown(result)
