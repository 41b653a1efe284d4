"""The launches of the forward and backward pass, in order.

Forward: one row kernel (statistics and LayerNorm) and one matrix product with the bias added in its epilogue.
Backward:

dln = dY W                                      a matrix product that reads W as it is stored
dx, ln_out, partial sums of dgamma and dbeta    one row kernel over dln and the input; dx overwrites dln
partial sums of db = sum over rows of dY        only for many rows
dgamma, dbeta, db                               add the partial sums, or the rows if there are few
dW = dY^T ln_out                                a matrix product that reads both operands transposed in place

There are no atomic additions, so every run gives the same bits. The forward pass saves only the input and the
statistics. The row kernel recomputes the LayerNorm output or, if nothing else of it is requested, a launch
that does not wait for dln does (`ln_out.mojo`).
"""

from .backward_launches import launch_ln_backward
from .few_rows import launch_ln_backward_few
from .forward import launch_layernorm
from .ln_out import launch_ln_out, launch_ln_out_transposed
from .padded import AlignedOperand, launch_aligned_copy, has_aligned_rows
from .rows import DX, LN_OUT, SUMS
from .sums import (
    DIRECT_ROWS,
    MORE_DIRECT_ROWS,
    MIN_LARGE_SLICE_ROWS,
    MIN_SLICE_ROWS,
    PartialSums,
    launch_bias_partials,
    launch_finish_sums,
    launch_norm_partials,
)
from shared.common import ImmPtr, MutPtr, accum_type
from common.gemm_hopper_launches import (
    Pitches,
    SideSums,
    count_column_slices,
    flag_count,
    launch_gemm_hopper,
)
from common.tensor_maps import has_aligned_width, aligned_pitch
from shared.launcher import Launcher
from .tensors import BackwardTensors, ForwardTensors, Sizes

comptime WEIGHT = 1
"""Bit of `requested`: compute dW."""
comptime BIAS = 2
"""Bit of `requested`: compute db."""
comptime INPUT = 4
"""Bit of `requested`: compute dx."""
comptime NORM = 8
"""Bit of `requested`: compute dgamma and dbeta."""
comptime ALL_GRADIENTS = WEIGHT | BIAS | INPUT | NORM
comptime DLN_COMPUTED = 16
"""The caller has computed dln."""
comptime LN_OUT_REQUESTED = 32
"""The caller computes dW, from ln_out."""
comptime TRANSPOSED = 128
"""With LN_OUT_REQUESTED: ln_out is requested as [H, rows]."""
comptime FEW_ROWS = 64
"""With DLN_COMPUTED and LN_OUT_REQUESTED: there are few rows, and dx does not overwrite dln."""
comptime FEW_PARTIALS = 256
"""Sums over rows use few partial sums: this takes less memory but reads dY, dln and the input once more."""


