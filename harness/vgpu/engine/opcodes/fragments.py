"""Fragment layouts of `mma.sync`: the supported shapes, and the matrix elements that each lane holds.

For lane 4 g + t (g and t are arrays), `locate_in_a`, `..._b` and `..._c` return row and column of element `n`
of its fragment. `kind` is the type of the operands A and B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

_SUPPORTED_MMA = {
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


def is_mma_supported(shape: str, types: list[str]) -> bool:
    """Return whether mma.sync of this shape and these types (d, a, b, c) is simulated."""
    return (shape, tuple(types)) in _SUPPORTED_MMA


def parse_shape(shape: str) -> tuple[int, int, int]:
    """Parse a shape into (m, n, k): "m16n8k8" -> (16, 8, 8)."""
    rows, columns, depth = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    return rows, columns, depth


def locate_in_a(kind: str, n: int, g, t):
    """Return (row, column) in matrix A of element n of lane (g, t)."""
    if kind in ("f64", "tf32"):
        return g + (n & 1) * 8, t + (n >> 1) * 4
    return g + (n >> 1 & 1) * 8, t + t + (n & 1) + (n >> 2) * 8


def locate_in_b(kind: str, n: int, g, t):
    if kind in ("f64", "tf32"):
        return t + n * 4, g
    return t + t + (n & 1) + (n >> 1) * 8, g


def locate_in_c(kind: str, n: int, g, t):
    return g + (n >> 1) * 8, t + t + (n & 1)


@functools.cache
def compute_fragment_maps(shape: str, kind: str):
    """Return (rows, columns) of the fragments of A, B and C, as index arrays [element, lane]."""
    rows, columns, depth = parse_shape(shape)
    lane = np.arange(32)

    def locate_elements(locate: Callable, count: int):
        located = [np.broadcast_arrays(*locate(kind, n, lane >> 2, lane & 3)) for n in range(count // 32)]
        return tuple(np.stack(axis) for axis in zip(*located, strict=True))

    return (
        locate_elements(locate_in_a, rows * depth),
        locate_elements(locate_in_b, depth * columns),
        locate_elements(locate_in_c, rows * columns),
    )
