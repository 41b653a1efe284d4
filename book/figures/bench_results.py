"""Tables and charts of the records `bench` and `training`: nothing in them is typed by hand."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from book.figures import markdown_table
from book.figures.charts import Axis, Bar, Series, bars, plot
from book.measure import record
from book.measure.record import Row

Size = tuple[int, int, int]

NAMES = {
    "bare GEMMs": "bare matrix products",
    "fast": "LayerNormLinear",
    "least memory": "LayerNormLinear, least memory",
    "unfused through MAX": "unfused kernels, no layer",
    "fused through MAX": "fused kernel, no layer",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
    "liger": "Liger LayerNorm, linear",
}
PASSES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
OURS, FLOOR = "fast", "bare GEMMs"
SHORT = {
    FLOOR: "products",
    "eager": "eager",
    "compile": "compile",
    "liger": "Liger",
}
"""Who stands in the head of the table of all peers, which is to be seen whole."""
NBSP = "\u00a0"
OUR_OWN = (OURS, "least memory", "unfused through MAX", "fused through MAX")


# ---- Rows ---------------------------------------------------------------------------------------------------


def size(row: Row) -> Size:
    """M, H and O of a row."""
    return int(row["M"]), int(row["H"]), int(row["O"])


def waited_passes(dtype: str) -> dict[tuple[Size, str], dict[str, float]]:
    """Medians of the record `fusion`, in microseconds: (size, pass) -> fused, unfused or eager -> a call that is waited for."""
    medians: dict[tuple[Size, str], dict[str, float]] = {}
    for row in record.rows("fusion"):
        if row["dtype"] == dtype and row["role"] in ("ours", "peer"):
            who = row["candidate"].removesuffix(" through MAX")
            medians.setdefault((size(row), row["pass"]), {})[who] = float(row["median_us"])
    return medians


def select(rows: Iterable[Row], direction: str, column: str) -> dict[Size, dict[str, Row]]:
    """The rows of a pass in a column that hold a measurement: size -> candidate -> row."""
    selected: dict[Size, dict[str, Row]] = {}
    value = "saved_bytes" if column == "memory" else "median_us"
    for row in rows:
        if (row["pass"], row["column"]) == (direction, column) and row[value]:
            selected.setdefault(size(row), {})[row["candidate"]] = row
    return selected


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
    return markdown_table.table(head, body, "l" * left + "r" * (len(head) - left))


@dataclass(frozen=True)
class Timed:
    """What one candidate took in a pass, and what the bare products took in the turns beside it.

    Attributes:
        time, floor: Microseconds; floor is None where the benchmark refuses a ratio.
        words: The time with its spread, for a table.
    """

    time: float
    floor: float | None
    words: str

    def over(self, other: "Timed") -> float | None:
        """This time over another one, each over the products beside it; None where one has no ratio."""
        if self.floor is None or other.floor is None:
            return None
        return (self.time / self.floor) / (other.time / other.floor)


def timed(row: Row) -> Timed:
    """The time of a row."""
    time = float(row["median_us"])
    floor = time / float(row["ratio_to_floor"]) if row["ratio_to_floor"] else None
    return Timed(time, floor, f"{time_text(time)} ± {widest_spread(row):.1f} %".replace(" ", NBSP))


def passes(rows: list[Row], column: str) -> Iterator[tuple[Size, str, dict[str, Timed]]]:
    """Size, pass and what everybody took: forward, backward, and both."""
    selected = {direction: select(rows, direction, column) for direction in PASSES}
    for dims in dict.fromkeys(dims for at in selected.values() for dims in at):
        for direction, at in selected.items():
            yield dims, direction, {name: timed(row) for name, row in at.get(dims, {}).items()}


def peers_of(rows: list[Row], column: str) -> list[str]:
    """Everybody to compare with, in the order of NAMES: the products first."""
    measured = {name for _, _, by_name in passes(rows, column) for name in by_name}
    return [name for name in NAMES if name in measured and name not in OUR_OWN]


def peers_table(rows: list[Row], column: str) -> str:
    """LayerNormLinear beside all peers, a line for each size and pass: its time, and that over everybody's.

    The spread of a time is the larger distance of the 20 % and the 80 % quantile. Above 1 it is slower, and the ratio is bold.
    """
    peers, body = peers_of(rows, column), []
    for dims, what, by_name in passes(rows, column):
        if OURS in by_name:
            ours = by_name[OURS]
            ratios = [ours.over(by_name[name]) if name in by_name else None for name in peers]
            size = "{:,}:\u00a0{:,}→{:,}".format(*dims)
            body.append([size, what.replace(" ", NBSP), ours.words, *map(bold_ratio, ratios)])
    head = ["rows: H→O", "pass", "time", *(SHORT[name] for name in peers)]
    return table(head, body, left=2)


def bold_ratio(ratio: float | None) -> str:
    """A ratio with two digits, bold above 1.00, or a dash."""
    if ratio is None:
        return "–"
    return f"**{ratio:.2f}**" if round(ratio, 2) > 1 else f"{ratio:.2f}"


def losses(rows: list[Row], column: str) -> str:
    """In how many comparisons with a peer LayerNormLinear is slower, and what the spread is."""
    peers = [name for name in peers_of(rows, column) if name != FLOOR]
    timed = [by_name for _, _, by_name in passes(rows, column)]
    ratios = [by[OURS].over(by[name]) for by in timed for name in peers if {OURS, name} <= set(by)]
    compared = [round(ratio, 2) for ratio in ratios if ratio is not None]
    widest = max((widest_spread(row) for row in rows if row["column"] == column), default=0.0)
    return (
        f"The layer is slower than a peer in {sum(ratio > 1 for ratio in compared)} of {len(compared)} comparisons. "
        f"Three of five rounds of every candidate lie within {widest:.1f} % of its median.\n"
    )


def widest_spread(row: Row) -> float:
    """How far the 20 % or the 80 % quantile lies from the median at most, in percent."""
    return 100 * max(abs(float(row[name]) / float(row["median_us"]) - 1) for name in ("p20_us", "p80_us"))


def memory_note(rows: list[Row]) -> str:
    """How LayerNormLinear stands in what is kept and at the peak, a list item for each peer."""
    compared: dict[str, dict[str, list[float]]] = {}
    for by_name in select(rows, "both", "memory").values():
        for name in by_name.keys() - {OURS}:
            for field in MEMORY:
                ratio = int(by_name[OURS][field]) / int(by_name[name][field])
                compared.setdefault(name, {}).setdefault(field, []).append(ratio)
    lines = []
    for name in filter(compared.__contains__, NAMES):
        parts = [f"{word} {span(compared[name][field])} times as much" for field, word in MEMORY.items()]
        peaks = compared[name]["peak_bytes"]
        higher = f"the layer's peak is the higher one at {sum(r > 1 for r in peaks)} of {len(peaks)} sizes"
        lines.append(f"- Beside {NAMES[name]}: {', '.join(parts)}; {higher}.")
    return "\n".join(lines) + "\n"


MEMORY = {"saved_bytes": "keeps", "peak_bytes": "peaks at"}


def span(ratios: list[float]) -> str:
    """0.50, or 0.50 to 1.02."""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def mebibytes(cell: str) -> str:
    """A number of bytes in MiB."""
    return f"{int(cell) / 2**20:,.1f} MiB" if cell else "–"


def compared(rows: list[Row]) -> str:
    """What LayerNormLinear takes and keeps beside torch.compile, as the benchmark has it: list items."""
    times: dict[str, list[float]] = {}
    for _, what, by_name in passes(rows, "graph"):
        ratio = by_name[OURS].over(by_name["compile"])
        assert ratio is not None
        times.setdefault(what, []).append(ratio)
    peer = f"- Beside {NAMES['compile']}:"
    lines = [f"- {what}: {span(ratios)} of its time" for what, ratios in times.items()]
    memory = [line for line in memory_note(rows).splitlines() if line.startswith(peer)]
    return "\n".join([*lines, *(line.replace(peer, "- memory:").rstrip(".") for line in memory)]) + "\n"


# ---- Charts -------------------------------------------------------------------------------------------------


def ratio_bars(title: str, groups: dict[str, list[Bar]]) -> str:
    """Groups of bars with the ratio in front of their words, all of them spoken."""
    spoken = [
        f"{heading} {name} {ratio:.2f}" for heading, group in groups.items() for name, ratio, *_ in group
    ]
    shown = {
        heading: [(name, ratio, f"{ratio:.2f} · {words}", ours) for name, ratio, words, ours in group]
        for heading, group in groups.items()
        if group
    }
    return bars(f"{title}. {'; '.join(spoken)}", shown, title, level=1)


def ratio_chart(rows: list[Row]) -> str:
    """Both passes as graphs over the bare matrix products' time, for every size and candidate."""
    groups = {}
    for dims, by_name in select(rows, "both", "graph").items():
        able = [
            (NAMES[name], float(row["ratio_to_floor"]), time_text(float(row["median_us"])), name == OURS)
            for name, row in by_name.items()
            if row["ratio_to_floor"] and name != FLOOR
        ]
        groups[size_text(dims)] = sorted(able, key=lambda bar: bar[1])
    return ratio_bars("time / time of the bare matrix products", groups)


