"""The row kernels of the fast variant: LayerNorm forward and backward, and sums over rows in two stages.

Each kernel reads its operands from DRAM once, 16 bytes a thread at a time, and keeps a row in registers between its
statistics and what is made from them. A group of threads (one or more whole warps, block_dim.x) shares a row, and a
block holds block_dim.y groups. Sums over rows go to one partial sum for each block, added by a second kernel in a
fixed order: no atomics, so every run gives the same bits. Rows that are no whole number of aligned 16-byte vectors,
or too long for the registers, take the kernels whose names end in `_any`, which load one element at a time.
"""

from std.math import ceildiv, iota, sqrt
from std.memory import AddressSpace
from std.sys import has_accelerator, size_of
from max.gpu import WARP_SIZE, barrier, block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives import warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .common import ImmPtr, MutPtr, Sizes, accum_type
from .launcher import Launcher

comptime VECTOR_BYTES = 16
"""The widest access of a thread."""
comptime FORWARD_VECTORS = 4
"""Vectors of a row that a thread keeps in the forward kernel."""
comptime FORWARD_THREADS = 256
"""Threads of a block of the forward kernel that holds several rows."""
comptime BACKWARD_THREADS = 512
"""The most threads of a block of the backward kernel."""
comptime MAX_GROUP = 512
"""The most threads that share a row."""
comptime MAX_WARPS = 32
"""Room for the partial sums of the warps of a block; AMD's are half as many."""
comptime ANY_THREADS = 256
"""Threads that share a row in the kernels for any row."""
comptime COLUMN_LANES = 32
"""Neighbouring threads in a sum over rows; each owns as many columns as it loads at once."""
comptime COLUMN_ROWS = 8
"""Threads that share a column in the first stage of a sum over rows."""
comptime COLUMN_BLOCKS = 6
"""Blocks that one multiprocessor has at a time in the first stage of a sum over rows."""
comptime BACKWARD_BLOCKS = 2
"""Blocks that one multiprocessor has at a time in the backward kernel."""
comptime FINISH_ROWS = 16
"""Threads that share a column in the second stage of a sum over rows."""


def multiprocessors() -> Int:
    """How many blocks the GPU of this build runs side by side, at one a multiprocessor."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.sm_count
    else:
        return 1


def lanes_of_a_warp() -> Int:
    """Threads of a warp on the GPU of this build, for launch geometry; kernels ask WARP_SIZE."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.warp_size
    else:
        return 32


comptime vector_width[dtype: DType] = VECTOR_BYTES // size_of[Scalar[dtype]]()
"""Elements of a 16-byte vector."""


def is_aligned[dtype: DType](address: ImmPtr[dtype]) -> Bool:
    """Whether a tensor starts on a vector's boundary."""
    return Int(address) % VECTOR_BYTES == 0


# ---- Sums over the threads of a row -------------------------------------------------------------------------


