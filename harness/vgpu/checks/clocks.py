"""Vector clocks: the happens-before order of kernels whose threads synchronize by more than barriers.

Blocks synchronize through atomics and strong accesses to global memory, and through their cluster's barrier;
warps of one block through flags in its shared memory. A block's history is divided into segments at its
releases and acquires. A release covers the earlier accesses of its own warp, and those of the whole block
before its last barrier; an acquire takes effect for its warp at once, and for the whole block after its next
barrier. So one thread's fence does not order recent stores of other warps. Accesses of one warp count as
ordered.

The rules are the PTX memory model's. A release pattern (a release, or a fence followed by a strong write)
synchronizes with an acquire pattern (an acquire, or a strong read followed by a fence) that reads its write
or a later atomic of its release sequence, which ends at the next strong store; each one's scope must include
the other. A strong write also happens before whatever follows, in program order, a read that observed it or
a later atomic: that one location needs no fence. Two fence.sc are ordered too, if the first comes before a
write (possibly with a barrier in between) and the second after a read of it.

The accesses of such a launch are logged, and sorted and checked when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.access import BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE
from harness.vgpu.memory.arena import Extent, find_extent

EPOCH_MASK = (1 << 14) - 1  # mask of a barrier epoch, as in the marks of races.py
Warps = frozenset[int]


class Prefix(NamedTuple):
    """A prefix of a block's history: its first `count` segments.

    In `epoch`, its last barrier epoch, it contains only the warps in `warps`, each up to a separate count.
    """

    count: int
    epoch: int
    warps: dict[int, int]

    def covers(self, count: int, epoch: int, warp: int) -> bool:
        """Return whether the prefix contains a warp's access in segment `count` and a barrier epoch."""
        return count < (self.count if epoch != self.epoch else self.warps.get(warp, 0))


class AcquiredPrefix(NamedTuple):
    """A prefix, and the warps that acquired it in barrier epoch `epoch` of their block."""

    prefix: Prefix
    epoch: int
    warps: Warps


Clock = dict[int, Prefix]
"""Block -> the prefix of its history that happened before."""

Domain = tuple[int | None, bool]
"""An acquire's scope (a block, -1 - a cluster's first block, or None: all), and whether it needs fence.sc."""

WarpSegment = tuple[int, int, int]
"""A warp's accesses in one segment: (segment, barrier epoch, warp)."""


class Location:
    """The state of one memory location with strong accesses."""

    __slots__ = ("count", "published_clocks", "reads", "release_clocks", "start", "writer", "writes")

    def __init__(self):
        self.count = 0  # number of strong writes so far
        self.start = 0  # the first write of the current release sequence
        self.writer: tuple[int, int] | None = None  # (scope, block) of the last write
        self.published_clocks: dict[Domain, Clock] = {}  # clocks that the release sequence publishes
        # (block, warp) -> scope -> clock of its releases here
        self.release_clocks: dict[tuple[int, int], dict[int, Clock]] = {}
        # writer -> numbers of the first and the last write
        self.writes: dict[WarpSegment, tuple[int, int]] = {}
        self.reads: dict[WarpSegment, tuple[int, int]] = {}  # reader -> observed writes: from, to


def merge_prefixes(a: Prefix | None, b: Prefix) -> Prefix:
    if a is None or a == b:
        return b
    if a.epoch != b.epoch:
        later = max(a, b, key=lambda prefix: prefix.epoch)
        return later._replace(count=max(a.count, b.count))
    warps = a.warps | {w: max(count, a.warps.get(w, 0)) for w, count in b.warps.items()}
    return Prefix(max(a.count, b.count), a.epoch, warps)


def merge_clocks(clocks: Iterable[Clock]) -> Clock:
    out: Clock = {}
    for clock in clocks:
        for block, prefix in clock.items():
            out[block] = merge_prefixes(out.get(block), prefix)
    return out


