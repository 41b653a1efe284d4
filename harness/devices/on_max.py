"""Run training ops as cached MAX graphs on PyTorch tensors, without copies."""

import os
import threading
from collections.abc import Iterable

import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count

from harness.devices.graphs import Program, load_graphs
from harness.nn.arguments import DTYPES
from harness.spec.ops import Call, OpSpec
from harness.toolchain.packages import OpPackage
from harness.toolchain.roots import get_solutions, make_op_package

Tensor = torch.Tensor
compile_lock = threading.Lock()
executed_functions: set[str] = set()
"""Names of the functions that have run through MAX in this process."""
parent_pids: list[int] = []
"""The parent's process ID, in a child forked after MAX was started."""


class OpGraphs:
    """The training ops of a puzzle's solution, one graph each; a learner's kernels are never used.

    `alternative` is a suggestion in the error message for a caller that captures a CUDA graph.
    """

    def __init__(self, puzzle: str, function: str, ops: Iterable[OpSpec], alternative: str = ""):
        self.puzzle, self.function, self.ops, self.alternative = puzzle, function, tuple(ops), alternative
        self.programs: dict[tuple, dict[str, Program]] = {}

    @property
    def package(self) -> OpPackage:
        return make_op_package(get_solutions(), self.puzzle)

    def make_calls(self, **parameters: str) -> dict[str, tuple[Call, ...]]:
        return {op.name: (Call(op, tuple(parameters.items())),) for op in self.ops}

    def get_programs(self, dtype: torch.dtype, device: torch.device, **parameters: str) -> dict[str, Program]:
        """Return the compiled graphs by op; one thread compiles them and the others wait."""
        check_not_forked(self.function)
        key = (*parameters.values(), dtype, device)
        if key not in self.programs:
            with compile_lock:
                if key not in self.programs:
                    calls, max_device = self.make_calls(**parameters), get_max_device(device)
                    self.programs[key] = load_graphs(self.package, calls, DTYPES[dtype], max_device)
        return self.programs[key]

    def run(self, op: OpSpec, tensors: Iterable[Tensor], *scalars: float, **parameters: str) -> None:
        """Run an op on tensors and scalars in the order of its spec."""
        arguments = dict(zip((*op.writes, *op.reads), tensors, strict=True))
        first_input = arguments[next(iter(op.reads))]
        for (name, scalar), value in zip(op.scalars.items(), scalars, strict=True):
            arguments[name] = torch.tensor(value, dtype=getattr(torch, scalar.dtype))
        # MAX writes only to contiguous tensors; for other tensors, copy the result back.
        written = {name: arguments[name].contiguous() for name in op.writes}
        program = self.get_programs(first_input.dtype, first_input.device, **parameters)[op.name]
        run(program, arguments | written, first_input.device, self.function, self.alternative)
        for name, tensor in written.items():
            if tensor is not arguments[name]:
                arguments[name].copy_(tensor)


def _record_fork() -> None:
    """Record in a forked child that MAX's threads do not exist, so that calls fail instead of hanging."""
    if executed_functions and not parent_pids:
        parent_pids.append(os.getppid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_record_fork)


def check_not_forked(function: str) -> None:
    """Raise RuntimeError in a child that was forked after its parent had called a function through MAX."""
    if parent_pids:
        raise RuntimeError(
            f"{function} was called in process {parent_pids[0]} before this one was forked from it, and MAX's "
            'threads do not survive a fork; start workers by spawn, DataLoader(..., multiprocessing_context="spawn"), or '
            "call the layer in the parent only after they have started"
        )


def get_max_device(device: torch.device) -> Device:
    """Return MAX's device for a PyTorch device. Raises RuntimeError if MAX does not see it."""
    if device.type == "cpu":
        return CPU()
    if device.index >= accelerator_count():
        raise RuntimeError(
            f"the tensors are on {device}, but MAX sees {accelerator_count()} GPUs; is the driver too old?"
        )
    return Accelerator(device.index)


def run(
    program: Program, arguments: dict[str, Tensor], device: torch.device, function: str, alternative: str = ""
) -> None:
    """Run a program on tensors, ordered with PyTorch's current stream; error messages name `function`."""
    check_not_forked(function)
    executed_functions.add(function)
    # MAX accepts neither strides nor tensors that require a gradient.
    tensors = {name: tensor.detach().contiguous() for name, tensor in arguments.items()}
    if device.type == "cpu":
        execute(program, tensors)
        return
    check_not_capturing(function, alternative)
    with torch.cuda.device(device):
        run_in_stream_order(program, tensors, device)


def run_in_stream_order(program: Program, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Run a program after the earlier work on PyTorch's current stream, and before the later work.

    MAX launches on its own stream, which is ordered only with PyTorch's default stream. Called from another
    stream, its kernels could read inputs before they are written. So the default stream waits for the current
    stream before the call, and the current stream for the default stream after it. `record_stream` keeps
    PyTorch's allocator from reusing the memory while MAX still uses it.
    """
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if current == default:
        execute(program, tensors)
        return
    default.wait_stream(current)
    with torch.cuda.stream(default):
        execute(program, tensors)
    current.wait_stream(default)
    for tensor in tensors.values():
        if tensor.is_cuda:
            tensor.record_stream(default)


def execute(program: Program, tensors: dict[str, Tensor]) -> None:
    # MAX also accepts PyTorch tensors, but takes 20 us to recognise each.
    program.run({name: Buffer.from_dlpack(tensor) for name, tensor in tensors.items()})


def check_not_capturing(function: str, alternative: str = "") -> None:
    """Raise RuntimeError while PyTorch captures a CUDA graph, which MAX's stream cannot join."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{function} cannot be captured in a CUDA graph here, because MAX launches on a stream of its own; call it "
            f'outside the capture, or compile without mode="reduce-overhead"{alternative}'
        )
