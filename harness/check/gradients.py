"""Compare the gradients of a differentiable PyTorch function with those of its reference."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from harness.check.compare import format_got_and_expected

Tensors = Sequence[Tensor]
Edit = Callable[[Tensor], Tensor]
Function = Callable[..., Tensor | tuple[Tensor, ...]]
MakeGradOutputs = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""A function that creates incoming gradients for the outputs."""
R = TypeVar("R")
TOLERANCE = 1e-9  # largest error of a gradient in float64, relative to its largest element
MIN_SCALE = 1e-6
"""A gradient without a larger element is rounding noise, as softmax's for a constant incoming gradient."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a function is expected to support by default."""


@dataclass(frozen=True)
class Subject:
    """A function and its reference.

    Attributes:
        function: The function to check; it takes the tensors of `make_tensors` and returns one or more.
        reference: The same function, built from PyTorch's differentiable operations.
        make_tensors: (sizes, seed) -> float64 tensors; `sizes` is "odd", "square", "row" (no leading axis),
            "deep" (three leading axes) or, by name only, "tall" (thousands of rows).
        frozen: Floating-point inputs without a gradient.
        expected_saved_bytes: (inputs) -> bytes saved for the backward pass; None if they are not counted.
        sizes: The kinds of sizes that `make_tensors` supports.
        dtypes: Dtypes that the function supports; inputs have the first by default.
        names: Names of the inputs in messages, by default input 0, input 1 and so on.
        editable: Inputs that may be set to special values; None for all that have a gradient.
        subgradients: Whether any slope between the two sides of a kink is accepted.
        not_compared: Tensor -> PyTorch's own error, if that is too large for a comparison.
    """

    function: Function
    reference: Function
    make_tensors: Callable[[str, int], tuple[Tensor, ...]]
    frozen: tuple[int, ...] = ()
    expected_saved_bytes: Callable[..., int] | None = None
    sizes: tuple[str, ...] = ("odd", "square", "row", "deep")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    names: tuple[str, ...] = ()
    editable: tuple[int, ...] | None = None
    subgradients: bool = False
    not_compared: dict[str, float] = field(default_factory=dict[str, float])

    def get_input_name(self, index: int) -> str:
        return self.names[index] if self.names else f"input {index}"

    def edit_inputs(self, inputs: list[Tensor], edit: Edit, first_only: bool = False) -> list[Tensor]:
        editable = range(len(inputs)) if self.editable is None else self.editable
        with torch.no_grad():
            for leaf in list_leaves([inputs[i] for i in editable])[: 1 if first_only else None]:
                leaf.copy_(edit(leaf.detach()))
        return inputs

    def inputs(self, sizes: str = "odd", seed: int = 0, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Create a problem's inputs as leaf tensors, with requires_grad where a gradient is needed."""
        tensors = [t.detach().clone() for t in self.make_tensors(sizes, seed)]
        dtype = dtype or self.dtypes[0]  # masks and indices keep theirs
        return [
            t.to(dtype).requires_grad_(i not in self.frozen) if t.is_floating_point() else t
            for i, t in enumerate(tensors)
        ]


def get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute_outputs(function: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Call a function and return the tensors among its results, nested ones too, as a tuple."""
    return tuple(iterate_tensors(function(*inputs)))


def iterate_tensors(returned: object) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, tuple | list):
        for item in cast("Sequence[object]", returned):
            yield from iterate_tensors(item)


def list_leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t.requires_grad]


def random_like(tensors: tuple[Tensor, ...], seed: int = 1) -> list[Tensor]:
    """Return random gradients for outputs, with a mean of 0.5."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) + 0.5 for t in tensors]


def ones_like(tensors: Tensors) -> list[Tensor]:
    """Return gradients of ones, as from `out.sum()`."""
    return [torch.ones_like(t) for t in tensors]


def compute_gradients(
    function: Function, inputs: list[Tensor], make_grad_outputs: MakeGradOutputs
) -> list[Tensor]:
    """Return the gradients of the inputs that require one; zeros if autograd has none."""
    outputs = tuple(t for t in compute_outputs(function, inputs) if t.requires_grad)
    return run_backward(outputs, inputs, make_grad_outputs(outputs))


def run_backward(outputs: Tensors, inputs: list[Tensor], grad_outputs: Tensors) -> list[Tensor]:
    if not outputs or not list_leaves(inputs):
        return [torch.zeros_like(t) for t in list_leaves(inputs)]
    grads = call_autograd_grad(outputs, list_leaves(inputs), grad_outputs)
    pairs = zip(list_leaves(inputs), grads, strict=True)
    return [torch.zeros_like(t) if g is None else g.to_dense() for t, g in pairs]


def call_autograd_grad(
    outputs: Tensors, inputs: Tensors, grad_outputs: Tensors, **graph: bool
) -> Sequence[Tensor | None]:
    """Call `torch.autograd.grad`, whose type omits that an input's gradient may be None."""
    return torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True, **graph)


def are_equal(first: Tensors, second: Tensors, tolerance: float = 0.0) -> bool:
    """Check whether tensors are equal, NaN included."""
    pairs = ((a.double(), b.double()) for a, b in zip(first, second, strict=True))
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance / 1000, equal_nan=True) for a, b in pairs)


