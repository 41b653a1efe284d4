"""Where a swap pays: sizes at which the layer and Inductor's own code were timed side by side, and what follows for others.

The table is of one NVIDIA H200: bfloat16, forward and backward with all gradients as one CUDA graph, torch 2.11, 2026-11-22, by
`p22 --bench --columns graph --passes both --peers compile --sizes ...`. It speaks for 16-bit types on CUDA devices. Elsewhere nothing was
measured, and every pair is swapped. It does not load torch, so that the book can show the table without it.
"""

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TABLE = Path(__file__).with_name("measured_h200.csv")
ALIGNED = 8
"""Elements of 16 bits that the kernels load at once."""


@dataclass(frozen=True)
class Timed:
    """One size: rows, H -> O, and the layer's time divided by Inductor's."""

    rows: int
    in_features: int
    out_features: int
    ratio: float

    def distance(self, rows: int, in_features: int, out_features: int) -> float:
        """How far another size is, in doublings."""
        mine, other = (self.rows, self.in_features, self.out_features), (rows, in_features, out_features)
        return math.dist([math.log2(size) for size in mine], [math.log2(size) for size in other])


@functools.cache
def table() -> tuple[Timed, ...]:
    """All sizes that were timed."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Timed(
                *(int(row[name]) for name in ("rows", "in_features", "out_features")),
                ratio=float(row["ours_us"]) / float(row["inductor_us"]),
            )
            for row in csv.DictReader(file)
        )


def applies(device: "torch.device", dtype: "torch.dtype") -> bool:
    """Whether the table speaks for a device and a dtype."""
    return device.type == "cuda" and dtype.itemsize == 2


def why_not(rows: Any, in_features: Any, out_features: Any) -> str:
    """Why Inductor's code is left at a size, "" where the swap pays; the nearest size of the table decides.

    Of a size that is symbolic nothing is known, and the pair is swapped.
    """
    if not (isinstance(in_features, int) and isinstance(out_features, int)):
        return ""
    if in_features % ALIGNED or out_features % ALIGNED:
        return f"{in_features} -> {out_features} is no multiple of {ALIGNED}: Inductor pads such products, and is faster"
    if not isinstance(rows, int) or rows < 1:
        return ""
    nearest = min(table(), key=lambda timed: timed.distance(rows, in_features, out_features))
    if nearest.ratio <= 1:
        return ""
    return (
        f"Inductor is faster at such sizes: on an H200 the layer took {nearest.ratio:.2f} of its time for "
        f"{nearest.rows:,} rows, {nearest.in_features:,} -> {nearest.out_features:,}"
    )
