"""A learner's work on the screen: the list of gates, the next hint, the lines beside the solution's."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from harness.console import shown
from harness.errors import BadUse, DamagedFile
from harness.learner import blanks, hints
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens import difference, gate_report


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
        command = f"python -m harness diff {work.puzzle.name} {gate}{rung} --spoil"
        lines.append(Text(f"That is the last rung. `{command}` shows the solution.", style="dim"))
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
