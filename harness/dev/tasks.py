"""The tasks that uv and pixi offer, written from one list: those below, and one for each puzzle.

Both files keep everything outside their table of tasks byte for byte.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from harness.errors import DamagedFile
from harness.spec.puzzle import Puzzle

Task = tuple[str, str, str]
"""Name, command and description."""

FIXED: tuple[Task, ...] = (
    ("init", "python -m harness init", "A folder of your own to solve puzzles in: init DIR"),
    ("update", "python -m harness update", "Renew a folder that init made; your blanks stay"),
    ("list", "python -m harness list", "Puzzles, gates and progress"),
    ("hint", "python -m harness hint", "The next hint: hint pNN dx"),
    ("watch", "python -m harness watch", "Check the current gate on every save: watch pNN"),
    ("diff", "python -m harness diff", "Your blanks beside the solution's: diff pNN"),
    ("score", "python -m harness score", "Your path through a puzzle, and a card: score pNN"),
    ("reset", "python -m harness reset", "Put a puzzle or one blank back, keeping a copy: reset pNN dx"),
    ("verify", "python -m harness verify", "Check all of your work"),
    ("doctor", "python -m harness doctor", "What this machine has and lacks"),
    (
        "extension",
        "python -m harness build-ext",
        "Build the layer's extension module for a GPU ahead of time (--arch, --output)",
    ),
    (
        "tests",
        "python -m pytest -m 'not nightly' -n 2 --dist loadgroup",
        "Run the tests, in two processes: all but those of poe nightly",
    ),
    (
        "nightly",
        "python -m pytest -m nightly -n 2 --dist loadgroup",
        "Run the rest: other targets, dtypes and seeds, more wrong solutions",
    ),
    (
        "quick",
        "python -m pytest --quick -n 2 --dist loadgroup",
        "Run the tests that need no compiler, no browser and no seconds: about a minute",
    ),
    ("book", "python -m book.build", "Build the book and open it"),
    ("dev", "python -m harness dev", "Work on puzzles: dev new, dev check, dev tasks, dev generate"),
    (
        "generate",
        "python -m harness dev generate",
        "Write problems/ from solutions/, and each record.mojo from the ops",
    ),
    (
        "format",
        "python -m harness.toolchain.formatting",
        "Format Mojo and Python files (--check only says what differs)",
    ),
    ("types", "basedpyright", "Check the types of the harness, the book's code and the tests"),
    ("pictures", "python -m book.build.pictures", "Make the README's pictures from real runs"),
)
TABLES = {"pyproject.toml": ("[tool.poe.tasks]", "help"), "pixi.toml": ("[tasks]", "description")}
"""File -> the head of its table of tasks, and what it calls a description."""


def puzzle_task(puzzle: Puzzle) -> Task:
    """The task of one puzzle."""
    flags = ("--backward, " if puzzle.variants and puzzle.backward else "") + "--solution, --help"
    words = f"Puzzle {puzzle.name[1:]}: {puzzle.subject or puzzle.title} (try {flags})"
    return puzzle.name, f"python -m harness {puzzle.name}", words


def table(tasks: Iterable[Task], description: str) -> str:
    """The lines of a table of tasks."""
    return "".join(f'{name} = {{ cmd = "{cmd}", {description} = "{words}" }}\n' for name, cmd, words in tasks)


def with_tasks(text: str, file: str, tasks: Iterable[Task]) -> str:
    """The text of pyproject.toml or pixi.toml with its tasks replaced.

    Raises DamagedFile where there is no such table.
    """
    head, description = TABLES[file]
    match = re.search(rf"^{re.escape(head)}\n((?:[^\n\[]+\n)*)", text, re.MULTILINE)
    if not match:
        raise DamagedFile(f"{file}: the table {head} is missing")
    return text[: match.start(1)] + table(tasks, description) + text[match.end(1) :]


def out_of_step(checkout: Path, puzzles: Iterable[Puzzle]) -> dict[Path, str]:
    """The files whose tasks are not what they should be, with what they should hold."""
    tasks = [*(puzzle_task(puzzle) for puzzle in puzzles), *FIXED]
    wanted = {}
    for file in TABLES:
        path = checkout / file
        text = path.read_text(encoding="utf-8")
        if (new := with_tasks(text, file, tasks)) != text:
            wanted[path] = new
    return wanted
