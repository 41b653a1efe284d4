"""Counters by instruction, tensor, array and line, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import kernel

from harness.vgpu import Checks, Launch
from harness.vgpu.checks.counters import Traffic, sum_traffic

ARRAYS = ".shared .align 16 .b8 straight[4096]; .shared .align 16 .b8 folded[4096];"


def launched(body: str, threads: int, *, blocks: int = 1, checks: Checks | None = None) -> Launch:
    """A launch of `body`, in which %d0 is the address of `first` and %d1 that of `second`, 1,024 words each."""
    bench = Bench(checks=checks)
    text = kernel(f"mov.u64 %d0, %a0; mov.u64 %d1, %a1;\n{body}", 0, 2, widths_in=[], widths_out=[4, 4],
                  declare=ARRAYS)  # fmt: skip
    text = text.replace("st.global.b32 [%a0], %y0;", "").replace("st.global.b32 [%a1], %y1;", "")
    text = text.replace(".visible", '.file 1 "/reader/kernel.mojo"\n.visible', 1)
    places = [bench.place(name, np.ones(1024, np.uint32)) for name in ("first", "second")]
    launch = bench.run(text, blocks, threads, *places)
    assert not bench.errors(), "\n".join(f.text() for f in bench.errors())
    return launch


def of(launch: Launch, **wanted) -> Traffic:
    """The traffic of the sites with some attributes; `line` is that of the source."""
    line = wanted.pop("line", None)
    return sum_traffic(
        site
        for site in launch.counters.sites.values()
        if all(getattr(site, name) == value for name, value in wanted.items())
        and line in (None, site.instr.loc and site.instr.loc.line)
    )


def test_global_traffic_by_tensor_and_line():
    """64 threads: neighbouring words of one tensor, words 32 bytes apart of the other, twice on one line."""
    body = """ld.param.u64 %d2, [q1]; mad.wide.u32 %d2, %t2, 32, %d2;
    .loc 1 7 1
    ld.global.b32 %r1, [%d0];
    .loc 1 8 1
    ld.global.b32 %r2, [%d2]; st.global.b32 [%d2], %r1;
    .loc 1 9 1
    st.global.v2.b32 [%d2], {%r1, %r2};"""
    launch = launched(body, 64)
    assert of(launch, line=7) == of(launch, tensor="first") == Traffic(2, 256, 8)
    assert of(launch, line=8, kind="R") == of(launch, line=8, kind="W") == Traffic(2, 256, 64)
    assert of(launch, line=9) == Traffic(2, 512, 64)
    assert of(launch, tensor="second", space="global") == Traffic(6, 1024, 192)
    assert launch.counters.global_load == Traffic(4, 512, 72)
    tensors = launch.counters.tensors
    assert (tensors["first"].read, tensors["second"].read, tensors["second"].written) == (256, 256, 768)


def test_shared_traffic_by_array_and_line():
    """A column of 32 words conflicts 32 ways in one array; the row of the other has no conflict."""
    body = """mov.u32 %r0, straight; mov.u32 %r1, folded;
    mad.lo.u32 %r2, %t2, 4, %r0; mad.lo.u32 %r3, %t2, 128, %r1;
    .loc 1 3 1
    st.shared.b32 [%r2], %t2;
    .loc 1 4 1
    st.shared.b32 [%r3], %t2; ld.shared.b32 %r4, [%r3];"""
    launch = launched(body, 32, blocks=2)
    arrays = {site.tensor for site in launch.counters.sites.values()}
    assert len(arrays) == 2
    assert of(launch, line=3) == Traffic(2, 256, 0, 2, 2)
    assert of(launch, line=4) == Traffic(4, 512, 0, 128, 4)
    by_array = {name: of(launch, tensor=name).bank_conflicts for name in arrays}
    assert sorted(by_array.values()) == [0, 124]


def test_what_warps_issue_and_blocks_pass():
    """Two blocks of three warps: two shuffles each, one of them by the first warp alone, and three barriers."""
    body = """shfl.sync.bfly.b32 %r1, %t2, 1, 31, -1; bar.sync 0; bar.sync 0;
    setp.ge.u32 %p1, %t2, 32; @%p1 bra over; shfl.sync.down.b32 %r1, %t2, 4, 31, -1;
    over: bar.sync 0;"""
    launch = launched(body, 96, blocks=2)
    assert launch.counters.issues("shfl") == 2 * 3 + 2 * 1
    assert launch.counters.issues("bar") == launch.counters.barriers == 2 * 3


def test_matrix_products_and_multiply_adds():
    """Two warps, a product of 16 x 8 x 16 each, and one multiply-add a thread."""
    body = """mov.b32 %r0, 0; fma.rn.f32 %r9, %r0, %r0, %r0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r0, %r0, %r0, %r0}, {%r0, %r0},
      {%r0, %r0, %r0, %r0};"""
    counters = launched(body, 64).counters
    assert counters.issues("mma") == 2
    assert counters.multiply_adds == 64 + 2 * 16 * 8 * 16


COPY = """cp.async.ca.shared.global [%r8], [%d0], 4; cp.async.commit_group;"""
STEP = "fma.rn.f32 %r9, %r9, %r9, %r9;\n"
START = "mov.u32 %r8, straight; mad.lo.u32 %r8, %t2, 4, %r8; mov.b32 %r9, 0;"


@pytest.mark.parametrize(
    ("body", "overlap", "groups"),
    [
        (COPY + 4 * STEP + "cp.async.wait_group 0;", None, 1),  # the prologue: nothing could be done before it
        (STEP + COPY + "cp.async.wait_group 0;" + STEP, 0, 1),
        (STEP + COPY + 3 * STEP + "cp.async.wait_group 0;", 3, 1),
        (STEP + COPY + 3 * STEP + "cp.async.wait_all;", 3, 1),
        # Two under way: the first waits for 2 + 3, the second for 3 + 1.
        (STEP + COPY + 2 * STEP + COPY + 3 * STEP + "cp.async.wait_group 1;" + STEP + "cp.async.wait_group 0;", 4, 2),
        # A group without copies counts for nothing.
        (STEP + COPY + 2 * STEP + "cp.async.commit_group; cp.async.wait_group 0;", 2, 1),
    ],
)  # fmt: skip
def test_multiply_adds_that_hide_a_copy(body, overlap, groups):
    counters = launched(START + body, 32).counters
    assert counters.copy_overlap == overlap
    assert counters.issues("cp") == groups


def test_multiply_adds_of_a_loop_hide_a_copy():
    """What lies in basic blocks between commit and wait counts as well: five turns of two."""
    loop = f"mov.u32 %r5, 0; again: {2 * STEP} add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5; @%p1 bra again;"
    launch = launched(START + STEP + COPY + loop + "cp.async.wait_group 0;", 32)
    assert launch.counters.copy_overlap == 10
    (overlap,) = launch.counters.overlaps.values()
    assert overlap.instr.name == "cp.async.wait_group"


def test_nothing_is_counted_where_nobody_asks():
    body = START + STEP + COPY + "cp.async.wait_group 0; bar.sync 0; shfl.sync.bfly.b32 %r1, %t2, 1, 31, -1;"
    counters = launched(body, 32, checks=Checks(counters=False)).counters
    assert not counters.sites and not counters.issued and not counters.overlaps
