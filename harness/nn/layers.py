"""LayerNorm followed by Linear as one differentiable function and one module, for training.

On an NVIDIA GPU both are the operator `torch.ops.mojo_workbook.layernorm_linear`
(`harness/nn/host/layernorm_linear.cpp`); other devices run PyTorch's own operations.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.nn import host

Tensor = torch.Tensor
LAYER = "layernorm_linear"
EPS = 1e-5
AUTO, LEAST = "auto", "least"
OPTIONS = {"fast": 0, "pairs": 1, AUTO: 0, LEAST: 2}
"""The bits in which the operator takes an algorithm and a choice of memory."""
ALGORITHMS, MEMORY = ("fast", "pairs"), (AUTO, LEAST)
MATMULS = ("own", "library", "library on padded rows")
"""Implementations of a matmul, numbered as in `harness/nn/kernels/layernorm_linear/plan.mojo`."""
TWO_STREAMS = 1 << 6
"""Set in a plan whose backward pass uses two streams."""


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
    """Compute `linear(layer_norm(x))` with hand-written Mojo kernels for the forward and the backward pass.

    It saves x, the parameters and two numbers per row; the backward pass computes the LayerNorm output again.
    Second derivatives, forward mode and torch.func's transforms run PyTorch's own operations. Under
    `torch.autocast` the LayerNorm is computed in float32 and the matmul in the autocast dtype, as in
    PyTorch's own layers. In float32 the matmuls are PyTorch's, with its flag for TF32.

    The first call on a GPU builds the operator and its kernels for the dtype, which takes a minute or two;
    `workbook build-ext` does so ahead of time. Both are cached on disk.

    Args:
        x: Shape [..., H], H >= 1. The kernels take float32, bfloat16 and float16; PyTorch's own operations,
            others. The leading dimensions are free, and may be zero.
        ln_weight: gamma, [H], or None for ones.
        ln_bias: beta, [H], or None for zeros.
        linear_weight: [O, H], O >= 1. It may be transposed, as in GPT-2.
        linear_bias: [O], or None for zeros.
        eps: Added to the variance, inside the root.
        algorithm: "fast", or "pairs" for float32 on a Hopper: each matmul is three of float16, in 0.3 to 0.4
            of the time and with more memory. Its errors are PyTorch's own for sums of some hundred terms, and
            smaller for longer ones. If H or O is not a multiple of 8 it is "fast".
        memory: Of the kernels. "auto" computes dln and dW at the same time, or dW first if memory runs out.
            "least" computes dW first and frees the LayerNorm output before dln is allocated: one matrix of
            x's size less at the peak. It sums over rows in fewer shares, with other rounding, and reads x,
            dln and dY once more. In 16 bits it copies no unaligned rows, so cuBLAS takes longer if H or O is
            not a multiple of 8.

    Returns:
        Shape [..., O], contiguous, in x's dtype, or autocast's. Every run gives the same bits; in a CUDA
        graph other kernels may multiply (see `LayerNormLinear.explain`), with other bits.

    Raises:
        ValueError: H or O is zero, or the algorithm or the choice of memory is unknown.
        TypeError, RuntimeError: What PyTorch's own layers raise for arguments that do not fit.
    """
    options = options_of(algorithm, memory)
    check_sizes(x, linear_weight)
    arguments = x, ln_weight, ln_bias, linear_weight, linear_bias
    if host.load(LAYER, x.device.type):
        return torch.ops.mojo_workbook.layernorm_linear(*arguments, eps, options)
    return with_torch(*arguments, eps)


def with_torch(x, ln_weight, ln_bias, linear_weight, linear_bias, eps: float, options: int = 0) -> Tensor:
    """Compute both layers with PyTorch's own operations."""
    return F.linear(
        F.layer_norm(x, linear_weight.shape[1:], ln_weight, ln_bias, eps), linear_weight, linear_bias
    )


def operator() -> torch._ops.OpOverload:
    """Return the operator, for graphs; without kernels it is PyTorch's own operations."""
    if not host.load(LAYER, host.DEVICE) and not hasattr(torch.ops.mojo_workbook, LAYER):
        tags = (torch.Tag.pt2_compliant_tag,)
        torch.library.define(f"mojo_workbook::{LAYER}", SCHEMA, tags=tags)
        torch.library.impl(f"mojo_workbook::{LAYER}", "CompositeImplicitAutograd", with_torch)
    return torch.ops.mojo_workbook.layernorm_linear.default


