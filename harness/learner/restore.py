"""Restore a problem file, or one blank of it; the previous text is saved in a copy next to it."""

import os
import shutil
import time
from pathlib import Path

from harness.errors import BadUse, DamagedFile
from harness.learner import blanks, layout
from harness.toolchain.disk import replace_file

SUFFIX = ".bak"


def restore(path: Path, solution: Path, blank: str | None = None) -> str:
    """Return the content of the file after a reset.

    Args:
        path: The problem file; may be missing, damaged or a folder if all of it is reset.
        solution: The file it was made from.
        blank: Only this blank. Raises DamagedFile if the file's markers are broken, BadUse for an unknown
            one.
    """
    skeleton = blanks.skeleton(blanks.read(solution), str(solution))
    if blank is None:
        return skeleton
    requested = blanks.find(skeleton)
    if blank not in requested:
        raise BadUse(f"unknown blank {blank!r}; there is {', '.join(requested)}")
    try:
        text = blanks.read(path)
        pieces = blanks.split(text, str(path))
        blanks.complete({p.id: p for p in pieces if isinstance(p, blanks.Blank)}, [blank], str(path))
    except DamagedFile as error:
        raise DamagedFile(f"one blank of a damaged file cannot be found: {error}") from None
    joined = blanks.join(pieces, {blank: requested[blank].body})
    return joined.replace("\n", "\r\n") if text.count("\r\n") * 2 > text.count("\n") else joined


def backup(path: Path) -> Path | None:
    """Copy a file or folder next to itself; returns the copy, None if there is nothing or a dangling link."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    target = path.with_name(f"{path.name}.{stamp}{SUFFIX}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}.{stamp}-{number}{SUFFIX}")
        number += 1
    # A folder, an endless pipe, or a file too large for source code.
    if not path.is_file() or path.stat().st_size > blanks.LARGEST:
        path.rename(target)
        return target
    try:
        shutil.copy2(path, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def missing(solutions: Path, problems: Path) -> list[Path]:
    """Return the files with blanks of a puzzle's folder that are not there at all, relative to it."""
    edited = layout.layout(solutions).edited
    return [relative for relative in edited if not os.path.lexists(problems / relative)]


def reset(path: Path, content: str | Path) -> Path | None:
    """Restore a file and return the copy of its old content. Nothing is written without that copy.

    Args:
        path: The problem file.
        content: Its text, or the file of the solutions that it links to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = backup(path)
    if isinstance(content, Path):
        layout.put_link(content, path)
        return kept
    replace_file(path, content)
    return kept
