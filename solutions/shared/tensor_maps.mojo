"""Tensor maps, by which the tensor memory accelerator (TMA) of a Hopper finds boxes in a matrix; they are kept."""

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

from .common import ImmPtr
from .gemm_hopper_pipeline import BOX

comptime ROW_BYTES = 16
"""The TMA reaches rows that begin at multiples of so many bytes."""
comptime LINE_BYTES = 128
"""What the TMA fetches at a time: rows that begin elsewhere cost it nearly twice as much."""


def lies_in_rows[dtype: DType](width: Int) -> Bool:
    """Whether the TMA reaches rows of `width` elements that lie one behind the other."""
    return width * size_of[Scalar[dtype]]() % ROW_BYTES == 0


def pitch_of[dtype: DType](width: Int) -> Int:
    """The elements from one row to the next where rows of `width` elements are laid out for the TMA, if need be anew.
    """
    comptime line = LINE_BYTES // size_of[Scalar[dtype]]()
    return width if lies_in_rows[dtype](width) else ceildiv(width, line) * line


comptime MapKey = SIMD[DType.int64, 8]
"""All that a tensor map follows from: address, height, width, row, rows of the box and whether it is bfloat16."""
comptime KEPT_MAPS = 1024
"""Places for maps, 192 bytes each."""


@fieldwise_init
struct KeptMap(ImplicitlyCopyable, Movable):
    """A tensor map, and what it was made of."""

    var key: MapKey
    var map: TMADescriptor


def no_maps() -> List[KeptMap]:
    """Places without a map."""
    return List[KeptMap](length=KEPT_MAPS, fill=KeptMap(MapKey(-1), TMADescriptor()))


comptime MAPS = _Global["workbook_tensor_maps", no_maps]
"""The last maps, each in the one place that its key has. A loop gets the same memory from call to call, and the driver takes as long
to encode a map as a third of a launch. Extension modules are called with Python's lock held, and nothing else makes maps."""


def tensor_map[
    dtype: DType, box_rows: Int
](ctx: DeviceContext, matrix: ImmPtr[dtype], height: Int, width: Int, pitch: Int = 0) raises -> TMADescriptor:
    """How the TMA finds boxes in a row-major matrix [height, width], whose rows are `pitch` elements apart, `width` where
    that is 0. Raises where it cannot.

    Outside the matrix, and between its rows, it reads zeros and writes nothing. The matrix must start at a multiple of 16
    bytes, and so must each of its rows. Every box is 128 bytes wide.
    """
    comptime assert dtype.is_half_float(), "a key tells two dtypes apart"
    var row = pitch if pitch > 0 else width
    comptime kind = Int64(1 if dtype == DType.bfloat16 else 0)
    var key = MapKey(Int64(Int(matrix)), Int64(height), Int64(width), Int64(row), Int64(box_rows), kind, 0, 0)
    # Odd factors, so that no part of the key is lost; the upper bits are the mixed ones.
    var mixed = (
        key * MapKey(0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0x7FEB352D, 1, 1)
    ).reduce_add()
    ref kept = MAPS.get_or_create_ptr()[][Int((mixed >> 20) & (KEPT_MAPS - 1))]
    if kept.key != key:
        kept.map = create_tma_descriptor[
            dtype, 2, TensorMapSwizzle.SWIZZLE_128B, TensorMapL2Promotion.L2_256B
        ](
            DeviceBuffer[dtype](
                ctx, matrix.unsafe_mut_cast[True]().as_unsafe_any_origin(), height * row, owning=False
            ),
            IndexList[2](height, width),
            IndexList[2](row, 1),
            IndexList[2](box_rows, BOX),
        )
        kept.key = key
    return kept.map
