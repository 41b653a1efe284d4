"""Replace LayerNorm -> Linear pairs of a model, given by name, with fused layers, without torch.compile."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from harness.nn.layers import AUTO, encode_options, fused_layernorm_linear, get_parameter

NORM_CLASSES = {"torch.nn.modules.normalization.LayerNorm"}
LINEAR_CLASSES = {"torch.nn.modules.linear.Linear": False, "transformers.pytorch_utils.Conv1D": True}
"""Class of a Linear layer (subclasses are not supported) -> whether it stores the weight as [H, O]."""


class IdentityNorm(nn.LayerNorm):
    """A LayerNorm that returns its input; normalization is fused into the Linear layers that follow."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__([*norm.normalized_shape], norm.eps, norm.elementwise_affine, device="meta")
        self.weight, self.bias, self.training = norm.weight, norm.bias, norm.training

    def forward(self, input: Tensor) -> Tensor:
        return input


class NormLinear(nn.Module):
    """A Linear that also computes the preceding LayerNorm; the parameters of both are unchanged."""

    def __init__(self, norm: IdentityNorm, linear: Any, **options: Any):
        super().__init__()
        self.weight, self.bias, self.training = linear.weight, linear.bias, linear.training
        self.norm = [norm]  # in a list, so that it is not a child module
        self.transposed, self.options = LINEAR_CLASSES[get_class_name(linear)], options

    def forward(self, x: Tensor) -> Tensor:
        (norm,), weight, bias = self.norm, get_parameter(self, "weight"), get_parameter(self, "bias")
        weight = weight.t() if self.transposed else weight
        return fused_layernorm_linear(x, norm.weight, norm.bias, weight, bias, norm.eps, **self.options)


def replace(
    model: nn.Module, pairs: Iterable[Sequence[str]], *, algorithm: str = "fast", memory: str = AUTO
) -> list[tuple[str, str]]:
    """Replace pairs of a LayerNorm and a Linear that reads it, in place; return the full names of the pairs.

    A name is a path as in `named_modules`, relative to the model or to every block that has both: ("ln_1",
    "attn.c_attn") is one pair in each block of GPT-2. The Linear then computes both layers, as
    `fused_layernorm_linear` does, and the LayerNorm returns its input. So pass a pair for every Linear that
    reads the LayerNorm, such as three for query, key and value; each recomputes the LayerNorm. Between the
    two, the model may only reshape or select rows (no dropout), which is checked only in nn.Sequential.

    Parameters and their names are unchanged, so optimizers and state dicts remain valid. After an error the
    model is unchanged.

    Raises:
        TypeError: A module is not an nn.LayerNorm, or neither nn.Linear nor transformers' Conv1D.
        ValueError: No block has both names; sizes, dtypes or devices differ; a module has hooks or an
            overridden `forward`, or occurs twice in the model; or `algorithm` or `memory` is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected nn.Module, got {type(model).__name__}")
    encode_options(algorithm, memory)
    modules: dict[str, Any] = dict(model.named_modules())
    replaced_pairs: list[tuple[str, str]] = []
    use_counts = Counter(id(child) for block in modules.values() for child in block._modules.values())
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"pairs: expected names of a LayerNorm and a Linear, got {pair!r}")
        blocks = [""] if all(name in modules for name in pair) else modules
        candidates = [tuple(f"{block}.{name}".lstrip(".") for name in pair) for block in blocks]
        matches = [names for names in candidates if all(name in modules for name in names)]
        if not matches:
            raise ValueError(f"pairs: no block of the model has both {pair[0]!r} and {pair[1]!r}")
        for norm, linear in matches:
            check_pair(norm, linear, modules, use_counts)
            if linear in (other for _, other in replaced_pairs):
                raise ValueError(f"{linear}: it occurs in two pairs")
            replaced_pairs.append((norm, linear))
    replacements: dict[str, Any] = {name: IdentityNorm(modules[name]) for name, _ in replaced_pairs}
    for norm, linear in replaced_pairs:
        options = {"algorithm": algorithm, "memory": memory}
        replacements[linear] = NormLinear(replacements[norm], modules[linear], **options)
    for name, module in replacements.items():
        model.set_submodule(name, module)
    return replaced_pairs


def check_pair(norm: str, linear: str, modules: dict[str, Any], use_counts: Counter[int]) -> None:
    """Raise an error with the module's name if a pair cannot be replaced."""
    for name, classes in ((norm, NORM_CLASSES), (linear, LINEAR_CLASSES)):
        module = modules[name]
        if get_class_name(module) not in classes:
            raise TypeError(f"{name}: expected {' or '.join(classes)}, got {get_class_name(module)}")
        if any(value for key, value in vars(module).items() if key == "forward" or key.endswith("_hooks")):
            raise ValueError(f"{name}: it has hooks or an overridden forward")
        if use_counts[id(module)] != 1:
            raise ValueError(f"{name}: it occurs {use_counts[id(module)]} times in the model")
    weight, transposed = modules[linear].weight, LINEAR_CLASSES[get_class_name(modules[linear])]
    shape = (weight.shape[0 if transposed else 1],)
    if modules[norm].normalized_shape != shape:
        raise ValueError(f"{norm}: expected {shape}, as {linear} reads, got {modules[norm].normalized_shape}")
    for parameter in modules[norm].parameters():
        if (parameter.dtype, parameter.device) != (weight.dtype, weight.device):
            expected, actual = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, parameter))
            raise ValueError(f"{norm}: expected {expected}, as {linear}, got {actual}")
    block, _, child = norm.rpartition(".")
    if isinstance(modules[block], nn.Sequential):
        children = [*modules[block]._modules]
        next_name = ".".join(filter(None, [block, *children[children.index(child) + 1 :][:1]]))
        if child != children[-1] and not f"{linear}.".startswith(f"{next_name}."):
            raise ValueError(f"{norm}: {next_name} reads it, not {linear}")


def get_class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
