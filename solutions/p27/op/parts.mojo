"""Puzzle 27, the parts of a GPT's training step that no earlier puzzle has as kernels.

    cross-entropy  loss of a row = log(total) - (z[target] - largest), total = sum exp(z - largest)
                   lse = largest + log(total), from which lse - z[target] would cancel
                   dz = (exp(z - lse) - onehot) / positions that are not ignored
    GELU           y = x / 2 * (1 + tanh u), u = SCALE * (x + CUBE * x^3)   dx = dy * y'(x)
    embedding      a position reads a row of a table                        a row's gradient is the sum over its positions
    AdamW          x -= rate * (mean / c1 / (sqrt(square / c2) + eps) + decay * x)
    clipping       all gradients times limit / norm, at most 1

Places are the B * T tokens of a batch, one row of logits or channels each. Every size is a run-time argument. Sums are
kept in `accum_type[dtype]`: float32 for 16-bit types; no sum depends on the order in which blocks run. The launches and
the ops are in `ops.mojo`.
"""

from std.math import exp, log, sqrt
from max.gpu import block_dim, block_idx, global_idx, thread_idx
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import ImmPtr, MutPtr, accum_type

comptime IGNORED = -100
"""The target of a position that the loss ignores."""
comptime SCALE = 0.7978845608028654
"""The factor of GELU's u: sqrt(2 / pi)."""
comptime CUBE = 0.044715
"""The factor of x^3 in GELU's u."""
comptime THREADS = 128
"""Threads per block."""
comptime CHUNK = 256
"""Gradient elements per block of `square_sums_kernel`."""
comptime NORM_EPS = 1e-6
"""The constant added to the norm before the limit is divided by it."""


# ---- Cross-entropy: a block owns a row of logits ------------------------------------------------------------


def cross_entropy_kernel[
    dtype: DType
](
    row_loss: MutPtr[accum_type[dtype]],  # [places]
    lse: MutPtr[accum_type[dtype]],  # [places], log of the sum of all exponentials
    logits: ImmPtr[dtype],  # [places, vocabulary]
    targets: ImmPtr[DType.int64],  # [places]
    vocabulary: Int32,
):
    """Compute the loss of every position, 0 if its target is IGNORED, and its lse. The row is read once ("online").
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "cross-entropy needs a floating-point dtype"
    var V = Int(vocabulary)
    var row = block_idx.x
    var z = TileTensor(logits.unsafe_offset(row * V), row_major(V))
    var target = Int(targets[unsafe_offset=row])
    # Finite, so that largest - new_largest is not NaN if a thread's first logit is -inf.
    var largest = Scalar[accum].MIN_FINITE
    var total = Scalar[accum](0)
    # BLANK-START row_loss: largest and total of this thread's columns, reduced over the threads; write lse and loss
    for c in range(thread_idx.x, V, block_dim.x):
        var new_largest = max(largest, z[c].cast[accum]())
        total = total * exp(largest - new_largest) + exp(z[c].cast[accum]() - new_largest)
        largest = new_largest
    # A thread's total is relative to its own largest. block.max and block.sum have barriers: all threads call them.
    var block_largest = block.max[block_size=THREADS](largest)
    var log_total = log(block.sum[block_size=THREADS](total * exp(largest - block_largest)))
    if thread_idx.x == 0:
        lse[unsafe_offset=row] = block_largest + log_total
        var loss = Scalar[accum](0)
        if target != IGNORED:
            loss = log_total - (z[target].cast[accum]() - block_largest)
        row_loss[unsafe_offset=row] = loss
    # BLANK-END row_loss


def mean_loss_kernel[
    dtype: DType
](
    mean_loss: MutPtr[dtype],  # [1]
    counted: MutPtr[dtype],  # [1], the number of positions that are not ignored
    row_loss: ImmPtr[dtype],  # [places]
    targets: ImmPtr[DType.int64],  # [places]
    places: Int32,
):
    """Compute the mean loss of the positions that are not ignored, and their number, in one block."""
    comptime assert dtype.is_floating_point(), "the mean needs a floating-point dtype"
    # BLANK-START mean_loss: sum losses and counted positions, reduce over the threads, write the mean and the count
    var loss = Scalar[dtype](0)
    var count = Scalar[dtype](0)
    for row in range(thread_idx.x, Int(places), block_dim.x):
        if targets[unsafe_offset=row] != IGNORED:
            loss += row_loss[unsafe_offset=row]
            count += 1
    var sum_loss = block.sum[block_size=THREADS](loss)
    var sum_count = block.sum[block_size=THREADS](count)
    if thread_idx.x == 0:
        mean_loss[unsafe_offset=0] = sum_loss / sum_count
        counted[unsafe_offset=0] = sum_count
    # BLANK-END mean_loss


def cross_entropy_backward_kernel[
    dtype: DType
](
    grad_rows: MutPtr[dtype],  # [places, vocabulary]
    logits: ImmPtr[dtype],  # [places, vocabulary]
    targets: ImmPtr[DType.int64],  # [places]
    lse: ImmPtr[accum_type[dtype]],  # [places]
    counted: ImmPtr[accum_type[dtype]],  # [1]
    vocabulary: Int32,
):
    """Compute the gradient of the logits for the mean loss, 0 in ignored rows. A block owns a row."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "cross-entropy needs a floating-point dtype"
    var V = Int(vocabulary)
    var row = block_idx.x
    var z = TileTensor(logits.unsafe_offset(row * V), row_major(V))
    var dz = TileTensor(grad_rows.unsafe_offset(row * V), row_major(V))
    var target = Int(targets[unsafe_offset=row])
    # BLANK-START row_gradient: (p - onehot) / counted in every column, or 0, with p from the logit and the row's lse
    var scale = Scalar[accum](0)
    if target != IGNORED:
        scale = 1 / counted[unsafe_offset=0]
    for c in range(thread_idx.x, V, block_dim.x):
        var p = exp(z[c].cast[accum]() - lse[unsafe_offset=row])
        var y = Scalar[accum](1 if c == target else 0)
        dz[c] = ((p - y) * scale).cast[dtype]()
    # BLANK-END row_gradient


