"""LayerNorm backward: the row kernels, which compute dx, ln_out, and partial sums of dgamma and dbeta.

`ln_backward_rows` keeps a row in registers. `ln_backward_wide`, for Hopper, passes rows that are too long for
registers, or not aligned, through shared memory. `ln_backward_elements` loads rows that are not a whole
number of vectors element by element. `ln_backward_any` handles all other rows, and reads a row again for
every sum. Each block writes one partial sum over its rows, and `sums.mojo` adds the partial sums without
atomics, so every run gives the same bits.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.memory import external_memory

from .rows import (
    DX,
    LN_OUT,
    SUMS,
    WIDE_VECTORS,
    copy_constants,
    copy_elements,
    fetch_row,
    fill_row,
    zero_tail,
    load_columns,
    load_elements,
    normalize,
    store_elements,
    store_row,
    wait_for_row,
    wide_row_elements,
    wide_slots,
)
from shared.common import (
    ImmPtr,
    MutPtr,
    accum_type,
    rounded_product,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from common.row_reductions import (
    VECTOR_BYTES,
    load_shifted,
    copy_vector,
    commit_copies,
    load_vector,
    row_sum,
    store_vector,
    vector_width,
    wait_for_copies,
)

comptime BACKWARD_THREADS = 512
"""Maximum threads per block of `ln_backward_rows`."""
comptime BACKWARD_STAGES = 2
"""Rows per group of threads that are in shared memory or being copied to it."""
comptime ELEMENTS_IN_FLIGHT = 8
"""Loads in flight per thread of `ln_backward_elements`."""
comptime ELEMENT_THREADS = 1024
"""Threads per block of `ln_backward_elements`."""
comptime WIDE_THREADS = 512
"""Threads per block of `ln_backward_wide`; its column sums fill the registers."""


def backward_blocks(vectors: Int) -> Int:
    """Return the blocks per multiprocessor of `ln_backward_rows`, which bounds the registers per thread."""
    return 2 if vectors == 1 else 1


@__name("ln_backward_rows")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BACKWARD_THREADS)),
    `nvvm.minctasm`=SIMDLength(backward_blocks(vectors)),
)
def ln_backward_rows[
    dtype: DType, x_dtype: DType, vectors: Int, lanes: Int, early: Bool
](
    grad_input: MutPtr[x_dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, H], recomputed for dW
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta over the rows of each block
    dln: ImmPtr[dtype],  # [rows, H], the gradient of the LayerNorm output
    input: ImmPtr[x_dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    parts: Int32,  # sum of DX, LN_OUT and SUMS
):
    """Compute everything in the backward pass that needs rows of dln and the input, reading each row once.

    dx = rstd * (g - c2 - x_hat * c1) with g = dln * gamma, c1 = mean(g * x_hat), c2 = mean(g); ln_out; and
    the block's partial sums of dgamma = sum of dln * x_hat and dbeta = sum of dln. block_dim.x threads share
    a row; a block processes block_dim.y rows at a time, with a stride of grid_dim.x * block_dim.y rows. A
    thread keeps dgamma and dbeta of its columns in registers for all of its rows. It copies the vectors of
    its next row to its own slots in shared memory while it processes the current one. dx may overwrite dln if
    both have one dtype: each element is written by the thread that has read it.

    Parameters:
        dtype: The dtype of dln and ln_out.
        x_dtype: The dtype of the input, gamma, beta and dx.
        vectors: Vectors per thread in each of the two tensors.
        lanes: block_dim.x if less than the warp size, else 0.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    var H = Int(hidden_dim)
    var scale = 1 / Scalar[accum](H)
    var stride = grid_dim.x * block_dim.y
    var column = thread_idx.x * width
    var next_column = block_dim.x * width

    # Shared memory: gamma and beta in the accumulation type, then the input and dln by stage and thread.
    var memory = external_memory[Scalar[accum], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var gamma = memory.unsafe_offset(column)
    var beta = memory.unsafe_offset(vectors * next_column + column)
    var stage_elements = vectors * next_column * block_dim.y
    var mine = thread_idx.y * vectors * next_column + column
    var slots = memory.unsafe_offset(2 * vectors * next_column).unsafe_bitcast[Scalar[x_dtype]]()
    var x_slots = slots.unsafe_offset(mine)
    var d_slots = slots.unsafe_offset(BACKWARD_STAGES * stage_elements).unsafe_bitcast[Scalar[dtype]]()
    d_slots = d_slots.unsafe_offset(mine)

    @__parameter
    @always_inline
    def fetch(row: Int, stage: Int):
        if row < Int(rows):
            var x_slot = x_slots.unsafe_offset(stage * stage_elements)
            var d_slot = d_slots.unsafe_offset(stage * stage_elements)
            var start = row * H + column
            comptime for v in range(vectors):
                var offset = v * next_column
                if column + offset < H:
                    copy_elements[width](x_slot.unsafe_offset(offset), input.unsafe_offset(start + offset))
                    copy_elements[width](d_slot.unsafe_offset(offset), dln.unsafe_offset(start + offset))
        commit_copies()

    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    if thread_idx.y == 0:
        copy_constants[vectors, width](gamma, ln_weight, H)
        copy_constants[vectors, width](beta, ln_bias, H)
    barrier()
    var row = block_idx.x * block_dim.y + thread_idx.y
    comptime for stage in range(BACKWARD_STAGES - 1):
        fetch(row + stage * stride, stage)
    var row_mean = Scalar[accum](0)
    var row_rstd = Scalar[accum](0)
    if row < Int(rows):
        row_mean = mean[unsafe_offset=row]
        row_rstd = rstd[unsafe_offset=row]
    var dgamma = Array[SIMD[accum, width], vectors](fill=0)
    var dbeta = Array[SIMD[accum, width], vectors](fill=0)

    # Because of the barriers, all groups of the block need the same number of iterations, even if some have
    # no row in the last one.
    var iterations = ceildiv(Int(rows) - block_idx.x * block_dim.y, stride)
    var stage = 0
    for iteration in range(iterations):
        fetch(row + (BACKWARD_STAGES - 1) * stride, stage - 1 if stage > 0 else BACKWARD_STAGES - 1)
        var next_row = row + stride
        var next_mean = Scalar[accum](0)
        var next_rstd = Scalar[accum](0)
        if next_row < Int(rows):
            next_mean = mean[unsafe_offset=next_row]
            next_rstd = rstd[unsafe_offset=next_row]
        wait_for_copies[BACKWARD_STAGES - 1]()
        var x_slot = x_slots.unsafe_offset(stage * stage_elements)
        var d_slot = d_slots.unsafe_offset(stage * stage_elements)
        # A row past the last one has no columns.
        var columns = H if row < Int(rows) else 0

        var x_hat = Array[SIMD[accum, width], vectors](fill=0)
        var g = Array[SIMD[accum, width], vectors](fill=0)
        var sums = SIMD[accum, 2](0)
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                var x = load_vector[width, accum](x_slot, v * next_column)
                x_hat[v] = normalize[x_dtype](x, row_mean, row_rstd)
                var d = load_vector[width, accum](d_slot, v * next_column)
                g[v] = d * load_vector[width, accum](gamma, v * next_column)
                dgamma[v] = d.fma(x_hat[v], dgamma[v])
                dbeta[v] += d
                sums += SIMD[accum, 2]((g[v] * x_hat[v]).reduce_add(), g[v].reduce_add())
        sums = row_sum[lanes](sums, iteration % 2) * (scale * row_rstd)

        # dx = rstd * (g - c2 - x_hat * c1); `sums` holds rstd * c1 and rstd * c2.
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                var offset = row * H + column + v * next_column
                var dx = g[v].fma(row_rstd, x_hat[v].fma(-sums[0], -sums[1]))
                if parts & DX != 0:
                    grad_input.unsafe_store[alignment=VECTOR_BYTES](offset, dx.cast[x_dtype]())
                var y = x_hat[v].fma(
                    load_vector[width, accum](gamma, v * next_column),
                    load_vector[width, accum](beta, v * next_column),
                )
                if parts & LN_OUT != 0:
                    ln_out.unsafe_store[alignment=VECTOR_BYTES](offset, y.cast[dtype]())
        row_mean = next_mean
        row_rstd = next_rstd
        row = next_row
        stage = stage + 1 if stage < BACKWARD_STAGES - 1 else 0

    if parts & SUMS == 0:
        return
    # The slots are free now; reuse them to add the groups' sums.
    add_groups(memory.unsafe_offset(2 * vectors * next_column), dgamma, dbeta)
    if thread_idx.y == 0:
        var mine = partials.unsafe_offset(2 * block_idx.x * H)
        comptime for v in range(vectors):
            var h = column + v * next_column
            if h < H:
                mine.unsafe_store[alignment=VECTOR_BYTES](h, dgamma[v])
                mine.unsafe_store[alignment=VECTOR_BYTES](H + h, dbeta[v])


@always_inline
def add_groups[
    dtype: DType, width: SIMDLength, vectors: Int, //
](
    shared: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED],
    mut dgamma: Array[SIMD[dtype, width], vectors],
    mut dbeta: Array[SIMD[dtype, width], vectors],
):
    """Add the sums of a block's groups, halving the number of groups each time; group 0 ends with the total.

    `shared` holds the sums of half of the groups. Every thread of the block must call it.
    """
    comptime quad = VECTOR_BYTES // size_of[Scalar[dtype]]()
    comptime quads = max(1, Int(width) // quad)
    comptime part = Int(width) // quads
    var groups = block_dim.y
    while groups > 1:
        var upper_half = ceildiv(groups, 2)
        var threads = upper_half * block_dim.x
        barrier()
        if upper_half <= thread_idx.y < groups:
            var thread = (thread_idx.y - upper_half) * block_dim.x + thread_idx.x
            comptime for v in range(vectors):
                comptime for q in range(quads):
                    var offset = ((2 * v * quads + q) * threads + thread) * part
                    shared.unsafe_store[alignment=part * size_of[Scalar[dtype]]()](
                        offset, dgamma[v].slice[part, offset=q * part]()
                    )
                    shared.unsafe_store[alignment=part * size_of[Scalar[dtype]]()](
                        offset + quads * threads * part, dbeta[v].slice[part, offset=q * part]()
                    )
        barrier()
        if thread_idx.y < groups - upper_half:
            var thread = thread_idx.y * block_dim.x + thread_idx.x
            comptime for v in range(vectors):
                comptime for q in range(quads):
                    var offset = ((2 * v * quads + q) * threads + thread) * part
                    var other_dgamma = shared.unsafe_load[
                        width=part, alignment=part * size_of[Scalar[dtype]]()
                    ](offset)
                    var other_dbeta = shared.unsafe_load[
                        width=part, alignment=part * size_of[Scalar[dtype]]()
                    ](offset + quads * threads * part)
                    comptime for e in range(part):
                        dgamma[v][q * part + e] += other_dgamma[e]
                        dbeta[v][q * part + e] += other_dbeta[e]
        groups = upper_half


@__name("ln_backward_wide")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WIDE_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def ln_backward_wide[
    dtype: DType, group: Int, shifted: Bool, early: Bool
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], recomputed for dW; zeros from column H on
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta over the rows of each block
    dln: ImmPtr[dtype],  # [rows, stride], the gradient of the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    row_stride: Int32,
    parts: Int32,  # sum of DX, LN_OUT and SUMS; not LN_OUT alone
):
    """Compute the same as `ln_backward_rows`, with up to WIDE_VECTORS vectors per thread. The column sums
    fill a thread's registers, so x_hat and g are computed from shared memory twice, before and after the row
    sums.

    Parameters:
        dtype: The dtype of the rows.
        group: Threads that share a row: block_dim.x, known at compile time so that address offsets are
            constants.
        shifted: Whether rows of the input and dx may be unaligned, in aligned tensors. Then the aligned
            vectors that cover a row are copied, and dx passes through shared memory.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    comptime vectors = WIDE_VECTORS
    comptime step = group * width
    comptime row_elements = wide_row_elements[dtype](group)
    var H = Int(hidden_dim)
    var pitch = Int(row_stride)
    var scale = 1 / Scalar[accum](H)
    var stride = grid_dim.x * block_dim.y
    var column = thread_idx.x * width
    # Shared memory: `wide_slots` rows per group of threads, then gamma and beta.
    comptime group_elements = wide_slots(shifted) * row_elements
    var memory = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var slots = memory.unsafe_offset(thread_idx.y * group_elements)
    var gamma = memory.unsafe_offset(block_dim.y * group_elements + column)
    var beta = gamma.unsafe_offset(vectors * step)

    @__parameter
    @always_inline
    def fetch(row: Int, stage: Int):
        if row < Int(rows):
            var slot = slots.unsafe_offset(2 * stage * row_elements)
            var x_row = input.unsafe_offset(row * H + column)
            var d_row = dln.unsafe_offset(row * pitch + column)
            comptime if shifted:
                fetch_row[step](slot, input, row, H, Int(rows))
            slot = slot.unsafe_offset(column)
            var remaining = Int32(H - column)
            comptime for v in range(vectors):
                if Int32(v * step) < remaining:
                    comptime if not shifted:
                        copy_vector(slot.unsafe_offset(v * step), x_row.unsafe_offset(v * step))
                    copy_vector(slot.unsafe_offset(row_elements + v * step), d_row.unsafe_offset(v * step))
        commit_copies()

    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var row = block_idx.x * block_dim.y + thread_idx.y
    fetch(row, 0)
    if thread_idx.y == 0:
        comptime for v in range(vectors):
            var remaining = Int32(H - column - v * step)
            if remaining > 0:
                store_vector(gamma, v * step, load_columns[dtype](ln_weight, column + v * step, remaining))
                store_vector(beta, v * step, load_columns[dtype](ln_bias, column + v * step, remaining))
    var row_mean = Scalar[accum](0)
    var row_rstd = Scalar[accum](0)
    if row < Int(rows):
        row_mean = mean[unsafe_offset=row]
        row_rstd = rstd[unsafe_offset=row]
    var dgamma = Array[SIMD[accum, width], vectors](fill=0)
    var dbeta = Array[SIMD[accum, width], vectors](fill=0)
    barrier()

    # Because of the barriers, all groups of the block need the same number of iterations, even if some have
    # no row in the last one.
    var iterations = ceildiv(Int(rows) - block_idx.x * block_dim.y, stride)
    for iteration in range(iterations):
        # All reads of the previous row are done; its dx is stored from a separate buffer.
        fetch(row + stride, (iteration + 1) % 2)
        var next_mean = Scalar[accum](0)
        var next_rstd = Scalar[accum](0)
        if row + stride < Int(rows):
            next_mean = mean[unsafe_offset=row + stride]
            next_rstd = rstd[unsafe_offset=row + stride]
        wait_for_copies[1]()
        comptime if shifted:
            wait_for_row[group]()
        var x_row = slots.unsafe_offset(iteration % 2 * 2 * row_elements + column)
        var d_row = x_row.unsafe_offset(row_elements)
        var shift = Int32(row * H) & Int32(width - 1)
        # A row past the last one has no columns.
        var remaining = Int32((H if row < Int(rows) else 0) - column)

        # For unaligned rows, the buffer of dx holds the vectors of x until dx is computed.
        var x_buffer = slots.unsafe_offset(4 * row_elements + column) if shifted else x_row

        @__parameter
        @always_inline
        def compute_x_hat[v: Int](x: SIMD[dtype, width]) -> SIMD[accum, width]:
            var x_hat = normalize[dtype](x.cast[accum](), row_mean, row_rstd)
            return zero_tail(x_hat, remaining - Int32(v * step)) if shifted else x_hat

        var sums = SIMD[accum, 2](0)
        comptime for v in range(vectors):
            if Int32(v * step) < remaining:
                var x: SIMD[dtype, width]
                var d = load_vector[width, accum](d_row, v * step)
                comptime if shifted:
                    x = load_shifted(x_row, v * step, shift)
                    store_vector(x_buffer, v * step, x)
                    d = zero_tail(d, remaining - Int32(v * step))
                else:
                    x = load_vector[width, dtype](x_row, v * step)
                var x_hat = compute_x_hat[v](x)
                dgamma[v] = d.fma(x_hat, dgamma[v])
                dbeta[v] += d
                var g = d * load_vector[width, accum](gamma, v * step)
                sums += SIMD[accum, 2]((g * x_hat).reduce_add(), g.reduce_add())
        sums = row_sum(sums, iteration % 2) * (scale * row_rstd)

        # dx = rstd * (g - c2 - x_hat * c1); `sums` holds rstd * c1 and rstd * c2. Past the last column x_hat,
        # gamma and beta are 0, and so is ln_out.
        comptime for v in range(vectors):
            if Int32(v * step) < remaining:
                var x_hat = compute_x_hat[v](load_vector[width, dtype](x_buffer, v * step))
                var scaled = load_vector[width, accum](gamma, v * step)
                if parts & LN_OUT != 0:
                    var y = x_hat.fma(scaled, load_vector[width, accum](beta, v * step)).cast[dtype]()
                    ln_out.unsafe_offset(row * pitch + column).unsafe_store[alignment=VECTOR_BYTES](
                        v * step, y
                    )
                if parts & DX != 0:
                    var g = load_vector[width, accum](d_row, v * step) * scaled
                    var dx = g.fma(row_rstd, x_hat.fma(-sums[0], -sums[1])).cast[dtype]()
                    comptime if shifted:
                        store_vector(x_buffer, v * step, dx)
                    else:
                        grad_input.unsafe_offset(row * H + column).unsafe_store[alignment=VECTOR_BYTES](
                            v * step, dx
                        )
        if parts & LN_OUT != 0 and row < Int(rows):
            fill_row[step](ln_out, row, H, pitch)
        comptime if shifted:
            wait_for_row[group]()
            if parts & DX != 0 and row < Int(rows):
                store_row[step](grad_input, slots.unsafe_offset(4 * row_elements), row, H)
        row_mean = next_mean
        row_rstd = next_rstd
        row += stride

    if parts & SUMS == 0:
        return
    # The slots are free now; reuse them for the groups' sums.
    barrier()
    var group_sums = slots.unsafe_bitcast[Scalar[accum]]().unsafe_offset(column)
    comptime for v in range(vectors):
        if column + v * step < H:
            store_vector(group_sums, v * step, dgamma[v])
            store_vector(group_sums, row_elements + v * step, dbeta[v])
    barrier()
    store_sums(partials, memory.unsafe_bitcast[Scalar[accum]](), group_elements // 2, row_elements, H)


@always_inline
def store_sums[
    accum: DType, //
](
    partials: MutPtr[accum],  # [blocks, 2, H]
    shared: Pointer[Scalar[accum], _, address_space=AddressSpace.SHARED],
    group_stride: Int,
    dbeta_offset: Int,
    H: Int,
):
    """Add the sums that a block's groups stored in shared memory. Each group stored dgamma, then dbeta
    `dbeta_offset` elements further; consecutive groups are `group_stride` elements apart.
    """
    var thread = thread_idx.y * block_dim.x + thread_idx.x
    for h in range(thread, H, block_dim.x * block_dim.y):
        var total = SIMD[accum, 2](0)
        for group in range(block_dim.y):
            var sums = shared.unsafe_offset(group * group_stride + h)
            total += SIMD[accum, 2](sums[], sums[unsafe_offset=dbeta_offset])
        partials[unsafe_offset=2 * block_idx.x * H + h] = total[0]
        partials[unsafe_offset=(2 * block_idx.x + 1) * H + h] = total[1]


@__name("ln_backward_elements")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(ELEMENT_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def ln_backward_elements[
    dtype: DType, x_dtype: DType, group: Int, early: Bool
](
    grad_input: MutPtr[x_dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], recomputed for dW; zeros from column H on
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta over the rows of each block
    dln: ImmPtr[dtype],  # [rows, stride], the gradient of the LayerNorm output
    input: ImmPtr[x_dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # sum of DX, LN_OUT and SUMS
):
    """Compute the same as `ln_backward_rows`, for rows at any address.

    A thread owns the same columns in every row of its group, and keeps their dgamma and dbeta in its own part
    of shared memory. It reads a row twice, for the sums and for the results; the second read hits the cache.

    Parameters:
        dtype: The dtype of dln and ln_out.
        x_dtype: The dtype of the input, gamma, beta and dx.
        group: Threads that share a row: block_dim.x, known at compile time so that address offsets are
            constants.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime unroll = ELEMENTS_IN_FLIGHT
    var H = Int(hidden_dim)
    var step = grid_dim.x * block_dim.y
    var needs_dln = parts & (DX | SUMS) != 0
    var memory = external_memory[Scalar[accum], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var dgamma = memory.unsafe_offset(thread_idx.y * 2 * H)
    var dbeta = dgamma.unsafe_offset(H)
    for h in range(thread_idx.x, H, group):
        dgamma[unsafe_offset=h] = 0
        dbeta[unsafe_offset=h] = 0
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()

    var row = block_idx.x * block_dim.y + thread_idx.y
    # Because of the barriers, all groups of the block need the same number of iterations, even if some have
    # no row in the last one.
    var iterations = ceildiv(Int(rows) - block_idx.x * block_dim.y, step)
    for iteration in range(iterations):
        var columns = H if row < Int(rows) else 0
        var row_mean = Scalar[accum](0)
        var row_rstd = Scalar[accum](0)
        if columns > 0:
            row_mean = mean[unsafe_offset=row]
            row_rstd = rstd[unsafe_offset=row]
        var x_row = input.unsafe_offset(row * H)
        var d_row = dln.unsafe_offset(row * Int(stride))
        var c = SIMD[accum, 2](0)
        if needs_dln:
            for first in range(thread_idx.x, columns, unroll * group):
                var remaining = Int32(columns - first)
                var x = load_unrolled[unroll, group](x_row.unsafe_offset(first), remaining)
                var d = load_unrolled[unroll, group](d_row.unsafe_offset(first), remaining)
                var gamma = ln_weight.unsafe_offset(first)
                comptime for v in range(unroll):
                    comptime h = v * group
                    if Int32(h) < remaining:
                        var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
                        var gradient = d[v].cast[accum]()
                        var g = rounded_product(gradient, gamma[unsafe_offset=h].cast[accum]())
                        c += SIMD[accum, 2](g * x_hat, g)
                        var sum = dgamma[unsafe_offset=first + h]
                        dgamma[unsafe_offset=first + h] = gradient.fma(x_hat, sum)
                        dbeta[unsafe_offset=first + h] += gradient
            c = row_sum(c, iteration % 2) / Scalar[accum](H)

        var y_row = ln_out.unsafe_offset(row * Int(stride))
        for first in range(thread_idx.x, columns, unroll * group):
            var remaining = Int32(columns - first)
            var x = load_unrolled[unroll, group](x_row.unsafe_offset(first), remaining)
            # If dx is not requested, dln may be an invalid address.
            var d = load_unrolled[unroll, group](
                d_row.unsafe_offset(first), remaining if parts & DX != 0 else 0
            )
            var dx_row = grad_input.unsafe_offset(row * H + first)
            var y_target = y_row.unsafe_offset(first)
            comptime for v in range(unroll):
                comptime h = v * group
                if Int32(h) < remaining:
                    var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
                    var gamma = ln_weight[unsafe_offset=first + h].cast[accum]()
                    if parts & DX != 0:
                        var g = rounded_product(d[v].cast[accum](), gamma)
                        var dx = row_rstd * (g - c[1] - x_hat * c[0])
                        dx_row[unsafe_offset=h] = dx.cast[x_dtype]()
                    if parts & LN_OUT != 0:
                        var y = x_hat * gamma + ln_bias[unsafe_offset=first + h].cast[accum]()
                        y_target[unsafe_offset=h] = y.cast[dtype]()
        if parts & LN_OUT != 0 and columns > 0:
            for h in range(H + thread_idx.x, Int(stride), block_dim.x):
                y_row[unsafe_offset=h] = 0
        row += step

    if parts & SUMS == 0:
        return
    barrier()
    store_sums(partials, memory, 2 * H, H, H)


@always_inline
def load_unrolled[
    dtype: DType, //, unroll: Int, distance: Int
](source: ImmPtr[dtype], remaining: Int32) -> Array[Scalar[dtype], unroll]:
    """Load a thread's elements of a row that has `remaining` elements left; all loads are in flight at once.
    """
    var loaded = Array[Scalar[dtype], unroll](fill=0)
    comptime for v in range(unroll):
        if Int32(v * distance) < remaining:
            loaded[v] = source[unsafe_offset=v * distance]
    return loaded^


@__name("ln_backward_any")
def ln_backward_any[
    dtype: DType, x_dtype: DType, width: Int
](
    grad_input: MutPtr[x_dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], recomputed for dW; zeros from column H on
    dln: ImmPtr[dtype],  # [rows, stride]
    input: ImmPtr[x_dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # sum of DX and LN_OUT
):
    """Compute dx and ln_out of rows of any length at any address. A block owns one row and reads it twice,
    `width` elements at a time. dx may overwrite dln if both have the same dtype.
    """
    var row = block_idx.x
    backward_row[width](
        grad_input,
        ln_out,
        dln,
        input,
        mean[unsafe_offset=row],
        rstd[unsafe_offset=row],
        ln_weight,
        ln_bias,
        row,
        Int(hidden_dim),
        Int(stride),
        parts,
    )


@always_inline
def backward_row[
    dtype: DType, x_dtype: DType, //, width: Int
](
    grad_input: MutPtr[x_dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    row_mean: Scalar[accum_type[dtype]],
    row_rstd: Scalar[accum_type[dtype]],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    row: Int,
    H: Int,
    stride: Int,
    parts: Int32,
):
    """Compute dx and ln_out of one row with all threads of a block."""
    comptime accum = accum_type[dtype]
    var x = input.unsafe_offset(row * H)
    var d = dln.unsafe_offset(row * stride)
    var y = ln_out.unsafe_offset(row * stride)
    var first = thread_idx.x * width
    var step = block_dim.x * width
    var c = SIMD[accum, 2](0)
    if parts & DX != 0:
        for h in range(first, H, step):
            var deviation = load_elements[width, accum](x, h) - row_mean
            var gamma = load_elements[width, accum](ln_weight, h)
            var g = load_elements[width, accum](d, h) * gamma
            c += SIMD[accum, 2]((g * (deviation * row_rstd)).reduce_add(), g.reduce_add())
        c = row_sum(c, 0) / Scalar[accum](H)

    for h in range(first, H, step):
        var deviation = load_elements[width, accum](x, h) - row_mean
        var x_hat = deviation * row_rstd
        var gamma = load_elements[width, accum](ln_weight, h)
        if parts & DX != 0:
            var g = rounded_product(load_elements[width, accum](d, h), gamma)
            var dx = row_rstd * (g - c[1] - x_hat * c[0])
            store_elements(grad_input, row * H + h, dx.cast[x_dtype]())
        if parts & LN_OUT != 0:
            var beta = load_elements[width, accum](ln_bias, h)
            store_elements(y, h, (x_hat * gamma + beta).cast[dtype]())
    if parts & LN_OUT != 0:
        for h in range(H + thread_idx.x, stride, block_dim.x):
            y[unsafe_offset=h] = 0
