"""The race check on hand-written PTX: conflicting and ordered accesses per byte, in all block orders."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import find_errors, make_kernel

from harness.vgpu.checks import races as race_check

U4 = np.uint32


def find_races(body: str, grid: int, block: int, *, blocks: str = "natural", **options) -> list:
    """Return the errors of a kernel on 64 zeroed words at %d0, with a block order."""
    return find_errors(body, grid, block, bench=Bench(block_order=blocks), **options)


PAIR = ("{{ .reg .pred %p8, %p9; setp.ne.u32 %p8, %t2, {0}; setp.ne.u32 %p9, %t2, {1}; and.pred %p8, %p8, %p9;"
        " @%p8 bra past; bar.warp.sync {2}; past: }}")  # fmt: skip
FOURS = "and.b32 %r8, %t2, 28; mov.u32 %r9, 15; shl.b32 %r9, %r9, %r8; bar.warp.sync %r9;"
THREAD_CELL = "mad.wide.u32 %d1, %i, 4, %d0;"
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
        (THREAD_CELL + "st.global.u32 [%d1], 1; ld.global.u32 %r1, [%d1];", None),
        (THREAD_CELL + "st.global.u32 [%d1], 1; xor.b32 %r1, %i, 1; mad.wide.u32 %d2, %r1, 4, %d0; ld.global.u32 %r2, [%d2];",
         "global race"),
    ],
)  # fmt: skip
def test_races_between_blocks(body, kind, blocks):
    findings = find_races(body, 4, 1, blocks=blocks)
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
        # a warp barrier orders threads 0 and 1 of one warp, but not thread 40 of another warp
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 1;"
         " @%p2 st.shared.u32 [s], 2;", None),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.shared.u32 [s], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 40;"
         " @%p2 st.shared.u32 [s], 2;", "shared race"),
        # in global memory a warp barrier also orders only threads of its warp
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.global.u32 [%d0], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 1;"
         " @%p2 ld.global.u32 %r1, [%d0];", None),
        ("setp.eq.u32 %p1, %t2, 0; @%p1 st.global.u32 [%d0], 1; bar.warp.sync -1; setp.eq.u32 %p2, %t2, 40;"
         " @%p2 ld.global.u32 %r1, [%d0];", "race inside a block"),
        # a warp barrier orders the lanes of its mask: two lanes, groups of four, two barriers in sequence
        *(
            (f"setp.eq.u32 %p1, %t2, 0; @%p1 st.{space} {cell}, 1; {syncs} setp.eq.u32 %p2, %t2, {reader};"
             f" @%p2 ld.{space} %r1, {cell};", None if ordered else kind)
            for space, cell, kind in (("shared.u32", "[s]", "shared race"), ("global.u32", "[%d0]", "race inside a block"))
            for syncs, reader, ordered in (
                (PAIR.format(0, 1, 3), 1, True), (PAIR.format(0, 1, 3), 2, False),
                (FOURS, 3, True), (FOURS, 4, False),
                (PAIR.format(0, 1, 3) + PAIR.format(1, 2, 6), 2, True),
                (PAIR.format(1, 2, 6) + PAIR.format(0, 1, 3), 2, space.startswith("global")),
                (PAIR.format(0, 1, 3) + "bar.warp.sync -1;", 9, True),
            )
        ),
        # a shuffle, a vote or a match synchronises a warp but does not order memory: cuCollections #337
        *(
            (f"setp.eq.u32 %p1, %t2, 0; @%p1 st.{space} {cell}, 1; {meet} ld.{space} %r1, {cell};", kind)
            for meet in ("shfl.sync.idx.b32 %r2, %t2, 0, 31, -1;", "vote.sync.ballot.b32 %r2, %p1, -1;",
                         "match.any.sync.b32 %r2, %t2, -1;", "redux.sync.add.u32 %r2, %t2, -1;")
            for space, cell, kind in (("shared.u32", "[s]", "shared race"), ("global.u32", "[%d0]", "race inside a block"))
        ),
        ("bar.warp.sync -1; setp.lt.u32 %p1, %t2, 2; @%p1 st.global.u32 [%d0], 1;", "race inside a block"),
        # the same store by another thread after a barrier
        ("setp.eq.u32 %p1, %t2, 3; @%p1 st.global.u32 [%d0], 1; bar.sync 0; setp.eq.u32 %p2, %t2, 9;"
         " @%p2 st.global.u32 [%d0], 2;", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("limit", [race_check.MAX_LOGGED_ACCESSES, 0], ids=["", "short log"])
def test_races_inside_a_block(body, kind, limit, monkeypatch):
    monkeypatch.setattr(race_check, "MAX_LOGGED_ACCESSES", limit)
    findings = find_races(body, 1, 64, declare=".shared .align 4 .b8 s[64];")
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.format() for f in findings]


@pytest.mark.parametrize("space", ["shared", "global"])
def test_bytes_of_a_word_are_distinguished(space):
    """Different bytes or halves of one word do not conflict; the same byte does."""
    base = "mov.u64 %d1, s;" if space == "shared" else "mov.b64 %d1, %d0;"
    declare = ".shared .align 4 .b8 s[512];"
    byte_per_thread = base + f"cvt.u64.u32 %d2, %t2; add.u64 %d1, %d1, %d2; st.{space}.u8 [%d1], %r1;"
    halves = base + f"mad.wide.u32 %d1, %t2, 2, %d1; cvt.u16.u32 %h1, %t2; st.{space}.u16 [%d1], %h1;"
    pairs = (
        base + f"shr.u32 %r2, %t2, 1; cvt.u64.u32 %d2, %r2; add.u64 %d1, %d1, %d2; st.{space}.u8 [%d1], %r1;"
    )
    zero = "mov.u32 %r1, 0;"
    assert not find_races(zero + byte_per_thread, 1, 64, declare=declare)
    assert not find_races(zero + halves, 1, 64, declare=declare)
    (f,) = find_races(zero + pairs, 1, 64, declare=declare)
    assert f.count == 32
    # a wide load of bytes that other threads store
    wide = byte_per_thread + f"mov.b64 %d1, {'%d0' if space == 'global' else 's'}; ld.{space}.u32 %r3, [%d1];"
    assert {f.kind for f in find_races(zero + wide, 1, 64, declare=declare)} == {
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
        # one cell per block: block scope suffices
        (ADD.format("cta").replace("%d0", "%d1"), None),
        ("atom.relaxed.cta.global.add.u32 %r5, [%d0], 1; mad.wide.u32 %d2, %i, 4, %d0; st.global.u32 [%d2+64], %r5;", SCOPE),
        ("atom.relaxed.cta.global.cas.b32 %r5, [%d0], 0, 1; mad.wide.u32 %d2, %i, 4, %d0; st.global.u32 [%d2+64], %r5;", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.cta.global.u32 [%d0], 1; ld.relaxed.gpu.global.u32 %r5, [%d0];", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.gpu.global.u32 [%d0], 1; ld.relaxed.cta.global.u32 %r5, [%d0];", SCOPE),
        ("setp.eq.u32 %p1, %t0, 1; @%p1 st.relaxed.gpu.global.u32 [%d0], 1; ld.relaxed.gpu.global.u32 %r5, [%d0];", None),
        # only loads, of any strength and scope
        ("ld.relaxed.cta.global.u32 %r5, [%d0]; ld.global.u32 %r6, [%d0]; ld.relaxed.gpu.global.u32 %r7, [%d0];", None),
        ("red.relaxed.cta.shared.add.u32 [s], 1;", None),
    ],
)  # fmt: skip
def test_block_scope_atomics_between_blocks_are_reported(body, kind, blocks):
    """Block scope suffices for memory that only one block uses."""
    begin = "mad.wide.u32 %d1, %t0, 4, %d0; setp.ne.u32 %p2, %t2, 0; @%p2 bra w; st.shared.u32 [s], 0; w: bar.sync 0;"
    findings = find_races(begin + body, 4, 2, blocks=blocks, declare=".shared .align 4 .b8 s[4];")
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.format() for f in findings]
    assert all("block scope" in f.message for f in findings)


@ORDERS
def test_unused_atomic_result_orders_nothing(blocks):
    """Mojo's atomics are acquire operations by default, but only a used result orders accesses."""
    body = """setp.eq.u32 %p1, %t0, 0;  @%p1 st.global.u32 [%d0+64], 0;
    fence.sc.sys;  atom.acquire.sys.global.add.u32 %r9, [%d0], 1;  setp.ne.u32 %p2, %t0, 0;
    @%p2 st.global.u32 [%d0+64], 5;"""
    assert {f.kind for f in find_races(body, 3, 1, blocks=blocks)} == {"global race"}


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_async_copy_into_a_buffer_in_use_is_a_race(barrier):
    body = f"""mov.u32 %r1, s; mad.lo.u32 %r2, %t2, 4, %r1; st.shared.u32 [%r2], 1; bar.sync 0;
    xor.b32 %r3, %t2, 33; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3]; {barrier}
    mad.wide.u32 %d1, %t2, 4, %d0; cp.async.ca.shared.global [%r2], [%d1], 4; bar.sync 0; cp.async.wait_all; bar.sync 0;"""
    findings = find_races(body, 1, 64, declare=".shared .align 4 .b8 s[256];")
    assert {f.kind for f in findings} == (set() if barrier else {"shared race"})