# ---- GELU: a thread owns an element -------------------------------------------------------------------------


def gelu_kernel[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], count: Int32):
    """Compute GELU in its tanh form. (1 + tanh u) / 2 is 1 / (1 + exp(-2 u)), which takes one exponential."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "GELU needs a floating-point dtype"
    var i = global_idx.x
    if i >= Int(count):
        return
    var x = input[unsafe_offset=i].cast[accum]()
    # BLANK-START gelu_forward: x times half of 1 + tanh u
    var u = Scalar[accum](SCALE) * (x + Scalar[accum](CUBE) * x * x * x)
    output[unsafe_offset=i] = (x / (1 + exp(-2 * u))).cast[dtype]()
    # BLANK-END gelu_forward


def gelu_backward_kernel[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], count: Int32):
    """Compute the gradient of GELU's input from dy and the input."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "GELU needs a floating-point dtype"
    var i = global_idx.x
    if i >= Int(count):
        return
    var x = input[unsafe_offset=i].cast[accum]()
    var dy = grad_output[unsafe_offset=i].cast[accum]()
    # BLANK-START gelu_backward: with s for half of 1 + tanh u, s' is 2 s (1 - s) u'
    var u = Scalar[accum](SCALE) * (x + Scalar[accum](CUBE) * x * x * x)
    var s = 1 / (1 + exp(-2 * u))
    var slope = Scalar[accum](SCALE) * (1 + Scalar[accum](3 * CUBE) * x * x)
    grad_input[unsafe_offset=i] = (dy * (s + x * 2 * s * (1 - s) * slope)).cast[dtype]()
    # BLANK-END gelu_backward


# ---- Embedding: a block owns a row of the table -------------------------------------------------------------


def embedding_backward_kernel[
    dtype: DType
](
    grad_token: MutPtr[dtype],  # [vocabulary, channels]
    grad_output: ImmPtr[dtype],  # [places, channels]
    order: ImmPtr[DType.int32],  # [places]: the positions, sorted by token id
    starts: ImmPtr[
        DType.int32
    ],  # [vocabulary + 1]: the offset of each token's first position in `order`, and the end
    channels: Int32,
):
    """Compute the gradient of a table, 0 for tokens that do not occur. A block owns a row and sums over the
    positions of its token in order.
    """
    comptime accum = accum_type[dtype]
    var C = Int(channels)
    var token = block_idx.x
    # BLANK-START token_gradient: for each of this thread's channels sum the positions of this token, and write the sum
    for c in range(thread_idx.x, C, block_dim.x):
        var total = Scalar[accum](0)
        for i in range(starts[unsafe_offset=token], starts[unsafe_offset=token + 1]):
            var position = Int(order[unsafe_offset=Int(i)])
            total += grad_output[unsafe_offset=position * C + c].cast[accum]()
        grad_token[unsafe_offset=token * C + c] = total.cast[dtype]()
    # BLANK-END token_gradient


# ---- AdamW: a thread owns an element ------------------------------------------------------------------------


def correction(beta: Float64, step: Int32) -> Float64:
    """Return the total weight of the gradients in a running mean after `step` steps. It is computed on the host in
    float64: for a beta near 1 the difference would cancel in float32.
    """
    var weight = Float64(0)
    # BLANK-START correction: the running mean, after this step, of a gradient that is always 1
    weight = 1 - beta ** Int(step)
    # BLANK-END correction
    return weight


