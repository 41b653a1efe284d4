"""The native engine: the same bytes as NumPy, nothing found missed, and everything that it does not know left to NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import Bench
from ptx_tools import HEADER, run
from test_random_programs import REGS, THREADS, expected, program, ptx_of
from typed import present

from harness.errors import BadUse, EnvironmentProblem
from harness.vgpu import Checks, VirtualGPU
from harness.vgpu.engines import choice
from harness.vgpu.engines.native import engine, machine_code

SHARED = f".shared .align 16 .b8 s[{16 * THREADS}];"


@pytest.fixture(autouse=True)
def chosen_here(request):
    """These tests choose the engine themselves."""
    if request.config.getoption("--engines"):
        pytest.skip("--engines runs both")


@pytest.fixture
def native(monkeypatch):
    """Launches run as machine code wherever they can."""
    if why := machine_code.unavailable():
        pytest.skip(why)
    monkeypatch.setenv(choice.VARIABLE, "native")


def bench(**options) -> Bench:
    """A device that does not count, so that it may run machine code."""
    return Bench(checks=Checks(counters=False), **options)


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True)
@given(program, st.integers(0, 1000))
def test_random_programs_end_as_an_interpreter_says(statements, seed):
    if machine_code.unavailable():
        pytest.skip("no native engine")
    x = np.random.default_rng(seed).integers(0, 1 << 32, THREADS, np.uint64).astype(np.uint32)
    device = bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choice.VARIABLE, "native")
        got = run(ptx_of(statements), [x], ["u4"] * REGS, declare=SHARED, bench=device)
    assert present(device.launch).engine == "native"
    np.testing.assert_array_equal(got, np.array(expected(statements, x), np.uint32).T)


def kernel(body: str, arrays: int = 1) -> str:
    """A kernel of some arrays, %a0 ... their addresses, %t the thread's number, %b its block's, %s that of `s`."""
    params = ", ".join(f".param .u64 q{k}" for k in range(arrays))
    loads = "".join(f"ld.param.u64 %a{k}, [q{k}];\n" for k in range(arrays))
    return f"""{HEADER}.visible .entry k({params}) {{
        .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>, %t, %b, %s; .reg .b64 %d<16>, %a<8>; .reg .f32 %f<8>;
        {SHARED}
        {loads} mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mov.u32 %s, s;
        {body}
        ret; }}"""


def launched(
    body: str, grid: int = 2, block: int = 64, elements: int = 256, written: bool = True, second: bool = False
):
    """The launch of a kernel of two arrays of 32-bit words, and what they hold afterwards."""
    device = bench()
    x = np.arange(elements, dtype=np.uint32)
    first = device.place("x", x) if written else device.empty("x", elements, np.uint32)
    y = device.place("y", np.zeros(elements, np.uint32))
    launch = device.run(kernel(body, 2), grid, block, first, y)
    return launch, [device.get(first) if written else None, device.get(y)]


OWN = "mad.lo.u32 %r0, %b, 64, %t; mad.wide.u32 %d0, %r0, 4, %a0; mad.wide.u32 %d1, %r0, 4, %a1;"
MINE = "mad.lo.u32 %r1, %t, 4, %s;"

FAULTS = {
    "out-of-bounds store": OWN + "st.global.u32 [%d0+1024], %t;",
    "out-of-bounds load": OWN + "ld.global.u32 %r2, [%d0+960]; st.global.u32 [%d1], %r2;",
    "null pointer load": OWN + "mov.u64 %d2, 0; ld.global.u32 %r2, [%d2]; st.global.u32 [%d1], %r2;",
    "misaligned load": OWN + "ld.global.u32 %r2, [%d0+2]; st.global.u32 [%d1], %r2;",
    "uninitialised read": OWN + MINE + "ld.shared.u32 %r2, [%r1]; st.global.u32 [%d1], %r2;",
    "shared race": OWN
    + MINE
    + "st.shared.u32 [%r1], %t; ld.shared.u32 %r2, [%s+8]; st.global.u32 [%d1], %r2;",
    "global race": "st.global.u32 [%a0], %t;",
    "race inside a block": OWN + "setp.ne.u32 %p1, %b, 0; @%p1 bra E; st.global.u32 [%d0], %t;"
    " ld.global.u32 %r2, [%a0+4]; st.global.u32 [%d1], %r2; E:",
    "barrier divergence": "setp.lt.u32 %p1, %t, 32; @%p1 bra A; bar.sync 0; bra E; A: bar.sync 0; E:",
    "threads exited before a barrier": "setp.lt.u32 %p1, %t, 32; @%p1 bra E; bar.sync 0; E:",
    "warp divergence": "setp.lt.u32 %p1, %t, 8; @%p1 bra O; shfl.sync.bfly.b32 %r2, %t, 1, 31, -1; bra E;"
    " O: shfl.sync.bfly.b32 %r2, %t, 1, 31, -1; E:",
    "shuffle from an absent thread": "setp.lt.u32 %p1, %t, 7; @%p1 bra E; shfl.sync.bfly.b32 %r2, %t, 1, 31, -1; E:",
    "trap": "setp.eq.u32 %p1, %t, 63; @%p1 trap;",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_finding_is_left_to_numpy_with_memory_as_it_was(native, kind):
    launch, _ = launched(FAULTS[kind])
    assert launch.engine == "NumPy" and kind in {f.kind for f in launch.findings}


def test_the_right_forms_of_these_run_natively(native):
    """So the faults above are not left to NumPy for another reason."""
    body = OWN + MINE + "ld.global.u32 %r2, [%d0]; st.shared.u32 [%r1], %r2; bar.sync 0; xor.b32 %r3, %t, 1;"
    body += "mad.lo.u32 %r3, %r3, 4, %s; ld.shared.u32 %r2, [%r3]; shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1; st.global.u32 [%d1], %r2;"
    launch, (_, y) = launched(body)
    assert launch.engine == "native" and not launch.findings
    np.testing.assert_array_equal(y[:128], np.arange(128))


def test_an_accumulation_starts_again_from_what_memory_held(native):
    """The launch adds to a tensor before it fails: NumPy must not add to what machine code has added."""
    body = (
        OWN
        + "ld.global.u32 %r2, [%d0]; add.u32 %r2, %r2, 1000; st.global.u32 [%d0], %r2; bar.sync 0; st.global.u32 [%a1], %t;"
    )
    launch, (x, _) = launched(body)
    assert launch.engine == "NumPy" and {f.kind for f in launch.findings} >= {"global race"}
    np.testing.assert_array_equal(x[:128], np.arange(128) + 1000)


RACES = {
    # a thread's newer access must not hide its older one
    "a store behind an atomic": "setp.ne.u32 %p1, %t, 0; @%p1 bra E; @!%p1 bra S; S: setp.eq.u32 %p2, %b, 1; @%p2 bra L;"
    " st.global.u32 [%a0], 5; red.global.add.u32 [%a0], 1; bra E; L: red.global.add.u32 [%a0], 1; E:",
    "a load before a store": "setp.ne.u32 %p1, %t, 0; @%p1 bra E; setp.eq.u32 %p2, %b, 1; @%p2 bra S;"
    " ld.global.u32 %r2, [%a0]; st.global.u32 [%a1], %r2; bra E; S: st.global.u32 [%a0], %r2; E:",
    "a lane beside its warp": "mov.u32 %r2, 7; setp.eq.u32 %p1, %t, 5; @%p1 st.shared.u32 [%s], %r2; bar.warp.sync -1;"
    " setp.eq.u32 %p2, %t, 40; @%p2 ld.shared.u32 %r3, [%s]; @%p2 st.global.u32 [%a1], %r3;",
    "two warps in one epoch": MINE
    + "rem.u32 %r4, %t, 32; mad.lo.u32 %r4, %r4, 4, %s; st.shared.u32 [%r4], %t;",
}


@pytest.mark.parametrize("name", RACES)
def test_races_that_one_mark_would_hide(native, name):
    launch, _ = launched(RACES[name])
    assert launch.engine == "NumPy" and any("race" in f.kind for f in launch.findings)


def test_a_warp_instruction_orders_lanes_in_shared_memory(native):
    body = (
        OWN
        + MINE
        + "st.shared.u32 [%r1], %t; bar.warp.sync -1; xor.b32 %r3, %t, 1; mad.lo.u32 %r3, %r3, 4, %s;"
    )
    launch, (_, y) = launched(
        body
        + "ld.shared.u32 %r2, [%r3]; bar.warp.sync -1; st.shared.u32 [%r3], %t; st.global.u32 [%d1], %r2;"
    )
    assert launch.engine == "native" and not launch.findings
    np.testing.assert_array_equal(y[:64], np.arange(64) ^ 1)


def test_lanes_of_different_turns_do_not_meet(native):
    """Odd lanes come to the shuffle in the second turn of the loop, even ones in the first."""
    body = (
        "mov.u32 %r4, 0; T: add.u32 %r5, %r4, %t; and.b32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0; @%p1 bra N;"
    )
    body += (
        "shfl.sync.bfly.b32 %r2, %t, 2, 31, -1; N: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 2; @%p2 bra T;"
    )
    launch, _ = launched(body)
    assert launch.engine == "NumPy" and "warp divergence" in {f.kind for f in launch.findings}


COPY = "mad.lo.u32 %r1, %t, 16, %s; mad.wide.u32 %d0, %t, 16, %a0; mad.wide.u32 %d1, %t, 4, %a1;"
COPY += "cp.async.cg.shared.global [%r1], [%d0], 16; cp.async.commit_group;"


@pytest.mark.parametrize(
    ("wait", "ran"),
    [("cp.async.wait_group 0;", "native"), ("", "NumPy"), ("cp.async.wait_group 1;", "NumPy")],
)
def test_an_asynchronous_copy_lands_at_its_wait(native, wait, ran):
    launch, (_, y) = launched(COPY + wait + "ld.shared.u32 %r2, [%r1+4]; st.global.u32 [%d1], %r2;", grid=1)
    assert launch.engine == ran
    if ran == "native":
        np.testing.assert_array_equal(y[:64], 4 * np.arange(64) + 1)
    else:
        assert "uninitialised read" in {f.kind for f in launch.findings}


LEFT = {
    "an atomic whose result is used": "atom.global.add.u32 %r2, [%a0], 1; st.shared.u32 [%s], %r2;",
    "a clock": "mov.u32 %r2, %clock; st.shared.u32 [%s], %r2;",
    "a strong load": "ld.relaxed.gpu.global.u32 %r2, [%a0]; st.global.u32 [%a1], %r2;",
    "a numbered barrier": "bar.sync 1, 64;",
    "a sum of floats in a loop": "mov.u32 %r4, 0; T: red.global.add.f32 [%a0], 0f3F800000; add.u32 %r4, %r4, 1;"
    " setp.lt.u32 %p2, %r4, 2; @%p2 bra T;",
    "an instruction that nobody knows": "setp.eq.u32 %p1, %t, 100; @%p1 frobnicate.b32 %r2, %t;",
}


@pytest.mark.parametrize("what", LEFT)
def test_what_it_does_not_know_is_left_to_numpy(native, what):
    launch, _ = launched(LEFT[what], grid=1)
    assert launch.engine == "NumPy" and isinstance(launch.kernel.native, str)


def test_counters_and_events_are_numpys(native):
    for options, events in (({}, 0), ({"checks": Checks(counters=False)}, 100)):
        device = Bench(**options)
        device.gpu.keep_events = events
        x = device.place("x", np.zeros(64, np.uint32))
        assert device.run(kernel(OWN + "st.global.u32 [%d0], %t;"), 1, 64, x).engine == "NumPy"


def test_a_sum_of_floats_has_the_same_bits(native):
    """One atomic for each thread: both engines add in the order of threads."""
    body = OWN + "cvt.rn.f32.u32 %f0, %r0; mul.f32 %f0, %f0, 0f3DCCCCCD; red.global.add.f32 [%a0], %f0;"
    x = np.ones(1, np.float32)
    results = []
    for wanted in ("numpy", "native"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(choice.VARIABLE, wanted)
            device = bench()
            total = device.place("x", x)
            y = device.place("y", x)
            assert device.run(kernel(body, 2), 4, 64, total, y).engine == {"numpy": "NumPy"}.get(
                wanted, wanted
            )
            results.append(device.get(total).tobytes())
    assert results[0] == results[1]


LOOP = (
    OWN
    + """mov.u32 %r2, 0; mov.u32 %r3, 0;
    T: add.u32 %r2, %r2, %r3; xor.b32 %r2, %r2, %t; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 3000; @%p1 bra T;
    st.global.u32 [%d1], %r2;"""
)


def test_a_long_launch_becomes_machine_code_and_is_remembered(monkeypatch, tmp_path):
    if why := machine_code.unavailable():
        pytest.skip(why)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    first, (_, y) = launched(LOOP)
    assert first.engine == "NumPy", "it is over in time"
    monkeypatch.setattr(choice, "patience", lambda kernel: 0.0)
    second, (_, again) = launched(LOOP)
    assert second.engine == "native"
    np.testing.assert_array_equal(y, again)
    monkeypatch.setattr(choice, "patience", lambda kernel: 1e9)
    third, _ = launched(LOOP)
    assert third.engine == "native", "the note in the cache says that it takes long"
    assert list((tmp_path / "native").glob("*.long")) and list((tmp_path / "native").glob("*.o"))


def test_a_kernel_whose_machine_code_takes_long_to_make_has_more_time_in_numpy():
    """A product of matrices is thousands of instructions of LLVM."""
    product = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r2, %r2, %r2, %r2}, {%r2, %r2},
    {%f0, %f1, %f2, %f3};
    """
    begin = (
        OWN + "mov.u32 %r2, 0; mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;"
    )
    small, large = (
        choice.patience(VirtualGPU().load(kernel(begin + many * product)).kernels["k"]) for many in (1, 50)
    )
    assert small == choice.PATIENCE and 4 < large < 10


