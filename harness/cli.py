"""The command line: find the command, run it, and turn its result into an exit code.

Exit codes: 0 all correct, 1 a wrong result, 2 bad use, 3 unsolved blanks, 4 the Mojo package does not
compile, 5 the environment, 6 nothing wrong, but no GPU kernel ran anywhere, 130 interrupted.
"""

import os
import sys
from pathlib import Path

from harness.check.options import COMMANDS, Options, find_named_puzzle, parse
from harness.console import ParserExit, escape_controls, make_console, prepare_streams, report_output_error
from harness.errors import EnvironmentProblem, UsageError, WorkbookError
from harness.toolchain import roots
from harness.toolchain.disk import check_target


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        check_folder()
        roots.enter_workbook(Path.cwd())
        code = run(arguments)
        sys.stdout.flush()
        return code
    except WorkbookError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        if "--verbose" in arguments and error.details:
            print(escape_controls(error.details), file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(f"error: not enough memory for these sizes: {error}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # A compile in another thread cannot be stopped; nothing is left half-written.
    except OSError as error:
        return report_output_error(error)
    except ParserExit:
        raise
    except (SystemExit, GeneratorExit) as error:  # an exit without a result, whatever its code
        print(f"error: {type(error).__name__} before the end of the run: {error}", file=sys.stderr)
        return WorkbookError.exit_code


def check_folder() -> None:
    """Raise EnvironmentProblem if the working directory is missing: libraries would report other errors."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem(
            "the working directory does not exist any more: change into another one"
        ) from error


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["vgpu"]:
        from harness.vgpu.cli import main as vgpu

        try:
            return vgpu(arguments[1:])
        except SystemExit as end:  # raised by argparse: the virtual GPU does not use the workbook's Parser
            raise ParserExit(end.code) from None
    if arguments and arguments[0] in COMMANDS:
        from harness import commands

        return commands.run(arguments[0], arguments[1:])
    if "--bench" in arguments:
        from harness.bench import command

        return command.main(arguments)
    puzzle = find_named_puzzle(arguments or ["--help"])
    for demo in puzzle.demos:
        if demo.options and f"--{demo.flag}" in arguments:
            demo_arguments = [
                argument for argument in arguments if argument not in (puzzle.name, f"--{demo.flag}")
            ]
            return puzzle.resolve(demo.run)(make_console(sys.stdout), demo_arguments)
    return run_puzzle(parse(arguments or ["--help"]))


def run_puzzle(options: Options) -> int:
    console = make_console(sys.stdout)
    if options.json == "-":  # standard output is for the data
        console = make_console(sys.stderr)
    if options.demo:
        return options.puzzle.resolve(options.demo.run)(console)
    from harness.screens.checking import check, print_counters

    if options.json not in (None, "-"):
        check_target("--json", options.json)
    if options.exercise.is_mojo:
        if options.show is not None:
            from harness.screens.show import show

            return show(console, options)
        if options.html:
            raise UsageError("--html: only --show writes a page")
        if options.profile:
            from harness.check.profile import CountRequest

            dtype, seed, blocks = options.dtype, options.seed, options.blocks
            counting = CountRequest(options.exercise, options.variants, options.dims, dtype, seed, blocks)
            return print_counters(console, counting, by_line=options.verbose)
    return check(console, options)
