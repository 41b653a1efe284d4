"""Trace a learner's run: every access of every thread, the first wrong element, and the thread that caused
it.

The learner's kernels and the solution's run one case on the virtual GPU, with all accesses recorded. Results
and findings are the gate's own; the trace adds their place in the run. Screens and the book draw it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.check.accesses import Accesses, Line, Place, Source, Thread
from harness.check.blame import Fault, blame
from harness.check.checker import Checker
from harness.check.diagnose import FOUND
from harness.check.execution import STEPS
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.console import shown
from harness.devices.recorder import record
from harness.devices.replay import Replay
from harness.devices.targets import VIRTUAL
from harness.errors import BadUse, Unsolved
from harness.learner.work import package_blanks
from harness.spec.puzzle import Arrays, Case, Dims, Gate, Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage
from harness.vgpu import Finding, VirtualGPUError
from harness.vgpu.checks.findings import by_cause

LARGEST = 4096
"""Elements of a tensor that a picture can still show one by one."""
EVENTS = 1 << 21
"""Accesses of a launch that are recorded."""
SYMPTOMS = ("uninitialised read", "output never written")
"""Findings that often follow from a wrong or missing write."""


@dataclass(frozen=True)
class Wrong:
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
    def element(self) -> int:
        """The flat number of the first."""
        return self.elements[0]


@dataclass
class Side:
    """One of the two runs: its accesses, its outputs, its findings, and why it stopped, if it did."""

    accesses: Accesses
    outputs: Arrays = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failure: str = ""


@dataclass
class Picture:
    """The data of a picture.

    Attributes:
        puzzle, gate, case: Subject of the picture; `result` is the gate's result in all cases.
        mine, theirs: The learner's run and the solution's.
        wrong: The first wrong element of each wrong quantity of the gate, in their order.
        fault: The fault found from the first of them by comparing the runs, or None.
        finding: The finding that is the cause, or None.
        shapes: The shape of every tensor that has one, by name.
    """

    puzzle: Puzzle
    gate: Gate
    case: Case
    result: GateResult
    mine: Side
    theirs: Side
    wrong: list[Wrong] = field(default_factory=list)
    fault: Fault | None = None
    finding: Finding | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Check whether the gate has passed."""
        return self.result.state == "correct"

    @property
    def thread(self) -> Thread | None:
        """The thread that the picture follows: the finding's, else the fault's, else the first that writes the gate's."""
        if self.finding and self.finding.thread is not None:
            launch = self.launch_of(self.finding)
            if launch is not None:
                trace = self.mine.accesses.launches[launch]
                block = self.finding.block or (0, 0, 0)
                return Thread(launch, number(block, trace.grid), number(self.finding.thread, trace.block))
        if self.fault:
            return self.fault.who
        run = self.mine.accesses
        for quantity in self.gate.quantities:
            rows = np.flatnonzero(run.at(Place(quantity, 0)) & (run.kind != "R"))
            if len(rows):
                return run.access(int(rows[-1])).who
        return None

    @property
    def line(self) -> Line | None:
        """The line at fault."""
        if self.finding:
            return self.mine.accesses.source.line(self.finding.instr)
        return self.fault.line if self.fault else None

    def launch_of(self, finding: Finding) -> int | None:
        """Return the number of a finding's launch."""
        for number_, launch in enumerate(self.mine.accesses.launches):
            if any(other.where == finding.where and other.kind == finding.kind for other in launch.findings):
                return number_
        return None

    def index(self, name: str, element: int) -> tuple[int, ...]:
        """Return the index of a flat element number; the number itself if the shape is unknown or it is out
        of bounds."""
        shape = self.shapes.get(name, ())
        if len(shape) < 2 or not 0 <= element < math.prod(shape):
            return (element,)
        return tuple(int(i) for i in np.unravel_index(element, shape))


def number(index: tuple[int, int, int], sizes: tuple[int, int, int]) -> int:
    """Return (x, y, z) as a number, x first."""
    return index[0] + sizes[0] * (index[1] + sizes[1] * index[2])


# ---- Making one ---------------------------------------------------------------------------------------------


