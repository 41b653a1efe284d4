"""Translates a kernel to LLVM IR: one function `step` that runs one thread until it waits for others or
returns.

The code of an instruction is what its emitter writes for the NumPy engine (opcodes/*_ops.py): the same lines,
compiled for one thread by compiler.py. Only the methods of the batch that they call (`m.load`, ...)
have their own form here, in `Threads`: calls of the runtime.

A thread's registers are places on the stack, which LLVM turns into registers of the processor. Where lanes
wait for each other, the thread keeps the live ones in its state and returns the number of the place; `step`
begins with a switch over those places. So barriers in loops and under branches need nothing else."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from harness.vgpu.checks.races import follows_shared, granule_of, synchronises
from harness.vgpu.engines.opcodes import numeric
from harness.vgpu.engines.opcodes.codegen import Code, Writer
from harness.vgpu.engines.opcodes.emitters import emit
from harness.vgpu.memory.access import Access
from harness.vgpu.ptx.parser import WIDTH
from harness.vgpu.ptx.special_registers import SPECIALS

from . import runtime as rt
from . import warps
from .arithmetic import INTRINSICS
from .builtins import INSTRUCTIONS, _load, _store
from .compiler import Frame, Unit
from .segments import Segment, cut, lonely_loads, loops_that_wait
from .values import KINDS, Refused, Value

u4, u8 = np.uint32, np.uint64
FLOAT_ATOMICS = ("f2", "f4", "f8")


def kind_of_width(width: int) -> str:
    """The kind of a register of this many bytes."""
    return f"u{width}" if width else "p"


class Threads:
    """What generated code calls `m`: the memory and the warp of the thread that runs."""

    def __init__(self, kernel: Translation):
        self.kernel = kernel
        self.P = _Parameters(kernel)

    def __getattr__(self, name: str):
        raise Refused(f"{name} is for the NumPy engine")

    @property
    def f(self) -> Frame:
        """The function that is being written."""
        return self.kernel.frame

    # -- memory ---------------------------------------------------------------------------------------------
    def place(self, A: Access, address, role: str) -> Value:
        """Where an access's bytes lie in this process, checked and marked."""
        k, f = self.kernel, self.f
        if (A.kind == "A") != (role == "A"):
            raise Refused("a strong load or store")
        k.access(A)
        address = f.cast(f.value(address, "u8"), u8)
        space = {"frame": "local", "const": "global"}.get(A.space, A.space)
        if space == "global":
            given = (k.ctx, address, k.mine, A.number, A.nbytes, role, k.shifts[0], k.atomics[0])
            return f.call(rt.global_place, given)
        if space == "shared":
            given = (k.ctx, address, k.mine, A.nbytes, role, k.shifts[1], k.atomics[1], k.races(role))
            return f.call(rt.shared_place, given)
        if space == "local":
            return f.call(rt.local_place, (k.ctx, address, k.tid, A.nbytes, role))
        if space == "generic":
            given = (k.ctx, address, k.mine, k.tid, A.number, A.nbytes, role, k.shifts, k.atomics)
            return f.call(rt.generic_place, given)
        raise Refused(f"an access to {A.space} memory")

    def load(self, A: Access, address, L):
        place = self.place(A, address, "R")
        out = [
            _load(self.f, f"u{A.width}", self.f.binary(ast.Add, place, u8(k * A.width)))
            for k in range(A.count)
        ]
        return out if A.count > 1 else out[0]

    def store(self, A: Access, address, value, L):
        place = self.place(A, address, "W")
        for k, part in enumerate(value if isinstance(value, tuple) else (value,)):
            kind = numeric.UNSIGNED[A.width]
            _store(
                self.f,
                kind,
                self.f.binary(ast.Add, place, u8(k * A.width)),
                self.f.view(self.f.value(part), kind),
            )

    def atomic(self, A: Access, op: str, kind: str, address, values, L, used: bool):
        if used or A.narrow or kind not in KINDS or op not in ("add", "min", "max", "and", "or", "xor"):
            raise Refused("an atomic whose result is used, or whose order matters")
        if A.space not in ("global", "shared"):
            raise Refused("an atomic on generic memory")
        if kind in FLOAT_ATOMICS:
            self.kernel.float_atomic(A)
        place = self.place(A, address, "A")
        flushes = kind == "f4" and op == "add" and A.space == "global"
        typed = tuple(self.f.view(self.f.value(v), kind) for v in values)
        self.f.call(rt.atomic_at, (place, op, np.dtype(kind).type, typed[0], flushes))

    def fence(self, L, narrow):
        """Orders nothing that is looked at here: kernels whose blocks order each other are refused."""

    # -- copies ---------------------------------------------------------------------------------------------
    def copy_async(self, R: Access, W: Access, target, source, extra, L):
        k, f = self.kernel, self.f
        k.copies = True
        k.access(R)
        k.access(W)
        whole = u8(R.nbytes)
        take = f.value(whole)
        if extra is not None:
            extra = f.value(extra)
            take = (
                f.select(extra, u8(0), whole)
                if extra.kind == "p"
                else f.apply(np.minimum, (f.cast(extra, u8), whole))
            )
        target, source = (f.cast(f.value(x, "u8"), u8) for x in (target, source))
        given = (k.ctx, k.tid, k.mine, target, source, take, R.number, R.nbytes, k.shifts, k.atomics)
        f.call(rt.copy_async, given)

    def copy_commit(self, L):
        self.kernel.copies = True
        self.f.call(rt.copy_commit, (self.kernel.ctx, self.kernel.tid))

    def copy_wait(self, L, allowed: int):
        k = self.kernel
        k.copies = True
        self.f.call(rt.copy_wait, (k.ctx, k.tid, k.mine, allowed, k.shifts[1], k.atomics[1]))

    # -- warps ----------------------------------------------------------------------------------------------
    def shuffle(self, instr, mode: str, a, b, c, mask, L):
        value, inside = self.kernel.together(warps.shuffle, (mode,), (a, b, c, mask), ("u4", "p"))
        return value, inside

    def vote(self, instr, mode: str, p, mask, L):
        kind = "u4" if mode == "ballot" else "p"
        return self.kernel.together(warps.vote, (mode,), (self.f.value(p), mask), (kind,))[0]

    def match(self, instr, mode: str, value, mask, L):
        return self.kernel.together(warps.match, (mode,), (value, mask), ("u4", "p"))

    def redux(self, instr, op: str, value, mask, L):
        value = self.f.value(value)
        kind = np.dtype(value.kind).type
        out = self.kernel.together(warps.redux, (op, kind), (self.f.view(value, "u4"), mask), ("u4",))[0]
        return self.f.view(out, value.kind)

    def warp_sync(self, instr, mask, L):
        self.kernel.together(warps.warp_sync, (), (mask,), ())

    def mma(self, instr, shape: str, types, a, b, c, L):
        if not shape.startswith("m16n8"):
            raise Refused(f"mma of {shape}")
        known = (int(shape.partition("k")[2]), types[1], types[0] == "f32")
        return self.kernel.together(warps.multiply, known, (*a, *b, *c), ("u4",) * len(c))

    def ldmatrix(self, A: Access, address, number: int, transpose: bool, L):
        k = self.kernel
        k.access(A)
        known = (number, transpose, k.shifts[1], k.atomics[1], k.races("R"))
        given = (self.f.cast(self.f.value(address, "u8"), u8), k.mine)
        return self.kernel.together(warps.load_matrices, known, given, ("u4",) * number)


