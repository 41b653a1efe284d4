"""Address provenance: the kernel parameters from which every register is computed.

A pointer that leaves its tensor by more than the guard zone may reach another one, where no bounds check sees
it. But an address that is computed from one pointer, and from numbers, must stay in that pointer's tensor.
The analysis handles each register once for the whole kernel, on all paths. A value loaded from memory may be
any pointer; addresses that depend on it are not checked.
"""

from __future__ import annotations

from .parser import WIDTH, Instr, Mem, Pair, Reg, Sym, Vec
from .program import Program, reads_and_writes

ANYTHING = None
Origin = frozenset[int] | None
"""Byte offsets among the kernel's parameters; ANYTHING where it is not known."""


def origins(program: Program) -> dict[str, Origin]:
    """Return the origin of every register that is written. Special registers and constants have none: they
    are numbers."""
    known: dict[str, Origin] = {}
    changed = True
    while changed:
        changed = False
        for i in program.instrs:
            for name, origin in written_origins(i, program, known):
                old = known.get(name, frozenset())
                new = join_origins(old, origin)
                if name not in known or new != old:
                    known[name] = new
                    changed = True
    return known


def written_origins(i: Instr, program: Program, known: dict[str, Origin]):
    """Yield (register, origin) for each register that an instruction writes."""
    reads, writes = reads_and_writes(i)
    if i.op in ("ld", "ldu") and any(m.startswith("param") for m in i.mods):
        yield from parameters(i, program)
        return
    origin: Origin = frozenset()
    if i.op in ("ld", "ldu", "atom", "ldmatrix") or any(names_variable(a) for a in i.args):
        origin = ANYTHING
    else:
        for name in reads:
            origin = join_origins(origin, known.get(name, frozenset()))
    for name in writes:
        yield name, origin


def parameters(i: Instr, program: Program):
    """Return the origin of a load of kernel parameters: its offset if known, else anything."""
    mem = i.args[1]
    targets = i.args[0].items if isinstance(i.args[0], Vec) else (i.args[0],)
    start = None
    if isinstance(mem.base, Sym) and mem.base.name in program.params:
        start = program.params[mem.base.name][0] + mem.base.offset + mem.offset
    size = WIDTH[next(m for m in reversed(i.mods) if WIDTH.get(m))]
    for k, target in enumerate(targets):
        if isinstance(target, Reg):
            yield target.name, ANYTHING if start is None else frozenset([start + k * size])


def names_variable(a) -> bool:
    """Return whether an operand holds the address of a variable."""
    if isinstance(a, Vec):
        return any(names_variable(x) for x in a.items)
    if isinstance(a, Pair):
        return names_variable(a.first) or names_variable(a.second)
    return isinstance(a, Sym) or (isinstance(a, Mem) and isinstance(a.base, Sym))


def join_origins(a: Origin, b: Origin) -> Origin:
    """Return the union of two origins."""
    return ANYTHING if a is None or b is None else a | b


def address_origin(i: Instr, known: dict[str, Origin]) -> Origin:
    """Return the origin of the address of a memory instruction; anything for several addresses (copies)."""
    places = [a for a in i.args if isinstance(a, Mem)]
    if len(places) != 1 or not isinstance(places[0].base, Reg):
        return ANYTHING
    return known.get(places[0].base.name, frozenset())
