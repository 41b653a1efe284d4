"""Cuts basic blocks at warp instructions, where threads wait for each other, and finds what lives across each
cut."""

from __future__ import annotations

from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.program import Block, Program, live_registers, set_bits

WARP_OPS = {"shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "activemask", "elect"}


def waits(i: Instr) -> bool:
    """Whether the lanes of a warp execute this instruction together."""
    return i.op in WARP_OPS or (i.op in ("bar", "barrier") and "warp" in i.mods)


class Segment:
    """A part of a basic block: `block` is what codegen.Writer needs of it; `saved` are the registers that
    live after it."""

    __slots__ = ("block", "first", "number", "saved", "succs", "waits")

    def __init__(self, number: int, block: Block, first: bool, waits: bool):
        self.number, self.block, self.first, self.waits = number, block, first, waits
        self.succs: list[int] = []
        self.saved: list[str] = []


def cut(program: Program) -> list[Segment]:
    """The segments of a program, in the order of its blocks; `succs` are segments."""
    segments: list[Segment] = []
    first: dict[int, int] = {}
    for b in program.blocks:
        pieces: list[tuple[list[Instr], bool]] = [([], False)]
        for i in b.instrs:
            if waits(i):
                pieces += [([i], True), ([], False)]
            else:
                pieces[-1][0].append(i)
        first[b.index] = len(segments)
        for k, (instrs, together) in enumerate(pieces):
            last = k == len(pieces) - 1
            part = Block(b.index, b.function, instrs, b.kind if last else "jump", b.term if last else None)
            part.succs, part.order = b.succs if last else [], b.order
            segments.append(Segment(len(segments), part, k == 0, together))
            segments[-1].succs = [] if last else [len(segments)]
    for s in segments:
        if s.block.succs:
            s.succs = [first[k] for k in s.block.succs]
    _liveness(program, segments)
    return segments


def _liveness(program: Program, segments: list[Segment]):
    """Fill in what each segment uses, stores and saves."""
    names = list(program.regs)
    edges = [[s.succs[0]] if s.block.kind == "call" else s.succs for s in segments]
    lives = live_registers(program, [s.block for s in segments], edges)
    for s, (after, defined) in zip(segments, lives, strict=True):
        s.block.stores = [names[n] for n in set_bits(after & defined)]
        s.saved = [names[n] for n in set_bits(after & ~defined if s.waits else after)]


def loops_that_wait(program: Program) -> set[tuple[int, int]]:
    """The edges back to the head of a loop with warp instructions in it: (from, to)."""
    order = {b.order: b for b in program.blocks}
    edges = set()
    for b in program.blocks:
        for s in b.succs:
            low = program.blocks[s].order
            if low <= b.order and any(
                waits(i) for k in range(low, b.order + 1) if k in order for i in order[k].instrs
            ):
                edges.add((b.index, s))
    return edges


def lonely_loads(program: Program) -> set[int]:
    """The basic blocks whose loads of shared memory nothing can race with: no thread stores there between the
    barriers.

    All threads of a block leave a barrier together, from one place. What they can reach from there without
    another barrier is what may run at the same time."""
    starts = [0, *(s for b in program.blocks if b.kind == "barrier" for s in b.succs)]
    busy: set[int] = set()
    for start in starts:
        reached, todo = {start}, [start]
        while todo:
            b = program.blocks[todo.pop()]
            if b.kind != "barrier":
                more = [s for s in b.succs if s not in reached]
                reached.update(more)
                todo += more
        if any(_stores_shared(i) for k in reached for i in program.blocks[k].instrs):
            busy |= reached
    return {b.index for b in program.blocks} - busy


def _stores_shared(i: Instr) -> bool:
    """Whether an instruction may store to shared memory; a wait lets copies land."""
    if i.op == "cp":
        return True
    spaces = {m.split("::")[0] for m in i.mods} & {"global", "shared", "local", "frame", "param", "const"}
    return i.op in ("st", "atom", "red", "stmatrix") and (not spaces or "shared" in spaces)
