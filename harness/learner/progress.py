"""Load and save a learner's progress: which blanks have passed, which hints were read.

One small file at the top of the checkout, ignored by git. A passed blank is saved as a hash of its text, so
that a later edit shows. If the file is lost or damaged, the gates are checked again.
"""

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.learner.blanks import Blank
from harness.toolchain import roots
from harness.toolchain.cache import digest
from harness.toolchain.disk import write_whole

FILE = ".workbook-progress.json"
BEGUN = ("begun", "changed")
"""The states of a blank with work in progress."""


@dataclass
class Progress:
    """The progress of every puzzle. Each change is merged into the current file, since several commands may
    write it.

    A ladder is called "p20 dx", and "p20 numpy-dx" in NumPy.

    Attributes:
        path: The file.
        passed: Ladder -> the hash of the blank that passed.
        hints: Ladder -> number of hints read.
        unsaved: (attribute, ladder) -> the value, or None if removed, of changes that could not be saved.
        trouble: Why they could not be saved, in the system's words, or "".
    """

    path: Path
    passed: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    unsaved: dict[tuple[str, str], str | int | None] = field(default_factory=dict)
    trouble: str = ""

    @classmethod
    def load(cls, folder: Path | None = None) -> "Progress":
        """Return the progress in a folder, by default the checkout; empty if the file is missing or invalid."""
        progress = cls((folder or roots.CHECKOUT) / FILE)
        progress.refresh()
        return progress

    def refresh(self) -> None:
        """Read the current file."""
        read: dict[str, dict[str, str | int]] = {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            for name, kind in KINDS.items():
                read[name] = {str(key): kind(value) for key, value in data.get(name, {}).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            read = {name: {} for name in KINDS}
        for (name, ladder), value in self.unsaved.items():
            read[name].pop(ladder, None)
            read[name] |= {} if value is None else {ladder: value}
        vars(self).update(read)

    def change(self, name: str, ladder: str, value: str | int | None) -> None:
        """Change one value, here and in the file, or here alone and leave the file whole."""
        self.unsaved[name, ladder] = value
        try:
            with lock(self.path.parent):
                self.refresh()
                data = {name: getattr(self, name) for name in KINDS}
                write_whole(self.path, json.dumps(data, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            self.refresh()
            self.trouble = error.strerror or str(error)
        else:
            self.unsaved, self.trouble = {}, ""

    def note(self, ladder: str, blank: Blank, correct: bool) -> None:
        """Record that a blank has passed, or no longer does."""
        self.refresh()
        known, text = self.passed.get(ladder), fingerprint(blank)
        if correct and known != text:
            self.change("passed", ladder, text)
        elif not correct and known == text:
            self.change("passed", ladder, None)

    def read_hint(self, ladder: str, rung: int) -> None:
        """Record the highest rung that was read."""
        self.refresh()
        if rung > self.hints.get(ladder, 0):
            self.change("hints", ladder, rung)

    def state(self, ladder: str, blank: Blank) -> str:
        """Return "unsolved", "passed", "changed" since it passed, or "begun"."""
        if blank.size == 0:
            return "unsolved"
        if ladder not in self.passed:
            return "begun"
        return "passed" if self.passed[ladder] == fingerprint(blank) else "changed"


KINDS = {"passed": str, "hints": int}
"""The file's tables, with the type of their values."""


def fingerprint(blank: Blank) -> str:
    """Return a hash of a blank's text; line endings and trailing spaces do not count."""
    return digest(line.rstrip() for line in blank.body)


@contextmanager
def lock(folder: Path) -> Generator[None]:
    """Hold a folder's lock for this process, without a file in it. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network folder may not support locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
