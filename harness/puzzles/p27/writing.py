"""Sample text from a model of bytes, one byte at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.console import escape_controls

START = b"The gradient "
TEMPERATURE = 0.7


def write(logits_of: Callable[[Tensor], Tensor], context: int, count: int, seed: int) -> str:
    """Return START followed by `count` sampled bytes, as characters that a terminal can print.

    `logits_of` maps tokens [1, T], T up to `context`, to the logits [256] of the next byte.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(START)
    for _ in range(count):
        shares = torch.softmax(logits_of(torch.tensor([written[-context:]])) / TEMPERATURE, -1)
        written.append(int(torch.multinomial(shares, 1, generator=generator)))
    return escape_controls(bytes(written).decode(errors="replace"))
