"""Recorded accesses: thread, element, order and value; shared memory, atomics, barriers, limits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import Bench
from ptx_tools import make_kernel
from typed import unwrap

from harness.vgpu.checks.events import Tensor, decode_bits

F4, U4 = np.float32, np.uint32
SHARED = ".shared .align 4 .b8 tile[256];"


def record_events(
    body: str, *inputs: np.ndarray, out=None, block=8, threads=0, limit=1000, declare="", store=True
):
    """Launch `body`, by default with a thread per input element; return the events and the bench."""
    bench = Bench()
    bench.gpu.max_events = limit
    n = threads or len(inputs[0])
    text = make_kernel(body, [x.itemsize for x in inputs], declare=declare, store=store)
    out_array = bench.empty("out", n) if out is None else bench.upload("out", out)
    arguments = [bench.upload(f"in{k}", x) for k, x in enumerate(inputs)]
    events = bench.run(text, n // block, block, out_array, *arguments).events
    return events, bench


def get_column(events, number: int, name: str) -> list:
    """Return one column of a step's events."""
    step = events.steps[number]
    return getattr(events, name)[step.first : step.last].tolist()


def test_access_has_thread_element_and_value():
    x = np.arange(16, dtype=F4) * 1.5
    events = unwrap(record_events("add.f32 %y0, %x0, %x0;", x)[0])
    assert [(step.kind, step.tensor) for step in events.steps] == [("R", "in0"), ("W", "out")]
    for number, values in ((0, x), (1, 2 * x)):
        assert get_column(events, number, "block") == [0] * 8 + [1] * 8
        assert get_column(events, number, "thread") == [*range(8)] * 2
        assert get_column(events, number, "element") == [*range(16)]
        np.testing.assert_array_equal(get_column(events, number, "value"), values)
    assert events.step.tolist() == [0] * 16 + [1] * 16 and not events.dropped
    assert events.tensors["out"] == Tensor("out", "global", (16,), "float32", 4, 16)


def test_recording_is_off_by_default():
    assert record_events("mov.b32 %y0, %x0;", np.ones(8, F4), limit=0)[0] is None


def test_shared_memory_has_elements_and_barriers_are_steps():
    body = """
        mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2;
        st.shared.b32 [%r1], %x0; bar.sync 0;
        xor.b32 %r0, %r0, 1; shl.b32 %r0, %r0, 2; add.u32 %r0, %r0, %r2; ld.shared.b32 %y0, [%r0];"""
    x = np.arange(16, dtype=F4) + 0.5
    events = unwrap(record_events(body, x, declare=SHARED)[0])
    assert [step.kind for step in events.steps] == ["R", "W", "barrier", "R", "W"]
    write, read = 1, 3
    assert events.tensors[events.steps[read].tensor].space == "shared"
    assert get_column(events, write, "element") == [*range(8)] * 2
    assert get_column(events, read, "element") == [1, 0, 3, 2, 5, 4, 7, 6] * 2
    np.testing.assert_array_equal(get_column(events, read, "value"), x.reshape(8, 2)[:, ::-1].reshape(-1))


def test_atomic_is_recorded_with_its_operand():
    body = "ld.param.u64 %d0, [q0]; red.global.add.f32 [%d0], %x0;"
    events, bench = record_events(body, np.arange(8, dtype=F4), out=np.zeros(8, F4), store=False)
    step = unwrap(events).steps[1]
    assert (step.kind, step.tensor) == ("A", "out") and get_column(events, 1, "element") == [0] * 8
    np.testing.assert_array_equal(get_column(events, 1, "value"), np.arange(8))
    assert bench.download(bench.references[0])[0] == 28


def test_vector_load_is_one_access_per_element():
    body = "mad.wide.u32 %d0, %i, 12, %a1; ld.global.v4.b32 {%r1, %r2, %r3, %y0}, [%d0];"
    events, _ = record_events(body, np.arange(16, dtype=F4), block=4, threads=4)
    assert unwrap(events).steps[1].count == 4 and get_column(events, 1, "element") == [*range(16)]
    assert get_column(events, 1, "thread") == [t for t in range(4) for _ in range(4)]
    np.testing.assert_array_equal(get_column(events, 1, "value"), np.arange(16))


def test_out_of_bounds_access_is_recorded_with_its_index():
    events, bench = record_events("add.f32 %y0, %x0, %x0;", np.ones(8, F4), out=np.ones(6, F4))
    events = unwrap(events)
    stores = events.step > 0
    assert sorted(events.element[stores & (events.element >= 6)].tolist()) == [6, 7]
    assert [f.kind for f in bench.errors()] == ["out-of-bounds store"]


def test_accesses_beyond_the_limit_are_counted():
    events = unwrap(record_events("mov.b32 %y0, %x0;", np.ones(64, F4), limit=100)[0])
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
def test_decode_bits(bits, itemsize, dtype, value):
    tensor = Tensor("t", "global", (), dtype, itemsize, 1)
    assert decode_bits(np.array([bits], np.uint64), tensor).tolist() == [value]
