"""Parse and validate the command line of a puzzle, without torch or MAX."""

import argparse
import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.console import Parser
from harness.devices.targets import DEVICE_KINDS, MAX_VIRTUAL_MULTIPLY_ADDS
from harness.errors import UsageError
from harness.invocation import format_command
from harness.learner.exercise import Exercise, validate_gate
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.puzzle import Case, Demo, Gate, Puzzle
from harness.spec.rungs import get_rung_name
from harness.toolchain import roots

EXIT_CODES = """\
exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks, nothing attempted is wrong; 4 the Mojo
package does not compile or lacks an op; 5 the environment; 6 nothing wrong, but GPU kernels ran nowhere;
130 interrupted"""
COMMANDS = (
    "init", "list", "hint", "watch", "diff", "reset", "verify", "update", "doctor", "build-ext", "dev"
)  # fmt: skip
MAX_RANKS = 16
"""More processes than this exceed a machine's cores and take minutes to start."""
MAX_SIZE = 2**31 - 1
"""The largest size or number of rows, since kernels use Int32."""
BYTES_PER_ELEMENT = 8
"""Minimum bytes per element of a run: the reference is computed in float64."""
KERNEL_OPTIONS = ("dtype", "blocks", "repeat")
"""Options for kernels, not for Python files."""


@dataclass(frozen=True)
class Options:
    """The flags of a puzzle's command line; flags that the puzzle lacks have their defaults.

    Attributes:
        root: "problems", "solutions" or the path of an op package.
        variants: Variants to run; empty for the default ones.
        rung, gate: The file or gate to check; None for the puzzle's default.
        dims, ranks, seed: Sizes and processes, None for those of the puzzle's cases; seed of the inputs.
        show: Draw the run of this gate; "" for the current one, None for no picture.
        demo: The demonstration to run instead of a check.
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
    def exercise(self) -> Exercise:
        """The file of the selected rung: the learner's, the solution's, or the one in another op package."""
        puzzle = self.puzzle
        rung = puzzle.find_rung(self.rung) if self.rung else puzzle.find_gate_rung(self.gate or "")
        if self.root not in ("problems", "solutions"):
            return Exercise(puzzle, rung, ops=Path(self.root))
        return Exercise(puzzle, rung, roots.get_solutions() if self.root == "solutions" else None)

    @property
    def file_options(self) -> "Sequence[Options]":
        """The options for each file to check: one, or all rungs of an `every_rung` puzzle."""
        puzzle = self.puzzle
        if not puzzle.every_rung or self.rung or self.gate is not None or self.dims:
            return [self]
        if puzzle.variants and (self.json or self.root not in ("problems", "solutions")):
            return [self]
        default_options = {name: getattr(Options, name) for name in KERNEL_OPTIONS}
        python_options = [
            replace(self, rung=rung.id, **default_options)
            for rung in puzzle.rungs
            if rung.language == "Python"
        ]
        return [*python_options, self] if puzzle.variants else python_options

    @property
    def is_gate_check(self) -> bool:
        """True if results are per gate: for a Python file, or for one kernel gate on the virtual GPU."""
        if not self.exercise.is_mojo:
            return True
        if self.gate is None or self.dtype == "float64":
            return False
        small = self.dims is None or self.puzzle.count_multiply_adds(self.dims) <= MAX_VIRTUAL_MULTIPLY_ADDS
        return self.device == "virtual" or (self.device == "auto" and small)

    @property
    def checker_options(self) -> dict[str, object]:
        """The keyword arguments of a file's checker: the seed, and kernel options other than the defaults."""
        kernels = {name: getattr(self, name) for name in KERNEL_OPTIONS}
        non_default = {name: value for name, value in kernels.items() if value != getattr(Options, name)}
        return {"seed": self.seed, **non_default}

    @property
    def cases(self) -> list[Case] | None:
        """The cases for --dims and --ranks; None (the puzzle's cases) without either."""
        if not self.dims and not self.ranks:
            return None
        ranks, cases = self.ranks, self.puzzle.list_cases(self.dims)
        return [replace(case, world_size=ranks) if ranks and case.world_size > 1 else case for case in cases]

    @property
    def quantities(self) -> list[str]:
        """The quantities that a run of the kernels compares."""
        puzzle = self.puzzle
        if self.gate:
            return list(next(gate.quantities for gate in puzzle.gates if gate.id == self.gate))
        forward = list(puzzle.forward)
        return [*forward, *puzzle.backward, *puzzle.intermediate] if self.backward else forward

    @property
    def gates(self) -> list[Gate]:
        """The kernel gates that a run checks."""
        quantities = {*self.quantities}
        gates = [gate for gate in self.puzzle.kernel_gates if gate.variant in self.variants]
        return [g for g in gates if quantities & {*g.quantities} and self.gate in (None, g.id)]


