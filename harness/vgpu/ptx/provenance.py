"""Address provenance: which kernel parameters each register is computed from.

An address that overruns its tensor by more than the guard zone may fall inside another tensor, where a
bounds check passes. But an address computed from one pointer and from integers must stay in that pointer's
tensor. The analysis is flow-insensitive: each register has one result for the whole kernel. A value loaded
from memory may be any pointer, so addresses that depend on one are not checked.
"""

from __future__ import annotations

from .parser import WIDTH, Instr, Mem, Pair, Reg, Sym, Vec
from .program import Program, get_reads_and_writes

UNKNOWN = None
Origin = frozenset[int] | None
"""Byte offsets of the kernel parameters; UNKNOWN if they cannot be determined."""


def compute_origins(program: Program) -> dict[str, Origin]:
    """Return the origin of every register that is written.

    Special registers and constants are not computed from parameters: their origin is empty.
    """
    origins: dict[str, Origin] = {}
    changed = True
    while changed:
        changed = False
        for i in program.instrs:
            for name, origin in iterate_written_origins(i, program, origins):
                old = origins.get(name, frozenset())
                new = join_origins(old, origin)
                if name not in origins or new != old:
                    origins[name] = new
                    changed = True
    return origins


def iterate_written_origins(i: Instr, program: Program, origins: dict[str, Origin]):
    """Yield (register, origin) for each register that an instruction writes."""
    reads, writes = get_reads_and_writes(i)
    if i.op in ("ld", "ldu") and any(m.startswith("param") for m in i.mods):
        yield from iterate_parameter_origins(i, program)
        return
    origin: Origin = frozenset()
    if i.op in ("ld", "ldu", "atom", "ldmatrix") or any(is_variable_address(a) for a in i.args):
        origin = UNKNOWN
    else:
        for name in reads:
            origin = join_origins(origin, origins.get(name, frozenset()))
    for name in writes:
        yield name, origin


def iterate_parameter_origins(i: Instr, program: Program):
    """Yield (register, origin) for a load of kernel parameters: the offset if known, else UNKNOWN."""
    mem = i.args[1]
    targets = i.args[0].items if isinstance(i.args[0], Vec) else (i.args[0],)
    start = None
    if isinstance(mem.base, Sym) and mem.base.name in program.params:
        start = program.params[mem.base.name][0] + mem.base.offset + mem.offset
    size = WIDTH[next(m for m in reversed(i.mods) if WIDTH.get(m))]
    for k, target in enumerate(targets):
        if isinstance(target, Reg):
            yield target.name, UNKNOWN if start is None else frozenset([start + k * size])


def is_variable_address(a) -> bool:
    """Return whether an operand contains the address of a variable."""
    if isinstance(a, Vec):
        return any(is_variable_address(x) for x in a.items)
    if isinstance(a, Pair):
        return is_variable_address(a.first) or is_variable_address(a.second)
    return isinstance(a, Sym) or (isinstance(a, Mem) and isinstance(a.base, Sym))


def join_origins(a: Origin, b: Origin) -> Origin:
    return UNKNOWN if a is None or b is None else a | b


def get_address_origin(i: Instr, origins: dict[str, Origin]) -> Origin:
    """Return the origin of a memory instruction's address; UNKNOWN for several addresses (copies)."""
    addresses = [a for a in i.args if isinstance(a, Mem)]
    if len(addresses) != 1 or not isinstance(addresses[0].base, Reg):
        return UNKNOWN
    return origins.get(addresses[0].base.name, frozenset())
