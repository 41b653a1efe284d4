"""The tensors of a run through MAX: what its graph is given, and what comes back."""

import torch
from max.driver import Buffer  # pyright: ignore[reportMissingTypeStubs] (it has no types)

from harness.devices.graphs import Program, to_device
from harness.devices.poison import poisoned
from harness.devices.targets import Target
from harness.spec.puzzle import Dims, Puzzle


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
    outputs: dict[str, torch.Tensor] = {}
    buffers: dict[str, Buffer] = {}
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
    program.run(buffers)
    if target.kind != "cpu":
        from max.driver import CPU  # pyright: ignore[reportMissingTypeStubs] (it has no types)

        outputs = {name: torch.from_dlpack(buffers[name].to(CPU())) for name in outputs}
    return outputs
