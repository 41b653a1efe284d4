"""Planted bugs: each is reported once, as an error, at its Mojo line; and what is allowed is not."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench, compiled, line_of
from ptx_tools import kernel
from typed import stand_in

from harness.vgpu import cli
from harness.vgpu.driver.device import Device
from harness.vgpu.ptx.parser import Instr, Location
from harness.vgpu.ptx.places import callers, is_library_algorithm, user_location

F4, I4 = np.float32, np.int32
FILE = "basics.mojo"


@pytest.fixture(scope="module")
def ptx():
    return compiled()


def at(finding, text: str, nth: int = 0) -> bool:
    """Whether the finding lies at the nth line of the kernels' file that contains `text`."""
    return finding.where.split(":")[-2] == str(line_of(FILE, text, nth)) and FILE in finding.where


def only(bench: Bench, *kinds: str) -> list:
    """The error findings, which must be of exactly these kinds."""
    errors = bench.errors()
    assert sorted(f.kind for f in errors) == sorted(kinds), "\n".join(f.text() for f in bench.gpu.findings)
    return errors


def ones(bench, name, n=1000):
    return bench.place(name, np.ones(n, F4))


@pytest.mark.compiles
def test_out_of_bounds(ptx):
    bench = Bench()
    a, b, o = ones(bench, "a"), ones(bench, "b"), bench.empty("o", 1000)
    bench.run(ptx["vector_add_past_end"], 4, 256, o, a, b, I4(1000))
    loads = [f for f in only(bench, "out-of-bounds load", "out-of-bounds load", "out-of-bounds store")]
    assert {f.tensor for f in loads} == {"a", "b", "o"}
    for f in loads:
        assert at(f, "o[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]", 1), f.where
        assert (f.index, f.block, f.thread, f.count) == (1000, (3, 0, 0), (232, 0, 0), 1)
        assert "past the end" in f.text() and "(232, 0, 0)" in f.text()
    np.testing.assert_array_equal(bench.get(o), np.full(1000, 2))


@pytest.mark.compiles
def test_null_pointer(ptx):
    bench = Bench()
    a, o = ones(bench, "a"), bench.empty("o", 1000)
    bench.run(ptx["vector_add"], 4, 256, o, a, np.uint64(0), I4(1000))
    (f,) = only(bench, "null pointer load")
    assert f.count == 1000 and "null pointer" in f.text()


@pytest.mark.compiles
def test_misaligned(ptx):
    bench = Bench()
    a, b, o = ones(bench, "a"), ones(bench, "b"), bench.place("o", np.zeros(1000, F4))
    bench.run(ptx["vector_add"], 1, 32, o, a, np.uint64(bench.address(b) + 2), I4(32))
    (f,) = only(bench, "misaligned load")
    assert f.tensor == "b" and "not 4-byte aligned" in f.text()


@pytest.mark.compiles
def test_freed_memory(ptx):
    bench = Bench()
    a, b, o = ones(bench, "a"), ones(bench, "b"), bench.empty("o", 1000)
    bench.gpu.free(bench.address(b))
    bench.run(ptx["vector_add"], 1, 256, o, a, np.uint64(bench.address(b)), I4(256))
    (f,) = only(bench, "out-of-bounds load")
    assert f.count == 256


@pytest.mark.compiles
def test_exact_tensors_inside_one_allocation(ptx):
    """MAX packs several tensors in one allocation: labelled, an overrun of one into the gap behind it is seen."""
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
def test_never_written_input(ptx):
    bench = Bench()
    a, b, o = ones(bench, "a"), bench.empty("b", 1000), bench.empty("o", 1000)
    bench.run(ptx["vector_add"], 4, 256, o, a, b, I4(1000))
    (f,) = only(bench, "uninitialised read")
    assert (f.tensor, f.index, f.count) == ("b", (0,), 1000) and at(f, "b[unsafe_offset=i]", 0)


@pytest.mark.compiles
def test_output_element_never_written(ptx):
    bench = Bench()
    a, o = ones(bench, "a"), bench.empty("o", 1000)
    launch = bench.run(ptx["unwritten_tail"], 4, 256, o, a, I4(1000))
    assert not launch.findings
    bench.get(o)
    (f,) = only(bench, "output never written")
    assert f.index == (999,) and f.tensor == "o"


