"""Puzzle 28, make it fast: LayerNorm and Linear in steps, each of which brings one counter down.

    rows        a warp for each row: neighbouring threads read neighbouring elements
    once        x is read once, and kept in registers
    vectors     16 bytes a load
    shuffles    sums inside the warp, without shared memory and barriers
    dx          the backward pass of a row: both sums and dx from one reading of x and dy
    dgamma      sums over all rows in two stages, without atomics
    tiled       the product through tiles in shared memory
    registers   the product with a tile of results in every thread's registers

Every blank holds right code that is slow: the form before. Matrices are row-major: x, dln and ln_out [rows, hidden], the
Linear's weight [outputs, hidden]. Blocks have THREADS threads. Those of rows have a warp, LANES threads, for each of BLOCK_ROWS
rows; `launches.mojo` says how the kernels are launched.
"""

from std.math import iota, sqrt
from std.memory import AddressSpace
from std.sys import size_of
from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.primitives import warp
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import ImmPtr, MutPtr, accum_type, atomic_add

comptime LANES = 32
"""Threads of a warp, which share a row."""
comptime BLOCK_ROWS = 4
"""Rows of a block."""
comptime THREADS = BLOCK_ROWS * LANES
comptime KEPT = 32
"""Elements of a row that a thread can keep in registers: a row has at most KEPT * LANES."""
comptime VECTOR_BYTES = 16
"""The widest load of a thread."""
comptime EPS = 1e-5
"""What is added to the variance."""
comptime SLAB = 8
"""Rows whose dgamma and dbeta one block adds up in the first of the two stages."""
comptime TILE = 32
"""A block of `tiled` has TILE x TILE threads, one for each result of its tile."""
comptime BLOCK = 64
"""A block of `registers` makes BLOCK x BLOCK results."""
comptime EACH = 4
"""A thread of it makes EACH x EACH of them."""
comptime DEPTH = BLOCK // EACH
"""So it has DEPTH x DEPTH threads; of a row of a or b it takes DEPTH elements at a time."""


# ---- What the blanks use ------------------------------------------------------------------------------------


