"""Compare the layer within torch.func's transforms and in forward mode with PyTorch's own operations."""

import pytest
import torch
from layer_checks import make_inputs, plain_torch
from torch.autograd import forward_ad

from harness.nn.layers import fused_layernorm_linear

INPUTS = [tensor.detach() for tensor in make_inputs(torch.float64)]
ALL = (0, 1, 2, 3, 4)
ROWS = (0, None, None, None, None)


def dual(function):
    """The tangent in forward mode without torch.func, of an input beside parameters that need gradients."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(INPUTS[0], INPUTS[0].cos())
        return forward_ad.unpack_dual(function(x, *make_inputs(torch.float64)[1:])).tangent


def loss(function):
    """A scalar of the output."""
    return lambda *tensors: function(*tensors).sin().sum()


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(loss(f), argnums=ALL)(*INPUTS),
    "vjp": lambda f: torch.func.vjp(f, *INPUTS)[1](torch.ones(3, 5, 6).double()),
    "jacrev": lambda f: torch.func.jacrev(f, argnums=3)(*INPUTS),
    "vmap over inputs": lambda f: torch.func.vmap(f, in_dims=(1, None, None, None, None), out_dims=1)(
        *INPUTS
    ),
    "vmap over parameters": lambda f: torch.func.vmap(f, in_dims=(None, 0, 0, 0, 0))(
        INPUTS[0], *(torch.stack([tensor, 2 * tensor, tensor - 1]) for tensor in INPUTS[1:])
    ),
    "gradients of samples": lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=ALL), in_dims=ROWS)(
        *INPUTS
    ),
    "jvp": lambda f: torch.func.jvp(f, tuple(INPUTS), tuple(tensor.cos() for tensor in INPUTS)),
    "hessian": lambda f: torch.func.hessian(loss(f), argnums=1)(*INPUTS),
    "dual": dual,
    "compiled": lambda f: torch.compile(
        lambda *tensors: torch.func.grad(loss(f), argnums=ALL)(*tensors), backend="aot_eager", fullgraph=True
    )(*INPUTS),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_results_are_pytorch_s(transform):
    torch.testing.assert_close(
        transform(fused_layernorm_linear), transform(plain_torch), rtol=1e-9, atol=1e-9
    )


def test_arguments_are_checked_there_too():
    with pytest.raises(ValueError, match=r"^ln_weight: expected 7 elements"):
        torch.func.grad(loss(fused_layernorm_linear))(INPUTS[0], INPUTS[1][:6], *INPUTS[2:])
