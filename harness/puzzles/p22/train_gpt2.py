"""Trains a model of GPT-2 small's sizes with LayerNormLinear beside plain PyTorch: `python -m harness.puzzles.p22.train_gpt2`.

Random weights, the book's own text in bytes, no download. The models start from the same parameters, see the same
batches and take turns step by step, so that their step times compare. Their losses differ by rounding, which grows
from step to step; how much rounding alone does to the curve is measured too, by a third model: plain PyTorch whose
first parameters are moved by half a unit in their last place. The curves agree where LayerNormLinear's is no further
from PyTorch's than four times that.
"""

import argparse
import contextlib
import csv
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.text import Text
from torch import nn

from harness.bench.machine import machine
from harness.bench.timing import CudaClock, WallClock, ratio, summary
from harness.console import Parser, make_console
from harness.errors import BadUse, WorkbookError
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22.demo import plot, training_progress
from harness.puzzles.p22.demo_model import CharacterModel, plain_pair
from harness.toolchain.roots import CHECKOUT

OURS, PLAIN, CONTROL = "LayerNormLinear", "plain PyTorch", "plain PyTorch, moved"
BYTES = 256
LEARNING_RATE, WARM_UP_STEPS = 6e-4, 20
UNTIMED = 10
"""First steps, whose time holds compiling."""
WINDOW = 10
"""Losses are compared as means of so many steps."""
TIMES_CONTROL = 4.0
FIELDS = (
    *("device", "driver", "torch", "triton", "max", "date"),
    *("precision", "layers", "width", "heads", "context", "batch", "seed"),
    *("step", "model", "loss", "step_us", "peak_bytes"),
)


@dataclass(frozen=True)
class Options:
    """What to train; the defaults are GPT-2 small's sizes, with bytes for tokens."""

    steps: int = 200
    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    batch: int = 8
    precision: str = "autocast"
    seed: int = 22
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """In which the products are computed."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16


@dataclass
class Trainee:
    """A model with its optimizer, and what was seen of it: losses, microseconds of each step, bytes at the peak."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int = 0


# ---- Models and data ----------------------------------------------------------------------------------------


def make_model(options: Options, pair) -> nn.Module:
    """A model with GPT-2's first parameters: normal with deviation 0.02, smaller where a block adds to the stream."""
    generator = torch.Generator().manual_seed(options.seed)
    model = CharacterModel(BYTES, options.context, options.width, options.heads, options.layers, pair)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                adds = "join_heads" in name or "narrow" in name
                deviation = 0.02 / (math.sqrt(2 * options.layers) if adds else 1)
                parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
            elif "bias" in name:
                parameter.zero_()
    return model


def move_by_half_a_place(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Moves every parameter by half a unit in its last place in a dtype, up or down by chance."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(dtype).eps / 2
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(parameter.double() * (1 + half * up))


def make_trainees(options: Options) -> dict[str, Trainee]:
    """The three models from the same parameters, the third moved, each with an optimizer."""
    models = {name: make_model(options, plain_pair) for name in (PLAIN, CONTROL)}
    models = {OURS: make_model(options, LayerNormLinear), **models}
    move_by_half_a_place(models[CONTROL], options.dtype, options.seed)
    trainees = {}
    for name, model in models.items():
        model.to(options.device, torch.bfloat16 if options.precision == "bfloat16" else torch.float32)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=options.device.type == "cuda",
        )
        trainees[name] = Trainee(model, optimizer)
    return trainees


def read_text(folder: Path, context: int) -> torch.Tensor:
    """The bytes of all chapters. Raises BadUse, saying where it looked, where there are too few for one excerpt."""
    text = b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*.md")))
    if len(text) <= context + 1:
        raise BadUse(
            f"train_gpt2 needs more than {context + 1} bytes of the book's chapters, {folder} holds {len(text)}: "
            "run it in a checkout (an installed package carries no book)"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, options: Options) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random excerpts [batch, context], int64, and the bytes that follow each place of them."""
    generator = torch.Generator().manual_seed(options.seed)
    within = torch.arange(options.context + 1)
    while True:
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
        excerpt = text[starts + within].long().to(options.device)
        yield excerpt[:, :-1].contiguous(), excerpt[:, 1:].contiguous()


# ---- Training -----------------------------------------------------------------------------------------------


def train(console: Console, options: Options, trainees: dict[str, Trainee], text: torch.Tensor) -> None:
    """Trains the models in lockstep, in a new order at every step."""
    clock = CudaClock() if options.device.type == "cuda" else WallClock()
    order = random.Random(options.seed)
    with training_progress(console) as progress:
        task = progress.add_task("training", total=options.steps, losses="")
        for number, batch in zip(range(options.steps), batches(text, options), strict=False):
            for name in order.sample(list(trainees), len(trainees)):
                one_step(trainees[name], batch, number, options, clock)
            losses = "  ".join(f"{name} {one.losses[-1]:.4f}" for name, one in trainees.items())
            progress.update(task, advance=1, losses=losses)
            if not console.is_terminal and (number + 1) % 50 == 0:
                line(console, f"   step {number + 1}: {losses}")


def one_step(trainee: Trainee, batch, number: int, options: Options, clock) -> None:
    """One step of one model: its loss, its time, its peak of memory."""
    for group in trainee.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARM_UP_STEPS)
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


# ---- The verdict --------------------------------------------------------------------------------------------


def windows(losses: list[float]) -> list[float]:
    """The means of consecutive WINDOWs; what is left over at the end is a shorter one."""
    return [statistics.fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference between the windows of two curves."""
    pairs = zip(windows(one), windows(other), strict=True)
    return max(abs(a - b) / b if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)


