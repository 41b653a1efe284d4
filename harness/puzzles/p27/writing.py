"""Sample text from a model of bytes, one byte after the other."""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.console import printable

START = b"The gradient "
TEMPERATURE = 0.7


def write(logits_of: Callable[[Tensor], Tensor], context: int, count: int, seed: int) -> str:
    """Return START and `count` bytes after it, in characters that a terminal can print.

    Args:
        logits_of: The logits [256] of the byte after tokens [1, T], T from 1 to `context`.
        context: The longest input of the model.
        count: Bytes to sample.
        seed: Of the samples.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(START)
    for _ in range(count):
        shares = torch.softmax(logits_of(torch.tensor([written[-context:]])) / TEMPERATURE, -1)
        written.append(int(torch.multinomial(shares, 1, generator=generator)))
    return printable(bytes(written).decode(errors="replace"))
