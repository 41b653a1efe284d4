"""Link a kernel and the device functions it calls into one control-flow graph of basic blocks.

Calls must be direct and not recursive, so each function's registers and parameters exist once per thread: a
call stores the index of its return block in a register and jumps, and `ret` jumps to the block in that
register. Blocks end at branches, barriers, calls and returns. A guarded instruction with a side effect (`@%p
st...`) becomes a separate block, so that the executor never sees guards on memory accesses.

`order` is the scheduling priority: a topological order in which every loop's blocks are contiguous. Running
the block with the lowest order first makes diverged threads reconverge where their paths join.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .parser import Function, Instr, Mem, Module, Pair, Reg, Sym, TensorMem, Vec
from .special_registers import SPECIAL_REGISTERS

#: Opcodes without memory effects or thread communication. A guarded one becomes a select; any other guarded
#: instruction becomes a separate block.
PURE_OPCODES = {
    "mov", "add", "sub", "mul", "mad", "mul24", "mad24", "fma", "div", "rem", "min", "max", "abs", "neg",
    "not", "and", "or", "xor", "cnot", "shl", "shr", "shf", "setp", "set", "selp", "slct", "cvt", "cvta",
    "rcp", "rsqrt", "sqrt", "sin", "cos", "ex2", "lg2", "tanh", "copysign", "testp", "lop3", "prmt",
    "popc", "clz", "brev", "bfe", "bfi", "bfind", "sad", "dp4a", "dp2a", "isspacep", "mapa", "getctarank",
    "addc", "subc", "madc", "szext", "bmsk", "fns",
}  # fmt: skip
TERMINATORS = {"bra", "brx", "ret", "exit", "trap", "call"}
BUILTINS = {"vprintf", "__assertfail"}
LOCAL_ALIGN = 16


class LinkError(ValueError):
    """Raised for a kernel that cannot be linked: recursion, an unknown function, a missing label."""


@dataclass(slots=True)
class Block:
    """A basic block. `kind`: jump, branch, switch, barrier, cluster, call, ret, exit or trap."""

    index: int
    function: int
    instrs: list[Instr] = field(default_factory=list)
    kind: str = "jump"
    term: Instr | None = None
    succs: list[int] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)  # registers read before they are written here
    stores: list[str] = field(default_factory=list)  # registers written here and read elsewhere
    in_spin_loop: bool = False
    order: int = 0

    @property
    def end(self) -> Instr:
        """The instruction that ends the block; some jumps and exits have none."""
        assert self.term is not None
        return self.term


class Program:
    """One linked kernel: its basic blocks, register types, and the layout of its local variables."""

    def __init__(self, module: Module, entry: Function):
        self.module, self.entry = module, entry
        self.functions: list[Function] = []
        self.regs: dict[str, str] = {}  # qualified register name -> type
        self.blocks: list[Block] = []
        self.locals: dict[tuple[int, str], tuple[int, int]] = {}  # (function, name) -> (offset, bytes)
        self.local_bytes = 0
        self.params: dict[str, tuple[int, int]] = {}
        self.param_bytes = 0
        self._index: dict[str, int] = {}
        self._entry_block: dict[int, int] = {}
        # (device function, parameter or return value) -> offset in local memory
        self._frames: dict[tuple[str, str], int] = {}
        self.special_registers: set[str] = set()
        for p in entry.params:
            align = max(p.align, 1)
            self.param_bytes = -(-self.param_bytes // align) * align
            self.params[p.name] = (self.param_bytes, p.nbytes)
            self.param_bytes += p.nbytes
        self._depth: dict[int, int] = {}
        self._callees: dict[int, set[int]] = {}
        self._link(entry, ())
        self._link_returns()
        self._compute_liveness()
        self._compute_order()
        #: The instructions of all blocks except terminators, and the count of each opcode.
        self.instrs = [i for block in self.blocks for i in block.instrs]
        self.opcodes = Counter(i.op for i in self.instrs)
        #: Whether the kernel uses bulk copies or wgmma, and whether it uses setmaxnreg.
        self.is_asynchronous = any(
            i.op == "wgmma" or (i.op == "cp" and "bulk" in i.mods) for i in self.instrs
        )
        self.uses_setmaxnreg = "setmaxnreg" in self.opcodes

    # -- linking --------------------------------------------------------------------------------------------
    def _link(self, f: Function, stack: tuple[str, ...]) -> int:
        """Add `f` and the functions it calls, each once; return the first block of `f`."""
        if f.name in stack:
            raise LinkError(f"{f.name} calls itself; recursive device functions are not supported")
        number = self._index.get(f.name)
        if number is not None:
            self._raise_depth(number, len(stack))
            return self._entry_block[number]
        if not f.has_body:
            raise LinkError(f"function {f.name} is declared but has no body here")
        number = self._index[f.name] = len(self.functions)
        self.functions.append(f)
        self._depth[number] = len(stack)
        self._callees[number] = set()
        for name, kind in f.regs.items():
            self.regs[self.qualify(number, name)] = kind
        if not f.is_entry:
            self.regs[f"return_{number}"] = "b32"
            for p in [*f.params, *f.returns]:
                self._frames[f.name, p.name] = self._allocate_local(number, p.name, p.nbytes)
        for v in f.variables.values():
            if v.space == "local":
                self._allocate_local(number, v.name, v.nbytes)
        self._split_into_blocks(f, number, stack)
        return self._entry_block[number]

    def _raise_depth(self, number: int, depth: int):
        if depth > self._depth[number]:
            self._depth[number] = depth
            for callee in self._callees[number]:
                self._raise_depth(callee, depth + 1)

    def _allocate_local(self, number: int, name: str, nbytes: int) -> int:
        start = self.local_bytes + 16
        self.locals[number, name] = (start, nbytes)
        self.local_bytes = -(-(start + nbytes + 16) // LOCAL_ALIGN) * LOCAL_ALIGN
        return start

    def qualify(self, number: int, name: str) -> str:
        """Return a Python identifier, unique in the program, for register `name` of function `number`."""
        if name.startswith("%") and name[1:].split(".")[0] in SPECIAL_REGISTERS:
            self.special_registers.add(name[1:])
            return "sp_" + name[1:].replace(".", "_")
        return re.sub(r"\W", "_", name.lstrip("%")) + (f"_f{number}" if number else "")

    def _add_block(self, number: int) -> Block:
        block = Block(len(self.blocks), number)
        self.blocks.append(block)
        return block

    def _split_into_blocks(self, f: Function, number: int, stack: tuple[str, ...]):
        targets = {i.args[0].name for i in f.body if i.op == "bra"}.union(*f.tables.values())
        starts = {position for name, position in f.labels.items() if name in targets}
        block_at: dict[int, Block] = {}
        block_at[0] = block = self._add_block(number)
        self._entry_block[number] = block.index
        fixups: list[tuple[Block, list[str]]] = []
        pending: list[tuple[Instr, str, int]] = []  # st.param instructions of the next call
        last_call: dict[str, int] = {}  # variable for a call's result -> offset
        for position, instr in enumerate(f.body):
            if (
                position in starts
                and position != 0
                and (block.instrs or block.term or position not in block_at)
            ):
                new = self._add_block(number)
                if block.kind == "jump" and not block.succs:
                    block.succs = [new.index]
                block = new
            if position in starts or position == 0:
                block_at[position] = block
            instr = self._rename_registers(instr, number, f, pending, last_call)
            if instr.pred is not None and instr.op != "bra" and instr.op not in PURE_OPCODES:
                body, after = self._add_block(number), self._add_block(number)
                block.kind, block.term = "branch", Instr("bra", (), (), instr.pred, instr.line, instr.loc)
                block.succs = [body.index, after.index]
                instr.pred, block = None, body
                if self._get_terminator_kind(instr) is None:
                    body.succs = [after.index]
            elif self._get_terminator_kind(instr) is not None:
                after = self._add_block(number)
            else:
                after = block
            self._append(block, instr, number, f, stack, after, fixups, pending, last_call)
            block = after
        if not block.term and not block.succs:
            block.kind, block.term = "ret" if not f.is_entry else "exit", None
        end = len(f.body)
        for position in f.labels.values():
            if position == end:
                block_at[position] = block
        for branch, labels in fixups:
            for label in labels:
                if label not in f.labels:
                    raise LinkError(f"PTX line {branch.end.line}: branch to unknown label {label}")
                branch.succs.append(block_at[f.labels[label]].index)
            if branch.kind == "branch":
                branch.succs.reverse()  # the taken block first, then the fall-through block

    def _get_terminator_kind(self, i: Instr) -> str | None:
        if i.op == "bra":
            return "branch" if i.pred is not None else "jump"
        if i.op in TERMINATORS:
            return {"brx": "switch"}.get(i.op, i.op)
        if i.op in ("bar", "barrier"):
            if "cluster" in i.mods:
                return "cluster" if "wait" in i.mods else None
            if "warp" in i.mods or "arrive" in i.mods:
                return None
            return "barrier"
        return None

    def _append(self, block, instr, number, f, stack, after, fixups, pending, last_call) -> None:
        """Append `instr` to `block`, or end the block with it and continue in block `after`."""
        kind = self._get_terminator_kind(instr)
        if kind is None:
            block.instrs.append(instr)
            return
        block.kind, block.term = kind, instr
        if kind == "jump":
            fixups.append((block, [instr.args[0].name]))
        elif kind == "branch":
            block.succs = [after.index]
            fixups.append((block, [instr.args[0].name]))
        elif kind == "switch":
            table = f.tables.get(instr.args[1].name)
            if table is None:
                raise LinkError(f"PTX line {instr.line}: no branch target table for {instr.name}")
            fixups.append((block, table))
        elif kind in ("barrier", "cluster"):
            block.succs = [after.index]
        elif kind == "call":
            self._link_call(block, instr, number, stack, after, pending, last_call)
        elif kind == "ret" and f.is_entry:
            block.kind = "exit"

    def _link_call(self, block, instr, number, stack, after, pending, last_call):
        args = list(instr.args)
        returns = args.pop(0).items if isinstance(args[0], Vec) else ()
        if not isinstance(args[0], Sym):
            raise LinkError(f"PTX line {instr.line}: indirect calls are not supported")
        name = args[0].name
        params = args[1].items if len(args) > 1 and isinstance(args[1], Vec) else ()
        callee = self.module.functions.get(name)
        if callee is None or (not callee.has_body and name not in BUILTINS):
            raise LinkError(f"PTX line {instr.line}: call of unknown external function {name}")
        if name in BUILTINS:
            for p in [*callee.params, *callee.returns]:
                if (name, p.name) not in self._frames:
                    self._frames[name, p.name] = self._allocate_local(number, p.name, p.nbytes)
            block.kind, block.succs, block.term = "jump", [after.index], None
            symbols = [Sym(p.name, self._frames[name, p.name]) for p in [*callee.params, *callee.returns]]
            block.instrs.append(Instr("builtin", (name,), tuple(symbols), None, instr.line, instr.loc))
        else:
            first = self._link(callee, (*stack, self.functions[number].name))
            self._callees[number].add(self._index[name])
            block.succs = [first, after.index]  # [callee, return block]
        for arguments, parameter in zip(params, callee.params, strict=True):
            for store, variable, _ in pending:
                if variable == arguments.name:
                    offset = self._frames[name, parameter.name]
                    store.args = (Mem(None, offset + store.args[0].offset), *store.args[1:])
        for arguments, parameter in zip(returns, callee.returns, strict=True):
            last_call[arguments.name] = self._frames[name, parameter.name]
        pending.clear()

    def _qualify(self, number: int, register: Reg) -> Reg:
        name = register.name if register.name == "_" else self.qualify(number, register.name)
        return Reg(name, register.negated)

    def _rename_registers(self, i: Instr, number: int, f: Function, pending, last_call) -> Instr:
        """Copy `i` with qualified register names; call parameters become local memory ("frame" space)."""

        def walk(a):
            if isinstance(a, Reg):
                return self._qualify(number, a)
            if isinstance(a, Mem) and isinstance(a.base, Reg):
                return Mem(Reg(self.qualify(number, a.base.name)), a.offset)
            if isinstance(a, TensorMem):
                return TensorMem(walk(a.map), tuple(walk(x) for x in a.coordinates))
            if isinstance(a, Vec):
                return Vec(tuple(walk(x) for x in a.items))
            if isinstance(a, Pair):
                return Pair(walk(a.first), walk(a.second))
            if isinstance(a, Sym) and i.op not in ("bra", "call", "brx") and (number, a.name) in self.locals:
                return Sym(f"local:{self.locals[number, a.name][0]}", a.offset)
            if isinstance(a, Mem) and isinstance(a.base, Sym) and (number, a.base.name) in self.locals:
                return Mem(None, self.locals[number, a.base.name][0] + a.offset)
            return a

        args = i.args if i.op == "call" else tuple(walk(a) for a in i.args)
        out = Instr(i.op, i.mods, args, self._qualify(number, i.pred) if i.pred else None, i.line, i.loc)
        space = next((m for m in i.mods if m.startswith("param")), None)
        if i.op in ("ld", "st") and space:
            mem = i.args[1] if i.op == "ld" else i.args[0]
            base = mem.base.name if isinstance(mem.base, Sym) else None
            in_frame = tuple("frame" if m is space else m for m in i.mods)
            if base and (f.name, base) in self._frames:  # a parameter or return value of this function
                address = Mem(None, self._frames[f.name, base] + mem.offset)
                out.mods, out.args = in_frame, (args[0], address) if i.op == "ld" else (address, *args[1:])
            elif i.op == "st":  # an argument; its offset is only known at the call
                out.mods, out.args = in_frame, (Mem(None, mem.offset), *args[1:])
                pending.append((out, base, mem.offset))
            elif base in last_call:
                out.mods, out.args = in_frame, (args[0], Mem(None, last_call[base] + mem.offset))
        return out

    def _link_returns(self):
        """Connect each device function's `ret` to the blocks after its calls."""
        after: dict[int, list[int]] = {}
        for b in self.blocks:
            if b.kind == "call":
                after.setdefault(self.blocks[b.succs[0]].function, []).append(b.succs[1])
        for b in self.blocks:
            if b.kind == "ret":
                b.succs = after.get(b.function, [])

    # -- analysis -------------------------------------------------------------------------------------------
    def _compute_liveness(self):
        edges = [[b.succs[0]] if b.kind == "call" else b.succs for b in self.blocks]
        instructions = (i for b in self.blocks for i in [*b.instrs, *([b.term] if b.term else [])])
        self.read_registers = {name for i in instructions for name in get_reads_and_writes(i)[0]}
        names = list(self.regs)
        for b, (after, defined) in zip(self.blocks, compute_liveness(self, self.blocks, edges), strict=True):
            b.stores = [names[k] for k in iterate_set_bits(after & defined)]

    def _compute_order(self):
        position = 0
        for number in sorted(range(len(self.functions)), key=lambda k: -self._depth[k]):
            members = dict.fromkeys(b.index for b in self.blocks if b.function == number)
            inside = {i: [s for s in self._get_own_successors(i) if s in members] for i in members}
            # An unreachable block must not count as a loop's entry, or the wrong header would be chosen.
            live = find_reachable(inside, self._entry_block[number])
            inside = {i: inside[i] for i in members if i in live}
            for i in compute_nested_order(inside, self._entry_block[number], self._mark_loop):
                self.blocks[i].order = position
                position += 1

    def _get_own_successors(self, i: int) -> list[int]:
        """Return a block's successors; for a call, only the block after it."""
        b = self.blocks[i]
        return [b.succs[1]] if b.kind == "call" else b.succs

    def _mark_loop(self, loop: list[int]):
        if any(is_poll(i) for k in loop for i in self.blocks[k].instrs):
            for k in loop:
                self.blocks[k].in_spin_loop = True


