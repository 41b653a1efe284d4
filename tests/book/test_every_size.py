"""The tables of the page about every size say what their records say."""

import re

import pytest

from book.figures import every_size
from harness.bench.runner import MACHINE, MEASURED

MACHINE_ROW = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-02", "dtype": "bfloat16"}
TIMES = {
    (64, 128, 256): {"fast": 30.0, "eager": 40.0, "compile": 25.0},
    (512, 96, 33): {"fast": 9.0, "eager": 18.0, "compile": 20.0, "liger": 30.0},
    (4096, 768, 3072): {"fast": 500.0, "eager": 1.0, "compile": 1.0},
}


def strings(rows):
    """Rows as a record has them."""
    return [{name: str(value) for name, value in row.items()} for row in rows]


def drawn():
    names = (*MACHINE, "M", "H", "O", *MEASURED)
    rows = []
    for dims, times in TIMES.items():
        at = MACHINE_ROW | dict(zip("MHO", dims, strict=True)) | {"pass": "both"}
        for name, time in times.items():
            rows.append(at | {"column": "graph", "candidate": name, "median_us": time})
            rows.append(
                at | {"column": "loop", "candidate": name, "median_us": 100 if name == "fast" else 50}
            )
    return strings({name: row.get(name, "") for name in names} for row in rows)


def test_drawn_sizes_beside_their_fastest_peers():
    rows = drawn()
    _, _, *lines = every_size.drawn_table(rows).splitlines()
    assert lines == [
        "| 512: 96 → 33 | 9.0 µs | eager | 0.50 | eager | **2.00** |",
        "| 64: 128 → 256 | 30.0 µs | compile | **1.20** | eager | **2.00** |",
    ], "the benchmark's own sizes are not drawn; the least work first; slower is bold"
    verdict = every_size.verdict(rows)
    assert "As CUDA graphs the median is 0.85, and the worst 1.20, at 64: 128 → 256;" in verdict
    assert "at 1 of 2 sizes the layer is more than a hundredth slower" in verdict
    with pytest.raises(KeyError, match="compile"):
        every_size.drawn_table([row for row in rows if row["candidate"] != "compile"])


def test_a_timeline():
    names = ("M", "H", "O", "candidate", "kernel", "begin_us", "us")
    rows = [(5, 6, 7, "bare GEMMs", "other gemm", 0, 30), (5, 6, 7, "fast", "layernorm_rows", 0, 4)]
    rows += [(5, 6, 7, "fast", "gemm_hopper_kernel", 3.25, 31.5), (5, 6, 7, "fast", "finish_sums_DTy", 30, 1)]
    rows += [(5, 6, 7, "bare GEMMs", "other Memset (Unknown)", 0, 1)]
    text = every_size.timeline_table(strings(dict(zip(names, row, strict=True)) for row in rows))
    assert (
        "5: 6 → 7: the layer ends at 34.8 µs. Beside it, without pauses: products 30.0 µs in 1 launches."
        in text
    )
    assert "| `gemm_hopper_kernel` | 3.2 | 31.5 |" in text


def test_memory_at_the_peak():
    names = ("fast", "least memory", "compile", "eager")
    peaks = {(64, 128, 256): (3, 1, 2, 4), (512, 96, 33): (1, 1, 1, 1)}
    rows = strings(
        dict(zip("MHO", dims, strict=True))
        | {
            "pass": "both",
            "column": "memory",
            "candidate": name,
            "saved_bytes": 1,
            "peak_bytes": mebibytes * 2**20,
        }
        for dims, sizes in peaks.items()
        for name, mebibytes in zip(names, sizes, strict=True)
    )
    assert "| 64: 128 → 256 | 3.0 | 1.0 | 2.0 | 4.0 | **1.50** | 0.50 |" in every_size.peak_table(rows)
    assert "at 2 of 2 sizes, by default at 1." in every_size.peak_verdict(rows)
    drawn = every_size.peak_chart(rows)
    assert "at 2 sizes, by default up to 1.50, with the least memory up to 1.00" in drawn
    assert drawn.count("<circle") == 4 and drawn.count('fill-opacity="0"') == 2


