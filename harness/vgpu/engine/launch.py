"""Run one launch: split the grid into batches and execute them; reports.py records findings."""

from __future__ import annotations

import copy
import time

import numpy as np

from harness.vgpu.checks.counters import Counters
from harness.vgpu.checks.findings import Finding, Findings, format_count
from harness.vgpu.checks.races import AccessLog, may_synchronise
from harness.vgpu.checks.trial import SavedTensors, depends_on_unwritten_memory
from harness.vgpu.engine.interpreter.executor import Batch, Livelock, StepBudgetReached, Trap
from harness.vgpu.engine.reports import Reports, shorten_shared_name
from harness.vgpu.errors import StepBudgetExceeded, UnsupportedInstruction
from harness.vgpu.memory.arena import Extent, Space, find_extent
from harness.vgpu.ptx.locations import format_location
from harness.vgpu.ptx.program import is_poll

SHARED_BUDGET_BYTES, LOCAL_BUDGET_BYTES = 256 << 20, 512 << 20
MIN_BATCHES = 16
SHARED_GUARD_BYTES = 256
RERUN_EXTRA_STEPS = 10_000  # a rerun's step budget, beyond twice the steps of the first run


class Run(Reports):
    """The state of one launch."""

    def __init__(self, gpu, launch, kernel, args, dynamic_shared: int, cluster, is_rerun: bool = False):
        self.gpu, self.launch, self.kernel, self.args = gpu, launch, kernel, args
        self.is_rerun = is_rerun  # a rerun for comparison (trial.py), whose findings are not reported
        self.max_events = 0 if is_rerun else gpu.max_events
        self.output: list[str] = []
        self.arena, self.checks, self.code = gpu.arena, gpu.checks, kernel.code
        self.grid, self.block, self.cluster = launch.grid, launch.block, cluster
        self.threads_per_block = self.block[0] * self.block[1] * self.block[2]
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.dynamic_shared = dynamic_shared
        self.findings = Findings()
        self._owners: dict[int, list[Extent]] = {}
        self.steps, self.step_budget = 0, gpu.max_steps
        self._forbidden_writes = SavedTensors(self.arena)  # tensors to restore after the launch
        self.block_threads: dict[int, int] = {}
        self.atomics_by_address: dict[int, int] = {}
        self._create_memory_layout(args)
        tables = any(i.loc for i in self.code.program.instrs)
        needs_trial = self.shared_size and self.checks.uninitialised and not tables
        self.tensors_before_launch = SavedTensors(self.arena) if needs_trial else None
        # reads of unwritten shared memory, possibly by the library
        self.uncertain_findings: list[Finding] = []
        for a in self.code.accesses:
            a.clear_cache()
        for e in self.arena.extents:
            e.written = False
        self.counters = launch.counters = Counters(self)
        self.log = AccessLog(self)

    def _create_memory_layout(self, args):
        program = self.code.program
        block = bytearray(max(program.param_bytes, 1))
        for (offset, size), arguments in zip(program.params.values(), args, strict=True):
            block[offset : offset + size] = arguments
        block += bytes(64)
        data = np.frombuffer(
            bytes(block[: len(block) // 64 * 64 + 64]).ljust(-(-len(block) // 64) * 64, b"\0"), np.uint8
        )
        self.param_space = Space(data, np.ones(len(data), np.uint8))
        self.param_extent = Extent(0, program.param_bytes, "parameters", fully_written=True)
        self._param_bytes = bytes(data)
        self.params: list = []
        self.update_params()
        end, self.shared_extents = 0, []
        for name, (offset, size) in self.kernel.shared_layout.items():
            size = size or self.dynamic_shared
            label = "dynamic shared memory" if name.startswith("extern_ptr") else shorten_shared_name(name)
            self.shared_extents.append(Extent(offset, offset + size, label))
            end = max(end, offset + size + SHARED_GUARD_BYTES)
        self.shared_size = -(-end // 128) * 128
        self.local_extents = [Extent(o, o + n, "local memory") for o, n in program.locals.values()]
        self.local_size = -(-(program.local_bytes + SHARED_GUARD_BYTES) // 64) * 64 if program.locals else 0

    def get_shared_array_name(self, offset: int) -> str:
        array = find_extent(self.shared_extents, offset)
        return array.name if array else ""

    def generate_block(self, index: int):
        function = self.code.get_function(index)
        self.update_params()
        return function

    def update_params(self):
        """Extend `params`, the values of the kernel parameters that the generated functions read."""
        for offset, kind in self.code.param_reads[len(self.params) :]:
            self.params.append(np.frombuffer(self._param_bytes, np.dtype(kind), 1, offset)[0])

    # -- running --------------------------------------------------------------------------------------------
    def execute(self):
        """Run all blocks and record the findings. Raises StepBudgetExceeded or UnsupportedInstruction."""
        start = time.perf_counter()
        try:
            self.run_blocks()
            if self.uncertain_findings and not depends_on_unwritten_memory(self):
                for f in self.uncertain_findings:
                    f.is_error = False
                    f.marked_message += "; the results do not depend on the bytes read"
        finally:
            self.launch.duration_s = time.perf_counter() - start
            self.launch.findings = list(self.findings)
            for f in self.findings:
                self.gpu.findings.record(f, (id(self.launch), id(f)))

    def rerun(self) -> Run | None:
        """Repeat the launch with other bytes in unwritten shared memory; return None if it fails."""
        rerun = Run(
            self.gpu, copy.copy(self.launch), self.kernel, self.args, self.dynamic_shared, self.cluster, True
        )
        rerun.step_budget = 2 * self.steps + RERUN_EXTRA_STEPS
        try:
            rerun.run_blocks()
        except (StepBudgetExceeded, UnsupportedInstruction):
            return None
        return rerun

    def create_unwritten_bytes(self, count: int) -> np.ndarray:
        """Return the initial contents of shared memory. uint8 [count]"""
        if self.is_rerun:
            return np.random.default_rng(0).integers(0, 256, count, np.uint8)
        return np.zeros(count, np.uint8)

    def record_first_write(self, tensor: Extent) -> None:
        """Save a tensor's contents before its first write if they may have to be restored."""
        if not tensor.written:
            for store_of_tensors in (
                self.tensors_before_launch,
                self._forbidden_writes if tensor.write_violation else None,
            ):
                if store_of_tensors is not None:
                    store_of_tensors.save(tensor)
        tensor.written = True

    def run_blocks(self):
        try:
            with np.errstate(all="ignore"):
                for blocks in self.iterate_batches():
                    batch = Batch(self, blocks)
                    self.log.start_batch(batch)
                    batch.execute()
                    self.log.process_logs()  # all threads of the batch have exited
        except StepBudgetReached as stop:
            self._raise_hang(stop)
        except Trap as trap:
            text = "the kernel stopped itself (trap): an assertion or an unreachable state"
            self.record_at(trap.batch, trap.positions[0], "trap", trap.instr, text, count=len(trap.positions))
        finally:
            with np.errstate(all="ignore"):
                self.log.finish()
            self.counters.finish()
            for e, snapshot in (self._forbidden_writes.snapshots or {}).items():
                if e.write_violation != "undeclared atomic":  # later launches must read the original contents
                    self.arena.restore(e, snapshot)
            for e in self.arena.extents:
                if e.written:
                    e.last_writer = self.launch.name
                    if not e.fully_written:
                        self.arena.update_fully_written(e.start, e.end - e.start)

    def iterate_batches(self):
        """Yield arrays of linear block indices, in the device's block order."""
        gx, gy, gz = self.grid
        total = gx * gy * gz
        size = max(self.gpu.max_batch_threads // self.threads_per_block, 1)
        if self.shared_size:
            size = min(size, max(SHARED_BUDGET_BYTES // self.shared_size, 1))
        if self.local_size:
            size = min(size, max(LOCAL_BUDGET_BYTES // (self.local_size * self.threads_per_block), 1))
        order, _, seed = self.gpu.block_order.partition(":")
        blocks_wait = may_synchronise(self.code.program) and any(
            b.in_spin_loop for b in self.code.program.blocks
        )
        if order != "natural" and not blocks_wait:  # blocks that wait for each other must run together
            size = min(size, -(-total // MIN_BATCHES))
        c = self.cluster_size
        size = max(size // c, 1) * c
        if c == 1 and order == "natural":
            for first in range(0, total, size):
                yield np.arange(first, min(first + size, total))
            return
        blocks = self._order_by_cluster(total)
        if order == "reversed":
            blocks = blocks[::-1]
        elif order == "shuffled":
            np.random.default_rng(int(seed or 0)).shuffle(blocks)
        blocks = blocks.reshape(-1)
        for first in range(0, total, size):
            yield blocks[first : first + size]

    def _order_by_cluster(self, total: int) -> np.ndarray:
        """Return linear block indices [cluster, rank]."""
        gx, gy, _ = self.grid
        cx, cy, cz = self.cluster
        b = np.arange(total)
        x, y, z = b % gx, b // gx % gy, b // (gx * gy)
        cluster = (x // cx) + (gx // cx) * ((y // cy) + (gy // cy) * (z // cz))
        rank = (x % cx) + cx * ((y % cy) + cy * (z % cz))
        return b[np.lexsort((rank, cluster))].reshape(-1, self.cluster_size)

    def print(self, text: str):
        self.output.append(text)
        if not self.is_rerun:
            self.gpu.print(text)

    def _raise_hang(self, stop: StepBudgetReached):
        instr = next(iter(stop.block.instrs), stop.block.term)
        budget = format_count(self.step_budget, "step")
        if isinstance(stop, Livelock):
            instr = next((i for i in stop.block.instrs if is_poll(i)), instr)
            waiting = format_count(stop.threads, "thread waits", "threads wait")
            message = f"{waiting} here forever: no thread is left that could change what they read"
            message += stop.batch.describe_failed_tests()
        else:
            looping = format_count(stop.threads, "thread was", "threads were")
            message = f"the launch was stopped after {budget}; {looping} looping here"
        finding = self.record("hang", instr, message, is_note=False)
        finding.count = 1
        where = format_location(instr)
        if isinstance(stop, Livelock):
            raise StepBudgetExceeded(f"kernel {self.launch.name} can never end: {finding.message} ({where})")
        looping = format_count(stop.threads, "thread is", "threads are")
        raise StepBudgetExceeded(
            f"kernel {self.launch.name} did not end within {budget}: {looping} looping at {where}"
        )
