"""Puzzle 21, given complete: the CPU paths, plain loops in float32 or wider, and the ops that MAX sees."""

from std.math import exp, sqrt
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type
from .hunt import (
    EPS,
    launch_bias_gradient,
    launch_scale_gradient,
    launch_softmax_gradient,
    launch_standardise_gradient,
)
from .shared.launcher import DeviceLauncher


def bias_gradient_cpu[
    dtype: DType
](grad_bias: MutPtr[dtype], grad_output: ImmPtr[dtype], rows: Int, width: Int):
    """The sum of every column."""
    for c in range(width):
        var total = CompensatedSum[accum_type[dtype]]()
        for row in range(rows):
            total += grad_output[unsafe_offset=row * width + c].cast[accum_type[dtype]]()
        grad_bias[unsafe_offset=c] = total.total.cast[dtype]()


def scale_gradient_cpu[
    dtype: DType
](
    grad_scale: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rows: Int,
    width: Int,
):
    """The sum of dy * x of every column."""
    comptime accum = accum_type[dtype]
    for c in range(width):
        var total = CompensatedSum[accum]()
        for row in range(rows):
            var i = row * width + c
            total += grad_output[unsafe_offset=i].cast[accum]() * input[unsafe_offset=i].cast[accum]()
        grad_scale[unsafe_offset=c] = total.total


def softmax_gradient_cpu[
    dtype: DType
](grad_logits: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], rows: Int, width: Int,):
    """Row by row: dx = P * (dy - sum(dy * P))."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "softmax is of floating-point numbers"
    for row in range(rows):
        var x = input.unsafe_offset(row * width)
        var dy = grad_output.unsafe_offset(row * width)
        var largest = Scalar[accum].MIN
        for c in range(width):
            largest = max(largest, x[unsafe_offset=c].cast[accum]())
        var total = CompensatedSum[accum]()
        for c in range(width):
            total += exp(x[unsafe_offset=c].cast[accum]() - largest)
        var dot = CompensatedSum[accum]()
        for c in range(width):
            var P = exp(x[unsafe_offset=c].cast[accum]() - largest) / total.total
            dot += dy[unsafe_offset=c].cast[accum]() * P
        for c in range(width):
            var P = exp(x[unsafe_offset=c].cast[accum]() - largest) / total.total
            var dx = P * (dy[unsafe_offset=c].cast[accum]() - dot.total)
            grad_logits[unsafe_offset=row * width + c] = dx.cast[dtype]()


def standardise_gradient_cpu[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], rows: Int, width: Int,):
    """Row by row: dx = rstd * (dy - mean(dy) - (x - mean) * rstd^2 * mean(dy * (x - mean)))."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "rstd is of floating-point numbers"
    var count = Scalar[accum](width)
    for row in range(rows):
        var x = input.unsafe_offset(row * width)
        var dy = grad_output.unsafe_offset(row * width)
        var sum = CompensatedSum[accum]()
        var sum_dy = CompensatedSum[accum]()
        for c in range(width):
            sum += x[unsafe_offset=c].cast[accum]()
            sum_dy += dy[unsafe_offset=c].cast[accum]()
        var mean = sum.total / count
        var squares = CompensatedSum[accum]()
        var products = CompensatedSum[accum]()
        for c in range(width):
            var deviation = x[unsafe_offset=c].cast[accum]() - mean
            squares += deviation * deviation
            products += dy[unsafe_offset=c].cast[accum]() * deviation
        var rstd = 1 / sqrt(squares.total / count + Scalar[accum](EPS))
        for c in range(width):
            var x_hat = (x[unsafe_offset=c].cast[accum]() - mean) * rstd
            var through_variance = x_hat * rstd * (products.total / count)
            var rest = dy[unsafe_offset=c].cast[accum]() - sum_dy.total / count - through_variance
            grad_input[unsafe_offset=row * width + c] = (rstd * rest).cast[dtype]()


# ---- What MAX sees ------------------------------------------------------------------------------------------


@extensibility.register("bias_gradient_train")
struct BiasGradient:
    """The gradient of a bias."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        grad_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_bias.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var batch = grad_output.dim_size(0)
        var sequence = grad_output.dim_size(1)
        var width = grad_output.dim_size(2)
        comptime if target == "cpu":
            bias_gradient_cpu[dtype](to, dy, batch * sequence, width)
        else:
            var launcher = DeviceLauncher(ctx)
            launch_bias_gradient[dtype](launcher, to, dy, batch, sequence, width)


@extensibility.register("scale_gradient_train")
struct ScaleGradient:
    """The gradient of a scale, in the type of sums."""

    @staticmethod
    def execute[
        target: StaticString, accum: DType, dtype: DType
    ](
        grad_scale: MutableInputTensor[dtype=accum, rank=1, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "sums are kept in accum_type[dtype]"
        var to = rebind[MutPtr[accum_type[dtype]]](grad_scale.unsafe_ptr())
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        comptime if target == "cpu":
            scale_gradient_cpu[dtype](to, dy, x, rows, width)
        else:
            var launcher = DeviceLauncher(ctx)
            launch_scale_gradient[dtype](launcher, to, dy, x, rows, width)


@extensibility.register("softmax_gradient_train")
struct SoftmaxGradient:
    """The gradient of softmax's logits."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        grad_logits: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_logits.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        comptime if target == "cpu":
            softmax_gradient_cpu[dtype](to, dy, x, rows, width)
        else:
            var launcher = DeviceLauncher(ctx)
            launch_softmax_gradient[dtype](launcher, to, dy, x, rows, width)


@extensibility.register("standardise_gradient_train")
struct StandardiseGradient:
    """The gradient of what is standardised."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var to = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0) * input.dim_size(1)
        var width = input.dim_size(2)
        comptime if target == "cpu":
            standardise_gradient_cpu[dtype](to, dy, x, rows, width)
        else:
            var launcher = DeviceLauncher(ctx)
            launch_standardise_gradient[dtype](launcher, to, dy, x, rows, width)
