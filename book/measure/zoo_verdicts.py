"""How far each wrong solution in Python is from what is right, as the verdict of its gate says: `python -m book.measure zoo_verdicts`.

The size of an error is relative to the largest element, or to the right value where the verdict shows the first wrong element
alone; it is inf where that is no number, and -1 where what is wrong has no size.
"""

import math
import re
from collections.abc import Iterator
from unittest import mock

from book.measure.shared import write
from harness.check import zoo
from harness.check.checker import make_checker
from harness.learner.work import Work
from harness.puzzles.p21 import hunt
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

NUMBER = r"([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b)"
OFF = re.compile(rf"off by {NUMBER} of the largest|its error is {NUMBER}")
PAIR = re.compile(
    rf"(?:got|[^)] is|are) {NUMBER},? (?:expected|where it should be) {NUMBER}|: {NUMBER} for {NUMBER}$"
)
NO_NUMBER = re.compile(r"elements of \w+ are (NaN|inf)|got (nan|-?inf)\b")


def size(diagnosis: list[str]) -> float | None:
    """The size of an error that a verdict names; None where it names none."""
    for line in diagnosis:
        if off := OFF.search(line):
            return float(off[1] or off[2])
        if NO_NUMBER.search(line):
            return math.inf
        if pair := PAIR.search(line):
            got, right = (float(number) for number in pair.groups() if number is not None)
            if not math.isfinite(got - right):
                return math.inf
            return abs(got - right) / abs(right) if right else math.inf if got else None
    return None


def rows() -> Iterator[dict]:
    """A row for each wrong solution in Python."""
    for name in puzzle_names():
        puzzle = find_puzzle(name)
        checkers = {
            rung.id: make_checker(Work(puzzle, rung, roots.solutions()))
            for rung in puzzle.rungs
            if not isinstance(rung, MojoRung)
        }
        for wrong in zoo.load(name):
            if wrong.of_rung.id in checkers:
                results = checkers[wrong.of_rung.id].check(wrong.target(), [wrong.gate])
                (verdict,) = (result for result in results if result.gate.id == wrong.gate)
                error = size(verdict.diagnosis)
                yield {"puzzle": name, "wrong": wrong.name, "error": -1 if error is None else f"{error:.2g}"}


def main() -> None:
    """Writes them. The usual checks of puzzle 21 take most of the time, and their verdicts are no sizes."""
    with mock.patch.object(hunt, "seen_by", return_value={}):
        write(rows())


if __name__ == "__main__":
    main()
