"""SiLU as an operator of the workbook, `mojo_workbook::silu`, with its backward pass: what a graph rewrite
inserts.

On a GPU it runs the Mojo kernels of `solutions/p26/op`, as MAX graphs on the memory of the torch tensors; in
float64 results have 13 digits, as Mojo's exp does. On a CPU it runs PyTorch's own operations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.devices.on_max import Graphs
from harness.nn.arguments import DTYPES
from harness.spec.ops import Argument, OpSpec

VECTOR = Argument(("size",))
FORWARD = OpSpec("silu_train", writes={"output": VECTOR}, reads={"input": VECTOR})
BACKWARD = OpSpec(
    "silu_train_backward",
    writes={"grad_input": VECTOR},
    reads={"grad_output": VECTOR, "input": VECTOR},
)
NAME = "mojo_workbook::silu"
GRAPHS = Graphs("p26", NAME, (FORWARD, BACKWARD))
LARGEST = 2**31 - 1
"""Elements of a tensor, at most: the kernels count them as Int32."""


@torch.library.custom_op(NAME, mutates_args=())
def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x), of any shape. Raise TypeError for a dtype without kernel, ValueError for too many
    elements."""
    return launch(FORWARD, torch.ops.aten.silu, silu_buffer(x), x)


@silu.register_fake
def silu_buffer(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(DTYPES.values())}, got {x.dtype}")
    if x.numel() > LARGEST:
        raise ValueError(f"x: expected at most {LARGEST} elements, got shape {list(x.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("mojo_workbook::silu_backward", mutates_args=())
def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx = dy s (1 + x (1 - s)), where s = sigmoid(x)."""
    return launch(BACKWARD, torch.ops.aten.silu_backward, silu_buffer(x), dy, x)


@silu_backward.register_fake
def dx_buffer(dy: Tensor, x: Tensor) -> Tensor:
    return silu_buffer(x)


def launch(op: OpSpec, plain: Callable[..., Tensor], output: Tensor, *tensors: Tensor) -> Tensor:
    """Fill the output by one op, on a CPU by the function `plain`; all tensors have the same shape."""
    if output.device.type == "cpu":
        return output.copy_(plain(*tensors))
    if output.numel():
        GRAPHS.run(op, [tensor.reshape(-1) for tensor in (output, *tensors)])
    return output


def keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, dy: Tensor) -> Tensor:
    return silu_backward(dy, *ctx.saved_tensors)


def refuse(ctx, grad: Tensor) -> Tensor:
    """Raise an error: there is no second derivative."""
    raise NotImplementedError(f"{NAME} has no second derivative")


silu.register_autograd(backward, setup_context=keep)
silu_backward.register_autograd(refuse)
