"""Compare the gradients of a differentiable PyTorch function with those of its reference."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from harness.check.compare import got_and_expected

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Incoming = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Incoming gradients, from the outputs."""
Returned = TypeVar("Returned")
TOLERANCE = 1e-9
"""Largest error of a gradient in float64, relative to its largest element."""
CANCELLED = 1e-6
"""A gradient that is nowhere larger is rounding noise of terms that cancel, as softmax's under a constant
gradient."""


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of a function of any floating-point dtype."""


@dataclass(frozen=True)
class Subject:
    """A function and its reference.

    Attributes:
        function: The function to check: takes the tensors of `make` by position, returns one tensor or
            several.
        reference: The same by PyTorch's own differentiable operations.
        make: (sizes, seed) -> float64 tensors of a problem. `sizes` is "odd", "square", "row" (no leading
            axis) or "deep" (three leading axes).
        differentiable: Inputs that have a gradient; None for all of a floating-point dtype.
        saved: (inputs) -> bytes that may be saved for the backward pass; None if bytes are not counted.
        sizes: The kinds of sizes that `make` supports; "tall" (thousands of rows) is requested by name only.
        dtypes: Dtypes that the function supports; inputs have the first by default.
        names: Names of the inputs in messages, by default input 0, input 1 and so on.
        movable: Inputs that may be set to special values; None for all that have a gradient.
        measured: Whether limits are measured by PyTorch's own errors (`measured.py`); else they are
            TOLERANCE, in float64.
        subgradients: Whether any slope between the two sides is accepted at a kink, if limits are measured.
        dropped: Comparisons that were skipped because PyTorch's own error is too large; written by
            `measured.py`.
    """

    function: Function
    reference: Function
    make: Callable[[str, int], tuple[Tensor, ...]]
    differentiable: tuple[int, ...] | None = None
    saved: Callable[..., int] | None = None
    sizes: tuple[str, ...] = ("odd", "square", "row", "deep")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    names: tuple[str, ...] = ()
    movable: tuple[int, ...] | None = None
    measured: bool = False
    subgradients: bool = True
    dropped: list[str] = field(default_factory=list[str])

    def name_of_input(self, number: int) -> str:
        """Return the name of an input in messages."""
        return self.names[number] if self.names else f"input {number}"

    def movable_inputs(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the inputs that may be set to special values."""
        free = range(len(inputs)) if self.movable is None else self.movable
        return [t for i, t in enumerate(inputs) if t.requires_grad and i in free]

    def edit_inputs(
        self, inputs: list[Tensor], edit: Callable[[Tensor], Tensor], alone: bool = False
    ) -> list[Tensor]:
        """Set new values in all movable inputs, or in the first alone."""
        with torch.no_grad():
            for leaf in self.movable_inputs(inputs)[: 1 if alone else None]:
                leaf.copy_(edit(leaf.detach()))
        return inputs

    def inputs(self, sizes: str = "odd", seed: int = 0, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Create the leaves of a problem, with requires_grad where a gradient is needed."""
        dtype = dtype or self.dtypes[0]
        tensors = [
            t.to(dtype) if t.is_floating_point() else t for t in self.make(sizes, seed)
        ]  # masks and indices keep their dtype
        requested = self.differentiable or [i for i, t in enumerate(tensors) if t.is_floating_point()]
        return [t.detach().clone().requires_grad_(i in requested) for i, t in enumerate(tensors)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def outputs_of(function: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a function as a tuple."""
    returned = function(*inputs)
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs that require a gradient."""
    return [t for t in inputs if t.requires_grad]


def random_like(tensors: tuple[Tensor, ...], seed: int = 1) -> list[Tensor]:
    """Return random gradients, with a mean, for outputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) + 0.5 for t in tensors]


def gradients(function: Function, inputs: list[Tensor], incoming: Incoming) -> list[Tensor]:
    """Return the gradients of the inputs that require one; zeros if autograd has none."""
    outputs = tuple(t for t in outputs_of(function, inputs) if t.requires_grad)
    return pulled_back(outputs, inputs, incoming(outputs))


def pulled_back(outputs: Sequence[Tensor], inputs: list[Tensor], incoming: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients from outputs that were computed before."""
    if not outputs or not leaves(inputs):
        return [torch.zeros_like(t) for t in leaves(inputs)]
    each = gradients_or_none(outputs, leaves(inputs), incoming)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves(inputs), each, strict=True)]


def gradients_or_none(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    incoming: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """Return the gradient of each input, None if no output depends on it; the types of `torch.autograd.grad`
    omit that."""
    keep = retain_graph or create_graph
    return torch.autograd.grad(
        outputs, inputs, incoming, allow_unused=True, retain_graph=keep, create_graph=create_graph
    )


def second_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a random sum of the gradients: with respect to the inputs, then to the
    gradients coming in."""
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


def saved_by_autograd(call: Callable[[], Returned]) -> tuple[Returned, list[Tensor]]:
    """Return the outputs of a call and the tensors that autograd saves for its backward pass, each storage
    once."""
    tensors: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # an output saved by its own pass would keep the pass alive forever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        returned = call()
    return returned, list(tensors.values())


@dataclass(frozen=True)
class Evidence:
    """One checked call.

    Attributes:
        inputs: Inputs of the call.
        incoming: Incoming gradients.
        names: Names of the tensors, "the result" or "the gradient of x".
        got: The outputs and the gradients.
        truth: Their expected values, in float64.
    """

    inputs: list[Tensor]
    incoming: list[Tensor]
    names: list[str]
    got: list[Tensor]
    truth: list[Tensor]


class Distance(float):
    """A distance between tensors; `element` names the element with the largest, and its values."""

    element: str = ""
    limit: float = TOLERANCE
    evidence: Evidence | None = None


def furthest(
    got: Sequence[Tensor], expected: Sequence[Tensor], least: float = CANCELLED, names: Sequence[str] = ()
) -> Distance:
    """Return the largest difference, relative to the largest expected element of its tensor, or to `least`;
    inf if shapes differ or a value is NaN. `names` are the tensors', by default the gradients of input 0,
    input 1 and so on."""
    worst = Distance(0.0)
    names = names or [f"the gradient of input {number}" for number in range(len(got))]
    for name, one, other in zip(names, got, expected, strict=True):
        if one.shape != other.shape:
            return nowhere(f"{name} has shape {list(one.shape)}, expected {list(other.shape)}")
        if not other.numel():
            continue
        apart = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
        error = apart.max().item() / max(other.double().abs().max().item(), least)
        if error > worst:
            worst = Distance(error)
            limit = TOLERANCE * other.double().abs().max().item()
            worst.element = element(name, one, other, apart, limit)
    return worst


def nowhere(words: str) -> Distance:
    """Return the distance for tensors without elements to compare."""
    distance = Distance("inf")
    distance.element = words
    return distance


def element(name: str, got: Tensor, expected: Tensor, apart: Tensor, limit: float) -> str:
    """Return the element where two tensors are farthest apart, and both values."""
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return f"{name} at {list(at)}: {got_and_expected(got[at].item(), expected[at].item(), limit, 6)}"


class Line(str):
    """An error message with its distance."""

    distance: Distance | None = None


def off(error: Distance, what: str) -> str | None:
    """Return a message if an error is too large."""
    if error <= error.limit:
        return None
    far = "" if math.isinf(error) else f", off by {error:.1e} of the largest element"
    line = Line(f"{what}: {error.element}{far}")
    line.distance = error
    return line
