"""Launches of the unfused and the fused kernels: order, geometry, and workspace.

This file and `layernorm_linear.mojo` import each other, because the kernels and the public ops are in one
file.
"""

from std.math import ceildiv
from std.sys.defines import get_defined_int
from max.gpu.host import Dim

from .layernorm_linear import (
    ROW_THREADS,
    TILE,
    add_bias_kernel,
    layernorm_kernel,
    ln_backward_row_sums,
    matmul_idiomatic_tiled,
    minimal_fused_backward_kernel,
    minimal_fused_forward_kernel,
    row_statistics_kernel,
    transpose_kernel,
)
from .shared.common import ImmPtr, MutPtr, accum_type, atomic_type
from .shared.launcher import Launcher
from .tensors import BackwardTensors, ForwardTensors, Sizes
from .unfused_backward import (
    COLUMN_TILE,
    clear_gradients_kernel,
    column_sums_kernel,
    convert_gradients_kernel,
    ln_backward_input,
    ln_backward_parameters,
)

comptime MAX_GRID_Y = get_defined_int["MAX_GRID_Y", 65535]()
"""NVIDIA's maximum grid along y (2^31 - 1 along x). Checks define a small one, so that kernels must stride."""


def validate_sizes(batch_size: Int, seq_len: Int, hidden_dim: Int, output_dim: Int) raises -> Sizes:
    """Return the sizes in the kernels' type; raise if a kernel does not support them."""
    if hidden_dim < 1 or output_dim < 1:
        raise Error(t"hidden_dim and output_dim must be at least 1, got {hidden_dim} and {output_dim}")
    comptime max_dim = TILE * MAX_GRID_Y
    if hidden_dim > max_dim or output_dim > max_dim:
        raise Error(t"hidden_dim and output_dim must be at most {max_dim}, got {hidden_dim} and {output_dim}")
    if batch_size * seq_len > Int(Int32.MAX):
        raise Error(t"batch_size * seq_len must be at most {Int32.MAX}, got {batch_size} * {seq_len}")
    return Sizes(Int32(batch_size), Int32(seq_len), Int32(hidden_dim), Int32(output_dim))


# ---- Single steps -------------------------------------------------------------------------------------------


