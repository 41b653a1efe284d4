"""Compute attention with PyTorch's own operations, for devices and arguments that the kernels do not support.

`forward` and `backward` are the textbook formulas: they store all scores and support every derivative. Sums
are float32 (float64 for float64). Leading axes broadcast; query heads may share heads of key and value.
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.nn.arguments import cast_for_autocast, get_accumulation_dtype
from harness.nn.attention_arguments import resolve_scale

Tensor = torch.Tensor


def upcast(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors in the accumulation dtype, with shared heads repeated for the query heads."""
    accum_dtype = get_accumulation_dtype(query.dtype)

    def upcast_tensor(tensor: Tensor) -> Tensor:
        shared = query.dim() > 2 and tensor.dim() > 2 and tensor.shape[-3] not in (1, query.shape[-3])
        tensor = tensor.to(accum_dtype)
        return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) if shared else tensor

    return [upcast_tensor(tensor) for tensor in (query, *tensors)]


def compute_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, diagonal: int | None, mask_block: int = 1
) -> Tensor:
    """Return the scores [..., N, S, T] of tensors from `upcast`; masked scores are -inf."""
    scores = scale * query @ key.mT
    S, T = scores.shape[-2:]
    if mask is not None and mask_block > 1:
        mask = mask.repeat_interleave(mask_block, -1).repeat_interleave(mask_block, -2)[..., :S, :T]
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask.to(scores)
    if diagonal is not None:
        s, t = (torch.arange(length, device=query.device) for length in (S, T))
        scores = scores.masked_fill(t > s[:, None] + diagonal, -torch.inf)
    return scores


