"""What pages show of attention: times, memory, and predictions, from the record `attention`."""

from book.figures.charts import bars
from book.measure import record

OURS, CUDNN = "attention", "cuDNN"
HEADS = ("8", "12")
"""Batch and heads of the sizes that are shown."""
PRODUCTS = 9
"""Matrix products of a forward pass and of a backward pass of two kernels."""
Row = dict[str, str]
Size = tuple[int, int, bool, str]
"""S, d, whether causal, dtype."""


class Times:
    """The measured rows by size, column and candidate."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.by: dict[tuple[Size, str, str], Row] = {
            (size_of(row), row["column"], row["candidate"]): row
            for row in rows
            if (row["B"], row["N"], row["pass"]) == (*HEADS, "both")
            and (row["median_us"] or row["peak_bytes"])
        }

    def microseconds(self, size: Size, column: str, candidate: str) -> float:
        """The median. Raises KeyError where that was not measured."""
        return float(self.by[size, column, candidate]["median_us"])

    def sizes(
        self, column: str, d: int | None = None, causal: bool | None = None, ragged: bool = False
    ) -> list[Size]:
        """The sizes in bfloat16 in which ours was measured, of one kind or any, small heads and short lengths first."""
        timed = {
            size
            for size, other, who in self.by
            if (other, who, size[3], size[0] % 64 != 0) == (column, OURS, "bfloat16", ragged)
            and d in (None, size[1])
            and causal in (None, size[2])
        }
        return sorted(timed, key=lambda size: (size[1], *size))

    def rate(self, dtype: str) -> float:
        """Operations a second of a large matrix product in the same run."""
        matching = [
            row for row in self.rows if row["column"] == "ceiling" and row["dtype"] == dtype and row["tflops"]
        ]
        return float(matching[0]["tflops"]) * 1e12


def size_of(row: Row) -> Size:
    """The size of a row."""
    return int(row["S"]), int(row["d"]), row["part"] == "2", row["dtype"]


def read() -> Times:
    """The rows of the record."""
    return Times(record.rows("attention"))


def milliseconds(microseconds: float) -> str:
    """Three digits."""
    return f"{microseconds / 1000:.3g}"


def time_products(times: Times, size: Size) -> float:
    """Return the microseconds of the products at the rate of a large one, with B = 8 and 12 heads."""
    S, d, causal, dtype = size
    scores = 8 * 12 * S * S / (2 if causal else 1)
    return 1e6 * PRODUCTS * 2 * scores * d / times.rate(dtype)


def over_chart(times: Times) -> str:
    """Bars of the time over cuDNN's, by heads, mask and length."""
    groups: dict[str, list[tuple[str, float, str, bool]]] = {}
    for size in times.sizes("graph"):
        S, d, causal, _ = size
        ours, peer = (times.microseconds(size, "graph", who) for who in (OURS, CUDNN))
        bar = (f"{S:,}", ours / peer, f"{ours / peer:.2f} · {milliseconds(ours)} ms", True)
        groups.setdefault(f"heads of {d}{', causal' if causal else ''}", []).append(bar)
    spoken = "; ".join(f"{kind}: {', '.join(bar[2] for bar in bars_)}" for kind, bars_ in groups.items())
    return bars(f"Time over cuDNN's. {spoken}", groups, "time / cuDNN's", level=1)


def option_costs() -> str:
    """Heads of 64 in bfloat16, option by option: these kernels' time and PyTorch's, over PyTorch's without any."""
    rows = [row for row in record.rows("attention_options") if (row["dtype"], row["d"]) == ("bfloat16", "64")]
    unit = next(float(row["peer_ms"]) for row in rows if row["option"] == "none")
    groups, spoken = {}, []
    for row in rows:
        peer = row["peer"].replace("efficient", "memory-efficient")
        both = (("these kernels", float(row["ours_ms"]), True), (peer, float(row["peer_ms"]), False))
        option = row["option"].replace("S x S", "S × S")
        groups[option] = [
            (name, ms / unit, f"{ms / unit:.2f} · {1e3 * ms:.0f} µs", ours) for name, ms, ours in both
        ]
        spoken.append(f"{option}: " + ", ".join(f"{name} {ms / unit:.2f}" for name, ms, _ in both))
    title = "time / cuDNN's without a mask"
    return bars(f"Attention's {title}. {'; '.join(spoken)}", groups, title, level=1)


FILES = {"attention_over.svg": lambda: over_chart(read()), "option_costs.svg": option_costs}
