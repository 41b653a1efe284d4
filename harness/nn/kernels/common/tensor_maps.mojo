"""Tensor maps for Hopper's tensor memory accelerator (TMA), cached across calls."""

from std.ffi import _Global
from std.math import ceildiv
from std.sys import size_of
from std.sys.defines import get_defined_string
from std.utils.index import IndexList
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    TMADescriptor,
    create_tma_descriptor,
)

from shared.common import ImmPtr
from .gemm_hopper_pipeline import BOX_COLUMNS

comptime ROW_ALIGNMENT = 16
"""Alignment in bytes that the TMA requires of rows."""
comptime LINE_BYTES = 128
"""Bytes per TMA fetch: rows that are not aligned to it take nearly twice as long."""


def has_aligned_width[dtype: DType](width: Int) -> Bool:
    """Return whether the TMA can load contiguous rows of `width` elements."""
    return width * size_of[Scalar[dtype]]() % ROW_ALIGNMENT == 0


def aligned_pitch[dtype: DType](width: Int) -> Int:
    """Return the row pitch, in elements, with which the TMA can load rows of `width` elements, copied if
    necessary.
    """
    comptime line = LINE_BYTES // size_of[Scalar[dtype]]()
    return width if has_aligned_width[dtype](width) else ceildiv(width, line) * line


comptime MAX_AXES = 4
"""Maximum axes of a tensor map."""
comptime MapKey = SIMD[DType.int64, 16]
"""Everything that a tensor map depends on: address, dtype, number of axes, sizes, strides and box sizes."""
comptime HASH_FACTORS = MapKey(
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
"""The hash's factors; odd, so that multiplication loses no bits of a key."""
comptime MAP_SLOTS = 1024
"""Slots of the cache, 256 bytes each."""


@fieldwise_init
struct CachedMap(ImplicitlyCopyable, Movable):
    """A tensor map and its key."""

    var key: MapKey
    var map: TMADescriptor


def create_empty_slots() -> List[CachedMap]:
    """Return the initial cache: MAP_SLOTS entries with an invalid key."""
    return List[CachedMap](length=MAP_SLOTS, fill=CachedMap(MapKey(-1), TMADescriptor()))


comptime MAPS = _Global[get_defined_string["LIBRARY", "mojo_workbook"](), create_empty_slots]
"""The most recent maps, each in the slot of its key's hash. Each library has its own cache, since the caller
serializes launches only within a library. The cache pays off because a loop gets the same addresses in every
iteration, and the driver takes a third of a launch's time to encode a map.
"""


def get_tensor_map[
    dtype: DType, axes: Int
](
    ctx: DeviceContext,
    tensor: ImmPtr[dtype],
    sizes: IndexList[axes],
    strides: IndexList[axes],
    box: IndexList[axes],
) raises -> TMADescriptor:
    """Return the tensor map for these sizes and strides, the last of which is 1. Raise if the driver cannot
    encode it.

    Outside the tensor, and between its rows, the TMA reads zeros and writes nothing. The tensor and each of
    its rows must start at a multiple of 16 bytes. The rows of a box are 128 bytes wide.
    """
    comptime assert (
        dtype.is_half_float() and axes <= MAX_AXES
    ), "a key has one bit for the dtype and room for MAX_AXES axes"
    var key = MapKey(0)
    key[0] = Int64(Int(tensor))
    key[1] = Int64(2 * axes + (1 if dtype == DType.bfloat16 else 0))
    comptime for axis in range(axes):
        key[2 + axis] = Int64(sizes[axis])
        key[2 + axes + axis] = Int64(strides[axis])
        key[2 + 2 * axes + axis] = Int64(box[axis])
    # The upper bits of the sum depend on all bits of the key.
    var slot = Int(((key * HASH_FACTORS).reduce_add() >> 20) & (MAP_SLOTS - 1))
    ref entry = MAPS.get_or_create_ptr()[][slot]
    if entry.key != key:
        entry.map = create_tma_descriptor[
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
        entry.key = key
    return entry.map


def tensor_map[
    dtype: DType, box_rows: Int
](ctx: DeviceContext, matrix: ImmPtr[dtype], height: Int, width: Int, pitch: Int = 0) raises -> TMADescriptor:
    """Return the tensor map of a row-major matrix [height, width] with a row pitch of `pitch` elements,
    `width` if 0.
    """
    return get_tensor_map(
        ctx,
        matrix,
        IndexList[2](height, width),
        IndexList[2](pitch if pitch > 0 else width, 1),
        IndexList[2](box_rows, BOX_COLUMNS),
    )
