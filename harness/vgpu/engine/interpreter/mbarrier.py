"""Barriers in shared memory (mbarrier): arrivals, transaction counts, phases, and waiting threads.

A phase ends when no arrivals are pending and the transaction count is zero: `expect_tx` adds bytes to the
count, and asynchronous copies subtract the bytes they write. The token that an arrival returns contains only
the phase's parity, in its highest bit, and the number of pending arrivals, in its low bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.access import Access
from harness.vgpu.memory.barrier_state import MBarrier
from harness.vgpu.ptx.locations import format_location

from .batch_memory import BatchMemory

PHASE_BIT = 63  # in an mbarrier's state, and in the token of an arrival
MAX_LISTED = 4  # mbarriers listed in the message about a hang
PENDING_MASK = (1 << 20) - 1  # number of pending arrivals, in an arrival's token


class FailedTest(NamedTuple):
    """A failed test of an mbarrier: the access, the tested phase parity, and the number of threads of a
    block that executed it."""

    access: Access
    parity: int
    threads: int
    block: int


class MBarrierOps(BatchMemory):
    """The mbarrier instructions of a batch."""

    def init_mbarriers(self):
        self.mbarriers: dict[int, MBarrier] = {}  # by location, in units of 8 bytes
        self.blocks_with_ended_phase: set[int] = set()  # not yet reported to the race check
        self.phase_changes = 0  # times that phases have ended; a failed poll is repeated only after the next
        self.poll_failed = False  # whether the last test of an mbarrier failed for all threads
        self.failed_tests: dict[int, FailedTest] = {}  # by location, since a phase last ended

    def iterate_barriers(self, access: Access, address, active):
        """Yield (location, mbarrier, indices in L of the threads that use it) for each mbarrier.

        Report and skip threads whose mbarrier is not initialised.
        """
        slots, _ = self.get_remote_index(access, address, active)  # maybe in other blocks of the cluster
        distinct = np.unique(slots)
        for slot in distinct.tolist():
            group = np.flatnonzero(slots == slot) if len(distinct) > 1 else np.arange(len(slots))
            barrier = self.mbarriers.get(slot)
            if barrier is None:
                self.run.report_uninitialised_mbarrier(
                    self, access, self.get_positions(active)[group[0]], len(group)
                )
            else:
                yield slot, barrier, group

    def mbarrier_init(self, access: Access, address, count, active):
        slots, _ = self.get_remote_index(access, address, active)
        _, written_masks, full_mask = access.get_views(self.shared_space)
        written_masks[slots] = full_mask
        for slot, n in zip(slots.tolist(), np.broadcast_to(count, len(slots)).tolist(), strict=True):
            self.mbarriers[slot] = MBarrier(n, n)

    def mbarrier_inval(self, access: Access, address, active):
        for slot, _, _ in list(self.iterate_barriers(access, address, active)):
            del self.mbarriers[slot]

    def mbarrier_arrive(self, access: Access, address, count, expected, drop: bool, active):
        """Execute arrivals, each after an expect_tx of `expected` bytes; `drop` also lowers the count of
        later phases. Return each arrival's token.
        """
        positions = self.get_positions(active)
        count, expected = np.broadcast_to(count, len(positions)), np.broadcast_to(expected, len(positions))
        tokens = np.zeros(len(positions), np.uint64)
        for slot, barrier, group in self.iterate_barriers(access, address, active):
            if self.async_order:
                self.async_order.arrive(positions[group], barrier)
            for k in group.tolist():
                tokens[k] = (barrier.phase & 1) << PHASE_BIT | (barrier.pending_arrivals & PENDING_MASK)
                if count[k] > barrier.pending_arrivals:
                    name, missing = self.format_barrier(access, slot), barrier.describe_missing()
                    message = f"phase {barrier.phase} of the mbarrier {name} {missing}"
                    message += ", but more threads arrive here"
                    self.run.record_at(
                        self, positions[k], "too many arrivals", access.instr, message, is_note=None
                    )
                barrier.pending_bytes += int(expected[k])
                barrier.pending_arrivals = max(barrier.pending_arrivals - int(count[k]), 0)
                if drop:
                    barrier.count -= int(count[k])
                self.end_phase_if_complete(access, slot, barrier)
        self.pass_phases()
        return tokens

    def mbarrier_add_bytes(self, access: Access, address, nbytes, active):
        """Execute mbarrier.expect_tx, or complete_tx with negative numbers."""
        nbytes = np.broadcast_to(nbytes, len(self.get_positions(active)))
        for slot, barrier, group in self.iterate_barriers(access, address, active):
            barrier.pending_bytes += int(nbytes[group].sum())
            self.end_phase_if_complete(access, slot, barrier)
        self.pass_phases()

    def end_phase_if_complete(self, access: Access, location: int, barrier: MBarrier):
        """End the phase if it is complete. The caller must call `pass_phases` afterwards."""
        if not barrier.pending_arrivals and not barrier.pending_bytes:
            barrier.pending_arrivals = barrier.count
            barrier.phase += 1
            if self.async_order:
                self.async_order.end_phase(barrier)
            self.blocks_with_ended_phase.add((location << access.shift) // self.shared_size)

    def pass_phases(self):
        """Report the phases that have just ended to the race check."""
        if self.blocks_with_ended_phase:
            ready = np.zeros(self.num_blocks, bool)
            ready[list(self.blocks_with_ended_phase)] = True
            self.blocks_with_ended_phase.clear()
            self.phase_changes += 1
            self.failed_tests.clear()
            self.pass_barrier(ready)

    def mbarrier_test(self, access: Access, address, token, parity: bool, active):
        """Return a mask of the threads whose phase, given by token or parity, is complete.

        Like the hardware, test only one bit of the token, even if the token is not from an arrival.
        """
        positions = self.get_positions(active)
        token = np.broadcast_to(token, len(positions))
        bit = token >> token.dtype.type(0 if parity else PHASE_BIT) & token.dtype.type(1)
        done = np.ones(len(token), bool)
        for slot, barrier, group in self.iterate_barriers(access, address, active):
            done[group] = bit[group] != barrier.phase & 1
            if self.async_order and done[group].any():
                self.async_order.observe_phase(positions[group[done[group]]], barrier)
            if not done[group].all():
                failed = group[~done[group]]
                block = int(self.blocks[self.block_of[positions[failed[0]]]])
                self.failed_tests[slot] = FailedTest(access, barrier.phase & 1, len(failed), block)
        self.poll_failed = not done.any()
        return done

    def format_barrier(self, access: Access, location: int) -> str:
        return self.format_shared_location((location << access.shift) % self.shared_size, access.width)

    def describe_failed_tests(self) -> str:
        """Describe the failed tests of the first waiting thread block: mbarriers, locations, missing arrivals
        and bytes; "" without any."""
        waits = [(slot, t) for slot, t in self.failed_tests.items() if slot in self.mbarriers]
        if not waits:
            return ""
        blocks = [(slot << t.access.shift) // self.shared_size for slot, t in waits]
        tests = [wait for wait, block in zip(waits, blocks, strict=True) if block == min(blocks)]
        texts = []
        for slot, t in tests[:MAX_LISTED]:
            barrier, subject, where = self.mbarriers[slot], "they test", ""
            if len(tests) > 1:
                subject = f"{t.threads} of block {self.run.block_index(t.block)} test"
                where = f", at {format_location(t.access.instr)}"
            texts.append(
                f"{subject} the mbarrier {self.format_barrier(t.access, slot)} for the end of a phase of parity"
                f" {t.parity}, it is in phase {barrier.phase} and {barrier.describe_missing()}{where}"
            )
        return "; " + "; ".join(texts)
