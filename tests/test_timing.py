"""Times and ratios: what is measured, and when no ratio may be concluded."""

import time
from types import SimpleNamespace

import pytest

from harness import timing, workbook
from harness.devices.targets import cpu


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
    assert timing.ratio(times) == said


class CountingProgram:
    """Counts its calls; each takes as long as it is told."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds = 0, seconds

    def run(self, buffers):
        self.calls += 1
        time.sleep(self.seconds)


def test_a_quick_call_is_measured_many_times_and_a_slow_one_is_not(monkeypatch):
    target = SimpleNamespace(device=SimpleNamespace(synchronize=lambda: None))
    quick = CountingProgram()
    assert timing.median_microseconds(quick, {}, target) >= 0
    assert quick.calls == timing.CALLS + 2
    clock = iter(range(0, 1000, 4))  # every look at the clock finds four more seconds gone
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    slow = CountingProgram()
    assert timing.median_microseconds(slow, {}, target) == 4e6
    assert slow.calls < 10


def test_the_virtual_gpu_has_no_time(puzzle, solution, monkeypatch):
    measured = []
    monkeypatch.setattr(
        timing,
        "forward_microseconds",
        lambda run, target, variant: measured.append(target.kind) or (3.0, 1.0),
    )
    devices = [SimpleNamespace(target=SimpleNamespace(kind=kind)) for kind in ("cpu", "virtual")]
    run = SimpleNamespace(options=SimpleNamespace(variants=("fused", "unfused")), devices=devices)
    lines = timing.describe(run)
    assert measured == ["cpu", "cpu"]
    assert lines == [
        "   CPU time (fused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (fused): no GPU: ratio not measured",
        "   CPU time (unfused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (unfused): no GPU: ratio not measured",
    ]


def test_forward_buffers_are_what_one_call_needs(puzzle, solution, program):
    options = workbook.Options(puzzle, root="solutions")
    run = SimpleNamespace(options=options)
    buffers = timing.forward_buffers(run, program("float32"), puzzle.cases(None)[0], cpu())
    assert set(buffers) == set(program("float32").arguments)
