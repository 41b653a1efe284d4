"""The model of `solutions/p27/tape.py` in PyTorch with autograd, and known mistakes as changes to one part.

A mistake in a backward pass is a function for which autograd returns the wrong gradient: one with a detached
term, or with the value of one function and the gradient of another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
HEADS = 4
"""The number of heads in the learner's file."""
Tensors = dict[str, Tensor]
Part = Callable[..., Tensor]


def replace_value(value: Tensor, gradients_of: Tensor) -> Tensor:
    """Return `value` with the gradient of `gradients_of`."""
    return value.detach() + gradients_of - gradients_of.detach()


# ---- The parts ----------------------------------------------------------------------------------------------


def embedding(tokens: Tensor, token: Tensor, position: Tensor) -> Tensor:
    return F.embedding(tokens, token) + position[: tokens.shape[1]]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def heads(qkv: Tensor, count: int = HEADS) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(-1, (count, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))


def join_heads(output: Tensor) -> Tensor:
    return output.transpose(1, 2).flatten(2)


def attention(qkv: Tensor, causal: bool = True, count: int = HEADS) -> Tensor:
    query, key, value = heads(qkv, count)
    return join_heads(F.scaled_dot_product_attention(query, key, value, is_causal=causal))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over positions whose target is not -100, in float32 or wider."""
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(upcast.flatten(0, 1), targets.flatten())


def fork(x: Tensor) -> Tensor:
    return x


def residual(x: Tensor, branch: Tensor, which: str) -> Tensor:
    return x + branch


def head(x: Tensor, token: Tensor) -> Tensor:
    return x @ token.T


FUNCTIONS = (embedding, layernorm, attention, gelu, cross_entropy, fork, residual, head)
PARTS: Mapping[str, Part] = MappingProxyType({function.__name__: function for function in FUNCTIONS})


def parts_with_heads(count: int) -> Mapping[str, Part]:
    return {**PARTS, "attention": partial(attention, count=count)}


@dataclass
class Model:
    """The model built from `parts`, on tensors that require gradients.

    Attributes:
        outputs: Part of the learner's file -> its output, in the order of the forward pass.
        inputs: Part -> its input, whose gradient its `backward` returns.
        recording: Whether outputs and inputs are recorded, which keeps them in memory.
    """

    parts: Mapping[str, Part] = field(default_factory=lambda: PARTS)
    recording: bool = True
    outputs: Tensors = field(default_factory=dict)
    inputs: Tensors = field(default_factory=dict)

    def run(self, name: str, kind: str, x: Tensor, *rest: Tensor) -> Tensor:
        if x.is_floating_point():
            x = self.record_input(name, x)
        function = F.linear if kind == "linear" else self.parts[kind]
        return self.record_output(name, function(x, *rest))

    def record_input(self, name: str, x: Tensor) -> Tensor:
        if not self.recording:
            return x
        x = self.inputs[name] = x.view_as(x)
        if x.requires_grad:
            x.retain_grad()
        return x

    def record_output(self, name: str, output: Tensor) -> Tensor:
        if self.recording:
            self.outputs[name] = output
        return output

    def block(self, x: Tensor, name: str, p: Mapping[str, Tensor]) -> Tensor:
        x = self.record_input(name, x)

        def part(kind: str, id: str, given: Tensor) -> Tensor:
            weights = [p[f"{name}.{id}.{key}"] for key in ("weight", "bias") if f"{name}.{id}.{key}" in p]
            return self.run(f"{name}.{id}", kind, given, *weights)

        branch = part("linear", "qkv", part("layernorm", "ln_1", self.parts["fork"](x)))
        branch = part("linear", "join", part("attention", "attention", branch))
        x = self.parts["residual"](x, branch, "attention")
        branch = part("linear", "widen", part("layernorm", "ln_2", self.parts["fork"](x)))
        branch = part("linear", "narrow", part("gelu", "gelu", branch))
        x = self.parts["residual"](x, branch, "mlp")
        return self.record_output(name, x)

    def loss(self, tokens: Tensor, targets: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        x = self.run("embedding", "embedding", tokens, p["token"], p["position"])
        for i in range(sum(name.endswith(".ln_1.weight") for name in p)):
            x = self.block(x, f"block{i}", p)
        x = self.run("ln_f", "layernorm", x, p["ln_f.weight"], p["ln_f.bias"])
        logits = self.parts["head"](x, p["token"])
        return self.run("loss", "cross_entropy", logits, targets)


def parameters(
    *, layers: int, width: int, vocabulary: int, context: int, seed: int, dtype: torch.dtype = torch.float64
) -> Tensors:
    """Return GPT-2's initial parameters by their names on the tape, in the order of the forward pass.

    They are normal with standard deviation 0.02, smaller where a block adds to the residual stream. In float64,
    for checks, they are larger, and biases and LayerNorm weights differ from 0 and 1, which would hide mistakes.
    """
    generator = torch.Generator().manual_seed(seed)
    perturb = dtype == torch.float64

    def normal(*shape: int, deviation: float = 0.02) -> Tensor:
        return (0.3 if perturb else deviation) * torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {"token": normal(vocabulary, width), "position": normal(context, width)}
    for i in range(layers):
        residual_std = 0.02 / (2 * layers) ** 0.5
        sizes = {"qkv": (3 * width, width), "join": (width, width)}
        sizes |= {"widen": (4 * width, width), "narrow": (width, 4 * width)}
        for first, norm in (("qkv", "ln_1"), ("widen", "ln_2")):
            second = "join" if first == "qkv" else "narrow"
            tensors |= vectors(f"block{i}.{norm}", width, normal, perturb)
            for id, deviation in ((first, 0.02), (second, residual_std)):
                tensors[f"block{i}.{id}.weight"] = normal(*sizes[id], deviation=deviation)
                tensors[f"block{i}.{id}.bias"] = normal(sizes[id][0]) * perturb
    tensors |= vectors("ln_f", width, normal, perturb)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def vectors(name: str, width: int, normal: Callable[..., Tensor], checked: bool) -> Tensors:
    return {f"{name}.weight": 1 + normal(width) * checked, f"{name}.bias": normal(width) * checked}


# ---- Known mistakes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A known mistake: the end of the message "these are the values ...", the changed part, its function."""

    words: str
    part: str
    function: Part


def lose_skip_gradient(stays: str | None) -> Part:
    """Return a residual that loses the gradient of its skip connection, except at the branch `stays`."""
    return lambda x, branch, which: x + branch if which == stays else replace_value(x + branch, branch)


CHANGES: Mapping[str, Change] = {
    "residual-forgotten": Change("of the branches alone: the skip connection has a gradient too", "residual", lose_skip_gradient(None)),
    "first-residual-forgotten": Change(
        "without the skip connection around attention", "residual", lose_skip_gradient("mlp")),
    "second-residual-forgotten": Change("without the skip connection around the MLP", "residual", lose_skip_gradient("attention")),
    "branch-forgotten": Change(
        "of the skip connections alone: the branches' gradients are not added", "fork", lambda x: x.detach().requires_grad_()),
    "head-overwritten": Change(
        "of the embedding alone for the tied table: the head's gradient is lost", "head",
        lambda x, token: x @ token.detach().T),
    "embedding-forgotten": Change(
        "without the embedding's gradient for the table of tokens", "embedding",
        lambda tokens, token, position: embedding(tokens, token.detach(), position)),
}  # fmt: skip


def change_model(id: str | None) -> Model:
    return Model({**PARTS, CHANGES[id].part: CHANGES[id].function} if id else PARTS)
