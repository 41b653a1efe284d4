"""The path that a learner took through a puzzle: tries and hints for each gate, and the time, as the progress file has them."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.learner.hints import ladders
from harness.learner.progress import Progress
from harness.learner.work import Work


@dataclass(frozen=True)
class GateScore:
    """One gate on the way: its id, whether it has passed, the tries that it took, and the hints read of those there are."""

    id: str
    passed: bool
    tries: int
    hints: int
    ladder: int


@dataclass(frozen=True)
class Score:
    """The gates of a puzzle's files in the order in which they are taken, and the seconds spent on them."""

    gates: tuple[GateScore, ...]
    seconds: float

    @property
    def solved(self) -> bool:
        """Whether every gate has passed."""
        return all(gate.passed for gate in self.gates)

    @property
    def words(self) -> str:
        """ "14 tries at 8 gates, 1 h 5 min, 3 of 24 hints"."""
        tries, count = sum(gate.tries for gate in self.gates), len(self.gates)
        hints, there = sum(gate.hints for gate in self.gates), sum(gate.ladder for gate in self.gates)
        first = f"{tries} {'try' if tries == 1 else 'tries'} at {count} {'gate' if count == 1 else 'gates'}"
        return f"{first}, {duration(self.seconds)}, {hints} of {there} hints"


def duration(seconds: float) -> str:
    """ "1 h 5 min", "12 min", "less than a minute"."""
    hours, minutes = divmod(int(seconds) // 60, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes)
    return " ".join(parts) or "less than a minute"


def score_of(works: Sequence[Work], progress: Progress) -> Score:
    """The path through some files of one puzzle; an optional one counts where somebody tried it.

    Raises DamagedFile where a file cannot be read, BadUse where the hints are missing.
    """
    puzzle = works[0].puzzle
    there = ladders(puzzle.name)
    gates: list[GateScore] = []
    for work in works:
        states = work.states(progress)
        keys = {gate.id: work.key(gate.id) for gate in work.gates}
        if work.rung.optional and not any(key in progress.tries for key in keys.values()):
            continue
        for gate, key in keys.items():
            ladder = len(there.get(work.ladder(gate), ()))
            passed, tries = states[gate] == "passed", progress.tries.get(key, 0)
            gates.append(GateScore(gate, passed, max(tries, int(passed)), progress.hints.get(key, 0), ladder))
    return Score(tuple(gates), progress.spent.get(puzzle.name, 0.0))
