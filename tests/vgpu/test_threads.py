"""Hand-written PTX for interaction of threads: memory, atomics, warps, barriers, calls and clusters."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import HEADER, covers, make_kernel, run_ptx

from harness.vgpu import VirtualGPU
from harness.vgpu.engine.interpreter import executor
from harness.vgpu.errors import InvalidPTX, StepBudgetExceeded, UnsupportedInstruction
from harness.vgpu.memory import arena

U4, I4, F4 = np.uint32, np.int32, np.float32
rng = np.random.default_rng(5)


def make_words(n=64, high=1 << 32):
    return rng.integers(0, high, n, np.uint64).astype(U4)


# -- memory -------------------------------------------------------------------------------------------------
@covers("ld", "st")
@pytest.mark.parametrize("kind", ["weak", "volatile", "relaxed.gpu", "acquire.sys"])
def test_load_store_widths(kind):
    x = make_words()
    release = {"acquire.sys": "release.sys", "weak": "weak"}.get(kind, kind)
    body = f"""
    ld.{kind}.global.u8 %r1, [%a1];  ld.{kind}.global.s8 %r2, [%a1+1];  ld.{kind}.global.u16 %h1, [%a1+2];
    cvt.u32.u16 %r3, %h1;  shl.b32 %r3, %r3, 16;  and.b32 %r2, %r2, 0xFF00FF;  shl.b32 %r4, %r2, 8;
    add.u32 %y0, %r3, %r1;  st.{release}.global.u8 [%a0], %r1;"""
    (got,) = run_ptx(body, [x], ["u4"])
    np.testing.assert_array_equal(got, x & 0xFFFF00FF)


@covers("ld", "st")
def test_vectors_in_shared_memory():
    x = make_words()
    declare = ".shared .align 16 .b8 s[1024];"
    body = """
    mov.u32 %r1, s;  mad.lo.u32 %r1, %t2, 16, %r1;  add.u32 %r5, %x0, 1;  add.u32 %r6, %x0, 2; add.u32 %r7, %x0, 3;
    st.shared.v4.b32 [%r1], {%x0, %r5, %r6, %r7};  bar.sync 0;
    xor.b32 %r2, %t2, 1;  mov.u32 %r1, s;  mad.lo.u32 %r1, %r2, 16, %r1;
    ld.shared.v2.b64 {%d1, %d2}, [%r1];  shr.u64 %d2, %d2, 32;  cvt.u32.u64 %y0, %d2;"""
    (got,) = run_ptx(body, [x], ["u4"], declare=declare)
    np.testing.assert_array_equal(got, x.reshape(-1, 2)[:, ::-1].ravel() + 3)


@covers("cvta", "isspacep", "ld", "st")
def test_generic_addresses_of_all_state_spaces():
    """Each third of the threads uses a generic pointer into global, shared or local memory."""
    x = make_words(96)
    declare = ".shared .align 4 .b8 s[1024]; .local .align 4 .b8 l[16];"
    body = """
    mov.u32 %r1, s;  mad.lo.u32 %r1, %t2, 4, %r1;  add.u32 %r2, %x0, 1;  st.shared.b32 [%r1], %r2;
    add.u32 %r2, %x0, 2;  st.local.b32 [l+4], %r2;
    cvt.u64.u32 %d1, %r1;  cvta.shared.u64 %d1, %d1;  mov.b64 %d2, l;  cvta.local.u64 %d2, %d2;  add.u64 %d2, %d2, 4;
    rem.u32 %r3, %t2, 3;  setp.eq.u32 %p1, %r3, 0;  setp.eq.u32 %p2, %r3, 1;
    selp.b64 %d3, %d1, %d2, %p2;  selp.b64 %d3, %a1, %d3, %p1;
    ld.b32 %r4, [%d3];  isspacep.shared %p3, %d3;  isspacep.global %p4, %d3;  isspacep.local %p5, %d3;
    selp.u32 %r5, 10, 0, %p3;  selp.u32 %r6, 20, 0, %p4;  selp.u32 %r7, 40, 0, %p5;
    add.u32 %y0, %r4, %r5;  add.u32 %y0, %y0, %r6;  add.u32 %y0, %y0, %r7;
    cvta.to.shared.u64 %d4, %d1;  @%p2 st.b32 [%d3], %r6;"""
    (got,) = run_ptx(body, [x], ["u4"], declare=declare, block=96)
    np.testing.assert_array_equal(got, x + np.tile(np.array([20, 11, 42], U4), 32))


@covers("ld", "mov")
def test_module_variables_and_computed_parameters():
    body = """mov.u64 %d1, table;  and.b32 %r1, %i, 3;  mad.wide.u32 %d1, %r1, 4, %d1;  ld.global.u32 %r2, [%d1];
    ld.const.u32 %r3, [scale];  mul.lo.u32 %y0, %r2, %r3;
    mov.b64 %d2, q0;  mad.wide.u32 %d2, %r1, 0, %d2;  ld.param.u64 %d3, [%d2];  setp.eq.u32 %p1, %i, 0;
    @%p1 st.global.u32 [next+4], %r3;
    ld.global.u64 %d4, [next+8];  ld.global.u32 %r4, [%d4];  add.u32 %y0, %y0, %r4;"""
    module = """.global .align 4 .u32 table[4] = {10, 20, 30, 40};\n.const .align 4 .u32 scale = 3;
    .global .align 8 .u64 next[2] = {1, table};\n"""
    (got,) = run_ptx(body, [], ["u4"], block=32, module=module)
    np.testing.assert_array_equal(got, np.tile([40, 70, 100, 130], 8))


@pytest.mark.parametrize("base", [arena.DEFAULT_BASE, arena.DEFAULT_BASE + 0xFFFF0000])
def test_32_bit_constant_addresses(base):
    """Compilers keep constant-memory addresses in 32-bit registers."""
    body = """mov.b32 %r1, table;  and.b32 %r2, %i, 3;  shl.b32 %r2, %r2, 2;  add.s32 %r3, %r1, %r2;
    ld.const.u32 %y0, [%r3];  ld.const.u32 %r4, [%r1+4];  add.u32 %y0, %y0, %r4;"""
    module = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};\n"
    (got,) = run_ptx(body, [], ["u4"], block=32, module=module, bench=Bench(base=base))
    np.testing.assert_array_equal(got, np.tile([30, 40, 50, 60], 8))


# -- atomics ------------------------------------------------------------------------------------------------
def apply_atomic(op: str, old: int, v: int, swap: int = 0) -> int:
    s = lambda a: a - (1 << 32) if a >> 31 else a  # noqa: E731
    return {
        "add.u32": (old + v) & 0xFFFFFFFF, "min.s32": old if s(old) < s(v) else v, "max.u32": max(old, v),
        "and.b32": old & v, "or.b32": old | v, "xor.b32": old ^ v, "exch.b32": v,
        "cas.b32": swap if old == v else old, "inc.u32": 0 if old >= v else old + 1,
        "dec.u32": v if old == 0 or old > v else old - 1,
    }[op]  # fmt: skip


@covers("atom")
@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", [f"{op}.u32" for op in ("add", "max", "inc", "dec")]
    + ["min.s32", "and.b32", "or.b32", "xor.b32", "exch.b32", "cas.b32"])  # fmt: skip
def test_atomics_with_results(op, space):
    """The returned values equal those of sequential execution in thread order."""
    x = make_words(64, 1 << 32) if op not in ("inc.u32", "dec.u32", "cas.b32") else make_words(64, 4)
    y = make_words(64, 4)
    declare = ".shared .align 4 .b8 s[64];"
    swap = ", %x1" if op.startswith("cas") else ""
    address = {"global": "%d2", "shared": "%d1", "generic": "%d3"}[space]
    dot = "" if space == "generic" else f".{space}"
    body = f"""
    and.b32 %r1, %t2, 3;  mov.u64 %d1, s;  mad.wide.u32 %d1, %r1, 4, %d1;  ld.param.u64 %d2, [q1];
    mad.wide.u32 %d2, %r1, 4, %d2;  cvta.shared.u64 %d3, %d1;
    setp.lt.u32 %p1, %t2, 4;  @%p1 st.shared.u32 [%d1], 2;  @%p1 st.global.u32 [%d2], 2;  bar.sync 0;
    atom.relaxed.gpu{dot}.{op} %y0, [{address}], %x0{swap};  bar.sync 0;  mov.u32 %y1, 0;
    ld{dot}.u32 %r2, [{address}];  @%p1 mov.u32 %y1, %r2;  bar.sync 0;"""
    # y1 is array 1: its first four words are the global cells, rewritten at the end
    got, cells = run_ptx(body, [x, y], ["u4", "u4"], declare=declare)
    memory, expected = [2] * 4, []
    for t in range(64):
        expected.append(memory[t & 3])
        memory[t & 3] = apply_atomic(op, memory[t & 3], int(x[t]), int(y[t]))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(cells[:4], memory)


@covers("red")
@pytest.mark.parametrize(
    "kind,dtype",
    [*{"f32": F4, "f64": np.float64, "u64": np.uint64, "f16": np.float16, "f16x2": U4, "bf16x2": U4}.items()],
)
def test_reductions_without_result(kind, dtype):
    n = 64
    x = rng.integers(0, 8, n).astype(dtype)
    operand = x
    if kind == "f16x2":
        operand = np.stack([x, x + 1], 1).astype(np.float16).view(U4).ravel()
    elif kind == "bf16x2":
        operand = ((np.stack([x, x + 1], 1).astype(F4).view(U4)) >> 16).astype(np.uint16).view(U4).ravel()
    noftz = ".noftz" if "16" in kind else ""
    body = f"ld.param.u64 %d1, [q0]; red.relaxed.gpu.global.add{noftz}.{kind} [%d1], %x0;"
    text = make_kernel(body, [operand.itemsize], [operand.itemsize], store=False)
    bench = Bench()
    o, a = bench.upload("o", np.zeros(n, operand.dtype)), bench.upload("a", operand)
    bench.run(text, 1, n, o, a)
    total = bench.download(o)[:1]
    if kind == "f16x2":
        np.testing.assert_array_equal(total.view(np.float16), [x.sum(), (x + 1).sum()])
    elif kind == "bf16x2":
        values = (total.view(np.uint16).astype(U4) << 16).view(F4)
        np.testing.assert_allclose(values, [x.sum(), (x + 1).sum()], rtol=0.02)
    else:
        assert total[0] == x.sum()


# -- warps --------------------------------------------------------------------------------------------------
@covers("shfl")
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffle(mode, width):
    x = make_words(96)
    b, c = 3, (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"shfl.sync.{mode}.b32 %y0|%p1, %x0, {b}, {c}, -1; selp.u32 %y1, 1, 0, %p1;"
    got, inside = run_ptx(body, [x], ["u4", "u4"], block=96)
    expected, in_range_flags = [], []
    for t in range(96):
        lane, base = t % 32, t - t % 32
        low = lane - lane % width
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low + b % width}[mode]
        in_range = j >= low if mode == "up" else j < low + width
        expected.append(x[base + (j if in_range else lane)])
        in_range_flags.append(int(in_range))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(inside, in_range_flags)


def test_lanes_reconverge_in_a_loop_with_a_dead_block():
    """Compilers may place a loop's latch before its body and leave an unreachable jump to it."""
    x = make_words(32) % 1000
    body = """
        mov.b32 %y0, 0; mov.b32 %r0, 0; setp.ge.u32 %p0, %t2, 2; bra.uni BODY;
        DEAD: bra.uni LATCH;
        LATCH: add.u32 %r0, %r0, 1; setp.ge.u32 %p1, %r0, 3; @%p1 bra END;
        BODY: mov.b32 %r1, 0; @%p0 bra SKIP; mov.b32 %r1, %x0;
        SKIP: shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; add.u32 %y0, %y0, %r2;
        @%p0 bra LATCH; add.u32 %y0, %y0, %x0; bra.uni LATCH;
        END:
    """
    (got,) = run_ptx(body, [x], ["u4"], block=32)
    expected = [3 * (int(x[0]) + int(x[1])) if t < 2 else 0 for t in range(32)]
    np.testing.assert_array_equal(got, expected)


