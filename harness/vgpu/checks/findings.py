"""Findings: problems in a launch, one per cause, with Mojo line, tensor, index, block and thread.

A problem inside a library algorithm, such as a block or warp primitive, is a note, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from harness.vgpu.ptx.locations import find_callers
from harness.vgpu.ptx.parser import Instr

_MARKED_NAME = re.compile("\x0e([^\x0f]*)\x0f")

KINDS = (
    "barrier divergence", "early return", "warp divergence", "shuffle from an absent thread",
    "threads exited before a barrier", "hang", "trap",
    *(f"{fault} {access}" for fault in ("out-of-bounds", "null pointer", "misaligned")
      for access in ("load", "store", "atomic")),
    "store to an input", "store to constant memory", "undeclared atomic",
    "shared race", "race inside a block", "global race", "atomic scope",
    "uninitialised read", "output never written",
    "mbarrier not initialised", "too many arrivals", "unfinished copy", "stage reused early", "unordered store",
    "missing proxy fence", "operand overwritten", "bulk store left behind", "misaligned bulk copy",
    "not a tensor map", "uneven matrix descriptor", "missing wgmma fence", "accumulator in use",
    "register budget",
)  # fmt: skip
"""Every kind of finding."""


@dataclass(frozen=True)
class Checks:
    """The optional checks; addresses and barriers are always checked."""

    uninitialised: bool = True
    races: bool = True
    counters: bool = True


@dataclass(slots=True)
class Finding:
    """One problem: its first occurrence, and the number of occurrences.

    `kind` is one of KINDS. Tensor names in `marked_message` are marked by `mark_name`; `message` is the text
    without marks. `index` is an element's index in the tensor (a tuple if its shape is known). `block` and
    `thread` are (x, y, z).
    """

    kind: str
    marked_message: str
    location: str = ""
    kernel: str = ""
    tensor: str = ""
    index: int | tuple[int, ...] | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    count: int = 1
    is_error: bool = True
    other_location: str = ""  # location of the other access of a race
    access_kinds: frozenset[str] = frozenset()  # accesses of a race: "a load", "a store", "an atomic" ...
    instr: Instr | None = None
    other_instr: Instr | None = field(default=None, repr=False)

    def __post_init__(self):
        assert self.kind in KINDS, self.kind

    @property
    def message(self) -> str:
        return _MARKED_NAME.sub(r"\1", self.marked_message)

    def rename_tensors(self, name_of: Callable[[str], str]) -> Finding:
        marked_message = _MARKED_NAME.sub(lambda mark: mark_name(name_of(mark[1])), self.marked_message)
        return replace(
            self, marked_message=marked_message, tensor=name_of(self.tensor) if self.tensor else ""
        )

    def format(self) -> str:
        head = f"{'error' if self.is_error else 'note'}: {self.kind}"
        if self.location:
            head += f" at {self.location}"
        lines = [head, f"  {self.message}"]
        lines += [f"  called from {caller}" for caller in find_callers(self.instr)]
        if self.other_location:
            lines.append(f"  the other place: {self.other_location}")
        origin = []
        if self.kernel:
            origin.append(f"kernel {self.kernel}")
        if self.block is not None:
            origin.append(f"block {format_triple(self.block)}")
        if self.thread is not None:
            origin.append(f"thread {format_triple(self.thread)}")
        if origin:
            lines.append("  first seen in " + ", ".join(origin))
        if self.count > 1:
            lines.append(f"  {self.count} times in all")
        if not self.is_error:
            lines.append("  (this code belongs to the Mojo library, or is allowed: not counted as an error)")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """Return the finding as JSON data, with locations as file:line:column."""
        return {
            "kind": self.kind, "error": self.is_error, "message": self.message, "where": self.location,
            "called_from": find_callers(self.instr), "other": self.other_location or None,
            "kernel": self.kernel, "tensor": self.tensor or None,
            "index": list(self.index) if isinstance(self.index, tuple) else self.index, "block": self.block,
            "thread": self.thread, "count": self.count,
        }  # fmt: skip


def mark_name(tensor: str) -> str:
    """Mark a tensor's name in a message, so that it can be replaced later."""
    return f"\x0e{tensor}\x0f"


def format_count(count: int, singular: str, plural: str = "") -> str:
    """Format a count: "1 error", "2 errors"; with an irregular plural `plural`, "2 launches"."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def add_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def format_triple(t: tuple[int, int, int]) -> str:
    return f"({t[0]}, {t[1]}, {t[2]})"


class Findings(list):
    """The findings of a device or launch; repetitions at an instruction and tensor increment a count."""

    def __init__(self):
        super().__init__()
        self._keys: dict[tuple, Finding] = {}

    def record(self, finding: Finding, key: tuple) -> Finding:
        """Add a finding, or add its count to the one with the same key."""
        recorded = self._keys.get(key)
        if recorded is not None:
            recorded.count += finding.count
            recorded.access_kinds |= finding.access_kinds
            return recorded
        self._keys[key] = finding
        self.append(finding)
        return finding


def group_by_cause(findings: Iterable[Finding]) -> list[Finding]:
    """Group findings by cause, errors first, then by frequency.

    Findings of several launches share a cause if kind, kernel and both locations are the same.
    """
    causes: dict[tuple, Finding] = {}
    for finding in findings:
        cause = finding.kind, finding.kernel, finding.location, finding.other_location
        first = causes.get(cause)
        if first:
            finding = replace(
                first,
                count=first.count + finding.count,
                access_kinds=first.access_kinds | finding.access_kinds,
            )
        causes[cause] = finding
    return sorted(causes.values(), key=lambda finding: (not finding.is_error, -finding.count))


def format_index(index) -> str:
    if index is None:
        return ""
    return f"[{', '.join(map(str, index))}]" if isinstance(index, tuple) else f"[{index}]"


def format_findings(findings) -> str:
    ordered = sorted(findings, key=lambda f: not f.is_error)
    return "\n".join(f.format() for f in ordered)
