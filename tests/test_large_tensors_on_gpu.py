"""Tensors beyond the limits of grids and of 32-bit offsets, on a real GPU: the last entries are those of a small call."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from typed import loosely

from harness import nn

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
attention, attention_varlen = loosely(nn.attention), loosely(nn.attention_varlen)
linear_cross_entropy, layernorm_linear = loosely(nn.linear_cross_entropy), loosely(nn.fused_layernorm_linear)
LAST = slice(-2, None)


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=BF16)


def both_passes(function, *given):
    """Return the output and the gradients of all inputs, for a gradient of ones."""
    leaves = [t.detach().requires_grad_() for t in given]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def assert_near(got, expected):
    """Assert that tensors differ by at most some units of bfloat16 of the largest element."""
    for ours, theirs in zip(got, expected, strict=True):
        limit = 8 * torch.finfo(BF16).eps * theirs.abs().max().clamp(min=0.1)
        assert (ours - theirs).abs().max() <= limit


def last(tensors):
    return [t[LAST] for t in tensors]


@pytest.mark.parametrize("shape", [(66_000, 1, 3, 64), (1, 65_536, 3, 64)], ids=str)
def test_gpu_attention_of_more_batches_or_heads_than_a_grid_s_second_axis(shape):
    tensors = [normal(*shape) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other kernels raise "invalid argument"
        expected = both_passes(F.scaled_dot_product_attention, *tensors)
    assert_near(both_passes(attention, *tensors), expected)


@pytest.mark.parametrize(
    "shape", [(2**15 + 1, 64, 16, 64), (2**20 + 1, 128, 1, 16)], ids=["wgmma", "mma.sync"]
)
def test_gpu_attention_of_more_elements_than_32_bits_count(shape):
    tensors = [normal(*shape) for _ in range(3)]
    expected = both_passes(F.scaled_dot_product_attention, *last(tensors))
    assert_near(last(both_passes(attention, *tensors)), expected)


def test_gpu_sequences_of_more_elements_than_32_bits_count():
    tensors, end = [normal(2**21 + 16, 16, 64) for _ in range(3)], slice(-16, None)
    offsets = torch.arange(0, 2**21 + 17, 16, device="cuda", dtype=torch.int32)
    got = both_passes(lambda *t: attention_varlen(*t, offsets, offsets), *tensors)
    expected = both_passes(F.scaled_dot_product_attention, *(t[end].transpose(0, 1) for t in tensors))
    assert_near([t[end] for t in got], [t.transpose(0, 1) for t in expected])


@pytest.mark.parametrize(
    "sizes", [(2**16 + 1, 2**15, 8), (2**16 + 1, 8, 2**15 + 8), (2**28 + 1, 8, 8)], ids=str
)
def test_gpu_layernorm_linear_of_more_elements_than_32_bits_count(sizes):
    rows, H, O = sizes
    x, parameters = normal(rows, H), [normal(*size) / H**0.5 for size in ((H,), (H,), (O, H), (O,))]

    def by_torch(x, g, b, W, c):
        return F.linear(F.layer_norm(x, (H,), g, b), W, c)

    got = both_passes(layernorm_linear, x, *parameters)
    assert_near(last(got[:2]), both_passes(by_torch, x[LAST], *parameters)[:2])
    assert_near(got[2:], both_passes(by_torch, x, *parameters)[2:])


def test_gpu_more_logits_of_a_chunk_than_32_bits_count():
    rows, classes = 2048, 2**20 + 2**13
    x, weight, target = normal(rows, 16), normal(classes, 16), torch.randint(classes, (rows,), device="cuda")
    got = both_passes(lambda x, W: linear_cross_entropy(x, W, target, reduction="none"), x, weight)
    expected = both_passes(
        lambda x, W: F.cross_entropy(F.linear(x, W).float(), target[LAST], reduction="none"), x[LAST], weight
    )
    assert_near(last(got[:2]), expected[:2])
