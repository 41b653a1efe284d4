"""Attention by its formula in PyTorch, with all scores in memory and every derivative.

For devices without the operator. Sums are float32, float64 for float64. Leading axes broadcast; with [..., G, T, d], G heads of key and value
are shared.
"""

import torch

from harness.nn.arguments import wide

Tensor = torch.Tensor


def widen(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in the dtype of sums, those of key's heads repeated for each of query's."""
    sums = wide(query.dtype)

    def each(tensor: Tensor) -> Tensor:
        shared = query.dim() > 2 and tensor.dim() > 2 and tensor.shape[-3] not in (1, query.shape[-3])
        tensor = tensor.to(sums)
        return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) if shared else tensor

    return [each(tensor) for tensor in (query, *tensors)]


def masked_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, diagonal: int | None, mask_block: int = 1
) -> Tensor:
    """Return the scores [..., N, S, T] of tensors from `widen`, -inf where a key is hidden from a query."""
    scores = scale * query @ key.mT
    S, T = scores.shape[-2:]
    if mask is not None and mask_block > 1:
        mask = mask.repeat_interleave(mask_block, -1).repeat_interleave(mask_block, -2)[..., :S, :T]
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores)
        )
    if diagonal is not None:
        s, t = (torch.arange(length, device=query.device) for length in (S, T))
        scores = scores.masked_fill(t > s[:, None] + diagonal, -torch.inf)
    return scores


def softmax(scores: Tensor, sums: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the probabilities of rows and their lse in a dtype, 0 and -inf for a row that sees no key.

    Only lse adds the maximum to the logarithm, which is lost beside a large maximum in few digits.
    """
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf, dtype=sums)
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    P = torch.exp(scores - largest)
    total = P.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1)
    lse = (largest.to(sums) + total.to(sums).log()).masked_fill(none, -torch.inf)[..., 0]
    return P / total, lse


def forward(query, key, value, mask, scale, diagonal, mask_block=1, sums=None) -> tuple[Tensor, Tensor]:
    """Return output and lse, in the dtype `sums` or that of sums: 0 and -inf for a row that sees no key."""
    Q, K, V = widen(query, key, value)
    scores = masked_scores(Q, K, mask, scale, diagonal, mask_block)
    P, lse = softmax(scores, sums or scores.dtype)
    return (P @ V).to(query.dtype), lse


def backward(
    grad_out, query, key, value, lse, delta, mask, scale, diagonal, mask_block=1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from lse and delta of whole rows. Leading axes are alike.

    lse is None if these are all keys of a row: of a rounded one probabilities are off by |lse| times its rounding.
    """
    Q, K, V, dO = widen(query, key, value, grad_out)
    scores = masked_scores(Q, K, mask, scale, diagonal, mask_block)
    if lse is None:
        P = softmax(scores, scores.dtype)[0]
    else:
        shift = lse.masked_fill(lse == -torch.inf, 0).masked_fill(lse == torch.inf, torch.nan)
        P = torch.exp(scores - shift[..., None]).to(scores.dtype)
    dS = P * (dO @ V.mT - delta[..., None])
    shares = scale * dS @ K, scale * dS.mT @ Q, P.mT @ dO
    dQ, dK, dV = map(of_heads, shares, (query, key, value))
    return dQ, dK, dV


def of_heads(gradient: Tensor, own: Tensor) -> Tensor:
    """Sum a gradient over the query heads that share one of a tensor's heads, in the tensor's dtype."""
    if gradient.shape != own.shape:
        gradient = gradient.unflatten(-3, (own.shape[-3], -1)).sum(-3)
    return gradient.to(own.dtype)