def compute_second_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Differentiate a random projection of the gradients by the inputs, then by the incoming gradients."""
    outputs = tuple(t for t in compute_outputs(function, inputs) if t.requires_grad)
    grad_outputs = [g.requires_grad_() for g in random_like(outputs)]
    first = call_autograd_grad(outputs, list_leaves(inputs), grad_outputs, create_graph=True)
    pairs = zip(first, random_like(tuple(list_leaves(inputs)), 2), strict=True)
    total = sum(((g * w).sum() for g, w in pairs if g is not None), torch.zeros(()))
    if total.requires_grad:  # unlike grad(), backward() runs the whole graph: once_differentiable raises
        torch.autograd.backward(total)
    leaves = (*list_leaves(inputs), *grad_outputs)
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


def record_saved_tensors(call: Callable[[], R]) -> tuple[R, list[Tensor]]:
    """Return a call's result and the tensors saved for its backward pass, one for each storage."""
    tensors: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # an output saved by its own graph node would be a reference cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        returned = call()
    return returned, list(tensors.values())


@dataclass(frozen=True)
class CheckedCall:
    """One checked call: inputs, incoming gradients, and the names of its outputs and gradients ("the gradient
    of x"), with their values and their truth, in float64."""

    inputs: list[Tensor]
    grad_outputs: list[Tensor]
    names: list[str]
    got: list[Tensor]
    truth: list[Tensor]


class Distance(float):
    """A distance between tensors; `worst_element` describes the element that differs most."""

    worst_element: str = ""
    limit: float = TOLERANCE
    call: CheckedCall | None = None


def measure_distance(
    got: Tensors, expected: Tensors, min_scale: float = MIN_SCALE, names: Sequence[str] = ()
) -> Distance:
    """Return the largest difference, relative to its tensor's largest expected element, or to `min_scale`.

    It is inf if shapes differ or a value is NaN. `names` default to "the gradient of input 0" and so on.
    """
    distance = Distance(0.0)
    names = names or [f"the gradient of input {number}" for number in range(len(got))]
    for name, a, b in zip(names, got, expected, strict=True):
        if a.shape != b.shape:
            return make_infinite_distance(f"{name} has shape {list(a.shape)}, expected {list(b.shape)}")
        if not b.numel():
            continue
        errors = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
        scale = max_abs(b)
        if errors.max().item() / max(scale, min_scale) > distance:
            distance = Distance(errors.max().item() / max(scale, min_scale))
            distance.worst_element = describe_element(name, a, b, errors, TOLERANCE * scale)
    return distance


def make_infinite_distance(message: str) -> Distance:
    distance = Distance("inf")
    distance.worst_element = message
    return distance


def describe_element(name: str, got: Tensor, expected: Tensor, errors: Tensor, limit: float) -> str:
    index = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    return f"{name} at {list(index)}: {format_got_and_expected(got[index].item(), expected[index].item(), limit, 6)}"


def max_abs(t: Tensor) -> float:
    return t.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if t.numel() else 0.0


class Message(str):
    """An error message with the call that reproduces it."""

    call: CheckedCall | None = None


def describe_error(error: Exception, max_length: int = 200) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:max_length]}"


def report_excess(error: Distance, description: str) -> str | None:
    """Return a message if an error is above its limit, else None."""
    if error <= error.limit:
        return None
    relative_error = "" if math.isinf(error) else f", off by {error:.1e} of the largest element"
    line = Message(f"{description}: {error.worst_element}{relative_error}")
    line.call = error.call
    return line
