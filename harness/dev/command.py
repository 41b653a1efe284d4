"""Implement `workbook dev`: new, check, generate, format. It requires a checkout of the workbook."""

import argparse
from pathlib import Path

from harness.console import Parser
from harness.dev import check, formatting, mutation, skeleton
from harness.errors import UsageError
from harness.learner import blanks
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.toolchain import roots
from harness.vgpu.checks.findings import format_count


def main(arguments: list[str]) -> int:
    """Work on puzzles. Exit codes: 0 done; 1 a file is missing or out of date; 2 usage error."""
    parser = Parser(prog="workbook dev", description=main.__doc__)
    commands = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    new_parser = commands.add_parser("new", help=write_new.__doc__, description=write_new.__doc__)
    new_parser.add_argument("puzzle", help="its name, for example p27")
    check_parser = commands.add_parser("check", help=print_errors.__doc__, description=print_errors.__doc__)
    check_parser.add_argument("puzzle", nargs="?", default="all", help="one puzzle, or all (the default)")
    check_parser.add_argument(
        "--mutants", action="store_true", help="check solutions with one mistake each, list those that pass"
    )
    check_parser.add_argument(
        "--rung", action="append", help="with --mutants: only this rung (may be repeated)"
    )
    check_parser.add_argument(
        "--most", type=int, metavar="N", help="with --mutants: at most N of each rung, sampled with --seed"
    )
    check_parser.add_argument("--seed", type=int, default=0, help="with --most: the seed of the sample")
    generate_parser = commands.add_parser("generate", help=generate.__doc__, description=generate.__doc__)
    generate_parser.add_argument("--check", action="store_true", help="write nothing, print the difference")
    generate_parser.add_argument("--force", action="store_true", help="overwrite edited blanks")
    format_parser = commands.add_parser("format", help=format_files.__doc__, description=format_files.__doc__)
    format_parser.add_argument("--check", action="store_true", help="write nothing, print the difference")
    flags = parser.parse_args(arguments)
    if not (roots.CHECKOUT / "solutions").is_dir() or (roots.CHECKOUT / roots.MARKER_FILE).exists():
        raise UsageError("dev works on a checkout of the workbook, and this is an installed package")
    functions = {"new": write_new, "check": print_errors, "generate": generate, "format": format_files}
    return functions[flags.verb](roots.CHECKOUT, flags)


def write_new(checkout: Path, flags: argparse.Namespace) -> int:
    """Write the skeleton of every file of a new puzzle."""
    for path in skeleton.write(checkout, flags.puzzle):
        print(f"wrote {path.relative_to(checkout)}")
    return 0


def print_errors(checkout: Path, flags: argparse.Namespace) -> int:
    """Name each missing, unexpected or outdated file of a puzzle."""
    names = list_puzzle_names() if flags.puzzle == "all" else [find_puzzle(flags.puzzle).name]
    if flags.mutants:
        return print_survivors(names, flags)
    if flags.rung or flags.most is not None or flags.seed:
        raise UsageError("--rung, --most and --seed belong to --mutants")
    errors = [error for name in names for error in check.find_errors(checkout, find_puzzle(name))]
    if flags.puzzle == "all":
        errors += check.find_unknown_folders(checkout, names)
    print(*errors, sep="\n", end="\n" if errors else "")
    print(f"{', '.join(names)}: {format_count(len(errors), 'fault') if errors else 'every file is there'}")
    return int(bool(errors))


def print_survivors(names: list[str], flags: argparse.Namespace) -> int:
    """Print unexplained mutants that pass, and outdated explanations; return 1 if there are any."""
    unexplained = 0
    for puzzle in map(find_puzzle, names):
        for line in mutation.find_outdated(puzzle):
            print(line)
            unexplained += 1
        for exercise in mutation.list_exercises(puzzle, flags.rung):
            summary = mutation.run(exercise, seed=flags.seed, max_mutants=flags.most)
            location = exercise.solution.relative_to(roots.CHECKOUT)
            for mutant in summary.survivors:
                print(
                    f"{location}:{mutant.line}: {mutant.gate} passes with `{mutant.new}` for `{mutant.old}`"
                )
            unexplained += len(summary.survivors)
            print(f"{puzzle.name} {exercise.rung.id}: {summary}", flush=True)
    return int(unexplained > 0)


def generate(checkout: Path, flags: argparse.Namespace) -> int:
    """Write problems/ from solutions/."""
    solutions, problems = checkout / "solutions", checkout / "problems"
    if flags.check:
        return blanks.check_problems(solutions, problems)
    for path in blanks.generate_problems(solutions, problems, force=flags.force):
        print(f"wrote {path.relative_to(checkout)}")
    return 0


def format_files(checkout: Path, flags: argparse.Namespace) -> int:
    """Format Mojo and Python files."""
    return formatting.check(checkout) if flags.check else formatting.write(checkout)
