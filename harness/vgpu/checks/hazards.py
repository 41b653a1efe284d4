"""Register hazards of wgmma: early use of a product's registers, and missing wgmma.fence.

A product reads and writes registers until wgmma.wait_group has waited for it. The analysis follows the
control flow and lists, for every instruction, which products may be in flight whose registers it touches;
whether one is, the batch knows when the instruction runs (order.py). Products that add to the same registers
one after the other need no wait.

A product also needs a wgmma.fence after the last instruction that wrote its registers. That is a property of
the code alone, and is reported when the product runs.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.vgpu.ptx.parser import Instr, Vec
from harness.vgpu.ptx.program import Program, reads_and_writes, registers

SUMS, FACTOR = "sums", "factor"
OLDEST = 9  # groups that are distinguished
NO_FENCE = ""  # marks, among the registers that need a fence, that there was none before


class Hazard(NamedTuple):
    """A use of a register of one of several products that may be in flight."""

    products: tuple[Instr, ...]
    register: str
    role: str


class Use(NamedTuple):
    """A register of one of several products, and how many groups were committed since, its own included (0:
    not committed)."""

    age: int
    products: tuple[Instr, ...]
    role: str


class Unfenced(NamedTuple):
    """A register that needs a fence before a product; accumulators only where the product adds to them: a
    compiler may clear registers that are not read."""

    register: str
    only_if_added: bool


State = tuple[dict[str, Use], frozenset[str]]  # registers of products under way, registers that need a fence


def is_product(i: Instr) -> bool:
    """Return whether an instruction is a wgmma product."""
    return i.op == "wgmma" and "mma_async" in i.mods


def factors(i: Instr) -> list[str]:
    """Return the registers of a product's first factor."""
    return registers(i.args[1]) if isinstance(i.args[1], Vec) else []


class Hazards:
    """Hazards of every instruction of a program, by id, and the register that lacks a fence."""

    def __init__(self, program: Program):
        self.hazards: dict[int, list[Hazard]] = {}
        self.unfenced: dict[int, Unfenced] = {}
        blocks = program.blocks
        watched = {
            r for b in blocks for i in b.instrs if is_product(i) for r in (*registers(i.args[0]), *factors(i))
        }
        if not watched:
            return
        after = [[b.succs[1]] if b.kind == "call" else b.succs for b in blocks]
        before: list[State | None] = [None] * len(blocks)
        before[0] = {}, frozenset([NO_FENCE])
        todo = [0]
        while todo:
            index = todo.pop()
            state = before[index]
            assert state is not None  # only blocks with one are in the list
            uses, dirty = dict(state[0]), set(state[1])
            for i in blocks[index].instrs:
                self.step(i, uses, dirty, watched, None)
            for s in after[index]:
                old = before[s]
                joined = join(old, (uses, frozenset(dirty)))
                if old is None or not same(joined, old):
                    before[s] = joined
                    todo.append(s)
        for block, state in zip(blocks, before, strict=True):
            if state is not None:
                uses, dirty = dict(state[0]), set(state[1])
                for i in block.instrs:
                    self.step(i, uses, dirty, watched, self)

    def step(self, i: Instr, uses: dict[str, Use], dirty: set[str], watched: set[str], out: Hazards | None):
        """Update the state for an instruction, and add its faults to `out`."""
        if i.op == "wgmma" and not is_product(i):
            if "fence" in i.mods:
                dirty.clear()
            elif "commit_group" in i.mods:
                for r, use in uses.items():
                    uses[r] = use._replace(age=min(use.age + 1, OLDEST))
            else:
                allowed = int(i.args[0].value)
                for r in [r for r, use in uses.items() if use.age > allowed]:
                    del uses[r]
            return
        reads, writes = reads_and_writes(i)
        if is_product(i):
            sums, arguments = registers(i.args[0]), factors(i)
            if out is not None:
                out.product(i, sums, arguments, uses, dirty)
            uses.update((r, Use(0, (i,), FACTOR)) for r in arguments)
            uses.update((r, Use(0, (i,), SUMS)) for r in sums)
            dirty.difference_update(sums)
            return
        if out is not None:
            for r in dict.fromkeys([*reads, *writes]):
                use = uses.get(r)
                if use is not None and (use.role == SUMS or r in writes):
                    out.hazards.setdefault(id(i), []).append(Hazard(use.products, r, use.role))
        dirty.update(r for r in writes if r in watched)

    def product(self, i: Instr, sums: list[str], given: list[str], uses: dict[str, Use], dirty: set[str]):
        """Return the faults of a product."""
        for r in given:
            if (use := uses.get(r)) is not None and use.role == SUMS:
                self.hazards.setdefault(id(i), []).append(Hazard(use.products, r, SUMS))
        for r in sums:
            use = uses.get(r)
            same = (
                use is not None and use.role == SUMS and len(registers(use.products[0].args[0])) == len(sums)
            )
            if use is not None and not same:
                self.hazards.setdefault(id(i), []).append(Hazard(use.products, r, use.role))
        lacking = [r for r in (NO_FENCE, *given, *sums) if r in dirty]
        if lacking:
            self.unfenced[id(i)] = Unfenced(lacking[0], lacking[0] in sums)


def join(a: State | None, b: State) -> State:
    """Merge two states: for each register all products of either, each as recent as the more recent."""
    if a is None:
        return b
    uses = dict(a[0])
    for r, use in b[0].items():
        old = uses.get(r)
        if old is not None:
            more = [p for p in use.products if all(p is not q for q in old.products)]
            use = Use(min(old.age, use.age), (*old.products, *more), old.role)
        uses[r] = use
    return uses, a[1] | b[1]


def same(a: State, b: State) -> bool:
    """Return whether two states are equal; a register's products only become more, so comparing their number
    is enough."""
    sizes = [{r: (use.age, len(use.products)) for r, use in state[0].items()} for state in (a, b)]
    return sizes[0] == sizes[1] and a[1] == b[1]
