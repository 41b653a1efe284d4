"""Puzzle 27 on the CPU, given complete: plain loops, in the same phases as the GPU kernels, to read after the blanks."""

from std.math import exp, log, sqrt

from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type
from .parts import CHUNK, CUBE, IGNORED, NORM_EPS, SCALE


def cross_entropy_cpu[
    dtype: DType
](
    row_loss: MutPtr[accum_type[dtype]],
    lse: MutPtr[accum_type[dtype]],
    logits: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    places: Int,
    vocabulary: Int,
):
    """What every place pays, and its lse."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "logits are floating-point numbers"
    for row in range(places):
        var z = logits.unsafe_offset(row * vocabulary)
        var largest = Scalar[accum].MIN
        for c in range(vocabulary):
            largest = max(largest, z[unsafe_offset=c].cast[accum]())
        var total = CompensatedSum[accum]()
        for c in range(vocabulary):
            total += exp(z[unsafe_offset=c].cast[accum]() - largest)
        lse[unsafe_offset=row] = largest + log(total.total)
        row_loss[unsafe_offset=row] = 0
        if targets[unsafe_offset=row] != IGNORED:
            var wanted = z[unsafe_offset=Int(targets[unsafe_offset=row])].cast[accum]()
            row_loss[unsafe_offset=row] = log(total.total) - (wanted - largest)


def mean_loss_cpu[
    dtype: DType
](
    mean_loss: MutPtr[dtype],
    counted: MutPtr[dtype],
    row_loss: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    places: Int,
):
    """The mean of what is paid, and how many pay."""
    var paid = CompensatedSum[dtype]()
    var count = 0
    for row in range(places):
        if targets[unsafe_offset=row] != IGNORED:
            paid += row_loss[unsafe_offset=row]
            count += 1
    mean_loss[unsafe_offset=0] = paid.total / Scalar[dtype](count)
    counted[unsafe_offset=0] = Scalar[dtype](count)


def cross_entropy_backward_cpu[
    dtype: DType
](
    grad_rows: MutPtr[dtype],
    logits: ImmPtr[dtype],
    targets: ImmPtr[DType.int64],
    lse: ImmPtr[accum_type[dtype]],
    counted: ImmPtr[accum_type[dtype]],
    places: Int,
    vocabulary: Int,
):
    """The gradient by the logits, row by row."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "logits are floating-point numbers"
    for row in range(places):
        var target = Int(targets[unsafe_offset=row])
        for c in range(vocabulary):
            var i = row * vocabulary + c
            var dz = exp(logits[unsafe_offset=i].cast[accum]() - lse[unsafe_offset=row])
            if c == target:
                dz -= 1
            if target == IGNORED:
                dz = 0
            grad_rows[unsafe_offset=i] = (dz / counted[unsafe_offset=0]).cast[dtype]()


def gelu_cpu[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], count: Int):
    """GELU in its tanh form."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "GELU is of floating-point numbers"
    for i in range(count):
        var x = input[unsafe_offset=i].cast[accum]()
        var u = Scalar[accum](SCALE) * (x + Scalar[accum](CUBE) * x * x * x)
        output[unsafe_offset=i] = (x / (1 + exp(-2 * u))).cast[dtype]()


def gelu_backward_cpu[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], count: Int):
    """The gradient of GELU's input."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "GELU is of floating-point numbers"
    for i in range(count):
        var x = input[unsafe_offset=i].cast[accum]()
        var s = 1 / (1 + exp(-2 * Scalar[accum](SCALE) * (x + Scalar[accum](CUBE) * x * x * x)))
        var slope = Scalar[accum](SCALE) * (1 + Scalar[accum](3 * CUBE) * x * x)
        var dy = grad_output[unsafe_offset=i].cast[accum]()
        grad_input[unsafe_offset=i] = (dy * (s + x * 2 * s * (1 - s) * slope)).cast[dtype]()


def embedding_backward_cpu[
    dtype: DType
](
    grad_token: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    starts: ImmPtr[DType.int32],
    vocabulary: Int,
    channels: Int,
):
    """The gradient of the table, row by row."""
    comptime accum = accum_type[dtype]
    for token in range(vocabulary):
        for c in range(channels):
            var total = CompensatedSum[accum]()
            for i in range(starts[unsafe_offset=token], starts[unsafe_offset=token + 1]):
                var place = Int(order[unsafe_offset=Int(i)])
                total += grad_output[unsafe_offset=place * channels + c].cast[accum]()
            grad_token[unsafe_offset=token * channels + c] = total.total.cast[dtype]()


def adamw_cpu[
    dtype: DType
](
    corrections: MutPtr[accum_type[dtype]],
    new_parameter: MutPtr[dtype],
    new_mean: MutPtr[accum_type[dtype]],
    new_square: MutPtr[accum_type[dtype]],
    parameter: ImmPtr[dtype],
    gradient: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    square: ImmPtr[accum_type[dtype]],
    rate: Scalar[accum_type[dtype]],
    beta1: Float64,
    beta2: Float64,
    eps: Scalar[accum_type[dtype]],
    decay: Scalar[accum_type[dtype]],
    step: Int32,
    count: Int,
):
    """One step of AdamW, element by element."""
    comptime accum = accum_type[dtype]
    var c1 = (1 - beta1 ** Int(step)).cast[accum]()
    var c2 = (1 - beta2 ** Int(step)).cast[accum]()
    corrections[unsafe_offset=0] = c1
    corrections[unsafe_offset=1] = c2
    for i in range(count):
        var x = parameter[unsafe_offset=i].cast[accum]()
        var g = gradient[unsafe_offset=i].cast[accum]()
        var m = beta1.cast[accum]() * mean[unsafe_offset=i] + (1 - beta1.cast[accum]()) * g
        var v = beta2.cast[accum]() * square[unsafe_offset=i] + (1 - beta2.cast[accum]()) * g * g
        var update = m / c1 / (sqrt(v / c2) + eps) + decay * x
        new_mean[unsafe_offset=i] = m
        new_square[unsafe_offset=i] = v
        new_parameter[unsafe_offset=i] = (x - rate * update).cast[dtype]()


def clip_cpu[
    dtype: DType
](
    square_sums: MutPtr[accum_type[dtype]],
    norm: MutPtr[accum_type[dtype]],
    clipped: MutPtr[dtype],
    gradient: ImmPtr[dtype],
    limit: Scalar[accum_type[dtype]],
    count: Int,
):
    """The squares of every chunk, the norm, and the gradients, clipped."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "a root is of floating-point numbers"
    var total = CompensatedSum[accum]()
    for first in range(0, count, CHUNK):
        var squares = CompensatedSum[accum]()
        for i in range(first, min(first + CHUNK, count)):
            var g = gradient[unsafe_offset=i].cast[accum]()
            squares += g * g
        square_sums[unsafe_offset=first // CHUNK] = squares.total
        total += squares.total
    norm[unsafe_offset=0] = sqrt(total.total)
    var factor = limit / (sqrt(total.total) + Scalar[accum](NORM_EPS))
    if factor > 1:  # not min(1, factor), which makes 1 of NaN
        factor = 1
    for i in range(count):
        clipped[unsafe_offset=i] = (gradient[unsafe_offset=i].cast[accum]() * factor).cast[dtype]()
