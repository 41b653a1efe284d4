"""Attention of concatenated sequences of unequal lengths, without padding.

Sequences are [total, heads, dim] with offsets. On an NVIDIA GPU, in 16-bit types and heads of up to 128
elements, the kernels read the offsets on the GPU, so a CUDA graph can be replayed with others. Elsewhere the
offsets are copied to the host and each sequence is computed by itself.
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
    """Compute `attention` of several sequences at once: the queries of each see only its own keys.

    Sequence i has the queries offsets_q[i] to offsets_q[i + 1] - 1 and the keys offsets_k[i] to offsets_k[i +
    1] - 1. Documents within the rows of a batch [B, S, N, d] are sequences too: flatten(0, 1), with a
    document beginning at each row. Rows of no sequence, and queries of a sequence without keys, give 0 and
    gradients of 0.

    Args:
        query: Shape [total, N, d], of a floating dtype. Any strides.
        key: Shape [total of keys, N, d]; G heads with `enable_gqa`.
        value: Shape [total of keys, N, dv]; G heads with `enable_gqa`.
        offsets_q: int32 [sequences + 1], on query's device; not falling, from 0 to total. The kernels do not
            check that; they clamp rows to the tensors.
        offsets_k: int32 [sequences + 1], likewise of the keys.
        is_causal: Whether query s of a sequence sees only its keys up to s.
        scale: None for 1 / sqrt(d).
        enable_gqa: Whether N query heads may share G of key and value, where G divides N.

    Returns:
        Shape [total, N, dv], in query's dtype.

    Raises:
        TypeError: An argument is not a dense tensor of a floating dtype, or dtypes differ.
        ValueError: Ranks, sizes, devices or offsets do not fit.
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    arguments = in_autocast_dtype((query, key, value))
    check_packed(*arguments, enable_gqa)
    for name, offsets in (("offsets_q", offsets_q), ("offsets_k", offsets_k)):
        check_dense(name, offsets, query)
        if offsets.dtype != torch.int32 or offsets.dim() != 1 or len(offsets) < 2:
            got = f"{plain(offsets.dtype)} {list(offsets.shape)}"
            raise ValueError(f"{name}: expected int32 [sequences + 1], got {got}")
    if len(offsets_q) != len(offsets_k):
        raise ValueError(f"offsets_k: expected {len(offsets_q)} of them, as offsets_q, got {len(offsets_k)}")
    scale = factor(scale, query)
    diagonal = 0 if is_causal else None
    narrow = arguments[0].dtype in (torch.bfloat16, torch.float16)
    if narrow and host.load("attention", query.device.type):
        offsets = torch.stack([offsets_q, offsets_k])
        return torch.ops.mojo_workbook.attention_varlen(query, key, value, offsets, diagonal, scale)
    return each_alone(*arguments, bounds((offsets_q, offsets_k), (len(query), len(key))), scale, diagonal)


def each_alone(query, key, value, sequences, scale: float, diagonal: int | None) -> Tensor:
    """Return the attention of each sequence by the formula, and zeros for other rows."""
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


def check_packed(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise, naming the argument, for tensors that do not fit."""
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


def bounds(offsets: tuple[Tensor, Tensor], totals: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Return the rows of queries and of keys of each sequence; raise ValueError for wrong offsets."""
    rows = []
    for name, numbers, total in zip(("offsets_q", "offsets_k"), offsets, totals, strict=True):
        numbers = numbers.tolist()
        if numbers[0] < 0 or numbers[-1] > total or numbers != sorted(numbers):
            raise ValueError(f"{name}: expected numbers from 0 to {total} that never fall, got {numbers}")
        rows.append([slice(*pair) for pair in itertools.pairwise(numbers)])
    return list(zip(*rows, strict=True))
