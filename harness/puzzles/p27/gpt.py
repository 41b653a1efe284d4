"""GPT-2 for the step on kernels: its sizes, and its tensors, which are in one contiguous buffer per kind.

Matrices come first, so that weight decay ends at one index, and AdamW is one pass over a buffer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import UsageError
from harness.puzzles.p27.autograd import Tensors, init_parameters

ALIGNMENT = 16
"""Alignment of tensors in a buffer, in elements: vectorized loads need 16-byte alignment."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT and of a step: `batch` excerpts of `context` tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def draw_parameters(self, seed: int) -> Tensors:
        """Return GPT-2's initial parameters in float32."""
        sizes = {name: getattr(self, name) for name in ("layers", "width", "vocabulary", "context")}
        return init_parameters(**sizes, seed=seed, dtype=torch.float32)


SIZES = {
    "tiny": Sizes(layers=3, width=96, heads=4, vocabulary=256, context=64, batch=16),
    # 50,257 tokens, and unused ones so that rows of logits begin at multiples of 128 bytes.
    "gpt2": Sizes(layers=12, width=768, heads=12, vocabulary=50304, context=1024, batch=16),
}


def get_working_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of activations, gradients and matmuls: bfloat16 on a GPU, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class BufferLayout:
    """The layout of a model's tensors in a buffer.

    Attributes:
        num_elements: The size of a buffer, including the zero padding between tensors.
        num_decayed: The number of leading elements with weight decay, those of the matrices.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        ordered = sorted(parameters, key=lambda name: parameters[name].dim() < 2)
        self.entries: dict[str, tuple[int, torch.Size]] = {}
        self.num_elements = self.num_decayed = 0
        for name in ordered:
            self.entries[name] = self.num_elements, parameters[name].shape
            self.num_elements += -(-parameters[name].numel() // ALIGNMENT) * ALIGNMENT
            if parameters[name].dim() > 1:
                self.num_decayed = self.num_elements

    def get_padding(self, buffer: Tensor) -> list[Tensor]:
        ends = [offset + shape.numel() for offset, shape in self.entries.values()]
        begins = [*(offset for offset, _ in self.entries.values()), self.num_elements][1:]
        return [buffer[end:begin] for end, begin in zip(ends, begins, strict=True) if end < begin]

    def make_views(self, buffer: Tensor) -> Tensors:
        return {
            name: buffer[offset : offset + shape.numel()].view(shape)
            for name, (offset, shape) in self.entries.items()
        }


@dataclass
class State:
    """A training run between two steps: float32 parameters, AdamW's two running means, and the step count.

    Attributes:
        sizes: The model's sizes.
        layout: The layout of the three buffers.
        master, mean, square: [num_elements], float32: the parameters, and the running means of gradients and their squares.
        steps: The number of steps so far.
    """

    sizes: Sizes
    layout: BufferLayout
    master: Tensor
    mean: Tensor
    square: Tensor
    steps: int = 0

    @classmethod
    def initialize(cls, sizes: Sizes, seed: int, device: torch.device) -> "State":
        """Return a state with GPT-2's initial parameters, the same on every device."""
        initial = sizes.draw_parameters(seed)
        layout = BufferLayout(initial)
        master, mean, square = allocate_buffers(layout.num_elements, device)
        for name, view in layout.make_views(master).items():
            view.copy_(initial[name])
        return cls(sizes, layout, master, mean, square)

    @property
    def parameters(self) -> Tensors:
        return self.layout.make_views(self.master)

    # ---- State files --------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the tensors by name, for torch.load. Raises UsageError if the file cannot be written."""
        buffers = {"parameters": self.master, "mean": self.mean, "square": self.square}
        by_name = {
            kind: {name: view.cpu() for name, view in self.layout.make_views(buffer).items()}
            for kind, buffer in buffers.items()
        }
        try:
            with path.open("wb") as file:
                torch.save({"sizes": asdict(self.sizes), "steps": self.steps, **by_name}, file)
        except OSError as error:
            raise UsageError(f"--save {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path, sizes: Sizes, device: torch.device) -> "State":
        """Read a state that `save` wrote. Raises UsageError if the file is missing or from another model."""
        try:
            with path.open("rb") as file:
                contents = torch.load(file, map_location="cpu", weights_only=True)
            saved_sizes = Sizes(**contents["sizes"])
            layout = BufferLayout(contents["parameters"])
            state = cls(
                saved_sizes, layout, *allocate_buffers(layout.num_elements, device), contents["steps"]
            )
            for kind, buffer in (
                ("parameters", state.master),
                ("mean", state.mean),
                ("square", state.square),
            ):
                for name, view in state.layout.make_views(buffer).items():
                    view.copy_(contents[kind][name])
        except OSError as error:
            raise UsageError(f"--load {path}: {error.strerror}") from error
        except Exception as error:  # from zip or pickle, or a missing key
            raise UsageError(f"--load {path}: no state file of p27 --train --save") from error
        if replace(saved_sizes, batch=sizes.batch) != sizes:
            raise UsageError(f"--load {path}: holds {saved_sizes}, but --size has {sizes}")
        return replace(state, sizes=sizes)


def allocate_buffers(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    master, mean, square = torch.zeros(3, count, device=device)
    return master, mean, square
