"""`replace(model, pairs)`: outputs, gradients and state as before, and one line for a pair that it refuses."""

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


def blocks() -> nn.Sequential:
    """Two blocks in float64, with random parameters: behind a LayerNorm's ones and zeros mistakes hide."""
    model = nn.Sequential(Block(), Block()).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The output, and the gradients of x and of every parameter."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.cos().sum().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(model: nn.Module, plain: nn.Module, x: torch.Tensor):
    for mine, other in zip(outcome(model, x), outcome(plain, x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


X = torch.randn(2, 3, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
PAIRS = [*QKV, ("mlp.0", "mlp.1")]


@pytest.fixture
def in_torch(monkeypatch):
    """PyTorch computes the pairs; the choices that each was asked with."""
    choices = []

    def compute(x, ln_weight, ln_bias, weight, bias, eps, **how):
        choices.append(how)
        return F.linear(F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps), weight, bias)

    monkeypatch.setattr(replacing, "fused_layernorm_linear", compute)
    return choices


def test_the_kernels_compute_named_pairs_in_every_block():
    """Three Linear layers share a LayerNorm, and have its gradient together."""
    model = blocks()
    plain = copy.deepcopy(model)
    assert len(replace(model, PAIRS)) == 8
    assert_same(model, plain, X)


def test_all_parameters_stay_where_they_are(in_torch):
    model = blocks().eval()
    model[1].train()
    plain, kept, modes = (
        copy.deepcopy(model),
        dict(model.named_parameters()),
        [m.training for m in model.modules()],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = replace(model, PAIRS[:2], algorithm="pairs", memory="least")
    assert names == [(f"{i}.norm", f"{i}.attention.{each}") for each in ("query", "key") for i in range(2)]
    assert replace(model, [("0.mlp.0", "0.mlp.1")]) == [("0.mlp.0", "0.mlp.1")]
    assert [m.training for m in model.modules()] == modes
    now = dict(model.named_parameters())
    assert now.keys() == kept.keys() and all(now[name] is kept[name] for name in kept)
    assert model.state_dict().keys() == plain.state_dict().keys()
    outcome(model, X)
    assert in_torch.count({"algorithm": "pairs", "memory": "least"}) == 4 and len(in_torch) == 5
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(plain(X), blocks()(X))


def test_copies_pickles_dtypes_and_state(in_torch):
    model = blocks()
    plain = copy.deepcopy(model)
    replace(model, PAIRS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(plain.state_dict())
        assert_same(other, plain, X)
        assert_same(other.float().double(), copy.deepcopy(plain).float().double(), X)
    model.load_state_dict(plain.state_dict())
    assert_same(model, plain, X)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_of_torch_s(in_torch, training):
    """In inference it calls one function of PyTorch's with all parameters."""
    model = (
        nn.TransformerEncoderLayer(H, 2, 12, 0.0, batch_first=True, norm_first=True).double().train(training)
    )
    plain = copy.deepcopy(model)
    replace(model, [("norm2", "linear1")])
    assert_same(model, plain, X)
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


def test_the_weight_of_conv1d_lies_the_other_way(in_torch):
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(nn.LayerNorm(H), utils.Conv1D(5, H)).double()
    plain = copy.deepcopy(model)
    replace(model, [("0", "1")])
    assert_same(model, plain, X)


class Own(nn.Linear):
    """A subclass, which may compute anything."""


def pair(norm: nn.Module | None = None, linear: nn.Module | None = None, *rest: nn.Module) -> nn.Sequential:
    return nn.Sequential(norm or nn.LayerNorm(H), linear or nn.Linear(H, H), *rest)


def hooked(model: nn.Sequential, place: int) -> nn.Sequential:
    model[place].register_forward_hook(lambda *_: None)
    return model


def twice(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(model[0], model[1], model[0])


@pytest.mark.parametrize(
    ("model", "pairs", "error"),
    [
        (None, [("0", "1")], "model: expected nn.Module, got NoneType"),
        (pair(), ["01"], "pairs: expected names of a LayerNorm and a Linear, got '01'"),
        (pair(), [("0", "2")], "pairs: no block of the model has both '0' and '2'"),
        (pair(nn.RMSNorm(H)), [("0", "1")], "0: expected torch.nn.modules.normalization.LayerNorm, got"),
        (pair(None, Own(H, H)), [("0", "1")], "1: expected torch.nn.modules.linear.Linear or transformers"),
        (pair(nn.LayerNorm(4)), [("0", "1")], "0: expected (8,), as 1 reads, got (4,)"),
        (pair(nn.LayerNorm([3, H])), [("0", "1")], "0: expected (8,), as 1 reads, got (3, 8)"),
        (
            pair(nn.LayerNorm(H).double()),
            [("0", "1")],
            "0: expected torch.float32 on cpu, as 1, got torch.float64 on cpu",
        ),
        (
            pair(nn.LayerNorm(H, device="meta")),
            [("0", "1")],
            "0: expected torch.float32 on cpu, as 1, got torch.float32 on meta",
        ),
        (hooked(pair(), 0), [("0", "1")], "0: it has hooks or a forward of its own"),
        (hooked(pair(), 1), [("0", "1")], "1: it has hooks or a forward of its own"),
        (twice(pair()), [("0", "1")], "0: it has 2 places in the model"),
        (pair(None, nn.Dropout(), nn.Linear(H, H)), [("0", "2")], "0: 1 reads it, not 2"),
        (nn.Sequential(pair(), nn.Linear(H, H)), [("0.0", "1")], "0.0: 0.1 reads it, not 1"),
        (pair(), [("0", "1"), ("0", "1")], "1: it is in two pairs"),
    ],
)
def test_what_cannot_be_replaced_is_one_line_and_changes_nothing(model, pairs, error):
    before = repr(model)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(error)}") as raised:
        replace(model, pairs)
    assert "\n" not in str(raised.value) and repr(model) == before


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"^memory: expected"):
        replace(pair(), [("0", "1")], memory="little")


def test_an_error_in_a_later_pair_leaves_the_first_as_it_was():
    model = blocks()
    with pytest.raises(ValueError, match="no block"):
        replace(model, [*PAIRS, ("norm", "attention.output")])
    assert type(model[0].norm) is nn.LayerNorm
    replace(model, PAIRS[:1])
    with pytest.raises(TypeError, match=r"^0\.norm: expected"):
        replace(model, PAIRS[1:2])
