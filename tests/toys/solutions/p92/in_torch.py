"""Puzzle 92 in PyTorch: each rank has some rows."""

import torch
import torch.distributed


class Total(torch.autograd.Function):
    """The sum of the rows [rows, columns] of all ranks, [columns]."""

    @staticmethod
    def forward(ctx, x):
        """Sums the rows of this rank, and adds up what the ranks have."""
        ctx.rows = len(x)
        # BLANK-START total: the sum over all rows of all ranks
        total = x.sum(0)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return total
        # BLANK-END total

    @staticmethod
    def backward(ctx, dy):
        """Every row has the same gradient."""
        return dy.expand(ctx.rows, -1)
