"""The table of `--profile` for several widths."""

from typing import Any, cast

import pytest

from harness import console
from harness.check.profile import LEGEND, LaunchProfile, format_detail, format_table
from harness.vgpu import Counters
from harness.vgpu.checks.counters import Site, Traffic
from harness.vgpu.ptx.parser import Instr, Location

COUNTERS = Counters(cast("Any", None))  # counters without a launch
LAUNCHES = [
    LaunchProfile(name, (16, 1, 1), (32, 1, 1), COUNTERS, 34_816, 1_152) for name in ("rows", "clear")
]
PROFILES = {"fused": LAUNCHES, "unfused": LAUNCHES[:1]}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_all_cells_fit(width):
    wide, narrow = format_table(PROFILES), format_table(PROFILES, width)
    assert max(map(len, narrow)) <= width < max(map(len, wide))
    words = [word for line in wide for word in line.split()]
    assert {*words} == {word for line in narrow for word in line.split()}
    assert [*wide[-len(LEGEND) :]] == LEGEND


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("", 0), ("wide", 0), ("3", 0)])
def test_columns_variable_applies_in_a_pipe(monkeypatch, columns, width, tmp_path):
    monkeypatch.setenv("COLUMNS", columns)
    with (tmp_path / "out").open("w") as file:
        assert console.get_page_width(console.make_console(file)) == width


def test_details_show_tensor_array_and_line():
    """Loads on a line are summed, arrays have their source names, and barriers have line numbers."""
    load, barrier = (
        Instr(op, (), (), None, 1, Location("/reader/kernel.mojo", line, 1))
        for op, line in (("ld", 7), ("bar", 9))
    )
    counters = Counters(cast("Any", None), barriers=32)
    counters.sites[0, "global", "x"] = Site(load, "global", "R", "x", 4, Traffic(2, 256, 8))
    counters.sites[1, "shared", "array 1"] = Site(
        load, "shared", "R", "array 1", 4, Traffic(1, 128, 0, 32, 1)
    )
    counters.count_issue(barrier, 32)
    launch = LaunchProfile("rows", (16, 1, 1), (32, 1, 1), counters, 0, 0, {"array 1": "tile"})
    rows = [line.split() for line in format_detail({"fused": [launch]})]
    assert ["x:load", "2", "256", "128", "8", "0"] in rows
    assert ["tile:shared_load", "1", "128", "128", "0", "31"] in rows
    assert ["kernel.mojo:7", "3", "384", "128", "8", "31", "0"] in rows
    assert ["kernel.mojo:9", "0", "0", "-", "0", "0", "32"] in rows
    assert ["barriers", "a", "block", "2"] in rows
