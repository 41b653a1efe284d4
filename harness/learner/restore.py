"""Restore a problem file, or one blank of it, and save the previous text in a backup next to it."""

import os
import shutil
import time
from pathlib import Path

from harness.errors import DamagedFile, UsageError
from harness.learner import blanks, layout
from harness.toolchain.disk import replace_file

BACKUP_SUFFIX = ".bak"


def make_restored_text(path: Path, solution: Path, blank: str | None = None) -> str:
    """Return a problem file's text after a reset of one blank or, by default, all.

    For one blank, raises DamagedFile if the file is missing or damaged, UsageError if the blank is unknown.
    """
    skeleton = blanks.make_skeleton(blanks.read_source(solution), str(solution))
    if blank is None:
        return skeleton
    skeleton_blanks = blanks.find_blanks(skeleton)
    if blank not in skeleton_blanks:
        raise UsageError(f"unknown blank {blank!r}; there is {', '.join(skeleton_blanks)}")
    try:
        text = blanks.read_source(path)
        segments = blanks.split_blanks(text, str(path))
        blanks.require_blanks({p.id: p for p in segments if isinstance(p, blanks.Blank)}, [blank], str(path))
    except DamagedFile as error:
        raise DamagedFile(f"one blank of a damaged file cannot be found: {error}") from None
    joined = blanks.join_segments(segments, {blank: skeleton_blanks[blank].body})
    return joined.replace("\n", "\r\n") if text.count("\r\n") * 2 > text.count("\n") else joined


def back_up(path: Path) -> Path | None:
    """Copy a file, or move a folder, to a new name next to it; return the new path, None if it is missing."""
    if not path.exists():
        return None
    timestamp = time.strftime("%Y-%m-%d-%H%M%S")
    target = path.with_name(f"{path.name}.{timestamp}{BACKUP_SUFFIX}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}.{timestamp}-{number}{BACKUP_SUFFIX}")
        number += 1
    # Move folders, pipes (reading one may never end) and large files instead of copying them.
    if not path.is_file() or path.stat().st_size > blanks.MAX_SOURCE_BYTES:
        path.rename(target)
        return target
    try:
        shutil.copy2(path, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def list_missing_files(solutions: Path, problems: Path) -> list[Path]:
    """Return the missing problem files, relative to the puzzle's folder."""
    problem_files = layout.find_layout(solutions).problem_files
    return [relative for relative in problem_files if not os.path.lexists(problems / relative)]


def restore_file(path: Path, content: str | Path) -> Path | None:
    """Back up a file, then write a text or a link in its place; return the backup's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = back_up(path)
    if isinstance(content, Path):
        layout.create_link(content, path)
        return backup
    replace_file(path, content)
    return backup
