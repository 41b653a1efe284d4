"""Write files outside the cache: whole or not at all, with one line for an error."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from harness.errors import BadUse, EnvironmentProblem, WorkbookError

FULL = re.compile(r".*(?:No space left on device|Disk quota exceeded|available space).*")
"""Messages of the C library, LLVM, Mojo and MAX about a full disk."""


def check_target(flag: str, target: str | Path) -> None:
    """Find out, before a long run, whether the file that a flag names can be written; leaves it as it is.

    Raises BadUse.
    """
    place = Path(os.path.realpath(target))  # the target of a link
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
    """Write the file of a flag. Raises the error of `write_failed`."""
    try:
        write_whole(Path(target), text)
    except OSError as error:
        raise write_failed(f"{flag} {target}", error) from error


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file so that it has the whole text, or its old content. Raises OSError.

    A link stays one, and a file keeps its permissions. A device, a pipe or a file in a read-only folder is
    written in place.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
        place.write_bytes(text.encode())
        return
    replace_file(place, text)


def replace_file(place: Path, text: str) -> None:
    """Replace a file, whose permissions it keeps, or a link by a UTF-8 file. Raises OSError."""
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


def write_failed(what: str, error: OSError) -> WorkbookError:
    """Return the error for a file that cannot be written: EnvironmentProblem on a full disk, else BadUse."""
    kind = EnvironmentProblem if error.errno in (errno.ENOSPC, errno.EDQUOT) else BadUse
    return kind(f"{what}: {error.strerror or error}")


def disk_full(output: str) -> EnvironmentProblem | None:
    """Return the error for a compiler's output that reports a full disk, None if it does not."""
    line = FULL.search(output)
    return EnvironmentProblem(f"the Mojo compiler cannot write: {line[0].strip()}") if line else None
