"""Fuse LayerNorm and Linear, as a differentiable function and a module.

On an NVIDIA GPU both call the operator `torch.ops.mojo_workbook.layernorm_linear`
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
AUTO, LEAST_MEMORY = "auto", "least"
OPTION_BITS = {"fast": 0, "pairs": 1, AUTO: 0, LEAST_MEMORY: 2}
"""Bits that encode `algorithm` and `memory` for the operator."""
ALGORITHMS, MEMORY_MODES = ("fast", "pairs"), (AUTO, LEAST_MEMORY)
MATMUL_BACKENDS = ("own", "library", "library on padded rows")
"""Implementations of a matmul, numbered as in `harness/nn/kernels/layernorm_linear/plan.mojo`."""
TWO_STREAMS = 1 << 6
"""Bit of a plan: the backward pass uses two streams."""


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

    The forward pass saves x, the parameters, and the mean and rstd of each row; the backward pass recomputes
    the LayerNorm's output. Second derivatives, forward mode and torch.func's transforms run PyTorch's own
    operations. Under `torch.autocast` the LayerNorm is computed in float32 and the matmul in the autocast
    dtype, as in PyTorch's own layers. In float32 the matmuls are PyTorch's and respect its TF32 setting.

    The first call on a GPU builds the operator and its kernels for the dtype, which takes a minute or two,
    and caches them on disk; `workbook build-ext` builds them ahead of time.

    Args:
        x: Shape [..., H], H >= 1. float32, bfloat16 and float16 run the kernels, other dtypes PyTorch's own
            operations. Leading dimensions may be zero.
        ln_weight: gamma, shape [H]; None means ones.
        ln_bias: beta, shape [H]; None means zeros.
        linear_weight: Shape [O, H], O >= 1. May be a transposed view, as in GPT-2.
        linear_bias: Shape [O]; None means zeros.
        eps: Added to the variance under the square root.
        algorithm: "fast", or "pairs" for float32 on a Hopper GPU: each matmul becomes three float16 matmuls,
            which take 0.3 to 0.4 of the time and more memory. Errors are equal to PyTorch's for sums of a few
            hundred terms and smaller for longer sums. If H or O is not a multiple of 8, "fast" is used.
        memory: "auto" computes dln and dW concurrently, or dW first if memory runs out. "least" always
            computes dW first and frees the LayerNorm's output before it allocates dln, which lowers the peak
            by one matrix of x's size. It uses fewer partial sums over rows, so results round differently, and
            reads x, dln and dY once more. In 16 bits it does not copy unaligned rows, so cuBLAS is slower if
            H or O is not a multiple of 8.

    Returns:
        Shape [..., O], contiguous, in x's dtype or autocast's. Results are deterministic. In a CUDA graph
        other matmul kernels may be selected (see `LayerNormLinear.explain`), which round differently.

    Raises:
        ValueError: H or O is zero, or `algorithm` or `memory` is unknown.
        TypeError, RuntimeError: PyTorch's own errors for mismatched arguments.
    """
    options = encode_options(algorithm, memory)
    check_sizes(x, linear_weight)
    arguments = x, ln_weight, ln_bias, linear_weight, linear_bias
    if host.load(LAYER, x.device.type):
        return torch.ops.mojo_workbook.layernorm_linear(*arguments, eps, options)
    return compute_with_torch(*arguments, eps)


def compute_with_torch(
    x, ln_weight, ln_bias, linear_weight, linear_bias, eps: float, options: int = 0
) -> Tensor:
    norm = F.layer_norm(x, linear_weight.shape[1:], ln_weight, ln_bias, eps)
    return F.linear(norm, linear_weight, linear_bias)


def get_operator() -> torch._ops.OpOverload:
    """Return the operator for FX graphs; without kernels, define it with PyTorch's own operations."""
    if not host.load(LAYER, host.DEVICE) and not hasattr(torch.ops.mojo_workbook, LAYER):
        tags = (torch.Tag.pt2_compliant_tag,)
        torch.library.define(f"mojo_workbook::{LAYER}", SCHEMA, tags=tags)
        torch.library.impl(f"mojo_workbook::{LAYER}", "CompositeImplicitAutograd", compute_with_torch)
    return torch.ops.mojo_workbook.layernorm_linear.default


SCHEMA = "(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor weight, Tensor? bias, float eps, int options=0) -> Tensor"


