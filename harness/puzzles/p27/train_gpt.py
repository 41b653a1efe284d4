"""`p27 --train --size`: train a GPT with the workbook's layers or with autograd, on the book's bytes.

On one machine, the same seed reproduces the losses bit for bit.
"""

import csv
import hashlib
import math
from argparse import Namespace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from harness.console import print_lines
from harness.errors import UsageError
from harness.puzzles.p27 import step_parts, training
from harness.puzzles.p27.gpt import SIZES, Sizes, State
from harness.puzzles.p27.gpt_autograd import AutogradTrainer
from harness.puzzles.p27.gpt_step import ManualPass, ManualTrainer, make_trainer
from harness.puzzles.p27.running import no_autograd

HAND, AUTOGRAD = "hand", "autograd"
BYTE_VALUES = 256


def select_device(name: str | None) -> torch.device:
    """Return the requested device, by default a GPU if there is one. Raises UsageError if there is no GPU."""
    if name == "gpu" and not torch.cuda.is_available():
        raise UsageError("--device gpu: torch sees no GPU here; --device cpu runs the same step")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda:0")


def sample_text(state: State, num_bytes: int, seed: int) -> str:
    trainer = ManualTrainer(state)

    def compute_logits(tokens: Tensor) -> Tensor:
        p = trainer.p
        last = ManualPass(state.sizes, p).stream(tokens.to(state.master.device))[-1:]
        y, _ = step_parts.layernorm(last, p["ln_f.weight"], p["ln_f.bias"])
        return (y @ p["token"][:BYTE_VALUES].T)[0].float().cpu()

    with no_autograd():
        return training.generate_text(compute_logits, state.sizes.context, num_bytes, seed)


def train(
    console: Console, flags: Namespace, chapters: Path, sample_bytes: int, sizes: Sizes | None = None
) -> list[float]:
    """Train, draw the losses, and print a sample. Raises UsageError if the loss is not finite."""
    device, sizes = select_device(flags.device), sizes or SIZES[flags.size]
    state = (
        State.load(flags.load, sizes, device) if flags.load else State.initialize(sizes, flags.seed, device)
    )
    steps = training.STEPS[flags.size] if flags.steps is None else flags.steps
    print_lines(console, [f"{training.describe_model(sizes, state.parameters)}, on {device.type}"])
    if flags.save:
        state.save(flags.save)  # now, so that an unwritable path is reported before the training
    save_losses(flags.csv, [], state.steps)  # for the same reason
    # A resumed run gets the same excerpts as an uninterrupted one.
    texts = islice(training.draw_excerpts(sizes, flags.seed, chapters, device), state.steps, None)
    trainer = make_trainer(state) if flags.by == HAND else AutogradTrainer(state)

    def step(excerpt: Tensor) -> float:
        loss = run_step(trainer, excerpt, training.compute_learning_rate(flags.size, state.steps + 1))
        if not math.isfinite(loss):
            raise UsageError(f"the loss of step {state.steps} is {loss}")
        return loss

    losses = training.run_steps(console, flags.by, step, texts, steps, flags.seconds)
    if flags.save:
        state.save(flags.save)
    save_losses(flags.csv, losses, state.steps)
    digest = hashlib.sha256(state.master.detach().cpu().numpy().data).hexdigest()[:8]
    text = sample_text(state, sample_bytes, flags.seed)
    training.print_report(console, flags.by, losses, text, f"; the parameters' bits are {digest}")
    return losses


def save_losses(path: Path | None, losses: list[float], steps: int) -> None:
    """Write the last steps' losses as CSV with all digits. Raises UsageError if the file is not writable."""
    if path is None:
        return
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("step", "loss"), *enumerate(losses, steps - len(losses) + 1)])
    except OSError as error:
        raise UsageError(f"--csv {path}: {error.strerror}") from error


def run_step(trainer: ManualTrainer | AutogradTrainer, excerpt: Tensor, learning_rate: float) -> float:
    """Run a training step, by hand with autograd disabled, or with autograd."""
    if isinstance(trainer, AutogradTrainer):
        return float(trainer.step(excerpt, learning_rate))
    with no_autograd():
        return float(trainer.step(excerpt, learning_rate))
