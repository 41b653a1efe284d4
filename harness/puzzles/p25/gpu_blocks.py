"""The blocks of a ring computed by PyTorch's own attention kernels, which hand out the log-sum-exp: flash attention and cuDNN's.

`ring_with` returns the solution's functions with these in the place of those that compute. Who holds what, who sends what to
whom and when, and how parts are merged stays the solution's. On a CPU flash attention is PyTorch's for CPUs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.check.python_files import load
from harness.toolchain import roots

Ranges = tuple[tuple[int, int], ...]
Tensor = torch.Tensor


# ---- Kernels ------------------------------------------------------------------------------------------------


def flash_forward(q, k, v, scale: float, diagonal: bool) -> tuple[Tensor, Tensor, tuple]:
    """out [B, N, s, d] and lse [B, N, s] of a block that is seen whole, or up to its diagonal; what else backward takes."""
    aten = torch.ops.aten
    flash = (
        aten._scaled_dot_product_flash_attention
        if q.is_cuda
        else aten._scaled_dot_product_flash_attention_for_cpu
    )
    out, lse, *others = flash(q, k, v, 0.0, diagonal, scale=scale)
    return out, lse, tuple(others[:6])


def flash_backward(dO, q, k, v, out, lse, others: tuple, scale: float, diagonal: bool) -> tuple[Tensor, ...]:
    """What a block adds to dQ, dK and dV, from the output and lse of all keys."""
    if not q.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(dO, q, k, v, out, lse.contiguous(), 0.0, diagonal, scale=scale)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths, dropout = others[:4], others[4:]
    return backward(dO, q, k, v, out, lse.contiguous(), *lengths, 0.0, diagonal, *dropout, scale=scale)


def cudnn_forward(q, k, v, scale: float, diagonal: bool) -> tuple[Tensor, Tensor, tuple]:
    """As `flash_forward`; cuDNN's lse has one axis more."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, diagonal, scale=scale
    )
    out, lse, *others = found
    return out, lse.reshape(lse.shape[:3]), tuple(others[:6])


def cudnn_backward(dO, q, k, v, out, lse, others: tuple, scale: float, diagonal: bool) -> tuple[Tensor, ...]:
    """As `flash_backward`."""
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths, dropout = others[:4], others[4:]
    lse = lse.contiguous()[..., None]
    return backward(dO, q, k, v, out, lse, *dropout, None, *lengths, 0.0, diagonal, scale=scale)


KERNELS: dict[str, tuple[Callable, Callable]] = {
    "flash": (flash_forward, flash_backward),
    "cuDNN": (cudnn_forward, cudnn_backward),
}


# ---- The ring around them -----------------------------------------------------------------------------------


def ring_with(kernels: str) -> dict[str, Any]:
    """The solution's functions, with a key of KERNELS behind those that compute."""
    forward, backward = KERNELS[kernels]
    module = load(roots.solutions() / "p25" / "in_torch.py")
    others: dict[tuple[Ranges, Ranges], tuple] = {}

    def block_forward(q, k, v, queries, keys, scale, causal):
        out, lse, others[queries, keys] = forward(q, k, v, scale, causal and queries == keys)
        return out, lse

    def block_backward(dO, q, k, v, lse, out, queries, keys, scale, causal):
        return backward(dO, q, k, v, out, lse, others[queries, keys], scale, causal and queries == keys)

    def contributions(dO, q, k, v, lse, out, mine, theirs, scale, causal):
        """The solution's, in two passes over memory less: at most one pair, and what it is left as it comes."""
        for queries, rows, keys, columns in joined(mine, theirs, causal):
            of_rows = (tensor[:, :, rows] for tensor in (dO, q))
            of_columns = (tensor[:, :, columns] for tensor in (k, v))
            saved = lse[:, :, rows], out[:, :, rows]
            found = block_backward(*of_rows, *of_columns, *saved, queries, keys, scale, causal)
            if mine == theirs:
                return tuple(map(module["wide"], found))  # the first term says what the sum is made in
            places = zip(found, (rows, columns, columns), (q, k, v), strict=True)
            return tuple(spread(part, where, like) for part, where, like in places)
        return tuple(torch.zeros_like(module["wide"](tensor)) for tensor in (q, k, v))

    module.update(
        block_forward=block_forward,
        contributions=contributions,
        merge=merge,
        pairs=joined,
        row_sums=lambda dO, out: out,  # these kernels sum the rows themselves
    )
    return module


def joined(mine: list, theirs: list, causal: bool) -> Iterator[tuple[Ranges, slice, Ranges, slice]]:
    """As the solution's `pairs`, with several ranges in one where the same keys are visible to their queries.

    A zig-zag ring then has one pair a step: its own block, causal within; a block from before it, of which all queries see the
    first half; or one from behind it, of which the second half of the queries sees all. Ranges are of one length.
    """
    if causal and mine == theirs:
        yield tuple(mine), slice(None), tuple(theirs), slice(None)
        return
    seen: dict[Ranges, list[int]] = {}
    for number, queries in enumerate(mine):
        keys = tuple(each for each in theirs if not causal or each[0] < queries[0])
        seen.setdefault(keys, []).append(number)
    length = mine[0][1] - mine[0][0]
    for keys, numbers in seen.items():
        if keys:
            rows = slice(numbers[0] * length, (numbers[-1] + 1) * length)
            yield tuple(mine[i] for i in numbers), rows, keys, slice(0, len(keys) * length)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """As the solution's, in place, of rows that have seen a key each."""
    share = torch.sigmoid(block_lse - lse)[..., None]
    return out.lerp_(block_out.to(out.dtype), share), torch.logaddexp(lse, block_lse)


def spread(part: Tensor, where: slice, like: Tensor) -> Tensor:
    """A tensor of the shape of `like` with a part of it, and 0 elsewhere."""
    if part.shape == like.shape:
        return part
    whole = torch.zeros_like(like)
    whole[:, :, where] = part
    return whole
