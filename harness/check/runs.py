"""A run: the kernels of one puzzle and one root on some devices, every output compared with the reference.

`run` returns plain data; it prints nothing. `Run.exit_code` is the verdict in one number.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.check.options import Options, locate
from harness.check.results import VariantResult
from harness.check.upstream import blame_gates
from harness.devices.recorder import Order, Recording, is_recorded, record_one
from harness.devices.targets import Skipped, Target, choose
from harness.learner import blanks
from harness.learner.work import package_blanks
from harness.spec.puzzle import Case, Gate, Ledger
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.judge import Judge
    from harness.check.ran import Device
    from harness.devices.graphs import Program
    from harness.vgpu import Finding


@dataclass
class DeviceResult:
    """One device of a run, with how its kernels came about: compiled now, in how many seconds, or cached."""

    target: Target
    cached: bool
    compile_seconds: float
    variants: dict[str, VariantResult]

    @property
    def findings(self) -> list["Finding"]:
        """What the virtual GPU found, notes among it."""
        return [finding for variant in self.variants.values() for finding in variant.findings]


@dataclass
class Run:
    """Everything a report needs."""

    options: Options
    package: OpPackage
    cases: list[Case]
    quantities: list[str]
    devices: list[DeviceResult]
    skipped: list[Skipped]
    blanks: dict[str, blanks.Blank]
    ledger: Ledger | None
    unsolved: list[str]

    @property
    def source(self) -> Path:
        """The file with the blanks."""
        return self.package.path / self.options.puzzle.source

    def exit_code(self) -> int:
        """1 wrong or a finding, 3 unsolved, 6 no GPU kernel ran anywhere, 0 all correct; the first that holds."""
        states = [v.state(self.quantities) for d in self.devices for v in d.variants.values()]
        if "wrong" in states or self.errors():
            return 1
        if self.unsolved:
            return 3
        ran = any(device.target.kind != "cpu" for device in self.devices)
        return 0 if ran or not self.options.puzzle.gpu else 6

    def errors(self) -> list["Finding"]:
        """The findings of the virtual GPU that count."""
        return [f for device in self.devices for variant in device.variants.values() for f in variant.errors]


def judged_gates(run: Run) -> dict[str, bool]:
    """Gate -> whether it is right, of the gates whose own quantities were all compared on a GPU, real or virtual."""
    judged: dict[str, bool] = {}
    for device in run.devices:
        for variant in device.variants.values():
            for result in variant.gates:
                if set(result.gate.quantities) <= set(run.quantities):
                    right = result.state == "correct" and bool(result.comparisons)
                    judged[result.gate.id] = right and judged.get(result.gate.id, True)
    return judged


def quantities_of(options: Options) -> list[str]:
    """What a run compares: the forward outputs, and with --backward the gradients and what leads to them."""
    puzzle = options.puzzle
    if options.gate:
        return list(next(gate.quantities for gate in puzzle.gates if gate.id == options.gate))
    forward = list(puzzle.forward)
    return [*forward, *puzzle.backward, *puzzle.intermediate] if options.backward else forward


def run(
    options: Options,
    *,
    on_compile: Callable[[Target], None] = lambda target: None,
    on_ready: Callable[[Target], None] = lambda target: None,
) -> Run:
    """Compiles, runs and compares.

    Args:
        options: What to run.
        on_compile: Called, maybe from another thread, when the kernels of a device are not cached.
        on_ready: Called when they are there.

    Raises a WorkbookError for anything that keeps the kernels from running.
    """
    puzzle = options.puzzle
    package = locate(options)
    by_id = package_blanks(package, puzzle)
    cases = [case for case in puzzle.cases(options.dims) if case.world_size == 1]
    largest = max(puzzle.multiply_adds(case.dims) for case in cases)
    targets, skipped = choose(options.device if puzzle.gpu else "cpu", largest, options.dtype)
    if any(target.kind != "virtual" for target in targets):
        from harness.devices import graphs  # noqa: F401  (MAX is left by the thread that has imported it)
    pool = ThreadPoolExecutor(max_workers=1 + len(targets))
    try:
        compiling = [pool.submit(kernels, options, package, target, cases, on_compile) for target in targets]
        import torch  # noqa: F401  (takes seconds: it is imported while the kernels compile)

        from harness.check.judge import Judge
        from harness.check.reference import Reference

        judge = Judge(puzzle, Reference(puzzle, options.dtype, options.seed), package, by_id)
        results = []
        for target, compiled in zip(targets, compiling, strict=True):
            ready = compiled.result()
            on_ready(target)
            results.append(run_device(options, judge, ready, target, cases))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for a compile
    ledger = puzzle.ledger(cases[0].dims, options.dtype) if puzzle.ledger else None
    waiting = [gate.id for gate in asked_gates(options) if gate.id in judge.empty]
    return Run(options, package, cases, quantities_of(options), results, skipped, by_id, ledger, waiting)


def asked_gates(options: Options) -> list[Gate]:
    """The gates of the kernels that a run is about."""
    asked = set(quantities_of(options))
    gates = [
        g for g in options.puzzle.kernel_gates if g.variant in options.variants and asked & {*g.quantities}
    ]
    return [gate for gate in gates if options.gate in (None, gate.id)]


@dataclass
class Kernels:
    """The compiled kernels of a run on one device: a MAX graph, or recorded launches."""

    compiled: "Program | Recording"
    cached: bool
    seconds: float


def kernels(
    options: Options,
    package: OpPackage,
    target: Target,
    cases: Sequence[Case],
    on_compile: Callable[[Target], None],
) -> Kernels:
    """The kernels of the variants for every case on one device."""
    if target.kind != "virtual":
        program = load(options, package, target, on_compile)
        return Kernels(program, program.cached, program.seconds)
    started = time.monotonic()
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    order = Order(package, dims, tuple(sorted(options.variants)), small_grid=False, dtype=options.dtype)
    cached = is_recorded(order, options.puzzle.name)
    if not cached:
        on_compile(target)
    recording = record_one(order, options.puzzle.name)
    return Kernels(recording, cached, time.monotonic() - started)


def load(
    options: Options, package: OpPackage, target: Target, on_compile: Callable[[Target], None]
) -> "Program":
    """The one graph of the variants and every case on one device."""
    from harness.devices import graphs

    return graphs.load(
        package,
        options.puzzle.calls_of(options.puzzle.compiled_with(options.variants)),
        options.dtype,
        target.device,
        on_compile=lambda: on_compile(target),
    )


def run_device(
    options: Options, judge: "Judge", ready: Kernels, target: Target, cases: Sequence[Case]
) -> DeviceResult:
    """Runs every case on one device and judges what came out."""
    from harness.check.ran import Compiled, Simulated

    puzzle = options.puzzle
    device: Device = (
        Simulated(ready.compiled, judge.reference, judge.source, options.blocks)
        if isinstance(ready.compiled, Recording)
        else Compiled(ready.compiled, judge.reference, target)
    )
    quantities, asked = quantities_of(options), {gate.id for gate in asked_gates(options)}
    variants = {}
    for name in options.variants:
        result = variants[name] = judge.variant(device, name, cases, quantities)
        if options.repeat > 1:
            # The gradients, and the outputs of a puzzle that has none.
            repeated = [q for q in quantities if q in (puzzle.backward or puzzle.forward)]
            judge.repeat(device, result, cases, repeated, options.repeat)
    if puzzle.mojo_rung:
        blame_gates([gate for each in variants.values() for gate in each.gates], puzzle.mojo_rung.needs)
    for result in variants.values():
        result.gates = [gate for gate in result.gates if gate.gate.id in asked]
    return DeviceResult(target, ready.cached, ready.seconds, variants)
