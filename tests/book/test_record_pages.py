"""Tables made from records: ratios and predictions match manually computed values."""

from types import SimpleNamespace

import pytest

from book.figures import bench_results, every_size, speed_table
from harness.bench.runner import MACHINE_COLUMNS, RESULT_COLUMNS
from harness.puzzles.p22.candidates import BENCHMARK


def convert_to_strings(rows, names=()):
    """Convert rows to strings, as read from a record, with all columns `names`."""
    return [dict.fromkeys(names, "") | {name: str(value) for name, value in row.items()} for row in rows]


def parse_cells(markdown):
    """Parse a Markdown table into rows of cells, without the delimiter row."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    return [line for line in lines if not set("".join(line)) <= set("-: ")]


# ---- The benchmark ------------------------------------------------------------------------------------------


def make_bench_rows(times, column="graph", direction="both"):
    """Create rows of one pass, as written by the benchmark."""
    rows = []
    for dims, by_name in times.items():
        for name, time in by_name.items():
            sizes = dict(zip("MHO", dims, strict=True)) | {
                "pass": direction,
                "candidate": name,
                "column": column,
            }
            spread = {"median_us": time, "p20_us": 0.99 * time, "p80_us": 1.02 * time}
            rows.append(sizes | spread | {"ratio_to_floor": time / by_name.get("bare GEMMs", time)})
    return convert_to_strings(rows, (*MACHINE_COLUMNS, *BENCHMARK.size_names, *RESULT_COLUMNS))


def test_each_peer_has_a_name():
    assert set(bench_results.SHORT) == {one.name for one in BENCHMARK.candidates if one.role == "peer"}


def test_speed_table_ratios_are_quotients_of_times(monkeypatch):
    times = {"eager": "40", "torch.compile": "16", "mojo_workbook": "20"}
    steps = [{"setting": "autocast", "way": name, "median_ms": time} for name, time in times.items()]
    monkeypatch.setattr(speed_table.record, "rows", lambda name: steps)
    monkeypatch.setattr(speed_table.record, "read", lambda name: SimpleNamespace(machine="NVIDIA H200"))
    assert speed_table.gpt2_row()[1:] == ["20.0 ms", "0.50", "**1.25**", "**1.25** compile"]


def test_random_sizes_are_compared_with_the_fastest_peer():
    rows = make_bench_rows(
        {
            (64, 128, 256): {"fast": 30.0, "eager": 40.0, "compile": 25.0},
            (512, 96, 33): {"fast": 9.0, "eager": 18.0, "compile": 20.0},
            (4096, 768, 3072): {"fast": 500.0, "eager": 1.0, "compile": 1.0},
        }
    )
    graphs = {one.dims: (one.peer, one.ratio) for one in every_size.beside(rows, "graph")}
    assert graphs == {(64, 128, 256): ("compile", 1.2), (512, 96, 33): ("eager", 0.5)}, (
        "a model's size is not drawn"
    )
    with pytest.raises(KeyError, match="compile"):
        list(every_size.beside([row for row in rows if row["candidate"] != "compile"], "graph"))


def test_fastest_plan_with_one_or_two_streams():
    names = ("M", "H", "O", "branches", "us", "chosen")
    rows = [(50, 6, 7, 1, 20, ""), (50, 6, 7, 1, 10, ""), (50, 6, 7, 2, 9, "yes"), (50, 6, 7, 2, 8, "")]
    grouped = every_size.by_branches(convert_to_strings(dict(zip(names, row, strict=True)) for row in rows))
    assert [(dims, one["us"], two["us"], chosen["us"]) for dims, one, two, chosen in grouped] == [
        ((50, 6, 7), "10", "8", "9")
    ]
