"""A rung in PyTorch: a learner's `autograd.Function`s, or functions, one for each gate, judged on the puzzle's cases.

Outputs and gradients are compared with autograd through the puzzle's reference, in float32 against the truth in float64.
What has gradients is put before `torch.autograd.gradcheck` too, in float64 on the smallest case, and what is registered
as an op before `torch.library.opcheck`. A case of several processes is run by that many ranks, each on its part of the
tensors. Nothing here needs MAX or a compiler.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from harness.check.gradients import gradients_or_none
from harness.check.python_files import CaseChecker, Module, as_tuple, describe, load
from harness.check.reference import Reference
from harness.devices.processes import START, RankFailed, run_ranks
from harness.devices.targets import CPU
from harness.spec.puzzle import Case, Gate, Puzzle
from harness.spec.rungs import TorchFunction, TorchRung

Tensors = dict[str, torch.Tensor]
LONGEST = 300
"""Characters of what gradcheck or opcheck say that are shown."""


class TorchChecker(CaseChecker):
    """Judges the functions of one file again and again; truth and baseline of a case are computed once.

    `seconds` is how long the ranks of a case may take.
    """

    rung: TorchRung
    seconds = 60.0

    def __init__(self, puzzle: Puzzle, rung: TorchRung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self.reference = Reference(puzzle, "float32", seed)
        self.wide = Reference(puzzle, "float64", seed)

    def limit(self, cases: list[Case]) -> float:
        return super().limit(cases) + sum(START + self.seconds for c in cases if c.world_size > 1)

    def _reference_of(self, case: Case) -> Reference:
        return self.reference

    def _check_further(self, gate: Gate, path: Path, cases: list[Case]) -> None:
        case, asked = min(cases, key=self._elements), self.rung.functions[gate.id]
        self.where = f"by torch.autograd.gradcheck in case '{case.name}'"
        self._gradcheck(asked, path, case)
        self.where = f"by torch.library.opcheck in case '{case.name}'"
        self._opcheck(asked, path, case)

    def _said(self, error: Exception, path: Path) -> str:
        return str(error) if isinstance(error, RankFailed) else describe(error, path, longest=LONGEST)

    def _outputs(self, gate: Gate, module: Module, path: Path, case: Case) -> Tensors:
        asked = self.rung.functions[gate.id]
        tensors = self.reference.strided_inputs(case)
        if case.world_size == 1:
            outputs = [called(path, asked, tensors)]
        else:
            size = case.world_size
            parts = [(path, asked, part(asked, tensors, rank, size)) for rank in range(size)]
            answers = run_ranks(
                called_for_arrays,
                parts,
                describe=functools.partial(describe, path=path),
                source=path,
                seconds=self.seconds,
            )
            outputs = whole(asked, answers)
        return {name: self._farthest(case, name, [each[name] for each in outputs]) for name in outputs[0]}

    def _farthest(self, case: Case, quantity: str, copies: list[torch.Tensor]) -> torch.Tensor:
        """The rank's copy of a quantity that is farthest from the truth; every copy must have its shape."""
        truth = self.reference.truth(case, CPU)[quantity]
        for got in copies:
            if tuple(got.shape) != truth.shape:
                name = self.puzzle.printed(quantity)
                raise ValueError(f"{name} has shape {list(got.shape)}, expected {list(truth.shape)}")

        def distance(got: torch.Tensor) -> float:
            with np.errstate(invalid="ignore"):
                apart = np.abs(got.double().numpy() - truth).max(initial=0.0)
            return float("inf") if np.isnan(apart) else float(apart)

        return max(copies, key=distance)

    def _elements(self, case: Case) -> tuple[bool, int]:
        """What cases are ordered by, those of one process first: gradcheck calls a function for every element."""
        return case.world_size > 1, sum(array.size for array in self.wide.arrays(case).values())

    def _gradcheck(self, asked: TorchFunction, path: Path, case: Case) -> None:
        """Finite differences in float64. Raises GradcheckError."""
        if not asked.gradients or case.world_size > 1:
            return
        function = function_of(path, asked)
        tensors = self.wide.inputs(case)
        leaves = [tensors[name].requires_grad_() for name in asked.gradients]

        def outputs(*moved: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = {**tensors, **dict(zip(asked.gradients, moved, strict=True))}
            return returned_by(function, asked, given)[: len(asked.grad_outputs)]

        torch.autograd.gradcheck(outputs, leaves)

    def _opcheck(self, asked: TorchFunction, path: Path, case: Case) -> None:
        """PyTorch's own test of a registered op. Raises OpCheckError."""
        if not asked.op or case.world_size > 1:
            return
        load(path)
        tensors = self.reference.inputs(case)
        arguments = tuple(tensors[name].requires_grad_(name in asked.gradients) for name in asked.takes)
        torch.library.opcheck(registered(asked.op), arguments)  # pyright: ignore[reportUnknownMemberType] (two parameters have no types)


def registered(name: str) -> torch._ops.OpOverload:  # pyright: ignore[reportPrivateUsage] (it has no public name)
    """A registered op by its name, "namespace::name". Raises ValueError where there is none."""
    namespace, _, op = name.partition("::")
    try:
        return getattr(getattr(torch.ops, namespace), op).default
    except AttributeError:
        raise ValueError(f"the file registers no op {name!r}") from None


def function_of(path: Path, asked: TorchFunction) -> Callable[..., object]:
    """What is called for a gate. Raises ValueError where the file does not define it."""
    defined = load(path).get(asked.name)
    if inspect.isclass(defined) and issubclass(defined, torch.autograd.Function):
        return defined.apply
    if not callable(defined):
        raise ValueError(f"there is no function and no torch.autograd.Function {asked.name!r}")
    return defined


def called(path: Path, asked: TorchFunction, tensors: Tensors) -> Tensors:
    """Outputs and gradients by quantity. Raises ValueError for what cannot be compared, and where a tensor that was given has
    changed."""
    before = {name: tensors[name].detach().clone() for name in (*asked.takes, *asked.grad_outputs)}
    leaves = {name: tensors[name].requires_grad_() for name in asked.gradients}
    returned = returned_by(function_of(path, asked), asked, tensors)
    results = {name: tensor.detach() for name, tensor in zip(asked.returns, returned, strict=True)}
    if leaves:
        incoming = [tensors[name] for name in asked.grad_outputs]
        outputs = returned[: len(incoming)]
        gradients = gradients_or_none(outputs, list(leaves.values()), incoming)
        for (name, quantity), gradient in zip(asked.gradients.items(), gradients, strict=True):
            if gradient is None:
                raise ValueError(f"no gradient comes back for {name}: backward returns None in its place")
            results[quantity] = gradient
    for name, then in before.items():
        if not torch.equal(tensors[name].nan_to_num(), then.nan_to_num()):
            raise ValueError(
                f"{name} is changed in place: whoever reads it after the call, autograd too, gets the wrong numbers"
            )
    return results


def returned_by(
    function: Callable[..., object], asked: TorchFunction, tensors: Tensors
) -> tuple[torch.Tensor, ...]:
    """The tensors that a gate's function returns. Raises ValueError where they are too few or many, or none."""
    returned = as_tuple(function(*(tensors[name] for name in asked.takes)))
    outputs = tuple(each for each in returned if isinstance(each, torch.Tensor))
    if len(outputs) != len(returned) or len(returned) != len(asked.returns):
        count = len(asked.returns)
        raise ValueError(f"{asked.name} should return {count} tensor{'s' * (count != 1)}")
    return outputs


# ---- Several ranks ------------------------------------------------------------------------------------------


def part(asked: TorchFunction, tensors: Tensors, rank: int, size: int) -> dict[str, np.ndarray]:
    """What a rank is given: its part of the tensors that are split, the whole of the others."""
    parts = {
        name: tensors[name].tensor_split(size, asked.split[name])[rank]
        if name in asked.split
        else tensors[name]
        for name in {*asked.takes, *asked.grad_outputs}
    }
    return {name: tensor.contiguous().numpy() for name, tensor in parts.items()}


def called_for_arrays(
    path: Path, asked: TorchFunction, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """`called` in a process of its own, which is sent arrays and sends arrays back."""
    outputs = called(path, asked, {name: torch.as_tensor(array) for name, array in arrays.items()})
    return {name: tensor.contiguous().numpy() for name, tensor in outputs.items()}


def whole(asked: TorchFunction, answers: list[dict[str, np.ndarray]]) -> list[Tensors]:
    """The quantities as each rank has them: the parts put together, and its own copy of the others."""
    together = {
        name: np.concatenate([answer[name] for answer in answers], asked.split[name])
        for name in answers[0]
        if name in asked.split
    }
    return [
        {name: torch.as_tensor(array) for name, array in {**answer, **together}.items()} for answer in answers
    ]
