"""Record every memory access of a launch, for pictures and for tracing wrong values.

Steps are in the execution order of the virtual GPU; a GPU may execute blocks and warps in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.vgpu.memory.access import Access
from harness.vgpu.memory.arena import ITEMSIZE, Extent
from harness.vgpu.ptx.parser import Instr

# Without a dtype, 4- and 8-byte elements are decoded as floats if most have magnitudes in this range.
PLAUSIBLE_MAGNITUDES = (1e-12, 1e12)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory that a launch accesses: `space` is "global" or "shared" (one copy in each block).

    An unknown `shape` is empty, an unknown `dtype` "". `itemsize` is in bytes, `size` the number of elements.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """One memory instruction, executed by some threads at once.

    `kind` is "R" (read), "W" (write) or "A" (atomic) for an access to `tensor`, or "barrier". Its accesses
    are rows `first` to `last` (exclusive) of `Events`, `count` per thread.
    """

    kind: str
    tensor: str
    instr: Instr | None
    first: int
    last: int
    count: int = 1


@dataclass
class Events:
    """All accesses of a launch, as columns with one row per element and thread.

    Attributes:
        steps: Instructions in execution order.
        tensors: The tensors they access, by name.
        block, thread: Linear indices in the grid and in the block, x fastest. int32
        element: Index into the step's tensor; negative or beyond its size if out of bounds. int64
        value: The value read, stored or (by an atomic) added, NaN if unknown. float64
        dropped: Number of accesses beyond the limit, which were not recorded.
    """

    steps: list[Step]
    tensors: dict[str, Tensor]
    block: np.ndarray
    thread: np.ndarray
    element: np.ndarray
    value: np.ndarray
    dropped: int = 0

    @property
    def step(self) -> np.ndarray:
        """The index of each access's step. int32"""
        lengths = [step.last - step.first for step in self.steps]
        return np.repeat(np.arange(len(self.steps), dtype=np.int32), lengths)


@dataclass
class _PendingAccess:
    """Recorded accesses whose values are added later: byte offsets in the tensor, and threads."""

    kind: str
    space: str
    extent: Extent
    access: Access
    positions: np.ndarray
    block: np.ndarray
    thread: np.ndarray
    byte: np.ndarray
    bits: np.ndarray | None = None


