"""Vector clocks: what happened before what, for kernels whose threads order each other by more than barriers.

Blocks order each other through atomics and strong accesses in memory that they share, and through the barrier
of their cluster; warps of one block through flags in its shared memory. A block's history is cut into
segments at its releases and acquires. A release covers what its own warp has done, and what the whole block
did before its last barrier; what an acquire learns is known to its own warp at once, and to the whole block
after the next barrier. So a fence by one thread says nothing about stores that other threads have just made.
Inside a warp everything counts as ordered.

The rules are those of the PTX memory model. What a release pattern (a release, or a fence and a strong write
after it) publishes is seen by an acquire pattern (an acquire, or a strong read and a fence after it) that reads
its write, or reads from a chain of atomics that begins there; a plain strong store ends the chain. Both ends
name a scope that covers the other. A strong write itself also happens before what follows, in program order, a
read that has seen it or an atomic after it: no fence is needed for that one place. Two fence.sc, the first before
a write (a barrier may stand between) and the second after a read of it, are ordered too.

The log of such a launch is kept, sorted and checked at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.access import BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE
from harness.vgpu.memory.arena import Extent, extent_at

EPOCHS = (1 << 14) - 1  # barrier epochs are counted to here, as in the marks of races.py
Warps = frozenset[int]


class Prefix(NamedTuple):
    """A prefix of a block's history: its segments below `count`.

    In barrier epoch `epoch`, the last of them, it covers only the segments of each warp of `warps` below that
    warp's count.
    """

    count: int
    epoch: int
    warps: dict[int, int]

    def covers(self, count: int, epoch: int, warp: int) -> bool:
        """Return whether an access of a warp, in segment `count` and a barrier epoch, is in this prefix."""
        return count < (self.count if epoch != self.epoch else self.warps.get(warp, 0))


class Acquired(NamedTuple):
    """A clock, and which warps of the block acquired it in which barrier epoch."""

    known: Prefix
    epoch: int
    warps: Warps


Clock = dict[int, Prefix]
"""Block -> its known prefix."""

Domain = tuple[int | None, bool]
"""Scope of an acquire: a block, a cluster (its first block, negative) or all (None); and whether only by a fence.sc."""

Step = tuple[int, int, int]
"""Accesses of a launch: (segment, barrier epoch, warp)."""


class Place:
    """One memory location as strong accesses leave it."""

    __slots__ = ("count", "published", "reads", "released", "start", "writer", "wrote")

    def __init__(self):
        self.count = 0  # strong writes so far
        self.start = 0  # the first write of the chain of atomics that the last write ends
        self.writer: tuple[int, int] | None = None  # (scope, block) of the last write
        self.published: dict[Domain, Clock] = {}  # the clock that the chain publishes
        self.released: dict[
            tuple[int, int], dict[int, Clock]
        ] = {}  # (block, warp) -> scope -> by its releases here
        self.wrote: dict[Step, tuple[int, int]] = {}  # writer -> numbers of the first and the last write
        self.reads: dict[Step, tuple[int, int]] = {}  # reader -> observed writes: from, to


def merge_prefixes(a: Prefix | None, b: Prefix) -> Prefix:
    """Return the union of two prefixes."""
    if a is None or a == b:
        return b
    if a.epoch != b.epoch:
        late = max(a, b, key=lambda known: known.epoch)
        return late._replace(count=max(a.count, b.count))
    warps = a.warps | {w: max(count, a.warps.get(w, 0)) for w, count in b.warps.items()}
    return Prefix(max(a.count, b.count), a.epoch, warps)


def merge_clocks(clocks: Iterable[Clock]) -> Clock:
    out: Clock = {}
    for clock in clocks:
        for block, known in clock.items():
            out[block] = merge_prefixes(out.get(block), known)
    return out


class StrictFence:
    """A block's clock at its fence.sc: each warp's in the epoch of the last one, and all before it."""

    def __init__(self):
        self.epoch = -1
        self.now: dict[tuple[int, int], Clock] = {}  # (scope, warp) -> clock
        self.past: dict[int, Clock] = {}  # scope -> clock

    def before(self, epoch: int) -> dict[int, Clock]:
        """Map each scope to the clock that the whole block fenced before a barrier epoch."""
        if epoch != self.epoch:
            for (scope, _), clock in self.now.items():
                self.past[scope] = merge_clocks((self.past.get(scope, {}), clock))
            self.epoch, self.now = epoch, {}
        return self.past


class Clocks:
    """The vector clocks of one launch. Blocks are numbered in the grid, warps in their block."""

    def __init__(self, cluster_size: int):
        self.cluster_size = cluster_size
        self.current: dict[int, int] = {}  # block -> its segment
        self.rows: list[dict[int, tuple[Acquired, ...]]] = []  # segment -> block -> its known prefix
        self.owner: list[int] = []
        self.count: list[int] = []  # segment -> its number within its block
        self.cluster: dict[int, int] = {}  # block -> the first block of its cluster
        self.fenced: dict[
            tuple[int, int], dict[int, Clock]
        ] = {}  # (block, warp) -> scope -> at its last fence
        self.strict: dict[int, StrictFence] = {}  # block -> at its fence.sc
        self.places: dict[int, Place] = {}
        # (block, warp) -> place -> clocks read there but not yet acquired
        self.unacquired: dict[tuple[int, int], dict[int, dict[Domain, Clock]]] = {}
        self.arrived: dict[int, Clock] = {}  # cluster -> the clocks released by arrivals at its barrier
        self.held: list[tuple] | None = None  # compare-and-swaps that may or may not write
        self.table: tuple = (None, None)
        self.time = 0

    # -- segments -------------------------------------------------------------------------------------------
    def segment(self, block: int) -> int:
        segment = self.current.get(block)
        return self.new_segment(block, {}) if segment is None else segment

    def new_segment(self, block: int, row: dict[int, tuple[Acquired, ...]]) -> int:
        """Start a new segment of a block, in which `row` is known."""
        before = self.current.get(block)
        self.rows.append(row)
        self.owner.append(block)
        self.count.append(0 if before is None else self.count[before] + 1)
        self.current[block] = len(self.rows) - 1
        self.table = (None, None)
        return self.current[block]

    def segments(self, batch, L) -> tuple[np.ndarray, int]:
        """Return the current segment of each thread's block, and the time."""
        if self.table[0] is not batch:
            self.table = batch, np.array([self.segment(b) for b in batch.blocks.tolist()])
        self.time += 1
        return self.table[1][batch.block_of if L is None else batch.block_of[L]], self.time

    # -- releases and acquires ------------------------------------------------------------------------------
    def release(self, block: int, epoch: int, warps: Warps) -> Clock:
        """Return the clock that some warps of a block may publish now: what they acquired and their own
        block's past."""
        clock = self.clock(block, epoch, warps)
        self.new_segment(block, self.rows[self.segment(block)])  # later accesses are not covered
        return clock

    def clock(self, block: int, epoch: int, warps: Warps) -> Clock:
        """Return the clock of some warps of a block, their own past included."""
        s = self.segment(block)
        clock = {
            other: known
            for other, learned in self.rows[s].items()
            if (known := self.acquired_by(learned, epoch, warps)) is not None
        }
        count = self.count[s] + 1
        clock[block] = merge_prefixes(clock.get(block), Prefix(count, epoch, dict.fromkeys(warps, count)))
        return clock

    @staticmethod
    def acquired_by(learned: tuple[Acquired, ...], epoch: int, warps: Warps) -> Prefix | None:
        """Merge what these warps have acquired by an epoch, out of all that their block acquired."""
        known = None
        for item in learned:
            if item.epoch != epoch or item.warps & warps:
                known = merge_prefixes(known, item.known)
        return known

    def acquire(self, block: int, epoch: int, warps: Warps, clock: Clock) -> None:
        """Merge a clock into that of some warps of a block."""
        row = self.rows[self.segment(block)]
        news = {
            other: known
            for other, known in clock.items()
            if not any(
                item.known == known and (item.epoch != epoch or item.warps >= warps)
                for item in row.get(other, ())
            )
        }
        if not news:
            return
        row = dict(row)
        for other, known in news.items():
            old = row.get(other, ())
            everybody = None
            mine = known
            kept = []
            for item in old:
                if item.epoch != epoch:
                    everybody = merge_prefixes(everybody, item.known)
                elif item.warps == warps:
                    mine = merge_prefixes(mine, item.known)
                else:
                    kept.append(item)
            if everybody is not None:
                kept.append(Acquired(everybody, -1, frozenset()))
            row[other] = (*kept, Acquired(mine, epoch, warps))
        self.new_segment(block, row)

    # -- events ---------------------------------------------------------------------------------------------
    def groups(self, batch, L):
        """Yield (block, its barrier epoch, warps) of the threads."""
        positions = batch.positions(L)
        blocks = batch.block_of[positions]
        pairs = np.unique(blocks * 32 + (batch.thread_of[positions] >> 5))
        by_block: dict[int, list[int]] = {}
        for pair in pairs.tolist():
            by_block.setdefault(pair >> 5, []).append(pair & 31)
        for number, warps in by_block.items():
            yield int(batch.blocks[number]), int(batch.epoch[number]) & EPOCHS, frozenset(warps)

    def fence(self, batch, L, scope: int, acquires: bool, releases: bool, strict: bool) -> None:
        """Execute a fence: each warp fences its own accesses; those of other warps need a barrier before."""
        for block, epoch, warps in self.groups(batch, L):
            for w in warps:
                pending = self.unacquired.get((block, w))
                if pending and acquires:
                    domains = {
                        (d, sc) for d in self.scope_members(batch, block, scope) for sc in (False, strict)
                    }
                    clocks = (some[d] for some in pending.values() for d in domains & some.keys())
                    self.acquire(block, epoch, frozenset((w,)), merge_clocks(clocks))
                    if scope == DEVICE_SCOPE:
                        pending.clear()
                if releases:
                    clock = self.clock(block, epoch, frozenset((w,)))
                    self.fenced.setdefault((block, w), {}).update(dict.fromkeys(range(scope + 1), clock))
                    if strict:
                        fences = self.strict.setdefault(block, StrictFence())
                        fences.before(epoch)
                        fences.now |= {(covered, w): clock for covered in range(scope + 1)}
            self.new_segment(block, self.rows[self.segment(block)])

    def clusters_of(self, batch, L):
        """Yield (block, epoch, warps, cluster). A batch holds whole clusters, block by block."""
        at = {int(b): k for k, b in enumerate(batch.blocks)}
        for block, epoch, warps in self.groups(batch, L):
            yield block, epoch, warps, int(batch.blocks[at[block] // self.cluster_size * self.cluster_size])

    def cluster_arrive(self, batch, L, release: bool) -> None:
        for block, epoch, warps, cluster in self.clusters_of(batch, L):
            fenced = merge_clocks(self.fenced.get((block, w), {}).get(CLUSTER_SCOPE, {}) for w in warps)
            published = self.release(block, epoch, warps) if release else fenced
            self.arrived[cluster] = merge_clocks((self.arrived.get(cluster, {}), published))

    def cluster_wait(self, batch, L) -> None:
        passing = list(self.clusters_of(batch, L))
        for block, epoch, warps, cluster in passing:
            self.acquire(block, epoch, warps, self.arrived.get(cluster, {}))
        for *_, cluster in passing:
            self.arrived.pop(cluster, None)

    # -- strong accesses ------------------------------------------------------------------------------------
    def scope_members(self, batch, block: int, scope: int) -> tuple[int | None, ...]:
        """Return the threads a scope covers, and each narrower scope: the block, its cluster, all (None)."""
        if self.cluster_size > 1 and block not in self.cluster:
            for number in range(0, len(batch.blocks), self.cluster_size):
                some = batch.blocks[number : number + self.cluster_size].tolist()
                self.cluster.update(dict.fromkeys(some, some[0]))
        return (block, -1 - self.cluster.get(block, block), None)[: scope + 1]

    def scopes_include(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Return whether the scopes of two accesses, each (scope, block), cover each other's block."""
        needed = DEVICE_SCOPE
        if a[1] == b[1]:
            needed = BLOCK_SCOPE
        elif self.cluster_size > 1 and self.cluster.get(a[1]) == self.cluster.get(b[1]):
            needed = CLUSTER_SCOPE
        return min(a[0], b[0]) >= needed

    def resolve_failed(self, failed: np.ndarray) -> None:
        """Process the compare-and-swaps that are held back, of which the `failed` threads do not write."""
        held, self.held = self.held or [], None
        for access in held:
            self.access(*access, failed=frozenset(failed.tolist()))

    def access(self, batch, A, places: np.ndarray, L, failed: frozenset[int] = frozenset()) -> None:
        """Process an atomic, or a strong load or store, at one location per thread: a possible release or
        acquire."""
        if self.held is not None:
            self.held.append((batch, A, places, L))
            return
        positions = batch.positions(L)
        numbers = batch.block_of[positions].tolist()
        warps = (batch.thread_of[positions] >> 5).tolist()
        writes: dict[tuple[int, int, int], bool] = {}  # of each warp and place, in thread order
        for position, key in zip(
            positions.tolist(), zip(numbers, warps, places.tolist(), strict=True), strict=True
        ):
            writes[key] = A.writes and (position not in failed or writes.get(key, False))
        steps: dict[int, int] = {}  # block -> its segment when the access was logged
        for (number, warp, key), wrote in writes.items():
            block, epoch = int(batch.blocks[number]), int(batch.epoch[number]) & EPOCHS
            step = steps.setdefault(block, self.segment(block)), epoch, warp
            place = self.places.get(key)
            if place is None:
                place = self.places[key] = Place()
            domains = self.scope_members(batch, block, DEVICE_SCOPE)
            sees = place.writer is None or self.scopes_include(place.writer, (A.scope, block))
            if sees and (A.used or A.instr.op == "ld"):
                self.read(A, key, place, block, step, domains)
            if wrote:
                self.write(A, place, block, step, domains, sees)

    def read(self, A, key: int, place: Place, block: int, step: Step, domains) -> None:
        """Process a warp's read of the last write to a location."""
        _, epoch, warp = step
        there = {d: clock for d, clock in place.published.items() if d[0] in domains}
        pending = self.unacquired.setdefault((block, warp), {})
        if there and key in pending:
            there |= {d: merge_clocks((clock, there.get(d, {}))) for d, clock in pending[key].items()}
        if there:
            pending[key] = there
        if A.acquires and key in pending:
            clocks = (
                clock for d, clock in pending[key].items() if d[0] in domains[: A.scope + 1] and not d[1]
            )
            self.acquire(block, epoch, frozenset((warp,)), merge_clocks(clocks))
        if place.count > place.start and place.reads.get(step) != (place.start, place.count):
            place.reads[step] = place.start, place.count
            self.new_segment(block, self.rows[self.segment(block)])  # later accesses have observed the writes

    def write(self, A, place: Place, block: int, step: Step, domains, sees: bool) -> None:
        """Process a warp's write: an atomic extends the release sequence that it read, a store begins a new
        one."""
        _, epoch, warp = step
        if A.instr.op == "st" or not sees:
            place.start, place.published = place.count, {}
        place.wrote[step] = place.wrote.get(step, (place.count,))[0], place.count
        place.count += 1
        place.writer = A.scope, block
        if A.releases:
            clock = self.release(block, epoch, frozenset((warp,)))
            place.released[block, warp] = dict.fromkeys(range(A.scope + 1), clock)
        sources = [
            (place.released.get((block, warp), {}), False),
            (self.fenced.get((block, warp), {}), False),
        ]
        if block in self.strict:
            sources.append((self.strict[block].before(epoch), True))
        for clocks, strict in sources:
            for scope, clock in clocks.items():
                domain = domains[scope], strict
                old = place.published.get(domain)
                place.published[domain] = clock if old is None else merge_clocks((old, clock))

    # -- queries --------------------------------------------------------------------------------------------
    def is_ordered(self, first: Step, then: Step) -> bool:
        """Return whether one access happened before another."""
        (s, epoch, warp), (t, later_epoch, later_warp) = first, then
        block = self.owner[s]
        if block == self.owner[t] and (warp == later_warp or epoch != later_epoch):
            return s != t or epoch != later_epoch
        return any(
            (learned_epoch != later_epoch or later_warp in warps) and known.covers(self.count[s], epoch, warp)
            for known, learned_epoch, warps in self.rows[t].get(block, ())
        )

    def was_observed(self, key: int, first: Step, then: Step) -> bool:
        """Return whether a strong write was read, directly or through atomics, before an access."""
        place = self.places.get(key)
        if place is None or first not in place.wrote:
            return False
        begin, end = place.wrote[first]
        return any(
            start <= begin and end < count and self.before(read, then)
            for read, (start, count) in reversed(place.reads.items())
        )

    def before(self, read: Step, then: Step) -> bool:
        """Return whether a read of a strong write happened before an access."""
        s, t = read[0], then[0]
        return (self.owner[s] != self.owner[t] or self.count[s] < self.count[t]) and self.is_ordered(
            read, then
        )

    def happens_before_exit(self, access: Step, block: int) -> bool:
        """Return whether an access happened before a block's end, by the clock of any of its warps."""
        s, epoch, warp = access
        learned = self.rows[self.segment(block)].get(self.owner[s], ())
        return any(known.covers(self.count[s], epoch, warp) for known, _, _ in learned)


class SharedOfAll(Extent):
    """The shared memory of all blocks of a launch as one range: `size` bytes per block, in block order."""

    def __init__(self, blocks: int, size: int, extents: list[Extent]):
        super().__init__(0, blocks * size, "shared memory")
        self.size, self.extents = size, extents

    def part(self, byte: int, width: int) -> tuple[str, int | tuple[int, ...] | None, int]:
        """Return (name of the shared variable, element, block) at a byte of the range."""
        block, local = divmod(byte, self.size)
        extent = extent_at(self.extents, local)
        return (extent.name, extent.index(local, width), block) if extent else (self.name, None, block)
