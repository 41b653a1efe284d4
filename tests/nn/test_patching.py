"""patch(model): which pairs of an eager model are swapped, that nothing else changes, and that it can be undone."""

import copy
import pickle

import pytest
import torch
from torch import nn

from harness.nn import patch

H, O = 8, 6


class Conv1D(nn.Module):
    """As GPT-2 has it: a Linear whose weight lies as [in, out]."""

    def __init__(self, out: int, features: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, out)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Part(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class GPT2Block(nn.Module):
    """The shape of the real one: two LayerNorms, each read by one Conv1D."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.attn, self.mlp = Part(c_attn=Conv1D(H, H)), Part(c_fc=Conv1D(H, H))

    def forward(self, x):
        x = x + self.attn.c_attn(self.ln_1(x)).tanh()
        return x + self.mlp.c_fc(self.ln_2(x)).tanh()


def encoder(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(H, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=True)


MODELS = {
    "sequential": lambda: nn.Sequential(
        nn.LayerNorm(H), nn.Linear(H, H), nn.GELU(), nn.LayerNorm(H), nn.Linear(H, O)
    ),
    "gpt2": lambda: nn.Sequential(GPT2Block(), GPT2Block()),
    "encoder": lambda: encoder(norm_first=True),
}


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    (out * out.detach().cos()).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.compiler
@pytest.mark.parametrize("name,swapped", [("sequential", 2), ("gpt2", 4), ("encoder", 1)])
def test_same_values_and_gradients_same_state_and_back_again(name, swapped):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(2, 3, H)
    before, keys = gradients(model, x), list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    done = patch(model)
    assert len(done.swapped) == swapped
    for ours, theirs in zip(gradients(model, x), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
    done.undo()
    done.undo()
    assert not any("forward" in vars(m) for m in model.modules())
    for ours, theirs in zip(gradients(model, x), before, strict=True):
        assert torch.equal(ours, theirs)


def test_the_kernels_really_run():
    """A swapped LayerNorm hands its input on: its own forward is not called any more."""
    model = MODELS["sequential"]()
    patch(model)
    x = torch.randn(2, H)
    assert model[0](x) is x


def test_what_is_left_alone_says_why():
    model = nn.ModuleDict(
        {
            "alone": nn.LayerNorm(H),
            "post": encoder(norm_first=False),
            "narrow": nn.Sequential(nn.LayerNorm((2, H)), nn.Linear(H, O)),
            "gelu": nn.Sequential(nn.LayerNorm(H), nn.GELU(), nn.Linear(H, O)),
        }
    )
    done = patch(model)
    assert done.swapped == []
    why = dict(done.left)
    assert why["narrow.0"] == "it normalises [2, 8], narrow.1 reads 8 features"
    assert why["gelu.0"] == "gelu.1 is no Linear, but a GELU"
    place = "its place does not say which Linear reads its output"
    assert why["alone"] == why["post.norm1"] == why["post.norm2"] == place
    assert done.report.splitlines()[0] == "0 Linear layers swapped, 5 LayerNorms left alone"
    assert f"  left     alone: {place}" in done.report


def test_a_forward_of_ones_own_is_not_overwritten():
    model = MODELS["sequential"]()
    model[1].forward = lambda x: x
    assert dict(patch(model).left)["0"] == "1 has a forward of its own"


def test_twice_is_refused():
    model = MODELS["gpt2"]()
    done = patch(model)
    with pytest.raises(ValueError, match="it is patched already"):
        patch(model)
    done.undo()
    assert len(patch(model).swapped) == 4


def test_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: expected nn\.Module, got list"):
        patch([nn.LayerNorm(H)])
