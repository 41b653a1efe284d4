"""Derivation of puzzle 23 in NumPy, and helpers for its known mistakes.

Shapes: query, output and grad_output [B, N, S, d]; key and value [B, N, T, d]; scores, probabilities and
their gradients [B, N, S, T]; mask and grad_mask [S, T]; row_max, total and dot [B, N, S, 1]. If key and value
have fewer heads, G, each is repeated for the `group` = N / G query heads that share it, and the copies'
gradients are summed.
"""

from collections.abc import Mapping

import numpy as np

from harness.puzzles.rows import finite_max, repeat_heads, safe_total, sum_heads, transpose
from harness.spec.derivation import Derivation, Step, convert_floats


def normalise(weights: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.where(total == 0, 0.0, weights / safe_total(total))


def compute_lse(v: Derivation, total: np.ndarray) -> np.ndarray:
    return np.where(total == 0, -np.inf, finite_max(v.row_max) + np.log(safe_total(total)))[..., 0]


STEPS = {
    "scale": lambda v: 1 / np.sqrt(v.query.dtype.type(v.query.shape[-1])),
    "scores": lambda v: v.scale * (v.query @ transpose(v.key)),
    "masked": lambda v: v.scores + v.mask,
    "row_max": lambda v: v.masked.max(-1, keepdims=True),
    "weights": lambda v: np.exp(v.masked - finite_max(v.row_max)),
    "total": lambda v: v.weights.sum(-1, keepdims=True),
    "probabilities": lambda v: normalise(v.weights, v.total),
    "lse": lambda v: compute_lse(v, v.total),
    "delta": lambda v: v.dot[..., 0],
    "output": lambda v: v.probabilities @ v.value,
    "grad_value": lambda v: transpose(v.probabilities) @ v.grad_output,
    "grad_probabilities": lambda v: v.grad_output @ transpose(v.value),
    "dot": lambda v: (v.grad_probabilities * v.probabilities).sum(-1, keepdims=True),
    "grad_scores": lambda v: v.probabilities * (v.grad_probabilities - v.dot),
    "grad_query": lambda v: v.scale * (v.grad_scores @ v.key),
    "grad_key": lambda v: v.scale * (transpose(v.grad_scores) @ v.query),
    "grad_mask": lambda v: v.grad_scores.sum((0, 1)),
    "transposed_product": lambda v: transpose(v.query) @ v.grad_output,
}


def derive(
    arrays: Mapping[str, np.ndarray], changes: Mapping[str, Step] | None = None, dtype: type = np.float64
) -> Derivation:
    inputs = convert_floats(arrays, dtype)
    shared = {name: inputs[name] for name in ("key", "value")}
    inputs["group"] = np.asarray(inputs["query"].shape[1] // inputs["key"].shape[1])
    inputs |= {name: repeat_heads(array, inputs["query"]) for name, array in shared.items()}
    steps = {**STEPS, **(changes or {})}
    shared_gradients = {
        f"grad_{name}": lambda v, step=steps[f"grad_{name}"], array=array: sum_heads(step(v), array)
        for name, array in shared.items()
    }
    return Derivation(steps, inputs, {**(changes or {}), **shared_gradients})
