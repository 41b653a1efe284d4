"""A variant of a puzzle as a benchmark candidate: its MAX graphs, called directly.

A graph runs on a stream of MAX, invisible to CUDA graphs and torch's events. Only synchronized calls can be
timed, so these candidates are in the column `waited` only.
"""

from collections.abc import Mapping

import torch

from harness.bench.benchmark import Call as Timed
from harness.bench.benchmark import Calls, Unavailable
from harness.devices import graphs, targets
from harness.devices.targets import Target
from harness.spec.ops import Call
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots

DIRECTIONS = ("forward", "backward")


class MaxCalls(Calls):
    """Calls of a variant's forward and backward graph, on preallocated buffers.

    Args:
        puzzle: The puzzle; each of its variants starts with a forward and a backward call.
        variants: The variants that are compiled together: nearly all of the time is per unit, not per graph.
        variant: The one to call.
        inputs: The input tensors by the names of the ops; the first has the dtype of the run.
        shapes: The results of a pass, by the names of the ops, with their shapes.

    Raises Unavailable if PyTorch has a GPU and MAX sees none.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        variants: tuple[str, ...],
        variant: str,
        inputs: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        target = targets.gpu() if next(iter(inputs.values())).is_cuda else targets.cpu()
        if target is None:
            raise Unavailable("MAX sees no GPU")
        arguments = {name: tensor.detach().cpu().contiguous() for name, tensor in inputs.items()}
        dtype = str(next(iter(inputs.values())).dtype).removeprefix("torch.")
        programs = compile_graphs(puzzle, variants, dtype, target)
        self.device = target.device
        self.programs = {direction: programs[f"{variant} {direction}"] for direction in DIRECTIONS}
        written, forward = graphs.make_buffers(puzzle, self.programs["forward"], target, arguments)
        arguments |= {name.removeprefix(f"{variant}."): tensor for name, tensor in written.items()}
        _, backward = graphs.make_buffers(puzzle, self.programs["backward"], target, arguments)
        # Tensors saved for backward are buffers of both graphs.
        backward |= {name: forward[f"{variant}.{name}"] for name in puzzle.saved_quantities(variant)}
        self.buffers = {"forward": forward, "backward": backward}
        results = {f"{variant}.{name}": shape for name, shape in shapes.items()}
        self.results = {
            direction: tuple(
                torch.from_dlpack(buffers[name]).view(shape)
                for name, shape in results.items()
                if name in buffers
            )
            for direction, buffers in self.buffers.items()
        }

    def wait(self) -> None:
        """Wait until MAX's stream has nothing to do."""
        self.device.synchronize()

    def prepare(self, direction: str) -> Timed:
        """Return a call of one pass, which does not wait, and returns tensors that lie in the graphs' own buffers."""
        directions = {"backward": ("backward",), "both": DIRECTIONS}.get(direction, ("forward",))
        results = tuple(result for each in directions for result in self.results[each])
        if direction == "backward":
            self.programs["forward"].run(self.buffers["forward"])

        def call() -> tuple[torch.Tensor, ...]:
            for each in directions:
                self.programs[each].run(self.buffers[each])
            return results

        return call


def calls_of(puzzle: Puzzle, variants: tuple[str, ...]) -> dict[str, tuple[Call, ...]]:
    """Return the calls of the graph of each pass of each variant, "fused forward" and so on."""
    return {
        f"{variant} {direction}": (puzzle.variants[variant][number],)
        for variant in variants
        for number, direction in enumerate(DIRECTIONS)
    }


def compile_graphs(
    puzzle: Puzzle, variants: tuple[str, ...], dtype: str, target: Target
) -> dict[str, graphs.Program]:
    """Compile the graphs of the solution's passes together."""
    package = roots.op_package(roots.solutions(), puzzle.name)
    return graphs.load_each(package, calls_of(puzzle, variants), dtype, target.device)
