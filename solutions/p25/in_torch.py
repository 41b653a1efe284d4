"""Puzzle 25 in PyTorch: ring attention as one `autograd.Function` over `torch.distributed`.

Each of the `size` ranks of a group has one part of a sequence: query, out and dO [B, N, s, d], key and value
[B, G, s, d]; N is a multiple of G, and the number of positions `s` may differ by rank. A part is one or two ranges of
positions, concatenated (`chunks`). The forward pass saves the rank's query, key, value, out, and lse [B, N, s], the
logarithm of each row's sum of exponentials.

`block_forward` and `block_backward` are the only functions that compute attention, of one range of queries and one of
keys; faster ones can replace them. Sums are float32 for 16-bit tensors.
"""

from itertools import pairwise

import torch
import torch.distributed as dist

# ---- Partition of the sequence -----------------------------------------------------------------------------------------


def cut(length, parts):
    """Split `length` positions into `parts` ranges (start, stop) whose lengths differ by at most one; no padding."""
    edges = [length * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def chunks(rank, size, length, balanced):
    """Return a rank's ranges (start, stop) of positions, in the order of its tensors: one, or two if `balanced`."""
    if not balanced:
        return [cut(length, size)[rank]]
    # BLANK-START balanced: of 2 * size ranges, number `rank` from the front and from the end
    pieces = cut(length, 2 * size)
    return [pieces[rank], pieces[2 * size - 1 - rank]]
    # BLANK-END balanced


def positions(rank, size, length, balanced):
    """Return the number of positions of a rank."""
    return sum(stop - start for start, stop in chunks(rank, size, length, balanced))


# ---- One block: a range of queries, a range of keys ---------------------------------------------------------


def wide(tensor):
    """Convert a tensor to the accumulation dtype."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def zeros(tensor):
    """Return zeros of a tensor's shape in the accumulation dtype."""
    return torch.zeros_like(tensor, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def hidden(queries, keys):
    """Return True where a key comes after a query, [queries, keys]; both are ranges (start, stop) of positions."""
    # BLANK-START causal: compare positions in the sequence, not in the block
    return torch.arange(*keys) > torch.arange(*queries)[:, None]
    # BLANK-END causal


def scores(q, k, queries, keys, scale, causal):
    """Return scale * q k^T, -inf where a key is hidden, [B, N, s, t]; N / G heads of q share a head of k."""
    heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    masked = scale * (q @ heads.mT)
    if causal:
        masked = masked.masked_fill(hidden(queries, keys).to(q.device), -torch.inf)
    return masked


def finite(lse):
    """Return lse as [B, N, s, 1], with 0 for rows that see no key, because -inf - -inf would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)[..., None]


def probabilities(masked, lse):
    """Return exp(scores - lse) [B, N, s, t], 0 in a row that sees no key."""
    return torch.exp(masked - finite(lse))


def block_forward(q, k, v, queries, keys, scale, causal):
    """Return the attention of q to the keys of one block alone: out [B, N, s, d], 0 in a row without keys, and lse."""
    q, k, v = wide(q), wide(k), wide(v)
    masked = scores(q, k, queries, keys, scale, causal)
    lse = torch.logsumexp(masked, -1)
    P = probabilities(masked, lse)
    return P @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse


def block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal):
    """Return a block's contributions to dQ [B, N, s, d], dK and dV [B, G, t, d]; delta is the row sums of dO * out."""
    dO, q, k, v = wide(dO), wide(q), wide(k), wide(v)
    masked = scores(q, k, queries, keys, scale, causal)
    G, groups = k.shape[1], q.shape[1] // k.shape[1]
    K, V = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    dQ = dK = dV = None
    # BLANK-START recompute: P from lse, dP, dS; then dQ, dK and dV of every head of q
    P = probabilities(masked, lse)
    dP = dO @ V.mT
    dS = P * (dP - delta[..., None])
    dQ, dK, dV = scale * (dS @ K), scale * (dS.mT @ q), P.mT @ dO
    # BLANK-END recompute
    return dQ, dK.unflatten(1, (G, groups)).sum(2), dV.unflatten(1, (G, groups)).sum(2)


def merge(out, lse, block_out, block_lse):
    """Merge the attention to two sets of keys: return out [B, N, s, d] and lse [B, N, s]."""
    # BLANK-START merge: the block's share of the sum of both; the mean weighted by it, and the new lse
    share = torch.sigmoid(block_lse[..., None] - finite(lse)).masked_fill(lse[..., None] == -torch.inf, 1)
    return out + share * (block_out - out), torch.logaddexp(lse, block_lse)
    # BLANK-END merge


def pairs(query_ranges, key_ranges, causal):
    """Yield the pairs of query and key ranges with visible keys, each with its slice of the tensors."""
    for queries, rows in zip(query_ranges, slices(query_ranges), strict=True):
        for keys, columns in zip(key_ranges, slices(key_ranges), strict=True):
            if queries[0] < queries[1] and keys[0] < keys[1] and not (causal and keys[0] >= queries[1]):
                yield queries, rows, keys, columns


def slices(ranges):
    """Yield the slice of each range in a tensor of concatenated ranges."""
    start = 0
    for first, last in ranges:
        yield slice(start, start + last - first)
        start += last - first


# ---- The ring -----------------------------------------------------------------------------------------------


def exchange(tensors, shapes, group):
    """Start sending tensors to the next rank, and receiving tensors of `shapes` from the previous one.

    Return the tensors to receive, and the works to `finish` before they are read and before `tensors` change.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return list(tensors), []
    # BLANK-START exchange: every rank sends and receives at the same time, among the ranks of the group
    next_rank = dist.get_global_rank(group, (rank + 1) % size)
    previous_rank = dist.get_global_rank(group, (rank - 1) % size)
    received = [tensors[i].new_empty(shape) for i, shape in enumerate(shapes)]
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), next_rank, group) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, previous_rank, group) for tensor in received]
    return received, dist.batch_isend_irecv(operations)
    # BLANK-END exchange


def finish(works, step, group):
    """Wait for the works of an exchange. Raise RuntimeError with rank and step if a neighbour died or timed out."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        neighbours = f"rank {(rank - 1) % size} or {(rank + 1) % size}"
        reason = " ".join(str(error).split())[:160]
        raise RuntimeError(f"rank {rank}, step {step}: no answer from {neighbours}: {reason}") from error


def shape_of(tensor, rank, size, length, balanced):
    """Return the shape of a tensor [B, G, s, d] for another rank's number of positions."""
    B, G, _, d = tensor.shape
    return B, G, positions(rank, size, length, balanced), d


def ring_forward(q, k, v, length, scale, causal, balanced, group):
    """Return out [B, N, s, d] and lse [B, N, s] of this rank's queries, in the accumulation dtype."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    query_ranges = chunks(rank, size, length, balanced)
    out = zeros(q)
    lse = out.new_full(out.shape[:-1], -torch.inf)

    def attend(k, v, origin):
        """Merge the attention of this rank's queries to the keys of rank `origin`."""
        for queries, rows, keys, columns in pairs(
            query_ranges, chunks(origin, size, length, balanced), causal
        ):
            part = block_forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], queries, keys, scale, causal
            )
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *part)

    # BLANK-START steps: whose block is here at each step; the next one is in transit while this one is computed
    block = [k, v]
    for step in range(size):
        origin, next_origin = (rank - step) % size, (rank - step - 1) % size
        received, works = block, []
        if step < size - 1:
            shape = shape_of(k, next_origin, size, length, balanced)
            received, works = exchange(block, [shape, shape], group)
        attend(*block, origin)
        finish(works, step, group)
        block = received
    # BLANK-END steps
    return out, lse