def is_poll(i: Instr) -> bool:
    """Return whether `i` reads memory that another thread may change, as spin loops do."""
    if i.op == "mbarrier" and ("test_wait" in i.mods or "try_wait" in i.mods):
        return True
    if i.op == "atom":
        return True
    return i.op == "ld" and any(m in ("acquire", "relaxed", "volatile") for m in i.mods)


_NO_DESTINATION = {
    "st", "red", "bra", "brx", "bar", "barrier", "fence", "membar", "prefetch", "prefetchu", "cp", "ret",
    "exit", "trap", "call", "stmatrix", "nanosleep", "griddepcontrol", "brkpt", "pmevent", "builtin",
    "discard", "applypriority", "setmaxnreg",
}  # fmt: skip


def get_registers(a) -> list[str]:
    if isinstance(a, Reg):
        return [] if a.name == "_" else [a.name]
    if isinstance(a, Mem):
        return get_registers(a.base) if isinstance(a.base, Reg) else []
    if isinstance(a, Vec):
        return [r for x in a.items for r in get_registers(x)]
    if isinstance(a, TensorMem):
        return [r for x in (a.map, *a.coordinates) for r in get_registers(x)]
    if isinstance(a, Pair):
        return get_registers(a.first) + get_registers(a.second)
    return []


