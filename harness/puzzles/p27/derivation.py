"""Derivation of puzzle 27's NumPy rung, and its known mistakes; those of the kernels are in `kernels.py`.

Shapes as in `solutions/p27/in_numpy.py`: tokens and targets [B, T]; x and dx [B, T, C]; dy [B, T, O]; W [O,
C]; A [C, C]; logits [B, T, V]; smoothing and V are scalars. LayerNorm and attention are derived in other
puzzles.
"""

import numpy as np

from harness.puzzles.rows import softmax
from harness.spec.derivation import Derivation, Mistake

IGNORE_INDEX = -100
"""The target of positions that the loss ignores."""
CUBIC_COEFF = 0.044715
"""The factor of x^3 in GELU's inner function, u = sqrt(2 / pi) (x + CUBIC_COEFF x^3)."""


def scatter_add(tokens: np.ndarray, dx: np.ndarray, V: int) -> np.ndarray:
    return np.tensordot(np.arange(V)[:, None, None] == tokens, dx, 2)


STEPS = {
    "shifted": lambda v: v.logits - v.logits.max(-1, keepdims=True),
    "lse": lambda v: np.log(np.exp(v.shifted).sum(-1, keepdims=True)),
    "p": lambda v: np.exp(v.shifted - v.lse),
    "target_ids": lambda v: v.targets,
    "onehot": lambda v: (v.target_ids[..., None] == np.arange(int(v.V))).astype(v.logits.dtype),
    "y": lambda v: (1 - v.smoothing) * v.onehot + v.smoothing / v.V,
    "valid": lambda v: (v.targets != IGNORE_INDEX)[..., None].astype(np.int64),
    "count": lambda v: v.valid.sum(),
    "loss": lambda v: (v.valid * v.y * (v.lse - v.shifted)).sum() / v.count,
    "grad_logits": lambda v: v.valid * (v.p - v.y) / v.count,
    "k": lambda v: np.sqrt(2 / (np.pi + 0 * v.x[:1, :1, :1])),
    "u": lambda v: v.k * (v.x + CUBIC_COEFF * v.x**3),
    "tanh": lambda v: np.tanh(v.u),
    "slope": lambda v: v.k * (1 + 3 * CUBIC_COEFF * v.x**2),
    "grad_gelu": lambda v: v.dx * ((1 + v.tanh) / 2 + v.x / 2 * (1 - v.tanh**2) * v.slope),
    "grad_x": lambda v: v.dy @ v.W,
    "grad_W": lambda v: np.tensordot(v.dy, v.x, ((0, 1), (0, 1))),
    "grad_b": lambda v: v.dy.sum((0, 1)),
    "grad_token": lambda v: scatter_add(v.tokens, v.dx, int(v.V)),
    "grad_position": lambda v: v.dx.sum(0),
    "grad_stream": lambda v: v.dx + v.dx @ v.A,
    "grad_of_head": lambda v: np.tensordot(v.grad_logits, v.x, ((0, 1), (0, 1))),
    "grad_tied": lambda v: v.grad_token + v.grad_of_head,
}


def assign_gradients(v: Derivation) -> np.ndarray:
    """Return the table [V, C] if gradients are assigned instead of added: each token's last gradient."""
    table = np.zeros((int(v.V), v.dx.shape[-1]))
    table[v.tokens.reshape(-1)] = v.dx.reshape(-1, v.dx.shape[-1])
    return table


