"""Runs the generated block functions over a batch of thread blocks, in lockstep with divergence and barriers.

A batch holds many thread blocks; `pending` maps a basic block to the threads that wait to run it. The scheduler runs
the first pending block in program order (see program.py), so threads that took different paths meet again where the
paths join. `bar.sync` parks threads until all threads of their thread block that have not exited have arrived.

Threads have positions 0..n-1 in the batch; `None` in place of a position array means all of them. Threads that exited
are squeezed out, so kernels that guard with `if i < n` keep running on whole arrays.
"""

from __future__ import annotations

import numpy as np

from .access import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Access
from .codegen import Code, put
from .divergence import Splits
from .memory import Extent, Space
from .ptx import WIDTH
from .warp import WarpOps

SPIN_ROUNDS = 256
SMALL = 40  # below this many threads Python's min and max are faster than NumPy's


class StepBudget(Exception):
    """The launch ran more basic blocks than its budget; `.block` is where it was."""

    def __init__(self, block, threads: int):
        super().__init__()
        self.block, self.threads = block, threads


class Trap(Exception):
    """A thread executed `trap`."""

    def __init__(self, block, batch, positions):
        super().__init__()
        self.block, self.batch, self.positions = block, batch, positions


def _others_first(blocks, last: dict[int, int]):
    """A priority that takes blocks outside of polling loops first, then the polling one that has waited longest."""
    return lambda i: (blocks[i].spins, last.get(i, -1) if blocks[i].spins else blocks[i].order)


def _plain(value) -> bool:
    """Whether a barrier's (number, thread count, predicate) is that of `bar.sync 0`."""
    number, count, predicate = value
    return count is None and predicate is None and not isinstance(number, str) and np.ndim(number) == 0


