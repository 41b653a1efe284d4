"""Launches of puzzle 28's kernels: geometry, and the launches before and after them."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import Dim

from .fast import (
    SEPARATE_LAUNCHES, TRANSPOSE_FIRST, dgamma_kernel, dx_kernel, layernorm_kernel, sums_by_threads_kernel,
)  # fmt: skip
from .parts import (
    BF16, BLOCK, BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_THREADS, BUFFERS, LANES, PER_THREAD, SLAB_ROWS, TENSOR_DEPTH, THREADS, TILE,
    VECTOR_BYTES, WARPS, bias_kernel, clear_kernel, column_sums_kernel, transpose_kernel,
)  # fmt: skip
from .product import product_kernel
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import Launcher


def launch_layernorm[
    L: Launcher, //, dtype: DType, step: Int
](
    mut launcher: L,
    ln_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    rows: Int,
    hidden: Int,
) raises:
    """Launch steps 1 to 4: one kernel, a warp per row."""
    check_row_length(hidden)
    comptime name: StaticString = "rows" if step == 1 else "once" if step == 2 else "vectors" if step == 3 else "shuffles"
    launcher.launch[layernorm_kernel[dtype, step]](
        name, ln_out, input, ln_weight, ln_bias, Int32(rows), Int32(hidden),
        grid_dim=Dim(ceildiv(rows, BLOCK_ROWS)), block_dim=Dim(THREADS),
    )  # fmt: skip


def check_row_length(hidden: Int) raises:
    """Raise if a row has more elements than a warp can keep in registers."""
    if hidden > PER_THREAD * LANES:
        raise Error(
            t"hidden is {hidden}, but the kernels keep a row in registers, at most"
            t" {PER_THREAD * LANES} elements"
        )


def launch_dx[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    rows: Int,
    hidden: Int,
) raises:
    """Launch step 5: one kernel, a warp per row."""
    check_row_length(hidden)
    launcher.launch[dx_kernel[dtype]](
        "dx", grad_input, dln, input, mean, rstd, ln_weight, Int32(rows), Int32(hidden),
        grid_dim=Dim(ceildiv(rows, BLOCK_ROWS)), block_dim=Dim(THREADS),
    )  # fmt: skip


def launch_dgamma[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    rows: Int,
    hidden: Int,
) raises:
    """Launch step 6: clear the sums, sum slabs of rows, add the slabs."""
    comptime accum = accum_type[dtype]
    comptime width = VECTOR_BYTES // size_of[Scalar[dtype]]()
    var slabs = ceildiv(rows, SLAB_ROWS)
    var sums = launcher.workspace[accum]("sums", 2 * slabs * hidden)
    launcher.launch[clear_kernel[accum]](
        "clear", sums, Int32(2 * slabs * hidden),
        grid_dim=Dim(ceildiv(2 * slabs * hidden, THREADS)), block_dim=Dim(THREADS),
    )  # fmt: skip
    launcher.launch[dgamma_kernel[dtype]](
        "dgamma", sums, dln, input, mean, rstd, Int32(rows), Int32(hidden),
        grid_dim=Dim(ceildiv(hidden, LANES * width), ceildiv(slabs, BLOCK_ROWS)), block_dim=Dim(THREADS),
    )  # fmt: skip
    launcher.launch[column_sums_kernel[dtype, accum]](
        "second_stage", grad_ln_weight, grad_ln_bias, sums.as_imm(), Int32(slabs), Int32(2 * hidden), Int32(hidden),
        grid_dim=Dim(ceildiv(2 * hidden, TILE)), block_dim=Dim(TILE, TILE),
    )  # fmt: skip


def launch_product[
    L: Launcher, //, dtype: DType, step: Int
](
    mut launcher: L,
    output: MutPtr[dtype],
    ln_out: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    rows: Int,
    hidden: Int,
    outputs: Int,
) raises:
    """Launch steps 7 to 10: one kernel, a block per tile of results; steps 9 and 10 are for bfloat16."""
    comptime if step == 10:
        var y = rebind[MutPtr[BF16]](output)
        var a = rebind[ImmPtr[BF16]](ln_out)
        var b = rebind[ImmPtr[BF16]](linear_weight)
        launch_tiles[10](launcher, "tensor", y, y, a, b, a, rows, outputs, hidden)
    else:
        comptime name: StaticString = "tiled" if step == 7 else "registers" if step == 8 else "copies"
        comptime side = TILE if step == 7 else BLOCK
        comptime threads = TILE if step == 7 else BLOCK_THREADS
        launcher.launch[sums_by_threads_kernel[dtype, step]](
            name, output, ln_out, linear_weight, Int32(rows), Int32(hidden), Int32(outputs),
            grid_dim=Dim(ceildiv(outputs, side), ceildiv(rows, side)), block_dim=Dim(threads, threads),
        )  # fmt: skip


def launch_tiles[
    L: Launcher,
    //,
    step: Int,
    row_blocks: Int = 4,
    a_transposed: Bool = False,
    b_transposed: Bool = False,
    has_bias: Bool = False,
    has_sums: Bool = False,
](
    mut launcher: L,
    name: StaticString,
    output: MutPtr[BF16],
    sums: MutPtr[BF16],
    a: ImmPtr[BF16],
    b: ImmPtr[BF16],
    bias: ImmPtr[BF16],
    height: Int,
    width: Int,
    depth: Int,
) raises:
    """Launch one product on tensor cores. A block has 128 rows, or 96: all are resident at GPT-2's width."""
    launcher.launch[product_kernel[step, row_blocks, a_transposed, b_transposed, has_bias, has_sums]](
        name, output, sums, a, b, bias, Int32(height), Int32(width), Int32(depth),
        grid_dim=Dim(ceildiv(width, BLOCK_COLUMNS), ceildiv(height, 32 * row_blocks)), block_dim=Dim(WARPS * LANES),
        shared_bytes=2 * BUFFERS * (32 * row_blocks + BLOCK_COLUMNS) * TENSOR_DEPTH,
    )  # fmt: skip


