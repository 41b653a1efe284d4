"""The kernels that a ring's blocks may be computed by: puzzle 23's in Mojo, PyTorch's flash attention, or cuDNN's.

`ring_with` returns the functions of `ring_steps` with other kernels in the place of those that compute. Who holds
what, who sends what to whom and when, and how parts are merged stays as it is there. PyTorch's kernels take one pair of
ranges at each step, of one length, and hand out the log-sum-exp; on a CPU flash attention is PyTorch's for CPUs.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

Ranges = tuple[tuple[int, int], ...]
Tensor = torch.Tensor


def ring_with(kernels: str) -> dict[str, Any]:
    """The ring's functions, made anew, with some of BLOCKS behind those that compute."""
    spec = importlib.util.find_spec("harness.nn.ring_steps")
    assert spec is not None and spec.loader is not None  # it is a file beside this one
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = vars(module)
    BLOCKS[kernels](functions)
    return functions


# ---- Mojo kernels -------------------------------------------------------------------------------------------


def use_mojo(module: dict[str, Any]) -> None:
    """Puzzle 23's kernels, through MAX: they take positions, so that every pair of ranges fits."""
    from harness.nn.attention_autograd import Part, attention_block, attention_block_backward

    def part(queries, keys, scale: float, causal: bool) -> Part:
        return Part(queries[0], keys[0], causal, scale)

    @torch.no_grad()
    def block_forward(q, k, v, queries, keys, scale, causal):
        return attention_block(q, k, v, part(queries, keys, scale, causal))

    def block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal):
        rows = (lse.contiguous(), delta.contiguous())
        return attention_block_backward(dO, q, k, v, *rows, part(queries, keys, scale, causal))

    module.update(block_forward=block_forward, block_backward=block_backward)


# ---- PyTorch's kernels --------------------------------------------------------------------------------------


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
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *others = forward(q, k, v, None, True, 0.0, diagonal, scale=scale)
    return out, lse.reshape(lse.shape[:3]), tuple(others[:6])


def cudnn_backward(dO, q, k, v, out, lse, others: tuple, scale: float, diagonal: bool) -> tuple[Tensor, ...]:
    """As `flash_backward`."""
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths, dropout = others[:4], others[4:]
    lse = lse.contiguous()[..., None]
    return backward(dO, q, k, v, out, lse, *dropout, None, *lengths, 0.0, diagonal, scale=scale)


def use_torch(forward: Callable, backward: Callable, module: dict[str, Any]) -> None:
    """Kernels that sum the rows of dO * out themselves, and know no positions."""
    # What a backward pass takes beside tensors is the same in every layer: lengths, and the state of a dropout of 0.
    others: dict[tuple[Ranges, Ranges], tuple] = {}
    wide, send = module["wide"], module["exchange"]

    def exchange(tensors, shapes, group):
        """The solution's, of tensors as these kernels leave them and models have them: [B, s, N, d] in memory."""
        turned = [(B, s, N, d) for B, N, s, d in shapes]
        received, works = send([tensor.transpose(1, 2) for tensor in tensors], turned, group)
        return [tensor.transpose(1, 2) for tensor in received], works

    def block_forward(q, k, v, queries, keys, scale, causal):
        out, lse, others[queries, keys] = forward(q, k, v, scale, causal and queries == keys)
        return out, lse

    def block_backward(dO, q, k, v, lse, out, queries, keys, scale, causal):
        return backward(dO, q, k, v, out, lse, others[queries, keys], scale, causal and queries == keys)

    def contributions(dO, q, k, v, lse, out, mine, theirs, scale, causal):
        """The solution's, in fewer passes over memory: the one pair of a step is left as it comes."""
        for queries, rows, keys, columns in joined(mine, theirs, causal):
            of_rows = (tensor[:, :, rows] for tensor in (dO, q))
            of_columns = (tensor[:, :, columns] for tensor in (k, v))
            saved = lse[:, :, rows], out[:, :, rows]
            found = module["block_backward"](*of_rows, *of_columns, *saved, queries, keys, scale, causal)
            if mine == theirs:
                return tuple(map(wide, found))  # the first term says what the sum is made in
            places = zip(found, (rows, columns, columns), (q, k, v), strict=True)
            return tuple(spread(part, where, like) for part, where, like in places)
        return tuple(map(module["zeros"], (q, k, v)))

    module.update(
        block_forward=block_forward,
        block_backward=block_backward,
        contributions=contributions,
        exchange=exchange,
        merge=merge,
        pairs=joined,
        row_sums=lambda dO, out: out,  # goes where the sums would: the kernels take the output itself
    )


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


BLOCKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "solution": lambda module: None,
    "mojo": use_mojo,
    "flash": functools.partial(use_torch, flash_forward, flash_backward),
    "cuDNN": functools.partial(use_torch, cudnn_forward, cudnn_backward),
}
ONE_LENGTH = ("flash", "cuDNN")
"""Those that need ranges of one length, and a head of key and value for each of the query."""
