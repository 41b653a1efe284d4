"""Times of puzzle 28's forms on an H200, bfloat16: a copy of what the book's record fast_steps says, for reports."""

from collections.abc import Iterator

MACHINE, DATE = "NVIDIA H200", "2026-11-29"
BARE = 89.36
"""Microseconds of three products by PyTorch, as the two passes need them."""
TIMES = {
    "rows": (65536, 1723.01, 82.86, "0.506", 120056.35),
    "once": (65536, 82.74, 83.43, "0.503", 120124.61),
    "vectors": (65536, 83.62, 89.09, "0.471", 120061.82),
    "shuffles": (65536, 88.95, 90.77, "0.462", 120083.27),
    "dx": (65536, 132.7, 141.25, "0.445", 120075.81),
    "dgamma": (65536, 1834.09, 1120.22, "0.037", 120013.57),
    "tiled": (4096, 39396.87, 2643.39, "84.338", 8836.22),
    "registers": (4096, 1035.54, 806.75, "25.740", 3333.92),
    "copies": (4096, 801.34, 767.62, "24.491", 3067.23),
    "tensor": (4096, 760.39, 79.49, "2.536", 934.83),
    "layouts": (4096, 256.17, 241.32, "4.378", 918.98),
    "epilogue": (4096, 769.59, 253.41, "4.237", 418.25),
}
"""Step -> rows, microseconds of the form that is given and of the solution's, the latter over PyTorch's products or as a share of
what memory allows, and both passes, of 4096 rows, when all steps up to it are done."""


def lines() -> Iterator[str]:
    """The table below the counters."""
    yield ""
    yield f"Times on an {MACHINE} ({DATE}), bfloat16: recorded of the given and the solution's forms, not of yours"
    row = "   {:10} {:>6} {:>12} {:>12} {:>12} {:>12} {:>14}".format
    yield row("step", "rows", "given us", "solution us", "of products", "of memory", "both passes us")
    for number, (step, (rows, given, solution, share, passes)) in enumerate(TIMES.items(), 1):
        of = (share, "") if number > 6 else ("", share)
        yield row(step, rows, f"{given:,.0f}", f"{solution:,.0f}", *of, f"{passes:,.0f}").rstrip()
    yield f"   both passes have three products; PyTorch's bare ones take {BARE:.0f} us"
