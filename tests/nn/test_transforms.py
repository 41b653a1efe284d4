"""Compare the layer within torch.func's transforms and in forward mode with PyTorch's own operations."""

import pytest
import torch
from layer_checks import make_inputs, plain_torch
from torch.autograd import forward_ad

from harness.nn import attention
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


SAMPLES = [torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(3)).double()
OF_ATTENTION = {
    "grad": lambda f: torch.func.grad(loss(f), argnums=(0, 1, 2, 3))(*SAMPLES, MASK),
    "vmap": lambda f: torch.func.vmap(f, in_dims=(0, 0, 0, None))(*SAMPLES, MASK),
    "gradients of samples": lambda f: torch.func.vmap(torch.func.grad(loss(f)))(*SAMPLES),
    "jvp": lambda f: torch.func.jvp(f, tuple(SAMPLES), tuple(SAMPLES)),
    "hessian": lambda f: torch.func.hessian(loss(f))(SAMPLES[0][:1, :1], *SAMPLES[1:]),
    "causal, shared heads": lambda f: torch.func.grad(
        loss(lambda q, k: f(q, k, k, None, 0.0, True, 0.3, True))
    )(SAMPLES[0], SAMPLES[1][:, :1]),
}


@pytest.mark.parametrize("transform", OF_ATTENTION.values(), ids=OF_ATTENTION)
def test_attention_is_pytorch_s_too(transform):
    def right(q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
        scores = scores if mask is None else scores + mask
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf) if is_causal else scores).softmax(-1) @ v

    torch.testing.assert_close(transform(attention), transform(right), rtol=1e-9, atol=1e-9)
