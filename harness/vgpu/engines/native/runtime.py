"""What compiled kernels call: checked memory, race marks, warps, copies, atomics, and the scheduler of a
thread block.

These functions are never run by Python: compiler.py makes machine code of them, once for each combination of
what is known when a kernel is translated (sizes, roles, modes). `ctx` is the address of the launch's words
(the constants below), `st` that of a thread's, both u8.

Every check here only asks "might the NumPy engine find something?". Where it might, `give_up` ends the run:
memory is then put back, and the NumPy engine judges and reports.

Race marks. For each granule of tracked memory there are three words: the last plain store, load and atomic. A
mark is

    serial (32 bits) | thread (10) | warp epoch (10) | instruction (8) | flags (4)

The serial grows with each thread block and barrier, so that nothing is ever cleared: below `START` it is of
another launch, below `FIRST` of another thread block, below `NOW` of an earlier barrier epoch. Blocks run one
after another. As a granule has one mark for each role, the flags keep what a newer mark would hide: other
blocks, threads, warps, and other instructions or warp epochs of its thread. Only warp instructions of all
lanes that live count as order."""

from __future__ import annotations

import numpy as np

from harness.vgpu.checks.races import CONFLICTS
from harness.vgpu.engines.opcodes import numeric

from .builtins import copy_bytes, lanes, load, numbers, perform, step, store, unlikely

u2, u4, u8, i8, f2, f4, f8 = np.uint16, np.uint32, np.uint64, np.int64, np.float16, np.float32, np.float64

WORDS = 43
#: The words of a launch, by byte offset.
(
    FOUND, SINK, DATA, STATE, BASE, TABLE, MARKS, SHARED, SHARED_STATE, SHARED_INIT, SHARED_SIZE,
    SHARED_MARKS, LOCAL, LOCAL_STATE, LOCAL_INIT, LOCAL_SIZE, PARAMETERS, COUNTS, QUEUE, START, FIRST, NOW,
    ROUNDS, THREADS, BLOCKS, BLOCK_COUNT, CTAID_X, CTAID_Y, CTAID_Z, NTID_X, NTID_Y, NTID_Z, NCTAID_X,
    NCTAID_Y, NCTAID_Z, DYNAMIC_SHARED, STATES, STRIDE, ALIVE, EPOCHS, SERIAL_END, SCRATCH, BARRIERS,
) = (u8(8 * k) for k in range(WORDS))  # fmt: skip

#: What an access may touch (TABLE): first address, highest offset, flags, and whether it has stored.
ENTRY = 32
CHECKED, TRACKED = u8(1), u8(2)

#: The bits of a byte's state.
WRITTEN, ALLOCATED, CONSTANT = 1, 2, 16

#: A mark's parts.
SERIAL_AT, THREAD_AT, EPOCH_AT, INSTR_AT = 32, 22, 12, 4
THREAD, WARP, EPOCH, INSTR = u8(1023 << 22), u8(31 << 27), u8(1023 << 12), u8(255 << 4)
OTHER_BLOCKS, OTHER_THREADS, OTHER_WARPS, OTHER_PLACES = u8(1), u8(2), u8(4), u8(8)
FLAGS = u8(15)
MARK = {"W": u8(0), "R": u8(8), "A": u8(16)}
CELL = 24

#: A thread's words: where it waits, turns of loops around warp instructions, rounds of all loops, operands,
#: results.
CODE, TURNS, ROUNDS_DONE, OPERANDS, RESULTS, SAVED = u8(0), u8(8), u8(16), u8(24), u8(24 + 128), u8(24 + 192)
EXITED = u8(1 << 30)
OPERAND_WORDS, RESULT_WORDS = 16, 8

#: A thread's queue of asynchronous copies: entries in it, groups committed, and entries of place, group,
#: bytes, data.
QUEUE_ENTRY, QUEUE_LENGTH = 40, 96
QUEUE_BYTES = 16 + QUEUE_ENTRY * QUEUE_LENGTH


def variables(function):
    """Marks a function with branches that numbers decide."""
    function.variables = True
    return function


def cold(function):
    """Marks a function that is seldom called, and not inlined."""
    function.cold = True
    return variables(function)


def exported(function):
    """Marks the function that Python calls."""
    function.exported = True
    return variables(function)


@cold
def give_up(ctx):
    """Leave the launch to the NumPy engine. Returns the address of memory that belongs to nobody."""
    store(u8, ctx + FOUND, u8(1))
    return load(u8, ctx + SINK)


