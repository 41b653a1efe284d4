"""The SiLU operator: values and gradients in every dtype, registration, and unsupported calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import harness.puzzles.p26.activations  # noqa: F401 registers the operator
from harness.toolchain import roots

silu = torch.ops.mojo_workbook.silu.default


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_match_float64(dtype):
    x = torch.linspace(-12, 12, 60).reshape(6, 10).to(dtype).mT
    dy = torch.linspace(-1, 2, 60).reshape(10, 6).to(dtype)

    def run_forward_and_backward(function, float64_inputs):
        leaf = x.to(float64_inputs).requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, dy.to(float64_inputs))

    for actual, baseline, truth in zip(
        run_forward_and_backward(silu, dtype),
        run_forward_and_backward(F.silu, dtype),
        run_forward_and_backward(F.silu, torch.float64),
        strict=True,
    ):
        assert actual.dtype == dtype
        error, baseline_error = ((t.double() - truth).abs().max() for t in (actual, baseline))
        assert error <= 2 * baseline_error + 4 * torch.finfo(dtype).eps * truth.abs().max()


def test_operator_passes_opcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(silu, (x,))
    torch.library.opcheck(silu, (torch.randn(3, 4).mT,))
    torch.autograd.gradcheck(silu, (x,))


def test_integers_and_second_derivatives_are_rejected():
    with pytest.raises(
        TypeError, match=r"x: expected one of float32, float64, bfloat16, float16, got torch\.int64"
    ):
        silu(torch.arange(3))
    with pytest.raises(
        ValueError, match=r"x: expected at most 2147483647 elements, got shape \[2147483648\]"
    ):
        silu(torch.empty(2**31, dtype=torch.float16, device="meta"))
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(silu(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="mojo_workbook::silu has no second derivative"):
        torch.autograd.grad(dx.sum(), x)


def test_extreme_values_and_empty_tensors():
    x = torch.tensor([float("inf"), -1e30, -100.0, float("nan"), -0.0])
    torch.testing.assert_close(silu(x), F.silu(x), equal_nan=True)
    assert silu(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux")
def test_gpu_kernels_on_the_virtual_gpu():
    program = Path(__file__).with_name("silu_on_gpu.mojo")
    mojo = ["mojo", "run", "-I", str(roots.get_solutions() / "p26"), str(program)]
    result = subprocess.run(
        [sys.executable, "-m", "harness", "vgpu", "exec", "--", *mojo],
        cwd=roots.CHECKOUT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if re.fullmatch(r"\S+ \S+", line)]
    y, dx = torch.tensor([[float(number) for number in row] for row in rows]).T
    count = torch.arange(300)
    x = ((count - 150).float() / 10).double().requires_grad_()
    truth = F.silu(x)
    (gradient,) = torch.autograd.grad(truth, x, 1.0 + count % 7)
    for actual, exact in ((y, truth), (dx, gradient)):
        assert (actual - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()
