"""Swaps LayerNorm -> Linear pairs of an eager model by its module structure, and takes that back: no compiler needed.

The modules stay where they are, and so do parameters, state dict and optimizer: a pair gets another `forward` on its two
instances. Which LayerNorm feeds which Linear cannot be seen from modules alone, so only structures that say so are
swapped: neighbours in `nn.Sequential`, and the blocks in `BLOCKS`, by the name of their class.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from harness.nn.layers import fused_layernorm_linear, parameter

BLOCKS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "GPT2Block": (("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))),
    "ViTLayer": (
        ("layernorm_before", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
        ("layernorm_before", tuple(f"attention.attention.{n}" for n in ("query", "key", "value"))),
        ("layernorm_after", ("mlp.fc1",)),
        ("layernorm_after", ("intermediate.dense",)),
    ),
    "Block": (("norm1", ("attn.qkv",)), ("norm2", ("mlp.fc1",))),  # timm's vision transformers
    "TransformerEncoderLayer": (("norm2", ("linear1",)),),
}
"""Class name -> (LayerNorm, the Linear layers that are all that reads its output), as paths within the block. Where a
library has changed its names, the block has one row for each."""


@dataclass(frozen=True)
class Pair:
    """A LayerNorm and one Linear (or Conv1D) behind it, with their names in the model."""

    ln_name: str
    linear_name: str
    ln: nn.LayerNorm
    linear: nn.Module


@dataclass
class Patch:
    """What `patch` did to a model.

    Attributes:
        swapped: The pairs, as (name of LayerNorm, name of Linear).
        left: (name of LayerNorm, why it stays as it is).
    """

    swapped: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    @property
    def report(self) -> str:
        """A line for each pair and for each LayerNorm that stays."""
        lines = [f"{len(self.swapped)} Linear layers swapped, {len(self.left)} LayerNorms left alone"]
        lines += [f"  swapped  {ln} -> {linear}" for ln, linear in self.swapped]
        return "\n".join(lines + [f"  left     {name}: {why}" for name, why in self.left])

    def give(self, module: nn.Module, forward: functools.partial) -> None:
        """Sets the forward of one instance."""
        vars(module)["forward"] = forward
        self._modules.append(module)

    def undo(self) -> None:
        """Gives every module its own `forward` back. A second call does nothing."""
        while self._modules:
            del vars(self._modules.pop())["forward"]


def patch(model: nn.Module, *, algorithm: str = "fast") -> Patch:
    """Lets the workbook's kernels compute the LayerNorm -> Linear pairs of a model, in place.

    The LayerNorm of a pair hands its input on and the Linear computes both, so hooks on a swapped LayerNorm see its input in
    the place of its output. Shared modules are swapped once.

    Args:
        model: Any module; it is changed.
        algorithm: As in `fused_layernorm_linear`.

    Returns:
        A `Patch` with `report` and `undo()`.

    Raises:
        TypeError: `model` is no module.
        ValueError: The model is patched already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected nn.Module, got {type(model).__name__}")
    if any("forward" in vars(m) and is_ours(vars(m)["forward"]) for m in model.modules()):
        raise ValueError("model: it is patched already; undo() that patch first")
    done = Patch()
    grouped: dict[nn.LayerNorm, list[Pair]] = {}
    for pair in pairs(model):
        grouped.setdefault(pair.ln, []).append(pair)
    for ln, group in grouped.items():
        why = next(filter(None, map(unfit, group)), "")
        if why:
            done.left.append((group[0].ln_name, why))
            continue
        swap(done, ln, group, algorithm)
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) and module not in grouped:
            done.left.append((name, "its place does not say which Linear reads its output"))
    return done


def pairs(model: nn.Module) -> Iterator[Pair]:
    """The pairs that the model's structure says, in its order."""
    for name, module in model.named_modules():
        for ln_path, linear_paths in structure(module):
            linears = [(path, found(module, path)) for path in linear_paths]
            ln = found(module, ln_path)
            if isinstance(ln, nn.LayerNorm) and all(linear is not None for _, linear in linears):
                prefix = f"{name}." if name else ""
                for path, linear in linears:
                    assert linear is not None
                    yield Pair(prefix + ln_path, prefix + path, ln, linear)


def structure(module: nn.Module) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(LayerNorm, Linear layers behind it) of one module, as paths within it."""
    if type(module) is nn.Sequential:
        children = list(module._modules)
        return tuple((a, (b,)) for a, b in pairwise(children))
    if isinstance(module, nn.TransformerEncoderLayer) and not module.norm_first:
        return ()
    return BLOCKS.get(type(module).__name__, ())


def found(module: nn.Module, path: str) -> nn.Module | None:
    """A module below another one, None where there is none of this name."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def unfit(pair: Pair) -> str:
    """Why a pair cannot be swapped; empty where it can."""
    if not linear_like(pair.linear):
        return f"{pair.linear_name} is no Linear, but a {type(pair.linear).__name__}"
    features = in_features(pair.linear)
    if tuple(pair.ln.normalized_shape) != (features,):
        return f"it normalises {list(pair.ln.normalized_shape)}, {pair.linear_name} reads {features} features"
    for name, module in ((pair.ln_name, pair.ln), (pair.linear_name, pair.linear)):
        if "forward" in vars(module):
            return f"{name} has a forward of its own"
    return ""


def linear_like(module: nn.Module) -> bool:
    """Whether it is `nn.Linear`, or GPT-2's Conv1D, which keeps the weight as [H, O]."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def in_features(linear: nn.Module) -> int:
    """H."""
    weight = parameter(linear, "weight")
    assert weight is not None
    return weight.shape[1 if isinstance(linear, nn.Linear) else 0]


def swap(done: Patch, ln: nn.LayerNorm, group: list[Pair], algorithm: str) -> None:
    """Gives a LayerNorm and the Linear layers behind it their new forward."""
    done.give(ln, functools.partial(hand_on))
    for pair in group:
        done.give(pair.linear, functools.partial(both, ln, pair.linear, algorithm))
        done.swapped.append((pair.ln_name, pair.linear_name))


def is_ours(forward: object) -> bool:
    """Whether a forward is one that `patch` sets."""
    return isinstance(forward, functools.partial) and forward.func in (hand_on, both)


# Module-level functions, so that a patched model can be copied and pickled.
def hand_on(x: torch.Tensor) -> torch.Tensor:
    """The forward of a swapped LayerNorm: its Linear does the work."""
    return x


def both(ln: nn.LayerNorm, linear: nn.Module, algorithm: str, x: torch.Tensor) -> torch.Tensor:
    """The forward of a swapped Linear: x [..., H] is what the LayerNorm was given."""
    weight = parameter(linear, "weight")
    assert weight is not None
    return fused_layernorm_linear(
        x,
        parameter(ln, "weight"),
        parameter(ln, "bias"),
        weight if isinstance(linear, nn.Linear) else weight.t(),
        parameter(linear, "bias"),
        ln.eps,
        algorithm=algorithm,
    )
