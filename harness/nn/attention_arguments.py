"""The arguments of attention: what the kernels can take, and how it becomes four axes, [batch, heads, length, dim]."""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.nn.functional as F

from harness.nn.arguments import check_attended, check_dense, check_flag, check_scale, plain
from harness.nn.attention_direct import CHUNK
from harness.nn.attention_plan import EVERY_KEY, TENSOR_CORES

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Tensor = torch.Tensor
LARGEST_HEAD = 256
"""The largest head dimension that the kernels take."""


def refuse_options(is_causal: bool, attn_mask: Tensor | None, enable_gqa: bool) -> None:
    """Raises for options that are none, and for those that do not go together."""
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError(
            "is_causal: expected False where there is an attn_mask; put the triangle into the mask"
        )


def check(query, key, value, attn_mask, enable_gqa: bool) -> None:
    """Raises TypeError, ValueError or NotImplementedError, naming the argument, for what the kernels cannot take."""
    check_attended(query, key, value)
    if attn_mask is not None:
        check_dense("attn_mask", attn_mask, query, anywhere=is_causal_bias(attn_mask))
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"query: there is no kernel for {query.device.type}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2 or (enable_gqa and tensor.dim() < 3):
            raise ValueError(f"{name}: expected [..., heads, length, dim], got shape {list(tensor.shape)}")
    check_sizes(query, key, value, enable_gqa)
    if (
        attn_mask is not None
        and not is_causal_bias(attn_mask)
        and attn_mask.dtype not in (torch.bool, query.dtype)
    ):
        raise TypeError(f"attn_mask: expected bool or {plain(query.dtype)}, got {plain(attn_mask.dtype)}")


def check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raises where the lengths, the elements of a head or the numbers of heads do not fit."""
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: expected {query.shape[-1]} elements a head, as query, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: expected the length of key, {key.shape[-2]}, got {value.shape[-2]}")
    if min(query.shape[-1], value.shape[-1]) < 1:
        raise ValueError("query, value: expected at least one element a head, got 0")
    widest = max(query.shape[-1], value.shape[-1])
    if widest > LARGEST_HEAD:
        raise NotImplementedError(
            f"query, value: a head may have {LARGEST_HEAD} elements at most, got {widest}"
        )
    if enable_gqa:
        N, G = query.shape[-3], key.shape[-3]
        if value.shape[-3] != G or not G or N % G:
            raise ValueError(
                f"enable_gqa: the heads of key and value must be the same and divide those of query, got {N} for query, "
                f"{G} for key and {value.shape[-3]} for value"
            )


def expect(name: str, tensor: Tensor, query: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises TypeError for what is no dense tensor, ValueError for another shape, dtype or device than query's."""
    check_dense(name, tensor, query)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {plain(dtype)} {list(shape)}, got {plain(tensor.dtype)} {list(tensor.shape)}"
        )


def factor(scale: float | None, query: Tensor) -> float:
    """What the scores are multiplied by. Raises TypeError where it is no number."""
    check_scale(scale)
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def without_bias(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, int]:
    """The mask, None where it is one of PyTorch's causal ones, and how many keys past its own place a query sees."""
    if not is_causal_bias(attn_mask):
        return attn_mask, 0 if is_causal else EVERY_KEY
    S, T = query.shape[-2], key.shape[-2]
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (S, T):
        raise ValueError(
            f"attn_mask: a causal mask of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, expected {S} and {T}"
        )
    return None, T - S if attn_mask.variant.name == "LOWER_RIGHT" else 0


def is_causal_bias(mask: object) -> "TypeGuard[CausalBias]":
    """Whether a mask is one of PyTorch's causal ones.

    Their module loads all of dynamo, nearly two seconds; where no one has imported it, there is no such mask.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


@dataclass(frozen=True)
class Folded:
    """The arguments with four axes: query [B, N, S, d], key and value [B, G, T, d], the mask or None; `lead` is [..., N]."""

    lead: tuple[int, ...]
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]

    def unfold(self, output: Tensor, d: int) -> Tensor:
        """The first d columns of an output [B, N, S, ...] as [..., N, S, d]: itself where it is that already."""
        shape = (*self.lead, output.shape[-2], d)
        return output if output.shape == shape else output[..., :d].reshape(shape)


def fold(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> Folded:
    """Broadcasts the leading axes, makes one batch of all but the heads, and one head dimension of two.

    Zeros behind query and key leave the scores as they are, zeros behind value are columns of the output that are cut off.
    Raises ValueError where axes do not broadcast.
    """
    last = -3 if enable_gqa else -2
    batch = query.shape[:last]
    if not batch == key.shape[:last] == value.shape[:last]:
        batch = broadcast(query, key, value, last)
    d = max(query.shape[-1], value.shape[-1])

    def four(t: Tensor) -> Tensor:
        if t.dim() == 4 and t.shape[:last] == batch and t.shape[-1] == d:
            return t
        whole = F.pad(t, (0, d - t.shape[-1])) if t.shape[-1] < d else t
        whole = whole.expand(*batch, *t.shape[last:-1], d)
        heads = whole.shape[-3] if whole.dim() > 2 else 1
        return whole.reshape(math.prod(whole.shape[:-3]), heads, *whole.shape[-2:])

    lead = (*batch, query.shape[-3]) if enable_gqa else tuple(batch)
    mask = None if attn_mask is None else four_axes(attn_mask, lead, query, key)
    return Folded(lead, (four(query), four(key), four(value), mask))


def broadcast(query: Tensor, key: Tensor, value: Tensor, last: int) -> torch.Size:
    """The leading axes, up to `last`, that all three are broadcast to. Raises ValueError where there are none."""
    try:
        return torch.broadcast_shapes(query.shape[:last], key.shape[:last], value.shape[:last])
    except RuntimeError as error:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise ValueError(f"query, key, value: leading axes do not broadcast: {shapes}") from error


def four_axes(mask: Tensor, lead: tuple[int, ...], query: Tensor, key: Tensor) -> Tensor:
    """The mask as numbers to add, [B or 1, N or 1, S or 1, T or 1]. Raises ValueError where it does not broadcast."""
    scores = (*lead, query.shape[-2], key.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    # torch.broadcast_shapes says the same in 20 us.
    if mask.dim() > len(scores) or not all(size in (1, wanted) for size, wanted in pairs):
        raise ValueError(f"attn_mask: shape {list(mask.shape)} does not broadcast to {list(scores)}")
    if mask.dtype == torch.bool:
        mask = as_numbers(mask, query)
    if mask.dim() < 4 or len(scores) > 4:
        mask = mask.reshape(*(1,) * (max(len(scores), 4) - mask.dim()), *mask.shape)
    if mask.dim() > 4:
        if any(size != 1 for size in mask.shape[:-3]):
            mask = mask.expand(*lead[:-1], *mask.shape[-3:])
        mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
    return mask


def as_numbers(mask: Tensor, query: Tensor) -> Tensor:
    """0 where a bool mask is True, -inf elsewhere; for tensor cores in rows that begin at multiples of 16 bytes."""
    length = mask.shape[-1]
    if length % CHUNK and query.device.type == "cuda" and query.dtype in TENSOR_CORES and length > 1:
        mask = F.pad(mask, (0, -length % CHUNK))
    # The log of 1 is 0, of 0 -inf. In place, because autocast would make float32 of another.
    numbers = mask.to(query.dtype, memory_format=torch.contiguous_format).log_()
    return numbers if mask.shape[-1] == length else numbers[..., :length]
