"""The errors that end a run with one clear line, each with the exit code that the command line gives it."""

import difflib
from collections.abc import Iterable


class WorkbookError(Exception):
    """Base class: a problem that the person at the keyboard can do something about."""

    exit_code = 1
    details = ""


class BadUse(WorkbookError):
    """An unknown flag, puzzle, device, size or file."""

    exit_code = 2


def unknown_gate(id: str, there: Iterable[str], where: str = "") -> BadUse:
    """Return the error for an unknown gate, with the known ones of `where` and the closest match."""
    ids = [*there]
    near = difflib.get_close_matches(id, ids, 1)
    words = f" (did you mean {near[0]}?)" if near else ""
    return BadUse(
        f"{f'{where} has no' if where else 'unknown'} gate {id!r}{words}; there is {', '.join(ids)}"
    )


class DamagedFile(BadUse):
    """A problem file with broken blank markers, or a dangling link."""


class Unsolved(WorkbookError):
    """A blank that must be filled in first."""

    exit_code = 3


class CompileFailed(WorkbookError):
    """The Mojo package does not compile, or lacks an op. `details` holds the compiler's whole output."""

    exit_code = 4

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class EnvironmentProblem(WorkbookError):
    """A problem of the toolchain, a driver, a cache folder or the hardware."""

    exit_code = 5
