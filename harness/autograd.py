"""LayerNorm + Linear as PyTorch operators: the solution kernels behind `torch.library`, with their gradients.

Two operators are registered. `mojo_workbook::layernorm_linear` returns the output and the statistics of every row;
`mojo_workbook::layernorm_linear_backward` returns all five gradients. Between them autograd keeps the input, gamma,
beta, the linear weight, mean and rstd; the LayerNorm output is computed again. Both run as one MAX graph on the
memory of the torch tensors, without a copy. A graph is compiled when a dtype is first used on a device: ten seconds
and more, once, for it is cached. `harness.layers` has the function and the module to call.
"""

import functools
import threading

import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count

from harness.devices.graphs import Call, Program, load_each
from harness.puzzles.p22 import BACKWARD, FORWARD
from harness.roots import op_package, solutions

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
ALGORITHMS = ("unfused", "fused")

Tensor = torch.Tensor


# ---- The operators ------------------------------------------------------------------------------------------


@torch.library.custom_op("mojo_workbook::layernorm_linear", mutates_args=())
def layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output [..., O], and mean and rstd [...] of the rows of x [..., H], in float32 or wider.

    Raises TypeError, ValueError or NotImplementedError where `check` does.
    """
    output, mean, rstd = forward_buffers(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm)
    rows = mean.numel()
    if rows:
        H, O = x.shape[-1], linear_weight.shape[0]
        arguments = {
            "output": output.view(rows, 1, O),
            "mean": mean.view(rows, 1),
            "rstd": rstd.view(rows, 1),
            "input": x.reshape(rows, 1, H),
            "ln_weight": x.new_ones(H) if ln_weight is None else ln_weight,
            "ln_bias": x.new_zeros(H) if ln_bias is None else ln_bias,
            "linear_weight": linear_weight,
            "linear_bias": x.new_zeros(O) if linear_bias is None else linear_bias,
            "eps": torch.tensor(eps, dtype=torch.float64),
        }
        run(program("forward", algorithm, x.dtype, x.device), arguments, x.device)
    return output, mean, rstd


@layernorm_linear.register_fake
def forward_buffers(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm):
    """Checks the arguments and allocates what the forward operator returns."""
    check(x, ln_weight, ln_bias, linear_weight, linear_bias, algorithm)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty((*x.shape[:-1], linear_weight.shape[0])),
        x.new_empty(x.shape[:-1], dtype=wide),
        x.new_empty(x.shape[:-1], dtype=wide),
    )


@torch.library.custom_op("mojo_workbook::layernorm_linear_backward", mutates_args=())
def layernorm_linear_backward(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dx [..., H], dgamma [H], dbeta [H], dW [O, H] and db [O] from grad_output [..., O].

    The kernels compute all five, also those of a parameter that is absent or needs no gradient.
    """
    gradients = backward_buffers(grad_output, x, mean, rstd, ln_weight, ln_bias, linear_weight, algorithm)
    rows = mean.numel()
    if not rows:
        return tuple(gradient.zero_() for gradient in gradients)
    H, O = x.shape[-1], linear_weight.shape[0]
    arguments = {
        **dict(zip(BACKWARD.writes, gradients, strict=True)),
        "grad_input": gradients[0].view(rows, 1, H),
        "grad_output": grad_output.reshape(rows, 1, O),
        "input": x.reshape(rows, 1, H),
        "mean": mean.reshape(rows, 1),
        "rstd": rstd.reshape(rows, 1),
        "ln_weight": x.new_ones(H) if ln_weight is None else ln_weight,
        "ln_bias": x.new_zeros(H) if ln_bias is None else ln_bias,
        "linear_weight": linear_weight,
    }
    run(program("backward", algorithm, x.dtype, x.device), arguments, x.device)
    return gradients


@layernorm_linear_backward.register_fake
def backward_buffers(grad_output, x, mean, rstd, ln_weight, ln_bias, linear_weight, algorithm):
    """Allocates what the backward operator returns."""
    O, H = linear_weight.shape
    return x.new_empty(x.shape), x.new_empty(H), x.new_empty(H), x.new_empty((O, H)), x.new_empty(O)


def keep_for_backward(ctx, inputs, output):
    """Keeps six tensors; the statistics are no differentiable outputs."""
    x, ln_weight, ln_bias, linear_weight, _, _, ctx.algorithm = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, mean, rstd, ln_weight, ln_bias, linear_weight)


def backward(ctx, grad_output, grad_mean, grad_rstd):
    """The gradient of every input of the forward operator, None where none is needed."""
    gradients = layernorm_linear_backward(grad_output, *ctx.saved_tensors, ctx.algorithm)
    needed = [
        gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False)
    ]
    return (*needed, None, None)


def refuse_double_backward(ctx, *grads):
    """Raises: the gradients have no gradient."""
    raise NotImplementedError(
        "fused_layernorm_linear has no double backward: its gradients cannot be differentiated again; "
        "use torch.nn.functional.layer_norm and linear where a second derivative is needed"
    )


layernorm_linear.register_autograd(backward, setup_context=keep_for_backward)
layernorm_linear_backward.register_autograd(refuse_double_backward)


# ---- Checks -------------------------------------------------------------------------------------------------


