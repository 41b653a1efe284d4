"""Barriers in shared memory (mbarrier): arrivals, transaction counts, phases, and the threads that wait.

A phase ends when all arrivals that the barrier counts have come and its transaction count is zero:
`expect_tx` adds bytes to it, every byte that an asynchronous copy writes subtracts one. The state that an
arrival returns has the phase's parity in its highest bit and the arrivals that were still pending in its low
ones; nothing else is in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.access import Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.ptx.places import place as line_of

from .batch_memory import BatchMemory

PHASE_BIT = 63  # of the state of an mbarrier, and of the token that an arrival returns
LISTED = 4  # mbarriers that a message about a hang names
PENDING_MASK = (1 << 20) - 1  # of the token of an arrival: the arrivals that were pending


class Test(NamedTuple):
    """A failed test of an mbarrier: the instruction, the phase parity it tested, and how many threads of
    which block."""

    access: Access
    parity: int
    threads: int
    block: int


class BarrierOps(BatchMemory):
    """The mbarriers of a batch."""

    def start_barriers(self):
        self.mbarriers: dict[int, MBarrier] = {}  # by place
        self.finished: set[int] = set()  # thread blocks with a phase that has ended, and is not passed on yet
        self.changes = (
            0  # phases that have ended so far: polls that failed need not be tried before there are more
        )
        self.poll_failed = False  # whether the last test of an mbarrier failed for all threads
        self.tested: dict[int, Test] = {}  # by place: the tests that have failed since a phase has ended

    def barrier_places(self, A: Access, address, L) -> np.ndarray:
        """Return the locations of mbarriers, possibly in another block of the cluster, one for each thread."""
        return self.remote_index(A, address, L)[0]

    def barriers_at(self, A: Access, address, L):
        """Yield (location, its mbarrier, mask of the threads L that name it) for each of several locations.

        Threads whose mbarrier is not initialised are reported and left out.
        """
        places = self.barrier_places(A, address, L)
        distinct = np.unique(places)
        for place in distinct.tolist():
            which = np.flatnonzero(places == place) if len(distinct) > 1 else np.arange(len(places))
            barrier = self.mbarriers.get(place)
            if barrier is None:
                self.run.mbarrier_unready(self, A, self.positions(L)[which[0]], len(which))
            else:
                yield place, barrier, which

    def mbarrier_init(self, A: Access, address, count, L):
        places = self.barrier_places(A, address, L)
        _, written, full = A.views(self.shared_space)
        written[places] = full
        for place, n in zip(places.tolist(), np.broadcast_to(count, len(places)).tolist(), strict=True):
            self.mbarriers[place] = MBarrier(n, n)

    def mbarrier_inval(self, A: Access, address, L):
        for place, _, _ in list(self.barriers_at(A, address, L)):
            del self.mbarriers[place]

    def mbarrier_arrive(self, A: Access, address, count, expected, drop: bool, L):
        """Execute arrivals, each after an expect_tx of `expected` bytes; with `drop` for all later phases
        too.

        Return the token of each.
        """
        P = self.positions(L)
        count, expected = np.broadcast_to(count, len(P)), np.broadcast_to(expected, len(P))
        tokens = np.zeros(len(P), np.uint64)
        for place, barrier, which in self.barriers_at(A, address, L):
            if self.order:
                self.order.arrive(P[which], barrier)
            for k in which.tolist():
                tokens[k] = (barrier.phase & 1) << PHASE_BIT | (barrier.pending & PENDING_MASK)
                if count[k] > barrier.pending:
                    message = f"phase {barrier.phase} of the mbarrier {self.barrier_name(A, place)} {barrier.lacks()}"
                    message += ", and here come more arrivals than that"
                    self.run.at(self, P[k], "too many arrivals", A.instr, message, algorithm=None)
                barrier.bytes += int(expected[k])
                barrier.pending = max(barrier.pending - int(count[k]), 0)
                if drop:
                    barrier.count -= int(count[k])
                self.finish_phase(A, place, barrier)
        self.pass_phases()
        return tokens

    def mbarrier_bytes(self, A: Access, address, nbytes, L):
        """Execute mbarrier.expect_tx, or complete_tx with negative numbers."""
        nbytes = np.broadcast_to(nbytes, len(self.positions(L)))
        for place, barrier, which in self.barriers_at(A, address, L):
            barrier.bytes += int(nbytes[which].sum())
            self.finish_phase(A, place, barrier)
        self.pass_phases()

    def finish_phase(self, A: Access, place: int, barrier: MBarrier):
        """End a complete phase; `pass_phases` must follow."""
        if not barrier.pending and not barrier.bytes:
            barrier.pending = barrier.count
            barrier.phase += 1
            if self.order:
                self.order.end_phase(barrier)
            self.finished.add((place << A.shift) // self.shared_size)

    def pass_phases(self):
        """Report the phases that have just ended to the race check."""
        if self.finished:
            ready = np.zeros(self.count, bool)
            ready[list(self.finished)] = True
            self.finished.clear()
            self.changes += 1
            self.tested.clear()
            self.pass_barrier(ready)

    def mbarrier_test(self, A: Access, address, token, parity: bool, L):
        """Return whether the phase named by the token (or by its parity) is complete.

        Like the hardware, only look at one bit of the token, even where it is not a token of an arrival.
        """
        P = self.positions(L)
        token = np.broadcast_to(token, len(P))
        bit = token >> token.dtype.type(0 if parity else PHASE_BIT) & token.dtype.type(1)
        done = np.ones(len(token), bool)
        for place, barrier, which in self.barriers_at(A, address, L):
            done[which] = bit[which] != barrier.phase & 1
            if self.order and done[which].any():
                self.order.observe_phase(P[which[done[which]]], barrier)
            if not done[which].all():
                failed = which[~done[which]]
                block = int(self.blocks[self.block_of[P[failed[0]]]])
                self.tested[place] = Test(A, barrier.phase & 1, len(failed), block)
        self.poll_failed = not done.any()
        return done

    def barrier_name(self, A: Access, place: int) -> str:
        return self.shared_name((place << A.shift) % self.shared_size, A.width)

    def describe_failed_tests(self) -> str:
        """Describe the failed tests of the first waiting thread block: which mbarriers, where, what they
        lack; empty without any."""
        waits = [(place, t) for place, t in self.tested.items() if place in self.mbarriers]
        if not waits:
            return ""
        blocks = [(place << t.access.shift) // self.shared_size for place, t in waits]
        mine = [wait for wait, block in zip(waits, blocks, strict=True) if block == min(blocks)]
        texts = []
        for place, t in mine[:LISTED]:
            barrier = self.mbarriers[place]
            subject = (
                "they test"
                if len(mine) == 1
                else f"{t.threads} of block {self.run.block_index(t.block)} test"
            )
            where = "" if len(mine) == 1 else f", at {line_of(t.access.instr)}"
            texts.append(
                f"{subject} the mbarrier {self.barrier_name(t.access, place)} for the end of a phase of parity"
                f" {t.parity},"
                f" it is in phase {barrier.phase} and {barrier.lacks()}{where}"
            )
        return "; " + "; ".join(texts)
