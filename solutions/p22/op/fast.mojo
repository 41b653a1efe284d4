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

from .common import ImmPtr, MutPtr, Sizes, accum_type
from .fast_rows import (
    backward_geometry,
    launch_bias_gradient,
    launch_layernorm_fast,
    launch_ln_backward_fast,
    launch_ln_backward_rows,
    suits_ln_backward_rows,
)
from .gemm import launch_gemm
from .gemm_hopper import SideSums, column_slices_of, flag_count, launch_gemm_hopper, suits_hopper
from .launcher import Launcher


def launch_forward_fast[
    L: Launcher, //, dtype: DType, tf32: Bool = False
](
    mut launcher: L,
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    linear_bias: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Two launches: statistics with LayerNorm, and the product with W^T and the bias."""
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    launch_layernorm_fast[dtype](launcher, ln_out, mean, rstd, input, ln_weight, ln_bias, sizes, eps)
    launch_gemm[dtype, "nt", True, tf32](
        launcher, "output", output, ln_out.as_imm(), linear_weight, linear_bias, rows, sizes.output_dim, H
    )


def launch_backward_fast[
    L: Launcher, //, dtype: DType, tf32: Bool = False
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
    weight_wanted: Bool = True,
    bias_wanted: Bool = True,
) raises:
    """Six launches, seven where rows are no whole number of aligned vectors; fewer where the gradient of a frozen
    linear weight or bias is not wanted, whose memory then is not touched."""
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var dln = launcher.workspace[dtype]("dln", Int(rows) * Int(H))
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    comptime if L.wgmma and dtype.is_half_float():
        var suits = suits_hopper[dtype, "nn"](dln, grad_output, linear_weight, Int(rows), Int(H), Int(O))
        suits = suits and suits_hopper[dtype, "tn"](
            grad_weight, grad_output, ln_out.as_imm(), Int(O), Int(H), Int(rows)
        )
        suits = suits and suits_ln_backward_rows[dtype](
            grad_input, ln_out, dln.as_imm(), input, ln_weight, ln_bias, sizes
        )
        if suits and weight_wanted and bias_wanted:
            launch_backward_hopper[dtype](
                launcher,
                grad_input,
                grad_ln_weight,
                grad_ln_bias,
                grad_weight,
                grad_bias,
                dln,
                ln_out,
                grad_output,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                linear_weight,
                sizes,
            )
            return
    launch_gemm[dtype, "nn", False, tf32](
        launcher, "dln", dln, grad_output, linear_weight, linear_weight, rows, H, O
    )
    launch_ln_backward_fast[dtype](
        launcher,
        grad_input,
        grad_ln_weight,
        grad_ln_bias,
        ln_out,
        dln.as_imm(),
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes,
    )
    if weight_wanted:
        launch_gemm[dtype, "tn", False, tf32](
            launcher, "grad_weight", grad_weight, grad_output, ln_out.as_imm(), ln_out.as_imm(), O, H, rows
        )
    if bias_wanted:
        launch_bias_gradient[dtype](launcher, grad_bias, grad_output, mean, sizes)


def launch_backward_hopper[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    dln: MutPtr[dtype],
    ln_out: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Three launches. The products have warps with nothing to do: those of the first sum the columns of dY while it
    passes through, those of the second add the slices of db, dgamma and dbeta."""
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
        grad_output,
        linear_weight,
        linear_weight,
        rows,
        H,
        O,
        SideSums[dtype](flags, bias_partials, dln),
    )
    launch_ln_backward_rows[dtype](
        launcher,
        grad_input,
        ln_out,
        ln_partials,
        dln.as_imm(),
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes,
        geometry,
    )
    launch_gemm_hopper[dtype, "tn", False, "add slices"](
        launcher,
        "grad_weight",
        grad_weight,
        grad_output,
        ln_out.as_imm(),
        ln_out.as_imm(),
        O,
        H,
        rows,
        SideSums(
            flags,
            bias_partials,
            bias_slices,
            grad_bias,
            rebind[ImmPtr[DType.float32]](ln_partials.as_imm()),
            geometry.blocks,
            grad_ln_weight,
            grad_ln_bias,
        ),
    )
