"""What follows from the shapes and the dtype of a call of LayerNorm + Linear, worked out once: who multiplies, and in what memory."""

import functools
import math
from dataclasses import dataclass

import torch

from harness.nn.arguments import wide
from harness.nn.extension_kernels import contiguous_strides
from harness.nn.products import ALL_OWN, Choice, choose, padded, same

LINE = 128
"""Bytes: rows that the module copies begin at multiples of so many (`pitch_of` in `solutions/shared/tensor_maps.mojo`)."""
PAIR_ELEMENTS = 8
"""Of which the rows of a matrix that is split into a pair must be a multiple."""
LARGEST = 2**31 - 1
AUTO, LEAST = "auto", "least"
MEMORY = (AUTO, LEAST)
"""What both passes are made for: time, and the least memory only where there is no room otherwise; or the least memory."""


@dataclass(frozen=True)
class Plan:
    """What follows from the shapes and the dtype of a call."""

    rows: int
    H: int
    O: int
    dtype: torch.dtype
    wide: torch.dtype
    """Of the statistics."""
    choice: Choice
    """What multiplies."""
    pairs: bool
    """Whether this project's products of float32 are made of pairs of float16 matrices."""
    transposed: bool
    """Whether linear_weight lies in memory as [H, O], as in GPT-2; then so does its gradient."""
    weight_room: int
    """Elements that the memory of dW must have for the module, which first puts a copy of linear_weight there; 0: no more
    than dW itself."""
    input_size: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_size: tuple[int, ...]
    output_strides: tuple[int, ...]
    statistics_size: tuple[int, ...]
    statistics_strides: tuple[int, ...]
    lean: bool = False
    """Whether memory counts more than time: the backward pass makes dW first and gives its ln_out back before it makes dln, sums over
    rows have few shares, and no factor of 16 bits is copied."""


@functools.lru_cache(maxsize=4096)
def plan(
    shape: torch.Size,
    output_dim: int,
    dtype: torch.dtype,
    transposed: bool = False,
    hopper: bool = False,
    algorithm: str = "fast",
    memory: str = AUTO,
) -> Plan:
    """The plan for x of a shape [..., H] and linear_weight [O, H], which may lie transposed, on a GPU that may be a Hopper;
    by pairs of float16, or with the least memory, where that is asked for and suits.

    Raises ValueError where a size is beyond the 32-bit integers that the kernels take.
    """
    rows, H = math.prod(shape[:-1]), shape[-1]
    for name, size in (("rows", rows), ("H", H), ("O", output_dim)):
        if size > LARGEST:
            raise ValueError(f"{name}: the kernels take at most {LARGEST:,}, got {size:,}")
    whole = H % PAIR_ELEMENTS == 0 == output_dim % PAIR_ELEMENTS
    pairs = algorithm == "pairs" and hopper and whole and not transposed and dtype == torch.float32
    lean = memory == LEAST
    if pairs:
        choice = same(ALL_OWN)
    else:
        choice = choose(rows, H, output_dim, dtype, transposed=transposed, hopper=hopper, lean=lean)
    output_size = (*shape[:-1], output_dim)
    statistics_size = (2, *shape[:-1])
    return Plan(
        rows,
        H,
        output_dim,
        dtype,
        wide(dtype),
        choice,
        pairs,
        transposed,
        weight_room(H, output_dim, dtype) if hopper and not lean else 0,
        tuple(shape),
        contiguous_strides(shape),
        output_size,
        contiguous_strides(output_size),
        statistics_size,
        contiguous_strides(statistics_size),
        lean,
    )


def weight_room(H: int, output_dim: int, dtype: torch.dtype) -> int:
    """The elements of linear_weight on Hopper where its rows must be copied to begin at multiples of LINE bytes; else 0."""
    copied = dtype.itemsize == 2 and padded(H, dtype) != H
    step = LINE // dtype.itemsize
    return output_dim * -(-H // step) * step if copied else 0
