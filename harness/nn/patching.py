"""Lets the workbook's kernels compute the LayerNorm -> Linear pairs of an eager model, and takes that back: no compiler.

Which Linear reads a LayerNorm is decided at run time. A patched LayerNorm computes its output as ever, and notes for as
long as this tensor lives what it was made from. A patched Linear that is given this very tensor, unchanged, computes both
layers from the LayerNorm's input, so that autograd keeps no LayerNorm output; given anything else, it is the Linear that it was.

The output is computed at once, not on demand: a change in place of the LayerNorm's input before somebody asks would leave
nothing to compute it from, and a tensor that is no plain one would be seen by all that looks past torch's Python functions.
"""

import functools
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from harness.nn.arguments import DTYPES
from harness.nn.autograd import check_algorithm, check_memory
from harness.nn.extension_kernels import PLAIN
from harness.nn.layernorm_plan import AUTO
from harness.nn.layers import fused_layernorm_linear, parameter
from harness.nn.private import (
    any_autocast,
    current_stream,
    dispatch_modes,
    function_modes,
    hooks_of_all_modules,
    hooks_on_saved,
    is_tracing,
    transforms_active,
)

Tensor = torch.Tensor
is_compiling = torch.compiler.is_compiling


@dataclass
class Part:
    """What a patched module knows of its patch: its name in the model, and of which LayerNorms it has computed the pair."""

    name: str
    algorithm: str
    memory: str
    swapped: dict[str, None] = field(default_factory=dict)


@dataclass
class Patch:
    """What `patch` did to a model.

    Attributes:
        layernorms: The names of the LayerNorms whose output may be taken for what it was made from.
        linears: The names of the Linear layers that look whether they are given such an output.
        left: (name, why this LayerNorm or Linear stays as it is).
    """

    layernorms: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    _modules: list[tuple[nn.Module, Part]] = field(default_factory=list, repr=False)

    @property
    def swapped(self) -> list[tuple[str, str]]:
        """(Name of LayerNorm, name of Linear) of each pair that the kernels have computed: empty before the model has run."""
        return [(ln, part.name) for _, part in self._modules for ln in part.swapped]

    @property
    def report(self) -> str:
        """A line for each pair that the kernels have computed so far, and for each module that stays as it was."""
        lines = [
            f"patched: LayerNorm {len(self.layernorms)}, Linear {len(self.linears)}; left alone: {len(self.left)}; "
            f"pairs computed so far: {len(self.swapped)}"
        ]
        lines += [f"  swapped  {ln} -> {linear}" for ln, linear in self.swapped]
        return "\n".join(lines + [f"  left     {name}: {why}" for name, why in self.left])

    def give(self, module: nn.Module, part: Part) -> None:
        """Makes one module a patched one."""
        vars(module)["_part"] = part
        module.__class__ = patched(type(module))
        self._modules.append((module, part))

    def undo(self) -> None:
        """Gives every module its own class back. A second call does nothing."""
        for module, part in self._modules:
            if vars(module).get("_part") is part:
                give_back(module)


