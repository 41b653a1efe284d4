"""The public ops keep their contract: names, parameters and argument order, loaded by MAX's own PyTorch binding.

Everything here is spelled out, not taken from the package's spec, because other harnesses rely on it.
"""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.compiler

B, N, S, T, D = 2, 3, 5, 7, 4


@pytest.fixture(scope="module")
def tensors():
    """query, key, value and grad_output, [batch, heads, length, dim]."""
    generator = torch.Generator().manual_seed(0)
    lengths = (S, T, T, S)
    return tuple(torch.randn(B, N, length, D, generator=generator) for length in lengths)


def assert_near(got, exact):
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_forward(public_ops, tensors):
    query, key, value, _ = tensors
    output = torch.full((B, N, S, D), float("nan"))
    public_ops.attention(output, query, key, value)
    assert_near(output, F.scaled_dot_product_attention(query.double(), key.double(), value.double()))


def test_backward_by_argument_name(public_ops, tensors):
    leaves = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, tensors[3].double())
    names = ("grad_query", "grad_key", "grad_value")
    gradients = {name: torch.full_like(t, float("nan")) for name, t in zip(names, tensors[:3], strict=True)}
    arguments = dict(zip(("query", "key", "value"), tensors[:3], strict=True))
    public_ops.attention_backward(**gradients, grad_output=tensors[3], **arguments)
    for got, truth in zip(gradients.values(), exact, strict=True):
        assert_near(got, truth)


def test_backward_by_position(public_ops, tensors):
    query, key, value, grad_output = tensors
    gradients = [torch.full_like(tensor, float("nan")) for tensor in tensors[:3]]
    public_ops.attention_backward(*gradients, grad_output, query, key, value)
    assert not any(gradient.isnan().any() for gradient in gradients)


def test_shapes_are_checked_against_each_other(public_ops, tensors):
    query, key, value, _ = tensors
    with pytest.raises(Exception, match=r"value has size 7 along axis 2, expected 6"):
        public_ops.attention(torch.empty(B, N, S, D), query, key[:, :, :6].contiguous(), value)
