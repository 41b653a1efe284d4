"""Runs a launch as machine code, where that gives what the NumPy engine gives, and says so; else leaves it to
NumPy.

A launch that runs here to its end has no findings: whatever might be one stops it. Memory is then put back,
and the NumPy engine runs the launch from the start and reports. So there is one reporter, and one judge."""

from __future__ import annotations

import itertools
import time
import weakref

import numpy as np

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import Access
from harness.vgpu.memory.arena import Extent, reserve
from harness.vgpu.ptx.provenance import address_origin, origins

from . import machine_code
from . import runtime as rt
from .kernel import Translation, refuse
from .values import Refused

SPARE = 256  # bytes around every array that machine code writes
FILLED = 0xA5
SERIALS = 1 << 32
UNWRITABLE = ("store to constant memory", "store to an input")
NOT_TRANSLATED = "the translation failed"


class Native:
    """One kernel, translated: its machine code, and what launches must know of it."""

    def __init__(self, kernel):
        self.translation = t = Translation(kernel)
        self.code = machine_code.load(machine_code.key([t.text]), lambda: machine_code.compiled(t.text))
        of_registers = origins(t.program)
        self.origins = {a.number: address_origin(a.instr, of_registers) for a in t.code.accesses}
        floats = [self.origins[a.number] for a in t.floats]
        every = [offset for origin in floats for offset in origin or (None, None)]
        if len(floats) > 1 and len(set(every)) < len(every):
            raise Refused("sums of floats by several atomics on one tensor")
        self.stride = int(rt.SAVED) + 8 * t.state_words


class Marks:
    """The race marks of a device's memory; they are never cleared, as serials grow."""

    def __init__(self):
        self.data = np.zeros(0, np.uint8)
        self.serial = 1

    def of(self, nbytes: int, serials: int) -> tuple[np.ndarray, int]:
        """Marks of at least this size, and the first of so many new serials."""
        if len(self.data) < nbytes or self.serial + serials >= SERIALS:
            self.data, self.serial = reserve(max(nbytes, 1 << 16)), 1
        first = self.serial
        self.serial += serials
        return self.data, first


MARKS: weakref.WeakKeyDictionary[object, Marks] = weakref.WeakKeyDictionary()
"""By device."""


def native_of(kernel) -> Native | str:
    """The kernel's machine code, or why there is none."""
    native = kernel.native
    if native is None:
        try:
            native = Native(kernel)
        except (Refused, UnsupportedInstruction) as why:
            native = str(why)
        except Exception as why:  # a kernel that nobody has thought of must still run, in the other engine
            native = f"{NOT_TRANSLATED}: {why!r}"
        kernel.native = native
    return native


def may_translate(kernel) -> bool:
    """Whether a kernel may have machine code, as far as that can be said at once; one that prints never
    has."""
    if isinstance(kernel.native, str) or machine_code.unavailable():
        return False
    program = kernel.code.program
    try:
        refuse(program)
    except Refused as why:
        kernel.native = str(why)
    return kernel.native is None and "builtin" not in program.opcodes


def refusal(run) -> str | None:
    """Why this launch must be run by the NumPy engine, before anything is translated; None where it need
    not."""
    checks = run.checks
    if not (checks.uninitialised and checks.races):
        return "checks are switched off"
    if run.keep_events or run.trial:
        return "every access is recorded"
    if run.cluster_size > 1:
        return "a cluster"
    return None


