"""Tables and charts of the benchmark say what the CSV says, refuse what it refuses, and can be read light and dark."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from harness.bench.runner import MACHINE, MEASURED
from harness.puzzles.p22.candidates import BENCHMARK

SMALL, LARGE = (4096, 768, 3072), (8192, 4096, 4096)
TIMES = {
    SMALL: {"bare GEMMs": 90.0, "fast": 99.0, "eager": 150.0, "compile": 120.0},
    LARGE: {"bare GEMMs": 1000.0, "fast": 1100.0, "eager": 1200.0, "compile": 1250.0},
}
SHARED = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0", "max": "26.7.0"}
SHARED |= {"date": "2026-01-02", "dtype": "bfloat16"}


def csv_rows(column="graph", direction="both"):
    """Rows of one pass as the benchmark writes them, without ceilings and memory."""
    for (M, H, O), times in TIMES.items():
        fastest = min(("eager", "compile"), key=times.__getitem__)
        for name, time in times.items():
            tflops = 6 * M * H * O / time / 1e6
            yield SHARED | {
                **{"M": M, "H": H, "O": O, "pass": direction, "candidate": name, "column": column},
                **{"median_us": time, "p20_us": 0.99 * time, "p80_us": 1.02 * time, "samples": 9},
                "ratio_to_floor": time / times["bare GEMMs"],
                "ratio_to_fastest_peer": time / times[fastest],
                "fastest_peer": fastest,
                **{"tflops": tflops, "gbs": tflops, "percent_of_matmul": tflops / 8, "error": "2.3e-03"},
            }


def memory_rows():
    """Memory of two candidates at the small size."""
    for name, saved, peak in (("fast", 6, 50), ("eager", 12, 40)):
        sizes = dict(zip("MHO", SMALL, strict=True))
        row = SHARED | sizes | {"pass": "both", "column": "memory", "candidate": name}
        yield row | {"saved_bytes": saved * 2**20, "peak_bytes": peak * 2**20}


def ceiling_rows():
    """What the same run reached at best."""
    for name, key, value in (("matmul ceiling", "tflops", 800), ("copy ceiling", "gbs", 4000)):
        yield SHARED | {"M": 8192, "H": 8192, "O": 8192, "column": "ceiling", "candidate": name, key: value}


def strings(*rows):
    """Rows as a record has them: every column of the benchmark, as text."""
    names = (*MACHINE, *BENCHMARK.size_names, *MEASURED)
    return [dict.fromkeys(names, "") | {name: str(value) for name, value in row.items()} for row in rows]


@pytest.fixture
def rows():
    """A benchmark with two columns, memory, ceilings, and a peer that was not installed."""
    absent = SHARED | dict(zip("MHO", SMALL, strict=True))
    absent |= {"column": "all", "candidate": "liger", "note": "skipped: not installed"}
    return strings(*csv_rows("graph"), *csv_rows("loop"), *memory_rows(), *ceiling_rows(), absent)


def cells(markdown):
    """The cells of a Markdown table, line by line, without the line of rules."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    return [line for line in lines if not set("".join(line)) <= set("-: ")]


def words(svg):
    """The texts of a picture, in order."""
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def test_every_candidate_has_a_name_and_a_marker():
    from book.figures import bench_results

    assert set(bench_results.NAMES) == {candidate.name for candidate in BENCHMARK.candidates}
    drawn = {one.name for one in BENCHMARK.candidates if one.columns != ("waited",) and one.role != "floor"}
    assert set(bench_results.MARKS) == drawn
    assert len(set(bench_results.MARKS.values())) == len(bench_results.MARKS), "two look alike"
    assert set(bench_results.OUR_OWN) == {one.name for one in BENCHMARK.candidates if one.role == "ours"}


def test_the_table_of_times(rows):
    from book.figures import bench_results

    head, *body = cells(bench_results.times_table(rows, "both", "graph"))
    assert head[2:5] == ["time", "20 to 80 %", "/ products"]
    assert [line[1] for line in body[:4]] == [
        "bare matrix products",
        "LayerNormLinear",
        "torch.compile",
        "PyTorch eager",
    ]
    ours = body[1]
    assert ours[0] == "4,096 rows, 768 → 3,072" and ours[2] == "99.0 µs" and ours[3] == "-1.0 % +2.0 %"
    assert ours[4] == "1.10" and ours[7] == "2.3e-03"
    assert cells(bench_results.times_table(rows, "forward", "graph"))[1:] == []


