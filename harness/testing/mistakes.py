"""Identify the mistake in a wrong gradient: one known for a common op, or a general one."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.check.call_comparison import get_float_dtype, get_floor, make_leaf, to_float64_leaves
from harness.check.gradients import (
    CheckedCall,
    Tensors,
    are_equal,
    compute_outputs,
    describe_error,
    ones_like,
)
from harness.puzzles.p21.known import KNOWN_FORMULAS
from harness.testing.problem import Problem, resolve_sizes


def identify_mistake(problem: Problem, call: CheckedCall) -> str:
    """Describe the mistake in the first wrong gradient; "" if no mistake fits, or several do."""
    e = call
    input_indices = [i for i, t in enumerate(e.inputs) if t.requires_grad]
    input_indices = [-1] * (len(e.got) - len(input_indices)) + input_indices
    rows = zip(e.names, input_indices, e.got, e.truth, strict=True)
    gradients = (WrongGradient(problem, e, *row) for row in rows)
    wrong = next((gradient for gradient in gradients if not gradient.equals(gradient.truth)), None)
    if not wrong:
        return ""
    try:
        runs = [compute_outputs(problem.function, [make_leaf(t, t) for t in e.inputs]) for _ in range(2)]
    except Exception as error:
        return f"the function raises {describe_error(error)} in a second run"
    if not are_equal(runs[0], runs[1], 1e-2):
        return "the function gives another result in a second run"
    if wrong.input_index < 0:
        return ""
    descriptions = set(wrong.find_known()) or set(wrong.find_general())
    return f"{wrong.name} {descriptions.pop()}" if len(descriptions) == 1 else ""


@dataclass(frozen=True)
class WrongGradient:
    """The wrong gradient of an input in a call, or a wrong output if `input_index` is -1."""

    problem: Problem
    call: CheckedCall
    name: str
    input_index: int
    got: Tensor
    truth: Tensor

    def equals(self, other: Tensor) -> bool:
        """Check whether the gradient equals a tensor up to rounding, relative to that tensor's largest element."""
        a, b = self.got.double(), other.double()
        if a.shape != b.shape or not b.numel() or not (a.isfinite() & b.isfinite()).all():
            return False
        limit = 20 * get_floor(get_float_dtype(self.call.inputs)) * b.abs().max().clamp(min=1e-6)
        return bool(((a - b).abs() <= limit).all())

    def find_known(self) -> Iterator[str]:
        """Yield known mistakes that produce this gradient, of ops whose formula produces the correct one."""
        inputs = [t.detach() for t in to_float64_leaves(self.call.inputs)]
        dy = self.call.grad_outputs[0].double()
        for number, formula, mistakes in KNOWN_FORMULAS:
            with contextlib.suppress(Exception):  # the formula does not accept these inputs
                if number == self.input_index and replace(self, got=formula(inputs, dy)).equals(self.truth):
                    for wrong, description in mistakes.items():
                        if self.equals(formula(inputs, dy, wrong)):
                            yield f"equals the reference {description}"

    def find_general(self) -> Iterator[str]:
        e = self.call
        if not self.got.any():
            yield "is 0 everywhere"
            return
        right_for_ones = self.is_right_for(ones_like(e.grad_outputs))
        if right_for_ones:
            yield "is right for a gradient of ones coming in, not for this one"
        if not (right_for_ones and all(g.numel() == 1 for g in e.grad_outputs)) and (
            description := self.describe_factor()
        ):
            yield description
        flat = [read_as_contiguous(g) for g in e.grad_outputs]
        is_strided = any(g.stride() != f.stride() for g, f in zip(e.grad_outputs, flat, strict=True))
        if is_strided and self.is_right_for(flat):
            yield "reads the gradient that comes in as if it were contiguous"
        if self.got.dim() > 1 and self.equals(self.truth.mT):
            yield "is transposed"
        count = sum(t.requires_grad for t in e.inputs)
        for name, other_truth in zip(e.names[-count:], e.truth[-count:], strict=True):
            if other_truth is not self.truth and self.equals(other_truth):
                yield f"is {name}"
        ranks = [g.dim() for g in e.grad_outputs]
        for axis in range(max(ranks) - 1 if all(ranks) else 0):
            first = [g.clone() for g in e.grad_outputs]
            for g in first:
                g.movedim(min(axis, g.dim() - 1), 0)[1:] = 0
            if self.is_right_for(first):
                yield f"is that of the first part along axis {axis} of the result: a sum is missing"

    def is_right_for(self, incoming: Tensors) -> bool:
        """Check whether the gradient is correct for a different incoming gradient."""
        inputs = to_float64_leaves(self.call.inputs)
        outputs = [t for t in compute_outputs(self.problem.reference, inputs) if t.requires_grad]
        arguments = [g.double() for g in incoming]
        (gradient,) = torch.autograd.grad(
            outputs, [inputs[self.input_index]], arguments, materialize_grads=True
        )
        return self.equals(gradient)

    def describe_factor(self) -> str:
        """Describe a constant factor, where possible as a product of named sizes; "" if there is none."""
        largest = self.truth.abs().argmax()
        factor = (self.got.double().flatten()[largest] / self.truth.flatten()[largest]).item()
        is_trivial = not factor or not math.isfinite(factor) or math.isclose(factor, 1, rel_tol=1e-6)
        if is_trivial or not self.equals(factor * self.truth):
            return ""
        axes = resolve_sizes(self.problem.sizes[0], self.problem.size_names).items()
        sizes = {name: math.prod(axis_sizes) for name, axis_sizes in axes}
        for names in itertools.chain(itertools.combinations(sizes, 1), itertools.combinations(sizes, 2)):
            product = math.prod(sizes[name] for name in names)
            if math.isclose(factor * product, 1, rel_tol=1e-6):
                return f"is the mean over {' and '.join(names)}, and should be the sum"
            if math.isclose(factor, product, rel_tol=1e-6):
                return f"is {' * '.join(names)} times what it should be"
        return f"is {factor:.4g} times what it should be"


def read_as_contiguous(t: Tensor) -> Tensor:
    strides = torch.empty(t.shape, device="meta").stride()
    num_available = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    return t.as_strided(t.shape, strides) if num_available >= t.numel() else t
