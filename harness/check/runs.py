"""Run the kernels of one puzzle and one root on some devices, and compare every output with the reference.

`run` starts a run; a report then calls `Run.compute_reference` and `Run.compute_kernels` as it reaches them.
Nothing is printed here.
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from harness.check.checker import Checker
from harness.check.execution import Device, GraphDevice, VirtualDevice
from harness.check.options import Options
from harness.check.results import NARROW, GateResult, VariantResult
from harness.console import tell
from harness.devices.recorder import Order, is_recorded, record_one
from harness.devices.targets import Skipped, Target, choose
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Ledger
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.grading import Grader
    from harness.vgpu import Finding


@dataclass
class DeviceResult:
    """One device of a run, with how its kernels came about: compiled now, in how many seconds, or cached."""

    target: Target
    cached: bool = False
    compile_seconds: float = 0.0
    variants: dict[str, VariantResult] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return the kind of device: "cpu", "gpu" or "virtual"."""
        return self.target.kind

    @property
    def findings(self) -> list["Finding"]:
        """Return the findings of the virtual GPU, notes included."""
        return [finding for variant in self.variants.values() for finding in variant.findings]


@dataclass
class Run:
    """The state of a run, for reports.

    `rejected` are gates that are correct on every device in the run's cases, and wrong in their own.
    """

    options: Options
    package: OpPackage
    cases: list[Case]
    quantities: list[str]
    devices: list[DeviceResult]
    skipped: list[Skipped]
    blanks: dict[str, Blank]
    ledger: Ledger | None
    unsolved: list[str]
    rejected: list[GateResult] = field(default_factory=list)

    @property
    def source(self) -> Path:
        """The file with the blanks."""
        return self.package.path / self.options.puzzle.source

    def compute_reference(self, device: DeviceResult, variants: Sequence[str]) -> None:
        """Compute the reference in the cases of some variants, unless the run has ended."""

    def compute_kernels(self, device: DeviceResult, variants: Sequence[str]) -> None:
        """Run some variants on a device and compare them, once its kernels are compiled."""

    def gates_left(self) -> list[str]:
        """Return the correct gates with cases or dtypes of their own that the run does not cover; none with
        other sizes or another dtype, which record no pass."""
        options = self.options
        plain = not options.dims and options.dtype == "float32"
        return [id for id, right in checked_gates(self).items() if right] if plain else []

    def compute_gates(self) -> None:
        """Check those gates in the cases that this run does not cover."""

    def exit_code(self) -> int:
        """1 wrong or a finding, 3 unsolved, 6 no GPU kernel ran anywhere, 0 all correct; the first that holds."""
        states = [v.state(self.quantities) for d in self.devices for v in d.variants.values()]
        if "wrong" in states or self.errors() or self.rejected:
            return 1
        if self.unsolved:
            return 3
        return 0 if any(device.kind != "cpu" for device in self.devices) else 6

    def errors(self) -> list["Finding"]:
        """Return the findings of the virtual GPU that count."""
        return [f for device in self.devices for variant in device.variants.values() for f in variant.errors]


def checked_gates(run: Run) -> dict[str, bool]:
    """Return gate -> whether it is correct, in its own cases too, for gates whose quantities were all
    compared on a real or virtual GPU."""
    checked: dict[str, bool] = {}
    for device in run.devices:
        for variant in device.variants.values():
            for result in variant.gates:
                if set(result.gate.quantities) <= set(run.quantities):
                    right = result.state == "correct" and bool(result.comparisons)
                    checked[result.gate.id] = right and checked.get(result.gate.id, True)
    return checked | {result.gate.id: False for result in run.rejected}


