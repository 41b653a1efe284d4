"""Tables and charts of the records `bench` and `training`: nothing in them is typed by hand."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from book.figures import markdown_table
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


# ---- Rows ---------------------------------------------------------------------------------------------------


def size(row: Row) -> Size:
    """M, H and O of a row."""
    return int(row["M"]), int(row["H"]), int(row["O"])


def select(rows: Iterable[Row], direction: str, column: str) -> dict[Size, dict[str, Row]]:
    """The rows of a pass in a column that hold a measurement: size -> candidate -> row."""
    selected: dict[Size, dict[str, Row]] = {}
    value = "saved_bytes" if column == "memory" else "median_us"
    for row in rows:
        if (row["pass"], row["column"]) == (direction, column) and row[value]:
            selected.setdefault(size(row), {})[row["candidate"]] = row
    return selected


def time_text(microseconds: float) -> str:
    """Microseconds, or milliseconds from ten thousand on, with what is significant."""
    if microseconds >= 10_000:
        return f"{microseconds / 1000:,.1f} ms"
    return f"{microseconds:,.0f} µs" if microseconds >= 1000 else f"{microseconds:,.1f} µs"


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


def bold_ratio(ratio: float | None) -> str:
    """A ratio with two digits, bold above 1.00, or a dash."""
    if ratio is None:
        return "–"
    return f"**{ratio:.2f}**" if round(ratio, 2) > 1 else f"{ratio:.2f}"


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


# ---- Training -----------------------------------------------------------------------------------------------


def training(name: str) -> dict[str, list[Row]]:
    """The rows of a training run's record, by model."""
    return {model: rows for (model,), rows in record.by(record.rows(name), "model").items()}
