"""The row kernels of the fast variant: LayerNorm forward and backward, and sums over rows in two stages.

Each kernel reads its operands from DRAM once, 16 bytes a thread at a time, and keeps a row in registers between the
sums over it and what is made from them; `shared/row_reductions.mojo` says how threads share a row. Sums over rows go
to one partial sum for each block, added by a second kernel in a fixed order: no atomics, so every run gives the same
bits. Of rows that are no whole number of 16-byte vectors, a thread takes single elements, as many at a time. On Hopper the
aligned vectors in which short rows of 16-bit elements lie pass through shared memory instead (`_shared`), and backward those of
longer rows too, and rows of whole vectors that are too long for the registers (`_wide`). The kernels whose names end in `_any`
take all that is left, and read a row again for every sum. All but the first can leave room behind the rows that they write, so
that a product finds aligned ones.
"""

from std.math import ceildiv, sqrt
from std.memory import AddressSpace
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    syncwarp,
    thread_idx,
)
from max.gpu.host import Dim
from max.gpu.memory import external_memory
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .shared.common import (
    ImmPtr,
    MutPtr,
    accum_type,
    lanes_of_a_warp,
    multiprocessors,
    rounded_product,
    shared_memory,
    start_later_grids,
    wait_for_earlier_grids,
)
from .shared.launcher import Launcher
from .shared.row_reductions import (
    VECTOR_BYTES,
    load_across,
    copy_vector,
    end_copies,
    is_aligned,
    load_global,
    load_vector,
    row_sum,
    store_vector,
    vector_width,
    wait_for_copies,
)
from .tensors import Sizes

comptime FORWARD_VECTORS = 4
"""Vectors of a row that a thread owns in the forward kernel."""
comptime FORWARD_RESIDENT = 1024
"""Threads of the forward kernel that share a multiprocessor: a bound on their registers."""
comptime BACKWARD_THREADS = 512
"""The most threads of a block of the backward kernel."""
comptime MAX_BACKWARD_VECTORS = 2
"""The most vectors of a row that a thread owns in the backward kernel."""
comptime BACKWARD_STAGES = 2
"""Rows of a group of threads that are in shared memory or on their way."""
comptime EARLY_ELEMENTS = 4 * 1024 * 1024
"""The most elements of the input with which a row kernel starts early."""
comptime ELEMENTS_ABREAST = 8
"""Elements of a row that a thread loads at a time in the backward kernel for rows of single elements."""
comptime ELEMENT_THREADS = 1024
"""Threads of a block of that kernel."""
comptime LONGEST_SHARE = 16
"""The most elements of a row that a thread of a small group owns there."""
comptime LONGEST_RUN = 64
"""Rows that a thread there adds one after the other; of more rows there are more blocks, for sums lose digits."""
comptime ANY_THREADS = 256
"""Threads that share a row in the kernels for any row."""
comptime COLUMN_LANES = 32
"""Neighbouring threads in a sum over rows; each owns as many columns as it loads at once."""
comptime COLUMN_ROWS = 8
"""Threads that share a column in the first stage of a sum over rows."""
comptime COLUMN_BLOCKS = 6
"""Blocks that one multiprocessor has at a time in the first stage of a sum over rows."""
comptime FINISH_ROWS = 16
"""Threads that share a column in the second stage of a sum over rows."""
comptime DIRECT_ROWS = 1024
"""The most rows that the second stage adds by itself."""
comptime SHARED_THREADS = 128
"""Threads of a block of the forward kernel for short rows that begin at any address."""
comptime WIDE_THREADS = 512
"""Threads of a block of the kernel whose registers the sums of columns fill."""
comptime WIDE_VECTORS = 4
"""The most vectors of a row that a thread owns there."""
comptime WIDE_TURNS = 4
"""Rows of whole vectors for each multiprocessor above which that kernel pays: it leaves shares of all columns for each of these."""
comptime FEW_THREADS = 512
"""Threads of a block that makes everything of few rows; all of them share a row, or COLUMN_LANES columns."""
comptime FEW_ABREAST = 8
"""Rows of which a thread there loads an element at a time."""

comptime DX = 1
"""What a row kernel of the backward pass makes, added: dx. The memory of what is left out is not touched."""
comptime LN_OUT = 2
"""Likewise: ln_out."""
comptime SUMS = 4
"""Likewise: partial sums of dgamma and dbeta."""


@always_inline
def normalised[
    dtype: DType, accum: DType, width: SIMDLength
](x: SIMD[accum, width], mean: Scalar[accum], rstd: Scalar[accum]) -> SIMD[accum, width]:
    """x_hat = (x - mean) * rstd of elements that have been `dtype`.

    Of 16-bit elements in one operation: the rounding of mean * rstd is far below that of the elements themselves.
    """
    comptime if dtype.is_half_float():
        return x.fma(rstd, -mean * rstd)
    else:
        return (x - mean) * rstd


@always_inline
def load_elements[
    dtype: DType, //, width: Int, wide: DType
](source: ImmPtr[dtype], offset: Int) -> SIMD[wide, width]:
    """`width` elements from global memory that begin at a multiple of as many, in the type of sums."""
    comptime alignment = width * size_of[Scalar[dtype]]()
    return source.unsafe_load[width=width, alignment=alignment](offset).cast[wide]()


@always_inline
def copy_constants[
    dtype: DType, accum: DType, //, vectors: Int
](
    target: Pointer[mut=True, Scalar[accum], _, address_space=AddressSpace.SHARED],
    source: ImmPtr[dtype],
    columns: Int,
):
    """This thread's vectors of gamma or beta, converted once for all rows."""
    comptime width = vector_width[dtype]
    comptime for v in range(vectors):
        var h = (v * block_dim.x + thread_idx.x) * width
        if h < columns:
            store_vector(target, v * block_dim.x * width, load_global[width, accum](source, h))


def starts_early(sizes: Sizes) -> Bool:
    """Whether a row kernel is so short that it pays to start it before the launch in front of it is done."""
    return Int(sizes.rows()) * Int(sizes.hidden_dim) <= EARLY_ELEMENTS


# ---- Rows in shared memory ------------------------------------------------------------------------------------


def wide_room[dtype: DType](group: Int) -> Int:
    """Elements of a row of `ln_backward_wide` in shared memory: as many vectors as its threads own, and one more.
    """
    return (WIDE_VECTORS * group + 1) * vector_width[dtype]


