"""Implement the workbook's sub-commands: functions from the arguments after the name to an exit code."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.console import Parser, format_path, get_page_width, make_console, make_relative, print_lines
from harness.errors import Unsolved, UsageError, WorkbookError
from harness.invocation import format_command
from harness.learner import layout, restore, workspace
from harness.learner.exercise import Exercise, validate_gate
from harness.learner.progress import IN_PROGRESS, Progress
from harness.screens.checking import GateCheck
from harness.screens.exercise import (
    find_current_exercise,
    format_gates,
    format_next,
    format_puzzle,
    is_damaged,
    list_exercises,
    read_next_hint,
    show_difference,
)
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.puzzle import Gate, Puzzle
from harness.spec.rungs import RUNG_NAMES
from harness.toolchain import roots
from harness.toolchain.disk import make_write_error


def make_command_parser(name: str, description: str | None, nargs: str | None = None) -> Parser:
    """Return a parser for one sub-command; `nargs` is "?" if the puzzle is optional."""
    parser = Parser(prog=format_command(name), description=description, allow_abbrev=False)
    parser.add_argument("puzzle", nargs=nargs, help="for example p20")
    return parser


def add_rung_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rung",
        metavar="ID",
        help="which of the puzzle's files (default: the current one, else the first unsolved one)",
    )


def select_exercise(puzzle: Puzzle, rung: str | None, gate: str | None = None) -> Exercise:
    """Return a rung's file: by default of the last rung with the gate or, without a gate, the current one."""
    if not rung and gate is None:
        return find_current_exercise(list_exercises(puzzle), Progress.load()) or list_exercises(puzzle)[-1]
    return Exercise(puzzle, puzzle.find_rung(rung) if rung else puzzle.find_gate_rung(gate or ""))


def select_exercises(puzzle: Puzzle, rung: str | None, blank: str | None) -> list[Exercise]:
    """Return a command's exercises: one, or all of an `every_rung` puzzle if neither rung nor blank is given."""
    all_files = puzzle.every_rung and not rung and blank is None
    return list_exercises(puzzle) if all_files else [select_exercise(puzzle, rung, blank)]


def find_puzzles(name: str | None) -> list[Puzzle]:
    return [find_puzzle(puzzle_name) for puzzle_name in (list_puzzle_names() if name is None else [name])]


# ---- init and update ----------------------------------------------------------------------------------------


def init(arguments: list[str]) -> int:
    """Write a folder of your own to solve puzzles in: problems/, and the solutions that it links to. No clone is needed."""
    parser = Parser(prog=format_command("init"), description=init.__doc__, allow_abbrev=False)
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="DIR",
        default="workbook",
        help="a new or empty folder (default: workbook)",
    )
    parser.add_argument("--book", action="store_true", help="the built book too, as book/html/index.html")
    flags = parser.parse_args(arguments)
    folder = Path(flags.folder)
    count = workspace.create(folder, book=flags.book)
    cd_prefix = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    lines = [
        f"wrote {format_path(folder)}: {count} files with blanks under problems/, their solutions under solutions/"
    ]
    if flags.book:
        lines.append(
            f"the book: open {format_path(folder / workspace.BOOK_FOLDER / 'index.html')} in a browser"
        )
    print_lines(make_console(sys.stdout), [*lines, f"next: {cd_prefix}{format_command('list')}"])
    return 0


def update(arguments: list[str]) -> int:
    """Update a folder created by `init` from the installed package; what you wrote in blanks is kept."""
    parser = Parser(prog=format_command("update"), description=update.__doc__, allow_abbrev=False)
    parser.add_argument("--book", action="store_true", help="add the built book if the folder has none yet")
    flags = parser.parse_args(arguments)
    old_version, new_version = workspace.read_version(roots.CHECKOUT), workspace.get_version()
    if old_version is None:
        raise UsageError(
            f"not a workbook folder; run this inside one made by `{format_command('init')}`, or `git pull` in a clone"
        )
    updated_files = workspace.update(roots.CHECKOUT, book=flags.book)
    lines = [
        f"{format_path(file.path)}: renewed"
        + (f", your {', '.join(file.kept_blanks)} stays" if file.kept_blanks else "")
        + (
            f"; the old file is {format_path(file.backup)}, for lines outside of blanks"
            if file.backup
            else ""
        )
        for file in updated_files
    ]
    note = f"; it was of {old_version}" if old_version != new_version else ""
    print_lines(
        make_console(sys.stdout), [*lines, f"{roots.CHECKOUT} is as version {new_version} has it{note}"]
    )
    return 0