@always_inline
def row_sum[
    dtype: DType, width: SIMDLength, //, slot: Int
](values: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Adds the values of the block_dim.x threads that share a row; each of them gets the sum.

    Always in the same order. Every thread of the block must call it. Between two calls with the same `slot` every
    thread must have called it with another one, so that nobody overwrites what a neighbour still reads.
    """
    var totals = values
    comptime for distance in range(5 if WARP_SIZE == 32 else 6):
        comptime for i in range(Int(width)):
            totals[i] += warp.shuffle_xor(totals[i], UInt32(1 << distance))
    var warps = block_dim.x // WARP_SIZE
    if warps == 1:
        return totals
    var partials = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](
        row_major[2, MAX_WARPS, Int(width)]()
    )
    var first = thread_idx.y * warps
    if thread_idx.x % WARP_SIZE == 0:
        comptime for i in range(Int(width)):
            partials[slot, first + thread_idx.x // WARP_SIZE, i] = totals[i]
    barrier()
    totals = 0
    for w in range(warps):
        comptime for i in range(Int(width)):
            totals[i] += partials[slot, first + w, i]
    return totals


# ---- Forward ------------------------------------------------------------------------------------------------


def layernorm_rows[
    dtype: DType
](
    ln_out: MutPtr[dtype],  # [rows, H]
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Statistics and LayerNorm of a row that is read once. block_dim.x threads own a row, block_dim.y rows a block.

    Thread t owns the vectors t, t + block_dim.x, ...: at most FORWARD_VECTORS. The variance is the mean of squared
    deviations; the mean of the deviations themselves corrects the rounding of the first mean.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    var row = block_idx.x * block_dim.y + thread_idx.y
    # A group behind the last row goes along, for the barriers, with a row of no columns.
    var columns = Int(hidden_dim) if row < Int(rows) else 0
    var x_row = input.unsafe_offset(row * Int(hidden_dim))
    var y_row = ln_out.unsafe_offset(row * Int(hidden_dim))
    var count = Scalar[accum](hidden_dim)

    var x = Array[SIMD[dtype, width], FORWARD_VECTORS](fill=0)
    var total = SIMD[accum, width](0)
    comptime for v in range(FORWARD_VECTORS):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            x[v] = x_row.unsafe_load[width=width, alignment=VECTOR_BYTES](h)
    comptime for v in range(FORWARD_VECTORS):
        total += x[v].cast[accum]()
    var first_mean = row_sum[slot=0](total.reduce_add()) / count

    var deviations = SIMD[accum, width](0)
    var squares = SIMD[accum, width](0)
    comptime for v in range(FORWARD_VECTORS):
        if (v * block_dim.x + thread_idx.x) * width < columns:
            var deviation = x[v].cast[accum]() - first_mean
            deviations += deviation
            squares += deviation * deviation
    var sums = row_sum[slot=1](SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add())) / count
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0 and columns > 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    comptime for v in range(FORWARD_VECTORS):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            var gamma = ln_weight.unsafe_load[width=width, alignment=VECTOR_BYTES](h).cast[accum]()
            var beta = ln_bias.unsafe_load[width=width, alignment=VECTOR_BYTES](h).cast[accum]()
            var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
            y_row.unsafe_store[alignment=VECTOR_BYTES](h, (x_hat * gamma + beta).cast[dtype]())


def layernorm_any[
    dtype: DType
](
    ln_out: MutPtr[dtype],  # [rows, H]
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Statistics and LayerNorm of a row of any length at any address. One block owns one row and reads it three times.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = input.unsafe_offset(row * H)
    var count = Scalar[accum](H)
    var total = Scalar[accum](0)
    for h in range(thread_idx.x, H, block_dim.x):
        total += x[unsafe_offset=h].cast[accum]()
    var first_mean = row_sum[slot=0](total) / count

    var sums = SIMD[accum, 2](0)
    for h in range(thread_idx.x, H, block_dim.x):
        var deviation = x[unsafe_offset=h].cast[accum]() - first_mean
        sums += SIMD[accum, 2](deviation, deviation * deviation)
    sums = row_sum[slot=1](sums) / count
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    for h in range(thread_idx.x, H, block_dim.x):
        var x_hat = (x[unsafe_offset=h].cast[accum]() - row_mean) * row_rstd
        var shifted = x_hat * ln_weight[unsafe_offset=h].cast[accum]() + ln_bias[unsafe_offset=h].cast[accum]()
        ln_out[unsafe_offset=row * H + h] = shifted.cast[dtype]()


def launch_layernorm_fast[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    ln_out: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """One launch: mean, rstd and the LayerNorm output of every row."""
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var vectors = ceildiv(H, width)
    var aligned = (
        H % width == 0 and is_aligned(input) and is_aligned(ln_weight) and is_aligned(ln_bias)
    ) and is_aligned(ln_out.as_imm())
    if aligned and vectors <= FORWARD_VECTORS * MAX_GROUP:
        var warps = ceildiv(vectors, FORWARD_VECTORS * lanes_of_a_warp())
        var group = warps * lanes_of_a_warp()
        var rows_of_a_block = max(1, min(rows, FORWARD_THREADS // group))
        launcher.launch[layernorm_rows[dtype]](
            "layernorm_rows",
            ln_out,
            mean,
            rstd,
            input,
            ln_weight,
            ln_bias,
            sizes.rows(),
            sizes.hidden_dim,
            eps,
            grid_dim=Dim(ceildiv(rows, rows_of_a_block)),
            block_dim=Dim(group, rows_of_a_block),
        )
    else:
        launcher.launch[layernorm_any[dtype]](
            "layernorm_any",
            ln_out,
            mean,
            rstd,
            input,
            ln_weight,
            ln_bias,
            sizes.rows(),
            sizes.hidden_dim,
            eps,
            grid_dim=Dim(rows),
            block_dim=Dim(ANY_THREADS),
        )


# ---- Backward -----------------------------------------------------------------------------------------------


def ln_backward_rows[
    dtype: DType, vectors: Int
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, H], computed again for dW
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta of the rows of one block
    dln: ImmPtr[dtype],  # [rows, H], the gradient at the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
):
    """Everything of the backward pass that a row of dln and a row of the input give, each read once.

    dx = rstd * (g - c2 - x_hat * c1) with g = dln * gamma, c1 = mean(g * x_hat), c2 = mean(g); ln_out; and the
    block's share of dgamma = sum of dln * x_hat and dbeta = sum of dln. block_dim.x threads own a row,
    block_dim.y rows a block, which goes on with the rows grid_dim.x * block_dim.y further. A thread keeps its
    columns' dgamma and dbeta in registers from its first row to its last, and asks for its next row before it works
    on this one.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    comptime Vectors = Array[SIMD[dtype, width], vectors]
    var H = Int(hidden_dim)
    var count = Scalar[accum](H)
    var stride = grid_dim.x * block_dim.y

    var gamma = Vectors(fill=0)
    var beta = Vectors(fill=0)
    comptime for v in range(vectors):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < H:
            gamma[v] = ln_weight.unsafe_load[width=width, alignment=VECTOR_BYTES](h)
            beta[v] = ln_bias.unsafe_load[width=width, alignment=VECTOR_BYTES](h)
    var dgamma = Array[SIMD[accum, width], vectors](fill=0)
    var dbeta = Array[SIMD[accum, width], vectors](fill=0)

    var row = block_idx.x * block_dim.y + thread_idx.y
    var x = Vectors(fill=0)
    var dy = Vectors(fill=0)
    var row_mean = Scalar[accum](0)
    var row_rstd = Scalar[accum](0)
    if row < Int(rows):
        load_row[width](x, input, row, H)
        load_row[width](dy, dln, row, H)
        row_mean = mean[unsafe_offset=row]
        row_rstd = rstd[unsafe_offset=row]

    # Every group of the block takes as many turns, whether it has a row in the last one or not: turns hold barriers.
    var turns = ceildiv(Int(rows) - block_idx.x * block_dim.y, stride)
    for turn in range(turns):
        var next_x = Vectors(fill=0)
        var next_dy = Vectors(fill=0)
        var next_mean = Scalar[accum](0)
        var next_rstd = Scalar[accum](0)
        var next_row = row + stride
        if next_row < Int(rows):
            load_row[width](next_x, input, next_row, H)
            load_row[width](next_dy, dln, next_row, H)
            next_mean = mean[unsafe_offset=next_row]
            next_rstd = rstd[unsafe_offset=next_row]

        # Behind the last column and the last row dln is 0, and adds nothing to any sum.
        var sum_g_x_hat = SIMD[accum, width](0)
        var sum_g = SIMD[accum, width](0)
        comptime for v in range(vectors):
            var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
            var d = dy[v].cast[accum]()
            var g = d * gamma[v].cast[accum]()
            dgamma[v] += d * x_hat
            dbeta[v] += d
            sum_g_x_hat += g * x_hat
            sum_g += g
        var sums = SIMD[accum, 2](sum_g_x_hat.reduce_add(), sum_g.reduce_add())
        var c = (row_sum[slot=0](sums) if turn % 2 == 0 else row_sum[slot=1](sums)) / count

        if row < Int(rows):
            comptime for v in range(vectors):
                var h = (v * block_dim.x + thread_idx.x) * width
                if h < H:
                    var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
                    var gamma_v = gamma[v].cast[accum]()
                    var g = dy[v].cast[accum]() * gamma_v
                    var dx = row_rstd * (g - c[1] - x_hat * c[0])
                    var y = x_hat * gamma_v + beta[v].cast[accum]()
                    grad_input.unsafe_store[alignment=VECTOR_BYTES](row * H + h, dx.cast[dtype]())
                    ln_out.unsafe_store[alignment=VECTOR_BYTES](row * H + h, y.cast[dtype]())
        x = next_x^
        dy = next_dy^
        row_mean = next_mean
        row_rstd = next_rstd
        row = next_row

    add_groups(dgamma, dbeta)
    if thread_idx.y == 0:
        var mine = partials.unsafe_offset(2 * block_idx.x * H)
        comptime for v in range(vectors):
            var h = (v * block_dim.x + thread_idx.x) * width
            if h < H:
                mine.unsafe_store[alignment=VECTOR_BYTES](h, dgamma[v])
                mine.unsafe_store[alignment=VECTOR_BYTES](H + h, dbeta[v])


@always_inline
def load_row[
    dtype: DType, vectors: Int, //, width: Int
](mut row_vectors: Array[SIMD[dtype, width], vectors], source: ImmPtr[dtype], row: Int, columns: Int):
    """The vectors of a row that this thread owns; those behind the last column stay as they are."""
    comptime for v in range(vectors):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            row_vectors[v] = source.unsafe_load[width=width, alignment=VECTOR_BYTES](row * columns + h)


@always_inline
def add_groups[
    dtype: DType, width: SIMDLength, vectors: Int, //
](mut dgamma: Array[SIMD[dtype, width], vectors], mut dbeta: Array[SIMD[dtype, width], vectors]):
    """Adds the sums of the groups of a block, halving the number of groups each time; group 0 ends with the total.

    Every thread of the block must call it.
    """
    # At most half of the threads hand theirs over at a time; block_dim.y > 1 leaves a thread one vector.
    comptime half = BACKWARD_THREADS // 2
    var handed = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](
        row_major[half, 2 * Int(width)]()
    )
    var groups = block_dim.y
    while groups > 1:
        var kept = ceildiv(groups, 2)
        if kept <= thread_idx.y < groups:
            var place = (thread_idx.y - kept) * block_dim.x + thread_idx.x
            comptime for i in range(Int(width)):
                handed[place, i] = dgamma[0][i]
                handed[place, Int(width) + i] = dbeta[0][i]
        barrier()
        if thread_idx.y < groups - kept:
            var place = thread_idx.y * block_dim.x + thread_idx.x
            comptime for i in range(Int(width)):
                dgamma[0][i] += handed[place, i]
                dbeta[0][i] += handed[place, Int(width) + i]
        barrier()
        groups = kept