# -- memory -------------------------------------------------------------------------------------------------
@variables
def global_place(ctx, address, mine, number: int, nbytes: int, role: str, shift: int, atomics: bool):
    """Where in this process `nbytes` at a device address lie, for an access that is checked and marked
    here."""
    entry = load(u8, ctx + TABLE) + u8(ENTRY * number)
    offset = address - load(u8, entry)
    if unlikely((offset > load(u8, entry + u8(8)) - u8(nbytes)) | (address & u8(nbytes - 1) != u8(0))):
        return give_up(ctx)
    place = address - load(u8, ctx + BASE)
    flags = load(u8, entry + u8(16))
    if flags & CHECKED != u8(0):  # noqa: SIM102
        if unlikely(unfit(load(u8, ctx + STATE) + place, nbytes, role)):
            return give_up(ctx)
    if role != "R":
        store(u8, entry + u8(24), u8(1))
    if flags & TRACKED != u8(0):
        cells = load(u8, ctx + MARKS) + (place >> u8(shift)) * u8(CELL)
        for k in range(max(nbytes >> shift, 1)):
            mark_global(ctx, cells + u8(CELL * k), mine | u8((number & 255) << INSTR_AT), role, atomics)
    return load(u8, ctx + DATA) + place


def unfit(state, nbytes: int, role: str):
    """Whether bytes with these states may not be accessed; what is stored becomes written."""
    bad = False
    unit = min(nbytes, 8)
    kind = numeric.UNSIGNED[unit]
    want = ALLOCATED if role == "W" else ALLOCATED | WRITTEN
    look = want if role == "R" else want | CONSTANT
    for at in range(0, nbytes, unit):
        states = load(kind, state + u8(at))
        bad = (states & kind(repeated(look, unit)) != kind(repeated(want, unit))) | bad
        if role != "R":
            store(kind, state + u8(at), states | kind(repeated(WRITTEN, unit)))
    return bad


def repeated(byte: int, count: int) -> int:
    """A byte that fills `count` bytes."""
    return sum([byte << 8 * k for k in range(count)])


@variables
def shared_place(ctx, address, mine, nbytes: int, role: str, shift: int, atomics: bool, races: bool):
    """The same for shared memory of the own block; `races`: whether it can be part of one."""
    size = load(u8, ctx + SHARED_SIZE)
    inside = (address < size) & (address <= size - u8(nbytes))  # there may be none: a size of 0
    if unlikely(~inside | (address & u8(nbytes - 1) != u8(0))):
        return give_up(ctx)
    if unlikely(unfit(load(u8, ctx + SHARED_STATE) + address, nbytes, role)):
        return give_up(ctx)
    if races:
        cells = load(u8, ctx + SHARED_MARKS) + (address >> u8(shift)) * u8(CELL)
        for k in range(max(nbytes >> shift, 1)):
            mark_shared(ctx, cells + u8(CELL * k), mine, role, atomics)
    return load(u8, ctx + SHARED) + address


@variables
def local_place(ctx, address, tid, nbytes: int, role: str):
    """The same for a thread's local memory."""
    size = load(u8, ctx + LOCAL_SIZE)
    inside = (address < size) & (address <= size - u8(nbytes))  # there may be none: a size of 0
    if unlikely(~inside | (address & u8(nbytes - 1) != u8(0))):
        return give_up(ctx)
    place = address + tid.astype(u8) * size
    if unlikely(unfit(load(u8, ctx + LOCAL_STATE) + place, nbytes, role)):
        return give_up(ctx)
    return load(u8, ctx + LOCAL) + place


@variables
def generic_place(
    ctx, address, mine, tid, number: int, nbytes: int, role: str, shifts: tuple, atomics: tuple
):
    """The same for an address whose window tells its space."""
    window = address >> u8(56)
    if window == u8(0):
        return global_place(ctx, address, mine, number, nbytes, role, shifts[0], atomics[0])
    offset = address & u8((1 << 56) - 1)
    if window == u8(1):
        return shared_place(ctx, offset, mine, nbytes, role, shifts[1], atomics[1], True)
    if window == u8(2):
        return local_place(ctx, offset, tid, nbytes, role)
    return give_up(ctx)


# -- race marks ---------------------------------------------------------------------------------------------
@variables
def mark_global(ctx, cell, mine, role: str, atomics: bool):
    """Mark one granule of global memory; the usual case, that nobody has touched it in this launch, is done
    here."""
    start = load(u8, ctx + START)
    if role == "A":
        mark_slowly(ctx, cell, mine, role, False)
    else:
        touched = (load(u8, cell) >= start) | (load(u8, cell + MARK["R"]) >= start)
        if atomics:
            touched = touched | (load(u8, cell + MARK["A"]) >= start)
        if unlikely(touched):
            mark_slowly(ctx, cell, mine, role, False)
        else:
            store(u8, cell + MARK[role], mine)