@always_inline
def fetch_row[
    dtype: DType, //, step: Int
](
    slot: Pointer[mut=True, Scalar[dtype], _, address_space=AddressSpace.SHARED],
    source: ImmPtr[dtype],
    row: Int,
    H: Int,
    rows: Int,
):
    """Copies the aligned vectors in which a row lies that begins at any address, and one vector more; this thread its share,
    WIDE_VECTORS vectors `step` elements apart. Behind the tensor there are zeros.

    Args:
        slot: Where the row goes.
        source: The tensor, [rows, H].
        row: Which row.
        H: Elements of a row.
        rows: Of the tensor.
    """
    comptime width = vector_width[dtype]
    var column = thread_idx.x * width
    var x_row = source.unsafe_offset(row * H // width * width)
    var inside = rows * H - row * H // width * width
    var last = ceildiv(H, width) * width
    if last + width <= inside:
        var left = Int32(H - column)
        comptime for v in range(WIDE_VECTORS):
            if Int32(v * step) < left:
                copy_vector(slot.unsafe_offset(column + v * step), x_row.unsafe_offset(column + v * step))
        if thread_idx.x == 0:
            copy_vector(slot.unsafe_offset(last), x_row.unsafe_offset(last))
        return
    for h in range(column, last + width, step):
        for i in range(h, h + width):
            slot[unsafe_offset=i] = x_row[unsafe_offset=i] if i < inside else Scalar[dtype](0)


@always_inline
def store_row[
    dtype: DType, //, step: Int
](
    target: MutPtr[dtype],
    slot: Pointer[Scalar[dtype], _, address_space=AddressSpace.SHARED],
    row: Int,
    H: Int,
):
    """Stores a row from shared memory that begins at any address of `target`, [rows, H]: its aligned vectors, this thread
    WIDE_VECTORS of them, `step` elements apart; and what is left at both ends element by element."""
    comptime width = vector_width[dtype]
    var y_row = target.unsafe_offset(row * H)
    # The first element of a row that lies at an aligned address.
    var first = Int32(-row * H) & Int32(width - 1)
    var column = thread_idx.x * width
    var y = y_row.unsafe_offset(column + Int(first))
    var left = Int32(H - column) - first
    comptime for v in range(WIDE_VECTORS):
        if Int32(v * step + width) <= left:
            y.unsafe_store[alignment=VECTOR_BYTES](v * step, load_across(slot, column + v * step, first))
    var thread = Int32(thread_idx.x)
    if thread < first and thread < Int32(H):
        y_row[unsafe_offset=thread_idx.x] = slot[unsafe_offset=thread_idx.x]
    var rest = Int(first + (Int32(H) - first) // Int32(width) * Int32(width)) + thread_idx.x
    if thread < Int32(width) and rest >= Int(first) and rest < H:
        y_row[unsafe_offset=rest] = slot[unsafe_offset=rest]


@always_inline
def fill_row[dtype: DType, //, step: Int](target: MutPtr[dtype], row: Int, H: Int, pitch: Int):
    """Zeros in the vectors behind the last one of a row of `target`, [rows, pitch], by threads of which each has vectors `step`
    elements apart."""
    comptime width = vector_width[dtype]
    for h in range(ceildiv(H, width) * width + thread_idx.x * width, pitch, step):
        target.unsafe_store[alignment=VECTOR_BYTES](row * pitch + h, SIMD[dtype, width](0))


@always_inline
def wait_for_row[group: Int]():
    """Until all of the `group` threads of a row are here; every thread of the block must call it."""
    comptime if group == WARP_SIZE:
        syncwarp()
    else:
        barrier()


@always_inline
def first_of[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width], count: Int32) -> SIMD[dtype, width]:
    """The first `count` elements, zeros in the place of the others."""
    var kept = values
    if count < Int32(width):
        comptime for i in range(Int(width)):
            kept[i] = values[i] if Int32(i) < count else 0
    return kept


@always_inline
def load_columns[
    dtype: DType, //, wide: DType
](source: ImmPtr[dtype], offset: Int, left: Int32) -> SIMD[wide, vector_width[dtype]]:
    """The vector of gamma or beta at `offset`, with zeros behind the `left` columns that are left."""
    comptime width = vector_width[dtype]
    if left >= Int32(width):
        return load_global[width, wide](source, offset)
    var rest = SIMD[wide, width](0)
    comptime for i in range(width):
        if Int32(i) < left:
            rest[i] = source[unsafe_offset=offset + i].cast[wide]()
    return rest


# ---- Forward ------------------------------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(threads)),
    `nvvm.minctasm`=SIMDLength(FORWARD_RESIDENT // threads),
)
def layernorm_rows[
    dtype: DType, threads: Int, width: Int, early: Bool
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """Statistics and LayerNorm of a row that is read once. block_dim.x threads own a row, block_dim.y rows a block.

    Thread t owns the vectors t, t + block_dim.x, ...: at most FORWARD_VECTORS, or as many elements one by one. The
    variance is the mean of squared deviations; the mean of the deviations themselves corrects the rounding of the first
    mean.

    Parameters:
        dtype: Of the rows.
        threads: The most threads of a block.
        width: Elements that are read and written at once: a vector, or 1 where rows begin at any address.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime vectors = FORWARD_VECTORS * vector_width[dtype] // width
    comptime alignment = width * size_of[Scalar[dtype]]()
    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    var H = Int(hidden_dim)
    var scale = 1 / Scalar[accum](H)
    var row = block_idx.x * block_dim.y + thread_idx.y
    # A group behind the last row goes along, for the barriers, with a row of no columns.
    var columns = H if row < Int(rows) else 0
    var column = thread_idx.x * width
    var next_column = block_dim.x * width
    var x_row = input.unsafe_offset(row * H)
    var y_row = ln_out.unsafe_offset(row * Int(ln_out_stride))

    var x = Array[SIMD[accum, width], vectors](fill=0)
    var total = SIMD[accum, width](0)
    comptime for v in range(vectors):
        if column + v * next_column < columns:
            x[v] = load_elements[width, accum](x_row, column + v * next_column)
    comptime for v in range(vectors):
        total += x[v]
    # Rounded: were it part of one operation with what it is subtracted from, but not where it is added again, the means
    # would be off to one side, by a hundredth of their last digit, which a million rows add up.
    var first_mean = rounded_product(row_sum(total.reduce_add(), 0), scale)

    var deviations = SIMD[accum, width](0)
    var squares = SIMD[accum, width](0)
    comptime for v in range(vectors):
        if column + v * next_column < columns:
            var deviation = x[v] - first_mean
            deviations += deviation
            squares = deviation.fma(deviation, squares)
    var sums = row_sum(SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add()), 1)
    sums = rounded_product(sums, SIMD[accum, 2](scale))
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0 and columns > 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    comptime for v in range(vectors):
        var h = column + v * next_column
        if h < columns:
            var x_hat = normalised[dtype](x[v], row_mean, row_rstd)
            var y = x_hat.fma(
                load_elements[width, accum](ln_weight, h), load_elements[width, accum](ln_bias, h)
            )
            y_row.unsafe_store[alignment=alignment](h, y.cast[dtype]())
    comptime if width == 1:
        if columns > 0:
            for h in range(H + thread_idx.x, Int(ln_out_stride), block_dim.x):
                y_row[unsafe_offset=h] = 0


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(SHARED_THREADS)))
def layernorm_shared[
    dtype: DType, early: Bool
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """As `layernorm_rows`, of rows that begin at any address of an aligned tensor; those of ln_out are aligned. A warp owns a
    row, a lane one vector of it, which passes through shared memory.

    Parameters:
        dtype: Of the rows.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    comptime step = WARP_SIZE * width
    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    var H = Int(hidden_dim)
    var pitch = Int(ln_out_stride)
    var scale = 1 / Scalar[accum](H)
    var row = block_idx.x * block_dim.y + thread_idx.y
    var column = thread_idx.x * width
    if row >= Int(rows):
        return
    var memory = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var slot = memory.unsafe_offset(thread_idx.y * (step + width))
    fetch_row[step](slot, input, row, H, Int(rows))
    end_copies()
    wait_for_copies[0]()
    syncwarp()

    var left = Int32(H - column)
    var x = SIMD[accum, width](0)
    if left > 0:
        x = first_of(load_across(slot, column, Int32(row * H) & Int32(width - 1)), left).cast[accum]()
    var first_mean = rounded_product(row_sum(x.reduce_add(), 0), scale)
    var deviation = first_of(x - first_mean, left)
    var sums = row_sum(SIMD[accum, 2](deviation.reduce_add(), (deviation * deviation).reduce_add()), 1)
    sums = rounded_product(sums, SIMD[accum, 2](scale))
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd
    if left > 0:
        # Behind the last column gamma and beta are 0, and so is what is stored.
        var y = normalised[dtype](x, row_mean, row_rstd).fma(
            load_columns[accum](ln_weight, column, left), load_columns[accum](ln_bias, column, left)
        )
        ln_out.unsafe_store[alignment=VECTOR_BYTES](row * pitch + column, y.cast[dtype]())
    fill_row[step](ln_out, row, H, pitch)


def layernorm_any[
    dtype: DType, width: Int
](
    ln_out: MutPtr[dtype],  # [rows, ln_out_stride], zeros from H on
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
    ln_out_stride: Int32,
):
    """Statistics and LayerNorm of a row of any length at any address. One block owns one row and reads it three times,
    `width` elements at once.
    """
    comptime accum = accum_type[dtype]
    comptime alignment = width * size_of[Scalar[dtype]]()
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = input.unsafe_offset(row * H)
    var y = ln_out.unsafe_offset(row * Int(ln_out_stride))
    var count = Scalar[accum](H)
    var first = thread_idx.x * width
    var step = block_dim.x * width
    var totals = SIMD[accum, width](0)
    for h in range(first, H, step):
        totals += x.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
    var first_mean = row_sum(totals.reduce_add(), 0) / count

    var deviations = SIMD[accum, width](0)
    var squares = SIMD[accum, width](0)
    for h in range(first, H, step):
        var deviation = x.unsafe_load[width=width, alignment=alignment](h).cast[accum]() - first_mean
        deviations += deviation
        squares += deviation * deviation
    var sums = row_sum(SIMD[accum, 2](deviations.reduce_add(), squares.reduce_add()), 1) / count
    var row_mean = first_mean + sums[0]
    var row_rstd = 1 / sqrt(sums[1] - sums[0] * sums[0] + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    for h in range(first, H, step):
        var x_hat = (x.unsafe_load[width=width, alignment=alignment](h).cast[accum]() - row_mean) * row_rstd
        var gamma = ln_weight.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
        var beta = ln_bias.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
        y.unsafe_store[alignment=alignment](h, (x_hat * gamma + beta).cast[dtype]())
    for h in range(H + thread_idx.x, Int(ln_out_stride), block_dim.x):
        y[unsafe_offset=h] = 0


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
    stride: Int = 0,
) raises:
    """One launch: mean, rstd and the LayerNorm output of every row, `stride` elements from one to the next, H where that is
    0. None where there are no rows."""
    var rows = Int(sizes.rows())
    if rows == 0:
        return
    var ln_out_stride = stride if stride > 0 else Int(sizes.hidden_dim)
    comptime elements = FORWARD_VECTORS * vector_width[dtype]
    var group = ceildiv(Int(sizes.hidden_dim), elements * lanes_of_a_warp()) * lanes_of_a_warp()
    var aligned = (
        Int(sizes.hidden_dim) % vector_width[dtype] == 0 and is_aligned(input) and is_aligned(ln_weight)
    )
    aligned = aligned and is_aligned(ln_bias) and is_aligned(ln_out.as_imm())
    aligned = aligned and ln_out_stride == Int(sizes.hidden_dim)
    var tensors = (
        is_aligned(input) and is_aligned(ln_weight) and is_aligned(ln_bias) and is_aligned(ln_out.as_imm())
    )
    comptime if L.wgmma and dtype.is_half_float():
        if tensors and suits_shared[dtype](Int(sizes.hidden_dim), ln_out_stride):
            var groups = min(rows, SHARED_THREADS // lanes_of_a_warp())
            launcher.launch[layernorm_shared[dtype, L.wgmma]](
                "layernorm_shared",
                ln_out,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                sizes.rows(),
                sizes.hidden_dim,
                eps,
                Int32(ln_out_stride),
                grid_dim=Dim(ceildiv(rows, groups)),
                block_dim=Dim(lanes_of_a_warp(), groups),
                shared_bytes=groups * (lanes_of_a_warp() + 1) * VECTOR_BYTES,
                early=starts_early(sizes),
            )
            return
    # The first size of block that holds a row.
    comptime for width in [vector_width[dtype], 1]:
        comptime for threads in [128, 512]:
            if (aligned or width == 1) and group <= threads:
                var groups = min(rows, threads // group)
                launcher.launch[layernorm_rows[dtype, threads, width, L.wgmma]](
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
                    Int32(ln_out_stride),
                    grid_dim=Dim(ceildiv(rows, groups)),
                    block_dim=Dim(group, groups),
                    early=L.wgmma and starts_early(sizes),
                )
                return
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            launcher.launch[layernorm_any[dtype, width]](
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
                Int32(ln_out_stride),
                grid_dim=Dim(rows),
                block_dim=Dim(ANY_THREADS),
            )
            return


# ---- Backward -----------------------------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BACKWARD_THREADS)),
    `nvvm.minctasm`=SIMDLength(backward_blocks(vectors)),
)
def ln_backward_rows[
    dtype: DType, vectors: Int, early: Bool
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
    parts: Int32,  # DX, LN_OUT and SUMS, added
):
    """Everything of the backward pass that a row of dln and a row of the input give, each read once.

    dx = rstd * (g - c2 - x_hat * c1) with g = dln * gamma, c1 = mean(g * x_hat), c2 = mean(g); ln_out; and the
    block's share of dgamma = sum of dln * x_hat and dbeta = sum of dln. block_dim.x threads own a row,
    block_dim.y rows a block, which goes on with the rows grid_dim.x * block_dim.y further. A thread keeps its
    columns' dgamma and dbeta in registers from its first row to its last. The vectors of its next row are on their
    way into slots of shared memory, which no other thread touches, while it works on this one. dx may be written over
    dln: whoever writes an element has read it before.

    Parameters:
        dtype: Of the rows.
        vectors: How many a thread owns, in each of the two tensors.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    var H = Int(hidden_dim)
    var scale = 1 / Scalar[accum](H)
    var stride = grid_dim.x * block_dim.y
    var column = thread_idx.x * width
    var next_column = block_dim.x * width

    # Shared memory: gamma and beta in the type of sums, then for each stage the input and dln, thread by thread.
    var memory = external_memory[Scalar[accum], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var gamma = memory.unsafe_offset(column)
    var beta = memory.unsafe_offset(vectors * next_column + column)
    var slots = memory.unsafe_offset(2 * vectors * next_column).unsafe_bitcast[Scalar[dtype]]()
    var tensor_slots = vectors * next_column * block_dim.y
    slots = slots.unsafe_offset(thread_idx.y * vectors * next_column + column)

    @__parameter
    @always_inline
    def fetch(row: Int, stage: Int):
        if row < Int(rows):
            var slot = slots.unsafe_offset(stage * 2 * tensor_slots)
            var start = row * H + column
            comptime for v in range(vectors):
                if column + v * next_column < H:
                    copy_vector(
                        slot.unsafe_offset(v * next_column), input.unsafe_offset(start + v * next_column)
                    )
                    copy_vector(
                        slot.unsafe_offset(tensor_slots + v * next_column),
                        dln.unsafe_offset(start + v * next_column),
                    )
        end_copies()

    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    if thread_idx.y == 0:
        copy_constants[vectors](gamma, ln_weight, H)
        copy_constants[vectors](beta, ln_bias, H)
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

    # Every group of the block takes as many turns, whether it has a row in the last one or not: turns hold barriers.
    var turns = ceildiv(Int(rows) - block_idx.x * block_dim.y, stride)
    var stage = 0
    for turn in range(turns):
        fetch(row + (BACKWARD_STAGES - 1) * stride, stage - 1 if stage > 0 else BACKWARD_STAGES - 1)
        var next_row = row + stride
        var next_mean = Scalar[accum](0)
        var next_rstd = Scalar[accum](0)
        if next_row < Int(rows):
            next_mean = mean[unsafe_offset=next_row]
            next_rstd = rstd[unsafe_offset=next_row]
        wait_for_copies[BACKWARD_STAGES - 1]()
        var slot = slots.unsafe_offset(stage * 2 * tensor_slots)
        # Behind the last row there are no columns.
        var columns = H if row < Int(rows) else 0

        var x_hat = Array[SIMD[accum, width], vectors](fill=0)
        var g = Array[SIMD[accum, width], vectors](fill=0)
        var sums = SIMD[accum, 2](0)
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                x_hat[v] = normalised[dtype](
                    load_vector[width, accum](slot, v * next_column), row_mean, row_rstd
                )
                var d = load_vector[width, accum](slot, tensor_slots + v * next_column)
                g[v] = d * load_vector[width, accum](gamma, v * next_column)
                dgamma[v] = d.fma(x_hat[v], dgamma[v])
                dbeta[v] += d
                sums += SIMD[accum, 2]((g[v] * x_hat[v]).reduce_add(), g[v].reduce_add())
        sums = row_sum(sums, turn % 2) * (scale * row_rstd)

        # dx = rstd * (g - c2 - x_hat * c1), with rstd * c1 and rstd * c2 in `sums`.
        comptime for v in range(vectors):
            if column + v * next_column < columns:
                var place = row * H + column + v * next_column
                var dx = g[v].fma(row_rstd, x_hat[v].fma(-sums[0], -sums[1]))
                if parts & DX != 0:
                    grad_input.unsafe_store[alignment=VECTOR_BYTES](place, dx.cast[dtype]())
                var y = x_hat[v].fma(
                    load_vector[width, accum](gamma, v * next_column),
                    load_vector[width, accum](beta, v * next_column),
                )
                if parts & LN_OUT != 0:
                    ln_out.unsafe_store[alignment=VECTOR_BYTES](place, y.cast[dtype]())
        row_mean = next_mean
        row_rstd = next_rstd
        row = next_row
        stage = stage + 1 if stage < BACKWARD_STAGES - 1 else 0

    if parts & SUMS == 0:
        return
    # The slots have done their work; the groups of the block add their sums there.
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
    """Adds the sums of the groups of a block, halving the number of groups each time; group 0 ends with the total.

    `shared` has room for the sums of half of the groups and is used by nobody else. Every thread must call it.
    """
    comptime quad = VECTOR_BYTES // size_of[Scalar[dtype]]()
    comptime quads = max(1, Int(width) // quad)
    comptime part = Int(width) // quads
    var groups = block_dim.y
    while groups > 1:
        var kept = ceildiv(groups, 2)
        var threads = kept * block_dim.x
        barrier()
        if kept <= thread_idx.y < groups:
            var thread = (thread_idx.y - kept) * block_dim.x + thread_idx.x
            comptime for v in range(vectors):
                comptime for q in range(quads):
                    var place = ((2 * v * quads + q) * threads + thread) * part
                    shared.unsafe_store[alignment=part * size_of[Scalar[dtype]]()](
                        place, dgamma[v].slice[part, offset=q * part]()
                    )
                    shared.unsafe_store[alignment=part * size_of[Scalar[dtype]]()](
                        place + quads * threads * part, dbeta[v].slice[part, offset=q * part]()
                    )
        barrier()
        if thread_idx.y < groups - kept:
            var thread = thread_idx.y * block_dim.x + thread_idx.x
            comptime for v in range(vectors):
                comptime for q in range(quads):
                    var place = ((2 * v * quads + q) * threads + thread) * part
                    var more = shared.unsafe_load[width=part, alignment=part * size_of[Scalar[dtype]]()](
                        place
                    )
                    var more_beta = shared.unsafe_load[width=part, alignment=part * size_of[Scalar[dtype]]()](
                        place + quads * threads * part
                    )
                    comptime for e in range(part):
                        dgamma[v][q * part + e] += more[e]
                        dbeta[v][q * part + e] += more_beta[e]
        groups = kept


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WIDE_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def ln_backward_wide[
    dtype: DType, group: Int, shifted: Bool, early: Bool
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], computed again for dW; zeros from H on
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta of the rows of one block
    dln: ImmPtr[dtype],  # [rows, stride], the gradient at the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    row_stride: Int32,
    parts: Int32,  # DX, LN_OUT and SUMS, added; not LN_OUT alone
):
    """As `ln_backward_rows`, of rows of which a thread owns up to WIDE_VECTORS vectors: the sums of their columns fill its registers,
    and x_hat and g are made twice, from what lies in shared memory, before and behind the sums over the row.

    Parameters:
        dtype: Of the rows.
        group: Threads that share a row: block_dim.x, known here so that distances are constants.
        shifted: Whether rows of the input and dx begin at any address of an aligned tensor. Then the aligned vectors in which a
            row lies are fetched, and dx passes through shared memory.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime width = vector_width[dtype]
    comptime vectors = WIDE_VECTORS
    comptime step = group * width
    comptime room = wide_room[dtype](group)
    var H = Int(hidden_dim)
    var pitch = Int(row_stride)
    var scale = 1 / Scalar[accum](H)
    var stride = grid_dim.x * block_dim.y
    var column = thread_idx.x * width
    # Shared memory: two rows of the input and of dln for every group of threads, then gamma and beta.
    var memory = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var slots = memory.unsafe_offset(thread_idx.y * 4 * room)
    var gamma = memory.unsafe_offset(block_dim.y * 4 * room + column)
    var beta = gamma.unsafe_offset(vectors * step)

    @__parameter
    @always_inline
    def fetch(row: Int, stage: Int):
        if row < Int(rows):
            var slot = slots.unsafe_offset(2 * stage * room)
            var x_row = input.unsafe_offset(row * H + column)
            var d_row = dln.unsafe_offset(row * pitch + column)
            comptime if shifted:
                fetch_row[step](slot, input, row, H, Int(rows))
            slot = slot.unsafe_offset(column)
            var left = Int32(H - column)
            comptime for v in range(vectors):
                if Int32(v * step) < left:
                    comptime if not shifted:
                        copy_vector(slot.unsafe_offset(v * step), x_row.unsafe_offset(v * step))
                    copy_vector(slot.unsafe_offset(room + v * step), d_row.unsafe_offset(v * step))
        end_copies()

    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    var row = block_idx.x * block_dim.y + thread_idx.y
    fetch(row, 0)
    if thread_idx.y == 0:
        comptime for v in range(vectors):
            var left = Int32(H - column - v * step)
            if left > 0:
                store_vector(gamma, v * step, load_columns[dtype](ln_weight, column + v * step, left))
                store_vector(beta, v * step, load_columns[dtype](ln_bias, column + v * step, left))
    var row_mean = Scalar[accum](0)
    var row_rstd = Scalar[accum](0)
    if row < Int(rows):
        row_mean = mean[unsafe_offset=row]
        row_rstd = rstd[unsafe_offset=row]
    var dgamma = Array[SIMD[accum, width], vectors](fill=0)
    var dbeta = Array[SIMD[accum, width], vectors](fill=0)
    barrier()

    # Every group of the block takes as many turns, whether it has a row in the last one or not: turns hold barriers.
    var turns = ceildiv(Int(rows) - block_idx.x * block_dim.y, stride)
    for turn in range(turns):
        comptime if shifted:
            # Nobody reads the row before any more, and all see this one.
            wait_for_copies[0]()
            wait_for_row[group]()
        fetch(row + stride, (turn + 1) % 2)
        var next_mean = Scalar[accum](0)
        var next_rstd = Scalar[accum](0)
        if row + stride < Int(rows):
            next_mean = mean[unsafe_offset=row + stride]
            next_rstd = rstd[unsafe_offset=row + stride]
        comptime if not shifted:
            wait_for_copies[1]()
        var x_row = slots.unsafe_offset(turn % 2 * 2 * room + column)
        var d_row = x_row.unsafe_offset(room)
        var shift = Int32(row * H) & Int32(width - 1)
        # Behind the last row there are no columns.
        var left = Int32((H if row < Int(rows) else 0) - column)

        @__parameter
        @always_inline
        def x_hat_of[v: Int]() -> SIMD[accum, width]:
            comptime if shifted:
                var x = load_across(x_row, v * step, shift).cast[accum]()
                return first_of(normalised[dtype](x, row_mean, row_rstd), left - Int32(v * step))
            else:
                return normalised[dtype](load_vector[width, accum](x_row, v * step), row_mean, row_rstd)

        var sums = SIMD[accum, 2](0)
        comptime for v in range(vectors):
            if Int32(v * step) < left:
                var x_hat = x_hat_of[v]()
                var d = load_vector[width, accum](d_row, v * step)
                comptime if shifted:
                    d = first_of(d, left - Int32(v * step))
                dgamma[v] = d.fma(x_hat, dgamma[v])
                dbeta[v] += d
                var g = d * load_vector[width, accum](gamma, v * step)
                sums += SIMD[accum, 2]((g * x_hat).reduce_add(), g.reduce_add())
        sums = row_sum(sums, turn % 2) * (scale * row_rstd)

        # dx = rstd * (g - c2 - x_hat * c1), with rstd * c1 and rstd * c2 in `sums`. Behind the last column x_hat, gamma and
        # beta are 0, and so is ln_out.
        comptime for v in range(vectors):
            if Int32(v * step) < left:
                var x_hat = x_hat_of[v]()
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
                        store_vector(d_row, v * step, dx)
                    else:
                        grad_input.unsafe_offset(row * H + column).unsafe_store[alignment=VECTOR_BYTES](
                            v * step, dx
                        )
        if parts & LN_OUT != 0 and row < Int(rows):
            fill_row[step](ln_out, row, H, pitch)
        comptime if shifted:
            wait_for_row[group]()
            if parts & DX != 0 and row < Int(rows):
                store_row[step](grad_input, slots.unsafe_offset((turn % 2 * 2 + 1) * room), row, H)
        row_mean = next_mean
        row_rstd = next_rstd
        row += stride

    if parts & SUMS == 0:
        return
    # The slots have done their work; there every group lays down its sums.
    barrier()
    var of_group = slots.unsafe_bitcast[Scalar[accum]]().unsafe_offset(column)
    comptime for v in range(vectors):
        if column + v * step < H:
            store_vector(of_group, v * step, dgamma[v])
            store_vector(of_group, room + v * step, dbeta[v])
    barrier()
    store_sums(partials, memory.unsafe_bitcast[Scalar[accum]](), 2 * room, room, H)


@always_inline
def store_sums[
    accum: DType, //
](
    partials: MutPtr[accum],  # [blocks, 2, H]
    shared: Pointer[Scalar[accum], _, address_space=AddressSpace.SHARED],
    of_a_group: Int,
    of_dgamma: Int,
    H: Int,
):
    """Adds what the groups of a block have laid down in shared memory: dgamma, and dbeta `of_dgamma` elements further; from one
    group to the next there are `of_a_group`."""
    var thread = thread_idx.y * block_dim.x + thread_idx.x
    for h in range(thread, H, block_dim.x * block_dim.y):
        var total = SIMD[accum, 2](0)
        for group in range(block_dim.y):
            var sums = shared.unsafe_offset(group * of_a_group + h)
            total += SIMD[accum, 2](sums[], sums[unsafe_offset=of_dgamma])
        partials[unsafe_offset=2 * block_idx.x * H + h] = total[0]
        partials[unsafe_offset=(2 * block_idx.x + 1) * H + h] = total[1]


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(ELEMENT_THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def ln_backward_elements[
    dtype: DType, group: Int, early: Bool
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], computed again for dW; zeros from H on
    partials: MutPtr[accum_type[dtype]],  # [blocks, 2, H]: dgamma and dbeta of the rows of one block
    dln: ImmPtr[dtype],  # [rows, stride], the gradient at the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # DX, LN_OUT and SUMS, added
):
    """As `ln_backward_rows`, of rows that begin at any address.

    A thread owns the same columns of every row of its group, and keeps their dgamma and dbeta in shared memory, where no
    other thread touches them. It reads a row twice, for the sums over it and for what is made from them; the second time
    it finds it in the cache.

    Parameters:
        dtype: Of the rows.
        group: Threads that share a row: block_dim.x, known here so that distances are constants.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime abreast = ELEMENTS_ABREAST
    var H = Int(hidden_dim)
    var step = grid_dim.x * block_dim.y
    var dln_wanted = parts & (DX | SUMS) != 0
    var memory = external_memory[Scalar[accum], address_space=AddressSpace.SHARED, alignment=VECTOR_BYTES]()
    var dgamma = memory.unsafe_offset(thread_idx.y * 2 * H)
    var dbeta = dgamma.unsafe_offset(H)
    for h in range(thread_idx.x, H, group):
        dgamma[unsafe_offset=h] = 0
        dbeta[unsafe_offset=h] = 0
    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()

    var row = block_idx.x * block_dim.y + thread_idx.y
    # Every group of the block takes as many turns, whether it has a row in the last one or not: turns hold barriers.
    var turns = ceildiv(Int(rows) - block_idx.x * block_dim.y, step)
    for turn in range(turns):
        var columns = H if row < Int(rows) else 0
        var row_mean = Scalar[accum](0)
        var row_rstd = Scalar[accum](0)
        if columns > 0:
            row_mean = mean[unsafe_offset=row]
            row_rstd = rstd[unsafe_offset=row]
        var x_row = input.unsafe_offset(row * H)
        var d_row = dln.unsafe_offset(row * Int(stride))
        var c = SIMD[accum, 2](0)
        if dln_wanted:
            for first in range(thread_idx.x, columns, abreast * group):
                var left = Int32(columns - first)
                var x = load_abreast[abreast, group](x_row.unsafe_offset(first), left)
                var d = load_abreast[abreast, group](d_row.unsafe_offset(first), left)
                var gamma = ln_weight.unsafe_offset(first)
                comptime for v in range(abreast):
                    comptime h = v * group
                    if Int32(h) < left:
                        var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
                        var gradient = d[v].cast[accum]()
                        var g = rounded_product(gradient, gamma[unsafe_offset=h].cast[accum]())
                        c += SIMD[accum, 2](g * x_hat, g)
                        var sum = dgamma[unsafe_offset=first + h]
                        dgamma[unsafe_offset=first + h] = gradient.fma(x_hat, sum)
                        dbeta[unsafe_offset=first + h] += gradient
            c = row_sum(c, turn % 2) / Scalar[accum](H)

        var y_row = ln_out.unsafe_offset(row * Int(stride))
        for first in range(thread_idx.x, columns, abreast * group):
            var left = Int32(columns - first)
            var x = load_abreast[abreast, group](x_row.unsafe_offset(first), left)
            # Where dx is not wanted, dln may be any address.
            var d = load_abreast[abreast, group](d_row.unsafe_offset(first), left if parts & DX != 0 else 0)
            var dx_place = grad_input.unsafe_offset(row * H + first)
            var y_place = y_row.unsafe_offset(first)
            comptime for v in range(abreast):
                comptime h = v * group
                if Int32(h) < left:
                    var x_hat = (x[v].cast[accum]() - row_mean) * row_rstd
                    var gamma = ln_weight[unsafe_offset=first + h].cast[accum]()
                    if parts & DX != 0:
                        var g = rounded_product(d[v].cast[accum](), gamma)
                        var dx = row_rstd * (g - c[1] - x_hat * c[0])
                        dx_place[unsafe_offset=h] = dx.cast[dtype]()
                    if parts & LN_OUT != 0:
                        var y = x_hat * gamma + ln_bias[unsafe_offset=first + h].cast[accum]()
                        y_place[unsafe_offset=h] = y.cast[dtype]()
        if parts & LN_OUT != 0 and columns > 0:
            for h in range(H + thread_idx.x, Int(stride), block_dim.x):
                y_row[unsafe_offset=h] = 0
        row += step

    if parts & SUMS == 0:
        return
    barrier()
    store_sums(partials, memory, 2 * H, H, H)


@always_inline
def load_abreast[
    dtype: DType, //, abreast: Int, distance: Int
](source: ImmPtr[dtype], left: Int32) -> Array[Scalar[dtype], abreast]:
    """What a thread owns of a row at a time, of which `left` elements are left: all loads are under way at once.
    """
    var loaded = Array[Scalar[dtype], abreast](fill=0)
    comptime for v in range(abreast):
        if Int32(v * distance) < left:
            loaded[v] = source[unsafe_offset=v * distance]
    return loaded^


def ln_backward_any[
    dtype: DType, width: Int
](
    grad_input: MutPtr[dtype],  # [rows, H]
    ln_out: MutPtr[dtype],  # [rows, stride], computed again for dW; zeros from H on
    dln: ImmPtr[dtype],  # [rows, stride]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # DX and LN_OUT, added
):
    """dx and ln_out of a row of any length at any address. One block owns one row and reads it twice, `width` elements at
    once. dx may be written over dln."""
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
    dtype: DType, //, width: Int
](
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    row_mean: Scalar[accum_type[dtype]],
    row_rstd: Scalar[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    row: Int,
    H: Int,
    stride: Int,
    parts: Int32,
):
    """dx and ln_out of one row, by all threads of a block."""
    comptime accum = accum_type[dtype]
    comptime alignment = width * size_of[Scalar[dtype]]()
    var x = input.unsafe_offset(row * H)
    var d = dln.unsafe_offset(row * stride)
    var y = ln_out.unsafe_offset(row * stride)
    var first = thread_idx.x * width
    var step = block_dim.x * width
    var c = SIMD[accum, 2](0)
    if parts & DX != 0:
        for h in range(first, H, step):
            var deviation = x.unsafe_load[width=width, alignment=alignment](h).cast[accum]() - row_mean
            var gamma = ln_weight.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
            var g = d.unsafe_load[width=width, alignment=alignment](h).cast[accum]() * gamma
            c += SIMD[accum, 2]((g * (deviation * row_rstd)).reduce_add(), g.reduce_add())
        c = row_sum(c, 0) / Scalar[accum](H)

    for h in range(first, H, step):
        var deviation = x.unsafe_load[width=width, alignment=alignment](h).cast[accum]() - row_mean
        var x_hat = deviation * row_rstd
        var gamma = ln_weight.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
        if parts & DX != 0:
            var g = rounded_product(d.unsafe_load[width=width, alignment=alignment](h).cast[accum](), gamma)
            var dx = row_rstd * (g - c[1] - x_hat * c[0])
            grad_input.unsafe_store[alignment=alignment](row * H + h, dx.cast[dtype]())
        if parts & LN_OUT != 0:
            var beta = ln_bias.unsafe_load[width=width, alignment=alignment](h).cast[accum]()
            y.unsafe_store[alignment=alignment](h, (x_hat * gamma + beta).cast[dtype]())
    if parts & LN_OUT != 0:
        for h in range(H + thread_idx.x, stride, block_dim.x):
            y[unsafe_offset=h] = 0


# ---- Sums over rows, in two stages --------------------------------------------------------------------------


def column_partials[
    dtype: DType, width: Int, with_x_hat: Bool
](
    partials: MutPtr[accum_type[dtype]],  # [slices, columns], or [slices, 2, columns] with_x_hat
    dy: ImmPtr[dtype],  # [rows, dy_stride]
    input: ImmPtr[dtype],  # [rows, columns], read only with_x_hat, as mean and rstd
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    columns: Int32,
    dy_stride: Int32,
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
            var place = row * Int(dy_stride) + column
            var d = dy.unsafe_load[width=width, alignment=alignment](place).cast[accum]()
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
    dtype: DType, source: DType, early: Bool
](
    grad_ln_weight: MutPtr[dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[dtype],  # [H], dbeta
    ln_partials: ImmPtr[accum_type[dtype]],  # [ln_slices, 2, H]
    ln_slices: Int32,
    hidden_dim: Int32,  # 0 where dgamma and dbeta are not wanted
    grad_bias: MutPtr[dtype],  # [O], db
    bias_partials: ImmPtr[source],  # [bias_slices, O], or the rows of dY themselves
    bias_slices: Int32,
    output_dim: Int32,  # 0 where db is not wanted
):
    """Second stage of the sums over rows: adds the slices of every column of dgamma, dbeta and db.

    Parameters:
        dtype: Of the gradients.
        source: Of what db is added from.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var ln_blocks = ceildiv(2 * H, COLUMN_LANES)
    var column = block_idx.x * COLUMN_LANES + thread_idx.x
    var bias_column = column - ln_blocks * COLUMN_LANES
    var total = Scalar[accum](0)
    if block_idx.x < ln_blocks:
        if column < 2 * H:
            total = sum_of_slices[accum](ln_partials, Int(ln_slices), 2 * H, column)
    elif bias_column < O:
        total = sum_of_slices[accum](bias_partials, Int(bias_slices), O, bias_column)
    var shares = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[FINISH_ROWS, COLUMN_LANES]()
    )
    shares[thread_idx.y, thread_idx.x] = total
    barrier()
    if thread_idx.y == 0:
        total = 0
        comptime for lane in range(FINISH_ROWS):
            total += shares[lane, thread_idx.x]
        if block_idx.x < ln_blocks:
            if column < H:
                grad_ln_weight[unsafe_offset=column] = total.cast[dtype]()
            elif column < 2 * H:
                grad_ln_bias[unsafe_offset=column - H] = total.cast[dtype]()
        elif bias_column < O:
            grad_bias[unsafe_offset=bias_column] = total.cast[dtype]()


@always_inline
def sum_of_slices[
    source: DType, //, accum: DType
](partials: ImmPtr[source], slices: Int, columns: Int, column: Int) -> Scalar[accum]:
    """Adds one column of every FINISH_ROWS-th slice from thread_idx.y on, eight of them at a time."""
    comptime abreast = 8
    var totals = SIMD[accum, abreast](0)
    var slice = thread_idx.y
    while slice + (abreast - 1) * FINISH_ROWS < slices:
        comptime for i in range(abreast):
            totals[i] += partials[unsafe_offset=(slice + i * FINISH_ROWS) * columns + column].cast[accum]()
        slice += abreast * FINISH_ROWS
    while slice < slices:
        totals[0] += partials[unsafe_offset=slice * columns + column].cast[accum]()
        slice += FINISH_ROWS
    return totals.reduce_add()


# ---- Few rows, in one launch --------------------------------------------------------------------------------


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(FEW_THREADS)))
def ln_backward_few[
    dtype: DType, width: Int, early: Bool
](
    grad_input: MutPtr[dtype],  # [rows, H], not where dln is
    ln_out: MutPtr[dtype],  # [rows, stride], computed again for dW; zeros from H on
    grad_ln_weight: MutPtr[dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[dtype],  # [H], dbeta
    grad_bias: MutPtr[dtype],  # [O], db
    dln: ImmPtr[dtype],  # [rows, stride]
    grad_output: ImmPtr[dtype],  # [rows, O]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # DX, LN_OUT and SUMS, added
    output_dim: Int32,  # 0 where db is not wanted
):
    """Everything that is summed or made from rows of dln, dY and the input, where these are few: the first blocks make dx
    and ln_out of a row each, the next dgamma and dbeta of COLUMN_LANES columns each, the last db. Nobody waits for
    another, for dln is only read.

    Parameters:
        dtype: Of the rows.
        width: Elements of a row that a thread takes at once: a vector, or 1.
        early: Whether the kernel may be started before the launch in front of it is done.
    """
    comptime accum = accum_type[dtype]
    comptime if early:
        wait_for_earlier_grids()
        start_later_grids()
    var H = Int(hidden_dim)
    var row_blocks = Int(rows) if parts & (DX | LN_OUT) != 0 else 0
    var block = block_idx.x
    if block < row_blocks:
        backward_row[width](
            grad_input,
            ln_out,
            dln,
            input,
            mean[unsafe_offset=block],
            rstd[unsafe_offset=block],
            ln_weight,
            ln_bias,
            block,
            H,
            Int(stride),
            parts,
        )
        return
    block -= row_blocks
    var norm_blocks = ceildiv(H, COLUMN_LANES) if parts & SUMS != 0 else 0
    var lane = thread_idx.x % COLUMN_LANES
    var first = thread_idx.x // COLUMN_LANES
    comptime groups = FEW_THREADS // COLUMN_LANES
    var totals = SIMD[accum, 2](0)
    var of_norm = block < norm_blocks
    var column = (block if of_norm else block - norm_blocks) * COLUMN_LANES + lane
    var there = column < (H if of_norm else Int(output_dim))
    var source = dln if of_norm else grad_output
    var distance = Int(stride) if of_norm else Int(output_dim)
    for row in range(first, Int(rows), groups * FEW_ABREAST):
        var d = Array[Scalar[accum], FEW_ABREAST](fill=0)
        var x_hat = Array[Scalar[accum], FEW_ABREAST](fill=0)
        comptime for i in range(FEW_ABREAST):
            var this_row = row + i * groups
            if there and this_row < Int(rows):
                d[i] = source[unsafe_offset=this_row * distance + column].cast[accum]()
                if of_norm:
                    var x = input[unsafe_offset=this_row * H + column].cast[accum]()
                    x_hat[i] = (x - mean[unsafe_offset=this_row]) * rstd[unsafe_offset=this_row]
        comptime for i in range(FEW_ABREAST):
            totals += SIMD[accum, 2](d[i] * x_hat[i], d[i])

    var shares = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[2 * groups, COLUMN_LANES]()
    )
    comptime for i in range(2):
        shares[2 * first + i, lane] = totals[i]
    barrier()
    if first == 0 and there:
        totals = 0
        comptime for group in range(groups):
            comptime for i in range(2):
                totals[i] += shares[2 * group + i, lane][0]
        if of_norm:
            grad_ln_weight[unsafe_offset=column] = totals[0].cast[dtype]()
            grad_ln_bias[unsafe_offset=column] = totals[1].cast[dtype]()
        else:
            grad_bias[unsafe_offset=column] = totals[1].cast[dtype]()


# ---- How they are launched ----------------------------------------------------------------------------------


@fieldwise_init
struct Shares[dtype: DType](Copyable, Movable):
    """Partial sums of columns, [slices, columns]: of dgamma and dbeta, 2 H columns, or of db, O columns."""

    @__allow_legacy_any_origin_fields
    var partials: ImmPtr[Self.dtype]
    var slices: Int


def launch_column_partials[
    L: Launcher, //, dtype: DType, width: Int, with_x_hat: Bool
](
    mut launcher: L,
    dy: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    rows: Int,
    columns: Int,
    dy_stride: Int,
) raises -> Shares[accum_type[dtype]]:
    """One launch: shares of the sums over rows of dy; with_x_hat of dy * x_hat, then of dy. None where there are no rows.
    """
    comptime sums_of_a_column = 2 if with_x_hat else 1
    var tiles = ceildiv(columns, COLUMN_LANES * width)
    # Slices enough to fill the GPU, none so thin that its partial sum costs as much as its rows.
    var wanted = ceildiv(COLUMN_BLOCKS * multiprocessors(), tiles)
    var rows_of_a_slice = max(ceildiv(rows, wanted), 4 * COLUMN_ROWS)
    var slices = ceildiv(rows, rows_of_a_slice)
    var partials = launcher.workspace[accum_type[dtype]](
        "column_partials", slices * columns * sums_of_a_column
    )
    if slices > 0:
        launcher.launch[column_partials[dtype, width, with_x_hat]](
            "column_partials",
            partials,
            dy,
            input,
            mean,
            rstd,
            Int32(rows),
            Int32(columns),
            Int32(dy_stride),
            Int32(rows_of_a_slice),
            grid_dim=Dim(tiles, slices),
            block_dim=Dim(COLUMN_LANES, COLUMN_ROWS),
        )
    return Shares(partials.as_imm(), slices)


def launch_bias_partials[
    L: Launcher, //, dtype: DType
](
    mut launcher: L, grad_output: ImmPtr[dtype], anything: ImmPtr[accum_type[dtype]], sizes: Sizes
) raises -> Shares[accum_type[dtype]]:
    """One launch: shares of db, the sum over rows of grad_output. `anything` is an address that is not read.
    """
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var O = Int(sizes.output_dim)
    if O % width == 0 and is_aligned(grad_output):
        return launch_column_partials[dtype, width, False](
            launcher, grad_output, grad_output, anything, anything, rows, O, O
        )
    return launch_column_partials[dtype, 1, False](
        launcher, grad_output, grad_output, anything, anything, rows, O, O
    )


def launch_finish_sums[
    L: Launcher, source: DType, //, dtype: DType
](
    mut launcher: L,
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    ln_shares: Shares[accum_type[dtype]],
    hidden_dim: Int,
    grad_bias: MutPtr[dtype],
    bias_shares: Shares[source],
    output_dim: Int,
) raises:
    """One launch: dgamma and dbeta [hidden_dim] and db [output_dim], each left out where that is 0; none without all.
    """
    var blocks = ceildiv(2 * hidden_dim, COLUMN_LANES) + ceildiv(output_dim, COLUMN_LANES)
    if blocks == 0:
        return
    launcher.launch[finish_sums[dtype, source, L.wgmma]](
        "finish_sums",
        grad_ln_weight,
        grad_ln_bias,
        ln_shares.partials,
        Int32(ln_shares.slices),
        Int32(hidden_dim),
        grad_bias,
        bias_shares.partials,
        Int32(bias_shares.slices),
        Int32(output_dim),
        grid_dim=Dim(blocks),
        block_dim=Dim(COLUMN_LANES, FINISH_ROWS),
        early=L.wgmma,
    )


@fieldwise_init
struct RowGeometry(Copyable, Movable):
    """How `ln_backward_rows` is launched."""

    var vectors: Int
    """Vectors of a row that a thread owns."""
    var group: Int
    """Threads that share a row: block_dim.x."""
    var groups: Int
    """Rows that a block works on at a time: block_dim.y. 0 where there are none, or a row is too long."""
    var blocks: Int
    """Blocks, and partial sums: grid_dim.x."""
    var shared_bytes: Int
    """Dynamic shared memory of a block."""


def backward_geometry[dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """The geometry for rows of aligned vectors.

    As many rows at a time as fill the multiprocessors' threads and shared memory, and no more than keep all of them
    busy until the last turn: every block more leaves a partial sum more to add.
    """
    comptime width = vector_width[dtype]
    var vectors = 1 if H <= BACKWARD_THREADS * width else MAX_BACKWARD_VECTORS
    var group = ceildiv(H, width * vectors * lanes_of_a_warp()) * lanes_of_a_warp()
    var elements = vectors * group * width
    var constant_bytes = 2 * elements * size_of[Scalar[accum_type[dtype]]]()
    var row_bytes = 2 * BACKWARD_STAGES * elements * size_of[Scalar[dtype]]()
    var resident = backward_blocks(vectors)
    if shared_memory() // resident - constant_bytes < row_bytes:
        resident = 1
    var most = resident * multiprocessors()
    var groups = min(BACKWARD_THREADS // group, (shared_memory() // resident - constant_bytes) // row_bytes)
    if groups < 1 or rows == 0:
        return RowGeometry(vectors, group, 0, 0, 0)
    var turns = ceildiv(rows, most * groups)
    groups = ceildiv(rows, most * turns)
    var blocks = min(ceildiv(rows, groups), most)
    return RowGeometry(vectors, group, groups, blocks, constant_bytes + groups * row_bytes)


def backward_blocks(vectors: Int) -> Int:
    """Blocks of `ln_backward_rows` that share a multiprocessor: a bound on the registers of a thread."""
    return 2 if vectors == 1 else 1


def element_geometry[dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """The geometry of `ln_backward_elements`: a block for each multiprocessor, more of them where rows are very many.
    """
    var group = ELEMENT_THREADS
    if H <= 64 * LONGEST_SHARE:
        group = 64
    elif H <= 128 * LONGEST_SHARE:
        group = 128
    elif H <= BACKWARD_THREADS * ELEMENTS_ABREAST:
        group = BACKWARD_THREADS
    var sum_bytes = 2 * H * size_of[Scalar[accum_type[dtype]]]()
    if rows == 0 or sum_bytes > shared_memory():
        return RowGeometry(1, group, 0, 0, 0)
    var most = multiprocessors()
    var groups = min(ELEMENT_THREADS // group, shared_memory() // sum_bytes)
    if rows > LONGEST_RUN * most * groups:
        most *= COLUMN_BLOCKS
    var turns = ceildiv(rows, most * groups)
    groups = ceildiv(rows, most * turns)
    return RowGeometry(1, group, groups, min(ceildiv(rows, groups), most), groups * sum_bytes)


def wide_geometry[dtype: DType](rows: Int, H: Int) -> RowGeometry:
    """The geometry of `ln_backward_wide`: a block for each multiprocessor, which has registers and shared memory for no more.
    """
    var group = lanes_of_a_warp()
    while group < WIDE_THREADS and WIDE_VECTORS * group * vector_width[dtype] < H:
        group *= 2
    # Two rows of both tensors for every group, and gamma and beta.
    var row_bytes = wide_room[dtype](group) * size_of[Scalar[dtype]]()
    var most = min(WIDE_THREADS // group, (shared_memory() // row_bytes - 2) // 4)
    if WIDE_VECTORS * group * vector_width[dtype] < H or most == 0 or rows == 0:
        return RowGeometry(WIDE_VECTORS, group, 0, 0, 0)
    var turns = ceildiv(rows, multiprocessors() * most)
    var groups = ceildiv(rows, multiprocessors() * turns)
    var blocks = min(ceildiv(rows, groups), multiprocessors())
    return RowGeometry(WIDE_VECTORS, group, groups, blocks, (4 * groups + 2) * row_bytes)


def suits_shared[dtype: DType](H: Int, stride: Int) -> Bool:
    """Whether rows of the input begin at any address, those of ln_out do not, and a lane of a warp has no more than a vector of
    a row: longer ones are faster element by element."""
    comptime width = vector_width[dtype]
    return H % width != 0 and stride % width == 0 and H <= width * lanes_of_a_warp()


def suits_ln_backward_rows[
    dtype: DType
](
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
) -> Bool:
    """Whether rows are whole numbers of aligned vectors, and short enough for a block's shared memory."""
    var H = Int(sizes.hidden_dim)
    var aligned = (
        H % vector_width[dtype] == 0 and is_aligned(dln) and is_aligned(input) and is_aligned(ln_weight)
    )
    aligned = (
        aligned and is_aligned(ln_bias) and is_aligned(grad_input.as_imm()) and is_aligned(ln_out.as_imm())
    )
    return aligned and backward_geometry[dtype](Int(sizes.rows()), H).groups > 0


def launch_ln_backward_rows[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    partials: MutPtr[accum_type[dtype]],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int = DX | LN_OUT | SUMS,
) raises:
    """One launch: dx, ln_out, and partial sums of dgamma and dbeta, [geometry.blocks, 2, H]; of these, `parts`.
    """
    comptime for vectors in range(1, MAX_BACKWARD_VECTORS + 1):
        if geometry.vectors == vectors:
            launcher.launch[ln_backward_rows[dtype, vectors, L.wgmma]](
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
                Int32(parts),
                grid_dim=Dim(geometry.blocks),
                block_dim=Dim(geometry.group, geometry.groups),
                shared_bytes=geometry.shared_bytes,
                early=L.wgmma and starts_early(sizes),
            )


def launch_ln_backward_wide[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int,
    stride: Int,
) raises -> Shares[accum_type[dtype]]:
    """One launch: dx, ln_out, and the shares of dgamma and dbeta that are returned; of these, `parts`."""
    var H = Int(sizes.hidden_dim)
    var count = geometry.blocks * 2 * H if parts & SUMS != 0 else 0
    var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
    # Rows of whole vectors are short only where those of dln lie apart.
    var shifted = H % vector_width[dtype] != 0 or geometry.group < WIDE_THREADS
    comptime for way in range(6):
        comptime group = WIDE_THREADS >> max(0, way - 1)
        if geometry.group == group and shifted == (way > 0):
            launcher.launch[ln_backward_wide[dtype, group, way > 0, L.wgmma]](
                "ln_backward_wide",
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
                Int32(stride),
                Int32(parts),
                grid_dim=Dim(geometry.blocks),
                block_dim=Dim(group, geometry.groups),
                shared_bytes=geometry.shared_bytes,
                early=L.wgmma and starts_early(sizes),
            )
    return Shares(partials.as_imm(), geometry.blocks)


def launch_ln_backward_elements[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    geometry: RowGeometry,
    parts: Int,
    stride: Int,
) raises -> Shares[accum_type[dtype]]:
    """One launch: dx, ln_out, and the shares of dgamma and dbeta that are returned; of these, `parts`."""
    var count = geometry.blocks * 2 * Int(sizes.hidden_dim) if parts & SUMS != 0 else 0
    var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
    comptime for group in [64, 128, BACKWARD_THREADS, ELEMENT_THREADS]:
        if geometry.group == group:
            launcher.launch[ln_backward_elements[dtype, group, L.wgmma]](
                "ln_backward_elements",
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
                Int32(stride),
                Int32(parts),
                grid_dim=Dim(geometry.blocks),
                block_dim=Dim(group, geometry.groups),
                shared_bytes=geometry.shared_bytes,
                early=L.wgmma and starts_early(sizes),
            )
    return Shares(partials.as_imm(), geometry.blocks)


def launch_ln_backward_fast[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    parts: Int,
    stride: Int = 0,
) raises -> Shares[accum_type[dtype]]:
    """One launch or two: of dx, ln_out, and shares of dgamma and dbeta, what `parts` names. None where there are no rows.

    Rows of dln and ln_out are `stride` elements apart, H where that is 0.
    """
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var dln_stride = stride if stride > 0 else H
    if dln_stride == H and suits_ln_backward_rows[dtype](
        grad_input, ln_out, dln, input, ln_weight, ln_bias, sizes
    ):
        var geometry = backward_geometry[dtype](rows, H)
        var count = geometry.blocks * 2 * H if parts & SUMS != 0 else 0
        var partials = launcher.workspace[accum_type[dtype]]("ln_backward_partials", count)
        launch_ln_backward_rows[dtype](
            launcher,
            grad_input,
            ln_out,
            partials,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
            geometry,
            parts,
        )
        return Shares(partials.as_imm(), geometry.blocks)
    var shares = Shares(mean, 0)
    var tensors = is_aligned(dln) and is_aligned(input) and is_aligned(ln_weight) and is_aligned(ln_bias)
    tensors = tensors and is_aligned(grad_input.as_imm()) and is_aligned(ln_out.as_imm())
    comptime if L.wgmma and dtype.is_half_float():
        var wide = wide_geometry[dtype](rows, H)
        var pays = H % vector_width[dtype] != 0 or rows > WIDE_TURNS * multiprocessors()
        if tensors and pays and dln_stride % vector_width[dtype] == 0 and wide.groups > 0:
            return launch_ln_backward_wide[dtype](
                launcher,
                grad_input,
                ln_out,
                dln,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                sizes,
                wide,
                parts,
                dln_stride,
            )
    var aligned = H % vector_width[dtype] == 0 and dln_stride == H and is_aligned(dln) and is_aligned(input)
    aligned = aligned and is_aligned(ln_weight) and is_aligned(ln_bias)
    aligned = aligned and is_aligned(grad_input.as_imm()) and is_aligned(ln_out.as_imm())
    var geometry = element_geometry[dtype](rows, H)
    if not aligned and geometry.groups > 0:
        return launch_ln_backward_elements[dtype](
            launcher,
            grad_input,
            ln_out,
            dln,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            sizes,
            geometry,
            parts,
            dln_stride,
        )
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            if parts & SUMS != 0:
                # First, for dx may be written over dln.
                shares = launch_column_partials[dtype, width, True](
                    launcher, dln, input, mean, rstd, rows, H, dln_stride
                )
            if rows > 0 and parts & (DX | LN_OUT) != 0:
                launcher.launch[ln_backward_any[dtype, width]](
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
                    Int32(dln_stride),
                    Int32(parts),
                    grid_dim=Dim(rows),
                    block_dim=Dim(ANY_THREADS),
                )
            return shares^
    return shares^


def launch_ln_backward_few[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    dln: ImmPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
    parts: Int,
    bias_wanted: Bool,
    stride: Int,
) raises:
    """One launch: of dx, ln_out, dgamma with dbeta, and db, what `parts` and `bias_wanted` say. dx lies apart from dln; rows
    of dln and ln_out are `stride` elements apart, H where that is 0."""
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var row_stride = stride if stride > 0 else H
    var O = Int(sizes.output_dim) if bias_wanted else 0
    var blocks = (rows if parts & (DX | LN_OUT) != 0 else 0) + ceildiv(O, COLUMN_LANES)
    blocks += ceildiv(H, COLUMN_LANES) if parts & SUMS != 0 else 0
    var aligned = H % vector_width[dtype] == 0 and row_stride == H and is_aligned(dln) and is_aligned(input)
    aligned = aligned and is_aligned(ln_weight) and is_aligned(ln_bias)
    aligned = aligned and is_aligned(grad_input.as_imm()) and is_aligned(ln_out.as_imm())
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            launcher.launch[ln_backward_few[dtype, width, L.wgmma]](
                "ln_backward_few",
                grad_input,
                ln_out,
                grad_ln_weight,
                grad_ln_bias,
                grad_bias,
                dln,
                grad_output,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                sizes.rows(),
                sizes.hidden_dim,
                Int32(row_stride),
                Int32(parts),
                Int32(O),
                grid_dim=Dim(blocks),
                block_dim=Dim(FEW_THREADS),
                early=L.wgmma,
            )
            return
