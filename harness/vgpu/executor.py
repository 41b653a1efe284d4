"""Runs the generated block functions over a batch of thread blocks, in lockstep with divergence and barriers.

A batch holds many thread blocks; `pending` maps a basic block to the threads that wait to run it. The scheduler runs
the first pending block in program order (see program.py), so threads that took different paths meet again where the
paths join. `bar.sync` parks threads until all threads of their thread block that have not exited have arrived.

Threads that exited are squeezed out, so kernels that guard with `if i < n` keep running on whole arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codegen import put
from .divergence import Splits
from .livelock import Looks
from .ptx import WIDTH
from .warp import WarpOps

SPIN_ROUNDS = 256
# Steps in polling loops between two looks at whether anything changes: several turns of all other threads lie between.
SPIN_LOOK = 8 * SPIN_ROUNDS


class StepBudget(Exception):
    """The launch ran more basic blocks than its budget; `.block` is where it was."""

    def __init__(self, block, threads: int):
        super().__init__()
        self.block, self.threads = block, threads


class Livelock(StepBudget):
    """Threads of `.batch` poll in `.block`, and the state of all of it repeats: nobody can ever let them go on."""

    def __init__(self, block, threads: int, batch: Batch):
        super().__init__(block, threads)
        self.batch = batch


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
        super().__init__(run, blocks)
        self.S: list[Any] = [None] * len(self.code.slots)  # the registers, arrays or scalars
        self.P: list[np.generic] = run.P
        self.waiting: list[tuple] = []  # (basic block, positions, its barrier's value)
        self.complete: dict[
            int, np.ndarray
        ] = {}  # numbered barrier -> the thread blocks that have completed it
        self.specials(run)
        self.start_warps()
        self.splits = Splits(self)

    # -- set-up ---------------------------------------------------------------------------------------------
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

    # -- scheduling -----------------------------------------------------------------------------------------
    def execute(self):
        """Run all threads of the batch to their end. Raises StepBudget or Trap."""
        blocks, code, run = self.program.blocks, self.code, self.run
        order = [b.order for b in blocks]
        pending: dict[int, list] = {0: [None]}
        self.waiting = []
        rounds = 0  # steps in polling loops since the last time that other threads were let run
        turn = 0  # steps for which the others still go first
        last: dict[int, int] = {}  # polling block -> step when it last ran
        polled, looks = 0, Looks(self)  # steps in polling loops
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
                polled += 1
            L = groups[0] if len(groups) == 1 else self.merge(groups)
            if block.spins and polled % SPIN_LOOK == 0 and looks.repeats(index, L, pending):
                raise Livelock(block, self.n if L is None else len(L), self)
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
        together = []
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
            if isinstance(value[0], str):
                together.append(moving)
            target = self.program.blocks[index].succs[0]
            pending.setdefault(target, []).append(None if len(moving) == self.n else moving)
        if together:
            self.log.cluster_wait(self, np.concatenate(together))
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
        self.complete = {}
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
