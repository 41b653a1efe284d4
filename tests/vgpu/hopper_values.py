"""Measure a Hopper GPU's results for wgmma, TMA, bulk copies, mbarriers and matrix moves: kernels, data, runner.

`python tests/vgpu/hopper_values.py --out FILE` runs every kernel of `CASES` on the first NVIDIA GPU, through the CUDA
driver (with only Python's standard library), and writes the SHA-256 of each output. `data/hopper_values.json` is such a
file; a test compares the virtual GPU with it. Matrices contain small integers, so that sums are exact and the result
depends on every layout.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import struct
import zlib
from dataclasses import dataclass, field

from edge_values import Device, measure

THREADS = 128
INPUT_WORDS = 12288  # 32-bit words of input; matrix kernels copy them to shared memory
#: CUtensorMapDataType by name, and the bytes of an element.
TYPES = {"u8": (0, 1), "u16": (1, 2), "u32": (2, 4), "s32": (3, 4), "u64": (4, 8), "f16": (6, 2)}
TYPES |= {"f32": (7, 4), "f64": (8, 8), "bf16": (9, 2)}
FORMATS = {"bf16": lambda v: struct.unpack("<I", struct.pack("<f", v))[0] >> 16,
           "f16": lambda v: struct.unpack("<H", struct.pack("<e", v))[0],
           "tf32": lambda v: struct.unpack("<I", struct.pack("<f", v))[0]}  # fmt: skip


def make_small_numbers(count: int) -> list[int]:
    """Return numbers from -3 to 3, the same on every machine."""
    state, out = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        out.append((state >> 16) % 7 - 3)
    return out


def make_data(kind: str) -> bytes:
    """Return the input array: INPUT_WORDS 32-bit words of small numbers of type `kind`."""
    if kind in ("f16", "bf16"):
        return b"".join(FORMATS[kind](v).to_bytes(2, "little") for v in make_small_numbers(2 * INPUT_WORDS))
    if kind in ("tf32", "f32"):
        return b"".join(FORMATS["tf32"](v).to_bytes(4, "little") for v in make_small_numbers(INPUT_WORDS))
    if kind == "f64":
        return b"".join(struct.pack("<d", v) for v in make_small_numbers(INPUT_WORDS // 2))
    return b"".join(((v * 0x01234567 + 5 * k) & 0xFFFFFFFF).to_bytes(4, "little")
                    for k, v in enumerate(make_small_numbers(INPUT_WORDS)))  # fmt: skip


@dataclass(frozen=True)
class Map:
    """A tensor map of the input or, for stores, the output; dimensions are innermost first."""

    kind: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, for all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int = 0
    fill: int = 0
    on_output: bool = False


@dataclass(frozen=True)
class Case:
    """A kernel with blocks of 128 threads and clusters of `blocks`: body, input type, output size in words."""

    name: str
    body: str
    kind: str
    words: int
    map: Map | None = None
    shared: int = 4 * INPUT_WORDS
    blocks: int = 1
    registers: dict[str, int] = field(default_factory=dict)

    def ptx(self) -> str:
        """Return the kernel. %d0 is the tensor map, %d1 the input, %d2 the output, %t the thread, %s the
        shared memory."""
        regs = {"%r": 256, "%q": 160, "%d": 16, "%p": 8} | self.registers
        types = {"%r": "b32", "%q": "b32", "%d": "b64", "%p": "pred"}
        lines = [f".reg .{types[n]} {n}<{count}>;" for n, count in regs.items()]
        lines += [".reg .b32 %t, %s, %bar;", f".shared .align 1024 .b8 s[{self.shared}];"]
        if self.shared < 4 * INPUT_WORDS:
            lines += [".shared .align 8 .b8 bar[32];", "mov.b32 %bar, bar;"]
        lines += ["mov.u32 %t, %tid.x;", "mov.b32 %s, s;", "mov.b64 %d0, map;", "cvta.param.u64 %d0, %d0;",
                  "ld.param.u64 %d1, [in];", "ld.param.u64 %d2, [out];", "setp.eq.u32 %p0, %t, 0;"]  # fmt: skip
        body = "\n".join([*lines, self.body, "ret;"])
        cluster = f".explicitcluster\n.reqnctapercluster {self.blocks}, 1, 1\n" if self.blocks > 1 else ""
        return (
            ".version 8.5\n.target sm_90a\n.address_size 64\n"
            ".visible .entry k(.param .align 64 .b8 map[128], .param .u64 in, .param .u64 out)\n"
            f".maxntid {THREADS}\n{cluster}{{\n{body}\n}}\n"
        )

    def output(self) -> bytes:
        """Return the output before the kernel runs."""
        full = make_data(self.kind) if self.map and self.map.on_output else b"\xa5" * 4 * self.words
        return full[: 4 * self.words].ljust(4 * self.words, b"\xa5")


def make_loop(count: int, step: int, label: str, text: str) -> str:
    """Return PTX that runs `text` for %r0 = 0, step, ... below count."""
    return f"mov.u32 %r0, 0;\n{label}: {text}\nadd.u32 %r0, %r0, {step};\nsetp.lt.u32 %p7, %r0, {count};\n@%p7 bra {label};"


def fill_shared(words: int, value: str = "") -> str:
    """Return PTX that fills shared memory with the input or a value and executes a proxy fence."""
    load = f"mov.b32 %r1, {value};" if value else "mad.wide.u32 %d4, %r2, 4, %d1; ld.global.b32 %r1, [%d4];"
    text = f"add.u32 %r2, %r0, %t; {load} mad.lo.u32 %r3, %r2, 4, %s; st.shared.b32 [%r3], %r1;"
    return make_loop(words, THREADS, "FILL", text) + "\nfence.proxy.async; bar.sync 0;"


def dump_shared(words: int) -> str:
    """Return PTX that copies shared memory to the output, a separate part for each block of a cluster."""
    text = f"""mov.u32 %r4, %ctaid.x; mad.lo.u32 %r4, %r4, {words}, %r0; add.u32 %r4, %r4, %t; mad.wide.u32 %d4, %r4, 4, %d2;
    add.u32 %r2, %r0, %t; mad.lo.u32 %r3, %r2, 4, %s; ld.shared.b32 %r1, [%r3]; st.global.b32 [%d4], %r1;"""
    return make_loop(words, THREADS, "DUMP", text)


# -- matrix products ----------------------------------------------------------------------------------------
def make_descriptor(start: int, leading: int, stride: int, mode: int) -> str:
    """Return PTX that writes a matrix descriptor to %d5; start, leading and stride are in bytes."""
    rest = (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62
    return f"""add.u32 %r5, %s, {start}; shr.u32 %r5, %r5, 4; and.b32 %r5, %r5, 0x3FFF; cvt.u64.u32 %d5, %r5;
    or.b64 %d5, %d5, {rest:#x};"""


SPAN = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a matrix row, by the descriptor's swizzle mode
B_START = 16384


def choose_strides(across: int, mode: int) -> tuple[int, int]:
    """Return (leading, stride) in bytes: dense, with a gap if the layout allows it."""
    span = SPAN[mode]
    if across:
        return (4096, 8 * span) if mode else (128, 2048)
    return (1024, 128) if not mode else (16, 8 * span)


def make_product(
    kind: str, n: int, sums: str = "f32", a_mode: int = 1, b_mode: int = 1, across: tuple[int, int] = (0, 0),
    registers: bool = False, accumulate: bool = False, signs: tuple[int, int] = (1, 1),
) -> Case:  # fmt: skip
    """Return a case with one wgmma.mma_async; `accumulate` adds it to the input."""
    depth = 8 if kind == "tf32" else 16
    count = n // 2 if sums == "f32" else n // 4
    lines = [fill_shared(INPUT_WORDS)]
    lines += [make_descriptor(0, *choose_strides(across[0], a_mode), a_mode), "mov.b64 %d6, %d5;"]
    lines += [make_descriptor(B_START, *choose_strides(across[1], b_mode), b_mode), "mov.b64 %d7, %d5;"]
    first = "%d6"
    if registers:
        lines.append("mad.wide.u32 %d8, %t, 16, %d1;")
        lines.append("ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d8];")
        first = "{%r10, %r11, %r12, %r13}"
    for k in range(count):
        if not accumulate:
            lines.append(f"mov.b32 %q{k}, 0;")
        elif sums == "f32":  # -3 to 3
            lines.append(f"mad.lo.u32 %r6, %t, {count}, {k}; rem.u32 %r6, %r6, 7; sub.s32 %r6, %r6, 3;")
            lines.append(f"cvt.rn.f32.s32 %q{k}, %r6;")
        else:
            lines.append(f"mad.lo.u32 %r6, %t, {count}, {k}; mad.wide.u32 %d8, %r6, 4, %d1;")
            lines.append(f"ld.global.b32 %q{k}, [%d8];")
    all_sums = "{" + ", ".join(f"%q{k}" for k in range(count)) + "}"
    flags = f"{signs[0]}, {signs[1]}"
    if kind != "tf32":
        flags += f", {across[1]}" if registers else f", {across[0]}, {across[1]}"
    lines += [
        f"setp.ne.b32 %p1, {int(accumulate)}, 0;", "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{kind}.{kind} {all_sums}, {first}, %d7, %p1, {flags};",
        "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
        f"mad.lo.u32 %r6, %t, {count}, 0; mad.wide.u32 %d8, %r6, 4, %d2;",
    ]  # fmt: skip
    lines += [f"st.global.b32 [%d8+{4 * k}], %q{k};" for k in range(count)]
    a = "registers" if registers else f"mode {a_mode}{' across' if across[0] else ''}"
    b = f"mode {b_mode}{' across' if across[1] else ''}"
    name = (
        f"wgmma n{n} {sums} {kind}, a {a}, b {b}{', adds' if accumulate else ''}, signs {signs[0]} {signs[1]}"
    )
    return Case(name, "\n".join(lines), kind, count * THREADS)


def make_products() -> list[Case]:
    out = []
    for a_mode, b_mode in itertools.product(range(4), repeat=2):
        for across in ((0, 0), (1, 1)):
            out.append(make_product("bf16", 64, a_mode=a_mode, b_mode=b_mode, across=across))
    out += [make_product("bf16", 128, across=across) for across in ((0, 1), (1, 0))]
    out += [make_product("bf16", n, accumulate=True) for n in (8, 24, 96, 192, 256)]
    out += [make_product("f16", 64, sums, accumulate=True, signs=signs)
            for sums in ("f32", "f16") for signs in ((1, 1), (-1, 1), (1, -1), (-1, -1))]  # fmt: skip
    out += [make_product("tf32", 32, a_mode=mode, b_mode=3 - mode) for mode in range(4)]
    out += [make_product(kind, 40, registers=True, accumulate=True) for kind in ("bf16", "f16", "tf32")]
    out += [make_product("f16", 64, "f16", registers=True, across=(0, 1), signs=(-1, 1))]
    return out


# -- tensor maps --------------------------------------------------------------------------------------------
WAIT = """W{n}: mbarrier.try_wait.parity.shared.b64 %p2, [%bar], {parity}; @!%p2 bra W{n};"""
READY = "@%p0 mbarrier.init.shared.b64 [%bar], 1; fence.mbarrier_init.release.cluster;"
SHARED_WORDS = 4096  # words of shared memory that these cases read


def make_box_load(name: str, map: Map, corner: tuple[int, ...], blocks: int = 1) -> Case:
    """Return a case that loads a TMA tile into filled shared memory; in a cluster the first block multicasts it."""
    nbytes = TYPES[map.kind][1]
    for n in map.box:
        nbytes *= n
    coordinates = ", ".join(f"%r{10 + k}" for k in range(len(corner)))
    multicast, mask = (".multicast::cluster", ", %h0") if blocks > 1 else ("", "")
    lines = [fill_shared(SHARED_WORDS, "0xA5A5A5A5"), READY]
    lines += ["barrier.cluster.arrive; barrier.cluster.wait;" if blocks > 1 else "bar.sync 0;"]
    lines += [f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %d4, [%bar], {nbytes};"]
    if blocks > 1:
        lines += ["mov.u32 %r9, %ctaid.x; setp.eq.u32 %p3, %r9, 0; and.pred %p0, %p0, %p3;"]
        lines += [f"{{ .reg .b16 %h<2>; mov.b16 %h0, {(1 << blocks) - 1};"]
    lines += [f"mov.b32 %r{10 + k}, {v};" for k, v in enumerate(corner)]
    lines.append(
        f"@%p0 cp.async.bulk.tensor.{len(corner)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast}"
        f" [%s], [%d0, {{{coordinates}}}], [%bar]{mask};" + (" }" if blocks > 1 else "")
    )
    lines += [WAIT.format(n=0, parity=0), dump_shared(SHARED_WORDS)]
    if blocks > 1:
        lines.append("barrier.cluster.arrive; barrier.cluster.wait;")
    kind = {"u8": "u32", "u16": "u32", "s32": "u32", "u64": "u32"}.get(map.kind, map.kind)
    return Case(name, "\n".join(lines), kind, SHARED_WORDS * blocks, map, 4 * SHARED_WORDS, blocks)


def make_box_store(name: str, map: Map, corner: tuple[int, ...], op: str = "") -> Case:
    """Return a case that stores or reduces a tile of shared memory to a tensor with the same numbers."""
    coordinates = ", ".join(f"%r{10 + k}" for k in range(len(corner)))
    lines = [fill_shared(SHARED_WORDS)] + [f"mov.b32 %r{10 + k}, {v};" for k, v in enumerate(corner)]
    opcode = f"cp{'.reduce' if op else ''}.async.bulk.tensor.{len(corner)}d.global.shared::cta{'.' + op if op else ''}"
    lines += [
        f"@%p0 {opcode}.tile.bulk_group [%d0, {{{coordinates}}}], [%s];",
        "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;",
    ]  # fmt: skip
    kind = {"u8": "u32", "u16": "u32", "s32": "u32", "u64": "u32"}.get(map.kind, map.kind)
    return Case(name, "\n".join(lines), kind, INPUT_WORDS, map, 4 * SHARED_WORDS)


def make_boxes() -> list[Case]:
    square = ((100, 40), (224,), (64, 16))
    out = []
    for swizzle, width in ((0, 64), (1, 16), (2, 32), (3, 64), (3, 32), (2, 16), (3, 8)):
        map_ = Map("bf16", (100, 40), (224,), (width, 16), swizzle)
        out.append(make_box_load(f"load swizzle {swizzle}, {2 * width} bytes a row", map_, (24, 3)))
    for corner in ((-8, -3), (80, 30), (-200, 0), (8, 39)):
        out.append(make_box_load(f"load at {corner}", Map("f16", *square, 3), corner))
    for kind in ("f16", "bf16", "f32", "f64"):
        size = TYPES[kind][1]
        map_ = Map(kind, (20, 10), (32 * size,), (16, 8), 0, 1)
        out.append(make_box_load(f"load {kind}, NaN outside", map_, (8, -2)))
    for kind in ("u8", "u16", "u32", "s32", "u64"):
        size = TYPES[kind][1]
        out.append(make_box_load(f"load {kind}", Map(kind, (50, 9), (64 * size,), (16, 4)), (32, 7)))
        out.append(make_box_load(f"load {kind} at 37", Map(kind, (50, 9), (64 * size,), (16, 4)), (37, 7)))
    out.append(make_box_load("load 1d", Map("u32", (70,), (), (32,)), (50,)))
    out.append(make_box_load("load 3d", Map("u16", (20, 7, 6), (48, 480), (16, 4, 3), 1), (8, 5, 4)))
    out.append(
        make_box_load("load 4d", Map("u16", (20, 5, 4, 6), (48, 256, 1040), (8, 3, 2, 3)), (16, 3, -1, 4))
    )
    strides = (32, 112, 352, 1056)
    out.append(
        make_box_load("load 5d", Map("u32", (7, 3, 3, 3, 6), strides, (4, 2, 2, 2, 3)), (4, 1, 2, -1, 2))
    )
    out.append(make_box_load("load multicast", Map("bf16", *square, 3), (8, 2), 2))
    for swizzle, width in ((0, 64), (1, 16), (2, 32), (3, 64)):
        map_ = Map("bf16", (100, 40), (224,), (width, 16), swizzle, on_output=True)
        out.append(make_box_store(f"store swizzle {swizzle}", map_, (72, 33)))
    box = Map("u32", (30, 20), (144,), (16, 8), on_output=True)
    out.append(make_box_store("store before the start", box, (-5, -2)))
    for kind in ("u32", "s32", "u64"):
        only_integers = ("inc", "dec", "and", "or", "xor") if kind == "u32" else ()
        ops = ("add", "min", "max", *only_integers)
        for op in ops[:1] if kind == "u64" and "min" not in ops else ops:
            map_ = Map(kind, (24, 20), (32 * TYPES[kind][1],), (16, 8), on_output=True)
            out.append(make_box_store(f"reduce {op} {kind}", map_, (12, 15), op))
    for kind in ("f16", "bf16", "f32"):
        for op in ("add",) if kind == "f32" else ("add", "min", "max"):
            map_ = Map(kind, (24, 20), (32 * TYPES[kind][1],), (16, 8), on_output=True)
            out.append(make_box_store(f"reduce {op} {kind}", map_, (12, 15), op))
    return out


# -- bulk copies, barriers, matrix moves ---------------------------------------------------------------------
def make_bulk_copies() -> list[Case]:
    lines = [fill_shared(SHARED_WORDS, "0xA5A5A5A5"), READY, "bar.sync 0;"]
    lines += ["@!%p0 bra W0; mbarrier.arrive.expect_tx.shared.b64 %d4, [%bar], 144; add.u32 %r5, %s, 48;"]
    lines += ["add.u64 %d5, %d1, 32; mov.u32 %r6, 96;"]
    lines += ["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d5], %r6, [%bar];"]
    lines += ["add.u32 %r5, %s, 1024; add.u32 %r6, %s, 256;"]
    lines += [
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r6], 48, [%bar];"
    ]
    lines += [WAIT.format(n=0, parity=0), dump_shared(SHARED_WORDS)]
    out = [
        Case("bulk copies into shared memory", "\n".join(lines), "u32", SHARED_WORDS, None, 4 * SHARED_WORDS)
    ]
    reductions = [("", ""), ("add", "u32"), ("min", "s32"), ("add", "u64"), ("max", "u64"), ("xor", "b32"),
                  ("inc", "u32"), ("add", "f32"), ("add", "f64"), ("add.noftz", "f16"), ("min", "bf16")]  # fmt: skip
    for op, kind in reductions:
        opcode = f"cp{'.reduce' if op else ''}.async.bulk.global.shared::cta.bulk_group{f'.{op}.{kind}' if op else ''}"
        lines = [fill_shared(SHARED_WORDS), "add.u64 %d5, %d2, 64; add.u32 %r5, %s, 128;"]
        lines += [
            f"@%p0 {opcode} [%d5], [%r5], 208;",
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        ]
        data_in = kind if kind in TYPES and kind[0] in "fb" and kind != "b32" else "u32"
        map_ = Map(data_in if data_in in TYPES else "u32", (64,), (), (16,), on_output=True)
        out.append(Case(f"bulk {op} {kind}".strip(), "\n".join(lines), data_in, 1024, map_, 4 * SHARED_WORDS))
    return out


def make_barriers() -> list[Case]:
    """Return a case in which one thread operates an mbarrier and records tests and tokens."""
    steps = [
        "mbarrier.init.shared.b64 [%bar], 3;", "test 0", "test 1",
        "mbarrier.arrive.shared.b64 %d5, [%bar];", "pending %d5",
        "mbarrier.arrive_drop.shared.b64 %d6, [%bar];", "pending %d6", "test 0",
        "mbarrier.arrive.expect_tx.shared.b64 %d7, [%bar], 64;", "pending %d7", "test 0", "test 1",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 48;", "test 0",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 16;", "test 0", "test 1", "state %d5", "state %d7",
        "mbarrier.arrive.noComplete.shared.b64 %d8, [%bar], 1;", "pending %d8", "test 1",
        "mbarrier.arrive.shared.b64 %d9, [%bar];", "pending %d9", "test 1", "test 0", "state %d9", "state %d5",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 32;",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 32;", "test 0",
        "mbarrier.arrive.shared.b64 %d10, [%bar], 2;", "pending %d10", "test 0", "state %d10",
    ]  # fmt: skip
    lines, num_results = ["@!%p0 bra END;"], 0
    for step in steps:
        word, _, rest = step.partition(" ")
        if word == "test":
            lines.append(
                f"mbarrier.test_wait.parity.shared.b64 %p1, [%bar], {rest}; selp.b32 %r1, 1, 0, %p1;"
            )
        elif word == "state":
            lines.append(f"mbarrier.test_wait.shared.b64 %p1, [%bar], {rest}; selp.b32 %r1, 1, 0, %p1;")
        elif word == "pending":
            lines.append(f"mbarrier.pending_count.b64 %r1, {rest};")
        else:
            lines.append(step)
            continue
        lines.append(f"st.global.b32 [%d2+{4 * num_results}], %r1;")
        num_results += 1
    lines.append("END:")
    return [Case("mbarrier", "\n".join(lines), "u32", num_results, None, 1024)]


def make_matrix_moves() -> list[Case]:
    out = []
    for number, trans in itertools.product((1, 2, 4), ("", ".trans")):
        registers = "{" + ", ".join(f"%r{20 + k}" for k in range(number)) + "}"
        head = [
            fill_shared(SHARED_WORDS),
            "and.b32 %r5, %t, 31; mad.lo.u32 %r5, %r5, 48, %s; add.u32 %r6, %r5, 4096;",
        ]
        head += [f"ldmatrix.sync.aligned.m8n8.x{number}{trans}.shared.b16 {registers}, [%r5];"]
        head += [f"mov.b32 %r{20 + k}, %r{20 + k};" for k in range(number)]
        store = f"setp.lt.u32 %p1, %t, 32; @!%p1 bra SKIP; stmatrix.sync.aligned.m8n8.x{number}.shared.b16 [%r6], {registers};"
        back = f"setp.lt.u32 %p1, %t, 32; @!%p1 bra SKIP; stmatrix.sync.aligned.m8n8.x{number}.trans.shared.b16 [%r6], {registers};"
        for name, text in (("stmatrix", store), ("stmatrix.trans", back)):
            body = "\n".join([*head, text, "SKIP: bar.sync 0;", dump_shared(SHARED_WORDS)])
            out.append(
                Case(f"ldmatrix.x{number}{trans}, {name}", body, "u32", SHARED_WORDS, None, 4 * SHARED_WORDS)
            )
    return out


CASES = [*make_products(), *make_boxes(), *make_bulk_copies(), *make_barriers(), *make_matrix_moves()]


def compute_digest() -> int:
    """Return a checksum of all kernels and data; results are comparable only if it is equal."""
    total = 0
    for case in CASES:
        total = zlib.crc32(
            b"".join([case.ptx().encode(), repr(case.map).encode(), make_data(case.kind)]), total
        )
    return total


# -- measurement --------------------------------------------------------------------------------------------
def encode_map(device: Device, case: Case, buffers) -> bytes:
    """Return the tensor map that the driver encodes."""
    if case.map is None or (not case.map.strides and len(case.map.dims) > 1):
        return bytes(128)
    m, rank = case.map, len(case.map.dims)
    raw = ctypes.create_string_buffer(128 + 64)
    corner = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
    device(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(corner), TYPES[m.kind][0], ctypes.c_uint32(rank),
        ctypes.c_void_p(buffers[1 if m.on_output else 0].value), (ctypes.c_uint64 * rank)(*m.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*m.strides), (ctypes.c_uint32 * rank)(*m.box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, m.swizzle, 0, m.fill,
    )  # fmt: skip
    return ctypes.string_at(corner, 128)


def run(device: Device, case: Case) -> str:
    """Return the SHA-256 of the kernel's output; raise DriverError if a call fails."""
    data = [make_data(case.kind), case.output()]
    out = device.run(
        case.ptx(), case.blocks, THREADS, data, 1, lambda device, buffers: encode_map(device, case, buffers)
    )
    return hashlib.sha256(out).hexdigest()


if __name__ == "__main__":
    measure(__doc__, CASES, compute_digest(), run)
