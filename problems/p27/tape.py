"""Puzzle 27 in PyTorch without autograd: a small GPT, its backward pass and its training step, on a tape of your own.

Every part has a `forward`, which saves tensors for its `backward` on the tape under the part's name, and a `backward`,
which takes them back. `p` and `grads` map names to parameters and their gradients: "block0.qkv.weight" is the weight of
the part "block0.qkv". `backward` adds to `grads`, and returns the gradient of its input. `Linear` is provided as an
example.

Shapes: tokens and targets [B, T], integers; x [B, T, C], C divisible by HEADS; logits [B, T, V]. Parameters: token
[V, C], position [at least T, C]; of a LayerNorm weight and bias [C]; of a Linear layer from I to O weight [O, I] and
bias [O]. `workbook p27 --rung tape` checks it with autograd disabled.
"""

import math

import torch
from torch import Tensor

Parameters = dict[str, Tensor]

EPS = 1e-5
"""The constant that LayerNorm adds to a variance."""
IGNORED = -100
"""The target of a position that the loss ignores."""
HEADS = 4
"""Attention heads; each has C / HEADS channels."""


class Tape:
    """The tensors that the forward pass saves for the backward pass, by part name.

    Attributes:
        kept: Part name -> its tensors.
        story: (name, bytes on the tape afterwards) of every `keep` and `take`.
    """

    def __init__(self):
        self.kept: dict[str, tuple[Tensor, ...]] = {}
        self.story: list[tuple[str, int]] = []

    def keep(self, name: str, *tensors: Tensor) -> None:
        """Save tensors until they are taken."""
        self.kept[name] = tensors
        self.story.append((name, self.bytes()))

    def take(self, name: str) -> tuple[Tensor, ...]:
        """Remove and return the tensors under a name."""
        tensors = self.kept.pop(name)
        self.story.append((name, self.bytes()))
        return tensors

    def bytes(self) -> int:
        """Return the bytes of memory of the saved tensors."""
        # BLANK-START tape: the bytes of every storage of saved tensors, each once
        # FILL IN (about 6 lines)
        # BLANK-END tape


class Linear:
    """y = x W^T + b, for every token. (Provided as an example of a part.)"""

    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        tape.keep(name, x)
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        (x,) = tape.take(name)
        grads[f"{name}.weight"] += dy.flatten(0, -2).T @ x.flatten(0, -2)
        grads[f"{name}.bias"] += dy.flatten(0, -2).sum(0)
        return dy @ p[f"{name}.weight"]


