"""Detect whether results depend on unwritten shared memory, by rerunning the launch with other contents.

This is needed only without a line table, which distinguishes reads by the library from reads by user code.
"""

from __future__ import annotations

import numpy as np

from harness.vgpu.memory.arena import Extent

MAX_SAVED_BYTES = 1 << 28
"""Limit on the bytes of global memory that are saved for a rerun."""

Snapshot = tuple[np.ndarray, np.ndarray, bool]
"""A tensor's data and written mask, and whether it was fully written."""


class SavedTensors:
    """Copies of tensors from before their first write in a launch.

    `snapshots` is None if they exceed MAX_SAVED_BYTES.
    """

    def __init__(self, arena):
        self.arena = arena
        self.snapshots: dict[Extent, Snapshot] | None = {}
        self.size = 0

    def save(self, tensor: Extent) -> None:
        """Save a tensor that the launch is about to write for the first time."""
        self.size += tensor.end - tensor.start
        if self.size > MAX_SAVED_BYTES:
            self.snapshots = None
        if self.snapshots is not None:
            self.snapshots[tensor] = self.arena.snapshot(tensor)


def depends_on_unwritten_memory(run) -> bool:
    """Return whether a launch's results depend on unwritten shared memory; True if unknown.

    The rerun leaves global memory unchanged.
    """
    saved = run.tensors_before_launch.snapshots
    if saved is None:
        return True
    arena = run.arena
    after = {tensor: arena.snapshot(tensor) for tensor in saved}
    for tensor, snapshot in saved.items():
        arena.restore(tensor, snapshot)
    rerun = run.rerun()
    if rerun is not None:
        unchanged = rerun.output == run.output and get_finding_keys(rerun) == get_finding_keys(run)
        snapshots = rerun.tensors_before_launch.snapshots
        unchanged = unchanged and snapshots is not None and set(snapshots) == set(saved)
        for tensor in saved:
            data, written, _ = arena.snapshot(tensor)
            unchanged = unchanged and all(map(np.array_equal, (data, written), after[tensor][:2]))
        for tensor, snapshot in (snapshots or {}).items():
            if tensor not in saved:
                arena.restore(tensor, snapshot)
    for tensor, snapshot in after.items():
        arena.restore(tensor, snapshot)
    return rerun is None or not unchanged


def get_finding_keys(run) -> set[tuple]:
    return {(f.kind, f.location, f.other_location, f.tensor) for f in run.findings}
