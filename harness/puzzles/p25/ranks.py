"""The processes of a checked ring: each runs its part of every case, one after the other, over a strict wire.

A case with fewer ranks than processes runs on the last of them, so that ranks of the group and of the world
differ. A case that fails on one rank ends the run on all.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.check.gradients import saved_by_autograd
from harness.check.python_files import describe, load
from harness.puzzles.p25.wire import Broken, Wire

FUNCTIONS = {
    "merge": "merge",
    "steps": "ring_forward",
    "exchange": "exchange",
    "recompute": "block_backward",
    "home": "ring_backward",
    "causal": "hidden",
    "balanced": "chunks",
}
"""Gate -> the function that holds its blank, in both rungs."""
PATIENCE = 10.0
"""Timeout of a rank for another one, in seconds: a message takes milliseconds, even on a busy machine."""
SLACK = 256
"""Bytes that a rank may keep beyond its own tensors."""


@dataclass
class Part:
    """A rank's part of a case.

    Attributes:
        name: The case.
        size: The number of ranks.
        dtype: The dtype of the tensors.
        arrays: The rank's part of query, key, value and grad_output; empty for a process outside of the ring.
        arguments: The ring's arguments after query, key and value: length, scale, causal, balanced.
        transposed: Whether the tensors are stored as [B, s, heads, d].
    """

    name: str
    size: int
    dtype: str
    arrays: dict[str, np.ndarray]
    arguments: tuple
    transposed: bool = False


@dataclass
class Answer:
    """The result of a rank's part of a case: values by quantity, or the failure.

    Attributes:
        values: In float32.
        words: The failure, or "".
        mistake: The known mistake that explains it, or "".
        stuck: For a rank that waits in vain, see `wire.Broken`.
        kept: Bytes saved for the backward pass.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    words: str = ""
    mistake: str = ""
    stuck: tuple[str, int, tuple[int, ...]] | None = None
    kept: int = 0


def functions_of(path: Path, solution: Path, gate: str) -> dict[str, Any]:
    """Load a learner's file, with the solution's code in the functions of all other gates.

    So one blank is checked separately; its line numbers stay those of the learner's file.
    """
    module, right = load(path), load(solution)
    for other, name in FUNCTIONS.items():
        if other != gate and name in right:
            module[name] = types.FunctionType(right[name].__code__, module, name, right[name].__defaults__)
    return module


def run_cases(path: Path, solution: Path, gate: str, parts: list[Part], patience: float) -> list[Answer]:
    """Run a rank's cases up to the first in which any rank fails or waits `patience` seconds for another."""
    module = functions_of(path, solution, gate)
    module["finish"] = require_step(module["finish"])
    world = dist.get_world_size()
    # A rank outside of a group gets a marker for that, and has no case with it.
    groups: dict[int, Any] = {world: dist.group.WORLD}
    for size in sorted({part.size for part in parts} - {world}):
        groups[size] = dist.new_group(list(range(world - size, world)))
    control: Any = dist.new_group(list(range(world)))
    answers: list[Answer] = []
    for part in parts:
        answers.append(one_case(module, path, part, groups[part.size], patience) if part.arrays else Answer())
        failed: list[bool | None] = [None] * world
        dist.all_gather_object(failed, bool(answers[-1].words), group=control)
        if any(failed):
            break
    return answers


def require_step(finish: Callable[..., None]) -> Callable[..., None]:
    """Wrap `finish` so that it must get the step: if a neighbour is gone, only the step says when."""

    def finish_checked(works: list[Any], step: object, group: object) -> None:
        if not isinstance(step, int):
            raise Broken(
                "step-not-named",
                f"finish(works, step, group) is given a {type(step).__name__} for the step: where a neighbour is gone, "
                "nobody would learn at which step",
            )
        finish(works, step, group)

    return finish_checked


def one_case(module: Mapping[str, Any], path: Path, part: Part, group: Any, patience: float) -> Answer:
    """Run the ring forward and backward on this rank."""
    tensors = {
        name: torch.from_numpy(array).to(getattr(torch, part.dtype)) for name, array in part.arrays.items()
    }
    if part.transposed:
        tensors = {name: each.transpose(1, 2).contiguous().transpose(1, 2) for name, each in tensors.items()}
    arguments = {name: tensor.clone() for name, tensor in tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    wire = Wire(patience, leaves[0].dtype)
    try:
        with wire.route():
            output, count = bytes_saved(
                lambda: module["RingAttention"].apply(*leaves, *part.arguments, group)
            )
            wire.coarse = 0
            gradients = torch.autograd.grad(output, leaves, tensors["grad_output"])
        check_saved(count, leaves, output)
        check_travelling(wire.coarse, part.size, leaves[0].dtype)
        for name, tensor in tensors.items():
            if not torch.equal(tensor.detach(), arguments[name]):
                raise Broken("changed-input", changed_input(name))
    except Broken as broken:
        return Answer(words=str(broken), mistake=broken.mistake, stuck=broken.stuck)
    except Exception as error:  # an exception of the learner's code is a result
        return Answer(words=describe(error, path, longest=300), mistake=known_mistake(str(error)))
    names = ("output", "grad_query", "grad_key", "grad_value")
    pairs = zip(names, (output, *gradients), strict=True)
    values = {name: tensor.detach().float().numpy() for name, tensor in pairs}
    return Answer(values, kept=count)


def bytes_saved(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the output of one autograd.Function, and the bytes that its node saves: saved tensors, and
    others on its ctx."""
    output, saved = saved_by_autograd(call)
    memory = [tensor.untyped_storage() for tensor in (*saved, *tensors_in(vars(output.grad_fn)))]
    return output, sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def check_saved(count: int, leaves: list[torch.Tensor], output: torch.Tensor) -> None:
    """Raise Broken if a rank saves more than its own query, key, value and output, and a number per row."""
    rows = output.shape[0] * output.shape[1] * output.shape[2]
    own = sum(tensor.nbytes for tensor in (*leaves, output)) + 4 * rows
    if count > own + SLACK:
        raise Broken(
            "keeps-all-blocks",
            f"keeps {count:,} bytes for the backward pass; its own query, key, value, output and lse are {own:,}",
        )


def check_travelling(coarse: int, size: int, dtype: torch.dtype) -> None:
    """Raise Broken if a backward pass sends more than `coarse` may be in 16 bits.

    In 16-bit types those are key and value, size - 1 times, and dK and dV once, at the end: nothing is added
    to them any more.
    """
    if dtype.itemsize == 2 and coarse > 2 * size:
        raise Broken(
            "travels-in-bfloat16",
            f"dK and dV have the digits of {str(dtype).removeprefix('torch.')} on their way: a sum that is rounded at every rank",
        )


def changed_input(name: str) -> str:
    """Return the message for code that writes to its arguments."""
    return f"{name} is changed by the code that is given it: what is computed from it later is wrong"


def known_mistake(words: str) -> str:
    """Return the known mistake that explains an exception of PyTorch's, or ""."""
    return "group-rank" if "is not part of group" in words else ""
