"""Format a learner's exercises: the list of gates, the next hint, and blanks next to the solution's."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group
from rich.text import Text

from harness.console import format_path
from harness.errors import DamagedFile, UsageError
from harness.invocation import format_command
from harness.learner import blanks, hints
from harness.learner.blanks import Blank
from harness.learner.exercise import Exercise
from harness.learner.hints import Hint
from harness.learner.progress import Progress
from harness.screens.report import compute_name_width
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.puzzle import Puzzle

STATES = {
    "passed": ("✅", "passed"),
    "changed": ("✎", "changed since it passed"),
    "begun": ("✎", "begun, not passed yet"),
    "unsolved": ("·", "unsolved"),
}
SIDE_BY_SIDE_COLUMNS = 150
"""Minimum terminal width, in columns, for showing both versions of a blank side by side."""
DAMAGED_STYLE = "red"
"""Style of the line about a file that cannot be read."""


def format_gates(exercise: Exercise, progress: Progress, *, summary_only: bool = False) -> Iterable[Text]:
    """Yield a file's progress bar and, unless `summary_only`, a line for each gate."""
    title = f"{exercise.rung.label} ({exercise.rung.note})" if exercise.rung.note else exercise.rung.label
    try:
        states = exercise.get_states(progress)
    except DamagedFile as error:
        yield Text(f"   {title}: {error}", style=DAMAGED_STYLE)
        return
    done = sum(state == "passed" for state in states.values())
    yield Text(f"   {format_progress_bar(done, len(states))}  {title}: {format_path(exercise.path)}")
    width = compute_name_width(exercise.puzzle)
    for gate in () if summary_only else exercise.gates:
        mark, label = STATES[states[gate.id]]
        line = f"      {mark} {gate.id:<{width}} {label:<24} {gate.description}"
        yield Text(line, no_wrap=True, overflow="ellipsis")


def format_puzzle(puzzle: Puzzle, progress: Progress) -> Iterator[Text]:
    """Yield the puzzle's line, with the number of passed gates of required files, then its damaged files."""
    required = [exercise for exercise in list_exercises(puzzle) if not exercise.rung.optional]
    states = [state for exercise in required for state in list_gate_states(exercise, progress)]
    bar = format_progress_bar(states.count("passed"), len(states), 10)
    yield Text(f"{puzzle.name}  {bar:<18} {puzzle.title}", no_wrap=True, overflow="ellipsis")
    for exercise in list_exercises(puzzle):
        yield from (line for line in format_gates(exercise, progress) if line.style == DAMAGED_STYLE)


def format_next(exercise: Exercise, progress: Progress) -> Text:
    """Return the line about the next step, with the command to type."""
    try:
        gate = exercise.find_next_gate(progress)
    except DamagedFile:
        gate = None
    location = f"{exercise.puzzle.name}, {exercise.rung.label}{f', {gate.id}' if gate else ''}"
    return Text(f"next: {location}: {format_watch_command(exercise, progress)}", style="bold green")


def list_exercises(puzzle: Puzzle) -> list[Exercise]:
    return [Exercise(puzzle, rung) for rung in puzzle.rungs]


def find_current_exercise(files: Sequence[Exercise], progress: Progress) -> Exercise | None:
    """Return the exercise to continue with, or None if everything is solved.

    In order of preference: the attempted, unsolved exercise that was saved last; the first unsolved one after
    all attempted ones; an earlier unsolved one that is not optional.
    """
    attempted = [exercise for exercise in files if is_started(exercise, progress)]
    unsolved = [exercise for exercise in attempted if not is_solved(exercise, progress)]
    if unsolved:
        return max(
            unsolved, key=lambda exercise: exercise.path.stat().st_mtime if exercise.path.exists() else 0
        )
    start = files.index(attempted[-1]) + 1 if attempted else 0
    candidates = [*files[start:], *(exercise for exercise in files[:start] if not exercise.rung.optional)]
    return next((exercise for exercise in candidates if not is_solved(exercise, progress)), None)