def transpose_copy[
    L: Launcher, //
](mut launcher: L, name: StaticString, matrix: ImmPtr[BF16], rows: Int, columns: Int) raises -> ImmPtr[BF16]:
    """Launch a transposed copy of a matrix into workspace and return it."""
    var transposed = launcher.workspace[BF16](name, rows * columns)
    launcher.launch[transpose_kernel](
        "transpose", transposed, matrix, Int32(rows), Int32(columns),
        grid_dim=Dim(ceildiv(columns, TILE), ceildiv(rows, TILE)), block_dim=Dim(TILE, BLOCK_ROWS),
    )  # fmt: skip
    return transposed.as_imm()


def launch_grad_weight[
    L: Launcher, //, has_sums: Bool
](
    mut launcher: L,
    grad_linear_weight: MutPtr[BF16],
    sums: MutPtr[BF16],
    dy: ImmPtr[BF16],
    ln_out: ImmPtr[BF16],
    rows: Int,
    hidden: Int,
    outputs: Int,
) raises:
    """Launch `dW = dy.T @ ln_out`, [outputs, hidden], and if `has_sums` the column sums of dy."""
    comptime if TRANSPOSE_FIRST:
        var a = transpose_copy(launcher, "dy_turned", dy, rows, outputs)
        var b = transpose_copy(launcher, "ln_out_turned", ln_out, rows, hidden)
        launch_tiles[12, 3, has_sums=has_sums](
            launcher, "dweight", grad_linear_weight, sums, a, b, dy, outputs, hidden, rows
        )
    else:
        launch_tiles[12, 3, True, True, has_sums=has_sums](
            launcher, "dweight", grad_linear_weight, sums, dy, ln_out, dy, outputs, hidden, rows
        )


def launch_grad_input[
    L: Launcher, //
](
    mut launcher: L,
    grad_ln_out: MutPtr[BF16],
    dy: ImmPtr[BF16],
    linear_weight: ImmPtr[BF16],
    rows: Int,
    hidden: Int,
    outputs: Int,
) raises:
    """Launch `dln = dy @ W`, [rows, hidden]."""
    comptime if TRANSPOSE_FIRST:
        var b = transpose_copy(launcher, "weight_turned", linear_weight, outputs, hidden)
        launch_tiles[11](launcher, "dln", grad_ln_out, grad_ln_out, dy, b, dy, rows, hidden, outputs)
    else:
        launch_tiles[11, b_transposed=True](
            launcher, "dln", grad_ln_out, grad_ln_out, dy, linear_weight, dy, rows, hidden, outputs
        )


def launch_layouts[
    L: Launcher, //
](
    mut launcher: L,
    grad_ln_out: MutPtr[BF16],
    grad_linear_weight: MutPtr[BF16],
    dy: ImmPtr[BF16],
    ln_out: ImmPtr[BF16],
    linear_weight: ImmPtr[BF16],
    rows: Int,
    hidden: Int,
    outputs: Int,
) raises:
    """Launch step 11: both products of the backward pass."""
    launch_grad_input(launcher, grad_ln_out, dy, linear_weight, rows, hidden, outputs)
    launch_grad_weight[False](
        launcher, grad_linear_weight, grad_linear_weight, dy, ln_out, rows, hidden, outputs
    )


def launch_epilogue[
    L: Launcher, //
](
    mut launcher: L,
    output: MutPtr[BF16],
    grad_linear_weight: MutPtr[BF16],
    grad_linear_bias: MutPtr[BF16],
    dy: ImmPtr[BF16],
    ln_out: ImmPtr[BF16],
    linear_weight: ImmPtr[BF16],
    linear_bias: ImmPtr[BF16],
    rows: Int,
    hidden: Int,
    outputs: Int,
) raises:
    """Launch step 12: the product of the forward pass with the bias, and `dW` with the bias's gradient."""
    launch_tiles[12, has_bias=True](
        launcher, "output", output, output, ln_out, linear_weight, linear_bias, rows, outputs, hidden
    )
    launch_grad_weight[True](
        launcher, grad_linear_weight, grad_linear_bias, dy, ln_out, rows, hidden, outputs
    )
    comptime if SEPARATE_LAUNCHES:
        launch_bias_and_sums(launcher, output, grad_linear_bias, dy, linear_bias, rows, outputs)


def launch_bias_and_sums[
    L: Launcher, //
](
    mut launcher: L,
    output: MutPtr[BF16],
    grad_linear_bias: MutPtr[BF16],
    dy: ImmPtr[BF16],
    linear_bias: ImmPtr[BF16],
    rows: Int,
    outputs: Int,
) raises:
    """Launch two kernels: add the bias to an output in memory, and sum the columns of dy."""
    launcher.launch[bias_kernel](
        "bias", output, linear_bias, Int32(rows * outputs), Int32(outputs),
        grid_dim=Dim(ceildiv(rows * outputs, THREADS)), block_dim=Dim(THREADS),
    )  # fmt: skip
    launcher.launch[column_sums_kernel[BF16, BF16]](
        "column_sums", grad_linear_bias, grad_linear_bias, dy, Int32(rows), Int32(outputs), Int32(outputs),
        grid_dim=Dim(ceildiv(outputs, TILE)), block_dim=Dim(TILE, TILE),
    )  # fmt: skip
