"""Register hazards of wgmma: use of a product's registers before wgmma.wait_group, and missing wgmma.fence.

A product (wgmma.mma_async) reads and writes registers until wgmma.wait_group has waited for it. This
data-flow analysis lists, for every instruction, the products that may be in flight and whose registers it
uses; at run time the batch checks whether one is in flight (async_order.py). Successive products that
accumulate in the same registers need no wait.

A product also needs a wgmma.fence after the last instruction that wrote its registers. The analysis finds
missing fences statically; they are reported when the product runs.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.vgpu.ptx.parser import Instr, Vec
from harness.vgpu.ptx.program import Program, get_reads_and_writes, get_registers

ACCUMULATOR, OPERAND = "accumulator", "operand"
MAX_AGE = 9  # larger ages are not distinguished
NO_FENCE = ""  # placeholder in the set of unfenced registers until the first fence


class Hazard(NamedTuple):
    """An instruction's use of a register of products that may be in flight."""

    products: tuple[Instr, ...]
    register: str
    role: str


class RegisterUse(NamedTuple):
    """A use of a register by products; `age` counts the groups committed since (0: they are uncommitted)."""

    age: int
    products: tuple[Instr, ...]
    role: str


class UnfencedRegister(NamedTuple):
    """A register written since the last fence before a product. For an accumulator, this is an error only
    if the product adds to it, because the compiler may clear registers that are not read."""

    register: str
    only_if_accumulating: bool


State = tuple[
    dict[str, RegisterUse], frozenset[str]
]  # registers of products in flight, registers that need a fence


def is_wgmma_product(i: Instr) -> bool:
    return i.op == "wgmma" and "mma_async" in i.mods


def get_operand_registers(i: Instr) -> list[str]:
    return get_registers(i.args[1]) if isinstance(i.args[1], Vec) else []


class RegisterHazards:
    """Maps an instruction's id to its hazards, and a product's id to a register that lacks a fence."""

    def __init__(self, program: Program):
        self.by_instruction: dict[int, list[Hazard]] = {}
        self.unfenced: dict[int, UnfencedRegister] = {}
        blocks = program.blocks
        products = [i for b in blocks for i in b.instrs if is_wgmma_product(i)]
        tracked = {r for i in products for r in (*get_registers(i.args[0]), *get_operand_registers(i))}
        if not tracked:
            return
        successors = [[b.succs[1]] if b.kind == "call" else b.succs for b in blocks]
        before: list[State | None] = [None] * len(blocks)
        before[0] = {}, frozenset([NO_FENCE])
        worklist = [0]
        while worklist:
            index = worklist.pop()
            state = before[index]
            assert state is not None  # only blocks with a state are in the list
            uses, dirty = dict(state[0]), set(state[1])
            for i in blocks[index].instrs:
                self.step(i, uses, dirty, tracked, None)
            for s in successors[index]:
                old = before[s]
                merged = merge_states(old, (uses, frozenset(dirty)))
                if old is None or not are_states_equal(merged, old):
                    before[s] = merged
                    worklist.append(s)
        for block, state in zip(blocks, before, strict=True):
            if state is not None:
                uses, dirty = dict(state[0]), set(state[1])
                for i in block.instrs:
                    self.step(i, uses, dirty, tracked, self)

    def step(
        self, i: Instr, uses: dict[str, RegisterUse], dirty: set[str], watched: set[str],
        out: RegisterHazards | None,
    ):  # fmt: skip
        """Update the state for an instruction, and add its hazards to `out`."""
        if i.op == "wgmma" and not is_wgmma_product(i):
            if "fence" in i.mods:
                dirty.clear()
            elif "commit_group" in i.mods:
                for r, use in uses.items():
                    uses[r] = use._replace(age=min(use.age + 1, MAX_AGE))
            else:
                allowed = int(i.args[0].value)
                for r in [r for r, use in uses.items() if use.age > allowed]:
                    del uses[r]
            return
        reads, writes = get_reads_and_writes(i)
        if is_wgmma_product(i):
            accumulators, arguments = get_registers(i.args[0]), get_operand_registers(i)
            if out is not None:
                out.add_product(i, accumulators, arguments, uses, dirty)
            uses.update((r, RegisterUse(0, (i,), OPERAND)) for r in arguments)
            uses.update((r, RegisterUse(0, (i,), ACCUMULATOR)) for r in accumulators)
            dirty.difference_update(accumulators)
            return
        if out is not None:
            for r in dict.fromkeys([*reads, *writes]):
                use = uses.get(r)
                if use is not None and (use.role == ACCUMULATOR or r in writes):
                    out.by_instruction.setdefault(id(i), []).append(Hazard(use.products, r, use.role))
        dirty.update(r for r in writes if r in watched)

    def add_product(
        self, i: Instr, accumulators: list[str], operands: list[str], uses: dict[str, RegisterUse],
        dirty: set[str],
    ):  # fmt: skip
        for r in operands:
            if (use := uses.get(r)) is not None and use.role == ACCUMULATOR:
                self.by_instruction.setdefault(id(i), []).append(Hazard(use.products, r, ACCUMULATOR))
        for r in accumulators:
            use = uses.get(r)
            if use is None:
                continue
            same_shape = len(get_registers(use.products[0].args[0])) == len(accumulators)
            if use.role != ACCUMULATOR or not same_shape:
                self.by_instruction.setdefault(id(i), []).append(Hazard(use.products, r, use.role))
        unfenced = [r for r in (NO_FENCE, *operands, *accumulators) if r in dirty]
        if unfenced:
            self.unfenced[id(i)] = UnfencedRegister(unfenced[0], unfenced[0] in accumulators)


def merge_states(a: State | None, b: State) -> State:
    """Merge two states: a register's use has the products of both, and the smaller age."""
    if a is None:
        return b
    uses = dict(a[0])
    for r, use in b[0].items():
        old = uses.get(r)
        if old is not None:
            new = [p for p in use.products if all(p is not q for q in old.products)]
            use = RegisterUse(min(old.age, use.age), (*old.products, *new), old.role)
        uses[r] = use
    return uses, a[1] | b[1]


def are_states_equal(a: State, b: State) -> bool:
    """Return whether two states are equal; products are only ever added, so comparing counts suffices."""
    sizes = [{r: (use.age, len(use.products)) for r, use in state[0].items()} for state in (a, b)]
    return sizes[0] == sizes[1] and a[1] == b[1]
