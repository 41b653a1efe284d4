"""What a learner has done so far: which blanks have passed, which hints were read, how many tries and how long it took.

One small file at the top of the checkout, which git ignores. A blank is remembered by a hash of its text, so that an
edit after passing shows. A file that is lost or damaged loses nothing else: the gates are checked again.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.learner.blanks import Blank
from harness.toolchain import roots
from harness.toolchain.cache import digest
from harness.toolchain.disk import write_whole

FILE = ".workbook-progress.json"
IDLE = 600.0
"""Seconds: of a longer pause between two steps on a puzzle no more counts as time spent on it."""
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
        tries: Ladder -> how many different texts of the blank were checked until one passed.
        tried: Ladder -> the hash of the last of them.
        spent: Puzzle -> seconds from step to step, pauses left out.
        stepped: Puzzle -> when the last step was, a check or a hint, in seconds since 1970.
    """

    path: Path
    passed: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    tried: dict[str, str] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    stepped: dict[str, float] = field(default_factory=dict)

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
        """Remembers that a blank has passed, or no longer does, and a try where its text is another one."""
        known, text = self.passed.get(ladder), fingerprint(blank)
        new = blank.size > 0 and self.tried.get(ladder) != text
        if new:
            self.tried[ladder] = text
            self.tries[ladder] = self.tries.get(ladder, 0) + (known is None)
            self._step(ladder)
        if correct:
            self.passed[ladder] = text
        elif known == text:
            del self.passed[ladder]
        if new or self.passed.get(ladder) != known:
            self.save()

    def read_hint(self, ladder: str, rung: int) -> None:
        """Remembers the highest rung that was read."""
        if rung > self.hints.get(ladder, 0):
            self.hints[ladder] = rung
            self._step(ladder)
            self.save()

    def _step(self, ladder: str) -> None:
        """Adds the time since the last step to what was spent on the ladder's puzzle."""
        puzzle, now = ladder.split()[0], time.time()
        since = now - self.stepped.get(puzzle, now)
        self.spent[puzzle] = self.spent.get(puzzle, 0.0) + min(max(since, 0.0), IDLE)
        self.stepped[puzzle] = now

    def state(self, ladder: str, blank: Blank) -> str:
        """ "unsolved", "passed", "changed" since it passed, or "begun"."""
        if blank.size == 0:
            return "unsolved"
        if ladder not in self.passed:
            return "begun"
        return "passed" if self.passed[ladder] == fingerprint(blank) else "changed"


KINDS = {"passed": str, "hints": int, "tries": int, "tried": str, "spent": float, "stepped": float}
"""What the file holds, and of which kind each value is; one of an earlier version lacks the last four."""


def fingerprint(blank: Blank) -> str:
    """A hash of what stands in a blank; line endings and spaces at the end of a line do not count."""
    return digest(line.rstrip() for line in blank.body)