def ln_backward_any[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, H], computed again for dW
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    hidden_dim: Int32,
):
    """dx and ln_out of a row of any length at any address. One block owns one row and reads it twice."""
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var row_mean = mean[unsafe_offset=row]
    var row_rstd = rstd[unsafe_offset=row]
    var sums = SIMD[accum, 2](0)
    for h in range(thread_idx.x, H, block_dim.x):
        var x_hat = (input[unsafe_offset=row * H + h].cast[accum]() - row_mean) * row_rstd
        var g = dln[unsafe_offset=row * H + h].cast[accum]() * ln_weight[unsafe_offset=h].cast[accum]()
        sums += SIMD[accum, 2](g * x_hat, g)
    var c = row_sum[slot=0](sums) / Scalar[accum](H)

    for h in range(thread_idx.x, H, block_dim.x):
        var x_hat = (input[unsafe_offset=row * H + h].cast[accum]() - row_mean) * row_rstd
        var gamma = ln_weight[unsafe_offset=h].cast[accum]()
        var g = dln[unsafe_offset=row * H + h].cast[accum]() * gamma
        grad_input[unsafe_offset=row * H + h] = (row_rstd * (g - c[1] - x_hat * c[0])).cast[dtype]()
        ln_out[unsafe_offset=row * H + h] = (x_hat * gamma + ln_bias[unsafe_offset=h].cast[accum]()).cast[dtype]()