MISTAKES = (
    Mistake("mean-over-ignored", "with a mean over all places, including ignored ones",
            {"count": lambda v: np.asarray(v.targets.size)}),
    Mistake("averaged-twice", "divided by the number of places twice",
            {"grad_logits": lambda v: v.valid * (v.p - v.y) / v.count**2,
             "grad_rows": lambda v: v.valid * (v.row_p - v.onehot) / v.places**2,
             "mean_loss": lambda v: v.row_loss.sum() / v.places**2}),
    Mistake("not-averaged", "of the sum of the losses, not of their mean", {"count": lambda v: np.asarray(1)}),
    Mistake("ignored-counted", "with the ignored places counted like the others",
            {"grad_logits": lambda v: (v.p - v.y) / v.count,
             "loss": lambda v: (v.y * (v.lse - v.shifted)).sum() / v.count,
             "row_loss": lambda v: v.row_lse - np.where(v.valid[..., 0], v.row_target, v.logits[..., 0]),
             "grad_rows": lambda v: (v.row_p - v.onehot) / v.places}),
    Mistake("ignored-counted", "with the ignored places counted like the others, as if their target were 0",
            {"grad_logits": lambda v: (v.p - (np.maximum(v.targets, 0)[..., None] == np.arange(int(v.V)))) / v.count}),
    Mistake("smoothing-forgotten", "with all of y on the target", {"y": lambda v: v.onehot}),
    Mistake("smoothing-added", "with smoothing / V added to a full 1, so that y sums to more than 1",
            {"y": lambda v: v.onehot + v.smoothing / v.V}),
    Mistake("of-log-p", "of p, not of its logarithm: the sum over the other logits is missing",
            {"grad_logits": lambda v: -v.valid * v.y * (1 - v.p) / v.count}),
    Mistake("onehot-forgotten", "of p alone: 1 must be subtracted at the target",
            {"grad_logits": lambda v: v.valid * v.p / v.count, "grad_rows": lambda v: v.valid * v.row_p / v.places}),
    Mistake("ignored-counted-in-mean", "with the ignored places counted like the others, in the mean too",
            {"loss": lambda v: (v.y * (v.lse - v.shifted)).sum() / v.targets.size,
             "grad_logits": lambda v: (v.p - v.y) / v.targets.size}),
    Mistake("logits-negated", "with the softmax of -logits",
            {"shifted": lambda v: -v.logits - (-v.logits).max(-1, keepdims=True)}),
    Mistake("softmax-twice", "with the softmax of p, which is already a softmax", {"p": lambda v: softmax(softmax(v.logits))}),
    *(
        Mistake("other-axis", f"with the softmax taken over {description}, not over the vocabulary", changes)
        for axis, description in ((0, "the sequences"), (1, "the places"), (None, "everything"))
        for changes in (
            {"lse": lambda v, axis=axis: np.log(np.exp(v.shifted).sum(axis, keepdims=True))},
            {"p": lambda v, axis=axis: softmax(v.logits, axis),
             "loss": lambda v, axis=axis: -(v.valid * v.y * np.log(softmax(v.logits, axis))).sum() / v.count},
        )
    ),
    *(
        Mistake(f"target-{id}", f"with {words}", {changed: lambda v, of=of: of(v.get_original("targets"))})
        for id, words, of in (
            ("one-more", "the target's token id plus 1", lambda targets: targets + (targets != IGNORE_INDEX)),
            ("one-less", "the target's token id minus 1", lambda targets: targets - (targets != IGNORE_INDEX)),
            ("one-less", "the target's token id minus 1", lambda targets: targets - (targets > 0)),
            ("of-place-before", "the target of the place before", lambda targets: np.roll(targets, 1, 1)),
            ("of-place-after", "the target of the place after", lambda targets: np.roll(targets, -1, 1)),
        )
        for changed in ("target_ids", "targets")
    ),
    Mistake("scale-of-slope-forgotten", "without sqrt(2 / pi) in u', the derivative of tanh's argument",
            {"slope": lambda v: 1 + 3 * CUBIC_COEFF * v.x**2}),
    Mistake("slope-forgotten", "without u', the derivative of tanh's argument",
            {"slope": lambda v: np.ones_like(v.x)}),
    Mistake("second-term-forgotten", "of the first term of the product alone",
            {"grad_gelu": lambda v: v.dx * (1 + v.tanh) / 2}),
    Mistake("gelu-erf", "of the other GELU, x Phi(x) with the error function",
            {"grad_gelu": lambda v: v.dx * erf_slope(v.x), "gelu": lambda v: v.x * normal_cdf(v.x)}),
    Mistake("first-sequence-only", "of the first sequence alone: the sum over the batch is missing",
            {"loss": lambda v: (v.valid * v.y * (v.lse - v.shifted))[0].sum() / v.valid[0].sum(),
             "grad_W": lambda v: v.dy[0].T @ v.x[0], "grad_b": lambda v: v.dy[0].sum(0),
             "grad_position": lambda v: v.dx[0]}),
    Mistake("mean-over-batch", "with a mean over the batch: the loss is already a mean",
            {"grad_position": lambda v: v.dx.mean(0), "grad_b": lambda v: v.dy.mean((0, 1))}),
    Mistake("not-added", "of the last place of each token: a token that occurs twice gets both gradients",
            {"grad_token": assign_gradients}),
    Mistake("residual-forgotten", "of the branch alone: x is also added",
            {"grad_stream": lambda v: v.dx @ v.A}, hint=1),
    Mistake("branch-forgotten", "of the skip connection alone", {"grad_stream": lambda v: v.dx}, hint=1),
    Mistake("branch-transposed", "with A^T, which belongs to the forward pass",
            {"grad_stream": lambda v: v.dx + v.dx @ v.A.T}),
    Mistake("head-overwritten", "of the embedding alone: the head's gradient is lost",
            {"grad_tied": lambda v: v.grad_token}, hint=1),
    Mistake("embedding-forgotten", "of the head alone: the embedding reads the same table",
            {"grad_tied": lambda v: v.grad_of_head}, hint=1),
)  # fmt: skip


def normal_cdf(x: np.ndarray) -> np.ndarray:
    import math

    return np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(x)


def erf_slope(x: np.ndarray) -> np.ndarray:
    return normal_cdf(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
