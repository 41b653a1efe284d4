"""LayerNorm + Linear as PyTorch operators: the solution kernels behind `torch.library`, with their gradients.

Two operators are registered. `mojo_workbook::layernorm_linear` returns the output and the statistics of every row;
`mojo_workbook::layernorm_linear_backward` returns the gradients. Between them autograd keeps the input, gamma, beta,
the linear weight, mean and rstd; the LayerNorm output is computed again.

There are two ways to the kernels. The fast algorithm on a GPU goes through an extension module (`harness.nn.layernorm_direct`), which
launches on torch's stream. Everything else runs as a MAX graph (`harness.nn.on_max`). `harness.nn.layers` has the function and the
module to call, which goes to the extension module past these operators where it can.
"""

import torch

from harness.nn import layernorm_direct
from harness.nn.arguments import check_device, check_dtype, check_has_kernels, wide
from harness.nn.derivatives import FirstOnly
from harness.nn.layernorm_direct import ALL_GRADIENTS, BIAS, INPUT, NORM, WEIGHT, Gradients
from harness.nn.layernorm_ops import BACKWARD, FORWARD
from harness.nn.layernorm_plan import AUTO, MEMORY
from harness.nn.on_max import Graphs
from harness.nn.operators import registered

THROUGH_MAX = ("unfused", "fused")
"""The algorithms that MAX graphs have."""
ALGORITHMS = (*THROUGH_MAX, "fast", "pairs")
GRAPHS = Graphs(
    "p22",
    "fused_layernorm_linear",
    (FORWARD, BACKWARD),
    ', or use algorithm="fast", whose extension module can be captured',
)

Tensor = torch.Tensor


# ---- The operators ------------------------------------------------------------------------------------------


@registered(
    "layernorm_linear",
    "(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight, Tensor? linear_bias, float eps,"
    f' str algorithm, str memory="{AUTO}") -> (Tensor, Tensor)',
    check=lambda *arguments: check(*arguments),  # which stands below
)
def layernorm_linear(
    x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory=AUTO
) -> tuple[Tensor, Tensor]:
    """Returns output [..., O], and mean and rstd of the rows of x [..., H] as [2, ...], in float32 or wider.

    Raises TypeError, ValueError or NotImplementedError where `check` does.
    """
    tensors = with_absent(x, ln_weight, ln_bias, linear_weight, linear_bias)
    algorithm, kernels, plan = layernorm_direct.way(x, x.dtype, linear_weight, algorithm, memory)
    if kernels and plan:
        output, statistics = kernels.forward(plan, eps, True, *tensors)
        assert statistics is not None  # they are to be kept
        return output, statistics
    H, O = x.shape[-1], linear_weight.shape[0]
    output, statistics = forward_buffers(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm)
    rows = statistics[0].numel()
    if rows:
        written = output.view(rows, 1, O), *statistics.view(2, rows, 1)
        given = (*written, x.reshape(rows, 1, H), *tensors[1:])
        GRAPHS.run(FORWARD, given, eps, algorithm=algorithm)
    return output, statistics


def with_absent(x, ln_weight, ln_bias, linear_weight, linear_bias) -> tuple[Tensor, ...]:
    """The arguments with ones and zeros in the place of absent parameters; sizes need not fit yet."""
    H, O = x.shape[-1:], linear_weight.shape[:1]
    return (
        x,
        x.new_ones(H) if ln_weight is None else ln_weight,
        x.new_zeros(H) if ln_bias is None else ln_bias,
        linear_weight,
        x.new_zeros(O) if linear_bias is None else linear_bias,
    )


@layernorm_linear.register_fake
def forward_buffers(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory=AUTO):
    """Checks the arguments and allocates what the forward operator returns."""
    check(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory)
    output = x.new_empty((*x.shape[:-1], linear_weight.shape[0]))
    return output, x.new_empty((2, *x.shape[:-1]), dtype=wide(x.dtype))