class _Parameters:
    """`m.P`: the kernel's parameters, in the order in which the code reads them."""

    def __init__(self, kernel: Translation):
        self.kernel = kernel

    def __getitem__(self, k: int) -> Value:
        f = self.kernel.frame
        offset, kind = self.kernel.code.param_reads[k]
        start = _load(f, "u8", f.binary(ast.Add, self.kernel.ctx, rt.PARAMETERS))
        return _load(f, kind, f.binary(ast.Add, start, u8(offset)))


class Translation:
    """One kernel as LLVM IR (`text`), and what the launch must know: accesses, state size, copies, work of
    the blocks.

    Raises Refused or UnsupportedInstruction where the NumPy engine must run it.
    """

    def __init__(self, kernel):
        program = kernel.code.program
        refuse(program)
        self.program = program
        self.code = Code(program, kernel.module.addresses, kernel.shared_map)
        self.shifts = tuple(
            granule_of(program, spaces).bit_length() - 1
            for spaces in (("global", "generic", "const"), ("shared", "generic"))
        )
        ops = [i for i in program.instrs if i.op in ("atom", "red")]
        shared = [any(m.startswith("shared") for m in i.mods) for i in ops]
        self.atomics = (not all(shared), any(shared))
        self.accesses: set[int] = set()
        self.stores: set[int] = set()
        self.floats: list[Access] = []
        self.copies = False
        self.unit = Unit({**INTRINSICS, **INSTRUCTIONS})
        self.waits: list[tuple[Any, tuple]] = []  # (runtime function, what is known), by code - 1
        self.barriers: list[int] = []
        self.segments = cut(program)
        self.turning = loops_that_wait(program)
        self.lonely = lonely_loads(program)
        self.state_words = 0
        self._pending: list[
            tuple[str, str, bool]
        ] = []  # ways back to write: label, target, whether lanes wait in the loop
        self.write()
        self.text = self.unit.text()

    # -- what instructions say ------------------------------------------------------------------------------
    def access(self, A: Access):
        """A memory instruction that the kernel has."""
        self.accesses.add(A.number)
        if A.writes:
            self.stores.add(A.number)

    def races(self, role: str) -> bool:
        """Whether an access to shared memory in the block that is being written can be part of a race."""
        return role != "R" or self.block not in self.lonely

    def float_atomic(self, A: Access):
        """Sums of floats depend on the order of threads; it is the same in both engines for what runs
        once."""
        block = next(b for b in self.program.blocks if any(i is A.instr for i in b.instrs))
        if block.index in self.looping():
            raise Refused("a sum of floats by atomics in a loop")
        if not any(A.instr is other.instr for other in self.floats):
            self.floats.append(A)

    def looping(self) -> set[int]:
        """The blocks that lie in a loop."""
        blocks = self.program.blocks
        at = {b.order: b.index for b in blocks}
        return {
            at[k] for b in blocks for s in b.succs if blocks[s].order <= b.order
            for k in range(blocks[s].order, b.order + 1) if k in at
        }  # fmt: skip

    # -- the step function ----------------------------------------------------------------------------------
    def write(self):
        """Write `step`, `perform` and the scheduler."""
        self.frame = f = Frame(self.unit, {}, self.code.namespace)
        self.m = Threads(self)
        self.st, self.ctx, self.tid = Value("u8", "%st"), Value("u8", "%ctx"), Value("u4", "%tid")
        self.prepare()
        body, f.lines, f.ended = f.lines, [], True
        for s in self.segments:
            self.segment(s)
        blocks, f.lines, f.ended = f.lines, body, False
        targets = " ".join(f"i64 {code}, label %R{code}" for code in self.codes())
        f.end(f"switch i64 {self.resume.text}, label %S0 [{targets}]")
        self.unit.functions.append(
            "\n".join(
                [
                    "define internal i64 @step(i64 %st, i64 %ctx, i32 %tid) noinline nounwind {",
                    "entry:",
                    *f.slots,
                    *body,
                    *blocks,
                    "}",
                ]
            )
        )
        self.perform()
        self.unit.specialise(rt.run, (Value("u8", "%ctx"),))

    def codes(self) -> list[int]:
        """The numbers of the places where threads wait."""
        return [*range(1, len(self.waits) + 1), *self.barriers]

    def word(self, name, kind: str = "u8") -> Value:
        """A word of the launch."""
        return _load(self.frame, kind, self.frame.binary(ast.Add, self.ctx, name))

    def prepare(self):
        """The entry: registers, special registers, the thread's mark."""
        f = self.frame
        add, shift, conj = ast.Add, ast.LShift, ast.BitOr
        for name, kind in self.program.regs.items():
            if WIDTH[kind] > 8:
                raise Refused("registers of 128 bits")
            place = f"%r.{name}"
            llvm = KINDS[kind_of_width(WIDTH[kind])]
            f.slots.append(f"  {place} = alloca {llvm}")
            f.emit(f"store {llvm} 0, ptr {place}")
        f.slots += ["  %rounds = alloca i64", "  %turns = alloca i64"]
        for place, word in (("%rounds", rt.ROUNDS_DONE), ("%turns", rt.TURNS)):
            f.emit(f"store {_load(f, 'u8', f.binary(add, self.st, word)).typed}, ptr {place}")
        wide = f.cast(self.tid, u8)
        warp = f.binary(ast.RShift, wide, u8(5))
        epoch = _load(f, "u8", f.binary(add, self.word(rt.EPOCHS), f.binary(shift, warp, u8(3))))
        epoch = f.binary(shift, f.binary(ast.BitAnd, epoch, u8(1023)), u8(rt.EPOCH_AT))
        self.mine = f.binary(
            conj, self.word(rt.NOW), f.binary(conj, f.binary(shift, wide, u8(rt.THREAD_AT)), epoch)
        )
        self.counts = self.word(rt.COUNTS)
        f.names = {"tid": self.tid, "lane": f.binary(ast.BitAnd, self.tid, u4(31))}
        f.names |= {f"cluster_nctaid_{axis}": f.value(u4(1)) for axis in "xyz"}
        for name in (f"{what}_{axis}" for what in ("ctaid", "ntid", "nctaid") for axis in "xyz"):
            f.names[name] = self.word(getattr(rt, name.upper()), "u4")
        f.names["dynamic_smem_size"] = self.word(rt.DYNAMIC_SHARED, "u4")
        self.specials: dict[str, Value] = {}
        for name in sorted(s.replace(".", "_") for s in self.program.specials):
            if name not in SPECIALS:
                raise Refused(f"the special register %{name}")
            self.specials[f"sp_{name}"] = f.value(f.expression(ast.parse(SPECIALS[name], mode="eval").body))
        self.resume = _load(f, "u8", f.binary(add, self.st, rt.CODE))

    def segment(self, s: Segment):
        """Write the code of one segment."""
        f, b = self.frame, s.block
        f.begin(f"S{s.number}")
        f.names = {"m": self.m, "L": None}
        self.block = b.index
        if s.first:
            place = f.temp(
                f"getelementptr i64, ptr {f.temp(f'inttoptr {self.counts.typed} to ptr')}, i64 {b.index}"
            )
            count = f.temp(f"load i64, ptr {place}")
            f.emit(f"store i64 {f.temp(f'add i64 {count}, 1')}, ptr {place}")
        writer = Writer(self.code, b)
        for i in b.instrs:
            writer.instr, writer.pred = i, None
            writer.instructions += 1
            if i.pred is not None:
                writer.pred = writer.use_reg(i.pred, "p")
            emit(writer, i)
        writer.pred = None
        end = writer.terminator()
        stores = writer.stores()
        done = self.code.work.get(b.index, (0, 0))
        self.code.work[b.index] = done[0] + writer.instructions, done[1] + writer.flops
        for r in b.uses:
            kind = kind_of_width(writer.width(r))
            if r.startswith("sp_"):
                f.names[f"{r}_{kind}"] = self.specials[r]
            else:
                f.names[f"{r}_{kind}"] = f.op(kind, f"load {KINDS[kind]}, ptr %r.{r}")
        self.saved = s.saved
        f.statements(ast.parse("\n".join(writer.lines)).body)
        end = f.expression(ast.parse(end, mode="eval").body)
        values = [(r, f.value(f.expression(ast.parse(part, mode="eval").body))) for r, _, part in stores]
        for r, value in values:
            kind = kind_of_width(writer.width(r))
            f.emit(f"store {(f.view(value, kind) if kind != 'p' else value).typed}, ptr %r.{r}")
        self.terminate(s, end)

    def terminate(self, s: Segment, end):
        """Write the end of a segment, which decides where the thread goes on."""
        f, b = self.frame, s.block
        ways = [self.way(b, k, n) for k, n in zip(b.succs or [b.index], s.succs, strict=False)]
        if b.kind in ("jump", "call"):
            f.end(f"br label %{ways[0]}")
        elif b.kind == "branch":
            f.branch(f.value(end), ways[0], ways[1])
        elif b.kind in ("switch", "ret"):
            keys = range(len(ways)) if b.kind == "switch" else b.succs
            cases = " ".join(f"i32 {k}, label %{way}" for k, way in zip(keys, ways, strict=True))
            if not ways:
                raise Refused("a return to nowhere")
            f.end(f"switch {f.value(end).typed}, label %{ways[0]} [{cases}]")
        elif b.kind == "barrier":
            number, count, predicate = end
            if count is not None or predicate is not None or isinstance(number, Value) or int(number) != 0:
                raise Refused("a numbered barrier")
            code = int(rt.BARRIER) + len(self.barriers)
            self.barriers.append(code)
            self.suspend(code, [])
            f.end(f"br label %{ways[0]}")
        elif b.kind == "exit":
            self.leave()
        else:  # trap
            f.call(rt.give_up, (self.ctx,))
            self.leave()
        self.edges()

    def leave(self):
        """The thread returns."""
        f = self.frame
        _store(f, u8, f.binary(ast.Add, self.st, rt.CODE), rt.EXITED)
        f.end(f"ret i64 {int(rt.EXITED)}")

    def way(self, b, target: int, segment: int) -> str:
        """The label of the way from a block to another; back to the head of a loop it counts rounds."""
        if not b.succs or self.program.blocks[target].order > b.order or b.kind == "call":
            return f"S{segment}"
        label = self.frame.label("back")
        self._pending.append((label, f"S{segment}", (b.index, target) in self.turning))
        return label

    def edges(self):
        """Write the ways back that were asked for."""
        f = self.frame
        for label, target, turning in self._pending:
            f.begin(label)
            for place in ("%rounds", "%turns")[: 1 + turning]:
                count = f.temp(f"load i64, ptr {place}")
                f.emit(f"store i64 {f.temp(f'add i64 {count}, 1')}, ptr {place}")
            rounds = f.op("u8", "load i64, ptr %rounds")
            stop = f.label("stop")
            f.branch(f.compare(ast.Gt, rounds, self.word(rt.ROUNDS)), stop, target, unlikely=True)
            f.begin(stop)
            f.call(rt.give_up, (self.ctx,))
            self.leave()
        self._pending = []

    # -- waiting --------------------------------------------------------------------------------------------
    def suspend(self, code: int, operands: list[Value]):
        """Keep what lives in the thread's state, return `code`, and go on here when the thread is run
        again."""
        f = self.frame
        add = ast.Add
        for n, x in enumerate(operands):
            _store(f, u8, f.binary(add, self.st, u8(rt.OPERANDS + u8(8 * n))), f.cast(x, u8))
        places = []
        for n, r in enumerate(self.saved):
            kind = kind_of_width(WIDTH[self.program.regs[r]])
            places.append((r, kind, u8(rt.SAVED + u8(8 * n))))
            _store(
                f,
                u8,
                f.binary(add, self.st, places[-1][2]),
                f.cast(f.op(kind, f"load {KINDS[kind]}, ptr %r.{r}"), u8),
            )
        self.state_words = max(self.state_words, len(places))
        for place, word in (("%rounds", rt.ROUNDS_DONE), ("%turns", rt.TURNS)):
            _store(f, u8, f.binary(add, self.st, word), f.op("u8", f"load i64, ptr {place}"))
        _store(f, u8, f.binary(add, self.st, rt.CODE), u8(code))
        f.end(f"ret i64 {code}")
        f.begin(f"R{code}")
        for r, kind, place in places:
            value = _load(f, "u8", f.binary(add, self.st, place))
            value = f.compare(ast.NotEq, value, 0) if kind == "p" else f.cast(value, f"u{kind[1]}")
            f.emit(f"store {value.typed}, ptr %r.{r}")

    def together(self, function, known: tuple, operands: tuple, results: tuple) -> tuple:
        """A warp instruction: wait for the lanes, let the runtime execute it, and take the results."""
        f = self.frame
        values = [f.value(x) for x in operands]
        if len(values) > rt.OPERAND_WORDS or len(results) > rt.RESULT_WORDS:
            raise Refused("too many operands")
        self.waits.append((function, known))
        self.suspend(len(self.waits), values)
        out = []
        for n, kind in enumerate(results):
            x = _load(f, "u8", f.binary(ast.Add, self.st, u8(rt.RESULTS + u8(8 * n))))
            out.append(f.compare(ast.NotEq, x, 0) if kind == "p" else f.cast(x, kind))
        return tuple(out)

    def perform(self):
        """Write `perform`: the warp instruction with a given code."""
        names = ("code", "ctx", "warp", "stride", "active", "alive")
        f = Frame(self.unit, {}, {})
        given = tuple(Value("u8", f"%{n}") for n in names[1:])
        cases = " ".join(f"i64 {k + 1}, label %W{k + 1}" for k in range(len(self.waits)))
        f.end(f"switch i64 %code, label %none [{cases}]")
        for k, (function, known) in enumerate(self.waits):
            f.begin(f"W{k + 1}")
            f.call(function, (*given, *known))
            f.end("ret void")
        f.begin("none")
        f.end("ret void")
        head = f"define internal void @perform({', '.join(f'i64 %{n}' for n in names)}) noinline nounwind {{"
        self.unit.functions.append("\n".join([head, "entry:", *f.lines, "}"]))


def refuse(program):
    """Refuse kernels whose checks need more than marks, before anything is translated."""
    if program.is_asynchronous or program.moves_registers:
        raise Refused("bulk copies, warpgroup products or register budgets")
    if synchronises(program) or any(follows_shared(program, 1)):
        raise Refused("blocks or warps that order each other by atomics and flags")
    if any(b.spins for b in program.blocks):
        raise Refused("a loop that polls memory")
