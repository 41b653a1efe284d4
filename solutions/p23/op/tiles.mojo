"""Code shared by puzzle 23's kernels, provided: tiles, elements of a matrix, and the flash kernels' operations on tiles.

A block of TILE x TILE threads holds a tile of the scores, one element per thread. `tile_product` computes it,
`masked_score` adds the mask; the threads of a row compute maxima and sums by shuffles, without shared memory.
"""

from std.math import exp
from std.memory import AddressSpace
from std.sys.defines import get_defined_int
from max.gpu import barrier, thread_idx
from max.gpu.primitives import warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import ImmPtr, accum_type

comptime TILE = 16
"""Side of the square tiles of a matrix product: 256 threads per block."""
comptime TILE_LAYOUT = row_major[TILE, TILE + 1]()
"""A tile in shared memory. The column of padding puts the elements of a tile column in different banks."""
comptime MAX_GRID_Z = get_defined_int["MAX_GRID_Y", 65535]()
"""NVIDIA's maximum grid along y and z. Checks define a small one, so that kernels must stride."""
comptime MAX_HEAD = 256
"""Maximum head dimension: a thread keeps one of every 16 elements of a row in registers."""
comptime CHUNKS = MAX_HEAD // TILE
"""Tiles across a row of MAX_HEAD elements."""


@always_inline
def element[
    dtype: DType
](matrix: ImmPtr[dtype], row: Int, column: Int, rows: Int, columns: Int) -> Scalar[dtype]:
    """Return an element of a row-major matrix [rows, columns], or 0 if it is out of bounds."""
    if row >= rows or column >= columns:
        return 0
    return matrix[unsafe_offset=row * columns + column]


@always_inline
def row_max[dtype: DType, //](value: Scalar[dtype]) -> Scalar[dtype]:
    """Return the maximum over the TILE threads that share a row of the tile, in each of them."""
    var largest = value
    comptime for distance in range(4):
        largest = max(largest, warp.shuffle_xor(largest, UInt32(1 << distance)))
    return largest


@always_inline
def row_total[dtype: DType, //](value: Scalar[dtype]) -> Scalar[dtype]:
    """Return the sum over the TILE threads that share a row of the tile, in each of them."""
    var total = value
    comptime for distance in range(4):
        total += warp.shuffle_xor(total, UInt32(1 << distance))
    return total


@always_inline
def tile_product[
    dtype: DType
](
    left: ImmPtr[dtype], right: ImmPtr[dtype], row0: Int, column0: Int, rows: Int, columns: Int, d: Int
) -> Scalar[accum_type[dtype]]:
    """Return one element of left @ right^T: row row0 + thread_idx.y, column column0 + thread_idx.x.

    left is [rows, d], right [columns, d]. Every thread of the block must call it.
    """
    comptime accum = accum_type[dtype]
    var left_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var right_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var total = Scalar[accum](0)
    for d0 in range(0, d, TILE):
        left_tile[y, x] = element(left, row0 + y, d0 + x, rows, d)
        right_tile[y, x] = element(right, column0 + y, d0 + x, columns, d)
        barrier()
        var sum = Scalar[accum](0)
        comptime for i in range(TILE):
            sum += left_tile[y, i].cast[accum]() * right_tile[x, i].cast[accum]()
        total += sum
        barrier()
    return total


@always_inline
def masked_score[
    accum: DType, dtype: DType, //
](score: Scalar[accum], mask: ImmPtr[dtype], s: Int, t: Int, queries: Int, keys: Int) -> Scalar[accum]:
    """Return the score of query s and key t plus the mask, or -inf if they are out of bounds."""
    if s >= queries or t >= keys:
        return Scalar[accum].MIN
    return score + mask[unsafe_offset=s * keys + t].cast[accum]()


@always_inline
def probability[accum: DType, //](score: Scalar[accum], lse: Scalar[accum]) -> Scalar[accum]:
    """Return exp(score - lse), or 0 in a row that sees no key, whose lse is -inf."""
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    return exp(score - (lse if lse > Scalar[accum].MIN or lse != lse else Scalar[accum](0)))
