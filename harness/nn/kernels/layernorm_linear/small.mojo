"""The forward and backward pass of the smallest problems, one launch each, since a launch costs more than the
work.

`suits_small_forward` and `suits_small_backward` limit their size. Sums are compensated and their order is
fixed, so every run gives the same bits.
"""

from std.math import sqrt
from std.memory import AddressSpace
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import Dim
from max.gpu.primitives import block
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .launches import BIAS, INPUT, NORM, WEIGHT
from shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type, rounded_product
from shared.launcher import Launcher
from .tensors import BackwardTensors, ForwardTensors, Sizes

comptime FORWARD_THREADS = 128
"""Threads per block of the forward kernel; a block owns one row."""
comptime BACKWARD_THREADS = 256
"""Threads of the backward kernel's only block."""
comptime MAX_SIDE = 256
"""Maximum H, and in the backward pass also maximum rows and O: the length of a thread's longest sum."""
comptime MAX_SHARED_ELEMENTS = 2048
"""Maximum rows * H of the two arrays that the backward kernel keeps in shared memory."""
comptime MAX_FORWARD_WORK = 1 << 20
"""Maximum multiply-adds of a forward pass; a single row may have at most 1/64 of them."""
comptime MAX_BACKWARD_WORK = 1 << 15
"""Maximum multiply-adds of one product of a backward pass, which a single block computes."""


def suits_small_forward(sizes: Sizes) -> Bool:
    """Return whether a forward pass is small enough for one launch."""
    var weight = Int(sizes.hidden_dim) * Int(sizes.output_dim)
    return (
        sizes.hidden_dim <= MAX_SIDE
        and weight <= MAX_FORWARD_WORK // 64
        and Int(sizes.rows()) * weight <= MAX_FORWARD_WORK
    )


def suits_small_backward(sizes: Sizes) -> Bool:
    """Return whether a backward pass is small enough for one block."""
    var shared_elements = Int(sizes.rows()) * Int(sizes.hidden_dim)
    return (
        max(sizes.rows(), sizes.hidden_dim, sizes.output_dim) <= MAX_SIDE
        and shared_elements <= MAX_SHARED_ELEMENTS
        and shared_elements * Int(sizes.output_dim) <= MAX_BACKWARD_WORK
    )


