"""Puzzle 20: your first backward kernels. ReLU that saves one bit per element, softmax, and LayerNorm, each with its backward.

    relu       y = x where x > 0, else 0             dx = dy where x > 0, else 0
    softmax    P = exp(x - max) / sum exp(x - max)   dx = P * (dy - sum(dy * P)), sums over the row
    layernorm  y = x_hat * weight + bias             dx = rstd * (g - c2 - x_hat * c1), with g = dy * weight,
               x_hat = (x - mean) * rstd             c1 = mean(g * x_hat), c2 = mean(g), means over the row

Matrices are [rows, columns], row-major. Every size is a run-time argument. Sums are kept in `accum_type[dtype]`: float32 for
16-bit types. The launches of the kernels and the ops for MAX and PyTorch are in `ops.mojo`.
"""

from std.math import exp, sqrt
from std.memory import bitcast
from max.gpu import WARP_SIZE, block_dim, block_idx, global_idx, lane_id, thread_idx
from max.gpu.primitives import block
from max.gpu.primitives.warp import vote
from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import ImmPtr, MutPtr, accum_type

comptime WORD = 32
"""Bits per word of the mask, one for each element."""
comptime THREADS = 256
"""Threads per block, one for each element; a multiple of WORD."""
comptime ROW_THREADS = 128
"""Threads per block that share one row."""


# ---- ReLU: saves one bit per element ------------------------------------------------------------------------


def ballot(predicate: Bool) -> Int32:
    """Pack one bit from each of 32 neighbouring lanes into a word, the first lane's lowest. Every lane of the warp must call it.
    """
    comptime if WARP_SIZE == WORD:
        return bitcast[DType.int32](vote[DType.uint32](predicate))
    else:  # AMD's warps have 64 lanes: the vote has two words, and each lane returns its half's.
        var ballots = vote[DType.uint64](predicate)
        var half = UInt64(0 if lane_id() < WORD else WORD)
        return bitcast[DType.int32]((ballots >> half).cast[DType.uint32]())