@dataclass
class EventRecorder:
    """Record at most `limit` accesses of one launch, and count the rest."""

    run: Any = field(repr=False)  # launch.Run, which imports this module
    limit: int
    entries: list[_PendingAccess | None] = field(default_factory=list)  # None: a barrier
    pending: list[_PendingAccess] = field(default_factory=list)
    float_sizes: dict[str, int] = field(default_factory=dict)
    recorded: int = 0
    dropped: int = 0

    # -- during the launch ----------------------------------------------------------------------------------
    def add(self, batch, access, tensor: Extent, index, active) -> None:
        """Record a global access that is about to execute; `index` is in units of the access size."""
        positions = batch.get_positions(active)
        byte = (np.broadcast_to(index, len(positions)) << access.shift) - (tensor.start - self.run.arena.base)
        self._record(batch, access, "global", tensor, positions, byte)

    def add_shared(self, batch, access, index, active) -> None:
        if access.space == "early":  # an asynchronous copy is recorded when it completes
            return
        positions = batch.get_positions(active)
        offset = (np.broadcast_to(index, len(positions)) << access.shift) - batch.shared_base[positions]
        for extent in self.run.shared_extents:
            inside = (offset >= extent.start) & (offset < extent.end)
            if inside.any():
                self._record(
                    batch, access, "shared", extent, positions[inside], offset[inside] - extent.start
                )

    def add_out_of_bounds(self, batch, access, extent: Extent, addresses, positions) -> None:
        """Record out-of-bounds accesses to a tensor, which the virtual GPU redirects."""
        space = "global" if access.space == "global" else "shared"
        self._record(batch, access, space, extent, positions, addresses.astype(np.int64) - extent.start)

    def add_values(self, batch, value, active, dtype: str = "") -> None:
        """Add the values of the last recorded accesses; `value` is 2D if each thread accesses several
        elements."""
        for entry in self.pending:
            value = np.asarray(value)
            count = entry.access.count
            shape = (batch.num_threads, count) if count > 1 else (batch.num_threads,)
            all_bits = np.zeros(shape, np.uint64)
            all_bits[batch.get_positions(active)] = value.view(f"u{value.dtype.itemsize}")
            entry.bits = all_bits[entry.positions]
            if dtype:
                self.float_sizes[entry.extent.name] = ITEMSIZE[dtype]
        self.pending = []

    def add_barrier(self) -> None:
        if self.entries and self.entries[-1] is not None:
            self.entries.append(None)

    def _record(self, batch, access, space: str, extent: Extent, positions, byte) -> None:
        if self.pending and self.pending[-1].access is not access:
            self.pending = []  # their values were never added
        count = len(positions) * access.count
        if self.recorded + count > self.limit:
            self.dropped += count
            return
        self.recorded += count
        kind = "R" if access.kind == "A" and access.instr.op == "ld" else access.kind
        kind = "W" if kind == "A" and access.instr.op == "st" else kind
        block, thread = batch.blocks[batch.block_of[positions]], batch.thread_of[positions]
        entry = _PendingAccess(kind, space, extent, access, positions, block, thread, byte)
        self.entries.append(entry)
        self.pending.append(entry)

    # -- after the launch -----------------------------------------------------------------------------------
    def finish(self) -> Events:
        """Return the events; an unlabelled tensor's element size is that of its smallest access."""
        tensors = {}
        for entry in filter(None, self.entries):
            extent, width = entry.extent, entry.access.width
            known = tensors.get(extent.name)
            itemsize = ITEMSIZE.get(extent.dtype) or min(width, known.itemsize if known else width)
            size = (extent.end - extent.start) // itemsize
            tensors[extent.name] = Tensor(
                extent.name, entry.space, tuple(extent.shape), extent.dtype, itemsize, size
            )
        # An empty column of each kind, for a launch without accesses.
        columns = [tuple(np.zeros(0, kind) for kind in (int, int, int, np.uint64, bool))]
        steps, first = [], 0
        for entry in self.entries:
            if entry is None:
                steps.append(Step("barrier", "", None, first, first))
                continue
            columns.append(_build_columns(entry, tensors[entry.extent.name].itemsize))
            last = first + len(columns[-1][0])
            access = entry.access
            steps.append(Step(entry.kind, entry.extent.name, access.instr, first, last, access.count))
            first = last
        block, thread, element, bits, known = map(np.concatenate, zip(*columns, strict=True))
        value = np.full(len(bits), np.nan)
        owner = np.repeat(
            np.array([step.tensor for step in steps], object), [step.last - step.first for step in steps]
        )
        for name, tensor in tensors.items():
            mask = (owner == name) & known
            value[mask] = decode_bits(bits[mask], tensor, float_like=name in self.float_sizes)
        return Events(
            steps, tensors, block.astype(np.int32), thread.astype(np.int32), element.astype(np.int64), value,
            self.dropped,
        )  # fmt: skip


def _build_columns(entry: _PendingAccess, itemsize: int) -> tuple[np.ndarray, ...]:
    """Return an entry's columns (block, thread, element, bits, whether the bits are known)."""
    count = entry.access.count
    byte = entry.byte[:, None] + np.arange(count) * entry.access.width
    bits = np.zeros(len(entry.byte) * count, np.uint64) if entry.bits is None else entry.bits.reshape(-1)
    known = np.full(len(bits), entry.bits is not None and entry.access.width == itemsize)
    block, thread = np.repeat(entry.block, count), np.repeat(entry.thread, count)
    return block, thread, (byte // itemsize).reshape(-1), bits, known


def decode_bits(bits: np.ndarray, tensor: Tensor, float_like: bool = False) -> np.ndarray:
    """Decode bits to float64. Without a dtype, 4- and 8-byte elements are floats if most look plausible."""
    raw = bits.astype(f"u{tensor.itemsize}")
    if tensor.dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if tensor.dtype:
        return raw.view(tensor.dtype if tensor.dtype != "bool" else "uint8").astype(np.float64)
    if tensor.itemsize in (4, 8):
        floats = raw.view(f"f{tensor.itemsize}").astype(np.float64)
        size = np.abs(floats[raw != 0])
        with np.errstate(invalid="ignore"):
            plausible = (size > PLAUSIBLE_MAGNITUDES[0]) & (size < PLAUSIBLE_MAGNITUDES[1])
        if float_like or not len(size) or plausible.mean() > 0.5:
            return floats
    return raw.view(f"i{tensor.itemsize}").astype(np.float64)