@covers("vote", "activemask", "elect")
def test_votes_of_active_lanes():
    """Only even lanes take part, so results describe only even lanes."""
    x = make_words(64, 4)
    body = """
    and.b32 %r1, %t2, 1;  setp.eq.u32 %p1, %r1, 0;  mov.u32 %y0, 0;  mov.u32 %y1, 0;  mov.u32 %y2, 0;
    @!%p1 bra done;
    setp.gt.u32 %p2, %x0, 0;  vote.sync.ballot.b32 %y0, %p2, 0x55555555;  activemask.b32 %y1;
    vote.sync.any.pred %p3, %p2, 0x55555555;  vote.sync.all.pred %p4, %p2, 0x55555555;
    vote.sync.uni.pred %p5, %p2, 0x55555555;  elect.sync %r2|%p6, 0x55555555;
    selp.u32 %y2, 1, 0, %p3;  selp.u32 %r3, 2, 0, %p4;  selp.u32 %r4, 4, 0, %p5;  selp.u32 %r5, 8, 0, %p6;
    add.u32 %y2, %y2, %r3;  add.u32 %y2, %y2, %r4;  add.u32 %y2, %y2, %r5;
    done:"""
    ballot, active, rest = run_ptx(body, [x], ["u4", "u4", "u4"])
    for t in range(0, 64, 2):
        base = t - t % 32
        yes = sum(1 << k for k in range(0, 32, 2) if x[base + k] > 0)
        all_lanes = yes == 0x55555555
        assert ballot[t] == yes and active[t] == 0x55555555
        assert rest[t] == int(yes != 0) + 2 * all_lanes + 4 * (all_lanes or yes == 0) + 8 * (t % 32 == 0)
    assert (active[1::2] == 0).all()