@always_inline
def shared_sum[dtype: DType](mine: Scalar[dtype]) -> Scalar[dtype]:
    """The sum of what the LANES threads of a row have, by shared memory. Every thread of the block must call it.
    """
    var parts = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[THREADS]())
    parts[thread_idx.x] = mine
    barrier()
    var total = Scalar[dtype](0)
    for lane in range(LANES):
        total += parts[thread_idx.x // LANES * LANES + lane]
    barrier()  # before somebody calls it again
    return total


@always_inline
def load[
    dtype: DType, //, width: Int
](source: ImmPtr[dtype], place: Int, left: Int, aligned: Bool) -> SIMD[accum_type[dtype], width]:
    """`width` elements from `place` on, in the type of sums: in one load if that is `aligned`. Else only the `left` ones that
    there are, one by one, and zeros."""
    comptime accum = accum_type[dtype]
    if aligned:
        return source.unsafe_load[width=width, alignment=VECTOR_BYTES](place).cast[accum]()
    var values = SIMD[accum, width](0)
    comptime for i in range(width):
        if i < left:
            values[i] = source[unsafe_offset=place + i].cast[accum]()
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
    """The first `left` of some values, and zeros behind them."""
    return iota[DType.int32, width]().lt(Int32(left)).select(values, SIMD[accum, width](0))


# ---- 1 to 4: LayerNorm of every row -------------------------------------------------------------------------


def rows_kernel[
    dtype: DType
](
    rows_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """`y = (x - mean) * rstd * gamma + beta`, a row at a time. The blocks have room for a thread or a warp a row.
    """
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var x = TileTensor(input, row_major(R, C))
    var y = TileTensor(rows_out, row_major(R, C))
    var gamma = TileTensor(ln_weight, row_major(C))
    var beta = TileTensor(ln_bias, row_major(C))
    # ANCHOR: rows_solution
    # BLANK-START rows: a warp for each row: which elements does a lane take? See shared_sum
    var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
    var end = C if row < R else 0  # a row that is none has no elements
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
    # BLANK-GIVEN rows
    # var row = global_idx.x
    # var end = C if row < R else 0  # a thread without a row has nothing to do
    # var total = Scalar[accum](0)
    # for c in range(end):
    #     total += x[row, c].cast[accum]()
    # var mean = total / Scalar[accum](C)
    # var squares = Scalar[accum](0)
    # for c in range(end):
    #     squares += (x[row, c].cast[accum]() - mean) ** 2
    # var rstd = 1 / sqrt(squares / Scalar[accum](C) + EPS)
    # for c in range(end):
    #     var x_hat = (x[row, c].cast[accum]() - mean) * rstd
    #     y[row, c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
    # BLANK-END rows
    # ANCHOR_END: rows_solution


def once_kernel[
    dtype: DType
](
    once_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """The same. A loop over what a thread keeps is `comptime for i in range(KEPT)`, else the array is no register.
    """
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var x = TileTensor(input, row_major(R, C))
    var y = TileTensor(once_out, row_major(R, C))
    var gamma = TileTensor(ln_weight, row_major(C))
    var beta = TileTensor(ln_bias, row_major(C))
    # ANCHOR: once_solution
    # BLANK-START once: read x once, and keep a thread's elements: Array[Scalar[accum], KEPT](fill=0)
    var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
    var end = C if row < R else 0
    var kept = Array[Scalar[accum], KEPT](fill=0)
    var total = Scalar[accum](0)
    comptime for i in range(KEPT):
        var c = thread_idx.x % LANES + i * LANES
        if c < end:
            kept[i] = x[row, c].cast[accum]()
        total += kept[i]
    var mean = shared_sum(total) / Scalar[accum](C)
    var squares = Scalar[accum](0)
    comptime for i in range(KEPT):
        if thread_idx.x % LANES + i * LANES < end:
            squares += (kept[i] - mean) ** 2
    var rstd = 1 / sqrt(shared_sum(squares) / Scalar[accum](C) + EPS)
    comptime for i in range(KEPT):
        var c = thread_idx.x % LANES + i * LANES
        if c < end:
            var x_hat = (kept[i] - mean) * rstd
            y[row, c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
    # BLANK-GIVEN once as rows
    # BLANK-END once
    # ANCHOR_END: once_solution


def vectors_kernel[
    dtype: DType
](
    vectors_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """The same. A vector of `width` elements has 16 bytes. Where a row is no whole number of them, the rows after the first
    begin between two vectors: `load`, `store` and `only` are for that."""
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()
    var R = Int(rows)
    var C = Int(hidden)
    var x = TileTensor(input, row_major(R, C))
    var y = TileTensor(vectors_out, row_major(R, C))
    var gamma = TileTensor(ln_weight, row_major(C))
    var beta = TileTensor(ln_bias, row_major(C))
    # ANCHOR: vectors_solution
    # BLANK-START vectors: 16 bytes a load: keep KEPT // width vectors, SIMD[accum, width]; see load, store and only
    var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
    var end = C if row < R else 0
    var aligned = C % width == 0
    var kept = Array[SIMD[accum, width], KEPT // width](fill=0)
    var total = SIMD[accum, width](0)
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        if c < end:
            kept[i] = load[width](input, row * C + c, end - c, aligned)
        total += kept[i]
    var mean = shared_sum(total.reduce_add()) / Scalar[accum](C)
    var squares = SIMD[accum, width](0)
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        squares += only((kept[i] - mean) ** 2, end - c)
    var rstd = 1 / sqrt(shared_sum(squares.reduce_add()) / Scalar[accum](C) + EPS)
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        if c < end:
            var scaled = (kept[i] - mean) * rstd * load[width](ln_weight, c, end - c, aligned)
            store(
                vectors_out, row * C + c, end - c, aligned, scaled + load[width](ln_bias, c, end - c, aligned)
            )
    # BLANK-GIVEN vectors as once
    # BLANK-END vectors
    # ANCHOR_END: vectors_solution


def shuffles_kernel[
    dtype: DType
](
    shuffles_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int32,
    hidden: Int32,
):
    """The same, without shared memory: `warp.shuffle_xor(v, UInt32(distance))` gives what another lane has.
    """
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()
    var R = Int(rows)
    var C = Int(hidden)
    var vectors_out = shuffles_out
    # ANCHOR: shuffles_solution
    # BLANK-START shuffles: both sums by shuffles: five steps, in which the distance between lanes doubles
    var row = block_idx.x * BLOCK_ROWS + thread_idx.x // LANES
    var end = C if row < R else 0
    var aligned = C % width == 0
    var kept = Array[SIMD[accum, width], KEPT // width](fill=0)
    var total = SIMD[accum, width](0)
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        if c < end:
            kept[i] = load[width](input, row * C + c, end - c, aligned)
        total += kept[i]
    var mean = total.reduce_add() / Scalar[accum](C)
    comptime for step in range(5):
        mean += warp.shuffle_xor(mean, UInt32(1 << step))
    var squares = SIMD[accum, width](0)
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        squares += only((kept[i] - mean) ** 2, end - c)
    var variance = squares.reduce_add() / Scalar[accum](C)
    comptime for step in range(5):
        variance += warp.shuffle_xor(variance, UInt32(1 << step))
    comptime for i in range(KEPT // width):
        var c = (thread_idx.x % LANES + i * LANES) * width
        if c < end:
            var scaled = (kept[i] - mean) / sqrt(variance + EPS) * load[width](ln_weight, c, end - c, aligned)
            store(
                vectors_out, row * C + c, end - c, aligned, scaled + load[width](ln_bias, c, end - c, aligned)
            )
    # BLANK-GIVEN shuffles as vectors
    # BLANK-END shuffles
    # ANCHOR_END: shuffles_solution


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
    """`dx = rstd * (g - c2 - x_hat * c1)` with `g = dln * gamma`; c1 and c2 are the row's means of `g * x_hat` and of g.
    """
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
    # ANCHOR: dx_solution
    # BLANK-START dx: read x and dln once, by vectors: what has a thread to keep?
    var aligned = C % width == 0
    var x_hat = Array[SIMD[accum, width], KEPT // width](fill=0)
    var g = Array[SIMD[accum, width], KEPT // width](fill=0)
    var first = SIMD[accum, width](0)
    var second = SIMD[accum, width](0)
    comptime for i in range(KEPT // width):
        var c = (lane + i * LANES) * width
        if c < C:
            x_hat[i] = (load[width](input, row * C + c, C - c, aligned) - mean[unsafe_offset=row]) * rstd[
                unsafe_offset=row
            ]
            g[i] = load[width](dln, row * C + c, C - c, aligned) * load[width](ln_weight, c, C - c, aligned)
        first += g[i] * x_hat[i]  # behind the end of the row g is 0
        second += g[i]
    var c1 = warp.sum(first.reduce_add()) / Scalar[accum](C)
    var c2 = warp.sum(second.reduce_add()) / Scalar[accum](C)
    comptime for i in range(KEPT // width):
        var c = (lane + i * LANES) * width
        if c < C:
            store(
                grad_input, row * C + c, C - c, aligned, rstd[unsafe_offset=row] * (g[i] - c2 - x_hat[i] * c1)
            )
    # BLANK-GIVEN dx
    # var c1 = Scalar[accum](0)
    # var c2 = Scalar[accum](0)
    # for c in range(lane, C, LANES):
    #     var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
    #     var g = dy[row, c].cast[accum]() * gamma[c].cast[accum]()
    #     c1 += g * x_hat
    #     c2 += g
    # c1 = warp.sum(c1) / Scalar[accum](C)
    # c2 = warp.sum(c2) / Scalar[accum](C)
    # for c in range(lane, C, LANES):
    #     var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
    #     var g = dy[row, c].cast[accum]() * gamma[c].cast[accum]()
    #     dx[row, c] = (rstd[unsafe_offset=row] * (g - c2 - x_hat * c1)).cast[dtype]()
    # BLANK-END dx
    # ANCHOR_END: dx_solution


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
    """The first stage of `dgamma = sum of dln * x_hat` and `dbeta = sum of dln` over all rows: block_idx.y is a slab of SLAB
    rows, block_idx.x * THREADS its first column. The second stage adds up the slabs."""
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var x = TileTensor(input, row_major(R, C))
    var dy = TileTensor(dln, row_major(R, C))
    var slab = block_idx.y
    var c = block_idx.x * THREADS + thread_idx.x
    # ANCHOR: dgamma_solution
    # BLANK-START dgamma: what the slab's rows add to column c, without atomics: where does each slab leave its sums?
    if c < C:
        var dgamma = Scalar[accum](0)
        var dbeta = Scalar[accum](0)
        for row in range(slab * SLAB, min((slab + 1) * SLAB, R)):
            var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
            dgamma += dy[row, c].cast[accum]() * x_hat
            dbeta += dy[row, c].cast[accum]()
        sums[unsafe_offset=2 * slab * C + c] = dgamma
        sums[unsafe_offset=(2 * slab + 1) * C + c] = dbeta
    # BLANK-GIVEN dgamma
    # for row in range(slab * SLAB, min((slab + 1) * SLAB, R)):
    #     if c < C:
    #         var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
    #         atomic_add(sums, c, dy[row, c].cast[accum]() * x_hat)
    #         atomic_add(sums, C + c, dy[row, c].cast[accum]())
    # BLANK-END dgamma
    # ANCHOR_END: dgamma_solution


def clear_kernel[dtype: DType](sums: MutPtr[dtype], count: Int32):
    """Zeroes what `dgamma_kernel` may add to."""
    if global_idx.x < Int(count):
        sums[unsafe_offset=global_idx.x] = 0


def second_stage_kernel[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    sums: ImmPtr[accum_type[dtype]],
    slabs: Int32,
    hidden: Int32,
):
    """Adds up the slabs, one after the other, so that every run gives the same bits; a thread has a column.
    """
    var C = Int(hidden)
    var c = global_idx.x
    if c < C:
        var dgamma = Scalar[accum_type[dtype]](0)
        var dbeta = Scalar[accum_type[dtype]](0)
        for slab in range(Int(slabs)):
            dgamma += sums[unsafe_offset=2 * slab * C + c]
            dbeta += sums[unsafe_offset=(2 * slab + 1) * C + c]
        grad_ln_weight[unsafe_offset=c] = dgamma.cast[dtype]()
        grad_ln_bias[unsafe_offset=c] = dbeta.cast[dtype]()


# ---- 7 and 8: the product -----------------------------------------------------------------------------------


def tiled_kernel[
    dtype: DType
](
    tiled_out: MutPtr[dtype],  # [rows, outputs]
    ln_out: ImmPtr[dtype],  # [rows, hidden]
    linear_weight: ImmPtr[dtype],  # [outputs, hidden]
    rows: Int32,
    hidden: Int32,
    outputs: Int32,
):
    """`ln_out @ linear_weight.T`. A block has TILE x TILE threads, each for one result: row ty and column tx of its tile.
    """
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var O = Int(outputs)
    var a = TileTensor(ln_out, row_major(R, C))
    var b = TileTensor(linear_weight, row_major(O, C))
    var y = TileTensor(tiled_out, row_major(R, O))
    var tx = thread_idx.x
    var ty = thread_idx.y
    var row = block_idx.y * TILE + ty
    var column = block_idx.x * TILE + tx
    # One element more a row: then the threads of a warp that read a column of a tile find it in 32 banks.
    comptime padded = row_major[TILE, TILE + 1]()
    var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
    var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
    # ANCHOR: tiled_solution
    # BLANK-START tiled: TILE columns of a and b at a time through a_tile and b_tile: who loads what, and who waits when?
    var total = Scalar[accum](0)
    for first in range(0, C, TILE):
        var k = first + tx
        a_tile[ty, tx] = a[row, k].cast[accum]() if row < R and k < C else Scalar[accum](0)
        var other = block_idx.x * TILE + ty  # neighbouring threads read along a row of b
        b_tile[ty, tx] = b[other, k].cast[accum]() if other < O and k < C else Scalar[accum](0)
        barrier()
        comptime for i in range(TILE):
            total += a_tile[ty, i] * b_tile[tx, i]
        barrier()
    if row < R and column < O:
        y[row, column] = total.cast[dtype]()
    # BLANK-GIVEN tiled
    # if row < R and column < O:
    #     var total = Scalar[accum](0)
    #     for k in range(C):
    #         total += a[row, k].cast[accum]() * b[column, k].cast[accum]()
    #     y[row, column] = total.cast[dtype]()
    # BLANK-END tiled
    # ANCHOR_END: tiled_solution


def registers_kernel[
    dtype: DType
](
    registers_out: MutPtr[dtype],  # [rows, outputs]
    ln_out: ImmPtr[dtype],  # [rows, hidden]
    linear_weight: ImmPtr[dtype],  # [outputs, hidden]
    rows: Int32,
    hidden: Int32,
    outputs: Int32,
):
    """The same with BLOCK x BLOCK results a block. A thread has EACH x EACH of them: rows ty, ty + DEPTH, ... and columns tx,
    tx + DEPTH, ... of the block's tile."""
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(hidden)
    var O = Int(outputs)
    var a = TileTensor(ln_out, row_major(R, C))
    var b = TileTensor(linear_weight, row_major(O, C))
    var y = TileTensor(registers_out, row_major(R, O))
    var tx = thread_idx.x
    var ty = thread_idx.y
    # Columns of a and b become rows of the tiles; with two elements more, 16 threads of two columns store to 32 banks.
    comptime padded = row_major[DEPTH, BLOCK + 2]()
    var a_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
    var b_tile = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](padded)
    var totals = Array[Scalar[accum], EACH * EACH](fill=0)
    for first in range(0, C, DEPTH):
        var k = first + tx
        comptime for i in range(EACH):
            var here = ty + i * DEPTH
            var row = block_idx.y * BLOCK + here
            var other = block_idx.x * BLOCK + here
            a_tile[tx, here] = a[row, k].cast[accum]() if row < R and k < C else Scalar[accum](0)
            b_tile[tx, here] = b[other, k].cast[accum]() if other < O and k < C else Scalar[accum](0)
        barrier()
        # ANCHOR: registers_solution
        # BLANK-START registers: each number of a tile read once: EACH of a and EACH of b serve EACH * EACH results
        comptime for inner in range(DEPTH):
            var left = Array[Scalar[accum], EACH](fill=0)
            var right = Array[Scalar[accum], EACH](fill=0)
            comptime for i in range(EACH):
                left[i] = a_tile[inner, ty + i * DEPTH]
                right[i] = b_tile[inner, tx + i * DEPTH]
            comptime for i in range(EACH):
                comptime for j in range(EACH):
                    totals[i * EACH + j] += left[i] * right[j]
        # BLANK-GIVEN registers
        # comptime for i in range(EACH):
        #     comptime for j in range(EACH):
        #         for inner in range(DEPTH):
        #             totals[i * EACH + j] += a_tile[inner, ty + i * DEPTH] * b_tile[inner, tx + j * DEPTH]
        # BLANK-END registers
        # ANCHOR_END: registers_solution
        barrier()
    comptime for i in range(EACH):
        comptime for j in range(EACH):
            var row = block_idx.y * BLOCK + ty + i * DEPTH
            var column = block_idx.x * BLOCK + tx + j * DEPTH
            if row < R and column < O:
                y[row, column] = totals[i * EACH + j].cast[dtype]()
