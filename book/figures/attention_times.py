"""What pages show of attention: times, memory, and predictions, from the record `attention`."""

from book.figures.charts import bars
from book.measure.record import Rows

OURS, CUDNN = "attention", "cuDNN"
SHOWN = {"B": 8, "N": 12, "pass_": "both", "column": "graph", "dtype": "bfloat16"}
"""Batch, heads and the rest of what is shown."""
Size = tuple[int, int, bool]
"""S, d, whether causal."""


def microseconds(size: Size, candidate: str) -> float:
    """Return the median. Raises LookupError where that was not measured."""
    S, d, causal = size
    return Rows("attention")("median_us", **SHOWN, S=S, d=d, part=1 + causal, candidate=candidate)


def sizes(d: int | None = None, causal: bool | None = None, ragged: bool = False) -> list[Size]:
    """Return the sizes in which ours was measured, of one kind or any, small heads and short lengths first."""
    rows = Rows("attention").select(**SHOWN, candidate=OURS)
    timed = {(int(row["S"]), int(row["d"]), row["part"] == "2") for row in rows if row["median_us"]}
    return sorted(
        (
            size
            for size in timed
            if (size[0] % 64 != 0) == ragged and d in (None, size[1]) and causal in (None, size[2])
        ),
        key=lambda size: (size[1], *size),
    )


def over_chart() -> str:
    """Bars of the time over cuDNN's, by heads, mask and length."""
    groups: dict[str, list[tuple[str, float, str, bool]]] = {}
    for size in sizes():
        S, d, causal = size
        ours, peer = (microseconds(size, who) for who in (OURS, CUDNN))
        bar = (f"{S:,}", ours / peer, f"{ours / peer:.2f} · {ours / 1000:.3g} ms", True)
        groups.setdefault(f"heads of {d}{', causal' if causal else ''}", []).append(bar)
    spoken = "; ".join(f"{kind}: {', '.join(bar[2] for bar in bars_)}" for kind, bars_ in groups.items())
    return bars(f"Time over cuDNN's. {spoken}", groups, "time / cuDNN's time", level=1)


def option_costs() -> str:
    """Heads of 64 in bfloat16, option by option: these kernels' time and PyTorch's, over PyTorch's without any."""
    options = Rows("attention_options")
    unit = options("peer_ms", dtype="bfloat16", d=64, option="none")
    groups, spoken = {}, []
    for row in options.select(dtype="bfloat16", d=64):
        peer = row["peer"].replace("efficient", "memory-efficient")
        both = (("this workbook", float(row["ours_ms"]), True), (peer, float(row["peer_ms"]), False))
        option = row["option"].replace("S x S", "S × S")
        groups[option] = [
            (name, ms / unit, f"{ms / unit:.2f} · {1e3 * ms:.0f} µs", ours) for name, ms, ours in both
        ]
        spoken.append(f"{option}: " + ", ".join(f"{name} {ms / unit:.2f}" for name, ms, _ in both))
    title = "time / cuDNN's time without a mask"
    return bars(f"Attention's {title}. {'; '.join(spoken)}", groups, title, level=1)


FILES = {"attention_over.svg": over_chart, "option_costs.svg": option_costs}