@variables
def mark_shared(ctx, cell, mine, role: str, atomics: bool):
    """Mark one granule of shared memory; only what this barrier epoch has seen matters."""
    now = load(u8, ctx + NOW)
    if role == "R":
        busy = load(u8, cell) >= now
        if atomics:
            busy = busy | (load(u8, cell + MARK["A"]) >= now)
        if unlikely(busy):
            mark_slowly(ctx, cell, mine, role, True)
        else:
            old = load(u8, cell + MARK["R"])
            store(u8, cell + MARK["R"], joined_shared(old, mine, now))
    elif role == "A":
        mark_slowly(ctx, cell, mine, role, True)
    else:
        busy = (load(u8, cell) >= now) | (load(u8, cell + MARK["R"]) >= now)
        if atomics:
            busy = busy | (load(u8, cell + MARK["A"]) >= now)
        if unlikely(busy):
            mark_slowly(ctx, cell, mine, role, True)
        else:
            store(u8, cell + MARK["W"], mine)


@cold
def mark_slowly(ctx, cell, mine, role: str, shared: bool):
    """Compare with the marks of the roles that conflict, and join the own one."""
    start, first, now = load(u8, ctx + START), load(u8, ctx + FIRST), load(u8, ctx + NOW)
    for against in ("W", "R", "A"):
        if against in CONFLICTS[role]:
            other = load(u8, cell + MARK[against])
            clash = (
                clashes_shared(other, mine, now) if shared else clashes_global(other, mine, start, first, now)
            )
            if clash:
                give_up(ctx)
    old = load(u8, cell + MARK[role])
    new = joined_shared(old, mine, now) if shared else joined_global(old, mine, start, first, now)
    store(u8, cell + MARK[role], new)


def clashes_global(other, mine, start, first, now):
    """Whether a mark may be that of a race with the access `mine`: by another block, or unordered in this
    one.

    Two instructions of one warp with a warp instruction between are ordered; one instruction of two lanes
    never is."""
    x = other ^ mine
    across = (other < first) | (other & OTHER_BLOCKS != u8(0))
    ordered = (
        (x & WARP == u8(0)) & (x & EPOCH != u8(0)) & (x & INSTR != u8(0)) & (other & OTHER_PLACES == u8(0))
    )
    inside = (other & OTHER_THREADS != u8(0)) | ((x & THREAD != u8(0)) & ~ordered)
    return (other >= start) & (across | ((other >= now) & inside))


def joined_global(old, mine, start, first, now):
    """The mark of a granule after another access of the same role."""
    x = old ^ mine
    threads = np.where(x & THREAD != u8(0), OTHER_THREADS, u8(0))
    places = np.where(x & (EPOCH | INSTR) != u8(0), OTHER_PLACES, u8(0))
    here = mine | (old & FLAGS) | threads | places
    block = np.where(old >= now, here, mine | (old & OTHER_BLOCKS))
    return np.where(old < start, mine, np.where(old < first, mine | OTHER_BLOCKS, block))


def clashes_shared(other, mine, now):
    """The same in shared memory: in one barrier epoch, two threads, no warp instruction between."""
    x = other ^ mine
    ordered = (x & WARP == u8(0)) & (x & EPOCH != u8(0)) & (other & OTHER_WARPS == u8(0))
    several = (x & THREAD != u8(0)) | (other & (OTHER_THREADS | OTHER_WARPS) != u8(0))
    return (other >= now) & several & ~ordered


def joined_shared(old, mine, now):
    """What lanes of the warp did before its last warp instruction is over for the warp, not for others."""
    x = old ^ mine
    warps = np.where(x & WARP != u8(0), OTHER_WARPS, u8(0)) | (old & OTHER_WARPS)
    lanes = np.where(x & THREAD != u8(0), OTHER_THREADS, u8(0)) | (old & OTHER_THREADS)
    lanes = np.where(x & EPOCH == u8(0), lanes, u8(0))
    return np.where(old >= now, mine | warps | lanes, mine)


# -- atomics ------------------------------------------------------------------------------------------------
def atomic_at(place, op: str, kind, value, flushes: bool):
    """One atomic whose result nobody uses, at an address of this process."""
    old = load(kind, place)
    value = value.view(kind)
    if flushes:
        old, value = numeric.flush(old), numeric.flush(value)
    new = combined(op, old, value)
    if flushes:
        new = numeric.flush(new)
    store(kind, place, new)


