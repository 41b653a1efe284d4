"""Define what `pNN --bench` measures for a puzzle: sizes, problems and candidates.

The module in the spec's attribute `bench` defines BENCHMARK. A candidate is built for one problem; it then
prepares calls of inference, the forward pass, the backward pass, or both passes.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Protocol

import torch

from harness.bench.machine import get_version
from harness.errors import UsageError
from harness.spec.puzzle import Puzzle

Tensor = torch.Tensor
Call = Callable[[], tuple[Tensor, ...]]

PASSES = ("inference", "forward", "backward", "both")
COLUMNS = ("graph", "loop", "cold", "host", "memory", "waited")
OPTIONAL_COLUMNS = ("cold", "waited")
"""Columns that are measured only if requested."""
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")} | {"tf32": torch.float32}


class Unavailable(Exception):
    """Raised if a candidate is unavailable on this machine or at this size; the message is the reason."""


# ---- Problems ----------------------------------------------------------------------------------------------


class Sizes(Protocol):
    """Sizes of one problem: a dataclass of positive integers, whose fields are columns of the CSV."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __str__(self) -> str:
        """Format the sizes for a table's heading."""
        ...

    def count_flops(self, direction: str) -> int:
        """Return the minimum number of floating-point operations of a pass."""
        ...


@dataclass(frozen=True)
class Problem:
    """A function of `leaves` at one size, and a gradient of its output."""

    sizes: Any
    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    grad_output: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].dtype

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device


def run_both_passes(
    function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad_output: Tensor
) -> tuple[Tensor, ...]:
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


# ---- Candidates --------------------------------------------------------------------------------------------


class BuiltCandidate:
    """A candidate built for one problem. `note` is written to its rows."""

    note = ""

    def prepare(self, direction: str) -> Call:
        """Return a callable that runs one pass and returns the quantities of `list_quantities`.

        For "inference" the caller disables gradients, since switching inside the call would be timed too.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all work on PyTorch's streams."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class AutogradCandidate(BuiltCandidate):
    """A function of the problem's leaves, differentiated by autograd.

    `repeatable` computes the same and allows several backward passes after one forward pass.
    """

    def __init__(self, function, leaves, grad_output, repeatable=None, note=""):
        self.function, self.leaves, self.grad_output = function, leaves, grad_output
        self.repeatable_function, self.note = repeatable or function, note

    def prepare(self, direction: str) -> Call:
        if direction in ("inference", "forward"):
            return lambda: (self.function(*self.leaves),)
        if direction == "both":
            return lambda: run_both_passes(self.function, self.leaves, self.grad_output)
        output = self.repeatable_function(*self.leaves)
        return lambda: torch.autograd.grad(output, self.leaves, self.grad_output, retain_graph=True)


def make_eager(problem: Problem) -> AutogradCandidate:
    """Return the problem's function in eager PyTorch, whose errors determine all candidates' tolerances."""
    return AutogradCandidate(problem.function, problem.leaves, problem.grad_output)


@dataclass(frozen=True)
class Candidate:
    """An implementation to time.

    `role` is "ours", "peer" or "floor". The floor is a lower bound of the time: it does only a part of the
    work and is not checked. `build` raises Unavailable, or ImportError if the package (`distribution`) is
    missing.
    """

    name: str
    role: str
    build: Callable[[Problem], BuiltCandidate]
    distribution: str = ""
    columns: tuple[str, ...] = COLUMNS

    def get_version(self) -> str:
        """Return the package and its version, such as "liger_kernel 0.6.4", or "" if it is not installed."""
        version = self.distribution and get_version(self.distribution)
        return f"{self.distribution} {version}" if version else ""


# ---- The benchmark of a puzzle -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """Definition of what `pNN --bench` measures.

    Attributes:
        description: One line for --help.
        sizes: The dataclass of a problem's sizes.
        named_sizes: Name in --sizes -> list of sizes.
        cpu_sizes, gpu_sizes: Default values of --sizes.
        cpu_bound_sizes: Sizes so small that a call is CPU-bound.
        quantities: Names of the output and of the gradients of all leaves.
        candidates: The candidates; at most one is the floor.
        make_problem: Create a problem of some sizes on a device; no term of its gradients may vanish.
    """

    description: str
    sizes: type[Any]
    named_sizes: Mapping[str, list[Any]]
    cpu_sizes: str
    gpu_sizes: str
    cpu_bound_sizes: Any
    quantities: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    make_problem: Callable[[Any, torch.dtype, torch.device], Problem]

    @property
    def size_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.sizes))

    @property
    def floor(self) -> str:
        """Name of the floor, or ""."""
        return next((candidate.name for candidate in self.candidates if candidate.role == "floor"), "")

    def list_quantities(self, direction: str) -> tuple[str, ...]:
        return {"backward": self.quantities[1:], "both": self.quantities}.get(direction, self.quantities[:1])

    def compute_results(self, calls: BuiltCandidate) -> dict[str, Tensor]:
        return dict(zip(self.quantities, calls.prepare("both")(), strict=True))

    def compute_truth(self, problem: Problem) -> dict[str, Tensor]:
        """Return all quantities by name, computed in float64 with autograd."""
        leaves = tuple(leaf.detach().double().requires_grad_() for leaf in problem.leaves)
        results = run_both_passes(problem.function, leaves, problem.grad_output.double())
        return dict(zip(self.quantities, results, strict=True))


def find_benchmark(puzzle: Puzzle) -> Benchmark:
    """Return the benchmark of a puzzle. Raises UsageError if it has none."""
    if not puzzle.bench:
        raise UsageError(f"{puzzle.name} --bench: {puzzle.name} has no benchmark")
    return importlib.import_module(puzzle.bench).BENCHMARK