def test_race_of_many_elements_is_one_finding():
    """The finding counts the elements of all batches."""
    bench = Bench()
    bench.gpu.max_batch_threads = 64
    body = "and.b32 %r1, %i, 31; mad.wide.u32 %d1, %r1, 4, %d0; st.global.u32 [%d1], 3;"
    (f,) = find_errors(body, 40, 32, cells=32, bench=bench)
    assert f.kind == "global race" and f.tensor == "cells" and f.count >= 32 and f.format().count("\n") <= 5


def test_blocks_have_separate_shared_memory():
    assert not find_races("st.shared.u32 [s], 1;", 64, 1, declare=".shared .align 4 .b8 s[64];")


def test_sectors_and_bank_conflicts_are_counted():
    """Strided loads access one sector each; a column of a 32-wide tile has 32-way conflicts, 8-byte words take 2 cycles."""
    bench = Bench()
    body = """ld.param.u64 %d0, [q0]; mad.wide.u32 %d1, %i, 32, %d0; ld.global.u32 %r1, [%d1];
    mov.u32 %r2, s; mad.lo.u32 %r3, %t2, 128, %r2; st.shared.u32 [%r3], %r1; mad.lo.u32 %r3, %t2, 8, %r2; bar.sync 0;
    st.shared.u64 [%r3], %d0; red.shared.add.u32 [s], 1; red.global.add.u32 [%d0], 1;"""
    text = make_kernel(body, declare=".shared .align 8 .b8 s[4096];", store=False)
    c = bench.run(text, 2, 32, bench.upload("c", np.zeros(1024, U4))).counters
    assert (c.global_load.requests, c.global_load.sectors, c.global_load.bytes) == (2, 64, 256)
    store = c.shared_store
    assert (store.requests, store.cycles, store.ideal_cycles) == (4, 2 * 32 + 2 * 2, 2 + 4)
    assert (c.atomics, c.atomics_per_address, c.barriers, c.threads) == (128, 64, 2, 64)