@covers("match", "redux")
def test_match_and_redux():
    x = make_words(64, 5)
    body = """match.any.sync.b32 %y0, %x0, -1;  match.all.sync.b32 %r1|%p1, %x0, -1;  selp.u32 %y1, 1, 0, %p1;
    redux.sync.add.u32 %y2, %x0, -1;  redux.sync.max.s32 %y3, %x0, -1;  redux.sync.xor.b32 %r2, %x0, -1;
    shl.b32 %r2, %r2, 16;  add.u32 %y3, %y3, %r2;"""
    same, all_equal, total, rest = run_ptx(body, [x], ["u4"] * 4)
    for t in range(64):
        warp = x[t - t % 32 :][:32]
        assert same[t] == sum(1 << k for k in range(32) if warp[k] == x[t])
        assert all_equal[t] == (len(set(warp.tolist())) == 1)
        assert total[t] == warp.sum() and rest[t] == warp.max() + (int(np.bitwise_xor.reduce(warp)) << 16)


@covers("stmatrix", "ldmatrix")
def test_stmatrix_is_the_inverse_of_ldmatrix():
    x, y = make_words(32), make_words(32)
    declare = ".shared .align 16 .b8 s[512];"
    body = """mov.u32 %r1, s;  and.b32 %r2, %t2, 15;  mad.lo.u32 %r1, %r2, 16, %r1;
    stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r1], {%x0, %x1};  bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%y0, %y1}, [%r1];"""
    got = run_ptx(body, [x, y], ["u4", "u4"], declare=declare, block=32)
    np.testing.assert_array_equal(got, [x, y])


