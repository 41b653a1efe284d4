"""Helpers of puzzle 28's kernels (sums, vectors, tiles in shared memory), and kernels without a blank."""

from std.math import iota
from std.memory import AddressSpace, bitcast
from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.memory import async_copy, external_memory
from max.gpu.primitives import warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import ImmPtr, MutPtr, accum_type

comptime LANES = 32
"""Threads of a warp, which share a row."""
comptime BLOCK_ROWS = 4
"""Rows per block."""
comptime THREADS = BLOCK_ROWS * LANES
comptime PER_THREAD = 32
"""Elements of a row that fit in a thread's registers: a row has at most PER_THREAD * LANES."""
comptime VECTOR_BYTES = 16
"""Bytes of a vector load or store."""
comptime EPS = 1e-5
"""The constant added to the variance."""
comptime SLAB_ROWS = 32
"""Rows per slab, whose dgamma and dbeta one warp sums in the first of two stages."""
comptime TILE = 32
"""Side of a tile in `tiled`: a block has TILE x TILE threads, one per result."""
comptime BLOCK = 64
"""Side of a block's tile of results in `registers` and `copies`."""
comptime THREAD_TILE = 4
"""Side of a thread's tile of these results."""
comptime BLOCK_THREADS = BLOCK // THREAD_TILE
"""Side of a block in threads; also the elements of k per tile in `registers`."""
comptime TILE_DEPTH = 32
"""Elements of k per tile in `copies`."""
comptime TENSOR_DEPTH = 64
"""Elements of k per tile in the steps with tensor cores."""
comptime BUFFERS = 3
"""Tiles of each operand in shared memory in these steps."""
comptime WARPS = 4
"""Warps per block in these steps, 2 x 2; each computes 16 * `row_blocks` x 48 results (`row_blocks` is 4 or 3)."""
comptime BLOCK_COLUMNS = 96
"""Columns per block in these steps: it computes 32 * `row_blocks` x BLOCK_COLUMNS results."""
comptime VECTOR = 8
"""Elements of bfloat16 in 16 bytes."""
comptime BF16 = DType.bfloat16
comptime SharedTile = Pointer[BFloat16, MutAnyOrigin, address_space=AddressSpace.SHARED]
comptime Pair = SIMD[DType.float32, 2]
comptime Sums = SIMD[DType.float32, 4]
"""A thread's part of the 16 x 8 results of an `mma`: two neighbours in each of two rows."""


