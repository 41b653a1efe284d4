"""Race check: log every access and search the log for conflicts, independent of the actual schedule.

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
from .events import EventRecorder
from .findings import format_count, format_index, format_triple, mark_name
from .warp_syncs import WarpSyncs

u8 = np.uint64
_INSTR_BITS, _THREAD, _EPOCH_BITS, _TOP_BITS = 12, 10, 14, 27
_THREAD_SHIFT, _EPOCH_SHIFT, _TOP_SHIFT = u8(12), u8(22), u8(36)
_SEVERAL_BLOCKS = u8(1 << 63)
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1
MAX_LOGGED_ACCESSES = 1 << 22  # logged thread accesses before the log is processed
CHUNK_SIZE = 1 << 14  # thread accesses compared at a time
ROLE_NUMBERS = {"W": 0, "A": 1, "R": 2, "S": 3, "B": 4, "T": 5}
# Conflicting roles of each role (see Access.role), and those that conflict only between blocks.
CONFLICTS = {"W": "WASBTR", "A": "WR", "B": "WR", "R": "WAB", "S": "W", "T": "W"}
SCOPE_CONFLICTS = {"A": "BT", "B": "ABST", "S": "B", "T": "AB"}


def get_granule(program, spaces: tuple[str, ...]) -> int:
    """Return the size in bytes of the kernel's smallest accesses to these state spaces."""
    width = 8
    for block in program.blocks:
        for i in block.instrs:
            if i.op in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "mma"):
                modifiers = {m.split("::")[0] for m in i.mods}
                state_spaces = ("shared", "global", "local", "param", "const", "frame")
                space = next((s for s in state_spaces if s in modifiers), "generic")
                if space in spaces or i.op == "cp":
                    widths = [WIDTH[m] for m in i.mods if WIDTH.get(m)]
                    copy_size = 2 if "tensor" in i.mods else 4  # the element size of an untyped copy
                    width = min(width, copy_size if i.op == "cp" else widths[-1] if widths else 4)
    return width


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
    uses_flags = any(_may_acquire(program, i) for i in instrs if "global" not in i.mods)
    has_remote_accesses = cluster_size > 1 and any(
        i.op == "mapa" or "shared::cluster" in i.mods for i in instrs
    )
    return uses_flags, has_remote_accesses and not any(
        i.op == op and m in i.mods for i in instrs for op, m in others
    )


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


def find_global_conflicts(other_marks, marks):
    """Return a mask of the races in global memory: another block, or another thread in the same epoch."""
    x = other_marks ^ marks
    return (other_marks != 0) & (
        (x >> _TOP_SHIFT != 0) | ((x >> _EPOCH_SHIFT == 0) & (x >> _THREAD_SHIFT != 0))
    )


def find_scope_conflicts(other_marks, marks):
    return (other_marks != 0) & ((other_marks ^ marks) >> _TOP_SHIFT != 0)


def find_shared_conflicts(other_marks, marks):
    """Return a mask of the races in shared memory: same epoch, another thread, no warp sync in between."""
    x = other_marks ^ marks
    same_epoch = (x >> _EPOCH_SHIFT) & u8(_EPOCH_MASK) == 0
    thread = (x >> _THREAD_SHIFT) & u8(1023)
    ordered = (thread >> u8(5) == 0) & (x >> _TOP_SHIFT != 0)
    return (other_marks != 0) & same_epoch & (thread != 0) & ~ordered


def group_by_role(entries) -> dict[str, list]:
    roles: dict[str, list] = {}
    for e in entries:
        roles.setdefault(e[0].role, []).append(e)
    return {role: roles[role] for role in sorted(roles, key=ROLE_NUMBERS.__getitem__)}


def split_into_chunks(entries):
    """Yield a log's entries in lists small enough for the CPU's cache."""
    chunk, size = [], 0
    for e in entries:
        chunk.append(e)
        size += len(e[2][0] if e[3] is None else e[3])
        if size >= CHUNK_SIZE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class BatchLayout(Protocol):
    """The part of a batch (engine/interpreter/executor.py) that the log reads."""

    num_blocks: int
    shared_size: int  # bytes of shared memory per block
    warps_per_block: int


