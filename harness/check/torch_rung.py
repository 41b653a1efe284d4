"""Check a rung in PyTorch: an `autograd.Function` or a function for each gate, on the puzzle's cases.

Outputs and gradients are compared with autograd through the puzzle's reference, in float32 against the truth
in float64. Differentiable functions also run gradcheck, in float64 on the smallest case. MAX and a compiler
are not needed.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import torch

from harness.check.gradients import gradients_or_none
from harness.check.python_files import CaseChecker, Module, as_tuple, describe, load
from harness.check.reference import Reference
from harness.devices.targets import CPU
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import TorchFunction, TorchRung

Tensors = dict[str, torch.Tensor]
LONGEST = 300
"""Characters shown of gradcheck's message."""


class TorchChecker(CaseChecker):
    """Repeated checks of one file's functions; truth and baseline of a case are computed once."""

    rung: TorchRung

    def __init__(self, puzzle: Puzzle, rung: TorchRung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self.reference = Reference(puzzle, "float32", seed)
        self.wide = Reference(puzzle, "float64", seed)

    def _reference_of(self, case: Case) -> Reference:
        return self.reference

    def _check_further(self, gate: Gate, path: Path, cases: list[Case]) -> None:
        """Run finite differences in float64 on the smallest case, as a function is called for every element.
        Raises GradcheckError."""
        interface = self.rung.functions[gate.id]
        if not interface.gradients:
            return
        case = min(cases, key=lambda each: sum(array.size for array in self.wide.arrays(each).values()))
        self.where = f"by torch.autograd.gradcheck in case '{case.name}'"
        function = function_of(path, interface)
        tensors = {name: tensor.contiguous() for name, tensor in self.wide.strided_inputs(case).items()}
        leaves = [tensors[name].requires_grad_() for name in interface.gradients]

        def outputs(*moved: torch.Tensor) -> tuple[torch.Tensor, ...]:
            arguments = {**tensors, **dict(zip(interface.gradients, moved, strict=True))}
            return returned_by(function, interface, arguments)[: len(interface.grad_outputs)]

        torch.autograd.gradcheck(outputs, leaves)

    def _describe_error(self, error: Exception, path: Path) -> str:
        return describe(error, path, longest=LONGEST)

    def _outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Tensors:
        interface = self.rung.functions[gate.id]
        outputs = call_function(path, interface, self.reference.strided_inputs(case))
        for quantity, got in outputs.items():
            shape = self.reference.truth(case, CPU)[quantity].shape
            if tuple(got.shape) != shape:
                name = self.puzzle.printed_name(quantity)
                raise ValueError(f"{name} has shape {list(got.shape)}, expected {list(shape)}")
        return outputs


def function_of(path: Path, requested: TorchFunction) -> Callable[..., object]:
    """Return the function of a gate. Raises ValueError if the file does not define it."""
    defined = load(path).get(requested.name)
    if inspect.isclass(defined) and issubclass(defined, torch.autograd.Function):
        return defined.apply
    if not callable(defined):
        raise ValueError(f"there is no function and no torch.autograd.Function {requested.name!r}")
    return defined


def call_function(path: Path, requested: TorchFunction, tensors: Tensors) -> Tensors:
    """Return outputs and gradients by quantity. Raises ValueError for results that cannot be compared, and
    if an input tensor has changed."""
    before = {name: tensors[name].detach().clone() for name in (*requested.takes, *requested.grad_outputs)}
    leaves = {name: tensors[name].requires_grad_() for name in requested.gradients}
    returned = returned_by(function_of(path, requested), requested, tensors)
    results = {name: tensor.detach() for name, tensor in zip(requested.returns, returned, strict=True)}
    if leaves:
        incoming = [tensors[name] for name in requested.grad_outputs]
        outputs = returned[: len(incoming)]
        gradients = gradients_or_none(outputs, list(leaves.values()), incoming)
        for (name, quantity), gradient in zip(requested.gradients.items(), gradients, strict=True):
            if gradient is None:
                raise ValueError(f"no gradient comes back for {name}: backward returns None in its place")
            results[quantity] = gradient
    for name, then in before.items():
        if not torch.equal(tensors[name].nan_to_num(), then.nan_to_num()):
            raise ValueError(
                f"{name} is changed in place: later reads of it, autograd's too, get wrong numbers"
            )
    return results


def returned_by(
    function: Callable[..., object], requested: TorchFunction, tensors: Tensors
) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a gate's function returns. Raises ValueError unless their number is right."""
    returned = as_tuple(
        function(*(tensors[name] for name in requested.takes)), requested.name, len(requested.returns)
    )
    outputs = tuple(each for each in returned if isinstance(each, torch.Tensor))
    if len(outputs) != len(returned) or len(returned) != len(requested.returns):
        count = len(requested.returns)
        raise ValueError(f"{requested.name} should return {count} tensor{'s' * (count != 1)}")
    return outputs
