"""Write the skeleton of a new puzzle: the files of `template/`, with NN replaced by the puzzle's number."""

import re
from collections.abc import Iterator
from pathlib import Path

from harness.errors import UsageError
from harness.learner import blanks, layout

TEMPLATE = Path(__file__).parent / "template"
FOLDERS = ("harness/puzzles/pNN", "solutions/pNN", "problems/pNN", "tests/pNN", "book/src/puzzle_NN")
REFERENCE_HEADING = "# Reference"
"""New chapters are listed before this heading of the book's summary."""


def write(checkout: Path, name: str) -> Iterator[Path]:
    """Write all files of a new puzzle, and add its chapter and task; yield the changed paths.

    Raises UsageError for an invalid name, or if a file exists.
    """
    if not re.fullmatch(r"p\d\d", name):
        raise UsageError(f"dev new {name}: a puzzle's name is p and two digits, for example p27")
    existing = [
        folder
        for folder in (fill_in_number(folder, name) for folder in FOLDERS)
        if (checkout / folder).exists()
    ]
    if existing:
        raise UsageError(f"dev new {name}: {', '.join(existing)} already exists")
    files = (path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for source in sorted(files):
        target = checkout / fill_in_number(str(source.relative_to(TEMPLATE)), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fill_in_number(source.read_text(encoding="utf-8"), name), encoding="utf-8")
        yield target
    solutions, problems = checkout / "solutions", checkout / "problems"
    layout.create_link(solutions / "shared", solutions / name / "op" / "shared")
    yield solutions / name / "op" / "shared"
    yield from blanks.generate_problems(solutions / name, problems / name)
    yield add_to_summary(checkout / "book" / "src" / "SUMMARY.md", name)
    yield add_to_tasks(checkout / "pixi.toml", name)


def fill_in_number(text: str, name: str) -> str:
    return text.replace("NN", name.removeprefix("p"))


def add_to_summary(summary: Path, name: str) -> Path:
    """Insert the chapter before the heading of the reference."""
    text = summary.read_text(encoding="utf-8")
    number = name.removeprefix("p")
    line = f"- [Puzzle {number}: a placeholder](puzzle_{number}/puzzle_{number}.md)\n"
    before, heading, after = text.rpartition(f"\n{REFERENCE_HEADING}\n")
    summary.write_text(f"{before}{line}{heading}{after}" if heading else text + line, encoding="utf-8")
    return summary


def add_to_tasks(pixi: Path, name: str) -> Path:
    """Insert the puzzle's task after the last puzzle's task."""
    lines = pixi.read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if re.match(r"(p\d\d|\[tasks\])", line))
    lines.insert(last + 1, f'{name} = "workbook {name}"')
    pixi.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return pixi
