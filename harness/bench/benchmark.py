"""Declare what `pNN --bench` measures for a puzzle: named sizes, problems, and the candidates.

The module that the spec names as `bench` defines one `Benchmark`, BENCHMARK. A candidate is built for one
problem and then provides calls: inference, a training forward pass, a backward pass, or both. All candidates
get the same inputs and return the same quantities.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol

import torch

from harness.errors import BadUse
from harness.spec.puzzle import Puzzle

Tensor = torch.Tensor
Call = Callable[[], tuple[Tensor, ...]]

PASSES = ("inference", "forward", "backward", "both")
COLUMNS = ("graph", "loop", "cold", "host", "memory", "waited")
ON_REQUEST = ("cold", "waited")
"""Columns that are measured only on request."""
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,
}


class Unavailable(Exception):
    """A candidate that is not available on this machine or for this size; the message says why."""


# ---- Problems -----------------------------------------------------------------------------------------------


class Sizes(Protocol):
    """The sizes of one problem: a dataclass of positive integers, whose fields are columns of the CSV."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __str__(self) -> str:
        """Format the sizes for the head of a table."""
        ...

    def operations(self, direction: str) -> int:
        """Floating-point operations that a pass cannot do without."""
        ...


@dataclass(frozen=True)
class Problem:
    """The tensors of one size.

    Attributes:
        sizes: Its `Sizes`.
        function: The computation in PyTorch operations: takes the leaves and returns the output.
        leaves: The differentiable arguments.
        grad_output: The incoming gradient; has the shape of the output.
    """

    sizes: Any
    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    grad_output: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors."""
        return self.leaves[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.leaves[0].device


def forward_and_backward(
    function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Return the output and the gradient of every leaf."""
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


# ---- Candidates ---------------------------------------------------------------------------------------------


class Calls:
    """A candidate built for one problem. `note` is a remark for readers of the times."""

    note = ""

    def prepare(self, direction: str) -> Call:
        """Return a call that does one pass and returns its quantities, in the order of `Benchmark.returned_names(direction)`.

        "inference" must be called without gradients. The caller switches them off, because the switch itself takes time.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until everything that was called on torch's streams is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Differentiable(Calls):
    """Calls of a function that autograd can differentiate.

    Args:
        function: Takes the leaves.
        leaves: The leaves of the problem, as the function takes them.
        grad_output: The incoming gradient.
        again: The same function for a backward pass that runs many times after one forward pass.
        note: A remark for readers of the times.
    """

    def __init__(self, function, leaves, grad_output, again=None, note=""):
        self.function, self.leaves, self.grad_output = function, leaves, grad_output
        self.again, self.note = again or function, note

    def prepare(self, direction: str) -> Call:
        """Return a call of one pass, as `Calls` says."""
        if direction in ("inference", "forward"):
            return lambda: (self.function(*self.leaves),)
        if direction == "both":
            return lambda: forward_and_backward(self.function, self.leaves, self.grad_output)
        output = self.again(*self.leaves)
        return lambda: torch.autograd.grad(output, self.leaves, self.grad_output, retain_graph=True)


def plain(problem: Problem) -> Differentiable:
    """Return the problem's own PyTorch operations, one after the other: the candidate that sets the limit of error."""
    return Differentiable(problem.function, problem.leaves, problem.grad_output)


@dataclass(frozen=True)
class Candidate:
    """A function to time.

    Attributes:
        name: In the table and in the CSV.
        role: "ours", "peer" or "floor"; the floor does less than the problem requires, and is not checked.
        build: Takes a problem and returns its calls. Raises Unavailable, and ImportError for a missing
            package.
        distribution: The package it comes from, for its version.
        columns: The columns that it is measured in.
    """

    name: str
    role: str
    build: Callable[[Problem], Calls]
    distribution: str = ""
    columns: tuple[str, ...] = COLUMNS

    def version(self) -> str:
        """ "liger_kernel 0.6.4", or nothing if there is nothing to say."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return ""


# ---- The benchmark of a puzzle ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """Declaration of what `pNN --bench` measures.

    Attributes:
        about: One line for --help.
        sizes: The dataclass of a problem's sizes.
        named: Sizes by their names in --sizes.
        cpu_sizes, gpu_sizes: Default values of --sizes.
        host_sizes: Sizes at which a call is all host time.
        quantities: Results of forward and backward together: the output, then the gradient of every leaf.
        candidates: All candidates; at most one is the floor.
        make_problem: sizes, dtype, device -> the problem, with values for which no gradient term vanishes.
    """

    about: str
    sizes: type[Any]
    named: Mapping[str, list[Any]]
    cpu_sizes: str
    gpu_sizes: str
    host_sizes: Any
    quantities: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    make_problem: Callable[[Any, torch.dtype, torch.device], Problem]

    @property
    def size_names(self) -> tuple[str, ...]:
        """The names of the sizes, in order."""
        return tuple(field.name for field in fields(self.sizes))

    @property
    def floor(self) -> str:
        """The name of the floor, or nothing."""
        return next((one.name for one in self.candidates if one.role == "floor"), "")

    def returned_names(self, direction: str) -> tuple[str, ...]:
        """Return the names of what a call of a pass returns."""
        return {"backward": self.quantities[1:], "both": self.quantities}.get(direction, self.quantities[:1])

    def results(self, calls: Calls) -> dict[str, Tensor]:
        """Return all quantities of one forward and backward pass, by name."""
        return dict(zip(self.quantities, calls.prepare("both")(), strict=True))

    def truth(self, problem: Problem) -> dict[str, Tensor]:
        """Return all quantities by autograd in float64, by name."""
        leaves = tuple(leaf.detach().double().requires_grad_() for leaf in problem.leaves)
        both = forward_and_backward(problem.function, leaves, problem.grad_output.double())
        return dict(zip(self.quantities, both, strict=True))


def find_benchmark(puzzle: Puzzle) -> Benchmark:
    """Return the benchmark of a puzzle. Raises BadUse if it has none."""
    if not puzzle.bench:
        raise BadUse(f"{puzzle.name} --bench: {puzzle.name} has no benchmark")
    return importlib.import_module(puzzle.bench).BENCHMARK
