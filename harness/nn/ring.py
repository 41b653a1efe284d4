"""Ring attention: attention over a sequence split over the ranks of a `torch.distributed` process group.

Each of the `size` ranks has a part of the sequence, one or two ranges of positions (`get_chunks`): query,
out and dO are [B, N, s, d], key and value [B, M, s, d], where N is a multiple of M and `s` may differ between
ranks. The ranks compare shapes and dtypes first, so that all raise the same error and none waits forever. The
forward pass saves query, key, value, out, and lse [B, N, s].

A block is the attention of one range of queries to one range of keys. Sums are float32 for 16-bit tensors.
lse is float64, because float32 cannot represent the sum of a large score and the log of the number of keys.
Kernels round lse to float32, which changes a block's weight and probabilities by at most |lse| 2^-24.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from harness.nn import attention_formula
from harness.nn.arguments import (
    cast_for_autocast,
    check_flag,
    check_qkv,
    check_scale,
    get_accumulation_dtype,
    get_dtype_name,
)
from harness.nn.attention_layer import Part, attention_block, attention_block_backward, has_kernels

Tensor = torch.Tensor
CountPositions = Callable[[int, int, int, bool], int]
"""(rank, size, length, balanced) -> number of positions of the rank."""


def ring_attention(
    query, key, value, is_causal=False, scale=None, group=None, *, balanced=False, length: int | None = None
):
    """Compute softmax(scale * query key^T) value over the entire sequence, of which each rank has a part.

    Blocks run `attention`'s kernels in 16 bits on a GPU, otherwise PyTorch's operations. Under
    `torch.autocast` query, key and value are cast to its dtype; sums stay float32.

    Args:
        query: [B, N, s, d], any floating dtype; s is this rank's part of the sequence.
        key, value: [B, M, s, d]; N is a multiple of M.
        is_causal: Whether a query attends only to keys up to its position.
        scale: None means 1 / sqrt(d).
        group: A process group, None for the default group; its backend sends the blocks.
        balanced: Whether each rank has a range from the front and its mirror image from the end ("zig-zag");
            otherwise ranges are in the order of ranks.
        length: The length of the entire sequence. If None, the ranks exchange their shapes, which takes a
            round of messages.

    Raises:
        TypeError, ValueError, NotImplementedError: An argument is invalid. If the ranks exchange their
            shapes, all raise the same error, which includes the rank.
        ValueError: This rank's part has a wrong number of positions.
        RuntimeError: A neighbour died or timed out, or a torch.func transform is active.
        NotImplementedError: A second or forward-mode derivative was requested.
    """
    check_flag("balanced", balanced)
    group = resolve_process_group(group)
    NoDoubleBackward.apply([], query, key, value)  # PyTorch rejects tangents and torch.func transforms here
    if length is None:
        options = {"is_causal": is_causal, "scale": scale}
        length = agree_on_length(query, key, value, balanced, group, count_positions, options)
    query, key, value = check_parts(query, key, value, scale, is_causal)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length: expected a whole number, got {length!r}")
    expected = count_positions(rank, size, length, balanced)
    if query.shape[2] != expected:
        message = f"length: of {length} positions rank {rank} of {size} has {expected}, got {query.shape[2]}"
        raise ValueError(message)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        use_kernels = has_kernels(query)
        return RingAttention.apply(query, key, value, length, scale, is_causal, balanced, group, use_kernels)


def resolve_process_group(group) -> Any:
    if group is None and not dist.is_initialized():
        raise ValueError("group: there is no default one; call torch.distributed.init_process_group first")
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        is_nonmember = group is dist.GroupMember.NON_GROUP_MEMBER
        actual = "one that does not include this rank" if is_nonmember else repr(group)
        raise TypeError(f"group: expected a process group, got {actual}")
    return group


def check_parts(query, key, value, scale, is_causal) -> tuple[Tensor, Tensor, Tensor]:
    """Check this rank's tensors and return them, cast if autocast is enabled."""
    query, key, value = cast_for_autocast((query, key, value))
    check_qkv(query, key, value)
    check_scale(scale)
    check_flag("is_causal", is_causal)
    if query.is_meta:
        raise NotImplementedError("query: a tensor on meta has no data to send")
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


