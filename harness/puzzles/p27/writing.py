"""What a model of bytes writes: one after the other, each drawn from what the model expects."""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.console import printable

START = b"The gradient "
TEMPERATURE = 0.7


def write(logits_of: Callable[[Tensor], Tensor], context: int, count: int, seed: int) -> str:
    """START and `count` bytes after it, in characters that a terminal takes.

    Args:
        logits_of: The logits [256] of the byte after tokens [1, T], T from 1 to `context`.
        context: What the model sees at most.
        count: Bytes that it writes.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(START)
    for _ in range(count):
        shares = torch.softmax(logits_of(torch.tensor([written[-context:]])) / TEMPERATURE, -1)
        written.append(int(torch.multinomial(shares, 1, generator=generator)))
    return printable(bytes(written).decode(errors="replace"))
