"""Writing to disk: a file whole or not at all; what can be written; full disks, also as the cause of a compiler's failure.

A compiler that finds no room says so in words of its own, far from any line of code, or says nothing at all. Neither is
a learner's mistake.
"""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from harness.errors import BadUse, EnvironmentProblem

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What a write that finds no room fails with."""
SAID = re.compile(r"No space left on device|Disk quota exceeded|File too large|available space")
"""How the C library, LLVM, Mojo and MAX say it."""
LITTLE = 4 * 2**20
"""Bytes. Where less is free, a compiler that fails without naming a line has most likely run out of room."""


def check_target(flag: str, target: str | Path) -> None:
    """Finds out, before a long run, whether the file that a flag names can be written; leaves it as it is.

    Raises BadUse.
    """
    place = Path(os.path.realpath(target))  # of a link, what it points to
    try:
        if not str(target):
            raise FileNotFoundError(errno.ENOENT, "the name of a file is missing")
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not place.exists():
            tempfile.TemporaryFile(dir=place.parent).close()
        elif not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise BadUse(f"{flag} {target}: {error.strerror}") from error


def write_target(flag: str, target: str | Path, text: str) -> None:
    """Writes the file that a flag names. Raises BadUse where that cannot be, EnvironmentProblem on a full disk."""
    try:
        write_whole(Path(target), text)
    except OSError as error:
        if is_full(error):
            folder = Path(os.path.realpath(target)).parent
            raise no_room(f"{flag} {target}, {len(text):,} bytes", folder) from error
        raise BadUse(f"{flag} {target}: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file so that it holds the whole text, or what it held before. Raises OSError.

    A link stays one, and a file keeps its permissions. A device, a pipe or a file in a folder that takes no new one is
    written in place.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
        place.write_bytes(text.encode())
        return
    replace_file(place, text)


def replace_file(place: Path, text: str) -> None:
    """Replaces a file, whose permissions it keeps, or a link by a UTF-8 file. Raises OSError."""
    temporary = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name with nothing in it
        if place.is_file():
            shutil.copymode(place, temporary)
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    """Where the compilers write in addition to where they are told to: temporary files, and caches of their own."""
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
