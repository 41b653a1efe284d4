"""Generate one Python function per basic block: NumPy expressions over the dense array of active threads.

A generated function has the signature `(m, S, L)`: `m` is the batch of thread blocks, `S` the register slots
(an array over all threads, or a scalar if all threads have the same value), `L` the positions of the active
threads, or None for all. Registers used in only one basic block are Python locals. The function returns the
branch condition, or None.

The code of an instruction is written by its emitter, which emitters.py looks up by opcode.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from harness.vgpu.checks.counters import BlockCost
from harness.vgpu.checks.hazards import RegisterHazards
from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import NUMPY_TYPES, Access
from harness.vgpu.ptx.parser import WIDTH, Imm, Instr, Mem, Reg, Sym
from harness.vgpu.ptx.program import Block, Program, get_registers
from harness.vgpu.ptx.provenance import Origin, compute_origins

from . import numeric
from .emitters import emit


class Code:
    """The functions generated for one program, each on first use, and shared by all its launches."""

    def __init__(self, program: Program, globals_: dict[str, int], shared: dict[str, tuple[int, int]]):
        self.program = program
        self.globals = globals_  # module variable -> device address
        self.shared = shared  # shared variable -> (offset, bytes)
        names = [*program.regs, *("sp_" + s.replace(".", "_") for s in sorted(program.special_registers))]
        self.slots = {name: i for i, name in enumerate(names)}
        self.accesses: list[Access] = []
        self.param_reads: list[tuple[int, str]] = []
        self.namespace: dict[str, object] = {"np": np, "where": np.where, "nm": numeric, "put": put}
        self.namespace |= NUMPY_TYPES
        self.functions: list = [None] * len(program.blocks)
        self.costs: dict[int, BlockCost] = {}  # block -> work per thread

    def get_function(self, index: int):
        function = self.functions[index]
        if function is None:
            writer = Writer(self, self.program.blocks[index])
            source = writer.generate()
            self.costs[index] = BlockCost(writer.instructions, writer.flops, writer.multiply_adds)
            exec(compile(source, f"<block {index} of {self.program.entry.name}>", "exec"), self.namespace)
            function = self.functions[index] = self.namespace[f"b{index}"]
        return function

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """The kernel parameters that each register is computed from."""
        return compute_origins(self.program)

    @cached_property
    def hazards(self) -> RegisterHazards:
        return RegisterHazards(self.program)

    def bind_constant(self, kind: str, value) -> str:
        name = f"c_{kind}_{value}".replace("-", "m").replace(".", "_").replace("+", "")
        if name not in self.namespace:
            self.namespace[name] = NUMPY_TYPES[kind](value)
        return name

    def bind_bits(self, kind: str, bits: int) -> str:
        name = f"x_{kind}_{bits:x}"
        if name not in self.namespace:
            self.namespace[name] = NUMPY_TYPES[f"u{kind[1]}"](bits).view(NUMPY_TYPES[kind])
        return name

    def new_access(self, instr: Instr, kind: str, space: str, width: int, count: int = 1) -> Access:
        a = Access(len(self.accesses), instr, kind, space, width, count)
        self.accesses.append(a)
        self.namespace[f"A{a.number}"] = a
        return a


def put(batch, registers, slot, active, value):
    """Write values of the active threads to a register slot, which also has the values of other threads."""
    old = registers[slot]
    if old is None:
        old = registers[slot] = np.zeros(batch.num_threads, value.dtype)
    elif old.ndim == 0:
        old = registers[slot] = np.full(batch.num_threads, old)
    if old.dtype != value.dtype:
        value = value.view(old.dtype)
    old[active] = value


class Writer:
    """The generator of one block's function; the instruction emitters call `use` and `define`."""

    def __init__(self, code: Code, block: Block):
        self.code, self.block, self.program = code, block, code.program
        self.lines: list[str] = []
        self.views: dict[str, dict[str, str]] = {}
        self.shared_root: dict[str, str] = {}  # variable -> variable whose memory it aliases
        self.float_results: set[str] = set()  # results of float arithmetic, whose NaNs are not yet canonical
        self.pred: str | None = None
        self.counter = 0
        self.instructions = 0
        self.flops = 0
        self.multiply_adds = 0

    # -- building blocks ------------------------------------------------------------------------------------
    def emit(self, line: str):
        self.lines.append(line)

    def temp(self, expr: str) -> str:
        """Assign `expr` to a new local and return its name."""
        self.counter += 1
        self.emit(f"t{self.counter} = {expr}")
        return f"t{self.counter}"

    def bind_instruction(self, i: Instr) -> str:
        name = f"I{i.line}_{len(self.code.namespace)}"
        self.code.namespace[name] = i
        return name

    def get_width(self, name: str) -> int:
        """Return the size of register `name` in bytes, 0 for predicates."""
        if name == "sp_is_explicit_cluster":  # a predicate
            return 0
        if name.startswith("sp_"):
            return 8 if name in ("sp_clock64", "sp_globaltimer", "sp_gridid") else 4
        kind = self.program.regs.get(name)
        if kind is None:
            raise UnsupportedInstruction(self.instr, f"register {name} is not declared")
        return WIDTH[kind]

    def get_kind(self, name: str) -> str:
        """Return the kind of a register's variable: p, or the unsigned kind of its size."""
        return f"u{width}" if (width := self.get_width(name)) else "p"

    def use(self, a, kind: str) -> str:
        """Return an expression for operand `a` as `kind` (u4, i8, f4, p ...)."""
        if isinstance(a, Reg):
            return self.use_reg(a, kind)
        if isinstance(a, Imm):
            return self.literal(a, kind)
        if isinstance(a, Sym):
            return self.code.bind_constant(kind, self.get_variable_address(a) & ((1 << 8 * int(kind[1])) - 1))
        raise UnsupportedInstruction(self.instr, "an operand has an unexpected form")

    def literal(self, a: Imm, kind: str) -> str:
        if kind == "p":
            return self.code.bind_constant("p", bool(a.value))
        size = int(kind[1])
        if a.bits is not None:
            return self.code.bind_bits(kind, a.bits)
        if kind[0] == "f":
            if size == 2 and isinstance(a.value, int):
                return self.code.bind_bits(kind, a.value & 0xFFFF)
            return self.code.bind_constant(kind, float(a.value))
        value = int(a.value) & ((1 << 8 * size) - 1)
        if kind[0] == "i" and value >> (8 * size - 1):
            value -= 1 << 8 * size
        return self.code.bind_constant(kind, value)

    def use_reg(self, a: Reg, kind: str) -> str:
        if a.name == "_":
            raise UnsupportedInstruction(self.instr, "the bit bucket _ is read")
        width = self.get_width(a.name)
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
        converted = self.temp(f"{canonical}.astype(u{size})")
        return converted if kind[0] == "u" else f"{converted}.view({kind})"

    def canonical_bits(self, name: str) -> str:
        """Return an expression for a variable's bits, with NaNs of arithmetic made canonical."""
        return f"nm.canonicalize_nan({name})" if name in self.float_results else name

    def define(self, a, kind: str, expr: str, fresh: bool = True, float_result: bool = False):
        """Write `expr` of `kind` to register operand `a`.

        `fresh` is False if it may alias another register's memory; `float_result` means that it results from
        float arithmetic, so that its NaNs must be made canonical before the bits are used.
        """
        if isinstance(a, Reg) and a.name == "_":
            self.emit(expr)
            return
        if not isinstance(a, Reg):
            raise UnsupportedInstruction(self.instr, "the destination is not a register")
        width = self.get_width(a.name)
        size = 0 if kind == "p" else int(kind[1])
        if size != width:
            if float_result:
                expr, float_result = f"nm.canonicalize_nan({expr})", False
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
        if float_result:
            self.float_results.add(name)
        if not fresh:
            self.shared_root[name] = self.shared_root.get(expr, expr)
        self.views[a.name] = {kind: name}

    def get_variable_address(self, s: Sym) -> int:
        if s.name.startswith("local:"):
            return int(s.name[6:]) + s.offset
        if s.name in self.code.shared:
            return self.code.shared[s.name][0] + s.offset
        if s.name in self.code.globals:
            return self.code.globals[s.name] + s.offset
        if s.name in self.program.params:
            return self.program.params[s.name][0] + s.offset
        raise UnsupportedInstruction(self.instr, f"{s.name} has no address here")

    def emit_address(self, mem: Mem) -> str:
        """Return an expression for an address operand: uint64, or a scalar constant."""
        if isinstance(mem.base, Reg):
            width = self.get_width(mem.base.name)
            base = self.use_reg(mem.base, f"u{width}")
            if not mem.offset:
                return base
            offset = self.code.bind_constant(f"u{width}", mem.offset & ((1 << 8 * width) - 1))
            return self.temp(f"{base} + {offset}")
        offset = mem.offset if mem.base is None else self.get_variable_address(mem.base) + mem.offset
        return self.code.bind_constant("u8", offset)

    # -- the whole function ---------------------------------------------------------------------------------
    def generate(self) -> str:
        b = self.block
        for instr in b.instrs:
            self.instr = instr
            self.instructions += 1
            self.pred = self.use_reg(instr.pred, "p") if instr.pred is not None else None
            self.emit_hazard_checks(instr)
            emit(self, instr)
        self.pred = None
        result = self.emit_terminator()
        stores = self.list_stores()
        slots = self.code.slots
        head = [f"def b{b.index}(m, S, L):"]
        gathers = [(f"{r}_{self.get_kind(r)}", slots[r]) for r in b.uses]
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

    def emit_hazard_checks(self, i: Instr):
        """Emit the checks of an instruction that uses registers of products that may be in flight."""
        hazards = self.code.hazards
        for hazard in hazards.by_instruction.get(id(i), ())[:1]:
            products = ", ".join(self.bind_instruction(product) for product in hazard.products)
            names = f"{self.bind_instruction(i)}, ({products},)"
            arguments = f"{names}, {hazard.register!r}, {hazard.role!r}, {self.pred or True}, L"
            self.emit(f"m.check_register_hazard({arguments})")
        if id(i) in hazards.unfenced:
            register, only_if_accumulating = hazards.unfenced[id(i)]
            added = self.use(i.args[3], "p") if only_if_accumulating else "True"
            self.emit(f"m.report_unfenced_product({self.bind_instruction(i)}, {register!r}, {added}, L)")

    def list_stores(self) -> list[tuple[str, str, str]]:
        """Return (register, expression if all threads are active, expression otherwise) for every register
        that later blocks read."""
        roots = {f"{r}_{self.get_kind(r)}" for r in self.block.uses}
        out = []
        for r in self.block.stores:
            if self.block.kind == "barrier" and r in get_registers(self.block.end.args[0]):
                continue  # the result of bar.red, which the executor stores after the barrier
            if r.startswith("return_"):
                target = self.code.bind_constant("u4", self.block.succs[1])
                out.append((r, target, target))
                continue
            canonical, views = self.get_kind(r), self.views[r]
            source = views.get(canonical) or next(iter(views.values()))
            root = self.shared_root.get(source, source)
            expr = source if canonical in views else f"{self.canonical_bits(source)}.view({canonical})"
            full = f"{expr}.copy()" if root in roots or not root.startswith(r + "_") else expr
            roots.add(root)
            out.append((r, full, expr))
        return out

    def emit_terminator(self) -> str:
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
            return self.emit_barrier()
        return "None"

    def emit_barrier(self) -> str:
        """Return (barrier number, thread count or None, predicate or None) of a bar.sync or bar.red."""
        i = self.block.end
        args, value = list(i.args), "None"
        if "red" in i.mods:
            _, *args, predicate = args
            value = self.use(predicate, "p")
        if not args:
            return f"(0, None, {value})"
        number = self.use(args[0], "u4")
        count = self.use(args[1], "u4") if len(args) > 1 else "None"
        return f"({number}, {count}, {value})"
