"""Run one op package of a puzzle on some devices, and compare every output with the reference.

`start_run` starts a run; a report then calls `Run.compute_reference` and `Run.compute_kernels` as it needs
results. Nothing is printed here.
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
from harness.check.results import LOW_PRECISION_DTYPE, GateResult, VariantResult
from harness.console import report_progress
from harness.devices.recorder import RecordRequest, is_recorded, record
from harness.devices.targets import SkippedDevice, Target, choose_targets
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Ledger
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.grading import Grader
    from harness.vgpu import Finding


@dataclass
class DeviceResult:
    """The results on one device of a run; its kernels are `cached` or took `compile_seconds` to compile."""

    target: Target
    cached: bool = False
    compile_seconds: float = 0.0
    variants: dict[str, VariantResult] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.target.kind

    @property
    def findings(self) -> list["Finding"]:
        return [finding for variant in self.variants.values() for finding in variant.findings]


@dataclass
class Run:
    """The state of a run, for reports.

    `rejected_gates` are correct on every device in the run's cases, but wrong in further cases.
    """

    options: Options
    package: OpPackage
    cases: list[Case]
    quantities: list[str]
    devices: list[DeviceResult]
    skipped: list[SkippedDevice]
    blanks: dict[str, Blank]
    ledger: Ledger | None
    unsolved: list[str]
    rejected_gates: list[GateResult] = field(default_factory=list)

    @property
    def source(self) -> Path:
        return self.package.path / self.options.puzzle.source

    def compute_reference(self, device: DeviceResult, variants: Sequence[str]) -> None:
        """Compute the reference for some variants' cases; do nothing if the run has ended."""

    def compute_kernels(self, device: DeviceResult, variants: Sequence[str]) -> None:
        """Run some variants on a device, once its kernels are compiled, and compare their outputs."""

    def list_remaining_gates(self) -> list[str]:
        """Return the correct gates that have further cases or dtypes, not covered by the run."""
        options = self.options
        has_default_cases = not options.dims and options.dtype == "float32"
        return [id for id, right in collect_gate_states(self).items() if right] if has_default_cases else []

    def compute_gates(self) -> None:
        """Check the remaining gates in the cases that this run does not cover."""

    def compute_exit_code(self) -> int:
        """Return 1 if a result is wrong, else 3 if a gate is unsolved, 6 if no GPU kernel ran, or 0."""
        states = [v.get_state(self.quantities) for d in self.devices for v in d.variants.values()]
        if "wrong" in states or self.list_errors() or self.rejected_gates:
            return 1
        if self.unsolved:
            return 3
        return 0 if any(device.kind != "cpu" for device in self.devices) else 6

    def list_errors(self) -> list["Finding"]:
        """Return the virtual GPU's findings that make the run wrong."""
        return [f for device in self.devices for variant in device.variants.values() for f in variant.errors]


def collect_gate_states(run: Run) -> dict[str, bool]:
    """Map each gate whose quantities were all compared on a GPU to whether it is correct."""
    is_correct: dict[str, bool] = {}
    for device in run.devices:
        for variant in device.variants.values():
            for result in variant.gates:
                if set(result.gate.quantities) <= set(run.quantities):
                    is_correct_result = result.state == "correct" and bool(result.comparisons)
                    is_correct[result.gate.id] = is_correct_result and is_correct.get(result.gate.id, True)
    return is_correct | {result.gate.id: False for result in run.rejected_gates}