class Embedding:
    """x = token[tokens] + position[:T]; the parameters are "token" and "position"."""

    # BLANK-START embedding: save the tokens; sum the rows of a token that occurs twice
    @staticmethod
    def forward(tokens: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(dx: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> None:
        raise NotImplementedError
    # BLANK-END embedding (unsolved while it reads as given: a6b79827)


class LayerNorm:
    """y = (x - mean) / sqrt(variance + EPS) * weight + bias, the statistics over the last axis."""

    # BLANK-START layernorm: save x and two numbers per row; puzzle 22
    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        raise NotImplementedError
    # BLANK-END layernorm (unsolved while it reads as given: 4ec12f7a)


def split_heads(joined: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Split [B, T, parts * C] into `parts` views [B, HEADS, T, C / HEADS]. (Provided.)"""
    return joined.unflatten(-1, (parts, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()


def join_heads(parts: tuple[Tensor, ...]) -> Tensor:
    """Merge heads: tensors [B, HEADS, T, C / HEADS] -> [B, T, len(parts) * C]. (Provided.)"""
    return torch.stack(parts).permute(1, 3, 0, 2, 4).flatten(2)


class Attention:
    """softmax(q k^T / sqrt(d)) v of every head, with a causal mask; qkv [B, T, 3 C] is q, k and v, concatenated."""

    # BLANK-START attention: save q, k, v and P; puzzle 23, with a mask
    @staticmethod
    def forward(qkv: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        raise NotImplementedError
    # BLANK-END attention (unsolved while it reads as given: b3802554)


class Gelu:
    """y = x / 2 (1 + tanh u), u = SCALE (x + CUBE x^3)."""

    SCALE, CUBE = math.sqrt(2 / math.pi), 0.044715

    # BLANK-START gelu: save only x, and recompute tanh
    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        raise NotImplementedError
    # BLANK-END gelu (unsolved while it reads as given: 4ec12f7a)


class CrossEntropy:
    """The mean of -log p[target] over the positions whose target is not IGNORED; the incoming gradient is 1."""

    # BLANK-START cross_entropy: save p and the targets; shift the logits first
    @staticmethod
    def forward(logits: Tensor, targets: Tensor, tape: Tape, name: str) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(tape: Tape, name: str) -> Tensor:
        raise NotImplementedError
    # BLANK-END cross_entropy (unsolved while it reads as given: 506c5a43)


class Block:
    """x + attention(ln_1(x)), then x + mlp(ln_2(x)): two branches added to the residual stream."""

    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        branch = LayerNorm.forward(x, tape, f"{name}.ln_1", p)
        branch = Linear.forward(branch, tape, f"{name}.qkv", p)
        branch = Attention.forward(branch, tape, f"{name}.attention", p)
        x = x + Linear.forward(branch, tape, f"{name}.join", p)
        branch = LayerNorm.forward(x, tape, f"{name}.ln_2", p)
        branch = Linear.forward(branch, tape, f"{name}.widen", p)
        branch = Gelu.forward(branch, tape, f"{name}.gelu", p)
        return x + Linear.forward(branch, tape, f"{name}.narrow", p)

    @staticmethod
    def backward(dx: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        """Return the gradient of the block's input."""
        # BLANK-START block: the second branch first; add each branch's gradient
        # FILL IN (about 8 lines)
        # BLANK-END block


def layers(p: Parameters) -> int:
    """Return the number of blocks. (Provided.)"""
    return sum(name.endswith(".ln_1.weight") for name in p)


def logits_of(tokens: Tensor, tape: Tape, p: Parameters) -> Tensor:
    """Return the logits [B, T, V] of the token after each position. The head's weight is the token table. (Provided.)"""
    x = Embedding.forward(tokens, tape, "embedding", p)
    for i in range(layers(p)):
        x = Block.forward(x, tape, f"block{i}", p)
    x = LayerNorm.forward(x, tape, "ln_f", p)
    tape.keep("head", x)
    return x @ p["token"].T


def forward(tokens: Tensor, targets: Tensor, tape: Tape, p: Parameters) -> Tensor:
    """Return the loss, and save everything that `backward` needs on the tape. (Provided.)"""
    return CrossEntropy.forward(logits_of(tokens, tape, p), targets, tape, "loss")


def backward(tape: Tape, p: Parameters, grads: Parameters) -> None:
    """Add the gradient of every parameter to `grads`, from the loss back to the embedding, and empty the tape."""
    # BLANK-START model: the loss, the head, ln_f, the blocks, the embedding
    # FILL IN (about 7 lines)
    # BLANK-END model


def clip(grads: Parameters, limit: float) -> Tensor:
    """Scale all gradients by one factor if their global norm is above `limit`; return the norm before scaling."""
    # BLANK-START clip: one factor for all, limit / (norm + 1e-6), at most 1
    # FILL IN (about 4 lines)
    # BLANK-END clip


def adamw(
    p: Parameters,
    grads: Parameters,
    moments: dict[str, tuple[Tensor, Tensor]],
    number: int,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    decay: float = 0.1,
) -> None:
    """Update all parameters in place; the first `number` is 1, `moments` has the running means of g and g^2."""
    # BLANK-START adamw: decay for matrices alone, both means corrected, eps outside the root
    # FILL IN (about 8 lines)
    # BLANK-END adamw


def step(
    excerpt: Tensor,
    p: Parameters,
    grads: Parameters,
    moments: dict[str, tuple[Tensor, Tensor]],
    number: int,
    rate: float,
    limit: float = 1.0,
) -> Tensor:
    """Run one training step on an excerpt [B, T + 1]; return the loss. `grads` has the previous step's gradients."""
    tape = Tape()
    # BLANK-START step: predict the next token; clear the gradients, clip before the update
    # FILL IN (about 7 lines)
    # BLANK-END step
