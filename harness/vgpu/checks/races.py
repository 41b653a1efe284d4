"""Race check: log every access and search for conflicts in bulk, independent of the actual schedule.

Two accesses to the same bytes by different threads conflict if one of them is a non-atomic store, or one is
atomic and the other is not. An atomic of block scope (`.cta`) is atomic only within its own block, and
conflicts with atomics of other blocks. Conflicting accesses are a race unless they are ordered:
- threads of different blocks only by release and acquire through a global atomic, or by a cluster barrier
  (below);
- threads of one block by a barrier between the accesses (they have different `epoch`);
- threads of one warp, in shared memory, by a bar.warp.sync of both between the accesses (`warp epoch`);
  shuffles, votes and matrix instructions make threads wait for each other, but do not order memory.

Each granule of memory (the smallest element the kernel accesses) has three marks: the last store, load and
atomic. A mark is one integer: block or warp epoch, barrier epoch, thread and instruction. Loads are compared
with the store mark and vice versa, so their execution order does not matter.

Kernels that use the result of an atomic or a strong load may order blocks by it ("the last block reduces");
warps of a block may be ordered by a flag in shared memory. Such kernels get vector clocks (clocks.py): an
atomic or strong load is an acquire only if its result is used and it, or a later fence, has acquire
semantics; a release needs release semantics or an earlier fence. Kernels with a cluster barrier get them too:
its arrive is a release (unless `.relaxed`), its wait an acquire. The log of such a launch is sorted and
checked when it ends; so is its log of shared memory if blocks of a cluster access each other's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from harness.vgpu.memory.arena import Extent, find_extent
from harness.vgpu.ptx.parser import WIDTH, Instr
from harness.vgpu.ptx.program import get_registers

from .clocks import Clocks, GridSharedMemory
from .events import Recorder
from .findings import format_count, format_index, format_triple, mark_name
from .warp_syncs import WarpSyncs

u8 = np.uint64
_INSTR, _THREAD, _EPOCH, _TOP = 12, 10, 14, 27
_THREAD_AT, _EPOCH_AT, _TOP_AT = u8(12), u8(22), u8(36)
_SEVERAL_BLOCKS = u8(1 << 63)
_EPOCH_MASK = (1 << _EPOCH) - 1
LIMIT = 1 << 22  # logged thread accesses before the log is processed
PART_SIZE = 1 << 14  # thread accesses compared at a time
ROLE_NUMBER = {"W": 0, "A": 1, "R": 2, "S": 3, "B": 4, "T": 5}
# Conflicting roles of each role (see Access.role), and those that conflict only between blocks.
CONFLICTS = {"W": "WASBTR", "A": "WR", "B": "WR", "R": "WAB", "S": "W", "T": "W"}
SCOPE_CONFLICTS = {"A": "BT", "B": "ABST", "S": "B", "T": "AB"}


def get_granule(program, spaces: tuple[str, ...]) -> int:
    """Return the size in bytes of the kernel's smallest accesses to these state spaces."""
    smallest = 8
    for block in program.blocks:
        for i in block.instrs:
            if i.op in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "mma"):
                modifiers = {m.split("::")[0] for m in i.mods}
                state_spaces = ("shared", "global", "local", "param", "const", "frame")
                space = next((s for s in state_spaces if s in modifiers), "generic")
                if space in spaces or i.op == "cp":
                    widths = [WIDTH[m] for m in i.mods if WIDTH.get(m)]
                    copy_size = 2 if "tensor" in i.mods else 4  # the element size of an untyped copy
                    smallest = min(smallest, copy_size if i.op == "cp" else widths[-1] if widths else 4)
    return smallest


def _may_acquire(program, i: Instr) -> bool:
    """Return whether an instruction may acquire: an atomic whose result is used, or a strong load."""
    if i.op == "atom":
        return any(r in program.read_registers for r in get_registers(i.args[0]))
    return i.op == "ld" and any(m in ("acquire", "relaxed", "volatile") for m in i.mods)


