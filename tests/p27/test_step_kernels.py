"""The kernels of GPT-2's step on the virtual GPU: every result is PyTorch's in float64, of several runs the same bits."""

import pytest
import torch
from torch import Tensor

from harness.puzzles.p27 import step_parts
from harness.puzzles.p27.step_kernels import StepKernels, kernels

pytestmark = [pytest.mark.compiles, pytest.mark.on_virtual_gpu]
ROUNDED = 2.0**-8
"""Of bfloat16, a unit in the last place of 1."""


def normal(*shape: int, dtype=torch.float32, device="cpu", scale=1.0) -> Tensor:
    """The same numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)


def check(got: Tensor, exact: Tensor, limit: float) -> None:
    """Compare relative to the largest value; a NaN is one in both."""
    got, exact = got.double().cpu(), exact.cpu()
    assert torch.equal(got.isnan(), exact.isnan())
    scale = exact.nan_to_num().abs().max()
    assert (got - exact).nan_to_num().abs().max() <= limit * scale


@pytest.fixture(autouse=True)
def open_kernels(device) -> StepKernels:
    """The kernels, which must be there: else these tests test nothing."""
    there = kernels(normal(8, dtype=torch.bfloat16, device=device))
    assert there is not None
    return there


def test_gelu_and_its_gradient(device, launched):
    x = normal(4104, dtype=torch.bfloat16, device=device, scale=3)
    dy = normal(4112, dtype=torch.bfloat16, device=device)[:4104].clone()
    leaf = x.double().requires_grad_()
    exact = torch.nn.functional.gelu(leaf, approximate="tanh")
    (slope,) = torch.autograd.grad(exact, leaf, dy.double())
    check(step_parts.gelu(x), exact.detach(), ROUNDED)
    again, dx = step_parts.gelu_backward(x.clone(), dy)
    check(again, exact.detach(), ROUNDED)
    check(dx, slope, ROUNDED)
    assert len(launched.names) == 2


def test_stream_gradient_and_sums(device, launched):
    stream, branch = (normal(130 + i, 520, dtype=torch.bfloat16, device=device)[:130] for i in (0, 1))
    exact = stream.double() + branch.double()
    sums = step_parts.add_with_sums(stream, branch)
    check(stream, exact, ROUNDED)
    check(sums, exact.sum(0), ROUNDED)
    assert len(launched.names) == 2


@pytest.mark.parametrize(
    ("vocabulary", "channels", "places", "often"),
    [(9, 1032, 50, 25), (5, 8, 32, 32), (40, 264, 330, 190), (5, 8, 3, 1)],
)
def test_table_gradient(device, vocabulary, channels, places, often):
    """Tokens that come often, now and then, and never."""
    generator = torch.Generator().manual_seed(places)
    tokens = torch.randint(0, vocabulary - 1, (places,), generator=generator)
    tokens[torch.randperm(places, generator=generator)[:often]] = 1
    tokens = tokens.to(device)
    of_head = normal(vocabulary, channels, device=device)
    dx = normal(places, channels, dtype=torch.bfloat16, device=device)
    table = torch.full((vocabulary, channels), torch.nan, dtype=torch.bfloat16, device=device)
    exact = of_head.double().index_add(0, tokens, dx.double())
    check(step_parts.token_gradient(table, of_head, dx, tokens), exact, ROUNDED)
    again = step_parts.token_gradient(table.clone(), of_head, dx, tokens)
    assert torch.equal(again, table)


@pytest.mark.parametrize("count", [2104, 1_200_008])
def test_gradient_norm(device, count):
    gradients = normal(count, dtype=torch.bfloat16, device=device)
    norm = torch.zeros(1, device=device)
    step_parts.norm_of(norm, gradients)
    check(norm, gradients.double().norm()[None], 1e-6)


@pytest.mark.parametrize(
    ("count", "decayed", "norm"), [(4112, 2064, 3.0), (64, 0, 0.5), (64, 0, float("nan"))]
)
def test_adamw(device, count, decayed, norm):
    """Beside torch's operations in float64, which another test holds to PyTorch's AdamW."""
    master, mean = normal(count, device=device), normal(count + 8, device=device)[:count] / 9
    square = normal(count + 16, device=device)[:count].square()
    gradients = normal(count + 24, dtype=torch.bfloat16, device=device)[:count].clone()
    numbers, norms = torch.tensor([0.01, 0.19, 0.0975], device=device), torch.tensor([norm], device=device)
    tensors = {"master": master, "working": master.bfloat16(), "gradients": gradients, "mean": mean}
    tensors |= {"square": square, "numbers": numbers, "norm": norms}
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    options = step_parts.AdamW(0.9, 0.95, 1e-8, 0.1, 1.0)
    step_parts.adamw(**tensors, decayed=decayed, options=options)
    step_parts.adamw(**wide, decayed=decayed, options=options)
    for name in ("master", "mean", "square"):
        check(tensors[name], wide[name], 1e-6)
    check(tensors["working"], wide["working"], ROUNDED)
