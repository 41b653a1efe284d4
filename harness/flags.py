"""The flags of a puzzle's command line: which exist, which go together, and the `Options` that they make.

The flags are those that a puzzle has a use for; another puzzle's are unknown. No other module sees a flag.
"""

import argparse
import difflib
import re
from dataclasses import fields
from pathlib import Path

from harness.check.limits import check_dims
from harness.check.options import OF_KERNELS, Options
from harness.check.warm import FLAG
from harness.console import Parser
from harness.errors import BadUse
from harness.invocation import command
from harness.learner.work import check_gate
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.puzzle import Puzzle
from harness.spec.rungs import name_of

EXIT_CODES = """\
exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks, nothing attempted is wrong; 4 the Mojo
package does not compile or lacks an op; 5 the environment; 6 nothing wrong, but GPU kernels ran nowhere;
130 interrupted"""
COMMANDS = (
    "init", "list", "hint", "watch", "diff", "score", "reset", "verify", "update", "doctor", "build-ext", "dev"
)  # fmt: skip
MOST_RANKS = 16
"""More processes than that are more than a machine's cores, and start for minutes."""
FIELDS = {field.name: field.default for field in fields(Options) if field.name != "puzzle"}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse(arguments: list[str]) -> Options:
    """What a command line asks for. Raises BadUse, naming the flag that makes no sense or does not go with another."""
    puzzle, flags = read(arguments)
    check_values(puzzle, flags)
    return options_of(puzzle, flags)


def read(arguments: list[str]) -> tuple[Puzzle, argparse.Namespace]:
    """The puzzle and the flags of a command line. Raises BadUse, with what is wrong and what was typed."""
    puzzle = named_puzzle(arguments)
    own_parser = parser(puzzle)
    try:
        flags = own_parser.parse_intermixed_args(arguments)
        word = flags.gate_word
        if word is not None and flags.gate is not None:
            raise BadUse(f"{word} and --gate {flags.gate}: one gate at a time")
        if f"--{word}" in flags_of(own_parser) and word not in [gate.id for gate in puzzle.gates]:
            raise BadUse(f"{word}: a flag begins with two dashes: --{word}")
        flags.gate = word if flags.gate is None else flags.gate
        return puzzle, flags
    except BadUse as error:
        there = flags_of(own_parser)
        unknown = next(
            (word for word in arguments if word[:2] == "--" and word.split("=")[0] not in there), ""
        )
        near = difflib.get_close_matches(unknown.split("=")[0], there, 1)
        words = f"did you mean {near[0]}?" if near else "--help lists the flags"
        raise BadUse(f"{error}; got: {' '.join(arguments)} ({words})") from None


def flags_of(parser: Parser) -> list[str]:
    """The flags that a parser knows, each as it is typed."""
    return [flag for action in parser._actions for flag in action.option_strings]


def named_puzzle(arguments: list[str]) -> Puzzle:
    """The puzzle that a command line names; without one, --help is answered and anything else is refused."""
    names = puzzle_names()
    name = next((argument for argument in arguments if argument in names), None)
    if name is None:
        words = [argument for argument in arguments if not argument.startswith("-")]
        if {"-h", "--help"} & {*arguments}:
            general_parser().parse_args(["--help"])
        if words:
            find_puzzle(words[0])
        raise BadUse(f"no puzzle is named, there is {', '.join(names)}; got: {' '.join(arguments)}")
    return find_puzzle(name)