def peak_chart(rows: list[Row]) -> str:
    """Bytes at the peak over eager PyTorch's at the same size."""
    groups = {
        size_text(dims): [
            (
                NAMES[name],
                int(row["peak_bytes"]) / int(by_name["eager"]["peak_bytes"]),
                mebibytes(row["peak_bytes"]),
                name == OURS,
            )
            for name, row in by_name.items()
        ]
        for dims, by_name in select(rows, "both", "memory").items()
    }
    return ratio_bars("bytes in use at the peak / PyTorch eager's", groups)


def host_chart() -> str:
    """How long both passes keep their caller at the chapter's sizes."""
    waited = next(iter(select(record.rows("bench"), "both", "host").values()))
    times = {name: float(waited[name]["median_us"]) for name in NAMES if name in waited}
    words = "; ".join(f"{NAMES[name]} {time_text(time)}" for name, time in times.items())
    rows = [(NAMES[name], time, time_text(time), name == OURS) for name, time in times.items()]
    return bars(f"How long a caller waits for both passes at the chapter's sizes: {words}.", {"": rows})


# ---- Training -----------------------------------------------------------------------------------------------


def training(name: str) -> dict[str, list[Row]]:
    """The rows of a training run's record, by model."""
    return {model: rows for (model,), rows in record.by(record.rows(name), "model").items()}


