"""Emitters of memory, synchronisation, warp and tensor-core instructions: calls into the batch.

Global addresses are device addresses, shared ones offsets in the block's shared memory, local ones offsets in
the thread's local memory. The state space of a generic address follows from its window."""

from __future__ import annotations

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE, NUMPY_KINDS
from harness.vgpu.ptx.parser import WIDTH, Imm, Instr, Mem, Pair, Reg, Vec
from harness.vgpu.ptx.program import get_registers

from .codegen import Writer
from .emitters import STATE_SPACES, check_modifiers, get_type, opcode
from .fragments import is_mma_supported, parse_shape
from .hopper_ops import emit_bulk_copy, emit_shared_address

_SPACES = ("global", "shared", "local", "param", "const", "frame")
_STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
_HINTS = {"weak", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "cta", "gpu", "sys", "cluster", "noftz"}
_HINTS |= {"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"}
_HINTS |= {"L2::evict_normal", "L2::evict_last", "L2::evict_first", "L2::cache_hint"}
_HINTS |= {"L2::64B", "L2::128B", "L2::256B", "v2", "v4", "v8", *_STRONG}
_SPACE_WORDS = {*STATE_SPACES, "param::func", "frame"}


def get_space(i: Instr) -> str:
    """Return the state space in the modifiers, or "generic"."""
    for m in i.mods:
        base = m.split("::")[0]
        if base in _SPACES:
            return base
    return "generic"


def _get_vector_size(i: Instr) -> int:
    return next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)


def _get_memory_semantics(i: Instr) -> tuple[str | None, bool, bool]:
    """Return (strong modifier or None, acquires, releases)."""
    strong = next((m for m in i.mods if m in _STRONG), None)
    return strong, strong in ("acquire", "acq_rel"), strong in ("release", "acq_rel")


def _get_scope(i: Instr) -> int:
    return BLOCK_SCOPE if "cta" in i.mods else CLUSTER_SCOPE if "cluster" in i.mods else DEVICE_SCOPE


@opcode(
    "ld ldu",
    forms="global (.nc), shared, local, param, const and generic; b8 to b64, .v2 .v4; .relaxed .acquire "
    ".volatile",
)
def load(w: Writer, i: Instr):
    check_modifiers(i, *_HINTS, *_SPACE_WORDS)
    space, t, count = get_space(i), get_type(i), _get_vector_size(i)
    size = WIDTH[t]
    d, mem = i.args[:2]
    targets = d.items if isinstance(d, Vec) else (d,)
    kind = NUMPY_KINDS[t] if t[0] == "s" else f"u{size}"
    if space == "param" and not (isinstance(mem.base, Reg)):
        offset = mem.offset + (w.program.params[mem.base.name][0] if mem.base is not None else 0)
        for k, target in enumerate(targets):
            w.code.param_reads.append((offset + k * size, kind))
            w.define(target, kind, f"m.params[{len(w.code.param_reads) - 1}]")
        return
    strong, acquires, _ = _get_memory_semantics(i)
    a = w.code.new_access(i, "A" if strong else "R", space, size, count)
    a.acquires, a.result_used, a.scope = acquires, bool(strong), _get_scope(i)
    address = w.emit_address(mem)
    if space == "const" and isinstance(mem.base, Reg) and w.get_width(mem.base.name) == 4:
        address = f"m.expand_constant_address({address})"
    value = w.temp(f"m.load(A{a.number}, {address}, L)")
    for k, target in enumerate(targets):
        if isinstance(target, Reg) and target.name == "_":
            continue
        part = f"{value}[{k}]" if count > 1 else value
        w.define(target, kind, f"{part}.view({kind})" if kind[0] == "i" else part)


@opcode("st", forms="global, shared, local and generic; b8 to b64, .v2 .v4; .relaxed .release .volatile")
def store(w: Writer, i: Instr):
    check_modifiers(i, *_HINTS, *_SPACE_WORDS)
    space, t, count = get_space(i), get_type(i), _get_vector_size(i)
    size = WIDTH[t]
    mem, source = i.args[:2]
    strong, _, releases = _get_memory_semantics(i)
    if space == "shared" and "shared::cluster" in i.mods and "async" in i.mods:
        raise UnsupportedInstruction(i)
    a = w.code.new_access(i, "A" if strong else "W", space, size, count)
    a.releases, a.scope = releases, _get_scope(i)
    values = source.items if isinstance(source, Vec) else (source,)
    parts = [w.use(v, f"u{size}") for v in values]
    value = parts[0] if count == 1 else "(" + ", ".join(parts) + ")"
    w.emit(f"m.store(A{a.number}, {w.emit_address(mem)}, {value}, L)")


