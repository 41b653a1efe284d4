"""Sums over rows in two stages: partial sums per block, then their sum in a fixed order.

No atomics, so every run gives the same bits.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from max.gpu import barrier, block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from shared.common import (
    ImmPtr,
    MutPtr,
    accum_type,
    multiprocessors,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from shared.launcher import Launcher
from common.row_reductions import is_aligned, vector_width
from .rows import load_elements
from .tensors import Sizes

comptime COLUMN_LANES = 32
"""Neighbouring threads in a sum over rows; each owns the columns that it loads at a time."""
comptime COLUMN_ROWS = 8
"""Threads that share a column in the first stage of a sum over rows."""
comptime COLUMN_BLOCKS = 6
"""Blocks per multiprocessor in the first stage of a sum over rows."""
comptime FINISH_ROWS = 16
"""Threads that share a column in the second stage of a sum over rows."""
comptime DIRECT_ROWS = 1024
"""Maximum rows that the second stage adds without a first stage."""
comptime MORE_DIRECT_ROWS = 4096
"""DIRECT_ROWS if memory matters more than time."""
comptime MIN_SLICE_ROWS = 4 * COLUMN_ROWS
"""Minimum rows per block in the first stage: with fewer, a partial sum costs as much as the rows."""
comptime MIN_LARGE_SLICE_ROWS = 256
"""MIN_SLICE_ROWS if memory matters more than time: the partial sums then take a hundredth of the input's
memory.
"""


@__name("column_partials")
def column_partials[
    dtype: DType, x_dtype: DType, width: Int, with_x_hat: Bool
](
    partials: MutPtr[accum_type[dtype]],  # [slices, columns], or [slices, 2, columns] if with_x_hat
    dy: ImmPtr[dtype],  # [rows, dy_stride]
    input: ImmPtr[x_dtype],  # [rows, columns], read only if with_x_hat, like mean and rstd
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    columns: Int32,
    dy_stride: Int32,
    rows_per_slice: Int32,
):
    """Compute the first stage of a sum over rows: block (i, j) sums COLUMN_LANES * width columns over the
    rows of slice j.

    It sums dy, as for db; or, if with_x_hat, dy * x_hat and dy, as for dgamma and dbeta.
    """
    comptime accum = accum_type[dtype]
    comptime sums_per_column = 2 if with_x_hat else 1
    var N = Int(columns)
    var column = (block_idx.x * COLUMN_LANES + thread_idx.x) * width
    var first = block_idx.y * Int(rows_per_slice)
    var end = min(Int(rows), first + Int(rows_per_slice))

    var sums = Array[SIMD[accum, width], sums_per_column](fill=0)
    if column < N:
        for row in range(first + thread_idx.y, end, COLUMN_ROWS):
            var offset = row * Int(dy_stride) + column
            var d = load_elements[width, accum](dy, offset)
            comptime if with_x_hat:
                var x = load_elements[width, accum](input, row * N + column)
                sums[0] += d * ((x - mean[unsafe_offset=row]) * rstd[unsafe_offset=row])
            sums[sums_per_column - 1] += d

    var thread_sums = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[sums_per_column * COLUMN_ROWS, COLUMN_LANES * width]()
    )
    comptime for s in range(sums_per_column):
        comptime for i in range(width):
            thread_sums[s * COLUMN_ROWS + thread_idx.y, thread_idx.x * width + i] = sums[s][i]
    barrier()
    var thread = thread_idx.y * COLUMN_LANES + thread_idx.x
    comptime tile = COLUMN_LANES * width
    for c in range(thread, tile, COLUMN_LANES * COLUMN_ROWS):
        if block_idx.x * tile + c < N:
            comptime for s in range(sums_per_column):
                var total = Scalar[accum](0)
                comptime for lane in range(COLUMN_ROWS):
                    total += thread_sums[s * COLUMN_ROWS + lane, c]
                var offset = (block_idx.y * sums_per_column + s) * N + block_idx.x * tile + c
                partials[unsafe_offset=offset] = total


@__name("finish_sums")
def finish_sums[
    dtype: DType, x_dtype: DType, source: DType, early: Bool
](
    grad_ln_weight: MutPtr[x_dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[x_dtype],  # [H], dbeta
    ln_partials: ImmPtr[accum_type[dtype]],  # [ln_slices, 2, H]
    ln_slices: Int32,
    hidden_dim: Int32,  # 0 if dgamma and dbeta are not requested
    grad_bias: MutPtr[dtype],  # [O], db
    bias_partials: ImmPtr[source],  # [bias_slices, O], or the rows of dY themselves
    bias_slices: Int32,
    output_dim: Int32,  # 0 if db is not requested
):
    """Compute the second stage of the sums over rows: add the slices of every column of dgamma, dbeta and db.

    Parameters:
        dtype: The dtype of db.
        x_dtype: The dtype of dgamma and dbeta.
        source: The dtype of the slices of db.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var ln_blocks = ceildiv(2 * H, COLUMN_LANES)
    var column = block_idx.x * COLUMN_LANES + thread_idx.x
    var bias_column = column - ln_blocks * COLUMN_LANES
    var total = Scalar[accum](0)
    if block_idx.x < ln_blocks:
        if column < 2 * H:
            total = sum_slices[accum](ln_partials, Int(ln_slices), 2 * H, column)
    elif bias_column < O:
        total = sum_slices[accum](bias_partials, Int(bias_slices), O, bias_column)
    var thread_sums = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[FINISH_ROWS, COLUMN_LANES]()
    )
    thread_sums[thread_idx.y, thread_idx.x] = total
    barrier()
    if thread_idx.y == 0:
        total = 0
        comptime for lane in range(FINISH_ROWS):
            total += thread_sums[lane, thread_idx.x]
        if block_idx.x < ln_blocks:
            if column < H:
                grad_ln_weight[unsafe_offset=column] = total.cast[x_dtype]()
            elif column < 2 * H:
                grad_ln_bias[unsafe_offset=column - H] = total.cast[x_dtype]()
        elif bias_column < O:
            grad_bias[unsafe_offset=bias_column] = total.cast[dtype]()


