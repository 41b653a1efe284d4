"""Compare one call of a function with its reference, and measure its error limit.

Truth is the reference in float64. A measured limit is twice PyTorch's own worst error: the reference in the
dtype of the call, in eight orders of summation, and in float64 on inputs perturbed by a rounding. At a kink
any slope between those of the two sides is accepted.
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
    CANCELLED,
    TOLERANCE,
    Distance,
    Evidence,
    Function,
    Incoming,
    Subject,
    element,
    furthest,
    leaves,
    nowhere,
    outputs_of,
    pulled_back,
    random_like,
)

FACTOR = 2.0
"""Factor between PyTorch's own error and the limit."""
UNITS, SIXTEEN = 8, 2
"""And how many units of rounding more, since another formula may lose a few; the second is for 16-bit dtypes."""
ORDERS = 8
"""Orders of summation, and moves of the inputs, that are tried."""
COARSE = 1e-2
"""PyTorch's own error above which a comparison is meaningless."""
NUDGE, SIDES = 1e-13, 16
"""Relative perturbation of inputs in float64 that shows both sides of a kink, and the number of
perturbations."""
P = ParamSpec("P")
R = TypeVar("R")
Pull = Callable[[Sequence[Tensor], list[Tensor], Sequence[Tensor]], list[Tensor]]


class ReferenceRaised(Exception):
    """The reference does not take these inputs: there is nothing to compare with."""


class OtherOrder(TorchDispatchMode):
    """Change the summation order of PyTorch's operations."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def order(self, t: Tensor, axis: int) -> Tensor:
        return torch.randperm(t.shape[axis], generator=self.generator).to(t.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            *rest, a, b = args
            order = self.order(a, -1)
            args = (*rest, a.index_select(a.dim() - 1, order), b.index_select(b.dim() - 2, order))
        elif func in (aten.sum.dim_IntList, aten.mean.dim) and args[0].dim():
            t, axes, *rest = args
            for axis in axes or range(t.dim()):
                t = t.index_select(axis % t.dim(), self.order(t, axis))
            args = (t, axes, *rest)
        return func(*args, **(kwargs or {}))


def narrow_of(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of a call."""
    return next((t.dtype for t in inputs if t.is_floating_point()), torch.float64)


def guard(reference: Callable[P, R], called: str = "the reference") -> Callable[P, R]:
    """Return a reference whose exceptions are ReferenceRaised."""

    @functools.wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return reference(*args, **kwargs)
        except Exception as error:
            words = " ".join(str(error).split())
            raise ReferenceRaised(f"{called} raises {type(error).__name__}: {words[:200]}") from error

    return run


def leaf(t: Tensor, like: Tensor) -> Tensor:
    """Return a copy that requires a gradient if another tensor does."""
    return t.detach().clone().requires_grad_(like.requires_grad)


