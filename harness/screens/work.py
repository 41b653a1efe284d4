"""Format a learner's work: the list of gates, the next hint, and blanks next to the solution's."""

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
from harness.learner.hints import Hint
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens.report import compute_name_width
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.puzzle import Puzzle

STATES = {
    "passed": ("✅", "passed"),
    "changed": ("✎", "changed since it passed"),
    "begun": ("✎", "begun, not passed yet"),
    "unsolved": ("·", "unsolved"),
}
SIDE_BY_SIDE = 150
"""Minimum terminal width, in columns, for showing both versions of a blank side by side."""
DAMAGED = "red"
"""The style of the line about a file that cannot be read."""


def format_gates(work: Work, progress: Progress, *, folded: bool = False) -> Iterable[Text]:
    """Yield a file's progress bar and, unless it is `folded`, a line for each gate."""
    title = f"{work.rung.label} ({work.rung.about})" if work.rung.about else work.rung.label
    try:
        states = work.get_states(progress)
    except DamagedFile as error:
        yield Text(f"   {title}: {error}", style=DAMAGED)
        return
    done = sum(state == "passed" for state in states.values())
    yield Text(f"   {format_progress_bar(done, len(states))}  {title}: {format_path(work.path)}")
    width = compute_name_width(work.puzzle)
    for gate in () if folded else work.gates:
        mark, label = STATES[states[gate.id]]
        line = f"      {mark} {gate.id:<{width}} {label:<24} {gate.about}"
        yield Text(line, no_wrap=True, overflow="ellipsis")


def format_puzzle(puzzle: Puzzle, progress: Progress) -> Iterator[Text]:
    """Yield a puzzle's line, with the number of passed gates of required files, then its damaged files."""
    required = [work for work in list_works(puzzle) if not work.rung.optional]
    states = [state for work in required for state in list_gate_states(work, progress)]
    bar = format_progress_bar(states.count("passed"), len(states), 10)
    yield Text(f"{puzzle.name}  {bar:<18} {puzzle.title}", no_wrap=True, overflow="ellipsis")
    for work in list_works(puzzle):
        yield from (line for line in format_gates(work, progress) if line.style == DAMAGED)


def format_next(work: Work, progress: Progress) -> Text:
    """Return the line about the next step, with the command to type."""
    try:
        gate = work.find_next_gate(progress)
    except DamagedFile:
        gate = None
    location = f"{work.puzzle.name}, {work.rung.label}{f', {gate.id}' if gate else ''}"
    return Text(f"next: {location}: {format_watch_command(work, progress)}", style="bold green")


def list_works(puzzle: Puzzle) -> list[Work]:
    return [Work(puzzle, rung) for rung in puzzle.rungs]


def find_current_work(files: Sequence[Work], progress: Progress) -> Work | None:
    """Return the file that the learner is working on; None if everything is solved.

    It is the attempted, unsolved file that was saved last, else the first unsolved one after all attempted
    files, else an earlier one that is not optional.
    """
    attempted = [work for work in files if is_begun(work, progress)]
    unsolved = [work for work in attempted if not is_solved(work, progress)]
    if unsolved:
        return max(unsolved, key=lambda work: work.path.stat().st_mtime if work.path.exists() else 0)
    start = files.index(attempted[-1]) + 1 if attempted else 0
    candidates = [*files[start:], *(work for work in files[:start] if not work.rung.optional)]
    return next((work for work in candidates if not is_solved(work, progress)), None)


def format_watch_command(work: Work, progress: Progress) -> str:
    first = find_current_work(list_works(work.puzzle), progress)
    flag = "" if first and first.rung.id == work.rung.id else f" --rung {work.rung.id}"
    return format_command(f"watch {work.puzzle.name}{flag}")


def is_begun(work: Work, progress: Progress) -> bool:
    """Check whether any blank of a file is filled in; a damaged or missing file counts as begun."""
    return {*list_gate_states(work, progress)} != {"unsolved"}


def is_damaged(work: Work) -> bool:
    """Check whether a file, or a link of its op package, is missing or cannot be read."""
    try:
        return not work.read_blanks() or not work.target
    except DamagedFile:
        return True


def list_gate_states(work: Work, progress: Progress) -> list[str]:
    """Return the state of each gate of a file: "damaged" if it is missing or cannot be read."""
    try:
        return [*work.get_states(progress).values()]
    except DamagedFile:
        return ["damaged"] * len(work.gates)


def describe_next_step(work: Work, progress: Progress) -> str:
    """Return the line about the next step once every gate of a file has passed, else "".

    It names only files that are not solved.
    """
    if any(state != "passed" for state in work.get_states(progress).values()):
        return ""
    done = f"{work.puzzle.name}, {work.rung.label}: {len(work.gates)} of {len(work.gates)}, solved."
    required = [file_work for file_work in list_works(work.puzzle) if not file_work.rung.optional]
    finale = next((demo for demo in work.puzzle.demos if demo.finale), None)
    whole = all(is_solved(file_work, progress) for file_work in required)
    if finale and whole:
        return f"{done} What now: {finale.about}: `{format_command(f'{work.puzzle.name} --{finale.flag}')}`"
    step = find_next_work(work, progress)
    if step is None:
        return f"{done} Nothing is left: `{format_command('verify')}` checks all of it at once."
    location = f"{step.puzzle.name}, {step.rung.label} ({format_path(step.path)})"
    return f"{done} What now: {location}: `{format_watch_command(step, progress)}`"


