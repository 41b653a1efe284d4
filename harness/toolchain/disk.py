"""Write files atomically, and convert write errors to one-line errors."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from harness.errors import EnvironmentProblem, UsageError, WorkbookError

DISK_FULL = re.compile(r".*(?:No space left on device|Disk quota exceeded|available space).*")
"""Messages of the C library, LLVM, Mojo and MAX for a full disk."""


def check_target(flag: str, target: str | Path) -> None:
    """Check, before a long run, that a flag's file can be written, without changing it. Raises UsageError."""
    real_path = Path(os.path.realpath(target))  # follow links
    try:
        if not str(target):
            raise FileNotFoundError(errno.ENOENT, "the name of a file is missing")
        if real_path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not real_path.exists():
            tempfile.TemporaryFile(dir=real_path.parent).close()
        elif not os.access(real_path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}") from error


def write_target(flag: str, target: str | Path, text: str) -> None:
    """Write the file passed to a flag. Raises the error from `make_write_error`."""
    try:
        write_atomically(Path(target), text)
    except OSError as error:
        raise make_write_error(f"{flag} {target}", error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: on failure the old content remains. Raises OSError.

    Follow links, and preserve permissions. A device, a pipe or a file in a read-only folder is written in
    place.
    """
    real_path = Path(os.path.realpath(path))
    if real_path.exists() and not (real_path.is_file() and os.access(real_path.parent, os.W_OK)):
        real_path.write_bytes(text.encode())
        return
    replace_file(real_path, text)


def replace_file(real_path: Path, text: str) -> None:
    """Replace a link or file by a UTF-8 file; preserve a file's permissions. Raises OSError."""
    temporary = real_path.with_name(f"{real_path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure may leave an empty file
        if real_path.is_file():
            shutil.copymode(real_path, temporary)
        os.replace(temporary, real_path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_write_error(description: str, error: OSError) -> WorkbookError:
    """Return the error for a failed write: EnvironmentProblem on a full disk, else UsageError."""
    error_type = EnvironmentProblem if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
    return error_type(f"{description}: {error.strerror or error}")


def find_disk_full_error(output: str) -> EnvironmentProblem | None:
    """Return an error if a compiler's output reports a full disk, else None."""
    line = DISK_FULL.search(output)
    return EnvironmentProblem(f"the Mojo compiler cannot write: {line[0].strip()}") if line else None
