"""Training models side by side that differ in nothing but their layers: the loop that `--demo` runs.

All start from the same parameters, see the same batches of the workbook's own chapters and take turns step by step, so
that their losses and their step times compare. Random weights, no download; the solution's kernels.
"""

import contextlib
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from harness.bench.timing import CudaClock, WallClock
from harness.errors import BadUse
from harness.puzzles.p22.demo_model import CharacterModel, Pair

OURS, PLAIN = "LayerNormLinear", "plain PyTorch"


@dataclass(frozen=True)
class Recipe:
    """How models train, beside their sizes.

    Attributes:
        bytes: Whether a token is a byte of the text, else one of the characters that are in it.
        optimizer: Arguments of AdamW.
        warm_up: Steps in which the learning rate grows to its full size.
    """

    bytes: bool
    optimizer: dict
    warm_up: int = 1


@dataclass(frozen=True)
class Options:
    """What to train. `seconds` is the time from the start after which training stops early."""

    recipe: Recipe
    steps: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    precision: str = "float32"
    seed: int = 22
    seconds: float = math.inf
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """In which the products are computed."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16


@dataclass(frozen=True)
class Text:
    """The text as numbers [length], uint8 or int64, and how many different ones there can be."""

    tokens: torch.Tensor
    vocabulary: int


@dataclass
class Trainee:
    """A model with its optimizer, and what was seen of it: losses, microseconds of each step, bytes at the peak."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int = 0


# ---- Models and data ----------------------------------------------------------------------------------------


def make_model(options: Options, vocabulary: int, pair: Pair) -> CharacterModel:
    """A model from the seed; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        sizes = vocabulary, options.context, options.width, options.heads, options.layers
        return CharacterModel(*sizes, pair)


def make_trainees(options: Options, models: dict[str, CharacterModel]) -> dict[str, Trainee]:
    """The models on their device, each with an optimizer."""
    for model in models.values():
        model.to(options.device)
    return {
        name: Trainee(model, torch.optim.AdamW(model.parameters(), **options.recipe.optimizer))
        for name, model in models.items()
    }


def read_text(folder: Path, options: Options) -> Text:
    """All chapters. Raises BadUse, saying where it looked, where there is none or too little for one excerpt."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md")))
    if not text:
        raise BadUse(
            f"what is trained on is the workbook's chapters, and there is no Markdown file under {folder}"
        )
    unit = "bytes" if options.recipe.bytes else "characters"
    content = text.encode() if options.recipe.bytes else text
    if len(content) <= options.context + 1:
        raise BadUse(
            f"an excerpt needs more than {options.context + 1} {unit} of text, {folder} holds {len(content)}"
        )
    if isinstance(content, bytes):
        return Text(torch.frombuffer(bytearray(content), dtype=torch.uint8), 256)
    alphabet = {character: number for number, character in enumerate(sorted(set(content)))}
    return Text(torch.tensor([alphabet[character] for character in content]), len(alphabet))


def batches(text: torch.Tensor, options: Options) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random excerpts [batch, context], int64, and the tokens that follow each place of them."""
    generator = torch.Generator().manual_seed(options.seed)
    within = torch.arange(options.context + 1)
    while True:
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
        excerpt = text[starts + within].long().to(options.device)
        yield excerpt[:, :-1].contiguous(), excerpt[:, 1:].contiguous()


# ---- Training -----------------------------------------------------------------------------------------------


def training_progress(console: Console) -> Progress:
    """A bar of steps, with the field `losses` after it; shown on a terminal only, and gone afterwards."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def train(console: Console, options: Options, trainees: dict[str, Trainee], tokens: torch.Tensor) -> None:
    """Trains the models in lockstep, in a new order at every step."""
    deadline = time.monotonic() + options.seconds
    clock = CudaClock() if options.device.type == "cuda" else WallClock()
    order = random.Random(options.seed)
    with training_progress(console) as progress:
        task = progress.add_task("compiling the kernels", total=options.steps, losses="")
        for number, batch in zip(range(options.steps), batches(tokens, options), strict=False):
            for name in order.sample(list(trainees), len(trainees)):
                one_step(trainees[name], batch, number, options, clock)
            losses = "  ".join(f"{name} {one.losses[-1]:.4f}" for name, one in trainees.items())
            progress.update(task, advance=1, description="training", losses=losses)
            if time.monotonic() > deadline:
                break


def one_step(trainee: Trainee, batch, number: int, options: Options, clock) -> None:
    """One step of one model: its loss, its time, its peak of memory."""
    for group in trainee.optimizer.param_groups:
        group["lr"] = options.recipe.optimizer["lr"] * min(1.0, (number + 1) / options.recipe.warm_up)
    losses: list[torch.Tensor] = []
    clock.synchronize()
    with peak_of(trainee, options.device):
        microseconds = clock.elapsed(lambda: losses.append(step(trainee, batch, options)), 1)
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
