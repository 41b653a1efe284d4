"""Emitters for memory, synchronisation, warp and tensor-core instructions: calls into the batch (executor.py,
warp.py).

Addresses keep their state space: global ones are device addresses, shared ones offsets in the block's shared
memory, local ones offsets in the thread's local memory. A generic address tells its space by its window."""

from __future__ import annotations

from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE, KIND
from harness.vgpu.ptx.parser import WIDTH, Instr, Mem, Pair, Reg, Vec

from .codegen import Writer
from .emitters import STATE_SPACES, check, opcode, type_of
from .fragments import mma_supported, sizes
from .hopper_ops import bulk_copy, shared_place

_SPACES = ("global", "shared", "local", "param", "const", "frame")
_STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
_HINTS = {"weak", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "cta", "gpu", "sys", "cluster", "noftz"}
_HINTS |= {"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"}
_HINTS |= {"L2::evict_normal", "L2::evict_last", "L2::evict_first", "L2::cache_hint"}
_HINTS |= {"L2::64B", "L2::128B", "L2::256B", "v2", "v4", "v8", *_STRONG}
_SPACE_WORDS = {*STATE_SPACES, "param::func", "frame"}


def space_of(i: Instr) -> str:
    """Return the state space in the modifiers, or "generic"."""
    for m in i.mods:
        base = m.split("::")[0]
        if base in _SPACES:
            return base
    return "generic"


def _vector(i: Instr) -> int:
    return next((int(m[1:]) for m in i.mods if m in ("v2", "v4", "v8")), 1)


def _strength(i: Instr) -> tuple[str | None, bool, bool]:
    """Return (strong or None, acquires, releases)."""
    strong = next((m for m in i.mods if m in _STRONG), None)
    return strong, strong in ("acquire", "acq_rel"), strong in ("release", "acq_rel")


def _scope(i: Instr) -> int:
    """Return the scope of the instruction: how many threads it orders."""
    return BLOCK_SCOPE if "cta" in i.mods else CLUSTER_SCOPE if "cluster" in i.mods else DEVICE_SCOPE


@opcode("ld", "ldu")
def load(w: Writer, i: Instr):
    """global (.nc), shared, local, param, const and generic; b8 to b64, .v2 .v4; .relaxed .acquire
    .volatile"""
    check(i, *_HINTS, *_SPACE_WORDS)
    space, t, count = space_of(i), type_of(i), _vector(i)
    size = WIDTH[t]
    d, mem = i.args[:2]
    targets = d.items if isinstance(d, Vec) else (d,)
    kind = KIND[t] if t[0] == "s" else f"u{size}"
    if space == "param" and not (isinstance(mem.base, Reg)):
        offset = mem.offset + (w.program.params[mem.base.name][0] if mem.base is not None else 0)
        for k, target in enumerate(targets):
            w.code.param_reads.append((offset + k * size, kind))
            w.define(target, kind, f"m.P[{len(w.code.param_reads) - 1}]")
        return
    strong, acquires, _ = _strength(i)
    a = w.code.access(i, "A" if strong else "R", space, size, count)
    a.acquires, a.used, a.scope = acquires, bool(strong), _scope(i)
    address = w.address(mem)
    if space == "const" and isinstance(mem.base, Reg) and w.width(mem.base.name) == 4:
        address = f"m.constant_address({address})"
    value = w.temp(f"m.load(A{a.number}, {address}, L)")
    for k, target in enumerate(targets):
        if isinstance(target, Reg) and target.name == "_":
            continue
        part = f"{value}[{k}]" if count > 1 else value
        w.define(target, kind, f"{part}.view({kind})" if kind[0] == "i" else part)


@opcode("st")
def store(w: Writer, i: Instr):
    """global, shared, local and generic; b8 to b64, .v2 .v4; .relaxed .release .volatile"""
    check(i, *_HINTS, *_SPACE_WORDS)
    space, t, count = space_of(i), type_of(i), _vector(i)
    size = WIDTH[t]
    mem, source = i.args[:2]
    strong, _, releases = _strength(i)
    if space == "shared" and "shared::cluster" in i.mods and "async" in i.mods:
        raise UnsupportedInstruction(i)
    a = w.code.access(i, "A" if strong else "W", space, size, count)
    a.releases, a.scope = releases, _scope(i)
    values = source.items if isinstance(source, Vec) else (source,)
    parts = [w.use(v, f"u{size}") for v in values]
    value = parts[0] if count == 1 else "(" + ", ".join(parts) + ")"
    w.emit(f"m.store(A{a.number}, {w.address(mem)}, {value}, L)")


