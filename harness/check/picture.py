"""Trace a learner's run: every access of every thread, the first wrong element, and its cause.

The learner's kernels and the solution's run one case on the virtual GPU, with all accesses recorded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.check.accesses import Accesses, Element, Line, Source, Thread
from harness.check.blame import RootCause, find_root_cause
from harness.check.checker import Checker
from harness.check.diagnose import CAUSES
from harness.check.execution import MAX_STEPS
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.console import format_path
from harness.devices.recorder import RecordRequest, record
from harness.devices.replay import Replay
from harness.devices.targets import VIRTUAL
from harness.errors import Unsolved, UsageError
from harness.learner.exercise import read_package_blanks
from harness.spec.puzzle import Arrays, Case, Dims, Gate, Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding, VirtualGPUError
from harness.vgpu.checks.findings import group_by_cause

MAX_TENSOR_ELEMENTS = 4096
"""Maximum number of elements of a tensor in a picture."""
MAX_EVENTS = 1 << 21
"""Maximum number of recorded accesses of a launch."""
SYMPTOM_KINDS = ("uninitialised read", "output never written")
"""Findings that often follow from a wrong or missing write."""


@dataclass(frozen=True)
class WrongElements:
    """The first wrong element of a quantity: index, result (NaN if unwritten) and expected value.

    `elements` are the flat indices of all wrong elements, in ascending order.
    """

    quantity: str
    index: tuple[int, ...]
    got: float
    expected: float
    unwritten: bool
    size: int
    elements: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.elements[0]


@dataclass
class TracedRun:
    """A traced run: accesses, outputs, findings, and the error that stopped it, or ""."""

    accesses: Accesses
    outputs: Arrays = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: str = ""


@dataclass
class Picture:
    """The data of a picture.

    Attributes:
        puzzle, gate, case: Subject of the picture; `result` is the gate's result in all cases.
        learner, solution: The learner's run and the solution's.
        wrong: The first wrong element of each wrong quantity of the gate, in the order of writing.
        root_cause: The root cause of the first of them, from comparing the runs, or None.
        finding: The finding that is the cause, or None.
        shapes: Name -> shape, of every tensor whose shape is known.
    """

    puzzle: Puzzle
    gate: Gate
    case: Case
    result: GateResult
    learner: TracedRun
    solution: TracedRun
    wrong: list[WrongElements] = field(default_factory=list)
    root_cause: RootCause | None = None
    finding: Finding | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_correct(self) -> bool:
        return self.result.state == "correct"

    @property
    def thread(self) -> Thread | None:
        """The thread to follow: the finding's, the root cause's, or a writer of an output's element 0."""
        if self.finding and self.finding.thread is not None:
            launch = self.find_launch(self.finding)
            if launch is not None:
                trace = self.learner.accesses.launches[launch]
                block = flatten_index(self.finding.block or (0, 0, 0), trace.grid)
                return Thread(launch, block, flatten_index(self.finding.thread, trace.block))
        if self.root_cause:
            return self.root_cause.thread
        run = self.learner.accesses
        for quantity in self.gate.quantities:
            rows = np.flatnonzero(run.select_element(Element(quantity, 0)) & (run.kind != "R"))
            if len(rows):
                return run.get_access(int(rows[-1])).thread
        return None

    @property
    def line(self) -> Line | None:
        if self.finding:
            return self.learner.accesses.source.find_line(self.finding.instr)
        return self.root_cause.line if self.root_cause else None

    def find_launch(self, finding: Finding) -> int | None:
        for index, launch in enumerate(self.learner.accesses.launches):
            if any(
                other.location == finding.location and other.kind == finding.kind for other in launch.findings
            ):
                return index
        return None

    def unflatten(self, name: str, element: int) -> tuple[int, ...]:
        """Return a flat element's index, or (element,) if the shape is unknown or too small."""
        shape = self.shapes.get(name, ())
        if len(shape) < 2 or not 0 <= element < math.prod(shape):
            return (element,)
        return tuple(int(i) for i in np.unravel_index(element, shape))


def flatten_index(index: tuple[int, int, int], sizes: tuple[int, int, int]) -> int:
    return index[0] + sizes[0] * (index[1] + sizes[1] * index[2])


# ---- Creating a picture ------------------------------------------------------------------------------------


