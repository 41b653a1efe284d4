"""SiLU on a tensor of any shape, as a vector of `size` elements: y = x s, and dx = dy s (1 + x (1 - s)), where s = 1 / (1 + exp(-x)).

Both are computed in float32 (float64 for float64) and rounded once. Kernels and CPU path share the two formulas.
"""

from std.math import ceildiv, exp
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu import global_idx
from max.gpu.host import DeviceContext

from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher, Launcher

comptime THREADS = 256
"""Threads of a block; each has one element."""


@always_inline
def silu[dtype: DType](x: Scalar[dtype]) -> Scalar[dtype]:
    """The output for one element."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "SiLU is of floating-point numbers"
    var wide = x.cast[accum]()
    return (wide / (1 + exp(-wide))).cast[dtype]()


@always_inline
def silu_gradient[dtype: DType](dy: Scalar[dtype], x: Scalar[dtype]) -> Scalar[dtype]:
    """The gradient of the input for one element."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "SiLU is of floating-point numbers"
    var wide = x.cast[accum]()
    var s = 1 / (1 + exp(-wide))
    return (dy.cast[accum]() * s * (1 + wide * (1 - s))).cast[dtype]()


def silu_kernel[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], size: Int32):
    """One element for each thread."""
    var i = global_idx.x
    if i < Int(size):
        output[unsafe_offset=i] = silu(input[unsafe_offset=i])


def silu_backward_kernel[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], size: Int32):
    """One element for each thread."""
    var i = global_idx.x
    if i < Int(size):
        grad_input[unsafe_offset=i] = silu_gradient(grad_output[unsafe_offset=i], input[unsafe_offset=i])


def launch_silu[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], size: Int32) raises:
    """One launch."""
    launcher.launch[silu_kernel[dtype]](
        "silu", output, input, size, grid_dim=ceildiv(Int(size), THREADS), block_dim=THREADS
    )


def launch_silu_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L, grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], size: Int32
) raises:
    """One launch."""
    launcher.launch[silu_backward_kernel[dtype]](
        "silu_backward",
        grad_input,
        grad_output,
        input,
        size,
        grid_dim=ceildiv(Int(size), THREADS),
        block_dim=THREADS,
    )


@extensibility.register("silu_train")
struct SiluTrain:
    """The forward op."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        input: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        comptime if target == "cpu":
            for i in range(input.size()):
                y[unsafe_offset=i] = silu(x[unsafe_offset=i])
        else:
            var launcher = DeviceLauncher(ctx)
            launch_silu[dtype](launcher, y, x, Int32(input.size()))


@extensibility.register("silu_train_backward")
struct SiluTrainBackward:
    """The backward op."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=1, static_spec=_],
        input: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var dx = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        comptime if target == "cpu":
            for i in range(input.size()):
                dx[unsafe_offset=i] = silu_gradient(dy[unsafe_offset=i], x[unsafe_offset=i])
        else:
            var launcher = DeviceLauncher(ctx)
            launch_silu_backward[dtype](launcher, dx, dy, x, Int32(input.size()))
