"""The record `first_steps`: the first steps of `p27 --train --solution` from many seeds, with what the model knows before each of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from book.measure.shared import write
from harness.check.python_files import load
from harness.puzzles.p27 import train
from harness.puzzles.p27.running import Module, no_autograd
from harness.puzzles.p27.spec import PUZZLE
from harness.toolchain import roots

SEEDS, STEPS = range(1, 25), 30
PARTS = (1, 2)
"""The learning rate is that of the command, or its half."""


def known(
    module: Module, tokens: torch.Tensor, p: train.Tensors, common: torch.Tensor | None
) -> tuple[dict[str, float], torch.Tensor]:
    """What is the same at every place of what the head reads, and what a space is given on average; then that vector.

    `shared` is its part of the whole, from 0 to 1, and `turn` the cosine with `common`, the vector of the step before.
    """
    tape = module["Tape"]()
    logits = module["logits_of"](tokens, tape, p)
    (read,) = tape.take("head")
    rows = read.flatten(0, 1)
    mean = rows.mean(0)
    return {
        "shared": float(mean.norm() / rows.square().sum(1).mean().sqrt()),
        "turn": float(torch.cosine_similarity(mean, mean if common is None else common, 0)),
        "space": float(logits.softmax(-1)[..., ord(" ")].mean()),
    }, mean


def loss_of(module: Module, excerpt: torch.Tensor, p: train.Tensors) -> float:
    """The loss of an excerpt, without a step."""
    return float(module["forward"](excerpt[:, :-1], excerpt[:, 1:], module["Tape"](), p))


def rows() -> Iterator[dict]:
    """A row for each step: its loss, and that of the excerpts of the step before, with the same parameters."""
    module = load(roots.solutions() / PUZZLE.name / PUZZLE.rung("tape").file)
    rate = train.RATE
    for part in PARTS:
        train.RATE = rate / part
        for seed in SEEDS:
            options = replace(train.TINY, seed=seed)
            training, last, common = train.Training.begin(options), None, None
            excerpts = islice(train.excerpts(options, roots.book() / "src"), STEPS)
            for step, excerpt in enumerate(excerpts, 1):
                again = loss_of(module, excerpt if last is None else last, training.p)
                found, common = known(module, excerpt[:, :-1], training.p, common)
                training.step(module, excerpt)
                last, numbers = excerpt, {"loss": training.losses[-1], "again": again, **found}
                words = {name: f"{number:.4f}" for name, number in numbers.items()}
                yield {"rate": train.RATE, "seed": seed, "step": step, **words}


if __name__ == "__main__":
    torch.set_num_threads(1)  # small products: threads only wait for each other
    with no_autograd():
        write(rows())
