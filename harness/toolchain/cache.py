"""The workbook's own cache: compiled packages and graphs, recordings, the virtual GPU's driver, extension modules.

All of it is kept in one way, by `keep`. An entry, a file or a folder, is made under its own name in a folder beside its
place and then renamed, so that no process sees half of one. A note beside it, `NAME.sum`, says what it must hold: SHA-256 and
length of each file. An entry that does not fit its note, or has none, is made anew without a word; what a power cut
leaves does not fit either, so that nothing waits for the disk. Reading costs 1 ms for each MB, before every use.
"""

import fcntl
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
from harness.toolchain.disk import is_full, no_room

VARIABLE = "WORKBOOK_CACHE"
LOG = "WORKBOOK_CACHE_LOG"
"""Names a file that gets a line for each entry that is made: what it is, a tab, its path. The tests look there for what is
made twice."""
REMEDY = f"set {VARIABLE} to a folder you can write"
STAGING = ".making-"
STALE = 24 * 3600
"""Seconds after which what an interrupted process was making is swept away."""
PATIENCE = 600
"""Seconds for which a process waits for another that makes the same entry; then it makes it too, which does no harm."""


def cache_folder(*parts: str) -> Path:
    """A folder inside the cache, made if it is missing. Raises EnvironmentProblem where it cannot be written.

    The cache is `~/.cache/mojo-gpu-workbook`, or what the environment variable WORKBOOK_CACHE names. Everything
    in it can be deleted at any time.
    """
    named = os.environ.get(VARIABLE)
    try:
        root = Path(named).expanduser() if named else Path.home() / ".cache" / "mojo-gpu-workbook"
    except RuntimeError as error:
        raise EnvironmentProblem(f"no cache folder: this user has no home folder; {REMEDY}") from error
    # Absolute, because the virtual GPU's libraries are looked up from other folders too.
    folder = made_folder(root.absolute().joinpath(*parts), REMEDY, "cache folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"no write access to the cache folder {folder}; {REMEDY}")
    return folder


def made_folder(path: Path, remedy: str, what: str = "folder") -> Path:
    """A folder, made where it is missing. Raises EnvironmentProblem where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the {what} {path} ({error.strerror}); {remedy}") from error
    return path


def digest(parts: Iterable[str | bytes]) -> str:
    """A short hash of strings and bytes, in order; 16 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:16]


# ---- Entries ------------------------------------------------------------------------------------------------


def keep(target: Path, make: Callable[[Path], Any], what: str, remedy: str = REMEDY) -> Path:
    """The entry at a path: what is there, if it is whole, else made now.

    Where several processes or threads ask at once, one makes it and the others wait.

    Args:
        target: A file or folder in a folder that exists.
        make: Writes the entry to the path that it is given: of the same name, in an empty folder of its own.
        what: What it is, for the one line where it cannot be written.
        remedy: What to do then.

    Raises EnvironmentProblem where there is no room or no access; nothing half-made is left. What `make` raises besides
    goes through.
    """
    if whole(target):
        return target
    with writing(target.parent, what, remedy), only_one(target):
        if not whole(target):  # else another was first
            sweep(target.parent)
            with tempfile.TemporaryDirectory(prefix=STAGING, dir=target.parent) as staging:
                make(Path(staging) / target.name)
                publish(Path(staging) / target.name, target)
            if log := os.environ.get(LOG):
                with open(log, "a", encoding="utf-8") as lines:
                    lines.write(f"{what}\t{target}\n")
    return target


def whole(target: Path) -> bool:
    """Whether an entry is there and holds what its note says."""
    try:
        return note_beside(target).read_text(encoding="utf-8") == note_of(target)
    except (OSError, UnicodeDecodeError):
        return False


def discard(target: Path) -> None:
    """Lets an entry be made anew, although it fits its note, because its reader could not use it."""
    note_beside(target).unlink(missing_ok=True)


def note_beside(target: Path) -> Path:
    """Where the note of an entry lies."""
    return target.with_name(f"{target.name}.sum")


def note_of(target: Path) -> str:
    """What the note of an entry must say: a line for each file, with its SHA-256, its length in bytes and its name."""
    files = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    lines: list[str] = []
    for path in files:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{checksum} {file.tell()} {path.relative_to(target.parent).as_posix()}\n")
    return "".join(lines)


def publish(staged: Path, target: Path) -> None:
    """Puts a finished entry in its place, and its note beside it; what was there before goes."""
    note = staged.with_name("note")
    note.write_text(note_of(staged), encoding="utf-8")
    discard(target)
    if os.path.lexists(target) and (target.is_dir() or staged.is_dir()):  # a file gives way by itself
        target.rename(staged.with_name("old"))
    os.replace(staged, target)
    os.replace(note, note_beside(target))


def sweep(folder: Path) -> None:
    """Removes what interrupted processes left half-made a day ago and earlier."""
    for left in folder.glob(f"{STAGING}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left)


@contextmanager
def writing(folder: Path, what: str, remedy: str = REMEDY) -> Generator[None]:
    """Turns a write into a folder that fails into one line. Raises EnvironmentProblem."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise no_room(what, folder, f"make room there, or {remedy}") from error
        where = f" {error.filename}" if error.filename else ""
        raise EnvironmentProblem(
            f"cannot write {what} to {folder} ({error.strerror}{where}); {remedy}"
        ) from error


@contextmanager
def only_one(target: Path) -> Generator[None]:
    """Lets one process or thread at a time make an entry; the lock goes when its holder ends, however it ends.

    It only saves work: where a file system has no locks, or a holder sleeps for ever, two make the same.
    """
    path = target.with_name(f"{target.name}.lock")
    until = time.monotonic() + PATIENCE
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        held = locked(lock, until)
        if not held or same_file(lock, path):
            break
        os.close(lock)  # its holder has finished and removed it
    try:
        yield
    finally:
        if held:
            path.unlink(missing_ok=True)
        os.close(lock)


def locked(lock: int, until: float) -> bool:
    """Waits for a lock; False where there is none to be had."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        except OSError:
            return False


def same_file(lock: int, path: Path) -> bool:
    """Whether a path still names the open file."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
