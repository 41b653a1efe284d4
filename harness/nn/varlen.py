"""Attention of sequences of unequal lengths that lie behind one another: no padding is stored and none is computed.

A batch of sequences, or the documents of one long row, are given as [total, heads, dim] and by offsets. On an NVIDIA GPU, in 16-bit
types and heads of up to 128 elements, puzzle 23's kernels on tensor cores read the offsets themselves: nobody waits for them, and a
CUDA graph can be replayed with others. Everywhere else each sequence is an attention of its own, and the offsets come to the host.
"""

import itertools

import torch
import torch.nn.functional as F

from harness.nn.arguments import check_dense, check_flag, in_autocast_dtype, plain, wide
from harness.nn.attention_arguments import check, factor
from harness.nn.attention_autograd import backward_operator
from harness.nn.attention_direct import CHUNK, aligned, narrow_kernels, sizes
from harness.nn.attention_plan import EVERY_KEY
from harness.nn.derivatives import FirstOnly
from harness.nn.operators import registered

Tensor = torch.Tensor
FIRST_ONLY = FirstOnly(
    "attention_varlen", "torch.nn.functional.scaled_dot_product_attention of each sequence"
)


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
    """`attention` of several sequences at once: the queries of each see its own keys and no others.

    Sequence i has the queries offsets_q[i] to offsets_q[i + 1] - 1 and the keys offsets_k[i] to offsets_k[i + 1] - 1. Documents within
    the rows of a batch [B, S, N, d] are sequences too: `flatten(0, 1)` it, and let a document begin with each row.

    Rows of no sequence give 0 and gradients of 0, as queries of a sequence without keys do: the offsets may end before the tensors do.

    Args:
        query: Shape [total, N, d], 1 <= d <= 256; float32, float64, bfloat16 or float16. Any strides.
        key: Shape [total of keys, N, d]; G heads with `enable_gqa`.
        value: Shape [total of keys, N, dv]; G heads with `enable_gqa`.
        offsets_q: int32 [sequences + 1], on query's device; from 0 or more, never falling, up to total at most. The kernels on tensor
            cores do not check that, and take from outside what is nearest inside.
        offsets_k: int32 [sequences + 1], likewise of the keys.
        is_causal: Whether query s of a sequence sees the keys up to s of it alone.
        scale: None for 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G of key and value, where G divides N.

    Returns:
        Shape [total, N, dv], in query's dtype.

    Raises:
        TypeError: An argument is no dense tensor, or has a dtype without a kernel or another one than query.
        ValueError: Ranks, sizes, devices or offsets do not fit.
        NotImplementedError: A head dimension above 256, a second or a forward-mode derivative, or a transform of torch.func.
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    FIRST_ONLY.refuse(batches=False, query=query, key=key, value=value)
    query, key, value = in_autocast_dtype((query, key, value))
    check_packed(query, key, value, enable_gqa)
    for name, offsets in (("offsets_q", offsets_q), ("offsets_k", offsets_k)):
        check_offsets(name, offsets, query)
    if len(offsets_q) != len(offsets_k):
        raise ValueError(f"offsets_k: expected {len(offsets_q)} of them, as offsets_q, got {len(offsets_k)}")
    d, dv = query.shape[-1], value.shape[-1]
    # Zeros behind query and key leave the scores as they are; the kernels take whole chunks.
    width = -(-max(d, dv) // CHUNK) * CHUNK
    query_, key_, value_ = (F.pad(t, (0, width - t.shape[-1])) for t in (query, key, value))
    offsets = torch.stack([offsets_q, offsets_k])
    diagonal = 0 if is_causal else EVERY_KEY
    output, _ = torch.ops.mojo_workbook.attention_varlen(
        query_, key_, value_, offsets, factor(scale, query), diagonal
    )
    return output[..., :dv]


# ---- Checks -------------------------------------------------------------------------------------------------


def check_packed(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raises, naming the argument, for tensors that no attention of sequences can be made of."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_dense(name, tensor, query)
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected [total, heads, dim], got shape {list(tensor.shape)}")
    query, key, value = (heads_first(tensor) for tensor in tensors.values())
    check(query, key, value, None, enable_gqa)
    N, G, of_value = (tensor.shape[1] for tensor in (query, key, value))
    if not enable_gqa and not N == G == of_value:
        raise ValueError(
            f"key, value: expected the {N} heads of query, got {G} and {of_value}; enable_gqa lets heads be shared"
        )


def check_offsets(name: str, offsets: Tensor, query: Tensor) -> None:
    """Raises, naming the argument, for what are no offsets."""
    check_dense(name, offsets, query)
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or len(offsets) < 2:
        raise ValueError(
            f"{name}: expected int32 [sequences + 1], got {plain(offsets.dtype)} {list(offsets.shape)}"
        )


def bounds(offsets: Tensor, totals: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The rows of queries and of keys of each sequence, from offsets [2, sequences + 1]. Raises ValueError where they are none."""
    rows = []
    for name, numbers, total in zip(("offsets_q", "offsets_k"), offsets.tolist(), totals, strict=True):
        if numbers[0] < 0 or numbers[-1] > total or numbers != sorted(numbers):
            raise ValueError(f"{name}: expected numbers from 0 to {total} that never fall, got {numbers}")
        rows.append([slice(*pair) for pair in itertools.pairwise(numbers)])
    return list(zip(*rows, strict=True))


