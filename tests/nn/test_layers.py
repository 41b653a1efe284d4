"""`LayerNormLinear` in the place of `nn.Sequential(nn.LayerNorm, nn.Linear)`, and the function in all of torch's modes."""

import copy
import io
import os
import pickle
import shutil

import pytest
import torch
import torch.nn.functional as F
from layer_checks import layer_from
from torch import nn
from torch.utils.checkpoint import checkpoint
from typed import present

import harness
from harness.nn.autograd import ALGORITHMS
from harness.nn.layers import LayerNormLinear, fused_layernorm_linear

H, O = 6, 5


def sequential(**linear_options):
    """What the layer replaces, with parameters that are not the initial ones and zeros of LayerNorm."""
    torch.manual_seed(3)
    ln = nn.LayerNorm(H)
    modules = nn.Sequential(ln, nn.Linear(H, O, **linear_options))
    with torch.no_grad():
        ln.weight.add_(0.5 * torch.randn(H))
        ln.bias.add_(torch.randn(H))
    return modules


def random_input(*shape, seed=0):
    """Mean 2, and a gradient wanted."""
    generator = torch.Generator().manual_seed(seed)
    return (2 + torch.randn(*shape, H, generator=generator)).requires_grad_()


def assert_near(got, expected, relative=1e-5):
    """Same shape, and the largest difference is below `relative` of the largest value."""
    assert got.shape == expected.shape
    if expected.numel():
        assert (got - expected).abs().max() <= relative * expected.abs().max()


def assert_same_step(layer, reference, x, relative=1e-5):
    """The output and all gradients of one forward and backward pass agree."""
    mine, theirs = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    output, expected = layer(mine), reference(theirs)
    assert_near(output, expected, relative)
    grad_output = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    output.backward(grad_output)
    expected.backward(grad_output)
    assert_near(mine.grad, theirs.grad, relative)
    expected_gradients = dict(reference.named_parameters())
    for name, parameter in layer.named_parameters():
        assert_near(parameter.grad, expected_gradients[name].grad, relative)


# ---- In the place of the Sequential -------------------------------------------------------------------------


@pytest.mark.compiles
def test_state_dict_fits_both_ways():
    reference = sequential()
    layer = harness.LayerNormLinear(H, O)
    layer.load_state_dict(reference.state_dict())
    assert_same_step(layer, reference, random_input(2, 3))
    back = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
    back.load_state_dict(layer.state_dict())
    assert back.state_dict().keys() == reference.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in reference.state_dict().items())


def test_same_seed_same_parameters():
    torch.manual_seed(11)
    layer = LayerNormLinear(H, O)
    torch.manual_seed(11)
    reference = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
    assert all(map(torch.equal, layer.state_dict().values(), reference.state_dict().values()))


@pytest.mark.compiles
def test_from_modules_shares_the_modules():
    reference = sequential().eval()
    layer = layer_from(reference)
    assert layer.ln is reference[0] and layer.linear is reference[1] and not layer.training
    assert_near(layer(random_input(3)), reference(random_input(3)))
    with torch.no_grad():
        layer.linear.weight.mul_(2)
    assert_near(layer(random_input(3)), reference(random_input(3)))


@pytest.mark.parametrize(
    ("ln", "linear", "error", "message"),
    [
        (nn.RMSNorm(H), nn.Linear(H, O), TypeError, "ln: expected nn.LayerNorm, got RMSNorm"),
        (nn.LayerNorm(H), nn.Identity(), TypeError, "linear: expected nn.Linear, got Identity"),
        (
            nn.LayerNorm(H + 1),
            nn.Linear(H, O),
            ValueError,
            r"ln: expected normalized_shape \(6,\), .* got \(7,\)",
        ),
        (nn.LayerNorm([2, H]), nn.Linear(H, O), ValueError, r"ln: expected .* got \(2, 6\)"),
    ],
)
def test_from_modules_refuses(ln, linear, error, message):
    with pytest.raises(error, match=message):
        LayerNormLinear.from_modules(ln, linear)


@pytest.mark.compiles
@pytest.mark.parametrize("leading", [(), (1,), (0,), (4,), (2, 0, 3), (2, 3), (2, 1, 3, 2)])
def test_any_leading_dimensions(leading):
    reference = sequential()
    layer = LayerNormLinear(H, O)
    layer.load_state_dict(reference.state_dict())
    assert_same_step(layer, reference, random_input(*leading))


def test_zero_rows_give_zero_gradients():
    layer = LayerNormLinear(H, O)
    layer(random_input(0)).sum().backward()
    assert all(torch.equal(present(p.grad), torch.zeros_like(p)) for p in layer.parameters())


@pytest.mark.compiles
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps(eps):
    reference = sequential()
    reference[0].eps = eps
    assert_same_step(layer_from(copy.deepcopy(reference)), reference, random_input(2, 3))
    assert LayerNormLinear(H, O, eps=eps).ln.eps == eps