def patch(model: nn.Module, *, algorithm: str = "fast", memory: str = AUTO) -> Patch:
    """Lets the workbook's kernels compute the LayerNorm -> Linear pairs of a model, in place.

    Parameters, state dict, hooks and optimizer stay; a patched module is of a subclass with its class's name. A pair is
    computed as `fused_layernorm_linear` does it, with its errors, where the Linear is given what a LayerNorm returned, and
    neither this nor what it was made from has changed since. It is left to torch where a module of it has hooks, where the
    LayerNorm's output has (or keeps its gradient), under autocast, in inference mode, where only the Linear's parameters
    need gradients, and while something compiles, traces or transforms. The gradient with respect to the LayerNorm's output
    is of its other readers only, for who asks for it after the Linear has run. Writes that autograd does not see (`.data`)
    are not seen here either. A head and its loss stay two, because a Linear cannot know whether a loss alone will read its logits; the
    compile backend sees that in the graph.

    Args:
        model: Any module; it is changed.
        algorithm, memory: As in `fused_layernorm_linear`.

    Returns:
        A `Patch` with `report` and `undo()`.

    Raises:
        TypeError: `model` is no module.
        ValueError: The model is patched already, or the algorithm or the choice of memory is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected nn.Module, got {type(model).__name__}")
    check_algorithm(algorithm)
    check_memory(memory)
    modules = dict(model.named_modules())
    if any(isinstance(module, Noting | Taking) for module in modules.values()):
        raise ValueError("model: it is patched already; undo() that patch first")
    read = {in_features(module) for module in modules.values() if linear_like(module)}
    done = Patch()
    for name, module in modules.items():
        if isinstance(module, nn.LayerNorm):
            why = unlike(module, nn.LayerNorm) or unread(module, read)
            if not why:
                done.layernorms.append(name)
        elif linear_like(module) or isinstance(module, nn.Linear):
            why = "" if linear_like(module) else unlike(module, nn.Linear)
            why = why or unlike(module, type(module))
            if not why:
                done.linears.append(name)
        else:
            continue
        if why:
            done.left.append((name, why))
        else:
            done.give(module, Part(name, algorithm, memory))
    return done


def unlike(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module may do something else than its kind does; empty where it does not."""
    if hasattr(module, "parametrizations"):
        return "it has parametrizations"
    if type(module) is not kind:
        return f"it is no {kind.__name__}, but a subclass, {type(module).__name__}"
    if "forward" in vars(module):
        return "it has a forward of its own"
    return "it has hooks" if hooked(module) else ""


def unread(ln: nn.LayerNorm, read: set[int]) -> str:
    """Why no Linear can read this LayerNorm; empty where one may. `read` has the in_features of all."""
    shape = list(ln.normalized_shape)
    if len(shape) > 1:
        return f"it normalises {len(shape)} axes, {shape}"
    return "" if shape[0] in read else f"no Linear layer of the model reads {shape[0]} features"


ELSEWHERE = (
    ("transformers.pytorch_utils", "Conv1D"),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
)
"""(Module, class) with a forward of its own that computes what `nn.Linear` does; GPT-2's Conv1D keeps the weight as [H, O]."""


def linear_like(module: nn.Module) -> bool:
    """Whether it is `nn.Linear`, or one of the classes ELSEWHERE: the very class, not one of its name."""
    kind = type(module)
    return kind is nn.Linear or any(
        kind is getattr(sys.modules.get(home), name, None) for home, name in ELSEWHERE
    )


def in_features(linear: nn.Module) -> int:
    """H."""
    return parameter(linear, "weight").shape[1 if isinstance(linear, nn.Linear) else 0]


