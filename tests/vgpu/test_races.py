"""The race check on hand-written PTX: what conflicts, what does not, to the byte, whatever order the blocks ran in."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import kernel

from harness.vgpu.checks import races as race_check

U4 = np.uint32


def races(
    body: str,
    grid: int,
    block: int,
    *,
    cells: int = 64,
    declare: str = "",
    blocks: str = "natural",
    cluster=(1, 1, 1),
) -> list:
    """Findings of a kernel over one zeroed array `q0` of 32-bit cells; %d0 is its address."""
    bench = Bench(blocks=blocks)
    text = kernel("ld.param.u64 %d0, [q0];" + body, 0, 1, widths_in=[], widths_out=[4], declare=declare)
    text = text.replace("st.global.b32 [%a0], %y0;", "")
    bench.run(text, grid, block, bench.place("cells", np.zeros(cells, U4)), cluster=cluster)
    return bench.errors()


MINE = "mad.wide.u32 %d1, %i, 4, %d0;"
ORDERS = pytest.mark.parametrize("blocks", ["natural", "reversed", "shuffled:2"])


@ORDERS
@pytest.mark.parametrize(
    "body,kind",
    [
        ("st.global.u32 [%d0], 1;", "global race"),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.global.u32 [%d0+4], 1; ld.global.u32 %r1, [%d0+4];", "global race"),
        ("setp.eq.u32 %p1, %t0, 2; @%p1 st.global.u32 [%d0], 1; red.global.add.u32 [%d0], 1;", "global race"),
        ("setp.eq.u32 %p1, %t0, 0; @%p1 ld.global.u32 %r1, [%d0]; @!%p1 red.global.add.u32 [%d0], 1;", "global race"),
        ("red.global.add.u32 [%d0], 1;", None),
        ("ld.global.u32 %r1, [%d0];", None),
        (MINE + "st.global.u32 [%d1], 1; ld.global.u32 %r1, [%d1];", None),
        (MINE + "st.global.u32 [%d1], 1; xor.b32 %r1, %i, 1; mad.wide.u32 %d2, %r1, 4, %d0; ld.global.u32 %r2, [%d2];",
         "global race"),
    ],
)  # fmt: skip
def test_between_blocks(body, kind, blocks):
    findings = races(body, 4, 1, blocks=blocks)
    assert {f.kind for f in findings} == ({kind} if kind else set())


@pytest.mark.parametrize(
    "body,kind",
    [
        ("st.global.u32 [%d0], 1;", "race inside a block"),
        ("st.shared.u32 [s], 1;", "shared race"),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; ld.shared.u32 %r1, [s];", "shared race"),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.sync 0; ld.shared.u32 %r1, [s];", None),
        # a write after a read needs a barrier too
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.sync 0; ld.shared.u32 %r1, [s];"
         " setp.eq.u32 %p2, %t2, 5; @%p2 st.shared.u32 [s], 2;", "shared race"),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 0; bar.sync 0; red.shared.add.u32 [s], 1;", None),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 0; red.shared.add.u32 [s], 1;", "shared race"),
        # threads 0 and 1 of one warp, ordered by a warp barrier; then thread 40 of another warp, which is not
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 1;"
         " @%p2 st.shared.u32 [s], 2;", None),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 40;"
         " @%p2 st.shared.u32 [s], 2;", "shared race"),
        # through global memory: ordered inside a warp by a warp barrier, not across warps
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.global.u32 [%d0], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 1;"
         " @%p2 ld.global.u32 %r1, [%d0];", None),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.global.u32 [%d0], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 40;"
         " @%p2 ld.global.u32 %r1, [%d0];", "race inside a block"),
        # a shuffle, a vote or a match makes a warp meet, and orders no memory: cuCollections #337
        *(
            (f"setp.eq.u32 %p1, %t2, 0; @%p1 st.{space} {cell}, 1; {meet} ld.{space} %r1, {cell};", kind)
            for meet in ("shfl.sync.idx.b32 %r2, %t2, 0, 31, -1;", "vote.sync.ballot.b32 %r2, %p1, -1;",
                         "match.any.sync.b32 %r2, %t2, -1;", "redux.sync.add.u32 %r2, %t2, -1;")
            for space, cell, kind in (("shared.u32", "[s]", "shared race"), ("global.u32", "[%d0]", "race inside a block"))
        ),
        ("bar.warp.sync -1; setp.lt.u32 %p1, %t2, 2; @%p1 st.global.u32 [%d0], 1;", "race inside a block"),
        # the same store again after a barrier, by another thread
        ("setp.eq.u32 %p1, %t2, 3; @%p1 st.global.u32 [%d0], 1; bar.sync 0; setp.eq.u32 %p2, %t2, 9;"
         " @%p2 st.global.u32 [%d0], 2;", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [race_check.LIMIT, 0], ids=["", "short log"])
def test_inside_a_block(body, kind, limit, monkeypatch):
    monkeypatch.setattr(race_check, "LIMIT", limit)
    findings = races(body, 1, 64, declare=".shared .align 4 .b8 s[64];")
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.text() for f in findings]


@pytest.mark.parametrize("space", ["shared", "global"])
def test_bytes_are_told_apart(space):
    """Neighbouring bytes and halves of one word are different places; the same byte is not."""
    base = "mov.u64 %d1, s;" if space == "shared" else "mov.b64 %d1, %d0;"
    declare = ".shared .align 4 .b8 s[512];"
    own = base + f"cvt.u64.u32 %d2, %t2; add.u64 %d1, %d1, %d2; st.{space}.u8 [%d1], %r1;"
    halves = base + f"mad.wide.u32 %d1, %t2, 2, %d1; cvt.u16.u32 %h1, %t2; st.{space}.u16 [%d1], %h1;"
    pairs = (
        base + f"shr.u32 %r2, %t2, 1; cvt.u64.u32 %d2, %r2; add.u64 %d1, %d1, %d2; st.{space}.u8 [%d1], %r1;"
    )
    zero = "mov.u32 %r1, 0;"
    assert not races(zero + own, 1, 64, declare=declare)
    assert not races(zero + halves, 1, 64, declare=declare)
    (f,) = races(zero + pairs, 1, 64, declare=declare)
    assert f.count == 32
    # a wide load over bytes that others store
    wide = own + f"mov.b64 %d1, {'%d0' if space == 'global' else 's'}; ld.{space}.u32 %r3, [%d1];"
    assert {f.kind for f in races(zero + wide, 1, 64, declare=declare)} == {
        "shared race" if space == "shared" else "race inside a block"
    }


SCOPE = "atomic scope"
ADD = "red.relaxed.{}.global.add.u32 [%d0], 1;"


@ORDERS
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (ADD.format("cta"), SCOPE),
        (ADD.format("gpu"), None),
        (ADD.format("sys"), None),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 " + ADD.format("cta") + " @!%p1 " + ADD.format("gpu"), SCOPE),
        # each block its own cell: block scope is enough
        (ADD.format("cta").replace("%d0", "%d1"), None),
        ("atom.relaxed.cta.global.add.u32 %r5, [%d0], 1; mad.wide.u32 %d2, %i, 4, %d0; st.global.u32 [%d2+64], %r5;", SCOPE),
        ("atom.relaxed.cta.global.cas.b32 %r5, [%d0], 0, 1; mad.wide.u32 %d2, %i, 4, %d0; st.global.u32 [%d2+64], %r5;", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.cta.global.u32 [%d0], 1; ld.relaxed.gpu.global.u32 %r5, [%d0];", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.gpu.global.u32 [%d0], 1; ld.relaxed.cta.global.u32 %r5, [%d0];", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.gpu.global.u32 [%d0], 1; ld.relaxed.gpu.global.u32 %r5, [%d0];", None),
        # loads alone, of any strength and scope
        ("ld.relaxed.cta.global.u32 %r5, [%d0]; ld.global.u32 %r6, [%d0]; ld.relaxed.gpu.global.u32 %r7, [%d0];", None),
        ("red.relaxed.cta.shared.add.u32 [s], 1;", None),
    ],
)  # fmt: skip
def test_scope_of_atomics_between_blocks(body, kind, blocks):
    """Block scope is enough inside one block, and in memory that only one block uses."""
    begin = "mad.wide.u32 %d1, %t0, 4, %d0; setp.ne.u32 %p2, %t2, 0; @%p2 bra w; st.shared.u32 [s], 0; w: bar.sync 0;"
    findings = races(begin + body, 4, 2, blocks=blocks, declare=".shared .align 4 .b8 s[4];")
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.text() for f in findings]
    assert all("block scope" in f.message for f in findings)


@ORDERS
def test_unused_atomic_result_orders_nothing(blocks):
    """Mojo's plain atomics have acquire semantics by name; only a result that is used can order anything."""
    body = """setp.eq.u32 %p1, %t0, 0;  @%p1 st.global.u32 [%d0+64], 0;
    fence.sc.sys;  atom.acquire.sys.global.add.u32 %r9, [%d0], 1;  setp.ne.u32 %p2, %t0, 0;
    @%p2 st.global.u32 [%d0+64], 5;"""
    assert {f.kind for f in races(body, 3, 1, blocks=blocks)} == {"global race"}


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_async_copy_into_a_buffer_that_others_still_read(barrier):
    body = f"""mov.u32 %r1, s; mad.lo.u32 %r2, %t2, 4, %r1; st.shared.u32 [%r2], 1; bar.sync 0;
    xor.b32 %r3, %t2, 33; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3]; {barrier}
    mad.wide.u32 %d1, %t2, 4, %d0; cp.async.ca.shared.global [%r2], [%d1], 4; bar.sync 0; cp.async.wait_all; bar.sync 0;"""
    findings = races(body, 1, 64, declare=".shared .align 4 .b8 s[256];")
    assert {f.kind for f in findings} == (set() if barrier else {"shared race"})


