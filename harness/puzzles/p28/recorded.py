"""Times of puzzle 28's steps on an H200 in bfloat16, copied from the book's record fast_steps for reports."""

from collections.abc import Iterator

MACHINE, DATE = "NVIDIA H200", "2026-11-29"
BARE = 89.25
"""Microseconds of three products by PyTorch, as the two passes need them."""
TIMES = {
    "rows": (65536, 1724.7, 83.35, "0.503", 120026.43),
    "once": (65536, 83.32, 84.08, "0.499", 120030.24),
    "vectors": (65536, 84.08, 91.24, "0.460", 120035.74),
    "shuffles": (65536, 91.19, 91.8, "0.457", 120030.17),
    "dx": (65536, 134.55, 149.74, "0.420", 120031.52),
    "dgamma": (65536, 865.57, 138.79, "0.302", 119973.21),
    "tiled": (4096, 39373.5, 2643.27, "84.453", 8821.31),
    "registers": (4096, 1036.0, 805.96, "25.751", 3311.07),
    "copies": (4096, 800.78, 766.99, "24.506", 3041.02),
    "tensor": (4096, 719.42, 95.27, "3.044", 959.71),
    "layouts": (4096, 284.28, 230.72, "4.204", 907.58),
    "epilogue": (4096, 818.3, 239.75, "4.028", 365.6),
}
"""By step: rows, microseconds of the initial code and of the solution, the latter over PyTorch's products or as a
share of the memory bandwidth, and microseconds of both passes, of 4096 rows, once all steps up to it are done."""


def lines() -> Iterator[str]:
    """Yield the table that follows the counters."""
    yield ""
    yield f"Times on an {MACHINE} ({DATE}), bfloat16: recorded of the given and the solution's forms, not of yours"
    row = "   {:10} {:>6} {:>12} {:>12} {:>12} {:>12} {:>14}".format
    yield row("step", "rows", "given us", "solution us", "of products", "of memory", "both passes us")
    for number, (step, (rows, arguments, solution, share, passes)) in enumerate(TIMES.items(), 1):
        of = (share, "") if number > 6 else ("", share)
        yield row(step, rows, f"{arguments:,.0f}", f"{solution:,.0f}", *of, f"{passes:,.0f}").rstrip()
    yield f"   both passes have three products; PyTorch's bare ones take {BARE:.0f} us"
