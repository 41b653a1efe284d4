"""What the tests of patch(model) share: pairs computed by PyTorch in the kernels' place, and models compared with their copies."""

import copy
import functools
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.nn import patch

M = TypeVar("M", bound=nn.Module)
H, O = 8, 6
seeded = functools.partial(torch.randn, dtype=torch.float64)


def transformers() -> Any:
    """The package, imported only by the tests that use it; they skip where it is not installed."""
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: it comes with the extra `models`"
    )


class Pair(torch.autograd.Function):
    """Both layers, from the LayerNorm's input."""

    @staticmethod
    def function(x, gamma, beta, weight, bias, eps):
        return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias)

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, ctx.eps = arguments
        ctx.save_for_backward(*tensors)
        # As the layer, whose output is no view: some PyTorch's linear returns one, which could not be changed in place.
        return Pair.function(*arguments).clone()

    @staticmethod
    def backward(ctx, grad_output):
        own = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = Pair.function(*[*own, ctx.eps])
        gradients = iter(torch.autograd.grad(output, [t for t in own if t is not None], grad_output))
        return *(None if t is None else next(gradients) for t in own), None


def fresh(module: M) -> M:
    """In float64, with random parameters: LayerNorms begin with ones and zeros, behind which mistakes hide."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(seeded(parameter.shape, generator=generator))
    return module


def sequential(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), *more)


def outcome(model: nn.Module, use, x: torch.Tensor) -> list[torch.Tensor | None]:
    """What `use(model, x)` returns, and the gradients of x and every parameter."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    output = use(model, x)
    if output.requires_grad:
        (output * output.detach().cos()).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(ours, theirs, **limits):
    """The same numbers, to rounding in float64, and gradients in the same places."""
    assert [t is None for t in ours] == [t is None for t in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, **(limits or {"rtol": 1e-9, "atol": 1e-9}))


def assert_unchanged(model: nn.Module, use=lambda m, x: m(x), x: torch.Tensor | None = None):
    """A patched model does what its copy does that is not patched."""
    x = seeded(2, 3, H, generator=torch.Generator().manual_seed(6)).requires_grad_() if x is None else x
    model = fresh(model)
    plain = copy.deepcopy(model)
    patch(model)
    for _ in range(2):
        assert_same(outcome(model, use, x), outcome(plain, use, x))


class Named(nn.Module):
    """Any children, and a forward over them."""

    def __init__(self, forward, **children):
        super().__init__()
        self.run = forward
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return self.run(self, x)


class Scaled(nn.LayerNorm):
    """A LayerNorm with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input).tanh()
