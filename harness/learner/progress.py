"""Load and save a learner's progress: the hashes of the blanks that passed, and the hints read."""

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
from harness.toolchain.disk import write_atomically

FILE_NAME = ".workbook-progress.json"
IN_PROGRESS = ("begun", "changed")
"""States of a blank that has been edited and has not passed since."""


@dataclass
class Progress:
    """Progress in all puzzles. Each change is merged into the file, which several processes may write.

    `passed` maps a progress key ("p20 dx", "p20 numpy-dx") to the hash of the blank that passed, `hints` maps
    it to the number of hints read. `unsaved_changes` could not be saved because of `save_error`.
    """

    path: Path
    passed: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    unsaved_changes: dict[tuple[str, str], str | int | None] = field(default_factory=dict)
    save_error: str = ""

    @classmethod
    def load(cls, folder: Path | None = None) -> "Progress":
        """Load the progress in a folder (default: the checkout); empty if the file is missing or invalid."""
        progress = cls((folder or roots.CHECKOUT) / FILE_NAME)
        progress.refresh()
        return progress

    def refresh(self) -> None:
        tables: dict[str, dict[str, str | int]] = {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            for table, value_type in TABLES.items():
                tables[table] = {str(key): value_type(value) for key, value in data.get(table, {}).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            tables = {table: {} for table in TABLES}
        for (table, key), value in self.unsaved_changes.items():
            tables[table].pop(key, None)
            tables[table] |= {} if value is None else {key: value}
        vars(self).update(tables)

    def set_value(self, table: str, key: str, value: str | int | None) -> None:
        """Set one value in memory and in the file; if saving fails, the file is unchanged."""
        self.unsaved_changes[table, key] = value
        try:
            with lock_folder(self.path.parent):
                self.refresh()
                data = {table: getattr(self, table) for table in TABLES}
                write_atomically(self.path, json.dumps(data, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            self.refresh()
            self.save_error = error.strerror or str(error)
        else:
            self.unsaved_changes, self.save_error = {}, ""

    def record_result(self, key: str, blank: Blank, correct: bool) -> None:
        """Record that a blank has passed, or no longer does."""
        self.refresh()
        passed, digest = self.passed.get(key), hash_blank(blank)
        if correct and passed != digest:
            self.set_value("passed", key, digest)
        elif not correct and passed == digest:
            self.set_value("passed", key, None)

    def record_hint(self, key: str, number: int) -> None:
        """Record the highest hint read."""
        self.refresh()
        if number > self.hints.get(key, 0):
            self.set_value("hints", key, number)

    def get_state(self, key: str, blank: Blank) -> str:
        """Return "unsolved", "begun", "passed", or "changed" (since it passed)."""
        if blank.size == 0:
            return "unsolved"
        if key not in self.passed:
            return "begun"
        return "passed" if self.passed[key] == hash_blank(blank) else "changed"


TABLES = {"passed": str, "hints": int}
"""Table of the file -> type of its values."""


def hash_blank(blank: Blank) -> str:
    """Return a hash of a blank's text, ignoring line endings and trailing spaces."""
    return compute_digest(line.rstrip() for line in blank.body)


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Hold an exclusive lock on a folder, without a lock file. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network folder may not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