def tolerance(control: float, dtype: torch.dtype) -> float:
    """How far two right curves may be apart.

    The control shows what one rounding at the start grows into; LayerNormLinear rounds differently in every layer at
    every step. The last term is for the first steps, when nothing has grown: the rounding of the loss itself.
    """
    return TIMES_CONTROL * control + max(torch.finfo(dtype).eps / 8, 4 * torch.finfo(torch.float32).eps)


def report(console: Console, trainees: dict[str, Trainee], options: Options) -> int:
    """Prints curves, times, memory and the verdict; returns the exit code."""
    ours, plain, control = (trainees[name] for name in (OURS, PLAIN, CONTROL))
    for row in plot({OURS: ours.losses, PLAIN: plain.losses}):
        line(console, row)
    line(console)
    line(
        console,
        f"   {'model':<22}{'first loss':>11}{'last':>9}{'step ms':>10}{'p20':>9}{'p80':>9}{'peak MiB':>10}",
    )
    for name, one in trainees.items():
        found = summary(one.times[UNTIMED:] or one.times)
        times = "".join(f"{t / 1e3:>{w}.2f}" for t, w in ((found.median, 10), (found.p20, 9), (found.p80, 9)))
        peak = f"{one.peak / 2**20:,.0f}" if one.peak else "-"
        line(console, f"   {name:<22}{one.losses[0]:>11.4f}{windows(one.losses)[-1]:>9.4f}{times}{peak:>10}")
    if len(ours.times) > UNTIMED:
        speed = ratio(ours.times[UNTIMED:], plain.times[UNTIMED:])
        line(
            console,
            f"   step time, {OURS} / {PLAIN}: {speed:.3f} (median of {len(ours.times) - UNTIMED} steps)",
        )
    away, moved = furthest(ours.losses, plain.losses), furthest(control.losses, plain.losses)
    allowed = tolerance(moved, options.dtype)
    line(
        console,
        f"   largest difference of {WINDOW} steps' mean loss: {away:.2e}; by rounding alone {moved:.2e}",
    )
    agree = away <= allowed
    words = "✅ the curves agree" if agree else "❌ the curves part: a gradient is wrong"
    line(console, f"   {words} (limit {allowed:.2e})")
    return 0 if agree else 1


def line(console: Console, text: str = "") -> None:
    """One line as it is."""
    console.print(Text(text), soft_wrap=True)


# ---- The command --------------------------------------------------------------------------------------------


def parser() -> Parser:
    """The flags."""
    flags = Parser(
        prog="python -m harness.puzzles.p22.train_gpt2",
        description=__doc__.split("\n\n")[0],
        allow_abbrev=False,
    )
    default = Options()
    for name in ("steps", "layers", "width", "heads", "context", "batch"):
        flags.add_argument(f"--{name}", type=int, default=getattr(default, name), help="default: %(default)s")
    flags.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    flags.add_argument(
        "--precision",
        choices=("autocast", "bfloat16", "float32"),
        help="autocast to bfloat16 (default on a GPU), bfloat16 parameters, or float32 (default on a CPU)",
    )
    flags.add_argument("--csv", type=Path, metavar="FILE", help="write loss and time of every step here")
    return flags


def make_options(flags: argparse.Namespace) -> Options:
    """The options. Raises BadUse, naming the flag, for a value that makes no sense."""
    sizes = {name: getattr(flags, name) for name in ("steps", "layers", "width", "heads", "context", "batch")}
    for name, value in sizes.items():
        if value < 1:
            raise BadUse(f"--{name} {value}: must be at least 1")
    if flags.width % flags.heads:
        raise BadUse(f"--width {flags.width}: must be divisible by --heads {flags.heads}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = flags.precision or ("autocast" if device.type == "cuda" else "float32")
    return Options(**sizes, precision=precision, seed=flags.seed, device=device)


def rows(trainees: dict[str, Trainee], options: Options) -> Iterator[dict[str, object]]:
    """The rows of the CSV: one for each step of each model."""
    shared = {name: getattr(options, name) for name in FIELDS if hasattr(options, name)}
    shared |= machine(options.device)
    for name, one in trainees.items():
        for number, (loss, microseconds) in enumerate(zip(one.losses, one.times, strict=False)):
            own = {"step": number, "model": name, "loss": f"{loss:.6f}", "step_us": f"{microseconds:.1f}"}
            yield shared | own | {"peak_bytes": one.peak or ""}


def main(arguments: list[str] | None = None, chapters: Path = CHECKOUT / "book" / "src") -> int:
    """Trains, reports and writes the CSV; the exit code is 1 where the curves part."""
    try:
        flags = parser().parse_args(arguments)
        return run(make_options(flags), flags.csv, chapters)
    except WorkbookError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run(options: Options, target: Path | None, chapters: Path) -> int:
    """One training run. The rows are written also where it is interrupted."""
    console = make_console(sys.stdout)
    text = read_text(chapters, options.context)
    trainees = make_trainees(options)
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else "the CPU"
    line(
        console,
        f"{options.layers} layers of width {options.width}, {options.batch} x {options.context} bytes of the "
        f"book's {len(text):,}, {options.precision}, {options.steps} steps on {where}",
    )
    with csv_file(target) as file:
        try:
            train(console, options, trainees, text)
        finally:
            if file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows(trainees, options))
    return report(console, trainees, options)


def csv_file(path: Path | None):
    """The opened file, or nothing without a path. Raises BadUse where it cannot be written."""
    if path is None:
        return contextlib.nullcontext()
    try:
        return path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadUse(f"--csv {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
