"""`LayerNormLinear` as a drop-in replacement for `nn.Sequential(nn.LayerNorm, nn.Linear)`, on a CPU."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import harness
from harness.nn import layers
from harness.nn.layers import ALGORITHMS, MEMORY_MODES, LayerNormLinear, fused_layernorm_linear

H, O = 6, 5


def make_sequential(**linear_options):
    """Return LayerNorm and Linear with random parameters."""
    torch.manual_seed(3)
    ln = nn.LayerNorm(H)
    modules = nn.Sequential(ln, nn.Linear(H, O, **linear_options))
    with torch.no_grad():
        ln.weight.add_(0.5 * torch.randn(H))
        ln.bias.add_(torch.randn(H))
    return modules


def make_layer(modules: nn.Sequential, algorithm: str = "fast") -> LayerNormLinear:
    """Return the layer of a LayerNorm and a Linear."""
    ln, linear = modules.children()
    assert isinstance(ln, nn.LayerNorm) and isinstance(linear, nn.Linear)
    return LayerNormLinear.from_modules(ln, linear, algorithm=algorithm)


def make_input(*shape, seed=0):
    """Return a random input with mean 2 that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return (2 + torch.randn(*shape, H, generator=generator)).requires_grad_()


def assert_close(got, expected, relative=1e-5):
    """Assert equal shapes and a maximum difference of at most `relative` times the largest value."""
    assert got.shape == expected.shape
    if expected.numel():
        assert (got - expected).abs().max() <= relative * expected.abs().max()


def assert_same_step(layer, reference, x, relative=1e-5):
    """Compare the output and all gradients of two modules."""
    x_layer, x_reference = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    output, expected = layer(x_layer), reference(x_reference)
    assert_close(output, expected, relative)
    grad_output = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    output.backward(grad_output)
    expected.backward(grad_output)
    assert_close(x_layer.grad, x_reference.grad, relative)
    expected_gradients = dict(reference.named_parameters())
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, expected_gradients[name].grad, relative)


# ---- Compared with nn.Sequential -------------------------------------------------------------------------


def test_state_dicts_are_interchangeable():
    reference = make_sequential()
    layer = harness.LayerNormLinear(H, O)
    layer.load_state_dict(reference.state_dict())
    assert_same_step(layer, reference, make_input(2, 3))
    restored = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
    restored.load_state_dict(layer.state_dict())
    assert restored.state_dict().keys() == reference.state_dict().keys()
    assert all(torch.equal(restored.state_dict()[key], t) for key, t in reference.state_dict().items())


def test_initialization_matches_sequential():
    torch.manual_seed(11)
    layer = LayerNormLinear(H, O)
    torch.manual_seed(11)
    reference = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
    assert all(map(torch.equal, layer.state_dict().values(), reference.state_dict().values()))


def test_from_modules_shares_the_modules():
    reference = make_sequential().eval()
    layer = make_layer(reference)
    assert layer.ln is reference[0] and layer.linear is reference[1] and not layer.training
    assert_close(layer(make_input(3)), reference(make_input(3)))
    with torch.no_grad():
        layer.linear.weight.mul_(2)
    assert_close(layer(make_input(3)), reference(make_input(3)))


@pytest.mark.parametrize(
    ("ln", "linear", "error", "message"),
    [
        (nn.RMSNorm(H), nn.Linear(H, O), TypeError, "ln: expected nn.LayerNorm, got RMSNorm"),
        (nn.LayerNorm(H), nn.Identity(), TypeError, "linear: expected nn.Linear, got Identity"),
        (nn.LayerNorm(H + 1), nn.Linear(H, O), ValueError, r"normalized_shape \(6,\), .* got \(7,\)"),
        (nn.LayerNorm([2, H]), nn.Linear(H, O), ValueError, r"ln: expected .* got \(2, 6\)"),
    ],
)
def test_from_modules_rejects_invalid_modules(ln, linear, error, message):
    with pytest.raises(error, match=message):
        LayerNormLinear.from_modules(ln, linear)


