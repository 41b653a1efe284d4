"""No answer lies in view: no given line of a learner's file, and none of a page before its "Solution", is what a blank wants.

What counts is a line that computes. Two lines are the same where their words and signs are; a long formula already where
most of them are, so that another name of a tensor hides nothing.
"""

import difflib
import re
from collections.abc import Sequence

import pytest

from harness.learner import blanks
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.toolchain import roots

FILES = [Work(puzzle, rung) for puzzle in map(find_puzzle, puzzle_names()) for rung in puzzle.rungs]
NEAR = 0.8
STEPS = {("p20", "mojo"): "var x_hat = (x[c].cast[accum]() - row_mean) * row_rstd"}
"""Given on purpose: a step by which a given kernel shows what its row is, and that no blank is about."""
LONG = 3
"""So many operators make a formula."""


def words(line: str) -> list[str]:
    """The words and signs of a line, comments left out."""
    return re.findall(r"\w+|[^\w\s]", line.split("#")[0])


def operators(line: str) -> int:
    """How many operations a line holds, those between indices left out."""
    code = re.sub(r"\[[^\[\]]*\]", "", line.split("#")[0]).replace("->", "").replace("**", "*")
    return len(re.findall(r"(?<=[\w)\]]) ?(?:[-+*/@]|\+=) ?(?=[\w(])", code))


def computes(line: str) -> bool:
    """Whether a line is an answer: an operation on at least two names."""
    return operators(line) > 0 and len(set(re.findall(r"[A-Za-z_]\w+", line))) > 2


def given_away(wanted: str, lines: Sequence[str]) -> list[str]:
    """The lines among some that are the wanted one."""
    near = NEAR if operators(wanted) >= LONG else 1.0
    mine = words(wanted)
    return [
        line
        for line in lines
        if computes(line) and difflib.SequenceMatcher(None, mine, words(line)).ratio() >= near
    ]


def answers(work: Work) -> list[tuple[str, str]]:
    """Blank and line of everything that a file's blanks want."""
    by_id = blanks.find(work.solution.read_text())
    # A blank that is given with wrong code is mended in its place, among lines that are meant to be compared.
    bodies = {id: blank.body for id, blank in by_id.items() if not blank.given}
    return [(id, line.strip()) for id, body in bodies.items() for line in body if computes(line)]


@pytest.mark.parametrize("work", FILES, ids=lambda work: f"{work.puzzle.name}-{work.rung.id}")
def test_no_given_line_of_a_learner_s_file_is_an_answer(work):
    lines = blanks.outside(blanks.skeleton(work.solution.read_text())).split("\n")
    step = STEPS.get((work.puzzle.name, work.rung.id))
    lines = [line for line in lines if line.strip() != step]
    shown = [(id, line, given) for id, line in answers(work) for given in given_away(line, lines)]
    assert not shown, "\n".join(f"{id}: {line} | {given.strip()}" for id, line, given in shown)


@pytest.mark.parametrize("name", puzzle_names())
def test_no_code_on_a_page_before_its_solution_is_an_answer(name):
    folder = roots.CHECKOUT / "book" / "src" / f"puzzle_{name[1:]}"
    wanted = [(work, *answer) for work in FILES if work.puzzle.name == name for answer in answers(work)]
    shown = []
    for page in sorted(folder.glob("*.md")):
        text = re.split(r"(?m)^#+ .*Solution|<summary>.*[Ss]olution", page.read_text())[0]
        code = "\n".join(re.findall(r"(?ms)^```(?:mojo|python).*?^```", text)).split("\n")
        shown += [
            f"{page.name}: {id}: {line} | {s}" for _, id, line in wanted for s in given_away(line, code)
        ]
    assert not shown, "\n".join(shown)


def test_an_answer_is_seen_under_another_name():
    wanted = "dx[row, h] = (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()"
    assert given_away(
        wanted, ["  dx[row, h] = (rstd[unsafe_offset=row] * (g - c2 - x_hat * c1)).cast[dtype]()"]
    )
    assert given_away("total += x * y", ["total += x * y  # what it is"])
    assert not given_away(
        "total += x * y", ["total += x * z", "for h in range(H):", "y[row, o] = total.total"]
    )
    assert not computes("total = CompensatedSum[accum]()") and not computes("for h in range(H):")
