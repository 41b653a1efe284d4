"""`replace(model, pairs)`: results and state stay equal, and invalid pairs raise one-line errors."""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.nn import replace, replacing

H = 8
QKV = [("norm", "attention.query"), ("norm", "attention.key"), ("norm", "attention.value")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(H, H, bias=bias) for bias in (True, False, True))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(H, eps=1e-3), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(H, elementwise_affine=False), nn.Linear(H, 12), nn.GELU(), nn.Linear(12, H)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def make_blocks() -> nn.Sequential:
    """Return two blocks in float64 with random parameters; initial ones and zeros would hide errors."""
    model = nn.Sequential(Block(), Block()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def run_forward_and_backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the output, and the gradients of x and of every parameter."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.cos().sum().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(model: nn.Module, reference: nn.Module, x: torch.Tensor):
    torch.testing.assert_close(
        run_forward_and_backward(model, x), run_forward_and_backward(reference, x), rtol=1e-9, atol=1e-9
    )


X = torch.randn(2, 3, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
PAIRS = [*QKV, ("mlp.0", "mlp.1")]


@pytest.fixture
def run_in_pytorch(monkeypatch):
    """Run replaced pairs in PyTorch and record each call's options."""
    calls = []

    def compute(x, ln_weight, ln_bias, weight, bias, eps, **options):
        calls.append(options)
        return F.linear(F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps), weight, bias)

    monkeypatch.setattr(replacing, "fused_layernorm_linear", compute)
    return calls


def test_pairs_are_replaced_in_every_block():
    """Three Linear layers share a LayerNorm, whose gradients accumulate."""
    model = make_blocks()
    reference = copy.deepcopy(model)
    assert len(replace(model, PAIRS)) == 8
    assert_same(model, reference, X)


def test_parameters_and_modes_are_preserved(run_in_pytorch):
    model = make_blocks().eval()
    model[1].train()
    reference, parameters = copy.deepcopy(model), dict(model.named_parameters())
    modes = [m.training for m in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = replace(model, PAIRS[:2], algorithm="pairs", memory="least")
    assert names == [(f"{i}.norm", f"{i}.attention.{layer}") for layer in ("query", "key") for i in range(2)]
    assert replace(model, [("0.mlp.0", "0.mlp.1")]) == [("0.mlp.0", "0.mlp.1")]
    assert [m.training for m in model.modules()] == modes
    new_parameters = dict(model.named_parameters())
    assert new_parameters.keys() == parameters.keys() and all(
        new_parameters[name] is parameters[name] for name in parameters
    )
    assert model.state_dict().keys() == reference.state_dict().keys()
    run_forward_and_backward(model, X)
    assert run_in_pytorch.count({"algorithm": "pairs", "memory": "least"}) == 4 and len(run_in_pytorch) == 5
    optimizer.step()
    reference.load_state_dict(model.state_dict())
    assert not torch.equal(reference(X), make_blocks()(X))


def test_replaced_model_can_be_copied_and_converted(run_in_pytorch):
    model = make_blocks()
    reference = copy.deepcopy(model)
    replace(model, PAIRS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        copied.load_state_dict(reference.state_dict())
        assert_same(copied, reference, X)
        assert_same(copied.float().double(), copy.deepcopy(reference).float().double(), X)
    model.load_state_dict(reference.state_dict())
    assert_same(model, reference, X)


@pytest.mark.parametrize("training", [True, False])
def test_pairs_in_pytorchs_encoder_layer_are_replaced(run_in_pytorch, training):
    """In inference mode the encoder layer calls a fused PyTorch function with all parameters."""
    layer = nn.TransformerEncoderLayer(H, 2, 12, 0.0, batch_first=True, norm_first=True)
    model = layer.double().train(training)
    reference = copy.deepcopy(model)
    replace(model, [("norm2", "linear1")])
    assert_same(model, reference, X)
    with torch.no_grad():
        torch.testing.assert_close(model(X), reference(X))


def test_conv1d_weight_is_transposed(run_in_pytorch):
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(nn.LayerNorm(H), utils.Conv1D(5, H)).double()
    reference = copy.deepcopy(model)
    replace(model, [("0", "1")])
    assert_same(model, reference, X)


class LinearSubclass(nn.Linear):
    """A subclass, whose forward is unknown."""


def make_pair(
    norm: nn.Module | None = None, linear: nn.Module | None = None, *rest: nn.Module
) -> nn.Sequential:
    return nn.Sequential(norm or nn.LayerNorm(H), linear or nn.Linear(H, H), *rest)


def add_hook(model: nn.Sequential, index: int) -> nn.Sequential:
    model[index].register_forward_hook(lambda *_: None)
    return model


def repeat_norm(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(model[0], model[1], model[0])


@pytest.mark.parametrize(
    ("model", "pairs", "error"),
    [
        (None, [("0", "1")], "model: expected nn.Module, got NoneType"),
        (make_pair(), ["01"], "pairs: expected names of a LayerNorm and a Linear, got '01'"),
        (make_pair(), [("0", "2")], "pairs: no block of the model has both '0' and '2'"),
        (make_pair(nn.RMSNorm(H)), [("0", "1")], "0: expected torch.nn.modules.normalization.LayerNorm, got"),
        (
            make_pair(None, LinearSubclass(H, H)),
            [("0", "1")],
            "1: expected torch.nn.modules.linear.Linear or transformers",
        ),
        (make_pair(nn.LayerNorm(4)), [("0", "1")], "0: expected (8,), as 1 reads, got (4,)"),
        (make_pair(nn.LayerNorm([3, H])), [("0", "1")], "0: expected (8,), as 1 reads, got (3, 8)"),
        (
            make_pair(nn.LayerNorm(H).double()),
            [("0", "1")],
            "0: expected torch.float32 on cpu, as 1, got torch.float64 on cpu",
        ),
        (
            make_pair(nn.LayerNorm(H, device="meta")),
            [("0", "1")],
            "0: expected torch.float32 on cpu, as 1, got torch.float32 on meta",
        ),
        (add_hook(make_pair(), 0), [("0", "1")], "0: it has hooks or an overridden forward"),
        (add_hook(make_pair(), 1), [("0", "1")], "1: it has hooks or an overridden forward"),
        (repeat_norm(make_pair()), [("0", "1")], "0: it occurs 2 times in the model"),
        (make_pair(None, nn.Dropout(), nn.Linear(H, H)), [("0", "2")], "0: 1 reads it, not 2"),
        (nn.Sequential(make_pair(), nn.Linear(H, H)), [("0.0", "1")], "0.0: 0.1 reads it, not 1"),
        (make_pair(), [("0", "1"), ("0", "1")], "1: it occurs in two pairs"),
    ],
)
def test_invalid_pair_raises_and_changes_nothing(model, pairs, error):
    before = repr(model)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(error)}") as raised:
        replace(model, pairs)
    assert "\n" not in str(raised.value) and repr(model) == before


def test_unknown_option_is_rejected():
    with pytest.raises(ValueError, match=r"^memory: expected"):
        replace(make_pair(), [("0", "1")], memory="little")


def test_error_in_a_later_pair_changes_nothing():
    model = make_blocks()
    with pytest.raises(ValueError, match="no block"):
        replace(model, [*PAIRS, ("norm", "attention.output")])
    assert type(model[0].norm) is nn.LayerNorm
    replace(model, PAIRS[:1])
    with pytest.raises(TypeError, match=r"^0\.norm: expected"):
        replace(model, PAIRS[1:2])
