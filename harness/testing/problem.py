"""A function, its reference, and inputs of many sizes from the caller's description."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from harness.check.gradients import Function, Subject, gradients, outputs_of, random_like
from harness.check.measured import guard, narrow_of

Shape = Sequence[str | int | EllipsisType]
Sizes = Mapping[str, int]
Run = Callable[..., object]
Entry = Shape | Tensor | Callable[[Sizes, torch.Generator], Tensor]
"""An input: a shape of names and numbers, a tensor, or a function that makes one."""

LEADING = {"odd": (3, 5), "square": (4,), "row": (), "deep": (2, 3, 2)}
"""Leading axes for `...`, by kind of sizes."""
CYCLES = {"odd": (3, 5, 7, 6, 2), "square": (4,), "even": (2, 4, 8, 16)}
"""Sizes of the names in order, by kind of sizes."""
LARGE, TALL = 1031, 5003
"""More than a block of threads has, and than a sum in 16 bits can count."""


def mark_refusal(error: Exception) -> None:
    """Mark an exception of the function before it had a result; the type stays, since autograd has its own
    exceptions."""
    vars(error)["is_refusal"] = True


def is_refusal(error: Exception) -> bool:
    return vars(error).get("is_refusal", False)


@dataclass(frozen=True)
class Problem(Subject):
    """A subject whose inputs have named sizes (`free`); `module` is the function as passed, `notes` are reported only."""

    free: tuple[str, ...] = ()
    module: Run | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list[str])


def make_problem(
    function: Run,
    reference: Run,
    inputs: Mapping[str, Entry],
    dtypes: Sequence[torch.dtype],
    device: str,
    **options: Any,
) -> Problem:
    """Make the problem of a call of `check_backward`, in the dtypes that the function takes."""
    if isinstance(dtypes, torch.dtype) or not dtypes or not all(d.is_floating_point for d in dtypes):
        raise ValueError(f"dtypes is {dtypes}, and should be a list of floating-point dtypes")
    torch.empty(0, device=device)  # raises if there is no such device
    entries = {name: check_entry(name, entry) for name, entry in inputs.items()}
    ours, theirs = function, reference
    if isinstance(function, torch.nn.Module) and isinstance(reference, torch.nn.Module):
        parameters = {name: p.detach() for name, p in function.named_parameters()}
        names = [name for name, _ in reference.named_parameters()]
        if names != list(parameters):
            raise ValueError(f"the function has parameters {list(parameters)}, the reference {names}")
        entries |= parameters
        ours, theirs = (bind_parameters(module, names) for module in (function, reference))
    shapes = {i: entry for i, entry in enumerate(entries.values()) if isinstance(entry, Sequence)}
    named = dict.fromkeys(size for shape in shapes.values() for size in shape if isinstance(size, str))
    for entry in entries.values():
        if callable(entry):
            named |= dict.fromkeys(list_size_names(entry))
    leading = any(... in shape for shape in shapes.values())
    free = ("...",) * leading + tuple(named)
    kinds = ("square", *(("row", "deep") if leading else ("even",))) if free else ()
    problem = Problem(
        mark_refusals(ours),
        lambda *tensors: take_tensors(theirs(*tensors)),
        functools.partial(make_inputs, entries, free, device),
        sizes=("odd", *kinds), dtypes=tuple(dtypes), names=tuple(entries), movable=tuple(shapes),
        measured=True, free=free, module=function, device=device, **options,
    )  # fmt: skip
    if not any(t.requires_grad for t in outputs_of(guard(problem.reference), problem.inputs())):
        raise ValueError("no output of the reference has a gradient: there is nothing to check")
    if isinstance(function, torch.nn.Module) and not isinstance(reference, torch.nn.Module):
        problem.notes.append("the module's parameters are not checked: the reference is no module")
    return replace(problem, dtypes=tuple(d for d in dtypes if runs_in(problem, d)) or tuple(dtypes[:1]))


def check_entry(name: str, entry: Entry) -> Entry:
    """Return what makes an input. Raises ValueError for what does not."""
    if isinstance(entry, Tensor):
        return entry
    if callable(entry):
        return guard(entry, f"the function of input {name}")
    if isinstance(entry, tuple | list) and all(isinstance(s, str | int | EllipsisType) for s in entry):
        return entry
    raise ValueError(
        f"input {name} is {entry!r}, and should be a shape such as ('N', 3), a tensor, or a function of (sizes, generator)"
    )


def runs_in(problem: Problem, dtype: torch.dtype) -> bool:
    """Check whether both passes run in a dtype."""
    try:
        return bool(gradients(problem.function, problem.inputs(dtype=dtype), random_like))
    except Exception:
        return False


def mark_refusals(function: Run) -> Function:
    """Return a function whose exceptions are refusals."""

    @functools.wraps(function)
    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        try:
            return take_tensors(function(*tensors))
        except Exception as error:
            mark_refusal(error)
            raise

    return call


def take_tensors(returned: object) -> Tensor | tuple[Tensor, ...]:
    """Return the tensors among a function's results. Raises TypeError if there is none."""
    if isinstance(returned, Tensor):
        return returned
    tensors = (
        tuple(t for t in returned if isinstance(t, Tensor)) if isinstance(returned, tuple | list) else ()
    )
    if not tensors:
        raise TypeError(f"the function returns {type(returned).__name__}, expected a tensor or several")
    return tensors


