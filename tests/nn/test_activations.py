"""SiLU as an operator: values and gradients in every dtype against float64, registration, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

import harness.nn.activations  # noqa: F401 registers the operator

silu = torch.ops.mojo_workbook.silu.default


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients(dtype):
    x = torch.linspace(-12, 12, 60).reshape(6, 10).to(dtype).mT
    dy = torch.linspace(-1, 2, 60).reshape(10, 6).to(dtype)

    def both(function, wide):
        leaf = x.to(wide).requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, dy.to(wide))

    for ours, baseline, truth in zip(
        both(silu, dtype), both(F.silu, dtype), both(F.silu, torch.float64), strict=True
    ):
        assert ours.dtype == dtype
        far, near = ((t.double() - truth).abs().max() for t in (ours, baseline))
        assert far <= 2 * near + 4 * torch.finfo(dtype).eps * truth.abs().max()


def test_it_is_registered_as_it_should_be():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(silu, (x,))
    torch.library.opcheck(silu, (torch.randn(3, 4).mT,))
    torch.autograd.gradcheck(silu, (x,))


def test_integers_and_second_derivatives_are_refused():
    with pytest.raises(TypeError, match=r"x: expected a floating dtype, got torch\.int64"):
        silu(torch.arange(3))
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(silu(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="mojo_workbook::silu has no second derivative"):
        torch.autograd.grad(dx.sum(), x)