@dataclass
class LazyRun(Run):
    """A run whose parts are computed on demand, in the report's order, while its kernels compile."""

    grader: "Grader | None" = None
    compile_futures: dict[str, Future[Device]] = field(default_factory=dict)
    on_ready: Callable[[Target], None] = lambda target: None

    def compute_reference(self, device: DeviceResult, variants: Sequence[str]) -> None:
        reference = self._get_grader().reference
        if device.kind != "virtual":
            import_module("torch")  # takes seconds, so import it while the kernels compile
        cases = [case for case in self.cases if case.variant in ("", *variants)]
        for number, case in enumerate(cases, 1):
            report_progress(f"PyTorch: case {number} of {len(cases)} ({case.name})")
            reference.get_truth(case, device.target)
            reference.get_baseline(case, device.target)

    def compute_kernels(self, device: DeviceResult, variants: Sequence[str]) -> None:
        grader, compiled = self._get_grader(), self.compile_futures[device.kind].result()
        if not device.variants:
            self.on_ready(device.target)
        device.cached, device.compile_seconds = compiled.cached, compiled.compile_seconds
        device.variants |= {name: grader.grade_variant(compiled, name) for name in variants}
        if len(device.variants) == len(self.options.variants):
            grader.attribute_errors(device.variants)

    def compute_gates(self) -> None:
        options, puzzle = self.options, self.options.puzzle
        cases, executed = [*puzzle.list_cases(None), *puzzle.gate_cases], self.cases
        if any(device.kind == "virtual" for device in self.devices):  # a real GPU reports no races
            cases = [case for case in cases if case not in executed or case.in_16_bits]
        if cases and (remaining := self.list_remaining_gates()):
            checker = Checker(
                puzzle, seed=options.seed, second_dtype=LOW_PRECISION_DTYPE, blocks=options.blocks
            )
            results = checker.check(self.package, remaining, cases)
            self.rejected_gates = [result for result in results if result.state == "wrong"]

    def _get_grader(self) -> "Grader":
        if self.grader is None:
            from harness.check.grading import Grader
            from harness.check.reference import Reference

            options, puzzle = self.options, self.options.puzzle
            self.grader = Grader(
                Reference(puzzle, options.dtype, options.seed, use_cache=True), self.package, self.blanks,
                options.variants, self.cases, options.gates, options.quantities,
                # The gradients, or the outputs of a puzzle without gradients.
                [q for q in options.quantities if q in (puzzle.backward or puzzle.forward)], options.repeat,
            )  # fmt: skip
        return self.grader


@contextmanager
def start_run(
    options: Options,
    *,
    on_compile: Callable[[Target], None] = lambda target: None,
    on_ready: Callable[[Target], None] = lambda target: None,
) -> Generator[Run, None, None]:
    """Start a run by compiling its kernels in the background. Raises a WorkbookError if they cannot run.

    `on_compile` is called, possibly from another thread, if a device's kernels are not cached; `on_ready`
    once they are compiled.
    """
    puzzle, work = options.puzzle, options.exercise
    blanks, package = work.read_blanks(), work.package
    cases = puzzle.list_cases(options.dims)
    max_multiply_adds = max(puzzle.count_multiply_adds(case.dims) for case in cases) if options.dims else 0
    on_cpu = {*options.variants} <= {*puzzle.cpu_variants}
    targets, skipped = choose_targets(options.device, max_multiply_adds, options.dtype, on_cpu)
    if any(target.kind != "virtual" for target in targets):
        import_module("harness.devices.graphs")  # MAX must be shut down by the thread that imported it
    ledger = puzzle.make_ledger(cases[0].dims, options.dtype) if puzzle.make_ledger else None
    unsolved = [gate.id for gate in options.gates if gate.id in blanks and blanks[gate.id].size == 0]
    devices = [DeviceResult(target) for target in targets]
    pool = ThreadPoolExecutor(max_workers=1 + len(targets))
    try:
        common = options, package, cases, on_compile
        compile_futures = {t.kind: pool.submit(create_device, t, *common) for t in targets}
        yield LazyRun(
            options, package, cases, options.quantities, devices, skipped, blanks, ledger, unsolved,
            compile_futures=compile_futures, on_ready=on_ready,
        )  # fmt: skip
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt must not wait for the compiler


def create_device(
    target: Target,
    options: Options,
    package: OpPackage,
    cases: Sequence[Case],
    on_compile: Callable[[Target], None],
) -> Device:
    """Return a device with the variants' kernels for all cases: a MAX graph, or recorded launches."""
    puzzle = options.puzzle
    if target.kind != "virtual":
        from harness.devices import graphs

        calls = puzzle.list_calls(puzzle.list_compiled_variants(options.variants))
        report_compile = partial(on_compile, target)
        graph = graphs.load(package, calls, options.dtype, target.device, on_compile=report_compile)
        return GraphDevice(graph, target)
    start = time.monotonic()
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    # The same order as for gates, so that recordings are shared.
    order = RecordRequest(package, puzzle.name, dims, tuple(sorted(options.variants)), True, options.dtype)
    cached = is_recorded(order)
    if not cached:
        on_compile(target)
    recording, source = record(order), (package.path / puzzle.source).resolve()
    return VirtualDevice(recording, source, options.blocks, cached, time.monotonic() - start)
