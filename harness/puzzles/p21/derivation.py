"""Derivation of puzzle 21's kernels, and their known mistakes, including the bugs to fix.

Shapes: input, grad_output and elementwise results [batch, sequence, width]; dot, mean, rstd, mean_dy and
mean_products [batch, sequence, 1]; grad_bias and grad_scale [width].
"""

from collections.abc import Mapping

import numpy as np

from harness.puzzles import formulas
from harness.puzzles.formulas import EPS
from harness.puzzles.rows import softmax
from harness.spec.derivation import Mistake, Step, make_derive

ROW_THREADS = 128
"""Threads that share a row."""


STEPS: Mapping[str, Step] = {
    "grad_bias": lambda v: v.grad_output.sum((0, 1)),
    "grad_scale": lambda v: (v.grad_output * v.input).sum((0, 1)),
    "P": lambda v: softmax(v.input),
    "dot": lambda v: (v.grad_output * v.P).sum(-1, keepdims=True),
    "grad_logits": lambda v: v.P * (v.grad_output - v.dot),
    "deviation": lambda v: v.input - v.input.mean(-1, keepdims=True),
    "rstd": lambda v: 1 / np.sqrt((v.deviation**2).mean(-1, keepdims=True) + EPS),
    "mean_dy": lambda v: v.grad_output.mean(-1, keepdims=True),
    "mean_products": lambda v: (v.grad_output * v.deviation).mean(-1, keepdims=True),
    "through_variance": lambda v: v.deviation * v.rstd**2 * v.mean_products,
    "grad_input": lambda v: v.rstd * (v.grad_output - v.mean_dy - v.through_variance),
}

MISTAKES = (
    Mistake("one-leading-axis", "summed over the sequence only, for the first batch element",
            {"grad_bias": lambda v: v.grad_output[0].sum(0)}),
    Mistake("first-position-only", "summed over the batch only, for the first position",
            {"grad_bias": lambda v: v.grad_output[:, 0].sum(0)}),
    Mistake("last-position-only", "summed over the batch only, for the last position",
            {"grad_bias": lambda v: v.grad_output[:, -1].sum(0)}),
    Mistake("last-batch-only", "summed over the sequence only, for the last batch element",
            {"grad_bias": lambda v: v.grad_output[-1].sum(0)}),
    Mistake("input-left-out", "without the factor x", {"grad_scale": lambda v: v.grad_output.sum((0, 1))}),
    *formulas.list_softmax_backward_mistakes("grad_logits", "P", "grad_output", "dot", ROW_THREADS),
    Mistake("dot-not-normalised", "with exp(x - largest), not divided by its sum, in the row sum of dy * P",
            {"dot": lambda v: (v.grad_output * np.exp(v.input - v.input.max(-1, keepdims=True))).sum(-1, keepdims=True)}),
    Mistake("variance-power", "with rstd cubed, not squared, in the variance term",
            {"through_variance": lambda v: v.deviation * v.rstd**3 * v.mean_products}),
    *(
        Mistake(f"variance-{id}", f"with {description} in the variance term", {"through_variance": term})
        for id, description, term in (
            ("rstd-once", "rstd not squared", lambda v: v.deviation * v.rstd * v.mean_products),
            ("rstd-left-out", "rstd left out", lambda v: v.deviation * v.mean_products),
            ("sign", "the wrong sign", lambda v: -v.deviation * v.rstd**2 * v.mean_products),
            ("deviation-left-out", "x - mean left out", lambda v: v.rstd**2 * v.mean_products),
            ("input", "x instead of x - mean", lambda v: v.input * v.rstd**2 * v.mean_products),
        )
    ),
    Mistake("mean-added", "with the mean of dy added, not subtracted",
            {"mean_dy": lambda v: -v.grad_output.mean(-1, keepdims=True)}),
    Mistake("variance-dropped", "without the variance term",
            {"through_variance": lambda v: 0 * v.deviation}),
    Mistake("mean-dropped", "without the mean of dy", {"mean_dy": lambda v: np.zeros_like(v.input[..., :1])}),
    Mistake("first-block-only", "of the first row only",
            {"grad_scale": lambda v: v.grad_output[0, 0] * v.input[0, 0]}),
)  # fmt: skip
derive = make_derive(STEPS)
