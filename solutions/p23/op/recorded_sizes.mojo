"""The sizes of a recorded case. After B, N, S, T, d there may stand the heads of key and value, the diagonal, the size of the
mask's blocks (0 where there is no mask), and for each axis of the mask whether it has the size 1.
"""

from std.math import ceildiv

from .flash_tensors import FlashSizes


def size_or(dims: List[Int], place: Int, default: Int) -> Int:
    """The size at a place, a default where the case has no such size."""
    return dims[place] if place < len(dims) else default


def mask_has_one(dims: List[Int], axis: Int) -> Bool:
    """Whether an axis of the mask has the size 1; those of batch and heads have it by default."""
    return size_or(dims, 8 + axis, 1 if axis < 2 else 0) == 1


def mask_axis(dims: List[Int], axis: Int) -> Int:
    """The size of one axis of the mask, [B, N, S, T], the last two in blocks."""
    var block = max(1, size_or(dims, 7, 1)) if axis > 1 else 1
    return 1 if mask_has_one(dims, axis) else ceildiv(dims[axis], block)


def recorded_sizes(dims: List[Int]) -> FlashSizes:
    """The sizes as kernels take them; the mask has no gaps, and stride 0 where its size is 1."""
    var strides: List[Int32] = [0, 0, 0, 0]
    var elements = 1
    for axis in [3, 2, 1, 0]:
        if not mask_has_one(dims, axis):
            strides[axis] = Int32(elements)
            elements *= mask_axis(dims, axis)
    return FlashSizes(
        batch=Int32(dims[0]),
        query_heads=Int32(dims[1]),
        key_heads=Int32(size_or(dims, 5, dims[1])),
        query_len=Int32(dims[2]),
        key_len=Int32(dims[3]),
        head_dim=Int32(dims[4]),
        diagonal=Int32(size_or(dims, 6, dims[3])),
        mask_b=strides[0],
        mask_n=strides[1],
        mask_s=strides[2],
        mask_t=strides[3],
        mask_block=Int32(size_or(dims, 7, 1)),
    )