def row_sums(dO, out):
    """Return delta, the row sums of dO * out, [B, N, s]: the only use of the output in a block's backward pass."""
    return (wide(dO) * wide(out)).sum(-1)


def contributions(dO, q, k, v, lse, delta, query_ranges, key_ranges, scale, causal):
    """Return the contributions of query ranges and key ranges to dQ, dK and dV."""
    dQ, dK, dV = map(zeros, (q, k, v))
    for queries, rows, keys, columns in pairs(query_ranges, key_ranges, causal):
        row_tensors = (tensor[:, :, rows] for tensor in (dO, q))
        column_tensors = (tensor[:, :, columns] for tensor in (k, v))
        saved = lse[:, :, rows], delta[:, :, rows]
        part = block_backward(*row_tensors, *column_tensors, *saved, queries, keys, scale, causal)
        dQ[:, :, rows] += part[0]
        dK[:, :, columns] += part[1]
        dV[:, :, columns] += part[2]
    return dQ, dK, dV


def ring_backward(dO, q, k, v, out, lse, length, scale, causal, balanced, group):
    """Return dQ [B, N, s, d], dK and dV [B, G, s, d] of this rank, computed in a second pass around the ring."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    query_ranges = chunks(rank, size, length, balanced)
    delta = row_sums(dO, out)
    dQ = dK = dV = None
    block, works, origin = [k, v], [], rank
    for step in range(size):
        next_origin = (origin - 1) % size
        shape = shape_of(k, next_origin, size, length, balanced)
        received, block_works = block, []
        if step + 1 < size:
            received, block_works = exchange(block, [shape, shape], group)
        key_ranges = chunks(origin, size, length, balanced)
        share, *added = contributions(dO, q, *block, lse, delta, query_ranges, key_ranges, scale, causal)
        dQ = share if step == 0 else dQ + share
        # BLANK-START home: receive this block's dK and dV from the previous rank, add this rank's, and send them on
        finish(works, step, group)
        dK, dV = added if step == 0 else (dK + added[0], dV + added[1])
        if step == size - 1:  # nothing is added any more: rounded here or at home, it is the same
            dK, dV = dK.to(k.dtype), dV.to(v.dtype)
        (dK, dV), works = exchange([dK, dV], [shape, shape], group)
        if step == size - 1:
            finish(works, step, group)
        # BLANK-END home
        finish(block_works, step, group)
        block, origin = received, next_origin
    return dQ, dK, dV


class RingAttention(torch.autograd.Function):
    """softmax(scale * q k^T) v over a sequence that is distributed over the ranks of a group.

    Args of `apply`: q, k, v of this rank; length of the whole sequence; scale; causal; balanced; the group.
    """

    @staticmethod
    def forward(ctx, q, k, v, length, scale, causal, balanced, group):
        """Return out of this rank's queries, [B, N, s, d]."""
        out, lse = ring_forward(q, k, v, length, scale, causal, balanced, group)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = length, scale, causal, balanced, group
        return out

    @staticmethod
    def backward(ctx, dO):
        """Return the gradients of this rank's q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ring_backward(dO, q, k, v, out, lse, *ctx.ring)
        narrow = (gradient.to(q.dtype) for gradient in gradients)
        return *narrow, None, None, None, None, None
