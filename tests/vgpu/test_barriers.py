"""Hopper's barriers in hand-written PTX: mbarriers with transaction counts, named barriers, setmaxnreg."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import covers, make_kernel, run_ptx

from harness.vgpu.errors import StepBudgetExceeded

U4 = np.uint32
BAR = ".shared .align 8 .b8 bar[16]; .shared .align 4 .b8 s[1024];"
INIT = "setp.eq.u32 %p7, %t2, 0;  @%p7 mbarrier.init.shared::cta.b64 [bar], {count};  bar.sync 0;  mov.u32 %y0, 0;"
# As in Mojo's code, all waits use the same labels, in braces.
WAIT = """{{ .reg .pred P1;
LAB_WAIT: mbarrier.try_wait.parity.shared.b64 P1, [bar], {parity}, 100;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE: }}"""


def find_errors(body: str, block: int = 64, declare: str = BAR, **options) -> dict[str, str]:
    """Return kind -> message of a kernel's errors; the kernel may hang."""
    bench = Bench(**options)
    text = make_kernel(body, declare=declare)
    with contextlib.suppress(StepBudgetExceeded):
        bench.run(text, 1, block, bench.empty("o", block, U4))
    return {f.kind: f.message for f in bench.errors()}


@covers("mbarrier")
@pytest.mark.parametrize("order", ["before", "after"])
def test_phase_waits_for_expected_bytes(order):
    """Bytes can arrive before they are expected; two waits use the same labels."""
    completion = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 48;"
    early, late = (completion, "") if order == "before" else ("", completion)
    body = (
        INIT.format(count=1)
        + "setp.lt.u32 %p1, %t2, 32;  @%p1 bra consume;  setp.ne.u32 %p2, %t2, 32;  @%p2 bra done;"
        + f"st.shared.u32 [s], 7;  {early}  mbarrier.arrive.expect_tx.shared.b64 %d1, [bar], 48;  {late}"
        + WAIT.format(parity=0)
        + "bra done;  consume:"
        + WAIT.format(parity=0)
        + "ld.shared.u32 %y0, [s];  @!%p7 bra meet;"
        + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;  st.shared.u32 [s+4], 8;"
        + "mbarrier.arrive.shared.b64 _, [bar];  mbarrier.complete_tx.shared.b64 [bar], 16;  meet:"
        + WAIT.format(parity=1)
        + "ld.shared.u32 %r1, [s+4];  mad.lo.u32 %y0, %r1, 10, %y0;  done:"
    )
    (got,) = run_ptx(body, [], ["u4"], declare=BAR)
    np.testing.assert_array_equal(got, [87] * 32 + [0] * 32)


def test_arrive_drop_and_pending_count():
    """After a drop the next phase expects fewer arrivals; the state contains the pending count."""
    body = (
        INIT.format(count=3)
        + "@!%p7 bra done;  mbarrier.arrive_drop.shared.b64 %d1, [bar];  mbarrier.arrive.shared.b64 %d2, [bar], 2;"
        + WAIT.format(parity=0)
        + "mbarrier.arrive.shared.b64 %d3, [bar];  mbarrier.arrive.shared.b64 %d4, [bar];"
        + WAIT.format(parity=1)
        + """mbarrier.pending_count.b64 %r1, %d2;  mbarrier.pending_count.b64 %r2, %d3;  shr.u64 %d5, %d4, 63;
        cvt.u32.u64 %r3, %d5;  mad.lo.u32 %y0, %r1, 10, %r2;  mad.lo.u32 %y0, %r3, 100, %y0;  done:"""
    )
    (got,) = run_ptx(body, [], ["u4"], declare=BAR)
    assert got[0] == 122


def test_arrival_at_another_block_of_the_cluster():
    text = make_kernel(
        INIT.format(count=2)
        + """barrier.cluster.arrive;  barrier.cluster.wait;  mov.u32 %r1, bar;
        mapa.shared::cluster.u32 %r2, %r1, 0;  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        mov.u32 %r3, %cluster_ctarank;  setp.ne.u32 %p1, %r3, 0;  @%p1 bra done;"""
        + WAIT.format(parity=0)
        + "mov.u32 %y0, 5;  done: barrier.cluster.arrive;  barrier.cluster.wait;",
        declare=BAR,
    )
    bench = Bench()
    o = bench.empty("o", 2, U4)
    bench.run(text, 2, 1, o, cluster=(2, 1, 1))
    np.testing.assert_array_equal(bench.download(o), [5, 0])
    assert not bench.errors()


