"""Create a `Problem`: a function, its reference, and inputs of many sizes described by the caller."""

import functools
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.func import functional_call

from harness.check.call_comparison import get_float_dtype, guard_reference
from harness.check.gradients import DTYPES, Function, Subject, are_equal, compute_outputs, get_dtype_name

P = ParamSpec("P")
R = TypeVar("R")
Shape = Sequence[str | int | EllipsisType]
Sizes = Mapping[str, int]
AnyFunction = Callable[..., object]
InputSpec = Shape | Tensor | Callable[[Sizes, torch.Generator], Tensor]  # the last makes a tensor

LEADING_AXES = {"odd": (3, 5), "square": (4,), "row": (), "deep": (2, 3, 2)}  # sizes for `...`, by kind
SIZE_CYCLES = {"odd": (3, 5, 7, 6, 2), "square": (4,), "even": (2, 4, 8, 16)}  # sizes of the names, in order
LARGE_SIZE, MODEL_WIDTH, MANY_ROWS = 1031, 2304, 5003  # above a block, a model's width, beyond 16-bit counts


@dataclass(frozen=True)
class Problem(Subject):
    """A subject whose inputs have named sizes, `size_names`; `notes` are reported but are not failures.

    `module` is the function as passed in, `parameters` lists its parameters that are inputs.
    """

    size_names: tuple[str, ...] = ()
    module: AnyFunction | None = None
    parameters: tuple[str, ...] = ()
    device: str = "cpu"
    notes: list[str] = field(default_factory=list[str])


def require(is_valid: object, name: str, value: object, expected: str) -> None:
    """Raise ValueError, with the argument's name and the `expected` value, unless it is valid."""
    if not is_valid:
        raise ValueError(f"{name} is {textwrap.shorten(repr(value), 80)}, and should be {expected}")


def check_arguments(
    function: AnyFunction,
    reference: AnyFunction,
    inputs: Mapping[str, InputSpec],
    dtypes: Sequence[torch.dtype],
    saved: object,
) -> None:
    """Raise ValueError if an argument of `check_backward` is invalid."""
    requirement = "a module or a function of tensors, as the `apply` of an autograd.Function"
    for name, argument in (("function", function), ("reference", reference)):
        require(callable(argument) and not isinstance(argument, type), name, argument, requirement)
    requirement = "a dict from names to shapes, tensors or functions"
    require(isinstance(inputs, Mapping) and inputs, "inputs", inputs, requirement)
    requirement = "a shape such as ('N', 3), a tensor, or a function of (sizes, generator)"
    for name, entry in inputs.items():
        is_valid = isinstance(entry, Tensor) or callable(entry) or is_shape(entry)
        require(is_valid, f"input {name}", entry, requirement)
    is_valid = isinstance(dtypes, Sequence) and dtypes and all(dtype in DTYPES for dtype in dtypes)
    require(is_valid, "dtypes", dtypes, f"a list of some of {', '.join(map(get_dtype_name, DTYPES))}")
    require(saved is None or callable(saved), "saved", saved, "a function of the inputs")


def is_shape(entry: object) -> bool:
    """Check whether an input is a shape: names, sizes, and `...` for any leading axes."""
    return isinstance(entry, tuple | list) and all(
        s is ... or (s.isidentifier() if isinstance(s, str) else isinstance(s, int) and s >= 0) for s in entry
    )


