"""Write files outside the cache atomically, and report errors in one line."""

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from harness.errors import EnvironmentProblem, UsageError, WorkbookError

DISK_FULL = re.compile(r".*(?:No space left on device|Disk quota exceeded|available space).*")
"""Messages of the C library, LLVM, Mojo and MAX about a full disk."""


def check_target(flag: str, target: str | Path) -> None:
    """Check, before a long run, that a flag's file can be written, without changing it. Raises UsageError."""
    path_written = Path(os.path.realpath(target))  # follow links
    try:
        if not str(target):
            raise FileNotFoundError(errno.ENOENT, "the name of a file is missing")
        if path_written.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path_written.exists():
            tempfile.TemporaryFile(dir=path_written.parent).close()
        elif not os.access(path_written, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}") from error


def write_target(flag: str, target: str | Path, text: str) -> None:
    """Write the file passed to a flag. Raises the error from `write_failed`."""
    try:
        write_whole(Path(target), text)
    except OSError as error:
        raise write_failed(f"{flag} {target}", error) from error


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: if that fails, the old content remains. Raises OSError.

    Links are followed, and permissions preserved. A device, a pipe or a file in a read-only folder is written
    in place, not atomically.
    """
    path_written = Path(os.path.realpath(path))
    if path_written.exists() and not (path_written.is_file() and os.access(path_written.parent, os.W_OK)):
        path_written.write_bytes(text.encode())
        return
    replace_file(path_written, text)


def replace_file(path_written: Path, text: str) -> None:
    """Replace a link or file by a UTF-8 file; a file's permissions are preserved. Raises OSError."""
    temporary = path_written.with_name(f"{path_written.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure may leave an empty file
        if path_written.is_file():
            shutil.copymode(path_written, temporary)
        os.replace(temporary, path_written)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_failed(what: str, error: OSError) -> WorkbookError:
    """Return the error for a file that is not writable: EnvironmentProblem on a full disk, else UsageError."""
    kind = EnvironmentProblem if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
    return kind(f"{what}: {error.strerror or error}")


def get_disk_full_error(output: str) -> EnvironmentProblem | None:
    """Return an error if a compiler's output reports a full disk, else None."""
    line = DISK_FULL.search(output)
    return EnvironmentProblem(f"the Mojo compiler cannot write: {line[0].strip()}") if line else None
