"""Benchmark a variant of a puzzle by calling its MAX graphs directly.

Only the column `waited` is measured, since CUDA graphs and PyTorch's events do not cover MAX's stream.
"""

from collections.abc import Mapping

import torch

from harness.bench.benchmark import BuiltCandidate, Unavailable
from harness.bench.benchmark import Call as TimedCall
from harness.devices import graphs, targets
from harness.spec.ops import Call
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots

DIRECTIONS = ("forward", "backward")


class MaxCandidate(BuiltCandidate):
    """A variant's forward and backward graphs, with preallocated buffers.

    All `variants` are compiled together, because compile time depends little on the number of graphs.
    `shapes` maps each result to its shape. Raises Unavailable if PyTorch uses a GPU that MAX does not
    support.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        variants: tuple[str, ...],
        variant: str,
        inputs: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        target = (
            targets.find_gpu_target() if next(iter(inputs.values())).is_cuda else targets.make_cpu_target()
        )
        if target is None:
            raise Unavailable("MAX sees no GPU")
        arguments = {name: tensor.detach().cpu().contiguous() for name, tensor in inputs.items()}
        dtype = str(next(iter(inputs.values())).dtype).removeprefix("torch.")
        package = roots.make_op_package(roots.get_solutions(), puzzle.name)
        programs = graphs.load_graphs(package, list_calls(puzzle, variants), dtype, target.device)
        self.device = target.device
        self.programs = {direction: programs[f"{variant} {direction}"] for direction in DIRECTIONS}
        outputs, forward = graphs.make_buffers(puzzle, self.programs["forward"], target, arguments)
        arguments |= {name.removeprefix(f"{variant}."): tensor for name, tensor in outputs.items()}
        _, backward = graphs.make_buffers(puzzle, self.programs["backward"], target, arguments)
        # Both graphs share the buffers of tensors saved for backward.
        backward |= {name: forward[f"{variant}.{name}"] for name in puzzle.list_saved_quantities(variant)}
        self.buffers = {"forward": forward, "backward": backward}
        results = {f"{variant}.{name}": shape for name, shape in shapes.items()}
        self.results = {
            direction: tuple(
                torch.from_dlpack(buffers[name]).view(results[name]) for name in results if name in buffers
            )
            for direction, buffers in self.buffers.items()
        }

    def wait(self) -> None:
        """Wait until MAX's stream is idle."""
        self.device.synchronize()

    def prepare(self, direction: str) -> TimedCall:
        """Return a callable that starts one pass without synchronization and returns the graphs' buffers."""
        directions = {"backward": ("backward",), "both": DIRECTIONS}.get(direction, ("forward",))
        results = tuple(result for graph in directions for result in self.results[graph])
        if direction == "backward":
            self.programs["forward"].run(self.buffers["forward"])

        def call() -> tuple[torch.Tensor, ...]:
            for graph in directions:
                self.programs[graph].run(self.buffers[graph])
            return results

        return call


def list_calls(puzzle: Puzzle, variants: tuple[str, ...]) -> dict[str, tuple[Call, ...]]:
    """Map each graph's name, such as "fused forward", to its calls."""
    return {
        f"{variant} {direction}": (puzzle.variants[variant][number],)
        for variant in variants
        for number, direction in enumerate(DIRECTIONS)
    }
