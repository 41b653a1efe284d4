"""Compare one call of a function with its reference, and measure its error limit.

The truth is the reference in float64. A measured limit is twice PyTorch's own worst error: of the reference
in the call's dtype, in eight summation orders, and in float64 on inputs perturbed by a rounding error. At a
kink any value between the two one-sided slopes is accepted.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.check.gradients import (
    MIN_SCALE,
    TOLERANCE,
    CheckedCall,
    Distance,
    Edit,
    Function,
    MakeGradOutputs,
    Subject,
    Tensors,
    compute_outputs,
    describe_element,
    describe_error,
    list_leaves,
    make_infinite_distance,
    max_abs,
    random_like,
    run_backward,
)

TOLERANCE_FACTOR = 2.0  # between PyTorch's own error and the limit
ROUNDING_UNITS, ROUNDING_UNITS_16_BIT = 8, 2  # rounding units allowed in addition, for equivalent formulas
NUM_ORDERS = 8  # number of summation orders, and of perturbations of the inputs
MAX_REFERENCE_ERROR = 1e-2  # PyTorch's own error above which a comparison is meaningless
KINK_STEP, NUM_KINK_STEPS = 1e-13, 16  # size and number of the perturbations that reach both sides of a kink
P = ParamSpec("P")
R = TypeVar("R")
Floats = Sequence[float]
RunBackward = Callable[[Tensors, list[Tensor], Tensors], list[Tensor]]


class InvalidReference(ValueError):
    """The reference raises an exception for these inputs, so there is nothing to compare with."""


class ReorderedSums(TorchDispatchMode):
    """Change the summation order of PyTorch's operations."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.sum_by_matmul = seed == 0  # sum float32 by a matmul with ones, as einsum and BLAS do

    def draw_permutation(self, t: Tensor, axis: int) -> Tensor:
        return torch.randperm(t.shape[axis], generator=self.generator).to(t.device)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            *rest, a, b = args
            order = self.draw_permutation(a, -1)
            args = (*rest, a.index_select(a.dim() - 1, order), b.index_select(b.dim() - 2, order))
        elif func in (aten.sum.dim_IntList, aten.mean.dim) and args[0].dim():
            t, axes, *rest = args
            for axis in axes or range(t.dim()):
                t = t.index_select(axis % t.dim(), self.draw_permutation(t, axis))
                if self.sum_by_matmul and t.dtype == torch.float32 and func is aten.sum.dim_IntList:
                    t = (t.movedim(axis, -1) @ t.new_ones(t.shape[axis])).unsqueeze(axis)
            args = (t, axes, *rest)
        return func(*args, **(kwargs or {}))


# If it were defined in the class, its first call would import PyTorch's compiler.
ReorderedSums.__torch_dispatch__ = ReorderedSums.dispatch


def get_float_dtype(inputs: Tensors) -> torch.dtype:
    return next((t.dtype for t in inputs if t.is_floating_point()), torch.float64)


def guard_reference(reference: Callable[P, R], label: str = "the reference") -> Callable[P, R]:
    """Return a reference whose exceptions are raised as InvalidReference."""

    @functools.wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return reference(*args, **kwargs)
        except Exception as error:
            raise InvalidReference(f"{label} raises {describe_error(error)}") from error

    return run


def draw_uniform(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return uniform random numbers from [0, 1) in a tensor's shape."""
    return torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t)


