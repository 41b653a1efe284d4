"""Puzzle 22's ops in PyTorch: a small model trains as in PyTorch, and its gradients match autograd's."""

import pytest
import torch
from torch import nn

from harness.check.python_files import load_module
from harness.toolchain import roots

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def in_torch(public_ops):
    """Globals of in_torch.py, with test_public_ops.py's library to share its compiled graphs."""
    module = load_module(roots.get_solutions() / "p22" / "in_torch.py")
    module["library"] = lambda folder: public_ops
    return module


@pytest.mark.parametrize("algorithm", ["unfused", "fused"])
def test_small_model_trains_like_pytorch(in_torch, algorithm):
    reference, losses = in_torch["train"](in_torch["PLAIN"]), in_torch["train"](algorithm)
    assert losses == pytest.approx(reference, rel=1e-3) and losses[-1] < losses[0] / 2


@pytest.mark.parametrize("algorithm", ["unfused", "fused"])
def test_gradients_of_strided_tensors_match_autograd(in_torch, algorithm):
    layer = in_torch["Layer"](8, 16, algorithm)
    reference = nn.Sequential(layer.norm, layer.linear)
    x = torch.randn(8, 16, 8).transpose(0, 1).requires_grad_()
    leaves = [x, *layer.parameters()]
    got, expected = layer(x), reference(x)
    torch.testing.assert_close(got, expected)
    for a, b in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_second_derivative_is_rejected(in_torch):
    x = torch.randn(16, 8, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(in_torch["Layer"](8, 16, "fused")(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()
