"""Whose branch kept threads away from an instruction: the question that findings in the library's
collectives raise.

`warp.sum` and `block.sum` need all threads of a warp or block. Where some are missing, either the reader's
code sent them elsewhere (`if thread_idx.x < n`, an early return, an uneven loop), or the library does so in
its own algorithm and knows why. The batch notes for each branch which warps and thread blocks it has split;
the graph says on which branches it depends whether an instruction is reached at all."""

from __future__ import annotations

import functools

import numpy as np

from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.places import is_library_algorithm
from harness.vgpu.ptx.program import Program, set_bits


class Splits:
    """The branches at which threads of one warp or thread block of a batch went different ways."""

    def __init__(self, batch):
        self.batch = batch
        self.warps: dict[int, np.ndarray] = {}  # branch -> the warps that it has split
        self.blocks: dict[int, np.ndarray] = {}  # branch -> the thread blocks that it has split

    def add(self, branch: int, parts: list[np.ndarray]) -> int:
        """The positions `parts` take different ways at the end of basic block `branch`. Returns the warps
        split."""
        batch = self.batch
        split = _several(parts, batch.warp_of, batch.warps)
        _join(self.warps, branch, split)
        _join(self.blocks, branch, _several(parts, batch.block_of, batch.count))
        return int(np.count_nonzero(split))

    def by_reader(self, instr: Instr, *, warp: int | None = None, block: int | None = None) -> bool:
        """Whether a branch outside of the library's algorithms decides which threads of this warp, or of this
        thread block, reach `instr`."""
        table, number = (self.warps, warp) if warp is not None else (self.blocks, block)
        program = self.batch.program
        return any(
            k in table and table[k][number] and not is_library_algorithm(_place_of(program, k))
            for k in deciding(program, instr)
        )


def _several(parts: list[np.ndarray], group_of: np.ndarray, count: int) -> np.ndarray:
    """Which groups (warps or thread blocks) have threads in more than one of the parts."""
    ways = np.zeros(count, np.int64)
    for part in parts:
        here = np.zeros(count, bool)
        here[group_of[part]] = True
        ways += here
    return ways > 1


def _join(table: dict[int, np.ndarray], key: int, more: np.ndarray):
    table[key] = table[key] | more if key in table else more


def _place_of(program: Program, branch: int):
    term = program.blocks[branch].term
    return term.loc if term is not None else None


def deciding(program: Program, instr: Instr) -> set[int]:
    """The basic blocks whose branch decides whether `instr` is reached: those it is control dependent on, and
    theirs."""
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
    """Instruction (by identity) -> its basic block, and basic block -> the branches that it depends on
    directly.

    A device function's blocks depend on the blocks that call it; a call by itself leads on to the block after
    it."""
    blocks = program.blocks
    blocks_of = {id(i): b.index for b in blocks for i in [*b.instrs, *([b.term] if b.term else [])]}
    callers: dict[int, set[int]] = {}
    for b in blocks:
        if b.kind == "call":
            callers.setdefault(blocks[b.succs[0]].function, set()).add(b.index)
    ways = [[b.succs[1]] if b.kind == "call" else [] if b.kind == "ret" else b.succs for b in blocks]
    after = post_dominators(ways)
    controls = [set(callers.get(b.function, ())) for b in blocks]
    for b in blocks:
        for s in ways[b.index] if len(ways[b.index]) > 1 else ():
            for k in set_bits(after[s] & ~(after[b.index] & ~(1 << b.index))):
                controls[k].add(b.index)
    return blocks_of, controls


def post_dominators(succs: list[list[int]]) -> list[int]:
    """For every node, as bits of a number: the nodes on all its ways to the end, itself included."""
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
