"""Puzzle 21: a test of backward passes. It must reject every wrong one, and no correct one.

`check(op)` is called with one op after the other, right ones and wrong ones. It raises, or returns a line that says what is
wrong, where it has something against the op; it returns None where it has nothing. An op has

    op.function(*inputs)           what is tested; returns a tensor, or a tuple of them
    op.reference(*inputs)          the same by PyTorch's own differentiable operations: what is right
    op.inputs(sizes, seed, dtype)  fresh inputs; those of a floating-point dtype are leaves that ask for a gradient
    op.sizes                       the sizes that `inputs` knows: "odd", "square", "row" (no leading axis), "deep" (three of
                                   them), and maybe "tall" (thousands of rows)
    op.dtypes                      the dtypes that the function computes in, the widest first; not all know float64

A right op may be written in any way, and may add up in another order each time: it is then right to rounding. Its inputs
may lie at a corner of the function, and it may leave one of them unused. It may refuse second derivatives, or a backward
pass after its inputs have been overwritten, by raising a RuntimeError. A wrong one may be right in most calls.
"""

import torch


def check(op):
    """Raise AssertionError if an op is wrong."""

    # BLANK-START check: a test that finds every wrong op and accuses no right one
    # FILL IN (about 105 lines)
    # BLANK-END check