def find_next_work(work: Work, progress: Progress) -> Work | None:
    """Return the next unsolved file after this one, else an earlier one that is not optional."""
    order = list(list_all_works())
    current = [(step.puzzle.name, step.rung.id) for step in order].index((work.puzzle.name, work.rung.id))
    later = [*order[current + 1 :], *(step for step in order[:current] if not step.rung.optional)]
    return next((step for step in later if not is_solved(step, progress)), None)


def list_all_works() -> Iterator[Work]:
    for puzzle in map(find_puzzle, list_puzzle_names()):
        yield from list_works(puzzle)


def is_solved(work: Work, progress: Progress) -> bool:
    return {*list_gate_states(work, progress)} == {"passed"}


def format_progress_bar(done: int, total: int, width: int = 20) -> str:
    filled = round(width * done / total) if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


def format_hint(hint: Hint, number: int, total: int, width: int = 0) -> Iterator[Text]:
    """Yield a hint: its name and position in the ladder, paragraph, and code; wrapped to `width` unless 0."""
    yield Text(f"Hint {hint.id} ({number} of {total})", style="bold")
    yield from (Text(line) for line in (wrap_paragraph(hint.text, width) if width else [hint.text]))
    for line in hint.code.splitlines():
        yield Text(f"    {line}", style="cyan")


def describe_unsaved(progress: Progress) -> list[Text]:
    """Return a line with the reason why progress could not be saved, or [] if it was saved."""
    message = f"not saved: {format_path(progress.path)} cannot be written ({progress.save_error})"
    return [Text(message, style="yellow")] if progress.save_error else []


def wrap_paragraph(text: str, width: int) -> list[str]:
    """Wrap a paragraph into lines, without breaks inside `code`."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def read_next_hint(
    work: Work, gate: str, progress: Progress, number: int | None = None, width: int = 0
) -> list[Text]:
    """Return the lines of a hint, by default the next one, wrapped to `width`, and record it as read."""
    ladder = hints.load_ladder(work.puzzle.name, work.get_ladder_name(gate))
    key = work.get_progress_key(gate)
    if number is not None and not 1 <= number <= len(ladder):
        raise UsageError(f"the ladder of {gate} has rungs 1 to {len(ladder)}, not {number}")
    number = number or min(progress.hints.get(key, 0) + 1, len(ladder))
    last = progress.hints.get(key, 0) >= len(ladder)
    progress.record_hint(key, number)
    lines = list(format_hint(ladder[number - 1], number, len(ladder), width))
    if last and number == len(ladder):
        rung = "" if work.rung.id == work.puzzle.find_gate_rung(gate).id else f" --rung {work.rung.id}"
        spoil = format_command(f"diff {work.puzzle.name} {gate}{rung} --spoil")
        lines.append(Text(f"That is the last rung. `{spoil}` shows the solution.", style="dim"))
    return [*lines, *describe_unsaved(progress)]


def show_difference(
    console: Console, work: Work, progress: Progress, gates: list[str], *, spoil: bool = False
) -> bool:
    """Print the blanks of some gates next to the solution's; return whether any was printed."""
    states, yours = work.get_states(progress), work.read_blanks()
    ours = blanks.find_blanks(blanks.read_source(work.solution), str(work.solution))
    printed = False
    for gate in gates:
        if states[gate] != "passed" and not spoil:
            label = STATES[states[gate]][1]
            console.print(Text(f"{gate}: {label}; --spoil shows the solution all the same", style="dim"))
            continue
        width = console.width if console.is_terminal else 0
        console.print(format_blanks(yours[gate], ours[gate], width), soft_wrap=not width)
        printed = True
    return printed


def format_blanks(yours: Blank, ours: Blank, width: int) -> Group:
    """Return both versions of a blank; lines in only one of them are marked."""
    mine, theirs = list_body_lines(yours), list_body_lines(ours)
    left, right = mark_lines(mine, theirs, "red"), mark_lines(theirs, mine, "green")
    heading = Text(f"{ours.id}: {ours.task}", style="bold")
    if mine == theirs:
        return Group(heading, Text("  the same as the solution", style="green"))
    if width >= SIDE_BY_SIDE:
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


def mark_lines(these: list[str], others: list[str], style: str) -> list[Text]:
    """Return lines for the terminal; lines missing from the other side are marked."""
    common = set(find_matching(these, others))
    return [
        Text(f"{'  ' if number in common else '> '}{line}", style="" if number in common else style)
        for number, line in enumerate(these)
    ]


def find_matching(these: list[str], others: list[str]) -> Iterator[int]:
    """Yield the indices of the lines common to both sides, in the same order."""
    for block in difflib.SequenceMatcher(None, these, others, autojunk=False).get_matching_blocks():
        yield from range(block.a, block.a + block.size)