SCHEMA = "(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor weight, Tensor? bias, float eps, int options=0) -> Tensor"


def options_of(algorithm: str, memory: str) -> int:
    """Return the operator's options; raise ValueError for an unknown algorithm or choice of memory."""
    for name, value, known in (("algorithm", algorithm, ALGORITHMS), ("memory", memory, MEMORY)):
        if value not in known:
            raise ValueError(f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}")
    return OPTIONS[algorithm] | OPTIONS[memory]


def check_sizes(x: Tensor, linear_weight: Tensor) -> None:
    """Raise ValueError if H or O is zero, which PyTorch's layers accept."""
    if 0 in (*x.shape[-1:], *linear_weight.shape):
        shapes = f"{list(x.shape)} and {list(linear_weight.shape)}"
        raise ValueError(f"x, linear_weight: expected H >= 1 and O >= 1, got shapes {shapes}")


# ---- The module ---------------------------------------------------------------------------------------------


class LayerNormLinear(nn.Module):
    """Replaces `nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))`.

    The two layers are its children "0" and "1", as in the Sequential: state dicts and seeds are compatible,
    and code that looks for `nn.LayerNorm` and `nn.Linear` finds them. They only hold the parameters;
    `forward` runs `fused_layernorm_linear`, so hooks on the children do not fire.

    `eps`, `elementwise_affine` and `ln_bias` are LayerNorm's (whether it has a weight, and then a bias),
    `bias` is Linear's; `algorithm` and `memory` as in `fused_layernorm_linear`.
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
        """Return a layer that shares two existing ones, so that an optimizer of their parameters stays valid.

        Raises TypeError unless they are LayerNorm and Linear, ValueError if their sizes do not fit.
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
        return getattr(self, "0")

    @property
    def linear(self) -> nn.Linear:
        return getattr(self, "1")

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., H] to [..., O]; see `fused_layernorm_linear`."""
        # Past nn.Module's attribute look-up, which takes a microsecond.
        children: dict[str, Any] = self._modules
        ln, linear = children["0"], children["1"]
        norm = parameter(ln, "weight"), parameter(ln, "bias"), parameter(linear, "weight")
        arguments = x, *norm, parameter(linear, "bias"), ln.eps
        return fused_layernorm_linear(*arguments, algorithm=self.algorithm, memory=self.memory)

    def explain(self, x: Tensor) -> dict[str, str]:
        """Return what computes an input like x, as calls select it; it may build the kernels, and launches none.

        "backend" is the kernels, or PyTorch's own operations. "output", "dln" and "dW" are the matmuls Y =
        ln_out W^T, dln = dY W and dW = dY^T ln_out: each "own" for this project's kernel, "library" for
        PyTorch's, or "library on padded rows". Keys that end in " in a CUDA graph" are there if a capture
        selects others; "backward in a CUDA graph" is "two branches" if dW has a stream of its own there.
        """
        bits = [self._plan(x, captured) for captured in (False, True)]
        if -1 in bits:
            return {"backend": "PyTorch's own operations", **products(0b010101)}
        split = self.algorithm == "pairs" and products(bits[0])["dW"] == "own"
        backend = "kernels" + ", pairs of float16" * split + ", dW first" * (self.memory == LEAST)
        words = {"backend": backend, **products(bits[0])}
        if products(bits[1]) != products(bits[0]):
            words |= {f"{name} in a CUDA graph": by for name, by in products(bits[1]).items()}
        if bits[1] & TWO_STREAMS and self.memory != LEAST:
            words["backward in a CUDA graph"] = "two branches"
        return words

    def _plan(self, x: Tensor, captured: bool) -> int:
        """Return the selected matmuls in bits, -1 for PyTorch's own operations."""
        if not host.load(LAYER, x.device.type):
            return -1
        children, names = (self.ln, self.linear), ("weight", "bias")
        tensors = [parameter(child, name) for child in children for name in names]
        options = options_of(self.algorithm, self.memory)
        return torch.ops.mojo_workbook.layernorm_linear_plan(x, *tensors, options, captured)

    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}, memory={self.memory!r}"


def parameter(module: nn.Module, name: str) -> Any:
    """Return a module's parameter without the microsecond of nn.Module's attribute look-up."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)


def products(bits: int) -> dict[str, str]:
    """Return the implementation of each matmul, from the bits of `layernorm_linear_plan`."""
    return {name: MATMULS[bits >> 2 * k & 3] for k, name in enumerate(("output", "dln", "dW"))}