@opcode("atom", "red")
def atomic(w: Writer, i: Instr):
    """add min max and or xor exch cas inc dec on b32, b64, f32, f64, f16, bf16, x2; global, shared, generic;
    .v2 .v4 f32"""
    ops = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    check(i, *_HINTS, *_SPACE_WORDS, *ops)
    op = next(m for m in i.mods if m in ops)
    t, space, count = type_of(i), space_of(i), _vector(i)
    size = WIDTH[t]
    if size == 16:
        raise UnsupportedInstruction(i)
    args = list(i.args)
    dest = args.pop(0) if i.op == "atom" else None
    used = dest is not None and any(r in w.program.read for r in _names(dest))
    mem, *values = args
    if count > 1 and used:
        raise UnsupportedInstruction(i, "the result of a vector atomic")
    items = [v.items if isinstance(v, Vec) else (v,) for v in values]
    for k in range(count):
        a = w.code.access(i, "A", space, size)
        _, a.acquires, a.releases = _strength(i)
        a.used, a.scope = used, _scope(i)
        w.flops += 1 if t[0] == "f" or t[:2] == "bf" else 0
        kind = t if t in ("f16x2", "bf16x2", "bf16") else KIND[t]
        parts = [
            w.use(v[k], f"u{size}" if kind not in KIND.values() or kind[0] != "i" else kind) for v in items
        ]
        place = w.address(Mem(mem.base, mem.offset + k * size))
        call = f"m.atomic(A{a.number}, {op!r}, {kind!r}, {place}, ({', '.join(parts)},), L, {used})"
        if used:
            w.define(dest, f"u{size}", call)
        else:
            w.emit(call)


def _names(a) -> list[str]:
    return [x.name for x in (a.items if isinstance(a, Vec) else (a,)) if isinstance(x, Reg) and x.name != "_"]


@opcode("fence", "membar")
def fence(w: Writer, i: Instr):
    """all scopes; orders accesses of threads in its scope for the race check, unless it is a proxy fence; proxy.async: bulk copies and wgmma see stores after it"""
    if any("proxy" in m for m in i.mods):
        if any(m.startswith("async") for m in i.mods):
            w.emit("m.proxy_fence(L)")
    elif "mbarrier_init" not in i.mods:
        strict = i.op == "membar" or "sc" in i.mods
        w.emit(f"m.fence(L, {_scope(i)}, {'release' not in i.mods}, {'acquire' not in i.mods}, {strict})")


@opcode("bar", "barrier")
def warp_barrier(w: Writer, i: Instr):
    """bar.sync, bar.red, bar.arrive of named barriers; bar.warp.sync; barrier.cluster.arrive and .wait"""
    if "warp" in i.mods:
        w.emit(f"m.warp_sync({w.instruction(i)}, {w.use(i.args[0], 'u4')}, L)")
    elif "cluster" in i.mods:
        w.emit(f"m.cluster_arrive(L, {'relaxed' not in i.mods})")
    elif "arrive" in i.mods and len(i.args) == 2:
        w.emit(f"m.bar_arrive({w.use(i.args[0], 'u4')}, {w.use(i.args[1], 'u4')}, L)")
    else:
        raise UnsupportedInstruction(i)


@opcode("builtin")
def builtin(w: Writer, i: Instr):
    """vprintf: print from a kernel"""
    if i.mods[0] != "vprintf":
        raise UnsupportedInstruction(i, f"call of {i.mods[0]}")
    w.emit(f"m.vprintf({', '.join(str(s.offset) for s in i.args)}, L)")


@opcode("call")
def call(w: Writer, i: Instr):
    """direct calls of device functions (not recursive), and vprintf"""


@opcode("bra", "brx", "ret", "exit", "trap")
def flow(w: Writer, i: Instr):
    """branches, branch tables, returns; trap ends the launch with a finding"""


# -- warps --------------------------------------------------------------------------------------------------
@opcode("shfl")
def shuffle(w: Writer, i: Instr):
    """.sync up, down, bfly, idx on b32, with the in-range predicate"""
    check(i, "sync", "up", "down", "bfly", "idx")
    mode = next(m for m in i.mods if m in ("up", "down", "bfly", "idx"))
    d, a, b, c, *mask = i.args
    mask = w.use(mask[0], "u4") if mask else w.code.constant("u4", 0xFFFFFFFF)
    args = ", ".join(w.use(x, "u4") for x in (a, b, c))
    _define_with_predicate(w, d, f"m.shuffle({w.instruction(i)}, {mode!r}, {args}, {mask}, L)")


