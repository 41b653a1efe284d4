"""Determine whether user or library code prevented threads from reaching a collective instruction.

The batch records which warps and blocks diverged at each branch; the control-flow graph gives the branches
that an instruction is control dependent on.
"""

from __future__ import annotations

import functools

import numpy as np

from harness.vgpu.ptx.locations import is_library_algorithm
from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.program import Program, iterate_set_bits


class Divergence:
    """The branches at which threads of one warp or thread block of a batch diverged."""

    def __init__(self, batch):
        self.batch = batch
        self.warps: dict[int, np.ndarray] = {}  # branch -> mask of the warps it has split
        self.blocks: dict[int, np.ndarray] = {}  # branch -> mask of the thread blocks it has split

    def add(self, branch: int, parts: list[np.ndarray]) -> int:
        """Record that positions `parts` diverge at block `branch`; return the number of warps it splits."""
        batch = self.batch
        split_warps = _find_split_groups(parts, batch.warp_of, batch.warps)
        split_blocks = _find_split_groups(parts, batch.block_of, batch.num_blocks)
        for table, split in ((self.warps, split_warps), (self.blocks, split_blocks)):
            table[branch] = table.get(branch, False) | split
        return int(np.count_nonzero(split_warps))

    def diverges_in_user_code(
        self, instr: Instr, *, warp: int | None = None, block: int | None = None
    ) -> bool:
        """Return whether a branch in user code determines which threads of a warp or block reach `instr`."""
        table, number = (self.warps, warp) if warp is not None else (self.blocks, block)
        program = self.batch.program
        splitting = (
            program.blocks[k].end
            for k in find_controlling_branches(program, instr)
            if k in table and table[k][number]
        )
        return any(not is_library_algorithm(branch.loc) for branch in splitting)


def _find_split_groups(parts: list[np.ndarray], group_of: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the groups (warps or thread blocks) with threads in more than one of the parts."""
    parts_of_group = np.zeros(count, np.int64)
    for part in parts:
        in_part = np.zeros(count, bool)
        in_part[group_of[part]] = True
        parts_of_group += in_part
    return parts_of_group > 1


def find_controlling_branches(program: Program, instr: Instr) -> set[int]:
    """Return the basic blocks whose branches `instr` is control dependent on, directly or indirectly."""
    blocks_of, controls = _compute_control_dependence(program)
    branches: set[int] = set()
    worklist = [blocks_of[id(instr)]] if id(instr) in blocks_of else []
    while worklist:
        added = controls[worklist.pop()] - branches
        branches |= added
        worklist += added
    return branches


@functools.lru_cache(maxsize=16)
def _compute_control_dependence(program: Program) -> tuple[dict[int, int], list[set[int]]]:
    """Map each instruction (by id) to its basic block, and each basic block to the branches it directly
    depends on.

    A device function's blocks depend on the blocks that call it; a call's successor is the block after it.
    """
    blocks = program.blocks
    blocks_of = {id(i): b.index for b in blocks for i in [*b.instrs, *([b.term] if b.term else [])]}
    callers: dict[int, set[int]] = {}
    for b in blocks:
        if b.kind == "call":
            callers.setdefault(blocks[b.succs[0]].function, set()).add(b.index)
    successors = [[b.succs[1]] if b.kind == "call" else [] if b.kind == "ret" else b.succs for b in blocks]
    post_dominators = compute_post_dominators(successors)
    controls = [set(callers.get(b.function, ())) for b in blocks]
    for b in blocks:
        for s in successors[b.index] if len(successors[b.index]) > 1 else ():
            for k in iterate_set_bits(post_dominators[s] & ~(post_dominators[b.index] & ~(1 << b.index))):
                controls[k].add(b.index)
    return blocks_of, controls


def compute_post_dominators(successors: list[list[int]]) -> list[int]:
    count = len(successors)
    all_blocks = (1 << count) - 1
    dominators = [all_blocks if s else 1 << k for k, s in enumerate(successors)]
    changed = True
    while changed:
        changed = False
        for k in range(count - 1, -1, -1):
            if successors[k]:
                common = all_blocks
                for s in successors[k]:
                    common &= dominators[s]
                common |= 1 << k
                if common != dominators[k]:
                    dominators[k] = common
                    changed = True
    return dominators
