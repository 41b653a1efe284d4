"""A gradient that is computed without a graph is right, and refuses whoever differentiates it: no derivative is silently 0.

`ring_attention` is asked in tests/p25/test_ring_attention.py.
"""

import re

import pytest
import torch

from harness.nn import derivatives

CUBES = derivatives.FirstOnly("cubes", "torch.pow")
REFUSED = re.escape(
    "cubes has no double backward: its gradients cannot be differentiated again; use torch.pow where a second derivative "
    "is needed"
)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exponent):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @CUBES.once
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad, None


@CUBES.once
def cube(x):
    return x**3


def test_a_gradient_that_is_computed_once_is_right():
    x = torch.tensor([2.0], requires_grad=True)
    for create_graph in (False, True):
        (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=create_graph)
        assert gradient.tolist() == [12.0] and gradient.requires_grad is create_graph
    assert cube(x.detach()).tolist() == [8.0] and not cube(x.detach()).requires_grad
    with torch.no_grad():
        assert not cube(x).requires_grad


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another term"])
def test_who_differentiates_it_is_refused(alone):
    """Autograd goes only where a path leads to what it is asked for: there is one."""
    x = torch.tensor([2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=True)
    for result in (gradient, cube(x)):
        for differentiate in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, x)):
            loss = result.sum() if alone else x.square().sum() + result.sum()
            with pytest.raises(NotImplementedError, match=REFUSED):
                differentiate(loss)
