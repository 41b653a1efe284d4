"""Bulk copies and the Tensor Memory Accelerator (TMA): one instruction copies a byte range or a tile.

A copy is executed when it is issued: it reads its source and completes at its mbarrier at once.
async_order.py checks that threads wait for every copy.

Addresses, layouts and completion follow the PTX manual's "cp.async.bulk" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.vgpu.checks.findings import format_count
from harness.vgpu.memory.access import PARAM_WINDOW, Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.memory.tensor_map import ELEMENT_TYPES, ENCODED_BYTES, TensorMap, swizzle_address

from .warp import WarpOps, update_atomically

u8 = np.uint64
CHUNK_BYTES = 16  # bytes per access to shared memory


class Target(NamedTuple):
    """The destination of a copy into shared memory: a thread block of the batch, an offset, and the mbarrier
    that it signals."""

    block: int
    offset: int
    barrier: MBarrier | None
    location: int


class BulkCopyOps(WarpOps):
    """The bulk copies of a batch; each active thread issues one per instruction."""

    # -- tensor maps ----------------------------------------------------------------------------------------
    def read_tensor_map(self, instr, address: int, count: int, position: int) -> TensorMap | None:
        """Return the tensor map at a generic address; report a missing map or a wrong rank."""
        if address >= PARAM_WINDOW:
            offset = address - PARAM_WINDOW
            data = self.run._param_bytes[offset : offset + ENCODED_BYTES]
        else:
            offset = address - self.arena.base
            data = (
                self.arena.data[offset : offset + ENCODED_BYTES].tobytes()
                if 0 <= offset <= self.arena.size - ENCODED_BYTES
                else b""
            )
        tensor_map = TensorMap.decode(data)
        if tensor_map is None or len(tensor_map.dims) != count:
            subject = "there is no tensor map"
            if tensor_map:
                subject = f"the tensor map has {len(tensor_map.dims)} dimensions"
            supplied = f"{format_count(count, 'coordinate is', 'coordinates are')} given"
            message = f"{subject} at {address:#x}; {supplied}"
            self.run.record_at(self, position, "not a tensor map", instr, message)
            return None
        return tensor_map

    def iterate_valid_tiles(self, instr, map_address, coordinates, active):
        """Yield (index, position, map, coordinates) of every thread whose tensor map is valid."""
        positions = self.get_positions(active)
        maps = np.broadcast_to(map_address, len(positions)).tolist()
        axes = [np.broadcast_to(c, len(positions)).view(np.int32).tolist() for c in coordinates]
        for k, position in enumerate(positions.tolist()):
            tensor_map = self.read_tensor_map(instr, maps[k], len(axes), position)
            if tensor_map is not None:
                inner, width = axes[0][k], tensor_map.width
                if inner * width % CHUNK_BYTES:
                    subject = f"innermost coordinate, {inner}, times the {width} bytes of an element"
                    self.run.report_misaligned_copy(self, instr, position, inner * width, subject)
                yield k, position, tensor_map, tuple(c[k] for c in axes)

    def load_tile(self, load: dict[int, Access], tile: TensorMap, corner, position: int) -> np.ndarray:
        """Return the bytes of a tile, unswizzled: uint8 [rows, bytes of a row]."""
        address, inside = tile.compute_elements(corner)
        width = tile.width
        if inside.all():  # in 16-byte chunks: addresses, strides and row lengths are multiples of 16
            starts = address[:, :: CHUNK_BYTES // width]
            if (starts % CHUNK_BYTES == 0).all():
                columns = self.load(
                    load[CHUNK_BYTES], starts.reshape(-1).view(u8), np.full(starts.size, position)
                )
                return np.stack(list(columns), axis=1).view(np.uint8).reshape(len(address), -1)
        data = np.full(address.shape, tile.fill, f"u{width}")
        if inside.any():
            addresses = address[inside].view(u8)
            data[inside] = self.load(load[width], addresses, np.full(len(addresses), position))
        return data.view(np.uint8)

    # -- shared memory --------------------------------------------------------------------------------------
    def compute_chunk_index(
        self, access: Access, block: int, offset: int, nbytes: int, tile: TensorMap | None, position: int
    ):
        """Return the locations, in 16-byte units, of a byte range or tile in a block's shared memory."""
        address = offset + CHUNK_BYTES * np.arange(nbytes // CHUNK_BYTES)
        if tile is not None:
            row = tile.width * tile.box[0] // CHUNK_BYTES  # units per row
            unit = np.arange(len(address))
            address = swizzle_address(
                offset + unit // row * tile.pitch + unit % row * CHUNK_BYTES, tile.swizzle
            )
        count = len(address)
        base = np.zeros(self.num_threads, np.int64)
        base[position] = block * self.shared_size
        if offset % (CHUNK_BYTES if tile is None else 128):
            self.run.report_misaligned_copy(self, access.instr, position, offset, "address in shared memory")
            address &= ~15
        return self.get_offset_index(access, address, base, self.run.shared_extents, np.full(count, position))

    def write_shared(
        self, access: Access, block: int, offset: int, data: np.ndarray, tile: TensorMap | None, position: int
    ):
        """Write a multiple of 16 bytes to shared memory; return the locations in 16-byte units."""
        chunks = np.ascontiguousarray(data).reshape(-1, CHUNK_BYTES).view(u8)
        index = self.compute_chunk_index(access, block, offset, data.size, tile, position)
        cells, written, full = access.get_views(self.shared_space)
        cells[index], written[index] = chunks, full
        return index

    def read_shared(
        self, access: Access, block: int, offset: int, nbytes: int, tile: TensorMap | None, position: int
    ):
        """Read shared memory; return (bytes, locations in 16-byte units)."""
        index = self.compute_chunk_index(access, block, offset, nbytes, tile, position)
        cells, written, full = access.get_views(self.shared_space)
        if self.checks.uninitialised:
            state = written[index] != full
            if state.any():
                self.run.report_unwritten(self, access, state, index, np.full(len(index), position))
        return cells[index].view(np.uint8).reshape(-1), index

    def find_targets(
        self, access: Access, position: int, location: int, barrier: int, mask: int | None
    ) -> list[Target]:
        """Return the destinations of a thread's copy: one thread block, or with a multicast mask several."""
        own_block, size, rank = int(self.block_of[position]), self.run.cluster_size, location >> 24
        first = own_block - own_block % size
        ranks = [own_block - first if rank == 0 else rank - 1]
        if mask is not None:
            ranks = [r for r in range(size) if mask >> r & 1]
        targets = []
        per_block = self.shared_size >> access.shift  # mbarrier locations per thread block
        for r in ranks:
            block = first + min(r, size - 1)
            target_barrier = barrier if mask is None else block * per_block + barrier % per_block
            state = self.mbarriers.get(target_barrier)
            if state is None:
                self.run.report_uninitialised_mbarrier(self, access, position, 1)
            targets.append(Target(block, location & 0xFFFFFF, state, target_barrier))
        return targets

    def get_destinations(
        self, access: Access, location, barrier, mask, active
    ) -> list[tuple[int, int, int | None]]:
        """Return each thread's (address in shared memory, location of the mbarrier, multicast mask)."""
        barriers, _ = self.get_remote_index(access, barrier, active)
        masks = [None] * len(barriers) if mask is None else np.broadcast_to(mask, len(barriers)).tolist()
        addresses = np.broadcast_to(location, len(barriers)).tolist()
        return list(zip(addresses, barriers.tolist(), masks, strict=True))

    def write_targets(
        self, store: Access, barrier_access: Access, targets: list[Target], data: np.ndarray,
        tile: TensorMap | None, position: int,
    ):  # fmt: skip
        """Write one copy's bytes to its targets, and signal their mbarriers."""
        for t in targets:
            index = self.write_shared(store, t.block, t.offset, data, tile, position)
            if self.async_order:
                self.async_order.start_copy(store.instr, position, index, t.barrier)
            if t.barrier is not None:
                t.barrier.pending_bytes -= data.size
                self.end_phase_if_complete(barrier_access, t.location, t.barrier)

    # -- tiles of tensors -----------------------------------------------------------------------------------
    def tensor_load(
        self, load: dict[int, Access], store: Access, barrier_access: Access, location, maps, coordinates,
        barrier, mask, active,
    ):  # fmt: skip
        """Execute cp.async.bulk.tensor from global to shared memory."""
        destinations = self.get_destinations(barrier_access, location, barrier, mask, active)
        for k, position, tile, corner in self.iterate_valid_tiles(store.instr, maps, coordinates, active):
            data = self.load_tile(load, tile, corner, position)
            self.write_targets(
                store, barrier_access, self.find_targets(barrier_access, position, *destinations[k]), data,
                tile, position,
            )  # fmt: skip
        self.pass_phases()

    def tensor_store(
        self, load: Access, store: dict[int, Access], source, maps, coordinates, op: str | None, active
    ):
        """Execute cp.async.bulk.tensor from shared to global memory, or cp.reduce.async.bulk.tensor with
        `op`."""
        sources = np.broadcast_to(source, len(self.get_positions(active))).tolist()
        for k, position, tile, corner in self.iterate_valid_tiles(load.instr, maps, coordinates, active):
            offset = sources[k]
            block = int(self.block_of[position])
            data, index = self.read_shared(load, block, offset, tile.nbytes, tile, position)
            if self.async_order:
                self.async_order.start_bulk_store(load.instr, position, index)
            address, inside = tile.compute_elements(corner, is_store=True)
            values = data.view(f"u{tile.width}").reshape(address.shape)[inside]
            self.write_global(
                store[tile.width], ELEMENT_TYPES[tile.data_type][1], address[inside].view(u8), values, op,
                position,
            )  # fmt: skip

    def write_global(self, store: Access, kind: str, address, values, op: str | None, position: int):
        if not len(address):
            return
        positions = np.full(len(address), position)
        if op is None:
            self.store(store, address, values, positions)
            return
        index = self.get_global_index(store, address, positions)
        data, written, full = store.get_views(self.global_space)
        if self.checks.uninitialised and not (written[index] == full).all():
            self.run.report_unwritten(self, store, written[index] != full, index, positions)
        written[index] = full
        update_atomically(data, index, op, kind, [values], False)

    # -- byte ranges ----------------------------------------------------------------------------------------
    def bulk_load(
        self, load: Access, store: Access, barrier_access: Access, location, source, nbytes, barrier, mask,
        shared: bool, active,
    ):  # fmt: skip
        """Execute cp.async.bulk into shared memory from global or (`shared`) the block's shared memory."""
        positions = self.get_positions(active)
        destinations = self.get_destinations(barrier_access, location, barrier, mask, active)
        source, nbytes = (np.broadcast_to(x, len(positions)) for x in (source, nbytes))
        for k, position in enumerate(positions.tolist()):
            size = self.check_bulk_size(store, position, int(nbytes[k]))
            if shared:
                block = int(self.block_of[position])
                data, index = self.read_shared(load, block, int(source[k]), size, None, position)
                if self.async_order:
                    self.async_order.start_bulk_store(
                        load.instr, position, index, self.mbarriers.get(destinations[k][1])
                    )
            else:
                addresses = source[k].astype(u8) + u8(CHUNK_BYTES) * np.arange(size // CHUNK_BYTES, dtype=u8)
                columns = self.load(load, addresses, np.full(len(addresses), position))
                data = np.stack(list(columns), axis=1).view(np.uint8).reshape(-1)
            self.write_targets(
                store, barrier_access, self.find_targets(barrier_access, position, *destinations[k]), data,
                None, position,
            )  # fmt: skip
        self.pass_phases()

    def bulk_store(
        self, load: Access, store: Access, target, source, nbytes, op: str | None, kind: str, active
    ):
        """Execute cp.async.bulk and cp.reduce.async.bulk from shared to global memory."""
        positions = self.get_positions(active)
        target, source, nbytes = (np.broadcast_to(x, len(positions)) for x in (target, source, nbytes))
        for k, position in enumerate(positions.tolist()):
            size = self.check_bulk_size(store, position, int(nbytes[k]))
            block = int(self.block_of[position])
            data, index = self.read_shared(load, block, int(source[k]), size, None, position)
            if self.async_order:
                self.async_order.start_bulk_store(load.instr, position, index)
            addresses = target[k].astype(u8) + u8(store.width) * np.arange(size // store.width, dtype=u8)
            self.write_global(store, kind, addresses, data.view(f"u{store.width}"), op, position)

    def check_bulk_size(self, access: Access, position: int, size: int) -> int:
        """Return a copy's size rounded down to a multiple of 16 bytes; report one that is not."""
        if size % CHUNK_BYTES:
            self.run.report_misaligned_copy(self, access.instr, position, size, "size")
        return size // CHUNK_BYTES * CHUNK_BYTES

    def bulk_commit(self, active):
        if self.async_order:
            self.async_order.bulk_commit(self.get_positions(active))

    def bulk_wait(self, allowed: int, active):
        """Execute cp.async.bulk.wait_group (or .read): wait for all but the newest `allowed` groups."""
        if self.async_order:
            self.async_order.bulk_wait(self.get_positions(active), allowed)
