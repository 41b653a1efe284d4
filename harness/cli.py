"""The command line: `python -m harness p22 --backward`. Parses, runs, reports, and turns the verdict into an exit code.

Exit codes: 0 all correct, 1 a wrong result, 2 bad use, 3 unsolved blanks, 4 the Mojo package does not compile,
5 the environment, 6 nothing wrong but no GPU kernel ran, 130 interrupted.
"""

import argparse
import os
import pkgutil
import re
import sys
from pathlib import Path

from rich.console import Console

from harness.console import Parser, make_console, output_lost, prepare_streams, progress, write_json
from harness.errors import BadUse, WorkbookError
from harness.spec.catalogue import find_puzzle
from harness.toolchain.disk import check_target

EXIT_CODES = """\
exit codes: 0 all correct; 1 a wrong result; 2 bad use; 3 unsolved blanks, nothing attempted is wrong; 4 the Mojo
package does not compile or lacks an op; 5 the environment; 6 nothing wrong, but GPU kernels ran nowhere;
130 interrupted"""
COMMANDS = ("list", "hint", "watch", "diff", "reset", "verify", "doctor", "build-ext")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of a command line. Raises BadUse, with what is wrong and what was typed."""
    try:
        return parser().parse_args(arguments)
    except BadUse as error:
        raise BadUse(f"{error}; got: {' '.join(arguments)} (--help lists the flags)") from None


def parser() -> Parser:
    """The flags of `pNN`."""
    root = Parser(
        prog="p22",
        description="Run a puzzle's kernels and compare every output and gradient with PyTorch autograd.",
        epilog=f"sub-commands, each with its own --help: {', '.join(COMMANDS)}, vgpu; {EXIT_CODES}",
        allow_abbrev=False,
    )
    root.add_argument("puzzle", help="which puzzle, for example p22")
    root.add_argument(
        "--backward", action="store_true", help="check all five gradients too, not only the forward pass"
    )
    variants = root.add_argument_group("variants (default: fused and unfused)")
    variants.add_argument("--fused", action="store_true", help="only the fused kernels")
    variants.add_argument("--unfused", action="store_true", help="only the unfused kernels")
    variants.add_argument("--fast", action="store_true", help="only the fast kernels, which hold no blanks")
    modes = root.add_mutually_exclusive_group()
    modes.add_argument("--demo", action="store_true", help="train a small transformer beside plain PyTorch")
    modes.add_argument(
        "--demo-simple", action="store_true", help="one forward and backward through CustomOpLibrary"
    )
    modes.add_argument(
        "--bench", action="store_true", help="time it beside PyTorch and others; with --help: its own flags"
    )
    modes.add_argument("--profile", action="store_true", help="count what the kernels do, on the virtual GPU")
    modes.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what every block reads and writes, as JSON"
    )
    modes.add_argument("--numpy", action="store_true", help="check the NumPy rung in place of the kernels")
    roots = root.add_mutually_exclusive_group()
    roots.add_argument("--problem", action="store_true", help="run problems/, your files (the default)")
    roots.add_argument("--solution", action="store_true", help="run solutions/")
    roots.add_argument("--ops", type=Path, metavar="DIR", help="run the op package in DIR")
    root.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu", "virtual", "all"),
        default="auto",
        help="auto: the CPU, and a GPU where MAX sees one, else the virtual GPU",
    )
    root.add_argument(
        "--dims",
        type=int,
        nargs=4,
        metavar=("B", "S", "H", "O"),
        help="sizes (default: the chapter's and harder ones)",
    )
    root.add_argument("--dtype", choices=DTYPES, default="float32")
    root.add_argument("--seed", type=int, default=0, help="of the random inputs")
    root.add_argument(
        "--gate", metavar="ID", help="check one gate only: ln, forward, row_sums, db, dW, dgamma or dx"
    )
    root.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the backward N times: bit-equal, or the spread",
    )
    root.add_argument(
        "--blocks",
        default="natural",
        metavar="ORDER",
        help="block order of the virtual GPU: natural, reversed, shuffled or shuffled:SEED",
    )
    root.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    root.add_argument("--verbose", action="store_true", help="print the compiler's whole output")
    return root


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except WorkbookError as error:
        print(f"error: {error}", file=sys.stderr)
        if "--verbose" in arguments and getattr(error, "details", ""):
            print(error.details, file=sys.stderr)
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


def run(arguments: list[str]) -> int:
    """Finds the command and runs it."""
    if arguments[:1] == ["vgpu"]:
        from harness.vgpu.cli import main as vgpu

        return vgpu(arguments[1:])
    if arguments and arguments[0] in COMMANDS:
        from harness import commands

        return commands.run(arguments[0], arguments[1:])
    if "--bench" in arguments:
        from harness.bench import command

        return command.main(arguments)
    return run_puzzle(parse(arguments or ["--help"]))


def run_puzzle(flags: argparse.Namespace) -> int:
    """One run of one puzzle."""
    from harness.check import runs
    from harness.screens.report import Report, as_json

    puzzle = find_puzzle(flags.puzzle)
    if flags.numpy:
        from harness import commands

        return commands.check_numpy(puzzle, flags.gate)
    console = make_console(sys.stderr if flags.json == "-" else sys.stdout)
    for demo in puzzle.demos:
        if getattr(flags, demo.flag.replace("-", "_")):
            return pkgutil.resolve_name(demo.run)(console)
    options = make_options(flags, puzzle)
    for flag, target in (("--json", flags.json), ("--trace", flags.trace)):
        if target not in (None, "-"):
            check_target(flag, target)
    if flags.profile or flags.trace:
        return run_profile(console, options, flags.trace)
    with progress(console) as (on_compile, on_ready):
        run = runs.run(options, on_compile=on_compile, on_ready=on_ready)
    Report(console, verbose=flags.verbose).run(run)
    if not options.backward:
        report_times(console, run)
    if flags.json:
        write_json(as_json(run), flags.json)
    return run.exit_code()


def run_profile(console: Console, options, trace: Path | None) -> int:
    """--profile or --trace: the kernels of the first case on the virtual GPU, counted or written down."""
    from harness.check import profile

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    if trace:
        console.print(f"wrote {profile.write_trace(options, trace)} launches to {trace}")
        return 0
    console.print(*profile.table(profile.profile(options)), sep="\n", soft_wrap=True, markup=False)
    return 0


def make_options(flags: argparse.Namespace, puzzle) -> "workbook.Options":  # noqa: F821
    """The options of a run. Raises BadUse, naming the flag, for a value that makes no sense."""
    from harness.check.limits import check_dims
    from harness.check.runs import Options

    if flags.dims:
        check_dims(puzzle, tuple(flags.dims))
    if flags.repeat < 1:
        raise BadUse(f"--repeat {flags.repeat}: must be at least 1")
    if not 0 <= flags.seed < 2**64:
        raise BadUse(
            f"--seed {flags.seed}: must {'not be negative' if flags.seed < 0 else 'fit into 64 bits'}"
        )
    if not re.fullmatch(r"natural|reversed|shuffled(:\d+)?", flags.blocks):
        raise BadUse(f"--blocks {flags.blocks}: expected natural, reversed, shuffled or shuffled:SEED")
    gates = {gate.id: gate for gate in puzzle.gates}
    if flags.gate is not None and flags.gate not in gates:
        raise BadUse(f"--gate {flags.gate or repr('')}: unknown gate; there is {', '.join(gates)}")
    chosen = tuple(name for name in puzzle.variants if getattr(flags, name, False))
    if flags.gate:
        variant = gates[flags.gate].variant
        if chosen and variant not in chosen:
            raise BadUse(
                f"--gate {flags.gate}: a gate of the {variant} kernels; leave out --{' --'.join(chosen)}"
            )
        chosen = (variant,)
    return Options(
        puzzle=puzzle,
        root=str(flags.ops) if flags.ops else "solutions" if flags.solution else "problems",
        backward=flags.backward
        or (flags.gate is not None and not (set(gates[flags.gate].quantities) <= set(puzzle.forward))),
        variants=chosen or puzzle.default_variants,
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
