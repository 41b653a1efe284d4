"""Tensor maps, by which the tensor memory accelerator (TMA) of a Hopper finds boxes in a tensor; kept from call to call."""

from std.ffi import _Global
from std.math import ceildiv
from std.sys import size_of
from std.utils.index import IndexList
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    TMADescriptor,
    create_tma_descriptor,
)

from shared.common import ImmPtr
from .gemm_hopper_pipeline import BOX

comptime ROW_BYTES = 16
"""The TMA reaches rows that begin at multiples of so many bytes."""
comptime LINE_BYTES = 128
"""What the TMA fetches at a time: rows that begin elsewhere cost it nearly twice as much."""


def lies_in_rows[dtype: DType](width: Int) -> Bool:
    """Whether the TMA reaches rows of `width` elements that lie one after the other."""
    return width * size_of[Scalar[dtype]]() % ROW_BYTES == 0


def pitch_of[dtype: DType](width: Int) -> Int:
    """The elements from one row to the next where rows of `width` elements are laid out for the TMA, if need be anew.
    """
    comptime line = LINE_BYTES // size_of[Scalar[dtype]]()
    return width if lies_in_rows[dtype](width) else ceildiv(width, line) * line


comptime MOST_AXES = 4
"""Of a tensor that is found by a map."""
comptime MapKey = SIMD[DType.int64, 16]
"""All that a tensor map follows from: address, dtype and axes, then sizes, strides and the sizes of a box."""
comptime FACTORS = MapKey(
    0x9E3779B1,
    0x85EBCA6B,
    0xC2B2AE35,
    0x27D4EB2F,
    0x165667B1,
    0x7FEB352D,
    0x2C1B3C6D,
    0x297A2D39,
    0x68E31DA5,
    0x4CF5AD43,
    0x1B873593,
    0x5BD1E995,
    0x38495AB5,
    0x61C88647,
    0x3C6EF373,
    0x517CC1B7,
)
"""Odd ones, so that no part of a key is lost in the sum by which its place is found."""
comptime KEPT_MAPS = 1024
"""Places for maps, 256 bytes each."""


@fieldwise_init
struct KeptMap(ImplicitlyCopyable, Movable):
    """A tensor map, and what it was made of."""

    var key: MapKey
    var map: TMADescriptor


def no_maps() -> List[KeptMap]:
    """Places without a map."""
    return List[KeptMap](length=KEPT_MAPS, fill=KeptMap(MapKey(-1), TMADescriptor()))


comptime MAPS = _Global["workbook_tensor_maps_of_axes", no_maps]
"""The last maps, each in the one place that its key has; all modules of a process share them. A loop gets the same memory from call to
call, and the driver takes as long to encode a map as a third of a launch. Extension modules are called with Python's lock held, and
nothing else makes maps."""


def kept_map[
    dtype: DType, axes: Int
](
    ctx: DeviceContext,
    tensor: ImmPtr[dtype],
    sizes: IndexList[axes],
    strides: IndexList[axes],
    box: IndexList[axes],
) raises -> TMADescriptor:
    """How the TMA finds boxes in a tensor of these sizes and strides, the last of which is 1. Raises where it cannot.

    Outside the tensor, and between its rows, it reads zeros and writes nothing. The tensor must start at a multiple of 16
    bytes, and so must each of its rows. The rows of a box are 128 bytes wide.
    """
    comptime assert (
        dtype.is_half_float() and axes <= MOST_AXES
    ), "a key tells two dtypes apart, and has so much room"
    var key = MapKey(0)
    key[0] = Int64(Int(tensor))
    key[1] = Int64(2 * axes + (1 if dtype == DType.bfloat16 else 0))
    comptime for axis in range(axes):
        key[2 + axis] = Int64(sizes[axis])
        key[2 + axes + axis] = Int64(strides[axis])
        key[2 + 2 * axes + axis] = Int64(box[axis])
    # The upper bits of the sum are the mixed ones.
    var place = Int(((key * FACTORS).reduce_add() >> 20) & (KEPT_MAPS - 1))
    ref kept = MAPS.get_or_create_ptr()[][place]
    if kept.key != key:
        kept.map = create_tma_descriptor[
            dtype, axes, TensorMapSwizzle.SWIZZLE_128B, TensorMapL2Promotion.L2_256B
        ](
            DeviceBuffer[dtype](
                ctx,
                tensor.unsafe_mut_cast[True]().as_unsafe_any_origin(),
                sizes[0] * strides[0],
                owning=False,
            ),
            sizes,
            strides,
            box,
        )
        kept.key = key
    return kept.map


def tensor_map[
    dtype: DType, box_rows: Int
](ctx: DeviceContext, matrix: ImmPtr[dtype], height: Int, width: Int, pitch: Int = 0) raises -> TMADescriptor:
    """How the TMA finds boxes in a row-major matrix [height, width], whose rows are `pitch` elements apart, `width` where
    that is 0."""
    return kept_map(
        ctx,
        matrix,
        IndexList[2](height, width),
        IndexList[2](pitch if pitch > 0 else width, 1),
        IndexList[2](box_rows, BOX),
    )
