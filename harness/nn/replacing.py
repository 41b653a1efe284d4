"""Replace the LayerNorm -> Linear pairs that a caller names by the workbook's kernels, without a compiler."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from harness.nn.layers import AUTO, fused_layernorm_linear, options_of, parameter

NORMS = {"torch.nn.modules.normalization.LayerNorm"}
LINEARS = {"torch.nn.modules.linear.Linear": False, "transformers.pytorch_utils.Conv1D": True}
"""The classes of Linear layers, the very ones and no subclass, and whether they keep the weight as [H, O]."""


class PassedNorm(nn.LayerNorm):
    """A LayerNorm that returns its input; the Linear layers that read it compute it."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__([*norm.normalized_shape], norm.eps, norm.elementwise_affine, device="meta")
        self.weight, self.bias, self.training = norm.weight, norm.bias, norm.training

    def forward(self, input: Tensor) -> Tensor:
        return input


class NormLinear(nn.Module):
    """A Linear that also computes the LayerNorm before it; the parameters stay where they are."""

    def __init__(self, norm: PassedNorm, linear: Any, **how: Any):
        super().__init__()
        self.weight, self.bias, self.training = linear.weight, linear.bias, linear.training
        self.norm, self.transposed, self.how = [norm], LINEARS[class_of(linear)], how  # in a list: no child

    def forward(self, x: Tensor) -> Tensor:
        (norm,), weight, bias = self.norm, parameter(self, "weight"), parameter(self, "bias")
        weight = weight.t() if self.transposed else weight
        return fused_layernorm_linear(x, norm.weight, norm.bias, weight, bias, norm.eps, **self.how)


def replace(
    model: nn.Module, pairs: Iterable[Sequence[str]], *, algorithm: str = "fast", memory: str = AUTO
) -> list[tuple[str, str]]:
    """Replace LayerNorms and the Linear layers that read them, in place, by pairs of names; return their names.

    A name is a path as in `named_modules`, from the model or from every block that has both: ("ln_1",
    "attn.c_attn") is one pair in each block of GPT-2. The Linear then computes both layers, as
    `fused_layernorm_linear` does, and the LayerNorm returns its input. So name every reader of the LayerNorm:
    query, key and value are three pairs, and each computes it. Between the two, rows may be reshaped or
    selected, and nothing else done (no dropout). That is not checked, except in nn.Sequential.

    Parameters stay the same objects under the same names: optimizers and state dicts fit. An error changes
    nothing.

    Raises:
        TypeError: A module is not an nn.LayerNorm, or neither nn.Linear nor transformers' Conv1D.
        ValueError: No block has both names; sizes, dtypes or devices differ; a module has hooks or a forward
            of its own, or is used twice; or the algorithm or the choice of memory is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected nn.Module, got {type(model).__name__}")
    options_of(algorithm, memory)
    modules: dict[str, Any] = dict(model.named_modules())
    found: list[tuple[str, str]] = []
    places = Counter(id(child) for block in modules.values() for child in block._modules.values())
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"pairs: expected names of a LayerNorm and a Linear, got {pair!r}")
        blocks = [""] if all(name in modules for name in pair) else modules
        both = [tuple(f"{block}.{name}".lstrip(".") for name in pair) for block in blocks]
        here = [names for names in both if all(name in modules for name in names)]
        if not here:
            raise ValueError(f"pairs: no block of the model has both {pair[0]!r} and {pair[1]!r}")
        for norm, linear in here:
            check_pair(norm, linear, modules, places)
            if linear in (other for _, other in found):
                raise ValueError(f"{linear}: it is in two pairs")
            found.append((norm, linear))
    replacements: dict[str, Any] = {name: PassedNorm(modules[name]) for name, _ in found}
    for norm, linear in found:
        replacements[linear] = NormLinear(
            replacements[norm], modules[linear], algorithm=algorithm, memory=memory
        )
    for name, module in replacements.items():
        model.set_submodule(name, module)
    return found


def check_pair(norm: str, linear: str, modules: dict[str, Any], places: Counter[int]) -> None:
    """Raise, naming the module, if a pair cannot be replaced."""
    for name, kinds in ((norm, NORMS), (linear, LINEARS)):
        module = modules[name]
        if class_of(module) not in kinds:
            raise TypeError(f"{name}: expected {' or '.join(kinds)}, got {class_of(module)}")
        if any(kept for key, kept in vars(module).items() if key == "forward" or key.endswith("_hooks")):
            raise ValueError(f"{name}: it has hooks or a forward of its own")
        if places[id(module)] != 1:
            raise ValueError(f"{name}: it has {places[id(module)]} places in the model")
    weight, transposed = modules[linear].weight, LINEARS[class_of(modules[linear])]
    shape = (weight.shape[0 if transposed else 1],)
    if modules[norm].normalized_shape != shape:
        raise ValueError(f"{norm}: expected {shape}, as {linear} reads, got {modules[norm].normalized_shape}")
    for own in modules[norm].parameters():
        if (own.dtype, own.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"{norm}: expected {weight.dtype} on {weight.device}, as {linear}, got {own.dtype} on {own.device}"
            )
    block, _, child = norm.rpartition(".")
    if isinstance(modules[block], nn.Sequential):
        inside = [*modules[block]._modules]
        follows = ".".join(filter(None, [block, *inside[inside.index(child) + 1 :][:1]]))
        if child != inside[-1] and not f"{linear}.".startswith(f"{follows}."):
            raise ValueError(f"{norm}: {follows} reads it, not {linear}")


def class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
