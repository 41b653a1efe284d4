"""Implement `workbook dev check`: report missing and unexpected files of a puzzle, without compiling it."""

import re
from collections.abc import Iterator
from pathlib import Path

from harness.check import zoo
from harness.devices import record_program
from harness.errors import DamagedFile, UsageError
from harness.learner import blanks, hints, layout
from harness.spec.puzzle import Puzzle
from harness.spec.rungs import MojoRung, Rung

MIN_HINTS = 3
ALLOWED_FILE = re.compile(
    r"[\w-]+\.(mojo|py)|(hints|survivors)\.toml|op(/.*)?/[\w-]+\.mojo|wrong/[\w-]+\.toml"
)
"""Pattern of the files in a puzzle's folder of solutions."""


def find_errors(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Yield a line for each error in a puzzle's files, with paths relative to the checkout."""
    solution = checkout / "solutions" / puzzle.name
    for path in list_required_files(checkout, puzzle):
        if not path.exists():
            yield f"{path.relative_to(checkout)} is missing"
    for path in sorted(solution.rglob("*")):
        name = path.relative_to(solution).as_posix()
        if path.is_file() and "__pycache__" not in name and not ALLOWED_FILE.fullmatch(name):
            yield f"{path.relative_to(checkout)} is not part of a puzzle"
    for rung in puzzle.rungs:
        yield from check_rung(checkout, puzzle, rung)
    yield from check_zoo(checkout, puzzle)
    yield from check_hints(checkout, puzzle)
    yield from check_problem(checkout, puzzle)
    yield from check_recording(checkout, puzzle)
    yield from check_chapter(checkout, puzzle)
    task = f'{puzzle.name} = "workbook {puzzle.name}"'
    if task not in (checkout / "pixi.toml").read_text(encoding="utf-8").splitlines():
        yield f"pixi.toml: the task {task} is missing"
    if not list((checkout / "tests" / puzzle.name).glob("test_*.py")):
        yield f"tests/{puzzle.name} holds no test_*.py"


def list_required_files(checkout: Path, puzzle: Puzzle) -> Iterator[Path]:
    """Yield the files that a puzzle and its rungs require."""
    for name in ("__init__.py", "spec.py"):
        yield checkout / "harness" / "puzzles" / puzzle.name / name
    solution = checkout / "solutions" / puzzle.name
    yield solution / "hints.toml"
    for rung in puzzle.rungs:
        yield solution / rung.file
        if isinstance(rung, MojoRung):
            yield solution / "op" / "__init__.mojo"


def check_rung(checkout: Path, puzzle: Puzzle, rung: Rung) -> Iterator[str]:
    """Report blanks that are not gates of the rung, and gates without a blank."""
    solution = checkout / "solutions" / puzzle.name
    path = solution / rung.file
    if not path.is_file():
        return
    relative = path.relative_to(checkout)
    try:
        by_id = blanks.find_blanks(blanks.read_source(path), str(relative))
    except DamagedFile as error:
        yield str(error)
        return
    yield from (f"{relative} has no blank {id}" for id in rung.gates if id not in by_id)
    yield from (f"{relative}: blank {id} is not a gate of the rung" for id in by_id if id not in rung.gates)


def check_zoo(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Report wrong solutions that are missing, cannot be created, or refer to an unknown gate."""
    solution = checkout / "solutions" / puzzle.name
    files = sorted((solution / "wrong").glob("*.toml"))
    if not files:
        yield f"solutions/{puzzle.name}/wrong holds no wrong solution"
    for file in files:
        location = file.relative_to(checkout)
        try:
            wrong_kernel = zoo.read_entry(file, puzzle.name)
            rung = puzzle.find_rung(wrong_kernel.rung) if wrong_kernel.rung else puzzle.main_rung
            wrong_kernel.edit_text(
                solution / "op" / wrong_kernel.file if isinstance(rung, MojoRung) else solution / rung.file
            )
        except (UsageError, OSError) as error:
            yield f"{location}: {error}".replace(f"{location}: {file}", str(location)).replace(
                f"{checkout}/", ""
            )
            continue
        unknown = [id for id in (wrong_kernel.gate, *wrong_kernel.also) if id not in rung.gates]
        yield from (f"{location}: {id} is not a gate" for id in unknown)


def check_hints(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Report hint ladders that are missing, too short, or for an unknown gate."""
    location = f"solutions/{puzzle.name}/hints.toml"
    if not (checkout / location).is_file():
        return
    try:
        ladders = hints.load_ladders(puzzle.name, checkout / "solutions")
    except UsageError as error:
        yield str(error).replace(f"{checkout}/", "")
        return
    expected = [puzzle.get_ladder_name(rung, gate) for rung in puzzle.rungs for gate in rung.gates]
    for name in expected:
        if len(ladders.get(name, ())) < MIN_HINTS:
            yield f"{location}: {name} has {len(ladders.get(name, ()))} rungs, at least {MIN_HINTS} are required"
    yield from (f"{location}: {name} is the ladder of no gate" for name in ladders if name not in expected)


def check_problem(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Report problem files that differ from the generated ones, and unexpected files in their folder."""
    solution, problem = (checkout / folder / puzzle.name for folder in ("solutions", "problems"))
    try:
        for relative in layout.find_layout(solution).problem_files:
            path = problem / relative
            skeleton = blanks.make_skeleton(blanks.read_source(solution / relative), str(solution / relative))
            if not path.is_file():
                yield f"{path.relative_to(checkout)} is missing; `workbook dev generate` writes it"
            elif blanks.remove_blanks(blanks.read_source(path), str(path)) != blanks.remove_blanks(skeleton):
                yield f"{path.relative_to(checkout)} is out of step; `workbook dev generate` writes it"
    except DamagedFile as error:
        yield str(error).replace(f"{checkout}/", "")
    for error in layout.find_errors(solution, problem):
        yield str(error).replace(f"{checkout}/", "")


def check_recording(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Report an error if no recording program can be generated from the spec."""
    package = checkout / "solutions" / puzzle.name / "op"
    if puzzle.mojo_rung and package.is_dir():
        try:
            record_program.generate_program(puzzle, package)
        except DamagedFile as error:
            yield str(error)


def check_chapter(checkout: Path, puzzle: Puzzle) -> Iterator[str]:
    """Report pages that are missing, or are not in the book's summary."""
    name = f"puzzle_{puzzle.name[1:]}"
    book = checkout / "book" / "src"
    summary = (book / "SUMMARY.md").read_text(encoding="utf-8")
    pages = {f"{name}/{name}.md", *(f"{name}/{page.name}" for page in (book / name).glob("*.md"))}
    for page in sorted(pages):
        if not (book / page).is_file():
            yield f"book/src/{page} is missing"
        if f"({page})" not in summary:
            yield f"book/src/SUMMARY.md does not name {page}"


def find_unknown_folders(checkout: Path, names: list[str]) -> Iterator[str]:
    """Yield a line for each folder of a puzzle that does not exist."""
    for parent in ("solutions", "problems", "tests"):
        for path in sorted((checkout / parent).glob("p[0-9][0-9]")):
            if path.name not in names:
                yield f"{parent}/{path.name} belongs to no puzzle: harness/puzzles/{path.name} is missing"
