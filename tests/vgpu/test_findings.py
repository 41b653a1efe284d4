"""Kernels with bugs: each is reported once, as an error at its Mojo line; correct code has no findings."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench, compile_kernels, find_line
from ptx_tools import covers, find_errors, make_kernel
from typed import make_stub

from harness.vgpu import cli
from harness.vgpu.driver.device import Device
from harness.vgpu.ptx.locations import find_callers, find_user_location, is_library_algorithm
from harness.vgpu.ptx.parser import Instr, Location

F4, I4 = np.float32, np.int32
FILE = "basics.mojo"


@pytest.fixture(scope="module")
def ptx():
    return compile_kernels()


def is_at(finding, text: str) -> bool:
    """Return whether the finding is at the first line of the source that contains `text`."""
    return finding.location.split(":")[-2] == str(find_line(FILE, text)) and FILE in finding.location


def get_errors(bench: Bench, *kinds: str) -> list:
    """Return the errors; assert that they have exactly these kinds."""
    errors = bench.errors()
    assert sorted(f.kind for f in errors) == sorted(kinds), "\n".join(f.format() for f in bench.gpu.findings)
    return errors


def upload_ones(bench, name, n=1000):
    return bench.upload(name, np.ones(n, F4))


@pytest.mark.compiles
def test_out_of_bounds_accesses_are_reported(ptx):
    bench = Bench()
    a, b, o = upload_ones(bench, "a"), upload_ones(bench, "b"), bench.empty("o", 1000)
    bench.run(ptx["vector_add_past_end"], 4, 256, o, a, b, I4(1000))
    loads = [f for f in get_errors(bench, "out-of-bounds load", "out-of-bounds load", "out-of-bounds store")]
    assert {f.tensor for f in loads} == {"a", "b", "o"}
    for f in loads:
        assert is_at(f, "o[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]"), f.location
        assert (f.index, f.block, f.thread, f.count) == (1000, (3, 0, 0), (232, 0, 0), 1)
        assert "past the end" in f.format() and "(232, 0, 0)" in f.format()
    np.testing.assert_array_equal(bench.download(o), np.full(1000, 2))


@pytest.mark.compiles
def test_overrun_between_packed_tensors_is_reported(ptx):
    """MAX packs several tensors in one allocation; labels make an overrun into the gap after a tensor visible."""
    bench = Bench()
    gpu = bench.gpu
    pack = gpu.allocate(3 * 512)
    for k, name in enumerate("abo"):
        gpu.name(pack + 512 * k, 400, name, (100,), "float32")
    gpu.write(pack, np.ones(100, F4))
    gpu.write(pack + 512, np.ones(100, F4))
    args = [np.uint64(pack + 512 * k) for k in (2, 0, 1)]
    bench.run(ptx["vector_add_past_end"], 1, 128, *args, I4(100))
    assert {f.tensor for f in bench.errors()} == {"a", "b", "o"}
    assert all(f.index == (100,) or f.index == 100 for f in bench.errors())


@pytest.mark.compiles
def test_read_of_unwritten_shared_memory_is_reported(ptx):
    bench = Bench()
    a, o = upload_ones(bench, "a", 64), bench.empty("o", 64)
    bench.run(ptx["shared_unwritten"], 1, 64, o, a)
    (f,) = get_errors(bench, "uninitialised read")
    assert f.tensor == "s" and f.thread == (32, 0, 0) and f.count == 32
    assert is_at(f, "o[unsafe_offset=thread_idx.x] = rebind[Float32](s[thread_idx.x])")


@pytest.mark.compiles
@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled:5"])
def test_clearing_in_the_first_block_is_a_race(ptx, order):
    """The race is reported in every block order, even if the result is correct."""
    bench = Bench(block_order=order)
    a, o = upload_ones(bench, "a", 4000), bench.upload("o", np.zeros(1, F4))
    bench.run(ptx["zero_in_first_block"], 16, 256, o, a, I4(4000))
    (f,) = get_errors(bench, "global race")
    lines = {int(w.split(":")[-2]) for w in (f.location, f.other_location)}
    assert lines == {
        find_line(FILE, "o[unsafe_offset=0] = 0"),
        find_line(FILE, "fetch_add[ordering=Ordering.RELAXED](o, total)"),
    }
    assert (bench.download(o)[0] == 4000) == (order == "natural")


@pytest.mark.compiles
def test_whole_warps_exit_before_a_barrier(ptx):
    """Hardware counts exited warps as arrived, so this is only a note."""
    bench = Bench()
    a, o = upload_ones(bench, "a", 64), bench.empty("o", 64)
    bench.run(ptx["barrier_in_branch"], 1, 64, o, a)
    assert [(f.kind, f.is_error) for f in bench.gpu.findings] == [("threads exited before a barrier", False)]
    assert "counts them as arrived" in bench.gpu.findings[0].format()


@pytest.mark.compiles
def test_step_budget_error_has_location(ptx):
    from harness.vgpu.errors import StepBudgetExceeded

    bench = Bench()
    bench.gpu.max_steps = 2000
    flag = bench.upload("flag", np.zeros(1, I4))
    with pytest.raises(StepBudgetExceeded, match=f"basics.mojo:{find_line(FILE, '.load(flag) == 0')}"):
        bench.run(ptx["spin_forever"], 1, 32, flag)
    assert [f.kind for f in bench.errors()] == ["hang"]


# -- hand-written PTX ---------------------------------------------------------------------------------------
def test_reads_of_freed_or_unwritten_memory_are_reported():
    """Freed memory cannot be read, and reads of memory that was never written are reported."""
    bench = Bench()
    a, b, o = upload_ones(bench, "a", 64), bench.empty("b", 64), bench.empty("o", 64)
    copy = make_kernel("mov.b32 %y0, %x0;", [4])
    bench.run(copy, 1, 64, o, b)
    (f,) = get_errors(bench, "uninitialised read")
    assert (f.tensor, f.index, f.count) == ("b", (0,), 64)
    bench.gpu.free(bench.address(a))
    bench.run(copy, 1, 64, o, np.uint64(bench.address(a)))
    assert bench.errors()[1].kind == "out-of-bounds load" and bench.errors()[1].count == 64


@covers("trap")
@pytest.mark.parametrize(
    "body,kind,text",
    [
        ("mov.u64 %d1, c; setp.eq.u32 %p1, %t2, 0; @%p1 st.global.u32 [%d1], 1;", "store to constant memory", "writes to c[0], a constant"),
        ("mov.u64 %d1, 0x7fff00000000; st.global.u32 [%d1], 1;", "out-of-bounds store", "far from any tensor"),
        ("ld.global.u32 %r1, [%a0+-4];", "out-of-bounds load", "before the start of cells"),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a0+4];", "misaligned load", "is not 16-byte aligned"),
        ("mov.u32 %r1, 2000; ld.shared.u32 %r2, [%r1];", "out-of-bounds load", "past the end of shared array s"),
        ("mov.b64 %d1, q0; cvta.param.u64 %d1, %d1; st.u32 [%d1], 1;", "out-of-bounds store", "kernel's parameters"),
        ("mov.u64 %d1, 64; red.global.add.u32 [%d1], 1;", "null pointer atomic", "null pointer"),
        ("mov.u64 %d1, 64; st.global.u32 [%d1], 1;", "null pointer store", "null pointer"),
        ("red.global.add.u32 [%a0+2], 1;", "misaligned atomic", "is not 4-byte aligned"),
        ("red.global.add.u32 [%a0+256], 1;", "out-of-bounds atomic", "past the end of cells"),
        ("setp.eq.u32 %p1, %t2, 3; @%p1 trap;", "trap", "the kernel stopped itself"),
        ("ld.local.u32 %r1, [l];", "uninitialised read", "reads local memory[0]"),
        ("ld.local.u32 %r1, [l+64];", "out-of-bounds load", "past the end of local memory"),
        ("red.shared.add.u32 [s], 1;", "uninitialised read", "an atomic updates shared array s[0]"),
        ("mbarrier.arrive.shared.b64 %d1, [s];", "mbarrier not initialised", "has not been initialised"),
        ("mbarrier.test_wait.shared.b64 %p1, [s], %d1;", "mbarrier not initialised", "has not been initialised"),
        ("setp.lt.u32 %p1, %t2, 16; @%p1 shfl.sync.idx.b32 %r1, %t2, 0, 31, -1; bar.sync 0;", "warp divergence", "elsewhere"),
        ("setp.lt.u32 %p1, %t2, 16; @%p1 shfl.sync.idx.b32 %r1, %t2, 20, 31, 0xFFFF; bar.sync 0;",
         "shuffle from an absent thread", "lane 20"),
        *(
            (f"setp.lt.u32 %p1, %t2, 20; @%p1 {instruction}; bar.sync 0;", "warp divergence", "by a thread that its mask leaves out")
            for instruction in ("bar.warp.sync 0xFFFF", "shfl.sync.idx.b32 %r1, %t2, 0, 31, 0xFFFF", "vote.sync.any.pred %p2, %p1, 0xFFFF",
                                "match.any.sync.b32 %r1, %t2, 0xFFFF", "redux.sync.add.u32 %r1, %t2, 0xFFFF", "elect.sync %r1|%p2, 0xFFFF")
        ),
        ("bar.warp.sync 0xFFFF;", "warp divergence", "by a thread that its mask leaves out"),
        ("setp.lt.u32 %p1, %t2, 10; @%p1 bar.sync 0;", "barrier divergence", "22 of 32"),
        ("bar.sync 0, 64;", None, ""),  # the count exceeds the block: all its threads complete the barrier
    ],
)  # fmt: skip
def test_hand_written_ptx_has_expected_findings(body, kind, text):
    errors = find_errors(
        body,
        value=1,
        declare=".shared .align 8 .b8 s[16]; .local .align 8 .b8 l[16];",
        module=".const .u32 c = 5;\n",
    )
    assert {f.kind for f in errors} == ({kind} if kind else set()), [f.format() for f in errors]
    if kind:
        assert text in errors[0].format() and "PTX line" in errors[0].location


def test_matrix_instruction_requires_a_full_warp():
    body = "mov.u32 %r1, s; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];"
    errors = find_errors(body, 1, 20, declare=".shared .align 16 .b8 s[128];")
    assert "needs all 32 threads of the warp" in errors[0].format()


def test_unreached_barriers_are_reported_and_released():
    """Two halves wait at different named barriers: a deadlock on a GPU, here reported and released."""
    body = """setp.lt.u32 %p1, %t2, 32;  @%p1 bra a;  bar.sync 1, 64;  bra done;
    a: bar.sync 2, 64;
    done:"""
    (f,) = find_errors(body, 1, 64)
    assert f.kind == "barrier divergence" and "at another barrier" in f.message
    (f,) = find_errors(
        "setp.lt.u32 %p1, %t2, 32;  @!%p1 bra done;  bar.sync 1, 64;  done: bar.sync 2;", 1, 64
    )
    assert f.kind == "barrier divergence"


def test_findings_are_located_outside_the_library():
    """A finding is located at the innermost line outside the library."""
    user = Location("/home/me/k.mojo", 7, 3)
    accessor = Location("max/kernels/src/layout/tile_tensor.mojo", 900, 1, user)
    primitive = Location("max/mojo/max/gpu/primitives/block.mojo", 100, 1, user)
    assert find_user_location(accessor) == user == find_user_location(primitive)
    assert not is_library_algorithm(accessor) and is_library_algorithm(primitive)
    assert not is_library_algorithm(user) and not is_library_algorithm(None)
    # merged from several lines: the nearest known location is the function into which it was inlined
    merged = Location(
        "max/mojo/max/gpu/primitives/block.mojo", 100, 1, Location("/home/me/k.mojo", 0, 0, user)
    )
    assert find_user_location(merged) == user and is_library_algorithm(merged)


def test_unrolled_race_without_line_table_is_one_finding():
    """Sixteen stores of the same kind have one cause."""
    stores = "".join(f"st.global.u32 [%d0+{4 * k}], %t0;" for k in range(16))
    (race,) = find_errors(stores, 4, 1)
    assert race.kind == "global race" and race.count >= 16 and "PTX line" in race.location


def test_findings_without_line_table_suggest_g1(capsys):
    bench = Bench()
    find_errors("st.global.u32 [%d0], %t0;", 4, 1, bench=bench)
    cli.summarise([make_stub(Device, gpu=bench.gpu, errors=[])], "sm_90a", 0)
    assert "compile with -g1" in capsys.readouterr().err


BLOCK_INDEX = "mov.u32 %r1, %ctaid.x; "  # a register that is not a pointer


@pytest.mark.parametrize(
    "address,kind",
    [
        # element 2 ** 20 of the first tensor is in the second
        ("add.s64 %d1, %d0, {far};", "out-of-bounds store"),
        ("mov.u64 %d2, {far}; mul.wide.u32 %d3, %r1, 4; add.s64 %d2, %d2, %d3; add.s64 %d1, %d0, %d2;",
         "out-of-bounds store"),
        # the second tensor's pointer
        ("ld.param.u64 %d1, [q1];", None),
        # either pointer, selected at run time: valid
        ("ld.param.u64 %d2, [q1]; setp.eq.u32 %p1, %t2, 99; selp.b64 %d1, %d0, %d2, %p1;", None),
        # computed from the difference of both pointers
        ("ld.param.u64 %d2, [q1]; sub.s64 %d3, %d2, %d0; add.s64 %d1, %d0, %d3;", None),
        # a pointer loaded from memory
        ("ld.param.u64 %d3, [q2]; ld.global.u64 %d1, [%d3];", None),
    ],
)  # fmt: skip
def test_access_beyond_its_tensor_is_reported(address, kind):
    bench = Bench()
    first, second = bench.upload("first", np.zeros(64, I4)), bench.upload("second", np.zeros(1 << 20, I4))
    table = bench.upload("table", np.array([bench.address(second)], np.uint64))
    far = bench.address(second) - bench.address(first)
    body = "ld.param.u64 %d0, [q0];" + BLOCK_INDEX + address.format(far=far) + "st.global.u32 [%d1], 1;"
    bench.run(make_kernel(body, (), (4, 4, 8), store=False), 1, 1, first, second, table)
    errors = bench.errors()
    assert [f.kind for f in errors] == ([kind] if kind else [])
    if kind:
        assert errors[0].tensor == "first" and errors[0].index == far // 4
        assert "so far past the end of first that it lands in second[0]" in errors[0].message


def test_access_before_its_tensor_is_reported():
    bench = Bench()
    first, second = bench.upload("first", np.zeros(1 << 20, I4)), bench.upload("second", np.zeros(64, I4))
    distance = bench.address(second) - bench.address(first)
    body = f"ld.param.u64 %d0, [q1]; sub.s64 %d1, %d0, {distance}; ld.global.u32 %r1, [%d1];"
    bench.run(make_kernel(body, (), (4, 4), store=False), 1, 1, first, second)
    (error,) = bench.errors()
    assert error.kind == "out-of-bounds load" and "before the start of second" in error.message


def test_kernel_definition_is_not_a_call(tmp_path):
    """The compiler inlines a kernel's body at its definition, which is not a call."""
    file = tmp_path / "kernel.mojo"
    file.write_text("def helper(x: Int):\n    pass\n\ndef kernel(n: Int32):\n    helper(Int(n))\n")
    definition = Location(str(file), 4, 5)
    call = Location(str(file), 5, 5, definition)

    def get_callers(at: Location) -> list[str]:
        return find_callers(Instr("ld", (), (), None, 1, at))

    assert get_callers(call) == []
    assert get_callers(Location(str(file), 2, 5, call)) == [f"{file}:5:5"]
    file.write_text("# edited\n" + file.read_text())
    assert get_callers(Location(str(file), 6, 5, Location(str(file), 5, 5))) == []
    missing = str(tmp_path / "missing.mojo")
    at = Location(missing, 5, 5, Location(missing, 4, 5))
    assert get_callers(at) == [f"{missing}:4:5"], "without the source no caller is omitted"


