"""Vector clocks: what happened before what, for kernels whose threads order each other by more than barriers.

Blocks order each other through atomics and strong accesses in memory that they share, and through the barrier
of their cluster; warps of one block through flags in its shared memory. A block's history is cut into
segments at its releases and acquires. A release covers what its own warp has done, and what the whole block
did before its last barrier; what an acquire learns is known to its own warp at once, and to the whole block
after the next barrier. So a fence by one thread says nothing about stores that other threads have just made.
Inside a warp everything counts as ordered.

The log of such a launch is kept, sorted and checked at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.arena import Extent, extent_at

EPOCHS = (1 << 14) - 1  # barrier epochs are counted to here, as in the marks of races.py
Warps = frozenset[int]


class Known(NamedTuple):
    """How much of a block happened before something: its segments below `count`.

    In barrier epoch `epoch`, the last of them, only what `warps` did.
    """

    count: int
    epoch: int
    warps: Warps


class Learned(NamedTuple):
    """Something known, and who of the block has learned it in which barrier epoch."""

    known: Known
    epoch: int
    warps: Warps


Clock = dict[int, Known]
"""Block -> what of it is known."""


def together(a: Known | None, b: Known) -> Known:
    """What is known from two sides."""
    if a is None:
        return b
    if a.epoch != b.epoch:
        late = max(a, b, key=lambda known: known.epoch)
        return late._replace(count=max(a.count, b.count))
    return Known(max(a.count, b.count), a.epoch, a.warps | b.warps)


def joined(clocks: Iterable[Clock]) -> Clock:
    """What is known from all clocks."""
    out: Clock = {}
    for clock in clocks:
        for block, known in clock.items():
            out[block] = together(out.get(block), known)
    return out


class Clocks:
    """The clocks of one launch. Blocks are numbers in the grid, warps numbers in their block."""

    def __init__(self, cluster_size: int):
        self.cluster_size = cluster_size
        self.current: dict[int, int] = {}  # block -> its segment
        self.rows: list[dict[int, tuple[Learned, ...]]] = []  # segment -> block -> what is known of it
        self.owner: list[int] = []
        self.count: list[int] = []  # segment -> its number within its block
        self.fenced: dict[
            tuple[int, int, bool], Clock
        ] = {}  # (block, warp, block scope) -> at its last fence
        self.places: dict[tuple, Clock] = {}  # place -> what releases have left there
        # (block, warp) -> what was read but not yet acquired
        self.unacquired: dict[tuple[int, int], Clock] = {}
        self.arrived: dict[int, Clock] = {}  # cluster -> what arrivals at its barrier have released
        self.table: tuple = (None, None)
        self.time = 0

    # -- segments -------------------------------------------------------------------------------------------
    def segment(self, block: int) -> int:
        """The segment that a block is in."""
        segment = self.current.get(block)
        return self.new_segment(block, {}) if segment is None else segment

    def new_segment(self, block: int, row: dict[int, tuple[Learned, ...]]) -> int:
        """What a block does from now on is in a new segment, in which `row` is known."""
        before = self.current.get(block)
        self.rows.append(row)
        self.owner.append(block)
        self.count.append(0 if before is None else self.count[before] + 1)
        self.current[block] = len(self.rows) - 1
        self.table = (None, None)
        return self.current[block]

    def segments(self, batch, L) -> tuple[np.ndarray, int]:
        """The current segment of each thread's block, and the time."""
        if self.table[0] is not batch:
            self.table = batch, np.array([self.segment(b) for b in batch.blocks.tolist()])
        self.time += 1
        return self.table[1][batch.block_of if L is None else batch.block_of[L]], self.time

    # -- releases and acquires ------------------------------------------------------------------------------
    def release(self, block: int, epoch: int, warps: Warps) -> Clock:
        """What some warps of a block may publish now: what they know, and what is before them in their own
        block."""
        clock = self.clock(block, epoch, warps)
        self.new_segment(block, self.rows[self.segment(block)])  # what comes after is not covered
        return clock

    def clock(self, block: int, epoch: int, warps: Warps) -> Clock:
        """What some warps of a block know now, their own past included."""
        s = self.segment(block)
        clock = {
            other: known
            for other, learned in self.rows[s].items()
            if (known := self.knows(learned, epoch, warps)) is not None
        }
        clock[block] = together(clock.get(block), Known(self.count[s] + 1, epoch, warps))
        return clock

    @staticmethod
    def knows(learned: tuple[Learned, ...], epoch: int, warps: Warps) -> Known | None:
        """What warps know in an epoch, of what their block has learned."""
        known = None
        for item in learned:
            if item.epoch != epoch or item.warps & warps:
                known = together(known, item.known)
        return known

    def acquire(self, block: int, epoch: int, warps: Warps, clock: Clock) -> None:
        """Some warps of a block learn a clock."""
        if not clock:
            return
        row = dict(self.rows[self.segment(block)])
        for other, known in clock.items():
            old = row.get(other, ())
            everybody = None
            mine = known
            kept = []
            for item in old:
                if item.epoch != epoch:
                    everybody = together(everybody, item.known)
                elif item.warps == warps:
                    mine = together(mine, item.known)
                else:
                    kept.append(item)
            if everybody is not None:
                kept.append(Learned(everybody, -1, frozenset()))
            row[other] = (*kept, Learned(mine, epoch, warps))
        self.new_segment(block, row)

    # -- what threads do ------------------------------------------------------------------------------------
    def groups(self, batch, L):
        """(block, its barrier epoch, warps) of the threads."""
        positions = batch.positions(L)
        blocks = batch.block_of[positions]
        pairs = np.unique(blocks * 32 + (batch.thread_of[positions] >> 5))
        by_block: dict[int, list[int]] = {}
        for pair in pairs.tolist():
            by_block.setdefault(pair >> 5, []).append(pair & 31)
        for number, warps in by_block.items():
            yield int(batch.blocks[number]), int(batch.epoch[number]) & EPOCHS, frozenset(warps)

    def fence(self, batch, L, narrow: bool) -> None:
        """A fence of the threads; `narrow`: for their own block only."""
        for block, epoch, warps in self.groups(batch, L):
            self.acquire(block, epoch, warps, joined(self.unacquired.pop((block, w), {}) for w in warps))
            for w in warps:  # each fences what is its own: what others have done, a barrier must bring
                self.fenced[block, w, True] = clock = self.clock(block, epoch, frozenset((w,)))
                if not narrow:
                    self.fenced[block, w, False] = clock
            self.new_segment(block, self.rows[self.segment(block)])

    def clusters_of(self, batch, L):
        """(block, epoch, warps, cluster). A batch holds whole clusters, block by block."""
        at = {int(b): k for k, b in enumerate(batch.blocks)}
        for block, epoch, warps in self.groups(batch, L):
            yield block, epoch, warps, int(batch.blocks[at[block] // self.cluster_size * self.cluster_size])

    def cluster_arrive(self, batch, L, release: bool) -> None:
        """The threads arrive at the barrier of their cluster."""
        for block, epoch, warps, cluster in self.clusters_of(batch, L):
            fenced = joined(self.fenced.get((block, w, False), {}) for w in warps)
            published = self.release(block, epoch, warps) if release else fenced
            self.arrived[cluster] = joined((self.arrived.get(cluster, {}), published))

    def cluster_wait(self, batch, L) -> None:
        """The threads go on after the barrier of their cluster."""
        passing = list(self.clusters_of(batch, L))
        for block, epoch, warps, cluster in passing:
            self.acquire(block, epoch, warps, self.arrived.get(cluster, {}))
        for *_, cluster in passing:
            self.arrived.pop(cluster, None)

    def access(self, batch, A, places: np.ndarray, L) -> None:
        """An atomic, or a strong load or store, at a place for each thread: it may publish, and it may
        learn."""
        positions = batch.positions(L)
        numbers = batch.block_of[positions].tolist()
        met: dict[tuple, set[int]] = {}
        for number, warp, place in zip(
            numbers, (batch.thread_of[positions] >> 5).tolist(), places.tolist(), strict=True
        ):
            met.setdefault((number, place), set()).add(warp)
        for (number, place), some in met.items():
            block, epoch, warps = (
                int(batch.blocks[number]),
                int(batch.epoch[number]) & EPOCHS,
                frozenset(some),
            )
            key = (place, block if A.narrow else None)
            if A.used or A.instr.op == "ld":
                there = joined(self.places.get(k, {}) for k in {key, (place, None)})
                if there and A.acquires:
                    self.acquire(block, epoch, warps, there)
                elif there:
                    for w in warps:
                        self.unacquired[block, w] = joined((self.unacquired.get((block, w), {}), there))
            if A.writes:
                if A.releases:
                    published = self.release(block, epoch, warps)
                else:
                    published = joined(self.fenced.get((block, w, A.narrow), {}) for w in warps)
                if published:
                    self.places[key] = joined((self.places.get(key, {}), published))

    # -- verdicts -------------------------------------------------------------------------------------------
    def ordered(self, first: tuple[int, int, int], then: tuple[int, int, int]) -> bool:
        """Whether one access happened before another; each is (segment, barrier epoch, warp)."""
        (s, epoch, warp), (t, later_epoch, later_warp) = first, then
        block = self.owner[s]
        if block == self.owner[t] and (warp == later_warp or epoch != later_epoch):
            return s != t or epoch != later_epoch
        for known, learned_epoch, warps in self.rows[t].get(block, ()):
            if learned_epoch == later_epoch and later_warp not in warps:
                continue
            if self.count[s] < known.count and (epoch != known.epoch or warp in known.warps):
                return True
        return False

    def over_before_exit(self, access: tuple[int, int, int], block: int) -> bool:
        """Whether an access happened before a block's end, as far as any of its warps knows."""
        s, epoch, warp = access
        return any(
            self.count[s] < known.count and (epoch != known.epoch or warp in known.warps)
            for known, _, _ in self.rows[self.segment(block)].get(self.owner[s], ())
        )


class SharedOfAll(Extent):
    """The shared memory of all blocks of a launch as one range: `size` bytes for each block, by its
    number."""

    def __init__(self, blocks: int, size: int, extents: list[Extent]):
        super().__init__(0, blocks * size, "shared memory")
        self.size, self.extents = size, extents

    def part(self, byte: int, width: int) -> tuple[str, int | tuple[int, ...] | None, int]:
        """(name of the shared variable, element, block) at a byte of the range."""
        block, local = divmod(byte, self.size)
        extent = extent_at(self.extents, local)
        return (extent.name, extent.index(local, width), block) if extent else (self.name, None, block)