def format_watch_command(exercise: Exercise, progress: Progress) -> str:
    first = find_current_exercise(list_exercises(exercise.puzzle), progress)
    flag = "" if first and first.rung.id == exercise.rung.id else f" --rung {exercise.rung.id}"
    return format_command(f"watch {exercise.puzzle.name}{flag}")


def is_started(exercise: Exercise, progress: Progress) -> bool:
    """Check whether any blank of a file is filled in; a damaged or missing file counts as started."""
    return {*list_gate_states(exercise, progress)} != {"unsolved"}


def is_damaged(exercise: Exercise) -> bool:
    """Check whether a file, or a link of its op package, is missing or cannot be read."""
    try:
        return not exercise.read_blanks() or not exercise.target
    except DamagedFile:
        return True


def list_gate_states(exercise: Exercise, progress: Progress) -> list[str]:
    """Return the state of each gate of a file: "damaged" if it is missing or cannot be read."""
    try:
        return [*exercise.get_states(progress).values()]
    except DamagedFile:
        return ["damaged"] * len(exercise.gates)


def describe_next_step(exercise: Exercise, progress: Progress) -> str:
    """Return the line about the next step if every gate of a file has passed, else ""."""
    if any(state != "passed" for state in exercise.get_states(progress).values()):
        return ""
    done = f"{exercise.puzzle.name}, {exercise.rung.label}: {len(exercise.gates)} of {len(exercise.gates)}, solved."
    required = [other for other in list_exercises(exercise.puzzle) if not other.rung.optional]
    finale = next((demo for demo in exercise.puzzle.demos if demo.finale), None)
    whole = all(is_solved(other, progress) for other in required)
    if finale and whole:
        return f"{done} What now: {finale.description}: `{format_command(f'{exercise.puzzle.name} --{finale.flag}')}`"
    step = find_next_exercise(exercise, progress)
    if step is None:
        return f"{done} Nothing is left: `{format_command('verify')}` checks all of it at once."
    location = f"{step.puzzle.name}, {step.rung.label} ({format_path(step.path)})"
    return f"{done} What now: {location}: `{format_watch_command(step, progress)}`"


def find_next_exercise(exercise: Exercise, progress: Progress) -> Exercise | None:
    """Return the next unsolved exercise after this one, else an earlier one that is not optional."""
    order = list(list_all_exercises())
    current = [(step.puzzle.name, step.rung.id) for step in order].index(
        (exercise.puzzle.name, exercise.rung.id)
    )
    later = [*order[current + 1 :], *(step for step in order[:current] if not step.rung.optional)]
    return next((step for step in later if not is_solved(step, progress)), None)


def list_all_exercises() -> Iterator[Exercise]:
    for puzzle in map(find_puzzle, list_puzzle_names()):
        yield from list_exercises(puzzle)


def is_solved(exercise: Exercise, progress: Progress) -> bool:
    return {*list_gate_states(exercise, progress)} == {"passed"}


def format_progress_bar(done: int, total: int, width: int = 20) -> str:
    filled = round(width * done / total) if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


def format_hint(hint: Hint, number: int, total: int, width: int = 0) -> Iterator[Text]:
    """Yield a hint's name and position in the ladder, its paragraph wrapped to `width` unless 0, and code."""
    yield Text(f"Hint {hint.id} ({number} of {total})", style="bold")
    yield from (Text(line) for line in (wrap_paragraph(hint.text, width) if width else [hint.text]))
    for line in hint.code.splitlines():
        yield Text(f"    {line}", style="cyan")


def describe_unsaved(progress: Progress) -> list[Text]:
    """Return a line about progress that could not be saved, or []."""
    message = f"not saved: {format_path(progress.path)} cannot be written ({progress.save_error})"
    return [Text(message, style="yellow")] if progress.save_error else []


