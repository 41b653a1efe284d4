"""Create and update a learner's folder without a checkout, from the files of the installed package."""

import json
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.errors import UsageError
from harness.invocation import format_command
from harness.learner import blanks, layout, restore
from harness.toolchain import roots
from harness.toolchain.disk import make_write_error, write_atomically

DISTRIBUTION = "mojo-gpu-workbook"
BOOK_FOLDER = Path("book") / "html"
"""Location of the built book in the learner's folder."""


@dataclass(frozen=True)
class UpdatedFile:
    """An updated problem file, the preserved blanks, and a backup of the old file if lines were lost."""

    path: Path
    kept_blanks: tuple[str, ...]
    backup: Path | None


def get_version() -> str:
    return metadata.version(DISTRIBUTION)


def read_version(folder: Path) -> str | None:
    """Return the version that wrote a learner's folder, or None if `init` did not create it."""
    try:
        return str(json.loads((folder / roots.MARKER_FILE).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_outdated(folder: Path) -> str | None:
    """Return the message for a folder written by another version of this program, or None."""
    folder_version, current_version = read_version(folder), get_version()
    if folder_version in (None, current_version):
        return None
    return f"written by version {folder_version}, this is {current_version}: `{format_command('update')}` renews the folder, your blanks stay"


def create(folder: Path, *, book: bool) -> int:
    """Write a learner's folder and return the number of files with blanks.

    Raises UsageError if the folder is not empty, or if a book is requested and this package has none.
    """
    if (folder / roots.MARKER_FILE).exists():
        raise UsageError(
            f"{folder} is already a workbook; run `{format_command('update')}` inside it to update it"
        )
    if enclosing := next(
        (parent for parent in folder.resolve().parents if (parent / roots.MARKER_FILE).exists()), None
    ):
        raise UsageError(f"{folder} would lie inside the workbook {enclosing}: name a folder outside of it")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty: name a new folder, for example `{format_command('init workbook')}`"
        )
    built_book = find_built_book() if book else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copy_solutions(folder)
        blanks.generate_problems(folder / "solutions", folder / "problems")
        copy_book(folder, built_book)
        write_version(folder)
    except OSError as error:
        raise make_write_error(str(error.filename or folder), error) from error
    return len(layout.find_layout(folder / "solutions").problem_files)


def update(folder: Path, *, book: bool) -> list[UpdatedFile]:
    """Update a learner's folder from this package and return the changed problem files; edits in blanks
    remain.

    Raises DamagedFile, before anything is written, if the blanks of a file cannot be parsed.
    """
    built_book = find_built_book() if book or (folder / BOOK_FOLDER).is_dir() else None
    old, new = folder / "solutions", roots.get_program_solutions()
    texts: dict[Path, tuple[str, str]] = {}
    for relative in layout.find_layout(new).problem_files:
        path, source = folder / "problems" / relative, blanks.read_source(new / relative)
        skeleton = blanks.make_skeleton(source, str(new / relative))
        current = blanks.read_source(path) if path.exists() else skeleton
        texts[relative] = current, merge_blanks(current, skeleton, str(path))
    try:
        updated_files = [
            update_file(folder, relative, current, text, read_skeleton(old / relative))
            for relative, (current, text) in texts.items()
            if text != current.replace("\r\n", "\n") or not (folder / "problems" / relative).exists()
        ]
        copy_solutions(folder)
        repair_links(folder / "solutions", folder / "problems")
        copy_book(folder, built_book)
        write_version(folder)
    except OSError as error:
        raise make_write_error(str(error.filename or folder), error) from error
    return updated_files


def merge_blanks(current: str, skeleton: str, name: str) -> str:
    """Return a skeleton with the edited blanks of the current text."""
    current_blanks = blanks.find_blanks(current, name)
    bodies = {id: blank.body for id, blank in current_blanks.items() if blank.size}
    return blanks.join_segments(blanks.split_blanks(skeleton), bodies)


def read_skeleton(solution: Path) -> str:
    return blanks.make_skeleton(blanks.read_source(solution), str(solution)) if solution.is_file() else ""


def update_file(folder: Path, relative: Path, current: str, text: str, old_skeleton: str) -> UpdatedFile:
    """Write one problem file; back up the old one if edits outside blanks, or a removed blank, are lost."""
    path = folder / "problems" / relative
    attempted_ids = [id for id, blank in blanks.find_blanks(current).items() if blank.size]
    lost_blanks = set(attempted_ids) - {*blanks.find_blanks(text)}
    needs_backup = path.exists() and (
        lost_blanks or blanks.remove_blanks(current) != blanks.remove_blanks(old_skeleton or current)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = restore.back_up(path) if needs_backup else None
    write_atomically(path, text)
    return UpdatedFile(path, tuple(id for id in attempted_ids if id not in lost_blanks), backup)


def repair_links(solutions: Path, problems: Path) -> None:
    """Remove dangling links and create missing ones; do not overwrite files in place of links."""
    for path in [path for path in problems.rglob("*") if path.is_symlink() and not path.exists()]:
        path.unlink()
    for relative in layout.find_layout(solutions).links:
        if not os.path.lexists(problems / relative):
            layout.create_link(solutions / relative, problems / relative)


# ---- Copies -------------------------------------------------------------------------------------------------


def copy_solutions(folder: Path) -> None:
    """Replace the folder's solutions with this package's."""
    staging, target = folder / f".solutions.{os.getpid()}.tmp", folder / "solutions"
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        # Follow links: some lead out of the folder.
        shutil.copytree(roots.get_program_solutions(), staging, ignore=ignored)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def find_built_book() -> Path:
    """Return the book built with this package. Raises UsageError if there is none."""
    checkout = roots.PACKAGE_ROOT.parent / "book"
    html = (checkout if checkout.is_dir() else roots.BUNDLED_BOOK) / "html"
    if not (html / "index.html").is_file():
        unavailable = "this package was made without one; leave out --book"
        remedy = "the task `book` builds it" if checkout.is_dir() else unavailable
        raise UsageError(f"--book: there is no built book; {remedy}")
    return html


def copy_book(folder: Path, built_book: Path | None) -> None:
    if built_book:
        shutil.rmtree(folder / BOOK_FOLDER, ignore_errors=True)
        shutil.copytree(built_book, folder / BOOK_FOLDER)


def write_version(folder: Path) -> None:
    """Record the folder's version, as the last step: a partly written folder has none."""
    write_atomically(folder / roots.MARKER_FILE, json.dumps({"version": get_version()}) + "\n")
