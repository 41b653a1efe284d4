"""Random excerpts of the training text, which are the workbook's chapters; progress bar and loss curve."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.errors import BadUse


@dataclass(frozen=True)
class Options:
    steps: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    seed: int = 22
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def read_text(folder: Path, context: int) -> torch.Tensor:
    """Return the bytes of all chapters, uint8 [length]. Raises BadUse if they are too short for an excerpt."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.md"))).encode()
    if not text:
        raise BadUse(f"no training text: {folder} has no Markdown file of the workbook's chapters")
    if len(text) <= context + 1:
        raise BadUse(f"an excerpt needs more than {context + 1} bytes of text; {folder} has {len(text)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def excerpts(options: Options, chapters: Path) -> Iterator[torch.Tensor]:
    """Yield random excerpts of the text, int64 [batch, context + 1], forever."""
    text = read_text(chapters, options.context)
    generator = torch.Generator().manual_seed(options.seed)
    within = torch.arange(options.context + 1)
    while True:
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
        yield text[starts + within].long().to(options.device)


def training_progress(console: Console) -> Progress:
    """Return a progress bar of steps, followed by the field `losses`; shown only on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


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
