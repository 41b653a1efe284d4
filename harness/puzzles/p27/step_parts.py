"""Parts of the step by hand beyond the layers of `harness.nn`: GELU, LayerNorm, AdamW and others.

Activations are matrices [rows, channels]. On a GPU, in bfloat16, kernels run on PyTorch's current stream;
elsewhere, and for a LayerNorm without a matmul, PyTorch's own operations run.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.nn import attention_backward, attention_with_lse, host
from harness.nn.layers import EPS, LAYER
from harness.puzzles.p27.step_kernels import get_kernels

SCALE, CUBIC_COEFF = math.sqrt(2 / math.pi), 0.044715
"""Constants of GELU's u = SCALE (x + CUBIC_COEFF x^3)."""


# ---- GELU -----------------------------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    """Return x / 2 (1 + tanh u), rounded once."""
    if library := get_kernels(x):
        y = torch.empty_like(x)
        library.launch("gelu", y, x, x.numel())
        return y
    return F.gelu(x, approximate="tanh")


def gelu_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Recompute GELU(x) and return it with the gradient w.r.t. x; on a GPU, they overwrite x and dy."""
    if library := get_kernels(x):
        library.launch("gelu_backward", x, dy, x.numel())
        return x, dy
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    s = torch.sigmoid(2 * SCALE * (x32 + CUBIC_COEFF * x32**3))
    slope = SCALE * (1 + 3 * CUBIC_COEFF * x32.square())
    dx = dy.to(x32.dtype) * (s + 2 * x32 * s * (1 - s) * slope)
    return (x32 * s).to(x.dtype), dx.to(x.dtype)


# ---- LayerNorm, with and without a matmul ----------------------------------------------------------------------

ALL_GRADIENTS = 15


def layernorm_linear(x: Tensor, weight: Tensor, bias: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [rows, O] of LayerNorm + Linear, and the LayerNorm's mean and rstd."""
    if host.load(LAYER, x.device.type):
        return torch.ops.mojo_workbook.layernorm_linear_forward(x, weight, bias, W, b, EPS)
    y, statistics = layernorm(x, weight, bias)
    return F.linear(y, W, b), statistics


def layernorm_linear_backward(
    dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, W: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, bias, W and the linear bias."""
    if host.load(LAYER, x.device.type):
        arguments = dy, x, statistics, weight, bias, W
        return torch.ops.mojo_workbook.layernorm_linear_backward(*arguments, ALL_GRADIENTS)
    y, _ = layernorm(x, weight, bias)
    return *layernorm_backward(dy @ W, x, statistics, weight), dy.t() @ y, dy.sum(0)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and mean and rstd [2, rows] in float32, of x [rows, C]."""
    if x.is_cuda:
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, EPS)
        return y, torch.stack((mean.flatten(), rstd.flatten()))
    x32 = x.float()
    mean = x32.mean(-1)
    rstd = ((x32 - mean[:, None]).square().mean(-1) + EPS).rsqrt()
    x_hat = (x32 - mean[:, None]) * rstd[:, None]
    return (x_hat * weight + bias).to(x.dtype), torch.stack((mean, rstd))


