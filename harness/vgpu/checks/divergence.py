"""Find the branch that kept threads away from a collective instruction: the user's or the library's.

`warp.sum` and `block.sum` need all threads of a warp or block. Where some are missing, either the user's code
sent them elsewhere (`if thread_idx.x < n`, an early return, an uneven loop), or the library's own algorithm
does so on purpose. The batch records for each branch which warps and thread blocks it has split; the
control-flow graph tells which branches control whether an instruction is reached.
"""

from __future__ import annotations

import functools

import numpy as np

from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.places import is_library_algorithm
from harness.vgpu.ptx.program import Program, set_bits


class Splits:
    """The branches at which threads of one warp or thread block of a batch diverged."""

    def __init__(self, batch):
        self.batch = batch
        self.warps: dict[int, np.ndarray] = {}  # branch -> the warps that it has split
        self.blocks: dict[int, np.ndarray] = {}  # branch -> the thread blocks that it has split

    def add(self, branch: int, parts: list[np.ndarray]) -> int:
        """Record that the positions `parts` diverge at the end of basic block `branch`. Return the number of
        warps split."""
        batch = self.batch
        split = _groups_in_several(parts, batch.warp_of, batch.warps)
        _join(self.warps, branch, split)
        _join(self.blocks, branch, _groups_in_several(parts, batch.block_of, batch.count))
        return int(np.count_nonzero(split))

    def split_by_user(self, instr: Instr, *, warp: int | None = None, block: int | None = None) -> bool:
        """Return whether a branch in user code decides which threads of this warp, or thread block, reach
        `instr`."""
        table, number = (self.warps, warp) if warp is not None else (self.blocks, block)
        program = self.batch.program
        return any(
            k in table and table[k][number] and not is_library_algorithm(_place_of(program, k))
            for k in controlling_blocks(program, instr)
        )


def _groups_in_several(parts: list[np.ndarray], group_of: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the groups (warps or thread blocks) with threads in more than one of the parts."""
    parts_of_group = np.zeros(count, np.int64)
    for part in parts:
        here = np.zeros(count, bool)
        here[group_of[part]] = True
        parts_of_group += here
    return parts_of_group > 1


def _join(table: dict[int, np.ndarray], key: int, more: np.ndarray):
    table[key] = table[key] | more if key in table else more


def _place_of(program: Program, branch: int):
    term = program.blocks[branch].term
    return term.loc if term is not None else None


def controlling_blocks(program: Program, instr: Instr) -> set[int]:
    """Return the basic blocks on whose branches `instr` is control dependent, directly or not."""
    blocks_of, controls = _dependence(program)
    branches: set[int] = set()
    todo = [blocks_of[id(instr)]] if id(instr) in blocks_of else []
    while todo:
        more = controls[todo.pop()] - branches
        branches |= more
        todo += more
    return branches


@functools.lru_cache(maxsize=16)
def _dependence(program: Program) -> tuple[dict[int, int], list[set[int]]]:
    """Map each instruction (by id) to its basic block, and each basic block to the branches it directly
    depends on.

    A device function's blocks depend on the blocks that call it; a call by itself continues at the block
    after it.
    """
    blocks = program.blocks
    blocks_of = {id(i): b.index for b in blocks for i in [*b.instrs, *([b.term] if b.term else [])]}
    callers: dict[int, set[int]] = {}
    for b in blocks:
        if b.kind == "call":
            callers.setdefault(blocks[b.succs[0]].function, set()).add(b.index)
    successors = [[b.succs[1]] if b.kind == "call" else [] if b.kind == "ret" else b.succs for b in blocks]
    after = post_dominators(successors)
    controls = [set(callers.get(b.function, ())) for b in blocks]
    for b in blocks:
        for s in successors[b.index] if len(successors[b.index]) > 1 else ():
            for k in set_bits(after[s] & ~(after[b.index] & ~(1 << b.index))):
                controls[k].add(b.index)
    return blocks_of, controls


def post_dominators(succs: list[list[int]]) -> list[int]:
    """Return the post-dominators of every node, itself included, as the bits of a number."""
    count = len(succs)
    everything = (1 << count) - 1
    dominators = [everything if s else 1 << k for k, s in enumerate(succs)]
    changed = True
    while changed:
        changed = False
        for k in range(count - 1, -1, -1):
            if succs[k]:
                common = everything
                for s in succs[k]:
                    common &= dominators[s]
                common |= 1 << k
                if common != dominators[k]:
                    dominators[k] = common
                    changed = True
    return dominators
