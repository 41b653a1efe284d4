"""SiLU on a tensor of any shape, as a vector of `size` elements: y = x s, and dx = dy s (1 + x (1 - s)), where s = 1 / (1 + exp(-x)).

Both are computed in float32 (in float64 for float64) and rounded once.
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
"""Threads per block; each owns one element."""


def silu_kernel[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], size: Int32):
    """Compute SiLU, one element per thread."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "SiLU needs a floating-point dtype"
    var i = global_idx.x
    if i < Int(size):
        var x = input[unsafe_offset=i].cast[accum]()
        output[unsafe_offset=i] = (x / (1 + exp(-x))).cast[dtype]()


def silu_backward_kernel[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], size: Int32):
    """Compute the gradient of SiLU's input, one element per thread."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "SiLU needs a floating-point dtype"
    var i = global_idx.x
    if i < Int(size):
        var x = input[unsafe_offset=i].cast[accum]()
        var s = 1 / (1 + exp(-x))
        var dy = grad_output[unsafe_offset=i].cast[accum]()
        grad_input[unsafe_offset=i] = (dy * s * (1 + x * (1 - s))).cast[dtype]()


def launch_silu[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], size: Int32) raises:
    """Launch one kernel: a thread for each element."""
    launcher.launch[silu_kernel[dtype]](
        "silu", output, input, size, grid_dim=ceildiv(Int(size), THREADS), block_dim=THREADS
    )


def launch_silu_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L, grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], size: Int32
) raises:
    """Launch one kernel: a thread for each element."""
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
    """Compute SiLU."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        input: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_silu[dtype](launcher, y, x, Int32(input.size()))


@extensibility.register("silu_train_backward")
struct SiluTrainBackward:
    """Compute the gradient of SiLU's input."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=1, static_spec=_],
        input: InputTensor[dtype=dtype, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var dx = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_silu_backward[dtype](launcher, dx, dy, x, Int32(input.size()))
