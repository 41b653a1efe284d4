"""Puzzle 20, second rung: backward passes as `torch.autograd.Function`, and what each of them saves.

A function saves tensors for its backward pass with `ctx.save_for_backward`. For ReLU there is a choice: the input or
the output (32 bits per element in float32), a bool mask (8 bits), or a packed mask (1 bit). All give PyTorch's
gradient: 0 where x <= 0, else dy, also where x is NaN. The checks run gradcheck, compare with PyTorch's own gradients
in float32, pass gradients that are not contiguous, and count the saved bytes. `workbook p20 --rung torch` runs them.
"""

import math

import torch
from torch.autograd import Function


class ReluFromInput(Function):
    """max(x, 0) for x of any shape; saves x."""

    # BLANK-START relu_input: forward(ctx, x) saves x and returns y; backward(ctx, dy) returns the gradient of x
    # FILL IN (about 8 lines)
    # BLANK-END relu_input


class ReluFromOutput(Function):
    """max(x, 0) for x of any shape; saves the output, which the next layer saves anyway."""

    # BLANK-START relu_output: as before, but save the output: what does it still say about x?
    # FILL IN (about 9 lines)
    # BLANK-END relu_output


class ReluFromMask(Function):
    """max(x, 0) for x of any shape; saves one bool per element, which PyTorch stores in 8 bits."""

    # BLANK-START relu_mask: save one bool per element, and neither x nor y
    # FILL IN (about 9 lines)
    # BLANK-END relu_mask


def pack(mask):
    """Pack n bools into ceil(n / 32) int32 words, [words]: element i is bit i % 32 of word i // 32."""
    bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 32)).view(-1, 32)
    weights = torch.tensor([1 << i for i in range(32)], dtype=torch.int64, device=mask.device)
    return (bits * weights).sum(1).to(torch.int32)


def unpack(words, shape):
    """Return the bool tensor of a shape that `pack` converted to words."""
    positions = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, None] >> positions) & 1
    return bits.flatten()[: math.prod(shape)].view(shape).bool()


class ReluFromBits(Function):
    """max(x, 0) for x of any shape; saves one bit per element."""

    # BLANK-START relu_bits: save the packed mask; the other argument of `unpack` is not a tensor: make it an attribute of ctx
    # FILL IN (about 9 lines)
    # BLANK-END relu_bits


class LayerNorm(Function):
    """LayerNorm over the last axis of x [..., H], weight and bias [H]; saves x, weight and two numbers per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        return (x - mean) * rstd * weight + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        x_hat = (x - mean) * rstd
        leading = tuple(range(dy.dim() - 1))  # every axis but the last; none where x is a single row
        # BLANK-START layernorm: dx as x, by the formula on the page; dweight and dbias [H], sums over all rows
        # FILL IN (about 4 lines)
        # BLANK-END layernorm
        return dx, dweight, dbias, None


class Attention(Function):
    """softmax(q k^T / sqrt(d)) v for q [..., S, d], k and v [..., T, d]; saves q, k, v and P. (Provided.)"""

    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        P = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, P)
        return P @ v

    @staticmethod
    def backward(ctx, dO):
        q, k, v, P = ctx.saved_tensors
        dv = P.transpose(-1, -2) @ dO
        dP = dO @ v.transpose(-1, -2)
        dS = P * (dP - (dP * P).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        dq = dS @ k
        dk = dS.transpose(-1, -2) @ q
        return dq, dk, dv
