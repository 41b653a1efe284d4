"""Library collectives: missing threads are an error at the call's line.

Findings inside the library (a prefix sum reads shared words that it does not use) are only notes.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench, compile_kernels, find_line
from ptx_tools import HEADER
from typed import unwrap

from harness.vgpu import VirtualGPU
from harness.vgpu.checks.divergence import compute_post_dominators, find_controlling_branches

FILE = "collectives.mojo"
BARRIER, WARP, MISSING_LANES, RETURN = (
    "barrier divergence", "warp divergence", "shuffle from an absent thread", "early return")  # fmt: skip
NAN = np.float32(np.nan)


def run_kernel(kernel: str, *args, threads: int = 128, grid: int = 1) -> tuple[Bench, np.ndarray]:
    """Run a kernel on ones; return the bench and the output, which is NaN before the launch."""
    bench = Bench()
    a = bench.upload("a", np.ones(1024, np.float32))
    o = bench.upload("o", np.full(1024, NAN))
    bench.run(compile_kernels()[kernel], grid, threads, o, a, *(np.int32(x) for x in args))
    return bench, bench.download(o)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kernel", "h", "kinds", "call"),
    [
        ("return_before_block_sum", 96, {BARRIER, RETURN}, "block.sum[block_size=BLOCK]"),
        ("return_before_block_sum", 100, {BARRIER, WARP, MISSING_LANES}, "block.sum[block_size=BLOCK]"),
        ("return_before_block_broadcast", 32, {BARRIER, RETURN}, "block.broadcast[block_size=BLOCK]"),
        ("return_before_block_broadcast", 10, {BARRIER, RETURN}, "block.broadcast[block_size=BLOCK]"),
        ("block_sum_in_branch", 64, {BARRIER, RETURN}, "block.sum[block_size=BLOCK]"),
        ("block_sum_in_branch", 70, {BARRIER, RETURN, WARP, MISSING_LANES}, "block.sum[block_size=BLOCK]"),
        ("block_sum_in_uneven_loop", 200, {BARRIER, WARP, MISSING_LANES}, "block.sum[block_size=BLOCK]"),
        ("warp_sum_in_branch", 20, {WARP, MISSING_LANES}, "warp.sum("),
        ("warp_sum_in_branch", 40, {WARP, MISSING_LANES}, "warp.sum("),
        ("warp_sum_after_return", 40, {WARP, MISSING_LANES}, "warp.sum("),
    ],
)
def test_missing_threads_are_an_error(kernel, h, kinds, call):
    bench, _ = run_kernel(kernel, h)
    errors = bench.errors()
    assert {f.kind for f in errors} == kinds, "\n".join(f.format() for f in bench.gpu.findings)
    assert len(errors) == len(bench.gpu.findings)
    start = find_line(FILE, f"def {kernel}(")
    text = (find_line(FILE, call, nth) for nth in range(10))
    line = next(number for number in text if number > start)
    assert {f.location.rsplit("/", 1)[-1].rsplit(":", 1)[0] for f in errors} == {f"{FILE}:{line}"}


@pytest.mark.compiles
def test_full_mask_shuffle_in_half_a_warp_is_an_error():
    bench, _ = run_kernel("shuffle_in_half_a_warp")
    assert {f.kind for f in bench.errors()} == {WARP, MISSING_LANES}


@pytest.mark.compiles
def test_error_in_helper_shows_its_caller():
    """The location is the helper's line; the message also contains the caller's line."""
    bench, _ = run_kernel("helper_in_branch", 20)
    assert {f.kind for f in bench.errors()} == {WARP, MISSING_LANES}
    for f in bench.errors():
        assert f.location.split(":")[-2] == str(find_line(FILE, "return warp.sum(value) / 32"))
        assert (
            f"called from {f.location.split(FILE)[0]}{FILE}:{find_line(FILE, 'value = helper_sum(value)')}"
            in f.format()
        )
        assert f.format().count("called from") == 1, f.format()


@pytest.mark.compiles
def test_block_smaller_than_a_warp_is_an_error():
    """A warp collective in a block of 20 threads reads from lanes that do not exist."""
    bench, _ = run_kernel("warp_sum_after_return", 128, threads=20)
    assert {f.kind for f in bench.errors()} == {MISSING_LANES}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kernel", "h", "grid", "expected"),
    [
        ("return_before_block_sum", 128, 1, np.full(128, 128)),
        ("block_sum_in_branch", 128, 1, np.full(128, 128)),
        ("block_sum_in_uneven_loop", 256, 1, np.full(128, 256)),
        ("warp_sum_in_branch", 64, 1, np.repeat([32, 1], 64)),
        ("partial_block_warp_sum", 32, 1, np.repeat([32, 1, np.nan], [32, 64, 32])),
        ("rows_by_warps", 7, 1, np.append(np.tile(np.arange(33, 65), 7), NAN)),
        ("sum_then_return", 50, 1, np.append(np.full(50, 50), NAN)),
    ],
)
def test_correct_calls_have_no_finding(kernel, h, grid, expected):
    bench, o = run_kernel(kernel, h, grid=grid)
    assert not bench.gpu.findings, "\n".join(f.format() for f in bench.gpu.findings)
    np.testing.assert_array_equal(o[: len(expected)], expected)


@pytest.mark.compiles
def test_findings_inside_the_library_are_notes():
    """The prefix sum reads shared words that it does not use."""
    bench, o = run_kernel("block_collectives", 2)
    assert not bench.errors()
    assert {f.kind for f in bench.gpu.findings} <= {"uninitialised read"}
    expected = [np.arange(1, 129), np.arange(128), np.zeros(128), np.ones(128), np.full(128, 256)]
    np.testing.assert_array_equal(o[: 5 * 128].reshape(5, 128), expected)


# -- control flow ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ([[1, 2], [3], [3], []], [{0, 3}, {1, 3}, {2, 3}, {3}]),  # a diamond
        ([[1, 2], [], []], [{0}, {1}, {2}]),  # two ends
        ([[1], [1, 2], []], [{0, 1, 2}, {1, 2}, {2}]),  # a loop
    ],
)
def test_post_dominators_of_small_graphs(graph, expected):
    dominators = compute_post_dominators(graph)
    assert [{k for k in range(len(graph)) if bits >> k & 1} for bits in dominators] == expected


def test_controlling_branches():
    """Enclosing branches, earlier returns and branches around the call count; earlier branches and loops do not."""
    text = f"""{HEADER}
    .func inner() {{ .reg .b32 %r<4>; vote: mov.u32 %r1, 77; ret; }}
    .visible .entry k() {{
    .reg .pred %p<5>; .reg .b32 %r<4>;
    @%p0 bra other; mov.u32 %r1, 1; bra join; other: mov.u32 %r1, 2; join:
    @%p1 bra end;
    loop: add.u32 %r1, %r1, 1; @%p2 bra loop;
    @%p3 bra skip; mov.u32 %r2, 33; call inner, (); skip: mov.u32 %r3, 44;
    end: ret; }}"""
    program = next(iter(VirtualGPU().load(text).kernels.values())).code.program
    instructions = [i for b in program.blocks for i in b.instrs if i.op == "mov"]

    def find_predicates(value: int) -> set[str]:
        instr = next(i for i in instructions if i.args[1].value == value)
        terms = (unwrap(program.blocks[k].term) for k in find_controlling_branches(program, instr))
        return {term.pred.name for term in terms if term.pred is not None}

    assert find_predicates(1) == {"p0"}
    assert find_predicates(44) == {"p1"}
    assert find_predicates(33) == find_predicates(77) == {"p1", "p3"}
