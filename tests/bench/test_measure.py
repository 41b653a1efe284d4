"""What waited calls through MAX take: when a ratio may be concluded, and the CSV from size to size; no time is judged."""

import csv
from types import SimpleNamespace

import pytest

from harness.bench import measure
from harness.check import runs
from harness.devices.targets import cpu
from harness.errors import BadUse


@pytest.fixture
def short(monkeypatch):
    """Only the chapter's size, and no more calls than needed."""
    monkeypatch.setattr(measure, "SIZES", measure.SIZES[:1])
    monkeypatch.setattr(measure, "SECONDS", 0.0)


def test_rows_for_every_pass_and_everybody(short, tmp_path, capsys):
    target = tmp_path / "times.csv"
    assert measure.main(["--csv", str(target)]) == 0
    rows = list(csv.DictReader(target.open()))
    assert {(row["pass"], row["who"]) for row in rows} == {
        (direction, who) for direction in ("forward", "backward") for who in ("fused", "unfused", "PyTorch")
    }
    for row in rows:
        assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert int(row["calls"]) == 3
    assert capsys.readouterr().out.count("\n") == len(rows)


def test_a_file_that_cannot_be_written(short, tmp_path):
    with pytest.raises(BadUse, match=r"--csv .*: "):
        measure.main(["--csv", str(tmp_path / "missing" / "times.csv")])


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
    assert measure.cpu_to_gpu(times) == said


def test_the_virtual_gpu_has_no_time(monkeypatch):
    measured = []
    monkeypatch.setattr(
        measure,
        "forward_microseconds",
        lambda run, target, variant: measured.append(target.kind) or (3.0, 1.0),
    )
    devices = [SimpleNamespace(target=SimpleNamespace(kind=kind)) for kind in ("cpu", "virtual")]
    run = SimpleNamespace(options=SimpleNamespace(variants=("fused", "unfused")), devices=devices)
    lines = measure.describe(run)
    assert measured == ["cpu", "cpu"]
    assert lines == [
        "   CPU time (fused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (fused): no GPU: ratio not measured",
        "   CPU time (unfused): 3.0 us, median of up to 50 calls through MAX",
        "   CPU / GPU (unfused): no GPU: ratio not measured",
    ]


def test_forward_buffers_are_what_one_call_needs(puzzle, program):
    run = SimpleNamespace(options=runs.Options(puzzle, root="solutions"))
    buffers = measure.forward_buffers(run, program("float32"), puzzle.cases(None)[0], cpu())
    assert set(buffers) == set(program("float32").arguments)
