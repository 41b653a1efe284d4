"""What a check comes to, whatever it checked: verdicts by case and by gate. Loads neither torch nor MAX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.check.compare import Verdict
from harness.errors import unknown_gate
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import Rung

if TYPE_CHECKING:
    from harness.vgpu import Finding


@dataclass
class Comparison:
    """One case: the verdict of every quantity that was compared."""

    case: Case
    verdicts: dict[str, Verdict]


def right_in_all(comparisons: Iterable[Comparison]) -> set[str]:
    """The quantities that are right in every case in which they were compared."""
    verdicts = [item for comparison in comparisons for item in comparison.verdicts.items()]
    return {quantity for quantity, _ in verdicts} - {
        quantity for quantity, verdict in verdicts if not verdict.ok
    }


@dataclass
class GateResult:
    """The verdict on one gate of any rung.

    Attributes:
        gate: Which one.
        state: "unsolved" (the blank is untouched), "wrong" or "correct".
        comparisons: One for each case, with the verdicts of the gate's quantities; empty where nothing was compared.
        findings: The virtual GPU's memory, race and barrier findings that belong to the gate, errors only.
        diagnosis: What is wrong, line by line; empty unless wrong.
        mistake: The id of the known mistake that the result equals, or None.
        hint: The hint to read next, as "dx-2"; None unless wrong.
        summary: What a line says behind "correct" where there are no comparisons to count.
        by_itself: Whether its values are right but for a known mistake in its own last step.
        picture: What the learner's own run looks like, line by line, below the verdict, right or wrong.
    """

    gate: Gate
    state: str
    comparisons: list[Comparison] = field(default_factory=list)
    findings: list["Finding"] = field(default_factory=list)
    diagnosis: list[str] = field(default_factory=list)
    mistake: str | None = None
    hint: str | None = None
    summary: str = ""
    by_itself: bool = False
    picture: list[str] = field(default_factory=list)


def exit_code(results: Iterable[GateResult], wanted: Iterable[str]) -> int:
    """1 where a gate is wrong, or one of those that were wanted has no verdict; 3 where one is unsolved, 0 where all are correct."""
    states = {result.gate.id: result.state for result in results}
    found = {states.get(id, "wrong") for id in wanted} | {*states.values()}
    return 1 if found - {"correct", "unsolved"} else 3 if "unsolved" in found else 0


def wanted_gates(puzzle: Puzzle, rung: Rung, ids: Sequence[str] | None) -> list[Gate]:
    """The gates of a rung that are asked for, in its order; None asks for all. Raises BadUse, naming those there are."""
    for id in ids or ():
        if id not in rung.gates:
            raise unknown_gate(id, rung.gates)
    return [gate for gate in puzzle.gates_of(rung) if ids is None or gate.id in ids]