def check(x, ln_weight, ln_bias, linear_weight, linear_bias, algorithm) -> None:
    """Raises where the forward operator cannot take its arguments; the message names the first one at fault.

    Raises:
        TypeError: A dtype that has no kernel, or that is not x's.
        ValueError: A rank or size that does not fit the others, H or O of zero, an unknown algorithm, tensors on
            different devices.
        NotImplementedError: A device that has no kernel.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected {' or '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected {', '.join(DTYPES.values())}, got {plain(x.dtype)}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"x: expected a tensor on a CPU or a CUDA or ROCm GPU, got one on {x.device}, which has no kernel; "
            "move the layer and its input, or use torch.nn.LayerNorm and Linear there"
        )
    if x.dim() < 1:
        raise ValueError("x: expected at least one dimension, [..., H], got a scalar")
    parameters = {
        "ln_weight": (ln_weight, 1),
        "ln_bias": (ln_bias, 1),
        "linear_weight": (linear_weight, 2),
        "linear_bias": (linear_bias, 1),
    }
    for name, (tensor, rank) in parameters.items():
        if tensor is not None:
            check_parameter(name, tensor, rank, x)
    check_sizes(x, ln_weight, ln_bias, linear_weight, linear_bias)


def check_parameter(name: str, tensor: Tensor, rank: int, x: Tensor) -> None:
    """Raises where a parameter's dtype, device or rank is not what x makes it."""
    if tensor.dtype != x.dtype:
        raise TypeError(f"{name}: expected {plain(x.dtype)}, the dtype of x, got {plain(tensor.dtype)}")
    if tensor.device != x.device:
        raise ValueError(
            f"{name}: expected a tensor on {x.device}, the device of x, got one on {tensor.device}"
        )
    if tensor.dim() != rank:
        expected = "[O, H]" if rank == 2 else "a vector"
        raise ValueError(f"{name}: expected {expected}, got shape {list(tensor.shape)}")


def check_sizes(x, ln_weight, ln_bias, linear_weight, linear_bias) -> None:
    """Raises where H or O differs between tensors or is zero."""
    H, O = x.shape[-1], linear_weight.shape[0]
    if H < 1:
        raise ValueError(f"x: expected H >= 1, the size of the last dimension, got shape {list(x.shape)}")
    if O < 1:
        raise ValueError(f"linear_weight: expected O >= 1 rows, got shape {list(linear_weight.shape)}")
    for name, tensor in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        if tensor is not None and tensor.shape[0] != H:
            raise ValueError(f"{name}: expected {H} elements, the last dimension of x, got {tensor.shape[0]}")
    if linear_weight.shape[1] != H:
        raise ValueError(
            f"linear_weight: expected shape [O, {H}], {H} being the last dimension of x, "
            f"got {list(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape[0] != O:
        raise ValueError(
            f"linear_bias: expected {O} elements, the rows of linear_weight, got {linear_bias.shape[0]}"
        )


def plain(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


# ---- Running on MAX -----------------------------------------------------------------------------------------

programs: dict[tuple, dict[str, Program]] = {}
compiling = threading.Lock()


def program(direction: str, algorithm: str, dtype: torch.dtype, device: torch.device) -> Program:
    """The compiled graph of one operator, "forward" or "backward".

    Both are compiled together, by the first thread that asks for either while the others wait.
    """
    key = (algorithm, dtype, device)
    if key not in programs:
        with compiling:
            if key not in programs:
                parameters = (("algorithm", algorithm),)
                graphs = {"forward": (Call(FORWARD, parameters),), "backward": (Call(BACKWARD, parameters),)}
                programs[key] = load_each(package(), graphs, DTYPES[dtype], max_device(device))
    return programs[key][direction]


@functools.cache
def package():
    """The solution's kernels: a learner's never stand behind the layer."""
    return op_package(solutions(), "p22")


def max_device(device: torch.device) -> Device:
    """MAX's device for torch's. Raises RuntimeError where MAX does not see the GPU that torch sees."""
    if device.type == "cpu":
        return CPU()
    if device.index >= accelerator_count():
        raise RuntimeError(
            f"x is on {device}, but MAX sees {accelerator_count()} GPUs; is the driver too old?"
        )
    return Accelerator(device.index)


def run(program: Program, arguments: dict[str, Tensor], device: torch.device) -> None:
    """Runs a program on torch tensors, in the order of torch's current stream."""
    # MAX takes no strides and no tensor that asks for a gradient.
    tensors = {name: tensor.detach().contiguous() for name, tensor in arguments.items()}
    if device.type == "cpu":
        execute(program, tensors)
        return
    refuse_capture()
    with torch.cuda.device(device):
        run_in_stream_order(program, tensors, device)


def run_in_stream_order(program: Program, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Makes MAX wait for torch's current stream, and that stream for MAX.

    MAX launches on a stream of its own, which is ordered with torch's default stream only. From any other stream
    the kernels would read inputs that are not written yet, without an error; so work goes through the default
    stream there and back. `record_stream` keeps torch's allocator from lending the memory out again while MAX
    still uses it.
    """
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if current == default:
        execute(program, tensors)
        return
    default.wait_stream(current)
    with torch.cuda.stream(default):
        execute(program, tensors)
    current.wait_stream(default)
    for tensor in tensors.values():
        if tensor.is_cuda:
            tensor.record_stream(default)


def execute(program: Program, tensors: dict[str, Tensor]) -> None:
    """Runs a program on the memory of the tensors."""
    # MAX takes torch tensors too, but needs 20 us for each to find out that it does.
    program.run({name: Buffer.from_dlpack(tensor) for name, tensor in tensors.items()})


def refuse_capture() -> None:
    """Raises while torch captures a CUDA graph: MAX's stream cannot be captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "fused_layernorm_linear cannot be captured in a CUDA graph, because MAX launches on a stream of its "
            'own; call it outside the capture, or compile without mode="reduce-overhead"'
        )