def test_who_multiplies():
    names = ("output", "dln", "dW")
    way = dict(zip(names, ("library on padded rows", "own", "library"), strict=True))
    chosen = {f"chosen_{name}": who for name, who in way.items()} | {"chosen_dW": "own"}
    row = {"M": 5, "H": 6, "O": 7, **way, "forward_us": 3.0, "backward_us": 1234.0, "host_us": "nan"} | chosen
    rows = strings([row, row | chosen | {"dW": "own", "host_us": 45}])
    lines = every_size.ways_table(rows).splitlines()[2:]
    assert lines == [
        "| 5: 6 → 7 | padded · own · library | **3.0 µs** | 1,234 µs |  |",
        "| 5: 6 → 7 | padded · own · own | **3.0 µs** | **1,234 µs** | 45.0 µs |",
    ]


def test_pairs():
    names = ("inputs", "result", "norm_error", "norm_of_torch", "largest_error", "largest_of_torch", "way")
    empty = dict.fromkeys((*names, "graph_us", "note"), "") | {"M": 4096, "H": 768, "O": 3072}
    rows = [empty | {"way": way, "graph_us": time} for way, time in
            (("pairs", 300), ("fast", 1100), ("eager", 1200), ("compile", 1100), ("tf32x3", 1000))]  # fmt: skip
    error = {"inputs": "tiny", "norm_of_torch": "1e-7", "largest_of_torch": "1e-6"}
    rows += [empty | error | {"norm_error": norm, "largest_error": "2e-6"} for norm in ("5e-8", "1.5e-7")]
    rows += [empty | {"inputs": "nan in x", "note": "as PyTorch"}] * 3
    text = every_size.pairs_tables(strings(rows))
    assert "| 4,096: 768 → 3,072 | 300.0 µs | 1,100 µs | 1,200 µs | 1,100 µs | 1,000 µs | 0.30 |" in text
    assert "| tiny | 1.50 | 2.00 |" in text and "3 results as PyTorch." in text


def test_replays_become_one():
    from book.measure import timeline

    events = [
        (name, 100.0 * turn + at, 2.0 + turn) for turn in range(15) for name, at in (("a", 0), ("b", 5))
    ]
    assert timeline.replays_of(events[::-1]) == [("a", 0, 9.0), ("b", 5.0, 9.0)]
    for some in (events[1:], []):
        with pytest.raises(RuntimeError, match=f"{len(some)} launches in 15 replays"):
            timeline.replays_of(some)


def test_replays_whose_branches_take_turns():
    """Now one launch is the first to begin, now the other."""
    from book.measure import timeline

    events = [
        (name, 100.0 * turn + (at + turn) % 10, 2.0)
        for turn in range(15)
        for name, at in (("a", 0), ("b", 5))
    ]
    launches = timeline.replays_of(events)
    assert {name for name, *_ in launches} == {"a", "b"} and all(0 <= begin <= 5 for _, begin, _ in launches)
    assert launches[0][1] <= launches[1][1]
    with pytest.raises(RuntimeError, match="different launches in 15 replays"):
        timeline.replays_of([("c", *events[0][1:]), *events[1:]])


def test_one_branch_and_two():
    """The fastest of each, small sizes first; a dot is filled where two are chosen."""
    names = ("M", "H", "O", "dln", "dW", "branches", "us", "chosen")
    rows = [
        (50, 6, 7, "own", "own", 1, 20, ""),
        (50, 6, 7, "own", "library", 1, 10, ""),
        (50, 6, 7, "own", "own", 2, 9, "yes"),
        (50, 6, 7, "library", "own", 2, 8, ""),
        (5, 6, 7, "own", "own", 1, 4, "yes"),
        (5, 6, 7, "own", "own", 2, 5, ""),
    ]
    rows = strings(dict(zip(names, row, strict=True)) for row in rows)
    times = [
        (dims, one["us"], two["us"], chosen["us"]) for dims, one, two, chosen in every_size.by_branches(rows)
    ]
    assert times == [((5, 6, 7), "4", "5", "4"), ((50, 6, 7), "10", "8", "9")]
    svg = every_size.branches_chart(rows)
    assert "at 2 sizes, from 0.80 to 1.25" in svg
    assert re.findall(r'<circle.*?fill-opacity="(.)"', svg) == ["0", "1"]
