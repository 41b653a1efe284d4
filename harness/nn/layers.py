"""LayerNorm followed by Linear as one differentiable function and one module, for models that are really trained.

On a GPU a plain call goes straight to the extension module: the dispatch of a registered operator would cost more host time than
the launches. Every other call goes through the operators of `harness.nn.autograd`.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from harness.nn import extension_kernels, layernorm_direct
from harness.nn.arguments import check_tensor, in_autocast_dtype
from harness.nn.autograd import (
    check,
    layernorm_linear,
    layernorm_linear_backward,
    only,
    wanted_of,
    with_absent,
)
from harness.nn.extension_kernels import PLAIN, applied
from harness.nn.layernorm_ops import EPS
from harness.nn.layernorm_plan import AUTO, LEAST, MEMORY, Plan, make_plan
from harness.nn.private import any_autocast, dispatch_modes, transforms_active

Tensor = torch.Tensor


def fused_layernorm_linear(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float = EPS,
    *,
    algorithm: str = "fast",
    memory: str = AUTO,
) -> Tensor:
    """`linear(layer_norm(x))` with hand-written Mojo kernels for the forward and the backward pass.

    For the backward pass it keeps x, the parameters and two numbers for each row; the LayerNorm output is
    computed again. Within torch.func's transforms and in forward mode PyTorch's own operations compute it, at
    any order. Under `torch.autocast` it computes in the autocast dtype, with statistics in float32. On a GPU,
    torch's own flag for matrix products in TF32 holds here too.

    The first call on a GPU builds a module for it, which takes a minute or two; `workbook build-ext` does so
    ahead of time. Anywhere else, and where that fails, the first call with a dtype compiles a MAX graph for ten seconds
    and more. Both are cached on disk.

    Args:
        x: Shape [..., H], H >= 1; float32, float64, bfloat16 or float16, on a CPU or a CUDA or ROCm GPU. The
            leading dimensions are free, and may be zero.
        ln_weight: gamma, [H], or None for ones.
        ln_bias: beta, [H], or None for zeros.
        linear_weight: [O, H], O >= 1.
        linear_bias: [O], or None for zeros.
        eps: Added to the variance, inside the root.
        algorithm: "fast" is meant for real models: vectorised row kernels and tensor cores, launched on torch's
            stream, so that CUDA graphs can capture them. "unfused" launches a kernel for each step of the maths.
            "pairs" is "fast", but for float32 on a Hopper: each of its products is three of float16, in 0.3 to 0.4 of the
            time and with more scratch memory. Its errors are PyTorch's own where sums have some hundred terms, and smaller where they have
            more. H and O must be multiples of 8.
            "fused" is the chapter's single kernel: one thread for each row, parameter gradients by atomics on a GPU.
            All but "fused" give the same bits in every run; a CUDA graph may multiply otherwise than plain calls (see
            `LayerNormLinear.explain`), and then has bits of its own.
        memory: Of the extension module. "auto" makes dln and dW side by side, and dW first where there is no room for that.
            "least" makes dW first, and gives the memory of the LayerNorm output back before it makes dln: one matrix
            of x's size less at the peak. It sums over rows in fewer shares, with other rounding, and reads x, dln
            and dY once more. In 16 bits it copies no rows that are not aligned, so where H or O is no multiple of 8
            the library's products take longer.

    Returns:
        Shape [..., O], contiguous, in x's dtype.

    Raises:
        TypeError: An argument is no dense tensor, eps is no number, x has a dtype without a kernel, or a parameter has
            another dtype.
        ValueError: A rank or a size does not fit the others, H or O is zero, tensors lie on different devices, or
            the algorithm or the choice of memory is unknown.
        NotImplementedError: x lies on a device without a kernel (MPS), or its gradient is differentiated again.
        RuntimeError: A CUDA graph is being captured, and not the fast algorithm's extension module is used; or the
            process was forked from one that had used the layer on a CPU.
        torch.OutOfMemoryError: There is no room on the GPU; the message says how many bytes were needed.
        harness.errors.WorkbookError: The kernels cannot be compiled, or the cache folder cannot be written.
    """
    tensors = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    if type(eps) is not float:
        check_eps(eps)
    compiling = torch.compiler.is_compiling()
    if compiling or any_autocast() or type(x) not in PLAIN:
        check_types(*tensors)
        tensors = in_autocast_dtype(tensors)
    if forward_ad._current_level >= 0 or transforms_active():
        check_types(*tensors)
        check(*tensors, eps, algorithm, memory)
        x, ln_weight, ln_bias, linear_weight, linear_bias = tensors
        return F.linear(F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps), linear_weight, linear_bias)
    if not compiling:
        output = layernorm_linear_directly(*tensors, eps, algorithm, memory)
        if output is not None:
            return output
    check_types(*tensors)
    output, _ = layernorm_linear(*tensors, eps, algorithm, memory)
    return output


# ---- The direct way -----------------------------------------------------------------------------------------


class DirectLayerNormLinear(torch.autograd.Function):
    """One pass each way through the extension module, between tensors on one GPU."""

    @staticmethod
    def forward(ctx, x, ln_weight, ln_bias, linear_weight, linear_bias, call):
        eps, ctx.plan, ctx.kernels = call
        output, statistics = ctx.kernels.forward(
            ctx.plan, eps, True, x, ln_weight, ln_bias, linear_weight, linear_bias
        )
        ctx.save_for_backward(x, statistics, ln_weight, ln_bias, linear_weight)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        needed = ctx.needs_input_grad
        wanted = wanted_of(needed)
        if torch.is_grad_enabled():  # create_graph=True: the operator is there to refuse a second derivative
            asked = "pairs" if ctx.plan.pairs else "fast", LEAST if ctx.plan.lean else AUTO
            gradients = layernorm_linear_backward(grad_output, *ctx.saved_tensors, wanted, *asked)
            return (*only(gradients, needed), None)
        grad_output = grad_output.resolve_neg()
        dx, dgamma, dbeta, dW, db = ctx.kernels.backward(ctx.plan, wanted, grad_output, *ctx.saved_tensors)
        return dx, dgamma if needed[1] else None, dbeta if needed[2] else None, dW, db, None


apply_directly = applied(DirectLayerNormLinear)


def layernorm_linear_directly(
    x: Tensor,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float,
    algorithm: str = "fast",
    memory: str = AUTO,
) -> Tensor | None:
    """The output [..., O] by the direct way; None where the registered operator must do it, or must say what is wrong.

    Those are: an algorithm that the module does not have, no module for x's device, tensors on different devices, subclasses of Tensor,
    views that negate, and torch's modes that watch operators.
    """
    if not (
        algorithm in layernorm_direct.THROUGH_MODULE
        and memory in MEMORY
        and type(x) in PLAIN
        and x.layout is torch.strided
        and type(linear_weight) in PLAIN
        and dispatch_modes() == 0
    ):
        return None
    index = x.get_device()
    kernels = layernorm_direct.kernels.table.get(index)
    if kernels is None and x.device.type != extension_kernels.DEVICE:
        return None
    if ln_weight is None or ln_bias is None or linear_bias is None:
        _, ln_weight, ln_bias, _, linear_bias = with_absent(x, ln_weight, ln_bias, linear_weight, linear_bias)
    if not (
        type(ln_weight) in PLAIN
        and type(ln_bias) in PLAIN
        and type(linear_bias) in PLAIN
        and index
        == ln_weight.get_device()
        == ln_bias.get_device()
        == linear_weight.get_device()
        == linear_bias.get_device()
        and not (
            x.is_neg()
            or ln_weight.is_neg()
            or ln_bias.is_neg()
            or linear_weight.is_neg()
            or linear_bias.is_neg()
        )
    ):
        return None
    tensors = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    if kernels is None:
        check(*tensors, eps, algorithm)  # a call that is wrong does not wait for the module to be built
        kernels = layernorm_direct.kernels(x.device)
        if kernels is None:
            return None
    planned = checked_plan(
        layernorm_direct.lies_transposed(linear_weight),
        kernels.hopper,
        algorithm,
        memory,
        x.shape,
        ln_weight.shape,
        ln_bias.shape,
        linear_weight.shape,
        linear_bias.shape,
        x.dtype,
        ln_weight.dtype,
        ln_bias.dtype,
        linear_weight.dtype,
        linear_bias.dtype,
    )
    if planned is None:
        return None
    if torch.is_grad_enabled() and (
        x.requires_grad
        or linear_weight.requires_grad
        or ln_weight.requires_grad
        or ln_bias.requires_grad
        or linear_bias.requires_grad
    ):
        return apply_directly(*tensors, (eps, planned, kernels))
    return kernels.forward(planned, eps, False, *tensors)[0]


@functools.lru_cache(maxsize=4096)
def checked_plan(transposed: bool, hopper: bool, algorithm: str, memory: str, *facts) -> Plan | None:
    """The plan for tensors of these `facts`, five shapes and five dtypes; None where `check` has something against them."""
    shapes, dtypes = facts[:5], facts[5:]
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    try:
        check(*tensors, eps=EPS, algorithm=algorithm)
    except (TypeError, ValueError):
        return None
    x, *_, linear_weight, _ = shapes
    return make_plan(x, linear_weight[0], dtypes[0], transposed, hopper, algorithm, memory)


# ---- The module ---------------------------------------------------------------------------------------------


class LayerNormLinear(nn.Module):
    """Takes the place of `nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))`.

    The two layers are its children "0" and "1", as in the Sequential: a state dict fits both ways, the same seed
    gives the same parameters, and code that looks for `nn.LayerNorm` and `nn.Linear` finds them. They only hold the
    parameters; `forward` runs `fused_layernorm_linear`, so hooks on the children do not fire.

    Args:
        in_features: H.
        out_features: O.
        eps: As in `nn.LayerNorm`.
        elementwise_affine: Whether LayerNorm has a weight, and a bias if `ln_bias` says so.
        ln_bias: Whether LayerNorm has a bias.
        bias: Whether Linear has a bias.
        algorithm, memory: As in `fused_layernorm_linear`.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = EPS,
        elementwise_affine: bool = True,
        ln_bias: bool = True,
        bias: bool = True,
        algorithm: str = "fast",
        memory: str = AUTO,
        device=None,
        dtype=None,
    ):
        super().__init__()
        ln = nn.LayerNorm(in_features, eps, elementwise_affine, ln_bias, device=device, dtype=dtype)
        linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.algorithm, self.memory = algorithm, memory
        self.add_module("0", ln)
        self.add_module("1", linear)

    @classmethod
    def from_modules(
        cls, ln: nn.LayerNorm, linear: nn.Linear, *, algorithm: str = "fast", memory: str = AUTO
    ) -> "LayerNormLinear":
        """A layer around two existing ones. It shares them: an optimizer that holds their parameters goes on.

        Raises TypeError where they are no LayerNorm and Linear, ValueError where their sizes do not fit.
        """
        if not isinstance(ln, nn.LayerNorm):
            raise TypeError(f"ln: expected nn.LayerNorm, got {type(ln).__name__}")
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected nn.Linear, got {type(linear).__name__}")
        if tuple(ln.normalized_shape) != (linear.in_features,):
            raise ValueError(
                f"ln: expected normalized_shape ({linear.in_features},), the in_features of linear, "
                f"got {tuple(ln.normalized_shape)}"
            )
        sizes = linear.in_features, linear.out_features
        layer = cls(*sizes, algorithm=algorithm, memory=memory, device="meta")
        layer.training = ln.training
        layer.add_module("0", ln)
        layer.add_module("1", linear)
        return layer

    @property
    def ln(self) -> nn.LayerNorm:
        """The child that holds gamma, beta and eps."""
        return getattr(self, "0")

    @property
    def linear(self) -> nn.Linear:
        """The child that holds the linear weight and bias."""
        return getattr(self, "1")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] to [..., O]; see `fused_layernorm_linear` for dtypes, devices and errors."""
        children: dict[str, Any] = (
            self._modules
        )  # past nn.Module's attribute look-up, which takes a microsecond
        ln, linear = children["0"], children["1"]
        return fused_layernorm_linear(
            x,
            parameter(ln, "weight"),
            parameter(ln, "bias"),
            parameter(linear, "weight"),
            parameter(linear, "bias"),
            ln.eps,
            algorithm=self.algorithm,
            memory=self.memory,
        )

    def explain(self, x: Tensor) -> dict[str, str]:
        """What multiplies for an input like x, and the way to it, as calls ask too: it may build the extension module, and launches
        nothing else.

        "way" is the extension module or a MAX graph, with its algorithm. "output", "dln" and "dW" are the three products,
        Y = ln_out W^T, dln = dY W and dW = dY^T ln_out: each "own" where this project's kernel multiplies, "library" where
        torch's does, between this project's row kernels, or "library on padded rows". Where a call that a CUDA graph
        captures is multiplied otherwise, there are the same keys with " in a CUDA graph" behind them; "backward in a CUDA
        graph" is "two branches" where dW is made beside all the rest there.
        """
        weight = parameter(self.linear, "weight")
        dtype = in_autocast_dtype((x.new_empty(0),))[0].dtype
        return layernorm_direct.way(x, dtype, weight, self.algorithm, self.memory).explain()

    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}, memory={self.memory!r}"


def parameter(module: nn.Module, name: str) -> Any:
    """A module's parameter, without the microsecond of nn.Module's attribute look-up where it is a plain one."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


# ---- Checks -------------------------------------------------------------------------------------------------


def check_types(*tensors: Tensor | None) -> None:
    """Raises TypeError, naming the argument, for what is no tensor; three of the five may be None."""
    check_dense_tensors(dict(zip(NAMES, tensors, strict=True)), OPTIONAL)


def check_dense_tensors(named: dict[str, Any], optional: tuple[str, ...]) -> None:
    """Raises TypeError, naming the argument, for what is no dense tensor; the `optional` ones may be None."""
    for name, value in named.items():
        if value is not None or name not in optional:
            check_tensor(name, value, "the kernels read plain memory")


def check_eps(eps: float) -> None:
    """Raises TypeError for what is no number."""
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")


NAMES = ("x", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
OPTIONAL = ("ln_weight", "ln_bias", "linear_bias")