def agree_on_length(
    query,
    key,
    value,
    balanced: bool,
    group,
    count_positions: CountPositions,
    options: dict[str, Any] | None = None,
) -> int:
    """Return the length of the entire sequence; raise the same error on all ranks if their arguments differ.

    `options`, `balanced` and whether gradients are needed must be equal on all ranks.
    """
    size = dist.get_world_size(group)
    gathered: list[Any] = [None] * size
    local_description = describe_local_tensors(query, key, value, {"balanced": balanced, **(options or {})})
    dist.all_gather_object(gathered, local_description, group=group)
    for rank, description in enumerate(gathered):
        if isinstance(description, Exception):
            raise type(description)(f"rank {rank} of {size}: {description}" if size > 1 else str(description))
    check_ranks_agree(gathered, size)
    return infer_length([shapes for _, shapes in gathered], balanced, count_positions)


def describe_local_tensors(
    query, key, value, options: dict[str, Any]
) -> tuple[dict[str, Any], list] | Exception:
    try:
        tensors = check_parts(query, key, value, options.get("scale"), options.get("is_causal", False))
    except (TypeError, ValueError, NotImplementedError) as error:
        return type(error)(*error.args)
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    properties = {"dtype": get_dtype_name(tensors[0].dtype), **options, "requires_grad": needs_gradients}
    return properties, [list(tensor.shape) for tensor in tensors]


def check_ranks_agree(gathered: list, size: int) -> None:
    """Raise ValueError, with the rank, if its dtype or an option differs from the majority's."""
    for name in gathered[0][0]:
        majority = get_most_common([properties[name] for properties, _ in gathered])
        for rank, (properties, _) in enumerate(gathered):
            if properties[name] == majority:
                continue
            if name == "dtype":
                difference = f"tensors of {properties[name]}, the others of {majority}"
            else:
                difference = f"{name}={properties[name]}, the others {majority}"
            raise ValueError(f"rank {rank} of {size} has {difference}")


def infer_length(shapes: list, balanced: bool, count_positions: CountPositions) -> int:
    """Return the sequence's length from its parts' shapes. Raises ValueError if they are inconsistent."""
    size, local_lengths = len(shapes), [query[2] for query, _, _ in shapes]
    length, total = guess_length(local_lengths, balanced, count_positions), sum(local_lengths)
    B, N, M, d = get_most_common([(*query[:2], key[1], query[3]) for query, key, _ in shapes])
    for rank, rank_shapes in enumerate(shapes):
        local_length = count_positions(rank, size, length, balanced)
        if rank_shapes == [[B, heads, local_length, d] for heads in (N, M, M)]:
            continue
        actual = f"rank {rank} of {size} has query, key and value of {', '.join(map(str, rank_shapes))}"
        if length == total:
            expected = f"{[B, N, local_length, d]} and {[B, M, local_length, d]}"
            raise ValueError(f"{actual}, and not {expected}, its part of {length} positions")
        expected_lengths = [
            ", ".join(str(count_positions(i, size, candidate, balanced)) for i in range(size))
            for candidate in (length, total)
        ]
        raise ValueError(
            f"{actual}: the ranks have {', '.join(map(str, local_lengths))} positions, expected {expected_lengths[0]}, of {length}, "
            f"or {expected_lengths[1]}, of {total}"
        )
    return length


def get_most_common(items: list) -> Any:
    return max(items, key=items.count)


def guess_length(local_lengths: list[int], balanced: bool, count_positions: CountPositions) -> int:
    """Return the length for which the fewest ranks have a wrong part: the total if all are correct."""
    size, total = len(local_lengths), sum(local_lengths)

    def count_wrong(length: int) -> int:
        expected = [count_positions(rank, size, length, balanced) for rank in range(size)]
        return sum(actual != part for actual, part in zip(local_lengths, expected, strict=True))

    if count_wrong(total) == 0:
        return total
    offsets = range(-2 * size, 2 * size + 1)
    candidates = sorted({part * size + offset for part in local_lengths for offset in offsets})
    return min((length for length in candidates if length >= 0), key=count_wrong)


def split_evenly(length, parts):
    """Split `length` positions into `parts` ranges (start, stop) whose sizes differ by at most one."""
    bounds = [length * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))


def get_chunks(rank, size, length, balanced):
    """Return the ranges (start, stop) of a rank, in the order of its tensors: one, or two if balanced."""
    if not balanced:
        return [split_evenly(length, size)[rank]]
    ranges = split_evenly(length, 2 * size)
    return [ranges[rank], ranges[2 * size - 1 - rank]]


