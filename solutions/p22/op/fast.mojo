"""The fast variant: what is launched, in which order, and what lies in between.

Forward: one row kernel (statistics and LayerNorm) and one matrix product with the bias added at its end. Backward:

    dln = dY W                                   a matrix product that reads W as it lies
    dx, ln_out, shares of dgamma and dbeta       one row kernel over dln and the input; dx takes dln's place
    shares of db = sum over rows of dY           where there are many rows
    dgamma, dbeta, db                            the shares, or few rows, added
    dW = dY^T ln_out                             a matrix product that reads both factors transposed in place

Nothing is added with atomics, so every run gives the same bits. Only the input and the statistics are kept from the
forward pass; the LayerNorm output is computed again by the row kernel on its way.
"""

from .fast_rows import (
    DIRECT_ROWS,
    DX,
    LN_OUT,
    SUMS,
    Shares,
    backward_geometry,
    launch_bias_partials,
    launch_finish_sums,
    launch_layernorm_fast,
    launch_ln_backward_fast,
    launch_ln_backward_rows,
    suits_ln_backward_rows,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.gemm import launch_gemm
from .shared.gemm_hopper import SideSums, column_slices_of, flag_count, launch_gemm_hopper, suits_hopper
from .shared.launcher import Launcher
from .tensors import BackwardTensors, ForwardTensors


def launch_forward_fast[
    L: Launcher, dtype: DType, //, tf32: Bool = False
](mut launcher: L, t: ForwardTensors[dtype]) raises:
    """Two launches: statistics with LayerNorm, and the product with W^T and the bias."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    launch_layernorm_fast[dtype](
        launcher, ln_out, t.mean, t.rstd, t.input, t.ln_weight, t.ln_bias, sizes, t.eps
    )
    launch_gemm[dtype, "nt", True, tf32](
        launcher,
        "output",
        t.output,
        ln_out.as_imm(),
        t.linear_weight,
        t.linear_bias,
        rows,
        sizes.output_dim,
        H,
    )


comptime WEIGHT = 1
"""What is wanted of a backward pass, added: dW."""
comptime BIAS = 2
"""Likewise: db."""
comptime INPUT = 4
"""Likewise: dx."""
comptime NORM = 8
"""Likewise: dgamma and dbeta."""
comptime ALL_GRADIENTS = WEIGHT | BIAS | INPUT | NORM
comptime DLN_GIVEN = 16
"""Beside these: the caller has multiplied dln."""
comptime LN_OUT_TAKEN = 32
"""Likewise: the caller multiplies dW, from ln_out."""


def launch_backward_fast[
    L: Launcher, dtype: DType, //, tf32: Bool = False
](mut launcher: L, t: BackwardTensors[dtype]) raises:
    """All five gradients; see `launch_gradients`."""
    launch_gradients[tf32=tf32](launcher, t, ALL_GRADIENTS, t.grad_input, t.grad_input, 0)


def launch_gradients[
    L: Launcher, dtype: DType, //, tf32: Bool
](
    mut launcher: L,
    t: BackwardTensors[dtype],
    wanted: Int,
    given_dln: MutPtr[dtype],  # [rows, stride], read with DLN_GIVEN
    taken_ln_out: MutPtr[dtype],  # [rows, stride], written with LN_OUT_TAKEN
    stride: Int,
) raises:
    """Five launches, four where there are few rows, one more where rows are no whole number of aligned vectors; three on
    Hopper.

    A gradient that is not wanted is not computed, and its memory not touched. With DLN_GIVEN or LN_OUT_TAKEN a product
    is the caller's; rows of these two matrices are `stride` elements apart, H where that is 0.
    """
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    comptime if L.wgmma and dtype.is_half_float():
        if wanted == ALL_GRADIENTS and suits_backward_hopper(t):
            launch_backward_hopper(launcher, t, launcher.workspace[dtype]("ln_out", Int(rows) * Int(H)))
            return
    var dln_wanted = wanted & (INPUT | NORM) != 0
    var parts = (DX if wanted & INPUT != 0 else 0) | (SUMS if wanted & NORM != 0 else 0)
    # dx is written over dln, row by row. Where neither is wanted, any address that can be read will do.
    var dln = t.input
    var ln_out = t.grad_input
    if dln_wanted:
        if wanted & DLN_GIVEN != 0:
            dln = given_dln.as_imm()
        elif wanted & INPUT != 0:
            dln = t.grad_input.as_imm()
        else:
            dln = launcher.workspace[dtype]("dln", Int(rows) * Int(H)).as_imm()
    if wanted & LN_OUT_TAKEN != 0:
        ln_out = taken_ln_out
        parts |= LN_OUT
    elif wanted & WEIGHT != 0:
        ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
        parts |= LN_OUT

    var bias_shares = Shares(t.mean, 0)
    if dln_wanted and wanted & DLN_GIVEN == 0:
        bias_shares = launch_dln[tf32=tf32](launcher, t, dln.unsafe_mut_cast[True](), wanted & BIAS != 0)
    var ln_shares = Shares(t.mean, 0)
    if parts != 0:
        ln_shares = launch_ln_backward_fast[dtype](
            launcher,
            t.grad_input,
            ln_out,
            dln,
            t.input,
            t.mean,
            t.rstd,
            t.ln_weight,
            t.ln_bias,
            sizes,
            parts,
            stride,
        )
    launch_parameter_gradients(launcher, t, wanted, ln_shares, bias_shares)
    if wanted & WEIGHT != 0:
        launch_gemm[dtype, "tn", False, tf32](
            launcher,
            "grad_weight",
            t.grad_weight,
            t.grad_output,
            ln_out.as_imm(),
            ln_out.as_imm(),
            O,
            H,
            rows,
        )


def launch_dln[
    L: Launcher, dtype: DType, //, tf32: Bool
](mut launcher: L, t: BackwardTensors[dtype], dln: MutPtr[dtype], sums_wanted: Bool) raises -> Shares[
    accum_type[dtype]
]:
    """One launch: dln = dY W. On Hopper it sums the columns of dY on the side, where that is wanted: the shares of db; no
    slices elsewhere."""
    var rows = t.sizes.rows()
    var H = t.sizes.hidden_dim
    var O = t.sizes.output_dim
    comptime if L.wgmma and dtype.is_half_float():
        if sums_wanted and suits_hopper[dtype, "nn"](
            dln, t.grad_output, t.linear_weight, Int(rows), Int(H), Int(O)
        ):
            var slices = column_slices_of(Int(rows))
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
            return Shares(rebind[ImmPtr[accum_type[dtype]]](partials.as_imm()), slices)
    launch_gemm[dtype, "nn", False, tf32](
        launcher, "dln", dln, t.grad_output, t.linear_weight, t.linear_weight, rows, H, O
    )
    return Shares(t.mean, 0)


def launch_parameter_gradients[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    t: BackwardTensors[dtype],
    wanted: Int,
    ln_shares: Shares[accum_type[dtype]],
    bias_shares: Shares[accum_type[dtype]],
) raises:
    """One launch, or two: dgamma and dbeta from their shares, and db from its own, or from the rows of dY, which are few
    or are added in two stages."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim) if wanted & NORM != 0 else 0
    var O = Int(t.sizes.output_dim) if wanted & BIAS != 0 else 0
    if bias_shares.slices == 0 and rows <= DIRECT_ROWS:
        var rows_of_dy = Shares(t.grad_output, rows)
        launch_finish_sums[dtype](
            launcher, t.grad_ln_weight, t.grad_ln_bias, ln_shares, H, t.grad_bias, rows_of_dy, O
        )
        return
    var shares = bias_shares.copy()
    if shares.slices == 0 and O > 0:
        shares = launch_bias_partials[dtype](launcher, t.grad_output, t.mean, t.sizes)
    launch_finish_sums[dtype](
        launcher, t.grad_ln_weight, t.grad_ln_bias, ln_shares, H, t.grad_bias, shares, O
    )


def suits_backward_hopper[dtype: DType, //](t: BackwardTensors[dtype]) -> Bool:
    """Whether the three launches for Hopper can take these tensors."""
    ref sizes = t.sizes
    var rows = Int(sizes.rows())
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var dln = t.grad_input.as_imm()
    # Scratch memory is aligned.
    var suits = suits_hopper[dtype, "nn"](t.grad_input, t.grad_output, t.linear_weight, rows, H, O)
    suits = suits and suits_hopper[dtype, "tn"](t.grad_weight, t.grad_output, dln, O, H, rows)
    return suits and suits_ln_backward_rows[dtype](
        t.grad_input, t.grad_input, dln, t.input, t.ln_weight, t.ln_bias, sizes
    )


def launch_backward_hopper[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype], ln_out: MutPtr[dtype],) raises:  # [rows, H], scratch
    """Three launches. The products have warps with nothing to do: those of the first sum the columns of dY while it
    passes through, those of the second add the slices of db, dgamma and dbeta. dx is written over dln."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var geometry = backward_geometry[dtype](Int(rows), Int(H))
    var bias_slices = column_slices_of(Int(rows))
    var flags = launcher.workspace[DType.int32]("flags", flag_count())
    var bias_partials = launcher.workspace[DType.float32]("bias_partials", bias_slices * Int(O))
    var ln_partials = launcher.workspace[accum_type[dtype]](
        "ln_backward_partials", geometry.blocks * 2 * Int(H)
    )

    launch_gemm_hopper[dtype, "nn", False, "sum columns"](
        launcher,
        "dln",
        t.grad_input,
        t.grad_output,
        t.linear_weight,
        t.linear_weight,
        rows,
        H,
        O,
        SideSums[dtype](flags, bias_partials, t.grad_input),
    )
    launch_ln_backward_rows[dtype](
        launcher,
        t.grad_input,
        ln_out,
        ln_partials,
        t.grad_input.as_imm(),
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        sizes,
        geometry,
    )
    launch_gemm_hopper[dtype, "tn", False, "add slices"](
        launcher,
        "grad_weight",
        t.grad_weight,
        t.grad_output,
        ln_out.as_imm(),
        ln_out.as_imm(),
        O,
        H,
        rows,
        SideSums(
            flags,
            bias_partials,
            bias_slices,
            t.grad_bias,
            rebind[ImmPtr[DType.float32]](ln_partials.as_imm()),
            geometry.blocks,
            t.grad_ln_weight,
            t.grad_ln_bias,
        ),
    )
