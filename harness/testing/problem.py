"""What is checked: a function beside its reference, and inputs of many sizes made from what the caller says of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType

import torch
from torch import Tensor
from torch.func import functional_call

from harness.check.gradients import Function, Subject, leaves, outputs_of, pulled_back, random_like
from harness.check.measured import guarded

Shape = Sequence[str | int | EllipsisType]
Sizes = Mapping[str, int]
Entry = Shape | Tensor | Callable[[Sizes, torch.Generator], Tensor]
"""An input: a shape of names and numbers, a tensor, or a function that makes one."""

LEADING = {"odd": (3, 5), "square": (4,), "row": (), "deep": (2, 3, 2)}
"""What `...` stands for, by kind of sizes."""
CYCLES = {"odd": (3, 5, 7, 6, 2), "square": (4,), "even": (2, 4, 8, 16)}
"""The sizes of names in the order in which they come, by kind."""
LARGE, TALL = 1031, 5003
"""More than a block of threads has, and than a sum in 16 bits can count."""


class Refused(Exception):
    """The function raised before it had a result."""


def is_refusal(error: Exception) -> bool:
    """Whether an exception was raised by the function itself, before it had a result."""
    return isinstance(error, Refused) or getattr(error, "is_refusal", False)


@dataclass(frozen=True)
class Problem(Subject):
    """A subject with inputs by names of sizes.

    Attributes:
        free: The names of sizes, "..." among them.
        module: The function as it was given.
        device: Where it runs.
        notes: What is said and not demanded.
    """

    free: tuple[str, ...] = ()
    module: Callable[..., object] | None = None
    device: str = "cpu"
    notes: list[str] = field(default_factory=list[str])


def make_problem(
    function: Callable[..., object],
    reference: Callable[..., object],
    inputs: Mapping[str, Entry],
    dtypes: Sequence[torch.dtype],
    saved: Callable[..., int] | None,
    subgradients: bool,
    device: str,
) -> Problem:
    """The problem that a call of `check_backward` is about, in the dtypes that the function takes."""
    entries: dict[str, Entry] = dict(inputs)
    ours, theirs = function, reference
    if isinstance(function, torch.nn.Module) and isinstance(reference, torch.nn.Module):
        parameters = {name: p.detach() for name, p in function.named_parameters()}
        names = [name for name, _ in reference.named_parameters()]
        if names != list(parameters):
            raise ValueError(f"the function has parameters {list(parameters)}, the reference {names}")
        entries |= parameters
        ours, theirs = (with_parameters(module, names) for module in (function, reference))
    shapes = [entry for entry in entries.values() if not isinstance(entry, Tensor) and not callable(entry)]
    named = dict.fromkeys(s for shape in shapes for s in shape if isinstance(s, str))
    for entry in entries.values():
        if callable(entry) and not isinstance(entry, Tensor):
            named |= dict.fromkeys(asked_by(entry))
    leading = any(... in shape for shape in shapes)
    free = ("...",) * leading + tuple(named)
    kinds = (
        "odd",
        *(("square",) if free else ()),
        *(("row", "deep") if leading else ("even",) if free else ()),
    )
    problem = Problem(
        refusing(ours),
        references(theirs),
        functools.partial(make, entries, free, device),
        saved=saved,
        sizes=kinds,
        dtypes=tuple(dtypes),
        names=tuple(entries),
        movable=tuple(
            i
            for i, each in enumerate(entries.values())
            if not isinstance(each, Tensor) and not callable(each)
        ),
        measured=True,
        subgradients=subgradients,
        free=free,
        module=function,
        device=device,
    )
    taken = tuple(dtype for dtype in dtypes if takes(problem, dtype)) or tuple(dtypes[:1])
    return replace(problem, dtypes=taken)


def takes(problem: Problem, dtype: torch.dtype) -> bool:
    """Whether the function runs in a dtype at all."""
    try:
        inputs = problem.inputs(dtype=dtype)
        outputs = [t for t in outputs_of(problem.function, inputs) if t.requires_grad]
        pulled_back(outputs, inputs, random_like(tuple(outputs)))
    except Exception:
        return False
    return bool(leaves(inputs))


def refusing(function: Callable[..., object]) -> Function:
    """A function whose exceptions are refusals."""

    @functools.wraps(function)
    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        try:
            return tensors_of(function(*tensors))
        except Exception as error:
            vars(error)["is_refusal"] = True  # what it is stays, for autograd has exceptions of its own
            raise

    return call


def references(function: Callable[..., object]) -> Function:
    """The reference as a function of tensors."""
    return lambda *tensors: tensors_of(function(*tensors))


def tensors_of(returned: object) -> Tensor | tuple[Tensor, ...]:
    """The tensors of what a function returned. Raises TypeError where there is none."""
    if isinstance(returned, Tensor):
        return returned
    tensors = (
        tuple(t for t in returned if isinstance(t, Tensor)) if isinstance(returned, tuple | list) else ()
    )
    if not tensors:
        raise TypeError(f"the function returns {type(returned).__name__}, expected a tensor or several")
    return tensors


def with_parameters(module: torch.nn.Module, names: Sequence[str]) -> Callable[..., object]:
    """A module as a function of its inputs, and after them its parameters."""

    def call(*tensors: Tensor) -> object:
        count = len(tensors) - len(names)
        return functional_call(module, dict(zip(names, tensors[count:], strict=True)), tensors[:count])

    return call


def words_of(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def asked_by(make: Callable[[Sizes, torch.Generator], Tensor]) -> list[str]:
    """The names of the sizes that a function asks for."""

    class Asked(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return self.setdefault(name, 3)

    sizes = Asked()
    make(sizes, torch.Generator())
    return list(sizes)


# ---- Sizes --------------------------------------------------------------------------------------------------


def sizes_of(kind: str, free: Sequence[str]) -> tuple[tuple[int, ...], dict[str, int]]:
    """What `...` stands for in a kind of sizes, and the size of each name.

    A kind is one of `LEADING` and `CYCLES`, "tall", or a size for one name, or for all, with the others odd: "1 for H", "0 for all".
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


def make(
    entries: Mapping[str, Entry], free: Sequence[str], device: str, kind: str, seed: int
) -> tuple[Tensor, ...]:
    """The inputs of a kind of sizes, in float64: numbers about 0.5, and what was given."""
    leading, sizes = sizes_of(kind, free)
    generator = torch.Generator().manual_seed(seed)

    def one(entry: Entry) -> Tensor:
        if isinstance(entry, Tensor):
            tensor = entry.detach()
        elif callable(entry):
            tensor = guarded(entry)(sizes, generator).detach()
        else:
            shape: list[int] = []
            for size in entry:
                shape += leading if size is ... else [sizes[size] if isinstance(size, str) else int(size)]
            tensor = 0.5 + torch.randn(shape, generator=generator, dtype=torch.float64)
        return (tensor.double() if tensor.is_floating_point() else tensor).to(device)

    return tuple(one(entry) for entry in entries.values())