@covers("mma")
def test_mma_float64():
    """Row g of A has the lanes 4g to 4g + 3, B is 1, C is 2; test_edge_values.py tests 16-bit types."""
    body = """cvt.rn.f64.u32 %e1, %t2; mov.f64 %e2, 0d3FF0000000000000; mov.f64 %e3, 0d4000000000000000;
    mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%e4, %e5}, {%e1}, {%e2}, {%e3, %e3};
    cvt.rzi.u32.f64 %y0, %e4; cvt.rzi.u32.f64 %y1, %e5;"""
    for got in run_ptx(body, [], ["u4", "u4"], declare=".reg .f64 %e<8>;", block=32):
        np.testing.assert_array_equal(got, [4 * (4 * (t // 4)) + 6 + 2 for t in range(32)])


def test_mma_truncates_to_tf32():
    """Row g of A has the numbers of lanes 4g to 4g + 3 twice; B is 1."""
    x = rng.random(32).astype(F4)
    body = """mov.b32 %r1, 0x3F800000; mov.b32 %r2, 0;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%y0, %r3, %r4, %r5}, {%x0, %x0, %x0, %x0}, {%r1, %r1},
      {%r2, %r2, %r2, %r2};"""
    (got,) = run_ptx(body, [x], ["f4"], block=32)
    truncated = (x.view(U4) & 0xFFFFE000).view(F4).astype(float).reshape(8, 4)
    np.testing.assert_allclose(got, np.repeat(2 * truncated.sum(1), 4), rtol=1e-6)


# -- barriers -----------------------------------------------------------------------------------------------
@covers("bar", "barrier")
def test_barrier_reductions_and_named_barriers():
    x = make_words(128, 3)
    body = """setp.gt.u32 %p1, %x0, 0;  bar.red.popc.u32 %y0, 0, %p1;  bar.red.and.pred %p2, 0, %p1;
    barrier.red.or.pred %p3, 1, %p1;  selp.u32 %y1, 1, 0, %p2;  selp.u32 %r1, 2, 0, %p3;  add.u32 %y1, %y1, %r1;
    shr.u32 %r2, %t2, 6;  add.u32 %r2, %r2, 2;  barrier.sync %r2, 64;"""
    count, flags = run_ptx(body, [x], ["u4", "u4"], block=128)
    np.testing.assert_array_equal(count, np.full(128, (x > 0).sum()))
    np.testing.assert_array_equal(flags, np.full(128, int((x > 0).all()) + 2 * int((x > 0).any())))


@covers("mbarrier", "nanosleep")
def test_mbarrier_orders_producer_and_consumer():
    """The second warp spins until the first has written."""
    x = make_words(64)
    declare = ".shared .align 8 .b8 bar[8]; .shared .align 4 .b8 s[128];"
    body = """setp.eq.u32 %p1, %t2, 0;  @%p1 mbarrier.init.shared::cta.b64 [bar], 32;  bar.sync 0;
    and.b32 %r1, %t2, 31;  mov.u32 %r2, s;  mad.lo.u32 %r2, %r1, 4, %r2;  mov.u32 %y0, 7;
    setp.ge.u32 %p2, %t2, 32;  @%p2 bra consume;
    st.shared.u32 [%r2], %x0;  mbarrier.arrive.shared::cta.b64 %d1, [bar];  bra.uni done;
    consume: mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;  @!%p3 nanosleep.u32 20;  @!%p3 bra consume;
    ld.shared.u32 %y0, [%r2];
    done:"""
    (got,) = run_ptx(body, [x], ["u4"], declare=declare)
    np.testing.assert_array_equal(got[32:], x[:32])


@pytest.mark.parametrize("tail", ["", "bar.sync 0;"])
def test_spinning_threads_do_not_block_others(tail):
    """The first warp polls a flag that the second sets after a long loop while the third waits at the barrier."""
    declare = ".shared .align 4 .b8 flag[4];"
    body = f"""setp.eq.u32 %p1, %t2, 0;  @%p1 st.volatile.shared.u32 [flag], 0;  bar.sync 0;  mov.u32 %y0, 1;
    setp.ge.u32 %p4, %t2, 64;  @%p4 bra meet;  setp.ge.u32 %p2, %t2, 32;  @%p2 bra work;
    spin: ld.volatile.shared.u32 %r1, [flag];  setp.eq.u32 %p3, %r1, 0;  @%p3 bra spin;  mov.u32 %y0, %r1;  bra meet;
    work: mov.u32 %r2, 0;
    again: add.u32 %r2, %r2, 1;  setp.lt.u32 %p3, %r2, 3000;  @%p3 bra again;
    setp.eq.u32 %p5, %t2, 32;  @%p5 st.volatile.shared.u32 [flag], %r2;
    meet: {tail}"""
    bench = Bench()
    bench.gpu.max_steps = 20_000
    (got,) = run_ptx(body, [], ["u4"], declare=declare, block=96, bench=bench)
    np.testing.assert_array_equal(got, [3000] * 32 + [1] * 64)


@covers("cp")
@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_async_copies_with_zero_fill(wait):
    x = make_words(64)
    declare = ".shared .align 16 .b8 s[256];"
    body = f"""mov.u32 %r1, s;  mad.lo.u32 %r1, %t2, 4, %r1;  and.b32 %r2, %t2, 1;  shl.b32 %r2, %r2, 2;
    cp.async.ca.shared.global [%r1], [%a1], 4, %r2;  cp.async.commit_group;  {wait}  ld.shared.u32 %y0, [%r1];"""
    (got,) = run_ptx(body, [x], ["u4"], declare=declare)
    np.testing.assert_array_equal(got, np.where(np.arange(64) % 2, x, 0))


# -- control flow -------------------------------------------------------------------------------------------
@covers("call", "ret", "bra", "brx", "exit")
def test_device_functions_and_branch_tables():
    """Two levels of calls with results from diverged threads, and a jump through a table."""
    functions = """
    .func (.param .b32 r0) triple (.param .b32 a0) {
      .reg .b32 %r<4>;  ld.param.u32 %r1, [a0];  mul.lo.u32 %r1, %r1, 3;  st.param.b32 [r0], %r1;  ret; }
    .func (.param .b32 r1) twice (.param .b32 a1, .param .b32 b1) {
      .reg .b32 %r<6>;  .reg .pred %p<2>;  ld.param.u32 %r1, [a1];  ld.param.u32 %r2, [b1];
      setp.gt.u32 %p1, %r1, 50;  @%p1 bra skip;
      { .param .b32 x; .param .b32 y;  st.param.b32 [x], %r1;  call.uni (y), triple, (x);  ld.param.b32 %r1, [y]; }
      skip: add.u32 %r3, %r1, %r2;  st.param.b32 [r1], %r3;  ret; }
    """
    body = """and.b32 %r1, %i, 3;
    tab: .branchtargets L0, L1, L2, L2;
    brx.idx %r1, tab;
    L0: mov.u32 %r2, 100; bra go;
    L1: mov.u32 %r2, 200; bra go;
    L2: mov.u32 %r2, 300;
    go: setp.eq.u32 %p1, %r1, 3;  mov.u32 %y0, 0;  @%p1 bra done;
    { .param .b32 p0; .param .b32 p1; .param .b32 q;  st.param.b32 [p0], %x0;  st.param.b32 [p1], %r2;
      call (q), twice, (p0, p1);  ld.param.b32 %y0, [q]; }
    done: st.global.b32 [%a0], %y0;  setp.gt.u32 %p2, %i, 1000;  @%p2 exit;"""
    x = np.arange(64, dtype=U4) + 20
    (got,) = run_ptx(body, [x], ["u4"], module=functions)
    k = np.arange(64) & 3
    expected = np.where(x > 50, x, 3 * x) + np.array([100, 200, 300, 0])[k]
    np.testing.assert_array_equal(got, np.where(k == 3, 0, expected))


@covers("mapa", "barrier", "fence", "membar")
def test_distributed_shared_memory():
    """Blocks of a cluster exchange a word through distributed shared memory."""
    body = """.shared .align 4 .b8 s[4];
    mov.u32 %r1, %cluster_ctarank;  add.u32 %r2, %i, 10;  st.shared.u32 [s], %r2;  membar.gl;  fence.acq_rel.cluster;
    barrier.cluster.arrive.aligned;  barrier.cluster.wait.aligned;
    xor.b32 %r3, %r1, 1;  mov.u32 %r4, s;  mapa.shared::cluster.u32 %r5, %r4, %r3;
    ld.shared::cluster.u32 %y0, [%r5];  barrier.cluster.arrive;  barrier.cluster.wait;"""
    (got,) = run_ptx(body, [np.zeros(6, U4)], ["u4"], block=1, cluster=(2, 1, 1))
    np.testing.assert_array_equal(got, [11, 10, 13, 12, 15, 14])


@pytest.mark.parametrize("cluster", [1, 2])
def test_is_explicit_cluster(cluster):
    body = "mov.pred %p1, %is_explicit_cluster; selp.u32 %y0, 1, 0, %p1;"
    (got,) = run_ptx(body, [np.zeros(2, U4)], ["u4"], block=1, cluster=(cluster, 1, 1))
    np.testing.assert_array_equal(got, cluster - 1)


@covers("prefetch", "prefetchu", "griddepcontrol", "pmevent", "discard", "applypriority", "ldu")
def test_hints_change_nothing():
    x = make_words()
    body = """prefetch.global.L2 [%a1];  griddepcontrol.wait;  griddepcontrol.launch_dependents;  pmevent 1;
    prefetchu.L1 [%a1];  discard.global.L2 [%a1], 128;
    applypriority.global.L2::evict_normal [%a1], 128;  ldu.global.u32 %y0, [%a1];"""
    (got,) = run_ptx(body, [x], ["u4"])
    np.testing.assert_array_equal(got, x)


@covers("mov")
def test_special_registers():
    (got,) = run_ptx(
        """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %laneid; mov.u32 %r5, %tid.x;
        mov.u32 %r6, %warpid; mad.lo.u32 %y0, %r1, 1000, %r5; mad.lo.u32 %y0, %r2, 10000, %y0; mad.lo.u32 %y0, %r3, 100000, %y0;
        mad.lo.u32 %y0, %r6, 32, %y0; sub.u32 %y0, %y0, %r5; add.u32 %y0, %y0, %r4; mov.u32 %r7, %lanemask_lt; popc.b32 %r8, %r7;
        sub.u32 %y0, %y0, %r8; mov.u64 %d1, %clock64; mov.u64 %d2, %globaltimer;""",
        [np.zeros(128, U4)], ["u4"],
    )  # fmt: skip
    t = np.arange(128)
    np.testing.assert_array_equal(got, t // 64 * 1000 + 2 * 10000 + 64 * 100000 + t % 64 // 32 * 32)


# -- unsupported PTX ----------------------------------------------------------------------------------------
@covers("tcgen05", "wmma", "st_async", "tensormap", "multimem")
@pytest.mark.parametrize(
    "instr",
    [
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r1, %r2, %r3}], [%r4]",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r1], [%r2], 16, [%r3]",
        "cp.async.bulk.global [%d1], [%r1], 16", "setmaxnreg.inc.sync.aligned.u32 %r1", "tcgen05.wait::ld.sync.aligned", "add.rz.f32 %r1, %r1, %r1",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2,%r3,%r4}",
        "frobnicate.b32 %r1, %r2",
        "setp.lt.f16x2 %p1, %r1, %r1",
        "add.sat.f16x2 %r1, %r1, %r1",
        "fma.rn.ftz.f16 %h1, %h1, %h1, %h1",
        "mad.hi.sat.s32 %r1, %r1, %r1, %r1",
        "add.cc.u32 %r1, %r1, %r1",
        "add.sat.u32 %r1, %r1, %r1",
        "cvt.rp.bf16.f32 %h1, %r1",
        "cvt.rz.bf16.u32 %h1, %r1",
        "set.lt.f16.f16 %h1, %h1, %h1",
        "ld.global.b128 %d1, [%a0]",
        "bar.arrive 0",
        "min.xorsign.abs.f32 %r1, %r1, %r1", "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2", "multimem.red.add.f32 [%a0], %r1",
    ],
)  # fmt: skip
def test_unsupported_instruction_is_named(instr):
    bench = Bench()
    text = make_kernel(f"mov.u32 %y0, 0; {instr};")
    with pytest.raises(UnsupportedInstruction, match=instr.split()[0].split(".")[0]) as caught:
        bench.run(text, 1, 32, bench.upload("o", np.zeros(32, U4)))
    assert "PTX line" in str(caught.value)
    assert caught.value.instr.line == text[: text.index(instr)].count("\n") + 1


def test_unsupported_instruction_on_a_path_not_taken():
    (got,) = run_ptx(
        "mov.u32 %y0, 5; setp.gt.u32 %p1, %i, 99999; @!%p1 bra go; tcgen05.fence; go:", [make_words()], ["u4"]
    )
    assert (got == 5).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "no .version line"),
        (HEADER.replace("8.5", "99.1"), "PTX version 99.1"),
        (HEADER.replace("sm_90a", "gfx942"), "target 'gfx942'"),
        (HEADER.replace("address_size 64", "address_size 32"), "address_size 32"),
        (HEADER + ".visible .entry k() {\n mov.u32 %r1, ;;", "ends inside"),
        (HEADER + ".visible .entry k() {\n .reg .f128 %q;\n}", "line 5: register type .f128"),
        (HEADER + ".visible .entry k() {\n .shared .b8 s[50000];\n ret;\n}", "50000 bytes of static shared"),
    ],
)
def test_invalid_ptx_is_rejected_in_one_line(text, message):
    with pytest.raises(InvalidPTX, match=message) as caught:
        VirtualGPU().load(text)
    assert "\n" not in str(caught.value)