class SequentialFences:
    """A block's clocks at its fence.sc: by warp in the latest epoch, merged for earlier epochs."""

    def __init__(self):
        self.epoch = -1
        self.current_clocks: dict[tuple[int, int], Clock] = {}  # (scope, warp) -> clock
        self.earlier_clocks: dict[int, Clock] = {}  # scope -> clock

    def get_clocks_before(self, epoch: int) -> dict[int, Clock]:
        """Return, by scope, the merged clock of the block's fences before a barrier epoch."""
        if epoch != self.epoch:
            for (scope, _), clock in self.current_clocks.items():
                self.earlier_clocks[scope] = merge_clocks((self.earlier_clocks.get(scope, {}), clock))
            self.epoch, self.current_clocks = epoch, {}
        return self.earlier_clocks


class Clocks:
    """The vector clocks of one launch, by block of the grid and warp of the block."""

    def __init__(self, cluster_size: int):
        self.cluster_size = cluster_size
        self.current_segments: dict[int, int] = {}  # block -> its segment
        self.rows: list[dict[int, tuple[AcquiredPrefix, ...]]] = []  # segment -> block -> prefixes acquired
        self.segment_blocks: list[int] = []  # segment -> its block
        self.segment_indices: list[int] = []  # segment -> its index within its block
        self.cluster: dict[int, int] = {}  # block -> the first block of its cluster
        # (block, warp) -> scope -> clock at its last fence
        self.fence_clocks: dict[tuple[int, int], dict[int, Clock]] = {}
        self.sequential: dict[int, SequentialFences] = {}  # block -> its clocks at fence.sc
        self.locations: dict[int, Location] = {}
        # (block, warp) -> location -> clocks read there but not yet acquired
        self.unacquired_clocks: dict[tuple[int, int], dict[int, dict[Domain, Clock]]] = {}
        self.arrival_clocks: dict[int, Clock] = {}  # cluster -> clock released by arrivals at its barrier
        # compare-and-swaps whose outcome is not yet known
        self.deferred_accesses: list[tuple] | None = None
        self.segment_table: tuple = (None, None)  # batch, segments of its blocks
        self.time = 0

    # -- segments -------------------------------------------------------------------------------------------
    def get_segment(self, block: int) -> int:
        segment = self.current_segments.get(block)
        return self.start_segment(block, {}) if segment is None else segment

    def start_segment(self, block: int, row: dict[int, tuple[AcquiredPrefix, ...]]) -> int:
        before = self.current_segments.get(block)
        self.rows.append(row)
        self.segment_blocks.append(block)
        self.segment_indices.append(0 if before is None else self.segment_indices[before] + 1)
        self.current_segments[block] = len(self.rows) - 1
        self.segment_table = (None, None)
        return self.current_segments[block]

    def get_segments(self, batch, active) -> tuple[np.ndarray, int]:
        """Return the current segment of each thread's block, and a timestamp."""
        if self.segment_table[0] is not batch:
            self.segment_table = batch, np.array([self.get_segment(b) for b in batch.blocks.tolist()])
        self.time += 1
        return self.segment_table[1][batch.block_of if active is None else batch.block_of[active]], self.time

    # -- releases and acquires ------------------------------------------------------------------------------
    def release(self, block: int, epoch: int, warps: Warps) -> Clock:
        """Start a new segment; return the clock that these warps publish, including all they acquired."""
        clock = self.compute_clock(block, epoch, warps)
        self.start_segment(block, self.rows[self.get_segment(block)])  # later accesses are not covered
        return clock

    def compute_clock(self, block: int, epoch: int, warps: Warps) -> Clock:
        s = self.get_segment(block)
        clock = {
            other: prefix
            for other, acquired in self.rows[s].items()
            if (prefix := self.merge_acquired(acquired, epoch, warps)) is not None
        }
        count = self.segment_indices[s] + 1
        clock[block] = merge_prefixes(clock.get(block), Prefix(count, epoch, dict.fromkeys(warps, count)))
        return clock

    @staticmethod
    def merge_acquired(acquired: tuple[AcquiredPrefix, ...], epoch: int, warps: Warps) -> Prefix | None:
        """Merge the acquired prefixes that are in effect for these warps in this epoch."""
        prefix = None
        for item in acquired:
            if item.epoch != epoch or item.warps & warps:
                prefix = merge_prefixes(prefix, item.prefix)
        return prefix

    def acquire(self, block: int, epoch: int, warps: Warps, clock: Clock) -> None:
        """Merge a clock into the clock of these warps of a block."""
        row = self.rows[self.get_segment(block)]
        new = {
            other: prefix
            for other, prefix in clock.items()
            if not any(
                item.prefix == prefix and (item.epoch != epoch or item.warps >= warps)
                for item in row.get(other, ())
            )
        }
        if not new:
            return
        row = dict(row)
        for other, prefix in new.items():
            old = row.get(other, ())
            whole_block = None
            merged = prefix
            others = []
            for item in old:
                if item.epoch != epoch:
                    whole_block = merge_prefixes(whole_block, item.prefix)
                elif item.warps == warps:
                    merged = merge_prefixes(merged, item.prefix)
                else:
                    others.append(item)
            if whole_block is not None:
                others.append(AcquiredPrefix(whole_block, -1, frozenset()))
            row[other] = (*others, AcquiredPrefix(merged, epoch, warps))
        self.start_segment(block, row)

    # -- events ---------------------------------------------------------------------------------------------
    def group_warps(self, batch, active):
        """Yield (block, its barrier epoch, its warps) for the active threads."""
        positions = batch.get_positions(active)
        blocks = batch.block_of[positions]
        pairs = np.unique(blocks * 32 + (batch.thread_of[positions] >> 5))
        by_block: dict[int, list[int]] = {}
        for pair in pairs.tolist():
            by_block.setdefault(pair >> 5, []).append(pair & 31)
        for number, warps in by_block.items():
            yield int(batch.blocks[number]), int(batch.epoch[number]) & EPOCH_MASK, frozenset(warps)

    def fence(self, batch, active, scope: int, acquires: bool, releases: bool, sequential: bool) -> None:
        """Execute a fence for earlier accesses of its warp, and of other warps before the last barrier."""
        for block, epoch, warps in self.group_warps(batch, active):
            for w in warps:
                pending = self.unacquired_clocks.get((block, w))
                if pending and acquires:
                    domains = {
                        (d, sc) for d in self.get_domains(batch, block, scope) for sc in (False, sequential)
                    }
                    clocks = (
                        published[d] for published in pending.values() for d in domains & published.keys()
                    )
                    self.acquire(block, epoch, frozenset((w,)), merge_clocks(clocks))
                    if scope == DEVICE_SCOPE:
                        pending.clear()
                if releases:
                    clock = self.compute_clock(block, epoch, frozenset((w,)))
                    self.fence_clocks.setdefault((block, w), {}).update(
                        dict.fromkeys(range(scope + 1), clock)
                    )
                    if sequential:
                        fences = self.sequential.setdefault(block, SequentialFences())
                        fences.get_clocks_before(epoch)
                        fences.current_clocks |= {(covered, w): clock for covered in range(scope + 1)}
            self.start_segment(block, self.rows[self.get_segment(block)])

    def group_clusters(self, batch, active):
        """Yield (block, epoch, warps, first block of the cluster); a batch consists of whole clusters."""
        rank = {int(b): k for k, b in enumerate(batch.blocks)}
        for block, epoch, warps in self.group_warps(batch, active):
            yield block, epoch, warps, int(batch.blocks[rank[block] // self.cluster_size * self.cluster_size])

    def cluster_arrive(self, batch, active, release: bool) -> None:
        for block, epoch, warps, cluster in self.group_clusters(batch, active):
            clocks = (self.fence_clocks.get((block, w), {}).get(CLUSTER_SCOPE, {}) for w in warps)
            fence_clock = merge_clocks(clocks)
            clock = self.release(block, epoch, warps) if release else fence_clock
            self.arrival_clocks[cluster] = merge_clocks((self.arrival_clocks.get(cluster, {}), clock))

    def cluster_wait(self, batch, active) -> None:
        arrivals = list(self.group_clusters(batch, active))
        for block, epoch, warps, cluster in arrivals:
            self.acquire(block, epoch, warps, self.arrival_clocks.get(cluster, {}))
        for *_, cluster in arrivals:
            self.arrival_clocks.pop(cluster, None)

    # -- strong accesses ------------------------------------------------------------------------------------
    def get_domains(self, batch, block: int, scope: int) -> tuple[int | None, ...]:
        """Return the domains within a scope, narrowest first: the block, its cluster, all (None)."""
        if self.cluster_size > 1 and block not in self.cluster:
            for number in range(0, len(batch.blocks), self.cluster_size):
                members = batch.blocks[number : number + self.cluster_size].tolist()
                self.cluster.update(dict.fromkeys(members, members[0]))
        return (block, -1 - self.cluster.get(block, block), None)[: scope + 1]

    def are_scopes_mutual(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Return whether the scopes of two accesses, each (scope, block), include each other's block."""
        required_scope = DEVICE_SCOPE
        if a[1] == b[1]:
            required_scope = BLOCK_SCOPE
        elif self.cluster_size > 1 and self.cluster.get(a[1]) == self.cluster.get(b[1]):
            required_scope = CLUSTER_SCOPE
        return min(a[0], b[0]) >= required_scope

    def resolve_deferred(self, failed: np.ndarray) -> None:
        """Process the deferred compare-and-swaps; `failed` are the threads whose swap did not write."""
        deferred_accesses, self.deferred_accesses = self.deferred_accesses or [], None
        for logged_access in deferred_accesses:
            self.process_access(*logged_access, failed=frozenset(failed.tolist()))

    def process_access(
        self, batch, access, addresses: np.ndarray, active, failed: frozenset[int] = frozenset()
    ) -> None:
        """Process an atomic or strong access, one location per thread, as a possible release or acquire."""
        if self.deferred_accesses is not None:
            self.deferred_accesses.append((batch, access, addresses, active))
            return
        positions = batch.get_positions(active)
        block_numbers = batch.block_of[positions].tolist()
        warps = (batch.thread_of[positions] >> 5).tolist()
        writes: dict[tuple[int, int, int], bool] = {}  # by (block, warp, location)
        for position, key in zip(
            positions.tolist(), zip(block_numbers, warps, addresses.tolist(), strict=True), strict=True
        ):
            writes[key] = access.writes and (position not in failed or writes.get(key, False))
        steps: dict[int, int] = {}  # block -> its segment when the access was logged
        for (number, warp, key), writes_memory in writes.items():
            block, epoch = int(batch.blocks[number]), int(batch.epoch[number]) & EPOCH_MASK
            step = steps.setdefault(block, self.get_segment(block)), epoch, warp
            location = self.locations.get(key)
            if location is None:
                location = self.locations[key] = Location()
            domains = self.get_domains(batch, block, DEVICE_SCOPE)
            observes = location.writer is None or self.are_scopes_mutual(
                location.writer, (access.scope, block)
            )
            if observes and (access.result_used or access.instr.op == "ld"):
                self.process_read(access, key, location, block, step, domains)
            if writes_memory:
                self.process_write(access, location, block, step, domains, observes)

    def process_read(
        self, access, key: int, location: Location, block: int, reader: WarpSegment, domains
    ) -> None:
        """Process a warp's read of the last write to a location."""
        _, epoch, warp = reader
        published = {d: clock for d, clock in location.published_clocks.items() if d[0] in domains}
        pending = self.unacquired_clocks.setdefault((block, warp), {})
        if published and key in pending:
            published |= {d: merge_clocks((clock, published.get(d, {}))) for d, clock in pending[key].items()}
        if published:
            pending[key] = published
        if access.acquires and key in pending:
            clocks = (
                clock for d, clock in pending[key].items() if d[0] in domains[: access.scope + 1] and not d[1]
            )
            self.acquire(block, epoch, frozenset((warp,)), merge_clocks(clocks))
        if location.count > location.start and location.reads.get(reader) != (location.start, location.count):
            location.reads[reader] = location.start, location.count
            # later accesses have observed the writes
            self.start_segment(block, self.rows[self.get_segment(block)])

    def process_write(
        self, access, location: Location, block: int, writer: WarpSegment, domains, observes: bool
    ) -> None:
        """Process a warp's write: an atomic extends the release sequence, a store starts a new one."""
        _, epoch, warp = writer
        if access.instr.op == "st" or not observes:
            location.start, location.published_clocks = location.count, {}
        location.writes[writer] = location.writes.get(writer, (location.count,))[0], location.count
        location.count += 1
        location.writer = access.scope, block
        if access.releases:
            clock = self.release(block, epoch, frozenset((warp,)))
            location.release_clocks[block, warp] = dict.fromkeys(range(access.scope + 1), clock)
        releaser = block, warp
        sources = [
            (location.release_clocks.get(releaser, {}), False),
            (self.fence_clocks.get(releaser, {}), False),
        ]
        if block in self.sequential:
            sources.append((self.sequential[block].get_clocks_before(epoch), True))
        for clocks, sequential in sources:
            for scope, clock in clocks.items():
                domain = domains[scope], sequential
                old = location.published_clocks.get(domain)
                location.published_clocks[domain] = clock if old is None else merge_clocks((old, clock))

    # -- queries --------------------------------------------------------------------------------------------
    def is_ordered(self, first: WarpSegment, second: WarpSegment) -> bool:
        """Return whether access `first` happened before access `second`."""
        (s, epoch, warp), (t, later_epoch, later_warp) = first, second
        block = self.segment_blocks[s]
        if block == self.segment_blocks[t] and (warp == later_warp or epoch != later_epoch):
            return s != t or epoch != later_epoch
        return any(
            (acquired_epoch != later_epoch or later_warp in warps)
            and prefix.covers(self.segment_indices[s], epoch, warp)
            for prefix, acquired_epoch, warps in self.rows[t].get(block, ())
        )

    def was_observed(self, key: int, first: WarpSegment, second: WarpSegment) -> bool:
        """Return whether access `second` follows a read of strong write `first`, or of a later atomic."""
        location = self.locations.get(key)
        if location is None or first not in location.writes:
            return False
        begin, end = location.writes[first]
        return any(
            start <= begin and end < count and self.is_read_before(read, second)
            for read, (start, count) in reversed(location.reads.items())
        )

    def is_read_before(self, read: WarpSegment, second: WarpSegment) -> bool:
        """Return whether a read of a strong write happened before access `second`."""
        s, t = read[0], second[0]
        return (
            self.segment_blocks[s] != self.segment_blocks[t]
            or self.segment_indices[s] < self.segment_indices[t]
        ) and self.is_ordered(read, second)

    def happens_before_exit(self, access: WarpSegment, block: int) -> bool:
        s, epoch, warp = access
        acquired = self.rows[self.get_segment(block)].get(self.segment_blocks[s], ())
        return any(prefix.covers(self.segment_indices[s], epoch, warp) for prefix, _, _ in acquired)


class GridSharedMemory(Extent):
    """The shared memory of all blocks of a launch as one range: `size` bytes per block, in block order."""

    def __init__(self, blocks: int, size: int, extents: list[Extent]):
        super().__init__(0, blocks * size, "shared memory")
        self.size, self.extents = size, extents

    def locate(self, byte: int, width: int) -> tuple[str, int | tuple[int, ...] | None, int]:
        """Return (name of the shared variable, element, block) at a byte offset in the range."""
        block, local = divmod(byte, self.size)
        extent = find_extent(self.extents, local)
        return (extent.name, extent.index(local, width), block) if extent else (self.name, None, block)
