"""`harness.nn.attention` on a real GPU: values and gradients in every dtype, streams, devices, memory, and bits."""

import gc
import random
from typing import Any

import pytest
import torch
from attention_checks import assert_as_accurate_as_pytorch, differentiate, make_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from typed import as_triple

from harness.nn import attention, attention_layer

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that have kernels."""


def make_gpu_inputs(device="cuda", **sizes) -> list[torch.Tensor]:
    """Return query, key and value on a GPU."""
    return [tensor.to(device) for tensor in make_inputs(**sizes)]


def make_random_mask(rng: random.Random, B: int, N: int, S: int, T: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a random mask: padding, masked tiles, fully masked rows, or additive with arbitrary strides."""
    kind = rng.randrange(6)
    if kind == 0:
        lengths = torch.tensor([rng.randint(0, T) for _ in range(B)])
        return (torch.arange(T) < lengths[:, None])[:, None, None, :]
    if kind == 1:
        tiles = torch.rand(B, N, 1, -(-T // 64)) < 0.5
        return (torch.rand(B, N, 1, T) < 0.3) & tiles.repeat_interleave(64, -1)[..., :T]
    if kind == 2:
        return (torch.rand(B, rng.choice([1, N]), S, T) < 0.6) & (torch.arange(S) % 3 != 0)[:, None]
    if kind == 3:
        return torch.randn(1, N, 1, T, dtype=dtype)
    if kind == 4:
        return torch.randn(B, N, S, T + rng.choice([0, 8 + -T % 8]), dtype=dtype)[..., -T:]
    return torch.randn(rng.choice([1, B]), N, S, T, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_gpu_random_masked_calls_are_accurate_and_reproducible(seed):
    """Run fifty calls per seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(50):
        dtype = rng.choice([torch.bfloat16, torch.float16])
        B, G, query_heads_per_key_head = rng.randint(1, 3), rng.randint(1, 3), rng.choice([1, 1, 2])
        S = rng.choice([1, 63, 64, 65, 128, 129, 200, 257, 511])
        T = rng.choice([2, 16, 64, 65, 120, 128, 136, 192, 200, 320, 520])
        d = rng.choice([8, 40, 64, 72, 80, 128])
        tensors = make_gpu_inputs(B=B, N=G * query_heads_per_key_head, G=G, S=S, T=T, d=d, dtype=dtype)
        with torch.device("cuda"):
            mask = make_random_mask(rng, B, G * query_heads_per_key_head, S, T, dtype)
        options = {"attn_mask": mask, "enable_gqa": query_heads_per_key_head > 1}
        with sdpa_kernel(SDPBackend.MATH):
            assert_as_accurate_as_pytorch(tensors, **options)
        runs = [differentiate(attention, tensors, **options) for _ in range(2)]
        assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_gpu_repeated_runs_are_bit_equal(dtype, d):
    tensors = make_gpu_inputs(B=2, N=12, S=512, T=512, d=d, dtype=dtype)
    runs = [differentiate(attention, tensors, is_causal=True) for _ in range(20)]
    assert all(
        torch.equal(result, reference)
        for run in runs[1:]
        for result, reference in zip(run, runs[0], strict=True)
    )


@pytest.mark.gpu
def test_gpu_kernels_wait_for_a_side_stream():
    """Inputs are written after a long kernel on the side stream: a call that does not wait reads stale values."""
    side = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    sources = [make_gpu_inputs(S=100, T=100, d=64, dtype=torch.bfloat16, seed=seed) for seed in range(10)]
    expected = [differentiate(attention, source) for source in sources]
    leaves = [torch.zeros_like(tensor) for tensor in sources[0]]
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(side):
        for source in sources:
            busy = busy @ busy * 1e-4
            for leaf, tensor in zip(leaves, source, strict=True):
                leaf.copy_(tensor)
            got.append([tensor * 1 for tensor in differentiate(attention, leaves)])
    torch.cuda.synchronize()
    for actual, reference in zip(got, expected, strict=True):
        assert all(
            torch.equal(result, expected_result)
            for result, expected_result in zip(actual, reference, strict=True)
        )


@pytest.mark.gpu
def test_gpu_memory_is_constant_over_a_thousand_steps():
    leaves = [tensor.requires_grad_() for tensor in make_gpu_inputs(S=128, T=128, d=64, dtype=torch.bfloat16)]
    mask = torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def measure_memory(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            attention(*leaves, attn_mask=mask).square().sum().backward()
            for leaf in (*leaves, mask):
                leaf.grad = None
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    measure_memory(10)
    gc.collect()  # garbage of earlier tests
    assert measure_memory(10) == measure_memory(1000)


@pytest.mark.gpu
def test_gpu_peak_memory_excludes_scores():
    """A step allocates only the output, the gradients and a few numbers per row."""
    leaves = as_triple(
        tensor.requires_grad_()
        for tensor in make_gpu_inputs(B=1, N=4, S=4096, T=4096, d=64, dtype=torch.bfloat16)
    )
    attention(*leaves).sum().backward()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(*leaves).sum().backward()
    operand = leaves[0].numel() * 2
    assert torch.cuda.max_memory_allocated() - before < 10 * operand < 4 * 4096 * 4096 * 2


@pytest.mark.gpu(count=2)
def test_gpu_noncurrent_device():
    with torch.cuda.device(0):
        assert_as_accurate_as_pytorch(
            make_gpu_inputs("cuda:1", S=50, T=60, d=64, dtype=torch.bfloat16), is_causal=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d", "options"), [
    (torch.float32, 128, {"scale": -0.2}),
    (torch.float32, 40, {"attn_mask": (64, 1)}),
    (torch.bfloat16, 192, {"attn_mask": (64, 64)}),
    (torch.float16, 72, {"attn_mask": (64, 1)}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", ["padded rows", "shifted by one element"])
def test_gpu_pytorch_fallback_accepts_unaligned_tensors(dtype, d, options: dict[str, Any], layout):
    """PyTorch's kernels reject rows that are not 16-byte aligned, or fail and corrupt the CUDA context."""

    def unalign(tensor):
        if layout == "padded rows":
            return torch.nn.functional.pad(tensor, (1, 2))[..., 1:-2]
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    leaves = [unalign(t.detach()).requires_grad_() for t in make_gpu_inputs(S=64, T=64, d=d, dtype=dtype)]
    if "attn_mask" in options:
        mask = torch.randn(options["attn_mask"], device="cuda").to(dtype)
        options = {"attn_mask": unalign(mask).requires_grad_()}
        leaves.append(options["attn_mask"])
    explanation = attention_layer.explain(leaves[0], attn_mask=options.get("attn_mask"))
    assert explanation.startswith("PyTorch's own") == (dtype == torch.float32 or "attn_mask" in options)

    def run(function):
        output = function(*leaves[:3], **options)
        return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    with sdpa_kernel(SDPBackend.MATH):
        expected = run(torch.nn.functional.scaled_dot_product_attention)
    torch.testing.assert_close(
        run(attention), expected, rtol=0.03, atol=0.03 if dtype != torch.float32 else 1e-3
    )