def layernorm_backward(
    dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias: puzzle 22's dx = rstd (g - c2 - x_hat c1)."""
    if x.is_cuda:
        native = torch.ops.aten.native_layer_norm_backward
        mean, rstd = statistics[:, :, None].unbind()
        return native(dy, x, x.shape[-1:], mean, rstd, weight, torch.zeros_like(weight), [True] * 3)
    mean, rstd = statistics[:, :, None]
    x_hat = (x.float() - mean) * rstd
    dy32 = dy.float()
    g = dy32 * weight
    c1, c2 = (g * x_hat).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
    dx = rstd * (g - c2 - x_hat * c1)
    return dx.to(x.dtype), (dy32 * x_hat).sum(0).to(weight.dtype), dy32.sum(0).to(weight.dtype)


# ---- The stream's gradient --------------------------------------------------------------------------------------


def add_with_sums(stream: Tensor, branch: Tensor) -> Tensor:
    """Add a branch's gradient to the stream's, [rows, C], in place; return the column sums, a bias gradient."""
    if library := get_kernels(stream):
        sums = stream.new_empty(stream.shape[1])
        library.launch("add_with_sums", stream, sums, branch, *stream.shape)
        return sums
    return stream.add_(branch).sum(0)


# ---- Attention between matrices of rows -------------------------------------------------------------------------


def split_heads(rows: Tensor, batch: int, num_heads: int) -> Tensor:
    return rows.view(batch, -1, num_heads, rows.shape[1] // num_heads).transpose(1, 2)


def attention(qkv: Tensor, batch: int, num_heads: int) -> tuple[Tensor, Tensor]:
    """Compute causal attention of qkv [rows, 3 C]: the output [rows, C] and lse [batch, count, T]."""
    query, key, value = (split_heads(part, batch, num_heads) for part in qkv.chunk(3, 1))
    output, lse = attention_with_lse(query, key, value, is_causal=True)
    return output.transpose(1, 2).reshape(len(qkv), -1), lse


def attention_gradient(
    dy: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, batch: int, num_heads: int
) -> Tensor:
    """Return the gradient of qkv [rows, 3 C] from the gradient of the output [rows, C]."""
    dqkv = torch.empty_like(qkv)
    query, key, value = (split_heads(part, batch, num_heads) for part in qkv.chunk(3, 1))
    dQ, dK, dV = (split_heads(part, batch, num_heads) for part in dqkv.chunk(3, 1))
    dO, out = split_heads(dy, batch, num_heads), split_heads(output, batch, num_heads)
    gradients = attention_backward(dO, query, key, value, out, lse, is_causal=True)
    for view, gradient in zip((dQ, dK, dV), gradients, strict=True):
        view.copy_(gradient)
    return dqkv


# ---- The embedding's table --------------------------------------------------------------------------------------


def sort_positions(tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the int64 positions [rows] sorted by token, and the offset of each token's first one [vocab_size + 1]."""
    order = tokens.argsort(stable=True)
    token_ids = torch.arange(vocab_size + 1, device=tokens.device)
    return order, torch.searchsorted(tokens[order], token_ids)


def compute_token_gradient(table: Tensor, head_grad: Tensor, dx: Tensor, tokens: Tensor) -> Tensor:
    """Write and return the tied table's gradient [V, C]: the head's plus dx [rows, C] summed by token."""
    if library := get_kernels(dx):
        order, starts = sort_positions(tokens, len(head_grad))
        tensors = (table, head_grad.float(), dx, tokens, order, starts)
        library.launch("token_gradient", *tensors, len(tokens), *table.shape)
        return table
    total = head_grad.float()
    # Sum in a fixed order: on a GPU, index_put_ sorts; on a CPU, only index_add_ is sequential.
    if total.is_cuda:
        total.index_put_((tokens,), dx.float(), accumulate=True)
    else:
        total.index_add_(0, tokens, dx.float())
    return table.copy_(total)


# ---- AdamW ------------------------------------------------------------------------------------------------------


BETAS, ADAM_EPS, DECAY, LIMIT = (0.9, 0.95), 1e-8, 0.1, 1.0
"""AdamW's constants, and the norm to which gradients are clipped, as in the tape's file."""


def compute_norm(norm: Tensor, gradients: Tensor) -> None:
    if library := get_kernels(gradients):
        library.launch("norm", norm, gradients, gradients.numel())
        return
    torch.linalg.vector_norm(gradients, dtype=torch.float32, out=norm[0])


def adamw(
    master: Tensor,
    working: Tensor,
    gradients: Tensor,
    mean: Tensor,
    square: Tensor,
    step_inputs: Tensor,
    norm: Tensor,
    *,
    num_decayed: int,
) -> None:
    """Update in place both means, the parameters, and their working copy, which may be the same memory.

    Args:
        master, mean, square: [num_elements], float32.
        working, gradients: [num_elements], in the working dtype.
        step_inputs: The learning rate, and the corrections 1 - beta^step of both means, float32 [3].
        norm: The norm of all gradients, float32 [1], for clipping.
        num_decayed: The number of leading elements with weight decay.
    """
    if library := get_kernels(gradients):
        tensors = (master, working, mean, square, gradients, step_inputs, norm)
        library.launch("adamw", *BETAS, ADAM_EPS, DECAY, LIMIT, num_decayed, master.numel(), *tensors)
        return
    rate, correction1, correction2 = step_inputs
    factor = (LIMIT / (norm + 1e-6)).clamp(max=1)
    g = gradients.float() * factor
    mean.lerp_(g, 1 - BETAS[0])
    square.lerp_(g.square(), 1 - BETAS[1])
    master[:num_decayed] *= 1 - rate * DECAY
    master -= rate * (mean / correction1) / ((square / correction2).sqrt() + ADAM_EPS)
    if working is not master:
        working.copy_(master)
