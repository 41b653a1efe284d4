"""Helpers for several puzzles' derivations: softmax of rows that may be fully masked, and shared key heads.

Scores are [..., columns]; per-row values are [..., 1].
"""

import numpy as np


def transpose(array: np.ndarray) -> np.ndarray:
    return array.swapaxes(-1, -2)


def read_with_swapped_strides(array: np.ndarray) -> np.ndarray:
    """Return matrices [..., m, n] read as if they were stored [n, m]: element (i, j) reads j * m + i."""
    *lead, m, n = array.shape
    return transpose(array.reshape(*lead, n, m))


def finite_max(row_max: np.ndarray) -> np.ndarray:
    """Replace -inf, the maximum of a fully masked row, by 0."""
    return np.where(np.isneginf(row_max), 0.0, row_max)


def mean(array: np.ndarray) -> np.ndarray:
    return array.mean(-1, keepdims=True)


def safe_total(total: np.ndarray) -> np.ndarray:
    return np.where(total == 0, 1.0, total)


def softmax(scores: np.ndarray, axis: int | None = -1) -> np.ndarray:
    weights = np.exp(scores - finite_max(scores.max(axis, keepdims=True)))
    return weights / safe_total(weights.sum(axis, keepdims=True))


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Return each row's log-sum-exp, without the last axis; -inf for a row with no visible key."""
    largest = finite_max(scores.max(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - largest).sum(-1)) + largest[..., 0]


def repeat_heads(array: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Repeat a key or value [B, G, T, d] to match the heads of the query [B, N, S, d]."""
    return array.repeat(query.shape[1] // array.shape[1], 1)


def sum_heads(gradient: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return a key's or value's gradient [B, G, T, d] from its repeated heads' gradient [B, N, T, d]."""
    *lead, heads, T, d = gradient.shape
    G = key.shape[1]
    return gradient.reshape(*lead, G, heads // G, T, d).sum(-3)