def take(
    puzzle: Puzzle,
    package: OpPackage,
    gate: Gate,
    *,
    cases: list[Case] | None = None,
    result: GateResult | None = None,
    checker: Checker | None = None,
) -> Picture:
    """Check a gate, choose the most informative case, and run it twice.

    Args:
        puzzle, package, gate: The gate to draw.
        cases: None for the puzzle's.
        result: The gate's result, if known.
        checker: A warm checker of these kernels, or None.

    Raises Unsolved for an untouched blank, CompileFailed if the package does not compile, BadUse for sizes
    too large for a picture.
    """
    cases = cases or puzzle.cases(None)
    small = [case for case in cases if largest_tensor(puzzle, case) <= LARGEST]
    if not small:
        case = min(cases, key=lambda case: largest_tensor(puzzle, case))
        raise BadUse(
            f"--show {gate.id}: too large for a picture: a tensor of '{case.name}' has "
            f"{largest_tensor(puzzle, case):,} elements, {LARGEST:,} can be drawn; --dims takes smaller sizes"
        )
    source = package.path / puzzle.source
    by_gate = package_blanks(package, puzzle)
    if gate.id in by_gate and by_gate[gate.id].size == 0:
        raise Unsolved(
            f"--show {gate.id}: nothing to show yet: the blank at {shown(source)}:{by_gate[gate.id].line} is untouched"
        )
    checker = checker or Checker(puzzle)
    result = result or checker.check(package.path, [gate.id], cases)[0]
    dims = list(dict.fromkeys(case.dims for case in cases))
    run = runner(package, gate, dims, checker)
    left = preferred_cases(puzzle, small, result, checker.reference)
    while True:
        case = left.pop(0)
        mine = run(case)
        wrong = wrong_elements(gate, case, checker, mine)
        shows = wrong or mine.failure or causes(mine.findings, result, symptoms=True)
        if not left or result.state == "correct" or shows:
            break
    theirs = runner(roots.op_package(roots.solutions(), puzzle.name), gate, dims, checker)(case)
    return explain(Picture(puzzle, gate, case, result, mine, theirs, wrong))


def largest_tensor(puzzle: Puzzle, case: Case) -> int:
    """Return the elements of the largest tensor of a case, inputs and outputs."""
    sizes = [math.prod(shape) for shape in puzzle.shapes(case.dims).values()]
    if max(sizes, default=0) <= LARGEST:
        sizes += [array.size for array in puzzle.inputs(case, "float32", 0).values()]
    return max(sizes, default=0)


def preferred_cases(
    puzzle: Puzzle, cases: list[Case], result: GateResult, reference: Reference
) -> list[Case]:
    """Return the cases in the order in which they show most: wrong ones, the chapter's sizes, finite and
    varied values."""
    wrong = {c.case.name for c in result.comparisons if not all(v.ok for v in c.verdicts.values())}

    def rank(case: Case) -> tuple[bool, bool, bool, int, int]:
        arrays = list(reference.arrays(case).values())
        finite = all(np.isfinite(array).all() for array in arrays)
        size = sum(array.size for array in arrays)
        varied = sum(len(np.unique(array)) for array in arrays)
        return case.name not in wrong, not finite, case.dims != puzzle.dims, size, -varied

    return sorted(cases, key=rank)


def runner(package: OpPackage, gate: Gate, dims: list[Dims], checker: Checker) -> Callable[[Case], Side]:
    """Return a function that replays a package's recorded launches in a case, from correct statistics if
    another gate's are wrong."""
    puzzle, reference = checker.puzzle, checker.reference
    source = Source((package.path / puzzle.source).resolve(), package_blanks(package, puzzle))
    recording = record(package, puzzle.name, checker.dtype, dims, [gate.variant], small_grid=True)
    own = (*gate.quantities, *gate.given)
    saved = [quantity for quantity in puzzle.saved_quantities(gate.variant) if quantity not in own]

    def replay(case: Case, corrected: Arrays) -> Side:
        replay = Replay(recording, puzzle, checker.dtype, blocks=checker.blocks)
        replay.gpu.keep_events = EVENTS
        replay.gpu.steps = STEPS + puzzle.multiply_adds(case.dims)
        outputs: Arrays = {}
        failure = ""
        try:
            outputs = replay.run(gate.variant, case, reference.inputs(case), corrected)
        except VirtualGPUError as error:
            failure = str(error)
        findings = [finding for finding in by_cause(replay.gpu.findings) if finding.is_error]
        return Side(Accesses(replay.gpu.launches, source), outputs, findings, failure)

    def run(case: Case) -> Side:
        side = replay(case, {})
        checked = (
            {} if side.failure else reference.compare_all(case, VIRTUAL, gate.variant, side.outputs, saved)
        )
        if all(result.ok for result in checked.values()):
            return side
        right = reference.saved_arrays(case, VIRTUAL, gate.variant)
        return replay(case, {name: tensor for name, tensor in right.items() if name in saved})

    return run