def step_ratio(models: dict[str, list[Row]], name: str, untimed: int = 10) -> float:
    """The median, step by step, of a model's time over plain PyTorch's."""
    own, plain = (
        [float(row["step_us"]) for row in models[each]][untimed:] for each in (name, "plain PyTorch")
    )
    return statistics.median(a / b for a, b in zip(own, plain, strict=True))


def training_table(models: dict[str, list[Row]], untimed: int = 10, window: int = 10) -> str:
    """First loss, mean of the last ones, step time, its ratio to plain PyTorch's step by step, and peak memory of every model."""
    body = []
    for name, steps in models.items():
        losses = [float(row["loss"]) for row in steps]
        times = [float(row["step_us"]) for row in steps][untimed:]
        body.append(
            [
                name,
                f"{losses[0]:.4f}",
                f"{statistics.fmean(losses[-window:]):.4f}",
                f"{statistics.median(times) / 1000:.2f} ms",
                f"{step_ratio(models, name, untimed):.3f}",
                mebibytes(steps[0]["peak_bytes"]),
            ]
        )
    columns = [
        "model", "first loss", f"mean of the last {window}", "median step", "median ratio",
        "peak of a step",
    ]  # fmt: skip
    return table(columns, body)


def losses_of(models: dict[str, list[Row]]) -> dict[str, list[tuple[float, float]]]:
    """Step and loss by model."""
    return {
        name: [(float(step), float(row["loss"])) for step, row in enumerate(rows, start=1)]
        for name, rows in models.items()
    }


DASHES = ("-", "--", ":", "-.")


def training_curves(models: dict[str, list[Row]]) -> str:
    """The losses of all models over the steps, which lie on each other."""
    losses = losses_of(models)
    plain = losses["plain PyTorch"]
    return plot(
        f"Training losses over {len(plain)} steps. All curves fall together, from {plain[0][1]:.1f} to {plain[-1][1]:.1f}.",
        [Series(name, curve, dash) for (name, curve), dash in zip(losses.items(), DASHES, strict=False)],
        Axis("step"),
        Axis("loss", log=False),
    )


def training_apart(models: dict[str, list[Row]]) -> str:
    """How far each loss is from plain PyTorch's, step by step: the layer's, and the control's."""
    losses = losses_of(models)
    plain = losses.pop("plain PyTorch")
    apart = {
        name: [
            (step, max(abs(loss - other), 1e-5))
            for (step, loss), (_, other) in zip(curve, plain, strict=True)
        ]
        for name, curve in losses.items()
    }
    return plot(
        "The difference of two losses from plain PyTorch's: that of the layer and that of plain PyTorch with parameters moved by half "
        "a unit in their last place. Both grow in the same way.",
        [Series(name, curve, dash) for (name, curve), dash in zip(apart.items(), DASHES, strict=False)],
        Axis("step"),
        Axis("difference of the losses"),
    )


# ---- Files --------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """What the book's pages can include, by file name."""
    rows = record.rows("bench")
    texts = {
        "source.md": source(rows) + "\n",
        "ratio_both.svg": ratio_chart(rows),
        "memory_note.md": memory_note(rows),
        "peak.svg": peak_chart(rows),
        "compared.md": compared(rows),
    }
    for column in ("graph", "loop"):
        texts[f"peers_{column}.md"] = peers_table(rows, column)
        texts[f"losses_{column}.md"] = losses(rows, column)
    return {f"bench_{name}": text for name, text in texts.items()}


def training_pages() -> dict[str, str]:
    """The same of the training run."""
    models = training("training")
    return {
        "training.md": training_table(models),
        "training_loss.svg": training_curves(models),
        "training_apart.svg": training_apart(models),
    }
