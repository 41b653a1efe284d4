"""Puzzle 24 in PyTorch: a permutation and attention on gathered rows, each as one `autograd.Function`.

Shapes: query, key, value and the incoming gradient dO [B, N, L, d], a row for each cell of a grid, stored row by row;
order [L], the cell at each step. For the backward pass only the index is saved, no gathered rows: they are gathered
again. `workbook p24 --rung torch` compares with autograd and runs gradcheck.
"""

import torch


class Gather(torch.autograd.Function):
    """Rows in the order of the steps: row order[i] becomes row i."""

    @staticmethod
    def forward(ctx, tensor, order):
        """Return the gathered rows, [B, N, L, d]."""
        ctx.save_for_backward(order)
        return tensor[:, :, order.long()]

    @staticmethod
    def backward(ctx, grad_gathered):
        """Return the gradient of the tensor; an index has none."""
        (order,) = ctx.saved_tensors
        grad_tensor = torch.zeros_like(grad_gathered)
        # BLANK-START dgather: where did row i of the gathered tensor come from?
        # FILL IN (about 1 line)
        # BLANK-END dgather
        return grad_tensor, None


def near(order, width, radius):
    """Return whether a query sees a key, indexed by their steps, bool [L, L]. (Provided.)"""
    rows, columns = order // width, order % width
    down, right = ((axis[:, None] - axis).abs() for axis in (rows, columns))
    return torch.maximum(down, right) <= radius


class WindowAttention(torch.autograd.Function):
    """Attention of each cell to the cells at most `radius` away, computed in the order of the steps."""

    @staticmethod
    def forward(ctx, query, key, value, order, width, radius):
        """Return the output, [B, N, L, d], a row for each cell."""
        index = order.long()
        Q, K, V = (tensor[:, :, index] for tensor in (query, key, value))
        scores = query.shape[-1] ** -0.5 * (Q @ K.mT)
        scores = scores.masked_fill(~near(order, width, radius), -torch.inf)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        output = torch.zeros_like(query)
        # Not exp(scores - lse), whose row sums differ from 1 by the rounding of lse.
        output[:, :, index] = torch.softmax(scores, -1) @ V
        ctx.save_for_backward(query, key, value, output, lse, order)
        ctx.window = width, radius
        return output

    @staticmethod
    def backward(ctx, grad_output):
        """Return the gradients of query, key and value, a row for each cell."""
        query, key, value, output, lse, order = ctx.saved_tensors
        index = order.long()
        scale = query.shape[-1] ** -0.5
        hidden = ~near(order, *ctx.window)
        Q, K, V, O = (tensor[:, :, index] for tensor in (query, key, value, output))
        P = torch.exp((scale * (Q @ K.mT)).masked_fill(hidden, -torch.inf) - lse)
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        # BLANK-START attention: dO in the order of the steps, then dV, dS, dQ and dK; each row back to its cell
        # FILL IN (about 5 lines)
        # BLANK-END attention
        return grad_query, grad_key, grad_value, None, None, None