def test_too_many_arrivals_are_reported():
    """More arrivals than the count are reported; test_hopper_zoo.py tests wrong byte counts and parities."""
    body = (
        "mbarrier.arrive.expect_tx.shared.b64 %d1, [bar], 8;  mbarrier.arrive.shared.b64 %d1, [bar];"
        "mbarrier.complete_tx.shared.b64 [bar], 8;"
    )
    by_kind = find_errors(f"{INIT.format(count=1)} @!%p7 bra done; {body} {WAIT.format(parity=0)} done:", 32)
    assert list(by_kind) == ["too many arrivals"]


# -- named barriers -----------------------------------------------------------------------------------------
@covers("bar", "barrier")
def test_bar_arrive_and_bar_sync():
    """The producer continues after bar.arrive; barriers 1 and 2 complete at different times."""
    body = """setp.ge.u32 %p1, %t2, 32;  mov.u32 %r1, s;  and.b32 %r2, %t2, 31;  mad.lo.u32 %r1, %r2, 4, %r1;
    mov.u32 %y0, 0;  @%p1 bra consume;
    st.shared.u32 [%r1], %t2;  bar.arrive 1, 64;  bar.sync 2, 64;  ld.shared.u32 %y0, [%r1+128];  bra done;
    consume: bar.sync 1, 64;  ld.shared.u32 %r3, [%r1];  mul.lo.u32 %r3, %r3, 3;  st.shared.u32 [%r1+128], %r3;
    barrier.cta.arrive 2, 64;
    done:"""
    (got,) = run_ptx(body, [], ["u4"], declare=BAR)
    np.testing.assert_array_equal(got, [3 * t for t in range(32)] + [0] * 32)


def test_completed_barrier_releases_only_its_threads():
    """Half of barrier 2's threads first wait at barrier 1, whose completion must not release barrier 2."""
    body = """mov.u32 %y0, 0;  setp.lt.u32 %p1, %t2, 64;  @%p1 bra first;
    setp.lt.u32 %p2, %t2, 96;  @%p2 bra meet;  bar.sync 1, 96;  setp.eq.u32 %p3, %t2, 96;  @%p3 st.shared.u32 [s], 5;
    meet: bar.sync 2, 64;  ld.shared.u32 %y0, [s];  bra done;
    first: bar.sync 1, 96;
    done:"""
    (got,) = run_ptx(body, [], ["u4"], block=128, declare=BAR)
    np.testing.assert_array_equal(got, [0] * 64 + [5] * 64)


def test_missing_arrival_is_reported():
    by_kind = find_errors(
        "mov.u32 %y0, 0;  setp.lt.u32 %p1, %t2, 32;  @%p1 bra done;  bar.sync 1, 64;  done: bar.sync 0;"
    )
    assert list(by_kind) == ["barrier divergence"]


# -- setmaxnreg ---------------------------------------------------------------------------------------------
INCREASE = "setp.lt.u32 %p1, %t2, 128;  mov.u32 %y0, 0;  @%p1 bra few;  setmaxnreg.inc.sync.aligned.u32 {more};  bra done;"
DECREASE = "few: setmaxnreg.dec.sync.aligned.u32 {few};  done:"


@covers("setmaxnreg")
@pytest.mark.parametrize(
    ("few", "more", "text"),
    [
        (56, 224, ""),
        (
            56,
            232,
            "the warps of the block request 66560 registers, but it owns 64512: these warps wait forever",
        ),
        (176, 168, "the warp has 168 registers per thread; the operand of .dec, 176,"),
        (56, 160, "the warp has 168 registers per thread; the operand of .inc, 160,"),
        (50, 224, "a multiple of 8 from 24 to 256"),
    ],
)
def test_register_budget_is_checked(few, more, text):
    by_kind = find_errors(INCREASE.format(more=more) + DECREASE.format(few=few), 384, "")
    assert set(by_kind) == ({"register budget"} if text else set())
    assert text in by_kind.get("register budget", "")


def test_setmaxnreg_requires_a_full_warpgroup():
    by_kind = find_errors(
        "setp.lt.u32 %p1, %t2, 96;  mov.u32 %y0, 0;  @%p1 setmaxnreg.dec.sync.aligned.u32 56;", 128, ""
    )
    assert "needs all 128 threads of a warpgroup" in by_kind["warp divergence"]


def test_exited_blocks_do_not_pass_barriers():
    """Three of four blocks end; the fourth passes five barriers."""
    body = (
        "mov.u32 %y0, 4;  setp.eq.u32 %p1, %t0, 3;  @%p1 bra LOOP;  st.global.u32 [%a0], %t0;  ret;"
        "LOOP: bar.sync 0;  sub.u32 %y0, %y0, 1;  setp.ge.s32 %p1, %y0, 0;  @%p1 bra LOOP;"
    )
    bench = Bench()
    text = make_kernel(body)
    launch = bench.run(text, 4, 64, bench.empty("o", 4 * 64, U4))
    assert not bench.errors() and launch.counters.barriers == 5
