"""LayerNorm + Linear on a real GPU: CUDA graphs, streams, memory, and sizes at the grid limits."""

import pytest
import torch
import torch.nn.functional as F
from typed import erase_types

from harness.nn import layers
from harness.nn.layers import LayerNormLinear

pytestmark = pytest.mark.gpu
fused_layernorm_linear = erase_types(layers.fused_layernorm_linear)
SIZES = [(512, 256, 1024), (30, 338, 97), (2048, 768, 3072), (100, 75, 53), (16, 8, 16), (37, 5931, 775)]


def make_inputs(M, H, O, dtype=torch.bfloat16, x_dtype=None):
    """Return [x, gamma, beta, W, bias] as leaves, and an output gradient."""
    torch.manual_seed(M)
    norm = torch.randn(M, H), 1 + 0.3 * torch.randn(H), torch.randn(H)
    inputs = *norm, torch.randn(O, H) / H**0.5, torch.randn(O)
    dtypes = [x_dtype or dtype] * 3 + [dtype] * 2
    leaves = [t.cuda().to(dtype).requires_grad_() for t, dtype in zip(inputs, dtypes, strict=True)]
    return leaves, torch.randn(M, O).cuda().to(dtype)


def step(inputs, dy, call=fused_layernorm_linear):
    """Return the output and all gradients."""
    y = call(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def call_with_autocast(*inputs):
    """Call the operator under autocast."""
    with torch.autocast("cuda", torch.bfloat16):
        return fused_layernorm_linear(*inputs)


def assert_near_float64(got, inputs, dy):
    """Assert that results are within a few bfloat16 roundings of float64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = step(wide, dy.double(), lambda x, g, b, W, c: F.linear(F.layer_norm(x, x.shape[-1:], g, b), W, c))
    for actual, exact in zip(got, truth, strict=True):
        assert (actual.double() - exact).norm() <= 6e-3 * exact.norm() + 1e-6


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cuda_graph_replays_both_passes(sizes, mixed):
    """The first call at each size is captured; replays are bit-equal and correct."""
    inputs, dy = make_inputs(*sizes, x_dtype=torch.float32 if mixed else None)
    call = call_with_autocast if mixed else fused_layernorm_linear
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        captured = step(inputs, dy, call)
    results = []
    for _ in range(2):
        for tensor in captured:
            tensor.detach().fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        results.append([tensor.clone() for tensor in captured])
    assert all(map(torch.equal, *results))
    assert_near_float64(results[0], inputs, dy)
    assert_near_float64(step(inputs, dy, call), inputs, dy)


def test_kernels_run_on_the_current_stream():
    inputs, dy = make_inputs(512, 256, 1024)
    expected = step(inputs, dy)
    side, large = torch.cuda.Stream(), torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            torch.mm(large, large)
        copies = [(t * 1).detach().requires_grad_() for t in inputs]
        got = step(copies, dy * 1)
    side.synchronize()
    assert all(map(torch.equal, got, expected))


def test_low_memory_computes_dW_first():
    inputs, dy = make_inputs(16384, 2048, 2048)
    expected = step(inputs, dy)[4]
    _, total = torch.cuda.mem_get_info()
    y = fused_layernorm_linear(*inputs)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 150e6) / total)
    try:
        gradients = torch.autograd.grad(y, inputs, dy)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (gradients[3] - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("M", "H", "O"), [(2**20 + 1, 8, 8), (3, 2**20, 8), (3, 2**20 + 8, 8), (3, 8, 2**20 + 8)], ids=str
)
def test_sizes_at_the_grid_limits(M, H, O):
    inputs, dy = make_inputs(M, H, O)
    got = step(inputs, dy)
    reference = step(inputs, dy, lambda x, g, b, W, c: F.linear(F.layer_norm(x, x.shape[-1:], g, b), W, c))
    for actual, expected in zip(got, reference, strict=True):
        assert (actual.float() - expected.float()).norm() <= 2e-2 * expected.float().norm() + 1e-6


def test_explain_reports_kernels():
    layer = LayerNormLinear(256, 1024, device="cuda", dtype=torch.bfloat16)
    explanation = layer.explain(torch.empty(512, 256, device="cuda", dtype=torch.bfloat16))
    assert explanation["backend"] == "kernels" and explanation["backward in a CUDA graph"] == "two branches"
