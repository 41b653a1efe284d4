"""Reads of unwritten shared memory without a line table: an error only if a result depends on them."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench, compile_kernels
from ptx_tools import make_kernel
from typed import unwrap

from harness.vgpu.checks import trial

SHARED = ".shared .align 4 .b8 s[256];"
THREAD_WORD = "mov.u32 %r1, s;  mad.lo.u32 %r1, %t2, 4, %r1;  "
READ_HALF = (
    THREAD_WORD
    + "setp.lt.u32 %p1, %t2, 16;  @%p1 st.shared.u32 [%r1], %t2;  bar.sync 0;  ld.shared.u32 %r2, [%r1];"
)


def run_with_unwritten_reads(body: str, *, line: bool = False, max_events: int = 0):
    """Run 32 threads on out = [0, 1, 2, ...]; return the only finding, the final `out`, and the launch."""
    text = make_kernel("ld.param.u64 %d0, [q0];" + body, declare=SHARED, store=False)
    if line:
        text = text.replace("ld.param", ".loc 1 7 1\nld.param", 1) + '.file 1 "/home/me/k.mojo"\n'
    bench = Bench()
    bench.gpu.max_events = max_events
    out = bench.upload("out", np.arange(32, dtype=np.uint32))
    launch = bench.run(text, 1, 32, out)
    (finding,) = bench.gpu.findings
    assert finding.kind == "uninitialised read" and finding.count == 16
    return finding, bench.download(out), launch


@pytest.mark.parametrize(
    ("use", "error"),
    [
        ("", False),
        # only written words are used
        ("setp.ge.u32 %p2, %t2, 16;  selp.u32 %r3, 5, %r2, %p2;  st.global.u32 [%a0], %r3;", False),
        ("add.u32 %r2, %r2, %r2;  mul.lo.u32 %r2, %r2, 0;  st.global.u32 [%a0], %r2;", False),
        ("st.global.u32 [%a0], %r2;", True),
        # used through another lane, by a branch, as an address, in an atomic
        ("shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;  st.global.u32 [%a0], %r3;", True),
        ("setp.ne.u32 %p2, %r2, 0;  @%p2 st.global.u32 [%a0], 9;", True),
        ("and.b32 %r2, %r2, 31;  mad.wide.u32 %d1, %r2, 4, %d0;  red.global.add.u32 [%d1], 1;", True),
        ("red.global.add.u32 [%a0], %r2;", True),
        # affects whether the launch ends
        ("setp.gt.u32 %p2, %r2, 99;  @%p2 trap;", True),
        ("loop: setp.gt.u32 %p2, %r2, 99;  @%p2 bra loop;", True),
    ],
)
def test_dependent_result_is_an_error(use, error):
    finding, _, _ = run_with_unwritten_reads(READ_HALF + use)
    assert finding.is_error == error
    assert ("results do not depend" in finding.message) != error


def test_second_run_has_no_side_effects():
    """Memory, counters and events match a single launch."""
    body = READ_HALF + "setp.ge.u32 %p2, %t2, 16;  selp.u32 %r3, 5, %r2, %p2;  red.global.add.u32 [%a0], %r3;"
    finding, out, launch = run_with_unwritten_reads(body, max_events=1000)
    np.testing.assert_array_equal(out, np.r_[2 * np.arange(16), np.arange(16, 32) + 5])
    assert not finding.is_error
    assert (launch.counters.atomics, launch.counters.threads) == (32, 32)
    assert sum(step.last - step.first for step in unwrap(launch.events).steps if step.kind == "A") == 32
    _, out, _ = run_with_unwritten_reads(READ_HALF + "red.global.add.u32 [%a0], %r2;")
    np.testing.assert_array_equal(out, np.r_[2 * np.arange(16), np.arange(16, 32)])  # unwritten words are 0


def test_memory_too_large_to_save_is_an_error(monkeypatch):
    monkeypatch.setattr(trial, "MAX_SAVED_BYTES", 64)
    assert run_with_unwritten_reads(READ_HALF + "st.global.u32 [%a0], 5;")[0].is_error


def test_no_second_run_with_a_line_table():
    assert run_with_unwritten_reads(READ_HALF, line=True)[0].is_error


@pytest.mark.compiles
def test_prefix_sum_of_the_library_is_not_an_error():
    """The prefix sum reads words that it does not use: a note, with or without a line table."""
    ptx = compile_kernels()["block_prefix_sum"]
    without_lines = "\n".join(
        line for line in ptx.split("\n") if not line.strip().startswith((".loc", ".file"))
    )
    for text in (ptx, without_lines):
        bench = Bench()
        a, o = bench.upload("a", np.arange(128, dtype=np.int32)), bench.empty("o", 128, np.int32)
        bench.run(text, 1, 128, o, a)
        np.testing.assert_array_equal(bench.download(o), np.cumsum(np.arange(128)))
        assert {f.kind for f in bench.gpu.findings} == {"uninitialised read"} and not bench.errors()
        assert text != ptx or all("belongs to the Mojo library" in f.format() for f in bench.gpu.findings)
