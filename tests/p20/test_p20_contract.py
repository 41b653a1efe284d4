"""Puzzle 20's public ops: names and argument order, loaded by MAX's own PyTorch binding from the package alone.

Everything here is spelled out, not taken from the puzzle's spec, because other harnesses rely on it.
"""

import pytest
import torch

from book.examples import worth_it

pytestmark = pytest.mark.compiler

ROWS, COLUMNS = 5, 9


@pytest.fixture(scope="module")
def tensors():
    """input and grad_output, [5, 9]; the last row of the input is -inf in one place."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
    x[-1, 3] = -torch.inf
    return x, dy


def assert_near(got, exact):
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_relu_mask_and_its_backward(public_ops, tensors):
    x, dy = tensors
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    mask = torch.full((2,), -1, dtype=torch.int32)
    public_ops.relu_mask(y, mask, x)
    public_ops.relu_mask_backward(grad_input=dx, grad_output=dy, mask=mask)
    leaf = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(leaf.relu(), leaf, dy.double())
    assert torch.equal(y, x.relu()) and torch.equal(dx.double(), expected)
    bits = [(int(word) >> i) & 1 for word in mask for i in range(32)]
    assert bits[:45] == (x > 0).int().flatten().tolist() and not any(bits[45:])


def test_softmax_and_its_backward(public_ops, tensors):
    x, dy = tensors
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    public_ops.softmax(output=y, input=x)
    public_ops.softmax_backward(dx, dy, y)
    leaf = x.double().requires_grad_()
    exact = leaf.softmax(-1)
    assert_near(y, exact.detach())
    assert_near(dx, torch.autograd.grad(exact, leaf, dy.double())[0])


def test_what_the_table_of_times_calls_custom(public_ops, tensors, monkeypatch):
    """The kernels as book/examples/worth_it.py calls them, on the shapes that are compiled here."""
    x, dy = tensors
    monkeypatch.setattr("max.experimental.torch.CustomOpLibrary", lambda path: public_ops)
    kernels = worth_it.Kernels()
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(worth_it.relu_of(kernels)(leaf), leaf, dy)
    (expected,) = torch.autograd.grad(leaf.relu(), leaf, dy)
    assert torch.equal(dx, expected)
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    kernels.softmax(y, leaf)
    kernels.softmax_backward(dx, dy, y)
    exact = x.double().requires_grad_()
    assert_near(y, exact.softmax(-1).detach())
    assert_near(dx, torch.autograd.grad(exact.softmax(-1), exact, dy.double())[0])
