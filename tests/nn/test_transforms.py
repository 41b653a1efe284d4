"""Compare attention within torch.func's transforms and in forward mode with the formula."""

import pytest
import torch

from harness.nn import attention


def loss(function):
    """A scalar of the output."""
    return lambda *tensors: function(*tensors).sin().sum()


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
