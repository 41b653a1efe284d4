"""Ordering of asynchronous copies and wgmma products with other accesses to shared memory.

Bulk copies, TMA and wgmma access shared memory while the threads that issued them continue. A thread orders
them by waiting for an mbarrier's phase, a group of bulk stores, or a group of products; mbarriers and
barriers pass this order on to other threads. These operations access memory through the async proxy, so they
see a thread's stores only after a fence.proxy.async.

Each thread has a row, its vector clock: for every thread of its cluster, the time up to which that thread's
accesses happened before. Threads that have passed the same barrier share a row. Time advances with every
release. An asynchronous operation records when each thread observed its completion; it happened before any
thread whose row includes one of these times. Only the latest accesses to a location are compared: the last
copy, the last store, and the loads and reading operations since.

This check runs for kernels with such instructions. races.py finds races between ordinary loads and stores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.vgpu.memory.access import Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.program import iterate_set_bits

NEVER = np.iinfo(np.int32).max
MAX_READERS = 64  # reading operations that are tracked per thread block
INITIAL_ROWS = 1024  # of vector clocks
MAX_THREADS = 4096  # in a cluster
MAX_LISTS = 128  # lists of loads or stores before they are merged
STORE_UNIT = 4  # granularity of recorded stores in bytes
COPY, STORE, PRODUCT = "copy into shared memory", "bulk store", "wgmma"


def get_distinct(numbers: np.ndarray) -> list[int]:
    """Return the sorted distinct numbers of an array; np.unique is slow for a single one, the usual case."""
    if not len(numbers):
        return []
    if (numbers == numbers[0]).all():
        return [int(numbers[0])]
    return np.unique(numbers).tolist()


class Operation:
    """An asynchronous operation that reads or writes shared memory until a thread has waited for it."""

    __slots__ = ["done", "instr", "instrs", "issued", "kind", "recorded_units", "slot", "thread"]

    def __init__(self, kind: str, instr: Instr, thread: int, width: int):
        self.kind, self.instr, self.thread = kind, instr, thread
        self.instrs = {id(instr)}
        self.done = np.full(width, NEVER, np.int32)  # when each thread of the cluster observed completion
        self.issued = 0  # for products: when the last one of the group was issued
        self.recorded_units = 0  # number of 16-byte units that record this operation
        self.slot = -1


class AsyncOrder:
    """The ordering state of one batch. Thread numbers are block * threads + thread."""

    def __init__(self, batch):
        self.batch, self.run = batch, batch.run
        self.width = batch.threads_per_block * self.run.cluster_size
        threads = batch.num_blocks * batch.threads_per_block
        self.rows = np.zeros((INITIAL_ROWS, self.width), np.int32)
        self.used_rows = 1  # row 0: nothing observed
        self.sweep_limit = INITIAL_ROWS // 2  # rows that may be used before the next sweep
        self.thread_rows = np.zeros(threads, np.int64)
        self.fence_rows = np.zeros(threads, np.int64)  # the row of a thread at its last proxy fence
        self.now = 1
        self.arrivals: dict[tuple[int, int], int] = {}  # (thread block, barrier) -> row of its bar.arrive
        units = batch.num_blocks * batch.shared_size // 16 + 1
        self.units_per_block = batch.shared_size // 16
        self.last_copy = np.zeros(units, np.int32)  # the last copy that wrote a unit, 0 for none
        self.readers = np.zeros(units, np.uint64)  # operations that have read it since, one bit per slot
        # thread and time of the last store, and time of its proxy fence
        self.store_thread = np.full(4 * units, -1, np.int32)
        self.store_time = np.zeros(4 * units, np.int32)
        self.store_fenced = np.zeros(4 * units, np.int32)
        self.unfenced: list[tuple[np.ndarray, np.ndarray]] = []  # (locations of stores, threads)
        # block -> (units, threads, times)
        self.loads: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        self.copies: dict[int, Operation] = {}
        self.next_copy = 1
        self.slots: dict[int, dict[int, Operation]] = {}  # by thread block
        self.uncommitted: dict[int, list[Operation]] = {}  # by thread, or by get_warpgroup_key
        self.committed: dict[int, list[list[Operation]]] = {}  # groups, oldest first

    # -- rows -----------------------------------------------------------------------------------------------
    def get_threads(self, positions) -> np.ndarray:
        return self.batch.block_of[positions] * self.batch.threads_per_block + self.batch.thread_of[positions]

    def add_row(self, row: np.ndarray) -> int:
        if self.used_rows == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.used_rows] = row
        self.used_rows += 1
        return self.used_rows - 1

    def free_unused_rows(self):
        """Free the rows that are no longer referenced, and renumber the others."""
        barriers = list(self.batch.mbarriers.values())
        lists = [self.thread_rows, self.fence_rows, np.array([*self.arrivals.values()], np.int64)]
        lists += [np.array([x for b in barriers for x in (b.arriving_row, b.arrived_row)], np.int64)]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *lists]))
        new_index = np.zeros(self.used_rows, np.int64)
        new_index[live] = np.arange(len(live))
        self.rows[: len(live)] = self.rows[live]
        self.used_rows = len(live)
        self.thread_rows, self.fence_rows = new_index[self.thread_rows], new_index[self.fence_rows]
        self.arrivals = {key: int(new_index[row]) for key, row in self.arrivals.items()}
        for b in barriers:
            b.arriving_row, b.arrived_row = int(new_index[b.arriving_row]), int(new_index[b.arrived_row])

    def release(self, threads: np.ndarray, into: int = 0) -> int:
        """Merge row `into` and the rows of these threads of one cluster into a new row; return its number."""
        row = self.rows[get_distinct(np.append(self.thread_rows[threads], into))].max(axis=0)
        row[threads % self.width] = self.now
        return self.add_row(row)

    def acquire(self, threads: np.ndarray, row: int):
        """Merge row `row` into the rows of these threads."""
        rows = self.thread_rows[threads]
        for old in get_distinct(rows):
            if (self.rows[old] < self.rows[row]).any():
                merged = self.add_row(np.maximum(self.rows[old], self.rows[row]))
                self.thread_rows[threads[rows == old]] = merged

    def advance(self, threads: np.ndarray, time: int):
        """Order the accesses of these threads up to `time` before all their later accesses."""
        rows = self.thread_rows[threads]
        for old in get_distinct(rows):
            row = self.rows[old].copy()
            row[threads % self.width] = np.maximum(row[threads % self.width], time)
            self.thread_rows[threads[rows == old]] = self.add_row(row)

    def advance_time(self):
        """Advance the time past all releases so far, and free unused rows if there are many.

        All rows in use must be referenced by threads or barriers."""
        self.now += 1
        if self.used_rows > self.sweep_limit:
            self.free_unused_rows()
            self.sweep_limit = max(INITIAL_ROWS // 2, 2 * self.used_rows)

    # -- barriers -------------------------------------------------------------------------------------------
    def barrier(self, positions, number: int | str):
        """Order the threads at these positions by a barrier, separately in each block (or cluster)."""
        threads = self.get_threads(positions)
        size = self.width if isinstance(number, str) else self.batch.threads_per_block
        for group in get_distinct(threads // size):
            members = threads[threads // size == group]
            before = 0 if isinstance(number, str) else self.arrivals.pop((group, number), 0)
            self.thread_rows[members] = self.release(members, before)
        self.advance_time()

    def bar_arrive(self, positions, number: int):
        threads = self.get_threads(positions)
        for block in get_distinct(threads // self.batch.threads_per_block):
            members = threads[threads // self.batch.threads_per_block == block]
            self.arrivals[block, number] = self.release(members, self.arrivals.get((block, number), 0))
        self.advance_time()

    def warp_sync(self, positions, mask):
        """Order threads by a bar.warp.sync, separately for each warp and mask."""
        threads, groups = (
            self.get_threads(positions),
            self.batch.warp_of[positions] << 32 | mask.astype(np.int64),
        )
        for group in get_distinct(groups):
            members = threads[groups == group]
            self.thread_rows[members] = self.release(members)
        self.advance_time()

    def arrive(self, positions, barrier: MBarrier):
        barrier.arriving_row = self.release(self.get_threads(positions), barrier.arriving_row)
        self.advance_time()

    def end_phase(self, barrier: MBarrier):
        row = np.maximum(self.rows[barrier.arriving_row], self.rows[barrier.arrived_row])
        barrier.arrived_row, barrier.arriving_row = self.add_row(row), 0
        barrier.copies = {
            k: copies for k, copies in barrier.copies.items() if any(c.recorded_units > 0 for c in copies)
        }

    def observe_phase(self, positions, barrier: MBarrier):
        """Record that threads observed the end of the mbarrier's last phase: arrivals and copies."""
        threads = self.get_threads(positions)
        self.acquire(threads, barrier.arrived_row)
        for phase, copies in barrier.copies.items():
            if phase < barrier.phase:
                for copy in copies:
                    self.observe_completion(copy, threads)

    def observe_completion(self, operation: Operation, threads: np.ndarray):
        columns = threads % self.width
        operation.done[columns] = np.minimum(operation.done[columns], self.now)

    def happens_before(self, operation: Operation, threads: np.ndarray) -> np.ndarray:
        """Return a mask of the threads whose next access an operation happened before."""
        ordered = operation.done[threads % self.width] != NEVER
        rows = self.thread_rows[threads]
        for row in get_distinct(rows[~ordered]):
            if (self.rows[row] >= operation.done).any():
                ordered |= rows == row
        return ordered

    def proxy_fence(self, positions):
        """Execute fence.proxy.async: stores ordered before it become visible to the async proxy."""
        threads = self.get_threads(positions)
        self.fence_rows[threads] = self.thread_rows[threads]
        selected = np.zeros(len(self.thread_rows), bool)
        selected[threads] = True
        remaining = []
        for cells, owners in self.unfenced:
            mask = selected[owners]
            fenced = cells[mask]
            is_last = self.store_thread[fenced] == owners[mask]
            self.store_fenced[fenced[is_last]] = self.now
            if not mask.all():
                remaining.append((cells[~mask], owners[~mask]))
        self.unfenced = remaining
        self.advance_time()

    # -- loads and stores of threads -------------------------------------------------------------------------
    def access(self, access: Access, index, active):
        """Check and record a load, store or atomic of shared memory; `index` is in units of its size."""
        positions = self.batch.get_positions(active)
        threads = self.get_threads(positions)
        start = np.broadcast_to(index, len(positions)) << access.shift
        units = start >> 4
        self.check_copies(access.instr, threads, units, access.writes)
        if access.writes:
            self.check_readers(access.instr, threads, units)
            self.record_stores(threads, start, max(access.nbytes // STORE_UNIT, 1))
        else:
            copied = self.last_copy[units] != 0
            if copied.any():
                self.record_loads(threads[copied], units[copied])

    def record_loads(self, threads, units):
        times = np.full(len(units), self.now, np.int32)
        blocks = units // self.units_per_block
        for block in get_distinct(blocks):
            mask = blocks == block
            lists = self.loads.setdefault(block, [])
            lists.append((units[mask], threads[mask], times[mask]))
            if len(lists) > MAX_LISTS:
                merged = [np.concatenate(x)[::-1] for x in zip(*lists, strict=True)]
                _, last = np.unique(merged[0] * len(self.thread_rows) + merged[1], return_index=True)
                self.loads[block] = [(merged[0][last], merged[1][last], merged[2][last])]

    def record_stores(self, threads, start, count: int):
        """Record stores, which supersede the earlier accesses to these locations."""
        cells = ((start // STORE_UNIT)[:, None] + np.arange(count)).reshape(-1)
        owners = np.repeat(threads, count)
        self.store_thread[cells], self.store_time[cells], self.store_fenced[cells] = owners, self.now, NEVER
        self.unfenced.append((cells, owners))
        if len(self.unfenced) > MAX_LISTS:
            cells = np.unique(np.concatenate([c for c, _ in self.unfenced]))
            cells = cells[self.store_fenced[cells] == NEVER]
            self.unfenced = [(cells, self.store_thread[cells])]
        units = np.unique(start >> 4)
        self.drop_records(units[(self.last_copy[units] != 0) | (self.readers[units] != 0)])

    def check_copies(self, instr: Instr, threads, units, writes: bool):
        verb = "is written here" if writes else "is read here"
        for copy, mask in self.find_writers(units):
            bad = np.flatnonzero(mask)[~self.happens_before(copy, threads[mask])]
            self.report_if_any("unfinished copy", instr, copy.instr, threads, units, bad,
                       f"{verb}, but the thread has not waited for the copy that writes it")  # fmt: skip

    def check_readers(self, instr: Instr, threads, units):
        for reader, mask in self.find_readers(units):
            bad = np.flatnonzero(mask)[~self.happens_before(reader, threads[mask])]
            self.report_if_any("operand overwritten", instr, reader.instr, threads, units, bad,
                       f"is stored to while a {reader.kind} may still read it")  # fmt: skip

    def find_writers(self, units) -> Iterator[tuple[Operation, np.ndarray]]:
        last = self.last_copy[units]
        for number in get_distinct(last[last != 0]):
            yield self.copies[number], last == number

    def find_readers(self, units) -> Iterator[tuple[Operation, np.ndarray]]:
        """Yield each operation that has read these locations since their last write, and its mask."""
        bits = self.readers[units]
        if not bits.any():
            return
        for block in get_distinct(units[bits != 0] // self.units_per_block):
            selected = units // self.units_per_block == block
            for slot in iterate_set_bits(int(np.bitwise_or.reduce(bits[selected]))):
                yield self.slots[block][slot], selected & (bits >> np.uint64(slot) & np.uint64(1) != 0)

    # -- operations ------------------------------------------------------------------------------------------
    def start_copy(self, instr: Instr, position: int, units: np.ndarray, barrier: MBarrier | None):
        """Begin a copy into shared memory whose completion an mbarrier signals."""
        thread = self.get_threads(np.array([position]))
        block = int(units[0]) // self.units_per_block
        for reader, mask in self.find_readers(units):
            if not self.happens_before(reader, thread).all():
                message = f"is copied to while a {reader.kind} may still read it"
                bad = np.flatnonzero(mask)
                self.report_if_any("stage reused early", instr, reader.instr, thread, units, bad, message)
        for copy, mask in self.find_writers(units):
            same_phase = barrier is not None and copy in barrier.copies.get(barrier.phase, ())
            if not same_phase and not self.happens_before(copy, thread).all():
                message = "is copied to while another copy into it may be under way"
                bad = np.flatnonzero(mask)
                self.report_if_any("stage reused early", instr, copy.instr, thread, units, bad, message)
        self.check_loads(instr, thread, block, units)
        self.check_stores(instr, thread, units, "is copied to")
        self.drop_records(units)
        self.store_thread[(units[:, None] * 4 + np.arange(4)).reshape(-1)] = -1
        copy = self.get_copy(instr, int(thread[0]), barrier)
        self.last_copy[units] = copy.slot
        copy.recorded_units += len(units)

    def get_copy(self, instr: Instr, thread: int, barrier: MBarrier | None) -> Operation:
        """Return the operation that represents all copies of an instruction in one phase."""
        copies = [] if barrier is None else barrier.copies.setdefault(barrier.phase, [])
        for copy in copies:
            if copy.instr is instr and copy.thread == thread and copy.kind == COPY:
                return copy
        copy = Operation(COPY, instr, thread, self.width)
        copy.slot = self.next_copy
        self.copies[copy.slot] = copy
        self.next_copy += 1
        copies.append(copy)
        return copy

    def check_loads(self, instr: Instr, thread, block: int, units):
        """Check that a copy is ordered after earlier loads of the units that it overwrites."""
        lists = self.loads.get(block)
        if not lists:
            return
        selected = np.zeros(self.units_per_block, bool)
        selected[units - block * self.units_per_block] = True
        row = self.rows[self.thread_rows[thread[0]]]
        remaining = []
        for where, owners, times in lists:
            mask = selected[where - block * self.units_per_block]
            late = mask & (row[owners % self.width] < times) & (owners != thread[0])
            if late.any():
                k = int(np.flatnonzero(late)[0])
                self.report("stage reused early", instr, None, int(thread[0]), int(where[k]), int(late.sum()),
                            f"is overwritten by a copy that is not ordered after the load by"
                            f" {self.format_thread(int(owners[k]))}")  # fmt: skip
            if not mask.all():
                remaining.append((where[~mask], owners[~mask], times[~mask]))
        self.loads[block] = remaining

    def check_stores(self, instr: Instr, threads, units, verb: str):
        """Check that an operation is ordered after earlier stores, with a proxy fence in between."""
        cells = (units[:, None] * 4 + np.arange(4)).reshape(-1)
        cells = cells[self.store_thread[cells] >= 0]
        if not len(cells):
            return
        owners, time, fenced = self.store_thread[cells], self.store_time[cells], self.store_fenced[cells]
        rows = self.thread_rows[threads]
        for number in get_distinct(rows):
            members = threads[rows == number]
            row = self.rows[number][owners % self.width]
            is_own = owners == members[0] if len(members) == 1 else np.zeros(len(owners), bool)
            through = self.rows[self.fence_rows[members[0]]][owners % self.width] >= time
            unordered = ~is_own & (row < time)
            unfenced = ~unordered & ~through & np.where(is_own, fenced == NEVER, row < fenced)
            for bad, kind, message in (
                (unordered, "unordered store", f"{verb} here, but not ordered after the store by {{}}"),
                (unfenced, "missing proxy fence", f"{verb} here by the async proxy, with no"
                                                  " fence.proxy.async after the store by {}"),
            ):  # fmt: skip
                if bad.any():
                    k = int(np.flatnonzero(bad)[0])
                    self.report(kind, instr, None, int(members[0]), int(cells[k]) // 4, int(bad.sum()),
                                message.format(self.format_thread(int(owners[k]))))  # fmt: skip

    def drop_records(self, units):
        """Drop the records of accesses to overwritten locations."""
        if not len(units):
            return
        for copy, mask in self.find_writers(units):
            copy.recorded_units -= int(np.count_nonzero(mask))
            if copy.recorded_units <= 0:
                del self.copies[copy.slot]
        self.last_copy[units] = 0
        for reader, mask in self.find_readers(units):
            reader.recorded_units -= int(np.count_nonzero(mask))
            if reader.recorded_units <= 0:
                del self.slots[int(units[mask][0]) // self.units_per_block][reader.slot]
        self.readers[units] = 0

    def record_reads(self, operation: Operation, units):
        block = int(units[0]) // self.units_per_block
        slots = self.slots.setdefault(block, {})
        if slots.get(operation.slot) is not operation:
            free = next((s for s in range(MAX_READERS) if s not in slots), None)
            if free is None:  # drop the oldest completed operation
                free = next((s for s, x in slots.items() if (x.done != NEVER).any()), next(iter(slots)))
                del slots[free]
                mask = ~np.uint64(1 << free)
                self.readers[block * self.units_per_block : (block + 1) * self.units_per_block] &= mask
            operation.slot = free
            slots[free] = operation
        bit = np.uint64(1 << operation.slot)
        selected = np.zeros(self.units_per_block, bool)  # np.unique is slow
        selected[units - block * self.units_per_block] = True
        units = np.flatnonzero(selected) + block * self.units_per_block
        new = self.readers[units] & bit == 0
        self.readers[units[new]] |= bit
        operation.recorded_units += int(new.sum())

    def start_bulk_store(
        self, instr: Instr, position: int, units: np.ndarray, barrier: MBarrier | None = None
    ):
        """Begin a bulk store from shared memory; its thread waits for a bulk group, or for an mbarrier."""
        thread = self.get_threads(np.array([position]))
        self.check_copies(instr, np.full(len(units), thread[0]), units, False)
        self.check_stores(instr, thread, units, "is read")
        store = Operation(STORE, instr, int(thread[0]), self.width)
        self.record_reads(store, units)
        if barrier is None:
            self.uncommitted.setdefault(int(thread[0]), []).append(store)
        else:
            barrier.copies.setdefault(barrier.phase, []).append(store)

    def bulk_commit(self, positions):
        for thread in self.get_threads(positions).tolist():
            self.committed.setdefault(thread, []).append(self.uncommitted.pop(thread, []))

    def bulk_wait(self, positions, allowed: int):
        """Record that all but each thread's newest `allowed` groups have finished reading."""
        for thread in self.get_threads(positions).tolist():
            for store in self.pop_completed_groups(thread, allowed):
                self.observe_completion(store, np.array([thread]))

    def pop_completed_groups(self, key: int, allowed: int) -> list[Operation]:
        """Remove and return the operations of all but the newest `allowed` groups."""
        groups = self.committed.get(key, [])
        excess = max(len(groups) - allowed, 0)
        self.committed[key] = groups[excess:]
        return [operation for group in groups[:excess] for operation in group]

    # -- products --------------------------------------------------------------------------------------------
    def start_product(self, instr: Instr, positions: np.ndarray, units: np.ndarray | None):
        """Record a wgmma.mma_async by warpgroups of threads at `positions` [warpgroup, 128], which read the
        16-byte units `units` [warpgroup, units] of shared memory."""
        for k, warpgroup_positions in enumerate(positions):
            threads = self.get_threads(warpgroup_positions)
            key = self.get_warpgroup_key(threads)
            if not self.uncommitted.get(key):
                self.uncommitted[key] = [Operation(PRODUCT, instr, int(threads[0]), self.width)]
            product = self.uncommitted[key][0]
            product.instrs.add(id(instr))
            product.issued = self.now
            if units is None:
                continue
            self.check_wgmma_copies(instr, threads, units[k])
            self.check_stores(instr, threads, units[k], "is read")
            self.record_reads(product, units[k])

        self.advance_time()

    def get_warpgroup_key(self, threads: np.ndarray) -> int:
        """Return the key of a warpgroup's groups: negative, to differ from thread numbers."""
        return -1 - int(threads[0])

    def check_wgmma_copies(self, instr: Instr, threads, units):
        """Check that all threads of the warpgroup observed the copies of a product's operands."""
        for copy, mask in self.find_writers(units):
            late = threads[~self.happens_before(copy, threads)]
            if len(late):
                self.report("unfinished copy", instr, copy.instr, int(late[0]), int(units[mask][0]), len(late),
                            "is read here, but the thread has not waited for the copy that writes it")  # fmt: skip

    def wgmma_commit(self, positions):
        for threads in self.get_threads(positions).reshape(-1, 128):
            key = self.get_warpgroup_key(threads)
            self.committed.setdefault(key, []).append(self.uncommitted.pop(key, []))

    def wgmma_wait(self, positions, allowed: int):
        """Complete all but the newest `allowed` groups of each warpgroup.

        A product is issued by all four warps, so waiting for it also orders their earlier accesses.
        """
        for threads in self.get_threads(positions).reshape(-1, 128):
            ended = self.pop_completed_groups(self.get_warpgroup_key(threads), allowed)
            for product in ended:
                self.observe_completion(product, threads)
            if ended:
                self.advance(threads, max(product.issued for product in ended))

    def find_unfinished(self, positions, instr: Instr) -> np.ndarray:
        threads = self.get_threads(positions)
        first = (
            threads
            - threads % self.batch.threads_per_block
            + threads % self.batch.threads_per_block // 128 * 128
        )
        out = np.zeros(len(threads), bool)
        for k in get_distinct(first):
            if any(id(instr) in product.instrs for product in self.list_unfinished(-1 - k)):
                out |= first == k
        return out

    def list_unfinished(self, key: int) -> list[Operation]:
        """Return the operations that have not been waited for, of a thread or of a warpgroup."""
        return [x for group in (*self.committed.get(key, ()), self.uncommitted.get(key, ())) for x in group]

    # -- end of the batch ---------------------------------------------------------------------------------------------
    def finish(self):
        """Check at exit that no bulk store still reads shared memory, which is freed with the block."""
        for key in {*self.uncommitted, *self.committed}:
            for store in self.list_unfinished(key) if key >= 0 else ():
                self.report("bulk store left behind", store.instr, None, store.thread, -1, 1,
                            "the thread returns without cp.async.bulk.wait_group: this store still reads"
                            " shared memory, which is freed when its block ends")  # fmt: skip

    def report_if_any(
        self, kind: str, instr: Instr, other_instr: Instr | None, threads, units, bad: np.ndarray,
        message: str,
    ):  # fmt: skip
        """Report one finding for the accesses `bad`, if any; `threads` may be one thread for all accesses."""
        if len(bad):
            thread = threads[bad[0]] if len(threads) > 1 else threads[0]
            self.report(kind, instr, other_instr, int(thread), int(units[bad[0]]), len(bad), message)

    def format_thread(self, thread: int) -> str:
        return f"thread {self.run.thread_index(thread % self.batch.threads_per_block)}"

    def report(
        self, kind: str, instr: Instr, other_instr: Instr | None, thread: int, unit: int, count: int,
        message: str,
    ):  # fmt: skip
        """Report one finding at 16-byte unit `unit` of shared memory (-1: no location)."""
        if unit >= 0:
            message = f"{self.batch.format_shared_location(unit * 16 % self.batch.shared_size)} {message}"
        self.run.report_unordered(self.batch, kind, instr, other_instr, thread, count, message)