@pytest.mark.compiles
def test_unwritten_shared_memory(ptx):
    bench = Bench()
    a, o = ones(bench, "a", 64), bench.empty("o", 64)
    bench.run(ptx["shared_unwritten"], 1, 64, o, a)
    (f,) = only(bench, "uninitialised read")
    assert f.tensor == "s" and f.thread == (32, 0, 0) and f.count == 32
    assert at(f, "o[unsafe_offset=thread_idx.x] = rebind[Float32](s[thread_idx.x])", 1)


@pytest.mark.compiles
def test_missing_barrier(ptx):
    bench = Bench()
    a, b, o = (bench.place(n, np.ones((32, 32), F4)) for n in "abo")
    bench.run(ptx["matmul_no_barrier"], (2, 2), (16, 16), o, a, b, I4(32), I4(32), I4(32))
    races = [f for f in bench.errors() if f.kind == "shared race"]
    assert {f.tensor for f in races} == {"a_tile", "b_tile"}
    lines = {
        line_of(FILE, t, 1) for t in ("a_tile[ty, tx] = a[", "b_tile[ty, tx] = b[", "total += a_tile[ty, j]")
    }
    for f in races:
        assert {int(w.split(":")[-2]) for w in (f.where, f.other)} <= lines
        assert "no barrier between them" in f.text()


@pytest.mark.compiles
@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled"])
def test_removed_atomic(ptx, order):
    bench = Bench(blocks=order)
    a, o = ones(bench, "a"), bench.place("o", np.zeros(1, F4))
    bench.run(ptx["block_sum_no_atomic"], 4, 256, o, a, I4(1000))
    assert {f.kind for f in bench.errors()} == {"global race"}
    assert all(at(f, "o[unsafe_offset=0] += total") and f.tensor == "o" for f in bench.errors())


@pytest.mark.compiles
@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled:5"])
def test_zero_in_first_block(ptx, order):
    """The race of zeroing in block (0, 0): reported in every order, whatever the value."""
    bench = Bench(blocks=order)
    a, o = ones(bench, "a", 4000), bench.place("o", np.zeros(1, F4))
    bench.run(ptx["zero_in_first_block"], 16, 256, o, a, I4(4000))
    (f,) = only(bench, "global race")
    places = {int(w.split(":")[-2]) for w in (f.where, f.other)}
    assert places == {
        line_of(FILE, "o[unsafe_offset=0] = 0"),
        line_of(FILE, "fetch_add[ordering=Ordering.RELAXED](o, total)"),
    }
    assert (bench.get(o)[0] == 4000) == (order == "natural")


@pytest.mark.compiles
@pytest.mark.parametrize("order", ["natural", "reversed"])
def test_counter_without_fence(ptx, order):
    bench = Bench(blocks=order)
    a, o, partials = ones(bench, "a"), bench.empty("o", 1), bench.empty("partials", 8)
    counter = bench.place("counter", np.zeros(1, I4))
    bench.run(ptx["last_block_no_fence"], 8, 128, o, partials, counter, a, I4(1000))
    (f,) = only(bench, "global race")
    assert f.tensor == "partials"


@pytest.mark.compiles
def test_whole_warps_exit_before_a_barrier(ptx):
    """The hardware counts warps that have returned as arrived: a note, no error."""
    bench = Bench()
    a, o = ones(bench, "a", 64), bench.empty("o", 64)
    bench.run(ptx["barrier_in_branch"], 1, 64, o, a)
    assert [(f.kind, f.is_error) for f in bench.gpu.findings] == [("threads exited before a barrier", False)]
    assert "counts them as arrived" in bench.gpu.findings[0].text()


@pytest.mark.compiles
@pytest.mark.parametrize(
    "kernel,text", [("barrier_in_branch_of_warp", "54 of 64"), ("two_barriers", "at another barrier")]
)
def test_barrier_divergence(ptx, kernel, text):
    bench = Bench()
    a, o = ones(bench, "a", 64), bench.empty("o", 64)
    bench.run(ptx[kernel], 1, 64, o, a)
    (f,) = only(bench, "barrier divergence")
    assert text in f.message and f.block == (0, 0, 0)
    start = line_of(FILE, f"def {kernel}(")
    assert start < int(f.where.split(":")[-2]) < start + 12


@pytest.mark.compiles
def test_step_budget_says_where(ptx):
    from harness.vgpu.errors import StepBudgetExceeded

    bench = Bench()
    bench.gpu.steps = 2000
    flag = bench.place("flag", np.zeros(1, I4))
    with pytest.raises(StepBudgetExceeded, match=f"basics.mojo:{line_of(FILE, '.load(flag) == 0')}"):
        bench.run(ptx["spin_forever"], 1, 32, flag)
    assert [f.kind for f in bench.errors()] == ["hang"]