def _define_with_predicate(w: Writer, d: Reg | Pair, call: str):
    """Assign the result of `call`, a value and a predicate, to d: a pair of both, or the value alone."""
    result = w.temp(call)
    if isinstance(d, Pair):
        w.define(d.first, "u4", f"{result}[0]")
        w.define(d.second, "p", f"{result}[1]")
    else:
        w.define(d, "u4", f"{result}[0]")


@opcode("vote")
def vote(w: Writer, i: Instr):
    """.sync all, any, uni, ballot"""
    check(i, "sync", "all", "any", "uni", "ballot")
    mode = next(m for m in i.mods if m in ("all", "any", "uni", "ballot"))
    d, a, *mask = i.args
    mask = w.use(mask[0], "u4") if mask else w.code.constant("u4", 0xFFFFFFFF)
    call_ = f"m.vote({w.instruction(i)}, {mode!r}, {w.use(a, 'p')}, {mask}, L)"
    w.define(d, "u4" if mode == "ballot" else "p", call_)


@opcode("activemask")
def activemask(w: Writer, i: Instr):
    """the active threads of the warp"""
    w.define(i.args[0], "u4", "m.active_mask(L)")


@opcode("match")
def match(w: Writer, i: Instr):
    """.any.sync and .all.sync on b32 and b64"""
    check(i, "any", "all", "sync")
    d, a, mask = i.args
    mode = "any" if "any" in i.mods else "all"
    operands = f"{w.use(a, KIND[type_of(i)])}, {w.use(mask, 'u4')}"
    _define_with_predicate(w, d, f"m.match({w.instruction(i)}, {mode!r}, {operands}, L)")


@opcode("redux")
def redux(w: Writer, i: Instr):
    """.sync add, min, max, and, or, xor on s32, u32, b32"""
    check(i, "sync", "add", "min", "max", "and", "or", "xor")
    op = next(m for m in i.mods if m in ("add", "min", "max", "and", "or", "xor"))
    k = KIND[type_of(i)]
    w.define(
        i.args[0],
        k,
        f"m.redux({w.instruction(i)}, {op!r}, {w.use(i.args[1], k)}, {w.use(i.args[2], 'u4')}, L)",
    )


@opcode("elect")
def elect(w: Writer, i: Instr):
    """.sync: the lowest active thread of the mask"""
    check(i, "sync")
    value = w.temp(f"m.elect({w.instruction(i)}, {w.use(i.args[1], 'u4')}, L)")
    d = i.args[0]
    w.define(d.first, "u4", f"{value}[0]")
    w.define(d.second, "p", f"{value}[1]")