def combined(op: str, old, value):
    """The new value, as NumPy computes it."""
    total = numeric.combined(op, old, value)
    if op == "add" and old.dtype == f8:  # of two NaNs the payload in memory survives
        total = np.where(value != value, numeric.quiet(value), total)
        total = np.where(old != old, numeric.quiet(old), total)
    return total


# -- asynchronous copies ------------------------------------------------------------------------------------
@variables
def copy_async(ctx, tid, mine, target, source, take, number: int, nbytes: int, shifts: tuple, atomics: tuple):
    """cp.async: the source is checked and read now, the data lands at the wait; `take` bytes of it, the rest
    is 0."""
    low = u8(0)
    high = u8(0)
    if take != u8(0):
        place = global_place(ctx, source, mine, number, nbytes, "R", shifts[0], atomics[0])
        low = load(u4, place).astype(u8) if nbytes == 4 else load(u8, place)
        if nbytes == 16:
            high = load(u8, place + u8(8))
        low = low & kept(take)
        high = high & np.where(take > u8(8), kept(take - u8(8)), u8(0))
    top = load(u8, ctx + SHARED_SIZE) - u8(nbytes)
    cells = load(u8, ctx + SHARED_MARKS) + (np.minimum(target, top) >> u8(shifts[1])) * u8(CELL)
    for k in range(max(nbytes >> shifts[1], 1)):
        mark_shared(ctx, cells + u8(CELL * k), mine, "W", atomics[1])
    queue = load(u8, ctx + QUEUE) + tid.astype(u8) * u8(QUEUE_BYTES)
    count = load(u8, queue)
    if unlikely(count >= u8(QUEUE_LENGTH)):
        give_up(ctx)
    else:
        entry = queue + u8(16) + count * u8(QUEUE_ENTRY)
        store(u8, entry, target)
        store(u8, entry + u8(8), load(u8, queue + u8(8)))
        store(u8, entry + u8(16), u8(nbytes))
        store(u8, entry + u8(24), low)
        store(u8, entry + u8(32), high)
        store(u8, queue, count + u8(1))


def kept(take):
    """A mask of the low `take` bytes of a word."""
    return np.where(take >= u8(8), u8(0xFFFFFFFFFFFFFFFF), (u8(1) << (take & u8(7)) * u8(8)) - u8(1))


def copy_commit(ctx, tid):
    """cp.async.commit_group."""
    queue = load(u8, ctx + QUEUE) + tid.astype(u8) * u8(QUEUE_BYTES)
    store(u8, queue + u8(8), load(u8, queue + u8(8)) + u8(1))


@cold
def copy_wait(ctx, tid, mine, allowed: int, shift: int, atomics: bool):
    """Let copies land whose group is older than the newest `allowed` ones; -1: all."""
    queue = load(u8, ctx + QUEUE) + tid.astype(u8) * u8(QUEUE_BYTES)
    groups = load(u8, queue + u8(8))
    left = u8(0)
    for k in numbers(load(u8, queue)):
        entry = queue + u8(16) + k * u8(QUEUE_ENTRY)
        target = load(u8, entry)
        nbytes = load(u8, entry + u8(16))
        done = (load(u8, entry + u8(8)) + u8(max(allowed, 0)) < groups) if allowed >= 0 else (nbytes != u8(0))
        if done:
            for size in (4, 8, 16):
                if nbytes == u8(size):
                    place = shared_place(ctx, target, mine, size, "W", shift, atomics, True)
                    copy_bytes(place, entry + u8(24), u8(size))
        else:
            copy_bytes(queue + u8(16) + left * u8(QUEUE_ENTRY), entry, u8(QUEUE_ENTRY))
            left += u8(1)
    store(u8, queue, left)


