"""Livelock detection for spin loops: stop a batch whose relevant state repeats.

Between two samples every group of threads has had its turn. When the same state is sampled for the third
time, nothing can change any more. The state is all memory, the position of each thread, and the registers
from which branches, addresses, stores and warp instructions of the blocks that still run are computed. A loop
that merely counts its rounds repeats; one that ends at a count, or branches on a clock, is in another state
each time and runs into the step budget.
"""

from __future__ import annotations

import hashlib

import numpy as np

from harness.vgpu.ptx.program import PURE, Program, reads_and_writes

CLOCKS = ("sp_clock", "sp_globaltimer")


def steering_registers(program: Program, running: frozenset[int]) -> set[str]:
    """Return the registers that can influence threads that stay in the basic blocks `running`."""
    names: set[str] = set()
    sources: dict[str, set[str]] = {}  # register -> its operands
    for index in running:
        block = program.blocks[index]
        if block.kind == "ret":
            names.add(f"return_{block.function}")
        instrs = block.instrs if block.term is None else [*block.instrs, block.term]
        for i in instrs:
            reads, writes = reads_and_writes(i)
            if i.op not in PURE:
                names |= set(reads)
            for name in writes:
                sources.setdefault(name, set()).update(reads)
    todo = list(names)
    while todo:
        for name in sources.get(todo.pop(), ()):
            if name not in names:
                names.add(name)
                todo.append(name)
    return names


class StateSamples:
    def __init__(self, batch):
        self.batch = batch
        self.times: dict[bytes, int] = {}
        self.counts: dict[int, int] | None = None  # basic block -> its threads so far, at the last look
        self.running: frozenset[int] = frozenset()  # the basic blocks that have run since the first look
        self.slots: list[int] = []
        self.timed = False  # whether a clock decides

    def is_repeated(self, index: int, L, pending: dict) -> bool:
        """Return whether this state is sampled for the third time; the threads `L` are about to run block
        `index`."""
        b = self.batch
        self.sample()
        state: list = [index, L, *(x for i in sorted(pending) for x in (i, *pending[i]))]
        state += [x for i, group, _ in b.waiting for x in (i, group)]
        state += [sorted((k, *v.state()) for k, v in b.mbarriers.items()), len(b.copies)]
        state += [self.slots, *(b.S[slot] for slot in self.slots)]
        state += [b.clock() if self.timed else 0, b.shared_space.data, *b.arena.contents()]
        if b.run.local_size:
            state.append(b.local_space.data)
        digest = hashlib.blake2b(digest_size=16)
        for part in state:
            plain = not isinstance(part, np.ndarray) or part.ndim == 0
            digest.update(repr(part).encode() if plain else np.ascontiguousarray(part).data)
        key = digest.digest()
        self.times[key] = self.times.get(key, 0) + 1
        return self.times[key] == 3

    def sample(self) -> None:
        """Collect the basic blocks that run, and the register slots that decide their behaviour."""
        before, self.counts = self.counts, dict(self.batch.run.block_threads)
        if before is None:
            return
        running = self.running | {k for k, n in self.counts.items() if n != before.get(k)}
        if running != self.running:
            self.running = running
            names, slots = steering_registers(self.batch.program, running), self.batch.code.slots
            self.slots = sorted(slots[name] for name in names if name in slots)
            self.timed = any(name.startswith(CLOCKS) for name in names)
