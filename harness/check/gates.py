"""Gates: each blank of a puzzle judged by itself, without MAX and without a GPU, in one warm process.

The kernels are recorded (one run of the Mojo compiler for all cases, and for those kernels alone that have changed) and
replayed on the virtual GPU. What needs torch is imported, and PyTorch asked for the right results, while the compiler
runs: this module itself is light. A gate whose blank is untouched is not run.
"""

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.check.live import tell
from harness.check.results import GateResult, OnFirst, judged_as_given, leave_unsolved, wanted_gates
from harness.check.source_faults import faults
from harness.check.upstream import blame_gates
from harness.devices.recorder import Order, Recording, record_dtypes
from harness.devices.targets import VIRTUAL
from harness.errors import CompileFailed
from harness.learner.blanks import Blank
from harness.learner.work import package_blanks
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.reference import Reference


class Checker:
    """Judges gates again and again: truth and baseline are computed once, recordings are cached by content.

    Attributes:
        spent: Where the time of the last check went: what -> how long it took.
        other: Judges what is right on a few cases in another dtype too, whose kernels the same program compiles; or None.
        blocks: The block order of the virtual GPU.
        repeat: How often a case runs again.
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
        self.puzzle = puzzle
        self.rung = rung or puzzle.rung("mojo")
        self.dtype = dtype
        self.seed = seed
        self.blocks = blocks
        self.repeat = repeat
        self.spent: dict[str, float] = {}
        self.other = Checker(puzzle, self.rung, dtype=other, seed=seed, blocks=blocks) if other else None

    @cached_property
    def reference(self) -> "Reference":
        """Inputs, truth and baseline of the cases."""
        from harness.check.reference import Reference

        return Reference(self.puzzle, self.dtype, self.seed)

    def check(
        self,
        path: Path | OpPackage,
        gates: Sequence[str] | None = None,
        cases: list[Case] | None = None,
        *,
        on_first: OnFirst | None = None,
    ) -> list[GateResult]:
        """The verdict on each gate, in the puzzle's order.

        Args:
            path: The op package; read anew at every call.
            gates: Their ids, or None for all. Raises BadUse for an unknown one.
            cases: None for the puzzle's.
            on_first: Called with the verdicts on the first case alone, before the other cases are run.

        Raises CompileFailed where the package does not compile, DamagedFile where its blank markers are broken.
        """
        # A fresh one: it remembers the hash of what it has read.
        package = OpPackage(path.path if isinstance(path, OpPackage) else path)
        wanted = wanted_gates(self.puzzle, self.rung, gates)
        if cases is None:
            cases = [*self.puzzle.cases(None), *self.puzzle.gate_cases]
        cases = [case for case in cases if case.world_size == 1]
        blanks = package_blanks(package, self.puzzle)
        given = judged_as_given(gates, blanks)
        empty = {id for id, blank in blanks.items() if blank.size == 0} - given
        variants = sorted({gate.variant for gate in wanted if gate.id not in empty})
        self.spent = {}
        narrow = [case for case in cases if case.in_16_bits] if self.other else []
        try:
            recording, *others = self._recorded(package, cases, variants, narrow)
        except CompileFailed as error:
            raise with_owner(error, package.path / self.puzzle.source, blanks, gates or [*blanks]) from error
        if on_first and variants and len(cases) > 1:
            with self._timed("first case"):
                first = self._results(recording, cases[:1], wanted, variants, package, blanks, given)
            on_first(first)
        with self._timed("all cases"):
            results = self._results(recording, cases, wanted, variants, package, blanks, given, self.repeat)
        if not (self.other and others):
            return results
        right = [result.gate for result in results if result.state == "correct"]
        with self._timed(f"in {self.other.dtype}"):
            again = self.other._results(others[0], narrow, right, variants, package, blanks)
        wrong = {result.gate.id: result for result in again if result.state == "wrong"}
        for result in wrong.values():
            result.diagnosis.insert(0, f"right in {self.dtype}, and wrong in {self.other.dtype}:")
        return [wrong.get(result.gate.id, result) for result in results]

    def _results(
        self,
        recording: Recording,
        cases: list[Case],
        wanted: list[Gate],
        variants: list[str],
        package: OpPackage,
        blanks: dict[str, Blank],
        given: Collection[str] = (),
        repeat: int = 1,
    ) -> list[GateResult]:
        """The verdict on each wanted gate in these cases."""
        from harness.check.judge import Judge
        from harness.check.ran import Simulated

        judge = Judge(self.puzzle, self.reference, package, blanks, given)
        device = Simulated(recording, self.reference, judge.source, self.blocks)
        judged: dict[str, GateResult] = {}
        for name in variants:
            mine = [case for case in cases if case.variant in ("", name)]
            variant = judge.variant(device, name, mine)
            if repeat > 1:
                judge.repeat(device, variant, mine, [q for gate in wanted for q in gate.own], repeat)
            judged |= {result.gate.id: result for result in variant.gates}
        blame_gates(list(judged.values()), self.rung.needs)
        for id in given:
            leave_unsolved(judged[id])
        return [judged.get(gate.id) or GateResult(gate, "unsolved") for gate in wanted]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds what the block takes to `spent`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - started

    def _recorded(
        self, package: OpPackage, cases: list[Case], variants: list[str], narrow: Sequence[Case] = ()
    ) -> list[Recording]:
        """The recording, and one of the `narrow` cases in the other dtype; while the compiler runs, PyTorch is imported and
        asked for what is right.

        Raises what `record` does, and that without waiting for PyTorch to answer all.
        """
        if not variants:
            return [Recording()]
        orders = [self._order(package, cases, variants)]
        if self.other and narrow:
            orders.append(self.other._order(package, narrow, variants))
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            tell("compiling the kernels")
            with self._timed("compiler"):
                recording = pool.submit(record_dtypes, orders, self.puzzle.name)
                self._prepare(cases, recording)
                if self.other:
                    self.other._prepare(narrow, recording)
                return recording.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, cases: Sequence[Case], recording: "Future[list[Recording]]") -> None:
        """Makes truth and baseline of the cases, in order, until the recording is there."""
        with self._timed("beside it PyTorch"):
            for case in cases:
                if recording.done():
                    return
                self.reference.truth(case, VIRTUAL)
                self.reference.baseline(case, VIRTUAL)

    def _order(self, package: OpPackage, cases: Sequence[Case], variants: list[str]) -> Order:
        dims = tuple(dict.fromkeys(case.dims for case in cases))
        return Order(package, dims, tuple(variants), small_grid=True, dtype=self.dtype)


def with_owner(
    error: CompileFailed, source: Path, blanks: Mapping[str, Blank], asked: Sequence[str]
) -> CompileFailed:
    """The error; where its line is in the blank of a gate that was not asked about, it says whose. Where it is in no blank, the
    line of an index by parts, which breaks the compiler elsewhere."""
    at = re.search(rf"{re.escape(str(source))}:(\d+):", str(error))
    line = int(at[1]) if at else 0
    owners = [id for id, blank in blanks.items() if 0 <= line - blank.line < len(blank.body)]
    words = [
        f"the line is in the blank of {id}, and its kernel is compiled as a whole: mend {id} first"
        for id in owners
        if id not in asked
    ]
    if not owners:
        slips = (fault for blank in blanks.values() for fault in faults(source, blank))
        words = [f"line {slip.line}: {slip.words}" for slip in slips if slip.mistake == "double-index"]
    if words:
        return CompileFailed(f"{error}\n   -> {words[0]}", error.details)
    return error
