"""What the tests of the layer's two ways to its kernels share: inputs, PyTorch's own function, and comparisons with it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.nn.layers import LayerNormLinear, fused_layernorm_linear

NAMES = ("x", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
EPS = 1e-5
H, O = 7, 6
ROWS = (3, 5)

GRAD_OUTPUTS = {
    "stride 0": torch.tensor(1.25).expand(*ROWS, O),
    "transposed": torch.arange(-40.0, 15 * O - 40).view(O, *ROWS).permute(1, 2, 0),
    "every second": torch.arange(-40.0, 30 * O - 40).view(*ROWS, 2 * O)[..., ::2],
}
"""Gradients of an output, by what their strides are."""


def make_inputs(
    dtype=torch.float32, rows=ROWS, device="cpu", H=H, O=O, seed=0, requires_grad=True, deviation=0.2
):
    """x with a mean of 3 and, in every fourth row, a small deviation, and random parameters."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = randn(*rows, H)
    x.view(-1, H)[3::4] *= deviation
    tensors = (x + 3, 1 + 0.5 * randn(H), 0.5 * randn(H), randn(O, H) / H**0.5, randn(O))
    return [tensor.to(dtype).to(device).requires_grad_(requires_grad) for tensor in tensors]


def random_gradient(output, seed=1):
    """Random values of an output's shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(output.shape, generator=generator) + 1).to(output)


def layer_from(modules: nn.Module, algorithm: str = "fast") -> LayerNormLinear:
    """The layer of a LayerNorm and a Linear."""
    ln, linear = modules.children()
    assert isinstance(ln, nn.LayerNorm) and isinstance(linear, nn.Linear)
    return LayerNormLinear.from_modules(ln, linear, algorithm=algorithm)


def plain_torch(x, ln_weight, ln_bias, linear_weight, linear_bias, eps: Any = EPS) -> Tensor:
    """The same function from PyTorch's own operations."""
    return F.linear(F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps), linear_weight, linear_bias)


def output_and_gradients(function, inputs, grad_output=None):
    """The output and the gradients of all inputs, each detached."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    grad_output = random_gradient(output) if grad_output is None else grad_output.to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def assert_as_good_as_torch(function, inputs, grad_output=None):
    """Every result is within twice PyTorch's own error of the float64 result, plus a few roundings.

    For float64 the truth is no more exact than PyTorch: normalising a row of 3 +- 0.2 magnifies its roundings by 15.
    """
    got = output_and_gradients(function, inputs, grad_output)
    baseline = output_and_gradients(plain_torch, inputs, grad_output)
    given = random_gradient(baseline[0]) if grad_output is None else grad_output
    truth = output_and_gradients(plain_torch, [tensor.double() for tensor in inputs], given.double())
    floor = (4 * 15 if inputs[0].dtype == torch.float64 else 4) * torch.finfo(inputs[0].dtype).eps
    for name, ours, theirs, exact in zip(("output", *NAMES), got, baseline, truth, strict=True):
        scale = exact.abs().max()
        error = (ours.double() - exact).abs().max() / scale
        limit = 2 * (theirs.double() - exact).abs().max() / scale + floor
        laid_out = ours.is_contiguous() or (name == "linear_weight" and ours.stride() == inputs[3].stride())
        assert (ours.dtype == inputs[0].dtype and laid_out) or name == "x"
        assert error <= limit, f"{name}: {error} above {limit}"


def assert_near(got, expected, relative=1e-4):
    """The largest difference is below `relative` of the largest value."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert (got - expected).abs().max() <= relative * expected.abs().max()


def assert_only_needed_gradients(inputs):
    """Inputs that require a gradient get PyTorch's; the others get none."""
    expected = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    fused_layernorm_linear(*inputs).square().sum().backward()
    plain_torch(*expected).square().sum().backward()
    for tensor, reference in zip(inputs, expected, strict=True):
        assert (tensor.grad is None) == (not tensor.requires_grad)
        if tensor.requires_grad:
            assert_near(tensor.grad, reference.grad)
