"""Ordering of a warp's lanes by `bar.warp.sync`, for all lanes or the lanes in its mask."""

from __future__ import annotations

import functools
import operator

import numpy as np

LANES = np.arange(32)
ALL_LANES = 0xFFFFFFFF


class WarpSyncs:
    """The `bar.warp.sync`s of a launch.

    Each warp counts the syncs it has passed, and its accesses to shared memory are marked with the count. Two
    accesses with different counts are ordered if the masks of the syncs in between connect their lanes.

    Attributes:
        connected: [32, 32], whether syncs of the launch connect one lane to another.
        partial_syncs: (warp, count) -> the masks of a sync in the current batch that excludes lanes.
    """

    def __init__(self):
        self.connected = np.zeros((32, 32), bool)
        self.partial_syncs: dict[tuple[int, int], list[int]] = {}

    def add(self, batch, mask: np.ndarray, active) -> None:
        """Record a `bar.warp.sync` by the active threads, with one mask or one mask per lane."""
        if mask.ndim == 0 and mask == ALL_LANES:
            self.connected[:] = True
            batch.warp_epoch[slice(None) if active is None else np.unique(batch.warp_of[active])] += 1
            return
        warps = batch.warp_of[batch.get_positions(active)]
        pairs = np.unique(np.stack([warps, np.broadcast_to(mask, len(warps)).astype(np.int64)]), axis=1)
        batch.warp_epoch[np.unique(warps)] += 1
        for warp, mask_lanes in pairs.T.tolist():
            mask_lanes |= ALL_LANES & ~int(batch.initial_masks[warp])  # a warp may have fewer lanes than bits
            if mask_lanes != ALL_LANES:
                self.partial_syncs.setdefault((warp, int(batch.warp_epoch[warp])), []).append(mask_lanes)
            lanes = mask_lanes >> LANES & 1 > 0
            connected_lanes = lanes | self.connected[lanes].any(0)
            self.connected[np.ix_(connected_lanes, connected_lanes)] = True

    def are_connected(self, warp: int, access: tuple[int, int], other_access: tuple[int, int]) -> bool:
        """Return whether the syncs between two accesses, each (count, lane), connect their lanes."""
        (first, lane), (last, target) = sorted((access, other_access))
        connected_lanes = 1 << lane
        for count in range(first + 1, last + 1):
            masks = self.partial_syncs.get((warp, count))
            if masks is None:
                return True
            connected_lanes |= functools.reduce(
                operator.or_, (mask for mask in masks if mask & connected_lanes), 0
            )
        return bool(connected_lanes >> target & 1)

    def find_unordered(self, pairs: np.ndarray) -> np.ndarray:
        """Return a mask of the pairs, columns of [warp, count, lane, count, lane], that no sync orders."""
        distinct, number = np.unique(pairs, axis=1, return_inverse=True)
        connected = [self.are_connected(warp, (a, b), (c, d)) for warp, a, b, c, d in distinct.T.tolist()]
        return ~np.array(connected, bool)[number.reshape(-1)]
