"""What a learner has done so far: which blanks have passed, which hints were read.

One small file at the top of the checkout, which git ignores. A blank is remembered by a hash of its text, so that an
edit after passing shows. A file that is lost or damaged loses nothing else: the gates are checked again.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.learner.blanks import Blank
from harness.toolchain import roots
from harness.toolchain.cache import digest
from harness.toolchain.disk import write_whole

FILE = ".workbook-progress.json"
BEGUN = ("begun", "changed")
"""The states of a blank that somebody is at."""


@dataclass
class Progress:
    """The progress of every puzzle, saved after each change.

    A ladder is called "p20 dx", and "p20 numpy-dx" in NumPy.

    Attributes:
        path: The file.
        passed: Ladder -> the hash of the blank that passed.
        hints: Ladder -> how many rungs were read.
    """

    path: Path
    passed: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path | None = None) -> "Progress":
        """The progress in a folder, the checkout unless another is given; empty where the file is missing or cannot be understood."""
        path = (folder or roots.CHECKOUT) / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            noted = cls(path)
            for name, kind in KINDS.items():
                kept = data.get(name, {}).items()
                getattr(noted, name).update({str(key): kind(value) for key, value in kept})
            return noted
        except (OSError, ValueError, TypeError, AttributeError):
            return cls(path)

    def save(self) -> None:
        """Writes the file, or leaves the old one whole; a folder that cannot be written costs the progress only."""
        data = json.dumps({name: getattr(self, name) for name in KINDS}, indent=2, sort_keys=True)
        with suppress(OSError):
            write_whole(self.path, data + "\n")

    def note(self, ladder: str, blank: Blank, correct: bool) -> None:
        """Remembers that a blank has passed, or no longer does."""
        known, text = self.passed.get(ladder), fingerprint(blank)
        if correct:
            self.passed[ladder] = text
        elif known == text:
            del self.passed[ladder]
        if self.passed.get(ladder) != known:
            self.save()

    def read_hint(self, ladder: str, rung: int) -> None:
        """Remembers the highest rung that was read."""
        if rung > self.hints.get(ladder, 0):
            self.hints[ladder] = rung
            self.save()

    def state(self, ladder: str, blank: Blank) -> str:
        """ "unsolved", "passed", "changed" since it passed, or "begun"."""
        if blank.size == 0:
            return "unsolved"
        if ladder not in self.passed:
            return "begun"
        return "passed" if self.passed[ladder] == fingerprint(blank) else "changed"


KINDS = {"passed": str, "hints": int}
"""What the file holds, and of which kind each value is."""


def fingerprint(blank: Blank) -> str:
    """A hash of what stands in a blank; line endings and spaces at the end of a line do not count."""
    return digest(line.rstrip() for line in blank.body)
