"""The two demonstrations: `--demo` trains a small transformer with the layer, `--demo-simple` calls the ops once.

Both use the solution's kernels. The models of `--demo` see the same batches of the workbook's own chapters and start
from the same parameters; they differ in nothing but their LayerNorm + Linear pairs.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from max.driver import accelerator_count
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn

from harness.errors import BadUse
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22.demo_model import CharacterModel, plain_pair
from harness.puzzles.p22.spec import BATCH_SIZE, HIDDEN_DIM, OUTPUT_DIM, SEQ_LEN, reference
from harness.toolchain.roots import CHECKOUT, op_package, solutions

SEED = 22
CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 32, 64, 4, 2, 8
STEPS = 240
LEARNING_RATE = 3e-3
TIME_LIMIT = 95.0
"""Seconds from the start after which training stops early, so that the whole stays below two minutes."""
TAIL = 10
"""The final loss is the mean over this many steps."""
AGREEMENT = 0.02
"""Largest relative difference of the final losses: rounding, grown over the steps; a wrong gradient makes more."""


# ---- Training side by side ----------------------------------------------------------------------------------


def run(
    console: Console,
    *,
    chapters: Path = CHECKOUT / "book" / "src",
    steps: int = STEPS,
    limit: float = TIME_LIMIT,
) -> int:
    """Trains both models and prints their loss curves. Returns the exit code: 0, or 1 where the losses part.

    Args:
        console: Where to print; the progress bar shows on a terminal only.
        chapters: The folder whose Markdown files are the text.
        steps: Training steps.
        limit: Seconds after which training stops early.

    Raises BadUse where there is no text to train on.
    """
    started = time.monotonic()
    text = read_chapters(chapters)
    alphabet = sorted(set(text))
    device = torch.device("cuda" if torch.cuda.is_available() and accelerator_count() else "cpu")
    characters = torch.tensor([alphabet.index(character) for character in text], device=device)
    models = {
        "LayerNormLinear": make_model(len(alphabet), LayerNormLinear).to(device),
        "plain PyTorch": make_model(len(alphabet), plain_pair).to(device),
    }
    line(
        console,
        f"Training on {len(text):,} characters of this workbook, {len(alphabet)} different ones, on {device}",
    )
    parameters = sum(parameter.numel() for parameter in models["plain PyTorch"].parameters())
    line(
        console,
        f"Two models of {parameters:,} parameters from seed {SEED}: {BLOCKS} blocks of width {WIDTH}, "
        f"{2 * BLOCKS + 1} LayerNorm + Linear pairs each",
    )
    curves = train(console, models, characters, steps, started + limit)
    return report(console, curves, steps, time.monotonic() - started)


def read_chapters(folder: Path) -> str:
    """The text of all chapters. Raises BadUse, saying where it looked, where there is none or too little."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md")))
    if not text:
        raise BadUse(
            f"--demo trains on the workbook's chapters, and there is no Markdown file under {folder}: "
            "run it in a checkout (an installed package carries no book)"
        )
    if len(text) <= CONTEXT + 1:
        raise BadUse(f"--demo needs more than {CONTEXT + 1} characters of text, {folder} holds {len(text)}")
    return text


def make_model(vocabulary: int, pair) -> nn.Module:
    """A model from SEED; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return CharacterModel(vocabulary, CONTEXT, WIDTH, HEADS, BLOCKS, pair)


def batches(characters: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random excerpts, [BATCH, CONTEXT], and the characters that follow each place of them."""
    generator = torch.Generator().manual_seed(SEED)
    within = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(characters) - CONTEXT, (BATCH, 1), generator=generator)
        excerpt = characters[(starts + within).to(characters.device)]
        yield excerpt[:, :-1], excerpt[:, 1:]


