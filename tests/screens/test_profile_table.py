"""The table of `--profile` at the width that somebody asks for."""

from typing import Any, cast

import pytest

from harness import console
from harness.check.profile import LEGEND, LaunchProfile, table
from harness.vgpu import Counters

COUNTERS = Counters(cast("Any", None))  # no launch is behind them
LAUNCHES = [
    LaunchProfile(name, (16, 1, 1), (32, 1, 1), COUNTERS, 34_816, 1_152) for name in ("rows", "clear")
]
PROFILES = {"fused": LAUNCHES, "unfused": LAUNCHES[:1]}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_cell_fits_and_none_is_lost(width):
    wide, narrow = table(PROFILES), table(PROFILES, width)
    assert max(map(len, narrow)) <= width < max(map(len, wide))
    words = [word for line in wide for word in line.split()]
    assert {*words} == {word for line in narrow for word in line.split()}
    assert [*wide[-len(LEGEND) :]] == LEGEND


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("", 0), ("wide", 0), ("3", 0)])
def test_columns_are_obeyed_in_a_pipe(monkeypatch, columns, width, tmp_path):
    monkeypatch.setenv("COLUMNS", columns)
    with (tmp_path / "out").open("w") as file:
        assert console.page_width(console.make_console(file)) == width
