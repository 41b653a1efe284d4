"""Puzzle 23 in NumPy: attention and its backward pass in a few lines each, before the Mojo kernels.

One function for each step, checked alone: it asks for what it needs by the names of its arguments. Shapes, with B batches
of N heads, S queries, T keys and d elements of a head: Q and dO [B, N, S, d]; K and V [B, N, T, d]; S (the scores,
already scaled), P, dP and dS [B, N, S, T]; mask [S, T]; scale, a number. `python -m harness p23 --rung numpy` checks it.
"""

import numpy as np


def scores(Q, K, scale):
    """The scores, [B, N, S, T]. Given: how a product over the heads is written."""
    return scale * np.einsum("bnsd,bntd->bnst", Q, K)


def softmax(S, mask):
    """The probabilities, softmax over the keys, [B, N, S, T]; a row that is -inf throughout gives 0."""
    # BLANK-START softmax: add the mask, subtract the largest of each row, divide the exponentials by their sum
    masked = S + mask
    largest = masked.max(-1, keepdims=True)
    weights = np.exp(masked - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(-1, keepdims=True)
    return np.where(total == 0, 0, weights / total)
    # BLANK-END softmax


def output(P, V):
    """O = P V, [B, N, S, d]."""
    # BLANK-START output: the mean of the values that P weighs
    return np.einsum("bnst,bntd->bnsd", P, V)
    # BLANK-END output


def dV(P, dO):
    """The gradient of the value, [B, N, T, d]."""
    # BLANK-START dV: the sum over the queries of P[s, t] * dO[s]
    return np.einsum("bnst,bnsd->bntd", P, dO)
    # BLANK-END dV


def dP(dO, V):
    """The gradient of the probabilities, [B, N, S, T]."""
    # BLANK-START dP: the dot product of dO[s] and V[t]
    return np.einsum("bnsd,bntd->bnst", dO, V)
    # BLANK-END dP


def dsoftmax(P, dP):
    """The gradient of the scores, [B, N, S, T]."""
    # BLANK-START dsoftmax: P * (dP - the sum of dP * P over the keys)
    return P * (dP - (dP * P).sum(-1, keepdims=True))
    # BLANK-END dsoftmax


def dQ(dS, K, scale):
    """The gradient of the query, [B, N, S, d]."""
    # BLANK-START dQ: the sum over the keys of dS[s, t] * K[t], scaled
    return scale * np.einsum("bnst,bntd->bnsd", dS, K)
    # BLANK-END dQ


def dK(dS, Q, scale):
    """The gradient of the key, [B, N, T, d]."""
    # BLANK-START dK: the sum over the queries of dS[s, t] * Q[s], scaled
    return scale * np.einsum("bnst,bnsd->bntd", dS, Q)
    # BLANK-END dK


def backward(dO, Q, K, V, P, scale):
    """All three gradients from what the forward pass kept: Q, K, V and the probabilities."""
    dS = dsoftmax(P, dP(dO, V))
    return dQ(dS, K, scale), dK(dS, Q, scale), dV(P, dO)