def make_leaf(t: Tensor, like: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(like.requires_grad)


def to_float64_leaves(inputs: Tensors) -> list[Tensor]:
    return [make_leaf(t.detach().double() if t.is_floating_point() else t, t) for t in inputs]


def compare(
    subject: Subject,
    sizes: str = "odd",
    seed: int = 0,
    make_grad_outputs: MakeGradOutputs = random_like,
    transform_inputs: Callable[[list[Tensor]], list[Tensor]] = list,
    min_scale: float = MIN_SCALE,
    *,
    dtype: torch.dtype | None = None,
    edit: Edit | None = None,
    first_only: bool = False,
    wrap: Callable[[Function], Function] = lambda function: function,
    between_passes: Callable[[list[Tensor], Tensors], object] = lambda inputs, outputs: None,
    run_backward_pass: RunBackward = run_backward,
    floor: float = 0.0,
    reorder_only: bool = False,
    autocast_dtype: torch.dtype | None = None,
) -> Distance:
    """Return the distance of a call's outputs and gradients from the reference's.

    Args:
        transform_inputs: Inputs -> the inputs to pass.
        edit: Tensor -> new values, for every editable input or, with `first_only`, for the first.
        wrap: Wrapper of the function.
        between_passes: Function called between the forward and the backward pass.
        run_backward_pass: The backward pass.
        min_scale, floor: The smallest scale of a relative error; the error allowed in any dtype.
        reorder_only: Measure PyTorch's own errors without perturbed inputs.
        autocast_dtype: The dtype of autocast, under which the reference's errors are measured too.
    """
    inputs = transform_inputs(subject.inputs(sizes, seed, dtype))
    inputs = subject.edit_inputs(inputs, edit, first_only) if edit else inputs
    arguments, float64_inputs = [make_leaf(t, t) for t in inputs], to_float64_leaves(inputs)
    expected_outputs = compute_outputs(guard_reference(subject.reference), float64_inputs)
    outputs = compute_outputs(wrap(subject.function), inputs)
    if len(outputs) != len(expected_outputs):
        s = "s" * (len(outputs) != 1)
        return make_infinite_distance(
            f"the function returns {len(outputs)} tensor{s}, expected {len(expected_outputs)}"
        )
    differentiable = [i for i, t in enumerate(expected_outputs) if t.requires_grad]
    if missing := [i for i in differentiable if not outputs[i].requires_grad]:
        message = f"output {missing[0]} has no gradient for autograd, and should have one"
        return make_infinite_distance(message)
    names = ["the result"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
    names += [f"the gradient of {subject.get_input_name(i)}" for i, t in enumerate(inputs) if t.requires_grad]
    results = [t.detach().clone() for t in outputs]
    for name, got, expected in zip(names, results, expected_outputs, strict=False):
        if got.shape != expected.shape:
            message = f"{name} has shape {list(got.shape)}, expected {list(expected.shape)}"
            return make_infinite_distance(message)
    gradients = make_grad_outputs(tuple(outputs[i] for i in differentiable))
    saved_gradients = [g.detach().clone() for g in gradients]
    between_passes(inputs, outputs)
    grads = [g.detach() for g in run_backward_pass([outputs[i] for i in differentiable], inputs, gradients)]
    truth = guard_reference(run_backward)(
        [expected_outputs[i] for i in differentiable], float64_inputs, [g.double() for g in saved_gradients]
    )
    exact_results = [*(t.detach() for t in expected_outputs), *truth]
    call = CheckedCall(arguments, saved_gradients, names, [*results, *grads], exact_results)
    options = min_scale, floor, reorder_only, autocast_dtype
    distance = CallComparison(subject, call, differentiable, *options).compute_distance()
    distance.call = call
    return distance


@dataclass
class CallComparison:
    """A comparison of one call; limits are measured only if an error is above rounding."""

    subject: Subject
    call: CheckedCall
    differentiable_indices: list[int]
    min_scale: float
    floor: float
    reorder_only: bool
    autocast_dtype: torch.dtype | None

    def compute_distance(self) -> Distance:
        """Return the distance of the worst tensor, with its limit."""
        e = self.call
        dtype = self.autocast_dtype or get_float_dtype(e.inputs)
        floor = max(self.floor, get_floor(dtype))
        scales = [max(self.min_scale, max_abs(t)) for t in e.truth]
        ignored = self.find_nan_dependent()
        distance = self.find_worst(e.truth, e.truth, scales, [floor] * len(scales), ignored)
        if distance <= distance.limit:
            return distance
        if self.min_scale <= MIN_SCALE and not self.reorder_only:
            magnitudes, rounding = self.compute_typical_magnitudes(), self.compute_cancelling_scale()
            scales = [max(a, b, rounding) for a, b in zip(scales, magnitudes, strict=True)]
        low, high = self.find_kink_range(scales) if self.subject.subgradients else (e.truth, e.truth)
        reference_errors = [0.0] * len(scales)
        for results, is_reordered in self.rerun_reference(dtype):
            for k, (result, truth) in enumerate(zip(results, e.truth, strict=True)):
                # The dtype cannot represent these elements.
                ignored[k] |= is_reordered & (result.isfinite() != truth.isfinite())
                distances = compute_distances(result, truth, low[k], high[k], is_output=is_reordered)
                error = max_abs(torch.where(ignored[k] & is_reordered, 0.0, distances)) / scales[k]
                reference_errors[k] = max(reference_errors[k], error)
            limits = [
                TOLERANCE_FACTOR * error + floor if error <= MAX_REFERENCE_ERROR else math.inf
                for error in reference_errors
            ]
            distance = self.find_worst(low, high, scales, limits, ignored)
            if distance <= distance.limit:
                break  # no further run makes a limit smaller
        for name, error in zip(e.names, reference_errors, strict=True):
            if error > MAX_REFERENCE_ERROR:
                self.subject.not_compared[name] = max(error, self.subject.not_compared.get(name, 0.0))
        return distance

    def find_worst(
        self, low: Tensors, high: Tensors, scales: Floats, limits: Floats, ignored: Tensors
    ) -> Distance:
        """Return the distance of the tensor that is farthest beyond its limit."""
        e = self.call
        distance, ratio = Distance(0.0), 0.0
        for k, (name, got, truth) in enumerate(zip(e.names, e.got, e.truth, strict=True)):
            if not got.numel():
                continue
            is_output = k < len(e.names) - len(list_leaves(e.inputs))
            distances = compute_distances(got, truth, low[k], high[k], is_output=is_output)
            if not any(t.isnan().any() for t in e.inputs):  # inf - inf depends on the formula
                distances = torch.where(truth.isnan(), 0.0, distances)
            elif not is_output and self.subject.subgradients:  # NaN has no slope, so any gradient is accepted
                distances = torch.where(list_leaves(e.inputs)[k - len(e.names)].isnan(), 0.0, distances)
            distances = torch.where(ignored[k], 0.0, distances)
            error = distances.max().item() / scales[k]
            if error / limits[k] > ratio or (math.isinf(error) and not math.isinf(distance)):
                distance, ratio = Distance(error), error / limits[k]
                distance.limit = 0.0 if math.isinf(error) else limits[k]
                distance.worst_element = describe_element(name, got, truth, distances, limits[k] * scales[k])
        return distance

    def run(self, inputs: list[Tensor], grad_outputs: Tensors | None = None) -> list[Tensor]:
        arguments = self.call.grad_outputs if grad_outputs is None else grad_outputs
        outputs = compute_outputs(guard_reference(self.subject.reference), inputs)
        differentiable = [outputs[i] for i in self.differentiable_indices]
        grad_outputs = [g.to(t.dtype) for g, t in zip(arguments, differentiable, strict=True)]
        grads = guard_reference(run_backward)(differentiable, inputs, grad_outputs)
        return [*(t.detach() for t in outputs), *grads]

    def compute_typical_magnitudes(self) -> list[float]:
        """Return each result's magnitude for random incoming gradients, as a scale for cancelling sums."""
        e = self.call
        pairs = zip(random_like(tuple(e.grad_outputs)), e.grad_outputs, strict=True)
        grad_outputs = [gradient * max_abs(g) / 3 for gradient, g in pairs]
        return [max_abs(t) for t in self.run(to_float64_leaves(e.inputs), grad_outputs)]

    def compute_cancelling_scale(self) -> float:
        """Return a scale for gradients that cancel to 0: the rounding of terms as large as `grad_outputs`."""
        return 10 * MIN_SCALE * max(map(max_abs, self.call.grad_outputs), default=0.0)

    def run_perturbed(
        self, relative_step: float, count: int, absolute_scale: float = 0.0
    ) -> Iterator[list[Tensor]]:
        """Run the reference in float64 on inputs perturbed up and down, relative to their elements."""
        for index in range(count):
            generator, inputs = torch.Generator().manual_seed(index // 2), to_float64_leaves(self.call.inputs)
            with torch.no_grad():
                for t in filter(torch.is_floating_point, inputs):
                    direction = (draw_uniform(t, generator) * 2 - 1) * (-1) ** index
                    magnitude = (t.abs() + absolute_scale * (max_abs(t) or 1.0)).nan_to_num(posinf=0.0)
                    t += relative_step * (direction if absolute_scale else direction.sign()) * magnitude
            yield self.run(inputs)

    def find_nan_dependent(self) -> list[Tensor]:
        """Return masks of elements that depend on a NaN input: NaN is correct there."""
        if not any(t.isnan().any() for t in self.call.inputs):
            return [torch.zeros_like(t, dtype=torch.bool) for t in self.call.truth]

        def fill(t: Tensor, seed: int) -> Tensor:
            number = draw_uniform(t, torch.Generator().manual_seed(seed))
            return make_leaf(torch.where(t.isnan(), number, t), t) if t.is_floating_point() else t

        first, second = (
            self.run([fill(t, seed) for t in to_float64_leaves(self.call.inputs)]) for seed in (1, 2)
        )
        triples = zip(first, second, self.call.truth, strict=True)
        return [((a != b) | ~a.isclose(t)) & t.isfinite() for a, b, t in triples]

    def find_kink_range(self, scales: Floats) -> tuple[list[Tensor], list[Tensor]]:
        """Return the lower and upper bound of each correct element; they differ at a kink."""
        low, high = list(self.call.truth), list(self.call.truth)
        runs = self.run_perturbed(KINK_STEP, NUM_KINK_STEPS, absolute_scale=1.0)
        for count, results in enumerate(runs, 1):
            low = [torch.where(r.isnan(), t, torch.minimum(t, r)) for t, r in zip(low, results, strict=True)]
            high = [
                torch.where(r.isnan(), t, torch.maximum(t, r)) for t, r in zip(high, results, strict=True)
            ]
            gaps = (h - t > TOLERANCE * scale for t, h, scale in zip(low, high, scales, strict=True))
            if count == 2 and not any(gap.any() for gap in gaps):
                break  # opposite perturbations cross every kink
        return low, high

    def rerun_reference(self, dtype: torch.dtype) -> Iterator[tuple[list[Tensor], bool]]:
        """Yield the reference's results in `dtype` with reordered sums (True) or perturbed inputs (False)."""
        inputs = [make_leaf(t, t) for t in self.call.inputs]
        for order in (contextlib.nullcontext(), *map(ReorderedSums, range(NUM_ORDERS))):
            autocast = torch.autocast(
                inputs[0].device.type, self.autocast_dtype, self.autocast_dtype is not None
            )
            with autocast, order:
                results = self.run(inputs)
            yield results, True
        for results in (
            () if self.reorder_only else self.run_perturbed(torch.finfo(dtype).eps / 2, NUM_ORDERS)
        ):
            yield results, False


def get_floor(dtype: torch.dtype) -> float:
    """Return the error that rounding alone may cause, relative to the largest element."""
    info = torch.finfo(dtype)
    return max(TOLERANCE, (ROUNDING_UNITS_16_BIT if info.bits == 16 else ROUNDING_UNITS) * info.eps)


def compute_distances(got: Tensor, truth: Tensor, low: Tensor, high: Tensor, *, is_output: bool) -> Tensor:
    """Return each element's distance from [low, high]; infinite if only result or truth is finite."""
    got = got.double()
    distances = torch.maximum(low - got, got - high).clamp(min=0)
    distances = torch.where(got.isfinite(), distances, math.inf)
    equal = (got == truth) | (got.isnan() & truth.isnan())
    not_compared = ~truth.isfinite() & (equal if is_output else torch.ones_like(equal))
    return torch.where(not_compared, 0.0, torch.where(truth.isfinite(), distances, math.inf))