# -- asynchronous copies and barriers in memory -------------------------------------------------------------
@opcode("cp")
def async_copy(w: Writer, i: Instr):
    """.async ca and cg of 4, 8, 16 bytes with zero fill; commit_group, wait_group, wait_all, mbarrier.arrive;
    data lands at the wait. .async.bulk between global and shared memory, .async.bulk.tensor of 1 to 5
    dimensions in tile mode (swizzles, fill, multicast), cp.reduce of both into global memory; prefetch has no
    effect"""
    if "bulk" in i.mods or "reduce" in i.mods or "tensor" in i.mods:
        bulk_copy(w, i)
    elif "commit_group" in i.mods:
        w.emit(f"m.copy_commit({w.instruction(i)}, {w.multiply_adds}, L)")
    elif "wait_group" in i.mods:
        w.emit(f"m.copy_wait({w.instruction(i)}, {int(i.args[0].value)}, {w.multiply_adds}, L)")
    elif "wait_all" in i.mods:
        w.emit(f"m.copy_wait({w.instruction(i)}, -1, {w.multiply_adds}, L)")
    elif "mbarrier" in i.mods:
        a = w.code.access(i, "A", "shared", 8)
        w.emit(f"m.copy_wait({w.instruction(i)}, -1, {w.multiply_adds}, L)")
        if "noinc" in i.mods:
            w.emit(f"m.mbarrier_arrive(A{a.number}, {shared_place(w, i, i.args[0])}, 1, 0, False, L)")
    else:
        check(i, "async", *_HINTS, *_SPACE_WORDS, "L2::cache_hint")
        size = int(i.args[2].value)
        read = w.code.access(i, "R", "global", min(size, 8), max(size // 8, 1))
        write = w.code.access(i, "W", "shared", min(size, 8), max(size // 8, 1))
        rest = i.args[3:-1] if "L2::cache_hint" in i.mods else i.args[3:]
        extra = "None"
        if rest:
            is_predicate = isinstance(rest[0], Reg) and w.width(rest[0].name) == 0
            extra = w.use(rest[0], "p" if is_predicate else "u4")
        source, target = w.address(i.args[1]), w.address(i.args[0])
        places = f"A{read.number}, A{write.number}, {target}, {source}"
        w.emit(f"m.copy_async({places}, {extra}, {w.multiply_adds}, L)")


# -- tensor cores -------------------------------------------------------------------------------------------
@opcode("mma")
def mma(w: Writer, i: Instr):
    """.sync row.col: m16n8k16 and m16n8k8 (bf16, f16 with f32 or f16 sums), m16n8k8 and m16n8k4 (tf32),
    m8n8k4 f64"""
    check(i, "sync", "aligned", "row", "col", "m16n8k16", "m16n8k8", "m16n8k4", "m8n8k4")
    shape = next(m for m in i.mods if m.startswith("m"))
    types = [m for m in i.mods if m in WIDTH]
    if not mma_supported(shape, types) or "row" not in i.mods:
        raise UnsupportedInstruction(i)
    rows, columns, depth = sizes(shape)
    d, a, b, c = (x.items if isinstance(x, Vec) else (x,) for x in i.args)
    size = "u8" if types[0] == "f64" else "u4"
    w.flops += 2 * rows * columns * depth // 32
    w.multiply_adds += rows * columns * depth // 32
    lists = ", ".join("[" + ", ".join(w.use(x, size) for x in part) + "]" for part in (a, b, c))
    value = w.temp(f"m.mma({w.instruction(i)}, {shape!r}, {tuple(types)!r}, {lists}, L)")
    for k, target in enumerate(d):
        w.define(target, size, f"{value}[{k}]")


@opcode("ldmatrix")
def ldmatrix(w: Writer, i: Instr):
    """.sync m8n8 .x1 .x2 .x4, .trans, shared, b16"""
    check(i, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    d, mem = i.args
    targets = d.items if isinstance(d, Vec) else (d,)
    a = w.code.access(i, "R", "shared", 8, 2)
    value = w.temp(f"m.ldmatrix(A{a.number}, {w.address(mem)}, {len(targets)}, {'trans' in i.mods}, L)")
    for k, target in enumerate(targets):
        w.define(target, "u4", f"{value}[{k}]")


@opcode("stmatrix")
def stmatrix(w: Writer, i: Instr):
    """.sync m8n8 .x1 .x2 .x4, .trans, shared, b16"""
    check(i, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    mem, source = i.args
    values = source.items if isinstance(source, Vec) else (source,)
    a = w.code.access(i, "W", "shared", 8, 2)
    parts = ", ".join(w.use(v, "u4") for v in values)
    w.emit(f"m.stmatrix(A{a.number}, {w.address(mem)}, [{parts}], {'trans' in i.mods}, L)")


# -- clusters and hints -------------------------------------------------------------------------------------
@opcode("mapa")
def mapa(w: Writer, i: Instr):
    """the address of a shared variable in another block of the cluster (shared::cluster window)"""
    check(i, "shared::cluster")
    k = f"u{WIDTH[type_of(i)]}"
    d, a, rank = i.args
    place = w.use(a, k)
    if "shared::cluster" in i.mods:
        low = w.code.constant(k, 0xFFFFFF)
        w.define(
            d,
            k,
            f"({place} & {low}) | (({w.use(rank, 'u4')} + u4(1)).astype({k}) << {w.code.constant(k, 24)})",
        )
        return
    keep = w.code.constant(k, ~0xFF000000 & (1 << 64) - 1)
    w.define(
        d, k, f"({place} & {keep}) | (({w.use(rank, 'u4')} + u4(1)).astype({k}) << {w.code.constant(k, 24)})"
    )


@opcode("nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent", "discard", "applypriority")
def hint(w: Writer, i: Instr):
    """no effect on results"""


@opcode("tcgen05", "wmma", "st_async", "tensormap", "multimem")
def never(w: Writer, i: Instr):
    """not simulated: a clear error"""
    raise UnsupportedInstruction(i, "tensor memory, multimem and changes of tensor maps are not simulated")
