"""The tensors of a run: what goes into the kernels, what PyTorch makes of the same, and the verdict on what came out.

This is the one part of a run that needs torch.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.check.compare import Repeats, Verdict, allowance, judge, spread_in_ulps
from harness.check.diagnose import Evidence
from harness.devices.graphs import Program, to_device
from harness.devices.poison import BITS, POISON, poisoned
from harness.devices.targets import Target
from harness.spec.puzzle import Arrays, Case, Puzzle


def torch_device(target: Target) -> torch.device:
    """Where PyTorch computes the baseline: on the same device where torch has it."""
    return torch.device("cuda" if target.kind == "gpu" and torch.cuda.is_available() else "cpu")


@dataclass
class Reference:
    """Inputs, truth and baseline of the cases of one run, each made once."""

    puzzle: Puzzle
    dtype: str
    seed: int
    _inputs: dict[str, Arrays] = field(default_factory=dict)
    _truth: dict[str, Arrays] = field(default_factory=dict)
    _baseline: dict[tuple[str, str], Arrays] = field(default_factory=dict)
    _terms: dict[str, dict[str, float]] = field(default_factory=dict)

    def inputs(self, case: Case) -> dict[str, torch.Tensor]:
        """The input tensors of a case on the CPU, contiguous, in the dtype of the run."""
        kind = getattr(torch, self.dtype)
        return {name: torch.tensor(array).to(kind).contiguous() for name, array in self.arrays(case).items()}

    def arrays(self, case: Case) -> Arrays:
        """The input arrays of a case, in float64."""
        if case.name not in self._inputs:
            self._inputs[case.name] = self.puzzle.inputs(case, self.dtype, self.seed)
        return self._inputs[case.name]

    def truth(self, case: Case, target: Target) -> Arrays:
        """The same function in float64 by autograd; for float64 kernels in longdouble."""
        if case.name not in self._truth:
            arrays = self.arrays(case)
            if self.dtype == "float64":
                self._truth[case.name] = self.puzzle.exact(arrays)
            else:
                self._truth[case.name] = self._autograd(arrays, "float64", torch_device(target))
        return self._truth[case.name]

    def baseline(self, case: Case, target: Target) -> Arrays:
        """PyTorch in the dtype of the run, on the device of the kernels where torch has it; in float64."""
        device = torch_device(target)
        key = case.name, device.type
        if key not in self._baseline:
            self._baseline[key] = self._autograd(self.arrays(case), self.dtype, device)
        return self._baseline[key]

    def terms(self, case: Case) -> dict[str, float]:
        """The size of the terms that cancel in a quantity, for those that have any."""
        if case.name not in self._terms:
            self._terms[case.name] = self.puzzle.terms(self.arrays(case))
        return self._terms[case.name]

    def _autograd(self, arrays: Arrays, dtype: str, device: torch.device) -> Arrays:
        tensors = {name: strided(array, dtype, device) for name, array in arrays.items()}
        outputs = self.puzzle.reference(tensors)
        return {name: tensor.to("cpu", torch.float64).numpy() for name, tensor in outputs.items()}


def strided(array: np.ndarray, dtype: str = "float64", device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor with the array's strides, stride 0 included, so that PyTorch sees an expanded tensor as such."""
    base = torch.from_numpy(np.ascontiguousarray(array)).to(
        device, getattr(torch, dtype)
    )  # .to() drops stride 0
    if 0 in array.strides:
        return base[tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)].expand(array.shape)
    order = np.argsort([-s for s in array.strides], kind="stable")
    return base.permute(*order).contiguous().permute(*np.argsort(order))


