"""The NumPy rung: a learner's backward pass in Python, one function for each gate, judged on the puzzle's own cases.

Each function is called alone, with right values for everything that it asks for, so that a mistake in one does not
spoil another. Truth is the puzzle's longdouble reference, the baseline the same derivation in float64: nothing here
needs torch, MAX or a compiler.
"""

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.check.compare import Verdict, judge
from harness.check.diagnose import Evidence, diagnose
from harness.check.runs import Comparison
from harness.errors import BadUse, DamagedFile
from harness.learner import blanks
from harness.spec.puzzle import Arrays, Case, Gate, NumpyRung, Puzzle


@dataclass
class RungResult:
    """The verdict on one function; the attributes are those of a gate's result, and there are no findings."""

    gate: Gate
    state: str
    comparisons: list[Comparison] = field(default_factory=list)
    findings: list = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None


class NumpyChecker:
    """Judges the functions of one file again and again; inputs and truth of a case are computed once."""

    def __init__(self, puzzle: Puzzle, *, seed: int = 0):
        if puzzle.numpy_rung is None:
            raise BadUse(f"{puzzle.name} has no NumPy rung")
        self.puzzle = puzzle
        self.rung: NumpyRung = puzzle.numpy_rung
        self.seed = seed
        self._known: dict[str, tuple[Arrays, Arrays]] = {}

    @property
    def gates(self) -> list[Gate]:
        """The gates that have a function, in the order of the file."""
        by_id = {gate.id: gate for gate in self.puzzle.gates}
        return [by_id[id] for id in self.rung.returns]

    def blanks(self, path: Path) -> dict[str, blanks.Blank]:
        """The blanks of the file. Raises DamagedFile where one is missing or the file cannot be read."""
        return blanks.complete(blanks.find(blanks.read(path), str(path)), self.rung.returns, str(path))

    def check(self, path: Path, gates: Sequence[str] | None = None) -> list[RungResult]:
        """The verdict on each function of the file at `path`; `gates` are ids, or None for all.

        Raises DamagedFile, naming file and line, where the file cannot be read, has broken markers or is no Python.
        """
        for id in gates or ():
            if id not in self.rung.returns:
                raise BadUse(f"the NumPy rung has no gate {id!r}; there is {', '.join(self.rung.returns)}")
        found = self.blanks(path)
        module = load(path)
        wanted = [gate for gate in self.gates if gates is None or gate.id in gates]
        return [
            RungResult(gate, "unsolved")
            if found[gate.id].size == 0
            else self._judge(gate, module.get(gate.id), path)
            for gate in wanted
        ]

    def _judge(self, gate: Gate, function: object, path: Path) -> RungResult:
        result = RungResult(gate, "correct")
        evidence: dict[str, list[Evidence]] = {}
        for case in self.puzzle.cases(None):
            try:
                outputs = self._call(gate, function, case)
            except (
                Exception
            ) as error:  # whatever a learner's code raises is a verdict, not a failure of the harness
                result.state, result.hint = "wrong", f"numpy-{gate.id}-1"
                result.diagnosis = [f"in case '{case.name}': {describe(error, path)}"]
                return result
            verdicts = {quantity: self._verdict(case, quantity, got) for quantity, got in outputs.items()}
            result.comparisons.append(Comparison(case, verdicts))
            for quantity, verdict in verdicts.items():
                if not verdict.ok:
                    evidence.setdefault(quantity, []).append(
                        self._evidence(case, quantity, outputs[quantity], verdict)
                    )
        for quantity, found in evidence.items():
            seen = diagnose(
                self.puzzle, quantity, found, name=self.puzzle.printed(quantity), gate=f"numpy-{gate.id}"
            )
            result.state = "wrong"
            result.diagnosis += seen.lines
            result.mistake, result.hint = result.mistake or seen.mistake, result.hint or seen.hint
        return result

    def _call(self, gate: Gate, function: object, case: Case) -> Arrays:
        """What a gate's function returns on one case, by quantity. Raises ValueError for what cannot be compared."""
        if not callable(function):
            raise ValueError(f"there is no function {gate.id}()")
        _, right = self._case(case)
        with np.errstate(all="ignore"):
            returned = function(*self._arguments(gate, function, case))
        if returned is None:
            raise ValueError(f"{gate.id}() returns nothing: a `return` is missing")
        values = [
            np.asarray(value, np.float64)
            for value in (returned if isinstance(returned, tuple) else (returned,))
        ]
        quantities = self.rung.returns[gate.id]
        pack = self.rung.pack.get(quantities[0])
        expected = len(inspect.signature(pack).parameters if pack else quantities)
        if len(values) != expected:
            raise ValueError(f"{gate.id}() should return {expected} array{'s' * (expected != 1)}")
        values = [pack(*values)] if pack else values
        for quantity, value in zip(quantities, values, strict=True):
            if value.shape != right[quantity].shape:
                name = self.puzzle.printed(quantity)
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, expected {list(right[quantity].shape)}"
                )
        return dict(zip(quantities, values, strict=True))

    def _arguments(self, gate: Gate, function: Callable, case: Case) -> list[np.ndarray]:
        """Copies of the steps that a function asks for."""
        derivation = self.puzzle.derive(self._case(case)[0], {})
        names = inspect.signature(function).parameters
        common = self.rung.names
        steps = [common.get(f"{gate.id}.{name}", common.get(name, name)) for name in names]
        return [np.array(getattr(derivation, step)) for step in steps]

    def _case(self, case: Case) -> tuple[Arrays, Arrays]:
        """The inputs of a case and what is right, in longdouble."""
        if case.name not in self._known:
            arrays = self.puzzle.inputs(case, "float64", self.seed)
            self._known[case.name] = arrays, self.puzzle.exact(arrays)
        return self._known[case.name]

    def _verdict(self, case: Case, quantity: str, got: np.ndarray) -> Verdict:
        arrays, right = self._case(case)
        return judge(got, right[quantity], getattr(self.puzzle.derive(arrays, {}), quantity), "float64")

    def _evidence(self, case: Case, quantity: str, got: np.ndarray, verdict: Verdict) -> Evidence:
        arrays, right = self._case(case)
        truth = np.asarray(right[quantity], np.float64)
        return Evidence(case, arrays, got, truth, np.zeros(got.shape, bool), verdict, "float64")


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


def describe(error: Exception, path: Path) -> str:
    """An exception in one line, with the line of the learner's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}:{frames[-1].lineno}: " if frames else ""
    words = " ".join(str(error).split())
    return (
        f"{where}{words}"
        if type(error) is ValueError and not frames
        else f"{where}{type(error).__name__}: {words}"
    )