def test_all_peers_stand_in_one_table_and_losses_are_bold():
    """Forward, backward and both; 99 / 150 = 0.66. At the large size eager is made faster than the layer."""
    from book.figures import bench_results

    faster = {"median_us": 1000.0, "p20_us": 990.0, "p80_us": 1020.0, "ratio_to_floor": 1.0}
    slower = [row | (faster if row["candidate"] == "eager" else {}) for row in csv_rows()]
    timed_alone = list(csv_rows(direction="backward"))
    rows = strings(*slower, *csv_rows(direction="forward"), *timed_alone)
    head, *body = cells(bench_results.peers_table(rows, "graph"))
    assert head[3:] == ["products", "eager", "compile"]
    assert [line[1] for line in body] == ["forward", "backward", "both"] * 2
    assert body[0][2:5] == ["99.0\u00a0µs\u00a0±\u00a02.0\u00a0%", "**1.10**", "0.66"]
    assert float(body[0][5]) == pytest.approx(99 / 120, abs=0.006)
    assert body[5][2:] == ["1,100\u00a0µs\u00a0±\u00a02.0\u00a0%", "**1.10**", "**1.10**", "0.88"]
    words = bench_results.losses(rows, "graph")
    assert "slower than a peer in 2 of 12 comparisons" in words and "not timed alone" not in words
    assert "within 2.0 % of its median" in words


def test_a_refused_ratio_stays_refused():
    from book.figures import bench_results

    one = next(csv_rows()) | {"candidate": "fast", "ratio_to_floor": "", "ratio_to_fastest_peer": ""}
    peer = next(csv_rows()) | {"candidate": "eager"}
    rows = strings(one, peer)
    assert cells(bench_results.peers_table(rows, "graph"))[-1][3:] == ["–"]
    assert cells(bench_results.times_table(rows, "both", "graph"))[1][4] in ("–", "1.00")
    assert "LayerNormLinear" not in words(bench_results.ratio_chart(rows))


def test_memory_and_who_was_left_out(rows):
    from book.figures import bench_results

    body = cells(bench_results.memory_table(rows))[1:]
    assert [line[1:3] for line in body] == [["LayerNormLinear", "6.0 MiB"], ["PyTorch eager", "12.0 MiB"]]
    assert body[0][3] == "–"
    assert bench_results.unmeasured(rows) == (
        "The record of this page has no times of others that the command knows: torch.compile, memory budget 0.5; "
        "torch.compile, max-autotune; Liger LayerNorm, linear; Transformer Engine.\n"
    )
    every = [row | {"candidate": name, "median_us": "1"} for row in rows[:1] for name in bench_results.SHORT]
    assert bench_results.unmeasured(every) == "", "nobody is named where all were timed"
    assert body[0][4] == "50.0 MiB"
    kept = bench_results.memory_chart(rows, "saved_bytes", "bytes kept")
    assert words(kept)[-2:] == ["PyTorch eager", "1.00 · 12.0 MiB"]
    assert "1.25 · 50.0 MiB" in words(bench_results.memory_chart(rows, "peak_bytes", "bytes at the peak"))
    assert bench_results.memory_note(rows) == (
        "- Beside PyTorch eager: keeps 0.50 times as much, peaks at 1.25 times as much; the layer's peak is the higher one at "
        "1 of 1 sizes.\n"
    )


def test_host_times():
    from book.figures import bench_results

    given = [
        SHARED
        | dict(zip("MHO", (16, 8, 16), strict=True))
        | {"pass": direction, "column": "host", "candidate": name, "median_us": time}
        | {"p20_us": 0.9 * time, "p80_us": 1.2 * time}
        for name, times in {"fast": (9.0, 13.0, 80.0), "eager": (17.0, 21.0, 156.0)}.items()
        for direction, time in zip(("inference", "forward", "both"), times, strict=True)
    ]
    body = cells(bench_results.host_table(strings(*given)))[1:]
    assert body == [
        ["LayerNormLinear", *(f"{time}\u00a0µs\u00a0±\u00a020.0\u00a0%" for time in ("9.0", "13.0", "80.0"))],
        ["PyTorch eager", *(f"{time}\u00a0µs\u00a0±\u00a020.0\u00a0%" for time in ("17.0", "21.0", "156.0"))],
    ]


