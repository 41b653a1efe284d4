"""The record `first_block`: in the runs of `first_steps`, what all places share of the first block's output, before each step."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from book.measure.first_steps import SEEDS, STEPS
from book.measure.shared import write
from harness.check.python_files import load
from harness.puzzles.p27.running import Module, no_autograd
from harness.puzzles.p27.spec import PUZZLE
from harness.puzzles.p27.train import TINY, Tensors, Training, excerpts
from harness.toolchain import roots


def shared(module: Module, tokens: torch.Tensor, p: Tensors) -> torch.Tensor:
    """The mean over all places of the residual stream after the first block."""
    tape = module["Tape"]()
    x = module["Embedding"].forward(tokens, tape, "embedding", p)
    return module["Block"].forward(x, tape, "block0", p).mean((0, 1))


def rows() -> Iterator[dict]:
    """A row for each step: the size of that vector, and its cosine with the one before."""
    module = load(roots.solutions() / PUZZLE.name / PUZZLE.rung("tape").file)
    for seed in SEEDS:
        options = replace(TINY, seed=seed)
        training, before = Training.begin(options), None
        for step, excerpt in enumerate(islice(excerpts(options, roots.book() / "src"), STEPS), 1):
            now = shared(module, excerpt[:, :-1], training.p)
            cosine = torch.cosine_similarity(now, now if before is None else before, 0)
            yield {
                "seed": seed,
                "step": step,
                "size": f"{float(now.norm()):.4f}",
                "turn": f"{float(cosine):.4f}",
            }
            training.step(module, excerpt)
            before = now


if __name__ == "__main__":
    torch.set_num_threads(1)  # small products: threads only wait for each other
    with no_autograd():
        write(rows())
