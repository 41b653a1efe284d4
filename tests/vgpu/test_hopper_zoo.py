"""A pipelined Hopper GEMM in PTX, and variants with typical bugs.

One thread loads tiles of both factors with TMA, two stages ahead; a warpgroup multiplies them and releases the stages; a
TMA store writes the sums from shared memory. The correct kernel is compared with float64 and has no finding in any order
of the blocks; each bug is reported.
"""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
from kernel_tools import Bench

from harness.vgpu import Checks
from harness.vgpu.engine.interpreter import executor
from harness.vgpu.errors import StepBudgetExceeded, UnsupportedInstruction
from harness.vgpu.memory import tensor_map

M, N, K = 100, 88, 296  # no multiples of the tile: 2 x 2 tiles of 64 x 64, 5 steps of 64
STEPS = 5
STAGE, STAGING, FULL, EMPTY = 16384, 32768, 49152, 49168  # bytes; offsets in shared memory
SHARED = 49152 + 64
SUMS = ", ".join(f"%q{k}" for k in range(32))

KERNEL = """
.version 8.5
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 extern_ptr[];
.visible .entry product(.param .align 64 .b8 amap[128], .param .align 64 .b8 bmap[128], .param .align 64 .b8 cmap[128])
.maxntid 256
.maxnreg 128
{
    .reg .pred %p<8>; .reg .b32 %r<40>, %q<32>, %t, %s, %it, %stage, %phase, %full, %empty, %row, %col; .reg .b64 %d<20>;
    mov.u32 %t, %tid.x; mov.b32 %s, extern_ptr; setp.eq.u32 %p0, %t, 0;
    mov.b64 %d0, amap; cvta.param.u64 %d0, %d0; mov.b64 %d1, bmap; cvta.param.u64 %d1, %d1;
    mov.b64 %d2, cmap; cvta.param.u64 %d2, %d2;
    mov.u32 %row, %ctaid.y; shl.b32 %row, %row, 6; mov.u32 %col, %ctaid.x; shl.b32 %col, %col, 6;
    @!%p0 bra READY;
    mbarrier.init.shared.b64 [extern_ptr+49152], 1; mbarrier.init.shared.b64 [extern_ptr+49160], 1;
    mbarrier.init.shared.b64 [extern_ptr+49168], 1; mbarrier.init.shared.b64 [extern_ptr+49176], 1;
    fence.mbarrier_init.release.cluster;
READY: bar.sync 0; mov.u32 %it, 0; setp.lt.u32 %p1, %t, 128; @!%p1 bra CONSUME;

    setmaxnreg.dec.sync.aligned.u32 40;
    @!%p0 bra END;
LOAD: and.b32 %stage, %it, 1; shr.u32 %phase, %it, 1; and.b32 %phase, %phase, 1;
    mad.lo.u32 %full, %stage, 8, %s; add.u32 %empty, %full, 49168; add.u32 %full, %full, 49152;
    xor.b32 %r1, %phase, 1;
WAIT_EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [%empty], %r1; @!%p2 bra WAIT_EMPTY;
    mbarrier.arrive.expect_tx.shared.b64 _, [%full], 16384;
    mad.lo.u32 %r2, %stage, 16384, %s; add.u32 %r3, %r2, 8192; shl.b32 %r4, %it, 6;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0, {%r4, %row}], [%full];
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d1, {%r4, %col}], [%full];
    add.u32 %it, %it, 1; setp.lt.u32 %p3, %it, 5; @%p3 bra LOAD;
    bra END;

CONSUME: setmaxnreg.inc.sync.aligned.u32 216;
    setp.eq.u32 %p4, %t, 128; mov.u32 %r20, 0;
ZEROS
STEP: and.b32 %stage, %it, 1; shr.u32 %phase, %it, 1; and.b32 %phase, %phase, 1;
    mad.lo.u32 %full, %stage, 8, %s; add.u32 %empty, %full, 49168; add.u32 %full, %full, 49152;
WAIT_FULL: mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; @!%p2 bra WAIT_FULL;
    mad.lo.u32 %r2, %stage, 16384, %s; shr.u32 %r2, %r2, 4; and.b32 %r2, %r2, 0x3FFF; cvt.u64.u32 %d3, %r2;
    or.b64 %d3, %d3, 0x4000004000010000; add.u64 %d4, %d3, 512;
    wgmma.fence.sync.aligned;
    setp.ne.u32 %p5, %r20, 0;
PRODUCTS
    wgmma.commit_group.sync.aligned;
    setp.eq.u32 %p6, %it, 0; @%p6 bra NEXT;
    wgmma.wait_group.sync.aligned 1;
    @%p4 mbarrier.arrive.shared.b64 _, [%r21];
NEXT: mov.u32 %r21, %empty; mov.u32 %r20, 1;
    add.u32 %it, %it, 1; setp.lt.u32 %p3, %it, 5; @%p3 bra STEP;
    wgmma.wait_group.sync.aligned 0;

    and.b32 %r5, %t, 127; shr.u32 %r6, %r5, 5; and.b32 %r7, %r5, 31; shr.u32 %r8, %r7, 2; and.b32 %r9, %r7, 3;
    mad.lo.u32 %r8, %r6, 16, %r8; mad.lo.u32 %r10, %r8, 256, %s; mad.lo.u32 %r10, %r9, 8, %r10;
STORES
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    @!%p4 bra END; add.u32 %r11, %s, 32768;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {%col, %row}], [%r11];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END: ret;
}
"""
ZEROS = "\n".join(f"mov.b32 %q{k}, 0;" for k in range(32))
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, %d{}, %d{}, {}, 1, 1, 0, 0;"
STEP16 = "add.u64 %d{0}, %d3, {1}; add.u64 %d{2}, %d4, {1};"
PRODUCTS = "\n".join(
    f"{STEP16.format(5, 2 * k, 6)} {PRODUCT.format(SUMS, 5, 6, '%p5' if k == 0 else '1')}" for k in range(4)
)
STORES = "\n".join(
    f"st.shared.v2.b32 [%r10+{32768 + 32 * j}], {{%q{4 * j}, %q{4 * j + 1}}};"
    f" st.shared.v2.b32 [%r10+{32768 + 2048 + 32 * j}], {{%q{4 * j + 2}, %q{4 * j + 3}}};"
    for j in range(8)
)


