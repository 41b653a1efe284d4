"""Loss curves: drawn as text, and compared by windows of steps."""

import math
import statistics
from itertools import pairwise

WINDOW = 10
"""Losses are compared as means of this many steps."""


def plot(curves: dict[str, list[float]], width: int = 64, height: int = 12) -> list[str]:
    """Loss curves as lines of text: a sign for each of one or two curves, `*` where they meet; loss upwards, steps to the right."""
    signs = dict(zip(curves, "ox", strict=False))
    columns = min(width, len(next(iter(curves.values()))))
    averaged = {name: averages(curve, columns) for name, curve in curves.items()}
    values = [value for curve in averaged.values() for value in curve if value == value]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0
    grid = [[" "] * columns for _ in range(height)]
    for name, curve in averaged.items():
        for column, value in enumerate(curve):
            if value != value:
                continue
            row = round((high - value) / span * (height - 1))
            grid[row][column] = signs[name] if grid[row][column] == " " else "*"
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    both = ["* both"] * (len(curves) > 1)
    legend = "   ".join([f"{sign} {name}" for name, sign in signs.items()] + both)
    body = [f"{labels.get(row, ''):>7} │{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    return [
        f"{'loss':>7}   {legend}",
        *body,
        f"{'':>7} └{'─' * columns} step {len(next(iter(curves.values())))}",
    ]


def averages(curve: list[float], count: int) -> list[float]:
    """The curve cut into `count` parts, the mean of each."""
    edges = [len(curve) * part // count for part in range(count + 1)]
    return [sum(curve[start:end]) / (end - start) for start, end in pairwise(edges)]


def windows(losses: list[float]) -> list[float]:
    """The means of consecutive WINDOWs; what is left over at the end is a shorter one."""
    return [statistics.fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference between the windows of two curves."""
    pairs = zip(windows(one), windows(other), strict=True)
    return max(abs(a - b) / b if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)
