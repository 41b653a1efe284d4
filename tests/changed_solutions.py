"""Write edited copies of a puzzle's Python solutions."""

from pathlib import Path

from harness.learner import blanks
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots


def write_edited_solution(
    puzzle: Puzzle, rung: str, folder: Path, *edits: tuple[str, str], **bodies: str
) -> Path:
    """Write a rung's solution with blanks replaced by `bodies` and strings, which must occur exactly once, by `edits`."""
    path = folder / puzzle.find_rung(rung).file
    text = (roots.get_solutions() / puzzle.name / path.name).read_text("utf-8")
    text = blanks.join_segments(
        blanks.split_blanks(text), {id: tuple(body.split("\n")) for id, body in bodies.items()}
    )
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, "utf-8")
    return path
