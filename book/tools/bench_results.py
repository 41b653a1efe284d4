"""Tables and charts of the benchmark, from the CSV that `p22 --bench --csv` wrote: nothing in them is typed by hand.

`python book/tools/bench_results.py [FOLDER]` writes them all (default: docs/); the SVGs then bring their own background,
for a README. The generator of the book's pages calls `pages()`. The training results come from
`python -m harness.puzzles.p22.train_gpt2 --csv`.
"""

import csv
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from charts import FAINT, LogChart
from figures import Drawing

BOOK = Path(__file__).absolute().parents[1]
MEASURED = BOOK / "measurements" / "h200_bench_bfloat16.csv"
CLIMB = BOOK / "measurements" / "h200_bench_climb.csv"
TRAINED = BOOK / "measurements" / "h200_training.csv"

Row = dict[str, str]
Size = tuple[int, int, int]

NAMES = {
    "bare GEMMs": "bare matrix products",
    "fast": "LayerNormLinear",
    "unfused": "unfused kernels",
    "fused": "fused kernel",
    "unfused through MAX": "unfused kernels, no layer",
    "fused through MAX": "fused kernel, no layer",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "compile budget 0.5": "torch.compile, memory budget 0.5",
    "max-autotune": "torch.compile, max-autotune",
    "liger": "Liger LayerNorm, linear",
    "transformer-engine": "Transformer Engine",
}
MARKS = {
    "fast": ("square", False),
    "eager": ("circle", True),
    "compile": ("triangle", True),
    "compile budget 0.5": ("wedge", True),
    "max-autotune": ("diamond", True),
    "liger": ("square", True),
    "transformer-engine": ("circle", False),
    "unfused": ("triangle", False),
    "fused": ("diamond", False),
}
PASSES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


# ---- Rows ---------------------------------------------------------------------------------------------------


def read(*paths: Path) -> list[Row]:
    """The rows of some CSV files. Raises ValueError for a file that is no benchmark."""
    rows: list[Row] = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if "candidate" not in (reader.fieldnames or ()):
                raise ValueError(f"{path} is no CSV of `p22 --bench`: it has no column `candidate`")
            rows += reader
    return rows


def size(row: Row) -> Size:
    """M, H and O of a row."""
    return int(row["M"]), int(row["H"]), int(row["O"])


def select(rows: Iterable[Row], direction: str, column: str) -> dict[Size, dict[str, Row]]:
    """The rows of a pass in a column that hold a measurement: size -> candidate -> row."""
    found: dict[Size, dict[str, Row]] = {}
    value = "saved_bytes" if column == "memory" else "median_us"
    for row in rows:
        if (row["pass"], row["column"]) == (direction, column) and row[value]:
            found.setdefault(size(row), {})[row["candidate"]] = row
    return found


def size_text(dims: Size) -> str:
    """4,096 rows, 768 → 3,072."""
    M, H, O = dims
    return f"{M:,} rows, {H:,} → {O:,}"


def time_text(microseconds: float) -> str:
    """Microseconds, or milliseconds from ten thousand on, with what is significant."""
    if microseconds >= 10_000:
        return f"{microseconds / 1000:,.1f} ms"
    return f"{microseconds:,.0f} µs" if microseconds >= 1000 else f"{microseconds:,.1f} µs"


def source(rows: list[Row]) -> str:
    """One sentence about machine, versions and date."""
    first = rows[0]
    parts = [first["device"], first["driver"] and f"driver {first['driver']}", f"torch {first['torch']}"]
    parts += [f"{name} {first[name]}" for name in ("triton", "max") if first[name]]
    return f"{', '.join(part for part in parts if part)}, {first['dtype']}, {first['date']}."


# ---- Tables -------------------------------------------------------------------------------------------------


def table(head: list[str], body: list[list[str]], left: int = 1) -> str:
    """A Markdown table whose first columns are aligned left, the others right."""
    rules = ["---" if number < left else "---:" for number in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rules, *body]) + "\n"


def times_table(rows: list[Row], direction: str, column: str) -> str:
    """A line for each size and candidate: time, spread, ratios, TFLOP/s and error, the fastest first."""
    body = []
    for dims, found in select(rows, direction, column).items():
        for name, row in sorted(found.items(), key=lambda item: float(item[1]["median_us"])):
            body.append(
                [
                    size_text(dims),
                    NAMES[name],
                    time_text(float(row["median_us"])),
                    spread(row),
                    ratio_text(row, "ratio_to_floor"),
                    ratio_text(row, "ratio_to_fastest_peer"),
                    row["tflops"] and f"{float(row['tflops']):,.0f}",
                    row["percent_of_matmul"] and f"{float(row['percent_of_matmul']):.0f} %",
                    row["error"] or "",
                ]
            )
    head = ["sizes", "", "time", "20 to 80 %", "/ products", "/ fastest peer", "TFLOP/s", "of ceiling"]
    return table([*head, "error"], body, left=2)


