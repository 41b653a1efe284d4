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
from shared.common import ImmPtr, MutPtr, accum_type, start_later_grids, wait_for_earlier_grids
from shared.launcher import Launcher
from common.row_reductions import is_aligned, vector_width
from .tensors import Sizes

comptime FEW_THREADS = 512
"""Threads per block; they share a row, or COLUMN_LANES columns."""
comptime FEW_ABREAST = 8
"""Rows from which a thread loads an element at a time."""


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
    """Compute everything but the products for few rows. The first blocks each compute dx and ln_out of one
    row, the next ones dgamma and dbeta of COLUMN_LANES columns, the last ones db. Blocks do not depend on
    each other, since dln is only read.

    Parameters:
        dtype: The dtype of dln, dY, ln_out and db.
        x_dtype: The dtype of the other tensors.
        width: Elements of a row that a thread loads at a time: a vector, or 1.
        early: Whether the kernel may start before the previous launch is done.
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
