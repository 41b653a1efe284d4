"""Tables of float32 attention by pairs of float16: times beside PyTorch's kernel, errors beside it, and where nothing is finite.

Everything comes from the record `attention_pairs`. The generator of the book's
pages calls `pages()`.
"""

from book.figures.bench_results import table, time_text
from book.figures.charts import Axis, Series, plot
from book.measure import record

WAYS = {"pairs": "`wgmma`", "pairs, portable": "`mma.sync`"}
PEER = "efficient"
Row = dict[str, str]


def measured(rows: list[Row]) -> dict[str, str]:
    """The ways that the file has rows of, and their names."""
    return {way: name for way, name in WAYS.items() if any(row["way"] == way for row in rows)}


def timed(rows: list[Row]) -> dict[tuple[int, str], dict[str, Row]]:
    """(Length, causal or not) -> who was timed there, short ones first."""
    times: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        if row["graph_us"]:
            times.setdefault((int(row["S"]), row["causal"]), {})[row["way"]] = row
    return dict(sorted(times.items()))


def by_length() -> str:
    """The time of both ways over PyTorch's kernel's, without a mask, with broken lines at a half and a quarter."""
    every = {
        S: by_way for (S, causal), by_way in timed(record.rows("attention_pairs")).items() if causal == "0"
    }
    ratios = {
        way: [
            (S, float(by_way[way]["graph_us"]) / float(by_way[PEER]["graph_us"]))
            for S, by_way in every.items()
        ]
        for way in WAYS
    }
    spoken = "; ".join(
        f"{name.strip('`')} {', '.join(f'{ratio:.2f} at {S:,}' for S, ratio in ratios[way])}"
        for way, name in WAYS.items()
    )
    return plot(
        f"Time over that of PyTorch's memory-efficient kernel: {spoken}.",
        [
            Series(name.strip("`"), ratios[way], "-", marker)
            for (way, name), marker in zip(WAYS.items(), "os", strict=True)
        ],
        Axis("positions", ticks={float(S): f"{S:,}" for S in every}),
        Axis("time / PyTorch's", ticks={tick: f"{tick:g}" for tick in (0.2, 0.25, 0.3, 0.4, 0.5)}),
    )


def times_table(rows: list[Row]) -> str:
    """A line for each length: both ways, PyTorch's kernel, and the ratios to it."""
    ways, body = measured(rows), []
    for (S, causal), by_way in timed(rows).items():
        peer = float(by_way[PEER]["graph_us"])
        own = [float(by_way[way]["graph_us"]) for way in ways]
        memory = int(by_way["pairs"]["peak_bytes"]) / int(by_way[PEER]["peak_bytes"])
        cells = [f"{S:,}", "causal" if causal == "1" else "", *map(time_text, (*own, peer))]
        body.append([*cells, *(f"{time / peer:.2f}" for time in own), f"{memory:.2f}"])
    ratios = [f"{name}, of it" for name in ways.values()]
    head = ["length", "", *ways.values(), "PyTorch's", *ratios, "peak memory, of it"]
    return table(head, body, left=2)


def errors_table(rows: list[Row]) -> str:
    """A line for each kind of input: the largest ratio of a result's error to PyTorch's, and which path was taken."""
    worst: dict[str, dict[str, float]] = {}
    largest: dict[str, float] = {}
    plain, ways = set(), measured(rows)
    for row in rows:
        if row["error"]:
            ratios = worst.setdefault(row["inputs"], {})
            ratio = float(row["error"]) / float(row[f"of_{PEER}"])
            ratios[row["way"]] = max(ratios.get(row["way"], 0), ratio)
            if row["way"] == "pairs":
                largest[row["inputs"]] = max(largest.get(row["inputs"], 0), float(row["error"]))
            if row["note"]:
                plain.add(row["inputs"])
    body = [
        [
            kind,
            f"{largest[kind]:.1e}",
            *(f"{ratios[way]:.2f}" for way in ways),
            "plain" if kind in plain else "",
        ]
        for kind, ratios in worst.items()
    ]
    head = ["inputs", "largest error", *(f"{name}, of PyTorch's" for name in ways.values()), "path"]
    return table(head, body)


def sentences(rows: list[Row]) -> str:
    """Where results are not finite, and how often the bits were the same."""
    strange = [row["note"] for row in rows if " in " in row["inputs"] and not row["error"] and row["note"]]
    same = strange.count("as PyTorch")
    bits = "; ".join(f"{WAYS[row['way']]}: {row['note']}" for row in rows if "bits" in row["note"])
    return (
        f"With an infinity or a NaN in one of the inputs, {same} of {len(strange)} calls have infinities and NaNs in the same "
        f"places as PyTorch's formula. {bits}.\n"
    )


def pages() -> dict[str, str]:
    """What the page includes, by file name."""
    rows = record.rows("attention_pairs")
    first = rows[0]
    return {
        "attention_pairs.md": (
            f"Forward and backward, 8 sequences, 12 heads of 64 elements, as CUDA graphs, beside PyTorch's memory-efficient "
            f"kernel ({first['device']}, torch {first['torch']}, {first['date']}):\n\n{times_table(rows)}\n"
            f"The error of a result against float64 is the largest difference over the largest value. The worst of the four "
            f"results, and over PyTorch's own error:\n\n{errors_table(rows)}\n{sentences(rows)}"
        )
    }
