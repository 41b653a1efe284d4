"""Attention over a sequence that the ranks of a process group hold together: puzzle 25's ring, with a check in front of it.

The ranks first tell each other what they have. One that has another shape or dtype than the others would leave them waiting
for blocks that never fit; so all raise the same line, which names it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from harness.check.python_files import load
from harness.toolchain import roots

Positions = Callable[[int, int, int, bool], int]
"""rank, size, length, balanced -> how many positions the rank holds."""


@functools.cache
def solution() -> dict[str, Any]:
    """The functions of puzzle 25's solution."""
    return load(roots.solutions() / "p25" / "in_torch.py")


def ring_attention(query, key, value, is_causal=False, scale=None, group=None, *, balanced=False):
    """softmax(scale * query key^T) value over the whole sequence; each rank gives and gets its part.

    Args:
        query: [B, N, s, d], any floating dtype; s is this rank's part of the sequence.
        key, value: [B, M, s, d]; N is a multiple of M.
        is_causal: Whether a query sees the keys up to its own place only.
        scale: 1 / sqrt(d) where None.
        group: A process group, the default one where None; its backend moves the blocks.
        balanced: Whether each rank holds a range from the front and its mirror image from the end ("zig-zag"); else a
            range of its own, one behind the other by rank.

    Raises ValueError, on every rank the same, where the ranks' tensors do not go together; RuntimeError, with rank and step,
    where a neighbour is gone or late.
    """
    group = group or dist.group.WORLD
    length = agreed_length(query, key, value, balanced, group, solution()["positions"])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return solution()["RingAttention"].apply(query, key, value, length, scale, is_causal, balanced, group)


def agreed_length(query, key, value, balanced: bool, group, positions: Positions) -> int:
    """The length of the whole sequence, once every rank has said what it has; `positions` is the solution's function.

    Raises ValueError, on every rank the same line.
    """
    size = dist.get_world_size(group)
    said: list[Any] = [None] * size
    mine = (str(query.dtype).removeprefix("torch."), list(query.shape), list(key.shape), list(value.shape))
    dist.all_gather_object(said, mine, group=group)
    length = likeliest_length([shape[2] for _, shape, _, _ in said], balanced, positions)
    dtype, B, N, M, d = most([(own, *q[:2], k[1], q[3]) for own, q, k, _ in said])
    for rank, (own, *shapes) in enumerate(said):
        part = positions(rank, size, length, balanced)
        if own != dtype:
            raise ValueError(f"rank {rank} of {size} has tensors of {own}, the others of {dtype}")
        if shapes != [[B, heads, part, d] for heads in (N, M, M)]:
            words = ", ".join(map(str, shapes))
            wanted = f"{[B, N, part, d]} and {[B, M, part, d]}"
            raise ValueError(
                f"rank {rank} of {size} has query, key and value of {words}, and not {wanted}, its part of {length} positions"
            )
    return length


def most(items: list) -> Any:
    """What most of some items are."""
    return max(items, key=items.count)


def likeliest_length(parts: list[int], balanced: bool, positions: Positions) -> int:
    """The length of which the fewest ranks would have a wrong part; their sum, where all are right."""
    size, total = len(parts), sum(parts)

    def wrong(length: int) -> int:
        return sum(positions(rank, size, length, balanced) != part for rank, part in enumerate(parts))

    near = {part * size + k for part in parts for k in range(-2 * size, 2 * size + 1)}
    return total if wrong(total) == 0 else min(sorted(each for each in near if each >= 0), key=wrong)
