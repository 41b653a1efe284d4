"""Run the generated functions over a batch of thread blocks in lockstep, with divergence and barriers.

`pending` maps a basic block to the threads that are ready to run it. The scheduler runs the first pending
block in program order (see program.py), so threads that took different paths reconverge where the paths join.
`bar.sync` blocks threads until all threads of their thread block that have not exited have arrived.

Exited threads are removed from the arrays, so that after a guard `if i < n` the kernel runs on whole arrays
again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.vgpu.checks.async_order import MAX_THREADS, AsyncOrder
from harness.vgpu.checks.divergence import Divergence
from harness.vgpu.checks.livelock import StateSamples
from harness.vgpu.engine.opcodes.codegen import put
from harness.vgpu.ptx.parser import WIDTH
from harness.vgpu.ptx.special_registers import EXPRESSIONS

from .wgmma import WarpgroupOps

SPIN_ROUNDS = 256
# Steps in polling loops between two samples of the state, so that all other threads run several times.
SPIN_SAMPLE_STEPS = 8 * SPIN_ROUNDS


class StepBudgetReached(Exception):
    """Raised when a launch runs more basic blocks than its budget; `.block` is the last one."""

    def __init__(self, block, threads: int):
        super().__init__()
        self.block, self.threads = block, threads


class Livelock(StepBudgetReached):
    """Raised when threads of `.batch` poll in `.block` and the whole state repeats: none can proceed."""

    def __init__(self, block, threads: int, batch: Batch):
        super().__init__(block, threads)
        self.batch = batch


class Trap(Exception):
    """Raised when threads execute `trap`, or an instruction that cannot continue."""

    def __init__(self, instr, batch, positions):
        super().__init__()
        self.instr, self.batch, self.positions = instr, batch, positions


def make_polling_last_key(blocks, last_run: dict[int, int]):
    """Return a sort key: blocks outside polling loops first, then the one that ran least recently."""
    return lambda i: (
        blocks[i].in_spin_loop,
        last_run.get(i, -1) if blocks[i].in_spin_loop else blocks[i].order,
    )


def _is_bar_sync_0(value) -> bool:
    number, count, predicate = value
    return count is None and predicate is None and not isinstance(number, str) and np.ndim(number) == 0


def select(value, mask):
    """Select the elements of some threads; return scalars and None unchanged."""
    return value[mask] if np.ndim(value) and not isinstance(value, str) else value


def count_threads_by_barrier(number, count: int):
    """Yield (barrier, mask of the threads at it) for each barrier number of `count` threads."""
    if isinstance(number, str) or np.ndim(number) == 0:
        yield number if isinstance(number, str) else int(number), np.ones(count, bool)
        return
    for k in np.unique(number).tolist():
        yield k, number == k


def is_barrier_complete(complete: dict[int | str, np.ndarray], number, blocks: np.ndarray) -> np.ndarray:
    """Return a mask of the threads whose barrier is complete in their thread block."""
    done = np.zeros(len(blocks), bool)
    for k, mask in count_threads_by_barrier(number, len(blocks)):
        done |= mask & complete[k][blocks]
    return done


class Batch(WarpgroupOps):
    """Some thread blocks of one launch, with their registers and memory."""

    def __init__(self, run, blocks: np.ndarray):
        super().__init__(run, blocks)
        self.registers: list[Any] = [None] * len(self.code.slots)  # the registers, arrays or scalars
        self.params: list[np.generic] = run.params
        self.waiting: list[tuple] = []  # (basic block, positions, (barrier number, thread count, predicate))
        # Numbered barrier -> number of bar.arrive threads, by thread block.
        self.arrivals: dict[int, np.ndarray] = {}
        # polling basic block -> (phase_changes, threads) at its last failed poll
        self.failed_polls: dict[int, tuple[int, int]] = {}
        self.set_special_registers(run)
        self.init_warps()
        self.init_warpgroups()
        checked = run.checks.races and self.program.is_asynchronous
        self.async_order = (
            AsyncOrder(self) if checked and self.threads_per_block * run.cluster_size <= MAX_THREADS else None
        )
        self.divergence = Divergence(self)

    # -- set-up ---------------------------------------------------------------------------------------------
    def set_special_registers(self, run):
        """Initialise the register slots, and those of the special registers that the kernel reads."""
        u4 = np.uint32
        block = self.blocks[self.block_of] if self.num_blocks > 1 else self.blocks[0]
        env = {"u4": u4, "u8": np.uint64, "tid": self.thread_of.astype(u4), "lane": self.lane_of.astype(u4)}
        env |= {"dynamic_smem_size": u4(run.dynamic_shared), "total_smem_size": u4(run.shared_size)}
        sizes = {
            "ctaid": run.block_index(block),
            "ntid": run.block,
            "nctaid": run.grid,
            "cluster_nctaid": run.cluster,
        }
        for name, values in sizes.items():
            env |= {f"{name}_{axis}": u4(x) for axis, x in zip("xyz", values, strict=True)}
        for name, slot in self.code.slots.items():
            if (expression := EXPRESSIONS.get(name.removeprefix("sp_"))) and name.startswith("sp_"):
                with np.errstate(over="ignore"):
                    self.registers[slot] = eval(expression, env)
        for name, kind in self.program.regs.items():
            # A register that is read before it is written, on some path, is zero.
            width = {"pred": np.bool_, "b16": np.uint16, "b64": np.uint64}.get(kind)
            if width is None:
                width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[min(WIDTH[kind], 8)]
            self.registers[self.code.slots[name]] = width(0)

    def get_clock(self) -> int:
        """Return a clock that counts executed basic blocks, not time."""
        return self.run.steps * 16

    # -- scheduling -----------------------------------------------------------------------------------------
    def execute(self):
        """Run all threads of the batch to completion. Raises StepBudgetReached or Trap."""
        blocks, code, run = self.program.blocks, self.code, self.run
        order = [b.order for b in blocks]
        pending: dict[int, list] = {0: [None]}
        self.waiting = []
        spin_steps = 0  # steps in polling loops since other threads last had priority
        priority_steps = 0  # remaining steps for which other threads have priority
        last_run: dict[int, int] = {}  # polling block -> step when it last ran
        polling_steps, samples = 0, StateSamples(self)  # steps in polling loops
        while True:
            if not pending:
                if not self.release(pending):
                    self.report_over_budget()
                    if self.async_order:
                        self.async_order.finish()
                    return
                spin_steps = 0
            if spin_steps > SPIN_ROUNDS:
                # A loop waits for other threads, which may be pending or at a barrier: let them run.
                spin_steps, priority_steps = 0, SPIN_ROUNDS
                self.release(pending)
            runnable = pending
            if self.failed_polls:
                runnable = [i for i, groups in pending.items() if not self.has_failed_poll(i, groups)]
                if not runnable and self.release(pending):
                    continue
                runnable = runnable or pending
            if len(pending) == 1:
                index, groups = pending.popitem()
            else:
                first = order.__getitem__
                if priority_steps:
                    priority_steps -= 1
                    first = make_polling_last_key(blocks, last_run)
                index = min(runnable, key=first)
                groups = pending.pop(index)
            block = blocks[index]
            if block.in_spin_loop:
                last_run[index] = run.steps
                if pending or self.waiting:
                    spin_steps += 1
                polling_steps += 1
            active = groups[0] if len(groups) == 1 else self.merge(groups)
            if (
                block.in_spin_loop
                and polling_steps % SPIN_SAMPLE_STEPS == 0
                and samples.is_repeated(index, active, pending)
            ):
                raise Livelock(block, self.num_threads if active is None else len(active), self)
            if (
                active is not None
                and not pending
                and not self.waiting
                and len(active) * 8 <= self.num_threads * 7
                and self.exited_early
            ):
                active = self.compact(active)
            function = code.functions[index] or run.generate_block(index)
            run.steps += 1
            threads = self.num_threads if active is None else len(active)
            run.block_threads[index] = run.block_threads.get(index, 0) + threads
            if run.steps > run.step_budget:
                raise StepBudgetReached(block, threads)
            self.poll_failed = False
            value = function(self, self.registers, active)
            if self.multiply_adds_done is not None:
                self.multiply_adds_done[slice(None) if active is None else active] += code.costs[
                    index
                ].multiply_adds
            if self.poll_failed:
                self.failed_polls[index] = self.phase_changes, threads
            kind = block.kind
            if kind == "jump":
                pending.setdefault(block.succs[0], []).append(active)
            elif kind == "branch":
                self.branch(block, value, active, pending)
            elif kind == "barrier":
                self.waiting.append((index, active, value))
                if len(self.waiting) == 1 and not pending:
                    self.release(pending)
            elif kind == "call":
                pending.setdefault(block.succs[0], []).append(active)
            elif kind in ("ret", "switch"):
                self.scatter(block, value, active, pending)
            elif kind == "exit":
                self.exit(active)
            elif kind == "cluster":
                self.waiting.append((index, active, ("cluster", None, None)))
            else:
                raise Trap(block.term, self, self.get_positions(active))

    def has_failed_poll(self, index: int, groups) -> bool:
        """Return whether these threads already polled an mbarrier here since a phase last ended."""
        threads = sum(self.num_threads if g is None else len(g) for g in groups)
        return self.failed_polls.get(index) == (self.phase_changes, threads)

    def merge(self, groups):
        """Merge position arrays into a sorted one, or None for all threads."""
        if any(g is None for g in groups):
            return None
        active = np.sort(np.concatenate(groups))
        return None if len(active) == self.num_threads else active

    def branch(self, block, p, active, pending):
        taken, fall = block.succs
        if p.ndim == 0:
            pending.setdefault(taken if p else fall, []).append(active)
            return
        num_taken = np.count_nonzero(p)
        if num_taken == 0:
            pending.setdefault(fall, []).append(active)
        elif num_taken == len(p):
            pending.setdefault(taken, []).append(active)
        else:
            if active is None:
                a, b = np.flatnonzero(p), np.flatnonzero(~p)
            else:
                a, b = active[p], active[~p]
            pending.setdefault(taken, []).append(a)
            pending.setdefault(fall, []).append(b)
            self.run.counters.divergent_branches += self.divergence.add(block.index, [a, b])

    def scatter(self, block, value, active, pending):
        """Execute an indirect jump: `ret` of a device function, or a branch table."""
        table = block.succs if block.kind == "switch" else None
        if value.ndim == 0:
            pending.setdefault(table[int(value)] if table else int(value), []).append(active)
            return
        active = self.get_positions(active)
        parts = {int(v): active[value == v] for v in np.unique(value)}
        self.divergence.add(block.index, list(parts.values()))
        for v, group in parts.items():
            target = table[v] if table else v
            pending.setdefault(target, []).append(None if len(group) == self.num_threads else group)

    def exit(self, active):
        if active is None:
            self.live_threads[:] = 0
            self.exited_masks = self.warp_masks.copy()
        else:
            self.live_threads -= np.bincount(self.block_of[active], minlength=self.num_blocks)
            self.exited_masks |= self.gather_masks(active)
            self.exited_early = True

    def compact(self, active):
        """Remove all inactive threads and renumber the others, so that None means all of them again."""
        if self.commits is not None:  # asynchronous copies store positions
            return active
        keep = ("block_of", "thread_of", "warp_of", "lane_of", "shared_base", "local_base")
        for name in keep:
            setattr(self, name, getattr(self, name)[active])
        if self.multiply_adds_done is not None:
            self.multiply_adds_done = self.multiply_adds_done[active]
        self.compact_warps(active)
        registers = self.registers
        for k, value in enumerate(registers):
            if value is not None and value.ndim:
                registers[k] = value[active]
        self.num_threads = len(active)
        return None

    # -- barriers -------------------------------------------------------------------------------------------
    def release(self, pending) -> bool:
        """Release the thread blocks whose threads have all arrived; all blocks if nothing else can run."""
        if not self.waiting:
            return False
        first = self.waiting[0]
        if len(self.waiting) == 1 and first[1] is None and not pending and _is_bar_sync_0(first[2]):
            self.waiting = []
            if self.async_order:
                self.async_order.barrier(np.arange(self.num_threads), 0)
            self.count_barrier(first[0], np.greater(self.live_threads, 0))
            self.pass_barrier(None)
            self.report_exited(first[0], None)
            pending[self.program.blocks[first[0]].succs[0]] = [None]
            return True
        waiting = [(i, self.get_positions(positions), v) for i, positions, v in self.waiting]
        complete = self.find_completed_blocks(waiting)
        passing_masks = [
            is_barrier_complete(complete, v[0], self.block_of[positions]) for _, positions, v in waiting
        ]
        forced = not any(passes.any() for passes in passing_masks)
        if forced:
            if pending:
                return False
            self.run.report_barrier_divergence(self, waiting, deadlock=True)
            passing_masks = [np.ones(len(positions), bool) for _, positions, _ in waiting]
        else:
            separate = self.find_separate_completions(waiting, passing_masks)
            if separate.any():
                self.run.report_barrier_divergence(self, waiting, deadlock=False, only=separate)
        self.waiting = []
        ready = np.zeros(self.num_blocks, bool)
        values = self.reduce_barrier(waiting)
        clustered = []
        for (_, positions, _), passes in zip(waiting, passing_masks, strict=True):
            ready[self.block_of[positions[passes]]] = True
        for (index, positions, value), result, passes in zip(waiting, values, passing_masks, strict=True):
            waiting_positions = positions[~passes]
            passing_positions = positions[passes]
            if len(waiting_positions):
                self.waiting.append(
                    (
                        index,
                        waiting_positions,
                        (select(value[0], ~passes), select(value[1], ~passes), select(value[2], ~passes)),
                    )
                )
            if not len(passing_positions):
                continue
            self.count_barrier(index, np.bincount(self.block_of[passing_positions]) > 0)
            if not forced:
                self.report_exited(index, ready, None if value[1] is None else passing_positions)
            if result is not None:
                instr = self.program.blocks[index].term
                put(
                    self, self.registers, self.code.slots[instr.args[0].name], passing_positions,
                    result[passes],
                )  # fmt: skip
            if isinstance(value[0], str):
                clustered.append(passing_positions)
            target = self.program.blocks[index].succs[0]
            pending.setdefault(target, []).append(
                None if len(passing_positions) == self.num_threads else passing_positions
            )
        if clustered and self.log.clocks:
            self.log.clocks.cluster_wait(self, np.concatenate(clustered))
        if self.async_order and not forced:
            self.report_barrier_order(waiting, passing_masks)
        for k, done in complete.items():
            if k in self.arrivals:
                self.arrivals[k][done] = 0
        self.pass_barrier(ready)
        return True

    def count_barrier(self, index: int, blocks: np.ndarray):
        if self.counting:
            self.run.counters.count_issue(self.program.blocks[index].end, int(np.count_nonzero(blocks)))

    def report_barrier_order(self, waiting, passing_masks):
        """Report to the ordering check which threads pass which barrier."""
        assert self.async_order is not None
        passing: dict[int | str, list[np.ndarray]] = {}
        for (_, positions, (number, _, _)), passes in zip(waiting, passing_masks, strict=True):
            for k, mask in count_threads_by_barrier(number, len(positions)):
                passing.setdefault(k, []).append(positions[passes & mask])
        for k, groups in passing.items():
            self.async_order.barrier(np.concatenate(groups), k)

    def bar_arrive(self, number, count, active):
        """Execute bar.arrive: arrive at a numbered barrier without waiting."""
        P = self.get_positions(active)
        number = np.broadcast_to(number, len(P))
        for k in np.unique(number).tolist():
            arrived = np.bincount(self.block_of[P[number == k]], minlength=self.num_blocks)
            self.arrivals[k] = self.arrivals.get(k, 0) + arrived
            if self.async_order:
                self.async_order.bar_arrive(P[number == k], k)

    def find_separate_completions(self, waiting, passing_masks) -> np.ndarray:
        """Return a mask of the thread blocks that pass one barrier at several instructions.

        That is allowed for a barrier with an explicit thread count.
        """
        separate = np.zeros(self.num_blocks, bool)
        passed_blocks: dict[int | str, np.ndarray] = {}
        for (_, positions, (number, count, _)), passes in zip(waiting, passing_masks, strict=True):
            if count is not None and not isinstance(number, str):
                continue
            for k, mask in count_threads_by_barrier(number, len(positions)):
                passing = np.bincount(self.block_of[positions[passes & mask]], minlength=self.num_blocks) > 0
                previous = passed_blocks.get(k, np.zeros(self.num_blocks, bool))
                separate |= passing & previous
                passed_blocks[k] = previous | passing
        return separate

    def find_completed_blocks(self, waiting) -> dict[int | str, np.ndarray]:
        """Map each barrier to a mask of the thread blocks that have completed it."""
        complete: dict[int | str, np.ndarray] = {}
        counts: dict[int | str, np.ndarray] = {}
        requested: dict[int | str, np.ndarray] = {}
        for _, positions, (number, count, _) in waiting:
            for k, mask in count_threads_by_barrier(number, len(positions)):
                blocks = np.bincount(self.block_of[positions[mask]], minlength=self.num_blocks)
                counts[k] = counts.get(k, 0) + blocks
                if count is not None:
                    requested[k] = np.where(blocks > 0, int(np.max(count)), requested.get(k, 0))
        for k, waiting_count in counts.items():
            if isinstance(k, str):
                size = self.run.cluster_size
                full = (waiting_count == self.live_threads).reshape(-1, size).all(axis=1)
                complete[k] = np.repeat(full, size) & (waiting_count > 0)
                continue
            arrived = self.arrivals.get(k, 0)
            need = self.live_threads
            if k in requested:
                need = np.where(
                    requested[k] > 0, np.minimum(requested[k], self.live_threads + arrived), self.live_threads
                )
            complete[k] = (waiting_count > 0) & (waiting_count + arrived >= need)
        return complete

    def reduce_barrier(self, waiting) -> list:
        """Return the results of bar.red (popc, and, or) for each waiting group, or None."""
        results = []
        for index, positions, (number, _, arguments) in waiting:
            if arguments is None:
                results.append(None)
                continue
            mods = self.program.blocks[index].term.mods
            total = np.zeros(self.num_blocks, np.int64)
            total_threads = np.zeros(self.num_blocks, np.int64)
            for _, others, (name, _, value) in waiting:
                if value is not None and np.array_equal(name, number):
                    blocks = self.block_of[others]
                    total += np.bincount(
                        blocks, weights=np.broadcast_to(value, len(others)), minlength=self.num_blocks
                    ).astype(np.int64)
                    total_threads += np.bincount(blocks, minlength=self.num_blocks)
            t, e = total[self.block_of[positions]], total_threads[self.block_of[positions]]
            results.append(t.astype(np.uint32) if "popc" in mods else (t == e) if "and" in mods else t > 0)
        return results

    def report_exited(self, index: int, ready, participants=None):
        """Report threads that exited before a barrier; with `participants`, only in their warps."""
        if not self.exited_early:
            return
        late = (self.live_threads < self.threads_per_block) & (self.live_threads > 0)
        if ready is not None:
            late = late & ready
        if not late.any():
            return
        alive = self.get_live_lanes()
        partial = (alive != 0) & (alive != self.initial_masks)
        if participants is not None:
            partial &= np.bincount(self.warp_of[participants], minlength=self.warps) > 0
        split = partial.reshape(self.num_blocks, -1).any(axis=1) & late
        if participants is not None and not split.any():
            return
        block = int(np.flatnonzero(split if split.any() else late)[0])
        self.run.report_early_exit(self, self.program.blocks[index].term, block, bool(split.any()))
