"""A gradient that is computed by hand is right, and differentiating it is refused: no second derivative is silently 0."""

import re

import pytest
import torch

from harness.nn.derivatives import first_order

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
    @first_order("cubes", "torch.pow")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad, None


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_is_computed_once_is_right(create_graph):
    x = torch.tensor([2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=create_graph)
    assert gradient.tolist() == [12.0] and gradient.requires_grad is create_graph


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "next to another term"])
def test_differentiating_it_is_refused(alone):
    """PyTorch's once_differentiable is silent here: the other term has a gradient, and the refused one counts as 0."""
    x = torch.tensor([2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=True)
    for differentiate in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, x)):
        loss = gradient.sum() if alone else x.square().sum() + gradient.sum()
        with pytest.raises(NotImplementedError, match=REFUSED):
            differentiate(loss)
