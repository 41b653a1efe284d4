"""The timing of passes from size to size: what is called, and what is written; no time is judged."""

import csv

import pytest

from harness import measure
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


def test_unseen_calls_are_not_counted(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    seen = []
    assert len(measure.sample(lambda: seen.append(1), lambda: None)) == len(seen) - 2