CLUSTER = "barrier.cluster.arrive{};  {}  barrier.cluster.wait;"
WRITE_THREAD_CELL = THREAD_CELL + "st.global.u32 [%d1], 1;"
FIRST_READS_ALL = """mov.u32 %r1, %cluster_ctarank;  setp.ne.u32 %p1, %r1, 0;  @%p1 bra done;
    ld.global.u32 %r2, [%d1];  ld.global.u32 %r3, [%d1+4];  done:"""


@ORDERS
@pytest.mark.parametrize(
    "body,kind",
    [
        (WRITE_THREAD_CELL + CLUSTER.format("", "") + FIRST_READS_ALL, None),
        (WRITE_THREAD_CELL + CLUSTER.format(".release", "") + FIRST_READS_ALL, None),
        (WRITE_THREAD_CELL + FIRST_READS_ALL, "global race"),
        # a store between arrive and wait is not covered by the arrival
        (THREAD_CELL + CLUSTER.format("", "st.global.u32 [%d1], 1;") + FIRST_READS_ALL, "global race"),
        (WRITE_THREAD_CELL + CLUSTER.format("", FIRST_READS_ALL), "global race"),
        # a relaxed arrival publishes only stores before an earlier fence
        (WRITE_THREAD_CELL + CLUSTER.format(".relaxed", "") + FIRST_READS_ALL, "global race"),
        (WRITE_THREAD_CELL + "fence.acq_rel.cluster;" + CLUSTER.format(".relaxed", "") + FIRST_READS_ALL, None),
        # rank 1's neighbour is rank 0 of another cluster
        (WRITE_THREAD_CELL + CLUSTER.format("", "") + "ld.global.u32 %r2, [%d1+4];", "global race"),
        # rank 0 overwrites after the barrier an element that rank 1 read before it (the other cluster has exited)
        ("setp.ge.u32 %p1, %t0, 2;  @%p1 bra done;  ld.global.u32 %r2, [%d0];" + CLUSTER.format("", "")
         + "setp.eq.u32 %p1, %t0, 1;  @%p1 bra done;  st.global.u32 [%d0], 1;  done:", None),
    ],
)  # fmt: skip
def test_cluster_barrier_orders_the_blocks_of_its_cluster(body, kind, blocks):
    findings = find_races(body, 4, 1, blocks=blocks, cluster=(2, 1, 1))
    assert {f.kind for f in findings} == ({kind} if kind else set())


