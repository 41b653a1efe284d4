"""Synchronization idioms of the PTX memory model have no race; each of their near misses has one.

Blocks 0, 1 and 2 run different code on zeroed words: F and G are flags, D is data.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from kernel_tools import Bench
from ptx_tools import find_errors

CELLS = {"F": "[%d0]", "G": "[%d0+4]", "D": "[%d0+64]", "S": "[s]", "P": "[%d1+64]", "N": "[%d2+64]"}
SET, GET = "st.global.u32 D, 42; ", "ld.global.u32 %r2, D; "
RELEASE, ACQUIRE = "st.release.gpu.global.u32 F, 1; ", "wait ld.acquire.gpu.global.u32 F is 1; "
RELAXED, POLL = "st.relaxed.gpu.global.u32 F, 1; ", "wait ld.relaxed.gpu.global.u32 F is 1; "
FENCE = "fence.acq_rel.gpu; "
ADD = "atom.relaxed.gpu.global.add.u32 %r0, F, 1; "
FIRST_LANE = "setp.ne.u32 %p1, %t2, 0; @%p1 bra done; "
LAST = "setp.ne.u32 %p1, %r0, 1; @%p1 bra done; "
# each warp's first lane: addresses of its own word and of its neighbour's
OWN = "mov.u32 %r5, %tid.x; shr.u32 %r5, %r5, 5; xor.b32 %r6, %r5, 1; and.b32 %r7, %t2, 31; setp.ne.u32 %p1, %r7, 0; @%p1 bra done; "
OWN += "mad.wide.u32 %d1, %r5, 4, %d0; mad.wide.u32 %d2, %r6, 4, %d0; "
LOCK = "again{0}: atom.acquire.gpu.global.cas.b32 %r0, F, 0, 1; setp.ne.u32 %p2, %r0, 0; @%p2 bra again{0}; "
CLASSIC = LOCK.replace("acquire", "relaxed") + "membar.gl; "
COUNT = "ld.global.u32 %r3, D; add.u32 %r3, %r3, 1; st.global.u32 D, %r3; "
TICKET = """atom.relaxed.gpu.global.add.u32 %r0, F, 1; turn{0}: ld.acquire.gpu.global.u32 %r1, G; setp.ne.u32 %p2, %r1, %r0;
    @%p2 bra turn{0}; """ + COUNT + "add.u32 %r1, %r0, 1; st.release.gpu.global.u32 G, %r1; "  # fmt: skip
SWAP = "again: atom.relaxed.gpu.global.cas.b32 %r0, F, 1, 2; setp.ne.u32 %p2, %r0, 1; @%p2 bra again; "
WARPS = "and.b32 %r7, %t2, 31; setp.ne.u32 %p1, %r7, 0; @%p1 bra done; setp.ge.u32 %p2, %t2, 32; @%p2 bra second; FIRST bra done; second: SECOND"


class Idiom(NamedTuple):
    """PTX of each block, and edits (old -> new) that cause a race."""

    parts: tuple[str, ...]
    near_misses: tuple[tuple[str, str], ...]
    threads: int = 1
    cluster: int = 1


def make_lock(acquire: str, release: str) -> tuple[str, str]:
    """Return two blocks that increment a counter under a lock."""
    return acquire.format(0) + COUNT + release, acquire.format(1) + COUNT + release


def make_warps(first: str, second: str) -> tuple[str]:
    """Return one block whose two warps run different code."""
    return (WARPS.replace("FIRST", first).replace("SECOND", second),)


FINISH = SET.replace("D", "P") + "bar.sync 0; " + FIRST_LANE + FENCE + ADD + LAST + FENCE
IDIOMS = {
    "release, acquire": Idiom(
        (SET + RELEASE, ACQUIRE + GET),
        (
            ("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed"), ("st.release.gpu", "st.release.cta"),
            ("ld.acquire.gpu", "ld.acquire.cta"), ("st.release.gpu", "st.release.cluster"), (SET + RELEASE, RELEASE + SET),
            (ACQUIRE + GET, GET + ACQUIRE), ("st.release.gpu.global", "st.global"),
        ),
    ),
    "fence and relaxed, relaxed and fence": Idiom(
        (SET + FENCE + RELAXED, POLL + FENCE + GET),
        (
            (FENCE + RELAXED, RELAXED), (FENCE + GET, GET), (FENCE + RELAXED, RELAXED + FENCE), (POLL + FENCE, FENCE + POLL),
            (FENCE + RELAXED, "fence.acq_rel.cta; " + RELAXED), (POLL + FENCE, POLL + "fence.acq_rel.cta; "),
            (SET + FENCE, FENCE + SET), (FENCE + GET, GET + FENCE),
        ),
    ),
    "membar and volatile": Idiom(
        (SET + "membar.gl; st.volatile.global.u32 F, 1; ", "wait ld.volatile.global.u32 F is 1; membar.gl; " + GET),
        (("membar.gl; st", "membar.cta; st"), ("membar.gl; ld", "ld"), ("membar.gl; st", "st")),
    ),
    "one-way fences": Idiom(
        (SET + "fence.release.gpu; " + RELAXED, POLL + "fence.acquire.gpu; " + GET),
        (("fence.release", "fence.acquire"), ("fence.acquire", "fence.release")),
    ),
    "release, then a relaxed store by the same thread": Idiom(
        (SET + RELEASE + RELAXED.replace("1;", "2;"), ACQUIRE.replace("is 1", "is 2") + GET),
        ((RELEASE, RELEASE.replace("F", "G")), (RELEASE, "")),
    ),
    "relaxed load, then an acquire of the same place": Idiom(
        (SET + RELEASE, POLL + "ld.acquire.gpu.global.u32 %r3, F; " + GET),
        (("%r3, F", "%r3, G"), ("ld.acquire.gpu", "ld.acquire.cta")),
    ),
    "reduction that releases": Idiom(
        (SET + "red.release.gpu.global.add.u32 F, 1; ", ACQUIRE + GET), (("red.release", "red.relaxed"),)
    ),
    "chain of atomics through a third block": Idiom(
        (SET + RELEASE, SWAP, ACQUIRE.replace("is 1", "is 2") + GET),
        (
            (SWAP, POLL + RELAXED.replace("1;", "2;")), ("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed"),
            ("atom.relaxed.gpu", "atom.relaxed.cta"),
        ),
    ),
    "chain of blocks": Idiom(
        (SET + RELEASE, ACQUIRE + RELEASE.replace("F", "G"), ACQUIRE.replace("F", "G") + GET),
        (
            (ACQUIRE + RELEASE.replace("F", "G"), POLL + RELEASE.replace("F", "G")), ("st.release.gpu.global.u32 G", "st.relaxed.gpu.global.u32 G"),
        ),
    ),
    "compare and swap that publishes": Idiom(
        (SET + FENCE + "atom.relaxed.gpu.global.cas.b32 %r0, F, 0, 1; st.global.u32 G, %r0; ", ACQUIRE + GET),
        # a failed swap publishes nothing: the 0 was there before
        ((" F, 0, 1; st.global.u32 G, %r0; |is 1", " F, 7, 1; st.global.u32 G, %r0; |is 0"),),
    ),
    "last block resets, Mojo's atomics": Idiom(
        ("fence.sc.sys; atom.acquire.sys.global.add.u32 %r0, F, 1; " + LAST + "st.global.u32 F, 0; ",) * 2,
        (("sys.global.add", "cta.global.add"), ("fence.sc.sys; ", "st.global.u32 F, 0; ")),
    ),
    "last block resets, relaxed": Idiom(
        (ADD + LAST + "st.global.u32 F, 0; ",) * 2,
        (("atom.relaxed.gpu", "atom.relaxed.cta"), (ADD, "ld.global.u32 %r3, F; " + ADD), (LAST, ""), (ADD + "|F, 0;", GET + ADD + "|D, 0;")),
    ),
    "last block resets, fences": Idiom(
        (FENCE + ADD + FENCE + LAST + "st.global.u32 F, 0; ",) * 2, ((ADD, ADD.replace("gpu", "cta")),)
    ),
    "last block reads the data of all blocks": Idiom(
        (FINISH + "ld.global.u32 %r2, [%d0+196]; ld.global.u32 %r3, [%d0+452]; ",) * 2,
        (
            (FENCE + ADD, ADD), (ADD + LAST + FENCE, ADD + LAST), ("bar.sync 0; ", ""), (FENCE + ADD, "fence.acq_rel.cta; " + ADD),
            (ADD, "red.relaxed.gpu.global.add.u32 F, 1; mov.u32 %r0, 1; "),
        ),
        threads=64,
    ),
    "lock": Idiom(
        make_lock(LOCK, "st.release.gpu.global.u32 F, 0; "),
        (("st.release", "st.relaxed"), ("atom.acquire", "atom.relaxed"), ("st.release.gpu.global", "st.global"), ("atom.acquire.gpu", "atom.acquire.cta")),
    ),
    "classic lock": Idiom(
        make_lock(CLASSIC, "membar.gl; atom.exch.global.b32 %r4, F, 0; "),
        ((CLASSIC.format(1), CLASSIC.format(1).replace("membar.gl", "membar.cta")), ("membar.gl; atom.exch", "atom.exch")),
    ),
    "ticket lock": Idiom(
        (TICKET.format(0), TICKET.format(1)), (("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed"))
    ),
    "barrier of the grid": Idiom(
        (SET.replace("D", "P") + "bar.sync 0; setp.ne.u32 %p2, %t2, 0; @%p2 bra meet; " + FENCE + ADD
         + "wait ld.volatile.global.u32 F is 2; " + FENCE + "meet: bar.sync 0; ld.global.u32 %r2, N; ",) * 2,
        (
            ("bar.sync 0; setp", "setp"), ("meet: bar.sync 0;", "meet:"), (FENCE + ADD, ADD), (FENCE + "meet", "meet"),
            # a fence in every warp does not replace the barrier
            (FENCE + "meet: bar.sync 0; ", "meet: " + FENCE),
        ),
        threads=64,
    ),
    "cluster scope": Idiom(
        (SET + RELEASE.replace("gpu", "cluster"), ACQUIRE.replace("gpu", "cluster") + GET),
        (("ld.acquire.cluster", "ld.acquire.cta"), ("st.release.cluster", "st.relaxed.cluster")),
        cluster=2,
    ),
    "block scope between warps": Idiom(
        make_warps(SET + RELEASE.replace("gpu", "cta"), ACQUIRE.replace("gpu", "cta") + GET),
        (
            ("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed"),
            # another warp's release does not cover a store after this warp's release
            ("bra done; second:", SET + "bra done; second: " + "st.release.cta.global.u32 F, 1; "),
        ),
        threads=64,
    ),
    "flag in shared memory": Idiom(
        make_warps(
            SET + "st.shared.u32 [s+4], 42; st.release.cta.shared.u32 S, 1; ",
            "wait ld.acquire.cta.shared.u32 S is 1; ld.shared.u32 %r3, [s+4]; " + GET,
        ),
        (("st.release", "st.relaxed"), ("ld.acquire", "ld.relaxed")),
        threads=64,
    ),
    "last warp reads and resets in shared memory": Idiom(
        (OWN + "mov.u32 %r4, s; mad.lo.u32 %r4, %r5, 4, %r4; st.shared.u32 [%r4+8], 1; fence.acq_rel.cta; "
         + "atom.relaxed.cta.shared.add.u32 %r0, S, 1; fence.acq_rel.cta; " + LAST
         + "ld.shared.u32 %r1, [s+8]; ld.shared.u32 %r2, [s+12]; st.shared.u32 S, 0; ",),
        (("fence.acq_rel.cta; atom", "atom"), ("fence.acq_rel.cta; setp", "setp"), (LAST, "")),
        threads=64,
    ),
    # bugs from public reports, with the correct form
    "split-K blocks in turn (NVIDIA/Fuser#2391)": Idiom(
        (
            SET.replace("D", "P") + "membar.gl; bar.sync 0; " + FIRST_LANE + "st.volatile.global.u32 F, 1; ",
            "setp.ne.u32 %p1, %t2, 0; @%p1 bra meet; wait ld.volatile.global.u32 F is 1; membar.gl; meet: bar.sync 0; "
            + GET.replace("D", "N"),
        ),
        # only fence.sc (membar) is cumulative over the barrier
        (("membar.gl; bar", "bar"), ("membar.gl; bar", FENCE + "bar"), ("membar.gl; meet", FENCE + "meet")),
        threads=64,
    ),
    "histograms merged before the count (NVIDIA/cccl#10627)": Idiom(
        ("red.relaxed.gpu.global.add.u32 D, 1; bar.sync 0; " + FIRST_LANE + FENCE + ADD + LAST + FENCE + GET,) * 2,
        (("bar.sync 0; " + FIRST_LANE + FENCE, FENCE + FIRST_LANE),),
        threads=64,
    ),
    "spin loop before a warp barrier (NVIDIA/cutlass#3117)": Idiom(
        (SET + "red.release.sys.global.add.u32 F, 1; ", "wait ld.acquire.sys.global.u32 F is 1; bar.warp.sync -1; " + GET),
        (("ld.acquire", "ld.relaxed"),),
    ),
    "look-back of a scan (JuliaGPU/AcceleratedKernels.jl#98)": Idiom(
        ("mov.b64 %d5, 180388626433; st.relaxed.gpu.global.b64 F, %d5; ",
         "look: ld.relaxed.gpu.global.b64 %d5, F; cvt.u32.u64 %r1, %d5; setp.ne.u32 %p3, %r1, 1; @%p3 bra look; "),
        (("mov.b64 %d5, 180388626433; st.relaxed.gpu.global.b64 F, %d5; |look: ld.relaxed.gpu.global.b64 %d5, F; cvt.u32.u64 %r1, %d5;",
          SET + RELAXED + "|look: ld.relaxed.gpu.global.u32 %r1, F; " + GET),),
    ),
    "pointer of a warp in shared memory (ORNL/HeCBench#221)": Idiom(
        ("setp.ne.u32 %p1, %t2, 0; @%p1 bra meet; st.shared.u32 S, 42; meet: bar.warp.sync -1; ld.shared.u32 %r1, S; ",),
        (("bar.warp.sync -1; ", ""),),
        threads=32,
    ),
}  # fmt: skip


def find_races(idiom: Idiom, edit: tuple[str, str] = ("", ""), blocks: str = "natural") -> set[str]:
    """Return the kinds of findings after editing an idiom."""
    parts = idiom.parts
    for old, new in zip(*(side.split("|") for side in edit), strict=True):
        assert any(old in part for part in parts), f"{old!r} is not in the idiom"
        parts = tuple(part.replace(old, new) for part in parts) if old else parts
    numbers = iter(range(1000))

    def expand_wait(match: re.Match) -> str:
        load, cell, value, n = *match.groups(), next(numbers)
        return f"w{n}: {load} %r1, {cell}; setp.ne.u32 %p3, %r1, {value}; @%p3 bra w{n};"

    body = "mad.wide.u32 %d1, %i, 4, %d0; xor.b32 %r9, %i, 64; mad.wide.u32 %d2, %r9, 4, %d0; "
    body += "setp.ne.u32 %p0, %t2, 0; @%p0 bra go; st.shared.u32 [s], 0; go: bar.sync 0; "
    for block, part in enumerate(parts):
        part = re.sub(r"wait (\S+) (\w) is (\d);", expand_wait, part)
        part = re.sub(r"\bmeet\b", f"meet{block}", part)
        body += f"setp.ne.u32 %p0, %t0, {block}; @%p0 bra n{block}; {part} bra done; n{block}: "
    body = re.sub(r"\b[FGDSPN]\b(?=[,;])", lambda cell: CELLS[cell[0]], body + "done:")
    errors = find_errors(body, len(parts), idiom.threads, cells=512, declare=".shared .align 4 .b8 s[64];",
                         bench=Bench(block_order=blocks), cluster=(idiom.cluster, 1, 1))  # fmt: skip
    return {f.kind for f in errors}


RACES = {"global race", "race inside a block", "shared race", "atomic scope"}


@pytest.mark.parametrize("blocks", ["natural", "reversed"])
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_has_no_race(name, blocks):
    """One idiom is NVIDIA's threadFenceReduction, whose last block resets the counter, as compiled from Mojo and CUDA."""
    assert not find_races(IDIOMS[name], blocks=blocks)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        pytest.param(name, edit, id=f"{name}: {number}")
        for name, idiom in IDIOMS.items()
        for number, edit in enumerate(idiom.near_misses)
    ],
)
def test_near_miss_is_a_race(name, edit):
    """The scope is too narrow, a fence is missing or misplaced, or a weak store breaks a chain."""
    kinds = find_races(IDIOMS[name], edit)
    assert kinds and kinds <= RACES, edit