@opcode(
    "atom red",
    forms="add min max and or xor exch cas inc dec on b32, b64, f32, f64, f16, bf16, x2; global, shared, "
    "generic; .v2 .v4 f32",
)
def atomic(w: Writer, i: Instr):
    ops = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    check_modifiers(i, *_HINTS, *_SPACE_WORDS, *ops)
    op = next(m for m in i.mods if m in ops)
    t, space, count = get_type(i), get_space(i), _get_vector_size(i)
    size = WIDTH[t]
    if size == 16:
        raise UnsupportedInstruction(i)
    args = list(i.args)
    dest = args.pop(0) if i.op == "atom" else None
    used = dest is not None and any(r in w.program.read_registers for r in get_registers(dest))
    mem, *values = args
    if count > 1 and used:
        raise UnsupportedInstruction(i, "the result of a vector atomic")
    items = [v.items if isinstance(v, Vec) else (v,) for v in values]
    for k in range(count):
        a = w.code.new_access(i, "A", space, size)
        _, a.acquires, a.releases = _get_memory_semantics(i)
        a.result_used, a.scope = used, _get_scope(i)
        w.flops += 1 if t[0] == "f" or t[:2] == "bf" else 0
        kind = t if t in ("f16x2", "bf16x2", "bf16") else NUMPY_KINDS[t]
        parts = [
            w.use(v[k], f"u{size}" if kind not in NUMPY_KINDS.values() or kind[0] != "i" else kind)
            for v in items
        ]
        address = w.emit_address(Mem(mem.base, mem.offset + k * size))
        call = f"m.atomic(A{a.number}, {op!r}, {kind!r}, {address}, ({', '.join(parts)},), L, {used})"
        if used:
            w.define(dest, f"u{size}", call)
        else:
            w.emit(call)


@opcode(
    "fence membar",
    forms="all scopes; orders accesses of threads in its scope for the race check, unless it is a proxy "
    "fence; proxy.async: bulk copies and wgmma see stores after it",
)
def fence(w: Writer, i: Instr):
    if any("proxy" in m for m in i.mods):
        if any(m.startswith("async") for m in i.mods):
            w.emit("m.proxy_fence(L)")
    elif "mbarrier_init" not in i.mods:
        is_sequential = i.op == "membar" or "sc" in i.mods
        w.emit(
            f"m.fence(L, {_get_scope(i)}, {'release' not in i.mods}, {'acquire' not in i.mods}, {is_sequential})"
        )


@opcode(
    "bar barrier",
    forms="bar.sync, bar.red, bar.arrive of named barriers; bar.warp.sync; barrier.cluster.arrive and .wait",
)
def barrier(w: Writer, i: Instr):
    if "warp" in i.mods:
        w.emit(f"m.warp_sync({w.bind_instruction(i)}, {w.use(i.args[0], 'u4')}, L)")
    elif "cluster" in i.mods:
        w.emit(f"m.cluster_arrive(L, {'relaxed' not in i.mods})")
    elif "arrive" in i.mods and len(i.args) == 2:
        w.emit(f"m.bar_arrive({w.use(i.args[0], 'u4')}, {w.use(i.args[1], 'u4')}, L)")
    else:
        raise UnsupportedInstruction(i)


@opcode("builtin", forms="vprintf: print from a kernel")
def builtin(w: Writer, i: Instr):
    if i.mods[0] != "vprintf":
        raise UnsupportedInstruction(i, f"call of {i.mods[0]}")
    w.emit(f"m.vprintf({', '.join(str(s.offset) for s in i.args)}, L)")


@opcode("call", forms="direct calls of device functions (not recursive), and vprintf")
def call(w: Writer, i: Instr):
    """Emit nothing: the code generator handles terminators."""


@opcode(
    "bra brx ret exit trap", forms="branches, branch tables, returns; trap ends the launch with a finding"
)
def control_flow(w: Writer, i: Instr):
    """Emit nothing: the code generator handles terminators."""


# -- warps --------------------------------------------------------------------------------------------------
_ALL_LANES = Imm(0xFFFFFFFF)


