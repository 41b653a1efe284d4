"""Puzzle 91 in PyTorch."""

import torch


class Cube(torch.autograd.Function):
    """y = x ** 3 on [n]."""

    @staticmethod
    def forward(ctx, x):
        """Return the cube of every element, [n]."""
        ctx.save_for_backward(x)
        # BLANK-START cube: y = x ** 3
        return x * x * x
        # BLANK-END cube

    @staticmethod
    def backward(ctx, dy):
        """Return the gradient of x, [n]."""
        (x,) = ctx.saved_tensors
        # BLANK-START dcube: dx = 3 * x ** 2 * dy
        return 3 * x * x * dy
        # BLANK-END dcube
