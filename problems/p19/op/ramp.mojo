"""Puzzle 19, the ramp: eight small kernels, each with one idea that the later puzzles need.

    map       a thread for each element, and a guard for the spare threads
    index     a thread for each element of a matrix
    cast      bfloat16 in, sums in float32
    reduce    the threads of a block sum a row together
    tile      the threads of a block exchange values through shared memory
    atomic    many blocks add to the same sums
    stages    the same sums without atomics, in two launches and a fixed order
    rmsnorm   all of these: y = x * rstd * gamma

A `vector` has n elements, a `matrix` is [rows, columns]. `launches.mojo` launches the kernels, with their
grids and blocks; `ops.mojo` has the ops.
"""

from std.math import sqrt
from std.memory import AddressSpace
from max.gpu import barrier, block_dim, block_idx, global_idx, thread_idx
from max.gpu.primitives import block, warp
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import ImmPtr, MutPtr, accum_type, atomic_add

comptime THREADS = 32
"""Threads per block along a vector, and elements per tile."""
comptime BLOCK_SIDE = 8
"""Side of a block of `index`, which has BLOCK_SIDE x BLOCK_SIDE threads."""
comptime ROW_THREADS = 64
"""Threads that share one row."""
comptime EPS = 1e-5
"""The eps of RMSNorm."""


def map_kernel[dtype: DType](mapped: MutPtr[dtype], vector: ImmPtr[dtype], n: Int32):  # both tensors [n]
    """Compute `mapped = 2 * vector + 1`. Blocks have THREADS threads, one for each element; the last block has spare threads.
    """
    # BLANK-START map: this thread's element of `mapped`, if it has one
    # FILL IN (about 3 lines)
    # BLANK-END map


def index_kernel[
    dtype: DType
](
    shifted: MutPtr[dtype],  # [rows, columns]
    matrix: ImmPtr[dtype],  # [rows, columns]
    offset: ImmPtr[dtype],  # [columns]
    rows: Int32,
    columns: Int32,
):
    """Compute `shifted = matrix + offset`, with the same offset for every row. Blocks have BLOCK_SIDE x BLOCK_SIDE
    threads: x is along the columns, y along the rows.
    """
    var R = Int(rows)
    var C = Int(columns)
    var x = TileTensor(matrix, row_major(R, C))
    var y = TileTensor(shifted, row_major(R, C))
    var b = TileTensor(offset, row_major(C))
    # BLANK-START index: this thread's element of y, if it has one: which row, which column?
    # FILL IN (about 4 lines)
    # BLANK-END index


def cast_kernel(
    products: MutPtr[DType.float32],  # [rows]
    half_matrix: ImmPtr[DType.bfloat16],  # [rows, columns]
    half_vector: ImmPtr[DType.bfloat16],  # [columns]
    rows: Int32,
    columns: Int32,
):
    """Compute `products = half_matrix @ half_vector`, with float32 sums. One thread owns one row."""
    comptime accum = DType.float32
    var C = Int(columns)
    var x = TileTensor(half_matrix, row_major(Int(rows), C))
    var w = TileTensor(half_vector, row_major(C))
    var row = global_idx.x
    if row >= Int(rows):
        return
    # BLANK-START cast: this row's number of `products`: where does the rounding happen, and where must it not?
    # FILL IN (about 4 lines)
    # BLANK-END cast


def reduce_kernel[
    dtype: DType
](
    row_sums: MutPtr[accum_type[dtype]],  # [rows]
    matrix: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
):
    """Compute the sum of every row. One block of ROW_THREADS threads owns one row."""
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var x = TileTensor(matrix, row_major(Int(rows), C))
    var row = block_idx.x
    # BLANK-START reduce: the sum of the row, by the whole block; one thread writes it
    # FILL IN (about 6 lines)
    # BLANK-END reduce


def tile_kernel[dtype: DType](mirrored: MutPtr[dtype], vector: ImmPtr[dtype], n: Int32):  # both tensors [n]
    """Reverse every tile of THREADS elements of the vector; the last tile may be shorter. One block owns one tile.
    """
    var tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[THREADS]())
    var t = thread_idx.x
    var start = block_idx.x * THREADS
    var count = min(THREADS, Int(n) - start)
    # BLANK-START tile: the vector's elements into `tile`, and out of it in reverse: what has to be between?
    # FILL IN (about 5 lines)
    # BLANK-END tile


def clear_kernel[dtype: DType](sums: MutPtr[dtype], n: Int32):
    """Zero the n sums that `atomic_kernel` adds to. This is a separate launch, because within a launch no block waits for another.
    """
    var i = global_idx.x
    if i < Int(n):
        sums[unsafe_offset=i] = 0


def atomic_kernel[
    dtype: DType
](
    column_sums: MutPtr[accum_type[dtype]],  # [columns], zero before the launch
    matrix: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
):
    """Compute the sum of every column. One block of ROW_THREADS threads owns one row, and all blocks add to the same sums.
    """
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var x = TileTensor(matrix, row_major(Int(rows), C))
    var row = block_idx.x
    # BLANK-START atomic: what this row adds to every column's sum; see atomic_add
    # FILL IN (about 2 lines)
    # BLANK-END atomic


def stages_kernel[
    dtype: DType
](
    sums: MutPtr[accum_type[dtype]],  # [slabs, columns]
    matrix: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
    slab_rows: Int32,
):
    """Compute the sum of every column within slabs of `slab_rows` rows; the last slab may be shorter.

    It is launched twice: over the matrix, with many slabs, then over the resulting sums as one slab. One
    thread owns one column of slab block_idx.y.
    """
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var x = TileTensor(matrix, row_major(Int(rows), C))
    var slab = block_idx.y
    var first = slab * Int(slab_rows)
    var end = min(first + Int(slab_rows), Int(rows))
    var c = global_idx.x
    # BLANK-START stages: the sum of this thread's column over the slab's rows, if it has a column; where in `sums` is it?
    # FILL IN (about 5 lines)
    # BLANK-END stages


def rmsnorm_kernel[
    dtype: DType
](
    normalised: MutPtr[dtype],  # [rows, columns]
    matrix: ImmPtr[dtype],  # [rows, columns]
    weight: ImmPtr[dtype],  # [columns], gamma
    rows: Int32,
    columns: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute RMSNorm, `y = x * rstd * gamma`, rstd = 1 / sqrt(mean of x^2 over the row + eps). One block of
    ROW_THREADS threads owns one row.
    """
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var x = TileTensor(matrix, row_major(Int(rows), C))
    var y = TileTensor(normalised, row_major(Int(rows), C))
    var gamma = TileTensor(weight, row_major(C))
    var row = block_idx.x
    # BLANK-START rmsnorm: the sum of the row's squares with the whole block, rstd from it, then y for this thread's columns
    # FILL IN (about 6 lines)
    # BLANK-END rmsnorm
