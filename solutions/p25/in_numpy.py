"""Puzzle 25 in NumPy: ring attention in one process, with a list instead of ranks.

`queries[rank]` is the query of a rank, [B, N, s, d]; keys and values likewise, [B, G, s, d], where N is a multiple of G.
The number of positions s may differ by rank. A rank has one or two ranges of positions, concatenated (`chunks`).
lse [B, N, s] is the logarithm of each row's sum of exponentials.

Nothing is sent: after each step of all ranks, the list is rotated by one (`rotate`). in_torch.py has the same functions
with processes.
"""

from itertools import pairwise

import numpy as np

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


def positions(ranges):
    """Return the positions in the sequence of a rank with these ranges."""
    return np.concatenate([np.arange(*span) for span in ranges])


def rotate(items):
    """Rotate: return each rank's item after every rank has sent its item to the next one."""
    return [items[-1], *items[:-1]]


# ---- One block: the queries of one rank, the keys of another ------------------------------------------------


def hidden(queries, keys):
    """Return a mask, True where a key comes after a query, [s, t]; both are the ranges of a rank."""
    # BLANK-START causal: compare positions in the sequence, not in the block
    return positions(keys) > positions(queries)[:, None]
    # BLANK-END causal


def scores(q, k, queries, keys, scale, causal):
    """Return scale * q k^T, -inf where a key is hidden, [B, N, s, t]; N / G heads of q share a head of k."""
    found = scale * np.einsum("bnsd,bntd->bnst", q, k.repeat(q.shape[1] // k.shape[1], 1))
    return np.where(hidden(queries, keys), -np.inf, found) if causal else found


def finite(lse):
    """Return lse as [B, N, s, 1], with 0 for rows that see no key, because -inf - -inf would be NaN."""
    return np.where(lse == -np.inf, 0, lse)[..., None]


def probabilities(found, lse):
    """Return exp(scores - lse) [B, N, s, t], 0 in a row that sees no key."""
    return np.exp(found - finite(lse))


def block_forward(q, k, v, queries, keys, scale, causal):
    """Return the attention of q to the keys of one block alone: out [B, N, s, d], 0 in a row without keys, and lse."""
    found = scores(q, k, queries, keys, scale, causal)
    lse = np.logaddexp.reduce(found, -1, initial=-np.inf)
    P = probabilities(found, lse)
    return np.einsum("bnst,bntd->bnsd", P, v.repeat(q.shape[1] // v.shape[1], 1)), lse


def block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal):
    """Return a block's contributions to dQ [B, N, s, d], dK and dV [B, G, t, d]; delta is the row sums of dO * out."""
    found = scores(q, k, queries, keys, scale, causal)
    B, G, t, d = k.shape
    groups = q.shape[1] // G
    K, V = k.repeat(groups, 1), v.repeat(groups, 1)
    dQ = dK = dV = None
    # BLANK-START recompute: P from lse, dP, dS; then dQ, dK and dV of every head of q
    P = probabilities(found, lse)
    dP = np.einsum("bnsd,bntd->bnst", dO, V)
    dS = P * (dP - delta[..., None])
    dQ = scale * np.einsum("bnst,bntd->bnsd", dS, K)
    dK = scale * np.einsum("bnst,bnsd->bntd", dS, q)
    dV = np.einsum("bnst,bnsd->bntd", P, dO)
    # BLANK-END recompute
    return dQ, dK.reshape(B, G, groups, t, d).sum(2), dV.reshape(B, G, groups, t, d).sum(2)


def merge(out, lse, block_out, block_lse):
    """Merge the attention to two sets of keys: return out [B, N, s, d] and lse [B, N, s]."""
    # BLANK-START merge: the block's share of the sum of both; the mean weighted by it, and the new lse
    both = np.logaddexp(lse, block_lse)
    share = np.exp(block_lse[..., None] - finite(both))
    return out + share * (block_out - out), both
    # BLANK-END merge


# ---- The ring -----------------------------------------------------------------------------------------------


def ring_forward(queries, keys, values, ranges, scale, causal):
    """Return out and lse of every rank, two lists; `ranges` has a list of ranges for each rank."""
    size = len(queries)
    out = [np.zeros_like(q) for q in queries]
    lse = [np.full(q.shape[:-1], -np.inf) for q in queries]
    # BLANK-START steps: whose block is at each rank at each step; attend to it and merge, then turn the blocks
    blocks = list(zip(keys, values, strict=True))
    for step in range(size):
        for rank in range(size):
            origin = (rank - step) % size
            found = block_forward(queries[rank], *blocks[rank], ranges[rank], ranges[origin], scale, causal)
            out[rank], lse[rank] = merge(out[rank], lse[rank], *found)
        blocks = rotate(blocks)
    # BLANK-END steps
    return out, lse


def ring_backward(dO, queries, keys, values, out, lse, ranges, scale, causal):
    """Return dQ, dK and dV of every rank, three lists."""
    size = len(queries)
    delta = [(g * o).sum(-1) for g, o in zip(dO, out, strict=True)]
    dQ = [np.zeros_like(q) for q in queries]
    # The block at each rank, the rank that owns it, and its dK and dV.
    blocks, owners = list(zip(keys, values, strict=True)), list(range(size))
    travelling = [(np.zeros_like(k), np.zeros_like(v)) for k, v in blocks]
    for step in range(size):  # noqa: B007, for the blank
        added = []
        for rank in range(size):
            found = block_backward(
                dO[rank], queries[rank], *blocks[rank], lse[rank], delta[rank],
                ranges[rank], ranges[owners[rank]], scale, causal,
            )  # fmt: skip
            dQ[rank] += found[0]
            added.append(found[1:])
        blocks, owners = rotate(blocks), rotate(owners)
        # BLANK-START home: add each rank's contributions to the gradients at that rank, then rotate these
        pairs = zip(travelling, added, strict=True)
        travelling = rotate([(dK + terms[0], dV + terms[1]) for (dK, dV), terms in pairs])
        # BLANK-END home
    return dQ, [dK for dK, _ in travelling], [dV for _, dV in travelling]
