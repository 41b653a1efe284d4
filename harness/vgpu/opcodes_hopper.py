"""Emitters of what came with Hopper: mbarriers with transaction counts, and registers moved between warpgroups."""

from __future__ import annotations

from .access import SHARED_WINDOW
from .codegen import Writer
from .emitters import check, opcode
from .errors import UnsupportedInstruction
from .ptx import Imm, Instr, Mem

_SHARED = ("shared", "shared::cta", "shared::cluster")
_SCOPES = ("cta", "cluster", "release", "acquire", "relaxed")


def shared_place(w: Writer, i: Instr, mem: Mem) -> str:
    """An address in shared memory; a generic one where the instruction names no state space."""
    place = w.address(mem)
    if any(m.startswith("shared") for m in i.mods):
        return place
    return f"({place} - {w.code.constant('u8', SHARED_WINDOW)})"


@opcode("mbarrier")
def mbarrier(w: Writer, i: Instr):
    """init, inval, arrive and arrive_drop (with count, .noComplete, .expect_tx, in other blocks of the cluster), test_wait and try_wait by state or .parity, expect_tx, complete_tx, pending_count"""
    check(i, *_SHARED, *_SCOPES, "init", "inval", "arrive", "arrive_drop", "noComplete", "expect_tx", "complete_tx",
          "test_wait", "try_wait", "parity", "pending_count")  # fmt: skip
    args = list(i.args)
    if "pending_count" in i.mods:
        w.define(args[0], "u4", f"({w.use(args[1], 'u8')} & {w.code.constant('u8', 0xFFFFF)}).astype(u4)")
        return
    a = w.code.access(i, "A", "shared", 8)
    dest = None if isinstance(args[0], Mem) else args.pop(0)
    place = shared_place(w, i, args.pop(0))
    count = w.use(args[0], "u4") if args and not ("test_wait" in i.mods or "try_wait" in i.mods) else "1"
    call = f"A{a.number}, {place}"
    if "arrive" in i.mods or "arrive_drop" in i.mods:
        drop = "arrive_drop" in i.mods
        arrivals, expected = ("1", count) if "expect_tx" in i.mods else (count, "0")
        value = f"m.mbarrier_arrive({call}, {arrivals}, {expected}, {drop}, L)"
        if dest is None:
            w.emit(value)
        else:
            w.define(dest, "u8", value)
    elif "test_wait" in i.mods or "try_wait" in i.mods:
        parity = "parity" in i.mods
        token = w.use(args[0], "u4" if parity else "u8")
        w.define(dest, "p", f"m.mbarrier_test({call}, {token}, {parity}, L)")
    elif "init" in i.mods:
        w.emit(f"m.mbarrier_init({call}, {count}, L)")
    elif "inval" in i.mods:
        w.emit(f"m.mbarrier_inval({call}, L)")
    elif "expect_tx" in i.mods:
        w.emit(f"m.mbarrier_bytes({call}, {count}.astype(i8), L)")
    elif "complete_tx" in i.mods:
        w.emit(f"m.mbarrier_bytes({call}, -{count}.astype(i8), L)")
    else:
        raise UnsupportedInstruction(i)


@opcode("setmaxnreg")
def set_registers(w: Writer, i: Instr):
    """.inc and .dec: the sum over the warps of a block is checked against what the block was given"""
    check(i, "inc", "dec", "sync", "aligned")
    number = i.args[0]
    if not isinstance(number, Imm):
        raise UnsupportedInstruction(i, "the number of registers is not a constant")
    w.emit(f"m.set_registers({w.instruction(i)}, {int(number.value)}, {'inc' in i.mods}, L)")