@dataclass
class Running(Run):
    """A run whose parts are computed on demand, in the order of the report, while its kernels compile."""

    judge: "Grader | None" = None
    compiling: dict[str, Future[Device]] = field(default_factory=dict)
    on_ready: Callable[[Target], None] = lambda target: None

    def compute_reference(self, device: DeviceResult, variants: Sequence[str]) -> None:
        reference = self._grader().reference
        if device.kind != "virtual":
            import_module("torch")  # takes seconds: it is imported while the kernels compile
        cases = [case for case in self.cases if case.variant in ("", *variants)]
        for number, case in enumerate(cases, 1):
            tell(f"PyTorch: case {number} of {len(cases)} ({case.name})")
            reference.truth(case, device.target)
            reference.baseline(case, device.target)

    def compute_kernels(self, device: DeviceResult, variants: Sequence[str]) -> None:
        judge, compiled = self._grader(), self.compiling[device.kind].result()
        if not device.variants:
            self.on_ready(device.target)
        device.cached, device.compile_seconds = compiled.cached, compiled.seconds
        device.variants |= {name: judge.variant(compiled, name) for name in variants}
        if len(device.variants) == len(self.options.variants):
            judge.settle(device.variants)

    def compute_gates(self) -> None:
        options, puzzle = self.options, self.options.puzzle
        own, executed = [*puzzle.cases(None), *puzzle.gate_cases], self.cases
        if any(device.kind == "virtual" for device in self.devices):  # a real GPU reports no races
            own = [case for case in own if case not in executed or case.in_16_bits]
        if own and (left := self.gates_left()):
            checker = Checker(puzzle, seed=options.seed, other=NARROW, blocks=options.blocks)
            results = checker.check(self.package, left, own)
            self.rejected = [result for result in results if result.state == "wrong"]

    def _grader(self) -> "Grader":
        """Return the grader; created on first use, since its imports are slow."""
        if self.judge is None:
            from harness.check.grading import Grader
            from harness.check.reference import Reference

            options, puzzle = self.options, self.options.puzzle
            self.judge = Grader(
                Reference(puzzle, options.dtype, options.seed, kept=True), self.package, self.blanks,
                options.variants, self.cases, options.gates, options.quantities,
                # The gradients, and the outputs of a puzzle that has none.
                [q for q in options.quantities if q in (puzzle.backward or puzzle.forward)], options.repeat,
            )  # fmt: skip
        return self.judge


@contextmanager
def run(
    options: Options,
    *,
    on_compile: Callable[[Target], None] = lambda target: None,
    on_ready: Callable[[Target], None] = lambda target: None,
) -> Generator[Run, None, None]:
    """Start a run: its kernels begin to compile.

    Args:
        options: What to run.
        on_compile: Called if the kernels of a device are not cached, possibly from another thread.
        on_ready: Called once they are compiled.

    Raises a WorkbookError if the kernels cannot run.
    """
    puzzle, work = options.puzzle, options.work
    blanks, package = work.blanks(), work.package
    cases = puzzle.cases(options.dims)
    largest = max(puzzle.multiply_adds(case.dims) for case in cases)
    on_cpu = {*options.variants} <= {*puzzle.on_cpu}
    targets, skipped = choose(options.device, largest, options.dtype, on_cpu)
    if any(target.kind != "virtual" for target in targets):
        import_module("harness.devices.graphs")  # MAX is left by the thread that has imported it
    ledger = puzzle.ledger(cases[0].dims, options.dtype) if puzzle.ledger else None
    waiting = [gate.id for gate in options.gates if gate.id in blanks and blanks[gate.id].size == 0]
    devices = [DeviceResult(target) for target in targets]
    pool = ThreadPoolExecutor(max_workers=1 + len(targets))
    try:
        compiling = {
            target.kind: pool.submit(device_on, target, options, package, cases, on_compile)
            for target in targets
        }
        yield Running(
            options, package, cases, options.quantities, devices, skipped, blanks, ledger, waiting,
            compiling=compiling, on_ready=on_ready,
        )  # fmt: skip
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for a compile


def device_on(
    target: Target,
    options: Options,
    package: OpPackage,
    cases: Sequence[Case],
    on_compile: Callable[[Target], None],
) -> Device:
    """Return a device with the kernels of the variants for every case: a MAX graph, or recorded launches."""
    puzzle = options.puzzle
    if target.kind != "virtual":
        from harness.devices import graphs

        calls = puzzle.calls_of(puzzle.compiled_with(options.variants))
        compiling = partial(on_compile, target)
        graph = graphs.load(package, calls, options.dtype, target.device, on_compile=compiling)
        return GraphDevice(graph, target)
    started = time.monotonic()
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    order = Order(
        package, dims, tuple(sorted(options.variants)), True, options.dtype
    )  # as gates are recorded
    cached = is_recorded(order, puzzle.name)
    if not cached:
        on_compile(target)
    recording, source = record_one(order, puzzle.name), (package.path / puzzle.source).resolve()
    return VirtualDevice(recording, source, options.blocks, cached, time.monotonic() - started)