@pytest.mark.compiles
def test_bank_conflicts_are_counted(ptx):
    bench = Bench()
    a, o = bench.place("a", np.arange(1024, dtype=F4)), bench.empty("o", 1024)
    launch = bench.run(ptx["bank_conflicts"], 1, 32, o, a)
    np.testing.assert_array_equal(
        bench.get(o).reshape(32, 32), np.arange(1024).reshape(32, 32).T.T.reshape(32, 32).T
    )
    c = launch.counters
    assert (c.shared_store.requests, c.shared_store.bank_conflicts) == (32, 0)
    assert c.shared_load.bank_conflicts in (32 * 31, 8 * (32 - 4)), c.shared_load  # scalar or four-wide loads
    assert c.global_load.sectors_per_request == 4


# -- hand-written PTX ---------------------------------------------------------------------------------------
def errors_of(body: str, threads: int = 32, *, declare: str = "", module: str = "") -> list:
    """Errors of a kernel whose only array is `cells`, 64 words of 1; %a0 is the thread's word."""
    bench = Bench()
    text = kernel(body, 0, 1, widths_in=[], widths_out=[4], declare=declare)
    text = text.replace("st.global.b32 [%a0], %y0;", "").replace(".visible", module + ".visible")
    bench.run(text, 1, threads, bench.place("cells", np.ones(64, np.uint32)))
    return bench.errors()


@pytest.mark.compiles
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
        ("bar.sync 0, 64;", None, ""),  # more threads than there are: all that are there is enough
    ],
)  # fmt: skip
def test_finding_on_hand_written_ptx(body, kind, text):
    errors = errors_of(
        body, declare=".shared .align 8 .b8 s[16]; .local .align 8 .b8 l[16];", module=".const .u32 c = 5;\n"
    )
    assert {f.kind for f in errors} == ({kind} if kind else set()), [f.text() for f in errors]
    if kind:
        assert text in errors[0].text() and "PTX line" in errors[0].where


def test_matrix_instruction_without_a_whole_warp():
    errors = errors_of("mov.u32 %r1, s; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", 20,
                   declare=".shared .align 16 .b8 s[128];")  # fmt: skip
    assert "needs all 32 threads of the warp" in errors[0].text()


def test_barrier_that_some_never_reach():
    """Two named barriers, each waiting for the other half: a deadlock on a GPU; reported and forced open here."""
    body = """setp.lt.u32 %p1, %t2, 32;  @%p1 bra a;  bar.sync 1, 64;  bra done;
    a: bar.sync 2, 64;
    done:"""
    (f,) = errors_of(body, 64)
    assert f.kind == "barrier divergence" and "at another barrier" in f.message
    (f,) = errors_of("setp.lt.u32 %p1, %t2, 32;  @!%p1 bra done;  bar.sync 1, 64;  done: bar.sync 2;", 64)
    assert f.kind == "barrier divergence"


def test_location_chains():
    """A finding's place is the innermost line outside of the library; library algorithms are told from accessors."""
    user = Location("/home/me/k.mojo", 7, 3)
    accessor = Location("max/kernels/src/layout/tile_tensor.mojo", 900, 1, user)
    primitive = Location("max/mojo/max/gpu/primitives/block.mojo", 100, 1, user)
    assert user_location(accessor) == user == user_location(primitive)
    assert not is_library_algorithm(accessor) and is_library_algorithm(primitive)
    assert not is_library_algorithm(user) and not is_library_algorithm(None)
    # merged out of several lines: the function that it was inlined into is the nearest that is known
    merged = Location(
        "max/mojo/max/gpu/primitives/block.mojo", 100, 1, Location("/home/me/k.mojo", 0, 0, user)
    )
    assert user_location(merged) == user and is_library_algorithm(merged)


def test_an_unrolled_race_without_line_table_is_one_finding():
    """Sixteen stores of one kind are one cause."""
    stores = "".join(f"st.global.u32 [%d0+{4 * k}], %t0;" for k in range(16))
    text = kernel("ld.param.u64 %d0, [q0];" + stores, 0, 1, widths_in=[], widths_out=[4])
    text = text.replace("st.global.b32 [%a0], %y0;", "")
    bench = Bench()
    bench.run(text, 4, 1, bench.place("cells", np.zeros(64, np.uint32)))
    (race,) = bench.errors()
    assert race.kind == "global race" and race.count >= 16 and "PTX line" in race.where