def spread(row: Row) -> str:
    """How far the 20 % and 80 % quantiles lie from the median, in percent."""
    median = float(row["median_us"])
    low, high = (100 * (float(row[name]) / median - 1) for name in ("p20_us", "p80_us"))
    return f"{low:+.1f} % {high:+.1f} %"


def ratio_text(row: Row, name: str) -> str:
    """A ratio with two digits behind the point, or a dash where the benchmark refuses one."""
    return f"{float(row[name]):.2f}" if row[name] else "–"


def ratios_table(rows: list[Row], candidate: str = "fast", direction: str = "both") -> str:
    """One candidate at every size: time, and its ratios in the columns graph and loop."""
    graph, loop = (select(rows, direction, column) for column in ("graph", "loop"))
    body = []
    for dims in graph:
        if candidate not in graph[dims]:
            continue
        row, other = graph[dims][candidate], loop.get(dims, {}).get(candidate)
        body.append(
            [
                size_text(dims),
                time_text(float(row["median_us"])),
                ratio_text(row, "ratio_to_floor"),
                f"{ratio_text(row, 'ratio_to_fastest_peer')} ({NAMES.get(row['fastest_peer'], '–')})",
                f"{ratio_text(other, 'ratio_to_fastest_peer')} ({NAMES.get(other['fastest_peer'], '–')})"
                if other
                else "–",
            ]
        )
    head = ["sizes", "time", "/ bare products", "/ fastest peer", "/ fastest peer, plain loop"]
    return table(head, body)


def memory_table(rows: list[Row]) -> str:
    """Bytes kept for backward and the peak of forward and backward, for each size and candidate."""
    body = []
    for dims, found in select(rows, "both", "memory").items():
        for name, row in found.items():
            cells = (row["saved_bytes"], row["grown_bytes"], row["peak_bytes"])
            body.append([size_text(dims), NAMES[name], *(mebibytes(cell) for cell in cells)])
    return table(["sizes", "", "kept for backward", "grown by forward", "peak"], body, left=2)


def mebibytes(cell: str) -> str:
    """A number of bytes in MiB."""
    return f"{int(cell) / 2**20:,.1f} MiB" if cell else "–"


def host_table(rows: list[Row]) -> str:
    """How long a call keeps its caller at the chapter's sizes."""
    passes = ("inference", "forward", "both")
    found = {direction: next(iter(select(rows, direction, "host").values()), {}) for direction in passes}
    names = [name for name in NAMES if name in found["forward"]]
    body = [
        [
            NAMES[name],
            *(
                time_text(float(found[direction][name]["median_us"])) if name in found[direction] else "–"
                for direction in passes
            ),
        ]
        for name in names
    ]
    return table(["", "forward, no gradients", "forward", "forward and backward"], body)


def left_out(rows: list[Row]) -> str:
    """Who was not measured and why, a list item each."""
    seen = {}
    for row in rows:
        if row["candidate"] in NAMES and not row["median_us"] and not row["saved_bytes"]:
            seen.setdefault((NAMES[row["candidate"]], row["note"]), []).append(size_text(size(row)))
    return "".join(
        f"- {name} ({', '.join(dict.fromkeys(sizes))}): {note}\n" for (name, note), sizes in seen.items()
    )


# ---- Charts -------------------------------------------------------------------------------------------------


def bars(
    label: str,
    title: str,
    groups: dict[str, list[tuple[str, float, str, bool]]],
    line_at: float | None = None,
) -> str:
    """Groups of horizontal bars from one zero.

    Args:
        label: What the picture shows, in words.
        title: What a bar's length is.
        groups: Heading -> (name, length, words behind the bar, whether it is the workbook's).
        line_at: A length to mark across all groups.
    """
    left, right, height, gap = 250, 300, 20, 34
    count = sum(len(group) for group in groups.values())
    drawing = Drawing(900, 40 + gap * len(groups) + height * count, label)
    longest = max((length for group in groups.values() for _, length, _, _ in group), default=1.0)
    scale = (drawing.width - left - right) / max(longest, line_at or 0)
    drawing.text(left, 18, title, anchor="start", size=12)
    y = 28.0
    for heading, group in groups.items():
        drawing.text(left - 10, y + 22, heading, anchor="end", size=13)
        y += gap
        for name, length, words, ours in group:
            drawing.text(left - 10, y + 14, name, anchor="end", size=12)
            drawing.box(left, y + 2, max(1.0, scale * length), height - 5, shade=0.85 if ours else FAINT)
            drawing.text(left + scale * length + 8, y + 14, words, anchor="start", size=12)
            y += height
    if line_at is not None:
        x = left + scale * line_at
        drawing.parts.append(
            f'<line x1="{x:.1f}" y1="28" x2="{x:.1f}" y2="{drawing.height - 8}" stroke="currentColor"'
            ' stroke-dasharray="4 4"/>'
        )
    return drawing.svg()


