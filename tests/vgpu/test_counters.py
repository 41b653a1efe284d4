"""Counters per instruction, tensor, array and line, compared with manual counts."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import make_kernel

from harness.vgpu import Checks, Launch
from harness.vgpu.checks.counters import Traffic, sum_traffic

ARRAYS = ".shared .align 16 .b8 straight[4096]; .shared .align 16 .b8 folded[4096];"


def launch_body(body: str, threads: int, *, blocks: int = 1, checks: Checks | None = None) -> Launch:
    """Launch `body`; %d0 and %d1 are the addresses of `first` and `second`, 1,024 words each."""
    bench = Bench(checks=checks)
    body = f"mov.u64 %d0, %a0; mov.u64 %d1, %a1;\n{body}"
    file = '.file 1 "/reader/kernel.mojo"\n'
    text = make_kernel(body, (), (4, 4), declare=ARRAYS, module=file, store=False)
    arrays = [bench.upload(name, np.ones(1024, np.uint32)) for name in ("first", "second")]
    launch = bench.run(text, blocks, threads, *arrays)
    assert not bench.errors(), "\n".join(f.format() for f in bench.errors())
    return launch


def sum_sites(launch: Launch, **attributes) -> Traffic:
    """Return the traffic of all sites with these attributes; `line` is the source line."""
    line = attributes.pop("line", None)
    return sum_traffic(
        site
        for site in launch.counters.sites.values()
        if all(getattr(site, name) == value for name, value in attributes.items())
        and line in (None, site.instr.loc and site.instr.loc.line)
    )


def test_global_traffic_by_tensor_and_line():
    """64 threads access contiguous words of one tensor and, twice on one line, strided words of another."""
    body = """ld.param.u64 %d2, [q1]; mad.wide.u32 %d2, %t2, 32, %d2;
    .loc 1 7 1
    ld.global.b32 %r1, [%d0];
    .loc 1 8 1
    ld.global.b32 %r2, [%d2]; st.global.b32 [%d2], %r1;
    .loc 1 9 1
    st.global.v2.b32 [%d2], {%r1, %r2};"""
    launch = launch_body(body, 64)
    assert sum_sites(launch, line=7) == sum_sites(launch, tensor="first") == Traffic(2, 256, 8)
    assert sum_sites(launch, line=8, kind="R") == sum_sites(launch, line=8, kind="W") == Traffic(2, 256, 64)
    assert sum_sites(launch, line=9) == Traffic(2, 512, 64)
    assert sum_sites(launch, tensor="second", space="global") == Traffic(6, 1024, 192)
    assert launch.counters.global_load == Traffic(4, 512, 72)
    tensors = launch.counters.tensors
    assert (tensors["first"].read, tensors["second"].read, tensors["second"].written) == (256, 256, 768)


def test_shared_traffic_by_array_and_line():
    """A column access has 32-way bank conflicts, a row access none."""
    body = """mov.u32 %r0, straight; mov.u32 %r1, folded;
    mad.lo.u32 %r2, %t2, 4, %r0; mad.lo.u32 %r3, %t2, 128, %r1;
    .loc 1 3 1
    st.shared.b32 [%r2], %t2;
    .loc 1 4 1
    st.shared.b32 [%r3], %t2; ld.shared.b32 %r4, [%r3];"""
    launch = launch_body(body, 32, blocks=2)
    arrays = {site.tensor for site in launch.counters.sites.values()}
    assert len(arrays) == 2
    assert sum_sites(launch, line=3) == Traffic(2, 256, 0, 2, 2)
    assert sum_sites(launch, line=4) == Traffic(4, 512, 0, 128, 4)
    by_array = {name: sum_sites(launch, tensor=name).bank_conflicts for name in arrays}
    assert sorted(by_array.values()) == [0, 124]


def test_local_traffic_by_line():
    """Two warps store a word each to local memory, and one of them loads two."""
    body = """.local .align 8 .b8 kept[16]; mov.u64 %d2, kept;
    .loc 1 3 1
    st.local.b32 [%d2], %t2; st.local.b32 [%d2+4], %t2;
    setp.ge.u32 %p1, %t2, 32;
    .loc 1 4 1
    @!%p1 ld.local.v2.b32 {%r1, %r2}, [%d2];"""
    launch = launch_body(body, 64)
    assert sum_sites(launch, space="local", line=3) == Traffic(4, 512)
    assert sum_sites(launch, space="local", line=4) == Traffic(1, 256)
    assert {site.tensor for site in launch.counters.sites.values()} == {"local memory"}


def test_issued_instructions_and_barriers():
    """Two blocks of three warps: a shuffle by all warps, one by the first warp only, three barriers, a branch at thread 40."""
    body = """shfl.sync.bfly.b32 %r1, %t2, 1, 31, -1; bar.sync 0; bar.sync 0;
    setp.ge.u32 %p1, %t2, 32; @%p1 bra over; shfl.sync.down.b32 %r1, %t2, 4, 31, -1;
    over: bar.sync 0; setp.ge.u32 %p1, %t2, 40; @%p1 bra end; mov.u32 %r2, 1; end:"""
    launch = launch_body(body, 96, blocks=2)
    assert launch.counters.count_issues("shfl") == 2 * 3 + 2 * 1
    assert launch.counters.divergent_branches == 2  # in the second warp of each block
    assert launch.counters.count_issues("bar") == launch.counters.barriers == 2 * 3


def test_matrix_products_and_multiply_adds():
    """Two warps, each with one 16 x 8 x 16 product, and one multiply-add per thread."""
    body = """mov.b32 %r0, 0; fma.rn.f32 %r9, %r0, %r0, %r0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%r0, %r0, %r0, %r0}, {%r0, %r0},
      {%r0, %r0, %r0, %r0};"""
    counters = launch_body(body, 64).counters
    assert counters.count_issues("mma") == 2
    assert counters.multiply_adds == 64 + 2 * 16 * 8 * 16


COPY = """cp.async.ca.shared.global [%r8], [%d0], 4; cp.async.commit_group;"""
FMA = "fma.rn.f32 %r9, %r9, %r9, %r9;\n"
START = "mov.u32 %r8, straight; mad.lo.u32 %r8, %t2, 4, %r8; mov.b32 %r9, 0;"


@pytest.mark.parametrize(
    ("body", "overlap", "groups"),
    [
        (COPY + 4 * FMA + "cp.async.wait_group 0;", None, 1),  # prologue: no instruction before the copy
        (FMA + COPY + "cp.async.wait_group 0;" + FMA, 0, 1),
        (FMA + COPY + 3 * FMA + "cp.async.wait_group 0;", 3, 1),
        (FMA + COPY + 3 * FMA + "cp.async.wait_all;", 3, 1),
        # Two copies in flight: the first overlaps 2 + 3, the second 3 + 1.
        (FMA + COPY + 2 * FMA + COPY + 3 * FMA + "cp.async.wait_group 1;" + FMA + "cp.async.wait_group 0;", 4, 2),
        # A group without copies is not counted.
        (FMA + COPY + 2 * FMA + "cp.async.commit_group; cp.async.wait_group 0;", 2, 1),
    ],
)  # fmt: skip
def test_copy_overlap_counts_instructions_until_the_wait(body, overlap, groups):
    counters = launch_body(START + body, 32).counters
    assert counters.copy_overlap == overlap
    assert counters.count_issues("cp") == groups


def test_copy_overlap_includes_loops():
    """Instructions in all basic blocks between commit and wait count: five iterations of two."""
    loop = f"mov.u32 %r5, 0; again: {2 * FMA} add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5; @%p1 bra again;"
    launch = launch_body(START + FMA + COPY + loop + "cp.async.wait_group 0;", 32)
    assert launch.counters.copy_overlap == 10
    (overlap,) = launch.counters.overlaps.values()
    assert overlap.instr.name == "cp.async.wait_group"


def test_counters_can_be_disabled():
    body = START + FMA + COPY + "cp.async.wait_group 0; bar.sync 0; shfl.sync.bfly.b32 %r1, %t2, 1, 31, -1;"
    counters = launch_body(body, 32, checks=Checks(counters=False)).counters
    assert not counters.sites and not counters.issues and not counters.overlaps