def has_destination(i: Instr) -> bool:
    """Return whether the first operand of `i` is written."""
    if i.op in ("bar", "barrier"):
        return "red" in i.mods
    if i.op == "mbarrier":
        return not isinstance(i.args[0], Mem)
    if i.op == "wgmma":
        return "mma_async" in i.mods
    return i.op not in _NO_DESTINATION and bool(i.args)


def get_reads_and_writes(i: Instr) -> tuple[list[str], list[str]]:
    reads = [i.pred.name] if i.pred is not None else []
    start = 0
    writes: list[str] = []
    if has_destination(i):
        writes = get_registers(i.args[0])
        start = 1
        if isinstance(i.args[0], Mem):
            reads += writes
            writes = []
        elif i.op == "wgmma":  # it adds to its accumulators
            reads += writes
    for a in i.args[start:]:
        reads += get_registers(a)
    return reads, writes


def compute_liveness(program: Program, blocks: list[Block], edges: list[list[int]]) -> list[tuple[int, int]]:
    """Return, for each block, the registers live after it and the registers it writes, as bit masks in the
    order of `program.regs`.

    Also set `uses` of each block. A guarded write counts as a use: where the guard is false, the register
    keeps its old value.
    """
    bit = {name: 1 << i for i, name in enumerate(program.regs)}
    used: list[int] = []
    defined: list[int] = []
    for b in blocks:
        up = kill = 0
        uses: dict[str, None] = {}
        for i in [*b.instrs, *([b.term] if b.term else [])]:
            reads, writes = get_reads_and_writes(i)
            for r in reads:
                if r.startswith("sp_"):
                    uses[r] = None
                elif r in bit and not kill & bit[r]:
                    up |= bit[r]
                    uses[r] = None
            for r in writes:
                if r in bit:
                    if i.pred is not None and not kill & bit[r]:
                        up |= bit[r]
                        uses[r] = None
                    kill |= bit[r]
        if b.kind == "call":
            kill |= bit[f"return_{program.blocks[b.succs[0]].function}"]
        if b.kind == "ret":
            up |= bit[f"return_{b.function}"]
            uses[f"return_{b.function}"] = None
        b.uses = list(uses)
        used.append(up)
        defined.append(kill)
    live, after, changed = used[:], [0] * len(used), True
    while changed:
        changed = False
        for k in range(len(live) - 1, -1, -1):
            after[k] = 0
            for follower in edges[k]:
                after[k] |= live[follower]
            new = used[k] | (after[k] & ~defined[k])
            changed, live[k] = changed or new != live[k], new
    return list(zip(after, defined, strict=True))