# Thread 32 waits for a flag in shared memory that thread 0 sets after its data.
FLAG = """setp.ne.u32 %p1, %t2, 5;  @%p1 bra go;  st.shared.u32 [flag], 0;  go: bar.sync 0;
    setp.ne.u32 %p1, %t2, 0;  @%p1 bra other;
    st.shared.u32 [s], 42;  st.release.cta.shared.u32 [flag], 1;  bra done;
    other: setp.ne.u32 %p1, %t2, 32;  @%p1 bra done;
    spin: ld.acquire.cta.shared.u32 %r1, [flag];  setp.eq.u32 %p3, %r1, 0;  @%p3 bra spin;
    ld.shared.u32 %r2, [s];
    done:"""


def test_flag_orders_only_threads_that_read_it():
    """Thread 32 waits for the flag before it reads the data; thread 64 does not."""
    body = FLAG.replace("setp.ne.u32 %p1, %t2, 32;", "setp.eq.u32 %p2, %t2, 64;  @%p2 ld.shared.u32 %r3, [s];  setp.ne.u32 %p1, %t2, 32;")  # fmt: skip
    (race,) = find_races(body, 1, 96, declare=".shared .align 4 .b8 s[4]; .shared .align 4 .b8 flag[4];")
    assert race.kind == "shared race" and (race.tensor, race.index) == ("shared array s", 0)
    assert "no barrier between them" in race.message
    assert {race.thread[0], int(re.findall(r"thread \((\d+)", race.message)[1])} == {0, 64}


# Each of the two blocks of a cluster has a word; %r5 is the address of the other block's.
NEIGHBOUR = """mov.u32 %r1, %cluster_ctarank;  xor.b32 %r3, %r1, 1;  mov.u32 %r4, s;
    mapa.shared::cluster.u32 %r5, %r4, %r3;  """
SYNC = "barrier.cluster.arrive;  barrier.cluster.wait;"


@ORDERS
@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];" + SYNC, None, ""),
        ("st.shared::cluster.u32 [%r5], %t0;" + SYNC + "ld.shared.u32 %r6, [s];", None, ""),
        ("st.shared.u32 [s], 0;" + SYNC + "red.shared::cluster.add.u32 [%r5], 1;" + SYNC + "ld.shared.u32 %r6, [s];", None, ""),
        # no cluster barrier between store and load; a block's barrier does not count
        ("st.shared.u32 [s], %t0;  ld.shared::cluster.u32 %r6, [%r5];" + SYNC, "shared race", "of block"),
        ("st.shared.u32 [s], %t0;  bar.sync 0;  ld.shared::cluster.u32 %r6, [%r5];" + SYNC, "shared race", "no barrier of the cluster"),
        ("st.shared::cluster.u32 [%r5], %t0;  bar.sync 0;  ld.shared.u32 %r6, [s];" + SYNC, "shared race", "of its cluster"),
        # overwritten while the other block may still read
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];  st.shared.u32 [s], 7;" + SYNC, "shared race", "a load"),
        # both blocks store into the memory of block 0
        ("mov.u32 %r3, 0;  mapa.shared::cluster.u32 %r5, %r4, %r3;  st.shared::cluster.u32 [%r5], %t0;" + SYNC, "shared race", "a store"),
        # the other block can exit before its word is read
        ("st.shared.u32 [s], %t0;" + SYNC + "ld.shared::cluster.u32 %r6, [%r5];", "early return", "may have returned"),
    ],
)  # fmt: skip
def test_races_in_distributed_shared_memory(body, kind, message, blocks):
    findings = find_races(
        NEIGHBOUR + body, 4, 1, declare=".shared .align 4 .b8 s[4];", blocks=blocks, cluster=(2, 1, 1)
    )
    assert {f.kind for f in findings} == ({kind} if kind else set()), [f.format() for f in findings]
    assert all(message in f.message for f in findings), [f.format() for f in findings]