@pytest.fixture(autouse=True)
def short_spin_interval(monkeypatch):
    """Detect endless polls early; test_threads.py tests the default interval."""
    monkeypatch.setattr(executor, "SPIN_SAMPLE_STEPS", 2 * executor.SPIN_ROUNDS)


def make_text(edits: list[tuple[str, str]]) -> str:
    """Return the kernel's PTX after applying each edit once."""
    ptx = KERNEL.replace("ZEROS", ZEROS).replace("PRODUCTS", PRODUCTS).replace("STORES", STORES)
    ptx = re.sub(
        r", (%p5|1), 1, 1, 0, 0;", lambda m: f", {'%p5' if m[1] == '%p5' else '%p0x'}, 1, 1, 0, 0;", ptx
    )
    ptx = ptx.replace("%p0x", "%p7").replace(
        "setp.ne.u32 %p5", "setp.eq.u32 %p7, %r20, %r20; setp.ne.u32 %p5"
    )
    for old, new in edits:
        assert old in ptx, old
        ptx = ptx.replace(old, new, 1)
    return ptx


def run_edited(edits=(), **options):
    """Run the edited kernel on random inputs; return its findings and the relative error of its output."""
    bench = Bench(**options)
    bench.gpu.max_steps = 40_000
    random = np.random.default_rng(3)
    bits = [(random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for shape in ((M, K), (N, K))]  # fmt: skip
    a, b = (bench.upload(name, x) for name, x in zip("ab", bits, strict=True))
    c = bench.empty("c", (M, N))

    def encode_tiled(array, kind, width, box, swizzle):
        rows, columns = array.shape
        encoded = tensor_map.encode_tiled(
            kind, bench.address(array), [columns, rows], [columns * width], [box, 64], [1, 1],
            interleave=0, swizzle=swizzle, promotion=0, fill=0,
        )  # fmt: skip
        return encoded.encode()

    maps = [encode_tiled(a, 9, 2, 64, 3), encode_tiled(b, 9, 2, 64, 3), encode_tiled(c, 7, 4, 64, 0)]
    kernel = bench.gpu.load(make_text(list(edits))).kernels["product"]
    with contextlib.suppress(StepBudgetExceeded):
        bench.gpu.launch(kernel, (2, 2, 1), (256, 1, 1), maps, shared_bytes=SHARED)
    exact = [(x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in bits]
    expected = exact[0] @ exact[1].T
    errors = bench.errors()
    got = bench.gpu.read(bench.address(c), c.nbytes).view(np.float32).reshape(c.shape)
    return errors, np.abs(got - expected).max() / np.abs(expected).max()


WAIT_FULL = "WAIT_FULL: mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; @!%p2 bra WAIT_FULL;"
WAIT_EMPTY = "WAIT_EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [%empty], %r1; @!%p2 bra WAIT_EMPTY;"
ARRIVE = "@%p4 mbarrier.arrive.shared.b64 _, [%r21];"
WAIT_1, WAIT_0 = "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"
FENCE = "fence.proxy.async.shared::cta;"
WAIT_READ = "cp.async.bulk.wait_group.read 0;"
READ_TILE = "mad.lo.u32 %r30, %stage, 16384, %s; ld.shared.b32 %r31, [%r30];"
COMMIT = "wgmma.commit_group.sync.aligned;"
LANE_0_WAITS = ("{ .reg .pred %p8; and.b32 %r30, %t, 31; setp.ne.u32 %p8, %r30, 0; @%p8 bra GO; WAIT_FULL:"
                " mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; @!%p2 bra WAIT_FULL; GO: }")  # fmt: skip
HALVES = "and.b32 %r30, %t, 16; mov.b32 %r31, 0xFFFF; shl.b32 %r31, %r31, %r30; bar.warp.sync %r31;"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {%col, %row}], [%r11];"

CORRECT_VARIANTS = {
    "unchanged": [],
    "proxy fence by the storing thread after the barrier": [
        (FENCE, ""), ("@!%p4 bra END; add.u32 %r11", f"{FENCE} @!%p4 bra END; add.u32 %r11")],
    "one thread waits for the copies before a barrier": [
        (WAIT_FULL, "WAIT_FULL: @!%p4 bra GO; mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; "
                    "@!%p2 bra WAIT_FULL; GO: bar.sync 2, 128;")],
    "one lane per warp waits for the copies before a warp barrier": [
        (WAIT_FULL, f"{LANE_0_WAITS} bar.warp.sync -1;")],
    "wait after every product": [
        (WAIT_1, WAIT_0)],
    "sums cleared after the fence and overwritten (other output)": [
        ("setp.ne.u32 %p5, %r20, 0;", "setp.ne.u32 %p5, 0, 0; mov.b32 %q3, 0;"), ("@%p6 bra NEXT;", f"{WAIT_0} @%p6 bra NEXT;")],
    "consumers read a tile before the product": [(WAIT_FULL, f"{WAIT_FULL} {READ_TILE}")],
    "staging reused after the wait (other output)": [
        (WAIT_READ, f"{WAIT_READ} st.shared.b32 [%r11], %t;")],
}  # fmt: skip

# name: (edits, kind of finding, part of its message)
BUGS = {
    "missing proxy fence before the store": ([(FENCE, "")], "missing proxy fence", "dynamic shared memory"),
    "proxy fence too early": (
        [(FENCE, ""), (WAIT_0, f"{WAIT_0} {FENCE}")], "missing proxy fence", "is read here by the async proxy"),
    "missing barrier before the store": ([("bar.sync 1, 128;", "")], "unordered store", "after the store by thread"),
    "sums used before the last wait": ([(WAIT_0, WAIT_1)], "accumulator in use", "has not waited for"),
    "missing waits for the sums": ([(WAIT_0, ""), (WAIT_1, "")], "accumulator in use", "has not waited for"),
    "stage released after too few waits": (
        [(WAIT_1, "wgmma.wait_group.sync.aligned 2;")], "stage reused early", "while a wgmma may still read it"),
    "stage released before the product is complete": (
        [(COMMIT, f"{COMMIT} @%p4 mbarrier.arrive.shared.b64 _, [%empty];"), (ARRIVE, "")],
        "stage reused early", "while a wgmma may still read it"),
    "producer does not wait": ([(WAIT_EMPTY, "")], "stage reused early", "is copied to"),
    "consumers do not wait for the copies": ([(WAIT_FULL, "")], "unfinished copy", "has not waited for the copy"),
    "consumers wait with the wrong parity": (
        [(WAIT_FULL, f"xor.b32 %phase, %phase, 1; {WAIT_FULL}")], "hang", "for the end of a phase of parity 1"),
    "only one consumer waits for the copies": (
        [(WAIT_FULL, "WAIT_FULL: @!%p4 bra GO; mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; "
                     "@!%p2 bra WAIT_FULL; GO:")], "unfinished copy", "has not waited for the copy"),
    "one lane per warp waits, followed by a barrier of half a warp": (
        [(WAIT_FULL, f"{LANE_0_WAITS} {HALVES}")], "unfinished copy", "has not waited for the copy"),
    "producer's first parity off by one": (
        [("xor.b32 %r1, %phase, 1;", "mov.b32 %r1, %phase;")], "hang", "lacks 1 of 1 arrivals"),
    "half of the bytes expected": (
        [("[%full], 16384;", "[%full], 8192;")], "unfinished copy", "has not waited for the copy"),
    "too many bytes expected": (
        [("[%full], 16384;", "[%full], 16400;")], "hang", "16 expected bytes of copies"),
    "too few bytes expected": (
        [("[%full], 16384;", "[%full], 16368;")], "hang", "copies have written 16 bytes more"),
    "stages never released": ([(ARRIVE, "")], "hang", "dynamic shared memory[6146]"),
    "mbarrier expects too many arrivals": (
        [("mbarrier.init.shared.b64 [extern_ptr+49168], 1;", "mbarrier.init.shared.b64 [extern_ptr+49168], 2;")],
        "hang", "lacks 1 of 2 arrivals"),
    "mbarrier not initialised": (
        [("mbarrier.init.shared.b64 [extern_ptr+49160], 1;", "")], "mbarrier not initialised", "has not been initialised"),
    "missing wgmma fence": ([("wgmma.fence.sync.aligned;", "")], "missing wgmma fence", "no wgmma.fence comes before it"),
    "sums cleared after the fence": (
        [("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; @%p6 mov.b32 %q3, 0;")],
        "missing wgmma fence", "q3 has been written since"),
    "block ends before its store has read": ([(WAIT_READ, "")], "bulk store left behind", "freed when its block ends"),
    "store not committed": (
        [("cp.async.bulk.commit_group;", "")], "bulk store left behind", "freed when its block ends"),
    "staging reused too early": (
        [(WAIT_READ, f"st.shared.b32 [%r11], %t; {WAIT_READ}")], "operand overwritten", "while a bulk store may still read it"),
    "operand in shared memory overwritten before the wait": (
        [(COMMIT, f"{COMMIT} mad.lo.u32 %r30, %stage, 16384, %s; @%p4 st.shared.b32 [%r30], %t;")],
        "operand overwritten", "while a wgmma may still read it"),
    "operand in a register overwritten before the wait": (
        [(COMMIT, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" + SUMS + "}, {%r22, %r23, %r24, %r25}, %d4,"
                  f" %p7, 1, 1, 0; {COMMIT} mov.b32 %r23, 0;"),
         ("setp.eq.u32 %p4, %t, 128;", "setp.eq.u32 %p4, %t, 128; mov.b32 %r22, 0; mov.b32 %r23, 0; mov.b32 %r24, 0;"
                                       " mov.b32 %r25, 0;")],
        "operand overwritten", "r23 holds a factor"),
    "more registers than the block has": (
        [("setmaxnreg.inc.sync.aligned.u32 216;", "setmaxnreg.inc.sync.aligned.u32 224;")],
        "register budget", "wait forever"),
    "sums need more registers than available": (
        [("setmaxnreg.inc.sync.aligned.u32 216;", "setmaxnreg.dec.sync.aligned.u32 24;")],
        "register budget", "the product needs 32 registers"),
    "load of a tile without an arrival": (
        [("@!%p0 bra END;", "mov.b32 %r30, 0; setp.ge.u32 %p4, %t, 64; @%p4 bra LOOK; @!%p0 bra END;"),
         ("\nCONSUME:", """\nLOOK: and.b32 %stage, %it, 1; shr.u32 %phase, %it, 1; and.b32 %phase, %phase, 1;
             mad.lo.u32 %full, %stage, 8, %s; add.u32 %full, %full, 49152;
             SPY: mbarrier.try_wait.parity.shared.b64 %p2, [%full], %phase; @!%p2 bra SPY;
             mad.lo.u32 %r30, %stage, 16384, %s; ld.shared.b32 %r31, [%r30]; add.u32 %it, %it, 1;
             setp.lt.u32 %p3, %it, 2; @%p3 bra LOOK; bra END;\nCONSUME:""")],
        "stage reused early", "not ordered after the load"),
    "consumers read a tile during the product": (
        [(COMMIT, f"{COMMIT} {READ_TILE}")], "stage reused early", "not ordered after the load"),
    "threads with different matrix descriptors": (
        [("cvt.u64.u32 %d3, %r2;", "and.b32 %r30, %t, 64; shr.u32 %r30, %r30, 5; add.u32 %r2, %r2, %r30;"
                                   " cvt.u64.u32 %d3, %r2;")], "uneven matrix descriptor", "different matrix descriptors"),
    "tile not aligned to 128 bytes": (
        [("mad.lo.u32 %r2, %stage, 16384, %s; add.u32 %r3", "mad.lo.u32 %r2, %stage, 16384, %s; add.u32 %r2, %r2, 64;"
                                                            " add.u32 %r3")], "misaligned bulk copy", "is not a multiple of 128"),
    "coordinate not a multiple of 16 bytes": (
        [("shl.b32 %r4, %it, 6;", "shl.b32 %r4, %it, 6; add.u32 %r4, %r4, 4;")],
        "misaligned bulk copy", "innermost coordinate, 4, times the 2 bytes of an element, 8 bytes"),
    "fewer coordinates than dimensions": (
        [("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0, {%r4, %row}], [%full];",
          "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0, {%r4}], [%full];")],
        "not a tensor map", "the tensor map has 2 dimensions"),
    "other parameter instead of the tensor map": (
        [("mov.b64 %d0, amap;", "mov.b64 %d0, cmap;"), ("cvta.param.u64 %d0, %d0;", "cvta.param.u64 %d0, %d0;"
                                                        " add.u64 %d0, %d0, 128;")], "not a tensor map", "no tensor map"),
}  # fmt: skip


