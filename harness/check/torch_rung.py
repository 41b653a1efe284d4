"""Check the PyTorch rung: an `autograd.Function` or a function for each gate, on the puzzle's cases.

float32 outputs and gradients are compared with those of the puzzle's reference, by autograd in float64.
Differentiable functions are also checked by gradcheck, in float64 on the smallest case. Neither MAX nor a
compiler is needed.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import torch

from harness.check.gradients import call_autograd_grad
from harness.check.python_files import CaseChecker, Module, describe_exception, load_module, make_tuple
from harness.check.reference import Reference
from harness.devices.targets import CPU
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import TorchFunction, TorchRung

Tensors = dict[str, torch.Tensor]
MAX_MESSAGE_LENGTH = 300
"""Maximum number of characters of gradcheck's message in a result."""


class TorchChecker(CaseChecker):
    """A checker of one file's functions that computes the truth and baseline of each case once."""

    rung: TorchRung

    def __init__(self, puzzle: Puzzle, rung: TorchRung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self.reference = Reference(puzzle, "float32", seed)
        self.reference64 = Reference(puzzle, "float64", seed)

    def _get_reference(self, case: Case) -> Reference:
        return self.reference

    def _check_properties(self, gate: Gate, path: Path, cases: list[Case]) -> None:
        """Run gradcheck in float64, on the smallest case, since it calls the function for every element.
        Raises GradcheckError."""
        interface = self.rung.functions[gate.id]
        if not interface.gradients:
            return

        def count_elements(case: Case) -> int:
            return sum(array.size for array in self.reference64.get_arrays(case).values())

        case = min(cases, key=count_elements)
        self.context = f"by torch.autograd.gradcheck in case '{case.name}'"
        function = load_function(path, interface)
        strided = self.reference64.make_strided_inputs(case)
        tensors = {name: tensor.contiguous() for name, tensor in strided.items()}
        leaves = [tensors[name].requires_grad_() for name in interface.gradients]

        def compute_outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            arguments = {**tensors, **dict(zip(interface.gradients, leaves, strict=True))}
            return call_and_unpack(function, interface, arguments)[: len(interface.grad_outputs)]

        torch.autograd.gradcheck(compute_outputs, leaves)

    def _describe_error(self, error: Exception, path: Path) -> str:
        return describe_exception(error, path, max_length=MAX_MESSAGE_LENGTH)

    def _compute_outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Tensors:
        interface = self.rung.functions[gate.id]
        outputs = call_function(path, interface, self.reference.make_strided_inputs(case))
        for quantity, got in outputs.items():
            shape = self.reference.get_truth(case, CPU)[quantity].shape
            if tuple(got.shape) != shape:
                name = self.puzzle.get_printed_name(quantity)
                raise ValueError(f"{name} has shape {list(got.shape)}, expected {list(shape)}")
        return outputs


def load_function(path: Path, interface: TorchFunction) -> Callable[..., object]:
    """Return a gate's function from the file. Raises ValueError if the file does not define it."""
    defined = load_module(path).get(interface.name)
    if inspect.isclass(defined) and issubclass(defined, torch.autograd.Function):
        return defined.apply
    if not callable(defined):
        raise ValueError(f"there is no function and no torch.autograd.Function {interface.name!r}")
    return defined


def call_function(path: Path, interface: TorchFunction, tensors: Tensors) -> Tensors:
    """Return outputs and gradients by quantity. Raises ValueError for bad results or a changed input."""
    copies = {
        name: tensors[name].detach().clone() for name in (*interface.arguments, *interface.grad_outputs)
    }
    leaves = {name: tensors[name].requires_grad_() for name in interface.gradients}
    returned = call_and_unpack(load_function(path, interface), interface, tensors)
    results = {name: tensor.detach() for name, tensor in zip(interface.returns, returned, strict=True)}
    if leaves:
        grad_outputs = [tensors[name] for name in interface.grad_outputs]
        outputs = returned[: len(grad_outputs)]
        gradients = call_autograd_grad(outputs, list(leaves.values()), grad_outputs)
        for (name, quantity), gradient in zip(interface.gradients.items(), gradients, strict=True):
            if gradient is None:
                raise ValueError(f"no gradient comes back for {name}: backward returns None in its place")
            results[quantity] = gradient
    for name, copy in copies.items():
        if not torch.equal(tensors[name].nan_to_num(), copy.nan_to_num()):
            raise ValueError(
                f"{name} is changed in place: later reads of it, autograd's too, get wrong numbers"
            )
    return results


def call_and_unpack(
    function: Callable[..., object], interface: TorchFunction, tensors: Tensors
) -> tuple[torch.Tensor, ...]:
    """Call a gate's function and return its tensors. Raises ValueError for a wrong number or type."""
    returned = make_tuple(
        function(*(tensors[name] for name in interface.arguments)), interface.name, len(interface.returns)
    )
    outputs = tuple(value for value in returned if isinstance(value, torch.Tensor))
    if len(outputs) != len(returned) or len(returned) != len(interface.returns):
        count = len(interface.returns)
        raise ValueError(f"{interface.name} should return {count} tensor{'s' * (count != 1)}")
    return outputs