class Batch(WarpOps):
    """Some thread blocks of one launch, their registers and their shared and local memory."""

    def __init__(self, run, blocks: np.ndarray):
        self.run, self.blocks = run, blocks
        self.arena, self.checks = run.arena, run.checks
        code: Code = run.code
        self.code, self.program = code, code.program
        threads = run.threads
        count = len(blocks)
        self.n = self.total = count * threads
        self.threads, self.count = threads, count
        self.warps_per_block = -(-threads // 32)
        thread = np.arange(threads)
        self.block_of = np.repeat(np.arange(count), threads)
        self.thread_of = np.tile(thread, count)
        self.warp_of = self.block_of * self.warps_per_block + (self.thread_of >> 5)
        self.lane_of = self.thread_of & 31
        self.P = run.P
        self.S = [None] * len(code.slots)
        self.alive = np.full(count, threads)
        self.exited_early = False
        self.epoch = np.zeros(count, np.int64)  # barriers passed, per thread block
        self.even_epoch = 0  # the same for all blocks, or None
        self.warp_epoch = np.zeros(count * self.warps_per_block, np.int64)
        self.warp_synced = False
        self.log = run.log
        self.spaces(run)
        self.specials(run)
        self.start_warps()
        self.splits = Splits(self)

    # -- set-up ---------------------------------------------------------------------------------------------
    def spaces(self, run):
        self.global_space = self.arena.space
        self.base = np.uint64(self.arena.base)
        size = run.shared_size
        if size:
            data = np.zeros(self.count * size, np.uint8)
            written = np.zeros(self.count * size, np.uint8)
            self.shared_space = Space(data, written)
            written.reshape(self.count, size)[:, :64] = 1  # the sink
        else:
            self.shared_space = Space(np.zeros(64, np.uint8), np.ones(64, np.uint8))
        self.shared_size = size
        self.shared_base = self.block_of * size
        local = run.local_size
        if local:
            written = np.zeros(self.n * local, np.uint8)
            written.reshape(self.n, local)[:, :16] = 1  # the sink
            self.local_space = Space(np.zeros(self.n * local, np.uint8), written)
            self.local_base = np.arange(self.n) * local
        self.param_space = run.param_space

    def specials(self, run):
        """Fill the register slots of special registers that the kernel reads."""
        (gx, gy, gz), (bx, by, bz) = run.grid, run.block
        cx, cy, cz = run.cluster
        u4 = np.uint32
        lanes = self.lane_of.astype(u4)
        tid = self.thread_of
        ctaid = self.blocks
        x, y, z = ctaid % gx, ctaid // gx % gy, ctaid // (gx * gy)
        rank = (x % cx) + (y % cy) * cx + (z % cz) * cx * cy
        self.cluster_rank = rank
        one = u4(1)
        per_block = {
            "ctaid_x": x, "ctaid_y": y, "ctaid_z": z,
            "clusterid_x": x // cx, "clusterid_y": y // cy, "clusterid_z": z // cz,
            "cluster_ctaid_x": x % cx, "cluster_ctaid_y": y % cy, "cluster_ctaid_z": z % cz,
            "cluster_ctarank": rank, "smid": ctaid % 132,
        }  # fmt: skip
        per_thread = {
            "tid_x": tid % bx, "tid_y": tid // bx % by, "tid_z": tid // (bx * by),
            "laneid": lanes, "warpid": tid >> 5,
        }  # fmt: skip
        uniform = {
            "ntid_x": bx, "ntid_y": by, "ntid_z": bz, "nctaid_x": gx, "nctaid_y": gy, "nctaid_z": gz,
            "nclusterid_x": gx // cx, "nclusterid_y": gy // cy, "nclusterid_z": gz // cz,
            "cluster_nctaid_x": cx, "cluster_nctaid_y": cy, "cluster_nctaid_z": cz, "cluster_nctarank": cx * cy * cz,
            "is_explicit_cluster": int(cx * cy * cz > 1), "nwarpid": self.warps_per_block, "nsmid": 132, "gridid": 0,
            "dynamic_smem_size": run.dynamic_shared, "total_smem_size": run.shared_size, "aggr_smem_size": 0,
            "clock": 0, "clock64": 0, "globaltimer": 0, "clock_hi": 0, "globaltimer_lo": 0, "globaltimer_hi": 0,
            "reserved_smem_offset_begin": 0, "reserved_smem_offset_end": 1024,
        }  # fmt: skip
        wide = {"clock64", "globaltimer", "gridid"}
        for name, slot in self.code.slots.items():
            if not name.startswith("sp_"):
                continue
            name = name[3:]
            if name in per_block:
                value = per_block[name].astype(u4)
                self.S[slot] = value[self.block_of] if self.count > 1 else value[0]
            elif name in per_thread:
                self.S[slot] = per_thread[name].astype(u4)
            elif name in uniform:
                self.S[slot] = (np.uint64 if name in wide else u4)(uniform[name])
            elif name.startswith("lanemask_"):
                eq = one << lanes
                self.S[slot] = {"eq": eq, "lt": eq - one, "le": eq | (eq - one), "gt": ~(eq | (eq - one)),
                                "ge": ~(eq - one)}[name[9:]]  # fmt: skip
        for name, kind in self.program.regs.items():
            # A register that some path reads before it is written reads as zero.
            width = {"pred": np.bool_, "b16": np.uint16, "b64": np.uint64}.get(kind)
            if width is None:
                width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[min(WIDTH[kind], 8)]
            self.S[self.code.slots[name]] = width(0)

    def clock(self) -> int:
        """A clock that grows with the work done; it is not a time."""
        return self.run.steps * 16

    def positions(self, L):
        """`L`, or all positions."""
        return np.arange(self.n) if L is None else L

    # -- scheduling -----------------------------------------------------------------------------------------
    def execute(self):
        """Run all threads of the batch to their end. Raises StepBudget or Trap."""
        blocks, code, run = self.program.blocks, self.code, self.run
        order = [b.order for b in blocks]
        pending: dict[int, list] = {0: [None]}
        self.waiting: list[tuple] = []
        rounds = 0  # steps in polling loops since the last time that other threads were let run
        turn = 0  # steps for which the others still go first
        last: dict[int, int] = {}  # polling block -> step when it last ran
        while True:
            if not pending:
                if not self.release(pending):
                    return
                rounds = 0
            if rounds > SPIN_ROUNDS:
                # Some loop waits for other threads, which may wait for their turn or at a barrier: let them go on.
                rounds, turn = 0, SPIN_ROUNDS
                self.release(pending)
            if len(pending) == 1:
                index, groups = pending.popitem()
            else:
                first = order.__getitem__
                if turn:
                    turn -= 1
                    first = _others_first(blocks, last)
                index = min(pending, key=first)
                groups = pending.pop(index)
            block = blocks[index]
            if block.spins:
                last[index] = run.steps
                if pending or self.waiting:
                    rounds += 1
            L = groups[0] if len(groups) == 1 else self.merge(groups)
            if (
                L is not None
                and not pending
                and not self.waiting
                and len(L) * 8 <= self.n * 7
                and self.exited_early
            ):
                L = self.squeeze(L)
            function = code.functions[index] or run.generate(index)
            run.steps += 1
            threads = self.n if L is None else len(L)
            run.block_threads[index] = run.block_threads.get(index, 0) + threads
            if run.steps > run.step_budget:
                raise StepBudget(block, threads)
            value = function(self, self.S, L)
            kind = block.kind
            if kind == "jump":
                pending.setdefault(block.succs[0], []).append(L)
            elif kind == "branch":
                self.branch(block, value, L, pending)
            elif kind == "barrier":
                self.waiting.append((index, L, value))
                if len(self.waiting) == 1 and not pending:
                    self.release(pending)
            elif kind == "call":
                pending.setdefault(block.succs[0], []).append(L)
            elif kind in ("ret", "switch"):
                self.scatter(block, value, L, pending)
            elif kind == "exit":
                self.exit(L)
            elif kind == "cluster":
                self.waiting.append((index, L, ("cluster", None, None)))
            else:
                raise Trap(block, self, self.positions(L))

    def merge(self, groups):
        """One sorted position array of several, None when it is everybody."""
        if any(g is None for g in groups):
            return None
        L = np.sort(np.concatenate(groups))
        return None if len(L) == self.n else L

    def branch(self, block, p, L, pending):
        taken, fall = block.succs
        if p.ndim == 0:
            pending.setdefault(taken if p else fall, []).append(L)
            return
        yes = np.count_nonzero(p)
        if yes == 0:
            pending.setdefault(fall, []).append(L)
        elif yes == len(p):
            pending.setdefault(taken, []).append(L)
        else:
            if L is None:
                a, b = np.flatnonzero(p), np.flatnonzero(~p)
            else:
                a, b = L[p], L[~p]
            pending.setdefault(taken, []).append(a)
            pending.setdefault(fall, []).append(b)
            self.run.counters.divergent_branches += self.splits.add(block.index, [a, b])

    def scatter(self, block, value, L, pending):
        """Indirect jump: `ret` of a device function, or a branch table."""
        table = block.succs if block.kind == "switch" else None
        if value.ndim == 0:
            pending.setdefault(table[int(value)] if table else int(value), []).append(L)
            return
        L = self.positions(L)
        parts = {int(v): L[value == v] for v in np.unique(value)}
        self.splits.add(block.index, list(parts.values()))
        for v, part in parts.items():
            where = table[v] if table else v
            pending.setdefault(where, []).append(None if len(part) == self.n else part)

    def exit(self, L):
        if L is None:
            self.alive[:] = 0
            self.exited_bits = self.all_bits.copy()
        else:
            self.alive -= np.bincount(self.block_of[L], minlength=self.count)
            self.exited_bits |= self.gather_bits(L)
            self.exited_early = True

    def squeeze(self, L):
        """Renumber: only the threads `L` are left, so `None` may stand for them."""
        if self.copies_pending():
            return L
        keep = ("block_of", "thread_of", "warp_of", "lane_of", "shared_base")
        for name in keep:
            setattr(self, name, getattr(self, name)[L])
        if self.run.local_size:
            self.local_base = self.local_base[L]
        self.squeeze_warps(L)
        S = self.S
        for k, value in enumerate(S):
            if value is not None and value.ndim:
                S[k] = value[L]
        self.n = len(L)
        return None

    # -- barriers -------------------------------------------------------------------------------------------
    def release(self, pending) -> bool:
        """Let go the thread blocks whose threads have all arrived; when nothing else can run, force the rest."""
        if not self.waiting:
            return False
        first = self.waiting[0]
        if len(self.waiting) == 1 and first[1] is None and not pending and _plain(first[2]):
            self.waiting = []
            self.passed(None)
            self.note_exited(first[0], None)
            pending[self.program.blocks[first[0]].succs[0]] = [None]
            return True
        waiting = [(i, self.positions(L), v) for i, L, v in self.waiting]
        ready = self.arrived(waiting)
        forced = False
        if not ready.any():
            if pending:
                return False
            forced = True
            self.run.barrier_divergence(self, waiting, deadlock=True)
            ready = np.ones(self.count, bool)
        elif len({i for i, _, _ in waiting}) > 1:
            odd = ready & ~self.separate(waiting)
            if odd.any():
                self.run.barrier_divergence(self, waiting, deadlock=False, only=odd)
        self.waiting = []
        values = self.reduce_barrier(waiting, ready)
        for (index, L, value), result in zip(waiting, values, strict=True):
            go = ready[self.block_of[L]]
            stay = L[~go]
            moving = L[go]
            if len(stay):
                self.waiting.append(
                    (index, stay, (value[0], value[1], None if value[2] is None else value[2][~go]))
                )
            if not len(moving):
                continue
            if not forced:
                self.note_exited(index, ready)
            if result is not None:
                instr = self.program.blocks[index].term
                put(self, self.S, self.code.slots[instr.args[0].name], moving, result[go])
            target = self.program.blocks[index].succs[0]
            pending.setdefault(target, []).append(None if len(moving) == self.n else moving)
        self.passed(ready)
        return True

    def separate(self, waiting) -> np.ndarray:
        """Which thread blocks wait at named barriers only that have different numbers and are each complete."""
        fine = np.ones(self.count, bool)
        taken: dict[int, np.ndarray] = {}
        for _, L, (number, _, _) in waiting:
            here = np.bincount(self.block_of[L], minlength=self.count) > 0
            if isinstance(number, str) or np.ndim(number):
                fine &= ~here
                continue
            k = int(number)
            before = taken.get(k, np.zeros(self.count, bool))
            fine &= ~here | (self.complete[k] & ~before)
            taken[k] = before | here
        return fine

    def arrived(self, waiting) -> np.ndarray:
        """Which thread blocks may go on. Leaves in `complete` which have completed which numbered barrier."""
        self.complete: dict[int, np.ndarray] = {}
        ready = np.zeros(self.count, bool)
        names = {v[0] if isinstance(v[0], str) else "mixed" for _, _, v in waiting}
        if "cluster" in names:
            size = self.run.cluster_size
            there = np.zeros(self.count, np.int64)
            for _, L, v in waiting:
                if isinstance(v[0], str):
                    there += np.bincount(self.block_of[L], minlength=self.count)
            whole = (there == self.alive).reshape(-1, size).all(axis=1)
            ready |= np.repeat(whole, size) & (there > 0)
        counts: dict[int, np.ndarray] = {}
        wanted: dict[int, np.ndarray] = {}
        for _, L, (number, count, _) in waiting:
            if isinstance(number, str):
                continue
            numbers = np.broadcast_to(number, len(L)) if np.ndim(number) else None
            for k in [int(number)] if numbers is None else np.unique(numbers).tolist():
                part = L if numbers is None else L[numbers == k]
                blocks = np.bincount(self.block_of[part], minlength=self.count)
                counts[k] = counts.get(k, 0) + blocks
                if count is not None:
                    wanted[k] = np.where(blocks > 0, int(np.max(count)), wanted.get(k, 0))
        for k, there in counts.items():
            need = (
                np.where(wanted[k] > 0, np.minimum(wanted[k], self.alive), self.alive)
                if k in wanted
                else self.alive
            )
            self.complete[k] = (there > 0) & (there >= need)
            ready |= self.complete[k]
        return ready

    def reduce_barrier(self, waiting, ready) -> list:
        """Results of bar.red (popc, and, or) for each waiting group, or None."""
        out = []
        for index, _, value in waiting:
            if value[2] is None:
                out.append(None)
                continue
            mods = self.program.blocks[index].term.mods
            total = np.zeros(self.count, np.int64)
            everybody = np.zeros(self.count, np.int64)
            for _, L, v in waiting:
                if v[2] is not None:
                    blocks = self.block_of[L]
                    total += np.bincount(
                        blocks, weights=np.broadcast_to(v[2], len(L)), minlength=self.count
                    ).astype(np.int64)
                    everybody += np.bincount(blocks, minlength=self.count)
            L = waiting[[w[0] for w in waiting].index(index)][1]
            t, e = total[self.block_of[L]], everybody[self.block_of[L]]
            out.append(t.astype(np.uint32) if "popc" in mods else (t == e) if "and" in mods else t > 0)
        return out

    def epochs(self, L):
        """The barriers passed by the blocks of the threads L (None: all): one number where all blocks agree."""
        if self.even_epoch is not None:
            return self.even_epoch
        return self.epoch[self.block_of if L is None else self.block_of[L]]

    def passed(self, ready):
        """A barrier has been passed by the thread blocks `ready` (None: all): accesses before it are over."""
        self.run.log.barrier(self, ready)
        self.run.counters.barriers += int(self.count if ready is None else np.count_nonzero(ready))
        if ready is None:
            self.epoch += 1
            if self.even_epoch is not None:
                self.even_epoch += 1
        else:
            self.epoch[ready] += 1
            self.even_epoch = int(self.epoch[0]) if (self.epoch == self.epoch[0]).all() else None

    def note_exited(self, index: int, ready):
        if not self.exited_early:
            return
        late = (self.alive < self.threads) & (self.alive > 0)
        if ready is not None:
            late = late & ready
        if not late.any():
            return
        alive = self.alive_bits()
        torn = ((alive != 0) & (alive != self.initial_bits)).reshape(self.count, -1).any(axis=1) & late
        block = int(np.flatnonzero(torn if torn.any() else late)[0])
        self.run.early_exit(self, self.program.blocks[index].term, block, bool(torn.any()))

    # -- memory ---------------------------------------------------------------------------------------------
    def load_global(self, A: Access, address, L):
        index = self.global_index(A, address, L)
        return self.fetch(A, self.global_space, index, L)

    def store_global(self, A: Access, address, value, L):
        index = self.global_index(A, address, L)
        self.write(A, self.global_space, index, value, L)

    def global_index(self, A: Access, address, L):
        """Checked element index (units of the access size) in the arena; the access is logged."""
        t = A.tensor
        if address.ndim == 0:
            low = high = bits = int(address)
        elif len(address) <= SMALL:
            values = address.tolist()
            low, high = min(values), max(values)
            bits = low | high if A.mask == 0 else int(np.bitwise_or.reduce(address))
        else:
            low, high = int(address.min()), int(address.max())
            bits = int(np.bitwise_or.reduce(address))
        if low < t.start or high + A.mask >= t.end or bits & A.mask:
            return self.global_index_slow(A, address, L)
        if address.ndim == 0:
            index = (low - self.arena.base) >> A.shift
        else:
            index = ((address - self.base) >> A.shift64).view(np.int64)
        if A.writes:
            t.written = True
        if not A.unlogged:
            self.log.add(self, A, t, index, L)
        return index

    def global_index_slow(self, A: Access, address, L):
        """The same when threads touch several tensors, or when some access is wrong."""
        positions = self.positions(L)
        wide = np.broadcast_to(address, len(positions))
        number, ends = self.arena.locate(wide)
        starts = self.arena._arrays[0]
        inside = (wide >= starts[number]) & (wide + np.uint64(A.mask) < ends)
        aligned = wide & np.uint64(A.mask) == 0
        good = inside & aligned
        if not good.all():
            self.run.bad_address(self, A, wide, positions, inside, aligned)
            wide = np.where(good, wide, self.base + np.uint64(self.arena.sink))
        found = np.unique(number[good])
        extents = self.arena.extents
        index = ((wide - self.base) >> A.shift64).view(np.int64)
        for k in found.tolist():
            if A.writes:
                extents[k].written = True
                if extents[k].constant:
                    self.run.constant_store(self, A, positions)
            if not A.unlogged:
                part = good & (number == k)
                self.log.add(self, A, extents[k], index[part], positions[part])
        if len(found) == 1 and good.all():
            A.tensor = extents[int(found[0])]
        A.mixed = len(found) != 1 or not good.all()
        return index

    def fetch(self, A: Access, space: Space, index, L):
        """Read, and check that what is read has been written."""
        data, written, full = A.views(space)
        if not A.tensor.ready or A.mixed:
            A.mixed = False
            if self.checks.uninitialised:
                state = written[index]
                if not (state == full).all():
                    self.run.unwritten(self, A, state != full, index, L)
        value = data[index]
        if A.count == 1:
            return value
        return list(value) if value.ndim == 1 else list(np.ascontiguousarray(value.T))

    def write(self, A: Access, space: Space, index, value, L):
        data, written, full = A.views(space)
        if A.count == 1:
            data[index] = value if np.ndim(index) or not value.ndim else value[-1]
        else:
            for k, part in enumerate(value):
                data[index, k] = part if np.ndim(index) or not part.ndim else part[-1]
        if not A.tensor.ready or A.mixed:
            A.mixed = False
            written[index] = full

    def offset_index(self, A: Access, address, base, extents: list[Extent], L):
        """Checked index in shared or local memory: `base` is where each thread's part begins."""
        t = A.tensor
        low, high = (
            (int(address), int(address)) if address.ndim == 0 else (int(address.min()), int(address.max()))
        )
        if low < t.start or high + A.mask >= t.end or (address & address.dtype.type(A.mask)).any():
            bad = False
            for t in extents:
                if low >= t.start and high + A.mask < t.end:
                    A.tensor = t
                    bad = (address & address.dtype.type(A.mask)).any()
                    break
            else:
                bad = True
            if bad:
                address = self.offset_bad(A, address, extents, L)
        place = base if L is None else base[L]
        return (place + address.astype(np.int64)) >> A.shift

    def offset_bad(self, A: Access, address, extents, L):
        positions = self.positions(L)
        wide = np.broadcast_to(address, len(positions)).astype(np.int64)
        inside = np.zeros(len(positions), bool)
        for t in extents:
            inside |= (wide >= t.start) & (wide + A.mask < t.end)
        aligned = wide & A.mask == 0
        good = inside & aligned
        if not good.all():
            self.run.bad_address(self, A, wide, positions, inside, aligned)
        A.mixed = True
        return np.where(good, wide, 0)

    def load_shared(self, A: Access, address, L):
        index = self.shared_index(A, address, L)
        return self.fetch(A, self.shared_space, index, L)

    def store_shared(self, A: Access, address, value, L):
        self.write(A, self.shared_space, self.shared_index(A, address, L), value, L)

    def shared_index(self, A: Access, address, L):
        if self.run.cluster_size > 1:
            return self.cluster_index(A, address, L)
        index = self.offset_index(A, address, self.shared_base, self.run.shared_extents, L)
        self.log.add_shared(self, A, index, L)
        return index

    def cluster_index(self, A: Access, address, L):
        """Shared addresses in a cluster: the top byte is 0 for the own block, else 1 + the rank of another."""
        address = np.broadcast_to(address, len(self.positions(L))).astype(np.int64)
        rank = address >> 24
        own = self.block_of if L is None else self.block_of[L]
        size = self.run.cluster_size
        block = np.where(rank == 0, own, own - own % size + np.clip(rank - 1, 0, size - 1))
        place = np.zeros(self.n, np.int64)
        place[self.positions(L)] = block * self.shared_size
        index = self.offset_index(A, address & 0xFFFFFF, place, self.run.shared_extents, L)
        if (block == own).all():
            self.log.add_shared(self, A, index, L)
        return index

    def load_local(self, A: Access, address, L):
        index = self.offset_index(A, address, self.local_base, self.run.local_extents, L)
        return self.fetch(A, self.local_space, index, L)

    def store_local(self, A: Access, address, value, L):
        index = self.offset_index(A, address, self.local_base, self.run.local_extents, L)
        self.write(A, self.local_space, index, value, L)

    load_frame, store_frame = load_local, store_local

    def load_param(self, A: Access, address, L):
        """A kernel parameter at an address that the kernel computes."""
        A.tensor = self.run.param_extent
        data, _, _ = A.views(self.param_space)
        top = max(len(self.param_space.data) // A.nbytes - 1, 0)
        value = data[np.minimum(np.asarray(address).astype(np.int64) >> A.shift, top)]
        if A.count == 1:
            return value
        return list(value) if value.ndim == 1 else list(np.ascontiguousarray(value.T))

    def generic(self, A: Access, address):
        """The one window that all addresses lie in ("global", "shared", "local", "param"), or None if mixed."""
        low, high = (
            (int(address), int(address)) if address.ndim == 0 else (int(address.min()), int(address.max()))
        )
        for name, start in (("param", PARAM_WINDOW), ("local", LOCAL_WINDOW), ("shared", SHARED_WINDOW)):
            if low >= start:
                return (name, start) if high < 2 * start else (None, 0)
            if high >= start:
                return None, 0
        return "global", 0

    def load_generic(self, A: Access, address, L):
        name, window = self.generic(A, address)
        if name is None:
            return self.load_mixed(A, address, L)
        A = A.in_space(name)
        return getattr(self, f"load_{name}")(A, address - np.uint64(window), L)

    def load_mixed(self, A: Access, address, L):
        positions = self.positions(L)
        out = [np.zeros(len(positions), f"u{A.width}") for _ in range(A.count)]
        top = address >> np.uint64(56)
        for value in np.unique(top):
            part = top == value
            got = self.load_generic(A, address[part], positions[part])
            for k in range(A.count):
                out[k][part] = got if A.count == 1 else got[k]
        return out[0] if A.count == 1 else out

    def store_generic(self, A: Access, address, value, L):
        name, window = self.generic(A, address)
        if name is not None:
            A = A.in_space(name)
            getattr(self, f"store_{name}")(A, address - np.uint64(window), value, L)
            return
        positions = self.positions(L)
        top = address >> np.uint64(56)
        for v in np.unique(top):
            part = top == v
            if A.count == 1:
                some = value[part] if value.ndim else value
            else:
                some = tuple(x[part] if x.ndim else x for x in value)
            self.store_generic(A, address[part], some, positions[part])

    def store_param(self, A: Access, address, value, L):
        self.run.bad_address(
            self, A, np.broadcast_to(address, len(self.positions(L))), self.positions(L), None, None
        )
