"""Attention by its formula in PyTorch, with all scores in memory, for the calls that no kernel takes.

Sums are float32, float64 for float64. Query is [B, N, S, d], key and value [B, G, T, d]; G divides N.
"""

import torch

from harness.nn.arguments import wide

Tensor = torch.Tensor


def widened(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in the type of sums, those of key's heads with a head for each of query's."""
    N, sums = query.shape[1], wide(query.dtype)
    return [tensor.to(sums).repeat_interleave(N // tensor.shape[1], 1) for tensor in (query, *tensors)]


def masked_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, diagonal: int, mask_block: int = 1
) -> Tensor:
    """Return the scores [B, N, S, T] of `widened` tensors, -inf where a query does not see a key."""
    scores = scale * query @ key.mT
    S, T = scores.shape[2:]
    if mask is not None:
        if mask_block > 1:
            for axis in (2, 3):
                mask = mask.repeat_interleave(mask_block if mask.shape[axis] > 1 else 1, axis)
            mask = mask[:, :, :S, :T]
        scores = scores + mask
    if diagonal < T:
        s, t = (torch.arange(length, device=query.device) for length in (S, T))
        scores = scores.masked_fill(t > s[:, None] + diagonal, -torch.inf)
    return scores


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), 0 in a row that sees no key, NaN in a row with an infinite score."""
    shift = lse.masked_fill(lse == -torch.inf, 0).masked_fill(lse == torch.inf, torch.nan)
    return torch.exp(scores - shift[..., None])


def gradients_of(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    P: Tensor,
    dS: Tensor,
    scale: float,
    like: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the gradients of query, key and value to the tensors `like`, summed over shared heads."""
    shares = scale * dS @ key, scale * dS.mT @ query, P.mT @ grad_out
    for gradient, share in zip(like, shares, strict=True):
        gradient.copy_(share.unflatten(1, (gradient.shape[1], -1)).sum(2))
    return like


def forward(query, key, value, mask, scale, diagonal, mask_block) -> tuple[Tensor, Tensor]:
    """Return output [B, N, S, d] and lse [B, N, S], in the type of sums."""
    Q, K, V = widened(query, key, value)
    scores = masked_scores(Q, K, mask, scale, diagonal, mask_block)
    return torch.ops.aten._safe_softmax(scores, -1) @ V, torch.logsumexp(scores, -1)


def backward(grad_out, query, key, value, lse, delta, mask, scale, diagonal, mask_block, *, like):
    """Write the gradients of query, key and value to the tensors `like`, from lse and delta of whole rows."""
    Q, K, V, dO = widened(query, key, value, grad_out)
    P = probabilities(masked_scores(Q, K, mask, scale, diagonal, mask_block), lse)
    return gradients_of(dO, Q, K, P, P * (dO @ V.mT - delta[..., None]), scale, like)


def mask_gradient(grad_out, query, key, value, grad_lse, mask, scale, diagonal) -> Tensor:
    """Return the gradient of a mask, in its shape: that of the scores, summed over what it was broadcast to.

    Delta is made of the same P and dP, so that over all keys of a row all but grad_lse cancels.
    """
    Q, K, V, dO = widened(query, key, value, grad_out)
    P = torch.ops.aten._safe_softmax(masked_scores(Q, K, mask, scale, diagonal), -1)
    dP = dO @ V.mT
    delta = (P * dP).sum(-1) if grad_lse is None else (P * dP).sum(-1) - grad_lse
    return (P * (dP - delta[..., None])).sum_to_size(mask.shape).to(mask.dtype)
