"""A learner's work on the screen: the list of gates, the next hint, the lines beside the solution's."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from harness.console import shown
from harness.errors import BadUse, DamagedFile
from harness.invocation import command
from harness.learner import blanks, hints
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens import difference, gate_report
from harness.spec.catalogue import find_puzzle, puzzle_names


def list_lines(work: Work, progress: Progress) -> Iterable[Text]:
    """One file: its progress bar, then a line for each gate."""
    title = f"{work.rung.words} ({work.rung.about})" if work.rung.about else work.rung.words
    try:
        states = work.states(progress)
    except DamagedFile as error:
        yield Text(f"   {title}: {error}", style="red")
        return
    done = sum(state == "passed" for state in states.values())
    yield Text(f"   {gate_report.progress_bar(done, len(states))}  {title}: {shown(work.path)}")
    width = gate_report.name_width(work.puzzle)
    for gate in work.gates:
        mark, words = gate_report.STATES[states[gate.id]]
        yield Text(f"      {mark} {gate.id:<{width}} {words + '':<24} {gate.about}")


def next_step(work: Work, progress: Progress) -> str:
    """The one line that says what now, once every gate of a file has passed: the puzzle's next rung, or the next puzzle.

    Empty while a gate is left. A rung that has passed already is not named again.
    """
    if any(state != "passed" for state in work.states(progress).values()):
        return ""
    done = f"{work.puzzle.name}, {work.rung.words}: {len(work.gates)} of {len(work.gates)}, solved."
    order = list(steps())
    here = [(step.puzzle.name, step.rung.id) for step in order].index((work.puzzle.name, work.rung.id))
    for step in [*order[here + 1 :], *(step for step in order[:here] if not step.rung.optional)]:
        if is_solved(step, progress):
            continue
        flag = "" if step.rung.id == step.puzzle.main_rung.id else f" --rung {step.rung.id}"
        typed = command(f"watch {step.puzzle.name}{flag}")
        return f"{done} What now: {step.puzzle.name}, {step.rung.words} ({shown(step.path)}): `{typed}`"
    return f"{done} Nothing is left: `{command('verify')}` checks all of it at once."


def steps() -> Iterator[Work]:
    """Every file with blanks in the order in which they are taken: puzzle by puzzle, and of each its rungs."""
    for puzzle in map(find_puzzle, puzzle_names()):
        for rung in puzzle.rungs:
            yield Work(puzzle, rung)


def is_solved(work: Work, progress: Progress) -> bool:
    """Whether every gate of a file has passed; one that cannot be read counts as open."""
    try:
        return all(state == "passed" for state in work.states(progress).values())
    except DamagedFile:
        return False


def next_hint(work: Work, gate: str, progress: Progress, number: int | None = None) -> list[Text]:
    """The lines of a rung, the next one unless a number is given, which is then remembered as read."""
    ladder = hints.ladder(work.puzzle.name, work.ladder(gate))
    key = work.key(gate)
    if number is not None and not 1 <= number <= len(ladder):
        raise BadUse(f"the ladder of {gate} has rungs 1 to {len(ladder)}, not {number}")
    number = number or min(progress.hints.get(key, 0) + 1, len(ladder))
    last = progress.hints.get(key, 0) >= len(ladder)
    progress.read_hint(key, number)
    lines = list(gate_report.hint_lines(ladder[number - 1], number, len(ladder)))
    if last and number == len(ladder):
        rung = "" if work.rung.id == work.puzzle.rung_of(gate).id else f" --rung {work.rung.id}"
        spoil = command(f"diff {work.puzzle.name} {gate}{rung} --spoil")
        lines.append(Text(f"That is the last rung. `{spoil}` shows the solution.", style="dim"))
    return lines


def show_difference(
    console: Console, work: Work, progress: Progress, gates: list[str], *, spoil: bool = False
) -> bool:
    """Prints the difference of some gates; returns whether there was one to print."""
    states, yours = work.states(progress), work.blanks()
    ours = blanks.find(blanks.read(work.solution), str(work.solution))
    printed = False
    for gate in gates:
        if states[gate] != "passed" and not spoil:
            words = gate_report.STATES[states[gate]][1]
            console.print(Text(f"{gate}: {words}; --spoil shows the solution all the same", style="dim"))
            continue
        width = console.width if console.is_terminal else 0
        console.print(difference.region(yours[gate], ours[gate], width), soft_wrap=not width)
        printed = True
    return printed
