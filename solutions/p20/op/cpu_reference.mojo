"""Puzzle 20 on the CPU, given complete: plain loops, in the same phases as the GPU kernels, to read after the blanks."""

from std.math import exp, sqrt
from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type
from .first_backward import WORD


def relu_mask_cpu[
    dtype: DType
](output: MutPtr[dtype], mask: MutPtr[DType.int32], input: ImmPtr[dtype], count: Int):
    """ReLU and its mask, a word for 32 elements."""
    for first in range(0, count, WORD):
        var word = UInt32(0)
        for i in range(first, min(first + WORD, count)):
            var x = input[unsafe_offset=i]
            var passes = not (x <= 0)
            output[unsafe_offset=i] = x if passes else Scalar[dtype](0)
            word |= UInt32(1 if passes else 0) << UInt32(i - first)
        mask[unsafe_offset=first // WORD] = word.cast[DType.int32]()


def relu_mask_backward_cpu[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], mask: ImmPtr[DType.int32], count: Int):
    """The gradient of ReLU's input from the mask."""
    for i in range(count):
        var bit = (mask[unsafe_offset=i // WORD] >> Int32(i % WORD)) & 1
        grad_input[unsafe_offset=i] = grad_output[unsafe_offset=i] if bit == 1 else Scalar[dtype](0)


def softmax_cpu[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int, columns: Int):
    """Softmax of every row."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "softmax is of floating-point numbers"
    for row in range(rows):
        var x = TileTensor(input.unsafe_offset(row * columns), row_major(columns))
        var y = TileTensor(output.unsafe_offset(row * columns), row_major(columns))
        var largest = Scalar[accum].MIN
        for c in range(columns):
            largest = max(largest, x[c].cast[accum]())
        var total = CompensatedSum[accum]()
        for c in range(columns):
            total += exp(x[c].cast[accum]() - largest)
        for c in range(columns):
            y[c] = (exp(x[c].cast[accum]() - largest) / total.total).cast[dtype]()


def softmax_backward_cpu[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], output: ImmPtr[dtype], rows: Int, columns: Int):
    """The gradient of softmax's input from its output P: dS = P * (dP - sum(dP * P))."""
    comptime accum = accum_type[dtype]
    for row in range(rows):
        var P = TileTensor(output.unsafe_offset(row * columns), row_major(columns))
        var dP = TileTensor(grad_output.unsafe_offset(row * columns), row_major(columns))
        var dS = TileTensor(grad_input.unsafe_offset(row * columns), row_major(columns))
        var dot = CompensatedSum[accum]()
        for c in range(columns):
            dot += dP[c].cast[accum]() * P[c].cast[accum]()
        for c in range(columns):
            dS[c] = (P[c].cast[accum]() * (dP[c].cast[accum]() - dot.total)).cast[dtype]()


def layernorm_cpu[
    dtype: DType
](
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    weight: ImmPtr[dtype],
    bias: ImmPtr[dtype],
    rows: Int,
    columns: Int,
    eps: Scalar[accum_type[dtype]],
):
    """LayerNorm of every row, with its mean and rstd."""
    comptime accum = accum_type[dtype]
    var count = Scalar[accum](columns)
    for row in range(rows):
        var x = TileTensor(input.unsafe_offset(row * columns), row_major(columns))
        var y = TileTensor(output.unsafe_offset(row * columns), row_major(columns))
        var elements = CompensatedSum[accum]()
        for c in range(columns):
            elements += x[c].cast[accum]()
        var row_mean = elements.total / count
        var squares = CompensatedSum[accum]()
        for c in range(columns):
            var deviation = x[c].cast[accum]() - row_mean
            squares += deviation * deviation
        var row_rstd = 1 / sqrt(squares.total / count + eps)
        for c in range(columns):
            var x_hat = (x[c].cast[accum]() - row_mean) * row_rstd
            var scaled = x_hat * weight[unsafe_offset=c].cast[accum]()
            y[c] = (scaled + bias[unsafe_offset=c].cast[accum]()).cast[dtype]()
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd


def layernorm_backward_cpu[
    dtype: DType
](
    grad_input: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    weight: ImmPtr[dtype],
    rows: Int,
    columns: Int,
):
    """All three gradients: row by row that of the input, then column by column those of the parameters."""
    comptime accum = accum_type[dtype]
    var count = Scalar[accum](columns)
    var x = TileTensor(input, row_major(rows, columns))
    var dy = TileTensor(grad_output, row_major(rows, columns))
    var dx = TileTensor(grad_input, row_major(rows, columns))
    for row in range(rows):
        var row_mean = mean[unsafe_offset=row]
        var row_rstd = rstd[unsafe_offset=row]
        var sum_g_x_hat = CompensatedSum[accum]()
        var sum_g = CompensatedSum[accum]()
        for c in range(columns):
            var g = dy[row, c].cast[accum]() * weight[unsafe_offset=c].cast[accum]()
            sum_g_x_hat += g * (x[row, c].cast[accum]() - row_mean) * row_rstd
            sum_g += g
        var c1 = sum_g_x_hat.total / count
        var c2 = sum_g.total / count
        for c in range(columns):
            var g = dy[row, c].cast[accum]() * weight[unsafe_offset=c].cast[accum]()
            var x_hat = (x[row, c].cast[accum]() - row_mean) * row_rstd
            dx[row, c] = (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()
    for c in range(columns):
        var sum_weight = CompensatedSum[accum]()
        var sum_bias = CompensatedSum[accum]()
        for row in range(rows):
            var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
            sum_weight += dy[row, c].cast[accum]() * x_hat
            sum_bias += dy[row, c].cast[accum]()
        grad_weight[unsafe_offset=c] = sum_weight.total.cast[dtype]()
        grad_bias[unsafe_offset=c] = sum_bias.total.cast[dtype]()
