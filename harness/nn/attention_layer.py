"""Attention as a PyTorch function: hand-written kernels in `torch.ops.mojo_workbook.attention`, with their gradients.

`attention` replaces `torch.nn.functional.scaled_dot_product_attention`. It saves query, key, value, the
output and one number per row, the logarithm of the sum of its exponentials (lse); the backward pass
recomputes the probabilities. In 16-bit types every run gives the same bits. `attention_block` computes a part
of a larger attention.

The operators are in `harness/nn/host/attention.cpp`. Devices without them run PyTorch's attention and
`attention_formula.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.forward_ad import unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.nn import attention_formula, host
from harness.nn.arguments import DTYPES, check_dense, check_flag, check_scale, in_autocast_dtype, plain, wide
from harness.nn.attention_arguments import check, expect, factor, four_axes, is_causal_bias, without_bias

Tensor = torch.Tensor
Blocks = Tensor | Iterable[tuple[int, int]]
LAYER = "attention"

MEASURED_LENGTH, MEASURED_MASKED = 512, 1024
FASTER_HEADS, FASTER_MASKED = (range(64, 65), range(129, 193)), (range(64, 193),)
"""Without a mask and with one: the fewest queries and keys on record, and the head dimensions for which both passes are
as fast there as the fastest of PyTorch's kernels (`attention` and `attention_options` in book/records)."""


# ---- Public functions ---------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(query key^T * scale + mask) value, as `scaled_dot_product_attention`.

    A row that the mask hides from every key gives 0 and gradients of 0. `is_causal` counts from the top left,
    as PyTorch's: query s sees the keys up to s, even if there are more keys than queries. To count from the
    bottom right, pass `torch.nn.attention.bias.causal_lower_right(S, T)` as the mask.

    The kernels take 16-bit types and heads of up to 256 elements on an NVIDIA GPU. PyTorch's own operations
    compute other calls; second derivatives, torch.func's transforms and forward mode; and a mask that needs a
    gradient if it is one number for all keys or heads have more than 128 elements.

    Args:
        query: Shape [..., N, S, d], of a floating dtype. Any strides.
        key: Shape [..., N, T, d]; leading axes broadcast. [..., G, T, d] with `enable_gqa`.
        value: Shape [..., N, T, dv]; [..., G, T, dv] with `enable_gqa`.
        attn_mask: Broadcastable to [..., N, S, T]. Of bool: True if a query sees a key. Else of query's
            dtype, added to the scores; its gradient costs another computation of scores and dO value^T.
        dropout_p: The share of probabilities that become 0, in steps of 1 / 65,536. 0 outside of training: a
            module's mode does not matter. Random numbers are from PyTorch's generator of the device. The
            kernels take heads of up to 128 elements and a mask without a gradient.
        is_causal: Must be False with a mask.
        scale: None for 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G of key and value, where G divides N.

    Returns:
        Shape [..., N, S, dv], in query's dtype.

    Raises:
        TypeError: An argument is not a dense tensor of a floating dtype, or dtypes differ.
        ValueError: Ranks, sizes or devices do not fit, dropout_p is not a probability, or a mask is given
            with `is_causal`.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    try:
        if not host.load(LAYER, query.device.type):
            return torchs_own(*arguments)
        if dropout_p:
            check_probability(dropout_p)
        check_flag("enable_gqa", enable_gqa)
        check_scale(scale)
        mask, diagonal = without_bias(attn_mask, is_causal, query, key)
        return torch.ops.mojo_workbook.attention(
            query, key, value, mask, dropout_p, diagonal, scale, enable_gqa
        )
    except Exception:
        check_call(*arguments)  # gives a better message for a wrong argument
        raise


def torchs_own(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    """Run PyTorch's attention, without the operator."""
    check_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    mask, diagonal = without_bias(attn_mask, is_causal, query, key)
    query, key, value, mask = in_autocast_dtype((query, key, value, mask))
    scale = factor(scale, query)
    if not (query.numel() and key.numel()):
        return attention_formula.forward(query, key, value, mask, scale, diagonal)[0]
    if scale <= 0:
        # PyTorch's fused kernels multiply a triangle's -inf by the scale, which makes infinity or NaN of it. A sign is exact.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if diagonal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal)
    dual = any(t is not None and unpack_dual(t).tangent is not None for t in (query, key, value, mask))
    with sdpa_kernel(SDPBackend.MATH) if dual else nullcontext():  # which alone has every derivative
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, diagonal == 0, scale=scale, enable_gqa=enable_gqa
        )