@pytest.mark.parametrize("blocks", ["natural", "reversed", "shuffled:4"])
@pytest.mark.parametrize("name", CORRECT_VARIANTS)
def test_correct_kernels_have_no_finding(name, blocks):
    errors, error = run_edited(CORRECT_VARIANTS[name], block_order=blocks)
    assert not errors, errors[0].format()
    assert "other output" in name or error < 1e-6


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_reported(name):
    edits, kind, expected = BUGS[name]
    errors, _ = run_edited(edits)
    assert kind in {f.kind for f in errors}, [f.format() for f in errors]
    finding = next(f for f in errors if f.kind == kind)
    assert expected in finding.message, finding.format()
    assert finding.location.startswith("PTX line")
    assert kind != "hang" or "mbarrier dynamic shared memory" in finding.message


def test_bulk_copy_size_must_be_a_multiple_of_16_bytes():
    bench = Bench()
    x, y = bench.upload("x", np.arange(256, dtype=np.uint32)), bench.empty("y", 512, np.uint32)
    with contextlib.suppress(StepBudgetExceeded):
        bench.run(PAIR.replace("[%d2], 256,", "[%d2], 248,"), 2, 64, x, y, cluster=(2, 1, 1))
    finding = next(f for f in bench.errors() if f.kind == "misaligned bulk copy")
    assert "the size, 248 bytes, is not a multiple of 16" in finding.message


