"""Name a wrong gradient: known mistakes of well-known ops, and general ones. If two fit, there is no name."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.check.gradients import Evidence, leaves, outputs_of
from harness.check.measured import floor_of, narrow_of, wide
from harness.puzzles.p21.known import KNOWN
from harness.testing.problem import Problem, resolve_sizes


def name_mistake(problem: Problem, evidence: Evidence) -> str:
    """Return a description of the first wrong gradient; "" if no mistake fits, or several."""
    numbers = [i for i, t in enumerate(evidence.inputs) if t.requires_grad]
    outputs = len(evidence.got) - len(numbers)
    for i, (name, got, truth) in enumerate(zip(evidence.names, evidence.got, evidence.truth, strict=True)):
        number = numbers[i - outputs] if i >= outputs else -1
        wrong = WrongGradient(problem, evidence, number, got, truth)
        if wrong.equals(truth):
            continue
        for words in (set(wrong.find_known()), set(wrong.find_general())) if number >= 0 else ():
            if words:
                return f"{name} {words.pop()}" if len(words) == 1 else ""
        return ""
    return ""


@dataclass(frozen=True)
class WrongGradient:
    """A wrong gradient of input `number` in a call."""

    problem: Problem
    evidence: Evidence
    number: int
    got: Tensor
    truth: Tensor

    def is_close(self, a: Tensor, b: Tensor) -> bool:
        """Check whether two tensors are equal to rounding, relative to the largest element."""
        if a.shape != b.shape or not b.numel() or not (a.isfinite() & b.isfinite()).all():
            return False
        limit = 20 * floor_of(narrow_of(self.evidence.inputs)) * b.double().abs().max().clamp(min=1e-6)
        return bool(((a.double() - b.double()).abs() <= limit).all())

    def equals(self, other: Tensor) -> bool:
        return self.is_close(self.got, other)

    def find_known(self) -> Iterator[str]:
        """Yield the known mistakes that give it, of ops whose formula gives the right gradient."""
        inputs, dy = wide(self.evidence.inputs), self.evidence.incoming[0].double()
        inputs = [t.detach() for t in inputs]
        for number, formula, wrongs in KNOWN:
            try:
                if number == self.number and self.is_close(formula(inputs, dy), self.truth):
                    for wrong, words in wrongs.items():
                        if self.equals(formula(inputs, dy, wrong)):
                            yield f"equals the reference {words}"
            except Exception:  # another op, with other inputs
                continue

    def find_general(self) -> Iterator[str]:
        """Yield the general mistakes that give it."""
        e = self.evidence
        if not self.got.any():
            yield "is 0 everywhere"
            return
        if self.is_right_for([torch.ones_like(g) for g in e.incoming]):
            yield "is right for a gradient of ones coming in, not for this one"
        flat = [read_as_contiguous(g) for g in e.incoming]
        moved = any(g.stride() != f.stride() for g, f in zip(e.incoming, flat, strict=True))
        if moved and self.is_right_for(flat):
            yield "reads the gradient that comes in as if it were contiguous"
        if self.got.dim() > 1 and self.equals(self.truth.mT):
            yield "is transposed"
        count = len(leaves(e.inputs))
        for name, other in zip(e.names[-count:], e.truth[-count:], strict=True):
            if other is not self.truth and self.equals(other):
                yield f"is {name}"
        if self.got.shape == self.truth.shape and (words := self.describe_factor()):
            yield words
        ranks = [g.dim() for g in e.incoming]
        for axis in range(max(ranks) - 1 if all(ranks) else 0):
            alone = [torch.zeros_like(g) for g in e.incoming]
            for a, g in zip(alone, e.incoming, strict=True):
                a.narrow(min(axis, g.dim() - 1), 0, 1).copy_(g.narrow(min(axis, g.dim() - 1), 0, 1))
            if self.is_right_for(alone):
                yield f"is that of the first part along axis {axis} of the result: a sum is missing"

    def is_right_for(self, incoming: Sequence[Tensor]) -> bool:
        """Check whether the gradient is right for another gradient coming in."""
        inputs = wide(self.evidence.inputs)
        outputs = [t for t in outputs_of(self.problem.reference, inputs) if t.requires_grad]
        arguments = [g.double() for g in incoming]
        (gradient,) = torch.autograd.grad(outputs, [inputs[self.number]], arguments, materialize_grads=True)
        return self.equals(gradient)

    def describe_factor(self) -> str:
        """Describe a constant factor by the names of the sizes that it is a product of."""
        largest = self.truth.abs().argmax()
        times = (self.got.double().flatten()[largest] / self.truth.flatten()[largest]).item()
        if not math.isfinite(times) or not times or math.isclose(times, 1, rel_tol=1e-6):
            return ""
        if not self.equals(times * self.truth):
            return ""
        leading, sizes = resolve_sizes(self.problem.sizes[0], self.problem.free)
        every = sizes | ({"...": math.prod(leading)} if "..." in self.problem.free else {})
        for names in itertools.chain(itertools.combinations(every, 1), itertools.combinations(every, 2)):
            product = math.prod(every[name] for name in names)
            if math.isclose(times * product, 1, rel_tol=1e-6):
                return f"is the mean over {' and '.join(names)}, and should be the sum"
            if math.isclose(times, product, rel_tol=1e-6):
                return f"is {' * '.join(names)} times what it should be"
        return f"is {times:.4g} times what it should be"


def read_as_contiguous(t: Tensor) -> Tensor:
    """Return the elements read when a tensor is wrongly taken as contiguous."""
    strides = torch.empty(t.shape, device="meta").stride()
    there = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided(t.shape, strides) if there >= t.numel() else t