@always_inline
def shared_sum[dtype: DType](partial: Scalar[dtype]) -> Scalar[dtype]:
    """Sum over the LANES threads of a row, through shared memory. Every thread of the block must call it."""
    var partials = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[THREADS]())
    partials[thread_idx.x] = partial
    barrier()
    var total = Scalar[dtype](0)
    for lane in range(LANES):
        total += partials[thread_idx.x // LANES * LANES + lane]
    barrier()  # before the next call
    return total


@always_inline
def load[
    dtype: DType, //, width: Int
](source: ImmPtr[dtype], offset: Int, remaining: Int, aligned: Bool) -> SIMD[dtype, width]:
    """Load `width` elements at `offset`: in one load if `aligned`, otherwise the `remaining` elements one by one, padded with
    zeros. A thread waits for a load where it first uses the value, including in a `cast`."""
    if aligned:
        return source.unsafe_load[width=width, alignment=VECTOR_BYTES](offset)
    var values = SIMD[dtype, width](0)
    comptime for i in range(width):
        if i < remaining:
            values[i] = source[unsafe_offset=offset + i]
    return values


@always_inline
def store[
    dtype: DType, accum: DType, width: SIMDLength, //
](target: MutPtr[dtype], offset: Int, remaining: Int, aligned: Bool, values: SIMD[accum, width]):
    """Store values in the same way as `load`."""
    if aligned:
        target.unsafe_store[alignment=VECTOR_BYTES](offset, values.cast[dtype]())
        return
    comptime for i in range(Int(width)):
        if i < remaining:
            target[unsafe_offset=offset + i] = values[i].cast[dtype]()


@always_inline
def zero_tail[
    accum: DType, width: SIMDLength, //
](values: SIMD[accum, width], remaining: Int) -> SIMD[accum, width]:
    """Return the values with zeros after the first `remaining` elements."""
    return iota[DType.int32, width]().lt(Int32(remaining)).select(values, SIMD[accum, width](0))


@always_inline
def allocate_tiles[count: Int]() -> SharedTile:
    """Allocate `count` elements of shared memory."""
    return stack_allocation[dtype=BF16, address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES](
        row_major[count]()
    ).ptr.as_unsafe_any_origin()


@always_inline
def dynamic_shared_memory() -> SharedTile:
    """Return the dynamic shared memory of the launch, which may exceed what a kernel can declare."""
    return external_memory[
        BFloat16, address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES
    ]().as_unsafe_any_origin()


@always_inline
def swizzle[columns: Int](row: Int, column: Int) -> Int:
    """Return the offset of an element of a tile. Rows are consecutive; the vectors of a row are permuted, differently in each of
    eight neighbouring rows or pairs, so that the vectors of a row or of a column are in different banks."""
    comptime pairs = UInt32(1 if columns % 64 == 0 else 2)
    var r = UInt32(row)  # 32-bit arithmetic is faster than 64-bit
    var c = UInt32(column)
    return Int(r * UInt32(columns) + (c // VECTOR ^ r // pairs % (8 // pairs)) * VECTOR + c % VECTOR)


@always_inline
def copy_tile[
    rows: Int, columns: Int, threads: Int
](
    tile: SharedTile,
    source: ImmPtr[BF16],
    first_row: Int,
    first_column: Int,
    height: Int,
    width: Int,
    thread: Int,
):
    """Start copying a tile of `source`, [height, width], to shared memory, 16 bytes per thread, with zeros outside the
    matrix; no-op if the tile is outside. If rows are unaligned, copy element by element, synchronously."""
    var in_bounds = first_row < height and first_column < width
    var aligned = width % VECTOR == 0
    if in_bounds and not aligned:
        for i in range(thread, rows * columns, threads):
            var row = first_row + i // columns
            var column = first_column + i % columns
            tile[unsafe_offset=swizzle[columns](i // columns, i % columns)] = source[
                unsafe_offset=row * width + column
            ] if row < height and column < width else BFloat16(0)
    comptime for part in range(0, columns, 64):  # 8 vectors of each row, or the last 4
        comptime vectors = min(columns - part, 64) // VECTOR
        comptime step = threads // vectors  # rows at a time, all with the same permutation
        comptime assert rows % step == 0 and step % 8 == 0
        var row = thread // vectors
        var column = part + thread % vectors * VECTOR
        var remaining_rows = Int32(height - first_row - row) if first_column + column < width else 0
        var begin = source.unsafe_offset((first_row + row) * width + first_column + column)
        var target = tile.unsafe_offset(swizzle[columns](row, column))
        # Each copy has its own condition: a branch around all of them would prevent their overlap with the `mma` that follow.
        comptime for i in range(0, rows, step):
            if in_bounds and aligned:
                async_copy[VECTOR_BYTES, fill=BFloat16(0)](
                    begin.unsafe_offset(i * width).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                    target.unsafe_offset(i * columns),
                    Int32(VECTOR_BYTES) if Int32(i) < remaining_rows else 0,
                )


@always_inline
def store_results[
    row_blocks: Int, aligned_rows: Bool
](output: MutPtr[BF16], totals: Array[Sums, 6 * row_blocks], row: Int, column: Int, height: Int, width: Int):
    """Store a lane's results, the first of which is at `row` and `column`; four neighbours at once if `aligned_rows`. Lanes
    exchange results to form these fours, so that a warp writes whole 32-byte sectors."""
    var odd = thread_idx.x % 2
    var first_column = column + odd * 8 + thread_idx.x % 4 // 2 * 4
    comptime for group in range(6 * row_blocks):  # two rows of two neighbouring blocks of 16 x 8
        comptime block = group // 6 * 6 + group % 3 * 2
        comptime half = group // 3 % 2 * 2
        var pair = bitcast[DType.uint32, 1](totals[block].slice[2, offset=half]().cast[BF16]())
        var neighbour_pair = bitcast[DType.uint32, 1](totals[block + 1].slice[2, offset=half]().cast[BF16]())
        if odd:
            swap(pair, neighbour_pair)
        neighbour_pair = warp.shuffle_xor(neighbour_pair, 1)
        var four = SIMD[DType.uint32, 2](neighbour_pair, pair) if odd else SIMD[DType.uint32, 2](
            pair, neighbour_pair
        )
        var values = bitcast[BF16, 4](four)
        var result_row = row + group // 3 * 8
        var begin = first_column + group % 3 * 16
        comptime if aligned_rows:
            if result_row < height and begin < width:
                output.unsafe_store[alignment=8](result_row * width + begin, values)
        else:
            comptime for i in range(4):
                if result_row < height and begin + i < width:
                    output[unsafe_offset=result_row * width + begin + i] = values[i]


@always_inline
def multiply_tiles[
    accum: DType, //
](mut totals: Array[Scalar[accum], THREAD_TILE * THREAD_TILE], a: SharedTile, b: SharedTile):
    """Add the products of a tile to a thread's results, as in `registers`, VECTOR elements of k at a time."""
    comptime Part = SIMD[accum, VECTOR]
    comptime for k in range(0, TILE_DEPTH, VECTOR):
        var left = Array[Part, THREAD_TILE](fill=0)
        var right = Array[Part, THREAD_TILE](fill=0)
        comptime for i in range(THREAD_TILE):
            var row = a.unsafe_offset(swizzle[TILE_DEPTH](thread_idx.y + i * BLOCK_THREADS, k))
            var column = b.unsafe_offset(swizzle[TILE_DEPTH](thread_idx.x + i * BLOCK_THREADS, k))
            left[i] = row.unsafe_load[width=VECTOR, alignment=VECTOR_BYTES](0).cast[accum]()
            right[i] = column.unsafe_load[width=VECTOR, alignment=VECTOR_BYTES](0).cast[accum]()
        comptime for i in range(THREAD_TILE):
            comptime for j in range(THREAD_TILE):
                comptime for e in range(VECTOR):
                    totals[i * THREAD_TILE + j] += left[i][e] * right[j][e]


def transpose_kernel(transposed: MutPtr[BF16], source: ImmPtr[BF16], rows: Int32, columns: Int32):
    """Write the transpose of `source`, [rows, columns]. A block transposes a TILE x TILE tile."""
    var tile = stack_allocation[dtype=BF16, address_space=AddressSpace.SHARED](row_major[TILE, TILE + 2]())
    var row = block_idx.y * TILE
    var column = block_idx.x * TILE
    for i in range(thread_idx.y, TILE, BLOCK_ROWS):
        if row + i < Int(rows) and column + thread_idx.x < Int(columns):
            tile[i, thread_idx.x] = source[unsafe_offset=(row + i) * Int(columns) + column + thread_idx.x]
    barrier()
    for i in range(thread_idx.y, TILE, BLOCK_ROWS):
        if column + i < Int(columns) and row + thread_idx.x < Int(rows):
            var index = (column + i) * Int(rows) + row + thread_idx.x
            transposed[unsafe_offset=index] = rebind[BFloat16](tile[thread_idx.x, i])


def bias_kernel(output: MutPtr[BF16], linear_bias: ImmPtr[BF16], count: Int32, width: Int32):
    """Add the bias to every row."""
    if global_idx.x < Int(count):
        var sum = output[unsafe_offset=global_idx.x].cast[DType.float32]()
        sum += linear_bias[unsafe_offset=global_idx.x % Int(width)].cast[DType.float32]()
        output[unsafe_offset=global_idx.x] = sum.cast[BF16]()


def clear_kernel[dtype: DType](sums: MutPtr[dtype], count: Int32):
    """Zero the sums of `dgamma_kernel`."""
    if global_idx.x < Int(count):
        sums[unsafe_offset=global_idx.x] = 0


def column_sums_kernel[
    dtype: DType, source_dtype: DType
](
    first: MutPtr[dtype],
    second: MutPtr[dtype],
    matrix: ImmPtr[source_dtype],
    rows: Int32,
    columns: Int32,
    half: Int32,
):
    """Sum the columns of a matrix in a fixed order, so that every run gives the same bits. Write the sums of the first `half`
    columns to `first`, others to `second`. A block owns TILE columns; thread y adds rows y, y + TILE ..."""
    comptime accum = accum_type[source_dtype]
    var partials = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[TILE, TILE]())
    var c = block_idx.x * TILE + thread_idx.x
    var partial = Scalar[accum](0)
    if c < Int(columns):
        for row in range(thread_idx.y, Int(rows), TILE):
            partial += matrix[unsafe_offset=row * Int(columns) + c].cast[accum]()
    partials[thread_idx.y, thread_idx.x] = partial
    barrier()
    if thread_idx.y == 0 and c < Int(columns):
        var total = Scalar[accum](0)
        for y in range(TILE):
            total += partials[y, thread_idx.x]
        var target = first if c < Int(half) else second.unsafe_offset(-Int(half))
        target[unsafe_offset=c] = total.cast[dtype]()