# ---- Sums over rows, in two stages --------------------------------------------------------------------------


def column_partials[
    dtype: DType, width: Int, with_x_hat: Bool
](
    partials: MutPtr[accum_type[dtype]],  # [slices, columns], or [slices, 2, columns] with_x_hat
    dy: ImmPtr[dtype],  # [rows, columns]
    input: ImmPtr[dtype],  # [rows, columns], read only with_x_hat, as mean and rstd
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    columns: Int32,
    rows_of_a_slice: Int32,
):
    """First stage of a sum over rows: block (i, j) sums the rows of slice j over COLUMN_LANES * width columns.

    The sum is that of dy, as for db; with_x_hat it is those of dy * x_hat and of dy, as for dgamma and dbeta.
    """
    comptime accum = accum_type[dtype]
    comptime sums_of_a_column = 2 if with_x_hat else 1
    comptime alignment = width * size_of[Scalar[dtype]]()
    var N = Int(columns)
    var column = (block_idx.x * COLUMN_LANES + thread_idx.x) * width
    var first = block_idx.y * Int(rows_of_a_slice)
    var end = min(Int(rows), first + Int(rows_of_a_slice))

    var sums = Array[SIMD[accum, width], sums_of_a_column](fill=0)
    if column < N:
        for row in range(first + thread_idx.y, end, COLUMN_ROWS):
            var d = dy.unsafe_load[width=width, alignment=alignment](row * N + column).cast[accum]()
            comptime if with_x_hat:
                var x = input.unsafe_load[width=width, alignment=alignment](row * N + column).cast[accum]()
                sums[0] += d * ((x - mean[unsafe_offset=row]) * rstd[unsafe_offset=row])
            sums[sums_of_a_column - 1] += d

    var shares = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[sums_of_a_column * COLUMN_ROWS, COLUMN_LANES * width]()
    )
    comptime for s in range(sums_of_a_column):
        comptime for i in range(width):
            shares[s * COLUMN_ROWS + thread_idx.y, thread_idx.x * width + i] = sums[s][i]
    barrier()
    var thread = thread_idx.y * COLUMN_LANES + thread_idx.x
    comptime tile = COLUMN_LANES * width
    for c in range(thread, tile, COLUMN_LANES * COLUMN_ROWS):
        if block_idx.x * tile + c < N:
            comptime for s in range(sums_of_a_column):
                var total = Scalar[accum](0)
                comptime for lane in range(COLUMN_ROWS):
                    total += shares[s * COLUMN_ROWS + lane, c]
                var place = (block_idx.y * sums_of_a_column + s) * N + block_idx.x * tile + c
                partials[unsafe_offset=place] = total