# ---- list ---------------------------------------------------------------------------------------------------


def list_puzzles(arguments: list[str]) -> int:
    """Print the next step, the current puzzle with the gates of its file, and a line for each other puzzle."""
    parser = make_command_parser("list", list_puzzles.__doc__, "?")
    parser.add_argument("--all", action="store_true", help="every puzzle with its gates")
    flags = parser.parse_args(arguments)
    console, progress, puzzles = (
        make_console(sys.stdout, paged=True),
        Progress.load(),
        find_puzzles(flags.puzzle),
    )
    roots.get_problems()  # raises UsageError outside a workbook
    next_exercise = find_current_exercise(
        [exercise for puzzle in puzzles for exercise in list_exercises(puzzle)], progress
    )
    print_lines(console, [format_next(next_exercise, progress)] if next_exercise else [])
    if outdated := workspace.describe_outdated(roots.CHECKOUT):
        print_lines(console, [f"note: {outdated}"])
    for puzzle in puzzles:
        expanded = flags.all or flags.puzzle or (next_exercise and puzzle is next_exercise.puzzle)
        if not expanded:
            print_lines(console, format_puzzle(puzzle, progress))
            continue
        print_lines(console, [Text(f"{puzzle.name}  {puzzle.title}", style="bold")])
        for exercise in list_exercises(puzzle):
            is_folded = (
                not (flags.all or flags.puzzle)
                and next_exercise
                and exercise.rung.id != next_exercise.rung.id
            )
            print_lines(console, format_gates(exercise, progress, summary_only=bool(is_folded)))
    if not (flags.all or flags.puzzle):
        list_one, list_all = format_command(f"list {puzzles[-1].name}"), format_command("list --all")
        print_lines(
            console, [Text(f"gates of another puzzle: `{list_one}`; of all: `{list_all}`", style="dim")]
        )
    return 0


# ---- hint ---------------------------------------------------------------------------------------------------


def hint(arguments: list[str]) -> int:
    """Print the next rung of a blank's hint ladder; a rung by its name (dx-2) as often as you like."""
    parser = make_command_parser("hint", hint.__doc__)
    add_rung_flag(parser)
    parser.add_argument(
        "gate",
        nargs="?",
        help="a blank (dx) of the current file, or a hint (dx-2); default: the current blank, else the first "
        "that has not passed",
    )
    flags = parser.parse_intermixed_args(arguments)
    puzzle = find_puzzle(flags.puzzle)
    progress = Progress.load()
    requested_gate = flags.gate or ""
    prefix, _, remainder = requested_gate.partition("-")
    if prefix in RUNG_NAMES:
        flags.rung, requested_gate = prefix, remainder
    numbered_hint = re.fullmatch(r"(\w+?)-(\d+)", requested_gate)
    requested_gate = numbered_hint[1] if numbered_hint else requested_gate
    validate_gate(puzzle, flags.rung, None if flags.gate is None else requested_gate)
    candidates = [exercise for exercise in list_exercises(puzzle) if requested_gate in exercise.rung.gates]
    # A hint's name is unique; a gate's may occur in several files.
    current = None if flags.rung or numbered_hint else find_current_exercise(candidates, progress)
    exercise = current or select_exercise(puzzle, flags.rung, None if flags.gate is None else requested_gate)
    gate = (
        find_current_blank(exercise, progress) if flags.gate is None else exercise.find_gate(requested_gate)
    )
    if gate is None:
        print("Every blank has passed: no hints are left.")
        return 0
    console, number = make_console(sys.stdout), int(numbered_hint[2]) if numbered_hint else None
    print_lines(console, read_next_hint(exercise, gate.id, progress, number, get_page_width(console)))
    return 0


