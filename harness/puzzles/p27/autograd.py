"""The reference of the tape: the same model by PyTorch's functions with autograd; and known mistakes, as
changes of one part.

Names of parts and parameters are those of `solutions/p27/tape.py`. A mistake of a backward pass is a function
that autograd differentiates into it: with a detached term, or with the value of one function and the gradient
of another.
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
"""As in the learner's file."""
Tensors = dict[str, Tensor]
Part = Callable[..., Tensor]


def graph(value: Tensor, gradients_of: Tensor) -> Tensor:
    """Return the value of one tensor with the gradients of another, of the same shape."""
    return value.detach() + gradients_of - gradients_of.detach()


# ---- The parts ----------------------------------------------------------------------------------------------


def embedding(tokens: Tensor, token: Tensor, position: Tensor) -> Tensor:
    """Return [B, T, C]."""
    return F.embedding(tokens, token) + position[: tokens.shape[1]]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def heads(qkv: Tensor, count: int = HEADS) -> tuple[Tensor, ...]:
    """Split [B, T, 3 C] into query, key and value [B, count, T, C / count]."""
    return tuple(t.unflatten(-1, (count, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))


def join_heads(output: Tensor) -> Tensor:
    """Reshape [B, heads, T, d] to [B, T, C]."""
    return output.transpose(1, 2).flatten(2)


def attention(qkv: Tensor, causal: bool = True, count: int = HEADS) -> Tensor:
    query, key, value = heads(qkv, count)
    return join_heads(F.scaled_dot_product_attention(query, key, value, is_causal=causal))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the places whose target is not -100, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def fork(x: Tensor) -> Tensor:
    """Return the stream as a branch's input."""
    return x


def residual(x: Tensor, branch: Tensor, which: str) -> Tensor:
    """Add the output of a branch, "attention" or "mlp", to the stream."""
    return x + branch


def head(x: Tensor, token: Tensor) -> Tensor:
    return x @ token.T


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "embedding": embedding,
        "layernorm": layernorm,
        "attention": attention,
        "gelu": gelu,
        "cross_entropy": cross_entropy,
        "fork": fork,
        "residual": residual,
        "head": head,
    }
)


def parts_with_heads(count: int) -> Mapping[str, Part]:
    """Return the parts of a model with another number of heads."""
    return {**PARTS, "attention": partial(attention, count=count)}


@dataclass
class Model:
    """The model of some parts, on tensors that require gradients.

    Attributes:
        outputs: Part of the learner's file -> its output, in the order of the forward pass.
        inputs: Part -> its input; the gradient of it is what its `backward` returns.
        recording: Whether both are recorded, and so stay in memory.
    """

    parts: Mapping[str, Part] = field(default_factory=lambda: PARTS)
    recording: bool = True
    outputs: Tensors = field(default_factory=dict)
    inputs: Tensors = field(default_factory=dict)

    def run(self, name: str, kind: str, x: Tensor, *rest: Tensor) -> Tensor:
        """Run and record one part. Its input is a separate tensor, so that its gradient is this part's alone."""
        if x.is_floating_point():
            x = self.record_input(name, x)
        return self.record_output(
            name, F.linear(x, *rest) if kind == "linear" else self.parts[kind](x, *rest)
        )

    def record_input(self, name: str, x: Tensor) -> Tensor:
        """Record the input of a part."""
        if not self.recording:
            return x
        x = self.inputs[name] = x.view_as(x)
        if x.requires_grad:
            x.retain_grad()
        return x

    def record_output(self, name: str, output: Tensor) -> Tensor:
        """Record the output of a part."""
        if self.recording:
            self.outputs[name] = output
        return output

    def block(self, x: Tensor, name: str, p: Mapping[str, Tensor]) -> Tensor:
        x = self.record_input(name, x)

        def part(kind: str, id: str, given: Tensor) -> Tensor:
            weights = [p[f"{name}.{id}.{each}"] for each in ("weight", "bias") if f"{name}.{id}.{each}" in p]
            return self.run(f"{name}.{id}", kind, given, *weights)

        branch = part("linear", "qkv", part("layernorm", "ln_1", self.parts["fork"](x)))
        x = self.parts["residual"](
            x, part("linear", "join", part("attention", "attention", branch)), "attention"
        )
        branch = part("linear", "widen", part("layernorm", "ln_2", self.parts["fork"](x)))
        x = self.parts["residual"](x, part("linear", "narrow", part("gelu", "gelu", branch)), "mlp")
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
    """Return GPT-2's initial parameters by the names of the tape, in the order of the forward pass.

    Normal with deviation 0.02, smaller where a block adds to the stream; in float64, for checks, vectors are
    not 0 and 1, so that they hide no mistake.
    """
    generator = torch.Generator().manual_seed(seed)
    checked = dtype == torch.float64

    def normal(*shape: int, deviation: float = 0.02) -> Tensor:
        return (0.3 if checked else deviation) * torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {"token": normal(vocabulary, width), "position": normal(context, width)}
    for i in range(layers):
        adds = 0.02 / (2 * layers) ** 0.5
        sizes = {"qkv": (3 * width, width), "join": (width, width)}
        sizes |= {"widen": (4 * width, width), "narrow": (width, 4 * width)}
        for first, norm in (("qkv", "ln_1"), ("widen", "ln_2")):
            second = "join" if first == "qkv" else "narrow"
            tensors |= vectors(f"block{i}.{norm}", width, normal, checked)
            for id, deviation in ((first, 0.02), (second, adds)):
                tensors[f"block{i}.{id}.weight"] = normal(*sizes[id], deviation=deviation)
                tensors[f"block{i}.{id}.bias"] = normal(sizes[id][0]) * checked
    tensors |= vectors("ln_f", width, normal, checked)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def vectors(name: str, width: int, normal: Callable[..., Tensor], checked: bool) -> Tensors:
    return {f"{name}.weight": 1 + normal(width) * checked, f"{name}.bias": normal(width) * checked}


# ---- Known mistakes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A known mistake: the changed part, and words that end "these are the values ..."."""

    words: str
    part: str
    function: Part


def all_but(stays: str | None) -> Part:
    """Return a residual without the gradient next to the branches; `stays` is the branch around which it is
    correct."""
    return lambda x, branch, which: x + branch if which == stays else graph(x + branch, branch)


CHANGES: Mapping[str, Change] = {
    "residual-forgotten": Change("of the branches alone: the stream passes too", "residual", all_but(None)),
    "first-residual-forgotten": Change(
        "with nothing passed beside attention's branch", "residual", all_but("mlp")),
    "second-residual-forgotten": Change("with nothing passed beside the MLP's branch", "residual", all_but("attention")),
    "branch-forgotten": Change(
        "of the stream alone: what a branch brings back is not added", "fork", lambda x: x.detach().requires_grad_()),
    "head-overwritten": Change(
        "of the embedding alone for the tied table: the head's gradient is lost", "head",
        lambda x, token: x @ token.detach().T),
    "embedding-forgotten": Change(
        "without the embedding's gradient for the table of tokens", "embedding",
        lambda tokens, token, position: embedding(tokens, token.detach(), position)),
}  # fmt: skip


def change_model(id: str | None) -> Model:
    """Return the model with a known mistake; correct without one."""
    return Model({**PARTS, CHANGES[id].part: CHANGES[id].function} if id else PARTS)
