"""Ordering of asynchronous copies and wgmma products with other accesses to shared memory.

Bulk copies, TMA and wgmma access shared memory while the threads that issued them go on. They are ordered by
what threads wait for: the phase of an mbarrier, a group of bulk stores, a group of products. From there the
order spreads as between threads, through arrivals and waits of mbarriers and through barriers. They reach
memory through the async proxy, so that they see a thread's store only after a fence.proxy.async.

Each thread has a row: for every thread of its cluster the time up to which it knows that thread's past.
Threads that have passed one barrier share a row. Time is a number that grows with every release. An
asynchronous operation stores for every thread the time at which that thread observed its end: another thread
knows of the end if it knows one of these times. Only the last accesses of a location are compared: the copy,
the store and the loads since, the operations that read.

This check runs for kernels that use such instructions. Races between ordinary loads and stores are found by
races.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.vgpu.memory.access import Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.ptx.parser import Instr

NEVER = np.iinfo(np.int32).max
SLOTS = 64  # operations that read, in one thread block, between two writes
ROWS = 1024
MOST_THREADS = 4096  # of a cluster
MERGE = 128  # lists of loads or stores before they are merged
UNIT = 4  # granularity in bytes of the last store
COPY, STORE, PRODUCT = "copy into shared memory", "bulk store", "wgmma"


def distinct(numbers: np.ndarray) -> list[int]:
    """Return the distinct numbers of an array in order; fast for the common case of one, where np.unique is
    slow."""
    if not len(numbers):
        return []
    if (numbers == numbers[0]).all():
        return [int(numbers[0])]
    return np.unique(numbers).tolist()


class Operation:
    """An asynchronous operation, which reads or writes shared memory until it is waited for."""

    __slots__ = ["done", "instr", "instrs", "issued", "kind", "places", "slot", "thread"]

    def __init__(self, kind: str, instr: Instr, thread: int, width: int):
        self.kind, self.instr, self.thread = kind, instr, thread
        self.instrs = {id(instr)}
        self.done = np.full(width, NEVER, np.int32)  # when each thread of the cluster observed its end
        self.issued = 0  # of products: when the last of a group was issued
        self.places = 0  # units of 16 bytes where it is the last
        self.slot = -1


def bits_of(value: int) -> Iterator[int]:
    while value:
        yield (value & -value).bit_length() - 1
        value &= value - 1


class Order:
    """The ordering state of one batch. Threads are numbered in the batch: block * threads + thread."""

    def __init__(self, batch):
        self.batch, self.run = batch, batch.run
        self.width = batch.threads * self.run.cluster_size
        threads = batch.count * batch.threads
        self.rows = np.zeros((ROWS, self.width), np.int32)
        self.used = 1  # row 0 has observed nothing
        self.most = ROWS // 2  # rows before the oldest in use are forgotten
        self.row_of = np.zeros(threads, np.int64)
        self.fence_row = np.zeros(threads, np.int64)  # the row of a thread at its last proxy fence
        self.now = 1
        self.arrivals: dict[tuple[int, int], int] = {}  # (thread block, barrier) -> row of its bar.arrive
        units = batch.count * batch.shared_size // 16 + 1
        self.per_block = batch.shared_size // 16
        self.writer = np.zeros(units, np.int32)  # the copy that wrote last, 0 for none
        self.readers = np.zeros(units, np.uint64)  # the operations that have read since, by slot
        self.store_thread = np.full(
            4 * units, -1, np.int32
        )  # thread and time of the last store, and time of its fence
        self.store_time = np.zeros(4 * units, np.int32)
        self.store_fenced = np.zeros(4 * units, np.int32)
        self.unfenced: list[tuple[np.ndarray, np.ndarray]] = []  # (places of stores, threads)
        self.loads: dict[
            int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]
        ] = {}  # (units, threads, times) by block
        self.copies: dict[int, Operation] = {}
        self.next_copy = 1
        self.slots: dict[int, dict[int, Operation]] = {}  # by thread block
        self.open: dict[int, list[Operation]] = {}  # uncommitted operations of a thread, or warpgroup's first
        self.groups: dict[int, list[list[Operation]]] = {}  # committed ones, oldest first

    # -- rows -----------------------------------------------------------------------------------------------
    def threads(self, P) -> np.ndarray:
        return self.batch.block_of[P] * self.batch.threads + self.batch.thread_of[P]

    def add_row(self, row: np.ndarray) -> int:
        if self.used == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.used] = row
        self.used += 1
        return self.used - 1

    def sweep(self):
        """Free the rows that are no longer in use."""
        barriers = list(self.batch.mbarriers.values())
        kept = [self.row_of, self.fence_row, np.array([*self.arrivals.values()], np.int64)]
        kept += [np.array([x for b in barriers for x in (b.arriving, b.arrived)], np.int64)]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *kept]))
        number = np.zeros(self.used, np.int64)
        number[live] = np.arange(len(live))
        self.rows[: len(live)] = self.rows[live]
        self.used = len(live)
        self.row_of, self.fence_row = number[self.row_of], number[self.fence_row]
        self.arrivals = {key: int(number[row]) for key, row in self.arrivals.items()}
        for b in barriers:
            b.arriving, b.arrived = int(number[b.arriving]), int(number[b.arrived])

    def release(self, threads: np.ndarray, into: int = 0) -> int:
        """Return a row with all that these threads of one cluster have done and know, merged with the row
        `into`."""
        row = self.rows[distinct(np.append(self.row_of[threads], into))].max(axis=0)
        row[threads % self.width] = self.now
        return self.add_row(row)

    def acquire(self, threads: np.ndarray, row: int):
        """Merge a row into those of these threads."""
        mine = self.row_of[threads]
        for old in distinct(mine):
            if (self.rows[old] < self.rows[row]).any():
                joined = self.add_row(np.maximum(self.rows[old], self.rows[row]))
                self.row_of[threads[mine == old]] = joined

    def advance(self, threads: np.ndarray, time: int):
        """Merge what each of these threads has done up to a time into the rows of all of them."""
        mine = self.row_of[threads]
        for old in distinct(mine):
            row = self.rows[old].copy()
            row[threads % self.width] = np.maximum(row[threads % self.width], time)
            self.row_of[threads[mine == old]] = self.add_row(row)

    def tick(self):
        """Advance the time: what follows is later than every release so far. All rows in use must be known to
        `sweep`."""
        self.now += 1
        if self.used > self.most:
            self.sweep()
            self.most = max(ROWS // 2, 2 * self.used)

    # -- barriers -------------------------------------------------------------------------------------------
    def barrier(self, P, number: int | str):
        """Pass a barrier with the threads at these positions, each thread block (or cluster) for itself."""
        threads = self.threads(P)
        size = self.width if isinstance(number, str) else self.batch.threads
        for group in distinct(threads // size):
            mine = threads[threads // size == group]
            before = 0 if isinstance(number, str) else self.arrivals.pop((group, number), 0)
            self.row_of[mine] = self.release(mine, before)
        self.tick()

    def bar_arrive(self, P, number: int):
        threads = self.threads(P)
        for block in distinct(threads // self.batch.threads):
            mine = threads[threads // self.batch.threads == block]
            self.arrivals[block, number] = self.release(mine, self.arrivals.get((block, number), 0))
        self.tick()

    def warp_sync(self, P):
        threads, warps = self.threads(P), self.batch.warp_of[P]
        for warp in distinct(warps):
            mine = threads[warps == warp]
            self.row_of[mine] = self.release(mine)
        self.tick()

    def arrive(self, P, barrier: MBarrier):
        """Execute arrivals of threads at an mbarrier."""
        barrier.arriving = self.release(self.threads(P), barrier.arriving)
        self.tick()

    def end_phase(self, barrier: MBarrier):
        row = np.maximum(self.rows[barrier.arriving], self.rows[barrier.arrived])
        barrier.arrived, barrier.arriving = self.add_row(row), 0
        barrier.copies = {k: some for k, some in barrier.copies.items() if any(c.places > 0 for c in some)}

    def observe_phase(self, P, barrier: MBarrier):
        """Record that threads observed the end of the mbarrier's last phase: its arrivals and its copies."""
        threads = self.threads(P)
        self.acquire(threads, barrier.arrived)
        for phase, copies in barrier.copies.items():
            if phase < barrier.phase:
                for copy in copies:
                    self.observe_completion(copy, threads)

    def observe_completion(self, operation: Operation, threads: np.ndarray):
        """Record that threads observed the end of an operation."""
        place = threads % self.width
        operation.done[place] = np.minimum(operation.done[place], self.now)

    def happens_before(self, operation: Operation, threads: np.ndarray) -> np.ndarray:
        """Return a mask of the threads that know that an operation has ended."""
        known = operation.done[threads % self.width] != NEVER
        rows = self.row_of[threads]
        for row in distinct(rows[~known]):
            if (self.rows[row] >= operation.done).any():
                known |= rows == row
        return known

    def proxy_fence(self, P):
        """Execute fence.proxy.async: the stores that these threads know of become visible to the async proxy."""
        threads = self.threads(P)
        self.fence_row[threads] = self.row_of[threads]
        here = np.zeros(len(self.row_of), bool)
        here[threads] = True
        left = []
        for cells, owners in self.unfenced:
            mine = here[owners]
            some = cells[mine]
            still = self.store_thread[some] == owners[mine]
            self.store_fenced[some[still]] = self.now
            if not mine.all():
                left.append((cells[~mine], owners[~mine]))
        self.unfenced = left
        self.tick()

    # -- loads and stores of threads -------------------------------------------------------------------------
    def access(self, A: Access, index, L):
        """Check and record a load, store or atomic of shared memory; `index` in units of its size."""
        P = self.batch.positions(L)
        threads = self.threads(P)
        start = np.broadcast_to(index, len(P)) << A.shift
        units = start >> 4
        self.check_copies(A.instr, threads, units, A.writes)
        if A.writes:
            self.check_readers(A.instr, threads, units)
            self.record_stores(threads, start, max(A.nbytes // UNIT, 1))
        else:
            copied = self.writer[units] != 0
            if copied.any():
                self.record_loads(threads[copied], units[copied])

    def record_loads(self, threads, units):
        """Record loads of what a copy has written: the next copy must come after them."""
        times = np.full(len(units), self.now, np.int32)
        blocks = units // self.per_block
        for block in distinct(blocks):
            mine = blocks == block
            kept = self.loads.setdefault(block, [])
            kept.append((units[mine], threads[mine], times[mine]))
            if len(kept) > MERGE:
                some = [np.concatenate(x)[::-1] for x in zip(*kept, strict=True)]
                _, last = np.unique(some[0] * len(self.row_of) + some[1], return_index=True)
                self.loads[block] = [(some[0][last], some[1][last], some[2][last])]

    def record_stores(self, threads, start, count: int):
        """Record stores, which replace the earlier accesses of these locations."""
        cells = ((start // UNIT)[:, None] + np.arange(count)).reshape(-1)
        owners = np.repeat(threads, count)
        self.store_thread[cells], self.store_time[cells], self.store_fenced[cells] = owners, self.now, NEVER
        self.unfenced.append((cells, owners))
        if len(self.unfenced) > MERGE:
            cells = np.unique(np.concatenate([c for c, _ in self.unfenced]))
            cells = cells[self.store_fenced[cells] == NEVER]
            self.unfenced = [(cells, self.store_thread[cells])]
        units = np.unique(start >> 4)
        self.forget(units[(self.writer[units] != 0) | (self.readers[units] != 0)])

    def check_copies(self, instr: Instr, threads, units, writes: bool):
        """Check that threads which use what a copy has written know that the copy has ended."""
        verb = "is written here" if writes else "is read here"
        for copy, mine in self.writers(units):
            bad = np.flatnonzero(mine)[~self.happens_before(copy, threads[mine])]
            self.report_some("unfinished copy", instr, copy.instr, threads, units, bad,
                       f"{verb}, and the thread has not waited for the copy that brings it")  # fmt: skip

    def check_readers(self, instr: Instr, threads, units):
        """Check that threads which store know that the operations which read there have ended."""
        for reader, mine in self.readers_of(units):
            bad = np.flatnonzero(mine)[~self.happens_before(reader, threads[mine])]
            self.report_some("operand overwritten", instr, reader.instr, threads, units, bad,
                       f"is stored to while a {reader.kind} may still read it")  # fmt: skip

    def writers(self, units) -> Iterator[tuple[Operation, np.ndarray]]:
        """Yield the copies that wrote last at these locations, each with its mask of locations."""
        last = self.writer[units]
        for number in distinct(last[last != 0]):
            yield self.copies[number], last == number

    def readers_of(self, units) -> Iterator[tuple[Operation, np.ndarray]]:
        """Yield the operations that read these locations since the last write, each with its mask of
        locations."""
        bits = self.readers[units]
        if not bits.any():
            return
        for block in distinct(units[bits != 0] // self.per_block):
            here = units // self.per_block == block
            for slot in bits_of(int(np.bitwise_or.reduce(bits[here]))):
                yield self.slots[block][slot], here & (bits >> np.uint64(slot) & np.uint64(1) != 0)

    # -- operations ------------------------------------------------------------------------------------------
    def start_copy(self, instr: Instr, position: int, units: np.ndarray, barrier: MBarrier | None):
        """Begin a copy into shared memory, which an mbarrier completes."""
        thread = self.threads(np.array([position]))
        block = int(units[0]) // self.per_block
        for reader, mine in self.readers_of(units):
            if not self.happens_before(reader, thread).all():
                self.report_some("stage reused early", instr, reader.instr, thread, units, np.flatnonzero(mine),
                           f"is copied to while a {reader.kind} may still read it")  # fmt: skip
        for copy, mine in self.writers(units):
            if not self.happens_before(copy, thread).all() and not self.same_phase(copy, barrier):
                self.report_some("stage reused early", instr, copy.instr, thread, units, np.flatnonzero(mine),
                           "is copied to while another copy into it may be under way")  # fmt: skip
        self.check_loads(instr, thread, block, units)
        self.check_stores(instr, thread, units, "is copied to")
        self.forget(units)
        self.store_thread[(units[:, None] * 4 + np.arange(4)).reshape(-1)] = -1
        copy = self.copy_of(instr, int(thread[0]), barrier)
        self.writer[units] = copy.slot
        copy.places += len(units)

    def same_phase(self, copy: Operation, barrier: MBarrier | None) -> bool:
        """Return whether a copy is counted by the current phase of a barrier."""
        return barrier is not None and copy in barrier.copies.get(barrier.phase, ())

    def copy_of(self, instr: Instr, thread: int, barrier: MBarrier | None) -> Operation:
        """Return the operation for all copies of an instruction in one phase; its slot is its number."""
        some = [] if barrier is None else barrier.copies.setdefault(barrier.phase, [])
        for copy in some:
            if copy.instr is instr and copy.thread == thread and copy.kind == COPY:
                return copy
        copy = Operation(COPY, instr, thread, self.width)
        copy.slot = self.next_copy
        self.copies[copy.slot] = copy
        self.next_copy += 1
        some.append(copy)
        return copy

    def check_loads(self, instr: Instr, thread, block: int, units):
        """Check that a copy begins after the loads of what it overwrites."""
        kept = self.loads.get(block)
        if not kept:
            return
        here = np.zeros(self.per_block, bool)
        here[units - block * self.per_block] = True
        row = self.rows[self.row_of[thread[0]]]
        left = []
        for where, owners, times in kept:
            mine = here[where - block * self.per_block]
            late = mine & (row[owners % self.width] < times) & (owners != thread[0])
            if late.any():
                k = int(np.flatnonzero(late)[0])
                self.report("stage reused early", instr, None, int(thread[0]), int(where[k]), int(late.sum()),
                            f"is copied to, and nothing says that {self.name(int(owners[k]))} has loaded what"
                            " was there")  # fmt: skip
            if not mine.all():
                left.append((where[~mine], owners[~mine], times[~mine]))
        self.loads[block] = left

    def check_stores(self, instr: Instr, threads, units, verb: str):
        """Check that an operation reads after the threads' stores, a barrier and a proxy fence."""
        cells = (units[:, None] * 4 + np.arange(4)).reshape(-1)
        cells = cells[self.store_thread[cells] >= 0]
        if not len(cells):
            return
        owners, time, fenced = self.store_thread[cells], self.store_time[cells], self.store_fenced[cells]
        rows = self.row_of[threads]
        for number in distinct(rows):
            members = threads[rows == number]
            row = self.rows[number][owners % self.width]
            own = owners == members[0] if len(members) == 1 else np.zeros(len(owners), bool)
            through = self.rows[self.fence_row[members[0]]][owners % self.width] >= time
            unordered = ~own & (row < time)
            unfenced = ~unordered & ~through & np.where(own, fenced == NEVER, row < fenced)
            for bad, kind, why in (
                (unordered, "unordered store", f"{verb} here, and nothing orders it after the store by"
                                               f" {{}}"),
                (unfenced, "missing proxy fence", f"{verb} here by the async proxy, and no fence.proxy.async"
                                                  " lies between"
                                                  " that and the store by {}"),
            ):  # fmt: skip
                if bad.any():
                    k = int(np.flatnonzero(bad)[0])
                    self.report(kind, instr, None, int(members[0]), int(cells[k]) // 4, int(bad.sum()),
                                why.format(self.name(int(owners[k]))))  # fmt: skip

    def forget(self, units):
        """Drop the recorded accesses of locations that are overwritten."""
        if not len(units):
            return
        for copy, mine in self.writers(units):
            copy.places -= int(np.count_nonzero(mine))
            if copy.places <= 0:
                del self.copies[copy.slot]
        self.writer[units] = 0
        for reader, mine in self.readers_of(units):
            reader.places -= int(np.count_nonzero(mine))
            if reader.places <= 0:
                del self.slots[int(units[mine][0]) // self.per_block][reader.slot]
        self.readers[units] = 0

    def record_reads(self, operation: Operation, units):
        """Record that an operation reads some locations of one thread block."""
        block = int(units[0]) // self.per_block
        slots = self.slots.setdefault(block, {})
        if slots.get(operation.slot) is not operation:
            free = next((s for s in range(SLOTS) if s not in slots), None)
            if free is None:  # drop the oldest that has ended
                free = next((s for s, x in slots.items() if (x.done != NEVER).any()), next(iter(slots)))
                del slots[free]
                mask = ~np.uint64(1 << free)
                self.readers[block * self.per_block : (block + 1) * self.per_block] &= mask
            operation.slot = free
            slots[free] = operation
        bit = np.uint64(1 << operation.slot)
        here = np.zeros(self.per_block, bool)  # for np.unique takes long
        here[units - block * self.per_block] = True
        units = np.flatnonzero(here) + block * self.per_block
        new = self.readers[units] & bit == 0
        self.readers[units[new]] |= bit
        operation.places += int(new.sum())

    def start_bulk_store(
        self, instr: Instr, position: int, units: np.ndarray, barrier: MBarrier | None = None
    ):
        """Begin a bulk store from shared memory, which a group of its thread or an mbarrier completes."""
        thread = self.threads(np.array([position]))
        self.check_copies(instr, np.full(len(units), thread[0]), units, False)
        self.check_stores(instr, thread, units, "is read")
        store = Operation(STORE, instr, int(thread[0]), self.width)
        self.record_reads(store, units)
        if barrier is None:
            self.open.setdefault(int(thread[0]), []).append(store)
        else:
            barrier.copies.setdefault(barrier.phase, []).append(store)

    def bulk_commit(self, P):
        """Group the bulk stores of each thread so far."""
        for thread in self.threads(P).tolist():
            self.groups.setdefault(thread, []).append(self.open.pop(thread, []))

    def bulk_wait(self, P, allowed: int):
        """Record that each thread's groups except its newest have read."""
        for thread in self.threads(P).tolist():
            for store in self.take_ended(thread, allowed):
                self.observe_completion(store, np.array([thread]))

    def take_ended(self, key: int, allowed: int) -> list[Operation]:
        """Return the operations of all but the newest groups, and forget them."""
        groups = self.groups.get(key, [])
        over = max(len(groups) - allowed, 0)
        self.groups[key] = groups[over:]
        return [operation for group in groups[:over] for operation in group]

    # -- products --------------------------------------------------------------------------------------------
    def product(self, instr: Instr, P: np.ndarray, units: np.ndarray | None):
        """Record wgmma.mma_async of warpgroups, positions [warpgroup, 128], which reads locations [warpgroup,
        units]."""
        for k, some in enumerate(P):
            threads = self.threads(some)
            key = self.group_key(threads)
            if not self.open.get(key):
                self.open[key] = [Operation(PRODUCT, instr, int(threads[0]), self.width)]
            product = self.open[key][0]
            product.instrs.add(id(instr))
            product.issued = self.now
            if units is None:
                continue
            self.check_wgmma_copies(instr, threads, units[k])
            self.check_stores(instr, threads, units[k], "is read")
            self.record_reads(product, units[k])

        self.tick()

    def group_key(self, threads: np.ndarray) -> int:
        """Return the key of a warpgroup's groups: negative, unlike a thread's number."""
        return -1 - int(threads[0])

    def check_wgmma_copies(self, instr: Instr, threads, units):
        """Check that all threads of the warpgroup have observed the end of the copies that a product reads."""
        for copy, mine in self.writers(units):
            late = threads[~self.happens_before(copy, threads)]
            if len(late):
                self.report("unfinished copy", instr, copy.instr, int(late[0]), int(units[mine][0]), len(late),
                            "is read here, and the thread has not waited for the copy that brings it")  # fmt: skip

    def wgmma_commit(self, P):
        """Group the products of each warpgroup so far."""
        for threads in self.threads(P).reshape(-1, 128):
            key = self.group_key(threads)
            self.groups.setdefault(key, []).append(self.open.pop(key, []))

    def wgmma_wait(self, P, allowed: int):
        """End all but the newest groups of each warpgroup.

        A thread's wait covers the whole product: its four warps have issued it, so what they did before is
        over too.
        """
        for threads in self.threads(P).reshape(-1, 128):
            ended = self.take_ended(self.group_key(threads), allowed)
            for product in ended:
                self.observe_completion(product, threads)
            if ended:
                self.advance(threads, max(product.issued for product in ended))

    def has_unfinished(self, P, instr: Instr) -> np.ndarray:
        """Return a mask of the threads whose warpgroup has not waited for a product of an instruction."""
        threads = self.threads(P)
        first = threads - threads % self.batch.threads + threads % self.batch.threads // 128 * 128
        out = np.zeros(len(threads), bool)
        for k in distinct(first):
            some = [*self.open.get(-1 - k, []), *(x for group in self.groups.get(-1 - k, []) for x in group)]
            if any(id(instr) in product.instrs for product in some):
                out |= first == k
        return out

    # -- the end ---------------------------------------------------------------------------------------------
    def finish(self):
        """Check at exit that bulk stores have read their shared memory, which ends with the block."""
        left = [
            *self.open.items(),
            *((k, [x for group in groups for x in group]) for k, groups in self.groups.items()),
        ]
        for key, operations in left:
            for store in operations if key >= 0 else ():
                self.report("bulk store left behind", store.instr, None, store.thread, -1, 1,
                            "the thread returns without cp.async.bulk.wait_group, and the shared memory that"
                            " this still"
                            " reads goes with its block")  # fmt: skip

    def report_some(
        self, kind: str, instr: Instr, other: Instr | None, threads, units, bad: np.ndarray, message: str
    ):
        """Report one finding for the accesses `bad`, if any; one thread may stand for all."""
        if len(bad):
            thread = threads[bad[0]] if len(threads) > 1 else threads[0]
            self.report(kind, instr, other, int(thread), int(units[bad[0]]), len(bad), message)

    def name(self, thread: int) -> str:
        return f"thread {self.run.thread_index(thread % self.batch.threads)}"

    def report(
        self, kind: str, instr: Instr, other: Instr | None, thread: int, unit: int, count: int, message: str
    ):
        """Report one finding; `unit` is the location in units of 16 bytes, or -1."""
        if unit >= 0:
            message = f"{self.batch.shared_name(unit * 16 % self.batch.shared_size)} {message}"
        self.run.report_unordered(self.batch, kind, instr, other, thread, count, message)