def check_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> None:
    """Raise TypeError or ValueError, naming the argument."""
    check_probability(dropout_p)
    check_flag("enable_gqa", enable_gqa)
    # A causal mask of PyTorch's has no numbers.
    numbers = None if is_causal_bias(attn_mask) else attn_mask
    query, key, value, numbers = in_autocast_dtype((query, key, value, numbers))
    check(query, key, value, attn_mask if numbers is None else numbers, enable_gqa)
    without_bias(attn_mask, is_causal, query, key)
    factor(scale, query)


def check_probability(dropout_p: object) -> None:
    """Raise TypeError unless this is a number, ValueError unless from 0 to 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to 1, got {dropout_p}")


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `attention` and the logarithm of the sum of each row's exponentials, [..., N, S], with gradients too.

    lse is float32, float64 for float64; -inf for a row that sees no key. The kernels' backward pass computes
    probabilities as exp(score - lse), so rounding lse costs them |lse| 2^-23, about what rounding the scores
    does: less than a unit of bfloat16 below 2^14, of float16 below 2^11.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: attention_with_lse has no dropout, expected 0, got {dropout_p}; attention has"
        )
    check_call(query, key, value, attn_mask, 0, is_causal, scale, enable_gqa)
    mask, diagonal = without_bias(attn_mask, is_causal, query, key)
    return rows_with_lse(query, key, value, mask, diagonal, scale, enable_gqa, 1)


def rows_with_lse(query, key, value, mask, diagonal, scale, enable_gqa, mask_block) -> tuple[Tensor, Tensor]:
    """Return output and lse of checked arguments."""
    if host.load(LAYER, query.device.type):
        return torch.ops.mojo_workbook.attention_with_lse(
            query, key, value, mask, diagonal, scale, enable_gqa, mask_block
        )
    query, key, value, mask = in_autocast_dtype((query, key, value, mask))
    return attention_formula.forward(query, key, value, mask, factor(scale, query), diagonal, mask_block)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value from what `attention_with_lse` returned.

    The other arguments are those of the forward pass, but key and value need query's leading axes and head
    dimension. Raises what `attention` raises.
    """
    check_call(query, key, value, attn_mask, 0, is_causal, scale, enable_gqa)
    if (
        key.shape[:-3] != query.shape[:-3]
        or value.shape != key.shape
        or not (enable_gqa or key.shape[:-2] == query.shape[:-2])
    ):
        raise ValueError("key, value: expected query's leading axes and one head dimension")
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        expect(name, tensor, query, query.shape, query.dtype)
    expect("lse", lse, query, query.shape[:-1], wide(query.dtype))
    mask, diagonal = without_bias(attn_mask, is_causal, query, key)
    heads = query.shape[-3] if query.dim() > 2 else 1

    def four(tensor: Tensor, rank: int = 4) -> Tensor:
        kept = tensor.shape[tensor.dim() - rank + 2 :]
        own = tensor.shape[tensor.dim() - rank + 1] if query.dim() > 2 else heads
        return tensor.reshape(-1 if tensor.numel() else 0, own, *kept)

    mask = None if mask is None else four_axes(mask, query, key)
    dO, Q, K, V, O = map(four, (grad_out, query, key, value, out))
    found = gradients(dO, Q, K, V, O, four(lse, 3), None, mask, diagonal, scale, 1)
    return found[0].reshape(query.shape), found[1].reshape(key.shape), found[2].reshape(value.shape)


