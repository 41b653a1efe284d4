"""Helpers for derivations of several puzzles: matrices of scores, whose rows may be masked, and heads that
share a key.

Scores are [..., columns], a value per row is [..., 1].
"""

import numpy as np


def transpose(array: np.ndarray) -> np.ndarray:
    return array.swapaxes(-1, -2)


def or_0(largest: np.ndarray) -> np.ndarray:
    """Return the maximum to subtract from scores, 0 where it is -inf."""
    return np.where(np.isneginf(largest), 0.0, largest)


def or_1(total: np.ndarray) -> np.ndarray:
    """Return a total as a divisor, 1 where it is 0."""
    return np.where(total == 0, 1.0, total)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of every row; a row without a visible key gives 0."""
    weights = np.exp(scores - or_0(scores.max(-1, keepdims=True)))
    return weights / or_1(weights.sum(-1, keepdims=True))


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """Return the log-sum-exp of every row, without its axis; -inf for a row without a visible key."""
    largest = or_0(scores.max(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        return np.log(np.exp(scores - largest).sum(-1)) + largest[..., 0]


def repeat_heads(array: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Repeat key or value [B, G, T, d] for the heads of the query [B, N, S, d]."""
    return array.repeat(query.shape[1] // array.shape[1], 1)


def sum_shared(gradient: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the gradient of the key or value [B, G, T, d], from that of `repeated`'s result, [B, N, T, d]."""
    *lead, heads, T, d = gradient.shape
    G = key.shape[1]
    return gradient.reshape(*lead, G, heads // G, T, d).sum(-3)