def hooked(module: nn.Module) -> Any:
    """What is true where a hook of the module's own sees what it is given or returns."""
    return (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


# ---- What a LayerNorm's output was made from ----------------------------------------------------------------------


class Origin(weakref.ref):
    """A weak reference to a LayerNorm's output, with what it was made from."""

    __slots__ = ("key", "made")
    key: int
    made: tuple
    """(name, x, gamma, beta, eps, and what `state` said)."""


origins: dict[int, Origin] = {}
"""By the output's id; an entry goes with its tensor."""


def forget(origin: Origin) -> None:
    """Called as the output dies."""
    if origins.get(origin.key) is origin:
        del origins[origin.key]


def note(
    output: Tensor, name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """Enters what an output was made from."""
    try:
        then = state(output, x, weight, bias)
    except (
        RuntimeError
    ):  # tensors of the inference mode have no version: nobody can say whether they have changed
        return
    origin = Origin(output, forget)
    key = id(output)
    origin.key, origin.made = key, (name, x, weight, bias, eps, then)
    origins[key] = origin


def state(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple:
    """What differs once one of them was written to or changed its part in the gradient, and in another place.

    Another place is another stream, or a checkpoint: what it runs again is given a copy of its input, which nobody noted.
    """
    return (
        hooks_on_saved(True),
        current_stream(x.get_device()) if x.is_cuda else 0,
        output._version,
        x._version,
        x.requires_grad,
        weight is None or (weight._version, weight.requires_grad),
        bias is None or (bias._version, bias.requires_grad),
    )


def watched() -> bool:
    """Whether torch's operators mean something else than they say, or somebody looks at each."""
    return (
        any_autocast()
        or dispatch_modes() > 0
        or transforms_active()
        or forward_ad._current_level >= 0
        or function_modes()
        or is_tracing()
    )


def flows_back(output: Tensor) -> bool:
    """Whether a gradient of a LayerNorm's output goes on to what it was made from, and nobody waits for it here."""
    return output.requires_grad and not (output.is_leaf or output._backward_hooks or output.retains_grad)


def fit(x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels can compute both layers, x [..., H] and the linear weight [O, H]."""
    dtype = x.dtype
    for tensor in (gamma, beta, bias):
        if tensor is not None and (type(tensor) not in PLAIN or tensor.dtype != dtype):
            return False
    return (
        dtype in DTYPES
        and (x.is_cuda or x.is_cpu)
        and not x.is_nested
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and weight.dtype == dtype
        and weight.layout is torch.strided
        and weight.shape[0] > 0
        and (bias is None or bias.shape == weight.shape[:1])
    )


# ---- The patched modules ------------------------------------------------------------------------------------------


class Patched(nn.Module):
    """Before a module's own class; made by `patched`, for which it is copied and pickled by its own class."""

    _part: Part

    def __reduce_ex__(self, protocol):
        reduced: Any = super().__reduce_ex__(protocol)
        return blank, (CLASSES[type(self)],), *reduced[2:]


class Noting(Patched):
    """A LayerNorm that notes what its output was made from."""

    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.LayerNorm`."""
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        output = F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        # A child is a parametrization that came after the patch.
        if not (is_compiling() or hooked(self) or self._modules or dispatch_modes() or function_modes()):
            note(output, self._part.name, input, weight, bias, self.eps)
        return output


class Taking(Patched):
    """A Linear that looks whether it is given a LayerNorm's output, and computes both layers then."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if is_compiling():
            return super().forward(input)
        origin = origins.get(id(input))
        if origin is None or not self.takes(origin, input):
            return super().forward(input)
        name, x, gamma, beta, eps, _ = origin.made
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        if not isinstance(self, nn.Linear):
            weight = weight.t()
        if not fit(x, gamma, beta, weight, bias):
            return super().forward(input)
        part = self._part
        part.swapped[name] = None
        how = {"algorithm": part.algorithm, "memory": part.memory}
        return fused_layernorm_linear(x, gamma, beta, weight, bias, eps, **how)

    def takes(self, origin: Origin, input: Tensor) -> bool:
        """Whether the LayerNorm's input says all about what this Linear is given, gradient included."""
        _, x, gamma, beta, _, then = origin.made
        return not (
            origin() is not input
            or state(input, x, gamma, beta) != then
            or (torch.is_grad_enabled() and not flows_back(input))
            or watched()
            or hooked(self)
            or hooks_of_all_modules()
            or self._modules
        )


CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Patched class -> the module's own class."""


@functools.cache
def patched(own: type[nn.Module]) -> type[nn.Module]:
    """The class of a patched module: a subclass of its own class, with its name."""
    first = Noting if issubclass(own, nn.LayerNorm) else Taking
    made: Any = type(own.__name__, (first, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    CLASSES[made] = own
    return made


def blank(own: type[nn.Module]) -> nn.Module:
    """A patched module without its state, for copies and pickles."""
    return object.__new__(patched(own))


def give_back(module: nn.Module) -> None:
    """Takes a patch from one module; a class that a parametrization has put before it since then stays."""
    kind = type(module)
    if kind in CLASSES:
        module.__class__ = CLASSES[kind]
    else:
        kind.__bases__ = tuple(CLASSES.get(base, base) for base in kind.__bases__)
    del vars(module)["_part"]
