"""What is asked of a command on one puzzle, as one value, and the op package that it is asked of. Loads neither torch nor MAX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.devices.targets import VIRTUAL_LIMIT
from harness.learner.work import Work
from harness.spec.puzzle import Case, Demo, Gate, Puzzle
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

OF_KERNELS = ("dtype", "blocks", "repeat")
"""The options that files in Python do not have."""
NARROW = "bfloat16"
"""In what a few cases of a gate of kernels that is right are judged too."""


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
        demo: The demonstration to run instead of a check.
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
    demo: Demo | None = None
    verbose: bool = False

    def __post_init__(self):
        if not self.variants:
            object.__setattr__(self, "variants", self.puzzle.default_variants)

    @property
    def work(self) -> Work:
        """The file of the rung that is meant: the learner's, the solution's, or that of an op package elsewhere."""
        puzzle = self.puzzle
        rung = puzzle.rung(self.rung) if self.rung else puzzle.rung_of(self.gate or "")
        if self.root not in ("problems", "solutions"):
            return Work(puzzle, rung, ops=Path(self.root))
        return Work(puzzle, rung, roots.solutions() if self.root == "solutions" else None)

    @property
    def files(self) -> "Sequence[Options]":
        """The same for each file that is asked about: for one, or for each in turn where the puzzle is all of its rungs."""
        puzzle = self.puzzle
        if not puzzle.every_rung or self.rung or self.gate is not None or self.dims:
            return [self]
        if puzzle.variants and (self.json or self.root not in ("problems", "solutions")):
            return [self]
        plain = {name: getattr(Options, name) for name in OF_KERNELS}
        python = [replace(self, rung=rung.id, **plain) for rung in puzzle.rungs if rung.language == "Python"]
        return [*python, self] if puzzle.variants else python

    @property
    def by_gate(self) -> bool:
        """Whether the answer is a verdict on each gate: of a file in Python, and of the kernels where one gate is asked for and
        recorded launches can answer, on the virtual GPU."""
        if not self.work.in_package:
            return True
        if self.gate is None or not self.puzzle.gpu or self.dtype == "float64":
            return False
        small = self.dims is None or self.puzzle.multiply_adds(self.dims) <= VIRTUAL_LIMIT
        return self.device == "virtual" or (self.device == "auto" and small)

    @property
    def of_checker(self) -> dict[str, object]:
        """The keywords of the checker of a file: the seed, and of the options of kernels those that are given."""
        kernels = {name: getattr(self, name) for name in OF_KERNELS}
        asked = {name: value for name, value in kernels.items() if value != getattr(Options, name)}
        return {"seed": self.seed, **asked}

    @property
    def cases(self) -> list[Case] | None:
        """The cases of --dims and --ranks; None, for the puzzle's own, without either."""
        if not self.dims and not self.ranks:
            return None
        ranks, cases = self.ranks, self.puzzle.cases(self.dims)
        return [replace(case, world_size=ranks) if ranks and case.world_size > 1 else case for case in cases]

    @property
    def quantities(self) -> list[str]:
        """What a run of the kernels compares: the forward outputs, and with --backward the gradients and what leads to them."""
        puzzle = self.puzzle
        if self.gate:
            return list(next(gate.quantities for gate in puzzle.gates if gate.id == self.gate))
        forward = list(puzzle.forward)
        return [*forward, *puzzle.backward, *puzzle.intermediate] if self.backward else forward

    @property
    def gates(self) -> list[Gate]:
        """The gates of the kernels that a run is about."""
        asked = {*self.quantities}
        return [
            gate
            for gate in self.puzzle.kernel_gates
            if gate.variant in self.variants and asked & {*gate.quantities} and self.gate in (None, gate.id)
        ]


def locate(options: Options) -> OpPackage:
    """The op package of a run; a learner's file has all of its blanks, or says in a line what happened to it."""
    options.work.blanks()
    return options.work.package