def launch_gradients[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    t: BackwardTensors[dtype, x_dtype],
    requested: Int,
    caller_dln: MutPtr[dtype],  # [rows, H], read if DLN_COMPUTED
    caller_ln_out: MutPtr[dtype],  # [rows, H], or [H, rows] if TRANSPOSED; written if LN_OUT_REQUESTED
) raises:
    """Launch five kernels: four for few rows, one more if rows are too long for registers. For Hopper with
    both products, see `launch_backward_hopper`.

    A gradient that is not requested is not computed, and its memory is not touched. With DLN_COMPUTED or
    LN_OUT_REQUESTED the caller computes that product. With FEW_ROWS one launch computes everything else. On
    other GPUs, and for float32, the caller must compute both products.
    """
    ref sizes = t.sizes
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    comptime if L.wgmma and dtype.is_half_float():
        var computes_products = requested & (DLN_COMPUTED | LN_OUT_REQUESTED) == 0
        # Products that also sum columns write many partial sums. If few are requested, only rows that must be
        # copied take this path.
        var aligned = has_aligned_rows(t.linear_weight, H) and has_aligned_rows(t.grad_output, O)
        if computes_products and (not aligned or requested & FEW_PARTIALS == 0):
            launch_backward_hopper(launcher, t, requested)
            return
    var size = Int(sizes.rows()) * H
    var needs_dln = requested & (INPUT | NORM) != 0
    var parts = (DX if requested & INPUT != 0 else 0) | (SUMS if requested & NORM != 0 else 0)
    # If dln is not needed, pass any readable address.
    var dln = t.grad_output
    var ln_out = MutPtr[dtype](unsafe_from_address=Int(dln))
    if requested & DLN_COMPUTED != 0:
        dln = caller_dln.as_imm()
    elif needs_dln:
        dln = allocate_dln(launcher, t, requested, size).as_imm()
    if requested & TRANSPOSED != 0:
        comptime if dtype == x_dtype:
            launch_ln_out_transposed(launcher, rebind[BackwardTensors[dtype, dtype]](t), caller_ln_out)
    elif requested & LN_OUT_REQUESTED != 0:
        ln_out = caller_ln_out
        parts |= LN_OUT
    elif requested & WEIGHT != 0:
        ln_out = launcher.workspace[dtype]("ln_out", size)
        parts |= LN_OUT

    if requested & FEW_ROWS != 0:
        launch_ln_backward_few(
            launcher,
            t.grad_input,
            ln_out,
            t.grad_ln_weight,
            t.grad_ln_bias,
            t.grad_bias,
            dln,
            t.grad_output,
            t.input,
            t.mean,
            t.rstd,
            t.ln_weight,
            t.ln_bias,
            sizes,
            parts,
            requested & BIAS != 0,
            H,
        )
        return
    var bias_sums = PartialSums(t.mean, 0)
    comptime if L.wgmma and dtype.is_half_float():
        if needs_dln and requested & DLN_COMPUTED == 0:
            var sums_in_gemm = requested & BIAS != 0 and requested & FEW_PARTIALS == 0
            bias_sums = launch_dln(launcher, t, dln.unsafe_mut_cast[True](), sums_in_gemm)
    var ln_sums = PartialSums(t.mean, 0)
    if requested & FEW_PARTIALS != 0 and parts & SUMS != 0:
        # This launch comes first, because dx may overwrite dln.
        ln_sums = launch_norm_partials(launcher, dln, t.input, t.mean, t.rstd, sizes, H, MIN_LARGE_SLICE_ROWS)
        _ = launch_rows(launcher, t, ln_out, dln, parts & ~SUMS, H)
    else:
        ln_sums = launch_rows(launcher, t, ln_out, dln, parts, H)
    launch_parameter_gradients(launcher, t, requested, ln_sums, bias_sums)
    comptime if L.wgmma and dtype.is_half_float():
        if requested & WEIGHT != 0:
            var dy = AlignedOperand(t.grad_output, O)
            launch_grad_weight["none"](
                launcher, t, dy, ln_out, SideSums[dtype, x_dtype](t.grad_weight), Pitches(O, H, H)
            )


def allocate_dln[
    L: Launcher, dtype: DType, x_dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype, x_dtype], requested: Int, size: Int) raises -> MutPtr[dtype]:
    """Return memory for dln: the memory of dx if both have the same dtype, since dx overwrites dln row by
    row; otherwise workspace.
    """
    comptime if dtype == x_dtype:
        if requested & INPUT != 0:
            return rebind[MutPtr[dtype]](t.grad_input)
    return launcher.workspace[dtype]("dln", size)


def launch_rows[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    t: BackwardTensors[dtype, x_dtype],
    ln_out: MutPtr[dtype],
    dln: ImmPtr[dtype],
    parts: Int,
    stride: Int,
) raises -> PartialSums[accum_type[dtype]]:
    """Launch the kernels that compute what `parts` selects of dx, ln_out, and partial sums of dgamma and
    dbeta; dln and ln_out have a row pitch of `stride` elements.
    """
    if parts == LN_OUT:
        launch_ln_out(launcher, t, ln_out, stride)
    if parts == LN_OUT or parts == 0:
        return PartialSums(t.mean, 0)
    return launch_ln_backward(
        launcher,
        t.grad_input,
        ln_out,
        dln,
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        t.sizes,
        parts,
        stride,
    )


