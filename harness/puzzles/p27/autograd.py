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


def replace_value(value: Tensor, gradient_source: Tensor) -> Tensor:
    """Return `value` with the gradient of `gradient_source`."""
    return value.detach() + gradient_source - gradient_source.detach()


# ---- The parts ----------------------------------------------------------------------------------------------


def embedding(tokens: Tensor, token: Tensor, position: Tensor) -> Tensor:
    return F.embedding(tokens, token) + position[: tokens.shape[1]]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def split_heads(qkv: Tensor, num_heads: int = HEADS) -> tuple[Tensor, ...]:
    return tuple(t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))


def join_heads(output: Tensor) -> Tensor:
    return output.transpose(1, 2).flatten(2)


def attention(qkv: Tensor, causal: bool = True, num_heads: int = HEADS) -> Tensor:
    query, key, value = split_heads(qkv, num_heads)
    return join_heads(F.scaled_dot_product_attention(query, key, value, is_causal=causal))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over positions whose target is not -100, in float32 or wider."""
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(upcast.flatten(0, 1), targets.flatten())


def fork(x: Tensor) -> Tensor:
    return x


def residual(x: Tensor, branch: Tensor, branch_name: str) -> Tensor:
    return x + branch


def head(x: Tensor, token: Tensor) -> Tensor:
    return x @ token.T


FUNCTIONS = (embedding, layernorm, attention, gelu, cross_entropy, fork, residual, head)
PARTS: Mapping[str, Part] = MappingProxyType({function.__name__: function for function in FUNCTIONS})


def make_parts(num_heads: int) -> Mapping[str, Part]:
    return {**PARTS, "attention": partial(attention, num_heads=num_heads)}


@dataclass
class Model:
    """The model built from `parts`, on tensors that require gradients.

    Attributes:
        outputs: Part of the learner's file -> its output, in the order of the forward pass.
        inputs: Part -> its input, whose gradient its `backward` returns.
        records_parts: Whether to record outputs and inputs, which keeps them in memory.
    """

    parts: Mapping[str, Part] = field(default_factory=lambda: PARTS)
    records_parts: bool = True
    outputs: Tensors = field(default_factory=dict)
    inputs: Tensors = field(default_factory=dict)

    def run(self, name: str, kind: str, x: Tensor, *arguments: Tensor) -> Tensor:
        if x.is_floating_point():
            x = self.record_input(name, x)
        function = F.linear if kind == "linear" else self.parts[kind]
        return self.record_output(name, function(x, *arguments))

    def record_input(self, name: str, x: Tensor) -> Tensor:
        if not self.records_parts:
            return x
        x = self.inputs[name] = x.view_as(x)
        if x.requires_grad:
            x.retain_grad()
        return x

    def record_output(self, name: str, output: Tensor) -> Tensor:
        if self.records_parts:
            self.outputs[name] = output
        return output

    def block(self, x: Tensor, name: str, p: Mapping[str, Tensor]) -> Tensor:
        x = self.record_input(name, x)

        def run_part(kind: str, id: str, part_input: Tensor) -> Tensor:
            weights = [p[f"{name}.{id}.{key}"] for key in ("weight", "bias") if f"{name}.{id}.{key}" in p]
            return self.run(f"{name}.{id}", kind, part_input, *weights)

        branch = run_part("linear", "qkv", run_part("layernorm", "ln_1", self.parts["fork"](x)))
        branch = run_part("linear", "join", run_part("attention", "attention", branch))
        x = self.parts["residual"](x, branch, "attention")
        branch = run_part("linear", "widen", run_part("layernorm", "ln_2", self.parts["fork"](x)))
        branch = run_part("linear", "narrow", run_part("gelu", "gelu", branch))
        x = self.parts["residual"](x, branch, "mlp")
        return self.record_output(name, x)

    def loss(self, tokens: Tensor, targets: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        x = self.run("embedding", "embedding", tokens, p["token"], p["position"])
        for i in range(sum(name.endswith(".ln_1.weight") for name in p)):
            x = self.block(x, f"block{i}", p)
        x = self.run("ln_f", "layernorm", x, p["ln_f.weight"], p["ln_f.bias"])
        logits = self.parts["head"](x, p["token"])
        return self.run("loss", "cross_entropy", logits, targets)


def init_parameters(
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
            tensors |= init_vectors(f"block{i}.{norm}", width, normal, perturb)
            for id, deviation in ((first, 0.02), (second, residual_std)):
                tensors[f"block{i}.{id}.weight"] = normal(*sizes[id], deviation=deviation)
                tensors[f"block{i}.{id}.bias"] = normal(sizes[id][0]) * perturb
    tensors |= init_vectors("ln_f", width, normal, perturb)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def init_vectors(name: str, width: int, normal: Callable[..., Tensor], perturb: bool) -> Tensors:
    return {f"{name}.weight": 1 + normal(width) * perturb, f"{name}.bias": normal(width) * perturb}


# ---- Known mistakes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangedPart:
    """A known mistake: the part that it changes, its function, and the end of "these are the values ..."."""

    description: str
    part: str
    function: Part


def lose_skip_gradient(kept_branch: str | None) -> Part:
    """Return a residual without the gradient of its skip connection, except for `kept_branch`."""
    return lambda x, branch, branch_name: (
        x + branch if branch_name == kept_branch else replace_value(x + branch, branch)
    )


KNOWN_CHANGES: Mapping[str, ChangedPart] = {
    "residual-forgotten": ChangedPart("of the branches alone: the skip connection has a gradient too", "residual", lose_skip_gradient(None)),
    "first-residual-forgotten": ChangedPart(
        "without the skip connection around attention", "residual", lose_skip_gradient("mlp")),
    "second-residual-forgotten": ChangedPart("without the skip connection around the MLP", "residual", lose_skip_gradient("attention")),
    "branch-forgotten": ChangedPart(
        "of the skip connections alone: the branches' gradients are not added", "fork", lambda x: x.detach().requires_grad_()),
    "head-overwritten": ChangedPart(
        "of the embedding alone for the tied table: the head's gradient is lost", "head",
        lambda x, token: x @ token.detach().T),
    "embedding-forgotten": ChangedPart(
        "without the embedding's gradient for the table of tokens", "embedding",
        lambda tokens, token, position: embedding(tokens, token.detach(), position)),
}  # fmt: skip


def make_changed_model(id: str | None) -> Model:
    return Model({**PARTS, KNOWN_CHANGES[id].part: KNOWN_CHANGES[id].function} if id else PARTS)
