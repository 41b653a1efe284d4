"""Counters of a launch: memory requests, sectors, bank conflicts, atomics, barriers, flops, divergence.

A request is one memory instruction of one warp. Global memory is transferred in sectors of 32 bytes: a
coalesced load of 32 floats is 1 request, 128 bytes, 4 sectors. Shared memory has 32 banks of 4 bytes: a
request takes as many cycles as there are distinct words in its busiest bank (8- and 16-byte accesses are
split into 2 and 4 parts); cycles beyond the minimum are bank conflicts. Traffic is counted per memory
instruction and tensor (`Site`), warp instructions and barriers per instruction (`IssueCount`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from harness.vgpu.ptx.parser import Instr

from .findings import Checks


@dataclass(slots=True)
class Traffic:
    """Requests and bytes of one kind of access; for global memory also `sectors`, for shared memory `cycles`
    and `ideal_cycles`, those without bank conflicts."""

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    cycles: int = 0
    ideal_cycles: int = 0

    @property
    def sectors_per_request(self) -> float:
        """Sectors per request: 4 for a coalesced 4-byte access, up to 32."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def bank_conflicts(self) -> int:
        return self.cycles - self.ideal_cycles

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests, self.bytes + other.bytes, self.sectors + other.sectors,
            self.cycles + other.cycles, self.ideal_cycles + other.ideal_cycles,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Site:
    """Counts of one memory instruction on one tensor, array in shared memory, or local memory. `kind` is R, W
    or A (atomic, or a strong load or store)."""

    instr: Instr
    space: str
    kind: str
    tensor: str
    nbytes: int  # of one thread's access
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def verb(self) -> str:
        """One of "load", "store" and "atomic"; strong loads and stores count as loads and stores."""
        if self.kind == "R" or self.instr.op == "ld":
            return "load"
        return "store" if self.kind == "W" or self.instr.op == "st" else "atomic"


@dataclass(slots=True, eq=False)
class IssueCount:
    """Number of times an instruction was issued, per warp; per thread block for barriers, per warpgroup for
    wgmma."""

    instr: Instr
    count: int = 0


@dataclass(slots=True)
class TensorTraffic:
    """Bytes of one tensor that a launch read and wrote, and atomics on it."""

    read: int = 0
    written: int = 0
    atomics: int = 0


@dataclass(slots=True, eq=False)
class Overlap:
    """Multiply-adds that overlap an asynchronous copy, between its group's commit and the wait.

    `minimum` is taken over the groups committed after the first multiply-add; None if there are none.
    """

    instr: Instr
    minimum: int | None = None


