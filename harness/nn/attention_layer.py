"""Attention as a differentiable function, with hand-written kernels in `torch.ops.mojo_workbook.attention`.

`attention` replaces `torch.nn.functional.scaled_dot_product_attention`. It saves query, key, value, the
output and, for each row, the log-sum-exp of the scores (lse); the backward pass recomputes the probabilities.
Results in 16-bit types are deterministic. `attention_block` computes a part of a larger attention.

The operators are in `harness/nn/host/attention.cpp`. Other devices run PyTorch's attention and
`attention_formula.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.nn import attention_formula, host
from harness.nn.arguments import (
    DTYPES,
    cast_for_autocast,
    check_dense,
    check_flag,
    check_scale,
    get_accumulation_dtype,
    get_dtype_name,
)
from harness.nn.attention_arguments import (
    check_arguments,
    check_tensor,
    expand_mask,
    is_causal_bias,
    resolve_causal_mask,
    resolve_scale,
)

Tensor = torch.Tensor
Blocks = Tensor | Iterable[tuple[int, int]]
LAYER = "attention"

MIN_FASTER_LENGTH, MIN_FASTER_MASKED_LENGTH = 512, 1024
FASTER_HEAD_DIMS, FASTER_MASKED_HEAD_DIMS = (range(64, 65), range(129, 193)), (range(64, 193),)
"""Minimum length and head dimensions for which both passes are as fast as the fastest of PyTorch's kernels,
without and with a mask (records `attention` and `attention_options` in book/records).
"""


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
    """Compute softmax(query key^T * scale + mask) value, like `scaled_dot_product_attention`.

    The output and the gradients of a fully masked row are 0. `is_causal` aligns the mask to the top left, as
    PyTorch does: query s attends to keys 0 to s, even if there are more keys than queries. To align it to the
    bottom right, pass `torch.nn.attention.bias.causal_lower_right(S, T)` as the mask.

    The kernels support 16-bit types and head dimensions up to 256 on an NVIDIA GPU. PyTorch's own operations
    compute all other calls: second derivatives, torch.func's transforms, forward mode, and masks that require
    a gradient and are broadcast over the keys or used with a head dimension above 128.

    Args:
        query: Shape [..., N, S, d], floating dtype, any strides.
        key: Shape [..., N, T, d]; leading axes broadcast. [..., G, T, d] with `enable_gqa`.
        value: Shape [..., N, T, dv]; [..., G, T, dv] with `enable_gqa`.
        attn_mask: Broadcastable to [..., N, S, T]. A bool mask is True where a query attends to a key. A mask
            of query's dtype is added to the scores; its gradient recomputes the scores and dO value^T.
        dropout_p: The fraction of probabilities set to 0, in steps of 1 / 65,536. Pass 0 outside training.
            Random numbers come from PyTorch's generator of the device. The kernels support head dimensions up
            to 128 and masks without a gradient.
        is_causal: Must be False with a mask.
        scale: None means 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G heads of key and value, where G divides N.

    Returns:
        Shape [..., N, S, dv], in query's dtype.

    Raises:
        TypeError: An argument is not a dense tensor of a floating dtype, or dtypes differ.
        ValueError: Ranks, sizes or devices do not match, dropout_p is not a probability, or both `attn_mask`
            and `is_causal` are set.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    try:
        loaded = host.load(LAYER, query.device.type)
        if not loaded:
            check_attention_call(*arguments)
        if dropout_p:
            check_probability(dropout_p)
        check_flag("enable_gqa", enable_gqa)
        check_scale(scale)
        mask, diagonal = resolve_causal_mask(attn_mask, is_causal, query, key)
        compute = torch.ops.mojo_workbook.attention if loaded else attention_formula.compute_with_sdpa
        return compute(query, key, value, mask, dropout_p, diagonal, scale, enable_gqa)
    except Exception:
        check_attention_call(*arguments)  # raises a clearer error for an invalid argument
        raise