def count_positions(rank, size, length, balanced):
    return sum(stop - start for start, stop in get_chunks(rank, size, length, balanced))


# ---- One block: a range of queries, a range of keys ---------------------------------------------------------


def upcast(tensor):
    return tensor.to(get_accumulation_dtype(tensor.dtype))


def make_accumulator(tensor):
    return torch.zeros_like(tensor, dtype=get_accumulation_dtype(tensor.dtype))


def clear_infinities(lse):
    """Return lse [B, N, s, 1] with 0 for fully masked rows, since -inf - -inf is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)[..., None]


def run_block_forward(q, k, v, queries, keys, scale, causal, use_kernels):
    """Return out [B, N, s, d], 0 in fully masked rows, and lse [B, N, s]."""
    if use_kernels:
        return attention_block(q, k, v, Part(queries[0], keys[0], causal, scale))
    diagonal = queries[0] - keys[0] if causal else None
    q, k, v = map(upcast, (q, k, v))
    return attention_formula.forward(q, k, v, None, scale, diagonal, lse_dtype=torch.float64)


def run_block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal, use_kernels):
    """Return a block's part of dQ [B, N, s, d], dK and dV [B, M, t, d]; delta is rowsum(dO * out)."""
    if use_kernels:
        part = Part(queries[0], keys[0], causal, scale)
        return attention_block_backward(dO, q, k, v, lse, delta.contiguous(), part)
    diagonal = queries[0] - keys[0] if causal else None
    dO, q, k, v = map(upcast, (dO, q, k, v))
    return attention_formula.backward(dO, q, k, v, lse, delta, None, scale, diagonal)


def merge_blocks(out, lse, block_out, block_lse):
    """Combine attention to two sets of keys; return out [B, N, s, d] and lse [B, N, s]."""
    block_weight = torch.sigmoid(block_lse[..., None] - clear_infinities(lse))
    block_weight = block_weight.masked_fill(lse[..., None] == -torch.inf, 1)
    return out + block_weight.to(out.dtype) * (block_out - out), torch.logaddexp(lse, block_lse)


def iterate_visible_pairs(query_ranges, key_ranges, causal):
    """Yield the pairs of a query range and a key range that are not fully masked, with their slices."""
    for queries, rows in zip(query_ranges, iterate_slices(query_ranges), strict=True):
        for keys, columns in zip(key_ranges, iterate_slices(key_ranges), strict=True):
            if queries[0] < queries[1] and keys[0] < keys[1] and not (causal and keys[0] >= queries[1]):
                yield queries, rows, keys, columns


def iterate_slices(ranges):
    """Yield each range's slice of a tensor that concatenates the ranges."""
    start = 0
    for first, last in ranges:
        yield slice(start, start + last - first)
        start += last - first


def exchange(tensors, shapes, group):
    """Start sending tensors to the next rank and receiving tensors of `shapes` from the previous one.

    Return the receive buffers and the pending works, for which `wait_for_exchange` must be called first.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return list(tensors), []
    next_rank = dist.get_global_rank(group, (rank + 1) % size)
    previous_rank = dist.get_global_rank(group, (rank - 1) % size)
    received = [tensors[i].new_empty(shape) for i, shape in enumerate(shapes)]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), next_rank, group) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, previous_rank, group) for tensor in received]
    return received, dist.batch_isend_irecv(operations)


def wait_for_exchange(works, step, group):
    """Wait for an exchange. Raises RuntimeError, with rank and step, if a neighbour died or timed out."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        neighbours = f"rank {(rank - 1) % size} or {(rank + 1) % size}"
        reason = " ".join(str(error).split())[:160]
        raise RuntimeError(f"rank {rank}, step {step}: no answer from {neighbours}: {reason}") from error


def get_block_shape(tensor, rank, size, length, balanced):
    B, M, _, d = tensor.shape
    return B, M, count_positions(rank, size, length, balanced), d


