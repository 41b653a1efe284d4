"""Attention of sequences of unequal lengths that lie behind one another: no padding is stored and none is computed.

A batch of sequences, or the documents of one long row, are given as [total, heads, dim] and by offsets. On an NVIDIA GPU, in 16-bit
types and heads of up to 128 elements, kernels on tensor cores read the offsets themselves: nobody waits for them, and a
CUDA graph can be replayed with others. Everywhere else each sequence is an attention of its own, and the offsets come to the host.
"""

import itertools

import torch

from harness.nn import attention_formula, host
from harness.nn.arguments import check_dense, check_flag, in_autocast_dtype, plain
from harness.nn.attention_arguments import check, factor

Tensor = torch.Tensor


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
        query: Shape [total, N, d], of a floating dtype. Any strides.
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
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    given = in_autocast_dtype((query, key, value))
    check_packed(*given, enable_gqa)
    for name, offsets in (("offsets_q", offsets_q), ("offsets_k", offsets_k)):
        check_offsets(name, offsets, query)
    if len(offsets_q) != len(offsets_k):
        raise ValueError(f"offsets_k: expected {len(offsets_q)} of them, as offsets_q, got {len(offsets_k)}")
    scale = factor(scale, query)
    diagonal = 0 if is_causal else None
    narrow = given[0].dtype in (torch.bfloat16, torch.float16)
    if narrow and host.load("attention", query.device.type):
        offsets = torch.stack([offsets_q, offsets_k])
        return torch.ops.mojo_workbook.attention_varlen(query, key, value, offsets, diagonal, scale)
    return each_alone(*given, bounds((offsets_q, offsets_k), (len(query), len(key))), scale, diagonal)


def each_alone(query, key, value, sequences, scale: float, diagonal: int | None) -> Tensor:
    """Return the attention of each sequence by the formula, and zeros for the rows of none."""
    N, dv = query.shape[1], value.shape[-1]
    parts, end = [], 0
    for queries, keys in sequences:
        parts.append(query.new_zeros(queries.start - end, N, dv))
        q, k, v = map(heads_first, (query[queries], key[keys], value[keys]))
        parts.append(attention_formula.forward(q, k, v, None, scale, diagonal)[0][0].transpose(0, 1))
        end = queries.stop
    return torch.cat([*parts, query.new_zeros(len(query) - end, N, dv)])


def heads_first(tensor: Tensor) -> Tensor:
    """Return [total, heads, d] as a batch of one, [1, heads, total, d]."""
    return tensor.transpose(0, 1).unsqueeze(0)


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


def bounds(offsets: tuple[Tensor, Tensor], totals: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The rows of queries and of keys of each sequence, from the offsets of both. Raises ValueError where they are none."""
    rows = []
    for name, numbers, total in zip(("offsets_q", "offsets_k"), offsets, totals, strict=True):
        numbers = numbers.tolist()
        if numbers[0] < 0 or numbers[-1] > total or numbers != sorted(numbers):
            raise ValueError(f"{name}: expected numbers from 0 to {total} that never fall, got {numbers}")
        rows.append([slice(*pair) for pair in itertools.pairwise(numbers)])
    return list(zip(*rows, strict=True))