def encode_options(algorithm: str, memory: str) -> int:
    for name, value, choices in (("algorithm", algorithm, ALGORITHMS), ("memory", memory, MEMORY_MODES)):
        if value not in choices:
            raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    return OPTION_BITS[algorithm] | OPTION_BITS[memory]


def check_sizes(x: Tensor, linear_weight: Tensor) -> None:
    """Raise ValueError if H or O is zero, which PyTorch's layers accept."""
    if 0 in (*x.shape[-1:], *linear_weight.shape):
        shapes = f"{list(x.shape)} and {list(linear_weight.shape)}"
        raise ValueError(f"x, linear_weight: expected H >= 1 and O >= 1, got shapes {shapes}")


class LayerNormLinear(nn.Module):
    """A drop-in replacement for `nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))`.

    The two layers are the children "0" and "1", as in the Sequential, so state dicts and seeds are
    compatible, and code that searches for `nn.LayerNorm` and `nn.Linear` finds them. The children only have
    the parameters: `forward` calls `fused_layernorm_linear`, and hooks on the children do not run.

    `eps`, `elementwise_affine` and `ln_bias` (as `bias`) are passed to LayerNorm, `bias` to Linear,
    `algorithm` and `memory` to `fused_layernorm_linear`.
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
        """Return a layer that shares two existing layers, so optimizers of their parameters remain valid.

        Raises TypeError unless they are LayerNorm and Linear, ValueError if their sizes do not match.
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
        # Bypass nn.Module.__getattr__, which takes a microsecond.
        children: dict[str, Any] = self._modules
        ln, linear = children["0"], children["1"]
        norm = get_parameter(ln, "weight"), get_parameter(ln, "bias"), get_parameter(linear, "weight")
        arguments = x, *norm, get_parameter(linear, "bias"), ln.eps
        return fused_layernorm_linear(*arguments, algorithm=self.algorithm, memory=self.memory)

    def explain(self, x: Tensor) -> dict[str, str]:
        """Describe which kernels compute an input like x. This may build the kernels, but launches none.

        "backend" is the kernels or PyTorch's own operations. "output", "dln" and "dW" are the matmuls Y =
        ln_out W^T, dln = dY W and dW = dY^T ln_out: "own" for this project's kernel, "library" for PyTorch's
        matmul, or "library on padded rows". Keys that end in " in a CUDA graph" exist if the selection differs
        during capture; "backward in a CUDA graph" is "two branches" if dW runs on a second stream.
        """
        bits = [self._plan(x, in_graph) for in_graph in (False, True)]
        if -1 in bits:
            return {"backend": "PyTorch's own operations", **decode_plan(0b010101)}
        uses_pairs = self.algorithm == "pairs" and decode_plan(bits[0])["dW"] == "own"
        backend = "kernels" + ", pairs of float16" * uses_pairs + ", dW first" * (self.memory == LEAST_MEMORY)
        description = {"backend": backend, **decode_plan(bits[0])}
        if decode_plan(bits[1]) != decode_plan(bits[0]):
            in_graph = decode_plan(bits[1]).items()
            description |= {f"{name} in a CUDA graph": matmul for name, matmul in in_graph}
        if bits[1] & TWO_STREAMS and self.memory != LEAST_MEMORY:
            description["backward in a CUDA graph"] = "two branches"
        return description

    def _plan(self, x: Tensor, in_graph: bool) -> int:
        """Return the bits of the selected matmuls, or -1 for PyTorch's own operations."""
        if not host.load(LAYER, x.device.type):
            return -1
        children, names = (self.ln, self.linear), ("weight", "bias")
        tensors = [get_parameter(child, name) for child in children for name in names]
        options = encode_options(self.algorithm, self.memory)
        return torch.ops.mojo_workbook.layernorm_linear_plan(x, *tensors, options, in_graph)

    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}, memory={self.memory!r}"


def get_parameter(module: nn.Module, name: str) -> Any:
    """Return a module's parameter without nn.Module.__getattr__, which takes a microsecond."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def decode_plan(bits: int) -> dict[str, str]:
    """Map each matmul to its backend, from the bits of `layernorm_linear_plan`."""
    return {name: MATMUL_BACKENDS[bits >> 2 * k & 3] for k, name in enumerate(("output", "dln", "dW"))}