@pytest.mark.parametrize("leading", [(), (1,), (0,), (4,), (2, 0, 3), (2, 3), (2, 1, 3, 2)])
def test_leading_dimensions_match_sequential(leading):
    reference = make_sequential()
    layer = LayerNormLinear(H, O)
    layer.load_state_dict(reference.state_dict())
    assert_same_step(layer, reference, make_input(*leading))


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_is_used(eps):
    reference = make_sequential()
    reference[0].eps = eps
    assert_same_step(make_layer(copy.deepcopy(reference)), reference, make_input(2, 3))
    assert LayerNormLinear(H, O, eps=eps).ln.eps == eps


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("ln_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_optional_parameters_match_sequential(affine, ln_bias, bias):
    layer = LayerNormLinear(H, O, elementwise_affine=affine, ln_bias=ln_bias, bias=bias)
    reference = nn.Sequential(
        nn.LayerNorm(H, elementwise_affine=affine, bias=ln_bias), nn.Linear(H, O, bias=bias)
    )
    reference.load_state_dict(layer.state_dict())
    assert_same_step(layer, reference, make_input(2, 3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("memory", MEMORY_MODES)
def test_algorithm_and_memory_options_match_sequential(algorithm, memory):
    reference = make_sequential()
    layer = LayerNormLinear(H, O, algorithm=algorithm, memory=memory)
    layer.load_state_dict(reference.state_dict())
    assert repr(layer).startswith(f"LayerNormLinear(\n  algorithm={algorithm!r}, memory={memory!r}")
    assert_same_step(layer, reference, make_input(2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "unfused"}, "algorithm: expected 'fast' or 'pairs', got 'unfused'"),
        ({"memory": "most"}, "memory: expected 'auto' or 'least', got 'most'"),
    ],
)
def test_unknown_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        LayerNormLinear(H, O, **options)(make_input(2))


@pytest.mark.parametrize(("x", "W"), [((2, 0), (5, 0)), ((2, 6), (0, 6))], ids=str)
def test_zero_features_are_accepted(x, W):
    with pytest.raises(ValueError, match=r"expected H >= 1 and O >= 1, got shapes \[2, \d\] and"):
        fused_layernorm_linear(torch.zeros(x), None, None, torch.zeros(W), None)


def test_size_mismatch_raises_pytorchs_error():
    for device in ("cpu", "meta"):
        layer = LayerNormLinear(H, O, device=device)
        with pytest.raises(RuntimeError, match="normalized_shape"):
            layer(torch.zeros(2, H + 1, device=device))
        assert layer(torch.zeros(2, H, device=device)).shape == (2, O)


def test_cpu_call_neither_warns_nor_builds(monkeypatch):
    monkeypatch.setattr(layers.host, "_load", lambda layer: pytest.fail("built"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = LayerNormLinear(H, O)
        layer(make_input(2))
        assert layer.explain(make_input(2))["backend"] == "PyTorch's own operations"


def test_graph_operator_exists_without_kernels():
    tensors = [make_input(2), None, None, torch.randn(O, H), None]
    operator = layers.get_operator()
    assert operator is layers.get_operator() and operator.name() == "mojo_workbook::layernorm_linear"
    assert torch.equal(operator(*tensors, 1e-5), fused_layernorm_linear(*tensors))
    torch.library.opcheck(operator, (*tensors, 1e-5))


def test_deepcopy_and_pickle_preserve_results():
    layer = make_layer(make_sequential(), algorithm="pairs")
    x = make_input(4)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for copied in copies:
        assert torch.equal(copied(x), expected)
        assert all(a is not b for a, b in zip(copied.parameters(), layer.parameters(), strict=True))
        with torch.no_grad():
            copied.linear.weight.zero_()
        assert torch.equal(layer(x), expected)
