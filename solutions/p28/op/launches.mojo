"""How the kernels of puzzle 28 are launched: with which blocks, and what comes before and after."""

from std.math import ceildiv
from max.gpu.host import Dim

from .fast import (
    BLOCK,
    DEPTH,
    KEPT,
    LANES,
    BLOCK_ROWS,
    SLAB,
    THREADS,
    TILE,
    clear_kernel,
    dgamma_kernel,
    dx_kernel,
    once_kernel,
    registers_kernel,
    rows_kernel,
    second_stage_kernel,
    shuffles_kernel,
    tiled_kernel,
    vectors_kernel,
)
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
    """Steps 1 to 4: one launch, with room for a warp a row."""
    expect_narrow(hidden)
    var r = Int32(rows)
    var h = Int32(hidden)
    var grid = Dim(ceildiv(rows, BLOCK_ROWS))
    comptime if step == 1:
        launcher.launch[rows_kernel[dtype]](
            "rows", ln_out, input, ln_weight, ln_bias, r, h, grid_dim=grid, block_dim=Dim(THREADS)
        )
    elif step == 2:
        launcher.launch[once_kernel[dtype]](
            "once", ln_out, input, ln_weight, ln_bias, r, h, grid_dim=grid, block_dim=Dim(THREADS)
        )
    elif step == 3:
        launcher.launch[vectors_kernel[dtype]](
            "vectors", ln_out, input, ln_weight, ln_bias, r, h, grid_dim=grid, block_dim=Dim(THREADS)
        )
    else:
        launcher.launch[shuffles_kernel[dtype]](
            "shuffles", ln_out, input, ln_weight, ln_bias, r, h, grid_dim=grid, block_dim=Dim(THREADS)
        )


def expect_narrow(hidden: Int) raises:
    """Raises where a row has more elements than a warp can keep."""
    if hidden > KEPT * LANES:
        raise Error(
            t"hidden is {hidden}, but the kernels keep a row in registers, at most {KEPT * LANES} elements"
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
    """Step 5: one launch, a warp a row."""
    expect_narrow(hidden)
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
    """Step 6: clear the sums, add up slabs of rows, add up the slabs."""
    comptime accum = accum_type[dtype]
    var slabs = ceildiv(rows, SLAB)
    var sums = launcher.workspace[accum]("sums", 2 * slabs * hidden)
    launcher.launch[clear_kernel[accum]](
        "clear", sums, Int32(2 * slabs * hidden),
        grid_dim=Dim(ceildiv(2 * slabs * hidden, THREADS)), block_dim=Dim(THREADS),
    )  # fmt: skip
    launcher.launch[dgamma_kernel[dtype]](
        "dgamma", sums, dln, input, mean, rstd, Int32(rows), Int32(hidden),
        grid_dim=Dim(ceildiv(hidden, THREADS), slabs), block_dim=Dim(THREADS),
    )  # fmt: skip
    launcher.launch[second_stage_kernel[dtype]](
        "second_stage", grad_ln_weight, grad_ln_bias, sums.as_imm(), Int32(slabs), Int32(hidden),
        grid_dim=Dim(ceildiv(hidden, THREADS)), block_dim=Dim(THREADS),
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
    """Steps 7 and 8: one launch, a block for each tile of the results."""
    comptime if step == 7:
        launcher.launch[tiled_kernel[dtype]](
            "tiled", output, ln_out, linear_weight, Int32(rows), Int32(hidden), Int32(outputs),
            grid_dim=Dim(ceildiv(outputs, TILE), ceildiv(rows, TILE)), block_dim=Dim(TILE, TILE),
        )  # fmt: skip
    else:
        launcher.launch[registers_kernel[dtype]](
            "registers", output, ln_out, linear_weight, Int32(rows), Int32(hidden), Int32(outputs),
            grid_dim=Dim(ceildiv(outputs, BLOCK), ceildiv(rows, BLOCK)), block_dim=Dim(DEPTH, DEPTH),
        )  # fmt: skip
