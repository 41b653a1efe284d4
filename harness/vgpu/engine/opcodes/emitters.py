"""The registry of instruction emitters: base opcode -> the function that writes its NumPy code.

Emitters register themselves with `@opcode(...)`: arithmetic in `arithmetic_ops.py`, memory, warps and tensor
cores in `memory_ops.py`. An emitter gets the writer of a basic block (`codegen.Writer`) and the instruction.
Its docstring becomes its row in OPCODES.md.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.ptx.parser import WIDTH, Instr

Emitter = Callable[..., None]

#: The modifiers that name a state space.
STATE_SPACES = (
    "global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const",
)  # fmt: skip

OPCODES: dict[str, Emitter] = {}


def opcode(*names: str):
    """Register an emitter for these base opcodes."""

    def register(f):
        for name in names:
            OPCODES[name] = f
        return f

    return register


def emit(w, i: Instr):
    """Write the code of one instruction. Raise UnsupportedInstruction for an unknown opcode or variant."""
    emitter = OPCODES.get(i.op)
    if emitter is None:
        raise UnsupportedInstruction(i)
    emitter(w, i)


def type_of(i: Instr) -> str:
    """Return the last type modifier of an instruction ("s32" of add.sat.s32)."""
    for m in reversed(i.mods):
        if m in WIDTH:
            if WIDTH[m] == 16:
                raise UnsupportedInstruction(i, "128-bit values")
            return m
    raise UnsupportedInstruction(i, "it names no type")


def check(i: Instr, *known: str):
    """Refuse modifiers that are neither types nor known: an ignored modifier would give a wrong result."""
    for m in i.mods:
        if m not in WIDTH and m not in known:
            raise UnsupportedInstruction(i, f"modifier .{m}")