def test_findings_without_line_table_name_the_switch(capsys):
    text = kernel("ld.param.u64 %d0, [q0]; st.global.u32 [%d0], %t0;", 0, 1, widths_in=[], widths_out=[4])
    bench = Bench()
    bench.run(text, 4, 1, bench.place("cells", np.zeros(64, np.uint32)))
    cli.summarise([stand_in(Device, gpu=bench.gpu, errors=[])], "sm_90a", 0)
    assert "compile with -g1" in capsys.readouterr().err


AROUND = "mov.u32 %r1, %ctaid.x; "  # a register that is a number


@pytest.mark.parametrize(
    "address,kind",
    [
        # element 2 ** 20 of the first tensor lies in the second
        ("add.s64 %d1, %d0, {far};", "out-of-bounds store"),
        ("mov.u64 %d2, {far}; mul.wide.u32 %d3, %r1, 4; add.s64 %d2, %d2, %d3; add.s64 %d1, %d0, %d2;",
         "out-of-bounds store"),
        # the second tensor's own pointer
        ("ld.param.u64 %d1, [q1];", None),
        # one of the two, chosen while it runs: either is right
        ("ld.param.u64 %d2, [q1]; setp.eq.u32 %p1, %t2, 99; selp.b64 %d1, %d0, %d2, %p1;", None),
        # computed from both: their distance
        ("ld.param.u64 %d2, [q1]; sub.s64 %d3, %d2, %d0; add.s64 %d1, %d0, %d3;", None),
        # a pointer that memory holds
        ("ld.param.u64 %d3, [q2]; ld.global.u64 %d1, [%d3];", None),
    ],
)  # fmt: skip
def test_a_pointer_that_lands_in_another_tensor(address, kind):
    bench = Bench()
    first, second = bench.place("first", np.zeros(64, I4)), bench.place("second", np.zeros(1 << 20, I4))
    table = bench.place("table", np.array([bench.address(second)], np.uint64))
    far = bench.address(second) - bench.address(first)
    body = "ld.param.u64 %d0, [q0];" + AROUND + address.format(far=far) + "st.global.u32 [%d1], 1;"
    text = kernel(body, 0, 3, widths_in=[], widths_out=[4, 4, 8])
    for k, width in enumerate((32, 32, 64)):
        text = text.replace(f"st.global.b{width} [%a{k}], %y{k};", "")
    bench.run(text, 1, 1, first, second, table)
    errors = bench.errors()
    assert [f.kind for f in errors] == ([kind] if kind else [])
    if kind:
        assert errors[0].tensor == "first" and errors[0].index == far // 4
        assert "so far past the end of first that it lands in second[0]" in errors[0].message


def test_a_pointer_that_lands_before_its_tensor():
    bench = Bench()
    first, second = bench.place("first", np.zeros(1 << 20, I4)), bench.place("second", np.zeros(64, I4))
    back = bench.address(second) - bench.address(first)
    body = f"ld.param.u64 %d0, [q1]; sub.s64 %d1, %d0, {back}; ld.global.u32 %r1, [%d1];"
    text = kernel(body, 0, 2, widths_in=[], widths_out=[4, 4])
    for k in range(2):
        text = text.replace(f"st.global.b32 [%a{k}], %y{k};", "")
    bench.run(text, 1, 1, first, second)
    (errors,) = bench.errors()
    assert errors.kind == "out-of-bounds load" and "before the start of second" in errors.message


def test_a_kernel_is_not_called_from_its_own_definition(tmp_path):
    """The compiler inlines a kernel's body into the kernel: a place that no reader has written a call at."""
    file = tmp_path / "kernel.mojo"
    file.write_text("def helper(x: Int):\n    pass\n\ndef kernel(n: Int32):\n    helper(Int(n))\n")
    definition = Location(str(file), 4, 5)
    call = Location(str(file), 5, 5, definition)

    def called_from(at: Location) -> list[str]:
        return callers(Instr("ld", (), (), None, 1, at))

    assert called_from(call) == []
    assert called_from(Location(str(file), 2, 5, call)) == [f"{file}:5:5"]
    file.write_text("# edited\n" + file.read_text())
    assert called_from(Location(str(file), 6, 5, Location(str(file), 5, 5))) == []
    gone = Location(str(tmp_path / "gone.mojo"), 5, 5, Location(str(tmp_path / "gone.mojo"), 4, 5))
    assert called_from(gone) == [f"{tmp_path}/gone.mojo:4:5"]  # who cannot read the source leaves nothing out