def make_picture(
    puzzle: Puzzle,
    package: OpPackage,
    gate: Gate,
    *,
    cases: list[Case] | None = None,
    result: GateResult | None = None,
    checker: Checker | None = None,
) -> Picture:
    """Check a gate, choose the most informative case, and trace the learner's and the solution's run of it.

    `cases` default to the puzzle's; `result` is the gate's, if known; `checker` is one that has already
    checked these kernels. Raises Unsolved for an untouched blank, CompileFailed, and UsageError for sizes too
    large for a picture.
    """
    cases = cases or puzzle.list_cases(None)
    drawable_cases = [case for case in cases if count_largest_tensor(puzzle, case) <= MAX_TENSOR_ELEMENTS]
    if not drawable_cases:
        case = min(cases, key=lambda case: count_largest_tensor(puzzle, case))
        raise UsageError(
            f"--show {gate.id}: too large for a picture: a tensor of '{case.name}' has "
            f"{count_largest_tensor(puzzle, case):,} elements, {MAX_TENSOR_ELEMENTS:,} can be drawn; --dims takes smaller sizes"
        )
    source = package.path / puzzle.source
    by_gate = read_package_blanks(package, puzzle)
    if gate.id in by_gate and by_gate[gate.id].size == 0:
        raise Unsolved(
            f"--show {gate.id}: nothing to show yet: the blank at {format_path(source)}:{by_gate[gate.id].line} is untouched"
        )
    checker = checker or Checker(puzzle)
    result = result or checker.check(package.path, [gate.id], cases)[0]
    dims = list(dict.fromkeys(case.dims for case in cases))
    run = make_runner(package, gate, dims, checker)
    remaining = rank_cases(puzzle, drawable_cases, result, checker.reference)
    while True:
        case = remaining.pop(0)
        learner = run(case)
        wrong = find_wrong_elements(gate, case, checker, learner)
        is_informative = wrong or learner.failure or rank_causes(learner.findings, result, symptoms=True)
        if not remaining or result.state == "correct" or is_informative:
            break
    solution = make_runner(roots.make_op_package(roots.get_solutions(), puzzle.name), gate, dims, checker)(
        case
    )
    return add_explanation(Picture(puzzle, gate, case, result, learner, solution, wrong))


def count_largest_tensor(puzzle: Puzzle, case: Case) -> int:
    sizes = [math.prod(shape) for shape in puzzle.compute_shapes(case.dims).values()]
    if max(sizes, default=0) <= MAX_TENSOR_ELEMENTS:
        sizes += [array.size for array in puzzle.make_inputs(case, "float32", 0).values()]
    return max(sizes, default=0)


def rank_cases(puzzle: Puzzle, cases: list[Case], result: GateResult, reference: Reference) -> list[Case]:
    """Return the cases, most informative first: wrong, finite, of the default sizes, small, varied."""
    wrong = {c.case.name for c in result.comparisons if not all(v.ok for v in c.results.values())}

    def rank(case: Case) -> tuple[bool, bool, bool, int, int]:
        arrays = list(reference.get_arrays(case).values())
        finite = all(np.isfinite(array).all() for array in arrays)
        size = sum(array.size for array in arrays)
        varied = sum(len(np.unique(array)) for array in arrays)
        return case.name not in wrong, not finite, case.dims != puzzle.dims, size, -varied

    return sorted(cases, key=rank)


def make_runner(
    package: OpPackage, gate: Gate, dims: list[Dims], checker: Checker
) -> Callable[[Case], TracedRun]:
    """Return a function that replays a package's launches in a case, correcting wrong saved quantities."""
    puzzle, reference = checker.puzzle, checker.reference
    source = Source((package.path / puzzle.source).resolve(), read_package_blanks(package, puzzle))
    recording = record(RecordRequest(package, puzzle.name, tuple(dims), (gate.variant,), True, checker.dtype))
    gate_quantities = (*gate.quantities, *gate.provided_quantities)
    saved_quantities = [
        quantity for quantity in puzzle.list_saved_quantities(gate.variant) if quantity not in gate_quantities
    ]

    def replay(case: Case, corrected: Arrays) -> TracedRun:
        replay = Replay(recording, puzzle, checker.dtype, block_order=checker.blocks)
        replay.gpu.max_events = MAX_EVENTS
        replay.gpu.max_steps = MAX_STEPS + puzzle.count_multiply_adds(case.dims)
        outputs: Arrays = {}
        failure = ""
        try:
            outputs = replay.run(gate.variant, case, reference.get_inputs(case), corrected)
        except VirtualGPUError as error:
            failure = str(error)
        findings = [finding for finding in group_by_cause(replay.gpu.findings) if finding.is_error]
        return TracedRun(Accesses(replay.gpu.launches, source), outputs, findings, failure)

    def run(case: Case) -> TracedRun:
        traced_run = replay(case, {})
        quantities = () if traced_run.failure else saved_quantities
        results = reference.compare_all(case, VIRTUAL, gate.variant, traced_run.outputs, quantities)
        if all(result.ok for result in results.values()):
            return traced_run
        correct_arrays = reference.get_saved_arrays(case, VIRTUAL, gate.variant)
        return replay(
            case, {name: tensor for name, tensor in correct_arrays.items() if name in saved_quantities}
        )

    return run