def adamw_kernel[
    dtype: DType
](
    corrections: MutPtr[accum_type[dtype]],  # [2], for mean and square
    new_parameter: MutPtr[dtype],  # [count]
    new_mean: MutPtr[accum_type[dtype]],  # [count]
    new_square: MutPtr[accum_type[dtype]],  # [count]
    parameter: ImmPtr[dtype],  # [count]
    gradient: ImmPtr[dtype],  # [count]
    mean: ImmPtr[accum_type[dtype]],  # [count], running mean of the gradient
    square: ImmPtr[accum_type[dtype]],  # [count], running mean of the squared gradient
    rate: Scalar[accum_type[dtype]],
    beta1: Scalar[accum_type[dtype]],
    beta2: Scalar[accum_type[dtype]],
    eps: Scalar[accum_type[dtype]],
    decay: Scalar[accum_type[dtype]],
    correction1: Scalar[accum_type[dtype]],
    correction2: Scalar[accum_type[dtype]],
    count: Int32,
):
    """Compute one step of AdamW in one pass: parameter, mean and square of an element are read once and written once.
    """
    comptime accum = accum_type[dtype]
    var i = global_idx.x
    if i == 0:
        corrections[unsafe_offset=0] = correction1
        corrections[unsafe_offset=1] = correction2
    if i >= Int(count):
        return
    var x = parameter[unsafe_offset=i].cast[accum]()
    var g = gradient[unsafe_offset=i].cast[accum]()
    # BLANK-START adamw_update: both running means, then the step: corrected, eps outside the root, separate decay
    var m = beta1 * mean[unsafe_offset=i] + (1 - beta1) * g
    var v = beta2 * square[unsafe_offset=i] + (1 - beta2) * g * g
    var step = m / correction1 / (sqrt(v / correction2) + eps)
    new_mean[unsafe_offset=i] = m
    new_square[unsafe_offset=i] = v
    new_parameter[unsafe_offset=i] = (x - rate * (step + decay * x)).cast[dtype]()
    # BLANK-END adamw_update


# ---- Clipping: the norm in two stages -----------------------------------------------------------------------


def square_sums_kernel[
    dtype: DType
](
    square_sums: MutPtr[accum_type[dtype]],  # [ceil(count / CHUNK)]
    gradient: ImmPtr[dtype],  # [count]: all gradients, concatenated
    count: Int32,
):
    """Compute the first stage of the norm: a block sums the squares of its CHUNK elements."""
    comptime accum = accum_type[dtype]
    var first = block_idx.x * CHUNK
    # BLANK-START square_sums: sum this thread's squares of the chunk (the last may be short), reduce over the threads
    var partial = Scalar[accum](0)
    for i in range(first + thread_idx.x, min(first + CHUNK, Int(count)), block_dim.x):
        var g = gradient[unsafe_offset=i].cast[accum]()
        partial += g * g
    var total = block.sum[block_size=THREADS](partial)
    if thread_idx.x == 0:
        square_sums[unsafe_offset=block_idx.x] = total
    # BLANK-END square_sums


def norm_kernel[
    dtype: DType
](norm: MutPtr[dtype], square_sums: ImmPtr[dtype], chunks: Int32):  # [1] from [chunks]
    """Compute the second stage of the norm: one block adds the sums of all chunks."""
    comptime assert dtype.is_floating_point(), "the norm needs a floating-point dtype"
    # BLANK-START grad_norm: add this thread's sums, reduce over the threads, write the square root
    var partial = Scalar[dtype](0)
    for i in range(thread_idx.x, Int(chunks), block_dim.x):
        partial += square_sums[unsafe_offset=i]
    var total = block.sum[block_size=THREADS](partial)
    if thread_idx.x == 0:
        norm[unsafe_offset=0] = sqrt(total)
    # BLANK-END grad_norm


def clip_kernel[
    dtype: DType
](
    clipped: MutPtr[dtype],  # [count]
    gradient: ImmPtr[dtype],  # [count]
    norm: ImmPtr[accum_type[dtype]],  # [1]
    limit: Scalar[accum_type[dtype]],
    count: Int32,
):
    """Scale all gradients down so that their norm is at most `limit`. A thread owns an element."""
    comptime accum = accum_type[dtype]
    var i = global_idx.x
    if i >= Int(count):
        return
    # BLANK-START clip_gradients: the factor limit / (norm + NORM_EPS), at most 1
    var factor = limit / (norm[unsafe_offset=0] + Scalar[accum](NORM_EPS))
    if factor > 1:  # not min(1, factor), which turns NaN into 1
        factor = 1
    clipped[unsafe_offset=i] = (gradient[unsafe_offset=i].cast[accum]() * factor).cast[dtype]()
    # BLANK-END clip_gradients
