"""The fast variant: what is launched, in which order, and what lies in between.

Forward: one row kernel (statistics and LayerNorm) and one matrix product with the bias added at its end. Backward:

    dln = dY W                                   a matrix product that reads W as it lies
    dx, ln_out, shares of dgamma and dbeta       one row kernel over dln and the input
    dgamma, dbeta                                the shares added
    dW = dY^T ln_out                             a matrix product that reads both factors transposed in place
    db = sum over rows of dY                     in two stages

Nothing is added with atomics, so every run gives the same bits. Only the input and the statistics are kept from the
forward pass; the LayerNorm output is computed again by the row kernel on its way.
"""

from .fast_rows import (
    backward_geometry,
    launch_bias_gradient,
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


def launch_backward_fast[
    L: Launcher, dtype: DType, //, tf32: Bool = False
](mut launcher: L, t: BackwardTensors[dtype], weight_wanted: Bool = True, bias_wanted: Bool = True,) raises:
    """Six launches, seven where rows are no whole number of aligned vectors; fewer where the gradient of a frozen
    linear weight or bias is not wanted, whose memory then is not touched."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var dln = launcher.workspace[dtype]("dln", Int(rows) * Int(H))
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    comptime if L.wgmma and dtype.is_half_float():
        var suits = suits_hopper[dtype, "nn"](dln, t.grad_output, t.linear_weight, Int(rows), Int(H), Int(O))
        suits = suits and suits_hopper[dtype, "tn"](
            t.grad_weight, t.grad_output, ln_out.as_imm(), Int(O), Int(H), Int(rows)
        )
        suits = suits and suits_ln_backward_rows[dtype](
            t.grad_input, ln_out, dln.as_imm(), t.input, t.ln_weight, t.ln_bias, sizes
        )
        if suits and weight_wanted and bias_wanted:
            launch_backward_hopper(launcher, t, dln, ln_out)
            return
    launch_gemm[dtype, "nn", False, tf32](
        launcher, "dln", dln, t.grad_output, t.linear_weight, t.linear_weight, rows, H, O
    )
    launch_ln_backward_fast[dtype](
        launcher,
        t.grad_input,
        t.grad_ln_weight,
        t.grad_ln_bias,
        ln_out,
        dln.as_imm(),
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        sizes,
    )
    if weight_wanted:
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
    if bias_wanted:
        launch_bias_gradient[dtype](launcher, t.grad_bias, t.grad_output, t.mean, sizes)


def launch_backward_hopper[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    t: BackwardTensors[dtype],
    dln: MutPtr[dtype],  # [rows, H], scratch
    ln_out: MutPtr[dtype],  # [rows, H], scratch
) raises:
    """Three launches. The products have warps with nothing to do: those of the first sum the columns of dY while it
    passes through, those of the second add the slices of db, dgamma and dbeta."""
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
        dln,
        t.grad_output,
        t.linear_weight,
        t.linear_weight,
        rows,
        H,
        O,
        SideSums[dtype](flags, bias_partials, dln),
    )
    launch_ln_backward_rows[dtype](
        launcher,
        t.grad_input,
        ln_out,
        ln_partials,
        dln.as_imm(),
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
