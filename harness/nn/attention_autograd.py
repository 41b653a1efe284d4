"""Attention as a PyTorch function: the flash kernels of puzzle 23 behind `torch.library`, with their gradients.

`attention` takes the place of `torch.nn.functional.scaled_dot_product_attention`. Between forward and backward pass it keeps
query, key, value, the output and one number for each row, the log of the sum of its exponentials (lse); the probabilities
are computed again, and no matrix of query length x key length is stored. In 16-bit types gradients have the
same bits in every run.

`attention_block` and `attention_block_backward` are the same for a part of a larger attention: queries and keys from some
position on, and blocks of them that are left out. `attention_backward` is the backward pass by itself.

Three operators are registered, `mojo_workbook::attention`, `mojo_workbook::attention_backward` and, for a mask that needs a
gradient, `mojo_workbook::attention_mask_backward`. On a GPU an extension module launches their kernels
(`harness.nn.attention_direct`); where it has none, the formula computes (`harness.nn.attention_formula`).
With dropout there are two others (`harness.nn.attention_dropout`). What `attention` has no kernel for runs
PyTorch's own function.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.nn import attention_direct, attention_dropout, attention_formula
from harness.nn.arguments import DTYPES, check_dense, check_flag, in_autocast_dtype, plain, wide
from harness.nn.attention_arguments import (
    Folded,
    check,
    expect,
    factor,
    fold,
    is_causal_bias,
    refuse_options,
    without_bias,
)
from harness.nn.attention_direct import (
    CHUNK,
    FIRST_ONLY,
    backward_buffers,
    forward_buffers,
    kernels_for,
    without_mask_gradient,
)
from harness.nn.attention_plan import EVERY_KEY
from harness.nn.operators import registered
from harness.nn.private import transforms_active

Tensor = torch.Tensor
Blocks = Tensor | Iterable[tuple[int, int]]


# ---- What models call ---------------------------------------------------------------------------------------


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
    """`scaled_dot_product_attention` by hand-written Mojo kernels: softmax(query key^T * scale + mask) value.

    A row that the mask hides from every key gives 0 and gradients of 0. `is_causal` counts from the top left, as
    PyTorch's: query s sees the keys up to s, also where there are more keys than queries. From the bottom right,
    `torch.nn.attention.bias.causal_lower_right(S, T)` is the mask: the last query sees all keys.

    The kernels take 16-bit types on an NVIDIA GPU. PyTorch's own function computes every other call, and
    those whose mask needs a gradient, if it is one number for all keys, or heads have more than 128 elements
    or no multiple of 8. Within torch.func's transforms and in forward mode PyTorch's operations compute it, at
    any order.

    Args:
        query: Shape [..., N, S, d], 1 <= d <= 256; float32, float64, bfloat16 or float16. Any strides.
        key: Shape [..., N, T, d]; leading axes broadcast. [..., G, T, d] with `enable_gqa`.
        value: Shape [..., N, T, dv]; [..., G, T, dv] with `enable_gqa`.
        attn_mask: Broadcastable to [..., N, S, T]. Of bool: True where a query sees a key. Else of query's dtype, added
            to the scores; then it may need a gradient, for which scores and dO value^T are computed once more.
        dropout_p: The share of probabilities that become 0, in steps of 1 / 65,536; the others grow by as much. 0 outside of training:
            nobody asks for the mode of a module. From PyTorch's generator of the device. On an NVIDIA GPU, in
            16-bit types, kernels draw it, for heads of up to 128 elements and a mask without a gradient;
            PyTorch's own function computes every other call.
        is_causal: Must be False where there is a mask.
        scale: None for 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G of key and value, where G divides N.

    Returns:
        Shape [..., N, S, dv], in query's dtype.

    Raises:
        TypeError: An argument is no dense tensor, or has a dtype without a kernel or another one than query.
        ValueError: Ranks, sizes or devices do not fit, dropout_p is no probability, or there is a mask and `is_causal`.
        NotImplementedError: A head dimension above 256, or a second derivative.
    """
    if forward_ad._current_level >= 0 or transforms_active():
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        with sdpa_kernel(SDPBackend.MATH):  # which alone has every derivative
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **how)
    if not dropout_p and not torch.compiler.is_compiling():
        output = attention_direct.attention_directly(
            query, key, value, attn_mask, is_causal, scale, enable_gqa
        )
        if output is not None:
            return output
    kept = attention_dropout.kept_of(dropout_p)
    drops = kept < attention_dropout.ONE
    folded, diagonal = prepared(query, key, value, attn_mask, is_causal, enable_gqa)
    q, k, v, mask = folded.tensors
    scale = factor(scale, query)
    empty = not q.numel() or not k.numel()
    if not empty and attention_direct.left_to_torch(q, mask, drops) is not None:
        output = torchs_own(q, k, v, mask, dropout_p if drops else 0.0, scale, diagonal)
    elif drops:
        missing = -q.shape[-1] % CHUNK
        # Zeros after query and key leave the scores as they are; the kernels take whole chunks.
        tensors = [F.pad(tensor, (0, missing)) if missing else tensor for tensor in (q, k, v)]
        state = attention_dropout.new_state(query.device)
        output, _ = torch.ops.mojo_workbook.attention_dropout(*tensors, mask, state, scale, diagonal, kept)
    else:
        output = None
        if not torch.compiler.is_compiling():
            output = attention_direct.by_plan(q, k, v, mask, diagonal, scale, True)
        if output is None:
            output, _ = torch.ops.mojo_workbook.attention(q, k, v, mask, scale, diagonal, 1)
    return folded.unfold(output, value.shape[-1])


attention.explain = attention_direct.explain  # pyright: ignore[reportFunctionMemberAccess]


def torchs_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    diagonal: int,
) -> Tensor:
    """PyTorch's attention of query [B, N, S, d], key and value [B, G, T, d], and the mask of `fold`."""
    S, T = query.shape[2], key.shape[2]
    if scale <= 0:
        # PyTorch's fused kernels multiply a triangle's -inf by the scale, which makes infinity or NaN of it. A sign is exact.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if diagonal not in (0, EVERY_KEY):
        mask = torch.ones(1, 1, S, T, dtype=torch.bool, device=query.device).tril(diagonal)
    if mask is not None:
        # PyTorch's fused kernels want an element for each key, side by side.
        mask = mask.expand(*mask.shape[:3], T).contiguous() if mask.shape[3] < T else mask
    if query.device.type != "cpu" and not torch.compiler.is_compiling():
        query, key, value = (
            tensor if begins_at_16_bytes(tensor) else copied(tensor) for tensor in (query, key, value)
        )
        mask = copied(mask) if mask is not None and mask.storage_offset() * mask.element_size() % 16 else mask
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, diagonal == 0, scale=scale, enable_gqa=shared
    )