# -- common bugs and similar correct kernels ---------------------------------------------------------------
DECLARE = ".shared .align 16 .b8 s[512]; .shared .align 16 .b8 other[512];"
# %r10 and %r11 are the addresses of the thread's words of s and of other.
TILES = "mov.u32 %r8, s; mov.u32 %r9, other; mad.lo.u32 %r10, %t2, 4, %r8; mad.lo.u32 %r11, %t2, 4, %r9;"
FILL = "st.shared.u32 [%r10], %t2;"
MIRROR = "sub.u32 %r12, 127, %t2; mad.lo.u32 %r12, %r12, 4, %r8; ld.shared.u32 %r1, [%r12];"
STORE = "st.global.u32 [%a0], %r1;"
COPY = "cp.async.ca.shared.global [%r10], [%a0], 4; cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
BAR = "bar.sync 0;"

PATTERNS = {
    "vector load past the end": (
        "mad.wide.u32 %d2, %t2, 16, %d0; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2+2064];", {"out-of-bounds load"}),
    "misaligned vector store": (
        "mad.wide.u32 %d2, %t2, 16, %d0; st.global.v2.u32 [%d2+4], {%r1, %r2};", {"misaligned store"}),
    "store past a shared array": ("st.shared.u32 [%r10+4], %t2;", {"out-of-bounds store"}),
    "asynchronous copy without a wait": (COPY + BAR + MIRROR + STORE, {"unfinished copy"}),
    "wait for the copies without a barrier": (COPY + WAIT + MIRROR + STORE, {"shared race"}),
    "early return of some threads": (
        f"setp.ge.u32 %p1, %t2, 96; @%p1 ret; {FILL} {BAR} {MIRROR} {STORE}", {"early return"}),
    "two tiles, one barrier per round": (
        f"""st.shared.u32 [%r10], %t2; {BAR} {MIRROR} st.shared.u32 [%r11], %r1;
        {BAR} sub.u32 %r12, 127, %t2; mad.lo.u32 %r12, %r12, 4, %r9; ld.shared.u32 %r1, [%r12];
        {FILL} {BAR} {MIRROR} {STORE}""", set()),
    "aligned vectors to the end": (
        """mad.wide.u32 %d2, %i, 16, %d0;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2]; st.global.v4.u32 [%d2], {%r1, %r2, %r3, %r4};""", set()),
    "shuffle with a partial mask": (
        """and.b32 %r1, %t2, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra end;
        shfl.sync.bfly.b32 %r2, %t2, 2, 31, 0xAAAAAAAA; end:""", set()),
    "named barriers of half blocks": (
        """setp.lt.u32 %p1, %t2, 64; @%p1 bra a; bar.sync 1, 64; bra b;
        a: bar.sync 2, 64; b:""", set()),
    "whole warps return before a barrier": (
        f"""setp.ge.u32 %p1, %t2, 64; @%p1 ret; {FILL}
        {BAR} sub.u32 %r12, 63, %t2; mad.lo.u32 %r12, %r12, 4, %r8; ld.shared.u32 %r1, [%r12]; {STORE}""", set()),
}  # fmt: skip


@pytest.mark.parametrize(("body", "kinds"), PATTERNS.values(), ids=PATTERNS)
def test_common_patterns_have_expected_findings(body, kinds):
    errors = find_errors(TILES + body, 2, 128, cells=1024, value=1, declare=DECLARE)
    assert {f.kind for f in errors} == kinds


@pytest.mark.parametrize("window", ["0x0100000000000000", "0x0200000000000000", "0x1000000000000000"])
def test_access_to_missing_local_or_shared_memory(window):
    """Generic addresses in the windows of absent local and shared memory, and outside all windows."""
    (load,) = find_errors(f"mov.u64 %d2, {window}; ld.u32 %r1, [%d2+4];")
    (store,) = find_errors(f"mov.u64 %d2, {window}; st.u32 [%d2], 5;")
    assert (load.kind, store.kind) == ("out-of-bounds load", "out-of-bounds store")