def test_a_launch_that_is_stopped_has_stored_nothing(monkeypatch, tmp_path):
    """It adds to a tensor in NumPy, is overdue, and starts again: added once."""
    if why := machine_code.unavailable():
        pytest.skip(why)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "patience", lambda kernel: 0.0)
    add = (
        OWN
        + "ld.global.u32 %r2, [%d0]; add.u32 %r2, %r2, 1; st.global.u32 [%d0], %r2; bar.sync 0; bar.sync 0;"
    )
    launch, (x, _) = launched(add)
    assert launch.engine == "native"
    np.testing.assert_array_equal(x[:128], np.arange(128) + 1)


PRINT_KEY = """
import sys
from harness.vgpu import VirtualGPU
from harness.vgpu.engines.native import machine_code
from harness.vgpu.engines.native.kernel import Translation
kernel = VirtualGPU().load(sys.stdin.read()).kernels["k"]
print(machine_code.key([Translation(kernel).text]))
"""


def test_every_process_finds_the_same_object(native):
    """The text of a translation does not depend on how this process orders its sets."""
    body = (
        OWN
        + "mov.u32 %r2, %laneid; mov.u32 %r3, %ntid.x; mov.u32 %r4, %nctaid.x; mov.u32 %r5, %tid.y; st.global.u32 [%d0], %r2;"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", PRINT_KEY], input=kernel(body), env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(keys) == 1


def test_a_wrong_engine_is_named(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(BadUse, match="WORKBOOK_VGPU_ENGINE is 'cuda', expected auto, numpy or native"):
        VirtualGPU()


@pytest.fixture
def fresh_machine():
    """Asks anew what the machine has, before and after."""
    for ask in (machine_code.unavailable, machine_code.setting):
        ask.cache_clear()
    yield
    for ask in (machine_code.unavailable, machine_code.setting):
        ask.cache_clear()


def features(**has):
    """A stand-in for llvmlite on another processor."""
    binding = types.ModuleType("llvmlite.binding")
    vars(binding)["get_host_cpu_features"] = lambda: has
    return {"llvmlite": types.ModuleType("llvmlite"), "llvmlite.binding": binding}


@pytest.mark.parametrize(
    ("modules", "processor", "why"),
    [
        ({"llvmlite": None, "llvmlite.binding": None}, "x86_64", "llvmlite is not installed"),
        (features(fma=True, avx2=True, f16c=False), "x86_64", "the processor lacks f16c"),
        (features(), "riscv64", "it is not written for riscv64 processors"),
    ],
)
def test_without_it_numpy_runs_everything(monkeypatch, fresh_machine, modules, processor, why):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if modules["llvmlite"] is not None:
        modules["llvmlite"].binding = modules["llvmlite.binding"]
    monkeypatch.setattr(machine_code.platform, "machine", lambda: processor)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "patience", lambda kernel: 0.0)
    launch, (_, y) = launched(LOOP)
    assert launch.engine == "NumPy" and y.any()
    monkeypatch.setenv(choice.VARIABLE, "native")
    with pytest.raises(EnvironmentProblem, match=f"asks for the native engine of the virtual GPU, but {why}"):
        VirtualGPU()


def test_a_store_outside_of_its_memory_is_noticed(native, monkeypatch):
    """The guard zones around what machine code writes."""
    monkeypatch.setattr(engine.Launch, "intact", lambda launch: False)
    with pytest.raises(RuntimeError, match="machine code of k has written outside of its memory"):
        launched(LOOP)


def test_local_memory_that_a_kernel_does_not_have_is_found_missing(native):
    device = bench()
    out = device.place("out", np.zeros(64, np.uint32))
    device.run(kernel("mov.u64 %d1, 0x0200000000000000; st.u32 [%d1], 5;"), 1, 64, out)
    assert {f.kind for f in device.errors()} == {"out-of-bounds store"}
