"""Device memory: one flat arena, the exact bounds of its tensors, and a mask of written bytes.

Every allocation is followed by a guard zone, so that a small overrun never reaches the next tensor.
"""

from __future__ import annotations

import bisect
import math
import mmap
import sys
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 256
MIN_GUARD_BYTES, MAX_GUARD_BYTES = 512, 1 << 16
NULL_PAGE = 4096  # addresses below are never valid
DEFAULT_BASE = 0x7000_0000_0000
DEFAULT_SIZE = 8 << 30
ITEMSIZE = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2}
ITEMSIZE |= {"bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(slots=True, eq=False)
class Extent:
    """A range of addresses that may be accessed: a tensor, a module variable, or a shared variable.

    Attributes:
        fully_written: Whether every byte has been written, so that reads need no check.
        write_violation: Kind of the finding for a forbidden write: any write to a constant or an input, or an
            atomic on a result that must be summed in a fixed order; "" if all writes are allowed.
        written: Whether the current launch has written to it.
        last_writer: Name of the last kernel that wrote to it.
    """

    start: int
    end: int
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    fully_written: bool = False
    write_violation: str = ""
    written: bool = False
    last_writer: str = ""
    allocation: int = 0

    def index(self, address: int, width: int) -> int | tuple[int, ...]:
        """Return the element index of an address: a tuple if the shape is known, else a flat number."""
        size = ITEMSIZE.get(self.dtype, width)
        flat = (address - self.start) // size
        if not self.shape or not 0 <= flat < math.prod(self.shape):
            return flat
        out = []
        for dim in reversed(self.shape):
            flat, last = divmod(flat, dim)
            out.append(last)
        return tuple(reversed(out))


NO_EXTENT = Extent(1 << 62, 0)


def find_extent(extents: list[Extent], address: int) -> Extent | None:
    return next((e for e in extents if e.start <= address < e.end), None)


Views = tuple[np.ndarray, np.ndarray, np.generic]
"""The data, the written mask, and the mask's value for a completely written element."""


class Space:
    """Memory with views by element size. `data` is uint8, its length a multiple of 64; `written` is the mask
    of written bytes."""

    def __init__(self, data: np.ndarray, written: np.ndarray):
        self.data, self.written = data, written
        self._views: dict[tuple[int, int], Views] = {}

    def get_views(self, width: int, count: int) -> Views:
        """Return the views for accesses of `count` elements of `width` bytes.

        With count > 1 the data view has rows of `count` elements.
        """
        views = self._views.get((width, count))
        if views is None:
            nbytes = width * count
            data = self.data[: len(self.data) // nbytes * nbytes].view(f"u{width}")
            if count > 1:
                data = data.reshape(-1, count)
            unit = min(nbytes, 8)
            written = self.written[: len(self.written) // nbytes * nbytes].view(f"u{unit}")
            full = np.dtype(f"u{unit}").type(int("01" * unit, 16))
            if nbytes > 8:
                written = written.reshape(-1, nbytes // 8)
            views = self._views[width, count] = (data, written, full)
        return views


def reserve_memory(nbytes: int) -> np.ndarray:
    """Return zeroed bytes whose pages are allocated on first use."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flags |= getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


class OutOfSpace(Exception):
    """Raised for an allocation that does not fit."""


class Arena:
    """Global memory: allocations with guard zones, and the exact bounds of their tensors."""

    def __init__(self, memory=None, base: int = DEFAULT_BASE, size: int = DEFAULT_SIZE):
        if memory is None:
            memory = reserve_memory(size)
        elif not isinstance(memory, np.ndarray):
            memory = np.frombuffer(memory, np.uint8)
        memory = memory.view(np.uint8).reshape(-1)
        self.base = base
        self.size = len(memory)
        self.space = Space(memory, reserve_memory(-(-self.size // 4096) * 4096)[: self.size])
        self.data, self.written = self.space.data, self.space.written
        # Out-of-bounds accesses are redirected to a page outside all tensors.
        self.sink = ALIGNMENT * 16
        self.first_offset = 2 * NULL_PAGE
        self.written[self.sink : self.sink + 4096] = 1
        self._free: list[tuple[int, int]] = [
            (self.first_offset, self.size - self.first_offset)
        ]  # (offset, bytes)
        self._allocations: dict[int, tuple[int, int]] = {}  # address -> (reserved bytes, requested bytes)
        self._addresses: list[int] = []  # allocation addresses in ascending order
        self.extents: list[Extent] = []
        self._starts: list[int] = []
        self._arrays = None

    # -- allocation -----------------------------------------------------------------------------------------
    def allocate(self, nbytes: int, name: str = "") -> int:
        """Allocate and return an address that is a multiple of 256. Raises OutOfSpace."""
        guard = min(max(nbytes, MIN_GUARD_BYTES), MAX_GUARD_BYTES)
        reserved = -(-(max(nbytes, 1) + guard) // ALIGNMENT) * ALIGNMENT
        for k, (offset, free) in enumerate(self._free):
            if free >= reserved:
                self._free[k : k + 1] = [(offset + reserved, free - reserved)] if free > reserved else []
                break
        else:
            raise OutOfSpace
        address = self.base + offset
        self._allocations[address] = (reserved, nbytes)
        bisect.insort(self._addresses, address)
        self.written[offset : offset + reserved] = 0
        self._add_extent(
            Extent(address, address + nbytes, name or f"buffer{len(self._allocations)}", allocation=address)
        )
        return address

    def free(self, address: int) -> bool:
        """Free an allocation; return False if there is none at this address."""
        block = self._allocations.pop(address, None)
        if block is None:
            return False
        self._addresses.remove(address)
        self.extents = [e for e in self.extents if e.allocation != address]
        self._sort_extents()
        bisect.insort(self._free, (address - self.base, block[0]))
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged
        return True

    def label(self, address: int, nbytes: int, name: str, shape=(), dtype: str = ""):
        """Mark [address, address + nbytes) as one exact tensor. The rest of its allocation stays accessible,
        except gaps of less than 256 bytes, which are padding and become guard zones."""
        start, end = address, address + nbytes
        extents, allocation_address = [], 0
        for e in self.extents:
            if e.end <= start or e.start >= end or e.start == e.end:
                if not (e.start == e.end == start):
                    extents.append(e)
                continue
            allocation_address = e.allocation
            for low, high in ((e.start, min(start, e.end)), (max(end, e.start), e.end)):
                if high - low >= ALIGNMENT:
                    extents.append(Extent(low, high, e.name, allocation=e.allocation))
        self.extents = extents
        self._add_extent(Extent(start, end, name, tuple(shape), str(dtype), allocation=allocation_address))
        self.update_fully_written(start, nbytes)

    def _add_extent(self, extent: Extent):
        self.extents.append(extent)
        self._sort_extents()

    def _sort_extents(self):
        self.extents.sort(key=lambda e: (e.start, e.end))
        self._starts = [e.start for e in self.extents]
        self._arrays = None

    def find(self, address: int) -> Extent | None:
        k = bisect.bisect_right(self._starts, address) - 1
        if k >= 0 and address < self.extents[k].end:
            return self.extents[k]
        return None

    def get_contents(self) -> list[np.ndarray]:
        return [self.data[e.start - self.base : e.end - self.base] for e in self.extents]

    def snapshot(self, e: Extent) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return copies of a tensor's bytes and written mask, and whether it was fully written."""
        region = slice(e.start - self.base, e.end - self.base)
        return self.data[region].copy(), self.written[region].copy(), e.fully_written

    def restore(self, e: Extent, snapshot: tuple[np.ndarray, np.ndarray, bool]) -> None:
        region = slice(e.start - self.base, e.end - self.base)
        self.data[region], self.written[region], e.fully_written = snapshot

    def find_nearest(self, address: int) -> Extent | None:
        """Return the last tensor before an out-of-bounds address, or the first if there is none."""
        if not self.extents:
            return None
        k = bisect.bisect_right(self._starts, address) - 1
        return self.extents[max(k, 0)]

    def locate(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each uint64 address, index and end of the last tensor that starts at or below it."""
        if self._arrays is None:
            starts = np.array(self._starts or [1 << 62], np.uint64)
            ends = np.array([e.end for e in self.extents] or [0], np.uint64)
            self._arrays = starts, ends
        starts, ends = self._arrays
        k = np.searchsorted(starts, addresses, "right") - 1
        inside = np.maximum(k, 0)
        return inside, np.where(k >= 0, ends[inside], np.uint64(0))

    # -- host access ----------------------------------------------------------------------------------------
    def get_offset(self, address: int, nbytes: int) -> int | None:
        """Return the byte offset in the arena, or None if the range is not inside one allocation."""
        if nbytes == 0:
            return max(address - self.base, 0)
        k = bisect.bisect_right(self._addresses, address) - 1
        if k < 0:
            return None
        start = self._addresses[k]
        if address + nbytes > start + self._allocations[start][1]:
            return None
        return address - self.base

    def update_fully_written(self, address: int, nbytes: int):
        """Recompute `fully_written` for the tensors in a range after a write by the host or a kernel."""
        k = max(bisect.bisect_right(self._starts, address) - 1, 0)
        while k < len(self.extents) and self.extents[k].start < address + nbytes:
            e = self.extents[k]
            if not e.fully_written and e.end > address:
                e.fully_written = bool(self.written[e.start - self.base : e.end - self.base].all())
            k += 1

    def find_unwritten(self, address: int, nbytes: int) -> np.ndarray:
        """Return the offsets of unwritten bytes, relative to `address`."""
        start = address - self.base
        return np.flatnonzero(self.written[start : start + nbytes] == 0)
