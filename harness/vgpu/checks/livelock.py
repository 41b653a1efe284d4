"""Livelock detection for spin loops: stop a batch whose relevant state repeats.

Every group of threads runs between two samples. Once the same state is sampled a third time, nothing can
change any more. The state is all memory, the basic block of each thread, and the registers that determine
branches, addresses, stores and warp instructions in the blocks still running. A loop that only counts its
iterations repeats its state; one that ends at a count, or branches on a clock, does not, and runs into the
step budget.
"""

from __future__ import annotations

import hashlib

import numpy as np

from harness.vgpu.ptx.program import PURE_OPCODES, Program, get_reads_and_writes

CLOCK_REGISTERS = ("sp_clock", "sp_globaltimer")


def find_control_registers(program: Program, active_blocks: frozenset[int]) -> set[str]:
    """Return the registers that can influence threads that stay in these basic blocks."""
    names: set[str] = set()
    sources: dict[str, set[str]] = {}  # register -> its operands
    for index in active_blocks:
        block = program.blocks[index]
        if block.kind == "ret":
            names.add(f"return_{block.function}")
        instrs = block.instrs if block.term is None else [*block.instrs, block.term]
        for i in instrs:
            reads, writes = get_reads_and_writes(i)
            if i.op not in PURE_OPCODES:
                names |= set(reads)
            for name in writes:
                sources.setdefault(name, set()).update(reads)
    worklist = list(names)
    while worklist:
        for name in sources.get(worklist.pop(), ()):
            if name not in names:
                names.add(name)
                worklist.append(name)
    return names


class StateSamples:
    """The sampled states of a batch; the active basic blocks determine which registers they include."""

    def __init__(self, batch):
        self.batch = batch
        self.occurrences: dict[bytes, int] = {}
        self.thread_counts: dict[int, int] | None = (
            None  # basic block -> threads that ran it before the last sample
        )
        self.active_blocks: frozenset[int] = frozenset()  # basic blocks that have run since the first sample
        self.slots: list[int] = []
        self.reads_clock = False  # whether these blocks depend on a clock

    def is_repeated(self, index: int, active, pending: dict) -> bool:
        """Sample the state before the active threads run block `index`; return whether it is the third time."""
        b = self.batch
        self.update_active_blocks()
        state: list = [index, active, *(x for i in sorted(pending) for x in (i, *pending[i]))]
        state += [x for i, group, _ in b.waiting for x in (i, group)]
        state += [sorted((k, *v.get_state()) for k, v in b.mbarriers.items()), len(b.copies)]
        state += [self.slots, *(b.registers[slot] for slot in self.slots)]
        state += [b.get_clock() if self.reads_clock else 0, b.shared_space.data, *b.arena.get_contents()]
        if b.run.local_size:
            state.append(b.local_space.data)
        digest = hashlib.blake2b(digest_size=16)
        for part in state:
            is_scalar = not isinstance(part, np.ndarray) or part.ndim == 0
            digest.update(repr(part).encode() if is_scalar else np.ascontiguousarray(part).data)
        key = digest.digest()
        self.occurrences[key] = self.occurrences.get(key, 0) + 1
        return self.occurrences[key] == 3

    def update_active_blocks(self) -> None:
        """Update the basic blocks that have run, and the register slots that control them."""
        before, self.thread_counts = self.thread_counts, dict(self.batch.run.block_threads)
        if before is None:
            return
        active_blocks = self.active_blocks | {k for k, n in self.thread_counts.items() if n != before.get(k)}
        if active_blocks != self.active_blocks:
            self.active_blocks = active_blocks
            names, slots = find_control_registers(self.batch.program, active_blocks), self.batch.code.slots
            self.slots = sorted(slots[name] for name in names if name in slots)
            self.reads_clock = any(name.startswith(CLOCK_REGISTERS) for name in names)