def test_the_chart_of_the_host_shows_everybody_s_time_for_both_passes():
    from book.figures import bench_results

    waited = next(iter(bench_results.select(bench_results.record.rows("bench"), "both", "host").values()))
    shown = words(bench_results.host_chart())
    assert [shown[1::2]] == [
        [
            bench_results.time_text(float(waited[name]["median_us"]))
            for name in bench_results.NAMES
            if name in waited
        ]
    ]


def test_bars_are_as_long_as_the_ratios(rows):
    """The bar of ratio 1.10 against the one of 1.67, and the dashed line at 1."""
    from book.figures import bench_results

    svg = bench_results.ratio_chart(rows)
    root = ElementTree.fromstring(svg)
    boxes = [element for element in root if element.tag.endswith("rect")]
    lengths = [float(box.attrib["width"]) for box in boxes[:3]]
    ratios = [TIMES[SMALL][name] / 90 for name in ("fast", "compile", "eager")]
    for length, ratio in zip(lengths, ratios, strict=True):
        assert length / lengths[0] == pytest.approx(ratio / ratios[0], rel=1e-3)
    line = next(element for element in root if element.tag.endswith("line"))
    left = float(boxes[0].attrib["x"])
    assert (float(line.attrib["x1"]) - left) / lengths[0] == pytest.approx(1 / ratios[0], abs=0.002)
    assert len({box.get("fill-opacity") for box in boxes}) == 2, "ours is to be told from the others"
    assert "1.10 · 99.0 µs" in words(svg)
    right = max(float(element.attrib["x"]) for element in root if element.tag.endswith("text"))
    assert right < 900 - 8 * len("1.67 · 150.0 µs"), "words run out of the picture"


def test_the_roofline_stands_on_the_ceilings_of_the_run(rows):
    from book.figures import bench_results

    svg = bench_results.roofline_chart(rows)
    assert "large matrix product: 800 TFLOP/s" in words(svg) and "large copy: 4.0 TB/s" in words(svg)
    with pytest.raises(ValueError, match="no ceilings"):
        bench_results.roofline_chart([row for row in rows if row["column"] != "ceiling"])


def test_training():
    from book.figures import bench_results

    models = {
        name: [
            {
                "loss": "5.0" if step < 20 else last,
                "step_us": str(time if step >= 10 else 1e6),
                "peak_bytes": str(2**20),
            }
            for step in range(30)
        ]
        for name, time, last in (("LayerNormLinear", 900, "2.5"), ("plain PyTorch", 1000, "2.4"))
    }
    ours, plain = cells(bench_results.training_table(models))[1:]
    assert ours == ["LayerNormLinear", "5.0000", "2.5000", "0.90 ms", "0.900", "1.0 MiB"]
    assert plain[2:5] == ["2.4000", "1.00 ms", "1.000"]
    note = bench_results.training_note(models)
    assert "a step takes 10.0 % less than with plain PyTorch here, and its peak is 0 % higher" in note


def test_a_ratio_of_the_readme_s_table_is_one_time_over_the_other(monkeypatch):
    from book.figures import speed_table

    times = {"eager": "40", "torch.compile": "16", "mojo_workbook": "20"}
    steps = [{"setting": "autocast", "way": way, "median_ms": time} for way, time in times.items()]
    steps.append({"setting": "bfloat16", "way": "mojo_workbook", "median_ms": "1"})
    monkeypatch.setattr(speed_table.record, "rows", lambda name: steps)
    machines = {"bench": "NVIDIA H200", "gpt2_step": "NVIDIA H200", "step_by_hand": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(speed_table.record, "read", lambda name: SimpleNamespace(machine=machines[name]))
    assert speed_table.gpt2_row()[0].endswith("1,024 tokens")
    assert speed_table.gpt2_row()[1:] == ["20.0 ms", "0.50", "**1.25**", "**1.25** compile"]
    times = {"autograd": "40", "torch.compile": "25", "by hand": "20", "products": "10"}
    steps[:] = [{"what": what, "median_us": f"{time}000"} for what, time in times.items()]
    assert speed_table.step_by_hand_row()[0].endswith("by hand (`p27`), H100")
    assert speed_table.step_by_hand_row()[1:] == ["20.0 ms", "0.50", "0.80", "0.80 compile"]
