"""Puzzle 23: self-attention, forward and backward, as five unfused kernels, then without storing the scores.

    S = scale * Q K^T          O = P V          P = softmax(S + mask), over the keys, scale = 1 / sqrt(head_dim)
    dV = P^T dO                dP = dO V^T      dS = P * (dP - rowsum(dP * P))
    dQ = scale * dS K          dK = scale * dS^T Q

Shapes: query, output and grad_output [B, N, S, d]; key and value [B, N, T, d]; scores, probabilities and their
gradients [B, N, S, T]; mask [S, T], added to the scores of every head, -inf where a query must not see a key. B
is the batch size, N the number of heads; each of the B * N heads is one batch of the matrix products. Every size
is a run-time argument. Sums, scores and probabilities are kept in `accum_type[dtype]`: float32 for 16-bit types.

The five kernels are a matrix product, whose factors may be stored transposed (NN, NT and TN), and softmax with
its backward. The flash kernels after them compute the same without an S x T matrix: of each row they save lse,
one number, and recompute P = exp(S + mask - lse) where they need it. `ops.mojo` has the ops.
"""

from std.math import ceildiv, exp, log
from std.memory import AddressSpace
from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from max.gpu.primitives import block
from layout.tile_tensor import stack_allocation

from .shared.common import CompensatedSum, ImmPtr, MutPtr, accum_type
from .shared.launcher import Launcher
from .sizes import FlashSizes, PackedSizes, Sizes
from .tiles import (
    CHUNKS,
    MAX_GRID_Z,
    TILE,
    TILE_LAYOUT,
    element,
    probability,
    row_max,
    row_total,
    masked_score,
    tile_product,
)

comptime ROW_THREADS = 128
"""Threads per block that share one row of the scores."""


# ---- The unfused kernels ------------------------------------------------------------------------------------