class Launch:
    """The memory of one launch as machine code sees it: the words of runtime.py, and what they point to."""

    def __init__(self, run, native: Native):
        self.run, self.native = run, native
        self.arena = run.arena
        self.arrays: list[np.ndarray] = []
        self.words = self.array(8 * rt.WORDS).view(np.uint64)
        t = native.translation
        extents = [e for e in self.arena.extents if e.end > e.start]
        for a, b in itertools.pairwise(extents):
            if a.end == b.start and a.end % 32:
                raise Refused("tensors side by side without alignment")
        self.low = (min((e.start for e in extents), default=self.arena.base) - self.arena.base) // 4096 * 4096
        self.high = max((e.end for e in extents), default=self.arena.base) - self.arena.base
        self.extents = extents
        self.owners = {a.number: self.owner(a) for a in t.code.accesses if a.number in t.accesses}
        if any(
            a.instr.op in ("atom", "red") and any(e.forbids == "undeclared atomic" for e in self.reached(a))
            for a in t.code.accesses
            if a.number in self.owners
        ):
            raise Refused("an atomic on what takes none")
        self.written = self.targets()
        self.kept = [(e, self.arena.snapshot(e)) for e in self.written]
        self.global_memory(t)
        self.block_memory(t)

    def array(self, nbytes: int) -> np.ndarray:
        """Zeroed bytes with a guard zone on both sides."""
        whole = np.zeros(nbytes + 2 * SPARE, np.uint8)
        whole[:SPARE] = whole[SPARE + nbytes :] = FILLED
        self.arrays.append(whole)
        return whole[SPARE : SPARE + nbytes]

    def intact(self) -> bool:
        """Whether nothing has been written beside the arrays."""
        return all((a[:SPARE] == FILLED).all() and (a[-SPARE:] == FILLED).all() for a in self.arrays)

    def put(self, word, value) -> None:
        """Set a word: a number, or the address of an array."""
        self.words[int(word) // 8] = value.ctypes.data if isinstance(value, np.ndarray) else int(value)

    # -- global memory --------------------------------------------------------------------------------------
    def owner(self, a: Access) -> Extent | None:
        """The one tensor that an access must stay in, as far as its pointer is known; None: any."""
        origin = self.native.origins[a.number] or ()
        values = [int.from_bytes(self.run._param_bytes[o : o + 8], "little") for o in origin]
        tensors = list({id(e): e for e in map(self.arena.find, values) if e is not None}.values())
        if len(tensors) > 1:
            raise Refused("an address out of several tensors")
        return tensors[0] if tensors else None

    def reached(self, a: Access) -> list[Extent]:
        """The tensors that an access may touch."""
        owner = self.owners[a.number]
        return [owner] if owner else self.extents

    def targets(self) -> list[Extent]:
        """The tensors that the launch may store to."""
        stores = self.native.translation.stores
        accesses = {a.number: a for a in self.native.translation.code.accesses}
        tensors = {}
        for number in stores:
            if accesses[number].space in ("global", "generic", "const"):
                for e in self.reached(accesses[number]):
                    tensors[id(e)] = e
        return list(tensors.values())

    def global_memory(self, t: Translation):
        """Data, states and marks of the arena, and the table of accesses."""
        arena, low, high = self.arena, self.low, self.high
        state = self.state = self.array(max(high - low, 0) + 64)
        for e in self.extents:
            part = slice(e.start - arena.base, e.end - arena.base)
            state[part.start - low : part.stop - low] = (
                arena.written[part] | rt.ALLOCATED | (rt.CONSTANT if e.forbids in UNWRITABLE else 0)
            )
        base = arena.base + low
        self.put(rt.DATA, arena.data[low:])
        self.put(rt.STATE, state)
        self.put(rt.BASE, base)
        table = self.array(rt.ENTRY * max(len(t.code.accesses), 1)).view(np.uint64).reshape(-1, 4)
        writes = {id(e) for e in self.written}
        for a in t.code.accesses:
            if a.number not in t.accesses:
                continue
            e = self.owners[a.number]
            start, end = (e.start, e.end) if e else (base, arena.base + high)
            checked = e is None or not e.ready or e.forbids in UNWRITABLE
            tracked = bool(writes) if e is None else id(e) in writes
            if end - start < a.nbytes:
                start, end = 1 << 63, (1 << 63) + a.nbytes
            table[a.number] = start, end - start, (1 if checked else 0) | (2 if tracked else 0), 0
        self.table = table
        self.put(rt.TABLE, table)
        barriers = 1 << 12 if t.barriers else 1
        blocks = int(np.prod(self.run.grid))
        serials = min(blocks * (barriers + 1) + 1, SERIALS // 2)
        cells = ((high - low) >> t.shifts[0]) + 2
        self.marks = MARKS.setdefault(self.run.gpu, Marks())
        marks, first = self.marks.of(cells * rt.CELL, serials)
        self.marked = marks
        self.put(rt.MARKS, marks)
        self.put(rt.START, first << rt.SERIAL_AT)
        self.put(rt.NOW, first << rt.SERIAL_AT)
        self.put(rt.SERIAL_END, (first + serials) << rt.SERIAL_AT)

    # -- memory of a block ----------------------------------------------------------------------------------
    def block_memory(self, t: Translation):
        """Shared and local memory, the states of threads, and the sizes of the launch."""
        run, native = self.run, self.native
        threads = run.threads
        warps = -(-threads // 32)
        size = max(run.shared_size, 64)
        initial = self.array(size)
        for e in run.shared_extents:
            initial[e.start : e.end] = rt.ALLOCATED
        self.put(rt.SHARED, self.array(size))
        self.put(rt.SHARED_STATE, self.array(size))
        self.put(rt.SHARED_INIT, initial)
        self.put(rt.SHARED_SIZE, size)
        self.put(rt.SHARED_MARKS, self.array(((size >> t.shifts[1]) + 32) * rt.CELL))
        local = run.local_size
        if local:
            initial = self.array(local)
            for e in run.local_extents:
                initial[e.start : e.end] = rt.ALLOCATED
            self.put(rt.LOCAL, self.array(local * threads))
            self.put(rt.LOCAL_STATE, self.array(local * threads))
            self.put(rt.LOCAL_INIT, initial)
            self.put(rt.LOCAL_SIZE, local)
        self.put(rt.PARAMETERS, run.param_space.data)
        self.counts = self.array(8 * len(t.program.blocks)).view(np.uint64)
        self.put(rt.COUNTS, self.counts)
        self.put(rt.STRIDE, native.stride)
        self.put(rt.STATES, self.array(native.stride * 32 * warps))
        self.put(rt.ALIVE, self.array(8 * warps))
        self.put(rt.EPOCHS, self.array(8 * warps))
        self.put(rt.SCRATCH, self.array(3 * 16 * 16 * 8))
        self.put(rt.SINK, self.array(256))
        if t.copies:
            self.put(rt.QUEUE, self.array(rt.QUEUE_BYTES * threads))
        self.blocks = np.concatenate(list(run.batches())).astype(np.uint64)
        self.put(rt.BLOCKS, self.blocks)
        self.put(rt.BLOCK_COUNT, len(self.blocks))
        self.put(rt.THREADS, threads)
        self.put(rt.ROUNDS, run.step_budget)
        self.put(rt.DYNAMIC_SHARED, run.dynamic_shared)
        for k in range(3):
            self.words[int(rt.NTID_X) // 8 + k] = run.block[k]
            self.words[int(rt.NCTAID_X) // 8 + k] = run.grid[k]

    # -- running --------------------------------------------------------------------------------------------
    def execute(self) -> bool:
        """Run it; False where it gave up, and memory is as it was."""
        self.native.code.run(self.words.ctypes.data)
        self.marks.serial = (int(self.words[int(rt.NOW) // 8]) >> rt.SERIAL_AT) + 1
        if not self.intact():
            raise RuntimeError(f"machine code of {self.run.kernel.name} has written outside of its memory")
        if (
            self.words[int(rt.FOUND) // 8]
            or self.words[int(rt.NOW) // 8] >= self.words[int(rt.SERIAL_END) // 8]
        ):
            for e, held in self.kept:
                self.arena.restore(e, held)
            return False
        self.finish()
        return True

    def has_stores(self, e: Extent) -> bool:
        """Whether marks of stores or atomics of this launch lie in a tensor."""
        shift, base = self.native.translation.shifts[0], self.arena.base + self.low
        cells = self.marked[
            ((e.start - base) >> shift) * rt.CELL : (((e.end - 1 - base) >> shift) + 1) * rt.CELL
        ]
        marks = cells.view(np.uint64).reshape(-1, 3)
        return bool((marks[:, [0, 2]] >= self.words[int(rt.START) // 8]).any())

    def finish(self):
        """What the launch leaves: the map of written bytes, who wrote what, counters."""
        run, arena, t = self.run, self.arena, self.native.translation
        stored = {n for n in t.stores if self.table[n, 3]}
        anywhere = any(self.owners[n] is None for n in stored)
        owners = {id(self.owners[n]) for n in stored}
        for e in self.written:
            if not (id(e) in owners or (anywhere and self.has_stores(e))):
                continue
            part = slice(e.start - arena.base, e.end - arena.base)
            arena.written[part] = self.state[part.start - self.low : part.stop - self.low] & rt.WRITTEN
            if e.ready:
                arena.written[part] = 1
            e.written, e.writer = True, run.launch.name
            arena.refresh(e.start, e.end - e.start)
        run.block_threads = {k: int(n) for k, n in enumerate(self.counts) if n}
        run.code.work.update(t.code.work)
        run.counters.barriers = int(self.words[int(rt.BARRIERS) // 8])
        run.counters.finish()


def ran(run) -> bool:
    """Run a launch as machine code; False where the NumPy engine must do it, and nothing has happened."""
    start = time.perf_counter()
    if refusal(run) or machine_code.unavailable():
        return False
    native = native_of(run.kernel)
    if isinstance(native, str):
        return False
    try:
        if not Launch(run, native).execute():
            return False
    except Refused:
        return False
    run.launch.engine, run.launch.seconds = "native", time.perf_counter() - start
    return True