def iterate_set_bits(x: int):
    while x:
        low = x & -x
        yield low.bit_length() - 1
        x ^= low


def find_components(graph: dict[int, list[int]], roots: list[int]) -> list[list[int]]:
    """Return the strongly connected components of `graph` in topological order (Tarjan, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    groups: list[list[int]] = []
    for root in roots:
        if root in index:
            continue
        frames = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while frames:
            node, succs = frames[-1]
            for s in succs:
                if s not in index:
                    index[s] = low[s] = len(index)
                    stack.append(s)
                    on_stack.add(s)
                    frames.append((s, iter(graph[s])))
                    break
                if s in on_stack:
                    low[node] = min(low[node], index[s])
            else:
                frames.pop()
                if frames:
                    low[frames[-1][0]] = min(low[frames[-1][0]], low[node])
                if low[node] == index[node]:
                    group = []
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        group.append(top)
                        if top == node:
                            break
                    groups.append(group)
    return groups[::-1]


def find_reachable(graph: dict[int, list[int]], entry: int) -> set[int]:
    reached, worklist = {entry}, [entry]
    while worklist:
        new = [s for s in graph[worklist.pop()] if s not in reached]
        reached.update(new)
        worklist += new
    return reached


def compute_nested_order(graph: dict[int, list[int]], entry: int, on_loop) -> list[int]:
    """Return a topological order of `graph` in which every loop's blocks are contiguous, header first."""
    out: list[int] = []
    for group in find_components(graph, [entry, *graph]):
        if len(group) == 1 and group[0] not in graph[group[0]]:
            out.append(group[0])
            continue
        on_loop(group)
        members = set(group)
        outside = [s for n in graph if n not in members for s in graph[n] if s in members]
        header = entry if entry in members else min(outside, default=min(group))
        inner = {n: [s for s in graph[n] if s in members and s != header] for n in group if n != header}
        out.append(header)
        firsts = [s for s in graph[header] if s in inner]
        if inner:
            out += compute_nested_order(inner, firsts[0] if firsts else min(inner), on_loop)
    return out
