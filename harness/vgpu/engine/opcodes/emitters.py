"""The registry of instruction emitters: base opcode -> function that writes its NumPy code.

An emitter registers itself with `@opcode(...)`, which also lists the supported forms for OPCODES.md.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.ptx.parser import WIDTH, Instr

Emitter = Callable[..., None]

#: Modifiers that name a state space.
STATE_SPACES = (
    "global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const",
)  # fmt: skip

OPCODES: dict[str, Emitter] = {}
FORMS: dict[str, str] = {}
"""Opcode -> the supported forms of the instruction, as listed in OPCODES.md."""


def opcode(names: str, forms: str):
    """Register an emitter for opcodes, separated by spaces, and the forms that it supports."""

    def register(f):
        for name in names.split():
            OPCODES[name], FORMS[name] = f, forms
        return f

    return register


def emit(w, i: Instr):
    """Emit the code of one instruction. Raises UnsupportedInstruction for an unknown opcode or variant."""
    emitter = OPCODES.get(i.op)
    if emitter is None:
        raise UnsupportedInstruction(i)
    emitter(w, i)


def get_type(i: Instr) -> str:
    """Return the last type modifier of an instruction ("s32" of add.sat.s32)."""
    for m in reversed(i.mods):
        if m in WIDTH:
            if WIDTH[m] == 16:
                raise UnsupportedInstruction(i, "128-bit values")
            return m
    raise UnsupportedInstruction(i, "it names no type")


def check_modifiers(i: Instr, *known: str):
    """Raise UnsupportedInstruction for a modifier that is neither a type nor in `known`."""
    for m in i.mods:
        if m not in WIDTH and m not in known:
            raise UnsupportedInstruction(i, f"modifier .{m}")
