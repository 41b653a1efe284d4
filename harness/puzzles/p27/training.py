"""Code shared by both trainings of a GPT: excerpts of chapters, the loop, the report, a sample of text."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from harness.console import escape_controls, print_lines
from harness.errors import UsageError
from harness.puzzles.p27.autograd import Tensors
from harness.puzzles.p27.gpt import Sizes

STEPS = {"tiny": 600, "gpt2": 300}
"""Size -> the default number of steps."""
LEARNING_RATES = {"tiny": 3e-3, "gpt2": 6e-4}
WARMUP_STEPS = 20
"""The number of warm-up steps of the learning rate."""
PROMPT = b"The gradient "
TEMPERATURE = 0.7


def read_text(folder: Path, context: int) -> Tensor:
    """Return the bytes of all chapters, uint8 [length]. Raises UsageError if an excerpt does not fit."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))).encode()
    if not text:
        raise UsageError(f"no training text: {folder} has no Markdown file of the workbook's chapters")
    if len(text) <= context + 1:
        raise UsageError(f"an excerpt needs more than {context + 1} bytes of text; {folder} has {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_excerpts(
    sizes: Sizes, seed: int, chapters: Path, device: torch.device | None = None
) -> Iterator[Tensor]:
    """Yield random excerpts of the text, int64 [batch, context + 1], forever."""
    text = read_text(chapters, sizes.context)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sizes.context + 1)
    while True:
        starts = torch.randint(len(text) - sizes.context, (sizes.batch, 1), generator=generator)
        yield text[starts + offsets].long().to(device)


def compute_learning_rate(size: str, step: int) -> float:
    return LEARNING_RATES[size] * min(1.0, step / WARMUP_STEPS)


def run_steps(
    console: Console,
    method: str,
    step: Callable[[Tensor], float],
    excerpts: Iterable[Tensor],
    steps: int,
    timeout_s: float,
) -> list[float]:
    """Return the losses of `steps` steps, or fewer if time runs out."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    start, losses = time.monotonic(), list[float]()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"training by {method}", total=steps, losses="")
        for _, excerpt in zip(range(steps), excerpts, strict=False):
            losses.append(step(excerpt))
            progress.update(task, advance=1, losses=f"loss {losses[-1]:.3f}")
            if time.monotonic() - start > timeout_s:
                break
    return losses


def generate_text(compute_logits: Callable[[Tensor], Tensor], context: int, num_bytes: int, seed: int) -> str:
    """Return PROMPT followed by `num_bytes` sampled bytes, as characters that a terminal can print.

    `compute_logits` maps tokens [1, T], T up to `context`, to the logits [256] of the next byte.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(PROMPT)
    for _ in range(num_bytes):
        p = torch.softmax(compute_logits(torch.tensor([text[-context:]])) / TEMPERATURE, -1)
        text.append(int(torch.multinomial(p, 1, generator=generator)))
    return escape_controls(bytes(text).decode(errors="replace"))


# ---- The report ---------------------------------------------------------------------------------------------


def describe_model(sizes: Sizes, p: Tensors) -> str:
    num_parameters = sum(t.numel() for t in p.values())
    shape = f"{sizes.layers} blocks of {sizes.width} channels, {num_parameters:,} parameters"
    return f"{shape}; {sizes.batch} x {sizes.context} bytes of the book at every step"


def print_report(console: Console, method: str, losses: list[float], sample: str, suffix: str = "") -> None:
    """Draw the losses, and print the first and last ones and the sample."""
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    lines = [
        *plot(f"by {method}", losses),
        f"loss {first:.3f} in the first ten steps, {last:.3f} in the last ten of {len(losses)}{suffix}",
        "it writes:",
        *(f"   {line}" for line in sample.splitlines()),
    ]
    print_lines(console, lines)


def plot(label: str, values: list[float], width: int = 64, height: int = 10) -> list[str]:
    """Draw a loss curve as lines of text, with the loss on the vertical axis."""
    columns = min(width, len(values))
    edges = [len(values) * part // columns for part in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    rows = [round((high - value) / ((high - low) or 1.0) * (height - 1)) for value in means]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    body = [
        f"{labels.get(number, ''):>7} │{''.join('o' if row == number else ' ' for row in rows)}".rstrip()
        for number in range(height)
    ]
    return [f"{'loss':>7}   o {label}", *body, f"{'':>7} └{'─' * columns} step {len(values)}"]
