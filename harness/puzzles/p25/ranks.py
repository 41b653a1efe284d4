"""Processes of a checked ring; each runs its part of every case over a strict `Transport`.

A case with fewer ranks than processes runs on the last processes, so that group ranks and world ranks differ.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.check.gradients import record_saved_tensors
from harness.check.python_files import describe_exception, load_module
from harness.puzzles.p25.wire import Transport, TransportError

GATE_FUNCTIONS = {
    "merge": "merge",
    "steps": "ring_forward",
    "exchange": "exchange",
    "recompute": "block_backward",
    "home": "ring_backward",
    "causal": "hidden",
    "balanced": "chunks",
}
"""Gate -> the function that contains its blank, in both rungs."""
TIMEOUT_S = 10.0
"""Seconds that a rank waits for another; a message takes milliseconds, even on a busy machine."""
EXTRA_BYTES = 256
"""Bytes that a rank may save in addition to its own tensors."""


@dataclass
class Part:
    """A rank's part of a case.

    Attributes:
        name: The name of the case.
        size: The number of ranks.
        dtype: The dtype of the tensors.
        arrays: The rank's part of query, key, value and grad_output; empty for a process outside the ring.
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
class RankResult:
    """The result of a rank's part of a case: float32 values by quantity, or a description of the failure.

    `mistake` is the known mistake that explains it, `blocked_wait` is as in `TransportError`.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    message: str = ""
    mistake: str = ""
    blocked_wait: tuple[str, int, tuple[int, ...]] | None = None
    saved_bytes: int = 0


def load_functions(path: Path, solution: Path, gate: str) -> dict[str, Any]:
    """Load a learner's file, with the solution's code in the functions of all other gates.

    This tests one blank at a time, with the line numbers of the learner's file.
    """
    module, solution_module = load_module(path), load_module(solution)
    for other_gate, name in GATE_FUNCTIONS.items():
        if other_gate != gate and name in solution_module:
            module[name] = types.FunctionType(
                solution_module[name].__code__, module, name, solution_module[name].__defaults__
            )
    return module


def run_cases(path: Path, solution: Path, gate: str, parts: list[Part], timeout_s: float) -> list[RankResult]:
    """Run a rank's cases up to the first in which any rank fails or times out."""
    module = load_functions(path, solution, gate)
    module["finish"] = require_step(module["finish"])
    world = dist.get_world_size()
    # new_group returns only a marker to processes outside the group, which get none of its cases.
    groups: dict[int, Any] = {world: dist.group.WORLD}
    for size in sorted({part.size for part in parts} - {world}):
        groups[size] = dist.new_group(list(range(world - size, world)))
    control_group: Any = dist.new_group(list(range(world)))
    results: list[RankResult] = []
    for part in parts:
        results.append(
            run_case(module, path, part, groups[part.size], timeout_s) if part.arrays else RankResult()
        )
        failed: list[bool | None] = [None] * world
        dist.all_gather_object(failed, bool(results[-1].message), group=control_group)
        if any(failed):
            break
    return results


def require_step(finish: Callable[..., None]) -> Callable[..., None]:
    """Wrap `finish` to require a step number, which a report needs if a neighbour is lost."""

    def finish_checked(works: list[Any], step: object, group: object) -> None:
        if not isinstance(step, int):
            message = f"finish(works, step, group) gets a {type(step).__name__} as the step, expected an int"
            raise TransportError(
                "step-not-named", f"{message}: if a neighbour is lost, the report names the step"
            )
        finish(works, step, group)

    return finish_checked


def run_case(module: Mapping[str, Any], path: Path, part: Part, group: Any, timeout_s: float) -> RankResult:
    dtype = getattr(torch, part.dtype)
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in part.arrays.items()}
    if part.transposed:
        tensors = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in tensors.items()}
    arguments = {name: tensor.clone() for name, tensor in tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    transport = Transport(timeout_s, leaves[0].dtype)
    try:
        with transport.patch_torch():
            output, num_bytes = measure_saved_bytes(
                lambda: module["RingAttention"].apply(*leaves, *part.arguments, group)
            )
            transport.sends_in_16_bits = 0
            gradients = torch.autograd.grad(output, leaves, tensors["grad_output"])
        check_saved(num_bytes, leaves, output)
        check_sent_precision(transport.sends_in_16_bits, part.size, leaves[0].dtype)
        for name, tensor in tensors.items():
            if not torch.equal(tensor.detach(), arguments[name]):
                raise TransportError("changed-input", describe_changed_input(name))
    except TransportError as error:
        return RankResult(message=str(error), mistake=error.mistake, blocked_wait=error.blocked_wait)
    except Exception as error:  # an exception in the learner's code is a result
        mistake = "group-rank" if "is not part of group" in str(error) else ""
        return RankResult(message=describe_exception(error, path, max_length=300), mistake=mistake)
    names = ("output", "grad_query", "grad_key", "grad_value")
    pairs = zip(names, (output, *gradients), strict=True)
    values = {name: tensor.detach().float().numpy() for name, tensor in pairs}
    return RankResult(values, saved_bytes=num_bytes)


def measure_saved_bytes(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the output of an autograd.Function, and the number of bytes saved by its node and ctx."""
    output, saved = record_saved_tensors(call)
    memory = [tensor.untyped_storage() for tensor in (*saved, *iterate_tensors(vars(output.grad_fn)))]
    return output, sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def iterate_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from iterate_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_tensors(item)


def check_saved(num_bytes: int, leaves: list[torch.Tensor], output: torch.Tensor) -> None:
    """Raise TransportError if a rank saves more than its own query, key, value, output and lse."""
    rows = output.shape[0] * output.shape[1] * output.shape[2]
    limit = sum(tensor.nbytes for tensor in (*leaves, output)) + 4 * rows
    if num_bytes > limit + EXTRA_BYTES:
        message = f"saves {num_bytes:,} bytes for the backward pass"
        raise TransportError(
            "keeps-all-blocks", f"{message}; its own query, key, value, output and lse have {limit:,}"
        )


def check_sent_precision(sends_in_16_bits: int, size: int, dtype: torch.dtype) -> None:
    """Raise TransportError if a backward pass sends too many tensors with 16-bit precision.

    With 16-bit dtypes, it sends key and value size - 1 times, and the final dK and dV once.
    """
    if dtype.itemsize == 2 and sends_in_16_bits > 2 * size:
        message = f"dK and dV are sent with the precision of {dtype}, so the sum is rounded at every rank"
        raise TransportError("travels-in-bfloat16", message.replace("torch.", ""))


def describe_changed_input(name: str) -> str:
    return f"the code changes its argument {name}, from which later steps then compute wrong results"