class CostSource(Protocol):
    """The part of a kernel's generated code (engine/opcodes/codegen.py) that the counters read."""

    costs: dict[int, BlockCost]  # basic block -> costs per thread


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The costs of one thread in one basic block; a multiply-add counts as two flops."""

    instructions: int = 0
    flops: int = 0
    multiply_adds: int = 0


NO_COST = BlockCost()


class CounterSource(Protocol):
    """The part of a launch (engine/launch.py) that the counters read."""

    checks: Checks
    grid: tuple[int, int, int]
    threads_per_block: int
    block_threads: dict[int, int]  # basic block -> threads that ran it
    atomics_by_address: dict[int, int]  # address -> atomics on it

    @property
    def code(self) -> CostSource: ...

    def get_shared_array_name(self, offset: int) -> str: ...


@dataclass(slots=True, eq=False)
class Counters:
    """All counters of a launch, complete when the launch has ended."""

    run: CounterSource = field(repr=False)
    sites: dict[tuple[int, str, str], Site] = field(default_factory=dict, repr=False)
    issues: dict[int, IssueCount] = field(default_factory=dict, repr=False)
    overlaps: dict[int, Overlap] = field(default_factory=dict, repr=False)
    atomics: int = 0
    atomics_per_address: int = 0  # the maximum over all addresses
    barriers: int = 0  # barriers passed, summed over blocks
    instructions: int = 0  # thread instructions
    flops: int = 0
    multiply_adds: int = 0
    divergent_branches: int = 0  # branches that split a warp, counted per warp
    threads: int = 0

    # -- sums -----------------------------------------------------------------------------------------------
    def get_traffic(self, space: str, kind: str) -> Traffic:
        return sum_traffic(s for s in self.sites.values() if s.space == space and s.kind == kind)

    @property
    def global_load(self) -> Traffic:
        """Non-atomic loads of global memory."""
        return self.get_traffic("global", "R")

    @property
    def global_store(self) -> Traffic:
        """Non-atomic stores to global memory."""
        return self.get_traffic("global", "W")

    @property
    def global_atomic(self) -> Traffic:
        """Atomics, strong loads and strong stores of global memory."""
        return self.get_traffic("global", "A")

    @property
    def shared_load(self) -> Traffic:
        """Non-atomic loads of shared memory."""
        return self.get_traffic("shared", "R")

    @property
    def shared_store(self) -> Traffic:
        """Non-atomic stores to shared memory; an asynchronous copy counts when it completes."""
        return self.get_traffic("shared", "W")

    @property
    def shared_atomic(self) -> Traffic:
        """Atomics, strong loads and strong stores of shared memory."""
        return self.get_traffic("shared", "A")

    @property
    def tensors(self) -> dict[str, TensorTraffic]:
        """Bytes read and written in each tensor in global memory."""
        tensors: dict[str, TensorTraffic] = {}
        for site in self.sites.values():
            if site.space == "global":
                t = tensors.setdefault(site.tensor, TensorTraffic())
                t.read += site.traffic.bytes if site.verb == "load" else 0
                t.written += site.traffic.bytes if site.verb == "store" else 0
                t.atomics += site.traffic.bytes // site.nbytes if site.verb == "atomic" else 0
        return tensors

    def count_issues(self, *ops: str) -> int:
        """Count the issues of these opcodes, such as "shfl", "mma", "wgmma", "bar", "cp" (group commits)."""
        return sum(issues.count for issues in self.issues.values() if issues.instr.op in ops)

    @property
    def copy_overlap(self) -> int | None:
        """The minimum number of multiply-adds that overlap a copy; None if no group qualifies."""
        return min((o.minimum for o in self.overlaps.values() if o.minimum is not None), default=None)

    # -- called by the executor -----------------------------------------------------------------------------
    def count_atomic(self, access, index):
        """Count one atomic instruction, one address per thread."""
        self.atomics += len(index) if np.ndim(index) else 1
        if self.run.checks.counters and access.space == "global":
            indices, count = np.unique(index, return_counts=True)
            hits = self.run.atomics_by_address
            for w, c in zip((indices << access.shift).tolist(), count.tolist(), strict=True):
                hits[w] = hits.get(w, 0) + c

    def count_issue(self, instr: Instr, count: int):
        issues = self.issues.get(id(instr))
        if issues is None:
            issues = self.issues[id(instr)] = IssueCount(instr)
        issues.count += count

    def record_overlap(self, instr: Instr, multiply_adds: np.ndarray):
        overlap = self.overlaps.setdefault(id(instr), Overlap(instr))
        if len(multiply_adds):
            maximum = int(multiply_adds.max())  # threads at an edge may do fewer
            overlap.minimum = maximum if overlap.minimum is None else min(overlap.minimum, maximum)

    def finish(self):
        code = self.run.code
        for index, threads in self.run.block_threads.items():
            cost = code.costs.get(index, NO_COST)
            self.instructions += threads * cost.instructions
            self.flops += threads * cost.flops
            self.multiply_adds += threads * cost.multiply_adds
        self.threads = self.run.grid[0] * self.run.grid[1] * self.run.grid[2] * self.run.threads_per_block
        self.atomics_per_address = max(self.run.atomics_by_address.values(), default=0)

    def count_local(self, access, positions: np.ndarray, warp_of: np.ndarray):
        """Count an access of threads to local memory, which stores arrays that are not in registers."""
        requests = len(np.unique(warp_of[positions]))
        self.get_site(access, "local", "local memory").traffic += Traffic(
            requests, access.nbytes * len(positions)
        )

    # -- called by the access log ---------------------------------------------------------------------------
    def get_site(self, access, space: str, tensor: str) -> Site:
        """Return the counts of an instruction on a tensor or a shared array."""
        key = (access.number, space, tensor)
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(access.instr, space, access.kind, tensor, access.nbytes)
        return site

    def count_global_accesses(self, entries):
        requests = Requests([entry for entry, _ in entries])
        key = (requests.number << 34) | (requests.address >> 5)
        if (key[1:] < key[:-1]).any():
            key.sort()
        sectors = requests.sum_by_entry(key[find_run_starts(key)] >> 34)
        for k, (entry, tensor) in enumerate(entries):
            self.get_site(entry[0], "global", tensor.name).traffic += Traffic(*requests.sums[k], sectors[k])

    def count_shared_accesses(self, batch, entries):
        by_width: dict[int, list] = {}
        for e in entries:
            if e[0].space != "early":  # an asynchronous copy is counted when it completes
                by_width.setdefault(max(e[0].shift, 2), []).append(e)
        for shift, same_width in by_width.items():
            requests = Requests(same_width)
            parts = 1 << (shift - 2)  # a 16-byte access is served in four parts
            group = requests.number * parts + requests.lane * parts // 32
            cycles = compute_bank_cycles(group, requests.address >> shift, 32 // parts)
            request = group[find_run_starts(group)] // parts
            cycles_of_entry, ideal_cycles = (
                requests.sum_by_entry(request, cycles),
                requests.sum_by_entry(request),
            )
            for k, e in enumerate(same_width):
                offset = (int(np.min(e[1])) << e[0].shift) % batch.shared_size
                site = self.get_site(e[0], "shared", self.run.get_shared_array_name(offset))
                site.traffic += Traffic(*requests.sums[k], 0, cycles_of_entry[k], ideal_cycles[k])


def sum_traffic(sites: Iterable[Site]) -> Traffic:
    return sum((site.traffic for site in sites), Traffic())


def find_run_starts(ascending: np.ndarray) -> np.ndarray:
    """Return a mask of the first element of each run of equal values."""
    return np.r_[True, ascending[1:] != ascending[:-1]]


class Requests:
    """Logged accesses, by thread: request `number` (ascending), `lane`, byte `address`. `sums` has (requests,
    bytes) of each log entry."""

    def __init__(self, entries):
        number, lanes, address, spans = [], [], [], []
        base = 0
        for access, index, thread_ids, active, *_ in entries:
            warp = thread_ids[3] if active is None else thread_ids[3][active]
            lanes.append(thread_ids[4] if active is None else thread_ids[4][active])
            number.append(warp + base)
            spans.append(int(warp[-1]) + 1)
            base += spans[-1]
            address.append(
                np.full(len(warp), index << access.shift) if np.ndim(index) == 0 else index << access.shift
            )
        self.number, self.lane = np.concatenate(number), np.concatenate(lanes)
        self.address = np.concatenate(address)
        self._entry_of = np.repeat(np.arange(len(spans)), spans)
        counts = self.sum_by_entry(self.number[find_run_starts(self.number)])
        rows = zip(counts, entries, lanes, strict=True)
        self.sums = [(count, entry[0].nbytes * len(lane)) for count, entry, lane in rows]

    def sum_by_entry(self, requests: np.ndarray, weights: np.ndarray | None = None) -> list[int]:
        """Count these requests, or sum their weights, by log entry."""
        sums = np.bincount(self._entry_of[requests], weights, minlength=int(self._entry_of[-1]) + 1)
        return sums.astype(np.int64).tolist()


def compute_bank_cycles(group: np.ndarray, unit: np.ndarray, banks: int) -> np.ndarray:
    """Return each group's cycles, the distinct words (`unit`) in its busiest bank; `group` ascends."""
    number = np.cumsum(find_run_starts(group)) - 1
    count = int(number[-1]) + 1
    cycles = np.ones(count, np.int64)
    cell = number * banks + unit % banks
    table = np.empty(count * banks, unit.dtype)
    table[cell] = unit
    is_conflict = table[cell] != unit
    if not is_conflict.any():
        return cycles
    has_conflict = np.zeros(count, bool)
    has_conflict[number[is_conflict]] = True
    selected = has_conflict[number]
    order = np.lexsort((unit[selected], cell[selected]))
    c, v, g = cell[selected][order], unit[selected][order], number[selected][order]
    distinct = find_run_starts(c) | np.r_[True, v[1:] != v[:-1]]
    new_cell = find_run_starts(c)
    per_cell = np.add.reduceat(distinct.astype(np.int64), np.flatnonzero(new_cell))
    groups = g[new_cell]
    starts = find_run_starts(groups)
    cycles[groups[starts]] = np.maximum.reduceat(per_cell, np.flatnonzero(starts))
    return cycles
