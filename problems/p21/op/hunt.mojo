"""Puzzle 21, the four kernels of the hunt: gradients on [batch, sequence, width], each with a mistake from practice.

    dbias         y = x + bias          dbias = sum of dy over batch and sequence
    dscale        y = x * scale         dscale = sum of dy * x over batch and sequence
    dsoftmax      P = softmax(x)        dx = P * (dy - sum(dy * P)), the sum over a row
    dstandardise  y = (x - mean) * rstd, with rstd = 1 / sqrt(variance + EPS)
                  dx = rstd * (dy - mean(dy) - (x - mean) * rstd^2 * mean(dy * (x - mean))), means over a row

A row is one vector of `width` elements; there are batch * sequence contiguous rows. Every size is a run-time
argument. Sums are kept in `accum_type[dtype]`: float32 for 16-bit types. The ops are in `ops.mojo`.
"""

from std.math import ceildiv, exp, sqrt
from max.gpu import block_dim, block_idx, global_idx, thread_idx
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import ImmPtr, MutPtr, accum_type, atomic_add
from .shared.launcher import Launcher

comptime EPS = 1e-5
"""The constant added to the variance."""
comptime THREADS = 128
"""Threads per block."""


def bias_gradient_kernel[
    dtype: DType
](
    grad_bias: MutPtr[dtype],  # [width]
    grad_output: ImmPtr[dtype],  # [batch, sequence, width]
    batch: Int32,
    sequence: Int32,
    width: Int32,
):
    """Compute the gradient of a bias. A thread owns one column: no other thread writes its element."""
    comptime accum = accum_type[dtype]
    var c = global_idx.x
    if c >= Int(width):
        return
    var dy = TileTensor(grad_output, row_major(Int(batch), Int(sequence), Int(width)))
    # BLANK-START dbias: fix the sum of this thread's column
    var total = Scalar[accum](0)
    for s in range(Int(sequence)):
        total += dy[0, s, c].cast[accum]()
    grad_bias[unsafe_offset=c] = total.cast[dtype]()
    # BLANK-END dbias (unsolved while it reads as given: 9b2b1d32)


def clear_kernel[dtype: DType](sums: MutPtr[dtype], count: Int32):
    """Set `count` elements to 0. A thread owns one element."""
    var i = global_idx.x
    if i < Int(count):
        sums[unsafe_offset=i] = 0


def scale_gradient_kernel[
    dtype: DType
](
    grad_scale: MutPtr[accum_type[dtype]],  # [width]
    grad_output: ImmPtr[dtype],  # [batch, sequence, width]
    input: ImmPtr[dtype],  # [batch, sequence, width]
    width: Int32,
):
    """Add one row's share of the gradient of a scale to the sums. A block owns a row; all blocks add to the same sums.
    """
    comptime accum = accum_type[dtype]
    var W = Int(width)
    var dy = TileTensor(grad_output.unsafe_offset(block_idx.x * W), row_major(W))
    var x = TileTensor(input.unsafe_offset(block_idx.x * W), row_major(W))
    for c in range(thread_idx.x, W, block_dim.x):
        atomic_add(grad_scale, c, dy[c].cast[accum]() * x[c].cast[accum]())


