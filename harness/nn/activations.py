"""SiLU as an operator of the workbook's, `mojo_workbook::silu`, with its backward pass: what a rewrite of a graph puts in.

Both directions compute in float32 (float64 for float64) and round once, as PyTorch's own do. They are written with
PyTorch's operations: there is no Mojo kernel behind them.
"""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the dtype that is computed in."""
    return x if x.dtype == torch.float64 else x.float()


@torch.library.custom_op("mojo_workbook::silu", mutates_args=())
def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of any shape. Raises TypeError where x is no floating point."""
    check(x)
    y = wide(x)
    return (y * torch.sigmoid(y)).to(x.dtype, memory_format=torch.contiguous_format).contiguous()


@torch.library.custom_op("mojo_workbook::silu_backward", mutates_args=())
def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx = dy s (1 + x (1 - s)), where s = sigmoid(x)."""
    y = wide(x)
    s = torch.sigmoid(y)
    return (wide(dy) * s * (1 + y * (1 - s))).to(x.dtype).contiguous()


@silu.register_fake
def fake_silu(x: Tensor) -> Tensor:
    """Shape and dtype, for a compiler."""
    check(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@silu_backward.register_fake
def fake_silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Shape and dtype, for a compiler."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check(x: Tensor) -> None:
    """Raises TypeError where x is no floating point."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"x: expected a floating dtype, got {x.dtype}")


def keep(ctx, inputs, output) -> None:
    """Keeps x."""
    ctx.save_for_backward(*inputs)


def backward(ctx, dy: Tensor) -> Tensor:
    """dx from dy and what was kept."""
    return silu_backward(dy, *ctx.saved_tensors)


def refuse(ctx, grad: Tensor) -> Tensor:
    """Says that there is no second derivative."""
    raise NotImplementedError("mojo_workbook::silu has no second derivative")


silu.register_autograd(backward, setup_context=keep)
silu_backward.register_autograd(refuse)