def find_current_blank(exercise: Exercise, progress: Progress) -> Gate | None:
    """Return the first gate in progress, else the first that has not passed, or None."""
    states = exercise.get_states(progress)
    return next(
        (gate for gate in exercise.gates if states[gate.id] in IN_PROGRESS), exercise.find_next_gate(progress)
    )


# ---- diff ---------------------------------------------------------------------------------------------------


def diff(arguments: list[str]) -> int:
    """Compare your blanks with those of the solution: of the gates that have passed, or of all with --spoil."""
    parser = make_command_parser("diff", diff.__doc__)
    add_rung_flag(parser)
    parser.add_argument("gate", nargs="?", help="one blank (default: all)")
    parser.add_argument("--spoil", action="store_true", help="also of gates that have not passed")
    flags = parser.parse_intermixed_args(arguments)
    console, progress, shown_any = make_console(sys.stdout), Progress.load(), False
    puzzle = find_puzzle(flags.puzzle)
    validate_gate(puzzle, flags.rung, flags.gate)
    for exercise in select_exercises(puzzle, flags.rung, flags.gate):
        gates = exercise.gates if flags.gate is None else [exercise.find_gate(flags.gate)]
        shown_any |= show_difference(
            console, exercise, progress, [gate.id for gate in gates], spoil=flags.spoil
        )
    return 0 if shown_any else 3


# ---- reset --------------------------------------------------------------------------------------------------