@always_inline
def sum_slices[
    source: DType, //, accum: DType
](partials: ImmPtr[source], slices: Int, columns: Int, column: Int) -> Scalar[accum]:
    """Add one column of every FINISH_ROWS-th slice, starting at slice thread_idx.y, eight slices at a time.
    """
    comptime unroll = 8
    var totals = SIMD[accum, unroll](0)
    var slice = thread_idx.y
    while slice + (unroll - 1) * FINISH_ROWS < slices:
        comptime for i in range(unroll):
            totals[i] += partials[unsafe_offset=(slice + i * FINISH_ROWS) * columns + column].cast[accum]()
        slice += unroll * FINISH_ROWS
    while slice < slices:
        totals[0] += partials[unsafe_offset=slice * columns + column].cast[accum]()
        slice += FINISH_ROWS
    return totals.reduce_add()


# ---- Launches ----------------------------------------------------------------------------------------------


@fieldwise_init
struct PartialSums[dtype: DType](Copyable, Movable):
    """Partial column sums [slices, columns]: dgamma and dbeta with 2 H columns, or db with O columns."""

    @__allow_legacy_any_origin_fields
    var partials: ImmPtr[Self.dtype]
    var slices: Int


def launch_column_partials[
    L: Launcher, dtype: DType, x_dtype: DType, //, width: Int, with_x_hat: Bool
](
    mut launcher: L,
    dy: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    rows: Int,
    columns: Int,
    dy_stride: Int,
    min_rows: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one kernel that computes partial sums over rows of dy or, if with_x_hat, of dy * x_hat and then
    dy. Each is over at least `min_rows` rows. No-op if there are no rows.
    """
    comptime sums_per_column = 2 if with_x_hat else 1
    var tiles = ceildiv(columns, COLUMN_LANES * width)
    # Use enough slices to fill the GPU, but none with too few rows.
    var wanted_slices = ceildiv(COLUMN_BLOCKS * multiprocessors(), tiles)
    var rows_per_slice = max(ceildiv(rows, wanted_slices), min_rows)
    var slices = ceildiv(rows, rows_per_slice)
    var partials = launcher.workspace[accum_type[dtype]](
        "column_partials", slices * columns * sums_per_column
    )
    if slices > 0:
        launcher.launch[column_partials[dtype, x_dtype, width, with_x_hat]](
            "column_partials",
            partials,
            dy,
            input,
            mean,
            rstd,
            Int32(rows),
            Int32(columns),
            Int32(dy_stride),
            Int32(rows_per_slice),
            grid_dim=Dim(tiles, slices),
            block_dim=Dim(COLUMN_LANES, COLUMN_ROWS),
        )
    return PartialSums(partials.as_imm(), slices)


def launch_bias_partials[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    grad_output: ImmPtr[dtype],
    placeholder: ImmPtr[accum_type[dtype]],
    sizes: Sizes,
    min_rows: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one kernel that computes partial sums of db over rows of grad_output. `placeholder` is any
    address; it is not read.
    """
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var O = Int(sizes.output_dim)
    if O % width == 0 and is_aligned(grad_output):
        return launch_column_partials[width, False](
            launcher, grad_output, grad_output, placeholder, placeholder, rows, O, O, min_rows
        )
    return launch_column_partials[1, False](
        launcher, grad_output, grad_output, placeholder, placeholder, rows, O, O, min_rows
    )


def launch_norm_partials[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    dln: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    sizes: Sizes,
    stride: Int,
    min_rows: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch one kernel that computes partial sums of dgamma and dbeta, from dln with a row pitch of `stride`
    elements.
    """
    comptime width = vector_width[dtype]
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    if H % width == 0 == stride % width and is_aligned(dln) and is_aligned(input):
        return launch_column_partials[width, True](
            launcher, dln, input, mean, rstd, rows, H, stride, min_rows
        )
    return launch_column_partials[1, True](launcher, dln, input, mean, rstd, rows, H, stride, min_rows)


def launch_finish_sums[
    L: Launcher, source: DType, x_dtype: DType, //, dtype: DType
](
    mut launcher: L,
    grad_ln_weight: MutPtr[x_dtype],
    grad_ln_bias: MutPtr[x_dtype],
    ln_sums: PartialSums[accum_type[dtype]],
    hidden_dim: Int,
    grad_bias: MutPtr[dtype],
    bias_sums: PartialSums[source],
    output_dim: Int,
) raises:
    """Launch one kernel that computes dgamma and dbeta [hidden_dim] and db [output_dim], each omitted if its
    size is 0. No-op if both are 0.
    """
    var blocks = ceildiv(2 * hidden_dim, COLUMN_LANES) + ceildiv(output_dim, COLUMN_LANES)
    if blocks == 0:
        return
    launcher.launch[finish_sums[dtype, x_dtype, source, L.wgmma]](
        "finish_sums",
        grad_ln_weight,
        grad_ln_bias,
        ln_sums.partials,
        Int32(ln_sums.slices),
        Int32(hidden_dim),
        grad_bias,
        bias_sums.partials,
        Int32(bias_sums.slices),
        Int32(output_dim),
        grid_dim=Dim(blocks),
        block_dim=Dim(COLUMN_LANES, FINISH_ROWS),
        early=L.wgmma,
    )