def finish_sums[
    dtype: DType
](
    sums: MutPtr[dtype],  # [columns]
    more_sums: MutPtr[dtype],  # [columns], written where a column has two sums
    partials: ImmPtr[accum_type[dtype]],  # [slices, columns of all sums]
    slices: Int32,
    columns: Int32,
    sums_of_a_column: Int32,
):
    """Second stage of a sum over rows: adds the slices of every column, for one sum or two."""
    comptime accum = accum_type[dtype]
    var N = Int(columns)
    var stride = N * Int(sums_of_a_column)
    var column = block_idx.x * COLUMN_LANES + thread_idx.x
    var total = Scalar[accum](0)
    if column < stride:
        for slice in range(thread_idx.y, Int(slices), FINISH_ROWS):
            total += partials[unsafe_offset=slice * stride + column]
    var shares = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[FINISH_ROWS, COLUMN_LANES]()
    )
    shares[thread_idx.y, thread_idx.x] = total
    barrier()
    if thread_idx.y == 0 and column < stride:
        total = 0
        comptime for lane in range(FINISH_ROWS):
            total += shares[lane, thread_idx.x]
        if column < N:
            sums[unsafe_offset=column] = total.cast[dtype]()
        else:
            more_sums[unsafe_offset=column - N] = total.cast[dtype]()


# ---- How they are launched ----------------------------------------------------------------------------------


def launch_finish_sums[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    name: StaticString,
    sums: MutPtr[dtype],
    more_sums: MutPtr[dtype],
    partials: ImmPtr[accum_type[dtype]],
    slices: Int,
    columns: Int,
    sums_of_a_column: Int,
) raises:
    """One launch: adds the partial sums of all slices."""
    launcher.launch[finish_sums[dtype]](
        name,
        sums,
        more_sums,
        partials,
        Int32(slices),
        Int32(columns),
        Int32(sums_of_a_column),
        grid_dim=Dim(ceildiv(columns * sums_of_a_column, COLUMN_LANES)),
        block_dim=Dim(COLUMN_LANES, FINISH_ROWS),
    )


