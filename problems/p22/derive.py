"""Puzzle 22 before any formula: where the gradient of LayerNorm comes from, in five steps of a line or two.

One row x of H values is enough, because each row is normalised separately. mu is the mean of the row, sigma2 the mean
of its squared deviations from mu, rstd = 1 / sqrt(sigma2 + eps), and x_hat = (x - mu) * rstd. Only these definitions
are provided: your code is compared with finite differences, which need no formula. A pencil helps. `workbook p22
--rung derive` checks all five.
"""

import numpy as np


def dmean(x):
    """Return the derivative of mu by each x_j, [H]."""
    # BLANK-START dmean: how fast does the mean grow with x_j, for every j?
    # FILL IN (about 1 line)
    # BLANK-END dmean


def dvar(x):
    """Return the derivative of sigma2 by each x_j, [H]."""
    # BLANK-START dvar: x_j moves its own deviation, and through mu all others: what is left?
    # FILL IN (about 1 line)
    # BLANK-END dvar


def jvp(v, x_hat, rstd):
    """Return the Jacobian-vector product, the derivative of x_hat along v: [H]; v and x_hat are [H], rstd a number."""
    # BLANK-START jvp: move x to x + t * v; the derivative of x_hat by t at t = 0
    # FILL IN (about 1 line)
    # BLANK-END jvp


# In the backward pass g is the gradient of x_hat, [H], and the gradient of x is the sum over i of g_i times the
# derivative of x_hat_i. It is rstd * (g - c2 - x_hat * c1) with two numbers, the same for the whole row: find them.


def c2(g, x_hat):
    """Return the number that is subtracted from every g_j."""
    # BLANK-START c2: which number is it, of g or of x_hat or of both?
    # FILL IN (about 1 line)
    # BLANK-END c2


def c1(g, x_hat):
    """Return the factor of x_hat_j in the term that is subtracted from g_j."""
    # BLANK-START c1: which number is it, of g or of x_hat or of both?
    # FILL IN (about 1 line)
    # BLANK-END c1
