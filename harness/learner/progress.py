"""Load and save a learner's progress in one file: hashes of the blanks that passed, and hints read."""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.learner.blanks import Blank
from harness.toolchain import roots
from harness.toolchain.cache import compute_digest
from harness.toolchain.disk import write_whole

FILE_NAME = ".workbook-progress.json"
BEGUN = ("begun", "changed")
"""The states of a blank with work in progress."""


@dataclass
class Progress:
    """Progress in all puzzles. Each change is merged into the file, which several commands may write.

    `passed` maps a progress key ("p20 dx", "p20 numpy-dx") to the hash of the blank that passed, `hints` to
    the number of hints read. `unsaved` contains changes that could not be saved because of `save_error`.
    """

    path: Path
    passed: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    unsaved: dict[tuple[str, str], str | int | None] = field(default_factory=dict)
    save_error: str = ""

    @classmethod
    def load(cls, folder: Path | None = None) -> "Progress":
        """Return the progress in a folder, by default the checkout; empty if the file is missing or invalid."""
        progress = cls((folder or roots.CHECKOUT) / FILE_NAME)
        progress.refresh()
        return progress

    def refresh(self) -> None:
        read: dict[str, dict[str, str | int]] = {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            for name, kind in TABLES.items():
                read[name] = {str(key): kind(value) for key, value in data.get(name, {}).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            read = {name: {} for name in TABLES}
        for (name, ladder), value in self.unsaved.items():
            read[name].pop(ladder, None)
            read[name] |= {} if value is None else {ladder: value}
        vars(self).update(read)

    def change(self, name: str, ladder: str, value: str | int | None) -> None:
        """Change one value in memory and in the file; if saving fails, the file stays intact."""
        self.unsaved[name, ladder] = value
        try:
            with lock_folder(self.path.parent):
                self.refresh()
                data = {name: getattr(self, name) for name in TABLES}
                write_whole(self.path, json.dumps(data, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            self.refresh()
            self.save_error = error.strerror or str(error)
        else:
            self.unsaved, self.save_error = {}, ""

    def record_result(self, ladder: str, blank: Blank, correct: bool) -> None:
        """Record that a blank has passed, or no longer does."""
        self.refresh()
        passed, digest = self.passed.get(ladder), hash_blank(blank)
        if correct and passed != digest:
            self.change("passed", ladder, digest)
        elif not correct and passed == digest:
            self.change("passed", ladder, None)

    def record_hint(self, ladder: str, rung: int) -> None:
        """Record the highest hint read."""
        self.refresh()
        if rung > self.hints.get(ladder, 0):
            self.change("hints", ladder, rung)

    def get_state(self, ladder: str, blank: Blank) -> str:
        """Return "unsolved", "passed", "changed" since it passed, or "begun"."""
        if blank.size == 0:
            return "unsolved"
        if ladder not in self.passed:
            return "begun"
        return "passed" if self.passed[ladder] == hash_blank(blank) else "changed"


TABLES = {"passed": str, "hints": int}
"""The file's tables, with the type of their values."""


def hash_blank(blank: Blank) -> str:
    """Return a hash of a blank's text, ignoring line endings and trailing spaces."""
    return compute_digest(line.rstrip() for line in blank.body)


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold an exclusive lock on a folder, without a lock file. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network folder may not support locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
