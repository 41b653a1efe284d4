"""SiLU as an operator for graph rewrites, `mojo_workbook::silu`, with its backward pass.

On a GPU, it runs the Mojo kernels of `solutions/p26/op`; on a CPU, PyTorch's operations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.devices.on_max import OpGraphs
from harness.nn.arguments import DTYPES
from harness.spec.ops import Argument, OpSpec

VECTOR = Argument(("size",))
FORWARD = OpSpec("silu_train", writes={"output": VECTOR}, reads={"input": VECTOR})
BACKWARD = OpSpec(
    "silu_train_backward", writes={"grad_input": VECTOR}, reads={"grad_output": VECTOR, "input": VECTOR}
)
OP_NAME = "mojo_workbook::silu"
GRAPHS = OpGraphs("p26", OP_NAME, (FORWARD, BACKWARD))
MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of a tensor, which the kernels count in an Int32."""


@torch.library.custom_op(OP_NAME, mutates_args=())
def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x). Raises TypeError for an unsupported dtype, ValueError for too many elements."""
    return launch(FORWARD, torch.ops.aten.silu, make_silu_buffer(x), x)


@silu.register_fake
def make_silu_buffer(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(DTYPES.values())}, got {x.dtype}")
    if x.numel() > MAX_ELEMENTS:
        raise ValueError(f"x: expected at most {MAX_ELEMENTS} elements, got shape {list(x.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("mojo_workbook::silu_backward", mutates_args=())
def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx = dy s (1 + x (1 - s)), where s = sigmoid(x)."""
    return launch(BACKWARD, torch.ops.aten.silu_backward, make_silu_buffer(x), dy, x)


@silu_backward.register_fake
def make_dx_buffer(dy: Tensor, x: Tensor) -> Tensor:
    return make_silu_buffer(x)


def launch(op: OpSpec, torch_op: Callable[..., Tensor], output: Tensor, *tensors: Tensor) -> Tensor:
    """Compute the output with `op`, or on a CPU with `torch_op`; all tensors have the same shape."""
    if output.device.type == "cpu":
        return output.copy_(torch_op(*tensors))
    if output.numel():
        GRAPHS.run(op, [tensor.reshape(-1) for tensor in (output, *tensors)])
    return output


def save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, dy: Tensor) -> Tensor:
    return silu_backward(dy, *ctx.saved_tensors)


def raise_no_second_derivative(ctx, grad: Tensor) -> Tensor:
    raise NotImplementedError(f"{OP_NAME} has no second derivative")


silu.register_autograd(backward, setup_context=save_inputs)
silu_backward.register_autograd(raise_no_second_derivative)
