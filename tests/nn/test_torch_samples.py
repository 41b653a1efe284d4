"""PyTorch's own sample inputs, of layer_norm's OpInfo and of the module tests, through the layer: right, or refused in words."""

import itertools

import pytest
import sample_inputs
import torch
import torch.nn.functional as F

from harness.nn.layers import LayerNormLinear, fused_layernorm_linear

pytestmark = pytest.mark.compiles

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def bound(dtype: torch.dtype) -> float:
    """How far a sum of a few terms may be from float64, relative to its size."""
    return {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, 4e-2)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=bound(dtype), atol=bound(dtype), equal_nan=True)


def samples(dtype: torch.dtype):
    """The samples that normalise the last axis alone: LayerNorm as the layer has it."""
    samples_of = sample_inputs.of_operator("nn.functional.layer_norm")
    for sample in samples_of("cpu", dtype, requires_grad=False):
        shape, *more = (*sample.args, *(sample.kwargs.get(name) for name in ("weight", "bias")))[:3]
        eps = sample.kwargs.get("eps", 1e-5)
        if len(shape) == 1 and sample.input.dim() >= 1:
            yield sample.input, *more, eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_samples(dtype):
    compared = 0
    for x, gamma, beta, eps in samples(dtype):
        W = torch.eye(x.shape[-1], dtype=dtype)  # the Linear passes LayerNorm's output on
        if not x.shape[-1]:
            with pytest.raises(ValueError, match="expected H >= 1"):
                fused_layernorm_linear(x, gamma, beta, W, None, eps)
            continue
        leaves = [t.detach().clone().requires_grad_() for t in (x, gamma, beta) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in leaves]

        def spread(
            given, gamma=gamma, beta=beta
        ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            given = iter(given)
            x = next(given)
            return x, None if gamma is None else next(given), None if beta is None else next(given)

        ours = fused_layernorm_linear(*spread(leaves), W, None, eps)
        x64, gamma64, beta64 = spread(wide)
        truth = F.layer_norm(x64, x64.shape[-1:], gamma64, beta64, eps)
        assert_near(ours, truth, dtype)
        dy = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).view(ours.shape).to(dtype)
        got = torch.autograd.grad(ours, leaves, dy)
        for one, other in zip(got, torch.autograd.grad(truth, wide, dy.double()), strict=True):
            scale = max(1.0, other.abs().max().item() if other.numel() else 1.0)
            assert_near(one / scale, other / scale, dtype)
        compared += 1
    assert compared >= 3, "torch has changed its samples: too few normalise the last axis"


def module_inputs(module: type, dtype: torch.dtype):
    """The constructor arguments and the first input of a module's own tests."""
    options = {"device": "cpu", "dtype": dtype, "requires_grad": False, "training": True}
    for sample in sample_inputs.of_module(module, **options):
        given = sample.forward_input
        yield sample.constructor_input, (given.args or tuple(given.kwargs.values()))[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_module_samples_of_linear(dtype):
    """Each Linear of the module tests behind a LayerNorm of its input."""
    compared = 0
    for arguments, x in module_inputs(torch.nn.Linear, dtype):
        linear = torch.nn.Linear(*arguments.args, **arguments.kwargs, dtype=dtype)
        ln = torch.nn.LayerNorm(x.shape[-1], dtype=dtype)
        pair = torch.nn.Sequential(ln, linear)
        layer = LayerNormLinear.from_modules(ln, linear)
        assert_near(
            layer(x), pair.double()(x.double()) if dtype == torch.float64 else pair(x).double(), dtype
        )
        compared += 1
    assert compared >= 2


def test_module_samples_of_layer_norm():
    """Each LayerNorm of the module tests in front of a Linear; one over several axes is refused."""
    outcomes = set()
    cases = itertools.product(module_inputs(torch.nn.LayerNorm, torch.float32), (True, False))
    for (arguments, x), affine in cases:
        ln = torch.nn.LayerNorm(*arguments.args[:2], elementwise_affine=affine)  # the shape, and eps
        linear = torch.nn.Linear(ln.normalized_shape[-1], 3)
        if len(ln.normalized_shape) > 1:
            with pytest.raises(ValueError, match="ln: expected normalized_shape"):
                LayerNormLinear.from_modules(ln, linear)
            outcomes.add("refused")
            continue
        assert_near(LayerNormLinear.from_modules(ln, linear)(x), linear(ln(x)).double(), torch.float32)
        outcomes.add("right")
    assert outcomes == {"right", "refused"}
