"""Tables of the page about every size: drawn sizes beside the peers, who multiplies where, float32 by pairs.

Everything comes from the records `sizes`, `peak_memory`, `products`, `branches` and `pairs`. The generator of the book's pages calls `pages()`.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from book.figures.bench_results import OURS, SHORT, Row, Size, select, size, size_text, table, time_text
from book.figures.charts import ratio_dots
from book.measure import record

PAIRS_PEERS = ("eager", "compile")
WORST = 1.01
"""Above it a ratio to the fastest peer says that the layer is slower."""
MODELS = {(4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 4096), (16384, 4096, 12288)}
"""The benchmark's four sizes, which were measured in the same run and are not drawn."""
PEERS = ("eager", "compile")


@dataclass(frozen=True)
class Beside:
    """The layer beside the fastest peer at one size."""

    dims: Size
    time: float
    peer: str
    ratio: float


def beside(rows: list[Row], column: str) -> Iterator[Beside]:
    """Each drawn size that a column has, the ratio taken of the medians. Raises KeyError where a peer of the page is missing."""
    for dims, by_name in select(rows, "both", column).items():
        times = {name: float(row["median_us"]) for name, row in by_name.items()}
        if dims not in MODELS and OURS in times:
            fastest = min(PEERS, key=times.__getitem__)
            yield Beside(dims, times[OURS], fastest, times[OURS] / times[fastest])


def beside_compile() -> dict[Size, float]:
    """The layer's time over torch.compile's at every size of the newest records, both passes as CUDA graphs."""
    return {
        dims: float(by_name[OURS]["median_us"]) / float(by_name["compile"]["median_us"])
        for dims, by_name in select(record.rows("sizes"), "both", "graph").items()
    }


def pays_verdict() -> str:
    """At how many sizes the layer was timed beside torch.compile, and with what ratios."""
    ratios = beside_compile()
    worst = max(ratios, key=ratios.__getitem__)
    slower = sum(ratio > 1 for ratio in ratios.values())
    return (
        f"At {len(ratios)} sizes the layer took {min(ratios.values()):.2f} to {ratios[worst]:.2f} of `torch.compile`'s time; the "
        f"median is {statistics.median(ratios.values()):.2f}. It was slower at {slower} of them, most at {size_text(worst)}.\n"
    )


def small(dims: Size) -> str:
    """4,096: 768 → 3,072."""
    M, H, O = dims
    return f"{M:,}: {H:,} → {O:,}"


def marked(ratio: float) -> str:
    """A ratio, in bold where the layer is slower than it should be."""
    return f"**{ratio:.2f}**" if ratio > WORST else f"{ratio:.2f}"


def drawn_sizes() -> str:
    """The layer's time over the fastest peer's as a CUDA graph, by the number of rows; hollow where rows fill no whole vectors."""
    points = [
        (float(one.dims[0]), one.ratio, any(width % 8 for width in one.dims[1:]))
        for one in beside(record.rows("sizes"), "graph")
    ]
    whole, odd = ([ratio for _, ratio, hollow in points if hollow == kind] for kind in (False, True))
    label = (
        f"The layer's time over the fastest peer's as a CUDA graph. Where rows fill whole vectors, from {min(whole):.2f} to "
        f"{max(whole):.2f}; elsewhere from {min(odd):.2f} to {max(odd):.2f}"
    )
    return ratio_dots(label, "time / fastest peer's time", points, "number of rows")


def swaps() -> str:
    """The layer's time over torch.compile's at the sizes of the newest records, over the work of the product."""
    ratios = beside_compile()
    label = f"The layer's time over torch.compile's at {len(ratios)} sizes: from {min(ratios.values()):.2f} to {max(ratios.values()):.2f}."
    points = [(float(math.prod(dims)), ratio, ratio > 1) for dims, ratio in ratios.items()]
    return ratio_dots(label, "time / torch.compile's", points)


def drawn_table(rows: list[Row]) -> str:
    """A line for each size, the ones with the least work first."""
    loops = {one.dims: one for one in beside(rows, "loop")}
    graphs = sorted(beside(rows, "graph"), key=lambda one: math.prod(one.dims))
    body = []
    for one in graphs:
        loop = loops.get(one.dims)
        cells = [small(one.dims), time_text(one.time), SHORT[one.peer], marked(one.ratio)]
        body.append([*cells, *((SHORT[loop.peer], marked(loop.ratio)) if loop else ("", "–"))])
    return table(["rows: H → O", "graph", "fastest peer", "of it", "in a loop", "of it"], body)


def verdict(rows: list[Row]) -> str:
    """Median and worst ratio as graphs and in loops."""
    sentences = []
    for column, where in (("graph", "As CUDA graphs"), ("loop", "In plain loops")):
        comparisons = list(beside(rows, column))
        worst = max(comparisons, key=lambda one: one.ratio)
        median = statistics.median(one.ratio for one in comparisons)
        slower = sum(one.ratio > WORST for one in comparisons)
        sentences.append(
            f"{where} the median is {median:.2f}, and the worst {worst.ratio:.2f}, at {small(worst.dims)}; at {slower} of "
            f"{len(comparisons)} sizes the layer is more than a hundredth slower."
        )
    return " ".join(sentences) + "\n"


def peaks(rows: list[Row]) -> dict[Size, dict[str, int]]:
    """Bytes at the peak of both passes, by size and candidate."""
    return {
        dims: {name: int(row["peak_bytes"]) for name, row in by_name.items()}
        for dims, by_name in select(rows, "both", "memory").items()
    }


LEAST = "least memory"
"""How the record of peaks calls the layer with `memory="least"`."""


