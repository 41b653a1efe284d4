"""Emitters of Hopper instructions: mbarriers with transaction counts, bulk copies (TMA), warpgroups."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import NUMPY_KINDS, SHARED_WINDOW
from harness.vgpu.ptx.parser import WIDTH, Imm, Instr, Mem, TensorMem, Vec

from .codegen import Writer
from .emitters import check_modifiers, get_type, opcode

_SHARED = ("shared", "shared::cta", "shared::cluster")
_SCOPES = ("cta", "cluster", "release", "acquire", "relaxed")


@dataclass(frozen=True)
class Operand:
    """A matrix operand of wgmma as the instruction describes it; `rows` is m or n, a transposed one is
    MN-major."""

    rows: int
    kind: str
    transposed: bool
    negated: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return 4 if self.kind == "tf32" else 2


def emit_shared_address(w: Writer, i: Instr, mem: Mem) -> str:
    """Emit a shared address, converted from a generic one if the instruction names no state space."""
    address = w.emit_address(mem)
    if any(m.startswith("shared") for m in i.mods):
        return address
    return f"({address} - {w.code.bind_constant('u8', SHARED_WINDOW)})"


@opcode(
    "mbarrier",
    forms="init, inval, arrive and arrive_drop (with count, .noComplete, .expect_tx, in other blocks of the "
    "cluster), test_wait and try_wait by state or .parity, expect_tx, complete_tx, pending_count",
)
def mbarrier(w: Writer, i: Instr):
    check_modifiers(i, *_SHARED, *_SCOPES, "init", "inval", "arrive", "arrive_drop", "noComplete", "expect_tx",
          "complete_tx", "test_wait", "try_wait", "parity", "pending_count")  # fmt: skip
    args = list(i.args)
    if "pending_count" in i.mods:
        w.define(
            args[0], "u4", f"({w.use(args[1], 'u8')} & {w.code.bind_constant('u8', 0xFFFFF)}).astype(u4)"
        )
        return
    a = w.code.new_access(i, "A", "shared", 8)
    dest = None if isinstance(args[0], Mem) else args.pop(0)
    call = f"A{a.number}, {emit_shared_address(w, i, args.pop(0))}"
    is_wait = "test_wait" in i.mods or "try_wait" in i.mods
    count = w.use(args[0], "u4") if args and not is_wait else "1"
    if "arrive" in i.mods or "arrive_drop" in i.mods:
        drop = "arrive_drop" in i.mods
        arrivals, expected = ("1", count) if "expect_tx" in i.mods else (count, "0")
        value = f"m.mbarrier_arrive({call}, {arrivals}, {expected}, {drop}, L)"
        if dest is None:
            w.emit(value)
        else:
            w.define(dest, "u8", value)
    elif is_wait:
        parity = "parity" in i.mods
        token = w.use(args[0], "u4" if parity else "u8")
        w.define(dest, "p", f"m.mbarrier_test({call}, {token}, {parity}, L)")
    elif "init" in i.mods:
        w.emit(f"m.mbarrier_init({call}, {count}, L)")
    elif "inval" in i.mods:
        w.emit(f"m.mbarrier_inval({call}, L)")
    elif "expect_tx" in i.mods or "complete_tx" in i.mods:
        sign = "" if "expect_tx" in i.mods else "-"
        w.emit(f"m.mbarrier_add_bytes({call}, {sign}{count}.astype(i8), L)")
    else:
        raise UnsupportedInstruction(i)


@opcode(
    "setmaxnreg",
    forms=".inc and .dec: the sum over the warps of a block is checked against what the block was given",
)
def set_registers(w: Writer, i: Instr):
    check_modifiers(i, "inc", "dec", "sync", "aligned")
    number = i.args[0]
    if not isinstance(number, Imm):
        raise UnsupportedInstruction(i, "the number of registers is not a constant")
    w.emit(f"m.set_registers({w.bind_instruction(i)}, {int(number.value)}, {'inc' in i.mods}, L)")


# -- bulk copies --------------------------------------------------------------------------------------------
_BULK = ("async", "bulk", "tile", "1d", "2d", "3d", "4d", "5d", "global", *_SHARED, "bulk_group")
_BULK += ("mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint", "tensor", "reduce", "noftz")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_16_BYTES = 8, 2  # a 16-byte access: bytes per element, number of elements


def emit_bulk_copy(w: Writer, i: Instr):
    """Emit any form of cp.async.bulk and cp.async.bulk.tensor."""
    if "commit_group" in i.mods:
        w.emit("m.bulk_commit(L)")
    elif "wait_group" in i.mods:
        w.emit(f"m.bulk_wait({int(i.args[0].value)}, L)")
    elif "prefetch" not in i.mods:
        check_modifiers(i, *_BULK, *_REDUCTIONS)
        spaces = [m for m in i.mods if m == "global" or m in _SHARED]
        if len(spaces) != 2:
            raise UnsupportedInstruction(i, "it does not name where it copies from and to")
        op = next((m for m in i.mods if m in _REDUCTIONS), None)
        if spaces[0] == "global":
            emit_bulk_store(w, i, op)
        elif op is None:
            emit_bulk_load(w, i, spaces[1] != "global")
        else:
            raise UnsupportedInstruction(i, "a reduction into shared memory")


def emit_bulk_load(w: Writer, i: Instr, from_shared: bool):
    """Emit a copy into shared memory, whose completion an mbarrier counts in bytes."""
    target, source, *rest = i.args
    size = None if "tensor" in i.mods else rest.pop(0)
    barrier, *rest = rest
    mask = w.use(rest[0], "u4") if "multicast::cluster" in i.mods else "None"
    write = w.code.new_access(i, "W", "shared", *_16_BYTES)
    counter = w.code.new_access(i, "A", "shared", 8)
    address, counted = w.emit_address(target), emit_shared_address(w, i, barrier)
    if isinstance(source, TensorMem):
        reads = create_element_accesses(w, i, "R")
        box = f"{w.emit_address(source.map)}, {emit_coordinates(w, source)}"
        operands = f"{address}, {box}, {counted}, {mask}"
        w.emit(f"m.tensor_load({reads}, A{write.number}, A{counter.number}, {operands}, L)")
        return
    read = w.code.new_access(i, "R", "shared" if from_shared else "global", *_16_BYTES)
    args = f"{address}, {w.emit_address(source)}, {w.use(size, 'u4')}, {counted}, {mask}, {from_shared}"
    w.emit(f"m.bulk_load(A{read.number}, A{write.number}, A{counter.number}, {args}, L)")


def emit_bulk_store(w: Writer, i: Instr, op: str | None):
    """Emit a copy into global memory, which belongs to a bulk group of its thread."""
    target, source, *rest = i.args
    read = w.code.new_access(i, "R", "shared", *_16_BYTES)
    kind = "A" if op else "W"
    if isinstance(target, TensorMem):
        box = f"{w.emit_address(source)}, {w.emit_address(target.map)}, {emit_coordinates(w, target)}"
        w.emit(f"m.tensor_store(A{read.number}, {create_element_accesses(w, i, kind)}, {box}, {op!r}, L)")
        return
    t = get_type(i) if op else "u64"
    write = w.code.new_access(i, kind, "global", WIDTH[t])
    operands = f"{w.emit_address(target)}, {w.emit_address(source)}, {w.use(rest[0], 'u4')}"
    element = t if t == "bf16" else NUMPY_KINDS[t]
    w.emit(f"m.bulk_store(A{read.number}, A{write.number}, {operands}, {op!r}, {element!r}, L)")


def create_element_accesses(w: Writer, i: Instr, kind: str) -> str:
    """Create global accesses of 16 bytes and of each element size, which only the tensor map determines."""
    sizes = {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (8, 1), 16: _16_BYTES}
    name = f"E{i.line}_{len(w.code.namespace)}"
    w.code.namespace[name] = {
        size: w.code.new_access(i, kind, "global", *shape) for size, shape in sizes.items()
    }
    return name


def emit_coordinates(w: Writer, tile: TensorMem) -> str:
    return "[" + ", ".join(w.use(c, "u4") for c in tile.coordinates) + "]"


# -- warpgroups ---------------------------------------------------------------------------------------------
_DEPTH = {"bf16": 16, "f16": 16, "tf32": 8}


@opcode(
    "wgmma",
    forms=".mma_async m64nNk16 of bf16 and f16, m64nNk8 of tf32, N = 8 to 256, sums in f32 (f16 in f16 "
    "too); the first factor from registers too, every swizzle, transposed 16-bit factors, scale-d, "
    "signs; fence, commit_group, wait_group",
)
def wgmma(w: Writer, i: Instr):
    if "mma_async" not in i.mods:
        check_modifiers(i, "fence", "commit_group", "wait_group", "sync", "aligned")
        if "commit_group" in i.mods:
            w.emit(f"m.wgmma_commit({w.bind_instruction(i)}, L)")
        elif "wait_group" in i.mods:
            w.emit(f"m.wgmma_wait({w.bind_instruction(i)}, {int(i.args[0].value)}, L)")
        return
    shape = next((m for m in i.mods if m[0] == "m" and m[1:2].isdigit()), "")
    check_modifiers(i, "mma_async", "sync", "aligned", shape)
    sums_kind, kind, other = [m for m in i.mods if m in WIDTH]
    n, depth = (int(x) for x in re.findall(r"\d+", shape)[1:])
    supported = sums_kind == "f32" or (sums_kind == "f16" and kind == "f16")
    if kind != other or not supported or depth != _DEPTH.get(kind) or not 8 <= n <= 256 or n % 8:
        raise UnsupportedInstruction(i)
    sums, left, right, scale_d, *rest = i.args
    flags = [int(x.value) for x in rest]
    from_registers = isinstance(left, Vec)
    if kind == "tf32":
        flags += [0, 0]
    elif from_registers:
        flags.insert(2, 0)
    a = Operand(64, kind, bool(flags[2]), flags[0] < 0)
    b = Operand(n, kind, bool(flags[3]), flags[1] < 0)
    names = [f"{letter}{i.line}_{len(w.code.namespace)}" for letter in "PQ"]
    w.code.namespace |= dict(zip(names, (a, b), strict=True))
    accesses = [w.code.new_access(i, "R", "shared", *_16_BYTES) for _ in range(2)]
    first = "None" if from_registers else f"A{accesses[0].number}"
    arguments = f"[{', '.join(w.use(r, 'u4') for r in left.items)}]" if from_registers else w.use(left, "u8")
    old = ", ".join(w.use(r, "u4") for r in sums.items)
    w.flops += 2 * 64 * n * depth // 128
    w.multiply_adds += 64 * n * depth // 128
    value = w.temp(
        f"m.wgmma({first}, A{accesses[1].number}, [{old}], {sums_kind!r}, {arguments}, {names[0]},"
        f" {w.use(right, 'u8')}, {names[1]}, {w.use(scale_d, 'p')}, L)"
    )
    for k, target in enumerate(sums.items):
        w.define(target, "u4", f"{value}[{k}]")
