"""Recompute the LayerNorm output from the statistics in a separate launch, for a product dW that waits for
nothing else or reads ln_out transposed.

No element depends on another one of its row, so a block processes neighbouring columns of some rows, and a
thread keeps its gamma and beta in registers.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import Dim
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .rows import load_elements, normalize, starts_early, store_elements
from shared.common import ImmPtr, MutPtr, accum_type, launch_dependent_grids, wait_on_dependent_grids
from shared.launcher import Launcher
from common.row_reductions import is_aligned, vector_width
from .tensors import BackwardTensors

comptime THREADS = 256
"""Maximum threads per block."""
comptime ROWS_IN_FLIGHT = 4
"""Rows per thread whose loads are in flight at a time."""
comptime TILE = 32
"""Rows and columns of the tile that a block transposes."""
comptime LINES_PER_PASS = 8
"""Rows of the tile that are processed at a time."""


@__name("ln_out_rows")
def normalize_rows[
    dtype: DType, x_dtype: DType, width: Int, early: Bool
](
    ln_out: MutPtr[dtype],  # [rows, stride]; zeros from column H on
    input: ImmPtr[x_dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    stride: Int32,
):
    """Compute ln_out = x_hat * gamma + beta with x_hat = (x - mean) * rstd. A thread computes `width` columns
    of ROWS_IN_FLIGHT rows.
    """
    comptime accum = accum_type[dtype]
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var H = Int(hidden_dim)
    var column = (block_idx.y * block_dim.x + thread_idx.x) * width
    if column >= Int(stride):
        return
    var first = block_idx.x * block_dim.y * ROWS_IN_FLIGHT + thread_idx.y
    var gamma = SIMD[accum, width](0)
    var beta = SIMD[accum, width](0)
    var x = Array[SIMD[accum, width], ROWS_IN_FLIGHT](fill=0)
    if column < H:
        gamma = load_elements[width, accum](ln_weight, column)
        beta = load_elements[width, accum](ln_bias, column)
        comptime for i in range(ROWS_IN_FLIGHT):
            var row = first + i * block_dim.y
            if row < Int(rows):
                x[i] = load_elements[width, accum](input, row * H + column)
    comptime for i in range(ROWS_IN_FLIGHT):
        var row = first + i * block_dim.y
        if row < Int(rows):
            var x_hat = normalize[x_dtype](x[i], mean[unsafe_offset=row], rstd[unsafe_offset=row])
            var y = x_hat.fma(gamma, beta).cast[dtype]()
            store_elements(ln_out, row * Int(stride) + column, y)


def launch_ln_out[
    L: Launcher, dtype: DType, x_dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype, x_dtype], ln_out: MutPtr[dtype], stride: Int) raises:
    """Launch one kernel that computes ln_out, with a row pitch of `stride` elements. Launch nothing without
    rows.
    """
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    if rows == 0:
        return
    var aligned = is_aligned[x_dtype](t.input, t.ln_weight, t.ln_bias) and is_aligned(ln_out.as_imm())
    comptime for width in [vector_width[dtype], 1]:
        if width == 1 or aligned and H % width == 0 == stride % width:
            var columns = ceildiv(stride, width)
            var lanes = min(columns, THREADS)
            var groups = min(rows, THREADS // lanes)
            launcher.launch[normalize_rows[dtype, x_dtype, width, L.wgmma]](
                "ln_out",
                ln_out,
                t.input,
                t.mean,
                t.rstd,
                t.ln_weight,
                t.ln_bias,
                t.sizes.rows(),
                t.sizes.hidden_dim,
                Int32(stride),
                grid_dim=Dim(ceildiv(rows, groups * ROWS_IN_FLIGHT), ceildiv(columns, lanes)),
                block_dim=Dim(lanes, groups),
                early=L.wgmma and starts_early(t.sizes),
            )
            return


@__name("ln_out_transposed")
def normalize_transposed[
    dtype: DType, early: Bool
](
    ln_out: MutPtr[dtype],  # [H, rows]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
):
    """Compute the transpose of ln_out. A block reads a tile along rows and writes it along columns."""
    comptime accum = accum_type[dtype]
    # The extra column puts the elements of a column in different banks.
    var tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[TILE, TILE + 1]())
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var H = Int(hidden_dim)
    var first_row = block_idx.x * TILE
    var first_column = block_idx.y * TILE
    var column = first_column + thread_idx.x
    if column < H:
        var gamma = ln_weight[unsafe_offset=column].cast[accum]()
        var beta = ln_bias[unsafe_offset=column].cast[accum]()
        comptime for i in range(TILE // LINES_PER_PASS):
            var line = i * LINES_PER_PASS + thread_idx.y
            var row = first_row + line
            if row < Int(rows):
                var x = input[unsafe_offset=row * H + column].cast[accum]()
                var x_hat = normalize[dtype](x, mean[unsafe_offset=row], rstd[unsafe_offset=row])
                tile[line, thread_idx.x] = x_hat.fma(gamma, beta).cast[dtype]()
    barrier()
    var row = first_row + thread_idx.x
    comptime for i in range(TILE // LINES_PER_PASS):
        var line = i * LINES_PER_PASS + thread_idx.y
        if row < Int(rows) and first_column + line < H:
            ln_out[unsafe_offset=(first_column + line) * Int(rows) + row] = tile[thread_idx.x, line]


def launch_ln_out_transposed[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype, dtype], ln_out: MutPtr[dtype]) raises:
    """Launch one kernel that computes the transpose of ln_out, [H, rows]. No-op if there are no rows."""
    var rows = Int(t.sizes.rows())
    if rows == 0:
        return
    launcher.launch[normalize_transposed[dtype, L.wgmma]](
        "ln_out",
        ln_out,
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        t.sizes.rows(),
        t.sizes.hidden_dim,
        grid_dim=Dim(ceildiv(rows, TILE), ceildiv(Int(t.sizes.hidden_dim), TILE)),
        block_dim=Dim(TILE, LINES_PER_PASS),
        early=L.wgmma and starts_early(t.sizes),
    )
