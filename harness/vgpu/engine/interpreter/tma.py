"""Bulk copies and the tensor memory accelerator (TMA): byte ranges, and tiles of a tensor, by one
instruction.

A copy is executed when it is issued: it reads its source then, and its mbarrier gets the bytes. order.py
checks that every copy is waited for.

Addresses, layouts and completion are those of the PTX manual, "cp.async.bulk" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.vgpu.checks.findings import plural
from harness.vgpu.memory.access import PARAM_WINDOW, Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.memory.tensor_map import BYTES, ELEMENTS, TensorMap, swizzle_address

from .warp import WarpOps, atomic_update

u8 = np.uint64
CHUNK = 16  # bytes: shared memory is read and written in units of this


class Target(NamedTuple):
    """The destination of a copy into shared memory: a thread block of the batch, an offset in it, and its
    mbarrier."""

    block: int
    offset: int
    barrier: MBarrier | None
    place: int


class BulkOps(WarpOps):
    """Bulk copies of a batch. Each active thread issues its own."""

    def start_bulk(self):
        self.maps: dict[bytes, TensorMap | None] = {}

    # -- tensor maps ----------------------------------------------------------------------------------------
    def tensor_map(self, instr, address: int, count: int, position: int) -> TensorMap | None:
        """Return the map at a generic address; report what is not a map, or has another number of dimensions."""
        if address >= PARAM_WINDOW:
            at = address - PARAM_WINDOW
            data = self.run._param_bytes[at : at + BYTES]
        else:
            at = address - self.arena.base
            data = self.arena.data[at : at + BYTES].tobytes() if 0 <= at <= self.arena.size - BYTES else b""
        if data not in self.maps:
            self.maps[data] = TensorMap.decode(data) if len(data) == BYTES else None
        tensor_map = self.maps[data]
        if tensor_map is None or len(tensor_map.dims) != count:
            what = (
                "there is no tensor map"
                if tensor_map is None
                else f"the tensor map has {len(tensor_map.dims)} dimensions"
            )
            message = f"{what} at {address:#x}; {plural(count, 'coordinate is', 'coordinates are')} given"
            self.run.at(self, position, "not a tensor map", instr, message)
            return None
        return tensor_map

    def valid_tiles(self, instr, map_address, coordinates, L):
        """Yield (position, map, coordinates) of every thread whose tensor map is valid."""
        P = self.positions(L)
        maps = np.broadcast_to(map_address, len(P)).tolist()
        at = [np.broadcast_to(c, len(P)).view(np.int32).tolist() for c in coordinates]
        for k, position in enumerate(P.tolist()):
            tensor_map = self.tensor_map(instr, maps[k], len(at), position)
            if tensor_map is not None:
                if at[0][k] * tensor_map.width % CHUNK:
                    what = (
                        f"innermost coordinate, {at[0][k]}, times the {tensor_map.width} bytes of an element"
                    )
                    self.run.misaligned_copy(self, instr, position, at[0][k] * tensor_map.width, what)
                yield k, position, tensor_map, tuple(c[k] for c in at)

    def load_tile(self, R: dict[int, Access], box: TensorMap, at, position: int) -> np.ndarray:
        """Return the bytes of a tile as in shared memory without a swizzle: uint8 [rows, bytes of a row]."""
        address, inside = box.elements(at)
        width = box.width
        if inside.all():  # whole units of 16 bytes, because everything in a map is a multiple of that
            starts = address[:, :: CHUNK // width]
            if (starts % CHUNK == 0).all():
                some = self.load(R[CHUNK], starts.reshape(-1).view(u8), np.full(starts.size, position))
                return np.stack(list(some), axis=1).view(np.uint8).reshape(len(address), -1)
        data = np.full(address.shape, box.fill, f"u{width}")
        if inside.any():
            places = address[inside].view(u8)
            data[inside] = self.load(R[width], places, np.full(len(places), position))
        return data.view(np.uint8)

    # -- shared memory --------------------------------------------------------------------------------------
    def chunk_index(
        self, A: Access, block: int, offset: int, nbytes: int, box: TensorMap | None, position: int
    ):
        """Return the locations, in units of 16 bytes, of a byte range or a tile at an offset in a thread
        block."""
        address = offset + CHUNK * np.arange(nbytes // CHUNK)
        if box is not None:
            row = box.width * box.box[0] // CHUNK  # units of a row
            unit = np.arange(len(address))
            address = swizzle_address(offset + unit // row * box.pitch + unit % row * CHUNK, box.swizzle)
        count = len(address)
        base = np.zeros(self.n, np.int64)
        base[position] = block * self.shared_size
        if offset % (CHUNK if box is None else 128):
            self.run.misaligned_copy(self, A.instr, position, offset, "address in shared memory")
            address &= ~15
        return self.offset_index(A, address, base, self.run.shared_extents, np.full(count, position))

    def put_shared(
        self, A: Access, block: int, offset: int, data: np.ndarray, box: TensorMap | None, position: int
    ):
        """Write bytes, a multiple of 16, into shared memory. Return the locations in units of 16 bytes."""
        chunks = np.ascontiguousarray(data).reshape(-1, CHUNK).view(u8)
        index = self.chunk_index(A, block, offset, data.size, box, position)
        cells, written, full = A.views(self.shared_space)
        cells[index], written[index] = chunks, full
        return index

    def get_shared(
        self, A: Access, block: int, offset: int, nbytes: int, box: TensorMap | None, position: int
    ):
        """Return (bytes read from shared memory, locations in units of 16 bytes)."""
        index = self.chunk_index(A, block, offset, nbytes, box, position)
        cells, written, full = A.views(self.shared_space)
        if self.checks.uninitialised:
            state = written[index] != full
            if state.any():
                self.run.report_unwritten(self, A, state, index, np.full(len(index), position))
        return cells[index].view(np.uint8).reshape(-1), index

    def targets(self, A: Access, position: int, place: int, barrier: int, mask: int | None) -> list[Target]:
        """Return the destinations of a thread's copy: one thread block, or several of its cluster."""
        own, size = int(self.block_of[position]), self.run.cluster_size
        first = own - own % size
        rank = place >> 24
        if mask is None:
            ranks = [own - first if rank == 0 else rank - 1]
        else:
            ranks = [r for r in range(size) if mask >> r & 1]
        out = []
        per_block = self.shared_size >> A.shift  # places of mbarriers in one thread block
        for r in ranks:
            block = first + min(r, size - 1)
            there = barrier if mask is None else block * per_block + barrier % per_block
            state = self.mbarriers.get(there)
            if state is None:
                self.run.mbarrier_unready(self, A, position, 1)
            out.append(Target(block, place & 0xFFFFFF, state, there))
        return out

    def destinations(self, A: Access, place, barrier, mask, L) -> list[tuple[int, int, int | None]]:
        """Return (address in shared memory, location of the mbarrier, thread blocks of a multicast) of each
        thread."""
        barriers = self.barrier_places(A, barrier, L)
        masks = [None] * len(barriers) if mask is None else np.broadcast_to(mask, len(barriers)).tolist()
        places = np.broadcast_to(place, len(barriers)).tolist()
        return list(zip(places, barriers.tolist(), masks, strict=True))

    def write_targets(
        self,
        W: Access,
        B: Access,
        targets: list[Target],
        data: np.ndarray,
        box: TensorMap | None,
        position: int,
    ):
        """Write the bytes of one copy to its targets, and complete them at the mbarriers."""
        for t in targets:
            index = self.put_shared(W, t.block, t.offset, data, box, position)
            if self.order:
                self.order.start_copy(W.instr, position, index, t.barrier)
            if t.barrier is not None:
                t.barrier.bytes -= data.size
                self.finish_phase(B, t.place, t.barrier)

    # -- boxes of tensors -----------------------------------------------------------------------------------
    def tensor_load(
        self, R: dict[int, Access], W: Access, B: Access, place, maps, coordinates, barrier, mask, L
    ):
        """Execute cp.async.bulk.tensor from global to shared memory."""
        goes = self.destinations(B, place, barrier, mask, L)
        for k, position, box, at in self.valid_tiles(W.instr, maps, coordinates, L):
            data = self.load_tile(R, box, at, position)
            self.write_targets(W, B, self.targets(B, position, *goes[k]), data, box, position)
        self.pass_phases()

    def tensor_store(self, R: Access, W: dict[int, Access], source, maps, coordinates, op: str | None, L):
        """Execute cp.async.bulk.tensor from shared to global memory, or cp.reduce.async.bulk.tensor with an
        operation."""
        sources = np.broadcast_to(source, len(self.positions(L))).tolist()
        for k, position, box, at in self.valid_tiles(R.instr, maps, coordinates, L):
            offset = sources[k]
            block = int(self.block_of[position])
            data, index = self.get_shared(R, block, offset, box.nbytes, box, position)
            if self.order:
                self.order.start_bulk_store(R.instr, position, index)
            address, inside = box.elements(at, stored=True)
            values = data.view(f"u{box.width}").reshape(address.shape)[inside]
            self.put_global(
                W[box.width], ELEMENTS[box.kind][1], address[inside].view(u8), values, op, position
            )

    def put_global(self, W: Access, kind: str, address, values, op: str | None, position: int):
        """Store elements, or reduce them into memory."""
        if not len(address):
            return
        positions = np.full(len(address), position)
        if op is None:
            self.store(W, address, values, positions)
            return
        index = self.global_index(W, address, positions)
        data, written, full = W.views(self.global_space)
        if self.checks.uninitialised and not (written[index] == full).all():
            self.run.report_unwritten(self, W, written[index] != full, index, positions)
        written[index] = full
        atomic_update(data, index, op, kind, [values], False)

    # -- runs of bytes --------------------------------------------------------------------------------------
    def bulk_load(
        self, R: Access, W: Access, B: Access, place, source, nbytes, barrier, mask, shared: bool, L
    ):
        """Execute cp.async.bulk into shared memory: from global memory, or (`shared`) from the block's own."""
        P = self.positions(L)
        goes = self.destinations(B, place, barrier, mask, L)
        source, nbytes = (np.broadcast_to(x, len(P)) for x in (source, nbytes))
        for k, position in enumerate(P.tolist()):
            size = self.bulk_size(W, position, int(nbytes[k]))
            if shared:
                block = int(self.block_of[position])
                data, index = self.get_shared(R, block, int(source[k]), size, None, position)
                if self.order:
                    self.order.start_bulk_store(R.instr, position, index, self.mbarriers.get(goes[k][1]))
            else:
                at = source[k].astype(u8) + u8(CHUNK) * np.arange(size // CHUNK, dtype=u8)
                some = self.load(R, at, np.full(len(at), position))
                data = np.stack(list(some), axis=1).view(np.uint8).reshape(-1)
            self.write_targets(W, B, self.targets(B, position, *goes[k]), data, None, position)
        self.pass_phases()

    def bulk_store(self, R: Access, W: Access, target, source, nbytes, op: str | None, kind: str, L):
        """Execute cp.async.bulk and cp.reduce.async.bulk from shared to global memory."""
        P = self.positions(L)
        target, source, nbytes = (np.broadcast_to(x, len(P)) for x in (target, source, nbytes))
        for k, position in enumerate(P.tolist()):
            size = self.bulk_size(W, position, int(nbytes[k]))
            block = int(self.block_of[position])
            data, index = self.get_shared(R, block, int(source[k]), size, None, position)
            if self.order:
                self.order.start_bulk_store(R.instr, position, index)
            at = target[k].astype(u8) + u8(W.width) * np.arange(size // W.width, dtype=u8)
            self.put_global(W, kind, at, data.view(f"u{W.width}"), op, position)

    def bulk_size(self, A: Access, position: int, size: int) -> int:
        """Return the bytes of a copy, checked to be a multiple of 16."""
        if size % CHUNK:
            self.run.misaligned_copy(self, A.instr, position, size, "size")
        return size // CHUNK * CHUNK

    def bulk_commit(self, L):
        if self.order:
            self.order.bulk_commit(self.positions(L))

    def bulk_wait(self, allowed: int, L):
        """Execute cp.async.bulk.wait_group: wait for all but the newest `allowed` groups, or for their reads."""
        if self.order:
            self.order.bulk_wait(self.positions(L), allowed)