def ratio_chart(rows: list[Row], direction: str = "both", column: str = "graph") -> str:
    """Time over the bare matrix products' time, for every size and candidate."""
    groups, spoken = {}, []
    for dims, found in select(rows, direction, column).items():
        able = {name: row for name, row in found.items() if row["ratio_to_floor"] and name != "bare GEMMs"}
        group = []
        for name, row in sorted(able.items(), key=lambda item: float(item[1]["median_us"])):
            ratio = float(row["ratio_to_floor"])
            group.append(
                (NAMES[name], ratio, f"{ratio:.2f} · {time_text(float(row['median_us']))}", name == "fast")
            )
            spoken.append(f"{size_text(dims)} {NAMES[name]} {ratio:.2f}")
        if group:
            groups[size_text(dims)] = group
    what = f"{PASSES[direction]}: time / time of the bare matrix products"
    return bars(f"{what}. {'; '.join(spoken)}", what, groups, line_at=1.0)


def memory_chart(rows: list[Row]) -> str:
    """Bytes kept for backward, over what eager PyTorch keeps at the same size."""
    groups, spoken = {}, []
    for dims, found in select(rows, "both", "memory").items():
        if "eager" not in found:
            continue
        eager = int(found["eager"]["saved_bytes"])
        group = []
        for name, row in found.items():
            share = int(row["saved_bytes"]) / eager
            group.append(
                (NAMES[name], share, f"{share:.2f} · {mebibytes(row['saved_bytes'])}", name == "fast")
            )
            spoken.append(f"{size_text(dims)} {NAMES[name]} {share:.2f}")
        groups[size_text(dims)] = group
    what = "bytes kept for the backward pass / PyTorch eager's"
    return bars(f"{what}. {'; '.join(spoken)}", what, groups, line_at=1.0)


def roofline_chart(rows: list[Row], direction: str = "both", column: str = "graph") -> str:
    """Achieved TFLOP/s over operations for each byte, under the ceilings of the same run.

    Raises ValueError where the rows hold no ceilings.
    """
    ceilings = {row["candidate"]: row for row in rows if row["column"] == "ceiling"}
    if len(ceilings) != 2:
        raise ValueError("the rows hold no ceilings: they were not measured on a GPU")
    peak = float(ceilings["matmul ceiling"]["tflops"])
    bandwidth = float(ceilings["copy ceiling"]["gbs"]) / 1000  # TB/s, so that operations a byte give TFLOP/s
    found = select(rows, direction, column)
    low, high = 30.0, 4e3
    drawing = LogChart(
        (720, 420),
        f"TFLOP/s of {PASSES[direction]} over operations for each byte, under a roof of {peak:,.0f} TFLOP/s and "
        f"{bandwidth:.1f} TB/s that were measured in the same run.",
        x=(low, high),
        y=(30.0, 1.3 * peak),
        x_name="operations for each byte that must move",
        y_name="TFLOP/s",
        x_ticks={value: f"{value:,.0f}" for value in (30.0, 100.0, 300.0, 1000.0, 3000.0)},
        y_ticks={value: f"{value:,.0f}" for value in (30.0, 100.0, 300.0, 1000.0) if value < 1.3 * peak},
    )
    knee = peak / bandwidth
    drawing.curve([(low, max(30.0, low * bandwidth)), (knee, peak), (high, peak)])
    drawing.note(high, peak, f"large matrix product: {peak:,.0f} TFLOP/s", dx=-4, dy=-7, anchor="end")
    drawing.note(low * 1.3, low * 1.3 * bandwidth, f"large copy: {bandwidth:.1f} TB/s", dx=12, dy=14)
    shown = [name for name in MARKS if any(name in at for at in found.values())]
    for at in found.values():
        for name in shown:
            if name in at and float(at[name]["tflops"]) > 30:
                shape, hollow = MARKS[name]
                tflops = float(at[name]["tflops"])
                drawing.marker(1000 * tflops / float(at[name]["gbs"]), tflops, shape, hollow=hollow)
    legend(drawing, shown, across=0.67, up=0.4)
    return drawing.svg()


def legend(drawing: LogChart, names: list[str], across: float, up: float) -> None:
    """What the markers mean, from a place on downwards; the place in shares of the two axes."""
    x = drawing.x[0] * (drawing.x[1] / drawing.x[0]) ** across
    for number, name in enumerate(names):
        y = drawing.y[0] * (drawing.y[1] / drawing.y[0]) ** (up - 0.06 * number)
        shape, hollow = MARKS[name]
        drawing.marker(x, y, shape, hollow=hollow)
        drawing.note(x, y, NAMES[name])


