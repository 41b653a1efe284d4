"""Find the layout of `problems/`: the files that a learner edits, and links to all others.

A file with blanks becomes a problem file. The rest of an op package is linked instead of copied.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import DamagedFile
from harness.invocation import format_command
from harness.toolchain import roots

SUFFIXES = {".mojo", ".py"}
BLANK_START = "BLANK-START"
# Ignore backups by `reset`, compiled Python files and temporary files.
IGNORED_SUFFIXES = (".bak", ".pyc", ".tmp")


@dataclass(frozen=True)
class Layout:
    """Sorted relative paths of a learner's folder: the files to edit, and the links."""

    problem_files: tuple[Path, ...]
    links: tuple[Path, ...]


def find_layout(solutions: Path) -> Layout:
    """Return the problem files and links for the solutions of one puzzle or of all puzzles."""
    edited: list[Path] = []
    linked: list[Path] = []
    for parent, folders, names in os.walk(solutions):
        folder = Path(parent)
        relative = folder.relative_to(solutions)
        in_package = "op" in (solutions.name, *relative.parts)
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in list(folders):
            if in_package and not has_blanks(folder / name):
                folders.remove(name)
                linked.append(relative / name)
        for name in names:
            if Path(name).suffix in SUFFIXES:
                if BLANK_START in (folder / name).read_text(encoding="utf-8"):
                    edited.append(relative / name)
                elif in_package:
                    linked.append(relative / name)
    return Layout(tuple(sorted(edited)), tuple(sorted(linked)))


def has_blanks(folder: Path) -> bool:
    return not folder.is_symlink() and any(
        BLANK_START in path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
    )


def compute_link_target(solution: Path, link: Path) -> str:
    return os.path.relpath(solution.parent.resolve() / solution.name, link.parent.resolve())


def is_link_to(path: Path, solution: Path) -> bool:
    return path.is_symlink() and os.readlink(path) == compute_link_target(solution, path)


def create_link(solution: Path, link: Path) -> None:
    """Create a link to a solution's file, replacing any file at the link's path."""
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    temporary.symlink_to(compute_link_target(solution, link))
    os.replace(temporary, link)


# ---- Errors -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutError:
    """A wrong or missing path in a learner's folder, and whether it prevents compiling."""

    path: Path
    description: str
    prevents_build: bool = False

    def __str__(self) -> str:
        return f"{self.path} {self.description}"


def find_errors(solutions: Path, problems: Path) -> Iterator[LayoutError]:
    """Yield links that are missing, dangling or replaced, and files that are not part of a puzzle."""
    expected = find_layout(solutions)
    for relative in expected.links:
        if error := check_link(problems / relative, solutions / relative):
            yield error
    known = {*expected.problem_files, *expected.links}
    for parent, folders, names in os.walk(problems):
        relative = Path(parent).relative_to(problems)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]

        def is_unknown(name: str, relative: Path = relative) -> bool:
            return relative / name not in known and not (
                name.startswith(".") or name.endswith(IGNORED_SUFFIXES)
            )

        folders[:] = sorted(
            name for name in folders if is_unknown(name) and not name.startswith("__pycache__")
        )
        for name in filter(is_unknown, sorted([*names, *links])):
            yield LayoutError(problems / relative / name, "is not part of the puzzle")


def check_link(path: Path, solution: Path) -> LayoutError | None:
    """Return the error at a link's path, or None if the link is correct."""
    if is_link_to(path, solution) and path.exists():
        return None
    if path.is_symlink():
        if not path.exists():
            return LayoutError(path, f"links to {os.readlink(path)}, which is not there", prevents_build=True)
        return LayoutError(path, f"links to {os.readlink(path)}, not to the solution's")
    if not path.exists():
        return LayoutError(path, "is missing", prevents_build=True)
    is_small = path.is_file() and path.stat().st_size < 1000
    if is_small and path.read_bytes() == os.fsencode(compute_link_target(solution, path)):
        problem = "is a text file instead of a link: check out again with `git config core.symlinks true`"
        return LayoutError(path, problem, prevents_build=True)
    return LayoutError(path, "is your own, not the link to the solution's")


def check_layout(puzzle: str, problems: Path | None = None) -> list[str]:
    """Return a line for each layout error. Raises DamagedFile for one that prevents compiling."""
    errors = list(find_errors(roots.get_solutions() / puzzle, (problems or roots.get_problems()) / puzzle))
    for error in errors:
        if error.prevents_build:
            raise DamagedFile(f"{error}; `{format_command(f'reset {puzzle}')}` puts it back")
    return [str(error) for error in errors]
