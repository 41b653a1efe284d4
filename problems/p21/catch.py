"""Puzzle 21: a test of backward passes. It must reject every wrong one, and no correct one.

`check(op)` is called with correct and incorrect ops, one at a time. If an op is wrong, it raises or returns a line that
describes the error; otherwise it returns None. An op has

    op.function(*inputs)           the function to test; returns a tensor or a tuple of tensors
    op.reference(*inputs)          the correct result, from PyTorch's own differentiable operations
    op.inputs(sizes, seed, dtype)  new inputs; those of a floating-point dtype are leaves that require a gradient
    op.sizes                       the sizes that `inputs` supports: "odd", "square", "row" (no leading axis), "deep"
                                   (three leading axes), and maybe "tall" (thousands of rows)
    op.dtypes                      the dtypes that the function supports, the widest first; float64 may be missing

A correct op may use any method, and may sum in a different order in each call: its results are then correct up to
rounding. Its inputs may be at a corner of the function, and it may ignore one of them. It may raise a RuntimeError for
second derivatives, or for a backward pass after its inputs have been overwritten. A wrong op may be right in most
calls.
"""

import torch


def check(op):
    """Raise AssertionError if an op is wrong."""

    # BLANK-START check: a test that rejects every wrong op and no right one
    # FILL IN (about 107 lines)
    # BLANK-END check
