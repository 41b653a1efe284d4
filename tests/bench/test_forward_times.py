"""The ratio of CPU and GPU time after a forward check; times are not asserted."""

import pytest
from typed import make_stub

from harness.bench import forward_times
from harness.check import runs
from harness.check.options import Options
from harness.devices.targets import Target
from harness.spec.puzzle import Puzzle


@pytest.mark.parametrize(
    ("times", "text"),
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
def test_ratio_is_shown_only_if_meaningful(times, text):
    assert forward_times.format_cpu_gpu_ratio(times) == text


def test_virtual_gpu_is_not_timed(monkeypatch):
    measured = []
    monkeypatch.setattr(
        forward_times,
        "time_forward",
        lambda run, target, variant: measured.append(target.kind) or (3.0, 1.0),
    )
    devices = [make_stub(runs.DeviceResult, target=Target(kind, None, "")) for kind in ("cpu", "virtual")]
    options = make_stub(
        Options, variants=("fused", "other"), puzzle=make_stub(Puzzle, cpu_variants=("fused",))
    )
    run = make_stub(runs.Run, options=options, devices=devices)
    lines = forward_times.describe_times(run)
    assert measured == ["cpu", "cpu"]
    assert lines == [
        "   CPU time (fused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (fused): no GPU: ratio not measured",
        "   CPU time (other): 3.0 us, median of up to 50 calls through MAX",
    ]
