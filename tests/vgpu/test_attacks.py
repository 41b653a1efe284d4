"""Small kernels of the kinds that go wrong in practice: wrong ones are reported, right ones are clean."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import kernel

WORDS = 1024
DECLARE = ".shared .align 16 .b8 s[512]; .shared .align 16 .b8 other[512];"
# %d0 is the address of `cells` (1024 words of 1), %t0 the block, %t2 the thread, %i both; %r10 and %r11 are the thread's
# word of s and of other, %d1 the thread's cell
CELLS = "ld.param.u64 %d0, [q0]; mad.wide.u32 %d1, %i, 4, %d0;"
TILES = "mov.u32 %r8, s; mov.u32 %r9, other; mad.lo.u32 %r10, %t2, 4, %r8; mad.lo.u32 %r11, %t2, 4, %r9;"
FILL = "st.shared.u32 [%r10], %t2;"
MIRROR = "sub.u32 %r12, 127, %t2; mad.lo.u32 %r12, %r12, 4, %r8; ld.shared.u32 %r1, [%r12];"
KEEP = "st.global.u32 [%d1], %r1;"
COPY = "cp.async.ca.shared.global [%r10], [%d1], 4; cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
BAR = "bar.sync 0;"


def kinds(body: str, grid: int = 1, block: int = 128, declare: str = DECLARE) -> set[str]:
    """The kinds of errors found."""
    bench, begin = Bench(), CELLS + (TILES if declare else "")
    text = kernel(begin + body, 0, 1, widths_in=[], widths_out=[4], declare=declare)
    text = text.replace("st.global.b32 [%a0], %y0;", "")
    bench.run(text, grid, block, bench.place("cells", np.ones(WORDS, np.uint32)))
    return {f.kind for f in bench.errors()}


WRONG = {
    "a vector load runs over the end": (
        "mad.wide.u32 %d2, %t2, 16, %d0; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2+2064];", {"out-of-bounds load"}),
    "a vector store that is not aligned": (
        "mad.wide.u32 %d2, %t2, 16, %d0; st.global.v2.u32 [%d2+4], {%r1, %r2};", {"misaligned store"}),
    "one word past a shared array": ("st.shared.u32 [%r10+4], %t2;", {"out-of-bounds store"}),
    "an asynchronous copy that nobody waits for": (COPY + BAR + MIRROR + KEEP, {"uninitialised read"}),
    "a wait, but no barrier: others' copies are read": (COPY + WAIT + MIRROR + KEEP, {"shared race"}),
    "threads that return before they have written their share": (
        f"setp.ge.u32 %p1, %t2, 96; @%p1 ret; {FILL} {BAR} {MIRROR} {KEEP}", {"early return"}),
}  # fmt: skip

RIGHT = {
    "two tiles in turn, one barrier a round": f"""st.shared.u32 [%r10], %t2; {BAR} {MIRROR} st.shared.u32 [%r11], %r1;
        {BAR} sub.u32 %r12, 127, %t2; mad.lo.u32 %r12, %r12, 4, %r9; ld.shared.u32 %r1, [%r12];
        {FILL} {BAR} {MIRROR} {KEEP}""",
    "aligned vectors up to the last word": """mad.wide.u32 %d2, %i, 16, %d0;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2]; st.global.v4.u32 [%d2], {%r1, %r2, %r3, %r4};""",
    "a shuffle whose mask names those that are there": """and.b32 %r1, %t2, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra end;
        shfl.sync.bfly.b32 %r2, %t2, 2, 31, 0xAAAAAAAA; end:""",
    "named barriers of half a block each": """setp.lt.u32 %p1, %t2, 64; @%p1 bra a; bar.sync 1, 64; bra b;
        a: bar.sync 2, 64; b:""",
    "whole warps return before a barrier that they do not matter to": f"""setp.ge.u32 %p1, %t2, 64; @%p1 ret; {FILL}
        {BAR} sub.u32 %r12, 63, %t2; mad.lo.u32 %r12, %r12, 4, %r8; ld.shared.u32 %r1, [%r12]; {KEEP}""",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_reported(name):
    body, expected = WRONG[name]
    assert kinds(body, grid=2) == expected


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_are_clean(name):
    assert kinds(RIGHT[name], grid=2) == set()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("mov.u64 %d2, 0x1000000000000000; ld.u32 %r1, [%d2];", "out-of-bounds load"),  # no window has it
        ("mov.u64 %d2, 0x0200000000000000; ld.u32 %r1, [%d2+4];", "out-of-bounds load"),
        ("mov.u64 %d2, 0x0200000000000000; st.u32 [%d2], 5;", "out-of-bounds store"),
        ("mov.u64 %d2, 0x0100000000000000; ld.u32 %r1, [%d2];", "out-of-bounds load"),
        ("mov.u64 %d2, 0x0100000000000000; st.u32 [%d2], 5;", "out-of-bounds store"),
    ],
)
def test_local_and_shared_memory_that_a_kernel_does_not_have(body, kind):
    assert kinds(body, declare="") == {kind}
