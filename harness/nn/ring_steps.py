"""The steps of `ring_attention`: an `autograd.Function` over `torch.distributed`.

Each of the `size` ranks of a group holds a part of a sequence, one range of positions or two (`chunks`): of
query, out and dO [B, N, s, d], of key and value [B, M, s, d], where N is a multiple of M and `s` may differ
by rank. The forward pass saves the rank's own query, key, value, out, and lse [B, N, s], the logarithm of
each row's sum of exponentials.

A block is attention of one range of queries to one of keys. Sums are float32 for 16-bit tensors, but lse is
float64: next to a large score float32 has no digits left for how many keys there are. Kernels round the lse of
a block, and of all, to float32, so that a block's share of a row, and a probability p, is off by |lse| 2^-24 at most.
Puzzle 25 asks for the same in a file of its own.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from harness.nn import attention_formula
from harness.nn.attention_layer import Part, attention_block, attention_block_backward
from harness.nn.derivatives import first_order

# ---- Layout of the sequence over ranks ----------------------------------------------------------------------


def cut(length, parts):
    """Return `parts` ranges (start, stop) of `length` positions, whose sizes differ by at most one."""
    edges = [length * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def chunks(rank, size, length, balanced):
    """Return the ranges (start, stop) that a rank holds, in the order of its tensors: one, or two if balanced."""
    if not balanced:
        return [cut(length, size)[rank]]
    pieces = cut(length, 2 * size)
    return [pieces[rank], pieces[2 * size - 1 - rank]]


def positions(rank, size, length, balanced):
    """Return how many positions a rank holds."""
    return sum(stop - start for start, stop in chunks(rank, size, length, balanced))


# ---- One block: a range of queries, a range of keys ---------------------------------------------------------


def wide(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def zeros(tensor):
    return torch.zeros_like(tensor, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def finite(lse):
    """Return lse [B, N, s, 1], 0 if a row sees no key: -inf - -inf would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)[..., None]


def block_forward(q, k, v, queries, keys, scale, causal, kernels):
    """Return out [B, N, s, d], 0 in a row that sees no key of the block, and lse [B, N, s]."""
    if kernels:
        out, lse = attention_block(q, k, v, Part(queries[0], keys[0], causal, scale))
        return out, lse.double()
    diagonal = queries[0] - keys[0] if causal else None
    q, k, v = map(wide, (q, k, v))
    return attention_formula.forward(q, k, v, None, scale, diagonal, sums=torch.float64)


def block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal, kernels):
    """Return the terms of a block in dQ [B, N, s, d], dK and dV [B, M, t, d]; delta is rowsum(dO * out)."""
    if kernels:
        part = Part(queries[0], keys[0], causal, scale)
        return attention_block_backward(dO, q, k, v, lse.float(), delta.contiguous(), part)
    diagonal = queries[0] - keys[0] if causal else None
    dO, q, k, v = map(wide, (dO, q, k, v))
    return attention_formula.backward(dO, q, k, v, lse, delta, None, scale, diagonal)


def merge(out, lse, block_out, block_lse):
    """Combine attention to two sets of keys: out [B, N, s, d] and lse [B, N, s]."""
    share = torch.sigmoid(block_lse[..., None] - finite(lse)).masked_fill(lse[..., None] == -torch.inf, 1)
    return out + share.to(out.dtype) * (block_out - out), torch.logaddexp(lse, block_lse)


def pairs(mine, theirs, causal):
    """Yield the ranges of queries and keys that see each other, each with its slice of the tensors."""
    for queries, rows in zip(mine, slices(mine), strict=True):
        for keys, columns in zip(theirs, slices(theirs), strict=True):
            if queries[0] < queries[1] and keys[0] < keys[1] and not (causal and keys[0] >= queries[1]):
                yield queries, rows, keys, columns


def slices(ranges):
    """Yield the slice of each range in a tensor that concatenates them."""
    start = 0
    for first, last in ranges:
        yield slice(start, start + last - first)
        start += last - first


# ---- The ring -----------------------------------------------------------------------------------------------