@opcode("shfl", forms=".sync up, down, bfly, idx on b32, with the in-range predicate")
def shuffle(w: Writer, i: Instr):
    check_modifiers(i, "sync", "up", "down", "bfly", "idx")
    mode = next(m for m in i.mods if m in ("up", "down", "bfly", "idx"))
    d, a, b, c, *mask = i.args
    args = ", ".join(w.use(x, "u4") for x in (a, b, c, *(mask or [_ALL_LANES])))
    _define_with_predicate(w, d, f"m.shuffle({w.bind_instruction(i)}, {mode!r}, {args}, L)")


def _define_with_predicate(w: Writer, d: Reg | Pair, call: str):
    """Assign the result of `call`, (value, predicate), to `d`, a pair or a register for the value."""
    result = w.temp(call)
    if isinstance(d, Pair):
        w.define(d.first, "u4", f"{result}[0]")
        w.define(d.second, "p", f"{result}[1]")
    else:
        w.define(d, "u4", f"{result}[0]")


@opcode("vote", forms=".sync all, any, uni, ballot")
def vote(w: Writer, i: Instr):
    check_modifiers(i, "sync", "all", "any", "uni", "ballot")
    mode = next(m for m in i.mods if m in ("all", "any", "uni", "ballot"))
    d, a, *mask = i.args
    args = f"{w.use(a, 'p')}, {w.use(mask[0] if mask else _ALL_LANES, 'u4')}"
    w.define(d, "u4" if mode == "ballot" else "p", f"m.vote({w.bind_instruction(i)}, {mode!r}, {args}, L)")


@opcode("activemask", forms="the active threads of the warp")
def activemask(w: Writer, i: Instr):
    w.define(i.args[0], "u4", "m.get_active_mask(L)")


@opcode("match", forms=".any.sync and .all.sync on b32 and b64")
def match(w: Writer, i: Instr):
    check_modifiers(i, "any", "all", "sync")
    d, a, mask = i.args
    mode = "any" if "any" in i.mods else "all"
    operands = f"{w.use(a, NUMPY_KINDS[get_type(i)])}, {w.use(mask, 'u4')}"
    _define_with_predicate(w, d, f"m.match({w.bind_instruction(i)}, {mode!r}, {operands}, L)")


@opcode("redux", forms=".sync add, min, max, and, or, xor on s32, u32, b32")
def redux(w: Writer, i: Instr):
    check_modifiers(i, "sync", "add", "min", "max", "and", "or", "xor")
    op = next(m for m in i.mods if m in ("add", "min", "max", "and", "or", "xor"))
    k = NUMPY_KINDS[get_type(i)]
    args = f"{w.use(i.args[1], k)}, {w.use(i.args[2], 'u4')}"
    w.define(i.args[0], k, f"m.redux({w.bind_instruction(i)}, {op!r}, {args}, L)")


@opcode("elect", forms=".sync: the lowest active thread of the mask")
def elect(w: Writer, i: Instr):
    check_modifiers(i, "sync")
    call = f"m.elect({w.bind_instruction(i)}, {w.use(i.args[1], 'u4')}, L)"
    _define_with_predicate(w, i.args[0], call)