def check_attention_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> None:
    check_probability(dropout_p)
    check_flag("enable_gqa", enable_gqa)
    # PyTorch's causal biases have no data.
    mask = None if is_causal_bias(attn_mask) else attn_mask
    query, key, value, mask = cast_for_autocast((query, key, value, mask))
    check_arguments(query, key, value, attn_mask if mask is None else mask, enable_gqa)
    resolve_causal_mask(attn_mask, is_causal, query, key)
    resolve_scale(scale, query)


def check_probability(dropout_p: object) -> None:
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
    """Compute `attention` and the log-sum-exp of each row's scores, [..., N, S]; both are differentiable.

    lse is float32, or float64 for float64 inputs; it is -inf for a fully masked row. The kernels' backward
    pass computes probabilities as exp(score - lse), so rounding lse changes them by a factor of |lse| 2^-23,
    about as much as rounding the scores: below one ulp of bfloat16 if |lse| < 2^14, of float16 if |lse| < 2^11.
    """
    if dropout_p:
        message = f"dropout_p: attention_with_lse has no dropout, expected 0, got {dropout_p}; attention has"
        raise NotImplementedError(message)
    check_attention_call(query, key, value, attn_mask, 0, is_causal, scale, enable_gqa)
    mask, diagonal = resolve_causal_mask(attn_mask, is_causal, query, key)
    return compute_with_lse(query, key, value, mask, diagonal, scale, enable_gqa, 1)


def compute_with_lse(
    query, key, value, mask, diagonal, scale, enable_gqa, mask_block, lse_dtype=None
) -> tuple[Tensor, Tensor]:
    """Return output and lse for checked arguments; `lse_dtype` applies to PyTorch's operations."""
    if host.load(LAYER, query.device.type):
        options = diagonal, scale, enable_gqa, mask_block
        return torch.ops.mojo_workbook.attention_with_lse(query, key, value, mask, *options)
    tensors = cast_for_autocast((query, key, value, mask))
    return attention_formula.forward(*tensors, resolve_scale(scale, query), diagonal, mask_block, lse_dtype)


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
    """Compute the gradients of query, key and value from the results of `attention_with_lse`.

    Pass the arguments of the forward pass; key and value must have query's leading axes and head dimension.
    Raises the errors of `attention`.
    """
    check_attention_call(query, key, value, attn_mask, 0, is_causal, scale, enable_gqa)
    shapes_match = key.shape[:-3] == query.shape[:-3] and value.shape == key.shape
    if not (shapes_match and (enable_gqa or key.shape[:-2] == query.shape[:-2])):
        raise ValueError("key, value: expected query's leading axes and one head dimension")
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        check_tensor(name, tensor, query, query.shape, query.dtype)
    check_tensor("lse", lse, query, query.shape[:-1], get_accumulation_dtype(query.dtype))
    mask, diagonal = resolve_causal_mask(attn_mask, is_causal, query, key)
    heads = query.shape[-3] if query.dim() > 2 else 1

    def reshape_to_four_axes(tensor: Tensor, rank: int = 4) -> Tensor:
        shape = tensor.shape[tensor.dim() - rank + 2 :]
        head_count = tensor.shape[tensor.dim() - rank + 1] if query.dim() > 2 else heads
        return tensor.reshape(-1 if tensor.numel() else 0, head_count, *shape)

    mask = None if mask is None else expand_mask(mask, query, key)
    dO, Q, K, V, O = map(reshape_to_four_axes, (grad_out, query, key, value, out))
    lse = reshape_to_four_axes(lse, 3)
    gradients = compute_gradients(dO, Q, K, V, O, lse, None, mask, diagonal, scale, 1)
    dQ, dK, dV = (g.reshape(t.shape) for g, t in zip(gradients, (query, key, value), strict=True))
    return dQ, dK, dV