def peak_chart(rows: list[Row]) -> str:
    """The layer's peak over torch.compile's, by the work of a product; hollow with the least memory."""
    points = [
        (float(math.prod(dims)), by_name[name] / by_name["compile"], name == LEAST)
        for name in (OURS, LEAST)
        for dims, by_name in peaks(rows).items()
    ]
    label = (
        f"Peaks of memory over torch.compile's at {len(points) // 2} sizes, by default up to "
        f"{max(ratio for _, ratio, hollow in points if not hollow):.2f}, with the least memory up to "
        f"{max(ratio for _, ratio, hollow in points if hollow):.2f}."
    )
    return ratio_dots(label, "peak / torch.compile's", points)


def peak_verdict(rows: list[Row]) -> str:
    """At how many sizes the layer needs no more than torch.compile, either way."""
    every = peaks(rows).values()
    default, least = (sum(by_name[name] <= by_name["compile"] for by_name in every) for name in (OURS, LEAST))
    return (
        f'With `memory="least"` the layer needs no more than `torch.compile` at {least} of {len(every)} sizes, by default at '
        f"{default}.\n"
    )


def ways_table(rows: list[Row]) -> str:
    """A line for each size and way that was timed; the one that is chosen in a graph is marked."""
    body = []
    for row in rows:
        names = ("output", "dln", "dW")
        chosen = [row[f"chosen_{name}"] == row[name] for name in names]
        forward, backward = (time_text(float(row[f"{part}_us"])) for part in ("forward", "backward"))
        body.append(
            [
                small(size(row)),
                " · ".join("padded" if "padded" in row[name] else row[name] for name in names),
                f"**{forward}**" if chosen[0] else forward,
                f"**{backward}**" if all(chosen[1:]) else backward,
                "" if row["host_us"] == "nan" else time_text(float(row["host_us"])),
            ]
        )
    return table(["rows: H → O", "Y · dln · dW", "forward", "backward", "host, both"], body, left=2)


def by_branches(rows: list[Row]) -> Iterator[tuple[Size, Row, Row, Row]]:
    """Each size, small ones first, with the fastest way of one branch, the fastest of two, and the one that is chosen."""
    sizes: dict[Size, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row["us"])):
        sizes.setdefault(size(row), []).append(row)
    for dims, ways in sorted(sizes.items(), key=lambda item: math.prod(item[0])):
        one, two = (next(row for row in ways if row["branches"] == count) for count in "12")
        yield dims, one, two, next(row for row in ways if row["chosen"])


def branches_chart(rows: list[Row]) -> str:
    """The time of two branches over that of one, by the work of a product; filled where two are chosen."""
    points = [
        (float(math.prod(dims)), float(two["us"]) / float(one["us"]), chosen["branches"] == "1")
        for dims, one, two, chosen in by_branches(rows)
    ]
    ratios = [ratio for _, ratio, *_ in points]
    label = f"Two branches over one at {len(points)} sizes, from {min(ratios):.2f} to {max(ratios):.2f}: small products gain most."
    return ratio_dots(label, "two branches / one", points)


def pairs_tables(rows: list[Row]) -> str:
    """The times by pairs, and of each kind of input the worst error over PyTorch's own."""
    times: dict[Size, dict[str, float]] = {}
    worst: dict[str, dict[str, float]] = {}
    strange: dict[str, int] = {}
    for row in rows:
        if row["graph_us"]:
            dims = size(row)
            times.setdefault(dims, {})[row["way"]] = float(row["graph_us"])
        elif row["norm_error"]:
            for error in ("norm", "largest"):
                ratio = float(row[f"{error}_error"]) / max(float(row[f"{error}_of_torch"]), 1e-30)
                ratios = worst.setdefault(row["inputs"], {})
                ratios[error] = max(ratios.get(error, 0), ratio)
        else:
            strange[row["note"]] = strange.get(row["note"], 0) + 1
    timed = table(
        [
            "rows: H → O", "pairs", "by default", "eager", "`torch.compile`", "of the fastest peer",
        ],
        [
            [
                small(dims),
                *(time_text(by_name[way]) for way in ("pairs", "fast", *PAIRS_PEERS)),
                f"{by_name['pairs'] / min(by_name[peer] for peer in PAIRS_PEERS):.2f}",
            ]
            for dims, by_name in times.items()
        ],
    )  # fmt: skip
    errors = table(
        ["inputs", "error in the norm, of PyTorch's", "at the largest element"],
        [[kind, f"{ratios['norm']:.2f}", f"{ratios['largest']:.2f}"] for kind, ratios in worst.items()],
    )
    places = "; ".join(f"{count} results {note}" for note, count in strange.items())
    return (
        f"Forward and backward in float32, IEEE, as CUDA graphs:\n\n{timed}\n"
        f"The largest error of a result against float64, over PyTorch's own in float32:\n\n{errors}\n"
        f"With an infinity or a NaN somewhere: {places}.\n"
    )


def pages() -> dict[str, str]:
    """What the page includes, by file name."""
    rows = record.rows("sizes")
    return {
        "drawn_sizes.svg": drawn_sizes(),
        "swaps.svg": swaps(),
        "swap_pays.md": pays_verdict(),
        "sizes_drawn.md": drawn_table(rows),
        "sizes_verdict.md": verdict(rows),
        "sizes_peak.svg": peak_chart(record.rows("peak_memory")),
        "sizes_peak_verdict.md": peak_verdict(record.rows("peak_memory")),
        "sizes_ways.md": ways_table(record.rows("products")),
        "sizes_branches.svg": branches_chart(record.rows("branches")),
        "sizes_pairs.md": pairs_tables(record.rows("pairs")),
    }
