"""Triton's product of three TF32 products, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import torch
from book.measure import triton_products
triton_products.product_kernel.configs = triton_products.product_kernel.configs[-1:]  # none is timed here
generator = torch.Generator().manual_seed(5)
x, W, b, dy = (
    torch.randn(shape, generator=generator, requires_grad=True) for shape in ((70, 37), (133, 37), (133,), (70, 133))
)
leaves = (x, W, b)
output = triton_products.Linear.apply(*leaves)
exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
expected = torch.nn.functional.linear(*exact)
found = (output, *torch.autograd.grad(output, leaves, dy))
truth = (expected, *torch.autograd.grad(expected, exact, dy.double()))
for one, other in zip(found, truth, strict=True):
    assert one.shape == other.shape and (one - other).norm() < 1e-6 * other.norm(), (one - other).norm() / other.norm()
gamma, beta = torch.randn((2, 37), generator=generator)
output = triton_products.layernorm_linear(x, gamma, beta, W, b)
x, W, b, gamma, beta = (tensor.detach().double() for tensor in (x, W, b, gamma, beta))
expected = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (37,), gamma, beta, 1e-5), W, b)
assert (output - expected).norm() < 1e-6 * expected.norm()
"""


@pytest.mark.long
def test_triton_s_product_and_its_gradients_in_triton_s_interpreter():
    """Sizes that no tile divides, and factors in each layout; the interpreter multiplies in float32."""
    pytest.importorskip("triton", reason="no Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