def make_problem(
    function: AnyFunction,
    reference: AnyFunction,
    inputs: Mapping[str, InputSpec],
    dtypes: Sequence[torch.dtype],
    device: str | torch.device,
    saved: Callable[..., int] | None = None,
    **options: Any,
) -> Problem:
    """Make the problem for a call of `check_backward`."""
    torch_device = guard_reference(torch.empty, f"torch.empty on device {device!r}")(0, device=device).device
    parameters: dict[str, torch.nn.Parameter] = {}
    if isinstance(function, torch.nn.Module) and isinstance(reference, torch.nn.Module):
        parameters, reference_parameters = (
            dict(module.named_parameters()) for module in (function, reference)
        )
        if [*parameters] != [*reference_parameters]:
            raise ValueError(
                f"the function has parameters {[*parameters]}, the reference {[*reference_parameters]}"
            )
        if duplicates := inputs.keys() & parameters.keys():
            raise ValueError(f"input {duplicates.pop()} has the name of a parameter")
    describe = "the function of input {}".format
    guarded_inputs = {n: guard_reference(e, describe(n)) if callable(e) else e for n, e in inputs.items()}
    entries = {**guarded_inputs, **parameters}
    shapes = {i: entry for i, entry in enumerate(entries.values()) if is_shape(entry)}
    size_names = ("...",) * any(... in shape for shape in shapes.values()) + tuple(list_size_names(entries))
    kinds = ("square", *(("row", "deep") if "..." in size_names else ("even",))) if size_names else ()
    bound_function, bound_reference = (bind_parameters(f, [*parameters]) for f in (function, reference))
    frozen = (isinstance(t, torch.nn.Parameter) and not t.requires_grad for t in entries.values())
    problem = Problem(
        mark_refusals(bound_function), bound_reference, functools.partial(make_inputs, entries, size_names, torch_device),
        frozen=tuple(i for i, is_frozen in enumerate(frozen) if is_frozen), expected_saved_bytes=saved and guard_reference(saved, "saved"),
        sizes=("odd", *kinds), dtypes=tuple(dtypes), names=tuple(entries), editable=tuple(shapes),
        size_names=size_names, module=function, parameters=tuple(parameters), device=torch_device.type, **options,
    )  # fmt: skip
    first, second = (compute_outputs(guard_reference(problem.reference), problem.inputs()) for _ in range(2))
    if not any(t.requires_grad for t in first):
        raise ValueError("no output of the reference has a gradient: there is nothing to check")
    if not are_equal(first, second, 1e-5):
        raise ValueError("the reference gives another result in a second run: it must not be random")
    count = problem.expected_saved_bytes(*problem.inputs()) if problem.expected_saved_bytes else 0
    require(isinstance(count, int), "the result of saved", count, "a number of bytes")
    if isinstance(function, torch.nn.Module) and not isinstance(reference, torch.nn.Module):
        problem.notes.append("the module's parameters are not checked: the reference is no module")
    return problem


def mark_refusals(function: Callable[P, R], error_type: type[Exception] = Exception) -> Callable[P, R]:
    """Return the function with its exceptions marked as refusals by an attribute."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except error_type as error:
            vars(error)["is_refusal"] = True
            raise

    return call


def bind_parameters(function: AnyFunction, names: Sequence[str]) -> Function:
    """Return a module as a function of inputs, then named parameters; other tensors get the inputs' dtype."""
    if not isinstance(function, torch.nn.Module):
        return cast(Function, function)

    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        count, dtype = len(tensors) - len(names), get_float_dtype(tensors)
        state = {
            name: t.detach().to(tensors[-1].device, dtype if t.is_floating_point() else t.dtype, copy=True)
            for name, t in (*function.named_parameters(), *function.named_buffers())
        }
        state |= dict(zip(names, tensors[count:], strict=True))
        return functional_call(function, state, tensors[:count])

    return call


def list_size_names(entries: Mapping[str, InputSpec]) -> list[str]:
    """Return the size names in shapes, then those that functions look up."""
    shapes = (entry for entry in entries.values() if isinstance(entry, Sequence))
    sizes = defaultdict(lambda: 3, {s: 3 for shape in shapes for s in shape if isinstance(s, str)})
    for name, entry in entries.items():
        sample = entry(sizes, torch.Generator()) if callable(entry) else torch.empty(0)
        require(isinstance(sample, Tensor), f"the result of the function of input {name}", sample, "a tensor")
    return list(sizes)


def resolve_sizes(kind: str, size_names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Map each size name to its sizes: one, or one for each leading axis.

    `kind` is a key of `LEADING_AXES` or `SIZE_CYCLES`, "tall", or a size for one name or for all, such as
    "1 for H", with odd sizes for the other names.
    """
    cycle = SIZE_CYCLES.get(kind, SIZE_CYCLES["odd"])
    axes = {name: (cycle[i % len(cycle)],) for i, name in enumerate(size_names, "..." in size_names)}
    if "..." in axes:
        axes["..."] = LEADING_AXES.get(kind, LEADING_AXES["odd"])
    kind = f"{MANY_ROWS} for {size_names[0]}" if kind == "tall" and size_names else kind
    size, _, selected = kind.partition(" for ")
    return axes | {name: (int(size),) for name in size_names if selected in (name, "all")}


def make_inputs(
    entries: Mapping[str, InputSpec], size_names: Sequence[str], device: torch.device, kind: str, seed: int
) -> tuple[Tensor, ...]:
    """Make the inputs for one kind of sizes, in float64: random numbers around 0.5, or the given tensors."""
    axes = resolve_sizes(kind, size_names)
    sizes = {name: axis_sizes[0] for name, axis_sizes in axes.items() if name != "..."}
    generator = torch.Generator().manual_seed(seed)

    def make(entry: InputSpec) -> Tensor:
        value = entry(sizes, generator) if callable(entry) else entry
        if not isinstance(value, Tensor):
            axis_sizes = ((s,) if isinstance(s, int) else axes["..." if s is ... else s] for s in value)
            value = 0.5 + torch.randn(sum(axis_sizes, ()), generator=generator, dtype=torch.float64)
        return (value.detach().double() if value.is_floating_point() else value.detach()).to(device)

    return tuple(make(entry) for entry in entries.values())