def launch_dln[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L, t: BackwardTensors[dtype, x_dtype], dln: MutPtr[dtype], needs_bias_sums: Bool
) raises -> PartialSums[accum_type[dtype]]:
    """Launch dln = dY W, and return partial sums of db if requested, otherwise no slices."""
    var rows = t.sizes.rows()
    var H = t.sizes.hidden_dim
    var O = t.sizes.output_dim
    if not needs_bias_sums:
        launch_gemm_hopper[dtype, "nn", False, "none"](
            launcher, "dln", dln, t.grad_output, t.linear_weight, t.linear_weight, rows, H, O
        )
        return PartialSums(t.mean, 0)
    var slices = count_column_slices(Int(rows))
    var flags = launcher.workspace[DType.int32]("flags", flag_count())
    var partials = launcher.workspace[DType.float32]("bias_partials", slices * Int(O))
    launch_gemm_hopper[dtype, "nn", False, "sum columns"](
        launcher,
        "dln",
        dln,
        t.grad_output,
        t.linear_weight,
        t.linear_weight,
        rows,
        H,
        O,
        SideSums[dtype](flags, partials, dln),
    )
    return PartialSums(rebind[ImmPtr[accum_type[dtype]]](partials.as_imm()), slices)


def launch_parameter_gradients[
    L: Launcher, dtype: DType, x_dtype: DType, //
](
    mut launcher: L,
    t: BackwardTensors[dtype, x_dtype],
    requested: Int,
    ln_sums: PartialSums[accum_type[dtype]],
    bias_sums: PartialSums[accum_type[dtype]],
) raises:
    """Launch one or two kernels: dgamma and dbeta from their partial sums, and db from its partial sums or
    from the rows of dY, which are added in two stages if there are many.
    """
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim) if requested & NORM != 0 else 0
    var O = Int(t.sizes.output_dim) if requested & BIAS != 0 else 0
    var few_partials = requested & FEW_PARTIALS != 0
    if bias_sums.slices == 0 and rows <= (MORE_DIRECT_ROWS if few_partials else DIRECT_ROWS):
        var rows_of_dy = PartialSums(t.grad_output, rows)
        launch_finish_sums[dtype](
            launcher, t.grad_ln_weight, t.grad_ln_bias, ln_sums, H, t.grad_bias, rows_of_dy, O
        )
        return
    var sums = bias_sums.copy()
    if sums.slices == 0 and O > 0:
        var fewest = MIN_LARGE_SLICE_ROWS if few_partials else MIN_SLICE_ROWS
        sums = launch_bias_partials(launcher, t.grad_output, t.mean, t.sizes, fewest)
    launch_finish_sums[dtype](launcher, t.grad_ln_weight, t.grad_ln_bias, ln_sums, H, t.grad_bias, sums, O)


# ---- On Hopper ----------------------------------------------------------------------------------------------


def launch_forward_hopper[
    L: Launcher, dtype: DType, x_dtype: DType, //
](mut launcher: L, t: ForwardTensors[dtype, x_dtype]) raises:
    """Launch two kernels, and a third one if W must be copied to aligned rows."""
    ref sizes = t.sizes
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var pitch = aligned_pitch[dtype](H)
    var ln_out = launcher.workspace[dtype]("ln_out", rows * pitch)
    var buffer = ln_out
    if not has_aligned_rows(t.linear_weight, H):
        buffer = launcher.workspace[dtype]("linear_weight", O * pitch)
    var weight = launch_aligned_copy(launcher, "linear_weight", t.linear_weight, O, H, buffer)
    launch_layernorm(launcher, ln_out, t.mean, t.rstd, t.input, t.ln_weight, t.ln_bias, sizes, t.eps, pitch)
    launch_gemm_hopper[dtype, "nt", True, "none"](
        launcher,
        "output",
        t.output,
        ln_out.as_imm(),
        weight.address,
        t.linear_bias,
        sizes.rows(),
        sizes.output_dim,
        sizes.hidden_dim,
        pitches=Pitches(pitch, weight.pitch, O),
    )