def begins_at_16_bytes(tensor: Tensor) -> bool:
    """Whether every row does, and its elements are neighbours. PyTorch's fused kernels refuse other rows, or end with a misaligned
    address."""
    *strides, nearest = tensor.stride()
    size = tensor.element_size()
    return nearest == 1 and not any(step * size % 16 for step in (*strides, tensor.storage_offset()))


def copied(tensor: Tensor) -> Tensor:
    """The same elements without gaps, in memory of their own."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
    """As `attention`, and the log of the sum of the exponentials of each row, [..., N, S], with gradients too.

    lse is float32, float64 for float64; -inf for a row that sees no key.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: attention_with_lse has no dropout, expected 0, got {dropout_p}; attention has"
        )
    folded, diagonal = prepared(query, key, value, attn_mask, is_causal, enable_gqa)
    output, lse = torch.ops.mojo_workbook.attention(*folded.tensors, factor(scale, query), diagonal, 1)
    return folded.unfold(output, value.shape[-1]), lse.reshape(*folded.lead, query.shape[-2])


def prepared(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Folded, int]:
    """The arguments of `attention`, checked, in autocast's dtype, with four axes; and how many keys past its own place a query sees."""
    refuse_options(is_causal, attn_mask, enable_gqa)
    FIRST_ONLY.refuse(query=query, key=key, value=value, attn_mask=attn_mask)
    # A causal mask of PyTorch's has no numbers.
    numbers = None if is_causal_bias(attn_mask) else attn_mask
    query, key, value, numbers = in_autocast_dtype((query, key, value, numbers))
    attn_mask = attn_mask if numbers is None else numbers
    check(query, key, value, attn_mask, enable_gqa)
    attn_mask, diagonal = without_bias(attn_mask, is_causal, query, key)
    return fold(query, key, value, attn_mask, enable_gqa), diagonal


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
    """The gradients of query, key and value by themselves, from what `attention_with_lse` returned.

    Args:
        grad_out: The gradient of the output, [..., N, S, d].
        query, key, value: As the forward pass had them; key and value have query's leading axes and head dimension.
        out: The output, [..., N, S, d].
        lse: [..., N, S].
        attn_mask, is_causal, scale, enable_gqa: As the forward pass had them.

    Raises what `attention` raises.
    """
    refuse_options(is_causal, attn_mask, enable_gqa)
    FIRST_ONLY.refuse(
        grad_out=grad_out, query=query, key=key, value=value, out=out, lse=lse, attn_mask=attn_mask
    )
    check(query, key, value, attn_mask, enable_gqa)
    if (
        key.shape[:-3] != query.shape[:-3]
        or value.shape != key.shape
        or not (enable_gqa or key.shape[:-2] == query.shape[:-2])
    ):
        raise ValueError("key, value: expected query's leading axes and one head dimension")
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        expect(name, tensor, query, query.shape, query.dtype)
    expect("lse", lse, query, query.shape[:-1], wide(query.dtype))
    attn_mask, diagonal = without_bias(attn_mask, is_causal, query, key)
    folded = fold(query, key, value, attn_mask, enable_gqa)
    rows = folded.tensors[0].shape
    grad_query, grad_key, grad_value = torch.ops.mojo_workbook.attention_backward(
        grad_out.reshape(rows),
        *folded.tensors[:3],
        out.reshape(rows),
        lse.reshape(rows[:-1]),
        None,
        folded.tensors[3],
        factor(scale, query),
        diagonal,
        1,
    )
    return grad_query.reshape(query.shape), grad_key.reshape(key.shape), grad_value.reshape(value.shape)