def exchange(tensors, shapes, group):
    """Start sending tensors to the next rank and receiving tensors of `shapes` from the previous one.

    Returns the receive buffers, and the works to `finish` before they are read and before `tensors` change.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return list(tensors), []
    following = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    received = [tensors[i].new_empty(shape) for i, shape in enumerate(shapes)]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), following, group) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    return received, dist.batch_isend_irecv(operations)


def finish(works, step, group):
    """Wait for an exchange; raise RuntimeError, naming rank and step, if a neighbour is gone or late."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        neighbours = f"rank {(rank - 1) % size} or {(rank + 1) % size}"
        words = " ".join(str(error).split())[:160]
        raise RuntimeError(f"rank {rank}, step {step}: {neighbours} is gone or late: {words}") from error


def shape_of(tensor, rank, size, length, balanced):
    B, M, _, d = tensor.shape
    return B, M, positions(rank, size, length, balanced), d


def ring_forward(q, k, v, length, scale, causal, balanced, group, kernels):
    """Return out [B, N, s, d] and lse [B, N, s] of this rank's queries, in the dtype of sums."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = chunks(rank, size, length, balanced)
    out = zeros(q)
    lse = out.new_full(out.shape[:-1], -torch.inf, dtype=torch.float64)

    def attend(block, origin):
        k, v = block
        for queries, rows, keys, columns in pairs(mine, chunks(origin, size, length, balanced), causal):
            of_block = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            part = block_forward(*of_block, queries, keys, scale, causal, kernels)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *part)

    block = [k, v]
    for step in range(size):
        origin, coming = (rank - step) % size, (rank - step - 1) % size
        received, works = block, []
        if step < size - 1:
            shape = shape_of(k, coming, size, length, balanced)
            received, works = exchange(block, [shape, shape], group)
        attend(block, origin)
        finish(works, step, group)
        block = received
    return out, lse


def contributions(dO, q, k, v, lse, delta, mine, theirs, scale, causal, kernels):
    """Return the terms of the queries in the ranges `mine` in dQ, and in dK and dV of the keys in `theirs`."""
    dQ, dK, dV = map(zeros, (q, k, v))
    for queries, rows, keys, columns in pairs(mine, theirs, causal):
        block = dO[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns]
        saved = lse[:, :, rows], delta[:, :, rows]
        part = block_backward(*block, *saved, queries, keys, scale, causal, kernels)
        dQ[:, :, rows] += part[0]
        dK[:, :, columns] += part[1]
        dV[:, :, columns] += part[2]
    return dQ, dK, dV


def ring_backward(dO, q, k, v, out, lse, length, scale, causal, balanced, group, kernels):
    """Return dQ [B, N, s, d], dK and dV [B, M, s, d] of this rank: gradients travel with their block of keys."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = chunks(rank, size, length, balanced)
    delta = (wide(dO) * wide(out)).sum(-1)
    dQ: Any = None
    dK: Any = None
    dV: Any = None
    block, works, origin = [k, v], [], rank
    for step in range(size):
        coming = (origin - 1) % size
        shape = shape_of(k, coming, size, length, balanced)
        received, block_works = block, []
        if step + 1 < size:
            received, block_works = exchange(block, [shape, shape], group)
        theirs = chunks(origin, size, length, balanced)
        share, *added = contributions(dO, q, *block, lse, delta, mine, theirs, scale, causal, kernels)
        dQ = share if step == 0 else dQ + share
        finish(works, step, group)
        dK, dV = added if step == 0 else (dK + added[0], dV + added[1])
        if step == size - 1:  # nothing is added any more: rounded here or at home, it is the same
            dK, dV = dK.to(k.dtype), dV.to(v.dtype)
        (dK, dV), works = exchange([dK, dV], [shape, shape], group)
        if step == size - 1:
            finish(works, step, group)
        finish(block_works, step, group)
        block, origin = received, coming
    return dQ, dK, dV


class RingAttention(torch.autograd.Function):
    """Attention over the sequence that the ranks of a group hold together; each has its part."""

    @staticmethod
    def forward(ctx, q, k, v, length, scale, causal, balanced, group, kernels):
        out, lse = ring_forward(q, k, v, length, scale, causal, balanced, group, kernels)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = length, scale, causal, balanced, group, kernels
        return out

    @staticmethod
    @first_order("ring_attention", "torch.nn.functional.scaled_dot_product_attention on the whole sequence")
    def backward(ctx, dO):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ring_backward(dO, q, k, v, out, lse, *ctx.ring)
        narrow = (gradient.to(q.dtype) for gradient in gradients)
        return *narrow, None, None, None, None, None, None