# ---- The operators ------------------------------------------------------------------------------------------


def heads_first(tensor: Tensor) -> Tensor:
    """[total, heads, d] as a batch of one, [1, heads, total, d]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def of_offsets(offsets: Tensor) -> tuple[int, ...]:
    """What the module takes in the place of a mask's sizes: the number of sequences."""
    return (0, 0, 0, 0, offsets.shape[1] - 1)


@registered(
    "attention_varlen",
    "(Tensor query, Tensor key, Tensor value, Tensor offsets, float scale, SymInt diagonal) -> (Tensor, Tensor)",
)
def varlen_operator(query, key, value, offsets, scale, diagonal):
    """Returns output [total, N, d] and lse [N, total] from query, and key and value [total of keys, G, d].

    Args:
        offsets: int32 [2, sequences + 1], of queries and of keys.
        scale: What the scores are multiplied by.
        diagonal: How many keys further than its own place in its sequence a query sees.
    """
    # 0 and -inf are what rows of no sequence have.
    output, lse = (made.zero_() for made in varlen_buffers(query))
    lse.fill_(-torch.inf)
    kernels = narrow_kernels(query, scale)
    if kernels is None:
        for queries, keys in bounds(offsets, (len(query), len(key))):
            parts = (heads_first(t) for t in (query[queries], key[keys], value[keys]))
            made, sums = torch.ops.mojo_workbook.attention(*parts, None, scale, diagonal, 1)
            output[queries] = made[0].transpose(0, 1)
            lse[:, queries] = sums[0]
        return output, lse
    tensors = [aligned(heads_first(tensor)) for tensor in (query, key, value)]
    given = (
        sizes(tensors[0], tensors[1], diagonal, of_offsets(offsets)),
        scale,
        (heads_first(output), lse),
        tensors,
    )
    kernels.launch_forward(kernels.module.varlen_forward, *given, offsets)
    return output, lse


@varlen_operator.register_fake
def varlen_buffers(query, *rest):
    """Allocates what the operator returns."""
    total, N, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((N, total), dtype=wide(query.dtype))


@registered(
    "attention_varlen_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor offsets, float scale,"
    " SymInt diagonal) -> (Tensor, Tensor, Tensor)",
)
def varlen_backward_operator(grad_out, query, key, value, out, lse, offsets, scale, diagonal):
    """Returns the gradients of query, key and value; the arguments are those of the forward operator and its results."""
    gradients = varlen_gradients(grad_out, query, key, value)
    for gradient in gradients:
        gradient.zero_()
    kernels = narrow_kernels(query, scale)
    if kernels is None:
        for queries, keys in bounds(offsets, (len(query), len(key))):
            rows = (queries, queries, keys, keys, queries)
            parts = (
                heads_first(t[own]) for t, own in zip((grad_out, query, key, value, out), rows, strict=True)
            )
            shares = backward_operator(*parts, lse[None, :, queries], None, None, scale, diagonal, 1)
            for gradient, share, own in zip(gradients, shares, rows[1:4], strict=True):
                gradient[own] = share[0].transpose(0, 1)
        return gradients
    *tensors, out = (heads_first(tensor) for tensor in (grad_out, query, key, value, out))
    written = [heads_first(gradient) for gradient in gradients]
    given = sizes(tensors[1], tensors[2], diagonal, of_offsets(offsets)), scale, written, tensors, out, lse
    kernels.launch_aligned_backward(kernels.module.varlen_backward, *given, offsets.contiguous())
    return gradients


@varlen_backward_operator.register_fake
def varlen_gradients(grad_out, query, key, value, *rest):
    """Allocates what the backward operator returns."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep_for_backward(ctx, inputs, output) -> None:
    """Keeps query, key, value, the output, lse and the offsets."""
    query, key, value, offsets, ctx.scale, ctx.diagonal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, offsets)


def backward(ctx, grad_out, grad_lse):
    """The gradients of query, key and value."""
    query, key, value, out, lse, offsets = ctx.saved_tensors
    gradients = torch.ops.mojo_workbook.attention_varlen_backward(
        grad_out, query, key, value, out, lse, offsets, ctx.scale, ctx.diagonal
    )
    return *gradients, None, None, None


varlen_operator.register_autograd(backward, setup_context=keep_for_backward)
varlen_backward_operator.register_autograd(FIRST_ONLY.refuse_double_backward)
