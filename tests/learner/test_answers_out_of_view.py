"""No line of a solution's blank occurs elsewhere in the learner's file, or on a page before its "Solution".

Only computing lines are compared, as token lists. Long formulas count as equal if most tokens are, since a
tensor may have another name.
"""

import difflib
import re
from collections.abc import Sequence

import pytest

from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.toolchain import roots

FILES = [Exercise(puzzle, rung) for puzzle in map(find_puzzle, list_puzzle_names()) for rung in puzzle.rungs]
MIN_SIMILARITY = 0.8
ALLOWED_LINES = {("p20", "mojo"): "var x_hat = (x[c].cast[accum]() - row_mean) * row_rstd"}
"""Provided lines that also occur in a blank but are not its answer."""
MIN_LONG_OPERATORS = 3
"""Minimum number of operators in a long formula."""


def split_tokens(line: str) -> list[str]:
    """Split a line without its comment into tokens."""
    return re.findall(r"\w+|[^\w\s]", line.split("#")[0])


def count_operators(line: str) -> int:
    """Count the operators of a line outside indices."""
    code = re.sub(r"\[[^\[\]]*\]", "", line.split("#")[0]).replace("->", "").replace("**", "*")
    return len(re.findall(r"(?<=[\w)\]]) ?(?:[-+*/@]|\+=) ?(?=[\w(])", code))


def is_computation(line: str) -> bool:
    """Return whether a line has an operator and at least three names."""
    return count_operators(line) > 0 and len(set(re.findall(r"[A-Za-z_]\w+", line))) > 2


def find_equal_lines(answer: str, lines: Sequence[str]) -> list[str]:
    """Return the lines that equal an answer."""
    threshold = MIN_SIMILARITY if count_operators(answer) >= MIN_LONG_OPERATORS else 1.0
    tokens = split_tokens(answer)
    return [
        line
        for line in lines
        if is_computation(line)
        and difflib.SequenceMatcher(None, tokens, split_tokens(line)).ratio() >= threshold
    ]


def list_answers(exercise: Exercise) -> list[tuple[str, str]]:
    """Return (blank id, line) for each computing line of a file's blanks."""
    by_id = blanks.find_blanks(exercise.solution.read_text())
    # Compare provided wrong code with the lines around it.
    bodies = {id: blank.body for id, blank in by_id.items() if not blank.provided}
    return [(id, line.strip()) for id, body in bodies.items() for line in body if is_computation(line)]


@pytest.mark.parametrize("exercise", FILES, ids=lambda exercise: f"{exercise.puzzle.name}-{exercise.rung.id}")
def test_provided_lines_contain_no_answer(exercise):
    lines = blanks.remove_blanks(blanks.make_skeleton(exercise.solution.read_text())).split("\n")
    allowed_line = ALLOWED_LINES.get((exercise.puzzle.name, exercise.rung.id))
    lines = [line for line in lines if line.strip() != allowed_line]
    exposed = [
        (id, line, equal_line)
        for id, line in list_answers(exercise)
        for equal_line in find_equal_lines(line, lines)
    ]
    assert not exposed, "\n".join(f"{id}: {line} | {equal_line.strip()}" for id, line, equal_line in exposed)


@pytest.mark.parametrize("name", list_puzzle_names())
def test_page_code_before_the_solution_contains_no_answer(name):
    folder = roots.CHECKOUT / "book" / "src" / f"puzzle_{name[1:]}"
    answers = [
        (exercise, *answer)
        for exercise in FILES
        if exercise.puzzle.name == name
        for answer in list_answers(exercise)
    ]
    exposed = []
    for page in sorted(folder.glob("*.md")):
        text = re.split(r"(?m)^#+ .*Solution|<summary>.*[Ss]olution", page.read_text())[0]
        code = "\n".join(re.findall(r"(?ms)^```(?:mojo|python).*?^```", text)).split("\n")
        exposed += [
            f"{page.name}: {id}: {line} | {s}"
            for _, id, line in answers
            for s in find_equal_lines(line, code)
        ]
    assert not exposed, "\n".join(exposed)
