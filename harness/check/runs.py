"""A run: the kernels of one puzzle and one root on some devices, every output compared with the reference.

`run` returns plain data; it prints nothing. `Run.exit_code` is the verdict in one number.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.check.compare import Repeats
from harness.check.diagnose import Diagnosis, Evidence, diagnose
from harness.check.results import Comparison, right_in_all
from harness.check.upstream import blame_quantities
from harness.devices import graphs
from harness.devices.recorder import Recording, record
from harness.devices.targets import Skipped, Target, choose
from harness.errors import CompileFailed
from harness.learner import blanks
from harness.learner.work import Work, package_blanks
from harness.spec.puzzle import Case, Ledger, Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:
    from harness.check.reference import Reference


@dataclass(frozen=True)
class Options:
    """What to run.

    `root` is "problems", "solutions" or the path of an op package; without `variants` those that a run takes which
    names none.
    """

    puzzle: Puzzle
    root: str = "problems"
    backward: bool = True
    variants: tuple[str, ...] = ()
    device: str = "auto"
    dims: tuple[int, ...] | None = None
    dtype: str = "float32"
    seed: int = 0
    repeat: int = 1
    gate: str | None = None
    blocks: str = "natural"

    def __post_init__(self):
        if not self.variants:
            object.__setattr__(self, "variants", self.puzzle.default_variants)


@dataclass
class VariantResult:
    """One variant on one device.

    `unsolved` maps a quantity to the untouched blanks that it waits for, `diagnoses` a wrong one to what is wrong.
    """

    variant: str
    comparisons: list[Comparison] = field(default_factory=list)
    unsolved: dict[str, tuple[str, ...]] = field(default_factory=dict)
    repeats: dict[str, Repeats] = field(default_factory=dict)
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)

    def ok(self, quantity: str) -> bool:
        """Whether a quantity is right in every case (an unsolved one is not wrong)."""
        return all(c.verdicts[quantity].ok for c in self.comparisons if quantity in c.verdicts)

    def state(self, quantities: list[str]) -> str:
        """ "wrong", "unsolved" or "correct": the verdict on several quantities together."""
        if not all(self.ok(quantity) for quantity in quantities):
            return "wrong"
        if any(not self.repeats[q].ok for q in quantities if q in self.repeats):
            return "wrong"
        return "unsolved" if any(quantity in self.unsolved for quantity in quantities) else "correct"


@dataclass
class DeviceResult:
    """One device of a run, with how its graph came about: compiled now, in how many seconds, or cached.

    `findings` are the virtual GPU's.
    """

    target: Target
    cached: bool
    compile_seconds: float
    run_seconds: float
    variants: dict[str, VariantResult]
    findings: list = field(default_factory=list)


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

    def exit_code(self) -> int:
        """1 wrong or a finding, 3 unsolved, 6 no GPU kernel ran anywhere, 0 all correct; the first that holds."""
        states = [v.state(self.quantities) for d in self.devices for v in d.variants.values()]
        if "wrong" in states or self.errors():
            return 1
        if self.unsolved:
            return 3
        ran = any(device.target.kind != "cpu" for device in self.devices)
        return 0 if ran or not self.options.puzzle.gpu else 6

    def errors(self) -> list:
        """The findings of the virtual GPU that are errors.

        While a blank is untouched, the kernels behind it read what it has not written: no mistake of the learner's.
        """
        waiting = any(blank.size == 0 for blank in self.blanks.values())
        return [
            finding
            for device in self.devices
            for finding in device.findings
            if finding.is_error and not (waiting and finding.kind == "uninitialised read")
        ]


def judged_gates(run: Run) -> dict[str, bool]:
    """Gate -> whether it is right, of the gates whose own quantities were all compared on a GPU, real or virtual.

    A finding may be any gate's: where there is one, none is right.
    """
    devices = [device for device in run.devices if device.target.kind != "cpu"]
    judged = {}
    for gate in run.options.puzzle.kernel_gates:
        own = set(gate.quantities)
        also = [quantity for quantity in gate.given if quantity in run.quantities]
        variants = [device.variants[gate.variant] for device in devices if gate.variant in device.variants]
        compared = [v for v in variants if all(own <= c.verdicts.keys() for c in v.comparisons)]
        if compared:
            right = all(v.state([*own, *also]) == "correct" for v in compared)
            judged[gate.id] = right and not run.errors()
    return judged


def locate(options: Options) -> OpPackage:
    """The op package of a run."""
    name = options.puzzle.name
    if options.root == "solutions":
        return roots.op_package(roots.solutions(), name)
    if options.root == "problems":
        work = Work(options.puzzle, options.puzzle.rung("mojo"))
        work.blanks()  # a learner's file has all of them, or says in a line what happened to it
        return work.package
    return package_of(options.puzzle, Path(options.root))


def package_of(puzzle: Puzzle, folder: Path) -> OpPackage:
    """The op package in a folder. Raises CompileFailed, before anything is compiled, for that of another puzzle."""
    package = OpPackage(folder)
    wanted, there = [call.op.name for call in puzzle.calls], package.registers()
    if there and not there & {*wanted}:
        raise CompileFailed(f"{folder} is no package of {puzzle.name}: it registers no op {wanted[0]!r}")
    return package


def recorded_dims(options: Options, cases: list) -> list[tuple[int, ...]]:
    """Sizes that between them launch every kernel of a run: variants on request choose their kernels by size."""
    puzzle = options.puzzle
    if not set(options.variants) & set(puzzle.on_request):
        return [puzzle.dims]
    return list(dict.fromkeys([puzzle.dims, *(case.dims for case in cases)]))


def quantities_of(options: Options) -> list[str]:
    """What a run compares: the forward outputs, and with --backward the gradients and what leads to them."""
    puzzle = options.puzzle
    if options.gate:
        return list(next(gate.quantities for gate in puzzle.gates if gate.id == options.gate))
    forward = list(puzzle.forward)
    return [*forward, *puzzle.backward, *puzzle.intermediate] if options.backward else forward


def repeated(options: Options) -> list[str]:
    """What --repeat looks at: the gradients, and the outputs of a puzzle that has none."""
    return list(options.puzzle.backward or options.puzzle.forward)


def run(
    options: Options,
    *,
    on_compile: Callable[[Target], None] = lambda target: None,
    on_ready: Callable[[Target, graphs.Program], None] = lambda target, program: None,
) -> Run:
    """Compiles, runs and compares.

    Args:
        options: What to run.
        on_compile: Called, maybe from another thread, when the graph of a device is not cached.
        on_ready: Called when a device's graph is there.

    Raises a WorkbookError for anything that keeps the kernels from running.
    """
    puzzle = options.puzzle
    package = locate(options)
    found = package_blanks(package, puzzle)
    cases = [case for case in puzzle.cases(options.dims) if case.world_size == 1]
    largest = max(puzzle.multiply_adds(case.dims) for case in cases)
    device = options.device if puzzle.gpu else "cpu"
    targets, skipped = choose(device, largest, options.dtype, options.blocks)
    empty = {id for id, blank in found.items() if blank.size == 0}
    quantities = quantities_of(options)

    pool = ThreadPoolExecutor(max_workers=1 + len(targets))
    try:
        # The virtual GPU is given kernels without names and lines; a recording of the same launches has both.
        compiled = puzzle.compiled_with(options.variants)
        simulated = any(target.kind == "virtual" for target in targets)
        recorded = (
            pool.submit(record, package, puzzle.name, options.dtype, recorded_dims(options, cases), compiled)
            if simulated
            else None
        )
        programs = [pool.submit(load, options, package, target, on_compile, recorded) for target in targets]
        import torch  # noqa: F401  (takes seconds: it is imported while the graphs compile)

        from harness.check.reference import Reference

        reference = Reference(puzzle, options.dtype, options.seed)
        results = [
            run_device(options, target, program, cases, quantities, empty, reference, on_ready)
            for target, program in zip(targets, programs, strict=True)
        ]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for a compile
    waiting = [
        gate.id
        for gate in puzzle.kernel_gates
        if gate.id in empty
        and gate.variant in options.variants
        and set(gate.quantities) & set(quantities)
        and options.gate in (None, gate.id)
    ]
    ledger = puzzle.ledger(cases[0].dims, options.dtype) if puzzle.ledger else None
    return Run(options, package, cases, quantities, results, skipped, found, ledger, waiting)


def load(
    options: Options,
    package: OpPackage,
    target: Target,
    on_compile: Callable[[Target], None],
    recorded: "Future[Recording] | None" = None,
) -> graphs.Program:
    """The one graph of the variants and every case on one device."""

    def before_init() -> None:
        if target.kind == "virtual":
            from harness.devices import virtual

            assert recorded is not None  # begun where a virtual GPU is among the targets
            virtual.name_kernels(recorded.result())

    return graphs.load(
        package,
        options.puzzle.calls_of(options.puzzle.compiled_with(options.variants)),
        options.dtype,
        target.device,
        kind="virtual" if target.kind == "virtual" else "",
        on_compile=lambda: on_compile(target),
        before_init=before_init,
    )


def run_device(
    options: Options,
    target: Target,
    loading: "Future[graphs.Program]",
    cases: list[Case],
    quantities: list[str],
    empty: set[str],
    reference: "Reference",
    on_ready: Callable[[Target, graphs.Program], None],
) -> DeviceResult:
    """Runs every case on one device and judges what came out."""
    from harness.check import tensors
    from harness.check.reference import evidence

    program = loading.result()
    on_ready(target, program)
    started = time.monotonic()
    variants = {name: VariantResult(name) for name in options.variants}
    for variant in variants.values():
        variant.unsolved = unsolved(options.puzzle, variant.variant, target, quantities, empty)
    result = DeviceResult(target, program.cached, program.seconds, 0.0, variants)
    wrong: dict[tuple[str, str], list[Evidence]] = {}
    for case in cases:
        outputs = tensors.execute(options.puzzle, program, target, reference.inputs(case), case.dims)
        for name, variant in variants.items():
            compared = [q for q in quantities if q not in variant.unsolved and f"{name}.{q}" in outputs]
            verdicts = tensors.judge_variant(options.puzzle, reference, case, target, name, outputs, compared)
            variant.comparisons.append(Comparison(case, verdicts))
            for q in [q for q in compared if not verdicts[q].ok]:
                wrong.setdefault((name, q), []).append(
                    evidence(options.puzzle, reference, case, target, q, outputs[f"{name}.{q}"], verdicts[q])
                )
    for (name, quantity), found in wrong.items():
        gate = None if target.kind == "cpu" else options.puzzle.gate_of(name, quantity)
        variants[name].diagnoses[quantity] = diagnose(
            options.puzzle,
            quantity,
            found,
            name=options.puzzle.printed(quantity),
            gate=gate,
            right=right_in_all(variants[name].comparisons),
        )
    for name, variant in variants.items():
        blame_quantities(variant.diagnoses, options.puzzle, name)
    if options.repeat > 1:
        for name, variant in variants.items():
            asked = [q for q in quantities if q in repeated(options) and q in options.puzzle.writes(name)]
            compared = [q for q in asked if q not in variant.unsolved]
            hard = cases[min(1, len(cases) - 1)]  # the first is the chapter's, whose values hide a race
            variant.repeats = tensors.repeat(
                options.puzzle, program, target, reference, hard, name, compared, options.repeat
            )
    if target.kind == "virtual":
        from harness.devices import virtual

        result.findings = virtual.findings()
    result.run_seconds = time.monotonic() - started
    return result


def unsolved(
    puzzle: Puzzle, variant: str, target: Target, quantities: list[str], empty: set[str]
) -> dict[str, tuple[str, ...]]:
    """The quantities of a variant that wait for an untouched blank. The CPU path has no blanks."""
    if target.kind == "cpu":
        return {}
    gates = {quantity: puzzle.gate_of(variant, quantity) for quantity in quantities}
    return {quantity: (gate,) for quantity, gate in gates.items() if gate in empty}
