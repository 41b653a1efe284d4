"""Tensor-core matrices: which shapes `mma.sync` is simulated for, and which lane holds which element of a
fragment."""

from __future__ import annotations

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
    """Whether mma.sync of this shape and these types (d, a, b, c) is simulated."""
    return (shape, tuple(types)) in _MMA


def fragment_maps(shape: str, kind: str):
    """(rows of A, columns of A), (rows of B, columns of B), (rows of C, columns of C): [element, lane] index
    arrays."""
    lane = np.arange(32)
    g, t = lane >> 2, lane & 3

    def stack(rows):
        return np.array([np.broadcast_to(r, 32) for r in rows])

    if kind == "f64":
        return (stack([g]), stack([t])), (stack([t]), stack([g])), (stack([g, g]), stack([2 * t, 2 * t + 1]))
    c = (stack([g, g, g + 8, g + 8]), stack([2 * t, 2 * t + 1] * 2))
    if kind == "tf32":
        deep = shape == "m16n8k8"
        a = (stack([g, g + 8] * (2 if deep else 1)), stack([t, t, t + 4, t + 4][: 4 if deep else 2]))
        b = (stack([t, t + 4][: 2 if deep else 1]), stack([g] * (2 if deep else 1)))
        return a, b, c
    halves = (0, 8) if shape == "m16n8k16" else (0,)
    a_rows, a_columns, b_rows, b_columns = [], [], [], []
    for h in halves:
        a_rows += [g, g, g + 8, g + 8]
        a_columns += [2 * t + h, 2 * t + 1 + h] * 2
        b_rows += [2 * t + h, 2 * t + 1 + h]
        b_columns += [g, g]
    return (stack(a_rows), stack(a_columns)), (stack(b_rows), stack(b_columns)), c