def climb_chart(rows: list[Row], direction: str = "both", column: str = "loop") -> str:
    """Times from the chapter's sizes to GPT-2 small's, over the multiply-adds of one product."""
    found = select(rows, direction, column)
    products = {dims: float(dims[0] * dims[1] * dims[2]) for dims in found}
    times = [float(row["median_us"]) for at in found.values() for row in at.values()]
    drawing = LogChart(
        (720, 400),
        f"Time of {PASSES[direction]} over the size of the matrix product, for the workbook's variants and PyTorch.",
        x=(min(products.values()) / 2, max(products.values()) * 2),
        y=(min(times) / 2, max(times) * 2),
        x_name="size of the product in multiply-adds; written below: H → O",
        y_name="µs",
        x_ticks={product: f"{dims[1]} → {dims[2]}" for dims, product in products.items()},
    )
    shown = [name for name in MARKS if any(name in at for at in found.values())]
    legend(drawing, shown, across=0.03, up=0.95)
    for name in shown:
        shape, hollow = MARKS[name]
        points = [(products[dims], float(at[name]["median_us"])) for dims, at in found.items() if name in at]
        drawing.curve(points, dash="6 4" if hollow else "")
        for point in points:
            drawing.marker(*point, shape, hollow=hollow)
    return drawing.svg()


# ---- Training -----------------------------------------------------------------------------------------------


def read_training(path: Path) -> dict[str, list[Row]]:
    """The rows of a training run, by model. Raises ValueError for a file that is none."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if "loss" not in (reader.fieldnames or ()):
            raise ValueError(f"{path} is no CSV of harness.puzzles.p22.train_gpt2: it has no column `loss`")
        found: dict[str, list[Row]] = {}
        for row in reader:
            found.setdefault(row["model"], []).append(row)
        return found


def training_table(models: dict[str, list[Row]], untimed: int = 10, window: int = 10) -> str:
    """First and last loss, step time and peak memory of every model; the last loss is the mean of a window."""
    plain = [float(row["step_us"]) for row in models["plain PyTorch"]][untimed:]
    body = []
    for name, steps in models.items():
        losses = [float(row["loss"]) for row in steps]
        times = [float(row["step_us"]) for row in steps][untimed:]
        ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))
        body.append(
            [
                name,
                f"{losses[0]:.4f}",
                f"{statistics.fmean(losses[-window:]):.4f}",
                f"{statistics.median(times) / 1000:.2f} ms",
                f"{ratio:.3f}",
                mebibytes(steps[0]["peak_bytes"]),
            ]
        )
    return table(["model", "first loss", "last loss", "step", "/ plain PyTorch", "peak of a step"], body)


# ---- Files --------------------------------------------------------------------------------------------------


def standalone(svg: str) -> str:
    """An SVG with a background and a text colour of its own, light or dark as the reader's system is.

    An image in a README does not inherit the page's colour; with its own background it can be read on either page.
    """
    style = (
        "<style>svg{color:#1f2328;background:#ffffff;font-family:system-ui,sans-serif}"
        "@media (prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}</style>"
    )
    opening, closing = svg.split(">", 1)
    return f"{opening}>{style}{closing}"


def pages(measured: Path = MEASURED, climb: Path = CLIMB, trained: Path = TRAINED) -> dict[str, str]:
    """What the book's pages can include, by file name; without a file, without what is made from it."""
    found: dict[str, str] = {}
    if measured.is_file():
        rows = read(measured)
        makers: dict[str, Callable[[], str]] = {
            "bench_ratios.md": lambda: ratios_table(rows),
            "bench_graph.md": lambda: times_table(rows, "both", "graph"),
            "bench_loop.md": lambda: times_table(rows, "both", "loop"),
            "bench_forward.md": lambda: times_table(rows, "forward", "graph"),
            "bench_memory.md": lambda: memory_table(rows),
            "bench_host.md": lambda: host_table(rows),
            "bench_left_out.md": lambda: left_out(rows),
            "bench_source.md": lambda: source(rows) + "\n",
            "bench_ratio.svg": lambda: ratio_chart(rows),
            "bench_memory.svg": lambda: memory_chart(rows),
            "bench_roofline.svg": lambda: roofline_chart(rows),
        }
        found |= {name: make() for name, make in makers.items()}
    if climb.is_file():
        found["bench_climb.svg"] = climb_chart(read(climb))
    if trained.is_file():
        found["training.md"] = training_table(read_training(trained))
    return found


def main(arguments: list[str]) -> int:
    """Writes every table and chart into a folder, the charts to stand alone."""
    folder = Path(arguments[0] if arguments else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(standalone(text) if name.endswith(".svg") else text, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