def wrap_paragraph(text: str, width: int) -> list[str]:
    """Wrap a paragraph into lines, without line breaks inside `code`."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def read_next_hint(
    exercise: Exercise, gate: str, progress: Progress, number: int | None = None, width: int = 0
) -> list[Text]:
    """Return the lines of a hint, by default the next one, wrapped to `width`, and record it as read."""
    ladder = hints.load_ladder(exercise.puzzle.name, exercise.get_ladder_name(gate))
    key = exercise.get_progress_key(gate)
    if number is not None and not 1 <= number <= len(ladder):
        raise UsageError(f"the ladder of {gate} has rungs 1 to {len(ladder)}, not {number}")
    number = number or min(progress.hints.get(key, 0) + 1, len(ladder))
    last = progress.hints.get(key, 0) >= len(ladder)
    progress.record_hint(key, number)
    lines = list(format_hint(ladder[number - 1], number, len(ladder), width))
    if last and number == len(ladder):
        rung = (
            ""
            if exercise.rung.id == exercise.puzzle.find_gate_rung(gate).id
            else f" --rung {exercise.rung.id}"
        )
        spoil = format_command(f"diff {exercise.puzzle.name} {gate}{rung} --spoil")
        lines.append(Text(f"That is the last rung. `{spoil}` shows the solution.", style="dim"))
    return [*lines, *describe_unsaved(progress)]


def show_difference(
    console: Console, exercise: Exercise, progress: Progress, gates: list[str], *, spoil: bool = False
) -> bool:
    """Print the blanks of some gates next to the solution's; return whether any was printed."""
    states, learner_blanks = exercise.get_states(progress), exercise.read_blanks()
    solution_blanks = blanks.find_blanks(blanks.read_source(exercise.solution), str(exercise.solution))
    printed = False
    for gate in gates:
        if states[gate] != "passed" and not spoil:
            label = STATES[states[gate]][1]
            console.print(Text(f"{gate}: {label}; --spoil shows the solution all the same", style="dim"))
            continue
        width = console.width if console.is_terminal else 0
        pair = format_blanks(learner_blanks[gate], solution_blanks[gate], width)
        console.print(pair, soft_wrap=not width)
        printed = True
    return printed


def format_blanks(learner_blank: Blank, solution_blank: Blank, width: int) -> Group:
    """Return both versions of a blank; lines that occur in only one are marked."""
    learner_lines, solution_lines = list_body_lines(learner_blank), list_body_lines(solution_blank)
    left, right = (
        mark_lines(learner_lines, solution_lines, "red"),
        mark_lines(solution_lines, learner_lines, "green"),
    )
    heading = Text(f"{solution_blank.id}: {solution_blank.task}", style="bold")
    if learner_lines == solution_lines:
        return Group(heading, Text("  the same as the solution", style="green"))
    if width >= SIDE_BY_SIDE_COLUMNS:
        from rich.table import Table  # importing it takes longer than printing a list

        table = Table(expand=True, show_lines=False)
        table.add_column("yours", ratio=1)
        table.add_column("the solution's", ratio=1)
        table.add_row(Text("\n").join(left), Text("\n").join(right))
        return Group(heading, table)
    return Group(
        heading,
        Text("  yours", style="underline"),
        *left,
        Text("  the solution's", style="underline"),
        *right,
    )


def list_body_lines(blank: Blank) -> list[str]:
    return textwrap.dedent("\n".join(line.rstrip() for line in blank.body)).strip("\n").split("\n")


def mark_lines(lines: list[str], other_lines: list[str], style: str) -> list[Text]:
    """Return lines for the terminal; lines that are not in `other_lines` are marked."""
    common = set(find_common_lines(lines, other_lines))
    return [
        Text(f"{'  ' if number in common else '> '}{line}", style="" if number in common else style)
        for number, line in enumerate(lines)
    ]


def find_common_lines(lines: list[str], other_lines: list[str]) -> Iterator[int]:
    """Yield the indices of the lines that occur in both sequences, in the same order."""
    for block in difflib.SequenceMatcher(None, lines, other_lines, autojunk=False).get_matching_blocks():
        yield from range(block.a, block.a + block.size)