def wrong_elements(gate: Gate, case: Case, checker: Checker, side: Side) -> list[Wrong]:
    """Return the wrong quantities of a gate, each with its wrong elements, in the order in which they are
    written."""
    out: list[Wrong] = []
    requested = (*gate.given, *gate.quantities) if side.outputs else ()
    checked = checker.reference.compare_all(case, VIRTUAL, gate.variant, side.outputs, requested)
    for quantity in (quantity for quantity, result in checked.items() if not result.ok):
        compared = checker.reference.evidence(
            case, VIRTUAL, quantity, side.outputs[quantity], checked[quantity]
        )
        flat = np.flatnonzero(compared.wrong)
        if not len(flat):
            flat = np.array([np.abs(compared.got - compared.truth).argmax()])
        index = tuple(int(i) for i in np.unravel_index(int(flat[0]), compared.got.shape))
        out.append(
            Wrong(
                quantity, index, float(compared.got[index]), float(compared.truth[index]),
                bool(compared.unwritten[index]), compared.got.size, tuple(flat.tolist()),
            )
        )  # fmt: skip
    return sorted(out, key=lambda wrong: first_write(side.accesses, wrong))


def first_write(run: Accesses, wrong: Wrong) -> int:
    """Return the step that first writes the first wrong element; a number past the end if there is none."""
    rows = np.flatnonzero(run.at(Place(wrong.quantity, wrong.element)) & (run.kind != "R"))
    return int(run.step[rows[0]]) if len(rows) else len(run.steps)


# ---- The cause ----------------------------------------------------------------------------------------------


def causes(findings: list[Finding], result: GateResult, symptoms: bool = False) -> list[Finding]:
    """Return the findings of a run that belong to the gate, the likeliest cause first; symptoms only if
    requested."""
    own = {(finding.kind, finding.where) for finding in result.findings}
    kinds = list(FOUND)
    mine = [f for f in findings if (f.kind, f.where) in own and (symptoms or f.kind not in SYMPTOMS)]
    return sorted(mine, key=lambda f: kinds.index(f.kind) if f.kind in kinds else len(kinds))


def explain(picture: Picture) -> Picture:
    """Add the cause, and the shapes of tensors without one."""
    run = picture.mine.accesses
    picture.shapes = {name: tensor.shape for name, tensor in run.tensors.items() if tensor.shape}
    lend_shapes(picture)
    if picture.right:
        return picture
    known = causes(picture.mine.findings, picture.result, symptoms=not picture.wrong)
    picture.finding = next(iter(known), None)
    if picture.wrong:
        first = picture.wrong[0]
        picture.fault = blame(run, picture.theirs.accesses, Place(first.quantity, first.element))
    return picture


def lend_shapes(picture: Picture) -> None:
    """Give workspace memory the shape of the outputs of its size that are written from it, if they have one."""
    for launch in picture.mine.accesses.launches:
        tensors = launch.events.tensors
        written = {step.tensor for step in launch.events.steps if step.kind in "WA"} - {""}
        for name in {step.tensor for step in launch.events.steps if step.kind == "R"}:
            same = {tensors[w].shape for w in written if tensors[w].size == tensors[name].size}
            if not tensors[name].shape and len(same) == 1 and same != {()}:
                picture.shapes.setdefault(name, same.pop())
