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
    # FILL IN (about 5 lines)
    # BLANK-END softmax


def output(P, V):
    """Return O = P V, [B, N, S, d]."""
    # BLANK-START output: one product of P and V: which letter is summed?
    # FILL IN (about 1 line)
    # BLANK-END output


def dV(P, dO):
    """Return the gradient of the value, [B, N, T, d]."""
    # BLANK-START dV: every query that used value t contributes
    # FILL IN (about 1 line)
    # BLANK-END dV


def dP(dO, V):
    """Return the gradient of the probabilities, [B, N, S, T]."""
    # BLANK-START dP: the derivative of the loss by each element of P
    # FILL IN (about 1 line)
    # BLANK-END dP


def dsoftmax(P, dP):
    """Return the gradient of the scores, [B, N, S, T]."""
    # BLANK-START dsoftmax: through the softmax of each row, which has one sum
    # FILL IN (about 1 line)
    # BLANK-END dsoftmax


def dQ(dS, K, scale):
    """Return the gradient of the query, [B, N, S, d]."""
    # BLANK-START dQ: a product of dS and K, and the scale
    # FILL IN (about 1 line)
    # BLANK-END dQ


def dK(dS, Q, scale):
    """Return the gradient of the key, [B, N, T, d]."""
    # BLANK-START dK: a product of dS and Q, and the scale: which letter is summed now?
    # FILL IN (about 1 line)
    # BLANK-END dK


def backward(dO, Q, K, V, P, scale):
    """Return all three gradients from the saved Q, K, V and probabilities."""
    dS = dsoftmax(P, dP(dO, V))
    return dQ(dS, K, scale), dK(dS, Q, scale), dV(P, dO)
