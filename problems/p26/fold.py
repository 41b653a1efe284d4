"""Puzzle 26, second rung: products with constants folded, and what a rewrite may not touch.

x * 2.0 * 3.0 reads and writes x twice where x * 6.0 does so once. The rewrite is small and has all the dangers of a large
one: constants on either side, dtypes in which the product is another one, values that somebody else uses, tensors that
are written to in between, memory that two names share. The rule of this rung: every element keeps its bits.
`workbook p26 --rung fold` checks the five parts; every pass returns how many nodes it has changed.
"""

import math
import operator

import torch

from harness.puzzles.p26.nodes import is_tensor, mutates, pointwise, value, written_between

MUL = (operator.mul, torch.mul, "mul")
"""How Dynamo writes a product: x * y, torch.mul(x, y), x.mul(y). `x *= y` is operator.imul, and writes into x."""


def factor(node):
    """(x, c) where a node is the product of a tensor x and a number c, on whichever side; None for any other node."""
    # BLANK-START factor: no keywords; a number is an int or a float, neither a bool nor a node
    # FILL IN (about 6 lines)
    # BLANK-END factor


def exact(a, b, dtype):
    """Return whether x * a * b and x * (a * b) have the same bits for every x of a dtype."""
    # BLANK-START exact: of integers, whether the product fits; else at most one is not a power of two, and neither is a fraction
    # FILL IN (about 8 lines)
    # BLANK-END exact


def fold(gm):
    """Fold (x * a) * b into x * (a * b), for chains of any length; an inner product with other users stays."""
    # BLANK-START chain: walk over a copy of the nodes; one dtype all along, nothing written in between; then drop what is dead
    # FILL IN (about 14 lines)
    # BLANK-END chain


def drop_ones(gm):
    """Remove products with 1 where it cannot be observed.

    x * 1.0 is a copy of x: who returns it, looks at a part of it or writes to it must not meet x. And of an integer it makes a float.
    """
    # BLANK-START neutral: nothing in the graph writes, every user makes new memory, the dtype stays
    # FILL IN (about 12 lines)
    # BLANK-END neutral


def sweep(gm):
    """Remove every node whose result is not used and that has no side effect.

    `graph.eliminate_dead_code()` drops `y.add_(1)` and `torch.neg(x, out=y)` too: it believes that a call whose result is
    not used does nothing.
    """
    # BLANK-START sweep: from the last node to the first; keep inputs, the output, what mutates and what is impure
    # FILL IN (about 6 lines)
    # BLANK-END sweep
