"""Gradients of one differentiable PyTorch function beside those of another: how both are run, and how far apart they are."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from harness.check.compare import got_and_expected

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Returned = TypeVar("Returned")
TOLERANCE = 1e-9
"""Largest error of a gradient in float64, relative to its largest element."""
CANCELLED = 1e-6
"""A gradient that is nowhere larger is what rounding leaves of terms that cancel, as softmax's under a constant gradient."""


@dataclass(frozen=True)
class Subject:
    """A function and what it should be.

    Attributes:
        function: What is checked; takes the tensors of `make` by position, returns a tensor or several.
        reference: The same by PyTorch's own differentiable operations.
        make: (sizes, seed) -> float64 tensors of a problem. `sizes` is "odd", "square", "row" (no leading axis) or "deep"
            (three leading axes).
        differentiable: Which inputs have a gradient; None for all of a floating-point dtype.
        saved: (inputs) -> bytes that it may keep for the backward pass; None where bytes are not counted.
        sizes: Which of the kinds of sizes `make` knows; "tall" (thousands of rows) is asked for by name alone.
    """

    function: Function
    reference: Function
    make: Callable[[str, int], tuple[Tensor, ...]]
    differentiable: tuple[int, ...] | None = None
    saved: Callable[..., int] | None = None
    sizes: tuple[str, ...] = ("odd", "square", "row", "deep")

    def inputs(self, sizes: str = "odd", seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Fresh leaves of a problem; those with a gradient ask for it."""
        tensors = [
            t.to(dtype) if t.is_floating_point() else t for t in self.make(sizes, seed)
        ]  # masks and indices stay what they are
        wanted = self.differentiable or [i for i, t in enumerate(tensors) if t.is_floating_point()]
        return [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]


def outputs_of(function: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What a function returns, always as a tuple."""
    returned = function(*inputs)
    return returned if isinstance(returned, tuple) else (returned,)


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """The inputs that ask for a gradient."""
    return [t for t in inputs if t.requires_grad]


def random_like(tensors: tuple[Tensor, ...], seed: int = 1) -> list[Tensor]:
    """Random gradients, with a mean, for outputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) + 0.5 for t in tensors]


def gradients(
    function: Function, inputs: list[Tensor], incoming: Callable[[tuple[Tensor, ...]], list[Tensor]]
) -> list[Tensor]:
    """The gradients of the inputs that ask for one; zeros where autograd has none."""
    return pulled_back(outputs_of(function, inputs), inputs, incoming)


def pulled_back(
    outputs: tuple[Tensor, ...],
    inputs: list[Tensor],
    incoming: Callable[[tuple[Tensor, ...]], list[Tensor]],
    again: bool = False,
) -> list[Tensor]:
    """The gradients from outputs that were computed before; `again` keeps their graph."""
    outputs = tuple(t for t in outputs if t.requires_grad)
    each = gradients_or_none(outputs, leaves(inputs), incoming(outputs), retain_graph=again)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves(inputs), each, strict=True)]


def gradients_or_none(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """The gradient of each input, None where no output depends on it, which the types of `torch.autograd.grad` leave out."""
    keep = retain_graph or create_graph
    return torch.autograd.grad(
        outputs, inputs, incoming, allow_unused=True, retain_graph=keep, create_graph=create_graph
    )


def second_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of a random sum of the gradients: with respect to the inputs, then to the gradients coming in."""
    outputs = tuple(t for t in outputs_of(function, inputs) if t.requires_grad)
    incoming = [g.requires_grad_() for g in random_like(outputs)]
    first = gradients_or_none(outputs, leaves(inputs), incoming, create_graph=True)
    weights = random_like(tuple(leaves(inputs)), 2)
    total = sum(
        ((g * w).sum() for g, w in zip(first, weights, strict=True) if g is not None), torch.zeros(())
    )
    if total.requires_grad:
        torch.autograd.backward(
            total
        )  # unlike grad it runs the whole graph, so that once_differentiable refuses
    every = (*leaves(inputs), *incoming)
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in every]


def kept_by_autograd(call: Callable[[], Returned]) -> tuple[Returned, list[Tensor]]:
    """What a call returns, and what autograd keeps of it for the backward pass, a tensor for each piece of memory."""
    tensors: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # an output that its own pass keeps would keep the pass, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        returned = call()
    return returned, list(tensors.values())


class Distance(float):
    """How far some gradients are from others; `element` says where they are farthest apart, and what stands there."""

    element: str = ""


def furthest(
    got: list[Tensor], expected: list[Tensor], least: float = CANCELLED, names: Sequence[str] = ()
) -> Distance:
    """The largest difference, relative to the largest expected element of its tensor, or to `least`; inf where shapes differ or a value
    is none. `names` says what the gradients are of, where it is not input 0, input 1 and so on.
    """
    worst = Distance(0.0)
    names = names or [f"input {number}" for number in range(len(got))]
    for name, one, other in zip(names, got, expected, strict=True):
        if one.shape != other.shape:
            worst = Distance("inf")
            worst.element = (
                f"the gradient of {name} has shape {list(one.shape)}, expected {list(other.shape)}"
            )
            return worst
        if not other.numel():
            continue
        apart = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
        error = apart.max().item() / max(other.double().abs().max().item(), least)
        if error > worst:
            at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
            worst = Distance(error)
            limit = TOLERANCE * other.double().abs().max().item()
            values = got_and_expected(one[at].item(), other[at].item(), limit, 6)
            worst.element = f"the gradient of {name} at {list(at)}: {values}"
    return worst


def compare(
    subject: Subject,
    sizes: str = "odd",
    seed: int = 0,
    incoming: Callable[[tuple[Tensor, ...]], list[Tensor]] = random_like,
    change: Callable[[list[Tensor]], list[Tensor]] = list,
    least: float = CANCELLED,
    names: Sequence[str] = (),
) -> Distance:
    """How far the gradients in float64 are from PyTorch's, both on inputs that `change` has made others of; the rest as in `furthest`."""
    functions = (subject.function, subject.reference)
    ours, theirs = (gradients(f, change(subject.inputs(sizes, seed)), incoming) for f in functions)
    return furthest(ours, theirs, least, names)


def off(error: Distance, what: str) -> str | None:
    """A line where an error in float64 is too large."""
    if error <= TOLERANCE:
        return None
    far = "" if math.isinf(error) else f", off by {error:.1e} of the largest element"
    return f"{what}: {error.element}{far}"