def wide(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the same numbers in float64."""
    return [leaf(t.detach().double() if t.is_floating_point() else t, t) for t in inputs]


def compare(
    subject: Subject,
    sizes: str = "odd",
    seed: int = 0,
    incoming: Incoming = random_like,
    change: Callable[[list[Tensor]], list[Tensor]] = list,
    least: float = CANCELLED,
    *,
    dtype: torch.dtype | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
    alone: bool = False,
    around: Callable[[Function], Function] = lambda function: function,
    between: Callable[[list[Tensor], Sequence[Tensor]], object] = lambda inputs, outputs: None,
    pull: Pull = pulled_back,
    floor: float = 0.0,
    steady: bool = False,
    within: torch.dtype | None = None,
) -> Distance:
    """Return the distance of a call's outputs and gradients from the reference's.

    Args:
        change: Inputs -> the inputs to pass.
        edit: Puts other values into all inputs that may be moved, or into the first, `alone`.
        least: The smallest scale of a relative error.
        around: Wraps the function.
        between: Called between the passes.
        pull: The backward pass.
        floor: The error allowed in any dtype, if limits are measured.
        steady: Measure PyTorch's own errors without perturbed inputs.
        within: The dtype of autocast, in which the reference's errors are measured too.
    """
    inputs = change(subject.inputs(sizes, seed, dtype))
    inputs = subject.edit_inputs(inputs, edit, alone) if edit else inputs
    arguments, exact = [leaf(t, t) for t in inputs], wide(inputs)
    right = outputs_of(guard(subject.reference), exact)
    outputs = outputs_of(around(subject.function), inputs)
    if len(outputs) != len(right):
        return nowhere(f"the function returns {len(outputs)} tensors, expected {len(right)}")
    asking = [i for i, t in enumerate(right) if t.requires_grad]
    if silent := [i for i in asking if not outputs[i].requires_grad]:
        return nowhere(f"output {silent[0]} has no gradient for autograd, and should have one")
    names = ["the result"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
    names += [f"the gradient of {subject.name_of_input(i)}" for i, t in enumerate(inputs) if t.requires_grad]
    results = [t.detach().clone() for t in outputs]
    for name, got, expected in zip(names, results, right, strict=False):
        if got.shape != expected.shape:
            return furthest([got], [expected], names=[name])
    coming = incoming(tuple(outputs[i] for i in asking))
    kept = [g.detach().clone() for g in coming]
    between(inputs, outputs)
    grads = [g.detach() for g in pull([outputs[i] for i in asking], inputs, coming)]
    truth = guard(pulled_back)([right[i] for i in asking], exact, [g.double() for g in kept])
    evidence = Evidence(arguments, kept, names, [*results, *grads], [*(t.detach() for t in right), *truth])
    if subject.measured:
        distance = Measured(subject, evidence, asking, least, floor, steady, within).distance()
    else:
        distance = furthest(evidence.got, evidence.truth, least, names)
    distance.evidence = evidence
    return distance


@dataclass
class Measured:
    """Comparison of one call with measured limits, used if an error is above rounding."""

    subject: Subject
    evidence: Evidence
    asking: list[int]
    least: float
    floor: float
    steady: bool
    within: torch.dtype | None

    def distance(self) -> Distance:
        """Return the worst of all tensors with its limit."""
        e = self.evidence
        dtype = self.within or narrow_of(e.inputs)
        floor = max(self.floor, floor_of(dtype))
        scales = [max(self.least, largest(t)) for t in e.truth]
        found = self.worst(e.truth, e.truth, scales, [floor] * len(scales))
        if found <= found.limit:
            return found
        if self.least <= CANCELLED and not self.steady:
            scales = [max(a, b) for a, b in zip(scales, self.usual(), strict=True)]
        low, high = self.sides(scales) if self.subject.subgradients else (e.truth, e.truth)
        own, excused = [0.0] * len(scales), self.find_swallowed()
        for results, narrow in self.reruns(dtype):
            for k, (one, truth) in enumerate(zip(results, e.truth, strict=True)):
                excused[k] |= narrow & (
                    one.isfinite() != truth.isfinite()
                )  # it cannot hold them in the dtype
                apart = distance_to(one, truth, low[k], high[k], result=narrow)
                own[k] = max(own[k], largest(torch.where(excused[k] & narrow, 0.0, apart)) / scales[k])
            limits = [FACTOR * error + floor if error <= COARSE else math.inf for error in own]
            found = self.worst(low, high, scales, limits, excused)
            if found <= found.limit:
                break  # no further run makes a limit smaller
        self.subject.dropped.extend(
            f"{name} (PyTorch's own error is {error:.0e})"
            for name, error in zip(e.names, own, strict=True)
            if error > COARSE
        )
        return found

    def worst(
        self,
        low: Sequence[Tensor],
        high: Sequence[Tensor],
        scales: Sequence[float],
        limits: Sequence[float],
        excused: Sequence[Tensor] = (),
    ) -> Distance:
        """Return the distance of the tensor that is farthest beyond its limit."""
        e = self.evidence
        found, ratio = Distance(0.0), 0.0
        for k, (name, got, truth) in enumerate(zip(e.names, e.got, e.truth, strict=True)):
            if got.shape != truth.shape:
                return furthest([got], [truth], names=[name])
            if not got.numel():
                continue
            result = k < len(e.names) - len(leaves(e.inputs))
            apart = distance_to(got, truth, low[k], high[k], result=result)
            if not any(t.isnan().any() for t in e.inputs):
                apart = torch.where(
                    truth.isnan(), 0.0, apart
                )  # the result of inf - inf depends on the formula
            elif not result and self.subject.subgradients:  # NaN has no slope: its gradient may be anything
                apart = torch.where(leaves(e.inputs)[k - len(e.names)].isnan(), 0.0, apart)
            apart = torch.where(excused[k], 0.0, apart) if excused else apart
            error = apart.max().item() / scales[k]
            if error / limits[k] > ratio or (math.isinf(error) and not math.isinf(found)):
                found, ratio = Distance(error), error / limits[k]
                found.limit = 0.0 if math.isinf(error) else limits[k]
                found.element = element(name, got, truth, apart, limits[k] * scales[k])
        return found

    def run(self, inputs: list[Tensor], incoming: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the reference on other inputs."""
        arguments = self.evidence.incoming if incoming is None else incoming
        outputs = outputs_of(guard(self.subject.reference), inputs)
        chosen = [outputs[i] for i in self.asking]
        incoming = [g.to(t.dtype) for g, t in zip(arguments, chosen, strict=True)]
        return [*(t.detach() for t in outputs), *guard(pulled_back)(chosen, inputs, incoming)]

    def usual(self) -> list[float]:
        """Return the size of gradients for a random incoming one of the same size, as a scale for sums that
        cancel."""
        e = self.evidence
        sizes = [largest(g) for g in e.incoming]
        random = [g * size / 3 for g, size in zip(random_like(tuple(e.incoming)), sizes, strict=True)]
        return [largest(t) for t in self.run(wide(e.inputs), random)]

    def moves(self, by: float, count: int, absolute: float = 0.0) -> Iterator[list[Tensor]]:
        """Run the reference in float64 on inputs perturbed at random, relative to each element and to the
        largest, in both directions."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(count // 2):
            start = generator.get_state()
            for sign in (by, -by):
                generator.set_state(start)
                inputs = wide(self.evidence.inputs)
                with torch.no_grad():
                    for t in filter(torch.is_floating_point, inputs):
                        direction = (
                            torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t) * 2 - 1
                        )
                        direction = direction if absolute else direction.sign()
                        far = (t.abs() + absolute * (largest(t) or 1.0)).nan_to_num(posinf=0.0)
                        t += sign * direction * far
                yield self.run(inputs)

    def find_swallowed(self) -> list[Tensor]:
        """Return which elements depend on a NaN input: to propagate it is correct even where the reference
        does not."""
        if not any(t.isnan().any() for t in self.evidence.inputs):
            return [torch.zeros_like(t, dtype=torch.bool) for t in self.evidence.truth]

        def fill(t: Tensor, seed: int) -> Tensor:
            number = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            return leaf(torch.where(t.isnan(), number.to(t), t), t) if t.is_floating_point() else t

        first, second = (self.run([fill(t, seed) for t in wide(self.evidence.inputs)]) for seed in (1, 2))
        each = zip(first, second, self.evidence.truth, strict=True)
        return [((a != b) | ~a.isclose(t)) & t.isfinite() for a, b, t in each]

    def sides(self, scales: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the smallest and the largest correct value of each element: at a kink they differ."""
        low, high = list(self.evidence.truth), list(self.evidence.truth)
        for count, moved in enumerate(self.moves(NUDGE, SIDES, absolute=1.0), 1):
            low = [torch.where(m.isnan(), t, torch.minimum(t, m)) for t, m in zip(low, moved, strict=True)]
            high = [torch.where(m.isnan(), t, torch.maximum(t, m)) for t, m in zip(high, moved, strict=True)]
            apart = (h - t > TOLERANCE * scale for t, h, scale in zip(low, high, scales, strict=True))
            if count == 2 and not any(each.any() for each in apart):
                break  # opposite moves cross every kink
        return low, high

    def reruns(self, dtype: torch.dtype) -> Iterator[tuple[list[Tensor], bool]]:
        """Run the reference in the dtype, in several orders of summation (True), then in float64 on moved inputs (False)."""
        inputs = [leaf(t, t) for t in self.evidence.inputs]
        for order in (contextlib.nullcontext(), *map(OtherOrder, range(ORDERS))):
            with torch.autocast(inputs[0].device.type, self.within, enabled=self.within is not None), order:
                results = self.run(inputs)
            yield results, True
        for results in () if self.steady else self.moves(torch.finfo(dtype).eps / 2, ORDERS):
            yield results, False


def floor_of(dtype: torch.dtype) -> float:
    """Return the error by rounding alone, relative to the largest element."""
    info = torch.finfo(dtype)
    return max(TOLERANCE, (SIXTEEN if info.bits == 16 else UNITS) * info.eps)


def distance_to(got: Tensor, truth: Tensor, low: Tensor, high: Tensor, *, result: bool) -> Tensor:
    """Return the distance of each element from the correct range; infinite where only one of the two is a
    number."""
    got = got.double()
    apart = torch.maximum(low - got, got - high).clamp(min=0)
    apart = torch.where(got.isfinite(), apart, math.inf)
    same = (got == truth) | (got.isnan() & truth.isnan())
    unjudged = ~truth.isfinite() & (same if result else torch.ones_like(same))
    return torch.where(unjudged, 0.0, torch.where(truth.isfinite(), apart, math.inf))


def largest(t: Tensor) -> float:
    """Return the largest finite absolute value."""
    return t.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if t.numel() else 0.0
