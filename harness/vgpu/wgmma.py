"""What the warps of a warpgroup do together: the registers that setmaxnreg moves between them.

A warpgroup is four warps in a row, of which the first has a number that is a multiple of four.
"""

from __future__ import annotations

import numpy as np

from .ptx import Instr
from .warp import WarpOps

REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread


def registers_at_start(function, threads: int) -> int:
    """The registers that each thread of a kernel with setmaxnreg has at its start, as far as its PTX says.

    What the kernel's own limits leave to it, in steps of 8: .maxnreg, or .maxntid and .minnctapersm.
    """
    if function.max_registers:
        return function.max_registers
    most = REGISTERS // ((function.max_threads or threads) * max(function.min_blocks, 1))
    return min(most, MOST_REGISTERS) // 8 * 8


class WarpgroupOps(WarpOps):
    """Warpgroups of a batch."""

    def start_warpgroups(self):
        start = registers_at_start(self.program.entry, self.threads)
        self.registers = np.full(self.warps, start)  # of a thread, by warp
        self.pool = start * self.warps_per_block
        self.overdrawn: dict[int, tuple[Instr, int]] = {}  # thread block -> who asks for more than there is

    def warpgroup_rows(self, instr: Instr, L) -> int:
        """The number of warpgroups, all of whose 128 threads must be here."""
        P = self.positions(L)
        groups = self.warp_rows(instr, L)
        first = self.warp_of[P[::128]] % self.warps_per_block % 4 == 0
        if groups % 4 or not first.all() or (np.diff(self.warp_of[P].reshape(-1, 4, 32)[:, :, 0]) != 1).any():
            self.run.incomplete_warpgroup(self, instr, P)
        return groups // 4

    def set_registers(self, instr: Instr, number: int, more: bool, L):
        """setmaxnreg: the warps of some warpgroups have `number` registers a thread from now on."""
        self.warpgroup_rows(instr, L)
        P = self.positions(L)
        warps = self.warp_of[P[::32]]
        before = self.registers[warps]
        wrong = number % 8 != 0 or not 24 <= number <= 256
        wrong = (before > number if more else before < number) | wrong
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            self.run.register_budget(
                self, instr, P[32 * k],
                f"the warp has {before[k]} registers a thread, and {'.inc' if more else '.dec'} asks for {number}: a"
                f" multiple of 8 from 24 to 256 that is not {'smaller' if more else 'greater'}",
            )  # fmt: skip
        self.registers[warps] = number
        for block in np.unique(self.block_of[P]).tolist():
            mine = self.registers[block * self.warps_per_block :][: self.warps_per_block]
            if mine.sum() <= self.pool:
                self.overdrawn.pop(block, None)
            elif more:
                self.overdrawn[block] = instr, int(self.who_is(P[self.block_of[P] == block][0]))

    def who_is(self, position: int) -> int:
        """A thread's number in the batch, which stays when threads that have exited are squeezed out."""
        return int(self.block_of[position]) * self.threads + int(self.thread_of[position])

    def end_warpgroups(self):
        """Report blocks whose warps have asked for more registers than the block owns: they would wait for ever."""
        for block, (instr, thread) in self.overdrawn.items():
            mine = self.registers[block * self.warps_per_block :][: self.warps_per_block]
            self.run.register_budget(
                self, instr, None,
                f"the warps of the block ask for {32 * int(mine.sum())} registers, and it owns {32 * self.pool}: these"
                " warps wait for ever",
                block=block, thread=thread % self.threads,
            )  # fmt: skip