def run_ring_forward(q, k, v, length, scale, causal, balanced, group, use_kernels):
    """Return out [B, N, s, d] in the accumulation dtype, and lse [B, N, s], for this rank's queries."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    query_ranges = get_chunks(rank, size, length, balanced)
    out = make_accumulator(q)
    lse = out.new_full(out.shape[:-1], -torch.inf, dtype=torch.float64)

    def add_block(block, origin):
        k, v = block
        key_ranges = get_chunks(origin, size, length, balanced)
        for queries, rows, keys, columns in iterate_visible_pairs(query_ranges, key_ranges, causal):
            block_tensors = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            block_result = run_block_forward(*block_tensors, queries, keys, scale, causal, use_kernels)
            out[:, :, rows], lse[:, :, rows] = merge_blocks(out[:, :, rows], lse[:, :, rows], *block_result)

    block = [k, v]
    for step in range(size):
        origin, next_origin = (rank - step) % size, (rank - step - 1) % size
        received, works = block, []
        if step < size - 1:
            shape = get_block_shape(k, next_origin, size, length, balanced)
            received, works = exchange(block, [shape, shape], group)
        add_block(block, origin)
        wait_for_exchange(works, step, group)
        block = received
    return out, lse


def compute_contributions(dO, q, k, v, lse, delta, query_ranges, key_ranges, scale, causal, use_kernels):
    """Return the contributions of query ranges and key ranges to dQ, dK and dV."""
    dQ, dK, dV = map(make_accumulator, (q, k, v))
    for queries, rows, keys, columns in iterate_visible_pairs(query_ranges, key_ranges, causal):
        block = dO[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns]
        saved = lse[:, :, rows], delta[:, :, rows]
        block_gradients = run_block_backward(*block, *saved, queries, keys, scale, causal, use_kernels)
        dQ[:, :, rows] += block_gradients[0]
        dK[:, :, columns] += block_gradients[1]
        dV[:, :, columns] += block_gradients[2]
    return dQ, dK, dV


def run_ring_backward(dO, q, k, v, out, lse, length, scale, causal, balanced, group, use_kernels):
    """Return this rank's dQ [B, N, s, d], dK and dV [B, M, s, d]; dK and dV circulate with their keys."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    query_ranges = get_chunks(rank, size, length, balanced)
    delta = (upcast(dO) * upcast(out)).sum(-1)
    dQ: Any = None
    dK: Any = None
    dV: Any = None
    block, works, origin = [k, v], [], rank
    for step in range(size):
        next_origin = (origin - 1) % size
        shape = get_block_shape(k, next_origin, size, length, balanced)
        received, block_works = block, []
        if step + 1 < size:
            received, block_works = exchange(block, [shape, shape], group)
        key_ranges = get_chunks(origin, size, length, balanced)
        block_dQ, *block_dKV = compute_contributions(
            dO, q, *block, lse, delta, query_ranges, key_ranges, scale, causal, use_kernels
        )
        dQ = block_dQ if step == 0 else dQ + block_dQ
        wait_for_exchange(works, step, group)
        dK, dV = block_dKV if step == 0 else (dK + block_dKV[0], dV + block_dKV[1])
        if step == size - 1:  # the sums are complete; round them to send fewer bytes
            dK, dV = dK.to(k.dtype), dV.to(v.dtype)
        (dK, dV), works = exchange([dK, dV], [shape, shape], group)
        if step == size - 1:
            wait_for_exchange(works, step, group)
        wait_for_exchange(block_works, step, group)
        block, origin = received, next_origin
    return dQ, dK, dV


NO_DOUBLE_BACKWARD = (
    "ring_attention has no double backward: its gradients cannot be differentiated again; use "
    "torch.nn.functional.scaled_dot_product_attention on the whole sequence where a second derivative is needed"
)


class NoDoubleBackward(torch.autograd.Function):
    """Attach gradients to their sources, so that a second derivative raises an error instead of being 0.

    The gradients are passed as a list, because direct inputs would be returned as views.
    """

    @staticmethod
    def forward(ctx, gradients: list, *sources):
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(NO_DOUBLE_BACKWARD)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, length, scale, causal, balanced, group, use_kernels):
        out, lse = run_ring_forward(q, k, v, length, scale, causal, balanced, group, use_kernels)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = length, scale, causal, balanced, group, use_kernels
        return out

    @staticmethod
    def backward(ctx, dO):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            gradients = [
                gradient.to(q.dtype) for gradient in run_ring_backward(dO, q, k, v, out, lse, *ctx.ring)
            ]
        if torch.is_grad_enabled():
            gradients = NoDoubleBackward.apply(gradients, dO, q, k, v)
        return *gradients, None, None, None, None, None, None
