"""The public ops keep their contract: names, parameters and argument order, loaded by MAX's own PyTorch binding.

Everything here is spelled out, not taken from the package's spec, because other harnesses rely on it.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from harness.toolchain.roots import CHECKOUT

pytestmark = pytest.mark.compiles

B, S, H, O = 4, 4, 8, 16
SIZES = {"batch_size": B, "seq_len": S, "hidden_dim": H, "output_dim": O}


@pytest.fixture(scope="module")
def tensors():
    """input, ln_weight, ln_bias, linear_weight, linear_bias, with a mean of 2, and grad_output."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = (2 + randn(B, S, H), 1 + 0.5 * randn(H), 0.5 * randn(H), randn(O, H), randn(O))
    return inputs, 1 + randn(B, S, O)


def expected(tensors):
    """output, and the five gradients in the order of the inputs, by autograd in float64."""
    inputs, grad_output = tensors
    x, ln_weight, ln_bias, linear_weight, linear_bias = leaves = [t.double().requires_grad_() for t in inputs]
    output = F.linear(F.layer_norm(x, (H,), ln_weight, ln_bias, 1e-5), linear_weight, linear_bias)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.double())


def assert_near(got, exact):
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_forward(public_ops, tensors):
    """The fused algorithm; the unfused one is what the program further below calls."""
    output = torch.full((B, S, O), float("nan"))
    public_ops.layernorm_linear[{"algorithm": "fused", **SIZES}](output, *tensors[0])
    assert_near(output, expected(tensors)[0])


def test_forward_by_argument_name(public_ops, tensors):
    output = torch.full((B, S, O), float("nan"))
    names = ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
    arguments = dict(zip(names, tensors[0], strict=True))
    public_ops.layernorm_linear[{"algorithm": "fused", **SIZES}](output=output, **arguments)
    assert_near(output, expected(tensors)[0])


def test_backward_without_an_algorithm(public_ops, tensors):
    (x, ln_weight, ln_bias, linear_weight, _), grad_output = tensors
    gradients = [torch.full_like(tensor, float("nan")) for tensor in tensors[0]]
    public_ops.layernorm_linear_backward[SIZES](*gradients, grad_output, x, ln_weight, ln_bias, linear_weight)
    for got, exact in zip(gradients, expected(tensors)[1], strict=True):
        assert_near(got, exact)


def test_backward_by_argument_name(public_ops, tensors):
    gradient_names = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
    names = ("input", "ln_weight", "ln_bias", "linear_weight")
    gradients = {
        name: torch.full_like(tensor, float("nan"))
        for name, tensor in zip(gradient_names, tensors[0], strict=True)
    }
    arguments = dict(zip(names, tensors[0][:4], strict=True))
    public_ops.layernorm_linear_backward[SIZES](**gradients, grad_output=tensors[1], **arguments)
    for got, exact in zip(gradients.values(), expected(tensors)[1], strict=True):
        assert_near(got, exact)


def test_backward_takes_an_algorithm(public_ops, tensors):
    (x, ln_weight, ln_bias, linear_weight, _), grad_output = tensors
    gradients = [torch.full_like(tensor, float("nan")) for tensor in tensors[0]]
    parameters = {**SIZES, "algorithm": "unfused"}
    public_ops.layernorm_linear_backward[parameters](
        *gradients, grad_output, x, ln_weight, ln_bias, linear_weight
    )
    for got, exact in zip(gradients, expected(tensors)[1], strict=True):
        assert_near(got, exact)


def test_sizes_are_checked_against_the_tensors(public_ops, tensors):
    output = torch.empty(B, S, O)
    with pytest.raises(Exception, match=r"output has size 16 along axis 2, expected 15"):
        public_ops.layernorm_linear[{"algorithm": "fused", **SIZES, "output_dim": 15}](output, *tensors[0])


PROGRAM = """
import sys
from pathlib import Path
import torch
from max.experimental.torch import CustomOpLibrary

assert "harness" not in sys.modules
ops = CustomOpLibrary(Path(sys.argv[1]))
x, gamma, beta, W, b = (torch.randn(size) for size in ((4, 4, 8), (8,), (8,), (16, 8), (16,)))
x += 2
output = torch.full((4, 4, 16), float("nan"))
sizes = {"batch_size": 4, "seq_len": 4, "hidden_dim": 8, "output_dim": 16}
ops.layernorm_linear[{"algorithm": "unfused", **sizes}](output, x, gamma, beta, W, b)
x, gamma, beta, W, b = (tensor.double() for tensor in (x, gamma, beta, W, b))
wanted = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (8,), gamma, beta, 1e-5), W, b)
assert (output - wanted).abs().max() <= 2e-6 * wanted.abs().max()
print("loaded", sys.argv[1])
"""


@pytest.mark.slow
def test_another_program_loads_the_package_from_its_own_folder(tmp_path):
    """It knows nothing of the harness, and names the package by a path that leads there from where it runs."""
    (tmp_path / "puzzles").symlink_to(CHECKOUT / "solutions")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "puzzles/p22/op"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "loaded puzzles/p22/op\n", done.stderr
