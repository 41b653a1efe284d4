"""Attention over a sequence that is split over the ranks of a process group: `ring_steps` with checks.

The ranks first compare shapes and dtypes: with one that differs the others would wait for blocks that never
fit. All raise the same error, which names the rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.nn import attention_layer
from harness.nn.arguments import (
    check_attended,
    check_flag,
    check_scale,
    check_whole,
    in_autocast_dtype,
    plain,
)
from harness.nn.derivatives import check_first_order
from harness.nn.ring_steps import RingAttention, positions

Tensor = torch.Tensor
Positions = Callable[[int, int, int, bool], int]
"""rank, size, length, balanced -> how many positions the rank holds."""


def ring_attention(
    query, key, value, is_causal=False, scale=None, group=None, *, balanced=False, length: int | None = None
):
    """Compute softmax(scale * query key^T) value over the whole sequence; each rank passes and gets its part.

    Each block is computed by `attention`'s kernels, in 16 bits on a GPU, else by PyTorch's operations. Under
    `torch.autocast` query, key and value are cast to its dtype; sums are float32 all the same.

    Args:
        query: [B, N, s, d], any floating dtype; s is this rank's part of the sequence.
        key, value: [B, M, s, d]; N is a multiple of M.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: 1 / sqrt(d) if None.
        group: A process group, the default one if None; its backend sends the blocks.
        balanced: Whether each rank holds a range from the front and its mirror image from the end
            ("zig-zag"); else ranges are in the order of ranks.
        length: Of the whole sequence. If None the ranks compare what they have, which costs a round of
            messages; a loop can pass the length after the first call.

    Raises:
        TypeError, ValueError, NotImplementedError: An argument does not fit. If the ranks compare what they
            have, every rank raises the same error, which names the rank too.
        ValueError: This rank's part is not what it should hold of `length` positions.
        RuntimeError: A neighbour is gone or late, or a transform of torch.func is active.
        NotImplementedError: A second or a forward-mode derivative.
    """
    check_flag("balanced", balanced)
    group = process_group(group)
    check_first_order(query, key, value)
    if length is None:
        options = {"is_causal": is_causal, "scale": scale}
        length = agreed_length(query, key, value, balanced, group, positions, options)
    query, key, value = parts_of(query, key, value, scale, is_causal)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = positions(rank, size, check_whole("length", length, 0), balanced)
    if query.shape[2] != part:
        raise ValueError(
            f"length: of {length} positions rank {rank} of {size} holds {part}, got {query.shape[2]}"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        kernels = attention_layer.has_kernels(query)
        return RingAttention.apply(query, key, value, length, scale, is_causal, balanced, group, kernels)


def process_group(group) -> Any:
    """Return the group, the default one for None."""
    if group is None and not dist.is_initialized():
        raise ValueError("group: there is no default one; call torch.distributed.init_process_group first")
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        words = "one that this rank is not in" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
        raise TypeError(f"group: expected a process group, got {words}")
    return group


def parts_of(query, key, value, scale, is_causal) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked tensors, in autocast's dtype if it is on."""
    query, key, value = in_autocast_dtype((query, key, value))
    check_attended(query, key, value)
    check_scale(scale)
    check_flag("is_causal", is_causal)
    if query.is_meta:
        raise NotImplementedError("query: a tensor on meta has nothing that could be sent")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected four axes, [B, heads, length, d], got {list(tensor.shape)}")
    (B, N, s, d), M = query.shape, key.shape[1]
    if not M or N % M:
        raise ValueError(f"key: expected a number of heads that divides the {N} of query, got {M}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != (B, M, s, d):
            raise ValueError(f"{name}: expected {[B, M, s, d]}, got {list(tensor.shape)}")
    return query, key, value


def agreed_length(
    query, key, value, balanced: bool, group, positions: Positions, options: dict[str, Any] | None = None
) -> int:
    """Return the length of the whole sequence; raise the same error on every rank if what they have differs.

    `options` must be the same on all ranks, as must `balanced`, and whether gradients are needed.
    """
    size = dist.get_world_size(group)
    gathered: list[Any] = [None] * size
    mine = what_is_here(query, key, value, {"balanced": balanced, **(options or {})})
    dist.all_gather_object(gathered, mine, group=group)
    for rank, own in enumerate(gathered):
        if isinstance(own, Exception):
            raise type(own)(f"rank {rank} of {size}: {own}" if size > 1 else str(own))
    check_alike(gathered, size)
    return length_of([shapes for _, shapes in gathered], balanced, positions)


def what_is_here(query, key, value, options: dict[str, Any]) -> tuple[dict[str, Any], list] | Exception:
    """Return the values that must agree on all ranks, by name, and the shapes; or the error."""
    try:
        tensors = parts_of(query, key, value, options.get("scale"), options.get("is_causal", False))
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error)(*error.args)
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    alike = {"dtype": plain(tensors[0].dtype), **options, "requires_grad": backward}
    return alike, [list(tensor.shape) for tensor in tensors]


def check_alike(said: list, size: int) -> None:
    """Raise ValueError, naming the rank, if one has another dtype or option than most."""
    for name in said[0][0]:
        usual = most([alike[name] for alike, _ in said])
        for rank, (alike, _) in enumerate(said):
            if alike[name] == usual:
                continue
            if name == "dtype":
                raise ValueError(f"rank {rank} of {size} has tensors of {alike[name]}, the others of {usual}")
            raise ValueError(f"rank {rank} of {size} has {name}={alike[name]}, the others {usual}")


def length_of(shapes: list, balanced: bool, positions: Positions) -> int:
    """Return the length of a sequence whose parts have these shapes; raise ValueError if they do not fit."""
    size, here = len(shapes), [query[2] for query, _, _ in shapes]
    length, total = likeliest_length(here, balanced, positions), sum(here)
    B, N, M, d = most([(*query[:2], key[1], query[3]) for query, key, _ in shapes])
    for rank, own in enumerate(shapes):
        part = positions(rank, size, length, balanced)
        if own == [[B, heads, part, d] for heads in (N, M, M)]:
            continue
        have = f"rank {rank} of {size} has query, key and value of {', '.join(map(str, own))}"
        if length == total:
            expected = f"{[B, N, part, d]} and {[B, M, part, d]}"
            raise ValueError(f"{have}, and not {expected}, its part of {length} positions")
        parts = [
            ", ".join(str(positions(each, size, whole, balanced)) for each in range(size))
            for whole in (length, total)
        ]
        raise ValueError(
            f"{have}: the ranks hold {', '.join(map(str, here))} positions, and should hold {parts[0]}, of {length}, "
            f"or {parts[1]}, of {total}"
        )
    return length


def most(items: list) -> Any:
    return max(items, key=items.count)


def likeliest_length(parts: list[int], balanced: bool, positions: Positions) -> int:
    """Return the length for which the fewest ranks have a wrong part: the sum of the parts if all fit."""
    size, total = len(parts), sum(parts)

    def wrong(length: int) -> int:
        return sum(positions(rank, size, length, balanced) != part for rank, part in enumerate(parts))

    near = {part * size + k for part in parts for k in range(-2 * size, 2 * size + 1)}
    return total if wrong(total) == 0 else min(sorted(each for each in near if each >= 0), key=wrong)