def find_wrong_elements(gate: Gate, case: Case, checker: Checker, run: TracedRun) -> list[WrongElements]:
    """Return the wrong quantities of a gate with their wrong elements, in the order of writing."""
    wrong_elements: list[WrongElements] = []
    quantities = (*gate.provided_quantities, *gate.quantities) if run.outputs else ()
    results = checker.reference.compare_all(case, VIRTUAL, gate.variant, run.outputs, quantities)
    for quantity in (quantity for quantity, result in results.items() if not result.ok):
        got, result = run.outputs[quantity], results[quantity]
        evidence = checker.reference.make_evidence(case, VIRTUAL, quantity, got, result)
        flat_indices = np.flatnonzero(evidence.wrong_mask)
        if not len(flat_indices):
            flat_indices = np.array([np.abs(evidence.got - evidence.truth).argmax()])
        index = tuple(int(i) for i in np.unravel_index(int(flat_indices[0]), evidence.got.shape))
        wrong_elements.append(
            WrongElements(
                quantity, index, float(evidence.got[index]), float(evidence.truth[index]),
                bool(evidence.unwritten_mask[index]), evidence.got.size, tuple(flat_indices.tolist()),
            )
        )  # fmt: skip
    return sorted(wrong_elements, key=lambda wrong: find_first_write(run.accesses, wrong))


def find_first_write(run: Accesses, wrong: WrongElements) -> int:
    """Return the step that first writes the first wrong element, or the number of steps if none does."""
    rows = np.flatnonzero(run.select_element(Element(wrong.quantity, wrong.first)) & (run.kind != "R"))
    return int(run.step[rows[0]]) if len(rows) else len(run.steps)


# ---- The cause ----------------------------------------------------------------------------------------------


def rank_causes(findings: list[Finding], result: GateResult, symptoms: bool = False) -> list[Finding]:
    """Return the gate's findings, the likeliest cause first; symptoms only if requested."""
    reported = {(finding.kind, finding.location) for finding in result.findings}
    kinds = list(CAUSES)
    gate_findings = [
        f for f in findings if (f.kind, f.location) in reported and (symptoms or f.kind not in SYMPTOM_KINDS)
    ]
    return sorted(gate_findings, key=lambda f: kinds.index(f.kind) if f.kind in kinds else len(kinds))


def add_explanation(picture: Picture) -> Picture:
    """Add the tensors' shapes and, for a wrong result, its cause."""
    run = picture.learner.accesses
    picture.shapes = {name: tensor.shape for name, tensor in run.tensors.items() if tensor.shape}
    infer_shapes(picture)
    if picture.is_correct:
        return picture
    causes = rank_causes(picture.learner.findings, picture.result, symptoms=not picture.wrong)
    picture.finding = next(iter(causes), None)
    if picture.wrong:
        first = picture.wrong[0]
        picture.root_cause = find_root_cause(
            run, picture.solution.accesses, Element(first.quantity, first.first)
        )
    return picture


def infer_shapes(picture: Picture) -> None:
    """Infer a workspace's shape from equally large outputs of a launch that reads it, if unique."""
    for launch in picture.learner.accesses.launches:
        tensors = launch.events.tensors
        written = {step.tensor for step in launch.events.steps if step.kind in "WA"} - {""}
        for name in {step.tensor for step in launch.events.steps if step.kind == "R"}:
            shapes = {tensors[w].shape for w in written if tensors[w].size == tensors[name].size}
            if not tensors[name].shape and len(shapes) == 1 and shapes != {()}:
                picture.shapes.setdefault(name, shapes.pop())
