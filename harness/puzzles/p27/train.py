"""`p27 --train`: train a tiny GPT with the learner's own tape on the bytes of the book, and sample from it.

On one machine, the same seed reproduces the losses bit for bit.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from harness.check.python_files import describe_exception, load_module
from harness.console import Parser, print_lines
from harness.errors import DamagedFile, Unsolved, UsageError, WorkbookError
from harness.learner.exercise import Exercise
from harness.puzzles.p27 import train_gpt, training
from harness.puzzles.p27.autograd import Tensors
from harness.puzzles.p27.gpt import SIZES, Sizes
from harness.puzzles.p27.running import Module, no_autograd
from harness.puzzles.p27.spec import PUZZLE
from harness.toolchain import roots

SAMPLE_BYTES = 300
"""Number of bytes that the model writes at the end."""
TINY, SEED = SIZES["tiny"], 27
"""The model that the tape trains, and the default seed."""


@dataclass
class Training:
    """A training run: parameters, gradients, AdamW's running means, and the losses so far."""

    p: Tensors
    grads: Tensors
    moments: dict[str, tuple[Tensor, Tensor]]
    losses: list[float]

    @classmethod
    def initialize(cls, sizes: Sizes, seed: int = SEED) -> "Training":
        p = sizes.draw_parameters(seed)
        zeros = [{name: torch.zeros_like(t) for name, t in p.items()} for _ in range(3)]
        return cls(p, zeros[0], {name: (zeros[1][name], zeros[2][name]) for name in p}, [])

    def step(self, module: Module, excerpt: Tensor) -> float:
        """Run one training step; return its loss. Raises UsageError if the loss is not finite."""
        step = len(self.losses) + 1
        learning_rate = training.compute_learning_rate("tiny", step)
        self.losses.append(
            float(module["step"](excerpt, self.p, self.grads, self.moments, step, learning_rate))
        )
        if not math.isfinite(self.losses[-1]):
            raise UsageError(f"the loss of step {step} is {self.losses[-1]}: see p27 --gate step")
        return self.losses[-1]


def load_tape(flags) -> tuple[Path, Module]:
    """Load the solution's or the learner's tape. Raises Unsolved if any of its blanks is untouched."""
    exercise = Exercise(PUZZLE, PUZZLE.find_rung("tape"), roots.get_solutions() if flags.solution else None)
    if unsolved := [id for id, blank in exercise.read_blanks().items() if not blank.size]:
        raise Unsolved(
            f"{exercise.path}: {', '.join(unsolved)} still to be written; --solution runs the solution's"
        )
    return exercise.path, load_module(exercise.path)


@contextlib.contextmanager
def report_learner_errors(path: Path) -> Iterator[None]:
    """Convert an exception in the learner's code to DamagedFile, as one line with its location."""
    try:
        yield
    except WorkbookError:
        raise
    except Exception as error:
        raise DamagedFile(describe_exception(error, path)) from error


def parse_seed(text: str) -> int:
    """Parse a seed for PyTorch, an integer of at most 63 bits. Raises UsageError for anything else."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise UsageError(f"--seed {text}: must be a whole number from 0 to 2**63 - 1")
    return int(text)


def make_parser() -> Parser:
    parser = Parser(prog="p27 --train", description="Train a tiny GPT by your own tape.")
    parser.add_argument("--solution", action="store_true", help="with the solution's file in place of yours")
    parser.add_argument(
        "--steps", type=int, help=f"default: {training.STEPS['tiny']}, of GPT-2 {training.STEPS['gpt2']}"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="maximum training time (default: %(default)g)"
    )
    parser.add_argument(
        "--seed", type=parse_seed, default=SEED, help="of parameters and excerpts (default: %(default)s)"
    )
    add_size_flags(parser)
    parser.add_argument(
        "--by",
        choices=(train_gpt.HAND, train_gpt.AUTOGRAD),
        help="with --size: the step by hand (the default), or PyTorch's",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="with --size: write parameters and AdamW's means at the end"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="with --size: write the loss of every step")
    return parser


def add_size_flags(parser: Parser) -> None:
    parser.add_argument(
        "--size",
        choices=SIZES,
        help="instead of your tape: the step of the workbook's layers, for a GPT of this size",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="with --size: the device (default: a GPU if PyTorch sees one)",
    )
    parser.add_argument(
        "--load", type=Path, metavar="FILE", help="with --size: start from a file that --save wrote"
    )


def check_size_flags(flags, *size_flags: str) -> None:
    for name in () if flags.size else ("device", "load", *size_flags):
        if getattr(flags, name) is not None:
            raise UsageError(f"--{name}: only with --size")


def main(console: Console, arguments: Sequence[str] = (), chapters: Path | None = None) -> int:
    """Train on text, by default the book's chapters, draw the losses, and print a sample."""
    flags = make_parser().parse_args(arguments)
    check_size_flags(flags, "by", "save", "csv")
    if flags.steps is not None and flags.steps < 1:
        raise UsageError(f"--steps {flags.steps}: must be at least 1")
    if not flags.seconds > 0:
        raise UsageError(f"--seconds {flags.seconds:g}: must be above 0")
    chapters = chapters or roots.get_book() / "src"
    if flags.size:
        flags.by = flags.by or train_gpt.HAND
        train_gpt.train(console, flags, chapters, SAMPLE_BYTES)
        return 0
    path, module = load_tape(flags)
    run = Training.initialize(TINY, flags.seed)
    print_lines(console, [training.describe_model(TINY, run.p)])
    with report_learner_errors(path), no_autograd():
        steps = training.STEPS["tiny"] if flags.steps is None else flags.steps
        texts = training.draw_excerpts(TINY, flags.seed, chapters)
        step = partial(run.step, module)
        losses = training.run_steps(console, train_gpt.HAND, step, texts, steps, flags.seconds)
        sample = training.generate_text(
            lambda tokens: module["logits_of"](tokens, module["Tape"](), run.p)[0, -1],
            TINY.context,
            SAMPLE_BYTES,
            flags.seed,
        )
    training.print_report(console, train_gpt.HAND, losses, sample)
    return 0