def launch_backward_hopper[
    L: Launcher, dtype: DType, x_dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype, x_dtype], requested: Int) raises:
    """Launch three kernels for all gradients, plus one for each of dY and W that must be copied to aligned
    rows.

    The spare warps of the first product sum the columns of dY; those of the second add the slices of db,
    dgamma and dbeta. If rows of W are not aligned, the memory of dW must hold O rows of `aligned_pitch` H
    elements.
    """
    ref sizes = t.sizes
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var pitch = aligned_pitch[dtype](H)
    var needs_dln = requested & (INPUT | NORM) != 0
    var needs_weight_grad = requested & WEIGHT != 0
    var parts = (DX if requested & INPUT != 0 else 0) | (SUMS if requested & NORM != 0 else 0)
    parts |= LN_OUT if needs_weight_grad else 0

    # dx overwrites dln row by row if their layouts match; otherwise ln_out overwrites dln.
    var overwrites_dln = has_aligned_rows(t.grad_input.as_imm(), H) and dtype == x_dtype
    var dln = MutPtr[dtype](unsafe_from_address=Int(t.grad_input))
    var ln_out = dln
    if needs_dln and (requested & INPUT == 0 or not overwrites_dln):
        dln = launcher.workspace[dtype]("dln", rows * pitch)
        ln_out = dln
    elif needs_weight_grad:
        ln_out = launcher.workspace[dtype]("ln_out", rows * pitch)
    # The memory of dW holds the copy of W, which is read before dW is written.
    var copy = t.grad_weight
    if needs_dln and not has_aligned_rows(t.linear_weight, H):
        if not needs_weight_grad or has_aligned_width[dtype](H):
            copy = launcher.workspace[dtype]("linear_weight", O * pitch)
    var dy = AlignedOperand(t.grad_output, O)
    if (needs_dln or needs_weight_grad) and not has_aligned_rows(t.grad_output, O):
        var buffer = launcher.workspace[dtype]("grad_output", rows * aligned_pitch[dtype](O))
        dy = launch_aligned_copy(launcher, "grad_output", t.grad_output, rows, O, buffer)

    var flags = launcher.workspace[DType.int32]("flags", flag_count())
    var bias_sums = PartialSums(t.mean, 0)
    var bias_partials = MutPtr[DType.float32](unsafe_from_address=Int(flags))
    if needs_dln:
        var slices = count_column_slices(rows)
        bias_partials = launcher.workspace[DType.float32]("bias_partials", slices * O)
        bias_sums = PartialSums(rebind[ImmPtr[accum_type[dtype]]](bias_partials.as_imm()), slices)
        var weight = launch_aligned_copy(launcher, "linear_weight", t.linear_weight, O, H, copy)
        launch_gemm_hopper[dtype, "nn", False, "sum columns"](
            launcher,
            "dln",
            dln,
            dy.address,
            weight.address,
            weight.address,
            sizes.rows(),
            sizes.hidden_dim,
            sizes.output_dim,
            SideSums[dtype](flags, bias_partials, dln),
            Pitches(dy.pitch, weight.pitch, pitch),
        )
    var dln_or_dy = dln.as_imm() if needs_dln else t.grad_output
    var ln_sums = launch_rows(launcher, t, ln_out, dln_or_dy, parts, pitch)
    var pitches = Pitches(dy.pitch, pitch, H)
    if requested == ALL_GRADIENTS:
        var side = SideSums[dtype, x_dtype](
            flags,
            bias_partials,
            bias_sums.slices,
            t.grad_bias,
            rebind[ImmPtr[DType.float32]](ln_sums.partials),
            ln_sums.slices,
            t.grad_ln_weight,
            t.grad_ln_bias,
        )
        launch_grad_weight["add slices"](launcher, t, dy, ln_out, side^, pitches)
        return
    launch_parameter_gradients(launcher, t, requested, ln_sums, bias_sums)
    if needs_weight_grad:
        launch_grad_weight["none"](launcher, t, dy, ln_out, SideSums[dtype, x_dtype](t.grad_weight), pitches)


def launch_grad_weight[
    L: Launcher, dtype: DType, x_dtype: DType, //, side_work: StaticString
](
    mut launcher: L,
    t: BackwardTensors[dtype, x_dtype],
    dy: AlignedOperand[dtype],
    ln_out: MutPtr[dtype],
    var side: SideSums[dtype, x_dtype],
    pitches: Pitches,
) raises:
    """Launch dW = dY^T ln_out."""
    launch_gemm_hopper[dtype, "tn", False, side_work, x_dtype](
        launcher,
        "grad_weight",
        t.grad_weight,
        dy.address,
        ln_out.as_imm(),
        ln_out.as_imm(),
        t.sizes.output_dim,
        t.sizes.hidden_dim,
        t.sizes.rows(),
        side^,
        pitches,
    )
