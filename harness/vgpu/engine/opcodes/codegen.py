"""Generate one Python function per basic block: NumPy expressions over the dense array of active threads.

A generated function has the signature `(m, S, L)`: `m` is the batch of thread blocks (memory, warps, clocks),
`S` the register slots (one array over all threads, or one scalar where the value is the same for all), `L`
the positions of the active threads, or None for all of them. Registers used in one block only are Python
locals. It returns the branch condition, or None.

The code of an instruction comes from its emitter, which `emitters.py` looks up by opcode.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from harness.vgpu.checks.counters import Work
from harness.vgpu.checks.hazards import Hazards
from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import DTYPE, Access
from harness.vgpu.ptx.parser import WIDTH, Imm, Instr, Mem, Reg, Sym
from harness.vgpu.ptx.program import Block, Program, registers
from harness.vgpu.ptx.provenance import Origin, origins

from . import numeric
from .emitters import emit


class Code:
    """The generated functions of one program, each generated on first use. Shared by all its launches."""

    def __init__(self, program: Program, globals_: dict[str, int], shared: dict[str, tuple[int, int]]):
        self.program = program
        self.globals = globals_  # module variable -> device address
        self.shared = shared  # shared variable -> (offset, bytes)
        names = [*program.regs, *("sp_" + s.replace(".", "_") for s in sorted(program.specials))]
        self.slots = {name: i for i, name in enumerate(names)}
        self.accesses: list[Access] = []
        self.param_reads: list[tuple[int, str]] = []
        self.namespace: dict[str, object] = {"np": np, "where": np.where, "nm": numeric, "put": put}
        self.namespace |= DTYPE
        self.functions: list = [None] * len(program.blocks)
        self.work: dict[int, Work] = {}  # block -> the work of a thread in it

    def function(self, index: int):
        function = self.functions[index]
        if function is None:
            writer = Writer(self, self.program.blocks[index])
            source = writer.source()
            self.work[index] = Work(writer.instructions, writer.flops, writer.multiply_adds)
            exec(compile(source, f"<block {index} of {self.program.entry.name}>", "exec"), self.namespace)
            function = self.functions[index] = self.namespace[f"b{index}"]
        return function

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """The kernel parameters from which every register is computed."""
        return origins(self.program)

    @cached_property
    def hazards(self) -> Hazards:
        """The register hazards of the kernel's asynchronous products."""
        return Hazards(self.program)

    def constant(self, kind: str, value) -> str:
        """Return the name of a constant of this kind in the generated code."""
        name = f"c_{kind}_{value}".replace("-", "m").replace(".", "_").replace("+", "")
        if name not in self.namespace:
            self.namespace[name] = DTYPE[kind](value)
        return name

    def bits(self, kind: str, bits: int) -> str:
        """Return the name of a constant given by its bits."""
        name = f"x_{kind}_{bits:x}"
        if name not in self.namespace:
            self.namespace[name] = DTYPE[f"u{kind[1]}"](bits).view(DTYPE[kind])
        return name

    def access(self, instr: Instr, kind: str, space: str, width: int, count: int = 1) -> Access:
        """Register a memory instruction."""
        a = Access(len(self.accesses), instr, kind, space, width, count)
        self.accesses.append(a)
        self.namespace[f"A{a.number}"] = a
        return a


def put(m, S, slot, L, value):
    """Write `value` for the threads `L` into a register slot that other threads share."""
    old = S[slot]
    if old is None:
        old = S[slot] = np.zeros(m.n, value.dtype)
    elif old.ndim == 0:
        old = S[slot] = np.full(m.n, old)
    if old.dtype != value.dtype:
        value = value.view(old.dtype)
    old[L] = value


