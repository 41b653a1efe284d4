"""Which sizes a run can take: found before anything compiles."""

import math
import os

from harness.errors import BadUse
from harness.spec.puzzle import Puzzle

LARGEST = 2**31 - 1
"""Kernels take sizes as Int32, and so count rows."""
HELD = 8
"""Bytes that a run holds of each element at least: the reference is computed in float64."""


def check_dims(puzzle: Puzzle, dims: tuple[int, ...]) -> None:
    """Raises BadUse, naming the flag, for sizes that the kernels cannot count or this machine cannot hold."""
    flag = f"--dims {' '.join(map(str, dims))}"
    if min(dims) < 1:
        raise BadUse(f"{flag}: every size must be at least 1")
    shapes = puzzle.shapes(dims).values()
    counts = [count for shape in shapes for count in (*shape, math.prod(shape[:-1]))]
    largest = max((*dims, *counts))
    if largest > LARGEST:
        raise BadUse(f"{flag}: kernels count sizes and rows up to {LARGEST:,}, not {largest:,}")
    wanted = HELD * sum(math.prod(shape) for shape in shapes)
    if wanted > memory():
        raise BadUse(
            f"{flag}: needs more than {wanted / 2**30:,.0f} GiB, and this machine has {memory() / 2**30:,.0f} GiB"
        )


def memory() -> int:
    """Bytes of this machine's memory; without end where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**63
