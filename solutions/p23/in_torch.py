"""Puzzle 23 in PyTorch: attention as one `autograd.Function`, with a mask that also gets a gradient.

Shapes: query and the incoming gradient dO [B, N, S, d]; key and value [B, N, T, d]; mask [S, T], added to the scores
of every head. The forward pass saves query, key, value and the probabilities P [B, N, S, T].
`workbook p23 --rung torch` compares with autograd and runs gradcheck.
"""

import torch


class Attention(torch.autograd.Function):
    """softmax(query key^T / sqrt(d) + mask) value; a fully masked row gives 0 and gradients of 0."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        """Return the output, [B, N, S, d]."""
        scale = query.shape[-1] ** -0.5
        P = output = None
        # BLANK-START output: P, with 0 and not NaN in a row of -inf, and the output
        scores = scale * (query @ key.mT) + mask
        largest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0))
        total = weights.sum(-1, keepdim=True)
        P = (weights / total).masked_fill(total == 0, 0)
        output = P @ value
        # BLANK-END output
        ctx.save_for_backward(query, key, value, P)
        return output

    @staticmethod
    def backward(ctx, dO):
        """Return the gradients of query, key, value and mask."""
        query, key, value, P = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        dQ = dK = dV = dS = dmask = None
        dV = P.mT @ dO
        # BLANK-START dsoftmax: dS [B, N, S, T]; and dmask [S, T], for one mask serves every head
        dP = dO @ value.mT
        dS = P * (dP - (dP * P).sum(-1, keepdim=True))
        dmask = dS.sum((0, 1))
        # BLANK-END dsoftmax
        dQ = scale * (dS @ key)
        dK = scale * (dS.mT @ query)
        return dQ, dK, dV, dmask
