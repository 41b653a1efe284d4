"""SiLU as an operator of the workbook's, `mojo_workbook::silu`, with its backward pass: what a rewrite of a graph puts in.

Behind it stand the Mojo kernels of `solutions/p26/op`, as MAX graphs on the memory of the torch tensors. The graphs of all
dtypes on a device are compiled together, when the first one is needed. In float64 results have 13 digits, as Mojo's exp does.
"""

import functools

import torch
from torch import Tensor

from harness.devices.graphs import Program, load_each
from harness.nn.arguments import DTYPES
from harness.nn.on_max import max_device, refuse_after_fork, run
from harness.spec.ops import Argument, Call, OpSpec
from harness.toolchain.roots import op_package, solutions

VECTOR = Argument(("size",))
FORWARD = OpSpec("silu_train", writes={"output": VECTOR}, reads={"input": VECTOR})
BACKWARD = OpSpec(
    "silu_train_backward",
    writes={"grad_input": VECTOR},
    reads={"grad_output": VECTOR, "input": VECTOR},
)
GRAPHS = {f"{op.name} {dtype}": (Call(op),) for op in (FORWARD, BACKWARD) for dtype in DTYPES.values()}
"""What each graph calls, by op and dtype."""
NAME = "mojo_workbook::silu"
LARGEST = 2**31 - 1
"""Elements of a tensor, at most: the kernels count them as Int32."""


@torch.library.custom_op(NAME, mutates_args=())
def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), of any shape. Raises TypeError for a dtype without kernel, ValueError for too many elements."""
    output = silu_buffer(x)
    launch(FORWARD, {"output": output, "input": x})
    return output


@silu.register_fake
def silu_buffer(x: Tensor) -> Tensor:
    """Checks x and allocates the output."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected one of {', '.join(DTYPES.values())}, got {x.dtype}")
    if x.numel() > LARGEST:
        raise ValueError(f"x: expected at most {LARGEST} elements, got shape {list(x.shape)}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("mojo_workbook::silu_backward", mutates_args=())
def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx = dy s (1 + x (1 - s)), where s = sigmoid(x)."""
    dx = silu_buffer(x)
    launch(BACKWARD, {"grad_input": dx, "grad_output": dy, "input": x})
    return dx


@silu_backward.register_fake
def dx_buffer(dy: Tensor, x: Tensor) -> Tensor:
    """Allocates dx."""
    return silu_buffer(x)


def launch(op: OpSpec, tensors: dict[str, Tensor]) -> None:
    """Runs one op on tensors of any shape, all of one."""
    first = next(iter(tensors.values()))
    if first.numel():
        flat = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}
        run(programs(first.device)[f"{op.name} {DTYPES[first.dtype]}"], flat, first.device, NAME)


@functools.cache
def programs(device: torch.device) -> dict[str, Program]:
    """The graphs of both ops in every dtype, "silu_train float32", compiled as one unit."""
    refuse_after_fork(NAME)
    dtypes = {name: name.split()[1] for name in GRAPHS}
    return load_each(op_package(solutions(), "p26"), GRAPHS, dtypes, max_device(device))


def keep(ctx, inputs, output) -> None:
    """Keeps x."""
    ctx.save_for_backward(*inputs)


def backward(ctx, dy: Tensor) -> Tensor:
    """dx from dy and what was kept."""
    return silu_backward(dy, *ctx.saved_tensors)


def refuse(ctx, grad: Tensor) -> Tensor:
    """Says that there is no second derivative."""
    raise NotImplementedError(f"{NAME} has no second derivative")


silu.register_autograd(backward, setup_context=keep)
silu_backward.register_autograd(refuse)