def test_one_finding_per_cause_with_a_count():
    """A race of many elements, in many batches, is one finding."""
    bench = Bench()
    bench.gpu.batch_threads = 64
    text = kernel("ld.param.u64 %a0, [q0]; and.b32 %r1, %i, 31; mad.wide.u32 %a0, %r1, 4, %a0; mov.u32 %y0, 3;", 0, 1,
                  widths_in=[], widths_out=[4])  # fmt: skip
    bench.run(text, 40, 32, bench.place("cells", np.zeros(32, U4)))
    (f,) = bench.errors()
    assert f.kind == "global race" and f.tensor == "cells" and f.count >= 32 and f.text().count("\n") <= 5


def test_shared_memory_of_other_blocks_is_not_shared():
    assert not races("st.shared.u32 [s], 1;", 64, 1, declare=".shared .align 4 .b8 s[64];")


def test_counters_of_patterns():
    """Strided loads touch one sector each; a column of a 32-wide tile conflicts 32 ways, 8-byte words 2 parts."""
    bench = Bench()
    body = """ld.param.u64 %d0, [q0]; mad.wide.u32 %d1, %i, 32, %d0; ld.global.u32 %r1, [%d1];
    mov.u32 %r2, s; mad.lo.u32 %r3, %t2, 128, %r2; st.shared.u32 [%r3], %r1; mad.lo.u32 %r3, %t2, 8, %r2; bar.sync 0;
    st.shared.u64 [%r3], %d0; red.shared.add.u32 [s], 1; red.global.add.u32 [%d0], 1;"""
    text = kernel(body, 0, 1, widths_in=[], widths_out=[4], declare=".shared .align 8 .b8 s[4096];")
    launch = bench.run(
        text.replace("st.global.b32 [%a0], %y0;", ""), 2, 32, bench.place("c", np.zeros(1024, U4))
    )
    c = launch.counters
    assert (c.global_load.requests, c.global_load.sectors, c.global_load.bytes) == (2, 64, 256)
    assert (c.shared_store.requests, c.shared_store.cycles, c.shared_store.ideal) == (
        4,
        2 * 32 + 2 * 2,
        2 + 4,
    )
    assert (c.atomics, c.atomics_per_address, c.barriers, c.threads) == (128, 64, 2, 64)


