"""Times of puzzle 28's steps on an H200 in bfloat16, copied from the book's record fast_steps for reports."""

from collections.abc import Iterator

MACHINE, DATE = "NVIDIA H200", "2026-11-29"
BARE = 88.9
"""Microseconds that PyTorch takes for the three products of both passes."""
TIMES = {
    "rows": (65536, 1719.03, 82.7, "0.507", 119598.82),
    "once": (65536, 82.71, 83.36, "0.503", 119610.75),
    "vectors": (65536, 83.53, 67.1, "0.625", 119598.53),
    "shuffles": (65536, 67.82, 59.47, "0.705", 119640.29),
    "dx": (65536, 133.02, 82.23, "0.765", 119617.28),
    "dgamma": (65536, 856.12, 86.38, "0.486", 119525.12),
    "tiled": (4096, 39382.37, 2643.32, "84.747", 8355.78),
    "registers": (4096, 1035.17, 789.06, "25.298", 2797.41),
    "copies": (4096, 764.61, 793.72, "25.447", 2635.31),
    "tensor": (4096, 661.23, 57.61, "1.847", 344.4),
    "layouts": (4096, 150.29, 103.96, "1.891", 275.9),
    "epilogue": (4096, 236.04, 115.9, "1.949", 192.81),
}
"""Step -> rows; microseconds of the initial code and the solution; the latter over PyTorch's products, or its
share of memory bandwidth; microseconds of both passes, 4096 rows, with all steps up to it done."""


def format_times() -> Iterator[str]:
    """Yield the table that follows the counters."""
    yield ""
    yield f"Times on an {MACHINE} ({DATE}), bfloat16: recorded of the given and the solution's forms, not of yours"
    row = "   {:10} {:>6} {:>12} {:>12} {:>12} {:>12} {:>16}".format
    yield row("step", "rows", "given us", "solution us", "of products", "of memory", "both passes us")
    for number, (step, (rows, arguments, solution, share, passes)) in enumerate(TIMES.items(), 1):
        of = (share, "") if number > 6 else ("", share)
        yield row(step, rows, f"{arguments:,.0f}", f"{solution:,.0f}", *of, f"{passes:,.0f}").rstrip()
    yield f"   both passes have three products; PyTorch's bare ones take {BARE:.0f} us"
