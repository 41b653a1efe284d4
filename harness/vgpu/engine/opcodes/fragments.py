"""Fragment layouts of `mma.sync`: the supported shapes, and the lane that holds each matrix element.

For lane 4 g + t (an array of lanes), the functions return the row and column of its element `n`. `kind` is
the type of the factors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

_MMA = {
    ("m16n8k16", ("f32", "bf16", "bf16", "f32")),
    ("m16n8k16", ("f32", "f16", "f16", "f32")),
    ("m16n8k16", ("f16", "f16", "f16", "f16")),
    ("m16n8k8", ("f32", "bf16", "bf16", "f32")),
    ("m16n8k8", ("f32", "f16", "f16", "f32")),
    ("m16n8k8", ("f16", "f16", "f16", "f16")),
    ("m16n8k8", ("f32", "tf32", "tf32", "f32")),
    ("m16n8k4", ("f32", "tf32", "tf32", "f32")),
    ("m8n8k4", ("f64", "f64", "f64", "f64")),
}


def mma_supported(shape: str, types: list[str]) -> bool:
    """Return whether mma.sync of this shape and these types (d, a, b, c) is simulated."""
    return (shape, tuple(types)) in _MMA


def sizes(shape: str) -> tuple[int, int, int]:
    """Return rows, columns and depth of a product: "m16n8k8" -> (16, 8, 8)."""
    rows, columns, depth = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    return rows, columns, depth


def place_in_a(kind: str, n: int, g, t):
    """Return (row, column) of the first factor."""
    if kind in ("f64", "tf32"):
        return g + (n & 1) * 8, t + (n >> 1) * 4
    return g + (n >> 1 & 1) * 8, t + t + (n & 1) + (n >> 2) * 8


def place_in_b(kind: str, n: int, g, t):
    """Return (row, column) of the second factor."""
    if kind in ("f64", "tf32"):
        return t + n * 4, g
    return t + t + (n & 1) + (n >> 1) * 8, g


def place_in_c(kind: str, n: int, g, t):
    """Return (row, column) of the sums."""
    return g + (n >> 1) * 8, t + t + (n & 1)


@functools.cache
def fragment_maps(shape: str, kind: str):
    """Return (rows of A, columns of A), (rows of B, columns of B), (rows of C, columns of C): [element, lane]
    index arrays."""
    rows, columns, depth = sizes(shape)
    lane = np.arange(32)

    def places(place: Callable, count: int):
        each = [np.broadcast_arrays(*place(kind, n, lane >> 2, lane & 3)) for n in range(count // 32)]
        return tuple(np.stack(part) for part in zip(*each, strict=True))

    return (
        places(place_in_a, rows * depth),
        places(place_in_b, depth * columns),
        places(place_in_c, rows * columns),
    )