def may_synchronise(program) -> bool:
    is_poll = (
        _may_acquire(program, i) for i in program.instrs if not any(m.startswith("shared") for m in i.mods)
    )
    return any(is_poll) or any(b.kind == "cluster" for b in program.blocks)


def find_shared_ordering(program, cluster_size: int) -> tuple[bool, bool]:
    """Return whether warps of a block may synchronize through shared memory, and whether blocks of a cluster
    access each other's shared memory and synchronize only by means that clocks.py models (cluster barriers,
    fences, atomics)."""
    instrs, others = program.instrs, (("mbarrier", "cluster"), ("cp", "bulk"))
    flags = any(_may_acquire(program, i) for i in instrs if "global" not in i.mods)
    remote = cluster_size > 1 and any(i.op == "mapa" or "shared::cluster" in i.mods for i in instrs)
    return flags, remote and not any(i.op == op and m in i.mods for i in instrs for op, m in others)


class Marks:
    """The last store, load and atomic per granule of one tensor (or of a batch's shared memory)."""

    __slots__ = ("by_kind", "newest", "size")

    def __init__(self, size: int):
        self.size = size
        self.by_kind: dict[str, np.ndarray] = {}
        self.newest: dict[str, int] = {}  # for shared memory: last epoch among the marks of a kind

    def get_table(self, kind: str) -> np.ndarray:
        marks = self.by_kind.get(kind)
        if marks is None:
            marks = self.by_kind[kind] = np.zeros(self.size, u8)
        return marks


def find_global_clashes(other, mine):
    """Return a mask of the races in global memory: another block, or another thread in the same epoch."""
    x = other ^ mine
    return (other != 0) & ((x >> _TOP_AT != 0) | ((x >> _EPOCH_AT == 0) & (x >> _THREAD_AT != 0)))


def find_scope_clashes(other, mine):
    return (other != 0) & ((other ^ mine) >> _TOP_AT != 0)


def find_shared_clashes(other, mine):
    """Return a mask of the races in shared memory: same epoch, another thread, no warp sync in between."""
    x = other ^ mine
    same_epoch = (x >> _EPOCH_AT) & u8(_EPOCH_MASK) == 0
    thread = (x >> _THREAD_AT) & u8(1023)
    ordered = (thread >> u8(5) == 0) & (x >> _TOP_AT != 0)
    return (other != 0) & same_epoch & (thread != 0) & ~ordered


def group_by_role(entries) -> dict[str, list]:
    roles: dict[str, list] = {}
    for e in entries:
        roles.setdefault(e[0].role, []).append(e)
    return {role: roles[role] for role in sorted(roles, key=ROLE_NUMBER.__getitem__)}


def split_into_parts(entries):
    """Yield a log's entries in lists small enough for the CPU's cache."""
    part, size = [], 0
    for e in entries:
        part.append(e)
        size += len(e[2][0] if e[3] is None else e[3])
        if size >= PART_SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part


class LoggedBatch(Protocol):
    """The part of a batch (engine/interpreter/executor.py) that the log reads."""

    count: int  # thread blocks
    shared_size: int  # bytes of shared memory per block
    warps_per_block: int


