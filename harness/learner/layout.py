"""Lay out `problems/`: the files that a learner edits, and links to everything else.

A file with blanks becomes a problem file (written by `harness.learner.blanks`). The rest of an op package is
linked: single files, and whole folders without blanks, such as the shared one. So there is one copy of
everything that a learner does not edit, and compiler, editor and harness find it at the same path.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import DamagedFile
from harness.invocation import command
from harness.toolchain import roots

SUFFIXES = {".mojo", ".py"}
BLANK = "BLANK-START"
# Expected extra files: copies made by `reset`, and files of Python and file managers.
PASSED_OVER = (".bak", ".pyc", ".tmp")


@dataclass(frozen=True)
class Layout:
    """The paths of a learner's folder, relative to it and in a fixed order."""

    edited: tuple[Path, ...]
    linked: tuple[Path, ...]


def layout(solutions: Path) -> Layout:
    """Return the problem files and links for a folder of solutions, of one puzzle or of all."""
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
                if BLANK in (folder / name).read_text(encoding="utf-8"):
                    edited.append(relative / name)
                elif in_package:
                    linked.append(relative / name)
    return Layout(tuple(sorted(edited)), tuple(sorted(linked)))


def has_blanks(folder: Path) -> bool:
    """Check whether a folder, not a link, has a file with a blank."""
    return not folder.is_symlink() and any(
        BLANK in path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.suffix in SUFFIXES
    )


def link_text(solution: Path, link: Path) -> str:
    """Return the text of a link, relative to its folder, to a file or folder of the solutions."""
    return os.path.relpath(solution.parent.resolve() / solution.name, link.parent.resolve())


def is_link_to(path: Path, solution: Path) -> bool:
    """Check whether a path is the expected link."""
    return path.is_symlink() and os.readlink(path) == link_text(solution, path)


def put_link(solution: Path, link: Path) -> None:
    """Replace a path, which must not be a folder, by a link."""
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    temporary.symlink_to(link_text(solution, link))
    os.replace(temporary, link)


# ---- Faults -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """An unexpected path in a learner's folder; `broken` if nothing compiles with it."""

    path: Path
    what: str
    broken: bool = False

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def faults(solutions: Path, problems: Path) -> Iterator[Fault]:
    """Return links that are missing, dangling or replaced, and files that belong to no puzzle."""
    expected = layout(solutions)
    for relative in expected.linked:
        if fault := fault_of_link(problems / relative, solutions / relative):
            yield fault
    known = {*expected.edited, *expected.linked}
    for parent, folders, names in os.walk(problems):
        relative = Path(parent).relative_to(problems)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__pycache__"))
            and not name.endswith(PASSED_OVER)
            and relative / name not in known
        )
        for name in sorted([*names, *links]):
            if relative / name not in known and not name.startswith(".") and not name.endswith(PASSED_OVER):
                yield Fault(problems / relative / name, "is not part of the puzzle")


def fault_of_link(path: Path, solution: Path) -> Fault | None:
    """Describe what is at the place of a link; None if it is the link."""
    if is_link_to(path, solution) and path.exists():
        return None
    if path.is_symlink():
        if not path.exists():
            return Fault(path, f"links to {os.readlink(path)}, which is not there", broken=True)
        return Fault(path, f"links to {os.readlink(path)}, not to the solution's")
    if not path.exists():
        return Fault(path, "is missing", broken=True)
    if (
        path.is_file()
        and path.stat().st_size < 1000
        and path.read_bytes() == os.fsencode(link_text(solution, path))
    ):
        what = "is a text file instead of a link: check out again with `git config core.symlinks true`"
        return Fault(path, what, broken=True)
    return Fault(path, "is your own, not the link to the solution's")


def notes(puzzle: str, problems: Path | None = None) -> list[str]:
    """Return a line for each fault in a learner's folder of one puzzle. Raises DamagedFile for one that
    prevents compiling."""
    all_faults = list(faults(roots.solutions() / puzzle, (problems or roots.problems()) / puzzle))
    for fault in all_faults:
        if fault.broken:
            raise DamagedFile(f"{fault}; `{command(f'reset {puzzle}')}` puts it back")
    return [str(fault) for fault in all_faults]