def gradients(
    grad_out, query, key, value, out, lse, delta, mask, diagonal, scale, mask_block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of tensors [B, heads, length, d], from the output, or from the delta of whole rows."""
    if host.load(LAYER, query.device.type):
        return torch.ops.mojo_workbook.attention_gradients(
            grad_out, query, key, value, out, lse, delta, mask, diagonal, scale, mask_block
        )
    if delta is None:  # of all keys: their probabilities add up to 1, whatever lse was rounded to
        lse, delta = None, attention_delta(grad_out, out)
    arguments = grad_out, query, key, value, lse, delta, mask, factor(scale, query), diagonal, mask_block
    return attention_formula.backward(*arguments)


# ---- Kernel selection ---------------------------------------------------------------------------------------


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    blocks: int | None = None,
) -> str:
    """Return in one line which kernels `attention` runs, and why; with `blocks`, `attention_block`'s for blocks of this size.

    It may build kernels, and launches none. Key and value default to query. If only one pass uses wgmma, the
    line is about the other. `is_causal` makes no difference.
    """
    key, value = query if key is None else key, query if value is None else value
    if not host.load(LAYER, query.device.type):
        where = "the kernels are for NVIDIA's GPUs" if query.device.type != "cuda" else "there is no operator"
        return f"PyTorch's own operations: query is on {query.device}; {where}"
    mask, _ = without_bias(attn_mask, False, query, key)
    with torch.enable_grad():
        query = query if query.requires_grad else query.detach().requires_grad_()
        return torch.ops.mojo_workbook.attention_explain(
            query, key, value, mask, dropout_p, scale, enable_gqa, blocks or 1
        )


attention.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def portable_kernels(on: bool = True) -> Iterator[None]:
    """Run the kernels for every GPU on a Hopper too: for comparisons."""
    there = on and host.load(LAYER, host.DEVICE)
    if there:
        torch.ops.mojo_workbook.attention_portable(True)
    try:
        yield
    finally:
        if there:
            torch.ops.mojo_workbook.attention_portable(False)


def has_kernels(query: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> bool:
    """Return whether kernels compute a call."""
    return not explain(query, attn_mask=attn_mask, dropout_p=dropout_p).startswith("PyTorch")


def takes_wgmma(query: Tensor) -> bool:
    """Return whether a call without options runs the kernels for a Hopper."""
    return explain(query).startswith("wgmma")


def may_be_slower(query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str | None:
    """Return why PyTorch's attention may be faster for both passes of a call, by the records; else None."""
    d = query.shape[-1]
    if not takes_wgmma(query):
        return "it is faster only in 16 bits on a Hopper"
    if dropout_p:
        return "with dropout_p it would draw other numbers than PyTorch's"
    if not any(d in heads for heads in (FASTER_HEADS if attn_mask is None else FASTER_MASKED)):
        return f"PyTorch's takes {'' if attn_mask is None else 'attn_mask and '}heads of {d} elements in less time"
    if attn_mask is not None and (
        attn_mask.shape[-1] == 1 or (attn_mask.dtype != torch.bool and attn_mask.shape[-1] % 8)
    ):
        return f"PyTorch's takes an attn_mask of rows of {attn_mask.shape[-1]} elements in less time"
    lengths = query.shape[-2], key.shape[-2]
    if not all(isinstance(length, int) for length in lengths):
        return "its lengths are known only when it is called"
    shortest = MEASURED_LENGTH if attn_mask is None else MEASURED_MASKED
    if min(lengths) < shortest:
        return f"it is measured from {shortest} queries and keys on"
    return None


# ---- A part of a larger attention ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The part of a larger attention that `attention_block` and its backward pass compute.

    Attributes:
        query_offset, key_offset: The positions of the first query and key, from which a causal mask counts.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: None for 1 / sqrt(d).
        blocks: Which blocks of queries see which blocks of keys: a mask of bool, [blocks of queries, blocks
            of keys], or pairs (block of queries, block of keys). None for all. If `block_size` is a multiple
            of 16 the kernels skip the others.
        block_size: Queries, and keys, in a block; the last may be smaller.
        index: int64 [L], a permutation of the L rows of query, key and value: row index[i] is at position i.
            Results are in the rows' order. None for the identity.
    """

    query_offset: int = 0
    key_offset: int = 0
    is_causal: bool = False
    scale: float | None = None
    blocks: Blocks | None = None
    block_size: int = 64
    index: Tensor | None = None

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {self.block_size}")

    def options(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, int | None, int]:
        """Return what the operators take: mask, diagonal and the size of the mask's blocks."""
        diagonal = self.query_offset - self.key_offset if self.is_causal else None
        if self.blocks is None:
            return None, diagonal, 1
        counts = -(-query.shape[-2] // self.block_size), -(-key.shape[-2] // self.block_size)
        seen = visible_blocks(self.blocks, counts, query.device)
        mask = torch.zeros(counts, dtype=query.dtype, device=query.device).masked_fill(~seen, -torch.inf)
        return mask[None, None], diagonal, self.block_size

    def sort_rows(self, tensor: Tensor) -> Tensor:
        """Sort the rows of a tensor [B, N, L, ...] by position."""
        return tensor if self.index is None else tensor.index_select(2, self.index)

    def restore_order(self, tensor: Tensor) -> Tensor:
        """Restore the order of rows that are sorted by position."""
        return tensor if self.index is None else tensor.index_select(2, torch.argsort(self.index))


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """Compute output [B, N, S, d] and lse [B, N, S] of attention for queries [B, N, S, d] and keys [B, G, T, d].

    Two parts with the same queries and different keys are combined with L = logaddexp(lse1, lse2) as
    exp(lse1 - L) * out1 + exp(lse2 - L) * out2. Autograd differentiates that: both results have gradients.

    lse is float32 (float64 for float64), -inf for a row that sees no key of this part. Without a `part` it is
    the whole. Raises what `attention` raises, and ValueError if blocks or index do not fit.
    """
    part = part or Part()
    check_part(part, query, key, value)
    mask, diagonal, block = part.options(query, key)
    Q, K, V = map(part.sort_rows, (query, key, value))
    output, lse = rows_with_lse(Q, K, V, mask, diagonal, part.scale, True, block)
    return part.restore_order(output), part.restore_order(lse)


def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(grad_out * out), [B, N, S] in float32 (float64 for float64), of the combined output."""
    check_dense("out", out, out)
    if out.dim() != 4 or out.dtype not in DTYPES:
        got = f"{plain(out.dtype)} {list(out.shape)}"
        raise ValueError(f"out: expected [B, N, S, d] of a float dtype, got {got}")
    expect("grad_out", grad_out, out, out.shape, out.dtype)
    sums = wide(out.dtype)
    return (grad_out.to(sums) * out.to(sums)).sum(-1)


def attention_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a part adds to the gradients of query, key and value.

    `lse` and `delta`, [B, N, S], are of all parts together: `logaddexp` of their lse, and `attention_delta`.
    Rounding lse costs every gradient |lse| 2^-23. The other arguments are those of `attention_block`.
    """
    part = part or Part()
    check_part(part, query, key, value)
    expect("grad_out", grad_out, query, query.shape, query.dtype)
    for name, tensor in (("lse", lse), ("delta", delta)):
        expect(name, tensor, query, query.shape[:-1], wide(query.dtype))
    dO, Q, K, V, lse, delta = map(part.sort_rows, (grad_out, query, key, value, lse, delta))
    mask, diagonal, block = part.options(query, key)
    found = gradients(dO, Q, K, V, None, lse, delta, mask, diagonal, part.scale, block)
    return part.restore_order(found[0]), part.restore_order(found[1]), part.restore_order(found[2])


def visible_blocks(blocks: Blocks, counts: tuple[int, int], device: torch.device) -> Tensor:
    """Return the mask of bool, [blocks of queries, blocks of keys]."""
    if isinstance(blocks, Tensor):
        if blocks.dtype != torch.bool or tuple(blocks.shape) != counts:
            raise ValueError(
                f"blocks: expected a mask of bool, {list(counts)}, got {plain(blocks.dtype)} {list(blocks.shape)}"
            )
        return blocks.to(device)
    pairs = list(blocks)
    outside = [
        pair for pair in pairs if not all(0 <= i < count for i, count in zip(pair, counts, strict=True))
    ]
    if outside:
        raise ValueError(f"blocks: there are {counts[0]} x {counts[1]}, and {outside[0]} is none of them")
    seen = torch.zeros(counts, dtype=torch.bool)
    if pairs:
        rows, columns = torch.tensor(pairs).unbind(1)
        seen[rows, columns] = True
    return seen.to(device)


def check_part(part: Part, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise, naming the argument, if a part does not fit."""
    check(query, key, value, None, enable_gqa=True)
    check_flag("is_causal", part.is_causal)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"query, key, value: expected four axes, [B, N, length, d], got {list(query.shape)}")
    if value.shape != key.shape or key.shape[0] != query.shape[0]:
        raise ValueError(
            f"value: expected the shape of key, and query's batch of {query.shape[0]}, got {list(value.shape)} beside "
            f"{list(key.shape)}"
        )
    if part.index is not None:
        L = query.shape[2]
        if key.shape[2] != L or part.index.dtype != torch.int64 or tuple(part.index.shape) != (L,):
            raise ValueError(
                f"index: expected int64 [{L}] for as many queries as keys, got {plain(part.index.dtype)} "
                f"{list(part.index.shape)} for {L} queries and {key.shape[2]} keys"
            )
