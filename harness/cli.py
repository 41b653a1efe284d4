"""The command line: `python -m harness pNN --backward`. Parses, runs, reports, and turns the verdict into an exit code.

The flags are those that a puzzle has a use for; another puzzle's are unknown. Exit codes: 0 all correct, 1 a wrong
result, 2 bad use, 3 unsolved blanks, 4 the Mojo package does not compile, 5 the environment, 6 nothing wrong but GPU
kernels that there are ran nowhere, 130 interrupted.
"""

import argparse
import os
import pkgutil
import re
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.console import (
    Finished,
    Parser,
    make_console,
    output_lost,
    prepare_streams,
    printable,
    progress,
    write_json,
)
from harness.errors import BadUse, EnvironmentProblem, WorkbookError, unknown_gate
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.puzzle import Case, Puzzle
from harness.toolchain.bytecode import keep_bytecode, mend_bytecode
from harness.toolchain.disk import check_target

EXIT_CODES = """\
exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks, nothing attempted is wrong; 4 the Mojo
package does not compile or lacks an op; 5 the environment; 6 nothing wrong, but GPU kernels ran nowhere;
130 interrupted"""
COMMANDS = ("list", "hint", "watch", "diff", "reset", "verify", "doctor", "build-ext", "dev")
MOST_RANKS = 16
"""More processes than that are more than a machine's cores, and start for minutes."""
DTYPES = ("float32", "bfloat16", "float16", "float64")


