"""Create the checker of a learner's file; `Checker` runs kernel gates on the virtual GPU, without MAX.

Kernels are recorded, by one run of the Mojo compiler for all cases and only for kernels that have changed,
and replayed on the virtual GPU. While the compiler runs, the modules of the check are imported and reference
results are loaded or computed; this module itself imports little. A gate with an untouched blank is not run.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.check.results import (
    NARROW,
    Cases,
    GateIds,
    GateResult,
    OnFirst,
    provided_code_gates,
    requested_gates,
)
from harness.check.source_faults import faults
from harness.console import tell
from harness.devices.recorder import Order, Recording, is_planned, record_dtypes
from harness.devices.targets import VIRTUAL
from harness.errors import CompileFailed
from harness.learner.blanks import Blank
from harness.learner.work import Work, package_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import MojoRung, Rung
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.reference import Reference


class RungChecker(Protocol):
    """The interface of a rung's checker."""

    def check(
        self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """Return the result of each gate; a checker that goes case by case calls `on_first`."""
        ...


class Checker:
    """Repeated checks of kernel gates, with truth, baseline and recordings cached.

    Attributes:
        other: A second dtype for a few cases, compiled by the same program; "" for none.
        blocks: The block order of the virtual GPU.
        repeat: Number of repeated runs of a case.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        rung: Rung | None = None,
        *,
        dtype: str = "float32",
        seed: int = 0,
        other: str = "",
        blocks: str = "natural",
        repeat: int = 1,
    ):
        self.puzzle, self.rung = puzzle, rung or puzzle.rung("mojo")
        self.dtype, self.seed, self.other = dtype, seed, other
        self.blocks, self.repeat = blocks, repeat
        self._references: dict[str, Reference] = {}

    @property
    def reference(self) -> "Reference":
        """Inputs, truth and baseline of the cases."""
        return self._reference(self.dtype)

    def _reference(self, dtype: str) -> "Reference":
        from harness.check.reference import Reference

        return self._references.setdefault(dtype, Reference(self.puzzle, dtype, self.seed, kept=True))

    def check(
        self, path: Path | OpPackage, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """Return the result of each gate, in the puzzle's order.

        Args:
            path: The op package, read again at every call.
            gates: Their ids, or None for all. Raises BadUse for an unknown one.
            cases: None for the puzzle's.
            on_first: Called with the results of the first case, before the other cases run.

        Raises CompileFailed if the package does not compile, DamagedFile if its blank markers are broken.
        """
        # A new one, since it caches the hash of its files.
        package = OpPackage(path.path if isinstance(path, OpPackage) else path)
        wanted = requested_gates(self.puzzle, self.rung, gates)
        blanks = package_blanks(package, self.puzzle)
        provided = provided_code_gates(gates, blanks)
        empty = {id for id, blank in blanks.items() if blank.size == 0} - provided
        variants = sorted({gate.variant for gate in wanted if gate.id not in empty})
        if not variants:
            return [GateResult(gate, "unsolved") for gate in wanted]
        if cases is None:
            cases = [*self.puzzle.cases(None), *self.puzzle.gate_cases]
        requested = {self.dtype: cases}
        if self.other and (narrow := [case for case in cases if case.in_16_bits]):
            requested[self.other] = narrow
        try:
            recordings = self._record(package, requested, variants)
        except CompileFailed as error:
            raise name_owner(error, package.path / self.puzzle.source, blanks, gates or [*blanks]) from error
        from harness.check.execution import VirtualDevice
        from harness.check.grading import Grader

        def check_dtype(dtype: str, cases: Sequence[Case], expected: Sequence[Gate], runs: int = 1):
            again = [quantity for gate in expected for quantity in gate.own]
            reference = self._reference(dtype)
            judge = Grader(reference, package, blanks, variants, cases, expected, (), again, runs, provided)
            return judge.by_gate(VirtualDevice(recordings[dtype], judge.source, self.blocks))

        if on_first and len(cases) > 1:
            on_first(check_dtype(self.dtype, cases[:1], wanted))
        results = check_dtype(self.dtype, cases, wanted, self.repeat)
        right = [result.gate for result in results if result.state == "correct"]
        if self.other not in requested or not right:
            return results
        narrowed = check_dtype(self.other, requested[self.other], right)
        wrong = {result.gate.id: result for result in narrowed if result.state == "wrong"}
        for result in wrong.values():
            result.diagnosis.insert(0, f"right in {self.dtype}, and wrong in {self.other}:")
        return [wrong.get(result.gate.id, result) for result in results]

    def _record(
        self, package: OpPackage, requested: Mapping[str, Sequence[Case]], variants: Sequence[str]
    ) -> dict[str, Recording]:
        """Return the recording of each dtype's cases; reference results are loaded or computed meanwhile.

        Raises what `record` raises, without waiting for PyTorch.
        """
        orders = [
            Order(package, tuple(dict.fromkeys(case.dims for case in cases)), tuple(variants), True, dtype)
            for dtype, cases in requested.items()
        ]
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            first = "" if is_planned(orders, self.puzzle.name) else ", the first time: up to a minute"
            tell(f"compiling the kernels{first}")
            recorded = pool.submit(record_dtypes, orders, self.puzzle.name)
            for dtype, cases in requested.items():
                self._reference(dtype).prepare(cases, VIRTUAL, recorded.done)
            return dict(zip(requested, recorded.result(), strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def create_checker(work: Work, *, at_terminal: bool = False, **options: object) -> RungChecker:
    """Return the checker of a learner's file; Python runs in a subprocess, where an exit fails one gate
    only.

    `at_terminal`: whether that code may read from the terminal.
    """
    if work.in_package:
        return make_checker(work, **options)
    from harness.check.subprocess_checker import SubprocessChecker

    return SubprocessChecker(work, at_terminal=at_terminal, **options)


def make_checker(work: Work, **options: object) -> RungChecker:
    """Return the checker of a file; `options` are its keywords, such as `seed`. The import may take seconds.

    Without a dtype kernels are checked in NARROW too.
    """
    if isinstance(work.rung, MojoRung):
        options = {"other": NARROW, **options} if "dtype" not in options else options
    return work.puzzle.resolve(work.rung.checker)(work.puzzle, work.rung, **options)


def name_owner(
    error: CompileFailed, source: Path, blanks: Mapping[str, Blank], requested: Sequence[str]
) -> CompileFailed:
    """Add to a compile error whose blank its line is in, if that gate was not requested.

    For a line outside every blank it points to an index by parts, which breaks the compiler elsewhere.
    """
    at = re.search(rf"{re.escape(str(source))}:(\d+):", str(error))
    line = int(at[1]) if at else 0
    owners = [id for id, blank in blanks.items() if 0 <= line - blank.line < len(blank.body)]
    if owners:
        words = [
            f"the line is in the blank of {id}, and the file compiles as a whole: fix {id} first, or empty it by `reset`"
            for id in owners
            if id not in requested
        ]
    else:
        slips = (fault for blank in blanks.values() for fault in faults(source, blank))
        words = [f"line {slip.line}: {slip.words}" for slip in slips if slip.mistake == "double-index"]
    return CompileFailed(f"{error}\n   -> {words[0]}", error.details) if words else error
