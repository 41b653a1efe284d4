"""Attention over a sequence that the ranks of a process group hold together: puzzle 25's ring, with a check in front of it.

The ranks first tell each other what they have. One that has another shape or dtype than the others would leave them waiting
for blocks that never fit; so all raise the same line, which names it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.nn.ring_blocks import BLOCKS, ONE_LENGTH, ring_with

Positions = Callable[[int, int, int, bool], int]
"""rank, size, length, balanced -> how many positions the rank holds."""

ring_of = functools.cache(ring_with)


def ring_attention(
    query,
    key,
    value,
    is_causal=False,
    scale=None,
    group=None,
    *,
    balanced=False,
    length: int | None = None,
    blocks: str = "solution",
):
    """softmax(scale * query key^T) value over the whole sequence; each rank gives and gets its part.

    Under `torch.autocast` query, key and value are taken in its dtype; sums are float32 all the same.

    Args:
        query: [B, N, s, d], any floating dtype; s is this rank's part of the sequence.
        key, value: [B, M, s, d]; N is a multiple of M.
        is_causal: Whether a query sees the keys up to its own place only.
        scale: 1 / sqrt(d) where None.
        group: A process group, the default one where None; its backend moves the blocks.
        balanced: Whether each rank holds a range from the front and its mirror image from the end ("zig-zag"); else a
            range of its own, one behind the other by rank.
        length: Of the whole sequence. Where None the ranks first tell each other what they have, which costs a round
            of messages; a loop that has done so once can pass what it knows.
        blocks: What computes a block: "solution", puzzle 25's own, in plain PyTorch; "mojo", puzzle 23's kernels; "flash" or
            "cuDNN", PyTorch's, for lengths that 2 * ranks divide (the ranks, where not balanced) and N = M.

    Raises ValueError, on every rank the same, where the ranks' tensors do not go together, or do not suit the blocks;
    RuntimeError, with rank and step, where a neighbour is gone or late.
    """
    if blocks not in BLOCKS:
        raise ValueError(f"blocks: expected one of {', '.join(BLOCKS)}, got {blocks!r}")
    group = group or dist.group.WORLD
    ring = ring_of(blocks)
    if length is None:
        length = agreed_length(query, key, value, balanced, group, ring["positions"])
    if blocks in ONE_LENGTH:
        parts = (2 if balanced else 1) * dist.get_world_size(group)
        if length % parts or query.shape[1] != key.shape[1]:
            raise ValueError(
                f"blocks: {blocks!r} takes lengths that {parts} divides and one head of key and value for each of query, "
                f"got {length}, and {key.shape[1]} for {query.shape[1]}"
            )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(device, enabled=False):
        return ring["RingAttention"].apply(query, key, value, length, scale, is_causal, balanced, group)


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
