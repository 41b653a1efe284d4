"""Puzzle 28, make it fast: LayerNorm and Linear in steps, each of which lowers one counter.

    rows        a warp for each row: neighbouring threads read neighbouring elements
    once        x is read once, and kept in registers
    vectors     16 bytes a load
    shuffles    sums inside the warp, without shared memory and barriers
    dx          the backward pass of a row: both sums and dx from one reading of x and dy
    dgamma      sums over all rows in two stages, without atomics
    tiled       the product through tiles in shared memory
    registers   the product with a tile of results in every thread's registers
    copies      tiles are copied while others are multiplied
    tensor      the product on tensor cores
    layouts     the products of the backward pass, without a transpose in memory
    epilogue    the bias and the sums of a gradient's columns inside the products

Every blank starts with correct but slow code: the form of the previous step. Matrices are row-major: x, dln and ln_out
[rows, hidden], the Linear's weight [outputs, hidden]. Blocks have THREADS threads. Those of rows have a warp, LANES threads,
for each of BLOCK_ROWS rows. `launches.mojo` launches the kernels, `parts.mojo` has constants and helpers for the blanks,
`product.mojo` the kernel of the last three steps.
"""

from std.math import sqrt
from std.memory import AddressSpace
from std.sys import size_of
from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group
from max.gpu.primitives import warp
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .parts import (
    BF16, BLOCK, BLOCK_ROWS, BLOCK_THREADS, EPS, LANES, PER_THREAD, SLAB_ROWS, TENSOR_DEPTH, THREAD_TILE, TILE, TILE_DEPTH,
    VECTOR_BYTES, WARPS, Pair, SharedTile, Sums, swizzle, copy_tile, load, multiply_tiles, zero_tail, shared_sum, store, allocate_tiles,
)  # fmt: skip
from .shared.common import ImmPtr, MutPtr, accum_type, atomic_add


# ---- 1 to 4: LayerNorm of every row -------------------------------------------------------------------------


