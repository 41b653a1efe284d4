"""The threads of a batch and their memory: check, log and execute every load and store.

A batch (executor.py) consists of some thread blocks of one launch. Its threads have positions 0..n-1; `L` is
an array of positions, or None for all threads. Addresses are arrays with one element per thread, or a scalar
for all. An invalid access is reported and redirected to a page outside all tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.vgpu.checks.async_order import AsyncOrder
from harness.vgpu.checks.findings import format_index, mark_name
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.access import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Access
from harness.vgpu.memory.arena import Extent, Space, find_extent

SMALL_COUNT = 40  # up to this many threads Python's min and max are faster than NumPy's


class BatchMemory:
    """The thread positions of a batch, and its shared, local and global memory."""

    def __init__(self, run, blocks: np.ndarray):
        self.run, self.blocks = run, blocks
        self.arena, self.checks, self.log = run.arena, run.checks, run.log
        self.code: Code = run.code
        self.program = self.code.program
        threads, count = run.threads, len(blocks)
        self.n = count * threads
        self.threads, self.count = threads, count
        self.warps_per_block = -(-threads // 32)
        self.block_of = np.repeat(np.arange(count), threads)
        self.thread_of = np.tile(np.arange(threads), count)
        self.warp_of = self.block_of * self.warps_per_block + (self.thread_of >> 5)
        self.lane_of = self.thread_of & 31
        self.alive = np.full(count, threads)
        self.exited_early = False
        self.epoch = np.zeros(count, np.int64)  # barriers passed, per thread block
        self.common_epoch: int | None = 0  # the epoch of all blocks; None if they differ
        self.warp_epoch = np.zeros(count * self.warps_per_block, np.int64)
        self.warp_synced = False
        self.order: AsyncOrder | None = None  # set if the kernel has asynchronous copies or products
        self.allocate_spaces(run)

    def allocate_spaces(self, run):
        self.global_space = self.arena.space
        self.base = np.uint64(self.arena.base)
        size = run.shared_size
        if size:
            data = run.create_unwritten_bytes(self.count * size)
            written = np.zeros(self.count * size, np.uint8)
            self.shared_space = Space(data, written)
            written.reshape(self.count, size)[:, :64] = 1  # target of redirected accesses
        else:
            self.shared_space = Space(np.zeros(64, np.uint8), np.ones(64, np.uint8))
        self.shared_size = size
        self.shared_base = self.block_of * size
        local = run.local_size
        if local:
            written = np.zeros(self.n * local, np.uint8)
            written.reshape(self.n, local)[:, :16] = 1  # target of redirected accesses
            self.local_space = Space(np.zeros(self.n * local, np.uint8), written)
        else:
            self.local_space = Space(np.zeros(64, np.uint8), np.ones(64, np.uint8))
        self.local_base = np.arange(self.n) * local
        self.param_space = run.param_space

    def positions(self, L):
        return np.arange(self.n) if L is None else L

    def epochs(self, L):
        """Return the number of barriers that each thread's block has passed; a scalar if all are equal."""
        if self.common_epoch is not None:
            return self.common_epoch
        return self.epoch[self.block_of if L is None else self.block_of[L]]

    def pass_barrier(self, ready):
        """Move the thread blocks `ready` (None: all that have not exited) past a barrier to a new epoch."""
        self.run.log.barrier(self, ready)
        self.run.counters.barriers += int(np.count_nonzero(self.alive if ready is None else ready))
        if ready is None:
            self.epoch += 1
            if self.common_epoch is not None:
                self.common_epoch += 1
        else:
            self.epoch[ready] += 1
            self.common_epoch = int(self.epoch[0]) if (self.epoch == self.epoch[0]).all() else None

    # -- memory ---------------------------------------------------------------------------------------------
    def constant_address(self, address):
        """Expand a 32-bit address of constant memory to a device address."""
        low = np.uint32(self.arena.base & 0xFFFFFFFF)
        return (address - low).astype(np.uint64) + self.base

    def resolve(self, A: Access, address, L) -> tuple[Space, Any]:
        """Return the accessed memory and the checked index into it; log the access."""
        if A.space == "global" or A.space == "const":
            return self.global_space, self.global_index(A, address, L)
        if A.space == "shared":
            return self.shared_space, self.shared_index(A, address, L)
        if A.space == "local" and self.run.checks.counters:
            self.run.counters.count_local(A, self.positions(L), self.warp_of)
        return self.local_space, self.offset_index(A, address, self.local_base, self.run.local_extents, L)

    def load(self, A: Access, address, L):
        """Load the values of the threads L: an array, or a list of arrays for several elements."""
        if A.space == "generic":
            return self.load_generic(A, address, L)
        if A.space == "param":
            return self.load_param(A, address)
        return self.fetch(A, *self.resolve(A, address, L), L)

    def store(self, A: Access, address, value, L):
        if A.space == "generic":
            self.store_generic(A, address, value, L)
        elif A.space == "param":
            P = self.positions(L)
            self.run.report_bad_address(self, A, np.broadcast_to(address, len(P)), P, None, None)
        else:
            self.write(A, *self.resolve(A, address, L), value, L)

    def global_index(self, A: Access, address, L):
        """Return the checked element index (units of the access size) in the arena; log the access."""
        t = A.tensor
        if address.ndim == 0:
            low = high = bits = int(address)
        elif len(address) <= SMALL_COUNT:
            values = address.tolist()
            low, high = min(values), max(values)
            bits = low | high if A.mask == 0 else int(np.bitwise_or.reduce(address))
        else:
            low, high = int(address.min()), int(address.max())
            bits = int(np.bitwise_or.reduce(address))
        if low < t.start or high + A.mask >= t.end or bits & A.mask:
            return self.global_index_slow(A, address, L)
        if address.ndim == 0:
            index = (low - self.arena.base) >> A.shift
        else:
            index = ((address - self.base) >> A.shift64).view(np.int64)
        if A.writes:
            if not t.written:
                self.run.first_write(t)
            if t.forbids:
                self.run.report_forbidden(self, A, t, address, L)
        self.log.add(self, A, t, index, L)
        return index

    def global_index_slow(self, A: Access, address, L):
        """Handle the cases of `global_index` with accesses to several tensors or invalid accesses."""
        positions = self.positions(L)
        addr = np.broadcast_to(address, len(positions))
        number, ends = self.arena.locate(addr)
        starts = self.arena._arrays[0]
        inside = (addr >= starts[number]) & (addr + np.uint64(A.mask) < ends)
        aligned = addr & np.uint64(A.mask) == 0
        good = inside & aligned
        if not good.all():
            self.run.report_bad_address(self, A, addr, positions, inside, aligned)
            addr = np.where(good, addr, self.base + np.uint64(self.arena.sink))
        tensors = np.unique(number[good])
        extents = self.arena.extents
        index = ((addr - self.base) >> A.shift64).view(np.int64)
        owners = self.run.get_pointer_targets(A)
        for k in tensors.tolist():
            part = good & (number == k)
            if owners and extents[k] not in owners:
                self.run.report_stray_address(self, A, owners, addr, positions, part)
            if A.writes:
                self.run.first_write(extents[k])
                if extents[k].forbids:
                    self.run.report_forbidden(self, A, extents[k], addr[part], positions[part])
            self.log.add(self, A, extents[k], index[part], positions[part])
        if len(tensors) == 1 and good.all():
            A.tensor = extents[int(tensors[0])]
        A.mixed = len(tensors) != 1 or not good.all()
        return index

    def fetch(self, A: Access, space: Space, index, L):
        """Read the elements at an index, and check that they have been written."""
        data, written, full = A.get_views(space)
        if not A.tensor.ready or A.mixed:
            A.mixed = False
            if self.checks.uninitialised:
                state = written[index]
                if not (state == full).all():
                    self.run.report_unwritten(self, A, state != full, index, L)
        value = data[index]
        if self.log.events:
            self.log.events.add_values(self, value, L)
        return split_elements(A, value)

    def write(self, A: Access, space: Space, index, value, L):
        data, written, full = A.get_views(space)
        if self.log.events:
            many = A.count > 1
            self.log.events.add_values(self, np.stack(np.broadcast_arrays(*value), -1) if many else value, L)
        if A.count == 1:
            data[index] = value if np.ndim(index) or not value.ndim else value[-1]
        else:
            for k, part in enumerate(value):
                data[index, k] = part if np.ndim(index) or not part.ndim else part[-1]
        if not A.tensor.ready or A.mixed:
            A.mixed = False
            written[index] = full

    def offset_index(self, A: Access, address, base, extents: list[Extent], L):
        """Return the checked index into shared or local memory; `base` is the start of each thread's part."""
        t = A.tensor
        low, high = get_range(address)
        if low < t.start or high + A.mask >= t.end or (address & address.dtype.type(A.mask)).any():
            t = next((t for t in extents if low >= t.start and high + A.mask < t.end), None)
            A.tensor = t or A.tensor
            if t is None or (address & address.dtype.type(A.mask)).any():
                address = self.redirect_bad_offsets(A, address, extents, L)
        starts = base if L is None else base[L]
        return (starts + address.astype(np.int64)) >> A.shift

    def redirect_bad_offsets(self, A: Access, address, extents, L):
        positions = self.positions(L)
        offsets = np.broadcast_to(address, len(positions)).astype(np.int64)
        inside = np.zeros(len(positions), bool)
        for t in extents:
            inside |= (offsets >= t.start) & (offsets + A.mask < t.end)
        aligned = offsets & A.mask == 0
        good = inside & aligned
        if not good.all():
            self.run.report_bad_address(self, A, offsets, positions, inside, aligned)
        A.mixed = True
        return np.where(good, offsets, 0)

    def shared_index(self, A: Access, address, L):
        if self.run.cluster_size > 1:
            return self.cluster_index(A, address, L)
        index = self.offset_index(A, address, self.shared_base, self.run.shared_extents, L)
        self.log.add_shared(self, A, index, L)
        if self.order:
            self.order.access(A, index, L)
        return index

    def remote_index(self, A: Access, address, L) -> tuple[np.ndarray, bool]:
        """Return (checked index, whether all threads access their own block) for shared addresses in a
        cluster, whose top byte is 0 for the own block, or 1 + the rank of a block."""
        P = self.positions(L)
        address = np.broadcast_to(address, len(P)).astype(np.int64)
        rank, own_block, size = address >> 24, self.block_of[P], self.run.cluster_size
        block = np.where(rank == 0, own_block, own_block - own_block % size + np.clip(rank - 1, 0, size - 1))
        base = np.zeros(self.n, np.int64)
        base[P] = block * self.shared_size
        index = self.offset_index(A, address & 0xFFFFFF, base, self.run.shared_extents, L)
        return index, bool((block == own_block).all())

    def cluster_index(self, A: Access, address, L):
        """Return the checked index of a shared access in a cluster; log the access."""
        index, is_own = self.remote_index(A, address, L)
        (self.log.add_shared if is_own else self.log.add_remote)(self, A, index, L)
        if self.order:
            self.order.access(A, index, L)
        return index

    def format_shared_location(self, offset: int, width: int = 4) -> str:
        e = find_extent(self.run.shared_extents, offset)
        return f"{mark_name(e.name)}{format_index(e.index(offset, width))}" if e else "shared memory"

    def load_param(self, A: Access, address):
        A.tensor = self.run.param_extent
        data, _, _ = A.get_views(self.param_space)
        top = max(len(self.param_space.data) // A.nbytes - 1, 0)
        return split_elements(A, data[np.minimum(np.asarray(address).astype(np.int64) >> A.shift, top)])

    def get_window(self, A: Access, address):
        """Return the state space of generic addresses (None if mixed) and the start of its window."""
        low, high = get_range(address)
        if low >= 2 * PARAM_WINDOW:  # beyond all windows: out of bounds
            return "global", 0
        for name, start in (("param", PARAM_WINDOW), ("local", LOCAL_WINDOW), ("shared", SHARED_WINDOW)):
            if low >= start:
                return (name, start) if high < 2 * start else (None, 0)
            if high >= start:
                return None, 0
        return "global", 0

    def split_by_window(self, A: Access, address, L):
        """Split generic addresses by window: yield (mask of threads, their positions, the access in the
        window's state space, their addresses in it)."""
        name, window = self.get_window(A, address)
        if name is not None:
            yield slice(None), L, A.with_space(name), address - np.uint64(window)
            return
        positions = self.positions(L)
        top = address >> np.uint64(56)
        for value in np.unique(top):
            part = top == value
            yield from ((part, *rest) for _, *rest in self.split_by_window(A, address[part], positions[part]))

    def load_generic(self, A: Access, address, L):
        out = None
        for part, P, B, offset in self.split_by_window(A, address, L):
            loaded = self.load(B, offset, P)
            if isinstance(part, slice):
                return loaded
            if out is None:
                out = [np.zeros(len(address), f"u{A.width}") for _ in range(A.count)]
            for k in range(A.count):
                out[k][part] = loaded if A.count == 1 else loaded[k]
        assert out is not None  # there are threads
        return out[0] if A.count == 1 else out

    def store_generic(self, A: Access, address, value, L):
        for part, P, B, offset in self.split_by_window(A, address, L):
            parts = [x[part] if x.ndim else x for x in (value if A.count > 1 else (value,))]
            self.store(B, offset, tuple(parts) if A.count > 1 else parts[0], P)


def get_range(address: np.ndarray | np.generic) -> tuple[int, int]:
    return (int(address), int(address)) if address.ndim == 0 else (int(address.min()), int(address.max()))


def split_elements(A: Access, value):
    """Split a loaded value of several elements into one array per element."""
    if A.count == 1:
        return value
    return list(value) if value.ndim == 1 else list(np.ascontiguousarray(value.T))
