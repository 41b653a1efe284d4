"""Create and update a learner's folder from the installed package, without a checkout.

It has the layout of a checkout: problems/, the solutions that problems/ links to, and optionally the book.
Everything is a copy, so that the folder outlives the environment that wrote it.
"""

import json
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.errors import BadUse
from harness.invocation import command
from harness.learner import blanks, layout, restore
from harness.toolchain import roots
from harness.toolchain.disk import write_failed, write_whole

DISTRIBUTION = "mojo-gpu-workbook"
BOOK = Path("book") / "html"
"""The built book in the learner's folder."""


@dataclass(frozen=True)
class Renewed:
    """One problem file after an update: whether its work was kept, and the copy of the old file if lines
    were lost."""

    path: Path
    kept: tuple[str, ...]
    copy: Path | None


def version() -> str:
    """Return the version of this program."""
    return metadata.version(DISTRIBUTION)


def version_of(folder: Path) -> str | None:
    """Return the version that wrote a learner's folder; None if it was not created by `init`."""
    try:
        return str(json.loads((folder / roots.MARK).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def out_of_date(folder: Path) -> str | None:
    """Return the message for a folder written by another version of this program, or None."""
    before, now = version_of(folder), version()
    if before in (None, now):
        return None
    return f"written by version {before}, this is {now}: `{command('update')}` renews the folder, your blanks stay"


def create(folder: Path, *, book: bool) -> int:
    """Write a learner's folder and return the number of files with blanks.

    Raises BadUse if the folder exists and is something else, or if this package has no book and one is
    requested.
    """
    if (folder / roots.MARK).exists():
        raise BadUse(f"{folder} is a workbook already: inside it, `{command('update')}` renews it")
    if above := next((place for place in folder.resolve().parents if (place / roots.MARK).exists()), None):
        raise BadUse(f"{folder} would lie inside the workbook {above}: name a folder outside of it")
    if folder.exists() and not folder.is_dir():
        raise BadUse(f"{folder} is a file: name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise BadUse(f"{folder} is not empty: name a new folder, for example `{command('init workbook')}`")
    built = built_book() if book else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copy_solutions(folder)
        blanks.generate(folder / "solutions", folder / "problems")
        put_book(folder, built)
        put_mark(folder)
    except OSError as error:
        raise write_failed(str(error.filename or folder), error) from error
    return len(layout.layout(folder / "solutions").edited)


def update(folder: Path, *, book: bool) -> list[Renewed]:
    """Update a learner's folder from this package; the contents of blanks are kept. Returns the problem
    files that changed.

    Raises DamagedFile, before anything is written, if the blanks of a file cannot be identified.
    """
    built = built_book() if book or (folder / BOOK).is_dir() else None
    old, new = folder / "solutions", roots.origin()
    texts: dict[Path, tuple[str, str]] = {}
    for relative in layout.layout(new).edited:
        path, source = folder / "problems" / relative, blanks.read(new / relative)
        fresh = blanks.skeleton(source, str(new / relative))
        present = blanks.read(path) if path.exists() else fresh
        texts[relative] = present, with_work(present, fresh, str(path))
    try:
        renewed = [
            renew(folder, relative, present, text, skeleton_of(old / relative))
            for relative, (present, text) in texts.items()
            if text != present.replace("\r\n", "\n") or not (folder / "problems" / relative).exists()
        ]
        copy_solutions(folder)
        mend_links(folder / "solutions", folder / "problems")
        put_book(folder, built)
        put_mark(folder)
    except OSError as error:
        raise write_failed(str(error.filename or folder), error) from error
    return renewed


def with_work(present: str, fresh: str, name: str) -> str:
    """Return the new skeleton with the work in the blanks of the old file."""
    there = blanks.find(present, name)
    worked = {id: blank.body for id, blank in there.items() if blank.size}
    return blanks.join(blanks.split(fresh), worked)


def skeleton_of(solution: Path) -> str:
    """Return the original content of a problem file; "" for a new one."""
    return blanks.skeleton(blanks.read(solution), str(solution)) if solution.is_file() else ""


def renew(folder: Path, relative: Path, present: str, text: str, before: str) -> Renewed:
    """Write one problem file; a copy is kept if lines outside of blanks were changed, or a blank was
    removed."""
    path = folder / "problems" / relative
    worked = [id for id, blank in blanks.find(present).items() if blank.size]
    lost = set(worked) - {*blanks.find(text)}
    own = path.exists() and (lost or blanks.outside(present) != blanks.outside(before or present))
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = restore.backup(path) if own else None
    write_whole(path, text)
    return Renewed(path, tuple(id for id in worked if id not in lost), copy)


def mend_links(solutions: Path, problems: Path) -> None:
    """Remove dangling links and add missing ones; a file that replaced a link is kept."""
    for path in [path for path in problems.rglob("*") if path.is_symlink() and not path.exists()]:
        path.unlink()
    for relative in layout.layout(solutions).linked:
        if not os.path.lexists(problems / relative):
            layout.put_link(solutions / relative, problems / relative)


# ---- Copies -------------------------------------------------------------------------------------------------


def copy_solutions(folder: Path) -> None:
    """Replace the folder's solutions by this package's."""
    fresh, target = folder / f".solutions.{os.getpid()}.tmp", folder / "solutions"
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        shutil.copytree(roots.origin(), fresh, ignore=ignored)  # links followed: some lead out of it
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def built_book() -> Path:
    """Return the book built with this package. Raises BadUse if there is none."""
    checkout = roots.HERE.parent / "book"
    place = (checkout if checkout.is_dir() else roots.CARRIED_BOOK) / "html"
    if not (place / "index.html").is_file():
        remedy = (
            "the task `book` builds it"
            if checkout.is_dir()
            else "this package was made without one; leave out --book"
        )
        raise BadUse(f"--book: there is no built book; {remedy}")
    return place


def put_book(folder: Path, built: Path | None) -> None:
    """Copy the built book into the folder and replace an older one."""
    if built:
        shutil.rmtree(folder / BOOK, ignore_errors=True)
        shutil.copytree(built, folder / BOOK)


def put_mark(folder: Path) -> None:
    """Record the version of the folder, as the last step: a half-written folder has none."""
    write_whole(folder / roots.MARK, json.dumps({"version": version()}) + "\n")
