"""The times under a forward check: when a ratio may be concluded; no time is judged."""

import pytest
from typed import stand_in

from harness.bench import forward_times
from harness.check import runs
from harness.check.options import Options
from harness.devices.targets import Target, cpu
from harness.spec.puzzle import Puzzle


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"cpu": (900.0, 5.0)}, "no GPU: ratio not measured"),
        ({"gpu": (900.0, 5.0)}, "the CPU path was not run: ratio not measured"),
        ({"cpu": (900.0, 5.0), "gpu": (100.0, 20.0)}, "9.0x"),
        ({"cpu": (50.0, 5.0), "gpu": (100.0, 20.0)}, "0.5x"),
        (
            {"cpu": (900.0, 5.0), "gpu": (39.0, 20.0)},
            "launch-bound, no conclusion (with every size 1 the GPU takes 20.0 us)",
        ),
    ],
)
def test_a_ratio_only_where_it_means_something(times, said):
    assert forward_times.cpu_to_gpu(times) == said


def test_the_virtual_gpu_has_no_time(monkeypatch):
    measured = []
    monkeypatch.setattr(
        forward_times,
        "forward_microseconds",
        lambda run, target, variant: measured.append(target.kind) or (3.0, 1.0),
    )
    devices = [stand_in(runs.DeviceResult, target=Target(kind, None, "")) for kind in ("cpu", "virtual")]
    options = stand_in(Options, variants=("fused", "other"), puzzle=stand_in(Puzzle, on_cpu=("fused",)))
    run = stand_in(runs.Run, options=options, devices=devices)
    lines = forward_times.describe(run)
    assert measured == ["cpu", "cpu"]
    assert lines == [
        "   CPU time (fused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (fused): no GPU: ratio not measured",
        "   CPU time (other): 3.0 us, median of up to 50 calls through MAX",
    ]


@pytest.mark.compiles
def test_forward_buffers_are_what_one_call_needs(puzzle, program):
    run = stand_in(runs.Run, options=Options(puzzle, root="solutions"))
    buffers = forward_times.forward_buffers(run, program("float32"), puzzle.cases(None)[0], cpu())
    assert set(buffers) == set(program("float32").arguments)