# ANCHOR: tiled_matmul_kernel_solution
def tiled_matmul_kernel[
    out_dtype: DType, a_dtype: DType, b_dtype: DType, transpose_a: Bool, transpose_b: Bool
](
    output: MutPtr[out_dtype],  # [batches, M, N]
    a: ImmPtr[a_dtype],  # [batches, M, K], or [batches, K, M] if transpose_a
    b: ImmPtr[b_dtype],  # [batches, K, N], or [batches, N, K] if transpose_b
    batches: Int32,
    m: Int32,
    n: Int32,
    k: Int32,
    alpha: Scalar[accum_type[out_dtype]],
):
    """Compute output = alpha * a @ b in every batch; the factors may be stored transposed.

    A block owns one TILE x TILE tile of the output and loops over K tile by tile. A transposed factor is
    transposed while it is loaded: neighbouring threads read neighbouring elements either way.
    """
    comptime accum = accum_type[out_dtype]
    var M = Int(m)
    var N = Int(n)
    var K = Int(k)
    var a_tile = stack_allocation[dtype=a_dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var b_tile = stack_allocation[dtype=b_dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var row0 = block_idx.x * TILE
    var column0 = block_idx.y * TILE

    for batch in range(block_idx.z, Int(batches), grid_dim.z):
        var A = a.unsafe_offset(batch * M * K)
        var B = b.unsafe_offset(batch * K * N)
        var total = CompensatedSum[accum]()
        for k0 in range(0, K, TILE):
            # BLANK-START matmul: fill a_tile[row, k] and b_tile[k, column], then add their products to total
            comptime if transpose_a:
                a_tile[x, y] = element(A, k0 + y, row0 + x, K, M)
            else:
                a_tile[y, x] = element(A, row0 + y, k0 + x, M, K)
            comptime if transpose_b:
                b_tile[x, y] = element(B, column0 + y, k0 + x, N, K)
            else:
                b_tile[y, x] = element(B, k0 + y, column0 + x, K, N)
            barrier()
            # An ordinary sum within the tile, a compensated one over the tiles: no error that grows with K.
            var tile_sum = Scalar[accum](0)
            comptime for i in range(TILE):
                tile_sum += a_tile[y, i].cast[accum]() * b_tile[i, x].cast[accum]()
            total += tile_sum
            # No thread may load the next tile while another is still reading this one.
            barrier()
            # BLANK-END matmul
        if row0 + y < M and column0 + x < N:
            var index = (batch * M + row0 + y) * N + column0 + x
            output[unsafe_offset=index] = (alpha * total.total).cast[out_dtype]()


# ANCHOR_END: tiled_matmul_kernel_solution


# ANCHOR: softmax_kernel_solution
def softmax_kernel[
    accum: DType, mask_dtype: DType
](
    probabilities: MutPtr[accum],  # [rows, T]
    scores: ImmPtr[accum],  # [rows, T]
    mask: ImmPtr[
        mask_dtype
    ],  # [mask_rows, T], added to the scores of row % mask_rows; not read if mask_rows is 0
    mask_rows: Int32,
    columns: Int32,
):
    """Compute P = softmax(scores + mask) of every row; a fully masked row, all -inf, gives 0. A block owns a row.
    """
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    var T = Int(columns)
    var row = block_idx.x
    var s = scores.unsafe_offset(row * T)
    var p = probabilities.unsafe_offset(row * T)
    var masked = mask_rows > 0
    var m = mask.unsafe_offset(row % Int(mask_rows) * T if masked else 0)

    # BLANK-START softmax: two numbers of the row, then P for this thread's columns
    var largest = Scalar[accum].MIN
    for t in range(thread_idx.x, T, ROW_THREADS):
        var score = s[unsafe_offset=t] + (m[unsafe_offset=t].cast[accum]() if masked else 0)
        largest = max(largest, score)
    # block.max and block.sum contain barriers, so every thread calls them.
    largest = block.max[block_size=ROW_THREADS](largest)
    # Subtracting -inf from -inf would give NaN; subtracting 0 leaves -inf, whose exponential is 0.
    var shift = largest if largest > Scalar[accum].MIN else Scalar[accum](0)
    var partial = Scalar[accum](0)
    for t in range(thread_idx.x, T, ROW_THREADS):
        var score = s[unsafe_offset=t] + (m[unsafe_offset=t].cast[accum]() if masked else 0)
        var weight = exp(score - shift)
        p[unsafe_offset=t] = weight
        partial += weight
    var total = block.sum[block_size=ROW_THREADS](partial)
    for t in range(thread_idx.x, T, ROW_THREADS):
        # Each thread reads what it wrote. A NaN sum is not 0, so the row becomes NaN, as in PyTorch.
        p[unsafe_offset=t] = Scalar[accum](0) if total == 0 else p[unsafe_offset=t] / total
    # BLANK-END softmax


# ANCHOR_END: softmax_kernel_solution


# ANCHOR: softmax_backward_kernel_solution
def softmax_backward_kernel[
    accum: DType
](
    grad_scores: MutPtr[accum],  # [rows, T], dS
    grad_probabilities: ImmPtr[accum],  # [rows, T], dP
    probabilities: ImmPtr[accum],  # [rows, T], P
    columns: Int32,
):
    """Compute the gradient of the scores, dS, from P and dP. A block owns one row."""
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    var T = Int(columns)
    var P = probabilities.unsafe_offset(block_idx.x * T)
    var dP = grad_probabilities.unsafe_offset(block_idx.x * T)
    var dS = grad_scores.unsafe_offset(block_idx.x * T)

    # BLANK-START dsoftmax: one number of the row, then dS for this thread's columns
    var partial = Scalar[accum](0)
    for t in range(thread_idx.x, T, ROW_THREADS):
        partial += dP[unsafe_offset=t] * P[unsafe_offset=t]
    var dot = block.sum[block_size=ROW_THREADS](partial)
    for t in range(thread_idx.x, T, ROW_THREADS):
        dS[unsafe_offset=t] = P[unsafe_offset=t] * (dP[unsafe_offset=t] - dot)
    # BLANK-END dsoftmax


# ANCHOR_END: softmax_backward_kernel_solution


# ---- Launches of the unfused kernels ------------------------------------------------------------------------


def launch_matmul[
    L: Launcher,
    out_dtype: DType,
    a_dtype: DType,
    b_dtype: DType,
    //,
    *,
    transpose_a: Bool = False,
    transpose_b: Bool = False,
](
    mut launcher: L,
    name: StaticString,
    output: MutPtr[out_dtype],
    a: ImmPtr[a_dtype],
    b: ImmPtr[b_dtype],
    *,
    batches: Int32,
    m: Int32,
    n: Int32,
    k: Int32,
    alpha: Float64 = 1,
) raises:
    """Launch output [batches, m, n] = alpha * a @ b with inner dimension k; `name` is its name in reports."""
    if batches == 0 or m == 0 or n == 0:
        return
    launcher.launch[tiled_matmul_kernel[out_dtype, a_dtype, b_dtype, transpose_a, transpose_b]](
        name,
        output,
        a,
        b,
        batches,
        m,
        n,
        k,
        alpha.cast[accum_type[out_dtype]](),
        grid_dim=Dim(ceildiv(Int(m), TILE), ceildiv(Int(n), TILE), min(Int(batches), MAX_GRID_Z)),
        block_dim=Dim(TILE, TILE),
    )


def launch_scores[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    scores: MutPtr[accum_type[dtype]],  # [B, N, S, T]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, N, T, d]
    sizes: Sizes,
) raises:
    """Launch S = scale * Q K^T. Provided as an example: K is stored [T, d], and the right factor is [d, T].
    """
    launch_matmul[transpose_b=True](
        launcher,
        "scores",
        scores,
        query,
        key,
        batches=sizes.batches,
        m=sizes.query_len,
        n=sizes.key_len,
        k=sizes.head_dim,
        alpha=sizes.scale(),
    )


def launch_softmax[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    probabilities: MutPtr[accum_type[dtype]],  # [B, N, S, T]
    scores: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    mask: ImmPtr[dtype],  # [mask_rows, T]
    sizes: Sizes,
    mask_rows: Int32,
) raises:
    """Launch P = softmax(S + mask); without a mask, mask_rows is 0."""
    if sizes.rows() == 0 or sizes.key_len == 0:
        return
    launcher.launch[softmax_kernel[accum_type[dtype], dtype]](
        "softmax",
        probabilities,
        scores,
        mask,
        mask_rows,
        sizes.key_len,
        grid_dim=Dim(sizes.rows()),
        block_dim=Dim(ROW_THREADS),
    )


# ANCHOR: launch_output_solution
def launch_output[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    output: MutPtr[dtype],  # [B, N, S, d]
    probabilities: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    value: ImmPtr[dtype],  # [B, N, T, d]
    sizes: Sizes,
) raises:
    """Launch O = P V."""
    var heads = sizes.batches
    var S = sizes.query_len
    var T = sizes.key_len
    var d = sizes.head_dim
    # BLANK-START output: one launch_matmul named "output": what is transposed, and what are m, n, k?
    launch_matmul(launcher, "output", output, probabilities, value, batches=heads, m=S, n=d, k=T)
    # BLANK-END output


# ANCHOR_END: launch_output_solution


# ANCHOR: launch_output_backward_solution
def launch_output_backward[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_value: MutPtr[dtype],  # [B, N, T, d]
    grad_probabilities: MutPtr[accum_type[dtype]],  # [B, N, S, T]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    probabilities: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    value: ImmPtr[dtype],  # [B, N, T, d]
    sizes: Sizes,
) raises:
    """Launch the backward of O = P V: dV = P^T dO and dP = dO V^T."""
    var heads = sizes.batches
    var S = sizes.query_len
    var T = sizes.key_len
    var d = sizes.head_dim
    # BLANK-START dV: one launch_matmul named "dV" that writes grad_value
    launch_matmul[transpose_a=True](
        launcher, "dV", grad_value, probabilities, grad_output, batches=heads, m=T, n=d, k=S
    )
    # BLANK-END dV
    # BLANK-START dP: one launch_matmul named "dP" that writes grad_probabilities
    launch_matmul[transpose_b=True](
        launcher, "dP", grad_probabilities, grad_output, value, batches=heads, m=S, n=T, k=d
    )
    # BLANK-END dP


# ANCHOR_END: launch_output_backward_solution


def launch_softmax_backward[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_scores: MutPtr[accum_type[dtype]],  # [B, N, S, T]
    grad_probabilities: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    probabilities: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    sizes: Sizes,
) raises:
    """Launch the backward of P = softmax(S + mask)."""
    if sizes.rows() == 0 or sizes.key_len == 0:
        return
    launcher.launch[softmax_backward_kernel[accum_type[dtype]]](
        "softmax_backward",
        grad_scores,
        grad_probabilities,
        probabilities,
        sizes.key_len,
        grid_dim=Dim(sizes.rows()),
        block_dim=Dim(ROW_THREADS),
    )


# ANCHOR: launch_scores_backward_solution
def launch_scores_backward[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_query: MutPtr[dtype],  # [B, N, S, d]
    grad_key: MutPtr[dtype],  # [B, N, T, d]
    grad_scores: ImmPtr[accum_type[dtype]],  # [B, N, S, T]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, N, T, d]
    sizes: Sizes,
) raises:
    """Launch the backward of S = scale * Q K^T: dQ = scale * dS K and dK = scale * dS^T Q."""
    var heads = sizes.batches
    var S = sizes.query_len
    var T = sizes.key_len
    var d = sizes.head_dim
    var scale = sizes.scale()
    # BLANK-START dQ: one launch_matmul named "dQ" that writes grad_query; the scale is its alpha
    launch_matmul(launcher, "dQ", grad_query, grad_scores, key, batches=heads, m=S, n=d, k=T, alpha=scale)
    # BLANK-END dQ
    # BLANK-START dK: one launch_matmul named "dK" that writes grad_key
    launch_matmul[transpose_a=True](
        launcher, "dK", grad_key, grad_scores, query, batches=heads, m=T, n=d, k=S, alpha=scale
    )
    # BLANK-END dK


# ANCHOR_END: launch_scores_backward_solution


# ---- The flash kernels --------------------------------------------------------------------------------------
#
# They compute the same function without storing an [S, T] matrix. A block of TILE x TILE threads computes one tile
# of the scores at a time, one element per thread. `launches.mojo` launches them; their helpers are in `tiles.mojo`.
# Here key and value may have fewer heads than query, [B, G, T, d]; N / G query heads share one. lse and delta are
# [B, N, S]. Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).


# ANCHOR: flash_forward_kernel_solution
def flash_forward_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [B, N, S, d]
    lse: MutPtr[accum_type[dtype]],  # [B, N, S]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    mask: ImmPtr[dtype],  # [S, T]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute the output and lse = log(sum over the keys of exp(score)). A block owns TILE queries and loops over the keys.

    TILE threads share a row: largest and total are the same in all of them, and thread (x, y) computes elements x, x +
    TILE, ... of the output's row y in sums[0], sums[1], ...
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var weights = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var values = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var s0 = block_idx.x * TILE
    var s = s0 + y

    for head in range(block_idx.y, sizes.heads(), grid_dim.y):
        var Q = query.unsafe_offset(head * S * d)
        var K = key.unsafe_offset(sizes.shared_head(head) * T * d)
        var V = value.unsafe_offset(sizes.shared_head(head) * T * d)
        var largest = Scalar[accum].MIN
        var total = Scalar[accum](0)
        var sums = SIMD[accum, CHUNKS](0)
        for t0 in range(0, T, TILE):
            var product = tile_product[dtype](Q, K, s0, t0, S, T, d)
            var score = masked_score(scale * product, mask, s, t0 + x, S, T)
            # BLANK-START online: the new maximum, and the updates of total and sums
            var new_largest = max(largest, row_max(score))
            # Before a row sees a key, subtracting -inf would give NaN; subtracting 0 makes the exponentials 0.
            var shift = new_largest if new_largest > Scalar[accum].MIN else Scalar[accum](0)
            var rescale = exp(largest - shift)
            var weight = exp(score - shift)
            total = total * rescale + row_total(weight)
            largest = new_largest
            weights[y, x] = weight
            for chunk in range(ceildiv(d, TILE)):
                values[y, x] = element(V, t0 + y, chunk * TILE + x, T, d)
                barrier()
                var sum = Scalar[accum](0)
                comptime for i in range(TILE):
                    sum += weights[y, i] * values[i, x].cast[accum]()
                sums[chunk] = sums[chunk] * rescale + sum
                # No thread may write the next values while another is still reading these.
                barrier()
            # BLANK-END online
        if s < S:
            # For a row that sees no key, total and sums are 0, unless a value is NaN.
            var divisor = Scalar[accum](1) if total == 0 else total
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    output[unsafe_offset=(head * S + s) * d + chunk * TILE + x] = (
                        sums[chunk] / divisor
                    ).cast[dtype]()
            if x == 0:
                lse[unsafe_offset=head * S + s] = Scalar[accum].MIN if total == 0 else largest + log(total)


# ANCHOR_END: flash_forward_kernel_solution


# ANCHOR: delta_kernel_solution
def delta_kernel[
    dtype: DType
](
    delta: MutPtr[accum_type[dtype]],  # [rows]
    grad_output: ImmPtr[dtype],  # [rows, d]
    output: ImmPtr[dtype],  # [rows, d]
    head_dim: Int32,
):
    """Compute one number for each row that equals rowsum(dP * P), without dP and without P. A block owns a row.
    """
    comptime accum = accum_type[dtype]
    var d = Int(head_dim)
    var dO = grad_output.unsafe_offset(block_idx.x * d)
    var O = output.unsafe_offset(block_idx.x * d)
    # BLANK-START delta: one number of the row, by block.sum; one thread writes it
    var partial = Scalar[accum](0)
    for i in range(thread_idx.x, d, ROW_THREADS):
        partial += dO[unsafe_offset=i].cast[accum]() * O[unsafe_offset=i].cast[accum]()
    var total = block.sum[block_size=ROW_THREADS](partial)
    if thread_idx.x == 0:
        delta[unsafe_offset=block_idx.x] = total
    # BLANK-END delta


# ANCHOR_END: delta_kernel_solution


# ANCHOR: flash_query_kernel_solution
def flash_query_kernel[
    dtype: DType
](
    grad_query: MutPtr[dtype],  # [B, N, S, d]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[accum_type[dtype]],  # [B, N, S]
    delta: ImmPtr[accum_type[dtype]],  # [B, N, S]
    mask: ImmPtr[dtype],  # [S, T]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute the gradient of the query. A block owns TILE queries and loops over the keys, as in the forward pass.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var slopes = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var keys = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var s0 = block_idx.x * TILE
    var s = s0 + y

    for head in range(block_idx.y, sizes.heads(), grid_dim.y):
        var Q = query.unsafe_offset(head * S * d)
        var dO = grad_output.unsafe_offset(head * S * d)
        var K = key.unsafe_offset(sizes.shared_head(head) * T * d)
        var V = value.unsafe_offset(sizes.shared_head(head) * T * d)
        var row_lse = lse[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
        var row_delta = delta[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
        var sums = SIMD[accum, CHUNKS](0)
        for t0 in range(0, T, TILE):
            var product = tile_product[dtype](Q, K, s0, t0, S, T, d)
            var score = masked_score(scale * product, mask, s, t0 + x, S, T)
            var dP = tile_product[dtype](dO, V, s0, t0, S, T, d)
            # BLANK-START flash_dQ: P from lse, then scale * dS into slopes, then this tile's share of sums
            slopes[y, x] = scale * probability(score, row_lse) * (dP - row_delta)
            for chunk in range(ceildiv(d, TILE)):
                keys[y, x] = element(K, t0 + y, chunk * TILE + x, T, d)
                barrier()
                # Sum within the tile first: adding many keys one by one would lose digits.
                var sum = Scalar[accum](0)
                comptime for i in range(TILE):
                    sum += slopes[y, i] * keys[i, x].cast[accum]()
                sums[chunk] += sum
                barrier()
            # BLANK-END flash_dQ
        if s < S:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var index = (head * S + s) * d + chunk * TILE + x
                    grad_query[unsafe_offset=index] = sums[chunk].cast[dtype]()


# ANCHOR_END: flash_query_kernel_solution


# ANCHOR: flash_key_value_kernel_solution
def flash_key_value_kernel[
    dtype: DType
](
    grad_key: MutPtr[dtype],  # [B, G, T, d]
    grad_value: MutPtr[dtype],  # [B, G, T, d]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[accum_type[dtype]],  # [B, N, S]
    delta: ImmPtr[accum_type[dtype]],  # [B, N, S]
    mask: ImmPtr[dtype],  # [S, T]
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """Compute the gradients of key and value. A block owns TILE keys and loops over the queries of every head that shares them.

    Its tile of scores is transposed: thread (x, y) has query s0 + x and key t0 + y.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention needs a floating-point dtype"
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var weights = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var slopes = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var queries = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var grads = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var t0 = block_idx.x * TILE
    var t = t0 + y

    for shared_head in range(block_idx.y, sizes.shared_heads(), grid_dim.y):
        var K = key.unsafe_offset(shared_head * T * d)
        var V = value.unsafe_offset(shared_head * T * d)
        var key_sums = SIMD[accum, CHUNKS](0)
        var value_sums = SIMD[accum, CHUNKS](0)
        for member in range(sizes.group()):
            var head = shared_head * sizes.group() + member
            var Q = query.unsafe_offset(head * S * d)
            var dO = grad_output.unsafe_offset(head * S * d)
            for s0 in range(0, S, TILE):
                var s = s0 + x
                var product = tile_product[dtype](K, Q, t0, s0, T, S, d)
                var score = masked_score(scale * product, mask, s, t, S, T)
                var dP = tile_product[dtype](V, dO, t0, s0, T, S, d)
                var row_lse = lse[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                var row_delta = delta[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                # BLANK-START flash_dKdV: weights and slopes, then this tile's share of key_sums and value_sums
                var weight = probability(score, row_lse)
                weights[y, x] = weight
                slopes[y, x] = scale * weight * (dP - row_delta)
                for chunk in range(ceildiv(d, TILE)):
                    queries[y, x] = element(Q, s0 + y, chunk * TILE + x, S, d)
                    grads[y, x] = element(dO, s0 + y, chunk * TILE + x, S, d)
                    barrier()
                    var key_sum = Scalar[accum](0)
                    var value_sum = Scalar[accum](0)
                    comptime for i in range(TILE):
                        key_sum += slopes[y, i] * queries[i, x].cast[accum]()
                        value_sum += weights[y, i] * grads[i, x].cast[accum]()
                    key_sums[chunk] += key_sum
                    value_sums[chunk] += value_sum
                    barrier()
                # BLANK-END flash_dKdV
        if t < T:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var index = (shared_head * T + t) * d + chunk * TILE + x
                    grad_key[unsafe_offset=index] = key_sums[chunk].cast[dtype]()
                    grad_value[unsafe_offset=index] = value_sums[chunk].cast[dtype]()


# ANCHOR_END: flash_key_value_kernel_solution