class AccessLog:
    """The log of a launch's accesses, which feeds the counters and the event recorder, and finds races."""

    def __init__(self, run):
        self.run = run
        self.checking = run.checks.races
        self.counting = run.checks.counters
        self.events = Recorder(run, run.keep_events) if run.keep_events else None
        self.active = self.checking or self.counting or self.events is not None
        code = run.code
        if not hasattr(code, "granules"):
            code.granules = (
                get_granule(code.program, ("global", "generic", "const")),
                get_granule(code.program, ("shared", "generic")),
                may_synchronise(code.program),
            )
        self.granule, self.shared_granule, syncs = code.granules
        self.marks: dict[Extent, Marks] = {}
        self.entries: dict[Extent, list] = {}
        self.written: set[Extent] = set()
        self.uncounted: list = []
        self.size = self.shared_size = 0  # thread accesses in the logs
        self.has_store = False
        self.batch: LoggedBatch | None = None
        flags, remote = find_shared_ordering(code.program, run.cluster_size)
        self.ordered = OrderedLog(self, flags) if (syncs or flags or remote) and self.checking else None
        self.clocks = self.ordered.clocks if self.ordered else None
        self.flags, self.tracks_shared = flags, flags or remote
        self.warp_syncs = WarpSyncs()

    # -- called by the executor -----------------------------------------------------------------------------
    def start_batch(self, batch):
        self.batch = batch
        self.warp_syncs.partial.clear()
        self.shared: list = []
        self.shared_store = False
        self.segment = 0
        self.shared_marks: Marks | None = None
        self.ids: tuple | None = None

    def get_identity(self, batch):
        if self.ids is None or self.ids[0] is not batch.thread_of:
            thread = batch.thread_of.astype(u8) << _THREAD_AT
            block = batch.blocks[batch.block_of].astype(u8) << _TOP_AT
            self.ids = (batch.thread_of, block | thread, thread, batch.warp_of, batch.lane_of)
        return self.ids

    def add(self, batch, A, tensor: Extent, index, L):
        """Log a global access; `index` is in units of the access size, an int if it is the same for all."""
        if not self.active:
            return
        if self.events:
            self.events.add(batch, A, tensor, index, L)
        ids = self.get_identity(batch)
        epoch = batch.epochs(L)
        segment = self.clocks.get_segments(batch, L) if self.clocks else None
        entry = (A, index, ids, L, epoch, segment)
        self.entries.setdefault(tensor, []).append(entry)
        self.uncounted.append((entry, tensor))
        if A.writes or A.kind == "A":
            self.has_store = True
            self.written.add(tensor)
        self.size += batch.n if L is None else len(L)
        if self.clocks and A.kind == "A":
            addresses = np.broadcast_to(index, batch.n if L is None else len(L)) << A.shift
            self.clocks.process_access(batch, A, addresses, L)
        if self.size > LIMIT:
            self.digest_global(all_tensors=True)

    def add_shared(self, batch, A, index, L):
        """Log an access to the block's own shared memory (if it has none, the access was reported before)."""
        if not self.active or not batch.shared_size:
            return
        if self.events:
            self.events.add_shared(batch, A, index, L)
        ids = self.get_identity(batch)
        epoch = batch.epochs(L)
        top = 0
        if batch.warp_synced:
            top = batch.warp_epoch[batch.warp_of if L is None else batch.warp_of[L]]
        if self.ordered and self.tracks_shared:
            self.ordered.add_shared(batch, A, index, L)
        self.shared.append((A, index, ids, L, epoch, top, self.segment))
        self.shared_store = self.shared_store or A.kind != "R"
        self.shared_size += batch.n if L is None else len(L)
        if self.shared_size > LIMIT:
            self.digest_shared(keep_reads=True)

    def add_remote(self, batch, A, index, L):
        """Log an access to shared memory of another block of the cluster."""
        if self.ordered and self.tracks_shared:
            self.ordered.add_shared(batch, A, index, L)

    def barrier(self, batch, ready):
        """Record that the blocks `ready` (None: all) pass a barrier."""
        if self.events:
            self.events.add_barrier()
        if self.shared:
            self.digest_shared(keep_reads=ready is not None and not ready.all())
        if self.has_store and self.clocks is None:
            self.digest_global()

    def warp_sync(self, batch, mask, L):
        self.warp_syncs.add(batch, mask, L)
        if batch.shared_size and self.checking:
            batch.warp_synced = True
            self.segment += 1

    def finish(self):
        if self.batch is not None:
            self.digest()
        if self.ordered:
            self.ordered.finish()
        if self.events:
            self.run.launch.events = self.events.finish()

    def digest(self):
        if self.shared:
            self.digest_shared(keep_reads=False)
        self.digest_global()

    # -- global memory --------------------------------------------------------------------------------------
    def digest_global(self, all_tensors: bool = False):
        if self.counting and self.uncounted:
            self.run.counters.consume_global(self.uncounted)
        self.uncounted = []
        self.has_store = False
        if self.checking and self.ordered:
            self.ordered.extend(self.entries)
        elif self.checking:
            for tensor in list(self.entries):
                # Loads alone cannot race: they stay in the log until a store is logged or the log is full.
                if tensor in self.written or all_tensors:
                    self.compare_tensor(tensor, self.entries.pop(tensor))
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
            for k in range(cells):
                where.append(first + k if k else first)
                marks.append(mark)
        if len(where) == 1:
            return where[0], marks[0]
        return np.concatenate(where), np.concatenate(marks)

    def compare_tensor(self, tensor: Extent, entries):
        granule = self.granule
        marks = self.marks.get(tensor)
        if marks is None:
            marks = self.marks[tensor] = Marks((tensor.end - tensor.start) // granule + 2)
        base = tensor.start - self.run.arena.base
        logged = {
            role: self.expand(role_entries, granule, base)
            for role, role_entries in group_by_role(entries).items()
        }
        for kind, (where, mine) in logged.items():
            table = marks.get_table(kind)
            old = table[where]
            table[where] = mine
            won = table[where]
            several = ((won ^ mine) >> _TOP_AT != 0) | ((old != 0) & ((old ^ mine) >> _TOP_AT != 0))
            for other in (won, old):
                self.compare_global(tensor, kind, kind, where, mine, other)
            if several.any():
                table[where[several]] |= _SEVERAL_BLOCKS
        for kind, (where, mine) in logged.items():
            for against in marks.by_kind:
                if against != kind:
                    other = marks.by_kind[against][where]
                    self.compare_global(tensor, kind, against, where, mine, other)

    def compare_global(self, tensor, kind: str, against: str, where, mine, other):
        if against in CONFLICTS[kind]:
            self.report_global(tensor, where, mine, other, find_global_clashes(other, mine))
        elif against in SCOPE_CONFLICTS.get(kind, ""):
            self.report_global(tensor, where, mine, other, find_scope_clashes(other, mine), "atomic scope")

    def report_global(self, tensor, where, mine, other, bad, name: str = "global race"):
        if not bad.any():
            return
        if self.warp_syncs.connected.any():
            # Global marks have no warp epoch: two instructions of one warp count as ordered if some
            # bar.warp.sync connects their lanes; two threads at one instruction never do.
            x = other ^ mine
            connected = self.warp_syncs.connected[mine >> _THREAD_AT & u8(31), other >> _THREAD_AT & u8(31)]
            bad = bad & ~(connected & (x >> u8(17) == 0) & (x & u8((1 << _INSTR) - 1) != 0))
        # _SEVERAL_BLOCKS: other blocks have accessed the granule too. Report the mark's block if it differs.
        across = bad & (((other ^ mine) >> _TOP_AT) != 0)
        granule = self.shared_granule if isinstance(tensor, GridSharedMemory) else self.granule
        for part, kind in ((across, name), (bad & ~across, "race inside a block")):
            if part.any():
                self.report(kind, tensor, where[part], mine[part], other[part], granule)

    def report(self, kind, tensor, where, mine, other, granule, batch=None):
        """Report one finding per pair of instructions."""

        run = self.run
        mask = u8((1 << _INSTR) - 1)
        a, b = mine & mask, other & mask
        pair = np.where(a < b, a << u8(12) | b, b << u8(12) | a)
        for value in np.unique(pair):
            indices = np.flatnonzero(pair == value)
            k = int(indices[0])
            first = self.run.code.accesses[int(a[k]) - 1]
            second = self.run.code.accesses[int(b[k]) - 1]
            own_mark, other_mark = int(mine[k]), int(other[k])
            cells = len(np.unique(where[indices]))
            byte = int(where[k]) * granule
            thread = run.thread_index(own_mark >> 12 & 1023)
            their_thread = run.thread_index(other_mark >> 12 & 1023)
            theirs = block = run.block_index(own_mark >> 36 & (1 << _TOP) - 1)
            owner_text = ""
            if isinstance(tensor, GridSharedMemory):
                name, index, owner = tensor.part(byte, first.width)
                theirs = run.block_index(other_mark >> 36 & (1 << _TOP) - 1)
                if theirs != block or owner != (own_mark >> 36 & (1 << _TOP) - 1):
                    owner_text = f" of block {format_triple(run.block_index(owner))}"
                kind = "shared race" if kind != "atomic scope" else kind
            elif kind == "shared race":
                assert batch is not None  # other shared memory belongs to the blocks of a batch
                local = byte % batch.shared_size
                theirs = block = run.block_index(int(batch.blocks[byte // batch.shared_size]))
                extent = find_extent(run.shared_extents, local)
                name = extent.name if extent else "shared memory"
                index = extent.index(local, first.width) if extent else None
            else:
                name, index = tensor.name, tensor.index(tensor.start + byte, first.width)
                theirs = run.block_index(other_mark >> 36 & (1 << _TOP) - 1)
            verb = describe_access(second)
            if kind in ("global race", "atomic scope"):
                other_block = f"block {format_triple(theirs)}" if theirs != block else "another block"
                order = "nothing orders the blocks of a grid"
                if self.ordered:
                    order = "no release and acquire covers these two threads (is a barrier missing?)"
                if kind == "atomic scope":
                    order = "an atomic of block scope is atomic within its block only"
                conflict = f"block {format_triple(block)} and {verb} by {other_block}: {order}"
            elif theirs != block:
                conflict = (
                    f"block {format_triple(block)} and {verb} by block {format_triple(theirs)}"
                    " of its cluster: no barrier of the cluster is between them"
                )
            else:
                conflict = (
                    f"thread {format_triple(thread)} and {verb} by thread {format_triple(their_thread)} of"
                    " the same block, with no barrier between them"
                )
            location = f"{mark_name(name)}{owner_text}{format_index(index)}"
            message = f"{location}: {describe_access(first)} by {conflict} ({format_count(cells, 'place')})"
            run.record(
                kind, first.instr, message, tensor=name, index=index, block=block, thread=thread,
                count=cells, other=second.instr, verbs=frozenset((describe_access(first), verb)),
            )  # fmt: skip

    # -- shared memory --------------------------------------------------------------------------------------
    def digest_shared(self, keep_reads: bool):
        batch = self.batch
        assert batch is not None  # the entries are its accesses
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
            self.compare_shared(self.shared_marks, part, keep_reads or len(segments) > 1)

    def compare_shared(self, marks: Marks, entries, keep_reads: bool):
        oldest = min(int(np.min(e[4])) for e in entries)
        roles = group_by_role(entries)
        for kind, role_entries in roles.items():
            if kind == "R" and not keep_reads:
                continue
            table = marks.get_table(kind)
            if kind == "W":
                where, mine = self.expand(role_entries, self.shared_granule)
                old = table[where]
                table[where] = mine
                for other in (table[where], old):
                    self.report_shared([(where, mine, other)])
            else:
                for part in split_into_parts(role_entries):
                    where, mine = self.expand(part, self.shared_granule)
                    table[where] = mine
            newest = max(int(np.max(e[4])) for e in role_entries)
            marks.newest[kind] = max(marks.newest.get(kind, -1), newest)
        for kind, role_entries in roles.items():
            for against in CONFLICTS[kind]:
                # Marks that are all from earlier epochs, such as those of a tile stored before a barrier, cannot conflict.
                if against != kind and marks.newest.get(against, -1) >= oldest:
                    table = marks.by_kind[against]
                    expanded = (
                        self.expand(part, self.shared_granule) for part in split_into_parts(role_entries)
                    )
                    self.report_shared((where, mine, table[where]) for where, mine in expanded)

    def report_shared(self, parts):
        clashes = []
        for where, mine, other in parts:
            bad = find_shared_clashes(other, mine)
            if self.warp_syncs.partial:
                bad |= self.find_clashes_in_warp(where, mine, other)
            if self.flags:  # warps are checked with the clocks
                bad &= (other ^ mine) >> u8(17) & u8(31) == 0
            if bad.any():
                clashes.append((where[bad], mine[bad], other[bad]))
        if clashes:
            where, mine, other = map(np.concatenate, zip(*clashes, strict=True))
            self.report("shared race", None, where, mine, other, self.shared_granule, self.batch)

    def find_clashes_in_warp(self, where, mine, other):
        """Return a mask of the races between lanes of a warp that no warp synchronization orders."""
        batch = self.batch
        assert batch is not None
        x = other ^ mine
        mask = (other != 0) & ((x >> _EPOCH_AT) & u8(_EPOCH_MASK) == 0) & ((x >> u8(17)) & u8(31) == 0)
        mask &= (x >> _THREAD_AT) & u8(31) != 0
        hits = np.flatnonzero(mask)
        block = where[hits] * self.shared_granule // batch.shared_size
        warps = block.astype(u8) * u8(batch.warps_per_block) + (mine[hits] >> u8(17) & u8(31))
        pairs = [(m >> _TOP_AT, m >> _THREAD_AT & u8(31)) for m in (mine[hits], other[hits])]
        mask[hits] = self.warp_syncs.find_unordered(np.stack([warps, *pairs[0], *pairs[1]]).astype(np.int64))
        return mask


class OrderedLog:
    """The log of a launch whose threads synchronize by more than barriers, checked with clocks at its end."""

    def __init__(self, log: AccessLog, flags: bool):
        run = log.run
        self.log, self.flags = log, flags
        self.clocks = Clocks(run.cluster_size)
        gx, gy, gz = run.grid
        self.shared = GridSharedMemory(gx * gy * gz, run.shared_size, run.shared_extents)
        self.entries: dict[Extent, list] = {}
        # accesses to other blocks' shared memory, one per warp and segment
        self.remote: dict[tuple, tuple] = {}

    def extend(self, entries: dict) -> None:
        """Add entries of global memory."""
        for tensor, added in entries.items():
            self.entries.setdefault(tensor, []).extend(added)

    def add_shared(self, batch, A, index, L) -> None:
        """Log a shared access; `index` is in units of the access size, in the batch's shared memory."""
        positions = batch.positions(L)
        slot, byte = np.divmod(np.broadcast_to(index, len(positions)) << A.shift, self.shared.size)
        address = batch.blocks[slot] * self.shared.size + byte
        segments = self.clocks.get_segments(batch, L)
        entry = (A, address >> A.shift, self.log.get_identity(batch), L, batch.epochs(L), segments)
        self.entries.setdefault(self.shared, []).append(entry)
        if A.kind == "A":
            self.clocks.process_access(batch, A, -1 - address, L)
        home = batch.block_of[positions]
        for k in np.flatnonzero(slot != home).tolist():
            warp, epoch = int(batch.thread_of[positions[k]]) >> 5, int(batch.epoch[home[k]]) & _EPOCH_MASK
            key = A.number, int(segments[0][k]), epoch, warp, int(batch.blocks[slot[k]])
            accessor = int(batch.blocks[home[k]]), int(batch.thread_of[positions[k]])
            self.remote.setdefault(key, (A, int(address[k]), *accessor))

    def finish(self) -> None:
        """Check the whole log after the launch."""
        for tensor, entries in self.entries.items():
            if any(e[0].kind != "R" for e in entries):
                self.check(tensor, entries)
        for (_, segment, epoch, warp, owner), access in self.remote.items():
            if not self.clocks.happens_before_exit((segment, epoch, warp), owner):
                self.report_late(*access)

    def report_late(self, A, place: int, block: int, thread: int) -> None:
        """Report an access to the shared memory of a block that may have returned."""
        run = self.log.run
        name, index, owner = self.shared.part(place, A.width)
        message = (
            f"{describe_access(A)} by block {format_triple(run.block_index(block))} of"
            f" {mark_name(name)}{format_index(index)} of block {format_triple(run.block_index(owner))}, which may"
            " have returned by then: a barrier of the cluster must come after it"
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
            kinds.append(np.full(len(w), ROLE_NUMBER[e[0].role]))
            segments.append(np.tile(e[5][0], repeat))
            times.append(np.full(len(w), e[5][1]))
        w, m, k, s, t = (np.concatenate(x) for x in (where, marks, kinds, segments, times))
        order = np.lexsort((t, w))
        w, m, k, s = w[order], m[order], k[order], s[order]
        number = np.arange(len(w))
        first = np.r_[True, w[1:] != w[:-1]]
        start = np.maximum.accumulate(np.where(first, number, 0))
        roles_present = np.unique(k).tolist()
        for first_role, mine in ROLE_NUMBER.items():
            for second_role, other in ROLE_NUMBER.items():
                if mine not in roles_present or other not in roles_present:
                    continue
                if second_role in CONFLICTS[first_role]:
                    clash, name = find_global_clashes, "global race"
                elif second_role in SCOPE_CONFLICTS.get(first_role, ""):
                    clash, name = find_scope_clashes, "atomic scope"
                else:
                    continue
                # the last earlier access of the other role to the same granule
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
        if not len(later):
            return
        a, b = m[later], m[earlier]
        bad = clash(b, a)
        if tensor is self.shared:  # conflicts within a block, or with flags within a warp, are found by epoch
            bad &= (a ^ b) >> (u8(17) if self.flags else _TOP_AT) != 0
        bad = np.flatnonzero(bad)
        if not len(bad):
            return
        epochs_and_warps = ~u8(0) >> u8(64 - 36) & ~((u8(1) << u8(17)) - u8(1))
        columns = (s[earlier[bad]], b[bad] & epochs_and_warps, s[later[bad]], a[bad] & epochs_and_warps)
        pairs, pair_of = np.unique(
            np.stack([x.astype(np.int64) for x in columns], 1), axis=0, return_inverse=True
        )
        steps = [
            ((x, mx >> 22, mx >> 17 & 31), (y, my >> 22, my >> 17 & 31)) for x, mx, y, my in pairs.tolist()
        ]
        ordered = [self.clocks.is_ordered(*pair) for pair in steps]
        racing = [
            not ordered[pair] and not self.was_observed(tensor, int(w[later[k]]), b[k], steps[pair])
            for k, pair in zip(bad.tolist(), pair_of.reshape(-1).tolist(), strict=True)
        ]
        keep = bad[racing]
        if len(keep):
            self.log.report_global(tensor, w[later[keep]], a[keep], b[keep], np.ones(len(keep), bool), name)

    def was_observed(self, tensor, granule: int, mark, pair) -> bool:
        """Return whether the earlier access is a strong write that the later access's thread has observed."""
        A = self.log.run.code.accesses[(int(mark) & (1 << _INSTR) - 1) - 1]
        if not A.writes or A.kind != "A":
            return False
        if tensor is self.shared:
            key = -1 - granule * self.log.shared_granule // A.nbytes * A.nbytes
        else:
            byte = granule * self.log.granule + tensor.start - self.log.run.arena.base
            key = byte // A.nbytes * A.nbytes
        return self.clocks.was_observed(key, *pair)


def describe_access(A) -> str:
    if A.kind == "A":
        scope = " of block scope" if A.is_block_scope else ""
        if A.instr.op in ("atom", "red"):
            return f"an atomic{scope}"
        return f"a strong {'load' if A.instr.op == 'ld' else 'store'}{scope}"
    return "a load" if A.kind == "R" else "a store"