CLUSTER = "barrier.cluster.arrive{};  {}  barrier.cluster.wait;"
WRITE_MINE = MINE + "st.global.u32 [%d1], 1;"
FIRST_READS_ALL = """mov.u32 %r1, %cluster_ctarank;  setp.ne.u32 %p1, %r1, 0;  @%p1 bra done;
    ld.global.u32 %r2, [%d1];  ld.global.u32 %r3, [%d1+4];  done:"""


@ORDERS
@pytest.mark.parametrize(
    "body,kind",
    [
        (WRITE_MINE + CLUSTER.format("", "") + FIRST_READS_ALL, None),
        (WRITE_MINE + CLUSTER.format(".release", "") + FIRST_READS_ALL, None),
        (WRITE_MINE + FIRST_READS_ALL, "global race"),
        # what is stored between arrive and wait is not covered by the arrival
        (MINE + CLUSTER.format("", "st.global.u32 [%d1], 1;") + FIRST_READS_ALL, "global race"),
        (WRITE_MINE + CLUSTER.format("", FIRST_READS_ALL), "global race"),
        # a relaxed arrival publishes what a fence before it has published, and nothing else
        (WRITE_MINE + CLUSTER.format(".relaxed", "") + FIRST_READS_ALL, "global race"),
        (WRITE_MINE + "fence.acq_rel.cluster;" + CLUSTER.format(".relaxed", "") + FIRST_READS_ALL, None),
        # the neighbour of rank 1 is rank 0 of another cluster
        (WRITE_MINE + CLUSTER.format("", "") + "ld.global.u32 %r2, [%d1+4];", "global race"),
        # rank 0 overwrites after the barrier what rank 1 has read before it (one cluster; the other has left)
        ("setp.ge.u32 %p1, %t0, 2;  @%p1 bra done;  ld.global.u32 %r2, [%d0];" + CLUSTER.format("", "")
         + "setp.eq.u32 %p1, %t0, 1;  @%p1 bra done;  st.global.u32 [%d0], 1;  done:", None),
    ],
)  # fmt: skip
def test_a_cluster_barrier_orders_the_blocks_of_its_cluster(body, kind, blocks):
    findings = races(body, 4, 1, blocks=blocks, cluster=(2, 1, 1))
    assert {f.kind for f in findings} == ({kind} if kind else set())


