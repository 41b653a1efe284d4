"""What a wrong gradient is instead: known mistakes of well-known ops, and general ones. Where two fit, nothing is said."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from harness.check.gradients import Evidence, leaves, outputs_of
from harness.check.measured import floor_of, narrow_of, wide
from harness.puzzles.p21.known import KNOWN
from harness.testing.problem import Problem, sizes_of


def named(problem: Problem, evidence: Evidence) -> str:
    """What the first wrong gradient is instead; "" where nothing fits, or more than one thing."""
    close = partial(equal, by=20 * floor_of(narrow_of(evidence.inputs)))
    inputs = [t.detach() for t in wide(evidence.inputs)]
    which = [i for i, t in enumerate(evidence.inputs) if t.requires_grad]
    first = len(evidence.got) - len(which)
    if not all(close(g, t) for g, t in zip(evidence.got[:first], evidence.truth[:first], strict=True)):
        return ""
    for number, name, got, truth in zip(
        which, evidence.names[first:], evidence.got[first:], evidence.truth[first:], strict=True
    ):
        if not close(got, truth):
            for found in (
                known(number, inputs, evidence, got, truth, close),
                general(problem, number, evidence, got, truth, close),
            ):
                words = list(dict.fromkeys(found))
                if words:
                    return f"{name} {words[0]}" if len(words) == 1 else ""
            return ""
    return ""


def equal(a: Tensor, b: Tensor, by: float) -> bool:
    """Whether two tensors are the same to rounding."""
    if a.shape != b.shape or not (a.isfinite() & b.isfinite()).all():
        return False
    return (
        bool(((a.double() - b.double()).abs() <= by * b.double().abs().max().clamp(min=1e-6)).all())
        if b.numel()
        else False
    )


def known(
    number: int,
    inputs: list[Tensor],
    evidence: Evidence,
    got: Tensor,
    truth: Tensor,
    close: Callable[[Tensor, Tensor], bool],
) -> Iterator[str]:
    """The known mistakes that give these values, of the ops whose formula gives what is right."""
    dy = evidence.incoming[0].double()
    for of, formula, wrongs in KNOWN:
        if of != number:
            continue
        try:
            if close(formula(inputs, dy), truth):
                yield from (
                    f"equals the reference {words}"
                    for wrong, words in wrongs.items()
                    if close(got, formula(inputs, dy, wrong))
                )
        except Exception:  # another op, with other inputs
            continue


def general(
    problem: Problem,
    number: int,
    evidence: Evidence,
    got: Tensor,
    truth: Tensor,
    close: Callable[[Tensor, Tensor], bool],
) -> Iterator[str]:
    """The general mistakes that give these values."""
    if not got.any():
        yield "is 0 everywhere"
        return
    ones = [torch.ones_like(g) for g in evidence.incoming]
    if close(got, with_incoming(problem, evidence, ones, number)):
        yield "is right for a gradient of ones coming in, not for this one"
    lying = [as_it_lies(g) for g in evidence.incoming]
    if any(g.stride() != o.stride() for g, o in zip(evidence.incoming, lying, strict=True)) and close(
        got, with_incoming(problem, evidence, lying, number)
    ):
        yield "reads the gradient that comes in as if it were contiguous"
    if got.dim() > 1 and close(got, truth.mT):
        yield "is transposed"
    every = evidence.truth[-len(leaves(evidence.inputs)) :]
    for name, other in zip(evidence.names[-len(every) :], every, strict=True):
        if other is not truth and close(got, other):
            yield f"is {name}"
    if got.shape == truth.shape:
        yield from factor(problem, got, truth, close)
    if all(g.dim() for g in evidence.incoming):
        for axis in range(max(g.dim() for g in evidence.incoming) - 1):
            alone = [torch.zeros_like(g) for g in evidence.incoming]
            for a, g in zip(alone, evidence.incoming, strict=True):
                a.narrow(min(axis, g.dim() - 1), 0, 1).copy_(g.narrow(min(axis, g.dim() - 1), 0, 1))
            if close(got, with_incoming(problem, evidence, alone, number)):
                yield f"is that of the first part along axis {axis} of the result: a sum is missing"


def as_it_lies(t: Tensor) -> Tensor:
    """What is read where a tensor is taken for contiguous."""
    strides = torch.empty(t.shape, device="meta").stride()
    there = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided(t.shape, strides) if there >= t.numel() else t


def with_incoming(problem: Problem, evidence: Evidence, incoming: list[Tensor], number: int) -> Tensor:
    """What is right for an input, for another gradient coming in."""
    inputs = wide(evidence.inputs)
    outputs = [t for t in outputs_of(problem.reference, inputs) if t.requires_grad]
    (gradient,) = torch.autograd.grad(
        outputs, [inputs[number]], [g.double() for g in incoming], materialize_grads=True
    )
    return gradient


def factor(
    problem: Problem, got: Tensor, truth: Tensor, close: Callable[[Tensor, Tensor], bool]
) -> Iterator[str]:
    """A constant factor, by the names of the sizes that it is made of."""
    largest = truth.abs().argmax()
    times = (got.double().flatten()[largest] / truth.flatten()[largest]).item()
    if (
        not math.isfinite(times)
        or not times
        or math.isclose(times, 1, rel_tol=1e-6)
        or not close(got, times * truth)
    ):
        return
    leading, sizes = sizes_of(problem.sizes[0], problem.free)
    every = sizes | ({"...": math.prod(leading)} if "..." in problem.free else {})
    for count in (1, 2):
        for names in itertools.combinations(every, count):
            product = math.prod(every[name] for name in names)
            if math.isclose(times * product, 1, rel_tol=1e-6):
                yield f"is the mean over {' and '.join(names)}, and should be the sum"
                return
            if math.isclose(times, product, rel_tol=1e-6):
                yield f"is {' * '.join(names)} times what it should be"
                return
    yield f"is {times:.4g} times what it should be"
