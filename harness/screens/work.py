"""Format a learner's work: the list of gates, the next hint, the lines next to the solution's."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group
from rich.text import Text

from harness.console import shown
from harness.errors import BadUse, DamagedFile
from harness.invocation import command
from harness.learner import blanks, hints
from harness.learner.blanks import Blank
from harness.learner.hints import Hint
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens.report import name_width
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.puzzle import Puzzle

STATES = {
    "passed": ("✅", "passed"),
    "changed": ("✎", "changed since it passed"),
    "begun": ("✎", "begun, not passed yet"),
    "unsolved": ("·", "unsolved"),
}
SIDE_BY_SIDE = 150
"""Columns of a terminal from which both versions of a blank are shown side by side, else one below the
other."""
DAMAGED = "red"
"""The style of the line of a file that cannot be read."""


def list_lines(work: Work, progress: Progress, *, folded: bool = False) -> Iterable[Text]:
    """Return one file: its progress bar, then, unless it is folded, a line for each gate."""
    title = f"{work.rung.words} ({work.rung.about})" if work.rung.about else work.rung.words
    try:
        states = work.states(progress)
    except DamagedFile as error:
        yield Text(f"   {title}: {error}", style=DAMAGED)
        return
    done = sum(state == "passed" for state in states.values())
    yield Text(f"   {progress_bar(done, len(states))}  {title}: {shown(work.path)}")
    width = name_width(work.puzzle)
    for gate in () if folded else work.gates:
        mark, words = STATES[states[gate.id]]
        line = f"      {mark} {gate.id:<{width}} {words:<24} {gate.about}"
        yield Text(line, no_wrap=True, overflow="ellipsis")


def puzzle_lines(puzzle: Puzzle, progress: Progress) -> Iterator[Text]:
    """Yield one puzzle in a line: how many of its gates have passed, those of optional files left out; then
    its damaged files."""
    states = [
        state for work in works(puzzle) if not work.rung.optional for state in gate_states(work, progress)
    ]
    bar = progress_bar(states.count("passed"), len(states), 10)
    yield Text(f"{puzzle.name}  {bar:<18} {puzzle.title}", no_wrap=True, overflow="ellipsis")
    for work in works(puzzle):
        yield from (line for line in list_lines(work, progress) if line.style == DAMAGED)


def next_line(work: Work, progress: Progress) -> Text:
    """Return the line about the next step, with the command to type."""
    try:
        gate = work.next_gate(progress)
    except DamagedFile:
        gate = None
    what = f"{work.puzzle.name}, {work.rung.words}{f', {gate.id}' if gate else ''}"
    return Text(f"next: {what}: {watching(work, progress)}", style="bold green")


def works(puzzle: Puzzle) -> list[Work]:
    """Return a puzzle's files with blanks, in the order in which they are taken."""
    return [Work(puzzle, rung) for rung in puzzle.rungs]


def current_work(files: Sequence[Work], progress: Progress) -> Work | None:
    """Return the file that the learner is working on; None if everything is solved.

    It is the attempted, unsolved file that was saved last; else the first unsolved one after every attempted
    file; else an earlier one, unless it is optional.
    """
    begun = [work for work in files if is_begun(work, progress)]
    unsolved = [work for work in begun if not is_solved(work, progress)]
    if unsolved:
        return max(unsolved, key=lambda work: work.path.stat().st_mtime if work.path.exists() else 0)
    after = files.index(begun[-1]) + 1 if begun else 0
    order = [*files[after:], *(work for work in files[:after] if not work.rung.optional)]
    return next((work for work in order if not is_solved(work, progress)), None)


def watching(work: Work, progress: Progress) -> str:
    """Return the command that watches a file; it names the rung unless that is the default."""
    first = current_work(works(work.puzzle), progress)
    flag = "" if first and first.rung.id == work.rung.id else f" --rung {work.rung.id}"
    return command(f"watch {work.puzzle.name}{flag}")


def is_begun(work: Work, progress: Progress) -> bool:
    """Check whether a file has anything in its blanks; a damaged or missing one counts as begun."""
    return {*gate_states(work, progress)} != {"unsolved"}


def is_damaged(work: Work) -> bool:
    """Check whether a file, or a link of its op package, is missing or cannot be read."""
    try:
        return not work.blanks() or not work.target
    except DamagedFile:
        return True


def gate_states(work: Work, progress: Progress) -> list[str]:
    """Return the state of each gate of a file: "damaged" if it is missing or cannot be read."""
    try:
        return [*work.states(progress).values()]
    except DamagedFile:
        return ["damaged"] * len(work.gates)


def next_step(work: Work, progress: Progress) -> str:
    """Return the line about the next step once every gate of a file has passed: the puzzle's next rung, or
    the next puzzle.

    Empty while a gate is left. A rung that has passed already is not named again.
    """
    if any(state != "passed" for state in work.states(progress).values()):
        return ""
    done = f"{work.puzzle.name}, {work.rung.words}: {len(work.gates)} of {len(work.gates)}, solved."
    mine = [each for each in works(work.puzzle) if not each.rung.optional]
    finale = next((demo for demo in work.puzzle.demos if demo.finale), None)
    whole = all(is_solved(each, progress) for each in mine)
    if finale and whole:
        return f"{done} What now: {finale.about}: `{command(f'{work.puzzle.name} --{finale.flag}')}`"
    step = following(work, progress)
    if step is None:
        return f"{done} Nothing is left: `{command('verify')}` checks all of it at once."
    where = f"{step.puzzle.name}, {step.rung.words} ({shown(step.path)})"
    return f"{done} What now: {where}: `{watching(step, progress)}`"