# -- asynchronous copies and barriers in memory -------------------------------------------------------------
@opcode(
    "cp",
    forms=".async ca and cg of 4, 8, 16 bytes with zero fill; commit_group, wait_group, wait_all, "
    "mbarrier.arrive; data lands at the wait. .async.bulk between global and shared memory, "
    ".async.bulk.tensor of 1 to 5 dimensions in tile mode (swizzles, fill, multicast), cp.reduce of "
    "both into global memory; prefetch has no effect",
)
def async_copy(w: Writer, i: Instr):
    if "bulk" in i.mods or "reduce" in i.mods or "tensor" in i.mods:
        emit_bulk_copy(w, i)
    elif "commit_group" in i.mods:
        w.emit(f"m.copy_commit({w.bind_instruction(i)}, {w.multiply_adds}, L)")
    elif "wait_group" in i.mods or "wait_all" in i.mods or "mbarrier" in i.mods:
        groups = int(i.args[0].value) if "wait_group" in i.mods else -1
        w.emit(f"m.copy_wait({w.bind_instruction(i)}, {groups}, {w.multiply_adds}, L)")
        if "noinc" in i.mods:
            a = w.code.new_access(i, "A", "shared", 8)
            w.emit(f"m.mbarrier_arrive(A{a.number}, {emit_shared_address(w, i, i.args[0])}, 1, 0, False, L)")
    else:
        check_modifiers(i, "async", *_HINTS, *_SPACE_WORDS, "L2::cache_hint")
        size = int(i.args[2].value)
        read = w.code.new_access(i, "R", "global", min(size, 8), max(size // 8, 1))
        write = w.code.new_access(i, "W", "shared", min(size, 8), max(size // 8, 1))
        rest = i.args[3:-1] if "L2::cache_hint" in i.mods else i.args[3:]
        extra = "None"
        if rest:
            is_predicate = isinstance(rest[0], Reg) and w.get_width(rest[0].name) == 0
            extra = w.use(rest[0], "p" if is_predicate else "u4")
        source, target = w.emit_address(i.args[1]), w.emit_address(i.args[0])
        operands = f"A{read.number}, A{write.number}, {target}, {source}"
        w.emit(f"m.copy_async({operands}, {extra}, {w.multiply_adds}, L)")


# -- tensor cores -------------------------------------------------------------------------------------------
@opcode(
    "mma",
    forms=".sync row.col: m16n8k16 and m16n8k8 (bf16, f16 with f32 or f16 sums), m16n8k8 and m16n8k4 "
    "(tf32), m8n8k4 f64",
)
def mma(w: Writer, i: Instr):
    check_modifiers(i, "sync", "aligned", "row", "col", "m16n8k16", "m16n8k8", "m16n8k4", "m8n8k4")
    shape = next(m for m in i.mods if m.startswith("m"))
    types = [m for m in i.mods if m in WIDTH]
    if not is_mma_supported(shape, types) or "row" not in i.mods:
        raise UnsupportedInstruction(i)
    rows, columns, depth = parse_shape(shape)
    d, a, b, c = (x.items if isinstance(x, Vec) else (x,) for x in i.args)
    size = "u8" if types[0] == "f64" else "u4"
    w.flops += 2 * rows * columns * depth // 32
    w.multiply_adds += rows * columns * depth // 32
    lists = ", ".join("[" + ", ".join(w.use(x, size) for x in part) + "]" for part in (a, b, c))
    value = w.temp(f"m.mma({w.bind_instruction(i)}, {shape!r}, {tuple(types)!r}, {lists}, L)")
    for k, target in enumerate(d):
        w.define(target, size, f"{value}[{k}]")


@opcode("ldmatrix", forms=".sync m8n8 .x1 .x2 .x4, .trans, shared, b16")
def ldmatrix(w: Writer, i: Instr):
    check_modifiers(i, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    d, mem = i.args
    targets = d.items if isinstance(d, Vec) else (d,)
    a = w.code.new_access(i, "R", "shared", 8, 2)
    value = w.temp(f"m.ldmatrix(A{a.number}, {w.emit_address(mem)}, {len(targets)}, {'trans' in i.mods}, L)")
    for k, target in enumerate(targets):
        w.define(target, "u4", f"{value}[{k}]")


@opcode("stmatrix", forms=".sync m8n8 .x1 .x2 .x4, .trans, shared, b16")
def stmatrix(w: Writer, i: Instr):
    check_modifiers(i, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    mem, source = i.args
    values = source.items if isinstance(source, Vec) else (source,)
    a = w.code.new_access(i, "W", "shared", 8, 2)
    parts = ", ".join(w.use(v, "u4") for v in values)
    w.emit(f"m.stmatrix(A{a.number}, {w.emit_address(mem)}, [{parts}], {'trans' in i.mods}, L)")


# -- clusters and hints -------------------------------------------------------------------------------------
@opcode(
    "mapa", forms="the address of a shared variable in another block of the cluster (shared::cluster window)"
)
def mapa(w: Writer, i: Instr):
    check_modifiers(i, "shared::cluster")
    k = f"u{WIDTH[get_type(i)]}"
    d, a, rank = i.args
    address = w.use(a, k)
    rank_byte = f"(({w.use(rank, 'u4')} + u4(1)).astype({k}) << {w.code.bind_constant(k, 24)})"
    mask = 0xFFFFFF if "shared::cluster" in i.mods else ~0xFF000000 & (1 << 64) - 1
    w.define(d, k, f"({address} & {w.code.bind_constant(k, mask)}) | {rank_byte}")


@opcode(
    "nanosleep prefetch prefetchu griddepcontrol pmevent discard applypriority", forms="no effect on results"
)
def ignore_hint(w: Writer, i: Instr):
    """Emit nothing."""


@opcode("tcgen05 wmma st_async tensormap multimem", forms="not simulated: raises an error")
def raise_unsupported(w: Writer, i: Instr):
    raise UnsupportedInstruction(i, "tensor memory, multimem and changes of tensor maps are not simulated")