@pytest.mark.compiles
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("ln_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_optional_parameters(affine, ln_bias, bias):
    layer = LayerNormLinear(H, O, elementwise_affine=affine, ln_bias=ln_bias, bias=bias)
    reference = nn.Sequential(
        nn.LayerNorm(H, elementwise_affine=affine, bias=ln_bias), nn.Linear(H, O, bias=bias)
    )
    reference.load_state_dict(layer.state_dict())
    assert_same_step(layer, reference, random_input(2, 3))


@pytest.mark.compiles
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithm(algorithm):
    reference = sequential()
    layer = LayerNormLinear(H, O, algorithm=algorithm)
    layer.load_state_dict(reference.state_dict())
    assert f"algorithm={algorithm!r}" in repr(layer)
    assert_same_step(layer, reference, random_input(2, 3))


@pytest.mark.compiles
def test_frozen_parameters():
    layer = LayerNormLinear(H, O).requires_grad_(False)
    x = random_input(3)
    layer(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in layer.parameters())


def test_wrong_input_names_the_tensor():
    with pytest.raises(ValueError, match="ln_weight: expected 7 elements, the last dimension of x, got 6"):
        LayerNormLinear(H, O)(torch.zeros(2, H + 1))


@pytest.mark.compiles
def test_deepcopy_and_pickle():
    layer = layer_from(sequential(), algorithm="unfused")
    x = random_input(4)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(x), expected)
        assert all(a is not b for a, b in zip(other.parameters(), layer.parameters(), strict=True))
        with torch.no_grad():
            other.linear.weight.zero_()
        assert torch.equal(layer(x), expected)


# ---- Torch's modes ------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_inference_mode_and_no_grad():
    layer = layer_from(sequential())
    x = random_input(2, 3)
    expected = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), expected) and not layer(x).requires_grad
    with torch.inference_mode():
        inside = layer(x * 1)
        assert inside.is_inference() and torch.equal(inside, expected)


@pytest.mark.compiles
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    reference = nn.Sequential(sequential(), nn.GELU())
    layer = nn.Sequential(layer_from(copy.deepcopy(reference[0])), nn.GELU())

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    x, y = random_input(2, 3), random_input(2, 3)
    checkpointed(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert_near(x.grad, y.grad)
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)


@pytest.mark.compiles
def test_autocast_computes_in_its_dtype():
    """The result in bfloat16 is the layer's own on bfloat16 tensors; gradients come back in float32."""
    layer = layer_from(sequential())
    x = random_input(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    narrow = copy.deepcopy(layer).bfloat16()
    assert torch.equal(output, narrow(x.bfloat16()))
    output.sum().backward()
    assert present(x.grad).dtype == torch.float32
    assert all(present(parameter.grad).dtype == torch.float32 for parameter in layer.parameters())
    reference = sequential()
    other = random_input(2, 3)
    reference(other).sum().backward()
    assert_near(layer.linear.weight.grad, reference[1].weight.grad, relative=0.02)
    assert_near(x.grad, other.grad, relative=0.05)


@pytest.mark.compiles
def test_autocast_keeps_statistics_in_float32():
    """In bfloat16 the sum of 512 values of 3 stops growing at 512: statistics in it would be far off."""
    wide = 512
    x = 3 + 0.5 * torch.randn(4, wide, generator=torch.Generator().manual_seed(0))
    weight = torch.eye(wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused_layernorm_linear(x, None, None, weight, None)
    truth = F.layer_norm(x.bfloat16().double(), (wide,))
    assert (output.double() - truth).abs().max() < 0.01 * truth.abs().max()


@pytest.mark.compiles
def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert LayerNormLinear(H, O, dtype=torch.float64)(random_input(2).double()).dtype == torch.float64


# ---- torch.compile ------------------------------------------------------------------------------------------

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(
    not COMPILER, reason="torch.compile on a CPU needs a C++ compiler; none found"
)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.compiles
@needs_compiler
def test_compile_fullgraph(fresh_dynamo):
    reference = nn.Sequential(sequential(), nn.GELU())
    layer = nn.Sequential(layer_from(copy.deepcopy(reference[0])), nn.GELU())
    compiled = torch.compile(layer, fullgraph=True)
    x, y = random_input(2, 3), random_input(2, 3)
    compiled(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert_near(x.grad, y.grad)
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)


@pytest.mark.compiles
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_third_length_recompiles_nothing(fresh_dynamo, dynamic):
    """The second length may make the size dynamic; from the third on, forward and backward are compiled no more."""
    layer = layer_from(sequential())
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (3, 4):
        compiled(random_input(2, length)).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (5, 17, 2):
            x, y = random_input(2, length), random_input(2, length)
            compiled(x).square().sum().backward()
            sequential()(y).square().sum().backward()
            assert_near(x.grad, y.grad)


@pytest.mark.compiles
def test_compile_under_autocast(fresh_dynamo):
    layer = layer_from(sequential())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = random_input(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = layer(x), compiled(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)
    got.sum().backward()
    assert present(x.grad).dtype == torch.float32


def test_compile_checks_arguments_too(fresh_dynamo):
    compiled = torch.compile(LayerNormLinear(H, O), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="ln_weight: expected 7 elements, the last dimension of x, got 6"):
        compiled(torch.zeros(2, H + 1))


@pytest.mark.gpu
def test_gpu_compile(fresh_dynamo):
    reference = sequential().cuda()
    layer = layer_from(copy.deepcopy(reference))
    compiled = torch.compile(layer, fullgraph=True)
    x, y = (random_input(2, 3).detach().cuda().requires_grad_() for _ in range(2))
    compiled(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert_near(x.grad, y.grad, relative=1e-4)
    unfused = layer_from(copy.deepcopy(reference), algorithm="unfused")
    with pytest.raises(Exception, match="cannot be captured in a CUDA graph"):
        graphed = torch.compile(unfused, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            graphed(x.detach())
