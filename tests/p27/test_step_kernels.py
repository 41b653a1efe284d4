"""GPT-2's training-step kernels on the virtual GPU, compared with PyTorch in float64."""

import pytest
import torch
from torch import Tensor

from harness.puzzles.p27 import step_parts
from harness.puzzles.p27.step_kernels import StepKernels, get_kernels

pytestmark = [pytest.mark.compiles, pytest.mark.on_virtual_gpu]
BF16_EPS = 2.0**-8
"""bfloat16's relative rounding error."""


def make_normal(*shape: int, dtype=torch.float32, device="cpu", scale=1.0) -> Tensor:
    """Return normal random numbers, seeded by the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)


def assert_close(got: Tensor, exact: Tensor, limit: float) -> None:
    """Compare relative to the largest value; NaN positions must match."""
    got, exact = got.double().cpu(), exact.cpu()
    assert torch.equal(got.isnan(), exact.isnan())
    scale = exact.nan_to_num().abs().max()
    assert (got - exact).nan_to_num().abs().max() <= limit * scale


@pytest.fixture(autouse=True)
def require_kernels(device) -> StepKernels:
    """Fail if the kernels are missing: the tests would compare PyTorch with itself."""
    kernels = get_kernels(make_normal(8, dtype=torch.bfloat16, device=device))
    assert kernels is not None
    return kernels


def test_gelu_and_its_gradient_are_accurate(device, launch_log):
    x = make_normal(4104, dtype=torch.bfloat16, device=device, scale=3)
    dy = make_normal(4112, dtype=torch.bfloat16, device=device)[:4104].clone()
    leaf = x.double().requires_grad_()
    exact = torch.nn.functional.gelu(leaf, approximate="tanh")
    (slope,) = torch.autograd.grad(exact, leaf, dy.double())
    assert_close(step_parts.gelu(x), exact.detach(), BF16_EPS)
    second, dx = step_parts.gelu_backward(x.clone(), dy)
    assert_close(second, exact.detach(), BF16_EPS)
    assert_close(dx, slope, BF16_EPS)
    assert len(launch_log.names) == 2


def test_residual_add_and_column_sums_are_accurate(device, launch_log):
    stream, branch = (make_normal(130 + i, 520, dtype=torch.bfloat16, device=device)[:130] for i in (0, 1))
    exact = stream.double() + branch.double()
    sums = step_parts.add_with_sums(stream, branch)
    assert_close(stream, exact, BF16_EPS)
    assert_close(sums, exact.sum(0), BF16_EPS)
    assert len(launch_log.names) == 2


@pytest.mark.parametrize(
    ("vocabulary", "channels", "positions", "repeats"),
    [(9, 1032, 50, 25), (5, 8, 32, 32), (40, 264, 330, 190), (5, 8, 3, 1)],
)
def test_token_table_gradient_is_accurate_and_reproducible(device, vocabulary, channels, positions, repeats):
    """Include frequent, rare and missing tokens."""
    generator = torch.Generator().manual_seed(positions)
    tokens = torch.randint(0, vocabulary - 1, (positions,), generator=generator)
    tokens[torch.randperm(positions, generator=generator)[:repeats]] = 1
    tokens = tokens.to(device)
    head_gradient = make_normal(vocabulary, channels, device=device)
    dx = make_normal(positions, channels, dtype=torch.bfloat16, device=device)
    table = torch.full((vocabulary, channels), torch.nan, dtype=torch.bfloat16, device=device)
    exact = head_gradient.double().index_add(0, tokens, dx.double())
    assert_close(step_parts.compute_token_gradient(table, head_gradient, dx, tokens), exact, BF16_EPS)
    second = step_parts.compute_token_gradient(table.clone(), head_gradient, dx, tokens)
    assert torch.equal(second, table)


@pytest.mark.parametrize("count", [2104, 1_200_008])
def test_gradient_norm_is_accurate(device, count):
    gradients = make_normal(count, dtype=torch.bfloat16, device=device)
    norm = torch.zeros(1, device=device)
    step_parts.compute_norm(norm, gradients)
    assert_close(norm, gradients.double().norm()[None], 1e-6)


@pytest.mark.parametrize(
    ("count", "decayed", "norm"), [(4112, 2064, 3.0), (64, 0, 0.5), (64, 0, float("nan"))]
)
def test_adamw_matches_float64(device, count, decayed, norm):
    """The float64 path is compared with PyTorch's AdamW in test_p27_gpt.py."""
    master, mean = make_normal(count, device=device), make_normal(count + 8, device=device)[:count] / 9
    square = make_normal(count + 16, device=device)[:count].square()
    gradients = make_normal(count + 24, dtype=torch.bfloat16, device=device)[:count].clone()
    numbers, norms = torch.tensor([0.01, 0.19, 0.0975], device=device), torch.tensor([norm], device=device)
    tensors = {"master": master, "working": master.bfloat16(), "gradients": gradients, "mean": mean}
    tensors |= {"square": square, "step_inputs": numbers, "norm": norms}
    float64_tensors = {name: tensor.double() for name, tensor in tensors.items()}
    step_parts.adamw(**tensors, num_decayed=decayed)
    step_parts.adamw(**float64_tensors, num_decayed=decayed)
    for name in ("master", "mean", "square"):
        assert_close(tensors[name], float64_tensors[name], 1e-6)
    assert_close(tensors["working"], float64_tensors["working"], BF16_EPS)
