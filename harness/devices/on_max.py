"""Training ops as MAX graphs on the memory of torch tensors, without a copy: from PyTorch to a puzzle's ops.

All graphs of a dtype on a device are compiled together when one is first used: ten seconds and more, once, for they are cached.
"""

import os
import threading
from collections.abc import Iterable

import torch
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count

from harness.devices.graphs import Program, load_each
from harness.nn.arguments import DTYPES
from harness.spec.ops import Call, OpSpec
from harness.toolchain.packages import OpPackage
from harness.toolchain.roots import op_package, solutions

Tensor = torch.Tensor
compiling = threading.Lock()
ran: set[str] = set()
"""The functions that have run through MAX in this process."""
forked_from: list[int] = []
"""The parent's process number, in a child that was forked after MAX had started."""


class Graphs:
    """Training ops of a puzzle's solution, one graph each; never a learner's kernels.

    Args:
        puzzle: The puzzle.
        function: The name in error messages.
        ops: The ops.
        instead: The alternative for a caller that captures a CUDA graph.
    """

    def __init__(self, puzzle: str, function: str, ops: Iterable[OpSpec], instead: str = ""):
        self.puzzle, self.function, self.ops, self.instead = puzzle, function, tuple(ops), instead
        self.loaded: dict[tuple, dict[str, Program]] = {}

    @property
    def package(self) -> OpPackage:
        """The solution's kernels."""
        return op_package(solutions(), self.puzzle)

    def calls(self, **parameters: str) -> dict[str, tuple[Call, ...]]:
        """Return the calls of each graph, by the op's name."""
        return {op.name: (Call(op, tuple(parameters.items())),) for op in self.ops}

    def programs(self, dtype: torch.dtype, device: torch.device, **parameters: str) -> dict[str, Program]:
        """Return the compiled graphs by the op's name; the first thread compiles one while the others wait."""
        refuse_after_fork(self.function)
        where = (*parameters.values(), dtype, device)
        if where not in self.loaded:
            with compiling:
                if where not in self.loaded:
                    calls, on = self.calls(**parameters), max_device(device)
                    self.loaded[where] = load_each(self.package, calls, DTYPES[dtype], on)
        return self.loaded[where]

    def run(self, op: OpSpec, tensors: Iterable[Tensor], *scalars: float, **parameters: str) -> None:
        """Run an op on its tensors and scalars, in the order in which it names them."""
        arguments = dict(zip((*op.writes, *op.reads), tensors, strict=True))
        like = arguments[next(iter(op.reads))]
        for (name, scalar), value in zip(op.scalars.items(), scalars, strict=True):
            arguments[name] = torch.tensor(value, dtype=getattr(torch, scalar.dtype))
        # MAX writes contiguous tensors; others are copied from one.
        written = {name: arguments[name].contiguous() for name in op.writes}
        program = self.programs(like.dtype, like.device, **parameters)[op.name]
        run(program, arguments | written, like.device, self.function, self.instead)
        for name, tensor in written.items():
            if tensor is not arguments[name]:
                arguments[name].copy_(tensor)


def _after_fork() -> None:
    """Note in a forked child that MAX's threads are missing: to wait for them would never end."""
    if ran and not forked_from:
        forked_from.append(os.getppid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def refuse_after_fork(function: str) -> None:
    """Raise in a child that was forked after its parent had called a function through MAX."""
    if forked_from:
        raise RuntimeError(
            f"{function} was called in process {forked_from[0]} before this one was forked from it, and MAX's "
            'threads do not survive a fork; start workers by spawn, DataLoader(..., multiprocessing_context="spawn"), or '
            "call the layer in the parent only after they have started"
        )


def max_device(device: torch.device) -> Device:
    """MAX's device for torch's. Raises RuntimeError if MAX does not see torch's GPU."""
    if device.type == "cpu":
        return CPU()
    if device.index >= accelerator_count():
        raise RuntimeError(
            f"the tensors are on {device}, but MAX sees {accelerator_count()} GPUs; is the driver too old?"
        )
    return Accelerator(device.index)


def run(
    program: Program, arguments: dict[str, Tensor], device: torch.device, function: str, instead: str = ""
) -> None:
    """Run a program on torch tensors, in the order of torch's current stream; `function` is the name in
    error messages."""
    refuse_after_fork(function)
    ran.add(function)
    # MAX accepts neither strides nor tensors that require a gradient.
    tensors = {name: tensor.detach().contiguous() for name, tensor in arguments.items()}
    if device.type == "cpu":
        execute(program, tensors)
        return
    refuse_capture(function, instead)
    with torch.cuda.device(device):
        run_in_stream_order(program, tensors, device)


def run_in_stream_order(program: Program, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Make MAX wait for torch's current stream, and that stream for MAX.

    MAX launches on a stream of its own, which is ordered with torch's default stream only. From any other stream
    the kernels would read inputs that are not written yet, without an error; so work goes through the default
    stream there and back. `record_stream` keeps torch's allocator from lending the memory out again while MAX
    still uses it.
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
    """Run a program on the memory of the tensors."""
    # MAX takes torch tensors too, but needs 20 us for each to find out that it does.
    program.run({name: Buffer.from_dlpack(tensor) for name, tensor in tensors.items()})


def refuse_capture(function: str, instead: str = "") -> None:
    """Raise while torch captures a CUDA graph: MAX's stream cannot be captured. `instead` is one more way out."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{function} cannot be captured in a CUDA graph here, because MAX launches on a stream of its own; call it "
            f'outside the capture, or compile without mode="reduce-overhead"{instead}'
        )
