"""`p22 --demo`: two transformer blocks of width 64 trained with LayerNormLinear beside the same ones in plain PyTorch.

They learn the characters of the book, in less than two minutes. The curves agree where their last steps are within 2 %.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from max.driver import accelerator_count
from rich.console import Console

from harness.bench.loss_curves import plot
from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22.demo_model import plain_pair
from harness.puzzles.p22.training import (
    OURS,
    PLAIN,
    Options,
    Recipe,
    Trainee,
    make_model,
    make_trainees,
    read_text,
    train,
)
from harness.toolchain import roots

TAIL = 10
"""The final loss is the mean over this many steps."""
AGREEMENT = 0.02
"""Largest relative difference of the final losses: rounding, grown over the steps; a wrong gradient makes more."""
SIZES = ("steps", "layers", "width", "heads", "context", "batch")
SMALL = Options(
    Recipe(bytes=False, optimizer={"lr": 3e-3}),
    **dict(zip(SIZES, (240, 2, 64, 4, 32, 8), strict=True)),
    seconds=95.0,  # the whole stays below two minutes
)


def make_options(arguments: Sequence[str]) -> Options:
    """The options that the flags of `p22 --demo` give. Raises BadUse, naming the flag, for a value that makes no sense."""
    parser = Parser(
        prog="p22 --demo",
        description="Train a small transformer with LayerNormLinear beside the same one in plain PyTorch.",
    )
    for name in (*SIZES, "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(SMALL, name), help="default: %(default)s")
    given = vars(parser.parse_args(arguments))
    for name in SIZES:
        if given[name] < 1:
            raise BadUse(f"--{name} {given[name]}: must be at least 1")
    if given["width"] % given["heads"]:
        raise BadUse(f"--width {given['width']}: must be divisible by --heads {given['heads']}")
    device = torch.device("cuda" if torch.cuda.is_available() and accelerator_count() else "cpu")
    return dataclasses.replace(SMALL, **given, device=device)


def run(console: Console, arguments: Sequence[str] = (), chapters: Path | None = None) -> int:
    """Trains on the chapters, the book's unless given, and reports; 1 where the curves part. Raises BadUse."""
    return demonstrate(console, make_options(arguments), chapters or roots.book() / "src")


def demonstrate(console: Console, options: Options, chapters: Path) -> int:
    """One training run."""
    started = time.monotonic()
    text = read_text(chapters, options)
    pairs = {OURS: LayerNormLinear, PLAIN: plain_pair}
    models = {name: make_model(options, text.vocabulary, pair) for name, pair in pairs.items()}
    parameters = sum(parameter.numel() for parameter in models[PLAIN].parameters())
    print_lines(
        console,
        [
            f"Training on {len(text.tokens):,} characters of this workbook, {text.vocabulary} different ones, on "
            f"{options.device}",
            f"Two models of {parameters:,} parameters from seed {options.seed}: {options.layers} blocks of width "
            f"{options.width}, {2 * options.layers + 1} LayerNorm + Linear pairs each",
        ],
    )
    trainees = make_trainees(options, models)
    train(console, options, trainees, text.tokens)
    lines, agree = verdict(trainees, options, time.monotonic() - started)
    print_lines(console, lines)
    return 0 if agree else 1


def verdict(trainees: dict[str, Trainee], options: Options, seconds: float) -> tuple[list[str], bool]:
    """Curves, final losses and their difference, as lines; and whether the last steps agree."""
    curves = {name: trainees[name].losses for name in (OURS, PLAIN)}
    done = len(curves[OURS])
    early = (
        "" if done == options.steps else f", stopped early at the time limit ({options.steps} were planned)"
    )
    final = {name: sum(curve[-TAIL:]) / len(curve[-TAIL:]) for name, curve in curves.items()}
    difference = abs(final[OURS] - final[PLAIN])
    agree = difference <= AGREEMENT * final[PLAIN]
    return [
        f"Trained {done} steps in {seconds:.0f} s{early}",
        "",
        *plot(curves),
        "",
        *(f"   {name:<16} loss {curves[name][0]:.4f} -> {loss:.4f}" for name, loss in final.items()),
        f"   final difference {difference:.1e} (mean of the last {min(TAIL, done)} steps)",
        f"   {'✅ the curves agree' if agree else '❌ the curves part: a gradient is wrong'}",
    ], agree
