"""`--demo [small|gpt2]`: a transformer trained with LayerNormLinear beside the same one in plain PyTorch.

- `small`, the default: two blocks of width 64 over the characters of the book, in less than two minutes. The curves
  agree where their last steps are within 2 %.
- `gpt2`: GPT-2 small's sizes, over the bytes of the book. Losses differ by rounding, which grows from step to step; how
  much rounding alone does to the curve is measured too, by a third model: plain PyTorch whose first parameters are moved
  by half a unit in their last place. The curves agree where LayerNormLinear's is no further from PyTorch's than four
  times that.
"""

import contextlib
import csv
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from max.driver import accelerator_count
from rich.console import Console

from harness.bench.loss_curves import WINDOW, furthest, plot, windows
from harness.bench.machine import machine
from harness.bench.timing import ratio, summary
from harness.console import Parser, print_lines
from harness.errors import BadUse
from harness.puzzles.p22.training import (
    BOTH,
    CONTROL,
    OURS,
    PLAIN,
    Options,
    Recipe,
    Text,
    Trainee,
    make_trainees,
    read_text,
    train,
)
from harness.toolchain import roots

TAIL = 10
"""The final loss of the small preset is the mean over this many steps."""
AGREEMENT = 0.02
"""Largest relative difference of the final losses: rounding, grown over the steps; a wrong gradient makes more."""
UNTIMED = 10
"""First steps, whose time holds compiling."""
TIMES_CONTROL = 4.0
SIZES = ("steps", "layers", "width", "heads", "context", "batch")
FIELDS = (
    *("device", "driver", "torch", "triton", "max", "date"),
    *("precision", "layers", "width", "heads", "context", "batch", "seed"),
    *("step", "model", "loss", "step_us", "peak_bytes"),
)
PRESETS = {
    "small": Options(
        Recipe(bytes=False, optimizer={"lr": 3e-3}),
        **dict(zip(SIZES, (240, 2, 64, 4, 32, 8), strict=True)),
        seconds=95.0,  # the whole stays below two minutes
    ),
    "gpt2": Options(
        Recipe(
            bytes=True,
            optimizer={"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
            warm_up=20,
            gpt2_start=True,
            control=True,
            say_every=50,
        ),
        **dict(zip(SIZES, (200, 12, 768, 12, 1024, 8), strict=True)),
    ),
}


# ---- The command --------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    """The flags of `p22 --demo`."""
    flags = Parser(
        prog="p22 --demo",
        description="Train a transformer with LayerNormLinear beside the same one in plain PyTorch.",
        allow_abbrev=False,
    )
    flags.add_argument("preset", nargs="?", choices=PRESETS, default="small", help="default: small")
    for name in SIZES:
        flags.add_argument(f"--{name}", type=int, help="default: the preset's")
    flags.add_argument("--seed", type=int, default=22, help="default: %(default)s")
    flags.add_argument(
        "--precision",
        choices=("autocast", "bfloat16", "float32"),
        help="autocast to bfloat16, bfloat16 parameters, or float32 (default: autocast for gpt2 on a GPU, else float32)",
    )
    flags.add_argument(
        "--attention", action="store_true", help="train a model with the workbook's attention besides"
    )
    flags.add_argument("--csv", type=Path, metavar="FILE", help="write loss and time of every step here")
    return flags


def make_options(flags) -> Options:
    """The options. Raises BadUse, naming the flag, for a value that makes no sense."""
    preset = PRESETS[flags.preset]
    sizes = {name: getattr(preset if getattr(flags, name) is None else flags, name) for name in SIZES}
    for name, value in sizes.items():
        if value < 1:
            raise BadUse(f"--{name} {value}: must be at least 1")
    if sizes["width"] % sizes["heads"]:
        raise BadUse(f"--width {sizes['width']}: must be divisible by --heads {sizes['heads']}")
    device = torch.device("cuda" if torch.cuda.is_available() and accelerator_count() else "cpu")
    by_default = "autocast" if device.type == "cuda" and flags.preset == "gpt2" else "float32"
    recipe = preset.recipe
    if recipe.control and device.type == "cuda":
        recipe = dataclasses.replace(recipe, optimizer={**recipe.optimizer, "fused": True})
    return dataclasses.replace(
        preset,
        recipe=recipe,
        **sizes,
        precision=flags.precision or by_default,
        attention=flags.attention,
        seed=flags.seed,
        device=device,
    )


def run(console: Console, arguments: Sequence[str] = (), chapters: Path | None = None) -> int:
    """Trains on the chapters, the book's unless given, reports and writes the CSV; 1 where the curves part. Raises BadUse."""
    flags = make_parser().parse_args(arguments)
    return demonstrate(console, make_options(flags), flags.csv, chapters or roots.book() / "src")


def demonstrate(console: Console, options: Options, target: Path | None, chapters: Path) -> int:
    """One training run. The rows are written also where it is interrupted."""
    started = time.monotonic()
    text = read_text(chapters, options)
    trainees = make_trainees(options, text.vocabulary)
    with csv_file(target) as file:
        print_lines(console, introduction(options, text, trainees))
        try:
            train(console, options, trainees, text.tokens)
        finally:
            if file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows(trainees, options))
    if options.recipe.control:
        lines, agree = verdict_by_control(trainees, options)
    else:
        lines, agree = verdict_by_tail(trainees, options, time.monotonic() - started)
    print_lines(console, lines)
    return 0 if agree else 1


