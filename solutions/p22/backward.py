"""Puzzle 22 in NumPy: the backward pass of LayerNorm + Linear in about ten lines, before the Mojo kernels.

One function per gradient, checked separately; its arguments are passed by name. Shapes, with B
sequences of S positions, H features and O outputs: dy [B, S, O]; x_hat and dln [B, S, H]; rstd, c1 and c2 [B, S, 1];
gamma and beta [H]. dln = dy @ W is the gradient at the LayerNorm output. `workbook p22 --rung numpy` checks it.
"""

import numpy as np


def db(dy):
    """Return the gradient of the linear bias, [O]."""
    # BLANK-START db: every row of the output got the same bias
    return dy.sum((0, 1))
    # BLANK-END db


def dW(dy, x_hat, gamma, beta):
    """Return the gradient of the linear weight, [O, H]."""
    # BLANK-START dW: what did W multiply in each row? Which axes are left in the result?
    ln_out = x_hat * gamma + beta
    return np.einsum("bso,bsh->oh", dy, ln_out)
    # BLANK-END dW


def dgamma(dln, x_hat):
    """Return the gradients of the LayerNorm weight and bias, dgamma and dbeta, [H] each."""
    # BLANK-START dgamma: return dgamma and dbeta; every row used the same gamma and beta
    return (dln * x_hat).sum((0, 1)), dln.sum((0, 1))
    # BLANK-END dgamma


def row_sums(dln, x_hat, gamma):
    """Return the two means over each row that dx needs, c1 and c2, [B, S, 1] each."""
    # BLANK-START row_sums: return c1 and c2: the components of g along x_hat and along ones
    g = dln * gamma
    c1 = (g * x_hat).mean(-1, keepdims=True)
    c2 = g.mean(-1, keepdims=True)
    return c1, c2
    # BLANK-END row_sums


def dx(dln, x_hat, gamma, rstd, c1, c2):
    """Return the gradient of the input, [B, S, H]."""
    # BLANK-START dx: g without its two parts, and the factor in front
    g = dln * gamma
    return rstd * (g - c2 - x_hat * c1)
    # BLANK-END dx


def backward(dy, x, mean, rstd, gamma, beta, W):
    """Return all five gradients from the saved x [B, S, H], mean and rstd [B, S, 1]; W is [O, H]."""
    x_hat = (x - mean) * rstd
    dln = dy @ W
    c1, c2 = row_sums(dln, x_hat, gamma)
    return dx(dln, x_hat, gamma, rstd, c1, c2), *dgamma(dln, x_hat), dW(dy, x_hat, gamma, beta), db(dy)