def layernorm_kernel[
    dtype: DType, step: Int
](
    output: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """Compute `y = (x - mean) * rstd * gamma + beta` with a warp per row, initially a thread per row."""
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()  # elements per 16-byte vector
    var R = Int(rows)
    var C = Int(hidden)
    var x = TileTensor(input, row_major(R, C))
    var y = TileTensor(output, row_major(R, C))
    var gamma = TileTensor(ln_weight, row_major(C))
    var beta = TileTensor(ln_bias, row_major(C))
    comptime if step == 1:
        # ANCHOR: rows
        # BLANK-START rows: a warp for each row: which elements does a lane take? See shared_sum
        var row = global_idx.x
        var end = C if row < R else 0  # a thread without a row has nothing to do
        var total = Scalar[accum](0)
        for c in range(end):
            total += x[row, c].cast[accum]()
        var mean = total / Scalar[accum](C)
        var squares = Scalar[accum](0)
        for c in range(end):
            squares += (x[row, c].cast[accum]() - mean) ** 2
        var rstd = 1 / sqrt(squares / Scalar[accum](C) + EPS)
        for c in range(end):
            var x_hat = (x[row, c].cast[accum]() - mean) * rstd
            y[row, c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
        # BLANK-END rows (unsolved while it reads as given: 04628bdd)
        # ANCHOR_END: rows
    elif step == 2:
        # A loop over a thread's elements is `comptime for i in range(PER_THREAD)`, else the array is not in registers.
        # ANCHOR: once
        # BLANK-START once: read x once, and keep a thread's elements: Array[Scalar[accum], PER_THREAD](fill=0)
        var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
        var end = C if row < R else 0  # a row past the end has no elements
        var total = Scalar[accum](0)
        for c in range(thread_idx.x % LANES, end, LANES):
            total += x[row, c].cast[accum]()
        var mean = shared_sum(total) / Scalar[accum](C)
        var squares = Scalar[accum](0)
        for c in range(thread_idx.x % LANES, end, LANES):
            squares += (x[row, c].cast[accum]() - mean) ** 2
        var rstd = 1 / sqrt(shared_sum(squares) / Scalar[accum](C) + EPS)
        for c in range(thread_idx.x % LANES, end, LANES):
            var x_hat = (x[row, c].cast[accum]() - mean) * rstd
            y[row, c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
        # BLANK-END once (unsolved while it reads as given: b8ebd505)
        # ANCHOR_END: once
    elif step == 3:
        # If a row is not a whole number of vectors, the rows after the first begin between two vectors: `load`, `store` and
        # `zero_tail` are for that.
        # ANCHOR: vectors
        # BLANK-START vectors: 16 bytes per load: keep PER_THREAD // width vectors, SIMD[dtype, width]; see load, store and zero_tail
        var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
        var end = C if row < R else 0
        var values = Array[Scalar[accum], PER_THREAD](fill=0)
        var total = Scalar[accum](0)
        comptime for i in range(PER_THREAD):
            var c = thread_idx.x % LANES + i * LANES
            if c < end:
                values[i] = x[row, c].cast[accum]()
            total += values[i]
        var mean = shared_sum(total) / Scalar[accum](C)
        var squares = Scalar[accum](0)
        comptime for i in range(PER_THREAD):
            if thread_idx.x % LANES + i * LANES < end:
                squares += (values[i] - mean) ** 2
        var rstd = 1 / sqrt(shared_sum(squares) / Scalar[accum](C) + EPS)
        comptime for i in range(PER_THREAD):
            var c = thread_idx.x % LANES + i * LANES
            if c < end:
                var x_hat = (values[i] - mean) * rstd
                y[row, c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
        # BLANK-END vectors (unsolved while it reads as given: 586a1b5a)
        # ANCHOR_END: vectors
    else:
        var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
        var end = C if row < R else 0
        var aligned = C % width == 0
        var values = Array[SIMD[dtype, width], PER_THREAD // width](fill=0)
        comptime for i in range(PER_THREAD // width):
            var c = (thread_idx.x % LANES + i * LANES) * width
            if c < end:
                values[i] = load[width](input, row * C + c, end - c, aligned)
        var total = SIMD[accum, width](0)
        comptime for i in range(PER_THREAD // width):  # after all loads, so that none waits for another
            total += values[i].cast[accum]()
        var mean = lanes_sum(total.reduce_add()) / Scalar[accum](C)
        var squares = SIMD[accum, width](0)
        comptime for i in range(PER_THREAD // width):
            var c = (thread_idx.x % LANES + i * LANES) * width
            squares += zero_tail((values[i].cast[accum]() - mean) ** 2, end - c)
        var rstd = 1 / sqrt(lanes_sum(squares.reduce_add()) / Scalar[accum](C) + EPS)
        comptime for i in range(PER_THREAD // width):
            var c = (thread_idx.x % LANES + i * LANES) * width
            if c < end:
                var x_hat = (values[i].cast[accum]() - mean) * rstd
                var gain = load[width](ln_weight, c, end - c, aligned).cast[accum]()
                var shift = load[width](ln_bias, c, end - c, aligned).cast[accum]()
                store(output, row * C + c, end - c, aligned, x_hat * gain + shift)


# ANCHOR: shuffles
# BLANK-START shuffles: the sum by shuffles: five steps, in which the distance between lanes doubles
@always_inline
def lanes_sum[dtype: DType](partial: Scalar[dtype]) -> Scalar[dtype]:
    """Sum over a warp's lanes. `warp.shuffle_xor(v, UInt32(d))` returns the lane's at distance d."""
    return shared_sum(partial)
# BLANK-END shuffles (unsolved while it reads as given: 3ee065cb)
# ANCHOR_END: shuffles


# ---- 5 and 6: the backward pass of LayerNorm ----------------------------------------------------------------


def dx_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """Compute `dx = rstd * (g - c2 - x_hat * c1)`, `g = dln * gamma`; c1, c2: means of `g * x_hat`, g."""
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()
    var R = Int(rows)
    var C = Int(hidden)
    var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
    var lane = thread_idx.x % LANES
    if row >= R:  # the whole warp
        return
    var x = TileTensor(input, row_major(R, C))
    var dy = TileTensor(dln, row_major(R, C))
    var dx = TileTensor(grad_input, row_major(R, C))
    var gamma = TileTensor(ln_weight, row_major(C))
    # ANCHOR: dx
    # BLANK-START dx: read x and dln once, by vectors: what does a thread have to keep?
    var c1 = Scalar[accum](0)
    var c2 = Scalar[accum](0)
    for c in range(lane, C, LANES):
        var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
        var g = dy[row, c].cast[accum]() * gamma[c].cast[accum]()
        c1 += g * x_hat
        c2 += g
    c1 = warp.sum(c1) / Scalar[accum](C)
    c2 = warp.sum(c2) / Scalar[accum](C)
    for c in range(lane, C, LANES):
        var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
        var g = dy[row, c].cast[accum]() * gamma[c].cast[accum]()
        dx[row, c] = (rstd[unsafe_offset=row] * (g - c2 - x_hat * c1)).cast[dtype]()
    # BLANK-END dx (unsolved while it reads as given: 4a0bb773)
    # ANCHOR_END: dx


def dgamma_kernel[
    dtype: DType
](
    sums: MutPtr[accum_type[dtype]],  # [slabs, 2, hidden], zero before the launch
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    rows: Int32,
    hidden: Int32,
):
    """Compute `dgamma = sum of dln * x_hat` and `dbeta = sum of dln` for slabs of SLAB_ROWS rows; a second stage adds the slabs.
    A warp has a slab and LANES vectors of each row; a lane's vector begins at column c."""
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()
    var R = Int(rows)
    var C = Int(hidden)
    var aligned = C % width == 0
    var slab = block_idx.y * BLOCK_ROWS + thread_idx.x // LANES
    var c = (block_idx.x * LANES + thread_idx.x % LANES) * width
    if slab * SLAB_ROWS >= R or c >= C:
        return
    # ANCHOR: dgamma
    # BLANK-START dgamma: what the slab's rows add to these columns, without atomics: where does each slab leave its sums?
    var first = c - thread_idx.x % LANES * width
    var lanes = min(LANES, (C - first + width - 1) // width)
    for row in range(slab * SLAB_ROWS, min((slab + 1) * SLAB_ROWS, R)):
        var mu = mean[unsafe_offset=row]
        var scale = rstd[unsafe_offset=row]
        for column in range(first + thread_idx.x % LANES, min(first + LANES * width, C), lanes):
            var dy = dln[unsafe_offset=row * C + column].cast[accum]()
            atomic_add(sums, column, dy * (input[unsafe_offset=row * C + column].cast[accum]() - mu) * scale)
            atomic_add(sums, C + column, dy)
    # BLANK-END dgamma (unsolved while it reads as given: 724c405d)
    # ANCHOR_END: dgamma


# ---- 7 to 9: the product, its sums by threads ---------------------------------------------------------------


def sums_by_threads_kernel[
    dtype: DType, step: Int
](
    output: MutPtr[dtype],  # [rows, outputs]
    ln_out: ImmPtr[dtype],  # [rows, hidden]
    linear_weight: ImmPtr[dtype],  # [outputs, hidden]
    rows: Int32,
    hidden: Int32,
    outputs: Int32,
):
    """Compute `ln_out @ linear_weight.T`. In step 7 a block has TILE x TILE threads, one per result: row ty, column tx of its
    tile. Later BLOCK x BLOCK results, a thread those of rows ty, ty + BLOCK_THREADS ... and columns tx ..."""
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var O = Int(outputs)
    var a = TileTensor(ln_out, row_major(R, C))
    var b = TileTensor(linear_weight, row_major(O, C))
    var y = TileTensor(output, row_major(R, O))
    var tx = thread_idx.x
    var ty = thread_idx.y
    comptime if step == 7:
        var row = block_idx.y * TILE + ty
        var column = block_idx.x * TILE + tx
        # One padding element per row puts the elements of a column in 32 different banks.
        comptime padded = row_major[TILE, TILE + 1]()
        var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
        var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
        # ANCHOR: tiled
        # BLANK-START tiled: TILE columns of a and b at a time through a_tile and b_tile: which thread loads what, and where must it wait?
        if row < R and column < O:
            var total = Scalar[accum](0)
            for k in range(C):
                total += a[row, k].cast[accum]() * b[column, k].cast[accum]()
            y[row, column] = total.cast[dtype]()
        # BLANK-END tiled (unsolved while it reads as given: 55508fa4)
        # ANCHOR_END: tiled
        return
    var row = block_idx.y * BLOCK
    var column = block_idx.x * BLOCK
    var totals = Array[Scalar[accum], THREAD_TILE * THREAD_TILE](fill=0)
    comptime if step == 8:
        # The tiles are transposed; with two padding elements per row, 16 threads of two columns store to 32 banks.
        comptime padded = row_major[BLOCK_THREADS, BLOCK + 2]()
        var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
        var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
        for first in range(0, C, BLOCK_THREADS):
            var k = first + tx
            comptime for i in range(THREAD_TILE):
                var tile_row = ty + i * BLOCK_THREADS
                var row = block_idx.y * BLOCK + tile_row
                var b_row = block_idx.x * BLOCK + tile_row
                a_tile[tx, tile_row] = a[row, k].cast[accum]() if row < R and k < C else Scalar[accum](0)
                b_tile[tx, tile_row] = b[b_row, k].cast[accum]() if b_row < O and k < C else Scalar[accum](0)
            barrier()
            # ANCHOR: registers
            # BLANK-START registers: read each element of a tile once: THREAD_TILE of a and of b give all results of a thread
            comptime for i in range(THREAD_TILE):
                comptime for j in range(THREAD_TILE):
                    for inner in range(BLOCK_THREADS):
                        totals[i * THREAD_TILE + j] += a_tile[inner, ty + i * BLOCK_THREADS] * b_tile[inner, tx + j * BLOCK_THREADS]
            # BLANK-END registers (unsolved while it reads as given: 0e83977b)
            # ANCHOR_END: registers
            barrier()
    elif step == 9:
        # `copy_tile` copies while the threads multiply. Each operand has two tiles of BLOCK rows of TILE_DEPTH elements.
        comptime size = BLOCK * TILE_DEPTH
        var a16 = rebind[ImmPtr[BF16]](ln_out)
        var b16 = rebind[ImmPtr[BF16]](linear_weight)
        var thread = ty * BLOCK_THREADS + tx
        var a_tiles = allocate_tiles[2 * size]()
        var b_tiles = allocate_tiles[2 * size]()
        # ANCHOR: copies
        # BLANK-START copies: a tile is copied while the one before is multiplied: when may its buffer be overwritten?
        for first in range(0, C, TILE_DEPTH):
            copy_tile[BLOCK, TILE_DEPTH, BLOCK_THREADS * BLOCK_THREADS](a_tiles, a16, row, first, R, C, thread)
            copy_tile[BLOCK, TILE_DEPTH, BLOCK_THREADS * BLOCK_THREADS](b_tiles, b16, column, first, O, C, thread)
            async_copy_commit_group()
            async_copy_wait_group(0)
            barrier()
            multiply_tiles(totals, a_tiles, b_tiles)
            barrier()
        # BLANK-END copies (unsolved while it reads as given: cbeb5f62)
        # ANCHOR_END: copies
    comptime for i in range(THREAD_TILE):
        comptime for j in range(THREAD_TILE):
            var result_row = row + ty + i * BLOCK_THREADS
            var result_column = column + tx + j * BLOCK_THREADS
            if result_row < R and result_column < O:
                y[result_row, result_column] = totals[i * THREAD_TILE + j].cast[dtype]()


# ---- 10 to 12: bfloat16 on tensor cores -----------------------------------------------------------------------


@always_inline
def multiply_with_mma(mut totals: Array[Sums, 24], a: SharedTile, b: SharedTile):
    """Add the products of a tile to a warp's 64 x 48 results. One `mma` computes 16 x 8 of them from 16 elements of 16 rows of a
    and of 8 rows of b; lane l has columns 2 * (l % 4) and 2 * (l % 4) + 1 of rows l // 4 and l // 4 + 8. totals[6 * i + j] has
    the results of block (i, j) of 4 x 6."""
    var lane = thread_idx.x % LANES
    var row = thread_idx.x // LANES // 2 * 64
    var column = thread_idx.x // LANES % 2 * 48
    # ANCHOR: tensor
    # BLANK-START tensor: 16 elements of k at a time by mma: which rows of a and b does a warp need? Hint tensor-2 has ld_matrix
    for k in range(TENSOR_DEPTH):
        var left = Array[Float32, 8](fill=0)
        var right = Array[Float32, 12](fill=0)
        comptime for i in range(8):
            left[i] = a[unsafe_offset=swizzle[TENSOR_DEPTH](row + lane // 4 + 8 * i, k)].cast[DType.float32]()
        comptime for i in range(12):
            var b_row = column + lane % 4 * 2 + i // 2 * 8 + i % 2
            right[i] = b[unsafe_offset=swizzle[TENSOR_DEPTH](b_row, k)].cast[DType.float32]()
        comptime for i in range(8):
            comptime for j in range(12):
                totals[i // 2 * 6 + j // 2][i % 2 * 2 + j % 2] += left[i] * right[j]
    # BLANK-END tensor (unsolved while it reads as given: d8d9c286)
    # ANCHOR_END: tensor


# ANCHOR: layouts
# BLANK-START layouts: read a matrix without a copy: what does ld_matrix[..., transpose=True] make of a tile?
comptime TRANSPOSE_FIRST = True


@always_inline
def copy_operand[
    transposed: Bool, side: Int
](tile: SharedTile, matrix: ImmPtr[BF16], row: Int, k: Int, rows: Int, depth: Int):
    """Start to copy `side` rows of TENSOR_DEPTH of a [rows, depth] matrix, [depth, rows] if `transposed`."""
    copy_tile[side, TENSOR_DEPTH, WARPS * LANES](tile, matrix, row, k, rows, depth, thread_idx.x)


@always_inline
def load_matrices[transposed: Bool, side: Int](tile: SharedTile, row: Int, k: Int) -> SIMD[BF16, 8]:
    """Load four parts of a tile, 8 x 8 elements each, for eight lanes each: theirs begins at row and k."""
    return ld_matrix[8](tile.unsafe_offset(swizzle[TENSOR_DEPTH](row + thread_idx.x % 8, k)))
# BLANK-END layouts (unsolved while it reads as given: ba477e6c)
# ANCHOR_END: layouts


# ANCHOR: epilogue
# BLANK-START epilogue: add the bias, and sum dy's columns, while the results and dy's fragments are in registers
comptime SEPARATE_LAUNCHES = True


@always_inline
def load_bias_pair(bias: ImmPtr[BF16], column: Int, width: Int) -> Pair:
    """Return the biases of two neighbouring columns, starting at `column`."""
    return Pair(0)  # another launch adds the bias


@always_inline
def add_to_row_sums(mut sums: Sums, rows: SIMD[BF16, 8]):
    """Add the elements of each of 16 rows, a fragment for `mma`, to the row's result in every column."""
    pass  # another launch adds up the columns
# BLANK-END epilogue (unsolved while it reads as given: e3e591b1)
# ANCHOR_END: epilogue