def bind_parameters(module: torch.nn.Module, names: Sequence[str]) -> Run:
    """Return a module as a function of its inputs and, after them, its parameters; its buffers take their dtype."""

    def call(*tensors: Tensor) -> object:
        count, dtype = len(tensors) - len(names), narrow_of(tensors)
        buffers = {
            name: b.to(tensors[-1].device, dtype if b.is_floating_point() else b.dtype, copy=True)
            for name, b in module.named_buffers()
        }
        return functional_call(
            module, buffers | dict(zip(names, tensors[count:], strict=True)), tensors[:count]
        )

    return call


def list_size_names(make: Callable[[Sizes, torch.Generator], Tensor]) -> list[str]:
    """Return the names of the sizes that a function reads."""
    sizes: defaultdict[str, int] = defaultdict(lambda: 3)
    if not isinstance(made := make(sizes, torch.Generator()), Tensor):
        raise ValueError(
            f"the function of an input returns {type(made).__name__}, and should return a tensor"
        )
    return list(sizes)


def resolve_sizes(kind: str, free: Sequence[str]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the axes for `...` and the size of each name, for a kind of sizes.

    A kind is one of `LEADING` and `CYCLES`, "tall", or a size for one name, or for all, with the others odd:
    "1 for H", "0 for all".
    """
    names = [name for name in free if name != "..."]
    cycle = CYCLES.get(kind, CYCLES["odd"])
    sizes = {name: cycle[(i + 2 * ("..." in free)) % len(cycle)] for i, name in enumerate(names)}
    leading = LEADING.get(kind, LEADING["odd"])
    if kind == "tall" and free:
        kind = f"{TALL} for {free[0]}"
    size, _, which = kind.partition(" for ")
    for name in (free if which == "all" else (which,)) if which else ():
        leading = (int(size),) if name == "..." else leading
        sizes |= {name: int(size)} if name != "..." else {}
    return leading, sizes


def make_inputs(
    entries: Mapping[str, Entry], free: Sequence[str], device: str, kind: str, seed: int
) -> tuple[Tensor, ...]:
    """Make the inputs of a kind of sizes in float64: numbers about 0.5, and the tensors that were passed."""
    leading, sizes = resolve_sizes(kind, free)
    generator = torch.Generator().manual_seed(seed)

    def one(entry: Entry) -> Tensor:
        if isinstance(entry, Tensor):
            tensor = entry.detach()
        elif callable(entry):
            tensor = entry(sizes, generator).detach()
        else:
            axes = (leading if s is ... else (sizes[s] if isinstance(s, str) else int(s),) for s in entry)
            tensor = 0.5 + torch.randn(sum(axes, ()), generator=generator, dtype=torch.float64)
        return (tensor.double() if tensor.is_floating_point() else tensor).to(device)

    return tuple(one(entry) for entry in entries.values())
