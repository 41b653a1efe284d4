"""LayerNorm + Linear in float32 on Hopper's float16 tensor cores: see `common/gemm_pairs.mojo`.

The row kernels are those of `forward.mojo`. Between them, every operand is split into two float16 matrices,
which together take as much workspace as the operand, and each product is computed as three products.
"""

from .launches import (
    BIAS,
    DLN_COMPUTED,
    FEW_PARTIALS,
    INPUT,
    LN_OUT_REQUESTED,
    NORM,
    WEIGHT,
    launch_gradients,
)
from .forward import launch_layernorm
from common.gemm_pairs import launch_gemm_pairs, launch_split
from shared.launcher import Launcher
from .tensors import BackwardTensors, ForwardTensors


def launch_forward_pairs[
    L: Launcher, //
](mut launcher: L, t: ForwardTensors[DType.float32, DType.float32]) raises:
    """Launch six kernels: statistics with LayerNorm, two for each operand that is split, and the product."""
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var ln_out = launcher.workspace[DType.float32]("ln_out", Int(rows) * Int(H))
    launch_layernorm(launcher, ln_out, t.mean, t.rstd, t.input, t.ln_weight, t.ln_bias, sizes, t.eps)
    var a = launch_split(launcher, ln_out.as_imm(), Int(rows) * Int(H))
    var b = launch_split(launcher, t.linear_weight, Int(O) * Int(H))
    launch_gemm_pairs["nt", True](launcher, "output", t.output, a, b, t.linear_bias, rows, O, H)


def launch_backward_pairs[
    L: Launcher, //
](mut launcher: L, t: BackwardTensors[DType.float32, DType.float32], requested: Int) raises:
    """Launch at most eleven kernels: two for each operand that is split, two products, and the row kernels
    and sums.
    """
    ref sizes = t.sizes
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var size = Int(rows) * Int(H)
    var needs_weight_grad = requested & WEIGHT != 0
    var needs_dln = requested & (INPUT | NORM) != 0
    var dln = t.grad_input
    if needs_dln and requested & INPUT == 0:
        dln = launcher.workspace[DType.float32]("dln", size)
    var ln_out = launcher.workspace[DType.float32]("ln_out", size if needs_weight_grad else 0)
    var dy = launch_split(
        launcher, t.grad_output, Int(rows) * Int(O) if needs_weight_grad or needs_dln else 0
    )
    var parts = requested & (BIAS | INPUT | NORM | FEW_PARTIALS)
    if needs_dln:
        parts |= DLN_COMPUTED
        var weight = launch_split(launcher, t.linear_weight, Int(O) * Int(H))
        launch_gemm_pairs["nn", False](launcher, "dln", dln, dy, weight, t.linear_weight, rows, H, O)
    if needs_weight_grad:
        parts |= LN_OUT_REQUESTED
    launch_gradients(launcher, t, parts, dln, ln_out)
    if needs_weight_grad:
        var pair = launch_split(launcher, ln_out.as_imm(), size)
        launch_gemm_pairs["tn", False](
            launcher, "grad_weight", t.grad_weight, dy, pair, t.linear_weight, O, H, rows
        )
