"""Race check: log every access and search for conflicts in bulk, independent of the actual schedule.

Two accesses to the same bytes by different threads conflict when one of them is a non-atomic store, or one is
atomic and the other is not. An atomic of block scope (`.cta`) is atomic for its own block only: between
blocks it conflicts with every other. Conflicts are a race when nothing orders them:
- threads of different blocks are ordered only by release and acquire through a global atomic or
  through a barrier of their cluster (below);
- threads of one block are ordered by a barrier between the accesses (they have different `epoch`);
- threads of one warp are ordered by a bar.warp.sync between shared-memory accesses (`warp epoch`); shuffles, votes and
  matrix instructions make threads wait for each other, and promise nothing about memory.

Per granule of memory (the smallest element the kernel accesses) three marks are kept: the last store, load
and atomic. A mark is one integer: block or warp epoch, barrier epoch, thread and instruction. A load is
compared with the store mark and vice versa, so their execution order does not matter.

Kernels that use the result of an atomic, or a strong load, may order blocks by it ("the last block reduces");
warps of a block may do so by a flag in shared memory. They get vector clocks (clocks.py): an atomic or strong
load is an acquire only if its result is used and it, or a fence after it, has acquire semantics; a release
needs a fence or release semantics before. So do kernels with a cluster barrier: its arrive is a release
(unless `.relaxed`), its wait an acquire. There the log is kept and sorted at the end, that of shared memory
too where blocks of a cluster access each other's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from harness.vgpu.memory.arena import Extent, extent_at
from harness.vgpu.ptx.parser import WIDTH, Instr
from harness.vgpu.ptx.program import registers

from .clocks import Clocks, SharedOfAll
from .events import Recorder
from .findings import index_text, mark_name, plural

u8 = np.uint64
_INSTR, _THREAD, _EPOCH, _TOP = 12, 10, 14, 27
_THREAD_AT, _EPOCH_AT, _TOP_AT = u8(12), u8(22), u8(36)
_SEVERAL = u8(1 << 63)
_EPOCH_MASK = (1 << _EPOCH) - 1
LIMIT = 1 << 22  # logged thread accesses before the log is digested
PART = 1 << 14  # thread accesses that are compared at a time
ORDER = {"W": 0, "A": 1, "R": 2, "S": 3, "B": 4, "T": 5}
# Conflicting roles of each role (see Access.role), and those that conflict only between blocks.
CONFLICTS = {"W": "WASBTR", "A": "WR", "B": "WR", "R": "WAB", "S": "W", "T": "W"}
SCOPE_CONFLICTS = {"A": "BT", "B": "ABST", "S": "B", "T": "AB"}


def granule_of(program, spaces: tuple[str, ...]) -> int:
    """Return the smallest element size with which the kernel accesses these state spaces."""
    smallest = 8
    for block in program.blocks:
        for i in block.instrs:
            if i.op in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "mma"):
                words = {m.split("::")[0] for m in i.mods}
                space = next(
                    (s for s in ("shared", "global", "local", "param", "const", "frame") if s in words),
                    "generic",
                )
                if space in spaces or i.op == "cp":
                    widths = [WIDTH[m] for m in i.mods if WIDTH.get(m)]
                    copied = 2 if "tensor" in i.mods else 4  # the element size of an untyped copy
                    smallest = min(smallest, copied if i.op == "cp" else widths[-1] if widths else 4)
    return smallest


def _orders(program, i: Instr) -> bool:
    """Return whether an instruction may acquire: an atomic whose result is used, or a strong load."""
    if i.op == "atom":
        return any(r in program.read for r in registers(i.args[0]))
    return i.op == "ld" and any(m in ("acquire", "relaxed", "volatile") for m in i.mods)


def may_synchronise(program) -> bool:
    """Return whether threads may order each other through global memory or a cluster barrier."""
    polls = (_orders(program, i) for i in program.instrs if not any(m.startswith("shared") for m in i.mods))
    return any(polls) or any(b.kind == "cluster" for b in program.blocks)


def shared_ordering(program, cluster_size: int) -> tuple[bool, bool]:
    """Return whether warps of a block may order each other through its shared memory, and whether blocks of a
    cluster access each other's shared memory in a way that the clocks can follow (cluster barriers,
    fences, atomics)."""
    instrs = program.instrs
    flags = any(_orders(program, i) for i in instrs if "global" not in i.mods)
    other = any(
        (i.op == "mbarrier" and "cluster" in i.mods) or (i.op == "cp" and "bulk" in i.mods) for i in instrs
    )
    remote = (
        cluster_size > 1 and not other and any(i.op == "mapa" or "shared::cluster" in i.mods for i in instrs)
    )
    return flags, remote


class Marks:
    """The last store, load and atomic per granule of one tensor (or of a batch's shared memory)."""

    __slots__ = ("by_kind", "newest", "size")

    def __init__(self, size: int):
        self.size = size
        self.by_kind: dict[str, np.ndarray] = {}
        self.newest: dict[str, int] = {}  # shared memory: the last epoch among the marks of a kind

    def get(self, kind: str) -> np.ndarray:
        """Return the marks of a kind, created on first use."""
        marks = self.by_kind.get(kind)
        if marks is None:
            marks = self.by_kind[kind] = np.zeros(self.size, u8)
        return marks


def clash_global(other, mine):
    """Return the races of accesses to global memory: other block, or same block and epoch but another thread."""
    x = other ^ mine
    return (other != 0) & ((x >> _TOP_AT != 0) | ((x >> _EPOCH_AT == 0) & (x >> _THREAD_AT != 0)))


def clash_scope(other, mine):
    """Return the races of accesses of which one has block scope: those by different blocks."""
    return (other != 0) & ((other ^ mine) >> _TOP_AT != 0)


def clash_shared(other, mine):
    """Return the races of accesses to one block's shared memory: same epoch, another thread, unordered in its
    warp."""
    x = other ^ mine
    same_epoch = (x >> _EPOCH_AT) & u8(_EPOCH_MASK) == 0
    thread = (x >> _THREAD_AT) & u8(1023)
    ordered = (thread >> u8(5) == 0) & (x >> _TOP_AT != 0)
    return (other != 0) & same_epoch & (thread != 0) & ~ordered


def by_role(entries) -> dict[str, list]:
    """Map each role to its entries of a log, in the order of ORDER."""
    roles: dict[str, list] = {}
    for e in entries:
        roles.setdefault(e[0].role, []).append(e)
    return {role: roles[role] for role in sorted(roles, key=ORDER.__getitem__)}


def in_parts(entries):
    """Yield the entries of a log in lists that the processor's cache holds."""
    part, size = [], 0
    for e in entries:
        part.append(e)
        size += len(e[2][0] if e[3] is None else e[3])
        if size >= PART:
            yield part
            part, size = [], 0
    if part:
        yield part


class LoggedBatch(Protocol):
    """The part of a batch (engine/interpreter/executor.py) that the log reads."""

    count: int  # thread blocks
    shared_size: int  # bytes of shared memory of each


class AccessLog:
    """Log all accesses of a launch: feed the counters and the event recorder, and find races."""

    def __init__(self, run):
        self.run = run
        self.checking = run.checks.races
        self.counting = run.checks.counters
        self.events = Recorder(run, run.keep_events) if run.keep_events else None
        self.active = self.checking or self.counting or self.events is not None
        code = run.code
        if not hasattr(code, "granules"):
            code.granules = (
                granule_of(code.program, ("global", "generic", "const")),
                granule_of(code.program, ("shared", "generic")),
                may_synchronise(code.program),
            )
        self.granule, self.shared_granule, syncs = code.granules
        self.marks: dict[Extent, Marks] = {}
        self.entries: dict[Extent, list] = {}
        self.written: set[Extent] = set()
        self.fresh: list = []
        self.size = self.shared_size = 0  # thread accesses that wait in the logs
        self.has_store = False
        self.batch: LoggedBatch | None = None
        flags, remote = shared_ordering(code.program, run.cluster_size)
        self.ordered = OrderedLog(self, flags) if (syncs or flags or remote) and self.checking else None
        self.clocks = self.ordered.clocks if self.ordered else None
        self.flags, self.follows = flags, flags or remote
        self.warp_syncs = False  # whether a bar.warp.sync has been executed

    # -- called by the executor -----------------------------------------------------------------------------
    def start_batch(self, batch):
        self.batch = batch
        self.shared: list = []
        self.shared_store = False
        self.segment = 0
        self.shared_marks: Marks | None = None
        self.ids: tuple | None = None

    def identity(self, batch):
        """Return the marks of all threads without epoch and instruction: (global, shared)."""
        if self.ids is None or self.ids[0] is not batch.thread_of:
            thread = batch.thread_of.astype(u8) << _THREAD_AT
            block = batch.blocks[batch.block_of].astype(u8) << _TOP_AT
            self.ids = (batch.thread_of, block | thread, thread, batch.warp_of, batch.lane_of)
        return self.ids

    def add(self, batch, A, tensor: Extent, index, L):
        """Log a global access: `index` in units of the access size, an int where all threads have the same."""
        if not self.active:
            return
        if self.events:
            self.events.add(batch, A, tensor, index, L)
        ids = self.identity(batch)
        epoch = batch.epochs(L)
        segment = self.clocks.segments(batch, L) if self.clocks else None
        entry = (A, index, ids, L, epoch, segment)
        self.entries.setdefault(tensor, []).append(entry)
        self.fresh.append((entry, tensor))
        if A.writes or A.kind == "A":
            self.has_store = True
            self.written.add(tensor)
        self.size += batch.n if L is None else len(L)
        if self.clocks and A.kind == "A":
            places = np.broadcast_to(index, batch.n if L is None else len(L)) << A.shift
            self.clocks.access(batch, A, places, L)
        if self.size > LIMIT:
            self.digest_global(everything=True)

    def add_shared(self, batch, A, index, L):
        """Log a shared access of the own block. (A kernel without shared memory has had it reported as
        wrong.)"""
        if not self.active or not batch.shared_size:
            return
        if self.events:
            self.events.add_shared(batch, A, index, L)
        ids = self.identity(batch)
        epoch = batch.epochs(L)
        top = 0
        if batch.warp_synced:
            top = batch.warp_epoch[batch.warp_of if L is None else batch.warp_of[L]]
        if self.ordered and self.follows:
            self.ordered.add_shared(batch, A, index, L)
        self.shared.append((A, index, ids, L, epoch, top, self.segment))
        self.shared_store = self.shared_store or A.kind != "R"
        self.shared_size += batch.n if L is None else len(L)
        if self.shared_size > LIMIT:
            self.digest_shared(keep_reads=True)

    def add_remote(self, batch, A, index, L):
        """Log a shared access to the memory of another block of the cluster."""
        if self.ordered and self.follows:
            self.ordered.add_shared(batch, A, index, L)

    def barrier(self, batch, ready):
        """Pass a barrier with the blocks `ready` (None: all)."""
        if self.events:
            self.events.barrier()
        if self.shared:
            self.digest_shared(keep_reads=ready is not None and not ready.all())
        if self.has_store and self.clocks is None:
            self.digest_global()

    def warp_sync(self, batch, L):
        """Execute a bar.warp.sync of the warps of `L`."""
        self.warp_syncs = True
        if batch.shared_size and self.checking:
            if L is None:
                batch.warp_epoch += 1
            else:
                batch.warp_epoch[np.unique(batch.warp_of[L])] += 1
            batch.warp_synced = True
            self.segment += 1

    def end_batch(self, batch):
        """Check the rest of the log: all threads of the batch have exited."""
        self.digest()

    def finish(self):
        if self.batch is not None:
            self.digest()
        if self.ordered:
            self.ordered.finish()
        if self.events:
            self.run.launch.events = self.events.finish()

    def digest(self):
        """Count and check the logged accesses."""
        if self.shared:
            self.digest_shared(keep_reads=False)
        self.digest_global()

    # -- global memory --------------------------------------------------------------------------------------
    def digest_global(self, everything: bool = False):
        if self.counting and self.fresh:
            self.run.counters.consume_global(self.fresh)
        self.fresh = []
        self.has_store = False
        if self.checking and self.ordered:
            self.ordered.take(self.entries)
        elif self.checking:
            for tensor in list(self.entries):
                # Loads alone cannot race; they wait in the log for a store, or until the log is too long.
                if tensor in self.written or everything:
                    self.check_global(tensor, self.entries.pop(tensor))
        if not self.checking or self.ordered:
            self.entries = {}
        if not self.entries:
            self.size = 0

    def expand(self, entries, granule: int, base: int = 0):
        """Return arrays (granule index, mark) of entries of one kind."""
        where, marks = [], []
        for e in entries:
            A, index, ids, L, epoch = e[:5]
            shared = len(e) == 7
            identity = ids[2 if shared else 1]
            mark = identity if L is None else identity[L]
            extra = u8(min(A.number + 1, 4095))  # a mark is never 0
            if np.ndim(epoch):
                mark = mark | ((epoch.astype(u8) & u8(_EPOCH_MASK)) << _EPOCH_AT) | extra
            else:
                mark = mark | (u8((int(epoch) & _EPOCH_MASK) << 22) | extra)
            if shared:
                top = e[5]
                if np.ndim(top):
                    mark = mark | (top.astype(u8) << _TOP_AT)
            cells = max(A.nbytes // granule, 1)
            if np.ndim(index) == 0:
                index = np.full(len(mark), index)
            first = (((index << A.shift) - base) // granule) if cells == 1 or base else index * cells
            if cells == 1:
                where.append(first)
                marks.append(mark)
            else:
                for k in range(cells):
                    where.append(first + k)
                    marks.append(mark)
        if len(where) == 1:
            return where[0], marks[0]
        return np.concatenate(where), np.concatenate(marks)

    def check_global(self, tensor: Extent, entries):
        granule = self.granule
        marks = self.marks.get(tensor)
        if marks is None:
            marks = self.marks[tensor] = Marks((tensor.end - tensor.start) // granule + 2)
        base = tensor.start - self.run.arena.base
        logged = {role: self.expand(some, granule, base) for role, some in by_role(entries).items()}
        for kind, (where, mine) in logged.items():
            table = marks.get(kind)
            old = table[where]
            table[where] = mine
            won = table[where]
            several = ((won ^ mine) >> _TOP_AT != 0) | ((old != 0) & ((old ^ mine) >> _TOP_AT != 0))
            for other in (won, old):
                self.compare_global(tensor, kind, kind, where, mine, other)
            if several.any():
                table[where[several]] |= _SEVERAL
        for kind, (where, mine) in logged.items():
            for against in marks.by_kind:
                if against != kind:
                    other = marks.by_kind[against][where]
                    self.compare_global(tensor, kind, against, where, mine, other)

    def compare_global(self, tensor, kind: str, against: str, where, mine, other):
        """Report the races between accesses of two roles."""
        if against in CONFLICTS[kind]:
            self.report_global(tensor, where, mine, other, clash_global(other, mine))
        elif against in SCOPE_CONFLICTS.get(kind, ""):
            self.report_global(tensor, where, mine, other, clash_scope(other, mine), "atomic scope")

    def report_global(self, tensor, where, mine, other, bad, name: str = "global race"):
        if self.warp_syncs:
            # Global marks have no warp epoch: two instructions of one warp count as ordered in kernels that
            # use bar.warp.sync, two threads at one instruction never.
            x = other ^ mine
            bad = bad & ~((x >> u8(17) == 0) & (x & u8((1 << _INSTR) - 1) != 0))
        if not bad.any():
            return
        # The bit "several blocks" says that another block is among them: show the mark's own block, if it is
        # another.
        across = bad & (((other ^ mine) >> _TOP_AT) != 0)
        granule = self.shared_granule if isinstance(tensor, SharedOfAll) else self.granule
        for part, kind in ((across, name), (bad & ~across, "race inside a block")):
            if part.any():
                self.report(kind, tensor, where[part], mine[part], other[part], granule)

    def report(self, kind, tensor, where, mine, other, granule, batch=None):
        """Report one finding for each pair of instructions."""

        run = self.run
        mask = u8((1 << _INSTR) - 1)
        a, b = mine & mask, other & mask
        pair = np.where(a < b, a << u8(12) | b, b << u8(12) | a)
        for value in np.unique(pair):
            which = np.flatnonzero(pair == value)
            k = int(which[0])
            first = self.run.code.accesses[int(a[k]) - 1]
            second = self.run.code.accesses[int(b[k]) - 1]
            own, them = int(mine[k]), int(other[k])
            cells = len(np.unique(where[which]))
            byte = int(where[k]) * granule
            thread = run.thread_index(own >> 12 & 1023)
            their_thread = run.thread_index(them >> 12 & 1023)
            theirs = block = run.block_index(own >> 36 & (1 << _TOP) - 1)
            whose = ""
            if isinstance(tensor, SharedOfAll):
                name, index, owner = tensor.part(byte, first.width)
                theirs = run.block_index(them >> 36 & (1 << _TOP) - 1)
                if theirs != block or owner != (own >> 36 & (1 << _TOP) - 1):
                    whose = f" of block {_t(run.block_index(owner))}"
                kind = "shared race" if kind != "atomic scope" else kind
            elif kind == "shared race":
                assert batch is not None  # shared memory is a batch's
                local = byte % batch.shared_size
                theirs = block = run.block_index(int(batch.blocks[byte // batch.shared_size]))
                extent = extent_at(run.shared_extents, local)
                name = extent.name if extent else "shared memory"
                index = extent.index(local, first.width) if extent else None
            else:
                name, index = tensor.name, tensor.index(tensor.start + byte, first.width)
                theirs = run.block_index(them >> 36 & (1 << _TOP) - 1)
            if kind in ("global race", "atomic scope"):
                other_block = f"block {_t(theirs)}" if theirs != block else "another block"
                order = "nothing orders the blocks of a grid"
                if self.ordered:
                    order = "no release and acquire covers these two threads (is a barrier missing?)"
                if kind == "atomic scope":
                    order = "block scope counts inside one block only"
                why = f"block {_t(block)} and {_verb(second)} by {other_block}: {order}"
            elif theirs != block:
                why = (
                    f"block {_t(block)} and {_verb(second)} by block {_t(theirs)} of its cluster:"
                    " no barrier of the cluster is between them"
                )
            else:
                why = (
                    f"thread {_t(thread)} and {_verb(second)} by thread {_t(their_thread)} of the same block,"
                    " with no barrier between them"
                )
            message = f"{mark_name(name)}{whose}{index_text(index)}: {_verb(first)} by {why} ({plural(cells, 'place')})"
            run.record(
                kind, first.instr, message, tensor=name, index=index, block=block, thread=thread,
                count=cells, other=second.instr, verbs=frozenset((_verb(first), _verb(second))),
            )  # fmt: skip

    # -- shared memory --------------------------------------------------------------------------------------
    def digest_shared(self, keep_reads: bool):
        batch = self.batch
        assert batch is not None  # it has logged the entries
        entries, self.shared, self.shared_size = self.shared, [], 0
        store, self.shared_store = self.shared_store, False
        if self.counting:
            self.run.counters.consume_shared(batch, entries)
        # Loads matter only if a store in the same epoch may still come.
        if not self.checking or not (store or keep_reads or self.shared_marks is not None):
            return
        if self.shared_marks is None:
            self.shared_marks = Marks(batch.count * batch.shared_size // self.shared_granule + 1)
        segments: list[list] = []
        for e in entries:
            if not segments or segments[-1][0][6] != e[6]:
                segments.append([])
            segments[-1].append(e)
        for part in segments:
            self.check_shared(self.shared_marks, part, keep_reads or len(segments) > 1)

    def check_shared(self, marks: Marks, entries, keep_reads: bool):
        oldest = min(int(np.min(e[4])) for e in entries)
        roles = by_role(entries)
        for kind, some in roles.items():
            if kind == "R" and not keep_reads:
                continue
            table = marks.get(kind)
            if kind == "W":
                where, mine = self.expand(some, self.shared_granule)
                old = table[where]
                table[where] = mine
                for other in (table[where], old):
                    self.report_shared([(where, mine, other)])
            else:
                for part in in_parts(some):
                    where, mine = self.expand(part, self.shared_granule)
                    table[where] = mine
            newest = max(int(np.max(e[4])) for e in some)
            marks.newest[kind] = max(marks.newest.get(kind, -1), newest)
        for kind, some in roles.items():
            for against in CONFLICTS[kind]:
                # Where all marks are of earlier epochs, as in a tile that was stored before a barrier, nothing clashes.
                if against != kind and marks.newest.get(against, -1) >= oldest:
                    table = marks.by_kind[against]
                    expanded = (self.expand(part, self.shared_granule) for part in in_parts(some))
                    self.report_shared((where, mine, table[where]) for where, mine in expanded)

    def report_shared(self, parts):
        """Report the races among (granules, marks, other marks) of shared memory."""
        found = []
        for where, mine, other in parts:
            bad = clash_shared(other, mine)
            if self.flags:  # between warps the clocks decide
                bad &= (other ^ mine) >> u8(17) & u8(31) == 0
            if bad.any():
                found.append((where[bad], mine[bad], other[bad]))
        if found:
            where, mine, other = map(np.concatenate, zip(*found, strict=True))
            self.report("shared race", None, where, mine, other, self.shared_granule, self.batch)


class OrderedLog:
    """The log of a launch whose threads order each other by more than barriers: checked at its end, with
    clocks."""

    def __init__(self, log: AccessLog, flags: bool):
        run = log.run
        self.log, self.flags = log, flags
        self.clocks = Clocks(run.cluster_size)
        gx, gy, gz = run.grid
        self.shared = SharedOfAll(gx * gy * gz, run.shared_size, run.shared_extents)
        self.entries: dict[Extent, list] = {}
        self.remote: dict[tuple, tuple] = {}  # accesses to other blocks' shared memory, one of each kind

    def take(self, entries: dict) -> None:
        """Keep the log of global memory for the end."""
        for tensor, some in entries.items():
            self.entries.setdefault(tensor, []).extend(some)

    def add_shared(self, batch, A, index, L) -> None:
        """Log a shared access; `index` in units of the access size in the shared memory of the batch."""
        positions = batch.positions(L)
        slot, byte = np.divmod(np.broadcast_to(index, len(positions)) << A.shift, self.shared.size)
        place = batch.blocks[slot] * self.shared.size + byte
        segments = self.clocks.segments(batch, L)
        entry = (A, place >> A.shift, self.log.identity(batch), L, batch.epochs(L), segments)
        self.entries.setdefault(self.shared, []).append(entry)
        if A.kind == "A":
            self.clocks.access(batch, A, -1 - place, L)
        own = batch.block_of[positions]
        for k in np.flatnonzero(slot != own).tolist():
            warp, epoch = int(batch.thread_of[positions[k]]) >> 5, int(batch.epoch[own[k]]) & _EPOCH_MASK
            key = A.number, int(segments[0][k]), epoch, warp, int(batch.blocks[slot[k]])
            self.remote.setdefault(
                key,
                (A, int(positions[k]), int(place[k]), batch.blocks[own[k]], batch.thread_of[positions[k]]),
            )

    def finish(self) -> None:
        """Check the whole log: the launch has ended."""
        for tensor, entries in self.entries.items():
            if any(e[0].kind != "R" for e in entries):
                self.check(tensor, entries)
        for (_, segment, epoch, warp, owner), (A, _, place, block, thread) in self.remote.items():
            if not self.clocks.happens_before_exit((segment, epoch, warp), owner):
                self.report_late(A, place, int(block), int(thread))

    def report_late(self, A, place: int, block: int, thread: int) -> None:
        """Report an access to the shared memory of a block that may have returned."""
        run = self.log.run
        name, index, owner = self.shared.part(place, A.width)
        message = (
            f"{_verb(A)} by block {_t(run.block_index(block))} of {mark_name(name)}{index_text(index)} of block"
            f" {_t(run.block_index(owner))}, which may have returned by then: a barrier of the cluster must"
            " come after it"
        )
        run.record(
            "early return", A.instr, message, tensor=name, index=index, block=run.block_index(block),
            thread=run.thread_index(thread),
        )  # fmt: skip

    def check(self, tensor: Extent, entries) -> None:
        """Search one tensor's accesses for conflicting pairs that are not ordered."""
        log = self.log
        shared = tensor is self.shared
        base = 0 if shared else tensor.start - log.run.arena.base
        granule = log.shared_granule if shared else log.granule
        where, marks, kinds, segments, times = [], [], [], [], []
        for e in entries:
            w, m = log.expand([e], granule, base)
            repeat = len(w) // max(len(e[5][0]), 1)
            where.append(w)
            marks.append(m)
            kinds.append(np.full(len(w), ORDER[e[0].role]))
            segments.append(np.tile(e[5][0], repeat))
            times.append(np.full(len(w), e[5][1]))
        w, m, k, s, t = (np.concatenate(x) for x in (where, marks, kinds, segments, times))
        order = np.lexsort((t, w))
        w, m, k, s = w[order], m[order], k[order], s[order]
        number = np.arange(len(w))
        first = np.r_[True, w[1:] != w[:-1]]
        start = np.maximum.accumulate(np.where(first, number, 0))
        there = np.unique(k).tolist()
        for first_role, mine in ORDER.items():
            for second_role, other in ORDER.items():
                if mine not in there or other not in there:
                    continue
                if second_role in CONFLICTS[first_role]:
                    clash, name = clash_global, "global race"
                elif second_role in SCOPE_CONFLICTS.get(first_role, ""):
                    clash, name = clash_scope, "atomic scope"
                else:
                    continue
                # the last earlier access of the other kind to the same place by another thread
                previous = np.maximum.accumulate(np.where(k == other, number, -1))
                previous = np.r_[-1, previous[:-1]]
                pick = np.flatnonzero((k == mine) & (previous >= start))
                self.report_unordered(tensor, w, m, s, pick, previous[pick], clash, name)
                if mine == other:
                    continue
                following = np.minimum.accumulate(np.where(k == other, number, len(w))[::-1])[::-1]
                ok = np.flatnonzero((k == mine) & (following < len(w)))
                ok = ok[w[following[ok]] == w[ok]]
                self.report_unordered(tensor, w, m, s, following[ok], ok, clash, name)

    def report_unordered(self, tensor, w, m, s, later, earlier, clash, name: str) -> None:
        """Report the pairs of accesses that are not ordered."""
        if not len(later):
            return
        a, b = m[later], m[earlier]
        bad = clash(b, a)
        if tensor is self.shared:  # inside a block, or a warp of one with flags, the epochs decide
            bad &= (a ^ b) >> (u8(17) if self.flags else _TOP_AT) != 0
        bad = np.flatnonzero(bad)
        if not len(bad):
            return
        epochs_and_warps = ~u8(0) >> u8(64 - 36) & ~((u8(1) << u8(17)) - u8(1))
        whose = (s[earlier[bad]], b[bad] & epochs_and_warps, s[later[bad]], a[bad] & epochs_and_warps)
        pairs, pair_of = np.unique(
            np.stack([x.astype(np.int64) for x in whose], 1), axis=0, return_inverse=True
        )
        steps = [
            ((x, mx >> 22, mx >> 17 & 31), (y, my >> 22, my >> 17 & 31)) for x, mx, y, my in pairs.tolist()
        ]
        ordered = [self.clocks.is_ordered(*pair) for pair in steps]
        pair_of = pair_of.reshape(-1)
        keep = bad[
            [
                not ordered[pair] and not self.was_observed(tensor, int(w[later[k]]), b[k], steps[pair])
                for k, pair in zip(bad.tolist(), pair_of.tolist(), strict=True)
            ]
        ]
        if len(keep):
            self.log.report_global(tensor, w[later[keep]], a[keep], b[keep], np.ones(len(keep), bool), name)

    def was_observed(self, tensor, granule: int, mark, pair) -> bool:
        """Return whether the earlier access is a strong write that the later one's thread has observed."""
        A = self.log.run.code.accesses[(int(mark) & (1 << _INSTR) - 1) - 1]
        if not A.writes or A.kind != "A":
            return False
        if tensor is self.shared:
            return self.clocks.was_observed(
                -1 - granule * self.log.shared_granule // A.nbytes * A.nbytes, *pair
            )
        byte = granule * self.log.granule + tensor.start - self.log.run.arena.base
        return self.clocks.was_observed(byte // A.nbytes * A.nbytes, *pair)


def _t(t) -> str:
    return f"({t[0]}, {t[1]}, {t[2]})"


def _verb(A) -> str:
    """Name an access in a message."""
    if A.kind == "A":
        scope = " of block scope" if A.narrow else ""
        if A.instr.op in ("atom", "red"):
            return f"an atomic{scope}"
        return f"a strong {'load' if A.instr.op == 'ld' else 'store'}{scope}"
    return "a load" if A.kind == "R" else "a store"