# ---- The flags -----------------------------------------------------------------------------------------------


DEFAULTS = {field.name: field.default for field in fields(Options) if field.name != "puzzle"}
ExclusiveGroup = argparse._MutuallyExclusiveGroup  # pyright: ignore[reportPrivateUsage] (it has no public name)
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse(arguments: list[str]) -> Options:
    """Parse a command line. Raises UsageError, with the flag, if one is invalid or conflicts with another."""
    puzzle, flags = parse_flags(arguments)
    check_values(puzzle, flags)
    return make_options(puzzle, flags)


def parse_flags(arguments: list[str]) -> tuple[Puzzle, argparse.Namespace]:
    """Return the puzzle and the flags. Raises UsageError, with the problem and the arguments."""
    puzzle = find_named_puzzle(arguments)
    parser = make_parser(puzzle)
    try:
        return puzzle, parser.parse_args(arguments)
    except UsageError as error:
        known_flags = list_flags(parser)
        unknown = re.sub(r"=.*", "", str(error).partition("unrecognized arguments: ")[2].split(" ")[0])
        matches = difflib.get_close_matches(f"--{unknown.lstrip('-')}", known_flags, 1)
        suggestion = f"did you mean {matches[0]}?" if matches else "--help lists the flags"
        raise UsageError(f"{error}; got: {' '.join(arguments)} ({suggestion})") from None