class Writer:
    """Generates the function of one block. `use` and `define` are what the instruction emitters call."""

    def __init__(self, code: Code, block: Block):
        self.code, self.block, self.program = code, block, code.program
        self.lines: list[str] = []
        self.views: dict[str, dict[str, str]] = {}
        self.shared_root: dict[str, str] = {}  # variable -> variable whose memory it shares
        self.computed: set[str] = (
            set()
        )  # variables that hold results of float arithmetic, with NaNs of NumPy's
        self.pred: str | None = None
        self.counter = 0
        self.instructions = 0
        self.flops = 0
        self.multiply_adds = 0

    # -- building blocks ------------------------------------------------------------------------------------
    def emit(self, line: str):
        """Append one line of code."""
        self.lines.append(line)

    def temp(self, expr: str) -> str:
        """Assign `expr` to a new local and return its name."""
        self.counter += 1
        self.emit(f"t{self.counter} = {expr}")
        return f"t{self.counter}"

    def instruction(self, i: Instr) -> str:
        name = f"I{i.line}_{len(self.code.namespace)}"
        self.code.namespace[name] = i
        return name

    def width(self, name: str) -> int:
        """Return the bytes of register `name` (0 for predicates)."""
        if name == "sp_is_explicit_cluster":  # a predicate
            return 0
        if name.startswith("sp_"):
            return 8 if name in ("sp_clock64", "sp_globaltimer", "sp_gridid") else 4
        kind = self.program.regs.get(name)
        if kind is None:
            raise UnsupportedInstruction(self.instr, f"register {name} is not declared")
        return WIDTH[kind]

    def use(self, a, kind: str) -> str:
        """Return an expression for operand `a` as `kind` (u4, i8, f4, p ...)."""
        if isinstance(a, Reg):
            return self.use_reg(a, kind)
        if isinstance(a, Imm):
            return self.literal(a, kind)
        if isinstance(a, Sym):
            return self.code.constant(kind, self.address_of(a) & ((1 << 8 * int(kind[1])) - 1))
        raise UnsupportedInstruction(self.instr, "an operand has an unexpected form")

    def literal(self, a: Imm, kind: str) -> str:
        if kind == "p":
            return self.code.constant("p", bool(a.value))
        size = int(kind[1])
        if a.bits is not None:
            return self.code.bits(kind, a.bits)
        if kind[0] == "f":
            if size == 2 and isinstance(a.value, int):
                return self.code.bits(kind, a.value & 0xFFFF)
            return self.code.constant(kind, float(a.value))
        value = int(a.value) & ((1 << 8 * size) - 1)
        if kind[0] == "i" and value >> (8 * size - 1):
            value -= 1 << 8 * size
        return self.code.constant(kind, value)

    def use_reg(self, a: Reg, kind: str) -> str:
        if a.name == "_":
            raise UnsupportedInstruction(self.instr, "the bit bucket _ is read")
        width = self.width(a.name)
        if width == 0:
            name = self.views.setdefault(a.name, {"p": f"{a.name}_p"})["p"]
            return f"~{name}" if a.negated else name
        views = self.views.setdefault(a.name, {f"u{width}": f"{a.name}_u{width}"})
        if kind in views:
            return views[kind]
        size = int(kind[1]) if kind != "p" else 0
        source = next(iter(views.values()))
        if size == width:
            name = f"{a.name}_{kind}"
            self.emit(f"{name} = {self.canonical_bits(source)}.view({kind})")
            self.shared_root[name] = self.shared_root.get(source, source)
            views[kind] = name
            return name
        canonical = self.use_reg(a, f"u{width}")
        changed = self.temp(f"{canonical}.astype(u{size})")
        return changed if kind[0] == "u" else f"{changed}.view({kind})"

    def canonical_bits(self, name: str) -> str:
        """Return an expression for a variable whose bits matter now: arithmetic NaNs become those of a GPU."""
        return f"nm.canonical({name})" if name in self.computed else name

    def define(self, a, kind: str, expr: str, fresh: bool = True, computed: bool = False):
        """Write `expr` of `kind` to register operand `a`.

        `fresh` is False where it may share another register's memory; `computed` means that it is the result
        of float arithmetic, whose NaNs must become those of a GPU once the bits are used.
        """
        if isinstance(a, Reg) and a.name == "_":
            self.emit(expr)
            return
        if not isinstance(a, Reg):
            raise UnsupportedInstruction(self.instr, "the destination is not a register")
        width = self.width(a.name)
        size = 0 if kind == "p" else int(kind[1])
        if size != width:
            if computed:
                expr, computed = f"nm.canonical({expr})", False
            if kind == "p" or width == 0:
                raise UnsupportedInstruction(self.instr, f"register {a.name} has another type")
            if kind[0] == "i":
                expr, kind = f"({expr}).astype(i{width})", f"i{width}"
            elif kind[0] == "f":
                expr, kind = f"({expr}).view(u{size}).astype(u{width})", f"u{width}"
            else:
                expr, kind = f"({expr}).astype(u{width})", f"u{width}"
            fresh = True
        if self.pred is not None:
            expr, fresh = f"where({self.pred}, {expr}, {self.use_reg(a, kind)})", True
        self.counter += 1
        name = f"{a.name}_{kind}_{self.counter}"
        self.emit(f"{name} = {expr}")
        if computed:
            self.computed.add(name)
        if not fresh:
            self.shared_root[name] = self.shared_root.get(expr, expr)
        self.views[a.name] = {kind: name}

    def address_of(self, s: Sym) -> int:
        """Return the address of a variable in its own space."""
        if s.name.startswith("local:"):
            return int(s.name[6:]) + s.offset
        if s.name in self.code.shared:
            return self.code.shared[s.name][0] + s.offset
        if s.name in self.code.globals:
            return self.code.globals[s.name] + s.offset
        if s.name in self.program.params:
            return self.program.params[s.name][0] + s.offset
        raise UnsupportedInstruction(self.instr, f"{s.name} has no address here")

    def address(self, mem: Mem) -> str:
        """Return an expression for an address operand: uint64, or a scalar constant."""
        if isinstance(mem.base, Reg):
            width = self.width(mem.base.name)
            base = self.use_reg(mem.base, f"u{width}")
            if not mem.offset:
                return base
            return self.temp(
                f"{base} + {self.code.constant(f'u{width}', mem.offset & ((1 << 8 * width) - 1))}"
            )
        offset = mem.offset if mem.base is None else self.address_of(mem.base) + mem.offset
        return self.code.constant("u8", offset)

    # -- the whole function ---------------------------------------------------------------------------------
    def source(self) -> str:
        """Return the Python source of the block's function."""
        b = self.block
        for instr in b.instrs:
            self.instr = instr
            self.instructions += 1
            self.pred = None
            if instr.pred is not None:
                self.pred = self.use_reg(instr.pred, "p")
            self.hazards(instr)
            emit(self, instr)
        self.pred = None
        result = self.terminator()
        stores = self.stores()
        slots = self.code.slots
        head = [f"def b{b.index}(m, S, L):"]
        gathers = [(f"{r}_{'p' if self.width(r) == 0 else f'u{self.width(r)}'}", slots[r]) for r in b.uses]
        if gathers:
            head += [f"    {name} = S[{slot}]" for name, slot in gathers]
            head.append("    if L is not None:")
            head += [f"        if {name}.ndim: {name} = {name}[L]" for name, _ in gathers]
        body = [f"    {line}" for line in self.lines]
        tail = []
        if stores:
            tail.append("    if L is None:")
            tail += [f"        S[{slots[r]}] = {full}" for r, full, _ in stores]
            tail.append("    else:")
            tail += [f"        put(m, S, {slots[r]}, L, {part})" for r, _, part in stores]
        return "\n".join([*head, *body, *tail, f"    return {result}"]) + "\n"

    def hazards(self, i: Instr):
        """Emit checks of registers of products that may be in flight."""
        hazards = self.code.hazards
        for hazard in hazards.hazards.get(id(i), ())[:1]:
            products = ", ".join(self.instruction(product) for product in hazard.products)
            names = f"{self.instruction(i)}, ({products},)"
            self.emit(
                f"m.register_hazard({names}, {hazard.register!r}, {hazard.role!r}, {self.pred or True}, L)"
            )
        if id(i) in hazards.unfenced:
            register, only_if_added = hazards.unfenced[id(i)]
            added = self.use(i.args[3], "p") if only_if_added else "True"
            self.emit(f"m.unfenced_product({self.instruction(i)}, {register!r}, {added}, L)")

    def stores(self) -> list[tuple[str, str, str]]:
        """Return (register, expression to keep, expression to scatter) for every register that later blocks
        read."""
        kept: set[str] = {
            f"{r}_{'p' if self.width(r) == 0 else f'u{self.width(r)}'}" for r in self.block.uses
        }
        out = []
        for r in self.block.stores:
            if self.block.kind == "barrier" and r in registers(self.block.end.args[0]):
                continue  # the result of bar.red, which the executor stores when the barrier is passed
            if r.startswith("return_"):
                out.append((r, f"c_u4_{self.block.succs[1]}", f"c_u4_{self.block.succs[1]}"))
                self.code.constant("u4", self.block.succs[1])
                continue
            canonical = "p" if self.width(r) == 0 else f"u{self.width(r)}"
            views = self.views[r]
            source = views.get(canonical) or next(iter(views.values()))
            root = self.shared_root.get(source, source)
            expr = source if canonical in views else f"{self.canonical_bits(source)}.view({canonical})"
            full = f"{expr}.copy()" if root in kept or not root.startswith(r + "_") else expr
            kept.add(root)
            out.append((r, full, expr))
        return out

    def terminator(self) -> str:
        b = self.block
        self.instr = b.term
        if b.term is not None:
            self.instructions += 1
        if b.kind == "branch":
            assert b.end.pred is not None  # the branch itself
            return self.use_reg(b.end.pred, "p")
        if b.kind == "switch":
            return self.use(b.end.args[0], "u4")
        if b.kind == "ret":
            return self.use_reg(Reg(f"return_{b.function}"), "u4")
        if b.kind == "barrier":
            return self.barrier()
        return "None"

    def barrier(self) -> str:
        """Return (barrier number, thread count or None, predicate or None) of a bar.sync or bar.red."""
        i = self.block.end
        args = list(i.args)
        if "red" in i.mods:
            args = args[1:]
            value = self.use(args.pop(), "p")
        else:
            value = "None"
        if not args:
            return f"(0, None, {value})"
        number = self.use(args[0], "u4")
        count = self.use(args[1], "u4") if len(args) > 1 else "None"
        return f"({number}, {count}, {value})"