@__name("layernorm_linear_small_forward")
def small_forward_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [rows, O]
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    linear_bias: ImmPtr[dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute LayerNorm and Linear. A block owns one row, and keeps its LayerNorm output in shared memory."""
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var row = block_idx.x
    var x = input.unsafe_offset(row * H)
    var ln_out = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[MAX_SIDE]()).ptr

    # Phase 1: mean and variance, in two passes; the second pass also corrects the rounding of the first mean.
    var count = Scalar[accum](H)
    var elements = Scalar[accum](0)
    for h in range(thread_idx.x, H, FORWARD_THREADS):
        elements += x[unsafe_offset=h].cast[accum]()
    var first_mean = block.sum[block_size=FORWARD_THREADS](elements) / count
    var deviations = Scalar[accum](0)
    var squares = Scalar[accum](0)
    for h in range(thread_idx.x, H, FORWARD_THREADS):
        var deviation = x[unsafe_offset=h].cast[accum]() - first_mean
        deviations += deviation
        squares += deviation * deviation
    var correction = block.sum[block_size=FORWARD_THREADS](deviations) / count
    var variance = block.sum[block_size=FORWARD_THREADS](squares) / count - correction * correction
    var row_mean = first_mean + correction
    var row_rstd = 1 / sqrt(variance + eps)
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd

    # Phase 2: normalise, scale and shift.
    for h in range(thread_idx.x, H, FORWARD_THREADS):
        var x_hat = (x[unsafe_offset=h].cast[accum]() - row_mean) * row_rstd
        var gamma = ln_weight[unsafe_offset=h].cast[accum]()
        ln_out[unsafe_offset=h] = x_hat * gamma + ln_bias[unsafe_offset=h].cast[accum]()
    barrier()

    # Phase 3: the product; a thread computes one column of the output at a time.
    for o in range(thread_idx.x, O, FORWARD_THREADS):
        var total = CompensatedSum[accum]()
        for h in range(H):
            total += ln_out[unsafe_offset=h] * linear_weight[unsafe_offset=o * H + h].cast[accum]()
        total += linear_bias[unsafe_offset=o].cast[accum]()
        output[unsafe_offset=row * O + o] = total.total.cast[dtype]()


@__name("layernorm_linear_small_backward")
def small_backward_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, H]
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    grad_output: ImmPtr[dtype],  # [rows, O]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    rows: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
    requested: Int32,  # sum of WEIGHT, BIAS, INPUT and NORM; no other gradient is touched
):
    """Compute the requested gradients in one block: each element is summed by one thread, without atomics."""
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x_hat = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[MAX_SHARED_ELEMENTS]()
    ).ptr
    var dln = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[MAX_SHARED_ELEMENTS]()
    ).ptr
    var c1 = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[MAX_SIDE]()).ptr
    var c2 = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](row_major[MAX_SIDE]()).ptr

    # Phase 1: x_hat, and the gradient of the LayerNorm output, dln = dY W.
    var needs_dln = requested & (INPUT | NORM) != 0
    for index in range(thread_idx.x, R * H, BACKWARD_THREADS):
        var row = index // H
        var h = index % H
        var deviation = input[unsafe_offset=index].cast[accum]() - mean[unsafe_offset=row]
        x_hat[unsafe_offset=index] = deviation * rstd[unsafe_offset=row]
        if needs_dln:
            var total = CompensatedSum[accum]()
            for o in range(O):
                var dy = grad_output[unsafe_offset=row * O + o].cast[accum]()
                total += dy * linear_weight[unsafe_offset=o * H + h].cast[accum]()
            dln[unsafe_offset=index] = total.total
    barrier()

    # Phase 2: c1 = mean_h(g * x_hat) and c2 = mean_h(g) of every row, g = dln * gamma.
    if requested & INPUT != 0:
        for row in range(thread_idx.x, R, BACKWARD_THREADS):
            var sum_g_x_hat = CompensatedSum[accum]()
            var sum_g = CompensatedSum[accum]()
            for h in range(H):
                var g = dln[unsafe_offset=row * H + h] * ln_weight[unsafe_offset=h].cast[accum]()
                sum_g_x_hat += g * x_hat[unsafe_offset=row * H + h]
                sum_g += g
            c1[unsafe_offset=row] = sum_g_x_hat.total / Scalar[accum](H)
            c2[unsafe_offset=row] = sum_g.total / Scalar[accum](H)
    barrier()

    # Phase 3: dx = rstd * (g - c2 - x_hat * c1); dgamma and dbeta; db; dW.
    if requested & INPUT != 0:
        for index in range(thread_idx.x, R * H, BACKWARD_THREADS):
            var row = index // H
            var g = rounded_product(
                dln[unsafe_offset=index], ln_weight[unsafe_offset=index % H].cast[accum]()
            )
            var dx = g - c2[unsafe_offset=row] - x_hat[unsafe_offset=index] * c1[unsafe_offset=row]
            grad_input[unsafe_offset=index] = (rstd[unsafe_offset=row] * dx).cast[dtype]()
    if requested & NORM != 0:
        for h in range(thread_idx.x, H, BACKWARD_THREADS):
            var dgamma = CompensatedSum[accum]()
            var dbeta = CompensatedSum[accum]()
            for row in range(R):
                dgamma += dln[unsafe_offset=row * H + h] * x_hat[unsafe_offset=row * H + h]
                dbeta += dln[unsafe_offset=row * H + h]
            grad_ln_weight[unsafe_offset=h] = dgamma.total.cast[dtype]()
            grad_ln_bias[unsafe_offset=h] = dbeta.total.cast[dtype]()
    if requested & BIAS != 0:
        for o in range(thread_idx.x, O, BACKWARD_THREADS):
            var db = CompensatedSum[accum]()
            for row in range(R):
                db += grad_output[unsafe_offset=row * O + o].cast[accum]()
            grad_bias[unsafe_offset=o] = db.total.cast[dtype]()
    if requested & WEIGHT != 0:
        for index in range(thread_idx.x, O * H, BACKWARD_THREADS):
            var o = index // H
            var h = index % H
            var gamma = ln_weight[unsafe_offset=h].cast[accum]()
            var beta = ln_bias[unsafe_offset=h].cast[accum]()
            var dW = CompensatedSum[accum]()
            for row in range(R):
                var ln_out = x_hat[unsafe_offset=row * H + h] * gamma + beta
                dW += grad_output[unsafe_offset=row * O + o].cast[accum]() * ln_out
            grad_weight[unsafe_offset=index] = dW.total.cast[dtype]()


def launch_forward_small[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: ForwardTensors[dtype, dtype]) raises:
    launcher.launch[small_forward_kernel[dtype]](
        "small_forward",
        t.output,
        t.mean,
        t.rstd,
        t.input,
        t.ln_weight,
        t.ln_bias,
        t.linear_weight,
        t.linear_bias,
        t.sizes.hidden_dim,
        t.sizes.output_dim,
        t.eps,
        grid_dim=Dim(Int(t.sizes.rows())),
        block_dim=Dim(FORWARD_THREADS),
    )


def launch_backward_small[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: BackwardTensors[dtype, dtype], requested: Int) raises:
    launcher.launch[small_backward_kernel[dtype]](
        "small_backward",
        t.grad_input,
        t.grad_ln_weight,
        t.grad_ln_bias,
        t.grad_weight,
        t.grad_bias,
        t.grad_output,
        t.input,
        t.mean,
        t.rstd,
        t.ln_weight,
        t.ln_bias,
        t.linear_weight,
        t.sizes.rows(),
        t.sizes.hidden_dim,
        t.sizes.output_dim,
        Int32(requested),
        grid_dim=Dim(1),
        block_dim=Dim(BACKWARD_THREADS),
    )