BARRIER = ".shared .align 8 .b8 bar[8];"
INIT = "setp.eq.u32 %p1, %t2, 0;  @%p1 mbarrier.init.shared::cta.b64 [bar], 32;  bar.sync 0;  mov.u32 %y0, 7;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 %d1, [bar];"


def make_wait(token: str) -> str:
    return f"again: mbarrier.test_wait.shared::cta.b64 %p3, [bar], {token};  @!%p3 bra again;"


@pytest.mark.parametrize("token", ["%d1", "%d2"])
def test_poll_uses_only_the_phase_bit_of_its_token(token):
    """A count used as token has the phase bit of the first phase, so the poll ends with that phase."""
    body = INIT + "mov.u64 %d2, 32;" + ARRIVE + make_wait(token)
    (got,) = run_ptx(body, [make_words(32)], ["u4"], block=32, declare=BARRIER)
    np.testing.assert_array_equal(got, 7)


def run_endless(body: str, *, block: int, declare: str = "") -> tuple[str, str]:
    """Run a launch that cannot end; return the messages of its error and of its only finding."""
    bench = Bench()
    text = make_kernel(body, declare=declare)
    with pytest.raises(StepBudgetExceeded, match="kernel k can never end") as stop:
        bench.run(text, 1, block, bench.empty("o", block, U4))
    (finding,) = [f for f in bench.errors() if f.kind == "hang"]
    return str(stop.value), finding.message


def test_poll_that_cannot_succeed_ends():
    """Half of the arrivals are missing."""
    body = INIT + "setp.lt.u32 %p2, %t2, 16;  @%p2 bra done;" + ARRIVE + make_wait("%d1") + "done:"
    message, finding = run_endless(body, block=32, declare=BARRIER)
    assert "16 threads wait here forever" in finding and finding in message
    assert "mbarrier shared array bar[0] for the end of a phase of parity 0" in finding
    assert "it is in phase 0 and lacks 16 of 32" in finding


def test_wait_for_a_lock_that_is_never_released_ends(monkeypatch):
    """Two warps poll a lock that another thread holds."""
    monkeypatch.setattr(executor, "SPIN_SAMPLE_STEPS", 64)
    body = """mov.u32 %y0, 7;  mov.u64 %d1, lock;  setp.eq.u32 %p1, %t2, 64;  @%p1 st.shared.u32 [lock], 1;  bar.sync 0;
    setp.eq.u32 %p1, %t2, 64;  @%p1 bra meet;
    spin: atom.shared.cas.b32 %r1, [lock], 0, 1;  setp.ne.u32 %p3, %r1, 0;  @%p3 bra spin;
    meet: bar.sync 0;"""
    _, finding = run_endless(body, block=65, declare=".shared .align 4 .b8 lock[4];")
    assert "64 threads wait here forever" in finding