def general_parser() -> Parser:
    """What `--help` shows where no puzzle is named."""
    parser = Parser(
        prog=command("").rstrip(),
        description="Run a puzzle's kernels and compare every output and gradient with PyTorch autograd.",
        epilog=f"`{command('pNN --help')}` lists a puzzle's flags; sub-commands, each with its own --help: "
        f"{', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("puzzle", help=f"which puzzle: {', '.join(puzzle_names())}")
    return parser


def parser(puzzle: Puzzle) -> Parser:
    """The flags of one puzzle."""
    root = Parser(
        prog=puzzle.name,
        description=f"{puzzle.title}. Checks every output and gradient against PyTorch autograd.",
        epilog=f"sub-commands, each with its own --help: {', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    # A flag that the puzzle has no use for is unknown, and keeps its default.
    root.set_defaults(**{**FIELDS, "backward": False, "ops": None})
    root.add_argument("puzzle", help=puzzle.name)
    root.add_argument("gate_word", nargs="?", metavar="gate", help="the same as --gate")
    modes = root.add_mutually_exclusive_group()
    for demo in puzzle.demos:
        modes.add_argument(f"--{demo.flag}", action="store_true", help=demo.about)
    if puzzle.bench:
        modes.add_argument(
            "--bench",
            action="store_true",
            help="time it beside PyTorch and others; with --help: its own flags",
        )
    add_rungs(modes, puzzle)
    roots = root.add_mutually_exclusive_group()
    roots.add_argument("--problem", action="store_true", help="run problems/, your files (the default)")
    roots.add_argument("--solution", action="store_true", help="run solutions/")
    if puzzle.variants:
        add_kernel_flags(root, modes, roots, puzzle)
    names = puzzle.dim_names
    if names:
        root.add_argument(
            "--dims",
            type=int,
            nargs=len(names),
            metavar=names[0] if len(names) == 1 else names,
            help="sizes (default: the chapter's and harder ones)",
        )
    if any(case.world_size > 1 for case in puzzle.cases(None)):
        root.add_argument(
            "--ranks", type=int, metavar="N", help="processes of each case that is run by several"
        )
    root.add_argument("--seed", type=int, default=0, help="of the random inputs")
    root.add_argument(
        "--gate", metavar="ID", help=f"check one gate only: {listed([gate.id for gate in puzzle.gates])}"
    )
    root.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    return root


def add_rungs(modes: argparse._MutuallyExclusiveGroup, puzzle: Puzzle) -> None:
    """--rung, and --numpy where there is one."""
    ids = [rung.id for rung in puzzle.rungs]
    default = "all" if puzzle.every_rung else puzzle.main_rung.id
    modes.add_argument(
        "--rung", choices=ids, help=f"which of the puzzle's files to check (default: {default})"
    )
    if "numpy" in ids:
        modes.add_argument(
            "--numpy", dest="rung", action="store_const", const="numpy", help="the same as --rung numpy"
        )


def add_kernel_flags(
    root: Parser,
    modes: argparse._MutuallyExclusiveGroup,
    roots: argparse._MutuallyExclusiveGroup,
    puzzle: Puzzle,
) -> None:
    """The flags of a puzzle that has Mojo kernels."""
    if puzzle.backward:
        count = len(puzzle.backward)
        which = "the gradient" if count == 1 else f"all {count} gradients"
        root.add_argument(
            "--backward", action="store_true", help=f"check {which} too, not only the forward pass"
        )
    variants = root.add_argument_group(f"variants (default: {listed(puzzle.default_variants, 'and')})")
    for name in puzzle.variants:
        about = puzzle.about_variants.get(name, f"only the {name} kernels")
        variants.add_argument(f"--{name}", action="store_true", help=about)
    modes.add_argument("--profile", action="store_true", help="count what the kernels do, on the virtual GPU")
    modes.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="GATE",
        help="a picture of your kernel's run: who reads and writes what, and the first wrong element",
    )
    roots.add_argument("--ops", type=Path, metavar="DIR", help="run the op package in DIR")
    root.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu", "virtual", "all"),
        default="auto",
        help="auto: the CPU, and a GPU where MAX sees one, else the virtual GPU; for a gate by itself the virtual GPU",
    )
    root.add_argument("--dtype", choices=DTYPES, default="float32")
    root.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help=f"run the {'backward' if puzzle.backward else 'forward'} N times: bit-equal, or the spread",
    )
    root.add_argument(
        "--blocks",
        default="natural",
        metavar="ORDER",
        help="block order of the virtual GPU: natural, reversed, shuffled or shuffled:SEED",
    )
    root.add_argument("--html", type=Path, metavar="FILE", help="where --show puts its page")
    root.add_argument(
        FLAG,
        action="store_true",
        help="judge in this process, not in the warm one that --gate starts and the next one finds",
    )
    root.add_argument("--verbose", action="store_true", help="print the compiler's whole output")


def listed(names, last: str = "or") -> str:
    """Names as a sentence lists them: "ln, dW or dx"."""
    *before, end = names
    return f"{', '.join(before)} {last} {end}" if before else end


def check_values(puzzle: Puzzle, flags: argparse.Namespace) -> None:
    """Raises BadUse, naming the flag, for a value that makes no sense in any run."""
    try:
        check_gate(puzzle, flags.rung, flags.gate)
    except BadUse as error:
        raise BadUse(f"--gate {flags.gate or repr('')}: {error}") from None
    if flags.dims:
        check_dims(puzzle, tuple(flags.dims))
    if flags.ranks is not None and not 2 <= flags.ranks <= MOST_RANKS:
        raise BadUse(f"--ranks {flags.ranks}: must be 2 to {MOST_RANKS}")
    if flags.repeat < 1:
        raise BadUse(f"--repeat {flags.repeat}: must be at least 1")
    if not 0 <= flags.seed < 2**64:
        raise BadUse(
            f"--seed {flags.seed}: must {'not be negative' if flags.seed < 0 else 'fit into 64 bits'}"
        )
    if not re.fullmatch(r"natural|reversed|shuffled(:\d+)?", flags.blocks):
        raise BadUse(f"--blocks {flags.blocks}: expected natural, reversed, shuffled or shuffled:SEED")


def options_of(puzzle: Puzzle, flags: argparse.Namespace) -> Options:
    """The flags as a value. Raises BadUse where they do not go together."""
    gates, gate = {gate.id: gate for gate in puzzle.kernel_gates}, flags.gate
    rung = puzzle.rung(flags.rung) if flags.rung else puzzle.rung_of(gate or "")
    of_kernels = rung.language == "Mojo"
    if flags.ops and not of_kernels:
        raise BadUse(f"--ops {flags.ops}: an op package has no file of the {name_of(rung.id)} rung")
    for name in () if of_kernels else OF_KERNELS:
        if getattr(flags, name) != FIELDS[name]:
            raise BadUse(f"--{name}: for kernels alone, and the {name_of(rung.id)} rung is a file in Python")
    chosen = tuple(name for name in puzzle.variants if getattr(flags, name))
    gradients = False
    if gate in gates and of_kernels:
        variant = gates[gate].variant
        if chosen and variant not in chosen:
            raise BadUse(f"--gate {gate}: a gate of the {variant} kernels; leave out --{' --'.join(chosen)}")
        chosen, gradients = (variant,), not set(gates[gate].quantities) <= set(puzzle.forward)
    # A variant without a forward pass is checked by its gradients, asked for or not.
    gradients = gradients or not any(
        puzzle.writes(name) & {*puzzle.forward} for name in chosen or puzzle.variants
    )
    given = {name: value for name, value in vars(flags).items() if name in FIELDS}
    return Options(
        **{
            **given,
            "puzzle": puzzle,
            "demo": next((each for each in puzzle.demos if getattr(flags, each.dest)), None),
            "root": str(flags.ops) if flags.ops else "solutions" if flags.solution else "problems",
            "backward": flags.backward or gradients or not puzzle.forward,
            "variants": chosen,
            "dims": tuple(flags.dims) if flags.dims else None,
        }
    )