def training_progress(console: Console) -> Progress:
    """A bar of steps, with the field `losses` behind it; shown on a terminal only, and gone afterwards."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def train(
    console: Console, models: dict[str, nn.Module], characters: torch.Tensor, steps: int, deadline: float
) -> dict[str, list[float]]:
    """Trains the models in lockstep on the same batches; returns the loss of every step."""
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), LEARNING_RATE) for name, model in models.items()
    }
    curves: dict[str, list[float]] = {name: [] for name in models}
    with training_progress(console) as progress:
        task = progress.add_task("compiling the kernels", total=steps, losses="")
        for _, (given, wanted) in zip(range(steps), batches(characters), strict=False):
            for name, model in models.items():
                curves[name].append(step(model, optimizers[name], given, wanted))
            losses = "  ".join(f"{name} {curve[-1]:.4f}" for name, curve in curves.items())
            progress.update(task, advance=1, description="training", losses=losses)
            if time.monotonic() > deadline:
                break
    return curves


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor, wanted: torch.Tensor
) -> float:
    """One training step; returns the loss before it."""
    loss = F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def report(console: Console, curves: dict[str, list[float]], steps: int, seconds: float) -> int:
    """Prints the curves, the final losses and their difference; returns the exit code."""
    done = len(next(iter(curves.values())))
    early = "" if done == steps else f", stopped early at the time limit ({steps} were planned)"
    line(console, f"Trained {done} steps in {seconds:.0f} s{early}")
    line(console)
    for row in plot(curves):
        line(console, row)
    line(console)
    final = {name: sum(curve[-TAIL:]) / len(curve[-TAIL:]) for name, curve in curves.items()}
    for name, loss in final.items():
        line(console, f"   {name:<16} loss {curves[name][0]:.4f} -> {loss:.4f}")
    ours, theirs = final.values()
    difference = abs(ours - theirs)
    agree = difference <= AGREEMENT * theirs
    line(console, f"   final difference {difference:.1e} (mean of the last {min(TAIL, done)} steps)")
    line(console, f"   {'✅ the curves agree' if agree else '❌ the curves part: a gradient is wrong'}")
    return 0 if agree else 1


def plot(curves: dict[str, list[float]], width: int = 64, height: int = 12) -> list[str]:
    """Loss curves as lines of text: a sign for each curve, `*` where they meet; loss upwards, steps to the right."""
    signs = dict(zip(curves, "ox", strict=True))
    columns = min(width, len(next(iter(curves.values()))))
    averaged = {name: averages(curve, columns) for name, curve in curves.items()}
    values = [value for curve in averaged.values() for value in curve if value == value]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0
    grid = [[" "] * columns for _ in range(height)]
    for name, curve in averaged.items():
        for column, value in enumerate(curve):
            if value != value:
                continue
            row = round((high - value) / span * (height - 1))
            grid[row][column] = signs[name] if grid[row][column] == " " else "*"
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    legend = "   ".join([f"{sign} {name}" for name, sign in signs.items()] + ["* both"])
    body = [f"{labels.get(row, ''):>7} │{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    return [
        f"{'loss':>7}   {legend}",
        *body,
        f"{'':>7} └{'─' * columns} step {len(next(iter(curves.values())))}",
    ]


def averages(curve: list[float], count: int) -> list[float]:
    """The curve cut into `count` parts, the mean of each."""
    edges = [len(curve) * part // count for part in range(count + 1)]
    return [sum(curve[start:end]) / (end - start) for start, end in pairwise(edges)]


# ---- One call through CustomOpLibrary -----------------------------------------------------------------------


def run_simple(console: Console) -> int:
    """One forward and one backward pass through MAX's own PyTorch binding, timed. Returns 0, or 1 where it is wrong.

    This is the documented way from PyTorch to a Mojo op: public names, sizes as parameters, outputs first.
    """
    from max.experimental.torch import CustomOpLibrary

    torch.manual_seed(SEED)
    package = op_package(solutions(), "p22").path
    ops, seconds = timed(lambda: CustomOpLibrary(package))
    line(console, f"Loaded {package} in {seconds:.1f} s")
    sizes = dict(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, hidden_dim=HIDDEN_DIM, output_dim=OUTPUT_DIM)
    tensors = {
        "input": torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_DIM),
        "ln_weight": 1 + 0.5 * torch.randn(HIDDEN_DIM),
        "ln_bias": 0.5 * torch.randn(HIDDEN_DIM),
        "linear_weight": torch.randn(OUTPUT_DIM, HIDDEN_DIM),
        "linear_bias": torch.randn(OUTPUT_DIM),
    }
    grad_output = torch.randn(BATCH_SIZE, SEQ_LEN, OUTPUT_DIM)
    results = {"output": torch.empty_like(grad_output)}
    gradients = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
    for name, tensor in zip(gradients, tensors.values(), strict=True):
        results[name] = torch.empty_like(tensor)

    forward = ops.layernorm_linear[{"algorithm": "fused", **sizes}]
    backward = ops.layernorm_linear_backward[sizes]
    calls = {
        "forward": lambda: forward(results["output"], *tensors.values()),
        "backward": lambda: backward(
            *(results[name] for name in gradients), grad_output, *list(tensors.values())[:-1]
        ),
    }
    for name, call in calls.items():
        _, first = timed(call)
        _, second = timed(call)
        line(
            console,
            f"   {name:<8} first call {first:.1f} s, with compiling; second call {second * 1e6:,.0f} us",
        )
    dln = grad_output @ tensors["linear_weight"]
    return compare(console, results, reference({**tensors, "grad_output": grad_output, "dln": dln}))


def compare(console: Console, results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> int:
    """Prints the largest difference of each tensor from autograd's; returns the exit code."""
    wrong = False
    for name, result in results.items():
        difference = (result - expected[name]).abs().max().item()
        good = difference <= 1e-5 * expected[name].abs().max().item()
        wrong |= not good
        line(console, f"   {name:<14} differs from autograd by {difference:.2e} {'✅' if good else '❌'}")
    return int(wrong)


def timed(work):
    """What `work()` returns, and its seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def line(console: Console, text: str = "") -> None:
    """One line as it is: nothing in it is read as markup, and nothing wraps."""
    console.print(Text(text), soft_wrap=True)