def test_poll_with_an_iteration_limit_continues(monkeypatch):
    """It counts its iterations, so its state never repeats in the fifteen checks."""
    monkeypatch.setattr(executor, "SPIN_SAMPLE_STEPS", 64)
    body = """mov.u32 %y0, 0;  st.shared.u32 [flag], 0;
    spin: ld.volatile.shared.u32 %r1, [flag];  add.u32 %y0, %y0, 1;  setp.eq.u32 %p2, %r1, 0;
    setp.lt.u32 %p3, %y0, 1000;  and.pred %p3, %p2, %p3;  @%p3 bra spin;"""
    (got,) = run_ptx(body, [make_words(1)], ["u4"], block=1, declare=".shared .align 4 .b8 flag[4];")
    np.testing.assert_array_equal(got, 1000)


@pytest.mark.parametrize("count", ["add.u32 %y0, %y0, 1;", "mov.u32 %r2, %clock;  xor.b32 %y0, %y0, %r2;"])
def test_poll_with_an_unused_counter_ends(count, monkeypatch):
    """The count does not affect the loop's condition, so the loop can never end."""
    monkeypatch.setattr(executor, "SPIN_SAMPLE_STEPS", 64)
    body = f"""mov.u32 %y0, 0;  st.shared.u32 [flag], 0;
    spin: ld.volatile.shared.u32 %r1, [flag];  {count}  setp.eq.u32 %p2, %r1, 0;  @%p2 bra spin;"""
    _, finding = run_endless(body, block=1, declare=".shared .align 4 .b8 flag[4];")
    assert "1 thread waits here forever" in finding


def test_poll_with_a_clock_limit_continues(monkeypatch):
    monkeypatch.setattr(executor, "SPIN_SAMPLE_STEPS", 64)
    body = """mov.u32 %y0, 7;  st.shared.u32 [flag], 0;  mov.u32 %r3, %clock;
    spin: ld.volatile.shared.u32 %r1, [flag];  mov.u32 %r2, %clock;  sub.u32 %r2, %r2, %r3;
    setp.eq.u32 %p2, %r1, 0;  setp.lt.u32 %p3, %r2, 20000;  and.pred %p3, %p2, %p3;  @%p3 bra spin;"""
    (got,) = run_ptx(body, [make_words(1)], ["u4"], block=1, declare=".shared .align 4 .b8 flag[4];")
    np.testing.assert_array_equal(got, 7)
