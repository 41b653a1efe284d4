"""Puzzle 20, last rung: from two kernels to `loss.backward()`. Each line below prevents a failure.

`kernels.softmax(y, x)` and `kernels.softmax_backward(dx, dy, y)` are raw kernels: they write into the caller's
memory, access it as [rows, columns] regardless of strides, and have no autograd support. Registration makes them an
operator that a real model can use. Every check calls `register(library, kernels)` with a new library name;
`workbook p20 --rung register` reports which checks fail, and why.
"""

import torch
from torch import Tensor


def register(library, kernels):
    """Register `softmax` (over the last axis) and its backward pass in a library; return the operator to call."""

    # BLANK-START define: two custom ops, softmax(x) and softmax_backward(dy, y), that pass contiguous memory to the kernels
    # FILL IN (about 12 lines)
    # BLANK-END define

    # BLANK-START fake: the shape, dtype and strides of each result, for the compiler, which has no values
    # FILL IN (about 6 lines)
    # BLANK-END fake

    # BLANK-START save: setup_context(ctx, inputs, output) saves what the backward pass needs, and no more
    # FILL IN (about 2 lines)
    # BLANK-END save

    # BLANK-START gradient: backward(ctx, dy) from what was saved, and the registration of both with softmax
    # FILL IN (about 4 lines)
    # BLANK-END gradient

    # BLANK-START second: a second derivative raises your own error, which says that there is none
    # FILL IN (about 5 lines)
    # BLANK-END second

    # BLANK-START autocast: under autocast it computes in float32, on a CPU and on a GPU
    # FILL IN (about 2 lines)
    # BLANK-END autocast

    # BLANK-START vmap: a batch axis anywhere moves to the front; what is left is softmax over the last axis again
    # FILL IN (about 3 lines)
    # BLANK-END vmap
    return softmax
