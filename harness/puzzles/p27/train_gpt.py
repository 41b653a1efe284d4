"""`p27 --train --size`: train a GPT with the workbook's layers or with autograd, on the book's bytes.

On one machine, the same seed gives the same losses, bit for bit.
"""

import csv
import hashlib
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from harness.console import print_lines
from harness.errors import BadUse
from harness.puzzles.p27 import step_parts
from harness.puzzles.p27.excerpts import Options, plot, training_progress
from harness.puzzles.p27.excerpts import excerpts as excerpts_of
from harness.puzzles.p27.gpt import SIZES, Sizes, State
from harness.puzzles.p27.gpt_autograd import ByAutograd
from harness.puzzles.p27.gpt_step import ByHand, Pass, make_trainer
from harness.puzzles.p27.running import no_autograd
from harness.puzzles.p27.writing import write

HAND, AUTOGRAD = "hand", "autograd"
WARM_UP = 20
"""The number of warm-up steps of the learning rate."""
BYTES = 256


@dataclass(frozen=True)
class Plan:
    """The default training options for a size."""

    steps: int
    rate: float


PLANS = {"tiny": Plan(600, 3e-3), "gpt2": Plan(300, 6e-4)}


def select_device(name: str | None) -> torch.device:
    """Return the requested device, by default a GPU if there is one. Raises BadUse if there is no GPU."""
    if name == "gpu" and not torch.cuda.is_available():
        raise BadUse("--device gpu: torch sees no GPU here; --device cpu runs the same step")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda:0")


def excerpts(sizes: Sizes, seed: int, device: torch.device, chapters: Path) -> Iterator[Tensor]:
    """Yield excerpts of the text, [batch, context + 1], forever."""
    options = Options(
        steps=1,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        context=sizes.context,
        batch=sizes.batch,
        seed=seed,
        device=device,
    )
    return excerpts_of(options, chapters)


def compute_rate(plan: Plan, step: int) -> float:
    return plan.rate * min(1.0, step / WARM_UP)


def sample_text(state: State, count: int, seed: int) -> str:
    trained = ByHand(state)

    def logits_of(tokens: Tensor) -> Tensor:
        p = trained.p
        last = Pass(state.sizes, p).stream(tokens.to(state.master.device))[-1:]
        y, _ = step_parts.layernorm(last, p["ln_f.weight"], p["ln_f.bias"])
        return (y @ p["token"][:BYTES].T)[0].float().cpu()

    with no_autograd():
        return write(logits_of, state.sizes.context, count, seed)


def train(
    console: Console, flags: Namespace, chapters: Path, sample: int, sizes: Sizes | None = None
) -> list[float]:
    """Train, draw the losses, and print a sample. Raises BadUse if the loss is not finite."""
    device, plan = select_device(flags.device), PLANS[flags.size]
    sizes = sizes or SIZES[flags.size]
    state = State.load(flags.load, sizes, device) if flags.load else State.begin(sizes, flags.seed, device)
    steps = plan.steps if flags.steps is None else flags.steps
    count = sum(t.numel() for t in state.parameters.values())
    shape = f"{sizes.layers} blocks of {sizes.width} channels, {count:,} parameters"
    print_lines(
        console,
        [f"{shape}; {sizes.batch} x {sizes.context} bytes of the book at every step, on {device.type}"],
    )
    if flags.save:
        state.save(flags.save)  # now, so that an unwritable path is reported before the training
    save_losses(flags.csv, [], state.steps)  # likewise
    # A resumed run gets the same excerpts as an uninterrupted one.
    texts = islice(excerpts(sizes, flags.seed, device, chapters), state.steps, None)
    losses = run(console, state, flags, plan, steps, texts)
    if flags.save:
        state.save(flags.save)
    save_losses(flags.csv, losses, state.steps)
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    lines = [
        *plot(f"by {flags.by}", losses),
        f"loss {first:.3f} in the first ten steps, {last:.3f} in the last ten of {len(losses)}; the parameters' bits are {hash_tensor(state.master)}",
        "it writes:",
        *(f"   {line}" for line in sample_text(state, sample, flags.seed).splitlines()),
    ]
    print_lines(console, lines)
    return losses


def save_losses(path: Path | None, losses: list[float], steps: int) -> None:
    """Write the last steps' losses as CSV with all digits. Raises BadUse if the file cannot be written."""
    if path is None:
        return
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("step", "loss"), *enumerate(losses, steps - len(losses) + 1)])
    except OSError as error:
        raise BadUse(f"--csv {path}: {error.strerror}") from error


def hash_tensor(tensor: Tensor) -> str:
    """Return eight hex digits of a hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().numpy().data).hexdigest()[:8]


def run(
    console: Console, state: State, flags: Namespace, plan: Plan, steps: int, texts: Iterator[Tensor]
) -> list[float]:
    """Return the losses of `steps` steps, or fewer if time runs out."""
    trained = make_trainer(state) if flags.by == HAND else ByAutograd(state)
    begun, losses = time.monotonic(), []
    with training_progress(console) as progress:
        task = progress.add_task(f"training by {flags.by}", total=steps, losses="")
        for _, excerpt in zip(range(steps), texts, strict=False):
            loss = run_step(trained, excerpt, compute_rate(plan, state.steps + 1))
            losses.append(loss)
            if not math.isfinite(loss):
                raise BadUse(f"the loss of step {state.steps} is {loss}")
            progress.update(task, advance=1, losses=f"loss {loss:.3f}")
            if time.monotonic() - begun > flags.seconds:
                break
    return losses


def run_step(trained: ByHand | ByAutograd, excerpt: Tensor, rate: float) -> float:
    """Run a training step, by hand with autograd disabled, or with autograd."""
    if isinstance(trained, ByAutograd):
        return float(trained.step(excerpt, rate))
    with no_autograd():
        return float(trained.step(excerpt, rate))
