"""Public contract of the ops: names, parameters and argument order, through MAX's PyTorch binding.

Names are written out here, not taken from the spec, because other harnesses rely on them.
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
INPUTS = ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
GRADIENTS = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")


@pytest.fixture(scope="module")
def tensors():
    """Inputs (`input` has mean 2) and grad_output."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = (2 + randn(B, S, H), 1 + 0.5 * randn(H), 0.5 * randn(H), randn(O, H), randn(O))
    return inputs, 1 + randn(B, S, O)


def compute_expected(tensors):
    """Return the output and the gradients of the five inputs, from autograd in float64."""
    inputs, grad_output = tensors
    x, ln_weight, ln_bias, linear_weight, linear_bias = leaves = [t.double().requires_grad_() for t in inputs]
    output = F.linear(F.layer_norm(x, (H,), ln_weight, ln_bias, 1e-5), linear_weight, linear_bias)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.double())


def assert_close(got, exact):
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("by_name", [False, True])
def test_forward_matches_autograd(public_ops, tensors, by_name):
    """Call the fused algorithm; PROGRAM calls the unfused one."""
    output = torch.full((B, S, O), float("nan"))
    forward = public_ops.layernorm_linear[{"algorithm": "fused", **SIZES}]
    if by_name:
        forward(output=output, **dict(zip(INPUTS, tensors[0], strict=True)))
    else:
        forward(output, *tensors[0])
    assert_close(output, compute_expected(tensors)[0])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("parameters", [{}, {"algorithm": "unfused"}], ids=["default", "unfused"])
def test_backward_matches_autograd(public_ops, tensors, parameters, by_name):
    inputs, grad_output = tensors
    gradients = [torch.full_like(tensor, float("nan")) for tensor in inputs]
    backward = public_ops.layernorm_linear_backward[SIZES | parameters]
    if by_name:
        tensors_by_name = dict(zip((*GRADIENTS, *INPUTS[:4]), (*gradients, *inputs[:4]), strict=True))
        backward(**tensors_by_name, grad_output=grad_output)
    else:
        backward(*gradients, grad_output, *inputs[:4])
    for got, exact in zip(gradients, compute_expected(tensors)[1], strict=True):
        assert_close(got, exact)


def test_mismatched_sizes_are_rejected(public_ops, tensors):
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
expected = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (8,), gamma, beta, 1e-5), W, b)
assert (output - expected).abs().max() <= 2e-6 * expected.abs().max()
print("loaded", sys.argv[1])
"""


@pytest.mark.slow
def test_package_loads_from_another_program(tmp_path):
    """The program does not import the harness; its relative path contains a symbolic link."""
    (tmp_path / "puzzles").symlink_to(CHECKOUT / "solutions")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "puzzles/p22/op"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout == "loaded puzzles/p22/op\n", result.stderr