# ---- Flags --------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> tuple[Puzzle, argparse.Namespace]:
    """The puzzle and the flags of a command line. Raises BadUse, with what is wrong and what was typed."""
    puzzle = named_puzzle(arguments)
    try:
        return puzzle, parser(puzzle).parse_args(arguments)
    except BadUse as error:
        gates = [gate.id for gate in puzzle.gates]
        if gate := next((word for word in arguments if word in gates and "--gate" not in arguments), None):
            raise BadUse(f"{error} (did you mean `--gate {gate}`?)") from None
        raise BadUse(f"{error}; got: {' '.join(arguments)} (--help lists the flags)") from None


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
    made = Parser(
        prog="python -m harness",
        description="Run a puzzle's kernels and compare every output and gradient with PyTorch autograd.",
        epilog=f"`python -m harness pNN --help` lists a puzzle's flags; sub-commands, each with its own --help: "
        f"{', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    made.add_argument("puzzle", help=f"which puzzle: {', '.join(puzzle_names())}")
    return made


def parser(puzzle: Puzzle) -> Parser:
    """The flags of one puzzle."""
    root = Parser(
        prog=puzzle.name,
        description=f"{puzzle.title}. Checks every output and gradient against PyTorch autograd.",
        epilog=f"sub-commands, each with its own --help: {', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    root.add_argument("puzzle", help=puzzle.name)
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
        help="auto: the CPU, and a GPU where MAX sees one, else the virtual GPU",
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
    root.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    root.add_argument("--html", type=Path, metavar="FILE", help="where --show puts its page")
    root.add_argument("--verbose", action="store_true", help="print the compiler's whole output")


def listed(names, last: str = "or") -> str:
    """Names as a sentence lists them: "ln, dW or dx"."""
    *before, end = names
    return f"{', '.join(before)} {last} {end}" if before else end


# ---- Running ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:  # this process is a command's own
        keep_bytecode()
        mend_bytecode()
    prepare_streams()
    try:
        check_folder()
        code = run(arguments)
        sys.stdout.flush()
        return code
    except WorkbookError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        if "--verbose" in arguments and error.details:
            print(printable(error.details), file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(f"error: not enough memory for these sizes: {error}", file=sys.stderr)
        return BadUse.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # A compile in another thread cannot be stopped; nothing is left half-written.
    except OSError as error:
        return output_lost(error)
    except Finished:
        raise
    except (SystemExit, GeneratorExit) as error:  # no verdict, whatever code it leaves with
        print(f"error: {type(error).__name__} before the end of the run: {error}", file=sys.stderr)
        return WorkbookError.exit_code


def check_folder() -> None:
    """Raises EnvironmentProblem where the working directory is gone: libraries would say so in words of their own, or end."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem(
            "the working directory is no longer there: change into another one"
        ) from error


def run(arguments: list[str]) -> int:
    """Finds the command and runs it."""
    if arguments[:1] == ["vgpu"]:
        from harness.vgpu.cli import main as vgpu

        try:
            return vgpu(arguments[1:])
        except SystemExit as end:  # its parser's own: the virtual GPU knows nothing of the workbook
            raise Finished(end.code) from None
    if arguments and arguments[0] in COMMANDS:
        from harness import commands

        return commands.run(arguments[0], arguments[1:])
    if "--bench" in arguments:
        from harness.bench import command

        return command.main(arguments)
    puzzle = named_puzzle(arguments or ["--help"])
    for demo in puzzle.demos:
        if demo.options and f"--{demo.flag}" in arguments:
            rest = [argument for argument in arguments if argument not in (puzzle.name, f"--{demo.flag}")]
            return pkgutil.resolve_name(demo.run)(make_console(sys.stdout), rest)
    return run_puzzle(*parse(arguments or ["--help"]))


def run_puzzle(puzzle: Puzzle, flags: argparse.Namespace) -> int:
    """One run of one puzzle."""
    json = getattr(flags, "json", None)
    console = make_console(sys.stderr if json == "-" else sys.stdout)
    for demo in puzzle.demos:
        if getattr(flags, demo.flag.replace("-", "_")):
            return pkgutil.resolve_name(demo.run)(console)
    check_values(puzzle, flags)
    in_python = flags.gate is not None and puzzle.rung_of(flags.gate).language == "Python"
    if not puzzle.variants and (codes := run_python_rungs(console, puzzle, flags)):
        return next(code for code in (1, 3, 0) if code in codes)
    if not puzzle.variants or flags.rung not in (None, "mojo") or (flags.rung is None and in_python):
        return run_rung(console, puzzle, flags)
    from harness.check import runs
    from harness.screens.report import Report, as_json

    if judged_alone(puzzle, flags):
        make_options(flags, puzzle)  # says where the flags do not go together
        return run_gate(console, puzzle, flags)
    options = make_options(flags, puzzle)
    if json not in (None, "-"):
        check_target("--json", json)
    if flags.show is not None:
        from harness.screens.show import show

        return show(console, options, flags.show or flags.gate or "", flags.html, json)
    if flags.html:
        raise BadUse("--html: only --show writes a page")
    before = run_python_rungs(console, puzzle, flags)
    if flags.profile:
        return run_profile(console, options)
    with progress(console) as (on_compile, on_ready):
        run = runs.run(options, on_compile=on_compile, on_ready=on_ready)
    Report(console, verbose=flags.verbose).run(run)
    note_passed(run)
    if not options.backward and not puzzle.separate:
        report_times(console, run)
    if json:
        write_json(as_json(run), json)
    return next(code for code in (1, 3, 6, 0) if code in (*before, run.exit_code()))


def run_python_rungs(console: Console, puzzle: Puzzle, flags: argparse.Namespace) -> list[int]:
    """The exit codes of a puzzle's rungs in Python, where every rung is a part of it and no flag names a part; else none."""
    parts = ("rung", "gate", "ops", "profile", "dims", "json")
    if not puzzle.every_rung or any(getattr(flags, name, None) for name in parts):
        return []
    from harness.spec.rungs import MojoRung

    codes = []
    for rung in puzzle.rungs:
        if not isinstance(rung, MojoRung):
            console.print(Text(f"{rung.words}:", style="bold"), soft_wrap=True)
            codes.append(run_rung(console, puzzle, argparse.Namespace(**{**vars(flags), "rung": rung.id})))
            console.print()
    return codes


def judged_alone(puzzle: Puzzle, flags: argparse.Namespace) -> bool:
    """Whether a gate of the kernels is judged by the recorded launches: all that is not asked of MAX by its flags."""
    from harness.devices.targets import VIRTUAL_LIMIT

    if flags.gate is None or not puzzle.gpu or flags.dtype == "float64":
        return False
    if flags.profile or flags.show is not None or flags.html or flags.json or flags.repeat != 1:
        return False
    if flags.blocks != "natural":
        return False
    small = flags.dims is None or puzzle.multiply_adds(tuple(flags.dims)) <= VIRTUAL_LIMIT
    return flags.device == "virtual" or (flags.device == "auto" and small)


def run_gate(console: Console, puzzle: Puzzle, flags: argparse.Namespace) -> int:
    """One gate of the kernels, as `watch` and `verify` judge it: on the virtual GPU, without MAX."""
    from harness import commands
    from harness.check.runs import package_of
    from harness.learner.progress import Progress
    from harness.learner.work import Work, package_blanks
    from harness.toolchain import roots

    work = Work(puzzle, puzzle.rung("mojo"), roots.solutions() if flags.solution else None)
    package = package_of(puzzle, flags.ops) if flags.ops else None
    found = package_blanks(package, puzzle) if package else work.blanks()
    return commands.judge_work(
        console,
        work,
        Progress.load(),
        found,
        [flags.gate],
        puzzle.cases(tuple(flags.dims)) if flags.dims else None,
        flags.seed,
        dtype=flags.dtype,
        package=package,
        verbose=flags.verbose,
    )


def run_rung(console: Console, puzzle: Puzzle, flags: argparse.Namespace) -> int:
    """The gates of a rung in Python, or one of them."""
    from harness import commands
    from harness.learner.progress import Progress
    from harness.learner.work import Work
    from harness.spec.rungs import name_of
    from harness.toolchain import roots

    rung = puzzle.rung(flags.rung) if flags.rung else puzzle.rung_of(flags.gate or "")
    if flags.gate is not None and flags.gate not in rung.gates:
        whose, there = f"the {name_of(rung.id)} rung", ", ".join(rung.gates)
        raise BadUse(f"--gate {flags.gate or repr('')}: {whose} has no gate {flags.gate!r}; there is {there}")
    work = Work(puzzle, rung, roots.solutions() if flags.solution else None)
    return commands.judge_work(
        console,
        work,
        Progress.load(),
        work.blanks(),
        [flags.gate] if flags.gate else None,
        chosen_cases(puzzle, flags),
        flags.seed,
    )


def chosen_cases(puzzle: Puzzle, flags: argparse.Namespace) -> list[Case] | None:
    """The cases of --dims and --ranks; None, for the puzzle's own, without either."""
    dims, ranks = getattr(flags, "dims", None), getattr(flags, "ranks", None)
    if not dims and not ranks:
        return None
    cases = puzzle.cases(tuple(dims) if dims else None)
    return [replace(case, world_size=ranks) if ranks and case.world_size > 1 else case for case in cases]


def note_passed(run) -> None:
    """Remembers the gates of the learner's file that a run has judged right on a GPU, real or virtual."""
    from harness.check.runs import judged_gates
    from harness.learner.progress import Progress

    options = run.options
    if options.root != "problems" or options.dims or options.dtype != "float32":
        return
    progress = Progress.load()
    for gate, correct in judged_gates(run).items():
        progress.note(f"{options.puzzle.name} {gate}", run.blanks[gate], correct)


def run_profile(console: Console, options) -> int:
    """--profile: the kernels of the first case on the virtual GPU, counted."""
    from harness.check import profile

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    console.print(*profile.table(profile.profile(options)), sep="\n", soft_wrap=True, markup=False)
    return 0


def check_values(puzzle: Puzzle, flags: argparse.Namespace) -> None:
    """Raises BadUse, naming the flag, for a value that makes no sense in any run."""
    from harness.check.limits import check_dims
    from harness.learner.work import check_gate

    try:
        check_gate(puzzle, flags.rung, flags.gate)
    except BadUse as error:
        raise BadUse(f"--gate {flags.gate or repr('')}: {error}") from None
    if getattr(flags, "dims", None):
        check_dims(puzzle, tuple(flags.dims))
    ranks = getattr(flags, "ranks", None)
    if ranks is not None and not 2 <= ranks <= MOST_RANKS:
        raise BadUse(f"--ranks {ranks}: must be 2 to {MOST_RANKS}")
    if getattr(flags, "repeat", 1) < 1:
        raise BadUse(f"--repeat {flags.repeat}: must be at least 1")
    if not 0 <= flags.seed < 2**64:
        raise BadUse(
            f"--seed {flags.seed}: must {'not be negative' if flags.seed < 0 else 'fit into 64 bits'}"
        )
    blocks = getattr(flags, "blocks", "natural")
    if not re.fullmatch(r"natural|reversed|shuffled(:\d+)?", blocks):
        raise BadUse(f"--blocks {blocks}: expected natural, reversed, shuffled or shuffled:SEED")


def make_options(flags: argparse.Namespace, puzzle: Puzzle):
    """The `runs.Options` of a run of the kernels. Raises BadUse where the flags do not go together."""
    from harness.check.runs import Options

    gates = {gate.id: gate for gate in puzzle.kernel_gates}
    if flags.gate is not None and flags.gate not in gates:
        raise BadUse(f"--gate {flags.gate or repr('')}: {unknown_gate(flags.gate, gates)}")
    chosen = tuple(name for name in puzzle.variants if getattr(flags, name))
    if flags.gate:
        variant = gates[flags.gate].variant
        if chosen and variant not in chosen:
            raise BadUse(
                f"--gate {flags.gate}: a gate of the {variant} kernels; leave out --{' --'.join(chosen)}"
            )
        chosen = (variant,)
    gradients = flags.gate is not None and not set(gates[flags.gate].quantities) <= set(puzzle.forward)
    # A variant without a forward pass is checked by its gradients, asked for or not.
    gradients = gradients or not any(
        puzzle.writes(name) & {*puzzle.forward} for name in chosen or puzzle.variants
    )
    return Options(
        puzzle=puzzle,
        root=str(flags.ops) if flags.ops else "solutions" if flags.solution else "problems",
        backward=getattr(flags, "backward", False) or gradients or not puzzle.forward,
        variants=chosen,
        device=flags.device,
        dims=tuple(flags.dims) if flags.dims else None,
        dtype=flags.dtype,
        seed=flags.seed,
        repeat=flags.repeat,
        gate=flags.gate,
        blocks=flags.blocks,
    )


def report_times(console: Console, run) -> None:
    """Forward time on each device and, between a CPU and a real GPU, the ratio."""
    from harness.bench import forward_times

    for line in forward_times.describe(run):
        console.print(line, soft_wrap=True, markup=False)
