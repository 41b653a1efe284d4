"""Training models side by side that differ in nothing but their layers.

All start from the same parameters, see the same batches of the workbook's own chapters and take turns step by step, so
that their losses and their step times compare. Random weights, no download; the solution's kernels.
"""

import contextlib
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from book.measure.character_model import CharacterModel, Pair
from harness.bench.timing import CudaClock, WallClock
from harness.puzzles.p27 import excerpts

OURS, PLAIN = "LayerNormLinear", "plain PyTorch"
SIZES = ("steps", "layers", "width", "heads", "context", "batch")
BYTES = 256
WINDOW = 10
"""Losses are compared as means of this many steps."""


@dataclass(frozen=True)
class Options(excerpts.Options):
    """What to train, and how.

    Attributes:
        optimizer: Arguments of AdamW.
        warm_up: Steps in which the learning rate grows to its full size.
        precision: "float32", "autocast" or "bfloat16".
    """

    optimizer: dict = field(default_factory=lambda: {"lr": 3e-3})
    warm_up: int = 1
    precision: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """In which the products are computed."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16


@dataclass
class Trainee:
    """A model with its optimizer, and what was seen of it: losses, microseconds of each step, bytes at the peak."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int = 0


# ---- Models and data ----------------------------------------------------------------------------------------


def make_model(options: Options, pair: Pair) -> CharacterModel:
    """A model from the seed; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        sizes = BYTES, options.context, options.width, options.heads, options.layers
        return CharacterModel(*sizes, pair)


def make_trainees(options: Options, models: dict[str, CharacterModel]) -> dict[str, Trainee]:
    """The models on their device, each with an optimizer."""
    for model in models.values():
        model.to(options.device)
    return {
        name: Trainee(model, torch.optim.AdamW(model.parameters(), **options.optimizer))
        for name, model in models.items()
    }


def batches(chapters: Path, options: Options) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random excerpts [batch, context], int64, and the bytes that follow each place of them."""
    for excerpt in excerpts.excerpts(options, chapters):
        yield excerpt[:, :-1].contiguous(), excerpt[:, 1:].contiguous()


# ---- Training -----------------------------------------------------------------------------------------------


def train(console: Console, options: Options, trainees: dict[str, Trainee], chapters: Path) -> None:
    """Trains the models in lockstep, in a new order at every step."""
    clock = CudaClock() if options.device.type == "cuda" else WallClock()
    order = random.Random(options.seed)
    with excerpts.training_progress(console) as progress:
        task = progress.add_task("compiling the kernels", total=options.steps, losses="")
        for number, batch in zip(range(options.steps), batches(chapters, options), strict=False):
            for name in order.sample(list(trainees), len(trainees)):
                one_step(trainees[name], batch, number, options, clock)
            losses = "  ".join(f"{name} {one.losses[-1]:.4f}" for name, one in trainees.items())
            progress.update(task, advance=1, description="training", losses=losses)


def one_step(trainee: Trainee, batch, number: int, options: Options, clock) -> None:
    """One step of one model: its loss, its time, its peak of memory."""
    for group in trainee.optimizer.param_groups:
        group["lr"] = options.optimizer["lr"] * min(1.0, (number + 1) / options.warm_up)
    losses: list[torch.Tensor] = []
    clock.synchronize()
    with peak_of(trainee, options.device):
        microseconds = clock.measure(lambda: losses.append(step(trainee, batch, options)), 1)
    trainee.times.append(microseconds)
    trainee.losses.append(losses[0].item())


def step(trainee: Trainee, batch: tuple[torch.Tensor, torch.Tensor], options: Options) -> torch.Tensor:
    """Forward, backward and optimizer; returns the loss before the step."""
    given, wanted = batch
    with torch.autocast(options.device.type, torch.bfloat16, enabled=options.precision == "autocast"):
        logits = trainee.model(given)
    loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
    trainee.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@contextlib.contextmanager
def peak_of(trainee: Trainee, device: torch.device) -> Iterator[None]:
    """Notes the most memory that a step has in use above what was in use before it; 0 on a CPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    trainee.peak = torch.cuda.max_memory_allocated() - before


def windows(losses: list[float]) -> list[float]:
    """The means of consecutive WINDOWs; what is left over at the end is a shorter one."""
    return [statistics.fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference between the windows of two curves."""
    pairs = zip(windows(one), windows(other), strict=True)
    return max(abs(a - b) / b if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)
