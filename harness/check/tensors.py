"""The tensors of a run: what MAX is given, what comes back, and the verdict on it.

With `harness.check.reference` the one part of a run that needs torch.
"""

import numpy as np
import torch
from max.driver import Buffer

from harness.check.compare import Repeats, Verdict, allowance, spread_in_ulps
from harness.check.reference import Reference, values, verdict_on
from harness.devices.graphs import Program, to_device
from harness.devices.poison import poisoned
from harness.devices.targets import Target
from harness.spec.puzzle import Case, Dims, Puzzle


def sizes_of(puzzle: Puzzle, inputs: dict[str, torch.Tensor]) -> Dims:
    """The sizes of a case, read off the shapes of its inputs."""
    sizes = {
        name: size
        for call in puzzle.calls
        for argument, spec in call.op.reads.items()
        if argument in inputs
        for name, size in zip(spec.shape, inputs[argument].shape, strict=True)
    }
    return tuple(sizes[name] for name in puzzle.dim_names)


def make_buffers(
    puzzle: Puzzle,
    program: Program,
    target: Target,
    inputs: dict[str, torch.Tensor],
    dims: Dims | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Buffer]]:
    """The poisoned outputs of a program on the CPU, and a buffer on the target for every argument, both by name.

    `dims` are the case's sizes, None where the inputs tell them. A scalar that is not among the inputs is the op's own.
    """
    shapes = puzzle.shapes(dims or sizes_of(puzzle, inputs))
    scalars = {name: scalar for call in puzzle.calls for name, scalar in call.op.scalars.items()}
    outputs, buffers = {}, {}
    for name in program.arguments:
        quantity = name.split(".")[-1]
        if "." in name:
            outputs[name] = poisoned(shapes[quantity], puzzle.written_dtype(quantity, program.dtype))
            buffers[name] = to_device(outputs[name], target.device)
        elif name in scalars:
            value = inputs.get(name, scalars[name].value)
            buffers[name] = Buffer.from_dlpack(
                torch.as_tensor(value, dtype=getattr(torch, scalars[name].dtype))
            )
        else:
            buffers[name] = to_device(inputs[name], target.device)
    if target.kind == "virtual":
        from harness.devices import virtual

        tensors = {name: outputs.get(name, inputs.get(name)) for name in buffers if name not in scalars}
        virtual.name_buffers(
            buffers,
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        )
    return outputs, buffers


def execute(
    puzzle: Puzzle,
    program: Program,
    target: Target,
    inputs: dict[str, torch.Tensor],
    dims: Dims | None = None,
) -> dict[str, torch.Tensor]:
    """Runs every variant on one case; returns what was written, on the CPU, by "variant.quantity".

    `dims` are the case's sizes, None where the inputs tell them.
    """
    outputs, buffers = make_buffers(puzzle, program, target, inputs, dims)
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
    """The verdict on each quantity of one variant.

    One that is off is judged again with what the rounding of the saved quantities, where these are right, makes of it.
    """

    def verdict(quantity: str, propagated: float = 0.0) -> Verdict:
        atomic = target.kind != "cpu" and (variant, quantity) in puzzle.atomic
        s, got = allowance(atomic, puzzle.summands(case.dims)), outputs[f"{variant}.{quantity}"]
        return verdict_on(puzzle, reference, case, target, quantity, got, s, variant, propagated)

    verdicts = {quantity: verdict(quantity) for quantity in quantities}
    saved = puzzle.saved(variant)
    wrong = [q for q in quantities if not verdicts[q].ok and not verdicts[q].nonfinite and q not in saved]
    if wrong and all(verdict(quantity).ok for quantity in saved):
        kept = {quantity: values(outputs[f"{variant}.{quantity}"]) for quantity in saved}
        moved = puzzle.propagated(reference.arrays(case), kept)
        verdicts |= {quantity: verdict(quantity, moved[quantity]) for quantity in wrong if quantity in moved}
    return verdicts


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
        outputs = execute(puzzle, program, target, reference.inputs(case), case.dims)
        verdicts = judge_variant(puzzle, reference, case, target, variant, outputs, quantities)
        for quantity in quantities:
            got = values(outputs[f"{variant}.{quantity}"])
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
