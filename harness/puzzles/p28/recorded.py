"""Times of puzzle 28's steps on an H200 in bfloat16, copied from the book's record fast_steps for reports."""

from collections.abc import Iterator

MACHINE, DATE = "NVIDIA H200", "2026-11-30"
MATMULS_US = 90.44
"""Microseconds that PyTorch takes for the three matmuls of both passes."""
STEP_TIMES = {
    "rows": (65536, 1727.96, 83.51, "0.502", 119599.11),
    "once": (65536, 83.37, 83.94, "0.500", 119605.03),
    "vectors": (65536, 84.12, 67.59, "0.621", 119613.05),
    "shuffles": (65536, 68.4, 59.8, "0.701", 119598.56),
    "dx": (65536, 134.26, 83.01, "0.758", 119592.54),
    "dgamma": (65536, 857.39, 85.87, "0.488", 119520.74),
    "tiled": (4096, 39385.47, 2642.81, "83.031", 8367.71),
    "registers": (4096, 1040.18, 788.22, "24.764", 2800.35),
    "copies": (4096, 766.07, 792.49, "24.898", 2637.25),
    "tensor": (4096, 661.86, 57.57, "1.809", 345.33),
    "layouts": (4096, 151.56, 103.76, "1.863", 277.13),
    "epilogue": (4096, 238.25, 115.7, "1.916", 192.52),
}
"""Step -> rows; microseconds of the initial code and the solution; the latter over PyTorch's matmuls, or its
share of memory bandwidth; microseconds of both passes, 4096 rows, with all steps up to it done."""


def format_times() -> Iterator[str]:
    """Yield the table that follows the counters."""
    yield ""
    yield f"Times on an {MACHINE} ({DATE}), bfloat16: recorded of the given and the solution's forms, not of yours"
    row = "   {:10} {:>6} {:>12} {:>12} {:>12} {:>12} {:>16}".format
    yield row("step", "rows", "given us", "solution us", "of products", "of memory", "both passes us")
    for number, (step, (rows, initial, solution, share, passes)) in enumerate(STEP_TIMES.items(), 1):
        shares = (share, "") if number > 6 else ("", share)
        yield row(step, rows, f"{initial:,.0f}", f"{solution:,.0f}", *shares, f"{passes:,.0f}").rstrip()
    yield f"   both passes have three products; PyTorch's bare ones take {MATMULS_US:.0f} us"
