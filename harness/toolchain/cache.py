"""Manage the disk cache of compiled packages and graphs, recordings, extensions and the virtual GPU's driver.

Entries are built under a temporary name and then renamed; unusable entries are deleted and rebuilt.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentProblem

CACHE_VARIABLE = "WORKBOOK_CACHE"
REMEDY = f"set {CACHE_VARIABLE} to a folder you can write"
STAGING_PREFIX = ".making-"
STALE_AFTER_S = 24 * 3600
"""Age at which files left by an interrupted process are deleted."""
END_MARKER = "//@ end\n"
"""Last line of every cached text; a text without it is truncated."""


def get_cache_folder(*parts: str) -> Path:
    """Return a folder of the cache, created if missing. Raises EnvironmentProblem if it is not writable.

    The cache is `~/.cache/mojo-gpu-workbook`, or the folder in the environment variable WORKBOOK_CACHE.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    try:
        root = Path(configured).expanduser() if configured else Path.home() / ".cache" / "mojo-gpu-workbook"
    except RuntimeError as error:
        raise EnvironmentProblem(f"no cache folder: this user has no home folder; {REMEDY}") from error
    # Absolute, because the virtual GPU's libraries are also loaded from other working directories.
    folder = create_folder(root.absolute().joinpath(*parts), REMEDY, "cache folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"no write access to the cache folder {folder}; {REMEDY}")
    return folder


def create_folder(path: Path, remedy: str, description: str = "folder") -> Path:
    """Return a folder, created if missing. Raises EnvironmentProblem if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the {description} {path} ({error.strerror}); {remedy}"
        ) from error
    return path


def compute_digest(parts: Iterable[str | bytes]) -> str:
    """Return a hash of a sequence of strings and bytes, as 16 hexadecimal digits."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()[:16]


def cache_file(target: Path, make: Callable[[Path], Any], description: str, remedy: str = REMEDY) -> Path:
    """Return the path of a cache entry, built if missing.

    `make` writes the entry to its argument, a path with the same name in an empty folder. If several
    processes or threads need an entry, one builds it and the others wait. Raises EnvironmentProblem, with
    `remedy`, if it cannot be written, and the exceptions of `make`; incomplete entries are deleted.
    """
    if not target.exists():
        from filelock import FileLock

        lock = get_cache_folder("locks") / f"{compute_digest([str(target.absolute())])}.lock"
        with create_staging_folder(target.parent, description, remedy) as folder, FileLock(lock):
            if not target.exists():  # another process may have built it meanwhile
                make(folder / target.name)
                discard(target)  # it may be a dangling link
                os.replace(folder / target.name, target)
    return target


def discard(target: Path) -> None:
    """Delete an unusable entry; the next use rebuilds it."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)


def cache_text(target: Path, make: Callable[[], str], description: str) -> str:
    """Return the text of an entry, built if missing or truncated. Raises the exceptions of `cache_file`."""
    text = read_cached_text(target)
    if text is None:
        discard(target)
        cache_file(
            target,
            lambda staging_path: staging_path.write_text(make() + END_MARKER, encoding="utf-8"),
            description,
        )
        text = read_cached_text(target)
        assert text is not None  # it has just been built
    return text


def read_cached_text(target: Path) -> str | None:
    """Return the text of an entry, or None if it is missing or truncated."""
    try:
        text = target.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.removesuffix(END_MARKER) if text.endswith(END_MARKER) else None


@contextmanager
def create_staging_folder(folder: Path, description: str, remedy: str = REMEDY) -> Generator[Path]:
    """Yield an empty temporary folder inside a cache folder, in which to build an entry.

    Raises EnvironmentProblem if a file cannot be written.
    """
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(leftover)
    try:
        with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=folder) as path:
            yield Path(path)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {description} to {folder} ({error.strerror or error}); {remedy}"
        ) from error