def softmax_gradient_kernel[
    dtype: DType
](
    grad_logits: MutPtr[dtype],  # [batch, sequence, width]
    grad_output: ImmPtr[dtype],  # [batch, sequence, width]
    input: ImmPtr[dtype],  # [batch, sequence, width], the logits
    width: Int32,
):
    """Compute the gradient of softmax's logits from recomputed probabilities. A block owns a row."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    var W = Int(width)
    var x = TileTensor(input.unsafe_offset(block_idx.x * W), row_major(W))
    var dy = TileTensor(grad_output.unsafe_offset(block_idx.x * W), row_major(W))
    var dx = TileTensor(grad_logits.unsafe_offset(block_idx.x * W), row_major(W))

    var largest = Scalar[accum].MIN
    for c in range(thread_idx.x, W, block_dim.x):
        largest = max(largest, x[c].cast[accum]())
    largest = block.max[block_size=THREADS](largest)
    var partial = Scalar[accum](0)
    for c in range(thread_idx.x, W, block_dim.x):
        partial += exp(x[c].cast[accum]() - largest)
    var total = block.sum[block_size=THREADS](partial)

    # BLANK-START dsoftmax: fix the gradient of this row, whose P is exp(x - largest) / total
    for c in range(thread_idx.x, W, block_dim.x):
        var P = exp(x[c].cast[accum]() - largest) / total
        dx[c] = (P * (1 - P) * dy[c].cast[accum]()).cast[dtype]()
    # BLANK-END dsoftmax (unsolved while it reads as given: 6dd55c3b)


def standardise_gradient_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [batch, sequence, width]
    grad_output: ImmPtr[dtype],  # [batch, sequence, width]
    input: ImmPtr[dtype],  # [batch, sequence, width]
    width: Int32,
):
    """Compute the gradient of the standardised input from recomputed statistics. A block owns a row."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "rstd needs a floating-point dtype"
    var W = Int(width)
    var count = Scalar[accum](W)
    var x = TileTensor(input.unsafe_offset(block_idx.x * W), row_major(W))
    var dy = TileTensor(grad_output.unsafe_offset(block_idx.x * W), row_major(W))
    var dx = TileTensor(grad_input.unsafe_offset(block_idx.x * W), row_major(W))

    var partial = Scalar[accum](0)
    for c in range(thread_idx.x, W, block_dim.x):
        partial += x[c].cast[accum]()
    var mean = block.sum[block_size=THREADS](partial) / count
    var squares = Scalar[accum](0)
    for c in range(thread_idx.x, W, block_dim.x):
        var deviation = x[c].cast[accum]() - mean
        squares += deviation * deviation
    var rstd = 1 / sqrt(block.sum[block_size=THREADS](squares) / count + Scalar[accum](EPS))

    var sum_dy = Scalar[accum](0)
    var sum_products = Scalar[accum](0)
    for c in range(thread_idx.x, W, block_dim.x):
        sum_dy += dy[c].cast[accum]()
        sum_products += dy[c].cast[accum]() * (x[c].cast[accum]() - mean)
    var mean_dy = block.sum[block_size=THREADS](sum_dy) / count
    var mean_products = block.sum[block_size=THREADS](sum_products) / count
    # BLANK-START dstandardise: fix the gradient of this row
    for c in range(thread_idx.x, W, block_dim.x):
        var deviation = x[c].cast[accum]() - mean
        var through_variance = deviation * rstd * rstd * rstd * mean_products
        dx[c] = (rstd * (dy[c].cast[accum]() - mean_dy - through_variance)).cast[dtype]()
    # BLANK-END dstandardise (unsolved while it reads as given: 6dfb6f00)


# ---- Launches -----------------------------------------------------------------------------------------------


def launch_bias_gradient[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    batch: Int,
    sequence: Int,
    width: Int,
) raises:
    """Launch one kernel: a thread for each column."""
    launcher.launch[bias_gradient_kernel[dtype]](
        "bias_gradient", grad_bias, grad_output, Int32(batch), Int32(sequence), Int32(width),
        grid_dim=ceildiv(width, THREADS), block_dim=THREADS,
    )  # fmt: skip


def launch_scale_gradient[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_scale: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rows: Int,
    width: Int,
) raises:
    """Launch a block for each row, which adds to `grad_scale`; the caller passes uninitialised memory."""
    # BLANK-START dscale: fix the launches for the gradient of the scale
    launcher.launch[scale_gradient_kernel[dtype]](
        "scale_gradient", grad_scale, grad_output, input, Int32(width), grid_dim=rows, block_dim=THREADS
    )
    # BLANK-END dscale (unsolved while it reads as given: b926e84e)


def launch_softmax_gradient[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_logits: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rows: Int,
    width: Int,
) raises:
    """Launch one kernel: a block for each row."""
    launcher.launch[softmax_gradient_kernel[dtype]](
        "softmax_gradient", grad_logits, grad_output, input, Int32(width), grid_dim=rows, block_dim=THREADS
    )


def launch_standardise_gradient[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rows: Int,
    width: Int,
) raises:
    """Launch one kernel: a block for each row."""
    launcher.launch[standardise_gradient_kernel[dtype]](
        "standardise_gradient", grad_input, grad_output, input, Int32(width), grid_dim=rows, block_dim=THREADS
    )
