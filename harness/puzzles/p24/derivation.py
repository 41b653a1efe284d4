"""Derivation of puzzle 24 in NumPy: the curve, a permutation and its gradient, and windowed attention.

Shapes: query, key, value and their gradients [B, N, L, d], one row per cell of an H x W grid, L = H * W, in
row-major order; order [L], the cell at each step; index and inverse [side * side]; tiles [t, t] with t =
ceil(L / tile). Tensors with capital names have rows in step order: Q, K, V, dO, O, dQ, dK, dV
[B, N, L, d], P and dS [B, N, L, L].
"""

from collections.abc import Mapping

import numpy as np

from harness.puzzles.p24 import orders
from harness.puzzles.rows import log_sum_exp, softmax, transpose
from harness.spec.derivation import Step, make_derive


def gather(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Gather rows: row order[i] of the array becomes row i."""
    return np.take(array, order, 2)


def scatter(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Scatter rows back: row i of the array becomes row order[i]."""
    return np.take(array, np.argsort(order), 2)


def compute_distances(cells: np.ndarray) -> np.ndarray:
    return np.abs(cells[:, None] - cells[None, :])


def find_pairs_in_window(order: np.ndarray, width: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Return which pairs of steps are at most `radius` rows and columns apart on the grid: bool [L, L]."""
    rows, columns = np.divmod(order, width)
    return np.maximum(compute_distances(rows), compute_distances(columns)) <= radius


def split_into_tiles(pairs: np.ndarray, tile: int) -> np.ndarray:
    """Split pairs [L, L] into tiles of `tile` queries and keys, padded with False: [t, t, tile, tile]."""
    padding = -len(pairs) % tile
    padded = np.pad(pairs, ((0, padding), (0, padding)))
    num_tiles = len(padded) // tile
    return padded.reshape(num_tiles, tile, num_tiles, tile).swapaxes(1, 2)


def find_tiles(pairs: np.ndarray, tile: int) -> np.ndarray:
    """Return which tiles contain at least one of the pairs: bool [t, t]."""
    return np.asarray(split_into_tiles(pairs, tile).any((2, 3)))


STEPS: Mapping[str, Step] = {
    "steps": lambda v: np.arange(int(v.side) ** 2),
    "index": lambda v: orders.make_hilbert_order(int(v.side), int(v.side)),
    "inverse": lambda v: orders.invert_order(orders.make_hilbert_order(int(v.side), int(v.side))),
    "gathered": lambda v: gather(v.input, v.order),
    "grad_input": lambda v: scatter(v.grad_gathered, v.order),
    "in_window": lambda v: find_pairs_in_window(v.order, v.width, v.radius),
    "tiles": lambda v: find_tiles(v.in_window, int(v.tile)),
    "Q": lambda v: gather(v.query, v.order),
    "K": lambda v: gather(v.key, v.order),
    "V": lambda v: gather(v.value, v.order),
    "dO": lambda v: gather(v.grad_output, v.order),
    "scale": lambda v: 1 / np.sqrt(v.query.dtype.type(v.query.shape[-1])),
    "scores": lambda v: np.where(v.in_window, v.scale * (v.Q @ transpose(v.K)), -np.inf),
    "P": lambda v: softmax(v.scores),
    "O": lambda v: v.P @ v.V,
    "dot": lambda v: (v.dO * v.O).sum(-1, keepdims=True),
    "dP": lambda v: v.dO @ transpose(v.V),
    "dS": lambda v: v.P * (v.dP - v.dot),
    "dQ": lambda v: v.scale * (v.dS @ v.K),
    "dK": lambda v: v.scale * (transpose(v.dS) @ v.Q),
    "dV": lambda v: transpose(v.P) @ v.dO,
    "output": lambda v: scatter(v.O, v.order),
    "lse": lambda v: scatter(log_sum_exp(v.scores), v.order),
    "delta": lambda v: scatter(v.dot[..., 0], v.order),
    "grad_query": lambda v: scatter(v.dQ, v.order),
    "grad_key": lambda v: scatter(v.dK, v.order),
    "grad_value": lambda v: scatter(v.dV, v.order),
}
derive = make_derive(STEPS)
