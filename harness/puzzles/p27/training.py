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
RATES = {"tiny": 3e-3, "gpt2": 6e-4}
WARM_UP = 20
"""The number of warm-up steps of the learning rate."""
START = b"The gradient "
TEMPERATURE = 0.7


def read_text(folder: Path, context: int) -> Tensor:
    """Return the bytes of all chapters, uint8 [length]. Raises UsageError if an excerpt does not fit."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))).encode()
    if not text:
        raise UsageError(f"no training text: {folder} has no Markdown file of the workbook's chapters")
    if len(text) <= context + 1:
        raise UsageError(f"an excerpt needs more than {context + 1} bytes of text; {folder} has {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def excerpts(sizes: Sizes, seed: int, chapters: Path, device: torch.device | None = None) -> Iterator[Tensor]:
    """Yield random excerpts of the text, int64 [batch, context + 1], forever."""
    text = read_text(chapters, sizes.context)
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(sizes.context + 1)
    while True:
        starts = torch.randint(len(text) - sizes.context, (sizes.batch, 1), generator=generator)
        yield text[starts + within].long().to(device)


def compute_rate(size: str, step: int) -> float:
    return RATES[size] * min(1.0, step / WARM_UP)


def run_steps(
    console: Console,
    by: str,
    step: Callable[[Tensor], float],
    texts: Iterable[Tensor],
    steps: int,
    seconds: float,
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
        task = progress.add_task(f"training by {by}", total=steps, losses="")
        for _, excerpt in zip(range(steps), texts, strict=False):
            losses.append(step(excerpt))
            progress.update(task, advance=1, losses=f"loss {losses[-1]:.3f}")
            if time.monotonic() - start > seconds:
                break
    return losses


def write(logits_of: Callable[[Tensor], Tensor], context: int, count: int, seed: int) -> str:
    """Return START followed by `count` sampled bytes, as characters that a terminal can print.

    `logits_of` maps tokens [1, T], T up to `context`, to the logits [256] of the next byte.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(START)
    for _ in range(count):
        p = torch.softmax(logits_of(torch.tensor([text[-context:]])) / TEMPERATURE, -1)
        text.append(int(torch.multinomial(p, 1, generator=generator)))
    return escape_controls(bytes(text).decode(errors="replace"))


# ---- The report ---------------------------------------------------------------------------------------------


def describe_model(sizes: Sizes, p: Tensors) -> str:
    count = sum(t.numel() for t in p.values())
    shape = f"{sizes.layers} blocks of {sizes.width} channels, {count:,} parameters"
    return f"{shape}; {sizes.batch} x {sizes.context} bytes of the book at every step"


def print_report(console: Console, by: str, losses: list[float], sample: str, more: str = "") -> None:
    """Draw the losses, and print the first and last ones and the sample."""
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    lines = [
        *plot(f"by {by}", losses),
        f"loss {first:.3f} in the first ten steps, {last:.3f} in the last ten of {len(losses)}{more}",
        "it writes:",
        *(f"   {line}" for line in sample.splitlines()),
    ]
    print_lines(console, lines)


def plot(name: str, curve: list[float], width: int = 64, height: int = 10) -> list[str]:
    """Draw a loss curve as lines of text, with the loss on the vertical axis."""
    columns = min(width, len(curve))
    edges = [len(curve) * part // columns for part in range(columns + 1)]
    values = [sum(curve[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(values), max(values)
    rows = [round((high - value) / ((high - low) or 1.0) * (height - 1)) for value in values]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    body = [
        f"{labels.get(number, ''):>7} │{''.join('o' if row == number else ' ' for row in rows)}".rstrip()
        for number in range(height)
    ]
    return [f"{'loss':>7}   o {name}", *body, f"{'':>7} └{'─' * columns} step {len(curve)}"]
