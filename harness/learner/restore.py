"""Putting a problem file, or one blank of it, back to what it was; what stood there is kept in a copy beside it."""

import os
import shutil
import time
from pathlib import Path

from harness.errors import BadUse, DamagedFile
from harness.learner import blanks, layout

SUFFIX = ".bak"


def restored(path: Path, solution: Path, blank: str | None = None) -> str:
    """What the file would hold after a reset.

    Args:
        path: The problem file; may be missing, damaged or a folder where the whole of it is put back.
        solution: The file it was made from.
        blank: Only this blank. Raises DamagedFile where the file's markers are broken, BadUse for an unknown one.
    """
    skeleton = blanks.skeleton(blanks.read(solution), str(solution))
    if blank is None:
        return skeleton
    wanted = blanks.find(skeleton)
    if blank not in wanted:
        raise BadUse(f"unknown blank {blank!r}; there is {', '.join(wanted)}")
    try:
        pieces = blanks.split(blanks.read(path), str(path))
        blanks.complete({p.id: p for p in pieces if isinstance(p, blanks.Blank)}, [blank], str(path))
    except DamagedFile as error:
        raise DamagedFile(f"one blank of a damaged file cannot be found: {error}") from None
    return blanks.join(pieces, {blank: wanted[blank].body})


def backup(path: Path) -> Path | None:
    """Keeps what stands at a path, a file or a folder, in a copy beside it; returns where, None if nothing is there, or a
    link that leads nowhere."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    target = path.with_name(f"{path.name}.{stamp}{SUFFIX}")
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}.{stamp}-{number}{SUFFIX}")
        number += 1
    if path.is_dir():
        path.rename(target)
    else:
        shutil.copy2(path, target)
    return target


def reset(path: Path, content: str | Path) -> Path | None:
    """Puts a file back and returns the copy of what stood there before. Nothing is written without that copy.

    Args:
        path: The problem file.
        content: Its text; or the file of the solutions that it links to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = backup(path)
    if isinstance(content, Path):
        layout.put_link(content, path)
        return kept
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(content)
    os.replace(temporary, path)
    return kept