def following(work: Work, progress: Progress) -> Work | None:
    """Return the file to go on with after one: the next unsolved one, else one before it that is not
    optional."""
    order = list(steps())
    here = [(step.puzzle.name, step.rung.id) for step in order].index((work.puzzle.name, work.rung.id))
    after = [*order[here + 1 :], *(step for step in order[:here] if not step.rung.optional)]
    return next((step for step in after if not is_solved(step, progress)), None)


def steps() -> Iterator[Work]:
    """Yield every file with blanks in the order in which they are taken: puzzle by puzzle, and of each its
    rungs."""
    for puzzle in map(find_puzzle, puzzle_names()):
        yield from works(puzzle)


def is_solved(work: Work, progress: Progress) -> bool:
    """Check whether every gate of a file has passed; one that cannot be read counts as open."""
    return {*gate_states(work, progress)} == {"passed"}


def progress_bar(done: int, total: int, width: int = 20) -> str:
    """Return `[########------------] 3/7`."""
    filled = round(width * done / total) if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


def hint_lines(hint: Hint, number: int, total: int, width: int = 0) -> Iterator[Text]:
    """Yield a hint: its name and place in the ladder, the paragraph, the code; wrapped to `width` columns
    unless 0."""
    yield Text(f"Hint {hint.id} ({number} of {total})", style="bold")
    yield from (Text(line) for line in (wrap(hint.text, width) if width else [hint.text]))
    for line in hint.code.splitlines():
        yield Text(f"    {line}", style="cyan")


def unsaved_lines(progress: Progress) -> list[Text]:
    """Return the line about progress that could not be saved, and why; none if it was saved."""
    words = f"not noted: {shown(progress.path)} cannot be written ({progress.trouble})"
    return [Text(words, style="yellow")] if progress.trouble else []


def wrap(text: str, width: int) -> list[str]:
    """Return a paragraph in lines; no line ends within `code`."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def next_hint(
    work: Work, gate: str, progress: Progress, number: int | None = None, width: int = 0
) -> list[Text]:
    """Return the lines of a hint, by default the next one, and record it as read; `width` of a terminal."""
    ladder = hints.ladder(work.puzzle.name, work.ladder(gate))
    key = work.key(gate)
    if number is not None and not 1 <= number <= len(ladder):
        raise BadUse(f"the ladder of {gate} has rungs 1 to {len(ladder)}, not {number}")
    number = number or min(progress.hints.get(key, 0) + 1, len(ladder))
    last = progress.hints.get(key, 0) >= len(ladder)
    progress.read_hint(key, number)
    lines = list(hint_lines(ladder[number - 1], number, len(ladder), width))
    if last and number == len(ladder):
        rung = "" if work.rung.id == work.puzzle.rung_of(gate).id else f" --rung {work.rung.id}"
        spoil = command(f"diff {work.puzzle.name} {gate}{rung} --spoil")
        lines.append(Text(f"That is the last rung. `{spoil}` shows the solution.", style="dim"))
    return [*lines, *unsaved_lines(progress)]


def show_difference(
    console: Console, work: Work, progress: Progress, gates: list[str], *, spoil: bool = False
) -> bool:
    """Print the difference of some gates; returns whether there is one."""
    states, yours = work.states(progress), work.blanks()
    ours = blanks.find(blanks.read(work.solution), str(work.solution))
    printed = False
    for gate in gates:
        if states[gate] != "passed" and not spoil:
            words = STATES[states[gate]][1]
            console.print(Text(f"{gate}: {words}; --spoil shows the solution all the same", style="dim"))
            continue
        width = console.width if console.is_terminal else 0
        console.print(region(yours[gate], ours[gate], width), soft_wrap=not width)
        printed = True
    return printed


def region(yours: Blank, ours: Blank, width: int) -> Group:
    """Return one blank in both versions; lines that only one of them has are marked."""
    mine, theirs = body_of(yours), body_of(ours)
    left, right = mark(mine, theirs, "red"), mark(theirs, mine, "green")
    heading = Text(f"{ours.id}: {ours.task}", style="bold")
    if mine == theirs:
        return Group(heading, Text("  the same as the solution", style="green"))
    if width >= SIDE_BY_SIDE:
        from rich.table import Table  # takes longer to import than a list to print

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


def body_of(blank: Blank) -> list[str]:
    """Return the body of a blank without its indentation and without spaces at line ends."""
    return textwrap.dedent("\n".join(line.rstrip() for line in blank.body)).strip("\n").split("\n")


def mark(these: list[str], others: list[str], style: str) -> list[Text]:
    """Return lines for the terminal; those that the other side lacks get a mark."""
    same = set(matching(these, others))
    return [
        Text(f"{'  ' if number in same else '> '}{line}", style="" if number in same else style)
        for number, line in enumerate(these)
    ]


def matching(these: list[str], others: list[str]) -> Iterator[int]:
    """Yield the numbers of the lines that both sides have, in an order that fits both."""
    for block in difflib.SequenceMatcher(None, these, others, autojunk=False).get_matching_blocks():
        yield from range(block.a, block.a + block.size)
