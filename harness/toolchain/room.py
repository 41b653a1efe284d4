"""Full disks: the one line for them, and how to see one behind a compiler's failure.

A compiler that cannot write says so in words of its own, far from any line of code, or says nothing at all. Neither is
a learner's mistake.
"""

import errno
import os
import re
import shutil
from pathlib import Path

from harness.errors import EnvironmentProblem

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What a write that finds no room fails with."""
SAID = re.compile(r"No space left on device|Disk quota exceeded|File too large|available space")
"""How the C library, LLVM, Mojo and MAX say it."""
LITTLE = 4 * 2**20
"""Bytes. Where less is free, a compiler that fails without naming a line has most likely run out of room."""


def is_full(error: BaseException) -> bool:
    """Whether an exception, or what it comes from, is a full disk."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return bool(SAID.search(str(error))) or (error.__cause__ is not None and is_full(error.__cause__))


def free(folder: Path) -> int:
    """Free bytes where a folder lies, or will lie once it is made."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def no_room(what: str, folder: Path, remedy: str = "make room there") -> EnvironmentProblem:
    """The one line for something that did not fit into a folder."""
    return EnvironmentProblem(
        f"disk full: no room for {what} in {folder} ({free(folder):,} bytes are free there); {remedy}"
    )


def compiler_folders() -> list[Path]:
    """Where the compilers write besides what they are told to: temporary files, and caches of their own."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or os.sep) / ".cache"
    return [Path(os.environ.get("TMPDIR") or "/tmp"), Path(caches) / "modular"]


def compiler_out_of_room(said: str, *folders: Path) -> EnvironmentProblem | None:
    """The error for a compile that failed because a disk is full, or None where that is not why.

    Only for a failure that names no line of code.

    Args:
        said: Everything that the compiler said.
        folders: Where it was told to write.
    """
    tightest = min([*folders, *compiler_folders()], key=free)
    if SAID.search(said) or free(tightest) < LITTLE:
        return no_room("the Mojo compiler", tightest)
    return None