# -- the scheduler ------------------------------------------------------------------------------------------
@exported
def run(ctx):
    """Run the thread blocks of the launch, one after another, until one gives up. Returns nothing: see
    FOUND."""
    for k in numbers(load(u8, ctx + BLOCK_COUNT)):
        number = load(u8, load(u8, ctx + BLOCKS) + k * u8(8))
        across, down = load(u8, ctx + NCTAID_X), load(u8, ctx + NCTAID_Y)
        store(u8, ctx + CTAID_X, number % across)
        store(u8, ctx + CTAID_Y, number // across % down)
        store(u8, ctx + CTAID_Z, number // (across * down))
        now = load(u8, ctx + NOW) + u8(1 << SERIAL_AT)
        store(u8, ctx + NOW, now)
        store(u8, ctx + FIRST, now)
        copy_bytes(load(u8, ctx + SHARED_STATE), load(u8, ctx + SHARED_INIT), load(u8, ctx + SHARED_SIZE))
        run_block(ctx)
        if load(u8, ctx + FOUND) != u8(0):
            break


@variables
def start_block(ctx):
    """Make the threads of a block new."""
    threads, stride, states = load(u8, ctx + THREADS), load(u8, ctx + STRIDE), load(u8, ctx + STATES)
    size = load(u8, ctx + LOCAL_SIZE)
    for tid in numbers(threads):
        st = states + tid * stride
        store(u8, st + CODE, u8(0))
        store(u8, st + TURNS, u8(0))
        store(u8, st + ROUNDS_DONE, u8(0))
        if size != u8(0):
            copy_bytes(load(u8, ctx + LOCAL_STATE) + tid * size, load(u8, ctx + LOCAL_INIT), size)
        queue = load(u8, ctx + QUEUE)
        if queue != u8(0):
            store(u8, queue + tid * u8(QUEUE_BYTES), u8(0))
            store(u8, queue + tid * u8(QUEUE_BYTES) + u8(8), u8(0))
    for warp in numbers((threads + u8(31)) >> u8(5)):
        store(u8, load(u8, ctx + ALIVE) + warp * u8(8), everybody_of(ctx, warp))
        store(u8, load(u8, ctx + EPOCHS) + warp * u8(8), u8(0))


def everybody_of(ctx, warp):
    """The lanes that a warp has had from its start."""
    left = load(u8, ctx + THREADS) - warp * u8(32)
    return np.where(left >= u8(32), u8(0xFFFFFFFF), (u8(1) << (left & u8(31))) - u8(1))


@variables
def run_block(ctx):
    """One thread block: its warps in turn up to the barrier, until all threads have returned."""
    start_block(ctx)
    threads = load(u8, ctx + THREADS)
    while load(u8, ctx + FOUND) == u8(0):
        waiting = u8(0)
        gone = u8(0)
        where = u8(0)
        for warp in numbers((threads + u8(31)) >> u8(5)):
            code = run_warp(ctx, warp)
            if code != u8(0):
                waiting += u8(1)
                if (where != u8(0)) & (where != code):
                    give_up(ctx)
                where = code
            if load(u8, load(u8, ctx + ALIVE) + warp * u8(8)) != everybody_of(ctx, warp):
                gone = u8(1)
        if waiting == u8(0):
            break
        if gone != u8(0):  # some have returned without the barrier
            give_up(ctx)
        store(u8, ctx + NOW, load(u8, ctx + NOW) + u8(1 << SERIAL_AT))
        store(u8, ctx + BARRIERS, load(u8, ctx + BARRIERS) + u8(1))


@variables
def run_warp(ctx, warp):
    """Run a warp until its threads wait at a barrier or have returned. Returns the barrier's code, or 0.

    Threads at the first warp instruction in program order go on first; they must have come there in the same
    turn of the loops around it."""
    stride = load(u8, ctx + STRIDE)
    first = warp * u8(32)
    base = load(u8, ctx + STATES) + first * stride
    lives = load(u8, ctx + ALIVE) + warp * u8(8)
    ready = load(u8, lives)
    alive = ready
    barrier = u8(0)
    while load(u8, ctx + FOUND) == u8(0):
        for lane in lanes(ready):
            code = step(base + lane * stride, ctx, (first + lane).astype(u4))
            if code == EXITED:
                alive = alive & ~(u8(1) << lane)
        store(u8, lives, alive)
        if alive == u8(0):
            break
        lowest = EXITED
        highest = u8(0)
        for lane in lanes(alive):
            code = load(u8, base + lane * stride + CODE)
            lowest = np.minimum(lowest, code)
            highest = np.maximum(highest, code)
        if is_barrier(lowest):
            barrier = lowest
            if lowest != highest:
                give_up(ctx)
            break
        active = u8(0)
        turns = u8(0)
        for lane in lanes(alive):
            st = base + lane * stride
            if load(u8, st + CODE) == lowest:
                if (active != u8(0)) & (turns != load(u8, st + TURNS)):
                    give_up(ctx)
                turns = load(u8, st + TURNS)
                active = active | u8(1) << lane
        # Who has returned counts too: in the order of NumPy, or of a GPU, it may not have by now.
        perform(lowest, ctx, base, stride, active, everybody_of(ctx, warp))
        if active == alive:
            epoch = load(u8, ctx + EPOCHS) + warp * u8(8)
            store(u8, epoch, load(u8, epoch) + u8(1))
        ready = active
    return barrier


def is_barrier(code):
    """Whether a thread waits at a barrier of the block: those have the high codes."""
    return code >= BARRIER


#: Codes of warp instructions are below, those of barriers above.
BARRIER = u8(1 << 16)
