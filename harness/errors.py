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
    """Return the error for a gate that is none, or none of `where`, with those there are, and the one that was meant where it is
    much like one."""
    ids = [*there]
    near = difflib.get_close_matches(id, ids, 1)
    words = f" (did you mean {near[0]}?)" if near else ""
    return BadUse(
        f"{f'{where} has no' if where else 'unknown'} gate {id!r}{words}; there is {', '.join(ids)}"
    )


class DamagedFile(BadUse):
    """A problem file whose blank markers are broken, or a link that leads nowhere."""


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
    """The toolchain, a driver, a cache folder or the hardware stands in the way."""

    exit_code = 5
