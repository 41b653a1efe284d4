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
    @torch.library.custom_op(f"{library}::softmax", mutates_args=())
    def softmax(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels.softmax(y, x)
        return y

    @torch.library.custom_op(f"{library}::softmax_backward", mutates_args=())
    def softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
        dy, y = dy.contiguous(), y.contiguous()
        dx = torch.empty_like(y)
        kernels.softmax_backward(dx, dy, y)
        return dx

    # BLANK-END define

    # BLANK-START fake: the shape, dtype and strides of each result, for the compiler, which has no values
    @softmax.register_fake
    def _(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @softmax_backward.register_fake
    def _(dy, y):
        return torch.empty_like(y, memory_format=torch.contiguous_format)

    # BLANK-END fake

    # BLANK-START save: setup_context(ctx, inputs, output) saves what the backward pass needs, and no more
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    # BLANK-END save

    # BLANK-START gradient: backward(ctx, dy) from what was saved, and the registration of both with softmax
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return softmax_backward(dy, y)

    softmax.register_autograd(backward, setup_context=setup_context)
    # BLANK-END gradient

    # BLANK-START second: a second derivative raises your own error, which says that there is none
    def refuse(ctx, grad):
        raise NotImplementedError(
            "softmax has no second derivative: its gradient cannot be differentiated again"
        )

    softmax_backward.register_autograd(refuse)
    # BLANK-END second

    # BLANK-START autocast: under autocast it computes in float32, on a CPU and on a GPU
    for device in ("cpu", "cuda"):
        softmax.register_autocast(device, torch.float32)
    # BLANK-END autocast

    # BLANK-START vmap: a batch axis anywhere moves to the front; what is left is softmax over the last axis again
    def batched(info, in_dims, x):
        return softmax(x.movedim(in_dims[0], 0)), 0

    softmax.register_vmap(batched)
    # BLANK-END vmap
    return softmax