def list_flags(parser: Parser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def find_named_puzzle(arguments: list[str]) -> Puzzle:
    """Return the puzzle named on a command line; without one, only --help is accepted."""
    names = list_puzzle_names()
    name = next((argument for argument in arguments if argument in names), None)
    if name is None:
        positional = [argument for argument in arguments if not argument.startswith("-")]
        if {"-h", "--help"} & {*arguments}:
            make_general_parser().parse_args(["--help"])
        matches = difflib.get_close_matches(positional[0], [*COMMANDS, "vgpu"], 1) if positional else []
        if matches:
            raise UsageError(f"unknown command {positional[0]!r}: did you mean {matches[0]}?")
        if positional:
            find_puzzle(positional[0])
        raise UsageError(f"no puzzle is named, there is {', '.join(names)}; got: {' '.join(arguments)}")
    return find_puzzle(name)


def make_general_parser() -> Parser:
    parser = Parser(
        prog=format_command("").rstrip(),
        description="Run a puzzle's kernels and compare every output and gradient with PyTorch autograd.",
        epilog=f"`{format_command('pNN --help')}` lists a puzzle's flags; sub-commands, each with its own --help: "
        f"{', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("puzzle", help=f"which puzzle: {', '.join(list_puzzle_names())}")
    return parser


def make_parser(puzzle: Puzzle) -> Parser:
    parser = Parser(
        prog=puzzle.name,
        description=f"{puzzle.title}. Checks every output and gradient against PyTorch autograd.",
        epilog=f"sub-commands, each with its own --help: {', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    # Flags that the puzzle does not use are unknown to the parser, and have their defaults.
    parser.set_defaults(**{**DEFAULTS, "backward": False, "ops": None})
    parser.add_argument("puzzle", help=puzzle.name)
    modes = parser.add_mutually_exclusive_group()
    for demo in puzzle.demos:
        modes.add_argument(f"--{demo.flag}", action="store_true", help=demo.description)
    if puzzle.bench:
        help_text = "time the kernels against PyTorch and others; add --help to list its own flags"
        modes.add_argument("--bench", action="store_true", help=help_text)
    default = "all" if puzzle.every_rung else puzzle.main_rung.id
    help_text = f"which of the puzzle's files to check (default: {default})"
    modes.add_argument("--rung", choices=[rung.id for rung in puzzle.rungs], help=help_text)
    sources = parser.add_mutually_exclusive_group()
    help_text = "run the files in solutions/ instead of yours in problems/"
    sources.add_argument("--solution", action="store_true", help=help_text)
    if puzzle.variants:
        add_kernel_flags(parser, modes, sources, puzzle)
    if names := puzzle.dim_names:
        help_text = "sizes (default: the chapter's and harder ones)"
        metavar = names[0] if len(names) == 1 else names
        parser.add_argument("--dims", type=int, nargs=len(names), metavar=metavar, help=help_text)
    if any(case.world_size > 1 for case in puzzle.list_cases(None)):
        help_text = "processes of each case that is run by several"
        parser.add_argument("--ranks", type=int, metavar="N", help=help_text)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the random inputs")
    help_text = f"check one gate only: {join_names([gate.id for gate in puzzle.gates])}"
    parser.add_argument("--gate", metavar="ID", help=help_text)
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    return parser


def add_kernel_flags(root: Parser, modes: ExclusiveGroup, sources: ExclusiveGroup, puzzle: Puzzle) -> None:
    if puzzle.backward:
        count = len(puzzle.backward)
        gradients = "the gradient" if count == 1 else f"all {count} gradients"
        help_text = f"check {gradients} too, not only the forward pass"
        root.add_argument("--backward", action="store_true", help=help_text)
    variants = root.add_argument_group(f"variants (default: {join_names(puzzle.default_variants, 'and')})")
    for name in puzzle.variants:
        help_text = puzzle.variant_help.get(name, f"only the {name} kernels")
        variants.add_argument(f"--{name}", action="store_true", help=help_text)
    modes.add_argument("--profile", action="store_true", help="count what the kernels do on the virtual GPU")
    help_text = (
        "say where the first wrong element comes from, and write a page that steps through your kernel's run"
    )
    modes.add_argument("--show", nargs="?", const="", metavar="GATE", help=help_text)
    sources.add_argument("--ops", type=Path, metavar="DIR", help="run the op package in DIR")
    kinds = [kind for kind in DEVICE_KINDS if puzzle.cpu_variants or kind != "cpu"]
    help_text = f"auto: {'the CPU path, and ' if puzzle.cpu_variants else ''}a GPU if MAX finds one, else the virtual GPU; "
    help_text += "with --gate, the virtual GPU"
    root.add_argument("--device", choices=kinds, default="auto", help=help_text)
    dtypes = [dtype for dtype in DTYPES if puzzle.cpu_variants or dtype != "float64"]
    root.add_argument("--dtype", choices=dtypes, default="float32")
    help_text = (
        f"run the {'backward' if puzzle.backward else 'forward'} N times and compare the results bit by bit"
    )
    root.add_argument("--repeat", type=int, default=1, metavar="N", help=help_text)
    help_text = "block order of the virtual GPU: natural, reversed, shuffled or shuffled:SEED"
    root.add_argument("--blocks", default="natural", metavar="ORDER", help=help_text)
    root.add_argument("--html", type=Path, metavar="FILE", help="the file for the page that --show writes")
    help_text = "print the compiler's whole output; with --profile, count by tensor and by line"
    root.add_argument("--verbose", action="store_true", help=help_text)


def join_names(names: Iterable[str], conjunction: str = "or") -> str:
    """Join names as in a sentence: "ln, dW or dx"."""
    *initial, end = names
    return f"{', '.join(initial)} {conjunction} {end}" if initial else end


def check_values(puzzle: Puzzle, flags: argparse.Namespace) -> None:
    """Raise UsageError, naming the flag, for a value that is invalid in any run."""
    try:
        validate_gate(puzzle, flags.rung, flags.gate)
    except UsageError as error:
        raise UsageError(f"--gate {flags.gate or repr('')}: {error}") from None
    if flags.dims:
        check_dims(puzzle, tuple(flags.dims))
    if flags.ranks is not None and not 2 <= flags.ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {flags.ranks}: must be 2 to {MAX_RANKS}")
    if flags.repeat < 1:
        raise UsageError(f"--repeat {flags.repeat}: must be at least 1")
    if not 0 <= flags.seed < 2**64:
        requirement = "not be negative" if flags.seed < 0 else "fit into 64 bits"
        raise UsageError(f"--seed {flags.seed}: must {requirement}")
    if not re.fullmatch(r"natural|reversed|shuffled(:\d+)?", flags.blocks):
        raise UsageError(f"--blocks {flags.blocks}: expected natural, reversed, shuffled or shuffled:SEED")


def make_options(puzzle: Puzzle, flags: argparse.Namespace) -> Options:
    """Return the flags as options. Raises UsageError if they conflict."""
    gates, gate = {gate.id: gate for gate in puzzle.kernel_gates}, flags.gate
    rung = puzzle.find_rung(flags.rung) if flags.rung else puzzle.find_gate_rung(gate or "")
    is_mojo = rung.language == "Mojo"
    if flags.ops and not is_mojo:
        raise UsageError(f"--ops {flags.ops}: an op package has no file of the {get_rung_name(rung.id)} rung")
    for name in () if is_mojo else KERNEL_OPTIONS:
        if getattr(flags, name) != DEFAULTS[name]:
            raise UsageError(
                f"--{name}: only for kernels, and the {get_rung_name(rung.id)} rung is a Python file"
            )
    selected = tuple(name for name in puzzle.variants if getattr(flags, name))
    gradients = False
    if gate in gates and is_mojo:
        variant = gates[gate].variant
        if selected and variant not in selected:
            raise UsageError(
                f"--gate {gate}: a gate of the {variant} kernels; leave out --{' --'.join(selected)}"
            )
        selected, gradients = (variant,), not set(gates[gate].quantities) <= set(puzzle.forward)
    # A variant without a forward pass is checked by its gradients, requested or not.
    gradients = gradients or not any(
        puzzle.list_outputs(name) & {*puzzle.forward} for name in selected or puzzle.variants
    )
    if is_mojo and flags.show is not None and flags.device not in ("auto", "virtual", "all"):
        raise UsageError(f"--show: pictures are made on the virtual GPU, not with --device {flags.device}")
    arguments: dict[str, Any] = {name: value for name, value in vars(flags).items() if name in DEFAULTS}
    arguments |= {
        "demo": next((demo for demo in puzzle.demos if getattr(flags, demo.dest)), None),
        "root": str(flags.ops) if flags.ops else "solutions" if flags.solution else "problems",
        "backward": flags.backward or gradients or not puzzle.forward,
        "variants": selected,
        "dims": tuple(flags.dims) if flags.dims else None,
    }
    return Options(puzzle, **arguments)


def check_dims(puzzle: Puzzle, dims: tuple[int, ...]) -> None:
    """Raise UsageError for sizes that overflow the kernels' Int32 or exceed this machine's memory."""
    flag = f"--dims {' '.join(map(str, dims))}"
    if min(dims) < 1:
        raise UsageError(f"{flag}: every size must be at least 1")
    shapes = puzzle.compute_shapes(dims).values()
    sizes_and_rows = [count for shape in shapes for count in (*shape, math.prod(shape[:-1]))]
    largest = max((*dims, *sizes_and_rows))
    if largest > MAX_SIZE:
        raise UsageError(f"{flag}: kernels count sizes and rows up to {MAX_SIZE:,}, not {largest:,}")
    required_bytes = BYTES_PER_ELEMENT * sum(math.prod(shape) for shape in shapes)
    if required_bytes > get_memory_bytes():
        raise UsageError(
            f"{flag}: needs more than {required_bytes / 2**30:,.0f} GiB, and this machine has {get_memory_bytes() / 2**30:,.0f} GiB"
        )


def get_memory_bytes() -> int:
    """Return this machine's memory in bytes, or 2**63 if it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**63
