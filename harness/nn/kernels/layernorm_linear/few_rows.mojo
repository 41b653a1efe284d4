"""LayerNorm backward for few rows: one launch computes dx, ln_out, dgamma, dbeta and db."""

from std.math import ceildiv
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import Dim
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .backward import backward_row
from .rows import DX, LN_OUT, SUMS
from .sums import COLUMN_LANES
from shared.common import ImmPtr, MutPtr, accum_type, launch_dependent_grids, wait_on_dependent_grids
from shared.launcher import Launcher
from common.row_reductions import is_aligned, vector_width
from .tensors import Sizes

comptime FEW_THREADS = 512
"""Threads per block, which share a row or COLUMN_LANES columns."""
comptime ROWS_IN_FLIGHT = 8
"""Rows per thread whose loads are in flight at a time."""


@__name("ln_backward_few")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(FEW_THREADS)))
def ln_backward_few[
    dtype: DType, x_dtype: DType, width: Int, early: Bool
](
    grad_input: MutPtr[x_dtype],  # [rows, H], does not overlap dln
    ln_out: MutPtr[dtype],  # [rows, stride], recomputed for dW; zeros from column H on
    grad_ln_weight: MutPtr[x_dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[x_dtype],  # [H], dbeta
    grad_bias: MutPtr[dtype],  # [O], db
    dln: ImmPtr[dtype],  # [rows, stride]
    grad_output: ImmPtr[dtype],  # [rows, O]
    input: ImmPtr[x_dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[x_dtype],  # [H], gamma
    ln_bias: ImmPtr[x_dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
    stride: Int32,
    parts: Int32,  # sum of DX, LN_OUT and SUMS
    output_dim: Int32,  # 0 if db is not requested
):
    """Compute everything except the products for few rows. The first blocks compute dx and ln_out of one row
    each, the next blocks dgamma and dbeta of COLUMN_LANES columns, and the last blocks db. Blocks are
    independent, since dln is only read.

    Parameters:
        dtype: The dtype of dln, dY, ln_out and db.
        x_dtype: The dtype of the other tensors.
        width: Elements of a row that a thread loads at a time: a vector, or 1.
        early: Whether the kernel may start before the previous launch is done.
    """
    comptime accum = accum_type[dtype]
    comptime if early:
        wait_on_dependent_grids()
        launch_dependent_grids()
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
    var group_index = thread_idx.x // COLUMN_LANES
    comptime groups = FEW_THREADS // COLUMN_LANES
    var totals = SIMD[accum, 2](0)
    var is_norm_block = block < norm_blocks
    var column = (block if is_norm_block else block - norm_blocks) * COLUMN_LANES + lane
    var in_bounds = column < (H if is_norm_block else Int(output_dim))
    var source = dln if is_norm_block else grad_output
    var source_stride = Int(stride) if is_norm_block else Int(output_dim)
    for row in range(group_index, Int(rows), groups * ROWS_IN_FLIGHT):
        var d = Array[Scalar[accum], ROWS_IN_FLIGHT](fill=0)
        var x_hat = Array[Scalar[accum], ROWS_IN_FLIGHT](fill=0)
        comptime for i in range(ROWS_IN_FLIGHT):
            var this_row = row + i * groups
            if in_bounds and this_row < Int(rows):
                d[i] = source[unsafe_offset=this_row * source_stride + column].cast[accum]()
                if is_norm_block:
                    var x = input[unsafe_offset=this_row * H + column].cast[accum]()
                    x_hat[i] = (x - mean[unsafe_offset=this_row]) * rstd[unsafe_offset=this_row]
        comptime for i in range(ROWS_IN_FLIGHT):
            totals += SIMD[accum, 2](d[i] * x_hat[i], d[i])

    var group_sums = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[2 * groups, COLUMN_LANES]()
    )
    comptime for i in range(2):
        group_sums[2 * group_index + i, lane] = totals[i]
    barrier()
    if group_index == 0 and in_bounds:
        totals = 0
        comptime for group in range(groups):
            comptime for i in range(2):
                totals[i] += group_sums[2 * group + i, lane][0]
        if is_norm_block:
            grad_ln_weight[unsafe_offset=column] = totals[0].cast[x_dtype]()
            grad_ln_bias[unsafe_offset=column] = totals[1].cast[x_dtype]()
        else:
            grad_bias[unsafe_offset=column] = totals[1].cast[dtype]()


def launch_ln_backward_few[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    grad_input: MutPtr[x_dtype],
    ln_out: MutPtr[dtype],
    grad_ln_weight: MutPtr[x_dtype],
    grad_ln_bias: MutPtr[x_dtype],
    grad_bias: MutPtr[dtype],
    dln: ImmPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[x_dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[x_dtype],
    ln_bias: ImmPtr[x_dtype],
    sizes: Sizes,
    parts: Int,
    bias_requested: Bool,
    stride: Int,
) raises:
    """Launch one kernel that computes what `parts` and `bias_requested` select of dx, ln_out, dgamma with
    dbeta, and db. dx must not overlap dln; the row pitch of dln and ln_out is `stride` elements, H if
    `stride` is 0.
    """
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var row_stride = stride if stride > 0 else H
    var O = Int(sizes.output_dim) if bias_requested else 0
    var blocks = (rows if parts & (DX | LN_OUT) != 0 else 0) + ceildiv(O, COLUMN_LANES)
    blocks += ceildiv(H, COLUMN_LANES) if parts & SUMS != 0 else 0
    var aligned = H % vector_width[dtype] == 0 and row_stride == H
    aligned = aligned and is_aligned[x_dtype](input, ln_weight, ln_bias, grad_input.as_imm())
    aligned = aligned and is_aligned[dtype](dln, ln_out.as_imm())
    comptime for width in [vector_width[dtype], 1]:
        if aligned or width == 1:
            launcher.launch[ln_backward_few[dtype, x_dtype, width, L.wgmma]](
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
