"""patch(model) on 300 random small modules: values and every gradient are those of a copy that is not patched.

A module is drawn as a list of steps over the values so far: layers of a common pool (so that they are shared and used again),
operators, views, changes in place, hooks, slices of Sequentials, checkpoints. It runs under one of the ways in `WAYS`.
"""

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from patch_checks import H, Scaled, assert_same, fresh, seeded
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from harness.nn import patch

EACH = 30
LAYERS = {
    "ln": lambda: nn.LayerNorm(H),
    "ln without bias": lambda: nn.LayerNorm(H, bias=False),
    "bare ln": lambda: nn.LayerNorm(H, elementwise_affine=False),
    "ln of two axes": lambda: nn.LayerNorm([3, H]),
    "derived ln": lambda: Scaled(H),
    "linear": lambda: nn.Linear(H, H),
    "linear without bias": lambda: nn.Linear(H, H, bias=False),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(H, H)),
    "pair": lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H)),
    "three": lambda: nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)),
    "off": lambda: nn.Dropout(0.0),
}
WEIGHTS = [6, 2, 2, 1, 1, 6, 2, 1, 3, 2, 1]


def changed_without_grad(a, b):
    """Behind autograd's back; not where a has hooks, which PyTorch 2.11 loses if its linear's output, a view, is so changed."""
    return (a.clone() if a._backward_hooks else a).detach().mul_(0.5)


OPERATORS = {
    "sin": lambda a, b: a.sin(),
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b.tanh(),
    "turned": lambda a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
    "reshaped": lambda a, b: a.view(-1, H).view(a.shape),
    "same": lambda a, b: a.contiguous(),
    "detached": lambda a, b: a.detach(),
    "changed": lambda a, b: a.mul_(0.5),
    "changed without grad": changed_without_grad,
}


class Drawn(nn.Module):
    """Steps: (kind, what, index of a value, index of another)."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.substituted = False
        kinds = [*draw.choices(list(LAYERS), WEIGHTS, k=5), "ln", "linear"]
        self.pool: nn.ModuleList = nn.ModuleList(LAYERS[kind]() for kind in kinds)
        for module in self.pool.modules():
            if draw.random() < 0.1 and not hasattr(module, "parametrizations"):
                module.requires_grad_(False)
        self.steps = [self.step(draw) for _ in range(draw.randint(4, 12))]

    def step(self, draw):
        kind = draw.choices(
            ["call", "part", "operator", "checkpoint", "no_grad", "hook"], [10, 1, 4, 2, 1, 1]
        )[0]
        what = draw.choice(list(OPERATORS)) if kind == "operator" else draw.randrange(len(self.pool))
        newest = draw.choice([-1, -1, -1, draw.randrange(100)])
        return kind, what, newest, draw.randrange(100)

    def forward(self, x):
        values = [x * 1]
        for kind, what, first, second in self.steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == "operator":
                values.append(OPERATORS[str(what)](a, b))
                continue
            layer = self.pool[int(what)]
            if kind == "part" and isinstance(layer, nn.Sequential):
                layer = layer[: 1 + second % 2]
            if (
                kind == "checkpoint" and not self.substituted
            ):  # torch runs those again with the module's own parameters
                values.append(checkpoint(layer, a, use_reentrant=bool(second % 2)))
            elif kind == "hook":
                values.append(layer(a))
                if values[-1].requires_grad:
                    values[-1].register_hook(lambda g: 2 * g)
            elif kind == "no_grad":
                with torch.no_grad():
                    values.append(layer(a))
            else:
                values.append(layer(a))
        return sum((value.cos() * (i + 1) for i, value in enumerate(values)), torch.zeros(()))


def larger(module: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook that changes the output."""
    return 1.5 * output


def hook_some(model: nn.Module, seed: int) -> None:
    """The same hooks on a patched model and its copy."""
    draw = random.Random(seed)
    for module in model.get_submodule("pool").modules():
        if isinstance(module, nn.LayerNorm | nn.Linear) and draw.random() < 0.25:
            kind = draw.randrange(4)
            if kind == 0:
                module.register_forward_hook(larger)
            elif kind == 1:
                module.register_forward_pre_hook(lambda m, given: (given[0].tanh(),))
            elif kind == 2:
                module.register_full_backward_hook(
                    lambda m, inner, outer: tuple(g if g is None else 3 * g for g in inner)
                )
            else:
                module.register_full_backward_pre_hook(lambda m, outer: tuple(2 * g for g in outer))


def halved(m, x):
    m.substituted = True
    return torch.func.functional_call(m, {name: p * 0.5 for name, p in m.named_parameters()}, (x,))


def call(m, x):
    return m(x)


WAYS = {
    # what becomes of the patched model, what of both, how they are called
    "as it is": (None, None, call),
    "hooks later": (None, hook_some, call),
    "deepcopy": (copy.deepcopy, None, call),
    "no_grad": (None, None, torch.no_grad()(call)),
    "inference_mode": (None, None, lambda m, x: torch.inference_mode()(m)(x).clone()),
    "autocast": (None, None, torch.autocast("cpu", torch.bfloat16)(call)),
    "functional_call": (None, None, halved),
    "checkpoint": (None, None, lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "hooks before": (None, "before", call),
    "pickle": (lambda m: pickle.loads(pickle.dumps(m)), None, call),
}


def run(model, use, x, dtype):
    """Value and gradients, or what torch refuses."""
    model.zero_grad()
    x = x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)
    try:
        output = use(model, x)
        if output.requires_grad:
            output.sum().backward()
    except RuntimeError as error:
        return [], str(error).split("[")[0][:60]
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())], ""


def compare(seed: int, way: str) -> bool:
    """Whether torch refuses the module, patched or not, for a change in place."""
    changed, hooked, use = WAYS[way]
    torch.manual_seed(seed)
    model = fresh(Drawn(random.Random(seed)))
    dtype = torch.float32 if way == "autocast" else torch.float64
    model.to(dtype)
    x = seeded(2, 3, H).requires_grad_(seed % 5 > 0)
    if changed is not None and any(hasattr(m, "parametrizations") for m in model.modules()):
        changed = copy.deepcopy  # torch pickles no parametrizations
    plain = copy.deepcopy(model)
    if hooked == "before":
        hook_some(model, seed)
        hook_some(plain, seed)
    patch(model)
    if callable(hooked):
        hook_some(model, seed)
        hook_some(plain, seed)
    model = changed(model) if changed else model
    for _ in range(2):
        (ours, refused), (theirs, expected) = run(model, use, x, dtype), run(plain, use, x, dtype)
        assert refused == expected
        assert_same(ours, theirs)
    return bool(expected)


@pytest.mark.parametrize("way", WAYS)
def test_random_modules(pairs, way):
    refused = sum(compare(1000 * list(WAYS).index(way) + number, way) for number in range(EACH))
    assert refused <= EACH // 3
    assert (len(pairs) >= EACH // 3) == (way not in ("autocast", "inference_mode"))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_random_modules_compiled(pairs, backend, monkeypatch):
    def compiled(m, x):
        return torch.compile(m, backend=backend)(x)

    monkeypatch.setitem(WAYS, "compiled", (None, None, compiled))
    for seed in range(12000, 12003):
        torch._dynamo.reset()
        compare(seed, "compiled")
