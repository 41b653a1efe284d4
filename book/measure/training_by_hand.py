"""The record `training_by_hand`: the loss of every step of `p27 --train --solution`, and what the model writes at some of them."""

from collections.abc import Iterator

import torch

from book.measure.shared import write as write_rows
from harness.check.python_files import load_module
from harness.puzzles.p27.running import no_autograd
from harness.puzzles.p27.spec import PUZZLE
from harness.puzzles.p27.train import SEED, TINY, Training
from harness.puzzles.p27.training import STEPS, draw_excerpts, generate_text
from harness.toolchain import roots

SAMPLES = (1, 30, 100, 300, STEPS["tiny"])
"""The steps after which it writes."""
BYTES = 150


def rows() -> Iterator[dict]:
    """A row for each step."""
    module = load_module(roots.get_solutions() / PUZZLE.name / PUZZLE.find_rung("tape").file)
    training = Training.initialize(TINY)
    texts = draw_excerpts(TINY, SEED, roots.get_book() / "src")
    steps = zip(range(1, STEPS["tiny"] + 1), texts, strict=False)

    def logits(tokens):
        return module["logits_of"](tokens, module["Tape"](), training.p)[0, -1]

    for step, excerpt in steps:
        training.step(module, excerpt)
        wrote = generate_text(logits, TINY.context, BYTES, SEED) if step in SAMPLES else ""
        yield {"step": step, "loss": f"{training.losses[-1]:.4f}", "wrote": " ".join(wrote.split())}


if __name__ == "__main__":
    torch.set_num_threads(1)  # small products: threads only wait for each other
    with no_autograd():
        write_rows(rows())
