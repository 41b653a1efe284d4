"""The recorder of accesses: who, where, in which order and with which value; shared memory, atomics, barriers, limits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import kernel
from typed import present

from harness.vgpu.checks.events import Tensor, decode_bits

F4, U4 = np.float32, np.uint32
SHARED = ".shared .align 4 .b8 tile[256];"


def recorded(
    body: str, *inputs: np.ndarray, outputs: int = 1, block: int = 8, limit: int = 1000, declare: str = ""
):
    """The events of a launch of `body` in blocks of some threads, one element of every array for each thread."""
    bench = Bench()
    bench.gpu.keep_events = limit
    n = len(inputs[0])
    text = kernel(
        body,
        len(inputs),
        outputs,
        widths_in=[x.itemsize for x in inputs],
        widths_out=[4] * outputs,
        declare=declare,
    )
    out = [bench.empty(f"out{k}", n) for k in range(outputs)]
    given = [bench.place(f"in{k}", x) for k, x in enumerate(inputs)]
    return bench.run(text, n // block, block, *out, *given), bench


def column(events, number: int, name: str) -> list:
    """One column of a step."""
    step = events.steps[number]
    return getattr(events, name)[step.first : step.last].tolist()


def test_every_access_has_its_thread_place_and_value():
    x = np.arange(16, dtype=F4) * 1.5
    launch, _ = recorded("add.f32 %y0, %x0, %x0;", x)
    events = present(launch.events)
    assert [(step.kind, step.tensor) for step in events.steps] == [("R", "in0"), ("W", "out0")]
    for number, values in ((0, x), (1, 2 * x)):
        assert column(events, number, "block") == [0] * 8 + [1] * 8
        assert column(events, number, "thread") == [*range(8)] * 2
        assert column(events, number, "element") == [*range(16)]
        np.testing.assert_array_equal(column(events, number, "value"), values)
    assert events.step.tolist() == [0] * 16 + [1] * 16 and not events.dropped
    assert events.tensors["out0"] == Tensor("out0", "global", (16,), "float32", 4, 16)


def test_nothing_is_kept_unless_asked_for():
    launch, _ = recorded("mov.b32 %y0, %x0;", np.ones(8, F4), limit=0)
    assert launch.events is None


def test_shared_memory_is_counted_in_its_own_elements_and_barriers_are_steps():
    body = """
        mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2;
        st.shared.b32 [%r1], %x0; bar.sync 0;
        xor.b32 %r0, %r0, 1; shl.b32 %r0, %r0, 2; add.u32 %r0, %r0, %r2; ld.shared.b32 %y0, [%r0];"""
    x = np.arange(16, dtype=F4) + 0.5
    launch, _ = recorded(body, x, declare=SHARED)
    events = present(launch.events)
    assert [step.kind for step in events.steps] == ["R", "W", "barrier", "R", "W"]
    write, read = 1, 3
    assert events.tensors[events.steps[read].tensor].space == "shared"
    assert column(events, write, "element") == [*range(8)] * 2
    assert column(events, read, "element") == [1, 0, 3, 2, 5, 4, 7, 6] * 2
    np.testing.assert_array_equal(column(events, read, "value"), x.reshape(8, 2)[:, ::-1].reshape(-1))


def test_an_atomic_is_recorded_with_what_it_adds():
    body = "ld.param.u64 %d0, [q0]; red.global.add.f32 [%d0], %x0; mov.b32 %y0, 0; @%p0 bra END; exit; END:"
    bench = Bench()
    bench.gpu.keep_events = 100
    text = kernel(body.replace("@%p0 bra END; exit; END:", "ret;"), 1, 1, widths_in=[4], widths_out=[4])
    total, x = bench.place("total", np.zeros(8, F4)), bench.place("x", np.arange(8, dtype=F4))
    launch = bench.run(text, 1, 8, total, x)
    step = present(launch.events).steps[1]
    assert (step.kind, step.tensor) == ("A", "total") and column(launch.events, 1, "element") == [0] * 8
    np.testing.assert_array_equal(column(launch.events, 1, "value"), np.arange(8))
    assert bench.get(total)[0] == 28


def test_a_vector_load_is_one_access_for_each_element():
    body = "ld.param.u64 %d0, [q1]; mul.wide.u32 %d1, %i, 16; add.u64 %d0, %d0, %d1;" + (
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0]; mov.b32 %y0, %r4;"
    )
    bench = Bench()
    bench.gpu.keep_events = 1000
    text = kernel(body, 0, 2, widths_in=[], widths_out=[4, 4]).replace("st.global.b32 [%a1], %y1;", "")
    out, x = bench.empty("out", 4), bench.place("x", np.arange(16, dtype=F4))
    launch = bench.run(text, 1, 4, out, x)
    step = present(launch.events).steps[0]
    assert step.count == 4 and column(launch.events, 0, "element") == [*range(16)]
    assert column(launch.events, 0, "thread") == [t for t in range(4) for _ in range(4)]
    np.testing.assert_array_equal(column(launch.events, 0, "value"), np.arange(16))


def test_an_access_out_of_bounds_is_recorded_where_it_was_meant():
    bench = Bench()
    bench.gpu.keep_events = 100
    text = kernel("add.f32 %y0, %x0, %x0;", 1, 1, widths_in=[4], widths_out=[4])
    out, x = bench.empty("out", 6), bench.place("x", np.ones(8, F4))
    launch = bench.run(text, 1, 8, out, x)
    events = present(launch.events)
    wild = events.element[(events.element >= 6) & (events.step > 0)]
    assert sorted(wild.tolist()) == [6, 7] and [f.kind for f in bench.errors()] == ["out-of-bounds store"]


def test_beyond_the_limit_accesses_are_counted():
    launch, _ = recorded("mov.b32 %y0, %x0;", np.ones(64, F4), limit=100)
    events = present(launch.events)
    assert len(events.block) == 64 and events.dropped == 64 and [s.kind for s in events.steps] == ["R"]


@pytest.mark.parametrize(
    ("bits", "itemsize", "dtype", "value"),
    [
        (0x3FC00000, 4, "float32", 1.5),
        (0x3FC0, 2, "bfloat16", 1.5),
        (0x3E00, 2, "float16", 1.5),
        (0xFFFFFFFE, 4, "int32", -2),
        (1, 1, "bool", 1),
        (0x3FC00000, 4, "", 1.5),
        (7, 4, "", 7),
        (0x3FF8000000000000, 8, "", 1.5),
        (0xFFFE, 2, "", -2),
    ],
)
def test_bits_become_numbers(bits, itemsize, dtype, value):
    tensor = Tensor("t", "global", (), dtype, itemsize, 1)
    assert decode_bits(np.array([bits], np.uint64), tensor).tolist() == [value]
