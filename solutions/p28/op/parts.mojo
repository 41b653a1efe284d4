"""Building blocks of puzzle 28's kernels, and kernels without a blank: sums, vectors, tiles in shared memory."""

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
"""Rows of a block."""
comptime THREADS = BLOCK_ROWS * LANES
comptime KEPT = 32
"""Elements of a row that fit in a thread's registers: a row has at most KEPT * LANES."""
comptime VECTOR_BYTES = 16
"""The widest load of a thread."""
comptime EPS = 1e-5
"""The constant added to the variance."""
comptime SLAB = 32
"""Rows whose dgamma and dbeta one warp adds up in the first of the two stages."""
comptime TILE = 32
"""A block of `tiled` has TILE x TILE threads, one for each result of its tile."""
comptime BLOCK = 64
"""A block of `registers` and of `copies` makes BLOCK x BLOCK results."""
comptime EACH = 4
"""A thread of it makes EACH x EACH of them."""
comptime DEPTH = BLOCK // EACH
"""So it has DEPTH x DEPTH threads; of a row of a or b, `registers` takes DEPTH elements at a time."""
comptime DEEP = 32
"""And the steps after it DEEP elements."""
comptime LONG = 64
"""And the steps with tensor cores LONG elements, of which BUFFERS tiles of each factor have room."""
comptime BUFFERS = 3
comptime WARPS = 4
"""A block of these steps has so many warps, 2 x 2, each with 16 * `high` x 48 results: `high` is 4 or 3."""
comptime WIDE = 96
"""So a block makes 32 * `high` x WIDE results."""
comptime VECTOR = 8
"""Elements of bfloat16 in 16 bytes."""
comptime BF16 = DType.bfloat16
comptime SharedTile = Pointer[BFloat16, MutAnyOrigin, address_space=AddressSpace.SHARED]
comptime Pair = SIMD[DType.float32, 2]
comptime Sums = SIMD[DType.float32, 4]
"""A thread's part of the 16 x 8 results of an `mma`: two neighbours in each of two rows."""