@registered(
    "layernorm_linear_backward",
    "(Tensor grad_output, Tensor x, Tensor statistics, Tensor? ln_weight, Tensor? ln_bias, Tensor linear_weight,"
    f' SymInt wanted, str algorithm, str memory="{AUTO}") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def layernorm_linear_backward(
    grad_output, x, statistics, ln_weight, ln_bias, linear_weight, wanted, algorithm, memory=AUTO
):
    """Returns dx [..., H], dgamma [H], dbeta [H], dW [O, H] and db [O] from grad_output [..., O].

    Those that `wanted` leaves out, a sum of WEIGHT (dW), BIAS (db), INPUT (dx) and NORM (dgamma and dbeta), are empty. The
    extension module does not compute them.
    """
    H, O = x.shape[-1], linear_weight.shape[0]
    ln_weight = x.new_ones(H) if ln_weight is None else ln_weight
    ln_bias = x.new_zeros(H) if ln_bias is None else ln_bias
    algorithm, kernels, plan = layernorm_direct.way(x, x.dtype, linear_weight, algorithm, memory)
    if kernels and plan:
        tensors = (grad_output, x, statistics, ln_weight, ln_bias, linear_weight)
        return pruned(kernels.backward(plan, wanted, *tensors), wanted, x)
    gradients = backward_buffers(
        grad_output, x, statistics, ln_weight, ln_bias, linear_weight, ALL_GRADIENTS, algorithm
    )
    rows = statistics[0].numel()
    if not rows:
        return pruned([gradient.zero_() for gradient in gradients], wanted, x)
    dx, *of_parameters = gradients
    written = dx.view(rows, 1, H), *of_parameters
    read = grad_output.reshape(rows, 1, O), x.reshape(rows, 1, H), *statistics.reshape(2, rows, 1)
    GRAPHS.run(BACKWARD, (*written, *read, ln_weight, ln_bias, linear_weight), algorithm=algorithm)
    return pruned(gradients, wanted, x)


@layernorm_linear_backward.register_fake
def backward_buffers(
    grad_output, x, statistics, ln_weight, ln_bias, linear_weight, wanted, algorithm, memory=AUTO
):
    """Allocates what the backward operator returns; dW lies as the weight does, row by row or transposed."""
    O, H = linear_weight.shape
    dW = x.new_empty((H, O)).t() if layernorm_direct.lies_transposed(linear_weight) else x.new_empty((O, H))
    return pruned((x.new_empty(x.shape), x.new_empty(H), x.new_empty(H), dW, x.new_empty(O)), wanted, x)


def pruned(
    gradients: Gradients | list[Tensor], wanted: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five gradients, with an empty tensor in the place of each that is not wanted."""
    bits = (INPUT, NORM, NORM, WEIGHT, BIAS)
    dx, dgamma, dbeta, dW, db = (
        gradient if wanted & bit and gradient is not None else like.new_empty(0)
        for bit, gradient in zip(bits, gradients, strict=True)
    )
    return dx, dgamma, dbeta, dW, db


def keep_for_backward(ctx, inputs, output):
    """Keeps five tensors; the statistics are no differentiable outputs."""
    x, ln_weight, ln_bias, linear_weight, _, _, ctx.algorithm, ctx.memory = inputs
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(x, statistics, ln_weight, ln_bias, linear_weight)


def backward(ctx, grad_output, grad_statistics):
    """The gradient of every input of the forward operator, None where none is needed."""
    needed = ctx.needs_input_grad
    wanted = wanted_of(needed)
    gradients = layernorm_linear_backward(grad_output, *ctx.saved_tensors, wanted, ctx.algorithm, ctx.memory)
    return (*only(gradients, needed), None, None, None)


def wanted_of(needed: tuple[bool, ...]) -> int:
    """Which gradients are wanted, from whether each input of the forward pass needs one; dgamma and dbeta go together."""
    return (
        (INPUT if needed[0] else 0)
        | (NORM if needed[1] or needed[2] else 0)
        | (WEIGHT if needed[3] else 0)
        | (BIAS if needed[4] else 0)
    )


def only(gradients, needed) -> list[Tensor | None]:
    """The gradients that are needed, None in the place of the others."""
    return [gradient if need else None for gradient, need in zip(gradients, needed, strict=False)]


FIRST_ONLY = FirstOnly("fused_layernorm_linear", "torch.nn.functional.layer_norm and linear")
layernorm_linear.register_autograd(backward, setup_context=keep_for_backward)
layernorm_linear_backward.register_autograd(FIRST_ONLY.refuse_double_backward)


# ---- Checks -------------------------------------------------------------------------------------------------


def check(x, ln_weight, ln_bias, linear_weight, linear_bias, eps, algorithm, memory=AUTO) -> None:
    """Raises where the forward operator cannot take its arguments; the message names the first one at fault.

    Raises:
        TypeError: A dtype that has no kernel, or that is not x's.
        ValueError: A rank or size that does not fit the others, H or O of zero, an unknown algorithm or memory, tensors
            on different devices.
        NotImplementedError: A device that has no kernel.
    """
    check_algorithm(algorithm)
    check_memory(memory)
    check_has_kernels("x", x)
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


def check_algorithm(algorithm: str) -> None:
    """Raises ValueError for an algorithm that there is not."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected {' or '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")


def check_memory(memory: str) -> None:
    """Raises ValueError for a choice of memory that there is not."""
    if memory not in MEMORY:
        raise ValueError(f"memory: expected {' or '.join(map(repr, MEMORY))}, got {memory!r}")


def check_parameter(name: str, tensor: Tensor, rank: int, x: Tensor) -> None:
    """Raises where a parameter's dtype, device or rank is not what x makes it."""
    check_dtype(name, tensor, "x", x)
    check_device(name, tensor, "x", x)
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
