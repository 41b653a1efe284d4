"""Check the arguments of attention; error messages begin with the argument's name."""

import math
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from harness.nn.arguments import check_dense, check_flag, check_qkv, check_scale, get_dtype_name

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Tensor = torch.Tensor


def check_arguments(query, key, value, attn_mask, enable_gqa: bool) -> None:
    check_qkv(query, key, value)
    if attn_mask is not None:
        check_dense("attn_mask", attn_mask, query, any_device=is_causal_bias(attn_mask))
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2 or (enable_gqa and tensor.dim() < 3):
            raise ValueError(f"{name}: expected [..., heads, length, dim], got shape {list(tensor.shape)}")
    check_sizes(query, key, value, enable_gqa)
    batch = broadcast_batch_axes(query, key, value, -3 if enable_gqa else -2)
    if attn_mask is not None and not is_causal_bias(attn_mask):
        check_mask(attn_mask, (*batch, query.shape[-3]) if enable_gqa else batch, query, key)


def check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: expected {query.shape[-1]} elements per head, as query, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: expected the length of key, {key.shape[-2]}, got {value.shape[-2]}")
    if min(query.shape[-1], value.shape[-1]) < 1:
        raise ValueError("query, value: expected at least one element per head, got 0")
    if enable_gqa:
        N, G = query.shape[-3], key.shape[-3]
        if value.shape[-3] != G or not G or N % G:
            raise ValueError(
                f"enable_gqa: the heads of key and value must be the same and divide those of query, got {N} for query, "
                f"{G} for key and {value.shape[-3]} for value"
            )


def check_tensor(name: str, tensor: Tensor, query: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    check_dense(name, tensor, query)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {get_dtype_name(dtype)} {list(shape)}, got {get_dtype_name(tensor.dtype)} {list(tensor.shape)}"
        )


def resolve_scale(scale: float | None, query: Tensor) -> float:
    check_scale(scale)
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def resolve_causal_mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, int | None]:
    """Return the mask, without a causal bias of PyTorch, and the causal diagonal, if any.

    Query s attends to keys up to s + diagonal.
    """
    check_flag("is_causal", is_causal)
    if not is_causal_bias(attn_mask):
        if is_causal and attn_mask is not None:
            message = "is_causal: expected False with an attn_mask; include the causal mask in it"
            raise ValueError(message)
        return attn_mask, 0 if is_causal else None
    S, T = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (S, T):
        raise ValueError(
            f"attn_mask: a causal mask of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, expected {S} and {T}"
        )
    return None, T - S if attn_mask.variant.name == "LOWER_RIGHT" else 0


def is_causal_bias(mask: object) -> "TypeGuard[CausalBias]":
    """Return whether a mask is PyTorch's `CausalBias`.

    Do not import its module, because that imports Dynamo and takes nearly 2 s.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def broadcast_batch_axes(query: Tensor, key: Tensor, value: Tensor, end: int) -> torch.Size:
    """Return the broadcast shape of the leading axes, up to `end`."""
    try:
        return torch.broadcast_shapes(query.shape[:end], key.shape[:end], value.shape[:end])
    except RuntimeError as error:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key, value: leading axes do not broadcast: {shapes}") from error


def check_mask(mask: Tensor, leading_axes: tuple[int, ...], query: Tensor, key: Tensor) -> None:
    if mask.dtype not in (torch.bool, query.dtype):
        expected = f"bool or {get_dtype_name(query.dtype)}"
        raise TypeError(f"attn_mask: expected {expected}, got {get_dtype_name(mask.dtype)}")
    scores = (*leading_axes, query.shape[-2], key.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    if mask.dim() > len(scores) or not all(size in (1, expected) for size, expected in pairs):
        raise ValueError(f"attn_mask: shape {list(mask.shape)} does not broadcast to {list(scores)}")


def expand_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as an additive mask with four axes, [B or 1, N or 1, S or 1, T or 1]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
    if mask.dim() > 4:
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