# Thread 32 waits for a flag in shared memory that thread 0 sets behind its data.
FLAG = """setp.ne.u32 %p1, %t2, 5;  @%p1 bra go;  st.shared.u32 [flag], 0;  go: bar.sync 0;
    setp.ne.u32 %p1, %t2, 0;  @%p1 bra other;
    st.shared.u32 [s], 42;  st.release.cta.shared.u32 [flag], 1;  bra done;
    other: setp.ne.u32 %p1, %t2, 32;  @%p1 bra done;
    spin: ld.acquire.cta.shared.u32 %r1, [flag];  setp.eq.u32 %p3, %r1, 0;  @%p3 bra spin;
    ld.shared.u32 %r2, [s];
    done:"""


def test_a_flag_orders_only_who_has_looked_at_it():
    """Thread 40 reads the data without the flag, thread 32 with it."""
    body = FLAG.replace("setp.ne.u32 %p1, %t2, 32;", "setp.eq.u32 %p2, %t2, 64;  @%p2 ld.shared.u32 %r3, [s];  setp.ne.u32 %p1, %t2, 32;")  # fmt: skip
    (race,) = races(body, 1, 96, declare=".shared .align 4 .b8 s[4]; .shared .align 4 .b8 flag[4];")
    assert race.kind == "shared race" and (race.tensor, race.index) == ("shared array s", 0)
    assert {race.thread[0], int(re.findall(r"thread \((\d+)", race.message)[1])} == {0, 64}


# Each block of a cluster of two has a word; %r5 is the address of the other's.
OTHERS = """mov.u32 %r1, %cluster_ctarank;  xor.b32 %r3, %r1, 1;  mov.u32 %r4, s;
    mapa.shared::cluster.u32 %r5, %r4, %r3;  """
SYNC = "barrier.cluster.arrive;  barrier.cluster.wait;"


@ORDERS
@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];" + SYNC, None, ""),
        ("st.shared::cluster.u32 [%r5], %t0;" + SYNC + "ld.shared.u32 %r6, [s];", None, ""),
        ("st.shared.u32 [s], 0;" + SYNC + "red.shared::cluster.add.u32 [%r5], 1;" + SYNC + "ld.shared.u32 %r6, [s];", None, ""),
        # no barrier of the cluster between store and load; a block's own barrier is none
        ("st.shared.u32 [s], %t0;  ld.shared::cluster.u32 %r6, [%r5];" + SYNC, "shared race", "of block"),
        ("st.shared.u32 [s], %t0;  bar.sync 0;  ld.shared::cluster.u32 %r6, [%r5];" + SYNC, "shared race", "no barrier of the cluster"),
        ("st.shared::cluster.u32 [%r5], %t0;  bar.sync 0;  ld.shared.u32 %r6, [s];" + SYNC, "shared race", "of its cluster"),
        # overwritten while the other may still read
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];  st.shared.u32 [s], 7;" + SYNC, "shared race", "a load"),
        # both blocks store into the memory of block 0
        ("mov.u32 %r3, 0;  mapa.shared::cluster.u32 %r5, %r4, %r3;  st.shared::cluster.u32 [%r5], %t0;" + SYNC, "shared race", "a store"),
        # nothing keeps the other block there until it is read
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];", "early return", "may have returned"),
    ],
)  # fmt: skip
def test_shared_memory_of_other_blocks(body, kind, message, blocks):
    findings = races(
        OTHERS + body, 4, 1, declare=".shared .align 4 .b8 s[4];", blocks=blocks, cluster=(2, 1, 1)
    )
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.text() for f in findings]
    assert all(message in f.message for f in findings), [f.text() for f in findings]