# ANCHOR: relu_mask_kernel_solution
def relu_mask_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [count]
    mask: MutPtr[DType.int32],  # [ceil(count / 32)]: bit i % 32 of word i // 32 belongs to element i
    input: ImmPtr[dtype],  # [count]
    count: Int32,
):
    """Compute ReLU, and the mask for its backward pass. A thread owns one element, 32 threads own a word."""
    var i = global_idx.x
    # BLANK-START relu: this thread's element of the output, and with 31 others a word of the mask; see ballot
    var passes = False
    if i < Int(count):
        var x = input[unsafe_offset=i]
        passes = not (x <= 0)  # so that NaN passes, as in PyTorch
        output[unsafe_offset=i] = x if passes else Scalar[dtype](0)
    # Lanes past the end vote too: a vote needs the whole warp.
    var word = ballot(passes)
    if lane_id() % WORD == 0 and i < Int(count):
        mask[unsafe_offset=i // WORD] = word
    # BLANK-END relu


# ANCHOR_END: relu_mask_kernel_solution


# ANCHOR: relu_mask_backward_kernel_solution
def relu_mask_backward_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [count]
    grad_output: ImmPtr[dtype],  # [count]
    mask: ImmPtr[DType.int32],  # [ceil(count / 32)]
    count: Int32,
):
    """Compute the gradient of ReLU's input from the mask alone. A thread owns one element."""
    var i = global_idx.x
    if i >= Int(count):
        return
    # BLANK-START drelu: this element of grad_input: which bit of which word decides?
    var bit = (mask[unsafe_offset=i // WORD] >> Int32(i % WORD)) & 1
    grad_input[unsafe_offset=i] = grad_output[unsafe_offset=i] if bit == 1 else Scalar[dtype](0)
    # BLANK-END drelu


# ANCHOR_END: relu_mask_backward_kernel_solution


# ---- Softmax: a block owns a row ----------------------------------------------------------------------------


# ANCHOR: softmax_kernel_solution
def softmax_kernel[
    dtype: DType
](output: MutPtr[dtype], input: ImmPtr[dtype], columns: Int32):  # both tensors [rows, columns]
    """Compute softmax of every row. A block owns one row, its threads share the columns."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    var C = Int(columns)
    var x = TileTensor(input.unsafe_offset(block_idx.x * C), row_major(C))
    var y = TileTensor(output.unsafe_offset(block_idx.x * C), row_major(C))

    # Subtracting the row's maximum avoids overflow. A row that is all -inf becomes NaN in the division.
    var largest = Scalar[accum].MIN
    for c in range(thread_idx.x, C, block_dim.x):
        largest = max(largest, x[c].cast[accum]())
    largest = block.max[block_size=ROW_THREADS](largest)

    # BLANK-START softmax: the sum of the row's exponentials, then y for this thread's columns
    var partial = Scalar[accum](0)
    for c in range(thread_idx.x, C, block_dim.x):
        partial += exp(x[c].cast[accum]() - largest)
    # block.sum contains barriers, so every thread calls it, even one without a column.
    var total = block.sum[block_size=ROW_THREADS](partial)
    for c in range(thread_idx.x, C, block_dim.x):
        y[c] = (exp(x[c].cast[accum]() - largest) / total).cast[dtype]()
    # BLANK-END softmax


# ANCHOR_END: softmax_kernel_solution


# ANCHOR: softmax_backward_kernel_solution
def softmax_backward_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, columns]
    grad_output: ImmPtr[dtype],  # [rows, columns]
    output: ImmPtr[dtype],  # [rows, columns], P: saved by the forward pass
    columns: Int32,
):
    """Compute the gradient of softmax's input from its output alone. A block owns one row."""
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var P = TileTensor(output.unsafe_offset(block_idx.x * C), row_major(C))
    var dP = TileTensor(grad_output.unsafe_offset(block_idx.x * C), row_major(C))
    var dS = TileTensor(grad_input.unsafe_offset(block_idx.x * C), row_major(C))

    # BLANK-START dsoftmax: one number of the row, by block.sum, then dS for this thread's columns
    var partial = Scalar[accum](0)
    for c in range(thread_idx.x, C, block_dim.x):
        partial += dP[c].cast[accum]() * P[c].cast[accum]()
    var dot = block.sum[block_size=ROW_THREADS](partial)
    for c in range(thread_idx.x, C, block_dim.x):
        dS[c] = (P[c].cast[accum]() * (dP[c].cast[accum]() - dot)).cast[dtype]()
    # BLANK-END dsoftmax


# ANCHOR_END: softmax_backward_kernel_solution


# ---- LayerNorm: the step to puzzle 22 -----------------------------------------------------------------------


def layernorm_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [rows, columns]
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows], 1 / sqrt(variance + eps)
    input: ImmPtr[dtype],  # [rows, columns]
    weight: ImmPtr[dtype],  # [columns]
    bias: ImmPtr[dtype],  # [columns]
    columns: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Compute LayerNorm of every row, and the two numbers per row that its backward pass needs. (Provided.) A block owns one row.
    """
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var row = block_idx.x
    var x = TileTensor(input.unsafe_offset(row * C), row_major(C))
    var y = TileTensor(output.unsafe_offset(row * C), row_major(C))
    var gamma = TileTensor(weight, row_major(C))
    var beta = TileTensor(bias, row_major(C))

    var partial = Scalar[accum](0)
    for c in range(thread_idx.x, C, block_dim.x):
        partial += x[c].cast[accum]()
    var row_mean = block.sum[block_size=ROW_THREADS](partial) / Scalar[accum](C)
    # Squared deviations from the mean, never E[x^2] - mean^2, which cancels if the mean is large.
    var squares = Scalar[accum](0)
    for c in range(thread_idx.x, C, block_dim.x):
        var deviation = x[c].cast[accum]() - row_mean
        squares += deviation * deviation
    var variance = block.sum[block_size=ROW_THREADS](squares) / Scalar[accum](C)
    var row_rstd = 1 / sqrt(variance + eps)
    for c in range(thread_idx.x, C, block_dim.x):
        var x_hat = (x[c].cast[accum]() - row_mean) * row_rstd
        y[c] = (x_hat * gamma[c].cast[accum]() + beta[c].cast[accum]()).cast[dtype]()
    if thread_idx.x == 0:
        mean[unsafe_offset=row] = row_mean
        rstd[unsafe_offset=row] = row_rstd


# ANCHOR: layernorm_backward_kernel_solution
def layernorm_backward_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, columns]
    grad_output: ImmPtr[dtype],  # [rows, columns]
    input: ImmPtr[dtype],  # [rows, columns]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    weight: ImmPtr[dtype],  # [columns]
    columns: Int32,
):
    """Compute the gradient of LayerNorm's input: dx = rstd * (g - c2 - x_hat * c1). A block owns one row."""
    comptime accum = accum_type[dtype]
    var C = Int(columns)
    var row = block_idx.x
    var x = TileTensor(input.unsafe_offset(row * C), row_major(C))
    var dy = TileTensor(grad_output.unsafe_offset(row * C), row_major(C))
    var dx = TileTensor(grad_input.unsafe_offset(row * C), row_major(C))
    var gamma = TileTensor(weight, row_major(C))
    var row_mean = mean[unsafe_offset=row]
    var row_rstd = rstd[unsafe_offset=row]

    # BLANK-START dlayernorm: c1 and c2 of the row, means over C columns; then dx for this thread's columns
    var sum_g_x_hat = Scalar[accum](0)
    var sum_g = Scalar[accum](0)
    for c in range(thread_idx.x, C, block_dim.x):
        var g = dy[c].cast[accum]() * gamma[c].cast[accum]()
        sum_g_x_hat += g * (x[c].cast[accum]() - row_mean) * row_rstd
        sum_g += g
    var c1 = block.sum[block_size=ROW_THREADS](sum_g_x_hat) / Scalar[accum](C)
    var c2 = block.sum[block_size=ROW_THREADS](sum_g) / Scalar[accum](C)
    for c in range(thread_idx.x, C, block_dim.x):
        var g = dy[c].cast[accum]() * gamma[c].cast[accum]()
        var x_hat = (x[c].cast[accum]() - row_mean) * row_rstd
        dx[c] = (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()
    # BLANK-END dlayernorm


# ANCHOR_END: layernorm_backward_kernel_solution


# ANCHOR: layernorm_parameters_kernel_solution
def layernorm_parameters_kernel[
    dtype: DType
](
    grad_weight: MutPtr[dtype],  # [columns]
    grad_bias: MutPtr[dtype],  # [columns]
    grad_output: ImmPtr[dtype],  # [rows, columns]
    input: ImmPtr[dtype],  # [rows, columns]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    columns: Int32,
):
    """Compute the gradients of LayerNorm's weight and bias. A thread owns one column and loops over the rows:
    no other thread adds to its sums, so no buffer must be cleared and no atomics are needed.
    """
    comptime accum = accum_type[dtype]
    var R = Int(rows)
    var C = Int(columns)
    var c = global_idx.x
    if c >= C:
        return
    var x = TileTensor(input, row_major(R, C))
    var dy = TileTensor(grad_output, row_major(R, C))

    # BLANK-START dweight: two sums over the rows for this column
    var sum_weight = Scalar[accum](0)
    var sum_bias = Scalar[accum](0)
    for row in range(R):
        var x_hat = (x[row, c].cast[accum]() - mean[unsafe_offset=row]) * rstd[unsafe_offset=row]
        sum_weight += dy[row, c].cast[accum]() * x_hat
        sum_bias += dy[row, c].cast[accum]()
    grad_weight[unsafe_offset=c] = sum_weight.cast[dtype]()
    grad_bias[unsafe_offset=c] = sum_bias.cast[dtype]()
    # BLANK-END dweight


# ANCHOR_END: layernorm_parameters_kernel_solution