def test_missing_fences_are_reported_only_with_race_checks():
    for edits in ([("wgmma.fence.sync.aligned;", "")], [(WAIT_0, WAIT_1)], [(FENCE, "")], [(WAIT_READ, "")]):
        assert not run_edited(edits, checks=Checks(races=False))[0]


def test_matrix_descriptor_with_base_offset_is_not_simulated():
    with pytest.raises(UnsupportedInstruction, match="a matrix descriptor with a base offset"):
        run_edited([("0x4000004000010000", "0x4002004000010000")])


# -- clusters -----------------------------------------------------------------------------------------------
PAIR = """
.version 8.5
.target sm_90a
.address_size 64
.visible .entry pair(.param .u64 x, .param .u64 y)
.maxntid 64
.explicitcluster
.reqnctapercluster 2, 1, 1
{
    .reg .pred %p<8>; .reg .b16 %h<2>; .reg .b32 %r<20>, %t, %rank, %it, %phase; .reg .b64 %d<8>;
    .shared .align 128 .b8 tile[256]; .shared .align 8 .b8 full[8]; .shared .align 8 .b8 empty[8];
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y];
    setp.eq.u32 %p0, %t, 0; mov.u32 %it, 0; mov.b16 %h0, 3;
    @%p0 mbarrier.init.shared.b64 [full], 1; @%p0 mbarrier.init.shared.b64 [empty], 2;
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
    mov.b32 %r0, empty; mapa.shared::cluster.u32 %r1, %r0, 0; mov.b32 %r2, tile; mov.b32 %r3, full;
ROUND: and.b32 %phase, %it, 1; xor.b32 %r4, %phase, 1;
    @!%p0 bra WAIT_FULL;
    mbarrier.arrive.expect_tx.shared.b64 _, [full], 256;
    setp.ne.u32 %p1, %rank, 0; @%p1 bra WAIT_FULL;
WAIT_EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [empty], %r4; @!%p2 bra WAIT_EMPTY;
    mad.wide.u32 %d2, %it, 256, %d0;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d2], 256, [%r3], %h0;
WAIT_FULL: mbarrier.try_wait.parity.shared.b64 %p2, [full], %phase; @!%p2 bra WAIT_FULL;
    mad.lo.u32 %r5, %t, 4, %r2; ld.shared.b32 %r6, [%r5];
    mad.lo.u32 %r7, %rank, 256, %t; mad.lo.u32 %r7, %it, 64, %r7; mad.wide.u32 %d3, %r7, 4, %d1; st.global.b32 [%d3], %r6;
    bar.sync 0;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];
    add.u32 %it, %it, 1; setp.lt.u32 %p3, %it, 4; @%p3 bra ROUND;
    barrier.cluster.arrive; barrier.cluster.wait; ret;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("", "", None),
        ("bar.sync 0;", "", "stage reused early"),
        ("WAIT_EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [empty], %r4; @!%p2 bra WAIT_EMPTY;", "", "stage reused early"),
        ("@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
         "@%p0 mbarrier.arrive.shared.b64 _, [empty];", "hang"),
    ],
    ids=["correct", "missing barrier", "missing wait", "arrival at the wrong block"],
)  # fmt: skip
def test_multicast_pipeline_in_a_cluster(old, new, kind):
    """One block multicasts tiles to both blocks after both have released the previous tile."""
    bench = Bench()
    bench.gpu.max_steps = 20_000
    x = bench.upload("x", np.arange(256, dtype=np.uint32))
    y = bench.empty("y", 512, np.uint32)
    with contextlib.suppress(StepBudgetExceeded):
        bench.run(PAIR.replace(old, new, 1) if old else PAIR, 2, 64, x, y, cluster=(2, 1, 1))
    kinds = {f.kind for f in bench.errors()}
    assert kinds == set() if kind is None else kind in kinds, [f.format() for f in bench.errors()]
    if kind is None:
        np.testing.assert_array_equal(bench.download(y), [*range(256), *range(256)])