# ---- A part of a larger attention ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Which part of a larger attention a call is, for `attention_block` and its backward pass alike.

    Attributes:
        query_offset, key_offset: The positions of the first query and of the first key, which a causal mask counts from.
        is_causal: Whether a query sees the keys up to its own position alone.
        scale: None for 1 / sqrt(d).
        blocks: Which blocks of queries see which blocks of keys: a mask of bool, [blocks of queries, blocks of keys], or
            the pairs (block of queries, block of keys) that do. None for all. Where `block_size` is a multiple of 16
            the kernels leave out the others' work too.
        block_size: How many queries, and keys, are a block; the last may be smaller.
        index: int64 [L], the order in which the L rows of query, key and value are taken: row index[i] is at position i.
            Results stand where their rows stand. None where row i is at position i.
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

    def options(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, float, int, int]:
        """What the operators take: mask, scale, diagonal and the size of the mask's blocks."""
        diagonal = self.query_offset - self.key_offset if self.is_causal else EVERY_KEY
        if self.blocks is None:
            return None, factor(self.scale, query), diagonal, 1
        counts = -(-query.shape[-2] // self.block_size), -(-key.shape[-2] // self.block_size)
        seen = seen_blocks(self.blocks, counts, query.device)
        mask = torch.zeros(counts, dtype=query.dtype, device=query.device).masked_fill(~seen, -torch.inf)
        return mask[None, None], factor(self.scale, query), diagonal, self.block_size

    def ordered(self, tensor: Tensor) -> Tensor:
        """A tensor [B, N, L, ...] with its rows in the order of the positions."""
        return tensor if self.index is None else tensor.index_select(2, self.index)

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor in the order of the positions with its rows where they came from."""
        return tensor if self.index is None else tensor.index_select(2, torch.argsort(self.index))


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys, with what it takes to put parts together: output and lse.

    Of two parts with the same queries and different keys the whole is, with L = logaddexp(lse1, lse2),
    exp(lse1 - L) * out1 + exp(lse2 - L) * out2. Both results have gradients, so that this may be left to autograd.

    Args:
        query: [B, N, S, d].
        key, value: [B, G, T, d], where G divides N.
        part: Offsets, scale, blocks and index; None for a part that is the whole.

    Returns:
        output [B, N, S, d] in query's dtype, and lse [B, N, S] in float32 (float64 for float64), -inf for a row that sees no
        key of this part.

    Raises what `attention` raises, and ValueError where blocks or index do not fit.
    """
    part = part or Part()
    FIRST_ONLY.refuse(query=query, key=key, value=value)
    check_part(part, query, key, value)
    rows = map(part.ordered, (query, key, value))
    output, lse = torch.ops.mojo_workbook.attention(*rows, *part.options(query, key))
    return part.placed(output), part.placed(lse)


@FIRST_ONLY.once
def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """rowsum(grad_out * out), [B, N, S] in float32 (float64 for float64), of the output of all parts together."""
    FIRST_ONLY.refuse(batches=False, grad_out=grad_out, out=out)
    check_pair(grad_out, out)
    return row_sums(grad_out, out)


def row_sums(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None = None) -> Tensor:
    """As `attention_delta`, of tensors that fit, less a gradient of lse."""
    if out.numel() and (kernels := kernels_for(out)):
        return kernels.delta(grad_out, out, grad_lse)
    sums = wide(out.dtype)
    delta = (grad_out.to(sums) * out.to(sums)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


@FIRST_ONLY.once
def attention_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    delta: Tensor,
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of a part in the gradients, from the lse and the delta of whole rows, over the keys of all parts.

    Args:
        grad_out: The gradient of the whole output, [B, N, S, d].
        query, key, value: As `attention_block` had them.
        lse, delta: [B, N, S], of all parts together: `logaddexp` of their lse, and `attention_delta`.
        part: As `attention_block` had it.

    Returns the gradients of query, key and value; that of query, and those of keys in several parts, are terms of a sum.
    """
    part = part or Part()
    FIRST_ONLY.refuse(
        batches=False, grad_out=grad_out, query=query, key=key, value=value, lse=lse, delta=delta
    )
    check_part(part, query, key, value)
    expect("grad_out", grad_out, query, query.shape, query.dtype)
    for name, tensor in (("lse", lse), ("delta", delta)):
        expect(name, tensor, query, query.shape[:-1], wide(query.dtype))
    dO, Q, K, V, lse, delta = map(part.ordered, (grad_out, query, key, value, lse, delta))
    grad_query, grad_key, grad_value = backward_of_rows(dO, Q, K, V, lse, delta, *part.options(query, key))
    return part.placed(grad_query), part.placed(grad_key), part.placed(grad_value)


def seen_blocks(blocks: Blocks, counts: tuple[int, int], device: torch.device) -> Tensor:
    """The mask of bool, [blocks of queries, blocks of keys]. Raises TypeError or ValueError where it does not fit."""
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
    """Raises, naming the argument, for what a part cannot be made of."""
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


def check_pair(grad_out: Tensor, out: Tensor) -> None:
    """Raises where an output and its gradient do not fit."""
    check_dense("out", out, out)
    if out.dim() != 4 or out.dtype not in DTYPES:
        raise ValueError(
            f"out: expected [B, N, S, d] of a float dtype, got {plain(out.dtype)} {list(out.shape)}"
        )
    expect("grad_out", grad_out, out, out.shape, out.dtype)


# ---- The operators ------------------------------------------------------------------------------------------


@registered(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float scale, SymInt diagonal, SymInt mask_block)"
    " -> (Tensor, Tensor)",
)
def forward_operator(query, key, value, attn_mask, scale, diagonal, mask_block):
    """Returns output [B, N, S, d] and lse [B, N, S] from query, and key and value [B, G, T, d].

    Args:
        attn_mask: Added to the scores, each axis of its own size, in blocks, or 1.
        scale: What the scores are multiplied by.
        diagonal: How many keys further than its own place a query sees.
        mask_block: How many queries, and keys, an element of the mask stands for.
    """
    empty = not query.numel() or not key.numel()
    if not empty and (kernels := kernels_for(query)):
        return kernels.forward(query, key, value, attn_mask, scale, diagonal, mask_block)
    output, lse = forward_buffers(query)
    if empty:
        return output.zero_(), lse.fill_(-torch.inf)
    found = attention_formula.forward(query, key, value, attn_mask, scale, diagonal, mask_block)
    return output.copy_(found[0]), lse.copy_(found[1])


@registered(
    "attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_lse,"
    " Tensor? attn_mask, float scale, SymInt diagonal, SymInt mask_block) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(grad_out, query, key, value, out, lse, grad_lse, *options):
    """Returns the gradients of query, key and value; the arguments are those of the forward operator and its results.

    The derivative of lse along a score is its probability, so that dS = P * (dP - delta + grad_lse).
    """
    if grad_lse is None and out.numel() and (kernels := kernels_for(out)):
        gradients = kernels.gradients(grad_out, query, key, value, out, lse, *options)
        if gradients is not None:
            return gradients
    delta = row_sums(grad_out, out, grad_lse)
    return backward_of_rows(grad_out, query, key, value, lse, delta, *options)


def backward_of_rows(
    grad_out, query, key, value, lse, delta, attn_mask, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from lse and delta; the other arguments are those of the forward operator."""
    tensors = grad_out, query, key, value, lse, delta
    empty = not query.numel() or not key.numel()
    if not empty and (kernels := kernels_for(query)):
        return kernels.backward(*tensors, attn_mask, *options)
    gradients = backward_buffers(grad_out, query, key, value)
    if not empty:
        return attention_formula.backward(*tensors, attn_mask, *options, like=gradients)
    for gradient in gradients:
        gradient.zero_()
    return gradients


@registered(
    "attention_mask_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_lse,"
    " Tensor attn_mask, float scale, SymInt diagonal) -> Tensor",
)
def mask_operator(grad_out, query, key, value, out, lse, grad_lse, attn_mask, scale, diagonal):
    """Returns the gradient of the mask, in its own shape: dS, summed over what it was broadcast to.

    The arguments are those of `backward_operator`; an element of the mask stands for one query and one key.
    """
    empty = not query.numel() or not key.numel()
    if empty:
        return attn_mask.new_zeros(attn_mask.shape)
    if without_mask_gradient(query, attn_mask) is None and (kernels := kernels_for(query)):
        tensors = grad_out, query, key, value, out, lse, grad_lse, attn_mask
        return kernels.mask_gradient(*tensors, scale, diagonal)
    return attention_formula.mask_gradient(grad_out, query, key, value, grad_lse, attn_mask, scale, diagonal)


def keep_for_backward(ctx, inputs, output) -> None:
    """Keeps query, key, value, the mask, the output and lse."""
    query, key, value, attn_mask, ctx.scale, ctx.diagonal, ctx.mask_block = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, attn_mask)


def backward(ctx, grad_out, grad_lse):
    """The gradients of query, key, value and mask, None where none is needed."""
    query, key, value, out, lse, attn_mask = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs = ctx.needs_input_grad
    gradients = [None] * len(needs)
    tensors = (grad_out, query, key, value, out, lse, grad_lse, attn_mask)
    if any(needs[:3]):
        found = backward_operator(*tensors, ctx.scale, ctx.diagonal, ctx.mask_block)
        gradients[:3] = [gradient if need else None for gradient, need in zip(found, needs, strict=False)]
    if needs[3]:
        gradients[3] = mask_operator(*tensors, ctx.scale, ctx.diagonal)
    return tuple(gradients)


forward_operator.register_fake(forward_buffers)
backward_operator.register_fake(backward_buffers)
mask_operator.register_fake(lambda dO, Q, K, V, out, lse, grad_lse, mask, *rest: mask.new_empty(mask.shape))
forward_operator.register_autograd(backward, setup_context=keep_for_backward)
backward_operator.register_autograd(FIRST_ONLY.refuse_double_backward)
mask_operator.register_autograd(FIRST_ONLY.refuse_double_backward)
