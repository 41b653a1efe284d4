"""Detect whether results depend on unwritten shared memory: run the launch again with other bytes in it.

With a line table, an unwritten word that the library's own algorithms read and do not use is distinguished from a
mistake by its place. Without one the two cannot be told apart: the launch is run again from the same global
memory, with random bytes in the unwritten shared memory. If stores and findings are the same, nothing depends
on it.
"""

from __future__ import annotations

import numpy as np

from harness.vgpu.memory.arena import Extent

KEEP = 1 << 28
"""Limit of global memory, in bytes, saved for a second run."""

Held = tuple[np.ndarray, np.ndarray, bool]
"""Data and written-map of a tensor, and whether it was ready."""


class SavedTensors:
    """The contents of tensors before a launch first wrote them."""

    def __init__(self, arena):
        self.arena = arena
        self.kept: dict[Extent, Held] | None = {}
        self.size = 0

    def first_write(self, tensor: Extent) -> None:
        """Save a tensor that the launch is about to write for the first time."""
        self.size += tensor.end - tensor.start
        if self.size > KEEP:
            self.kept = None
        if self.kept is not None:
            self.kept[tensor] = self.arena.snapshot(tensor)


def depends_on_unwritten(run) -> bool:
    """Return whether a finished run gives another result with other bytes in its unwritten shared memory;
    True if unknown.

    Memory is restored afterwards.
    """
    before = run.before.kept
    if before is None:
        return True
    arena = run.arena
    after = {tensor: arena.snapshot(tensor) for tensor in before}
    for tensor, held in before.items():
        arena.restore(tensor, held)
    again = run.rerun()
    if again is not None:
        same = again.printed == run.printed and finding_keys(again) == finding_keys(run)
        same = same and again.before.kept is not None and set(again.before.kept) == set(before)
        for tensor in before:
            data, written, _ = arena.snapshot(tensor)
            same = same and all(map(np.array_equal, (data, written), after[tensor][:2]))
        for tensor, held in (again.before.kept or {}).items():
            if tensor not in before:
                arena.restore(tensor, held)
    for tensor, held in after.items():
        arena.restore(tensor, held)
    return again is None or not same


def finding_keys(run) -> set[tuple]:
    """Return the findings without their counts."""
    return {(f.kind, f.where, f.other, f.tensor) for f in run.findings}