def introduction(options: Options, text: Text, trainees: dict[str, Trainee]) -> list[str]:
    """What is trained, on what."""
    length = f"{len(text.tokens):,}"
    if options.recipe.bytes:
        where = torch.cuda.get_device_name() if options.device.type == "cuda" else "the CPU"
        return [
            f"{options.layers} layers of width {options.width}, {options.batch} x {options.context} bytes of the "
            f"book's {length}, {options.precision}, {options.steps} steps on {where}"
        ]
    parameters = sum(parameter.numel() for parameter in trainees[PLAIN].model.parameters())
    return [
        f"Training on {length} characters of this workbook, {text.vocabulary} different ones, on {options.device}",
        f"Two models of {parameters:,} parameters from seed {options.seed}: {options.layers} blocks of width "
        f"{options.width}, {2 * options.layers + 1} LayerNorm + Linear pairs each",
    ]


def rows(trainees: dict[str, Trainee], options: Options) -> Iterator[dict[str, Any]]:
    """The rows of the CSV: one for each step of each model."""
    shared = {name: getattr(options, name) for name in FIELDS if hasattr(options, name)}
    shared |= machine(options.device)
    for name, one in trainees.items():
        for number, (loss, microseconds) in enumerate(zip(one.losses, one.times, strict=False)):
            own = {"step": number, "model": name, "loss": f"{loss:.6f}", "step_us": f"{microseconds:.1f}"}
            yield shared | own | {"peak_bytes": one.peak or ""}


def csv_file(path: Path | None):
    """The opened file, or nothing without a path. Raises BadUse where it cannot be written."""
    if path is None:
        return contextlib.nullcontext()
    try:
        return path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadUse(f"--csv {path}: {error.strerror}") from error


# ---- The verdicts -------------------------------------------------------------------------------------------


def verdict_by_tail(trainees: dict[str, Trainee], options: Options, seconds: float) -> tuple[list[str], bool]:
    """Curves, final losses and their difference, as lines; and whether the last steps agree."""
    curves = {name: one.losses for name, one in trainees.items()}
    done = len(curves[OURS])
    early = (
        "" if done == options.steps else f", stopped early at the time limit ({options.steps} were planned)"
    )
    final = {name: sum(curve[-TAIL:]) / len(curve[-TAIL:]) for name, curve in curves.items()}
    differences = {name: abs(final[name] - final[PLAIN]) for name in mine(trainees)}
    agree = all(difference <= AGREEMENT * final[PLAIN] for difference in differences.values())
    return [
        f"Trained {done} steps in {seconds:.0f} s{early}",
        "",
        *plot({name: curves[name] for name in (OURS, PLAIN)}),
        "",
        *(f"   {name:<16} loss {curves[name][0]:.4f} -> {loss:.4f}" for name, loss in final.items()),
        *(
            f"   final difference {difference:.1e} (mean of the last {min(TAIL, done)} steps{of(name)})"
            for name, difference in differences.items()
        ),
        f"   {'✅ the curves agree' if agree else '❌ the curves part: a gradient is wrong'}",
    ], agree


def mine(trainees: dict[str, Trainee]) -> list[str]:
    """The models with layers of the workbook."""
    return [name for name in (OURS, BOTH) if name in trainees]


def of(name: str) -> str:
    """What a line adds that is not about LayerNormLinear alone."""
    return "" if name == OURS else f" {name}"


def tolerance(control: float, dtype: torch.dtype) -> float:
    """How far two right curves may be apart.

    The control shows what one rounding at the start grows into; LayerNormLinear rounds differently in every layer at
    every step. The last term is for the first steps, when nothing has grown: the rounding of the loss itself.
    """
    return TIMES_CONTROL * control + max(torch.finfo(dtype).eps / 8, 4 * torch.finfo(torch.float32).eps)


def verdict_by_control(trainees: dict[str, Trainee], options: Options) -> tuple[list[str], bool]:
    """Curves, times, memory and the largest differences, as lines; and whether ours is as near as rounding makes it."""
    plain, control = trainees[PLAIN], trainees[CONTROL]
    lines = [*plot({name: trainees[name].losses for name in (OURS, PLAIN)}), ""]
    lines += [
        f"   {'model':<22}{'first loss':>11}{'last':>9}{'step ms':>10}{'p20':>9}{'p80':>9}{'peak MiB':>10}"
        f"{'tokens/s':>10}"
    ]
    for name, one in trainees.items():
        timing = summary(one.times[UNTIMED:] or one.times)
        times = "".join(
            f"{t / 1e3:>{w}.2f}" for t, w in ((timing.median, 10), (timing.p20, 9), (timing.p80, 9))
        )
        peak = f"{one.peak / 2**20:,.0f}" if one.peak else "-"
        lines += [f"   {name:<22}{one.losses[0]:>11.4f}{windows(one.losses)[-1]:>9.4f}{times}{peak:>10}"]
        lines[-1] += f"{options.batch * options.context / timing.median * 1e6:>10,.0f}"
    if (steps := len(plain.times) - UNTIMED) > 0:
        for name in mine(trainees):
            speed = ratio(trainees[name].times[UNTIMED:], plain.times[UNTIMED:])
            lines += [f"   step time, {OURS}{of(name)} / {PLAIN}: {speed:.3f} (median of {steps} steps)"]
    moved = furthest(control.losses, plain.losses)
    away = {name: furthest(trainees[name].losses, plain.losses) for name in mine(trainees)}
    allowed = tolerance(moved, options.dtype)
    agree = all(far <= allowed for far in away.values())
    words = "✅ the curves agree" if agree else "❌ the curves part: a gradient is wrong"
    return [
        *lines,
        *(
            f"   largest difference of {WINDOW} steps' mean loss{of(name)}: {far:.2e}; by rounding alone {moved:.2e}"
            for name, far in away.items()
        ),
        f"   {words} (limit {allowed:.2e})",
    ], agree
