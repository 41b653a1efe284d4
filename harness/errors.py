"""Define the errors that end a run with one clear line, each with its exit code."""

import difflib
from collections.abc import Iterable


class WorkbookError(Exception):
    """Base class for problems that the user can fix."""

    exit_code = 1
    details = ""


class UsageError(WorkbookError):
    """An unknown flag, puzzle, device, size or file."""

    exit_code = 2


def make_unknown_gate_error(id: str, known_ids: Iterable[str], owner: str = "") -> UsageError:
    """Return the error for an unknown gate of `owner`, with the closest match and the `known_ids`."""
    ids = [*known_ids]
    matches = difflib.get_close_matches(id, ids, 1)
    suggestion = f" (did you mean {matches[0]}?)" if matches else ""
    return UsageError(
        f"{f'{owner} has no' if owner else 'unknown'} gate {id!r}{suggestion}; there is {', '.join(ids)}"
    )


class DamagedFile(UsageError):
    """A problem file with broken blank markers, or a dangling link."""


class Unsolved(WorkbookError):
    """A blank that must be filled in first."""

    exit_code = 3


class CompileFailed(WorkbookError):
    """The Mojo package does not compile, or lacks an op. `details` is the compiler's full output."""

    exit_code = 4

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class EnvironmentProblem(WorkbookError):
    """A problem with the toolchain, a driver, a cache folder or the hardware."""

    exit_code = 5
