"""Puzzle 23 in NumPy: attention and its backward pass in a few lines each, before the Mojo kernels.

One function per step, checked separately; its arguments are passed by name. Shapes, with B batches
of N heads, S queries, T keys and d elements of a head: Q and dO [B, N, S, d]; K and V [B, N, T, d]; S (the scores,
already scaled), P, dP and dS [B, N, S, T]; mask [S, T]; scale, a number. `workbook p23 --rung numpy` checks it.
"""

import numpy as np


def scores(Q, K, scale):
    """Return the scores, [B, N, S, T]. Provided as an example of a product over the heads."""
    return scale * np.einsum("bnsd,bntd->bnst", Q, K)


def softmax(S, mask):
    """Return the probabilities, softmax over the keys, [B, N, S, T]; a row that is all -inf gives 0."""
    # BLANK-START softmax: P from scores and mask: the exponentials must not overflow, and a row of -inf must not give 0/0
    masked = S + mask
    largest = masked.max(-1, keepdims=True)
    weights = np.exp(masked - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(-1, keepdims=True)
    return np.where(total == 0, 0, weights / total)
    # BLANK-END softmax


def output(P, V):
    """Return O = P V, [B, N, S, d]."""
    # BLANK-START output: one product of P and V: which letter is summed?
    return np.einsum("bnst,bntd->bnsd", P, V)
    # BLANK-END output


def dV(P, dO):
    """Return the gradient of the value, [B, N, T, d]."""
    # BLANK-START dV: every query that used value t contributes
    return np.einsum("bnst,bnsd->bntd", P, dO)
    # BLANK-END dV


def dP(dO, V):
    """Return the gradient of the probabilities, [B, N, S, T]."""
    # BLANK-START dP: the derivative of the loss by each element of P
    return np.einsum("bnsd,bntd->bnst", dO, V)
    # BLANK-END dP


def dsoftmax(P, dP):
    """Return the gradient of the scores, [B, N, S, T]."""
    # BLANK-START dsoftmax: through the softmax of each row, which has one sum
    return P * (dP - (dP * P).sum(-1, keepdims=True))
    # BLANK-END dsoftmax


def dQ(dS, K, scale):
    """Return the gradient of the query, [B, N, S, d]."""
    # BLANK-START dQ: a product of dS and K, and the scale
    return scale * np.einsum("bnst,bntd->bnsd", dS, K)
    # BLANK-END dQ


def dK(dS, Q, scale):
    """Return the gradient of the key, [B, N, T, d]."""
    # BLANK-START dK: a product of dS and Q, and the scale: which letter is summed now?
    return scale * np.einsum("bnst,bnsd->bntd", dS, Q)
    # BLANK-END dK


def backward(dO, Q, K, V, P, scale):
    """Return all three gradients from the saved Q, K, V and probabilities."""
    dS = dsoftmax(P, dP(dO, V))
    return dQ(dS, K, scale), dK(dS, Q, scale), dV(P, dO)
