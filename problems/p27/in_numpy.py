"""Puzzle 27 in NumPy: the backward pass of every part of a GPT that no earlier puzzle has, a few lines each.

For LayerNorm see puzzle 22, for attention puzzle 23; the tape needs both again, in PyTorch. Each function here is
checked separately; its arguments are passed by name. Shapes, with B sequences of T tokens, C channels, O outputs and a
vocabulary of V: tokens and targets [B, T], integers; x and dx [B, T, C]; dy [B, T, O]; W [O, C]; logits and dlogits
[B, T, V]; smoothing, a number. `workbook p27 --rung numpy` checks it.
"""

import numpy as np

IGNORED = -100
"""The target of a position that the loss ignores, as in PyTorch."""


def softmax(logits):
    """Return the softmax over the last axis; the largest logit is subtracted, so exp never overflows. (Provided.)"""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def target_distribution(targets, smoothing, V):
    """Return (1 - smoothing) * onehot(target) + smoothing / V of each position, [B, T, V]. (Provided.)"""
    onehot = np.where(targets[..., None] == np.arange(V), 1.0, 0.0)
    return (1 - smoothing) * onehot + smoothing / V


def loss(logits, targets, smoothing):
    """Return the cross-entropy, a number: the mean over the positions that are not ignored."""
    # BLANK-START loss: the mean of -sum(y * log p) over the positions that are not ignored
    # FILL IN (about 5 lines)
    # BLANK-END loss


def dlogits(logits, targets, smoothing):
    """Return the gradient of the logits, [B, T, V]."""
    # BLANK-START dlogits: p - y at positions that are not ignored, divided by their number
    # FILL IN (about 3 lines)
    # BLANK-END dlogits


def dgelu(x, dx):
    """Return the gradient of the input of GELU, y = x / 2 (1 + tanh u) with u = k (x + 0.044715 x^3): [B, T, C].

    dx is the gradient of y.
    """
    k = np.sqrt(2 / np.pi)
    # BLANK-START dgelu: the product rule; the derivative of tanh u is (1 - tanh^2 u) u'
    # FILL IN (about 3 lines)
    # BLANK-END dgelu


def dlinear(dy, x, W):
    """Return the gradients of x, W and the bias of y = x W^T + b: [B, T, C], [O, C] and [O]."""
    # BLANK-START dlinear: return all three; W and the bias serve every token
    # FILL IN (about 1 line)
    # BLANK-END dlinear


def dembedding(tokens, dx, V):
    """Return the gradients of both tables of x = token[tokens] + position[:T]: [V, C] and [T, C]."""
    # BLANK-START dembedding: return both; a token that occurs twice gets both gradients
    # FILL IN (about 3 lines)
    # BLANK-END dembedding


def dresidual(dx, A):
    """Return the gradient of x [B, T, C], given dx, the gradient of x + x A^T; A [C, C] stands for any branch."""
    # BLANK-START dresidual: the gradient flows back on both paths
    # FILL IN (about 1 line)
    # BLANK-END dresidual


def dtied(tokens, dx, dlogits, x):
    """Return the gradient [V, C] of a table used in token[tokens], with gradient dx, and in x token^T, with dlogits."""
    # BLANK-START dtied: one tensor, two gradients
    # FILL IN (about 3 lines)
    # BLANK-END dtied
