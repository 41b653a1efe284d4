"""Times of puzzle 28's steps on an H200 in bfloat16, copied from the book's record fast_steps for reports."""

from collections.abc import Iterator

MACHINE, DATE = "NVIDIA H200", "2026-11-29"
BARE = 89.12
"""Microseconds of three products by PyTorch, as the two passes need them."""
TIMES = {
    "rows": (65536, 1722.63, 82.93, "0.506", 120009.63),
    "once": (65536, 82.92, 83.59, "0.502", 120021.7),
    "vectors": (65536, 83.67, 67.13, "0.625", 120015.04),
    "shuffles": (65536, 67.22, 70.72, "0.593", 120019.94),
    "dx": (65536, 132.94, 82.51, "0.763", 120002.4),
    "dgamma": (65536, 833.96, 146.06, "0.287", 119960.16),
    "tiled": (4096, 39395.14, 2642.47, "84.100", 8799.58),
    "registers": (4096, 1033.75, 807.23, "25.691", 3297.41),
    "copies": (4096, 785.51, 779.29, "24.802", 3069.92),
    "tensor": (4096, 752.76, 57.22, "1.821", 792.37),
    "layouts": (4096, 157.3, 109.86, "1.994", 732.83),
    "epilogue": (4096, 687.97, 132.28, "2.215", 210.26),
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
