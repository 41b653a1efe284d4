"""What is asked of a command on one puzzle, as one value, and the op package that it is asked of. Loads neither torch nor MAX."""

from dataclasses import dataclass
from pathlib import Path

from harness.devices.targets import VIRTUAL_LIMIT
from harness.errors import CompileFailed
from harness.learner.work import Work
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage


@dataclass(frozen=True)
class Options:
    """The flags of a puzzle's command line; a flag that the puzzle does not have keeps its default.

    Attributes:
        puzzle: Which.
        root: "problems", "solutions" or the path of an op package.
        backward: Whether a run of the kernels compares the gradients too.
        variants: Whose kernels; without any, those that a run takes which names none.
        rung, gate: Which file or gate alone; None for what the puzzle is about.
        device, dtype: Where the kernels run, and in what.
        dims, ranks, seed: Sizes, processes and the seed of the inputs; None for the puzzle's cases.
        repeat: How often a case runs again.
        blocks: The block order of the virtual GPU.
        profile: Count what the kernels do, and judge nothing.
        show: Draw the run of this gate; "" for the one at hand, None for no picture.
        html, json: Where the page and the data go.
        verbose: Print all that is known.
    """

    puzzle: Puzzle
    root: str = "problems"
    backward: bool = True
    variants: tuple[str, ...] = ()
    rung: str | None = None
    gate: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    dims: tuple[int, ...] | None = None
    ranks: int | None = None
    seed: int = 0
    repeat: int = 1
    blocks: str = "natural"
    profile: bool = False
    show: str | None = None
    html: Path | None = None
    json: str | None = None
    verbose: bool = False

    def __post_init__(self):
        if not self.variants:
            object.__setattr__(self, "variants", self.puzzle.default_variants)

    @property
    def work(self) -> Work:
        """The file of the rung that is meant, the learner's or the solution's."""
        puzzle = self.puzzle
        rung = puzzle.rung(self.rung) if self.rung else puzzle.rung_of(self.gate or "")
        return Work(puzzle, rung, roots.solutions() if self.root == "solutions" else None)

    @property
    def one_gate(self) -> bool:
        """Whether one gate of the kernels is asked for, and where recorded launches can answer: on the virtual GPU."""
        if self.gate is None or not self.puzzle.gpu or self.dtype == "float64":
            return False
        small = self.dims is None or self.puzzle.multiply_adds(self.dims) <= VIRTUAL_LIMIT
        return self.device == "virtual" or (self.device == "auto" and small)


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