class AccessLog:
    """The log of a launch's accesses, which feeds the counters and the event recorder, and finds races."""

    def __init__(self, run):
        self.run = run
        self.checks_races = run.checks.races
        self.counts_accesses = run.checks.counters
        self.events = EventRecorder(run, run.max_events) if run.max_events else None
        self.is_active = self.checks_races or self.counts_accesses or self.events is not None
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
        self.written_tensors: set[Extent] = set()
        self.uncounted_entries: list = []
        self.size = self.shared_size = 0  # thread accesses in the logs
        self.has_store = False
        self.batch: BatchLayout | None = None
        uses_flags, has_remote_accesses = find_shared_ordering(code.program, run.cluster_size)
        self.ordered_log = (
            OrderedLog(self, uses_flags)
            if (syncs or uses_flags or has_remote_accesses) and self.checks_races
            else None
        )
        self.clocks = self.ordered_log.clocks if self.ordered_log else None
        self.uses_flags, self.tracks_shared = uses_flags, uses_flags or has_remote_accesses
        self.warp_syncs = WarpSyncs()

    # -- called by the executor -----------------------------------------------------------------------------
    def start_batch(self, batch):
        self.batch = batch
        self.warp_syncs.partial_syncs.clear()
        self.shared: list = []
        self.shared_store = False
        self.segment = 0
        self.shared_marks: Marks | None = None
        self.thread_ids: tuple | None = None

    def get_thread_ids(self, batch):
        if self.thread_ids is None or self.thread_ids[0] is not batch.thread_of:
            thread = batch.thread_of.astype(u8) << _THREAD_SHIFT
            block = batch.blocks[batch.block_of].astype(u8) << _TOP_SHIFT
            self.thread_ids = (batch.thread_of, block | thread, thread, batch.warp_of, batch.lane_of)
        return self.thread_ids

    def add(self, batch, access, tensor: Extent, index, active):
        """Log a global access; `index` is in units of the access size, an int if it is the same for all."""
        if not self.is_active:
            return
        if self.events:
            self.events.add(batch, access, tensor, index, active)
        thread_ids = self.get_thread_ids(batch)
        epoch = batch.get_epochs(active)
        segment = self.clocks.get_segments(batch, active) if self.clocks else None
        entry = (access, index, thread_ids, active, epoch, segment)
        self.entries.setdefault(tensor, []).append(entry)
        self.uncounted_entries.append((entry, tensor))
        if access.writes or access.kind == "A":
            self.has_store = True
            self.written_tensors.add(tensor)
        self.size += batch.num_threads if active is None else len(active)
        if self.clocks and access.kind == "A":
            addresses = (
                np.broadcast_to(index, batch.num_threads if active is None else len(active)) << access.shift
            )
            self.clocks.process_access(batch, access, addresses, active)
        if self.size > MAX_LOGGED_ACCESSES:
            self.process_global_log(all_tensors=True)

    def add_shared(self, batch, access, index, active):
        """Log an access to the block's own shared memory, if any (otherwise it has already been reported)."""
        if not self.is_active or not batch.shared_size:
            return
        if self.events:
            self.events.add_shared(batch, access, index, active)
        thread_ids = self.get_thread_ids(batch)
        epoch = batch.get_epochs(active)
        warp_epochs = 0
        if batch.warp_synced:
            warp_epochs = batch.warp_epoch[batch.warp_of if active is None else batch.warp_of[active]]
        if self.ordered_log and self.tracks_shared:
            self.ordered_log.add_shared(batch, access, index, active)
        self.shared.append((access, index, thread_ids, active, epoch, warp_epochs, self.segment))
        self.shared_store = self.shared_store or access.kind != "R"
        self.shared_size += batch.num_threads if active is None else len(active)
        if self.shared_size > MAX_LOGGED_ACCESSES:
            self.process_shared_log(keep_reads=True)

    def add_remote(self, batch, access, index, active):
        """Log an access to shared memory of another block of the cluster."""
        if self.ordered_log and self.tracks_shared:
            self.ordered_log.add_shared(batch, access, index, active)

    def barrier(self, batch, ready):
        """Record that a mask `ready` of blocks (None: all blocks) passes a barrier."""
        if self.events:
            self.events.add_barrier()
        if self.shared:
            self.process_shared_log(keep_reads=ready is not None and not ready.all())
        if self.has_store and self.clocks is None:
            self.process_global_log()

    def warp_sync(self, batch, mask, active):
        self.warp_syncs.add(batch, mask, active)
        if batch.shared_size and self.checks_races:
            batch.warp_synced = True
            self.segment += 1

    def finish(self):
        if self.batch is not None:
            self.process_logs()
        if self.ordered_log:
            self.ordered_log.finish()
        if self.events:
            self.run.launch.events = self.events.finish()

    def process_logs(self):
        if self.shared:
            self.process_shared_log(keep_reads=False)
        self.process_global_log()

    # -- global memory --------------------------------------------------------------------------------------
    def process_global_log(self, all_tensors: bool = False):
        if self.counts_accesses and self.uncounted_entries:
            self.run.counters.count_global_accesses(self.uncounted_entries)
        self.uncounted_entries = []
        self.has_store = False
        if self.checks_races and self.ordered_log:
            self.ordered_log.extend(self.entries)
        elif self.checks_races:
            for tensor in list(self.entries):
                # Loads alone cannot race: they stay in the log until a store is logged or the log is full.
                if tensor in self.written_tensors or all_tensors:
                    self.compare_tensor(tensor, self.entries.pop(tensor))
        if not self.checks_races or self.ordered_log:
            self.entries = {}
        if not self.entries:
            self.size = 0

    def expand(self, entries, granule: int, base: int = 0):
        """Return arrays (granule index, mark) of entries of one kind."""
        granules, marks = [], []
        for e in entries:
            access, index, thread_ids, active, epoch = e[:5]
            shared = len(e) == 7
            identity = thread_ids[2 if shared else 1]
            mark = identity if active is None else identity[active]
            extra = u8(min(access.number + 1, 4095))  # a mark is never 0
            if np.ndim(epoch):
                mark = mark | ((epoch.astype(u8) & u8(_EPOCH_MASK)) << _EPOCH_SHIFT) | extra
            else:
                mark = mark | (u8((int(epoch) & _EPOCH_MASK) << 22) | extra)
            if shared:
                warp_epoch = e[5]
                if np.ndim(warp_epoch):
                    mark = mark | (warp_epoch.astype(u8) << _TOP_SHIFT)
            cells = max(access.nbytes // granule, 1)
            if np.ndim(index) == 0:
                index = np.full(len(mark), index)
            first = (((index << access.shift) - base) // granule) if cells == 1 or base else index * cells
            for k in range(cells):
                granules.append(first + k if k else first)
                marks.append(mark)
        if len(granules) == 1:
            return granules[0], marks[0]
        return np.concatenate(granules), np.concatenate(marks)

    def compare_tensor(self, tensor: Extent, entries):
        granule = self.granule
        tables = self.marks.get(tensor)
        if tables is None:
            tables = self.marks[tensor] = Marks((tensor.end - tensor.start) // granule + 2)
        base = tensor.start - self.run.arena.base
        logged = {
            role: self.expand(role_entries, granule, base)
            for role, role_entries in group_by_role(entries).items()
        }
        for kind, (granules, marks) in logged.items():
            table = tables.get_table(kind)
            previous = table[granules]
            table[granules] = marks
            newest = table[granules]
            has_several_blocks = ((newest ^ marks) >> _TOP_SHIFT != 0) | (
                (previous != 0) & ((previous ^ marks) >> _TOP_SHIFT != 0)
            )
            for other_marks in (newest, previous):
                self.compare_global(tensor, kind, kind, granules, marks, other_marks)
            if has_several_blocks.any():
                table[granules[has_several_blocks]] |= _SEVERAL_BLOCKS
        for kind, (granules, marks) in logged.items():
            for other_kind in tables.by_kind:
                if other_kind != kind:
                    other_marks = tables.by_kind[other_kind][granules]
                    self.compare_global(tensor, kind, other_kind, granules, marks, other_marks)

    def compare_global(self, tensor, kind: str, other_kind: str, granules, marks, other_marks):
        if other_kind in CONFLICTS[kind]:
            self.report_global(
                tensor, granules, marks, other_marks, find_global_conflicts(other_marks, marks)
            )
        elif other_kind in SCOPE_CONFLICTS.get(kind, ""):
            self.report_global(
                tensor, granules, marks, other_marks, find_scope_conflicts(other_marks, marks), "atomic scope"
            )

    def report_global(self, tensor, granules, marks, other_marks, is_race, race_kind: str = "global race"):
        if not is_race.any():
            return
        if self.warp_syncs.connected.any():
            # Global marks have no warp epoch: two instructions of one warp count as ordered if some
            # bar.warp.sync connects their lanes; two threads at one instruction never do.
            x = other_marks ^ marks
            connected = self.warp_syncs.connected[
                marks >> _THREAD_SHIFT & u8(31), other_marks >> _THREAD_SHIFT & u8(31)
            ]
            is_race = is_race & ~(connected & (x >> u8(17) == 0) & (x & u8((1 << _INSTR_BITS) - 1) != 0))
        # _SEVERAL_BLOCKS: other blocks have accessed the granule too. Report the mark's block if it differs.
        across = is_race & (((other_marks ^ marks) >> _TOP_SHIFT) != 0)
        granule = self.shared_granule if isinstance(tensor, GridSharedMemory) else self.granule
        for chunk, kind in ((across, race_kind), (is_race & ~across, "race inside a block")):
            if chunk.any():
                self.report(kind, tensor, granules[chunk], marks[chunk], other_marks[chunk], granule)

    def report(self, kind, tensor, granules, marks, other_marks, granule, batch=None):
        """Report one finding per pair of instructions."""

        run = self.run
        mask = u8((1 << _INSTR_BITS) - 1)
        a, b = marks & mask, other_marks & mask
        pair = np.where(a < b, a << u8(12) | b, b << u8(12) | a)
        for value in np.unique(pair):
            indices = np.flatnonzero(pair == value)
            k = int(indices[0])
            first = self.run.code.accesses[int(a[k]) - 1]
            second = self.run.code.accesses[int(b[k]) - 1]
            own_mark, other_mark = int(marks[k]), int(other_marks[k])
            cells = len(np.unique(granules[indices]))
            byte = int(granules[k]) * granule
            thread = run.thread_index(own_mark >> 12 & 1023)
            their_thread = run.thread_index(other_mark >> 12 & 1023)
            theirs = block = run.block_index(own_mark >> 36 & (1 << _TOP_BITS) - 1)
            owner_text = ""
            if isinstance(tensor, GridSharedMemory):
                name, index, owner = tensor.locate(byte, first.width)
                theirs = run.block_index(other_mark >> 36 & (1 << _TOP_BITS) - 1)
                if theirs != block or owner != (own_mark >> 36 & (1 << _TOP_BITS) - 1):
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
                theirs = run.block_index(other_mark >> 36 & (1 << _TOP_BITS) - 1)
            other_access = describe_access(second)
            if kind in ("global race", "atomic scope"):
                other_block = f"block {format_triple(theirs)}" if theirs != block else "another block"
                order = "nothing orders the blocks of a grid"
                if self.ordered_log:
                    order = "no release and acquire covers these two threads (is a barrier missing?)"
                if kind == "atomic scope":
                    order = "an atomic of block scope is atomic within its block only"
                conflict = f"block {format_triple(block)} and {other_access} by {other_block}: {order}"
            elif theirs != block:
                conflict = (
                    f"block {format_triple(block)} and {other_access} by block {format_triple(theirs)}"
                    " of its cluster: no barrier of the cluster is between them"
                )
            else:
                conflict = (
                    f"thread {format_triple(thread)} and {other_access} by thread {format_triple(their_thread)} of"
                    " the same block, with no barrier between them"
                )
            location = f"{mark_name(name)}{owner_text}{format_index(index)}"
            message = f"{location}: {describe_access(first)} by {conflict} ({format_count(cells, 'place')})"
            run.record(
                kind, first.instr, message, tensor=name, index=index, block=block, thread=thread,
                count=cells, other_instr=second.instr, access_kinds=frozenset((describe_access(first), other_access)),
            )  # fmt: skip

    # -- shared memory --------------------------------------------------------------------------------------
    def process_shared_log(self, keep_reads: bool):
        batch = self.batch
        assert batch is not None  # the entries are its accesses
        entries, self.shared, self.shared_size = self.shared, [], 0
        store, self.shared_store = self.shared_store, False
        if self.counts_accesses:
            self.run.counters.count_shared_accesses(batch, entries)
        # Loads matter only if a store may follow in the same epoch.
        if not self.checks_races or not (store or keep_reads or self.shared_marks is not None):
            return
        if self.shared_marks is None:
            self.shared_marks = Marks(batch.num_blocks * batch.shared_size // self.shared_granule + 1)
        segments: list[list] = []
        for e in entries:
            if not segments or segments[-1][0][6] != e[6]:
                segments.append([])
            segments[-1].append(e)
        for chunk in segments:
            self.check_shared_accesses(self.shared_marks, chunk, keep_reads or len(segments) > 1)

    def check_shared_accesses(self, tables: Marks, entries, keep_reads: bool):
        oldest = min(int(np.min(e[4])) for e in entries)
        roles = group_by_role(entries)
        for kind, role_entries in roles.items():
            if kind == "R" and not keep_reads:
                continue
            table = tables.get_table(kind)
            if kind == "W":
                granules, marks = self.expand(role_entries, self.shared_granule)
                previous = table[granules]
                table[granules] = marks
                for other_marks in (table[granules], previous):
                    self.report_shared([(granules, marks, other_marks)])
            else:
                for chunk in split_into_chunks(role_entries):
                    granules, marks = self.expand(chunk, self.shared_granule)
                    table[granules] = marks
            newest = max(int(np.max(e[4])) for e in role_entries)
            tables.newest[kind] = max(tables.newest.get(kind, -1), newest)
        for kind, role_entries in roles.items():
            for other_kind in CONFLICTS[kind]:
                # Marks from earlier epochs, such as those of a tile stored before a barrier, cannot conflict.
                if other_kind != kind and tables.newest.get(other_kind, -1) >= oldest:
                    table = tables.by_kind[other_kind]
                    expanded = (
                        self.expand(chunk, self.shared_granule) for chunk in split_into_chunks(role_entries)
                    )
                    self.report_shared((granules, marks, table[granules]) for granules, marks in expanded)

    def report_shared(self, parts):
        conflicts = []
        for granules, marks, other_marks in parts:
            is_race = find_shared_conflicts(other_marks, marks)
            if self.warp_syncs.partial_syncs:
                is_race |= self.find_warp_conflicts(granules, marks, other_marks)
            if self.uses_flags:  # warps are checked with the clocks
                is_race &= (other_marks ^ marks) >> u8(17) & u8(31) == 0
            if is_race.any():
                conflicts.append((granules[is_race], marks[is_race], other_marks[is_race]))
        if conflicts:
            granules, marks, other_marks = map(np.concatenate, zip(*conflicts, strict=True))
            self.report("shared race", None, granules, marks, other_marks, self.shared_granule, self.batch)

    def find_warp_conflicts(self, granules, marks, other_marks):
        """Return a mask of the races between lanes of a warp that no warp synchronization orders."""
        batch = self.batch
        assert batch is not None
        x = other_marks ^ marks
        mask = (
            (other_marks != 0) & ((x >> _EPOCH_SHIFT) & u8(_EPOCH_MASK) == 0) & ((x >> u8(17)) & u8(31) == 0)
        )
        mask &= (x >> _THREAD_SHIFT) & u8(31) != 0
        indices = np.flatnonzero(mask)
        block = granules[indices] * self.shared_granule // batch.shared_size
        warps = block.astype(u8) * u8(batch.warps_per_block) + (marks[indices] >> u8(17) & u8(31))
        pairs = [
            (m >> _TOP_SHIFT, m >> _THREAD_SHIFT & u8(31)) for m in (marks[indices], other_marks[indices])
        ]
        mask[indices] = self.warp_syncs.find_unordered(
            np.stack([warps, *pairs[0], *pairs[1]]).astype(np.int64)
        )
        return mask


class OrderedLog:
    """The log of a launch whose threads synchronize by more than barriers, checked with clocks at its end."""

    def __init__(self, log: AccessLog, uses_flags: bool):
        run = log.run
        self.log, self.uses_flags = log, uses_flags
        self.clocks = Clocks(run.cluster_size)
        gx, gy, gz = run.grid
        self.shared = GridSharedMemory(gx * gy * gz, run.shared_size, run.shared_extents)
        self.entries: dict[Extent, list] = {}
        # accesses to other blocks' shared memory, one per warp and segment
        self.remote_accesses: dict[tuple, tuple] = {}

    def extend(self, entries: dict) -> None:
        for tensor, added in entries.items():
            self.entries.setdefault(tensor, []).extend(added)

    def add_shared(self, batch, access, index, active) -> None:
        """Log a shared access; `index` is in units of the access size, in the batch's shared memory."""
        positions = batch.get_positions(active)
        slot, byte = np.divmod(np.broadcast_to(index, len(positions)) << access.shift, self.shared.size)
        address = batch.blocks[slot] * self.shared.size + byte
        segments = self.clocks.get_segments(batch, active)
        entry = (
            access, address >> access.shift, self.log.get_thread_ids(batch), active, batch.get_epochs(active),
            segments,
        )  # fmt: skip
        self.entries.setdefault(self.shared, []).append(entry)
        if access.kind == "A":
            self.clocks.process_access(batch, access, -1 - address, active)
        home = batch.block_of[positions]
        for k in np.flatnonzero(slot != home).tolist():
            warp, epoch = int(batch.thread_of[positions[k]]) >> 5, int(batch.epoch[home[k]]) & _EPOCH_MASK
            key = access.number, int(segments[0][k]), epoch, warp, int(batch.blocks[slot[k]])
            accessor = int(batch.blocks[home[k]]), int(batch.thread_of[positions[k]])
            self.remote_accesses.setdefault(key, (access, int(address[k]), *accessor))

    def finish(self) -> None:
        """Check the whole log after the launch."""
        for tensor, entries in self.entries.items():
            if any(e[0].kind != "R" for e in entries):
                self.check(tensor, entries)
        for (_, segment, epoch, warp, owner), item in self.remote_accesses.items():
            if not self.clocks.happens_before_exit((segment, epoch, warp), owner):
                self.report_access_after_exit(*item)

    def report_access_after_exit(self, access, byte: int, block: int, thread: int) -> None:
        """Report an access to the shared memory of a block that may have returned."""
        run = self.log.run
        name, index, owner = self.shared.locate(byte, access.width)
        message = (
            f"{describe_access(access)} by block {format_triple(run.block_index(block))} of"
            f" {mark_name(name)}{format_index(index)} of block {format_triple(run.block_index(owner))}, which may"
            " have returned by then: a barrier of the cluster must come after it"
        )
        run.record(
            "early return", access.instr, message, tensor=name, index=index, block=run.block_index(block),
            thread=run.thread_index(thread),
        )  # fmt: skip

    def check(self, tensor: Extent, entries) -> None:
        """Search one tensor's accesses for conflicting pairs that are not ordered."""
        log = self.log
        shared = tensor is self.shared
        base = 0 if shared else tensor.start - log.run.arena.base
        granule = log.shared_granule if shared else log.granule
        granules, marks, kinds, segments, times = [], [], [], [], []
        for e in entries:
            w, m = log.expand([e], granule, base)
            repeat = len(w) // max(len(e[5][0]), 1)
            granules.append(w)
            marks.append(m)
            kinds.append(np.full(len(w), ROLE_NUMBERS[e[0].role]))
            segments.append(np.tile(e[5][0], repeat))
            times.append(np.full(len(w), e[5][1]))
        w, m, k, s, t = (np.concatenate(x) for x in (granules, marks, kinds, segments, times))
        order = np.lexsort((t, w))
        w, m, k, s = w[order], m[order], k[order], s[order]
        number = np.arange(len(w))
        first = np.r_[True, w[1:] != w[:-1]]
        start = np.maximum.accumulate(np.where(first, number, 0))
        roles_present = np.unique(k).tolist()
        for first_role, role_number in ROLE_NUMBERS.items():
            for second_role, other_role_number in ROLE_NUMBERS.items():
                if role_number not in roles_present or other_role_number not in roles_present:
                    continue
                if second_role in CONFLICTS[first_role]:
                    find_conflicts, name = find_global_conflicts, "global race"
                elif second_role in SCOPE_CONFLICTS.get(first_role, ""):
                    find_conflicts, name = find_scope_conflicts, "atomic scope"
                else:
                    continue
                # the last earlier access of the other role to the same granule
                previous = np.maximum.accumulate(np.where(k == other_role_number, number, -1))
                previous = np.r_[-1, previous[:-1]]
                pick = np.flatnonzero((k == role_number) & (previous >= start))
                self.report_unordered(tensor, w, m, s, pick, previous[pick], find_conflicts, name)
                if role_number == other_role_number:
                    continue
                following = np.minimum.accumulate(np.where(k == other_role_number, number, len(w))[::-1])[
                    ::-1
                ]
                ok = np.flatnonzero((k == role_number) & (following < len(w)))
                ok = ok[w[following[ok]] == w[ok]]
                self.report_unordered(tensor, w, m, s, following[ok], ok, find_conflicts, name)

    def report_unordered(self, tensor, w, m, s, later, earlier, find_conflicts, kind: str) -> None:
        if not len(later):
            return
        a, b = m[later], m[earlier]
        is_race = find_conflicts(b, a)
        if tensor is self.shared:  # conflicts within a block, or with flags within a warp, are found by epoch
            is_race &= (a ^ b) >> (u8(17) if self.uses_flags else _TOP_SHIFT) != 0
        is_race = np.flatnonzero(is_race)
        if not len(is_race):
            return
        epochs_and_warps = ~u8(0) >> u8(64 - 36) & ~((u8(1) << u8(17)) - u8(1))
        columns = (
            s[earlier[is_race]], b[is_race] & epochs_and_warps, s[later[is_race]],
            a[is_race] & epochs_and_warps,
        )  # fmt: skip
        pairs, pair_of = np.unique(
            np.stack([x.astype(np.int64) for x in columns], 1), axis=0, return_inverse=True
        )
        steps = [
            ((x, mx >> 22, mx >> 17 & 31), (y, my >> 22, my >> 17 & 31)) for x, mx, y, my in pairs.tolist()
        ]
        ordered = [self.clocks.is_ordered(*pair) for pair in steps]
        racing = [
            not ordered[pair] and not self.was_observed(tensor, int(w[later[k]]), b[k], steps[pair])
            for k, pair in zip(is_race.tolist(), pair_of.reshape(-1).tolist(), strict=True)
        ]
        keep = is_race[racing]
        if len(keep):
            self.log.report_global(tensor, w[later[keep]], a[keep], b[keep], np.ones(len(keep), bool), kind)

    def was_observed(self, tensor, granule: int, mark, pair) -> bool:
        """Return whether the earlier access is a strong write that the later access's thread has observed."""
        access = self.log.run.code.accesses[(int(mark) & (1 << _INSTR_BITS) - 1) - 1]
        if not access.writes or access.kind != "A":
            return False
        if tensor is self.shared:
            key = -1 - granule * self.log.shared_granule // access.nbytes * access.nbytes
        else:
            byte = granule * self.log.granule + tensor.start - self.log.run.arena.base
            key = byte // access.nbytes * access.nbytes
        return self.clocks.was_observed(key, *pair)


def describe_access(access) -> str:
    if access.kind == "A":
        scope = " of block scope" if access.is_block_scope else ""
        if access.instr.op in ("atom", "red"):
            return f"an atomic{scope}"
        return f"a strong {'load' if access.instr.op == 'ld' else 'store'}{scope}"
    return "a load" if access.kind == "R" else "a store"