def softmax(scores: Tensor, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the probabilities, and lse in `lse_dtype`; 0 and -inf for a fully masked row.

    lse is the maximum plus a logarithm, which would be lost in low precision if the maximum is large.
    """
    if not scores.shape[-1]:
        return scores, scores.sum(-1, dtype=lse_dtype).log()
    max_score = scores.detach().amax(-1, keepdim=True)
    max_score = max_score.masked_fill(max_score == -torch.inf, 0)
    P = torch.exp(scores - max_score)
    total = P.sum(-1, keepdim=True)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1)
    lse = (max_score.to(lse_dtype) + total.to(lse_dtype).log()).masked_fill(is_empty, -torch.inf)[..., 0]
    return P / total, lse


def forward(
    query, key, value, mask, scale, diagonal, mask_block=1, lse_dtype=None, factors: Tensor | int = 1
) -> tuple[Tensor, Tensor]:
    """Return output and lse, 0 and -inf for a fully masked row.

    The dtype of lse is `lse_dtype`, by default the scores' dtype. `factors` are the factors of dropout.
    """
    Q, K, V = upcast(query, key, value)
    scores = compute_scores(Q, K, mask, scale, diagonal, mask_block)
    P, lse = softmax(scores, lse_dtype or scores.dtype)
    return (P * factors @ V).to(query.dtype), lse


def backward(
    grad_out, query, key, value, lse, delta, mask, scale, diagonal, mask_block=1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from lse and delta of entire rows; leading axes match.

    Pass lse=None if `key` contains all keys of a row. Rounding lse changes the probabilities by a factor of
    |lse| times the unit roundoff.
    """
    Q, K, V, dO = upcast(query, key, value, grad_out)
    scores = compute_scores(Q, K, mask, scale, diagonal, mask_block)
    if lse is None:
        P = softmax(scores, scores.dtype)[0]
    else:
        shift = lse.masked_fill(lse == -torch.inf, 0).masked_fill(lse == torch.inf, torch.nan)
        P = torch.exp(scores - shift[..., None]).to(scores.dtype)
    dS = P * (dO @ V.mT - delta[..., None])
    gradients = scale * dS @ K, scale * dS.mT @ Q, P.mT @ dO
    dQ, dK, dV = map(sum_shared_heads, gradients, (query, key, value))
    return dQ, dK, dV


def sum_shared_heads(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Sum a gradient over the query heads that share a head of `tensor`, and cast it to tensor's dtype."""
    if gradient.shape != tensor.shape:
        gradient = gradient.unflatten(-3, (tensor.shape[-3], -1)).sum(-3)
    return gradient.to(tensor.dtype)


def compute_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(grad_out * out) in the accumulation dtype."""
    accum_dtype = get_accumulation_dtype(out.dtype)
    return (grad_out.to(accum_dtype) * out.to(accum_dtype)).sum(-1)


def compute_gradients(
    grad_out, query, key, value, out, lse, delta, mask, diagonal, scale, mask_block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients from the output, or from delta of entire rows."""
    if delta is None:  # all keys are present, so recompute the probabilities without the rounded lse
        lse, delta = None, compute_delta(grad_out, out)
    return backward(grad_out, query, key, value, lse, delta, mask, scale, diagonal, mask_block)


def compute_with_sdpa(query, key, value, mask, dropout_p, diagonal, scale, enable_gqa) -> Tensor:
    """Run scaled_dot_product_attention; query s attends to keys up to s + `diagonal`."""
    query, key, value, mask = cast_for_autocast((query, key, value, mask))
    scale = resolve_scale(scale, query)
    if not (query.numel() and key.numel()):
        return forward(query, key, value, mask, scale, diagonal)[0]
    if scale <= 0:
        # PyTorch's fused kernels multiply the causal mask's -inf by the scale, which results in inf or NaN.
        # Negating query and scale is exact.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    S, T = query.shape[-2], key.shape[-2]
    if diagonal:
        mask = torch.ones(S, T, dtype=torch.bool, device=query.device).tril(diagonal)
    if query.is_cuda:
        query, key, value = (align(tensor, tensor.stride()[:-1]) for tensor in (query, key, value))
        # The fused kernels require contiguous rows with a mask element for each key.
        if mask is not None and mask.shape[-1] != T:
            mask = mask.expand(*mask.shape[:-1], T).contiguous()
        mask = None if mask is None else align(mask)
    has_tangent = any(t is not None and unpack_dual(t).tangent is not None for t in (query, key, value, mask))
    with (
        sdpa_kernel(SDPBackend.MATH) if has_tangent else nullcontext()
    ):  # the only backend with every derivative
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, diagonal == 0, scale=scale, enable_gqa=enable_gqa
        )


def align(tensor: Tensor, strides: tuple[int, ...] = ()) -> Tensor:
    """Return the tensor with its start and rows aligned to 16 bytes, as PyTorch's fused kernels require."""
    offsets = (tensor.storage_offset(), *strides)
    is_aligned = all(
        isinstance(offset, int) and offset * tensor.element_size() % 16 == 0 for offset in offsets
    )
    contiguous = not strides or tensor.stride(-1) == 1
    return tensor if is_aligned and contiguous else tensor.clone(memory_format=torch.contiguous_format)


def compute_sequences(query, key, value, offsets, scale: float, diagonal: int | None) -> Tensor:
    """Compute packed sequences [1, N, total, d] one by one; rows outside all sequences are zeros.

    Copies the offsets to the host; raises ValueError if they are invalid.
    """
    parts, end = [], 0
    ranges = map(split_offsets, ("offsets_q", "offsets_k"), offsets, (query, key))
    for queries, keys in zip(*ranges, strict=True):
        parts.append(query.new_zeros(*query.shape[:2], queries.start - end, value.shape[-1]))
        rows = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        parts.append(forward(*rows, None, scale, diagonal)[0])
        end = queries.stop
    return torch.cat([*parts, query.new_zeros(*query.shape[:2], query.shape[2] - end, value.shape[-1])], 2)


def split_offsets(name: str, offsets: Tensor, rows: Tensor) -> list[slice]:
    """Return each sequence's rows as a slice. Raises ValueError for invalid offsets."""
    total = rows.shape[2]
    bounds = offsets.new_tensor([0]), offsets, offsets.new_tensor([total])
    if (torch.cat(bounds).diff() < 0).any():
        message = f"{name}: expected non-decreasing numbers from 0 to {total}, got {offsets.tolist()}"
        raise ValueError(message)
    return [slice(*pair) for pair in pairwise(offsets.tolist())]


# ---- Called by the operator (host/attention.cpp) ------------------------------------------------------------


KEEP_ONE = 65536
"""Dropout keeps an element with probability `keep_threshold` / KEEP_ONE."""


def compute_with_formula(
    query, key, value, mask, offsets, state, scale, diagonal, mask_block, keep_threshold
):
    """Return output and lse of tensors [B, heads, length, d]; lse is empty for packed sequences."""
    if offsets is not None:
        return compute_sequences(query, key, value, offsets, scale, diagonal), query.new_empty(0)
    factors: Tensor | int = 1
    if state is not None and key.numel():
        factors = recover_dropout_factors(query, key, state, keep_threshold)
    return forward(query, key, value, mask, scale, diagonal, mask_block, factors=factors)


def recover_dropout_factors(query: Tensor, key: Tensor, state: Tensor, keep_threshold: int) -> Tensor:
    """Return the dropout factors [B, N, S, T] that the kernels compute from a random state.

    Run the forward kernel with zero scores, and columns of the identity matrix as value: an output element is
    nonzero exactly where dropout keeps the probability.
    """
    (B, N, S, _), T = query.shape, key.shape[-2]
    factory_options: Any = {"dtype": query.dtype, "device": query.device}
    zeros = torch.zeros(B, N, max(S, T), 128, **factory_options)
    identity = F.pad(torch.eye(T, **factory_options), (0, -T % 128))
    options = None, None, state, 1.0, None, 1, keep_threshold
    columns = [
        torch.ops.mojo_workbook.attention_forward(
            zeros[:, :, :S], zeros[:, :, :T], value.expand(B, N, T, 128), *options
        )[0]
        for value in identity.split(128, -1)
    ]
    return (torch.cat(columns, -1)[..., :T] != 0) * (KEEP_ONE / keep_threshold if keep_threshold else 0.0)


OPERATORS = {"attention_by_formula": compute_with_formula, "attention_by_torch": compute_with_sdpa}
OPERATORS["attention_gradients_by_formula"] = compute_gradients
