"""Counters of a launch: memory requests, sectors, bank conflicts, atomics, barriers, flops, divergence. No
times.

A request is one memory instruction of one warp. Global memory moves sectors of 32 bytes: a coalesced load of
32 floats is 1 request, 128 bytes, 4 sectors. Shared memory has 32 banks of 4 bytes: a request takes as many
cycles as the busiest bank has different words in it (8- and 16-byte accesses are served in 2 and 4 parts);
the cycles above the ideal number are its bank conflicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .findings import Checks


@dataclass(slots=True)
class Traffic:
    """Requests and bytes of one kind of access; `sectors` for global, `cycles` and `ideal` for shared
    memory."""

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    cycles: int = 0
    ideal: int = 0

    @property
    def sectors_per_request(self) -> float:
        """4 for a coalesced 4-byte access, up to 32."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def bank_conflicts(self) -> int:
        """Extra cycles because of bank conflicts."""
        return self.cycles - self.ideal


@dataclass(slots=True)
class TensorTraffic:
    """Bytes that a launch read and wrote in one tensor, and atomics on it."""

    read: int = 0
    written: int = 0
    atomics: int = 0


class Costs(Protocol):
    """What is read of a kernel's generated code (engine/opcodes/codegen.py)."""

    work: dict[int, tuple[int, int]]  # basic block -> instructions and flops per thread


class Counted(Protocol):
    """What is read of the launch that is counted (engine/launch.py)."""

    checks: Checks
    grid: tuple[int, int, int]
    threads: int
    block_threads: dict[int, int]  # basic block -> threads that ran it
    atomic_hits: dict[int, int]  # place -> atomics on it

    @property
    def code(self) -> Costs:
        """The kernel's."""
        ...


@dataclass(slots=True, eq=False)
class Counters:
    """All counters of a launch; complete when the launch is over."""

    run: Counted = field(repr=False)
    global_load: Traffic = field(default_factory=Traffic)
    global_store: Traffic = field(default_factory=Traffic)
    global_atomic: Traffic = field(default_factory=Traffic)
    shared_load: Traffic = field(default_factory=Traffic)
    shared_store: Traffic = field(default_factory=Traffic)
    shared_atomic: Traffic = field(default_factory=Traffic)
    tensors: dict[str, TensorTraffic] = field(default_factory=dict)
    atomics: int = 0
    atomics_per_address: int = 0  # the most that one address got
    barriers: int = 0  # barrier passages, summed over blocks
    instructions: int = 0  # thread instructions
    flops: int = 0
    divergent_branches: int = 0  # branches that split a warp, counted per warp
    threads: int = 0

    def atomic(self, A, index):
        """One atomic instruction of some threads."""
        self.atomics += len(index) if np.ndim(index) else 1
        if self.run.checks.counters and A.space == "global":
            where, count = np.unique(index, return_counts=True)
            hits = self.run.atomic_hits
            for w, c in zip((where << A.shift).tolist(), count.tolist(), strict=True):
                hits[w] = hits.get(w, 0) + c

    def finish(self):
        """Add up what is counted per basic block."""
        code = self.run.code
        for index, threads in self.run.block_threads.items():
            instructions, flops = code.work.get(index, (0, 0))
            self.instructions += threads * instructions
            self.flops += threads * flops
        self.threads = self.run.grid[0] * self.run.grid[1] * self.run.grid[2] * self.run.threads
        self.atomics_per_address = max(self.run.atomic_hits.values(), default=0)

    # -- from the access log --------------------------------------------------------------------------------
    def consume_global(self, entries):
        """Count logged global accesses."""
        groups: dict[str, list] = {}
        for entry, tensor in entries:
            A, ids, L = entry[0], entry[2], entry[3]
            groups.setdefault(A.kind, []).append(entry)
            moved = A.nbytes * (len(ids[0]) if L is None else len(L))
            t = self.tensors.setdefault(tensor.name, TensorTraffic())
            if A.kind == "R" or A.instr.op == "ld":
                t.read += moved
            elif A.kind == "W" or A.instr.op == "st":
                t.written += moved
            else:
                t.atomics += moved // A.nbytes
        for kind, some in groups.items():
            traffic = {"R": self.global_load, "W": self.global_store, "A": self.global_atomic}[kind]
            request, _, address = self._requests(some)
            traffic.bytes += sum(e[0].nbytes * (len(e[2][0]) if e[3] is None else len(e[3])) for e in some)
            traffic.requests += 1 + int(np.count_nonzero(request[1:] != request[:-1]))
            key = (request << 34) | (address >> 5)
            step = np.diff(key)
            if (step < 0).any():
                key.sort()
                step = np.diff(key)
            traffic.sectors += 1 + int(np.count_nonzero(step))

    def _requests(self, entries):
        """(request number, lane, byte address) of every thread access in these entries."""
        request, lanes, address, base = [], [], [], 0
        for A, index, ids, L, *_ in entries:
            warp = ids[3] if L is None else ids[3][L]
            lanes.append(ids[4] if L is None else ids[4][L])
            request.append(warp + base)
            base += int(warp[-1]) + 1
            address.append(np.full(len(warp), index << A.shift) if np.ndim(index) == 0 else index << A.shift)
        return np.concatenate(request), np.concatenate(lanes), np.concatenate(address)

    def consume_shared(self, batch, entries):
        """Count logged shared accesses."""
        groups: dict[tuple[str, int], list] = {}
        for e in entries:
            if e[0].space == "early":  # an asynchronous copy is counted when it lands
                continue
            groups.setdefault((e[0].kind, max(e[0].shift, 2)), []).append(e)
        for (kind, shift), some in groups.items():
            traffic = {"R": self.shared_load, "W": self.shared_store, "A": self.shared_atomic}[kind]
            request, lanes, address = self._requests(some)
            traffic.bytes += sum(e[0].nbytes * (len(e[2][0]) if e[3] is None else len(e[3])) for e in some)
            traffic.requests += 1 + int(np.count_nonzero(request[1:] != request[:-1]))
            parts = 1 << (shift - 2)  # a 16-byte access is served in four parts
            group = request * parts + lanes * parts // 32
            cycles, ideal = bank_cycles(group, address >> shift, 32 // parts)
            traffic.cycles += cycles
            traffic.ideal += ideal


def bank_cycles(group: np.ndarray, unit: np.ndarray, banks: int) -> tuple[int, int]:
    """(cycles, groups): the busiest bank of each group decides; `group` is ascending, `unit` the word
    accessed."""
    change = np.r_[True, group[1:] != group[:-1]]
    number = np.cumsum(change) - 1
    count = int(number[-1]) + 1
    cell = number * banks + unit % banks
    table = np.empty(count * banks, unit.dtype)
    table[cell] = unit
    clash = table[cell] != unit
    if not clash.any():
        return count, count
    bad = np.zeros(count, bool)
    bad[number[clash]] = True
    pick = bad[number]
    order = np.lexsort((unit[pick], cell[pick]))
    c, v, g = cell[pick][order], unit[pick][order], number[pick][order]
    distinct = np.r_[True, (c[1:] != c[:-1]) | (v[1:] != v[:-1])]
    new_cell = np.r_[True, c[1:] != c[:-1]]
    per_cell = np.add.reduceat(distinct.astype(np.int64), np.flatnonzero(new_cell))
    groups = g[new_cell]
    firsts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    worst = np.maximum.reduceat(per_cell, firsts)
    return int(worst.sum()) + count - len(worst), count
