"""Run a pass of a learner's tape and the same pass with autograd; return both sets of values by name."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import graph

from harness.check.compare import Evidence, TensorResult, compute_relative_error, format_got_and_expected
from harness.check.gradients import TOLERANCE
from harness.check.results import Diagnosis
from harness.puzzles.p27.autograd import Model, Tensors
from harness.puzzles.p27.derivation import IGNORE_INDEX
from harness.spec.puzzle import Arrays, Case

Module = dict[str, Any]
PARTS = ("Linear", "Embedding", "LayerNorm", "Attention", "Gelu", "CrossEntropy", "Block")


class CheckError(Exception):
    """A failed check: a message, the mistake's id, and the number of the hint that helps, 0 for the default."""

    def __init__(self, message: str, mistake: str, hint: int = 0):
        super().__init__(message)
        self.mistake, self.hint = mistake, hint

    @staticmethod
    def from_diagnosis(diagnosis: Diagnosis, *extra_lines: str) -> "CheckError":
        hint = int(diagnosis.hint.rpartition("-")[2]) if diagnosis.hint else 0
        message = "\n".join([*diagnosis.lines, *filter(None, extra_lines)])
        return CheckError(message, diagnosis.mistake or "wrong-values", hint)


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Disable PyTorch's autograd: computing a gradient raises RuntimeError."""
    original = graph._engine_run_backward  # every entry point calls it: grad, backward, torch.func

    def refuse(*arguments, **options):
        raise RuntimeError("autograd is called: this gradient is yours to write")

    holders = [holder for holder in (graph, torch.autograd) if hasattr(holder, "_engine_run_backward")]
    for holder in holders:
        setattr(holder, "_engine_run_backward", refuse)  # noqa: B010 (private, so the types lack it)
    try:
        with torch.no_grad():
            yield
    finally:
        for holder in holders:
            setattr(holder, "_engine_run_backward", original)  # noqa: B010


@dataclass
class PartResults:
    """The results of a file's parts by name: outputs in forward order, gradients of inputs in backward order.

    `backward_order` lists the parts whose `backward` was called.
    """

    outputs: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    backward_order: list[str] = field(default_factory=list)


@contextlib.contextmanager
def record_parts(module: Module) -> Iterator[PartResults]:
    """Record the results of every part of a file inside the context."""
    results, original = PartResults(), {}

    def record(function, results_by_name: Tensors):
        def run(*arguments):
            name = next(argument for argument in arguments if isinstance(argument, str))
            if results_by_name is results.gradients:
                results.backward_order.append(name)
            returned = function(*arguments)
            if isinstance(returned, Tensor):
                results_by_name[name] = returned.clone()
            return returned

        return run

    for part in PARTS:
        part_class = module[part]
        original[part_class] = part_class.forward, part_class.backward
        part_class.forward = staticmethod(record(part_class.forward, results.outputs))
        part_class.backward = staticmethod(record(part_class.backward, results.gradients))
    try:
        yield results
    finally:
        for part_class, (forward, backward) in original.items():
            part_class.forward, part_class.backward = staticmethod(forward), staticmethod(backward)


def make_excerpt(B: int, T: int, V: int, seed: int, ignore_some: bool = True) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [B, T]; if `ignore_some`, a third of the targets are ignored (never all)."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(V, (B, T), generator=generator) for _ in range(2))
    if ignore_some:
        targets.view(-1)[1::3] = IGNORE_INDEX
    return tokens, targets


def count_saved_bytes(saved_tensors: Mapping[str, tuple[Tensor, ...]]) -> int:
    """Return the bytes of the saved tensors' storages, each counted once."""
    tensors = [tensor for saved in saved_tensors.values() for tensor in saved]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def compute_with_autograd(
    model: Model, output: Tensor, grad_output: Tensor | None, p: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the output, then all gradients in backward order: each part's parameters, then its input."""
    param_leaves = {f"the gradient of {name}": t for name, t in p.items()}
    order: dict[str, Tensor] = {}
    for part, arguments in reversed(model.inputs.items()):
        names = [f"the gradient of {part}.{key}" for key in ("bias", "weight")]
        order |= {name: param_leaves[name] for name in names if name in param_leaves}
        order[f"the gradient of what {part} is given"] = arguments
    order |= param_leaves
    gradients = torch.autograd.grad(output, [*order.values()], grad_output, materialize_grads=True)
    return {"the output": output.detach()} | dict(zip(order, gradients, strict=True))


def collect_values(
    output: Tensor, results: PartResults, grads: Mapping[str, Tensor], initial_grads: Mapping[str, Tensor]
) -> Tensors:
    """Return the values of a learner's pass by the same names; `grads` were `initial_grads` before it."""
    input_grads = {f"the gradient of what {part} is given": t for part, t in results.gradients.items()}
    param_grads = {f"the gradient of {name}": grads[name] - initial_grads[name] for name in grads}
    return {"the output": output, **input_grads, **param_grads}


def make_leaves(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


# ---- Values -------------------------------------------------------------------------------------------------


def find_wrong_values(got: Mapping[str, Tensor], expected_values: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of wrong values in the reference's order, skipping values that were not computed."""
    for name, expected in expected_values.items():
        if name in got and not is_close(got[name], expected):
            yield name


def is_close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return False
    if not expected.numel():
        return True
    return bool((got - expected).abs().max() <= TOLERANCE * (expected.abs().max().item() or 1.0))


def describe_wrong(got: Mapping[str, Tensor], expected_values: Mapping[str, Tensor], name: str) -> str:
    actual, expected = got[name], expected_values[name]
    if actual.shape != expected.shape:
        return f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    errors = torch.where(torch.isfinite(actual), (actual - expected).abs(), torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape))
    suffix = f" at {list(index)}" if index else ""
    limit = TOLERANCE * (expected.abs().max().item() or 1.0)
    numbers = format_got_and_expected(actual[index].item(), expected[index].item(), limit, 6)
    return f"{name} is wrong{suffix}: {numbers}"


def make_evidence(case: Case, arrays: Arrays, got: np.ndarray, expected: np.ndarray) -> list[Evidence]:
    """Return the evidence of a wrong value, or [] if the value is correct."""
    if is_close(torch.from_numpy(got.copy()), torch.from_numpy(expected.copy())):
        return []
    error = compute_relative_error(np.where(np.isfinite(got), got, expected), expected)
    result = TensorResult(False, error, 0.0, TOLERANCE, error, num_nonfinite=int((~np.isfinite(got)).sum()))
    return [Evidence(case, arrays, got, expected, np.zeros(expected.shape, bool), result, "float64")]