def compute_gradients(
    grad_out, query, key, value, out, lse, delta, mask, diagonal, scale, mask_block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of tensors [B, heads, length, d], from `out` or from delta of entire rows."""
    compute = attention_formula.compute_gradients
    if host.load(LAYER, query.device.type):
        compute = torch.ops.mojo_workbook.attention_gradients
        lse = lse.to(get_accumulation_dtype(query.dtype))
    options = mask, diagonal, resolve_scale(scale, query), mask_block
    return compute(grad_out, query, key, value, out, lse, delta, *options)


# ---- Sequences of unequal lengths, without padding -----------------------------------------------------------


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `attention` for several packed sequences; queries attend only to keys of the same sequence.

    On an NVIDIA GPU, in 16-bit types and head dimensions up to 128, the kernels read the offsets on the GPU,
    so a CUDA graph can be replayed with other offsets. Otherwise the offsets are copied to the host, and the
    sequences are computed one by one.

    Sequence i has queries offsets_q[i] to offsets_q[i + 1] - 1 and keys offsets_k[i] to offsets_k[i + 1] - 1.
    For documents packed in the rows of a batch [B, S, N, d], flatten(0, 1) and start a sequence at each row.
    Rows outside every sequence, and queries of a sequence without keys, get output 0 and gradients 0.

    Args:
        query: Shape [total, N, d], floating dtype, any strides.
        key: Shape [total of keys, N, d]; G heads with `enable_gqa`.
        value: Shape [total of keys, N, dv]; G heads with `enable_gqa`.
        offsets_q: int32 [sequences + 1], on query's device, non-decreasing from 0 to total. The kernels do
            not check this; they clamp rows to the tensors.
        offsets_k: int32 [sequences + 1], the same for the keys.
        is_causal: Whether query s of a sequence attends only to keys up to s.
        scale: None means 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G heads of key and value, where G divides N.

    Returns:
        Shape [total, N, dv], in query's dtype.

    Raises:
        TypeError: An argument is not a dense tensor of a floating dtype, or dtypes differ.
        ValueError: Ranks, sizes, devices or offsets do not match.
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    arguments = cast_for_autocast((query, key, value))
    check_packed(*arguments, enable_gqa)
    for name, offsets in (("offsets_q", offsets_q), ("offsets_k", offsets_k)):
        check_dense(name, offsets, query)
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or len(offsets) < 2:
            got = f"{get_dtype_name(offsets.dtype)} {list(offsets.shape)}"
            raise ValueError(f"{name}: expected int32 [sequences + 1], got {got}")
    if len(offsets_q) != len(offsets_k):
        raise ValueError(f"offsets_k: expected {len(offsets_q)} of them, as offsets_q, got {len(offsets_k)}")
    scale = resolve_scale(scale, query)
    diagonal = 0 if is_causal else None
    offsets = torch.stack([offsets_q, offsets_k])
    if host.load(LAYER, query.device.type):
        return torch.ops.mojo_workbook.attention_varlen(query, key, value, offsets, diagonal, scale)
    Q, K, V = map(move_heads_first, arguments)
    output = attention_formula.compute_sequences(Q, K, V, offsets, scale, diagonal)
    return output.squeeze(0).transpose(0, 1)


def move_heads_first(tensor: Tensor) -> Tensor:
    """Transpose [total, heads, d] to a batch of one, [1, heads, total, d]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def check_packed(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise an error with the argument's name if packed tensors do not match."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_dense(name, tensor, query)
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected [total, heads, dim], got shape {list(tensor.shape)}")
    query, key, value = (move_heads_first(tensor) for tensor in tensors.values())
    check_arguments(query, key, value, None, enable_gqa)
    N, G, value_heads = (tensor.shape[1] for tensor in (query, key, value))
    if not enable_gqa and not N == G == value_heads:
        raise ValueError(
            f"key, value: expected the {N} heads of query, got {G} and {value_heads}; enable_gqa allows fewer"
        )


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
    """Describe in one line which kernels `attention` runs, and why; `blocks` is the size of a block mask.

    This may build kernels, but launches none. Key and value default to query; `is_causal` has no effect. If
    only one pass uses wgmma, the line describes the other pass.
    """
    key, value = query if key is None else key, query if value is None else value
    if not host.load(LAYER, query.device.type):
        on_gpu = query.device.type == "cuda"
        reason = "there is no operator" if on_gpu else "the kernels are for NVIDIA's GPUs"
        return f"PyTorch's own operations: query is on {query.device}; {reason}"
    mask, _ = resolve_causal_mask(attn_mask, False, query, key)
    with torch.enable_grad():
        query = query if query.requires_grad else query.detach().requires_grad_()
        options = dropout_p, scale, enable_gqa, blocks or 1
        return torch.ops.mojo_workbook.attention_explain(query, key, value, mask, *options)


attention.explain = explain  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def use_portable_kernels(enabled: bool = True) -> Iterator[None]:
    """Run the portable kernels also on a Hopper GPU, for comparisons."""
    loaded = enabled and host.load(LAYER, host.DEVICE)
    if loaded:
        torch.ops.mojo_workbook.attention_portable(True)
    try:
        yield
    finally:
        if loaded:
            torch.ops.mojo_workbook.attention_portable(False)


def has_kernels(query: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> bool:
    return not explain(query, attn_mask=attn_mask, dropout_p=dropout_p).startswith("PyTorch")


def uses_wgmma(query: Tensor) -> bool:
    return explain(query).startswith("wgmma")


def get_reason_slower(query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str | None:
    """Return the reason why PyTorch's attention may be faster, according to the records, or None."""
    d = query.shape[-1]
    if not uses_wgmma(query):
        return "the kernels are faster only in 16 bits on Hopper"
    if dropout_p:
        return "dropout would use other random numbers"
    if not any(d in heads for heads in (FASTER_HEAD_DIMS if attn_mask is None else FASTER_MASKED_HEAD_DIMS)):
        return f"PyTorch is faster for head dimension {d}{'' if attn_mask is None else ' with attn_mask'}"
    mask_columns = 8 if attn_mask is None else attn_mask.shape[-1]
    if mask_columns == 1 or (attn_mask is not None and attn_mask.dtype != torch.bool and mask_columns % 8):
        return f"PyTorch is faster for an attn_mask with {mask_columns} columns"
    lengths = query.shape[-2], key.shape[-2]
    if not all(isinstance(length, int) for length in lengths):
        return "its lengths are symbolic"
    shortest = MIN_FASTER_LENGTH if attn_mask is None else MIN_FASTER_MASKED_LENGTH
    if min(lengths) < shortest:
        return f"it is faster only from {shortest} queries and keys on"
    return None


# ---- A part of a larger attention ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a larger attention, computed by `attention_block` and `attention_block_backward`.

    Attributes:
        query_offset, key_offset: The positions of the first query and key, for the causal mask.
        is_causal: Whether a query attends only to keys up to its position.
        scale: None means 1 / sqrt(d).
        blocks: The visible blocks: a bool mask [query blocks, key blocks] or pairs (query block, key block).
            None means all. If `block_size` is a multiple of 16, the kernels skip hidden blocks.
        block_size: The number of queries, and of keys, in a block; the last block may be smaller.
        index: int64 [L], a permutation of the L rows of query, key and value: row index[i] has position i.
            Results are in the order of the rows. None means the identity.
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

    def make_options(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, int | None, int]:
        """Return the operators' arguments: mask, diagonal and block size of the mask."""
        diagonal = self.query_offset - self.key_offset if self.is_causal else None
        if self.blocks is None:
            return None, diagonal, 1
        counts = -(-query.shape[-2] // self.block_size), -(-key.shape[-2] // self.block_size)
        visible = make_block_mask(self.blocks, counts, query.device)
        mask = torch.zeros(counts, dtype=query.dtype, device=query.device).masked_fill(~visible, -torch.inf)
        return mask[None, None], diagonal, self.block_size

    def sort_rows(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(2, self.index)

    def restore_order(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.index_select(2, torch.argsort(self.index))


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """Compute output [B, N, S, d] and lse [B, N, S] for queries [B, N, S, d] and keys [B, G, T, d].

    To combine two parts with the same queries and different keys, compute L = logaddexp(lse1, lse2) and
    exp(lse1 - L) * out1 + exp(lse2 - L) * out2. Both results are differentiable.

    lse is float64, because float32 cannot represent the sum of a large score and the log of the number of
    keys; the kernels round it to float32. It is -inf for a fully masked row. The default `part` is the entire
    attention. Raises the errors of `attention`, and ValueError if `blocks` or `index` do not match.
    """
    part = part or Part()
    check_part(part, query, key, value)
    mask, diagonal, block = part.make_options(query, key)
    Q, K, V = map(part.sort_rows, (query, key, value))
    output, lse = compute_with_lse(Q, K, V, mask, diagonal, part.scale, True, block, torch.float64)
    return part.restore_order(output), part.restore_order(lse.double())


def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(grad_out * out) of the combined output, [B, N, S], float32 or float64."""
    check_dense("out", out, out)
    if out.dim() != 4 or out.dtype not in DTYPES:
        got = f"{get_dtype_name(out.dtype)} {list(out.shape)}"
        raise ValueError(f"out: expected [B, N, S, d] of a float dtype, got {got}")
    check_tensor("grad_out", grad_out, out, out.shape, out.dtype)
    return attention_formula.compute_delta(grad_out, out)


def attention_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a part's contribution to the gradients of query, key and value.

    `lse` and `delta`, [B, N, S], are those of the combined attention: `logaddexp` of the parts' lse, and
    `attention_delta`. lse may be float32, as the kernels round it; this changes all gradients by a factor of
    |lse| 2^-23. Pass the other arguments as to `attention_block`.
    """
    part = part or Part()
    check_part(part, query, key, value)
    check_tensor("grad_out", grad_out, query, query.shape, query.dtype)
    check_tensor("delta", delta, query, query.shape[:-1], get_accumulation_dtype(query.dtype))
    lse_dtype = lse.dtype if lse.dtype == torch.float64 else get_accumulation_dtype(query.dtype)
    check_tensor("lse", lse, query, query.shape[:-1], lse_dtype)
    dO, Q, K, V, lse, delta = map(part.sort_rows, (grad_out, query, key, value, lse, delta))
    mask, diagonal, block = part.make_options(query, key)
    gradients = compute_gradients(dO, Q, K, V, None, lse, delta, mask, diagonal, part.scale, block)
    dQ, dK, dV = map(part.restore_order, gradients)
    return dQ, dK, dV


def make_block_mask(blocks: Blocks, counts: tuple[int, int], device: torch.device) -> Tensor:
    if isinstance(blocks, Tensor):
        if blocks.dtype != torch.bool or tuple(blocks.shape) != counts:
            raise ValueError(
                f"blocks: expected a mask of bool, {list(counts)}, got {get_dtype_name(blocks.dtype)} {list(blocks.shape)}"
            )
        return blocks.to(device)
    pairs = list(blocks)
    if invalid := [(i, j) for i, j in pairs if not (0 <= i < counts[0] and 0 <= j < counts[1])]:
        raise ValueError(f"blocks: there are {counts[0]} x {counts[1]}, and {invalid[0]} is none of them")
    visible = torch.zeros(counts, dtype=torch.bool)
    if pairs:
        rows, columns = torch.tensor(pairs).unbind(1)
        visible[rows, columns] = True
    return visible.to(device)


def check_part(part: Part, query: Tensor, key: Tensor, value: Tensor) -> None:
    check_arguments(query, key, value, None, enable_gqa=True)
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
                f"index: expected int64 [{L}] for as many queries as keys, got {get_dtype_name(part.index.dtype)} "
                f"{list(part.index.shape)} for {L} queries and {key.shape[2]} keys"
            )