@always_inline
def shared_sum[dtype: DType](mine: Scalar[dtype]) -> Scalar[dtype]:
    """Sum over the LANES threads of a row, through shared memory. Every thread of the block must call it."""
    var parts = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[THREADS]())
    parts[thread_idx.x] = mine
    barrier()
    var total = Scalar[dtype](0)
    for lane in range(LANES):
        total += parts[thread_idx.x // LANES * LANES + lane]
    barrier()  # before the next call
    return total


@always_inline
def load[
    dtype: DType, //, width: Int
](source: ImmPtr[dtype], place: Int, left: Int, aligned: Bool) -> SIMD[dtype, width]:
    """`width` elements from `place` on: in one load if that is `aligned`. Else only the `left` ones that there are, one by one,
    and zeros. A thread waits for a load where it uses what comes, a `cast` too."""
    if aligned:
        return source.unsafe_load[width=width, alignment=VECTOR_BYTES](place)
    var values = SIMD[dtype, width](0)
    comptime for i in range(width):
        if i < left:
            values[i] = source[unsafe_offset=place + i]
    return values


@always_inline
def store[
    dtype: DType, accum: DType, width: SIMDLength, //
](target: MutPtr[dtype], place: Int, left: Int, aligned: Bool, values: SIMD[accum, width]):
    """The opposite of `load`."""
    if aligned:
        target.unsafe_store[alignment=VECTOR_BYTES](place, values.cast[dtype]())
        return
    comptime for i in range(Int(width)):
        if i < left:
            target[unsafe_offset=place + i] = values[i].cast[dtype]()


@always_inline
def only[accum: DType, width: SIMDLength, //](values: SIMD[accum, width], left: Int) -> SIMD[accum, width]:
    """Return the first `left` of some values, and zeros after them."""
    return iota[DType.int32, width]().lt(Int32(left)).select(values, SIMD[accum, width](0))


@always_inline
def tiles_in_shared_memory[count: Int]() -> SharedTile:
    """Room for `count` elements."""
    return stack_allocation[dtype=BF16, address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES](
        row_major[count]()
    ).ptr.as_unsafe_any_origin()


@always_inline
def launched_shared_memory() -> SharedTile:
    """Return the shared memory that the launch asks for, which may be more than a kernel can declare."""
    return external_memory[
        BFloat16, address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES
    ]().as_unsafe_any_origin()


@always_inline
def at[columns: Int](row: Int, column: Int) -> Int:
    """Return the place of an element of a tile. Rows are consecutive; the vectors of a row are permuted, differently in each of
    eight neighbouring rows or pairs, so that both a row's vectors and a column's lie in different banks."""
    comptime pairs = UInt32(1 if columns % 64 == 0 else 2)
    var r = UInt32(row)  # 32 bits, which the hardware computes faster with than with 64
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
    """Start to copy a part of `source`, [height, width], into shared memory, by 16 bytes per thread, with zeros
    outside; nothing, if all of it is outside. Where rows begin between two vectors it copies one by one, and at once.
    """
    var wanted = first_row < height and first_column < width
    var whole = width % VECTOR == 0
    if wanted and not whole:
        for i in range(thread, rows * columns, threads):
            var row = first_row + i // columns
            var column = first_column + i % columns
            tile[unsafe_offset=at[columns](i // columns, i % columns)] = source[
                unsafe_offset=row * width + column
            ] if row < height and column < width else BFloat16(0)
    comptime for part in range(0, columns, 64):  # 8 vectors of each row, or the last 4
        comptime vectors = min(columns - part, 64) // VECTOR
        comptime step = threads // vectors  # rows at a time, in all of which `at` permutes alike
        comptime assert rows % step == 0 and step % 8 == 0
        var row = thread // vectors
        var column = part + thread % vectors * VECTOR
        var left = Int32(height - first_row - row) if first_column + column < width else 0
        var begin = source.unsafe_offset((first_row + row) * width + first_column + column)
        var target = tile.unsafe_offset(at[columns](row, column))
        # Each copy has its own condition: a branch around them all would keep them apart from the `mma` that follow.
        comptime for i in range(0, rows, step):
            if wanted and whole:
                async_copy[VECTOR_BYTES, fill=BFloat16(0)](
                    begin.unsafe_offset(i * width).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                    target.unsafe_offset(i * columns),
                    Int32(VECTOR_BYTES) if Int32(i) < left else 0,
                )


@always_inline
def store_results[
    high: Int, whole: Bool
](output: MutPtr[BF16], totals: Array[Sums, 6 * high], row: Int, column: Int, height: Int, width: Int):
    """Store a lane's results, of which the first is in row and column: four in a row at once if the rows are `whole` fours.
    Neighbouring lanes exchange what makes these four, so that a warp writes all 32 bytes of a sector at once.
    """
    var odd = thread_idx.x % 2
    var first_column = column + odd * 8 + thread_idx.x % 4 // 2 * 4
    comptime for place in range(6 * high):  # two rows of two neighbouring blocks of 16 x 8
        comptime block = place // 6 * 6 + place % 3 * 2
        comptime half = place // 3 % 2 * 2
        var mine = bitcast[DType.uint32, 1](totals[block].slice[2, offset=half]().cast[BF16]())
        var other = bitcast[DType.uint32, 1](totals[block + 1].slice[2, offset=half]().cast[BF16]())
        if odd:
            swap(mine, other)
        other = warp.shuffle_xor(other, 1)
        var four = SIMD[DType.uint32, 2](other, mine) if odd else SIMD[DType.uint32, 2](mine, other)
        var values = bitcast[BF16, 4](four)
        var here = row + place // 3 * 8
        var begin = first_column + place % 3 * 16
        comptime if whole:
            if here < height and begin < width:
                output.unsafe_store[alignment=8](here * width + begin, values)
        else:
            comptime for i in range(4):
                if here < height and begin + i < width:
                    output[unsafe_offset=here * width + begin + i] = values[i]


@always_inline
def multiply_tiles[
    accum: DType, //
](mut totals: Array[Scalar[accum], EACH * EACH], a: SharedTile, b: SharedTile):
    """Add a tile's part of a thread's results, as in `registers`, VECTOR elements of a row at a time."""
    comptime Part = SIMD[accum, VECTOR]
    comptime for k in range(0, DEEP, VECTOR):
        var left = Array[Part, EACH](fill=0)
        var right = Array[Part, EACH](fill=0)
        comptime for i in range(EACH):
            var row = a.unsafe_offset(at[DEEP](thread_idx.y + i * DEPTH, k))
            var column = b.unsafe_offset(at[DEEP](thread_idx.x + i * DEPTH, k))
            left[i] = row.unsafe_load[width=VECTOR, alignment=VECTOR_BYTES](0).cast[accum]()
            right[i] = column.unsafe_load[width=VECTOR, alignment=VECTOR_BYTES](0).cast[accum]()
        comptime for i in range(EACH):
            comptime for j in range(EACH):
                comptime for e in range(VECTOR):
                    totals[i * EACH + j] += left[i][e] * right[j][e]


def transpose_kernel(turned: MutPtr[BF16], source: ImmPtr[BF16], rows: Int32, columns: Int32):
    """Copy [rows, columns] as [columns, rows]. A block has TILE x TILE of them."""
    var tile = stack_allocation[dtype=BF16, address_space=AddressSpace.SHARED](row_major[TILE, TILE + 2]())
    var row = block_idx.y * TILE
    var column = block_idx.x * TILE
    for i in range(thread_idx.y, TILE, BLOCK_ROWS):
        if row + i < Int(rows) and column + thread_idx.x < Int(columns):
            tile[i, thread_idx.x] = source[unsafe_offset=(row + i) * Int(columns) + column + thread_idx.x]
    barrier()
    for i in range(thread_idx.y, TILE, BLOCK_ROWS):
        if column + i < Int(columns) and row + thread_idx.x < Int(rows):
            var place = (column + i) * Int(rows) + row + thread_idx.x
            turned[unsafe_offset=place] = rebind[BFloat16](tile[thread_idx.x, i])


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
    dtype: DType, of: DType
](first: MutPtr[dtype], second: MutPtr[dtype], matrix: ImmPtr[of], rows: Int32, columns: Int32, half: Int32):
    """Add up the rows of a matrix, in an order that depends on nothing, so that every run gives the same bits. The sums of the
    first `half` columns go to `first`. A block has TILE columns and TILE threads for each: thread y adds the rows y, y + TILE, ...
    """
    comptime accum = accum_type[of]
    var parts = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[TILE, TILE]())
    var c = block_idx.x * TILE + thread_idx.x
    var mine = Scalar[accum](0)
    if c < Int(columns):
        for row in range(thread_idx.y, Int(rows), TILE):
            mine += matrix[unsafe_offset=row * Int(columns) + c].cast[accum]()
    parts[thread_idx.y, thread_idx.x] = mine
    barrier()
    if thread_idx.y == 0 and c < Int(columns):
        var total = Scalar[accum](0)
        for y in range(TILE):
            total += parts[y, thread_idx.x]
        var target = first if c < Int(half) else second.unsafe_offset(-Int(half))
        target[unsafe_offset=c] = total.cast[dtype]()
