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
        storages = {}
        for tensors in self.kept.values():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())
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
        tape.keep(name, tokens)
        return p["token"][tokens] + p["position"][: tokens.shape[1]]

    @staticmethod
    def backward(dx: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> None:
        (tokens,) = tape.take(name)
        grads["token"].index_add_(0, tokens.flatten(), dx.flatten(0, 1))
        grads["position"][: tokens.shape[1]] += dx.sum(0)

    # BLANK-GIVEN embedding
    # @staticmethod
    # def forward(tokens: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
    #     raise NotImplementedError
    #
    # @staticmethod
    # def backward(dx: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> None:
    #     raise NotImplementedError
    # BLANK-END embedding


class LayerNorm:
    """y = (x - mean) / sqrt(variance + EPS) * weight + bias, the statistics over the last axis."""

    # BLANK-START layernorm: save x and two numbers per row; puzzle 22
    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
        tape.keep(name, x, mean, rstd)
        return (x - mean) * rstd * p[f"{name}.weight"] + p[f"{name}.bias"]

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        x, mean, rstd = tape.take(name)
        x_hat = (x - mean) * rstd
        grads[f"{name}.weight"] += (dy * x_hat).flatten(0, -2).sum(0)
        grads[f"{name}.bias"] += dy.flatten(0, -2).sum(0)
        g = dy * p[f"{name}.weight"]
        return rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))

    # BLANK-GIVEN layernorm
    # @staticmethod
    # def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
    #     raise NotImplementedError
    #
    # @staticmethod
    # def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
    #     raise NotImplementedError
    # BLANK-END layernorm


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
        q, k, v = split_heads(qkv, 3)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        P = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
        tape.keep(name, q, k, v, P)
        return join_heads((P @ v,))

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        q, k, v, P = tape.take(name)
        (dO,) = split_heads(dy, 1)
        dP = dO @ v.mT
        dS = P * (dP - (dP * P).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return join_heads((dS @ k, dS.mT @ q, P.mT @ dO))

    # BLANK-GIVEN attention
    # @staticmethod
    # def forward(qkv: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
    #     raise NotImplementedError
    #
    # @staticmethod
    # def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
    #     raise NotImplementedError
    # BLANK-END attention


class Gelu:
    """y = x / 2 (1 + tanh u), u = SCALE (x + CUBE x^3)."""

    SCALE, CUBE = math.sqrt(2 / math.pi), 0.044715

    # BLANK-START gelu: save only x, and recompute tanh
    @staticmethod
    def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
        tape.keep(name, x)
        return 0.5 * x * (1 + torch.tanh(Gelu.SCALE * (x + Gelu.CUBE * x**3)))

    @staticmethod
    def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
        (x,) = tape.take(name)
        tanh = torch.tanh(Gelu.SCALE * (x + Gelu.CUBE * x**3))
        slope = Gelu.SCALE * (1 + 3 * Gelu.CUBE * x**2)
        return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope)

    # BLANK-GIVEN gelu
    # @staticmethod
    # def forward(x: Tensor, tape: Tape, name: str, p: Parameters) -> Tensor:
    #     raise NotImplementedError
    #
    # @staticmethod
    # def backward(dy: Tensor, tape: Tape, name: str, p: Parameters, grads: Parameters) -> Tensor:
    #     raise NotImplementedError
    # BLANK-END gelu


class CrossEntropy:
    """The mean of -log p[target] over the positions whose target is not IGNORED; the incoming gradient is 1."""

    # BLANK-START cross_entropy: save p and the targets; shift the logits first
    @staticmethod
    def forward(logits: Tensor, targets: Tensor, tape: Tape, name: str) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
        tape.keep(name, log_p.exp(), targets)
        valid = targets != IGNORED
        chosen = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return -(chosen * valid).sum() / valid.sum()

    @staticmethod
    def backward(tape: Tape, name: str) -> Tensor:
        dlogits, targets = tape.take(name)
        valid = (targets != IGNORED)[..., None]
        dlogits -= torch.nn.functional.one_hot(targets.clamp(min=0), dlogits.shape[-1])
        return dlogits.mul_(valid).div_(valid.sum())

    # BLANK-GIVEN cross_entropy
    # @staticmethod
    # def forward(logits: Tensor, targets: Tensor, tape: Tape, name: str) -> Tensor:
    #     raise NotImplementedError
    #
    # @staticmethod
    # def backward(tape: Tape, name: str) -> Tensor:
    #     raise NotImplementedError
    # BLANK-END cross_entropy


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
        d = Linear.backward(dx, tape, f"{name}.narrow", p, grads)
        d = Gelu.backward(d, tape, f"{name}.gelu", p, grads)
        d = Linear.backward(d, tape, f"{name}.widen", p, grads)
        dx = dx + LayerNorm.backward(d, tape, f"{name}.ln_2", p, grads)
        d = Linear.backward(dx, tape, f"{name}.join", p, grads)
        d = Attention.backward(d, tape, f"{name}.attention", p, grads)
        d = Linear.backward(d, tape, f"{name}.qkv", p, grads)
        return dx + LayerNorm.backward(d, tape, f"{name}.ln_1", p, grads)
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
    d = CrossEntropy.backward(tape, "loss")
    (x,) = tape.take("head")
    grads["token"] += d.flatten(0, 1).T @ x.flatten(0, 1)
    d = LayerNorm.backward(d @ p["token"], tape, "ln_f", p, grads)
    for i in reversed(range(layers(p))):
        d = Block.backward(d, tape, f"block{i}", p, grads)
    Embedding.backward(d, tape, "embedding", p, grads)
    # BLANK-END model


def clip(grads: Parameters, limit: float) -> Tensor:
    """Scale all gradients by one factor if their global norm is above `limit`; return the norm before scaling."""
    # BLANK-START clip: one factor for all, limit / (norm + 1e-6), at most 1
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    for grad in grads.values():
        grad *= (limit / (norm + 1e-6)).clamp(max=1)
    return norm
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
    for name, tensor in p.items():
        g, (mean, square) = grads[name], moments[name]
        if tensor.dim() > 1:
            tensor *= 1 - rate * decay
        mean.lerp_(g, 1 - betas[0])
        square.lerp_(g * g, 1 - betas[1])
        root = (square / (1 - betas[1] ** number)).sqrt()
        tensor -= rate / (1 - betas[0] ** number) * mean / (root + eps)
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
    loss = forward(excerpt[:, :-1], excerpt[:, 1:], tape, p)
    for grad in grads.values():
        grad.zero_()
    backward(tape, p, grads)
    clip(grads, limit)
    adamw(p, grads, moments, number, rate)
    return loss
    # BLANK-END step
