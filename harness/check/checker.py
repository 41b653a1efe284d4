"""Create the checker of a learner's file; `Checker` runs kernel gates on the virtual GPU, without MAX.

This module imports little: other modules and reference results are loaded while the compiler runs.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.check.results import (
    LOW_PRECISION_DTYPE,
    Cases,
    FirstCaseCallback,
    GateIds,
    GateResult,
    select_gates,
    select_provided_gates,
)
from harness.check.source_errors import find_source_errors
from harness.console import report_progress
from harness.devices.recorder import Recording, RecordRequest, is_cached, record_dtypes
from harness.devices.targets import VIRTUAL
from harness.errors import CompileFailed
from harness.learner.blanks import Blank
from harness.learner.exercise import Exercise, read_package_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import MojoRung, Rung
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.reference import Reference


class RungChecker(Protocol):
    """The interface of a rung's checker."""

    def check(
        self,
        path: Path,
        gates: GateIds = None,
        cases: Cases = None,
        *,
        on_first_case: FirstCaseCallback = None,
    ) -> list[GateResult]:
        """Return the result of each gate; a checker that runs case by case calls `on_first_case`."""
        ...


class Checker:
    """A checker of kernel gates that caches truth, baseline and recordings.

    Cases `in_16_bits` are also run in `second_dtype`, recorded by the same program; "" for none.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        rung: Rung | None = None,
        *,
        dtype: str = "float32",
        seed: int = 0,
        second_dtype: str = "",
        blocks: str = "natural",
        repeat: int = 1,
    ):
        self.puzzle, self.rung = puzzle, rung or puzzle.find_rung("mojo")
        self.dtype, self.seed, self.second_dtype = dtype, seed, second_dtype
        self.blocks, self.repeat = blocks, repeat
        self._references: dict[str, Reference] = {}

    @property
    def reference(self) -> "Reference":
        return self._get_reference(self.dtype)

    def _get_reference(self, dtype: str) -> "Reference":
        from harness.check.reference import Reference

        return self._references.setdefault(dtype, Reference(self.puzzle, dtype, self.seed, use_cache=True))

    def check(
        self,
        path: Path | OpPackage,
        gates: GateIds = None,
        cases: Cases = None,
        *,
        on_first_case: FirstCaseCallback = None,
    ) -> list[GateResult]:
        """Return the result of each gate, in the puzzle's order.

        `on_first_case` gets the results of the first case, before the other cases run. Raises UsageError for an
        unknown gate, CompileFailed, and DamagedFile if the blank markers are broken.
        """
        # A new object, since an OpPackage caches the hash of its files.
        package = OpPackage(path.path if isinstance(path, OpPackage) else path)
        requested_gates = select_gates(self.puzzle, self.rung, gates)
        blanks = read_package_blanks(package, self.puzzle)
        provided_ids = select_provided_gates(gates, blanks)
        untouched_ids = {id for id, blank in blanks.items() if blank.size == 0} - provided_ids
        variants = sorted({gate.variant for gate in requested_gates if gate.id not in untouched_ids})
        if not variants:
            return [GateResult(gate, "unsolved") for gate in requested_gates]
        if cases is None:
            cases = [*self.puzzle.list_cases(None), *self.puzzle.gate_cases]
        cases_by_dtype = {self.dtype: cases}
        if self.second_dtype and (low_precision_cases := [case for case in cases if case.in_16_bits]):
            cases_by_dtype[self.second_dtype] = low_precision_cases
        try:
            recordings = self._record(package, cases_by_dtype, variants)
        except CompileFailed as error:
            raise add_blank_note(
                error, package.path / self.puzzle.source, blanks, gates or [*blanks]
            ) from error
        from harness.check.execution import VirtualDevice
        from harness.check.grading import Grader

        def check_dtype(dtype: str, cases: Sequence[Case], gates: Sequence[Gate], num_runs: int = 1):
            names = [quantity for gate in gates for quantity in gate.own_quantities]
            reference = self._get_reference(dtype)
            grader = Grader(
                reference, package, blanks, variants, cases, gates, (), names, num_runs, provided_ids
            )  # fmt: skip
            return grader.grade_gates(VirtualDevice(recordings[dtype], grader.source, self.blocks))

        if on_first_case and len(cases) > 1:
            on_first_case(check_dtype(self.dtype, cases[:1], requested_gates))
        results = check_dtype(self.dtype, cases, requested_gates, self.repeat)
        correct_gates = [result.gate for result in results if result.state == "correct"]
        if self.second_dtype not in cases_by_dtype or not correct_gates:
            return results
        second_results = check_dtype(self.second_dtype, cases_by_dtype[self.second_dtype], correct_gates)
        wrong_results = {result.gate.id: result for result in second_results if result.state == "wrong"}
        for result in wrong_results.values():
            result.diagnosis.insert(0, f"correct in {self.dtype}, but wrong in {self.second_dtype}:")
        return [wrong_results.get(result.gate.id, result) for result in results]

    def _record(
        self, package: OpPackage, cases_by_dtype: Mapping[str, Sequence[Case]], variants: Sequence[str]
    ) -> dict[str, Recording]:
        """Return the recording of each dtype's cases; reference results are loaded or computed meanwhile.

        Raises the errors of `record_dtypes`, without waiting for PyTorch.
        """
        orders = [
            RecordRequest(package, self.puzzle.name, dims, tuple(variants), True, dtype)
            for dtype, cases in cases_by_dtype.items()
            for dims in [tuple(dict.fromkeys(case.dims for case in cases))]
        ]
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            note = "" if is_cached(orders) else ", the first time: up to a minute"
            report_progress(f"compiling the kernels{note}")
            recording_future = pool.submit(record_dtypes, orders)
            for dtype, cases in cases_by_dtype.items():
                self._get_reference(dtype).prepare(cases, VIRTUAL, recording_future.done)
            return dict(zip(cases_by_dtype, recording_future.result(), strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def create_checker(exercise: Exercise, *, interactive: bool = False, **options: object) -> RungChecker:
    """Return the checker of a learner's file; Python runs in a subprocess, where an exit fails only one gate.

    `interactive`: whether that code may read from the terminal.
    """
    if exercise.is_mojo:
        return load_checker(exercise, **options)
    from harness.check.subprocess_checker import SubprocessChecker

    return SubprocessChecker(exercise, interactive=interactive, **options)


def load_checker(exercise: Exercise, **options: object) -> RungChecker:
    """Return a file's checker, created with `options`, such as `seed`. Importing it may take seconds.

    Unless `options` has a dtype, kernels are also checked in NARROW.
    """
    if isinstance(exercise.rung, MojoRung):
        options = {"second_dtype": LOW_PRECISION_DTYPE, **options} if "dtype" not in options else options
    return exercise.puzzle.resolve(exercise.rung.checker)(exercise.puzzle, exercise.rung, **options)


def add_blank_note(
    error: CompileFailed, source: Path, blanks: Mapping[str, Blank], requested_ids: Sequence[str]
) -> CompileFailed:
    """Add a note to a compile error about the blank that contains its line, unless that gate was requested.

    If the line is outside the blanks, the note is about an `x[i][j]` in a blank, which causes such errors.
    """
    location = re.search(rf"{re.escape(str(source))}:(\d+):", str(error))
    line = int(location[1]) if location else 0
    owner_ids = [id for id, blank in blanks.items() if 0 <= line - blank.line < len(blank.body)]
    if owner_ids:
        explanations = [
            f"the line is in the blank of {id}, and the file compiles as a whole: fix {id} first, or empty it by `reset`"
            for id in owner_ids
            if id not in requested_ids
        ]
    else:
        errors = (error for blank in blanks.values() for error in find_source_errors(source, blank))
        explanations = [f"line {e.line}: {e.message}" for e in errors if e.mistake == "double-index"]
    return CompileFailed(f"{error}\n   -> {explanations[0]}", error.details) if explanations else error
