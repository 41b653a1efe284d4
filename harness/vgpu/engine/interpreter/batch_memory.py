"""The threads of a batch and their memory: check, log and execute every load and store.

A batch (executor.py) consists of some thread blocks of one launch. Its threads have positions 0..n-1;
`active` is an array of positions, or None for all threads. An address is an array with one element per thread, or
a scalar if all are equal. An invalid access is reported and redirected to a page outside all tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.vgpu.checks.async_order import AsyncOrder
from harness.vgpu.checks.findings import format_index, mark_name
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.access import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Access
from harness.vgpu.memory.arena import Extent, Space, find_extent

MAX_PYTHON_THREADS = 40  # up to this many threads Python's min and max are faster than NumPy's


class BatchMemory:
    """The threads of a batch, and their shared, local and global memory."""

    def __init__(self, run, blocks: np.ndarray):
        self.run, self.blocks = run, blocks
        self.arena, self.checks, self.log = run.arena, run.checks, run.log
        self.code: Code = run.code
        self.program = self.code.program
        threads, count = run.threads_per_block, len(blocks)
        self.num_threads = count * threads
        self.threads_per_block, self.num_blocks = threads, count
        self.warps_per_block = -(-threads // 32)
        self.block_of = np.repeat(np.arange(count), threads)
        self.thread_of = np.tile(np.arange(threads), count)
        self.warp_of = self.block_of * self.warps_per_block + (self.thread_of >> 5)
        self.lane_of = self.thread_of & 31
        self.live_threads = np.full(count, threads)
        self.exited_early = False
        self.epoch = np.zeros(count, np.int64)  # barriers passed, per thread block
        self.common_epoch: int | None = 0  # the epoch of all blocks; None if they differ
        self.warp_epoch = np.zeros(count * self.warps_per_block, np.int64)
        self.warp_synced = False
        self.async_order: AsyncOrder | None = None  # set if the kernel has asynchronous copies or products
        self.allocate_spaces(run)

    def allocate_spaces(self, run):
        self.global_space = self.arena.space
        self.base = np.uint64(self.arena.base)
        size = run.shared_size
        if size:
            data = run.create_unwritten_bytes(self.num_blocks * size)
            written = np.zeros(self.num_blocks * size, np.uint8)
            self.shared_space = Space(data, written)
            written.reshape(self.num_blocks, size)[:, :64] = 1  # target of redirected accesses
        else:
            self.shared_space = Space(np.zeros(64, np.uint8), np.ones(64, np.uint8))
        self.shared_size = size
        self.shared_base = self.block_of * size
        local = run.local_size
        if local:
            written = np.zeros(self.num_threads * local, np.uint8)
            written.reshape(self.num_threads, local)[:, :16] = 1  # target of redirected accesses
            self.local_space = Space(np.zeros(self.num_threads * local, np.uint8), written)
        else:
            self.local_space = Space(np.zeros(64, np.uint8), np.ones(64, np.uint8))
        self.local_base = np.arange(self.num_threads) * local
        self.param_space = run.param_space

    def get_positions(self, active):
        return np.arange(self.num_threads) if active is None else active

    def get_epochs(self, active):
        """Return the number of barriers that each thread's block has passed; a scalar if all are equal."""
        if self.common_epoch is not None:
            return self.common_epoch
        return self.epoch[self.block_of if active is None else self.block_of[active]]

    def pass_barrier(self, ready):
        """Move the thread blocks `ready` (None: all that have not exited) past a barrier to a new epoch."""
        self.run.log.barrier(self, ready)
        self.run.counters.barriers += int(np.count_nonzero(self.live_threads if ready is None else ready))
        if ready is None:
            self.epoch += 1
            if self.common_epoch is not None:
                self.common_epoch += 1
        else:
            self.epoch[ready] += 1
            self.common_epoch = int(self.epoch[0]) if (self.epoch == self.epoch[0]).all() else None

    # -- memory ---------------------------------------------------------------------------------------------
    def expand_constant_address(self, address):
        """Expand a 32-bit address of constant memory to a device address."""
        low = np.uint32(self.arena.base & 0xFFFFFFFF)
        return (address - low).astype(np.uint64) + self.base

    def resolve(self, access: Access, address, active) -> tuple[Space, Any]:
        """Return the accessed memory and the checked index into it; log the access."""
        if access.space == "global" or access.space == "const":
            return self.global_space, self.get_global_index(access, address, active)
        if access.space == "shared":
            return self.shared_space, self.get_shared_index(access, address, active)
        if access.space == "local" and self.run.checks.counters:
            self.run.counters.count_local(access, self.get_positions(active), self.warp_of)
        return self.local_space, self.get_offset_index(
            access, address, self.local_base, self.run.local_extents, active
        )

    def load(self, access: Access, address, active):
        """Load the values of the threads L: an array, or a list of arrays for several elements."""
        if access.space == "generic":
            return self.load_generic(access, address, active)
        if access.space == "param":
            return self.load_param(access, address)
        return self.fetch(access, *self.resolve(access, address, active), active)

    def store(self, access: Access, address, value, active):
        if access.space == "generic":
            self.store_generic(access, address, value, active)
        elif access.space == "param":
            positions = self.get_positions(active)
            self.run.report_bad_address(
                self, access, np.broadcast_to(address, len(positions)), positions, None, None
            )
        else:
            self.write(access, *self.resolve(access, address, active), value, active)

    def get_global_index(self, access: Access, address, active):
        """Return the checked element index (units of the access size) in the arena; log the access."""
        t = access.tensor
        if address.ndim == 0:
            low = high = bits = int(address)
        elif len(address) <= MAX_PYTHON_THREADS:
            values = address.tolist()
            low, high = min(values), max(values)
            bits = low | high if access.mask == 0 else int(np.bitwise_or.reduce(address))
        else:
            low, high = int(address.min()), int(address.max())
            bits = int(np.bitwise_or.reduce(address))
        if low < t.start or high + access.mask >= t.end or bits & access.mask:
            return self.get_global_index_slow(access, address, active)
        if address.ndim == 0:
            index = (low - self.arena.base) >> access.shift
        else:
            index = ((address - self.base) >> access.shift64).view(np.int64)
        if access.writes:
            if not t.written:
                self.run.record_first_write(t)
            if t.write_violation:
                self.run.report_forbidden_write(self, access, t, address, active)
        self.log.add(self, access, t, index, active)
        return index

    def get_global_index_slow(self, access: Access, address, active):
        """Handle the cases of `get_global_index` with accesses to several tensors or invalid accesses."""
        positions = self.get_positions(active)
        addr = np.broadcast_to(address, len(positions))
        number, ends = self.arena.locate(addr)
        starts = self.arena._arrays[0]
        inside = (addr >= starts[number]) & (addr + np.uint64(access.mask) < ends)
        aligned = addr & np.uint64(access.mask) == 0
        good = inside & aligned
        if not good.all():
            self.run.report_bad_address(self, access, addr, positions, inside, aligned)
            addr = np.where(good, addr, self.base + np.uint64(self.arena.sink))
        tensors = np.unique(number[good])
        extents = self.arena.extents
        index = ((addr - self.base) >> access.shift64).view(np.int64)
        owners = self.run.get_pointer_targets(access)
        for k in tensors.tolist():
            part = good & (number == k)
            if owners and extents[k] not in owners:
                self.run.report_stray_address(self, access, owners, addr, positions, part)
            if access.writes:
                self.run.record_first_write(extents[k])
                if extents[k].write_violation:
                    self.run.report_forbidden_write(self, access, extents[k], addr[part], positions[part])
            self.log.add(self, access, extents[k], index[part], positions[part])
        if len(tensors) == 1 and good.all():
            access.tensor = extents[int(tensors[0])]
        access.is_mixed = len(tensors) != 1 or not good.all()
        return index

    def fetch(self, access: Access, space: Space, index, active):
        """Read the elements at an index, and check that they have been written."""
        data, written, full = access.get_views(space)
        if not access.tensor.fully_written or access.is_mixed:
            access.is_mixed = False
            if self.checks.uninitialised:
                state = written[index]
                if not (state == full).all():
                    self.run.report_unwritten(self, access, state != full, index, active)
        value = data[index]
        if self.log.events:
            self.log.events.add_values(self, value, active)
        return split_elements(access, value)

    def write(self, access: Access, space: Space, index, value, active):
        data, written, full = access.get_views(space)
        if self.log.events:
            many = access.count > 1
            self.log.events.add_values(
                self, np.stack(np.broadcast_arrays(*value), -1) if many else value, active
            )
        if access.count == 1:
            data[index] = value if np.ndim(index) or not value.ndim else value[-1]
        else:
            for k, part in enumerate(value):
                data[index, k] = part if np.ndim(index) or not part.ndim else part[-1]
        if not access.tensor.fully_written or access.is_mixed:
            access.is_mixed = False
            written[index] = full

    def get_offset_index(self, access: Access, address, base, extents: list[Extent], active):
        """Return the checked index into shared or local memory; `base` is the start of each thread's part."""
        t = access.tensor
        low, high = get_range(address)
        if low < t.start or high + access.mask >= t.end or (address & address.dtype.type(access.mask)).any():
            t = next((t for t in extents if low >= t.start and high + access.mask < t.end), None)
            access.tensor = t or access.tensor
            if t is None or (address & address.dtype.type(access.mask)).any():
                address = self.redirect_bad_offsets(access, address, extents, active)
        starts = base if active is None else base[active]
        return (starts + address.astype(np.int64)) >> access.shift

    def redirect_bad_offsets(self, access: Access, address, extents, active):
        positions = self.get_positions(active)
        offsets = np.broadcast_to(address, len(positions)).astype(np.int64)
        inside = np.zeros(len(positions), bool)
        for t in extents:
            inside |= (offsets >= t.start) & (offsets + access.mask < t.end)
        aligned = offsets & access.mask == 0
        good = inside & aligned
        if not good.all():
            self.run.report_bad_address(self, access, offsets, positions, inside, aligned)
        access.is_mixed = True
        return np.where(good, offsets, 0)

    def get_shared_index(self, access: Access, address, active):
        if self.run.cluster_size > 1:
            return self.get_cluster_index(access, address, active)
        index = self.get_offset_index(access, address, self.shared_base, self.run.shared_extents, active)
        self.log.add_shared(self, access, index, active)
        if self.async_order:
            self.async_order.access(access, index, active)
        return index

    def get_remote_index(self, access: Access, address, active) -> tuple[np.ndarray, bool]:
        """Return (checked index, whether all threads access their own block) for shared addresses in a
        cluster, whose top byte is 0 for the own block, or 1 + the rank of a block."""
        positions = self.get_positions(active)
        address = np.broadcast_to(address, len(positions)).astype(np.int64)
        rank, own_block, size = address >> 24, self.block_of[positions], self.run.cluster_size
        block = np.where(rank == 0, own_block, own_block - own_block % size + np.clip(rank - 1, 0, size - 1))
        base = np.zeros(self.num_threads, np.int64)
        base[positions] = block * self.shared_size
        index = self.get_offset_index(access, address & 0xFFFFFF, base, self.run.shared_extents, active)
        return index, bool((block == own_block).all())

    def get_cluster_index(self, access: Access, address, active):
        """Return the checked index of a shared access in a cluster; log the access."""
        index, is_own = self.get_remote_index(access, address, active)
        (self.log.add_shared if is_own else self.log.add_remote)(self, access, index, active)
        if self.async_order:
            self.async_order.access(access, index, active)
        return index

    def format_shared_location(self, offset: int, width: int = 4) -> str:
        e = find_extent(self.run.shared_extents, offset)
        return f"{mark_name(e.name)}{format_index(e.index(offset, width))}" if e else "shared memory"

    def load_param(self, access: Access, address):
        access.tensor = self.run.param_extent
        data, _, _ = access.get_views(self.param_space)
        top = max(len(self.param_space.data) // access.nbytes - 1, 0)
        return split_elements(
            access, data[np.minimum(np.asarray(address).astype(np.int64) >> access.shift, top)]
        )

    def get_window(self, access: Access, address):
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

    def split_by_window(self, access: Access, address, active):
        """Split generic addresses by window: yield (mask of threads, their positions, the access in the
        window's state space, their addresses in it)."""
        name, window = self.get_window(access, address)
        if name is not None:
            yield slice(None), active, access.with_space(name), address - np.uint64(window)
            return
        positions = self.get_positions(active)
        top = address >> np.uint64(56)
        for value in np.unique(top):
            part = top == value
            yield from (
                (part, *rest) for _, *rest in self.split_by_window(access, address[part], positions[part])
            )

    def load_generic(self, access: Access, address, active):
        out = None
        for part, positions, space_access, offset in self.split_by_window(access, address, active):
            loaded = self.load(space_access, offset, positions)
            if isinstance(part, slice):
                return loaded
            if out is None:
                out = [np.zeros(len(address), f"u{access.width}") for _ in range(access.count)]
            for k in range(access.count):
                out[k][part] = loaded if access.count == 1 else loaded[k]
        assert out is not None  # there are threads
        return out[0] if access.count == 1 else out

    def store_generic(self, access: Access, address, value, active):
        for part, positions, space_access, offset in self.split_by_window(access, address, active):
            parts = [x[part] if x.ndim else x for x in (value if access.count > 1 else (value,))]
            self.store(space_access, offset, tuple(parts) if access.count > 1 else parts[0], positions)


def get_range(address: np.ndarray | np.generic) -> tuple[int, int]:
    return (int(address), int(address)) if address.ndim == 0 else (int(address.min()), int(address.max()))


def split_elements(access: Access, value):
    if access.count == 1:
        return value
    return list(value) if value.ndim == 1 else list(np.ascontiguousarray(value.T))