def launch_row_statistics[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Launch one kernel: mean and rstd of every row."""
    launcher.launch[row_statistics_kernel[dtype]](
        "row_statistics",
        mean,
        rstd,
        input,
        sizes.rows(),
        sizes.hidden_dim,
        eps,
        grid_dim=Dim(ceildiv(Int(sizes.rows()), ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )


def launch_layernorm[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    ln_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Launch one kernel: the LayerNorm output of every row."""
    launcher.launch[layernorm_kernel[dtype]](
        "layernorm",
        ln_out,
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes.rows(),
        sizes.hidden_dim,
        grid_dim=Dim(Int(sizes.rows())),
        block_dim=Dim(ROW_THREADS),
    )


def launch_transpose[
    L: Launcher, //, dtype: DType
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32,) raises:
    """Launch one kernel: output [columns, rows] = input [rows, columns] transposed."""
    launcher.launch[transpose_kernel[dtype]](
        "transpose",
        output,
        input,
        rows,
        columns,
        grid_dim=Dim(ceildiv(Int(rows), TILE), ceildiv(Int(columns), TILE)),
        block_dim=Dim(TILE, TILE),
    )


def launch_matmul[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    output: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
) raises:
    """Launch one kernel: output [M, N] = a [M, K] @ b [K, N]."""
    launcher.launch[matmul_idiomatic_tiled[dtype]](
        "matmul",
        output,
        a,
        b,
        m,
        n,
        k,
        grid_dim=Dim(ceildiv(Int(m), TILE), ceildiv(Int(n), TILE)),
        block_dim=Dim(TILE, TILE),
    )


def launch_row_sums[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    row_sums: MutPtr[accum_type[dtype]],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Launch one kernel: c1 and c2 of every row."""
    launcher.launch[ln_backward_row_sums[dtype]](
        "ln_backward_row_sums",
        row_sums,
        dln,
        input,
        mean,
        rstd,
        ln_weight,
        sizes.rows(),
        sizes.hidden_dim,
        grid_dim=Dim(Int(sizes.rows())),
        block_dim=Dim(ROW_THREADS),
    )


# ---- Forward ------------------------------------------------------------------------------------------------


def launch_forward_unfused[L: Launcher, dtype: DType, //](mut launcher: L, t: ForwardTensors[dtype]) raises:
    """Launch five kernels: statistics, LayerNorm, transpose of W, matmul, bias."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    var weight_t = launcher.workspace[dtype]("linear_weight_t", Int(H) * Int(O))
    launch_row_statistics[dtype](launcher, t.mean, t.rstd, t.input, sizes, t.eps)
    launch_layernorm[dtype](
        launcher, ln_out, t.input, t.mean.as_imm(), t.rstd.as_imm(), t.ln_weight, t.ln_bias, sizes
    )
    launch_transpose[dtype](launcher, weight_t, t.linear_weight, O, H)
    launch_matmul[dtype](launcher, t.output, ln_out.as_imm(), weight_t.as_imm(), rows, O, H)
    launcher.launch[add_bias_kernel[dtype]](
        "add_bias", t.output, t.linear_bias, rows, O, grid_dim=Dim(Int(rows)), block_dim=Dim(ROW_THREADS)
    )


def launch_forward_fused[L: Launcher, dtype: DType, //](mut launcher: L, t: ForwardTensors[dtype]) raises:
    """Launch one kernel."""
    ref sizes = t.sizes
    launcher.launch[minimal_fused_forward_kernel[dtype]](
        "minimal_fused_forward",
        t.output,
        t.mean,
        t.rstd,
        t.input,
        t.ln_weight,
        t.ln_bias,
        t.linear_weight,
        t.linear_bias,
        sizes.batch_size,
        sizes.seq_len,
        sizes.hidden_dim,
        sizes.output_dim,
        t.eps,
        grid_dim=Dim(Int(sizes.batch_size), min(Int(sizes.seq_len), MAX_GRID_Y)),
        block_dim=Dim(1),
    )


# ---- Backward -----------------------------------------------------------------------------------------------


def launch_backward_unfused[L: Launcher, dtype: DType, //](mut launcher: L, t: BackwardTensors[dtype]) raises:
    """Launch eight kernels, one per step of the chain rule; no atomics, so every run gives the same bits."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    var dln = launcher.workspace[dtype]("dln", Int(rows) * Int(H))
    var dy_t = launcher.workspace[dtype]("grad_output_t", Int(rows) * Int(O))
    var row_sums = launcher.workspace[accum_type[dtype]]("row_sums", 2 * Int(rows))

    # Linear: dln = dY W, dW = dY^T ln_out, db = sum of dY.
    launch_matmul[dtype](launcher, dln, t.grad_output, t.linear_weight, rows, H, O)
    launch_layernorm[dtype](launcher, ln_out, t.input, t.mean, t.rstd, t.ln_weight, t.ln_bias, sizes)
    launch_transpose[dtype](launcher, dy_t, t.grad_output, rows, O)
    launch_matmul[dtype](launcher, t.grad_weight, dy_t.as_imm(), ln_out.as_imm(), O, H, rows)
    launcher.launch[column_sums_kernel[dtype]](
        "column_sums",
        t.grad_bias,
        t.grad_output,
        rows,
        O,
        grid_dim=Dim(ceildiv(Int(O), COLUMN_TILE)),
        block_dim=Dim(COLUMN_TILE, COLUMN_TILE),
    )

    # LayerNorm: c1 and c2, then dx; dgamma and dbeta.
    launch_row_sums[dtype](launcher, row_sums, dln.as_imm(), t.input, t.mean, t.rstd, t.ln_weight, sizes)
    launcher.launch[ln_backward_input[dtype]](
        "ln_backward_input",
        t.grad_input,
        row_sums.as_imm(),
        dln.as_imm(),
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        rows,
        H,
        grid_dim=Dim(Int(rows)),
        block_dim=Dim(ROW_THREADS),
    )
    launcher.launch[ln_backward_parameters[dtype]](
        "ln_backward_parameters",
        t.grad_ln_weight,
        t.grad_ln_bias,
        dln.as_imm(),
        t.input,
        t.mean,
        t.rstd,
        rows,
        H,
        grid_dim=Dim(ceildiv(Int(H), COLUMN_TILE)),
        block_dim=Dim(COLUMN_TILE, COLUMN_TILE),
    )


def launch_backward_fused[L: Launcher, dtype: DType, //](mut launcher: L, t: BackwardTensors[dtype]) raises:
    """Launch three kernels: clear the sums, compute all five gradients, round the sums."""
    comptime sum_dtype = atomic_type[dtype]
    ref sizes = t.sizes
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var elements = max(H, O, O * H)
    var sums_ln_weight = launcher.workspace[sum_dtype]("sums_ln_weight", H)
    var sums_ln_bias = launcher.workspace[sum_dtype]("sums_ln_bias", H)
    var sums_weight = launcher.workspace[sum_dtype]("sums_weight", O * H)
    var sums_bias = launcher.workspace[sum_dtype]("sums_bias", O)

    launcher.launch[clear_gradients_kernel[sum_dtype]](
        "clear_gradients",
        sums_ln_weight,
        sums_ln_bias,
        sums_weight,
        sums_bias,
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(ceildiv(elements, ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )
    launcher.launch[minimal_fused_backward_kernel[dtype, sum_dtype]](
        "minimal_fused_backward",
        t.grad_input,
        sums_ln_weight,
        sums_ln_bias,
        sums_weight,
        sums_bias,
        t.grad_output,
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        t.linear_weight,
        sizes.batch_size,
        sizes.seq_len,
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(Int(sizes.batch_size), min(Int(sizes.seq_len), MAX_GRID_Y)),
        block_dim=Dim(1),
    )
    launcher.launch[convert_gradients_kernel[dtype, sum_dtype]](
        "convert_gradients",
        t.grad_ln_weight,
        t.grad_ln_bias,
        t.grad_weight,
        t.grad_bias,
        sums_ln_weight.as_imm(),
        sums_ln_bias.as_imm(),
        sums_weight.as_imm(),
        sums_bias.as_imm(),
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(ceildiv(elements, ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )
