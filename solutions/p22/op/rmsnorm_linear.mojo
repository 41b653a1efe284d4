"""RMSNorm + Linear, backward: everything but the kernel of the last gate, which is in `layernorm_linear.mojo`.

    x_hat  = input * rstd                      rstd = 1 / sqrt(mean of input^2 over H + eps)
    output = (x_hat * rms_weight) @ linear_weight^T

There is no mean, and neither layer has a bias. The op writes the gradients of `input`, `rms_weight` and `linear_weight`.
"""

from std.math import ceildiv, sqrt
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext, Dim
from layout import TileTensor
from layout.tile_layout import row_major

from .launches import MAX_GRID_Y, validate_sizes
from .layernorm_linear import ROW_THREADS, rmsnorm_linear_backward_kernel
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type, atomic_type
from .shared.launcher import DeviceLauncher, Launcher
from .tensors import Sizes
from .unfused_backward import clear_gradients_kernel, convert_gradients_kernel

comptime CHUNK = 64
"""Squares that are summed separately before they are added to the total."""


@always_inline
def rms_rstd[
    dtype: DType
](input: ImmPtr[dtype], row: Int, hidden_dim: Int, eps: Scalar[accum_type[dtype]]) -> Scalar[
    accum_type[dtype]
]:
    """Return the reciprocal root mean square of a row: 1 / sqrt(mean of input^2 + eps).

    The squares are summed in chunks, so that the rounding error hardly grows with the row. A compensated sum
    would turn an infinity into NaN, but rstd of such a row is 0.
    """
    comptime accum = accum_type[dtype]
    var squares = Scalar[accum](0)
    for start in range(0, hidden_dim, CHUNK):
        var part = Scalar[accum](0)
        for k in range(start, min(start + CHUNK, hidden_dim)):
            var value = input[unsafe_offset=row * hidden_dim + k].cast[accum]()
            part += value * value
        squares += part
    return 1 / sqrt(squares / Scalar[accum](hidden_dim) + eps)


def launch_rmsnorm_linear_backward[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_rms_weight: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rms_weight: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Launch three kernels: clear the sums, compute, round the sums. The first and the last are those of the
    fused backward pass, which also clear and round two bias gradients; here these are unused workspace.
    """
    comptime sum_dtype = atomic_type[dtype]
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var elements = ceildiv(max(H, O, O * H), ROW_THREADS)
    var sums_rms_weight = launcher.workspace[sum_dtype]("sums_rms_weight", H)
    var sums_weight = launcher.workspace[sum_dtype]("sums_weight", O * H)
    var sums_unused_h = launcher.workspace[sum_dtype]("sums_unused_h", H)
    var sums_unused_o = launcher.workspace[sum_dtype]("sums_unused_o", O)
    var unused_h = launcher.workspace[dtype]("unused_h", H)
    var unused_o = launcher.workspace[dtype]("unused_o", O)

    launcher.launch[clear_gradients_kernel[sum_dtype]](
        "clear_gradients",
        sums_rms_weight,
        sums_unused_h,
        sums_weight,
        sums_unused_o,
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(elements),
        block_dim=Dim(ROW_THREADS),
    )
    launcher.launch[rmsnorm_linear_backward_kernel[dtype, sum_dtype]](
        "rmsnorm_linear_backward",
        grad_input,
        sums_rms_weight,
        sums_weight,
        grad_output,
        input,
        rms_weight,
        linear_weight,
        sizes.batch_size,
        sizes.seq_len,
        sizes.hidden_dim,
        sizes.output_dim,
        eps,
        grid_dim=Dim(Int(sizes.batch_size), min(Int(sizes.seq_len), MAX_GRID_Y)),
        block_dim=Dim(1),
    )
    launcher.launch[convert_gradients_kernel[dtype, sum_dtype]](
        "convert_gradients",
        grad_rms_weight,
        unused_h,
        grad_weight,
        unused_o,
        sums_rms_weight.as_imm(),
        sums_unused_h.as_imm(),
        sums_weight.as_imm(),
        sums_unused_o.as_imm(),
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(elements),
        block_dim=Dim(ROW_THREADS),
    )


@extensibility.register("rmsnorm_linear_train_backward")
struct RMSNormLinearTrainBackward:
    """The op of the last gate: run-time sizes, writes into the caller's buffers, recomputes rstd."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        grad_rms_weight: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_weight: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        rms_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        var O = linear_weight.dim_size(0)
        expect_shape("grad_input", grad_input, B, S, H)
        expect_shape("grad_rms_weight", grad_rms_weight, H)
        expect_shape("grad_weight", grad_weight, O, H)
        expect_shape("grad_output", grad_output, B, S, O)
        expect_shape("rms_weight", rms_weight, H)
        expect_shape("linear_weight", linear_weight, O, H)
        var launcher = DeviceLauncher(ctx)
        var sizes = validate_sizes(B, S, H, O)
        var dx = grad_input.unsafe_ptr()
        var dgamma = grad_rms_weight.unsafe_ptr()
        var dW = grad_weight.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var gamma = rms_weight.unsafe_ptr().as_imm()
        var W = linear_weight.unsafe_ptr().as_imm()
        var eps_accum = eps.cast[accum_type[dtype]]()
        launch_rmsnorm_linear_backward[dtype](launcher, dx, dgamma, dW, dy, x, gamma, W, sizes, eps_accum)
