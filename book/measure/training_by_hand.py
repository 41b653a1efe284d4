"""The record `training_by_hand`: the loss of every step of `p27 --train --solution`, and what the model writes at some of them."""

import csv
import sys
from pathlib import Path

import torch

from harness.check.python_files import load
from harness.puzzles.p27.running import no_autograd
from harness.puzzles.p27.spec import PUZZLE
from harness.puzzles.p27.train import TINY, Training, excerpts
from harness.puzzles.p27.writing import write
from harness.toolchain import roots

SAMPLES = (1, 30, 100, 300, TINY.steps)
"""The steps after which it writes."""
BYTES = 150


def main() -> None:
    """Trains and writes the table."""
    torch.set_num_threads(1)  # small products: threads only wait for each other
    root = roots.solutions()
    module = load(root / PUZZLE.name / PUZZLE.rung("tape").file)
    training = Training.begin(TINY)
    with Path(sys.argv[1]).open("w", newline="", encoding="utf-8") as file, no_autograd():
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", "loss", "wrote"])
        for step, excerpt in zip(
            range(1, TINY.steps + 1), excerpts(TINY, roots.book() / "src"), strict=False
        ):
            training.step(module, excerpt)
            wrote = ""
            if step in SAMPLES:
                wrote = write(
                    lambda tokens: module["logits_of"](tokens, module["Tape"](), training.p)[0, -1],
                    TINY.context,
                    BYTES,
                    TINY.seed,
                )
            file.flush()
            table.writerow([step, f"{training.losses[-1]:.4f}", " ".join(wrote.split())])


if __name__ == "__main__":
    main()