def puzzle_dims(puzzle: Puzzle, inputs: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """The sizes of a case, from the shapes of its inputs."""
    sizes = {
        letter: size
        for call in puzzle.calls
        for name, letters in call.op.reads.items()
        if name in inputs
        for letter, size in zip(letters, inputs[name].shape, strict=True)
    }
    return tuple(sizes[letter] for letter in puzzle.dim_names)


def puzzle_dtype(puzzle: Puzzle, inputs: dict[str, torch.Tensor]) -> str:
    """The dtype of a run, from an input that is no statistic."""
    op = puzzle.calls[0].op
    name = next(name for name in op.reads if name not in op.statistics)
    return str(inputs[name].dtype).removeprefix("torch.")


def make_buffers(
    puzzle: Puzzle, program: Program, target: Target, inputs: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The poisoned outputs of a program on the CPU, and a buffer on the target for every argument, both by name."""
    dtype = puzzle_dtype(puzzle, inputs)
    shapes = puzzle.shapes(puzzle_dims(puzzle, inputs))
    outputs, buffers = {}, {"eps": torch.tensor(1e-5, dtype=torch.float64)}
    for name in program.arguments:
        quantity = name.split(".")[-1]
        if "." in name:
            outputs[name] = poisoned(shapes[quantity], puzzle.written_dtype(quantity, dtype))
            buffers[name] = to_device(outputs[name], target.device)
        elif name != "eps":
            buffers[name] = to_device(inputs[name], target.device)
    if target.kind == "virtual":
        from harness.devices import virtual

        tensors = {name: outputs.get(name, inputs.get(name)) for name in buffers if name != "eps"}
        virtual.name_buffers(
            buffers,
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        )
    return outputs, buffers


def execute(
    puzzle: Puzzle, program: Program, target: Target, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Runs every variant on one case; returns what was written, on the CPU, by "variant.quantity"."""
    outputs, buffers = make_buffers(puzzle, program, target, inputs)
    try:
        program.run(buffers)
    except Exception as error:
        if target.kind != "virtual":
            raise
        from harness.devices import virtual

        raise virtual.failure(error) from error
    if target.kind != "cpu":
        from max.driver import CPU

        outputs = {name: torch.from_dlpack(buffers[name].to(CPU())) for name in outputs}
    return outputs


def judge_variant(
    puzzle: Puzzle,
    reference: Reference,
    case: Case,
    target: Target,
    variant: str,
    outputs: dict[str, torch.Tensor],
    quantities: list[str],
) -> dict[str, Verdict]:
    """The verdict on each quantity of one variant."""
    truth, baseline = reference.truth(case, target), reference.baseline(case, target)
    verdicts = {}
    for quantity in quantities:
        got = outputs[f"{variant}.{quantity}"]
        dtype = puzzle.written_dtype(quantity, reference.dtype)
        atomic = target.kind != "cpu" and (variant, quantity) in puzzle.atomic
        verdicts[quantity] = judge(
            got.to(torch.float64).numpy(),
            truth[quantity],
            baseline[quantity],
            dtype,
            allowance=allowance(atomic, math.prod(case.dims[:-2])),
            poison=(got.view(BITS[dtype]) == POISON[dtype]).numpy(),
            terms=reference.terms(case).get(quantity, 0.0),
        )
    return verdicts


def evidence(
    puzzle: Puzzle,
    reference: Reference,
    case: Case,
    target: Target,
    quantity: str,
    got: torch.Tensor,
    verdict: Verdict,
) -> Evidence:
    """What the diagnosis of a wrong quantity needs to know about one case."""
    dtype = puzzle.written_dtype(quantity, reference.dtype)
    return Evidence(
        case,
        reference.arrays(case),
        got.to(torch.float64).numpy(),
        np.asarray(reference.truth(case, target)[quantity], np.float64),
        (got.view(BITS[dtype]) == POISON[dtype]).numpy(),
        verdict,
        dtype,
    )


def repeat(
    puzzle: Puzzle,
    program: Program,
    target: Target,
    reference: Reference,
    case: Case,
    variant: str,
    quantities: list[str],
    runs: int,
) -> dict[str, Repeats]:
    """Runs one case again and again: per quantity, bit-equal or the spread in ulps, and how many runs were wrong."""
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    wrong = dict.fromkeys(quantities, 0)
    for _ in range(runs):
        outputs = execute(puzzle, program, target, reference.inputs(case))
        verdicts = judge_variant(puzzle, reference, case, target, variant, outputs, quantities)
        for quantity in quantities:
            got = outputs[f"{variant}.{quantity}"].to(torch.float64).numpy()
            low[quantity] = np.minimum(low.get(quantity, got), got)
            high[quantity] = np.maximum(high.get(quantity, got), got)
            wrong[quantity] += not verdicts[quantity].ok
    return {
        quantity: Repeats(
            runs,
            bool(np.array_equal(low[quantity], high[quantity])),
            spread_in_ulps(low[quantity], high[quantity], puzzle.written_dtype(quantity, reference.dtype)),
            wrong[quantity],
            target.kind != "cpu" and (variant, quantity) in puzzle.atomic,
        )
        for quantity in quantities
    }