def launch_column_sums[
    L: Launcher, //, dtype: DType, width: Int, with_x_hat: Bool
](
    mut launcher: L,
    name: StaticString,
    sums: MutPtr[dtype],
    more_sums: MutPtr[dtype],
    dy: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    rows: Int,
    columns: Int,
) raises:
    """Two launches: the sums over rows of dy into `sums`; with_x_hat of dy * x_hat, and of dy into `more_sums`."""
    comptime sums_of_a_column = 2 if with_x_hat else 1
    var tiles = ceildiv(columns, COLUMN_LANES * width)
    # Slices enough to fill the GPU, none so thin that its partial sum costs as much as its rows.
    var wanted = ceildiv(COLUMN_BLOCKS * multiprocessors(), tiles)
    var rows_of_a_slice = max(ceildiv(rows, wanted), 4 * COLUMN_ROWS)
    var slices = ceildiv(rows, rows_of_a_slice)
    var partials = launcher.workspace[accum_type[dtype]]("column_partials", slices * columns * sums_of_a_column)
    launcher.launch[column_partials[dtype, width, with_x_hat]](
        name,
        partials,
        dy,
        input,
        mean,
        rstd,
        Int32(rows),
        Int32(columns),
        Int32(rows_of_a_slice),
        grid_dim=Dim(tiles, slices),
        block_dim=Dim(COLUMN_LANES, COLUMN_ROWS),
    )
    launch_finish_sums[dtype](
        launcher, name, sums, more_sums, partials.as_imm(), slices, columns, sums_of_a_column
    )


def launch_bias_gradient[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    statistics: ImmPtr[accum_type[dtype]],
    sizes: Sizes,
) raises:
    """Two launches: db = sum over rows of grad_output. `statistics` is any address: none are read."""
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var O = Int(sizes.output_dim)
    if O % width == 0 and is_aligned(grad_output):
        launch_column_sums[dtype, width, False](
            launcher,
            "bias_gradient",
            grad_bias,
            grad_bias,
            grad_output,
            grad_output,
            statistics,
            statistics,
            rows,
            O,
        )
    else:
        launch_column_sums[dtype, 1, False](
            launcher,
            "bias_gradient",
            grad_bias,
            grad_bias,
            grad_output,
            grad_output,
            statistics,
            statistics,
            rows,
            O,
        )


def launch_ln_backward_rows[
    L: Launcher, //, dtype: DType, vectors: Int
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Two launches, for rows of aligned vectors of which a thread takes at most `vectors`."""
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var group = ceildiv(H, vector_width[dtype] * vectors * lanes_of_a_warp()) * lanes_of_a_warp()
    var groups = max(1, min(rows, BACKWARD_THREADS // group))
    var blocks = min(ceildiv(rows, groups), BACKWARD_BLOCKS * multiprocessors())
    var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", blocks * 2 * H)
    launcher.launch[ln_backward_rows[dtype, vectors]](
        "ln_backward_rows",
        grad_input,
        ln_out,
        partials,
        dln,
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes.rows(),
        sizes.hidden_dim,
        grid_dim=Dim(blocks),
        block_dim=Dim(group, groups),
    )
    launch_finish_sums[dtype](
        launcher, "ln_parameter_gradients", grad_ln_weight, grad_ln_bias, partials.as_imm(), blocks, H, 2
    )


def launch_ln_backward_fast[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Two or three launches: dx, dgamma, dbeta and ln_out from dln."""
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var aligned = H % width == 0 and is_aligned(dln) and is_aligned(input) and is_aligned(ln_weight)
    aligned = aligned and is_aligned(ln_bias) and is_aligned(grad_input.as_imm()) and is_aligned(ln_out.as_imm())
    if aligned and H <= width * BACKWARD_THREADS:
        launch_ln_backward_rows[dtype, 1](
            launcher,
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            ln_out,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
        )
        return
    if aligned and H <= 2 * width * BACKWARD_THREADS:
        launch_ln_backward_rows[dtype, 2](
            launcher,
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            ln_out,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
        )
        return
    launcher.launch[ln_backward_any[dtype]](
        "ln_backward_any",
        grad_input,
        ln_out,
        dln,
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes.hidden_dim,
        grid_dim=Dim(rows),
        block_dim=Dim(ANY_THREADS),
    )
    launch_column_sums[dtype, 1, True](
        launcher, "ln_parameter_gradients", grad_ln_weight, grad_ln_bias, dln, input, mean, rstd, rows, H
    )
