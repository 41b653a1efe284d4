"""Tensors beyond grid limits and 32-bit offsets, on a real GPU: the last rows must match a small call."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typed import erase_types

from harness import nn

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
attention, attention_varlen = erase_types(nn.attention), erase_types(nn.attention_varlen)
linear_cross_entropy, layernorm_linear = (
    erase_types(nn.linear_cross_entropy),
    erase_types(nn.fused_layernorm_linear),
)
LAST_ROWS = slice(-2, None)


def make_normal(*shape):
    return torch.randn(shape, device="cuda", dtype=BF16)


def run_forward_and_backward(function, *inputs):
    """Return the output and the gradients of all inputs for an output gradient of ones."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def assert_within_rounding(got, expected):
    """Assert a difference of at most eight bfloat16 roundings of the largest element."""
    for actual, reference in zip(got, expected, strict=True):
        limit = 8 * torch.finfo(BF16).eps * reference.abs().max().clamp(min=0.1)
        assert (actual - reference).abs().max() <= limit


def take_last_rows(tensors):
    return [t[LAST_ROWS] for t in tensors]


@pytest.mark.parametrize("shape", [(66_000, 1, 3, 64), (1, 65_536, 3, 64)], ids=str)
def test_gpu_attention_batches_or_heads_beyond_grid_y(shape):
    tensors = [make_normal(*shape) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other kernels raise "invalid argument"
        expected = run_forward_and_backward(F.scaled_dot_product_attention, *tensors)
    assert_within_rounding(run_forward_and_backward(attention, *tensors), expected)


@pytest.mark.parametrize(
    "shape", [(2**15 + 1, 64, 16, 64), (2**20 + 1, 128, 1, 16)], ids=["wgmma", "mma.sync"]
)
def test_gpu_attention_beyond_int32_elements(shape):
    tensors = [make_normal(*shape) for _ in range(3)]
    expected = run_forward_and_backward(F.scaled_dot_product_attention, *take_last_rows(tensors))
    assert_within_rounding(take_last_rows(run_forward_and_backward(attention, *tensors)), expected)


def test_gpu_varlen_attention_beyond_int32_elements():
    tensors, end = [make_normal(2**21 + 16, 16, 64) for _ in range(3)], slice(-16, None)
    offsets = torch.arange(0, 2**21 + 17, 16, device="cuda", dtype=torch.int32)
    got = run_forward_and_backward(lambda *t: attention_varlen(*t, offsets, offsets), *tensors)
    expected = run_forward_and_backward(
        F.scaled_dot_product_attention, *(t[end].transpose(0, 1) for t in tensors)
    )
    assert_within_rounding([t[end] for t in got], [t.transpose(0, 1) for t in expected])


@pytest.mark.parametrize(
    "sizes", [(2**16 + 1, 2**15, 8), (2**16 + 1, 8, 2**15 + 8), (2**28 + 1, 8, 8)], ids=str
)
def test_gpu_layernorm_linear_beyond_int32_elements(sizes):
    rows, H, O = sizes
    x, parameters = make_normal(rows, H), [make_normal(*size) / H**0.5 for size in ((H,), (H,), (O, H), (O,))]

    def run_pytorch(x, g, b, W, c):
        return F.linear(F.layer_norm(x, (H,), g, b), W, c)

    got = run_forward_and_backward(layernorm_linear, x, *parameters)
    assert_within_rounding(
        take_last_rows(got[:2]), run_forward_and_backward(run_pytorch, x[LAST_ROWS], *parameters)[:2]
    )
    assert_within_rounding(got[2:], run_forward_and_backward(run_pytorch, x, *parameters)[2:])


def test_gpu_cross_entropy_chunk_beyond_int32_logits():
    rows, classes = 2048, 2**20 + 2**13
    x, weight, target = (
        make_normal(rows, 16),
        make_normal(classes, 16),
        torch.randint(classes, (rows,), device="cuda"),
    )
    got = run_forward_and_backward(
        lambda x, W: linear_cross_entropy(x, W, target, reduction="none"), x, weight
    )
    expected = run_forward_and_backward(
        lambda x, W: F.cross_entropy(F.linear(x, W).float(), target[LAST_ROWS], reduction="none"),
        x[LAST_ROWS],
        weight,
    )
    assert_within_rounding(take_last_rows(got[:2]), expected[:2])