def reset(arguments: list[str]) -> int:
    """Restore a puzzle's damaged files, or the current file, or one blank. Asks first, and keeps copies."""
    parser = make_command_parser("reset", reset.__doc__)
    add_rung_flag(parser)
    parser.add_argument("blank", nargs="?", help="one blank (default: all of them)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    flags = parser.parse_intermixed_args(arguments)
    puzzle = find_puzzle(flags.puzzle)
    changes = find_changed_files(select_exercises(puzzle, flags.rung, flags.blank), flags.blank)
    if flags.blank and not flags.rung and not changes:
        # Several rungs may have the gate, and the learner may be working on an earlier one than the last.
        candidates = [exercise for exercise in list_exercises(puzzle) if flags.blank in exercise.rung.gates]
        changes = next(
            filter(None, (find_changed_files([exercise], flags.blank) for exercise in candidates)), {}
        )
    if not (puzzle.every_rung or flags.rung or flags.blank):
        damaged = find_changed_files(
            [exercise for exercise in list_exercises(puzzle) if is_damaged(exercise)], None
        )
        changes = damaged or changes or find_changed_files([Exercise(puzzle, puzzle.main_rung)], None)
    if not changes:
        print("Nothing to reset: this is what the puzzle began with.")
        return 0
    item = f"blank {flags.blank} of " if flags.blank else ""
    for path in changes:
        print(
            f"reset {item}{format_path(path)}; its current text is saved next to it as {path.name}.DATE{restore.BACKUP_SUFFIX}"
        )
    if not flags.yes and not confirm():
        print("Nothing was changed.")
        return 0
    for path, content in changes.items():
        try:
            backup = restore.restore_file(path, content)
        except OSError as error:
            raise make_write_error(
                f"nothing was changed, {error.filename or format_path(path)}", error
            ) from error
        print(f"wrote {format_path(path)}" + (f", kept {format_path(backup)}" if backup else ""))
    return 0


def find_changed_files(exercises: Sequence[Exercise], blank: str | None) -> dict[Path, str | Path]:
    return {
        path: content for exercise in exercises for path, content in find_changes(exercise, blank).items()
    }


def find_changes(exercise: Exercise, blank: str | None) -> dict[Path, str | Path]:
    """Return the paths that a reset of a file changes, each with its new text or the file to link to."""
    text = restore.make_restored_text(exercise.path, exercise.solution, blank)
    changes: dict[Path, str | Path] = {} if has_text(exercise.path, text) else {exercise.path: text}
    if blank is None and exercise.is_mojo:
        folder, package = exercise.solution.parent, exercise.path.parent
        for relative in layout.find_layout(folder).links:
            if not layout.is_link_to(package / relative, folder / relative):
                changes[package / relative] = folder / relative
        changes |= make_missing_files(exercise)
    return changes


def make_missing_files(exercise: Exercise) -> dict[Path, str | Path]:
    """Return the puzzle's missing files with blanks, of every rung; existing ones may contain work."""
    solutions = roots.get_solutions() / exercise.puzzle.name
    problems = roots.get_problems() / exercise.puzzle.name
    return {
        problems / relative: restore.make_restored_text(problems / relative, solutions / relative)
        for relative in restore.list_missing_files(solutions, problems)
    }


def has_text(path: Path, text: str) -> bool:
    """Check whether a path is a file, not a link, with exactly this text."""
    if not path.is_file() or path.is_symlink():
        return False
    data = text.encode()
    return path.stat().st_size == len(data) and path.read_bytes() == data


def confirm() -> bool:
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


# ---- verify -------------------------------------------------------------------------------------------------


def verify(arguments: list[str]) -> int:
    """Check all of your work: every gate of every puzzle, in every rung, with every case."""
    parser = make_command_parser("verify", verify.__doc__, "?")
    add_rung_flag(parser)
    parser.add_argument("--verbose", action="store_true", help="print the compiler's whole output")
    flags = parser.parse_args(arguments)
    console = make_console(sys.stdout)
    exercises = [exercise for puzzle in find_puzzles(flags.puzzle) for exercise in list_exercises(puzzle)]
    selected = [exercise for exercise in exercises if flags.rung in (None, exercise.rung.id)]
    if not selected:
        ids = dict.fromkeys(exercise.rung.id for exercise in exercises)
        raise UsageError(
            f"--rung {flags.rung}: no such rung of {flags.puzzle or 'any puzzle'}; there is {', '.join(ids)}"
        )
    codes = [verify_exercise(console, exercise, verbose=flags.verbose) for exercise in selected]
    code = next((code for code in (5, 4, 1, 2, 3, 0) if code in codes), 3)
    outcome = OUTCOMES[code].format(diff=format_command(f"diff {flags.puzzle or 'pNN'}"))
    console.print(Text(f"   {outcome}", style="bold"))
    return code


OUTCOMES = {
    0: "✅ all gates passed; `{diff}` shows your lines next to the solution's",
    1: "❌ something is wrong",
    2: "❌ a file is damaged",
    3: "⏳ gates are left; nothing attempted is wrong",
    4: "❌ the kernels do not compile",
    5: "❌ could not run: a problem of the environment",
}


def verify_exercise(console: Console, exercise: Exercise, *, verbose: bool = False) -> int | None:
    """Check one file, print each gate's result, and return the exit code; None if untouched and optional."""
    title = f"{exercise.puzzle.name} {exercise.rung.label}: {format_path(exercise.path)}"
    try:
        blanks = exercise.read_blanks()
        touched = any(blank.size for blank in blanks.values())
        # An optional rung is not required for a solved puzzle.
        state = "it is optional" if exercise.rung.optional else f"{len(blanks)} to solve"
        line = Text(title, style="bold") if touched else Text(f"{title}: untouched ({state})", style="dim")
        console.print(line)
        if exercise.is_mojo:
            print_lines(
                console,
                [f"   note: {make_relative(note)}" for note in layout.check_layout(exercise.puzzle.name)],
            )
        if not touched:
            return None if exercise.rung.optional else Unsolved.exit_code
        return GateCheck(exercise).run(console)[0]
    except WorkbookError as error:
        details = getattr(error, "details", "") if verbose else ""
        print_lines(console, [f"   error: {make_relative(str(error))}", *make_relative(details).splitlines()])
        return error.exit_code


# ---- watch and doctor ---------------------------------------------------------------------------------------


def watch(arguments: list[str]) -> int:
    """Check the current gate each time you save. Keys: n next, t stay, r run, h hint, s show, d diff, l list, q quit."""
    parser = make_command_parser("watch", watch.__doc__)
    add_rung_flag(parser)
    parser.add_argument(
        "--gate", metavar="ID", help="begin with this gate (default: the first that has not passed)"
    )
    flags = parser.parse_args(arguments)
    puzzle = find_puzzle(flags.puzzle)
    validate_gate(puzzle, flags.rung, flags.gate)
    exercise = select_exercise(puzzle, flags.rung, flags.gate)
    from harness.screens.watch import Watch

    return Watch(exercise, flags.gate).run()


def doctor(arguments: list[str]) -> int:
    """Print a line for each requirement on this machine, with the remedy if it is missing."""
    parser = Parser(prog=format_command("doctor"), description=doctor.__doc__, allow_abbrev=False)
    parser.parse_args(arguments)
    from harness.screens.doctor import print_findings

    return print_findings(make_console(sys.stdout))


# ---- build-ext ----------------------------------------------------------------------------------------------


def build_ext(arguments: list[str]) -> int:
    """Build the layers' kernels and operators, for this machine's GPUs and PyTorch or for others.

    Otherwise the first call on a GPU builds what it needs. Kernels are built in parts, one per dtype or
    feature. The environment variable WORKBOOK_EXTENSIONS names a folder of libraries built elsewhere. Kernels
    need no GPU and no C compiler; operators need a C++ compiler.
    """
    from harness.nn import host
    from harness.toolchain import architectures, libraries

    parser = Parser(
        prog=format_command("build-ext"),
        description=build_ext.__doc__,
        epilog="exit codes: 0 built, or there already; 2 bad use; 4 the kernels do not compile; 5 the environment",
        allow_abbrev=False,
    )
    parser.add_argument(
        "layer",
        nargs="*",
        help=f"{', '.join(host.list_layers())}; also with a part, as in attention/bfloat16",
    )
    parser.add_argument(
        "--arch",
        action="append",
        metavar="NAME",
        help="for example sm_90a; may be repeated (default: the GPUs that PyTorch sees here)",
    )
    parser.add_argument(
        "--torch",
        action="append",
        type=Path,
        metavar="DIR",
        help="the folder of a PyTorch to build operators for; may be repeated (default: the one that is installed)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help=f"where to put it (default: {libraries.VARIABLE}, else the workbook's cache)",
    )
    flags = parser.parse_args(arguments)
    console = make_console(sys.stdout)
    names = (
        [architectures.normalize_architecture(name) for name in flags.arch]
        if flags.arch
        else architectures.list_gpu_architectures()
    )
    libraries_to_build = host.select_libraries(flags.layer, [*dict.fromkeys(names)], flags.torch or [None])
    for library, built in libraries.build_all(libraries_to_build, flags.output):
        size = built.path.stat().st_size / 2**20
        status = f"built in {built.duration_s:.1f} s" if built.duration_s else "was there already"
        print_lines(console, [f"{library.name}: {status}, {size:.1f} MiB: {format_path(built.path)}"])
    return 0


# ---- dev ----------------------------------------------------------------------------------------------------


def dev(arguments: list[str]) -> int:
    """Run a command for the authors of puzzles: new, check, generate or format."""
    from harness.dev import command

    return command.main(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "init": init,
    "list": list_puzzles,
    "hint": hint,
    "watch": watch,
    "diff": diff,
    "reset": reset,
    "verify": verify,
    "update": update,
    "doctor": doctor,
    "build-ext": build_ext,
    "dev": dev,
}


def run(name: str, arguments: list[str]) -> int:
    return COMMANDS[name](arguments)
