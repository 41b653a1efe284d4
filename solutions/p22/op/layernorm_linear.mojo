"""Puzzle 22: LayerNorm + Linear, forward and backward, unfused, fused and fast.

    x_hat  = (input - mean) * rstd                 rstd = 1 / sqrt(variance + eps), statistics over H
    ln_out = x_hat * ln_weight + ln_bias
    output = ln_out @ linear_weight^T + linear_bias

Shapes: input [B, S, H]; output and grad_output [B, S, O]; ln_weight and ln_bias [H]; linear_weight [O, H];
linear_bias [O]; mean and rstd [B, S]. A row is one sequence position: rows = B * S. Every size is a run-time
argument, so a kernel is compiled once for a dtype. Sums are kept in `accum_type[dtype]`.

The file in reading order: the unfused forward kernels, the fused forward kernel, the unfused backward kernels,
the fused backward kernel, how each variant is launched, and the custom ops that MAX and PyTorch see. The kernels of
the fast variant stand in files of their own, and `fast.mojo` says in which order they run.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from extensibility import InputTensor, ManagedTensorSlice, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu import (
    barrier,
    block_dim,
    block_idx,
    global_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext, Dim
from max.gpu.primitives import block
from layout import TileTensor
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .common import CompensatedSum, ImmPtr, MutPtr, Sizes, accum_type, atomic_add, atomic_type, row_statistics
from .cpu_reference import (
    backward_fused_cpu,
    backward_unfused_cpu,
    forward_fused_cpu,
    forward_unfused_cpu,
    row_statistics_cpu,
    row_sums_cpu,
)
from .fast import launch_backward_fast, launch_forward_fast
from .fast_cpu import backward_fast_cpu, forward_fast_cpu
from .launcher import DeviceLauncher, Launcher

comptime EPS = 1e-5
"""The eps of the public ops; the training ops take it as an argument."""
comptime TILE = 16
"""Side of the square tiles of the matmul and the transpose: 256 threads a block."""
comptime ROW_THREADS = 128
"""Threads that share one row in the kernels that give a row to a block."""
comptime COLUMN_TILE = 32
"""A column sum gives a block 32 columns and 32 threads to each of them."""
comptime MAX_GRID_Y = 65535
"""The largest grid on NVIDIA along y; along x it is 2^31 - 1."""


# ---- Unfused forward: five launches -------------------------------------------------------------------------


def row_statistics_kernel[
    dtype: DType
](
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    rows: Int32,
    hidden_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """Mean and rstd of every row. One thread owns one row."""
    var row = global_idx.x
    if row >= Int(rows):
        return
    var statistics = row_statistics(input, row, Int(hidden_dim), eps)
    mean[unsafe_offset=row] = statistics.mean
    rstd[unsafe_offset=row] = statistics.rstd


# ANCHOR: layernorm_kernel_solution
def layernorm_kernel[
    dtype: DType
](
    ln_out: MutPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int32,
    hidden_dim: Int32,
):
    """LayerNorm from given statistics: ln_out = (input - mean) * rstd * gamma + beta.

    One block owns one row; its threads share the columns, so that neighbouring threads touch neighbouring
    elements.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var y = TileTensor(ln_out, row_major(Int(rows), H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))

    # BLANK-START ln: normalise, scale and shift the columns h = thread_idx.x, + block_dim.x, ... of this row
    for h in range(thread_idx.x, H, block_dim.x):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var shifted = x_hat * gamma[h].cast[accum]() + beta[h].cast[accum]()
        y[row, h] = shifted.cast[dtype]()
    # BLANK-END ln


# ANCHOR_END: layernorm_kernel_solution


# ANCHOR: transpose_kernel
def transpose_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [columns, rows]
    input: ImmPtr[dtype],  # [rows, columns]
    rows: Int32,
    columns: Int32,
):
    """Transposes a matrix through one shared tile a block, so that reads and writes are both coalesced."""
    # One column of padding puts the elements of a tile column into different banks.
    var tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](row_major[TILE, TILE + 1]())
    var source = TileTensor(input, row_major(Int(rows), Int(columns)))
    var target = TileTensor(output, row_major(Int(columns), Int(rows)))

    var row = block_idx.x * TILE + thread_idx.y
    var column = block_idx.y * TILE + thread_idx.x
    if row < Int(rows) and column < Int(columns):
        tile[thread_idx.y, thread_idx.x] = source[row, column]
    barrier()

    # The tile changes places: its first thread row now runs along the output's rows.
    row = block_idx.x * TILE + thread_idx.x
    column = block_idx.y * TILE + thread_idx.y
    if row < Int(rows) and column < Int(columns):
        target[column, row] = tile[thread_idx.x, thread_idx.y]


# ANCHOR_END: transpose_kernel


# ANCHOR: matmul_idiomatic_tiled
def matmul_idiomatic_tiled[
    dtype: DType
](
    output: MutPtr[dtype],  # [M, N]
    a: ImmPtr[dtype],  # [M, K]
    b: ImmPtr[dtype],  # [K, N]
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Matrix product, output = a @ b. A block owns one TILE x TILE tile of the output and walks along K tile by tile.
    """
    comptime accum = accum_type[dtype]
    var M = Int(m)
    var N = Int(n)
    var K = Int(k)
    var A = TileTensor(a, row_major(M, K))
    var B = TileTensor(b, row_major(K, N))
    var C = TileTensor(output, row_major(M, N))
    comptime tile_layout = row_major[TILE, TILE]()
    var a_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](tile_layout)
    var b_tile = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](tile_layout)

    var local_row = thread_idx.y
    var local_column = thread_idx.x
    # Rows lie along grid x, which has no practical limit; grid y ends at 65535 blocks.
    var row = block_idx.x * TILE + local_row
    var column = block_idx.y * TILE + local_column

    var total = CompensatedSum[accum]()
    for tile_start in range(0, K, TILE):
        # Load one tile of each factor; outside the matrices the tile holds zeros, which add nothing.
        var a_column = tile_start + local_column
        var b_row = tile_start + local_row
        a_tile[local_row, local_column] = A[row, a_column] if row < M and a_column < K else Scalar[dtype](0)
        b_tile[local_row, local_column] = B[b_row, column] if b_row < K and column < N else Scalar[dtype](0)
        barrier()

        # A plain sum for the tile, a compensated one for the tiles: its error does not grow with K.
        var tile_sum = Scalar[accum](0)
        comptime for i in range(TILE):
            tile_sum += a_tile[local_row, i].cast[accum]() * b_tile[i, local_column].cast[accum]()
        total += tile_sum
        # Nobody may load the next tile while a neighbour still reads this one.
        barrier()

    if row < M and column < N:
        C[row, column] = total.total.cast[dtype]()


# ANCHOR_END: matmul_idiomatic_tiled


# ANCHOR: add_bias_kernel
def add_bias_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [rows, O], read and written
    bias: ImmPtr[dtype],  # [O]
    rows: Int32,
    output_dim: Int32,
):
    """Adds the bias to every row, in place. One block owns one row; its threads share the columns."""
    comptime accum = accum_type[dtype]
    var y = TileTensor(output, row_major(Int(rows), Int(output_dim)))
    for o in range(thread_idx.x, Int(output_dim), block_dim.x):
        var total = y[block_idx.x, o].cast[accum]() + bias[unsafe_offset=o].cast[accum]()
        y[block_idx.x, o] = total.cast[dtype]()


# ANCHOR_END: add_bias_kernel


# ---- Fused forward: one launch ------------------------------------------------------------------------------


# ANCHOR: minimal_fused_forward_kernel_solution
def minimal_fused_forward_kernel[
    dtype: DType
](
    output: MutPtr[dtype],  # [B, S, O]
    mean: MutPtr[accum_type[dtype]],  # [B, S]
    rstd: MutPtr[accum_type[dtype]],  # [B, S]
    input: ImmPtr[dtype],  # [B, S, H]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    linear_bias: ImmPtr[dtype],  # [O]
    batch_size: Int32,
    seq_len: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
    eps: Scalar[accum_type[dtype]],
):
    """LayerNorm and Linear in one launch: the normalised row never reaches global memory.

    One block of one thread owns one sequence position: block (batch, seq). Where the sequence is longer than
    the grid, a block goes on with the position grid_dim.y further.
    """
    comptime accum = accum_type[dtype]
    var B = Int(batch_size)
    var S = Int(seq_len)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x = TileTensor(input, row_major(B * S, H))
    var y = TileTensor(output, row_major(B * S, O))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))
    var W = TileTensor(linear_weight, row_major(O, H))
    var bias = TileTensor(linear_bias, row_major(O))

    for seq in range(block_idx.y, S, grid_dim.y):
        var row = block_idx.x * S + seq

        # Phase 1: the statistics of this row, saved for the backward pass.
        var statistics = row_statistics(input, row, H, eps)
        mean[unsafe_offset=row] = statistics.mean
        rstd[unsafe_offset=row] = statistics.rstd

        # Phase 2: normalise, scale, shift and multiply, element by element.
        # BLANK-START forward: y[row, o] = sum over h of ln_out[h] * W[o, h] + bias[o], for every o
        for o in range(O):
            var total = CompensatedSum[accum]()
            for h in range(H):
                var deviation = x[row, h].cast[accum]() - statistics.mean
                var x_hat = deviation * statistics.rstd
                var ln_out = x_hat * gamma[h].cast[accum]() + beta[h].cast[accum]()
                total += ln_out * W[o, h].cast[accum]()
            total += bias[o].cast[accum]()
            y[row, o] = total.total.cast[dtype]()
        # BLANK-END forward


# ANCHOR_END: minimal_fused_forward_kernel_solution


# ---- Unfused backward: one launch for each quantity ---------------------------------------------------------


def ln_backward_row_sums[
    dtype: DType
](
    row_sums: MutPtr[accum_type[dtype]],  # [rows, 2]: c1, c2
    dln: ImmPtr[dtype],  # [rows, H], the gradient at the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    rows: Int32,
    hidden_dim: Int32,
):
    """The two means that dx needs of every row: c1 = mean_h(g * x_hat), c2 = mean_h(g), g = dln * gamma.

    One block of ROW_THREADS threads owns one row.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var c = TileTensor(row_sums, row_major(Int(rows), 2))

    # BLANK-START row_sums: sum g * x_hat and g over this row with the whole block, divide by H, write c1 and c2
    var sum_g_x_hat = Scalar[accum](0)
    var sum_g = Scalar[accum](0)
    for h in range(thread_idx.x, H, ROW_THREADS):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var g = dy_ln[row, h].cast[accum]() * gamma[h].cast[accum]()
        sum_g_x_hat += g * x_hat
        sum_g += g
    # block.sum holds barriers, so every thread calls it.
    var c1 = block.sum[block_size=ROW_THREADS](sum_g_x_hat) / Scalar[accum](H)
    var c2 = block.sum[block_size=ROW_THREADS](sum_g) / Scalar[accum](H)
    if thread_idx.x == 0:
        c[row, 0] = c1
        c[row, 1] = c2
    # BLANK-END row_sums


def ln_backward_input[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, H]
    row_sums: ImmPtr[accum_type[dtype]],  # [rows, 2]: c1, c2
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    rows: Int32,
    hidden_dim: Int32,
):
    """The input gradient from given row sums: dx = rstd * (g - c2 - x_hat * c1). One block owns one row."""
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), H))
    var dx = TileTensor(grad_input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var c1 = row_sums[unsafe_offset=2 * row]
    var c2 = row_sums[unsafe_offset=2 * row + 1]
    for h in range(thread_idx.x, H, block_dim.x):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var g = dy_ln[row, h].cast[accum]() * ln_weight[unsafe_offset=h].cast[accum]()
        dx[row, h] = (rstd[unsafe_offset=row] * (g - c2 - x_hat * c1)).cast[dtype]()


@always_inline
def sum_over_row_lanes[accum: DType](partial: Scalar[accum]) -> Scalar[accum]:
    """Adds the partial sums that the COLUMN_TILE threads of one column hold; complete where thread_idx.y is 0.

    Always in the same order, so the result is the same in every run. Every thread of the block must call it.
    """
    var partials = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](
        row_major[COLUMN_TILE, COLUMN_TILE]()
    )
    partials[thread_idx.y, thread_idx.x] = partial
    barrier()
    var total = Scalar[accum](0)
    if thread_idx.y == 0:
        for lane in range(COLUMN_TILE):
            total += partials[lane, thread_idx.x]
    return total


def column_sums_kernel[
    dtype: DType
](sums: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32,):  # [columns]  # [rows, columns]
    """Sums every column, as db = sum over rows of grad_output. Thread (x, y) adds rows y, y + COLUMN_TILE, ...
    """
    comptime accum = accum_type[dtype]
    var dy = TileTensor(input, row_major(Int(rows), Int(columns)))
    var column = block_idx.x * COLUMN_TILE + thread_idx.x
    var partial = CompensatedSum[accum]()
    if column < Int(columns):
        for row in range(thread_idx.y, Int(rows), COLUMN_TILE):
            partial += dy[row, column].cast[accum]()
    var total = sum_over_row_lanes(partial.total)
    if thread_idx.y == 0 and column < Int(columns):
        sums[unsafe_offset=column] = total.cast[dtype]()


def ln_backward_parameters[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H], dgamma
    grad_ln_bias: MutPtr[dtype],  # [H], dbeta
    dln: ImmPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    rows: Int32,
    hidden_dim: Int32,
):
    """The LayerNorm parameter gradients: dgamma = sum over rows of dln * x_hat, dbeta = sum over rows of dln.
    """
    comptime accum = accum_type[dtype]
    var H = Int(hidden_dim)
    var x = TileTensor(input, row_major(Int(rows), H))
    var dy_ln = TileTensor(dln, row_major(Int(rows), H))
    var h = block_idx.x * COLUMN_TILE + thread_idx.x
    var dgamma = CompensatedSum[accum]()
    var dbeta = CompensatedSum[accum]()
    if h < H:
        for row in range(thread_idx.y, Int(rows), COLUMN_TILE):
            var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
            var x_hat = deviation * rstd[unsafe_offset=row]
            dgamma += dy_ln[row, h].cast[accum]() * x_hat
            dbeta += dy_ln[row, h].cast[accum]()
    var dgamma_total = sum_over_row_lanes(dgamma.total)
    var dbeta_total = sum_over_row_lanes(dbeta.total)
    if thread_idx.y == 0 and h < H:
        grad_ln_weight[unsafe_offset=h] = dgamma_total.cast[dtype]()
        grad_ln_bias[unsafe_offset=h] = dbeta_total.cast[dtype]()


# ---- Fused backward: one launch for all five gradients ------------------------------------------------------


def clear_gradients_kernel[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Zeroes what the fused backward kernel adds to. One thread owns one element of grad_weight.

    This is a launch of its own because nothing inside a kernel makes one block wait for another: a block that
    clears in the same launch may wipe out what the others have already added.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = 0
        grad_ln_bias[unsafe_offset=index] = 0
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = 0
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = 0


def convert_gradients_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_weight: MutPtr[dtype],  # [O, H]
    grad_bias: MutPtr[dtype],  # [O]
    sums_ln_weight: ImmPtr[sum_dtype],  # [H]
    sums_ln_bias: ImmPtr[sum_dtype],  # [H]
    sums_weight: ImmPtr[sum_dtype],  # [O, H]
    sums_bias: ImmPtr[sum_dtype],  # [O]
    hidden_dim: Int32,
    output_dim: Int32,
):
    """Rounds the sums of the fused backward pass to the dtype of the gradients. One thread owns one element of dW.
    """
    var index = global_idx.x
    if index < Int(hidden_dim):
        grad_ln_weight[unsafe_offset=index] = sums_ln_weight[unsafe_offset=index].cast[dtype]()
        grad_ln_bias[unsafe_offset=index] = sums_ln_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim):
        grad_bias[unsafe_offset=index] = sums_bias[unsafe_offset=index].cast[dtype]()
    if index < Int(output_dim) * Int(hidden_dim):
        grad_weight[unsafe_offset=index] = sums_weight[unsafe_offset=index].cast[dtype]()


@always_inline
def dln_element[
    dtype: DType
](
    grad_output: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    row: Int,
    h: Int,
    hidden_dim: Int,
    output_dim: Int,
) -> Scalar[accum_type[dtype]]:
    """One element of the gradient at the LayerNorm output: dln[row, h] = sum over o of dy[row, o] * W[o, h].
    """
    comptime accum = accum_type[dtype]
    var total = CompensatedSum[accum]()
    for o in range(output_dim):
        var dy = grad_output[unsafe_offset=row * output_dim + o].cast[accum]()
        total += dy * linear_weight[unsafe_offset=o * hidden_dim + h].cast[accum]()
    return total.total


# ANCHOR: minimal_fused_backward_kernel_solution
def minimal_fused_backward_kernel[
    dtype: DType, sum_dtype: DType
](
    grad_input: MutPtr[dtype],  # [B, S, H]
    grad_ln_weight: MutPtr[sum_dtype],  # [H], zero before the launch
    grad_ln_bias: MutPtr[sum_dtype],  # [H], zero before the launch
    grad_weight: MutPtr[sum_dtype],  # [O, H], zero before the launch
    grad_bias: MutPtr[sum_dtype],  # [O], zero before the launch
    grad_output: ImmPtr[dtype],  # [B, S, O], dy
    input: ImmPtr[dtype],  # [B, S, H]
    mean: ImmPtr[accum_type[dtype]],  # [B, S]
    rstd: ImmPtr[accum_type[dtype]],  # [B, S]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    linear_weight: ImmPtr[dtype],  # [O, H]
    batch_size: Int32,
    seq_len: Int32,
    hidden_dim: Int32,
    output_dim: Int32,
):
    """All five gradients in one launch; nothing but the inputs and the statistics is read back.

    One block of one thread owns one sequence position. It alone writes its row of grad_input. Every block adds
    to the same sums of the parameter gradients, so those additions are atomic, and their order changes from run
    to run. A kernel enqueued before this one zeroes the sums, one behind it rounds them to the gradients' dtype.
    """
    comptime accum = accum_type[dtype]
    var B = Int(batch_size)
    var S = Int(seq_len)
    var H = Int(hidden_dim)
    var O = Int(output_dim)
    var x = TileTensor(input, row_major(B * S, H))
    var dy = TileTensor(grad_output, row_major(B * S, O))
    var dx = TileTensor(grad_input, row_major(B * S, H))
    var gamma = TileTensor(ln_weight, row_major(H))
    var beta = TileTensor(ln_bias, row_major(H))

    for seq in range(block_idx.y, S, grid_dim.y):
        # Phase 1: the statistics that the forward pass saved for this row.
        var row = block_idx.x * S + seq
        var row_mean = mean[unsafe_offset=row]
        var row_rstd = rstd[unsafe_offset=row]

        # Phase 2: the gradient of the linear bias.
        # BLANK-START db: add dy[row, o] to grad_bias[o], for every o
        for o in range(O):
            atomic_add(grad_bias, o, dy[row, o].cast[accum]())
        # BLANK-END db

        # Phase 3: the gradient of the linear weight, from the LayerNorm output, which is computed again here.
        # BLANK-START dW: add dy[row, o] * ln_out[h] to grad_weight[o * H + h], for every o and h
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var ln_out = x_hat * gamma[h].cast[accum]() + beta[h].cast[accum]()
            for o in range(O):
                atomic_add(grad_weight, o * H + h, dy[row, o].cast[accum]() * ln_out)
        # BLANK-END dW

        # Phase 4: the gradients of the LayerNorm weight and bias.
        # BLANK-START dgamma: add dln * x_hat to grad_ln_weight[h] and dln to grad_ln_bias[h]; see dln_element
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var dln = dln_element(grad_output, linear_weight, row, h, H, O)
            atomic_add(grad_ln_weight, h, dln * x_hat)
            atomic_add(grad_ln_bias, h, dln)
        # BLANK-END dgamma

        # Phase 5: the gradient of the input. Every element moves its row's mean and variance, so it needs c1
        # and c2, two means over the whole row, before any element can be finished.
        # BLANK-START dx: with g = dln * gamma, c1 = mean(g * x_hat), c2 = mean(g): dx = rstd * (g - c2 - x_hat * c1)
        var sum_g_x_hat = CompensatedSum[accum]()
        var sum_g = CompensatedSum[accum]()
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var dln = dln_element(grad_output, linear_weight, row, h, H, O)
            var g = dln * gamma[h].cast[accum]()
            sum_g_x_hat += g * x_hat
            sum_g += g
        var c1 = sum_g_x_hat.total / Scalar[accum](H)
        var c2 = sum_g.total / Scalar[accum](H)
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var dln = dln_element(grad_output, linear_weight, row, h, H, O)
            var g = dln * gamma[h].cast[accum]()
            dx[row, h] = (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()
        # BLANK-END dx


# ANCHOR_END: minimal_fused_backward_kernel_solution


# ---- How each variant is launched ---------------------------------------------------------------------------


def launch_row_statistics[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """One launch: mean and rstd of every row."""
    launcher.launch[row_statistics_kernel[dtype]](
        "row_statistics",
        mean,
        rstd,
        input,
        sizes.rows(),
        sizes.hidden_dim,
        eps,
        grid_dim=Dim(ceildiv(Int(sizes.rows()), ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )


def launch_layernorm[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    ln_out: MutPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """One launch: the LayerNorm output of every row."""
    launcher.launch[layernorm_kernel[dtype]](
        "layernorm",
        ln_out,
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        sizes.rows(),
        sizes.hidden_dim,
        grid_dim=Dim(Int(sizes.rows())),
        block_dim=Dim(ROW_THREADS),
    )


def launch_transpose[
    L: Launcher, //, dtype: DType
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32,) raises:
    """One launch: output [columns, rows] = input [rows, columns] transposed."""
    launcher.launch[transpose_kernel[dtype]](
        "transpose",
        output,
        input,
        rows,
        columns,
        grid_dim=Dim(ceildiv(Int(rows), TILE), ceildiv(Int(columns), TILE)),
        block_dim=Dim(TILE, TILE),
    )


def launch_matmul[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    output: MutPtr[dtype],
    a: ImmPtr[dtype],
    b: ImmPtr[dtype],
    m: Int32,
    n: Int32,
    k: Int32,
) raises:
    """One launch: output [M, N] = a [M, K] @ b [K, N]."""
    launcher.launch[matmul_idiomatic_tiled[dtype]](
        "matmul",
        output,
        a,
        b,
        m,
        n,
        k,
        grid_dim=Dim(ceildiv(Int(m), TILE), ceildiv(Int(n), TILE)),
        block_dim=Dim(TILE, TILE),
    )


def launch_forward_unfused[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    linear_bias: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """Five launches: statistics, LayerNorm, transpose of W, matmul, bias."""
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    var weight_t = launcher.workspace[dtype]("linear_weight_t", Int(H) * Int(O))
    launch_row_statistics[dtype](launcher, mean, rstd, input, sizes, eps)
    launch_layernorm[dtype](
        launcher,
        ln_out,
        input,
        mean.as_imm(),
        rstd.as_imm(),
        ln_weight,
        ln_bias,
        sizes,
    )
    launch_transpose[dtype](launcher, weight_t, linear_weight, O, H)
    launch_matmul[dtype](launcher, output, ln_out.as_imm(), weight_t.as_imm(), rows, O, H)
    launcher.launch[add_bias_kernel[dtype]](
        "add_bias",
        output,
        linear_bias,
        rows,
        O,
        grid_dim=Dim(Int(rows)),
        block_dim=Dim(ROW_THREADS),
    )


def launch_forward_fused[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    linear_bias: ImmPtr[dtype],
    sizes: Sizes,
    eps: Scalar[accum_type[dtype]],
) raises:
    """One launch."""
    launcher.launch[minimal_fused_forward_kernel[dtype]](
        "minimal_fused_forward",
        output,
        mean,
        rstd,
        input,
        ln_weight,
        ln_bias,
        linear_weight,
        linear_bias,
        sizes.batch_size,
        sizes.seq_len,
        sizes.hidden_dim,
        sizes.output_dim,
        eps,
        grid_dim=Dim(Int(sizes.batch_size), min(Int(sizes.seq_len), MAX_GRID_Y)),
        block_dim=Dim(1),
    )


def launch_row_sums[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    row_sums: MutPtr[accum_type[dtype]],
    dln: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """One launch: c1 and c2 of every row."""
    launcher.launch[ln_backward_row_sums[dtype]](
        "ln_backward_row_sums",
        row_sums,
        dln,
        input,
        mean,
        rstd,
        ln_weight,
        sizes.rows(),
        sizes.hidden_dim,
        grid_dim=Dim(Int(sizes.rows())),
        block_dim=Dim(ROW_THREADS),
    )


def launch_backward_unfused[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """Eight launches, each one step of the chain rule; no atomics, so every run gives the same bits."""
    var rows = sizes.rows()
    var H = sizes.hidden_dim
    var O = sizes.output_dim
    var ln_out = launcher.workspace[dtype]("ln_out", Int(rows) * Int(H))
    var dln = launcher.workspace[dtype]("dln", Int(rows) * Int(H))
    var dy_t = launcher.workspace[dtype]("grad_output_t", Int(rows) * Int(O))
    var row_sums = launcher.workspace[accum_type[dtype]]("row_sums", 2 * Int(rows))

    # Linear: dln = dY W, dW = dY^T ln_out, db = sum of dY.
    launch_matmul[dtype](launcher, dln, grad_output, linear_weight, rows, H, O)
    launch_layernorm[dtype](launcher, ln_out, input, mean, rstd, ln_weight, ln_bias, sizes)
    launch_transpose[dtype](launcher, dy_t, grad_output, rows, O)
    launch_matmul[dtype](launcher, grad_weight, dy_t.as_imm(), ln_out.as_imm(), O, H, rows)
    launcher.launch[column_sums_kernel[dtype]](
        "column_sums",
        grad_bias,
        grad_output,
        rows,
        O,
        grid_dim=Dim(ceildiv(Int(O), COLUMN_TILE)),
        block_dim=Dim(COLUMN_TILE, COLUMN_TILE),
    )

    # LayerNorm: c1 and c2, then dx; dgamma and dbeta.
    launch_row_sums[dtype](launcher, row_sums, dln.as_imm(), input, mean, rstd, ln_weight, sizes)
    launcher.launch[ln_backward_input[dtype]](
        "ln_backward_input",
        grad_input,
        row_sums.as_imm(),
        dln.as_imm(),
        input,
        mean,
        rstd,
        ln_weight,
        rows,
        H,
        grid_dim=Dim(Int(rows)),
        block_dim=Dim(ROW_THREADS),
    )
    launcher.launch[ln_backward_parameters[dtype]](
        "ln_backward_parameters",
        grad_ln_weight,
        grad_ln_bias,
        dln.as_imm(),
        input,
        mean,
        rstd,
        rows,
        H,
        grid_dim=Dim(ceildiv(Int(H), COLUMN_TILE)),
        block_dim=Dim(COLUMN_TILE, COLUMN_TILE),
    )


def launch_backward_fused[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
) raises:
    """One launch for all five gradients, between one that clears the sums and one that rounds them."""
    comptime sum_dtype = atomic_type[dtype]
    var H = Int(sizes.hidden_dim)
    var O = Int(sizes.output_dim)
    var elements = max(H, O, O * H)
    var sums_ln_weight = launcher.workspace[sum_dtype]("sums_ln_weight", H)
    var sums_ln_bias = launcher.workspace[sum_dtype]("sums_ln_bias", H)
    var sums_weight = launcher.workspace[sum_dtype]("sums_weight", O * H)
    var sums_bias = launcher.workspace[sum_dtype]("sums_bias", O)

    launcher.launch[clear_gradients_kernel[sum_dtype]](
        "clear_gradients",
        sums_ln_weight,
        sums_ln_bias,
        sums_weight,
        sums_bias,
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(ceildiv(elements, ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )
    launcher.launch[minimal_fused_backward_kernel[dtype, sum_dtype]](
        "minimal_fused_backward",
        grad_input,
        sums_ln_weight,
        sums_ln_bias,
        sums_weight,
        sums_bias,
        grad_output,
        input,
        mean,
        rstd,
        ln_weight,
        ln_bias,
        linear_weight,
        sizes.batch_size,
        sizes.seq_len,
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(Int(sizes.batch_size), min(Int(sizes.seq_len), MAX_GRID_Y)),
        block_dim=Dim(1),
    )
    launcher.launch[convert_gradients_kernel[dtype, sum_dtype]](
        "convert_gradients",
        grad_ln_weight,
        grad_ln_bias,
        grad_weight,
        grad_bias,
        sums_ln_weight.as_imm(),
        sums_ln_bias.as_imm(),
        sums_weight.as_imm(),
        sums_bias.as_imm(),
        sizes.hidden_dim,
        sizes.output_dim,
        grid_dim=Dim(ceildiv(elements, ROW_THREADS)),
        block_dim=Dim(ROW_THREADS),
    )


# ---- Custom ops: what MAX and PyTorch see -------------------------------------------------------------------


def expect_shape[
    rank: Int, //
](name: StaticString, tensor: ManagedTensorSlice[rank=rank, ...], *shape: Int) raises:
    """Raises where a tensor's shape is not what the parameters or the other tensors make it."""
    for axis in range(rank):
        if tensor.dim_size(axis) != shape[axis]:
            raise Error(t"{name} has size {tensor.dim_size(axis)} along axis {axis}, expected {shape[axis]}")


def checked_sizes(batch_size: Int, seq_len: Int, hidden_dim: Int, output_dim: Int) raises -> Sizes:
    """The sizes in the kernels' type, or an error where a kernel cannot cover them."""
    if hidden_dim < 1 or output_dim < 1:
        raise Error(t"hidden_dim and output_dim must be at least 1, got {hidden_dim} and {output_dim}")
    comptime most = TILE * MAX_GRID_Y
    if hidden_dim > most or output_dim > most:
        raise Error(t"hidden_dim and output_dim must be at most {most}, got {hidden_dim} and {output_dim}")
    if batch_size * seq_len > Int(Int32.MAX):
        raise Error(t"batch_size * seq_len must be at most {Int32.MAX}, got {batch_size} * {seq_len}")
    return Sizes(Int32(batch_size), Int32(seq_len), Int32(hidden_dim), Int32(output_dim))


def is_algorithm(name: StaticString) -> Bool:
    """Whether there is a variant of this name."""
    return name == "unfused" or name == "fused" or name == "fast"


def run_forward[
    dtype: DType, target: StaticString, algorithm: StaticString
](
    output: MutPtr[dtype],
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    linear_bias: ImmPtr[dtype],
    sizes: Sizes,
    eps: Float64,
    mut launcher: DeviceLauncher,
) raises:
    """The forward pass of any variant, on the device of the op."""
    comptime assert is_algorithm(algorithm), "algorithm must be 'unfused', 'fused' or 'fast'"
    var eps_accum = eps.cast[accum_type[dtype]]()
    if sizes.rows() == 0:
        return
    comptime if target == "cpu":
        var rows = Int(sizes.rows())
        var H = Int(sizes.hidden_dim)
        var O = Int(sizes.output_dim)
        comptime if algorithm == "fused":
            forward_fused_cpu[dtype](
                output,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                rows,
                H,
                O,
                eps_accum,
            )
        elif algorithm == "fast":
            forward_fast_cpu[dtype](
                output,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                rows,
                H,
                O,
                eps_accum,
            )
        else:
            forward_unfused_cpu[dtype](
                output,
                launcher.workspace[dtype]("ln_out", rows * H),
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                rows,
                H,
                O,
                eps_accum,
            )
    else:
        comptime if algorithm == "fused":
            launch_forward_fused[dtype](
                launcher,
                output,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                sizes,
                eps_accum,
            )
        elif algorithm == "fast":
            launch_forward_fast[dtype](
                launcher,
                output,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                sizes,
                eps_accum,
            )
        else:
            launch_forward_unfused[dtype](
                launcher,
                output,
                mean,
                rstd,
                input,
                ln_weight,
                ln_bias,
                linear_weight,
                linear_bias,
                sizes,
                eps_accum,
            )


def run_row_statistics[
    dtype: DType, target: StaticString
](
    mean: MutPtr[accum_type[dtype]],
    rstd: MutPtr[accum_type[dtype]],
    input: ImmPtr[dtype],
    sizes: Sizes,
    eps: Float64,
    mut launcher: DeviceLauncher,
) raises:
    """Mean and rstd of every row, on the device of the op."""
    var eps_accum = eps.cast[accum_type[dtype]]()
    if sizes.rows() == 0:
        return
    comptime if target == "cpu":
        row_statistics_cpu[dtype](
            mean,
            rstd,
            input,
            Int(sizes.rows()),
            Int(sizes.hidden_dim),
            eps_accum,
        )
    else:
        launch_row_statistics[dtype](launcher, mean, rstd, input, sizes, eps_accum)


def run_backward[
    dtype: DType, target: StaticString, algorithm: StaticString
](
    grad_input: MutPtr[dtype],
    grad_ln_weight: MutPtr[dtype],
    grad_ln_bias: MutPtr[dtype],
    grad_weight: MutPtr[dtype],
    grad_bias: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    mean: ImmPtr[accum_type[dtype]],
    rstd: ImmPtr[accum_type[dtype]],
    ln_weight: ImmPtr[dtype],
    ln_bias: ImmPtr[dtype],
    linear_weight: ImmPtr[dtype],
    sizes: Sizes,
    mut launcher: DeviceLauncher,
) raises:
    """The backward pass of any variant, on the device of the op."""
    comptime assert is_algorithm(algorithm), "algorithm must be 'unfused', 'fused' or 'fast'"
    comptime if target == "cpu":
        var rows = Int(sizes.rows())
        var H = Int(sizes.hidden_dim)
        var O = Int(sizes.output_dim)
        comptime if algorithm == "fused":
            backward_fused_cpu[dtype](
                grad_input,
                grad_ln_weight,
                grad_ln_bias,
                grad_weight,
                grad_bias,
                launcher.workspace[DType.float64]("sums", 3 * H + O * H + O),
                grad_output,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                linear_weight,
                rows,
                H,
                O,
            )
        elif algorithm == "fast":
            backward_fast_cpu[dtype](
                grad_input,
                grad_ln_weight,
                grad_ln_bias,
                grad_weight,
                grad_bias,
                grad_output,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                linear_weight,
                rows,
                H,
                O,
            )
        else:
            backward_unfused_cpu[dtype](
                grad_input,
                grad_ln_weight,
                grad_ln_bias,
                grad_weight,
                grad_bias,
                launcher.workspace[dtype]("ln_out", rows * H),
                launcher.workspace[dtype]("dln", rows * H),
                launcher.workspace[accum_type[dtype]]("row_sums", 2 * rows),
                grad_output,
                input,
                mean,
                rstd,
                ln_weight,
                ln_bias,
                linear_weight,
                rows,
                H,
                O,
            )
    elif algorithm == "fused":
        launch_backward_fused[dtype](
            launcher,
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            grad_weight,
            grad_bias,
            grad_output,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            linear_weight,
            sizes,
        )
    elif algorithm == "fast":
        launch_backward_fast[dtype](
            launcher,
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            grad_weight,
            grad_bias,
            grad_output,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            linear_weight,
            sizes,
        )
    else:
        launch_backward_unfused[dtype](
            launcher,
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            grad_weight,
            grad_bias,
            grad_output,
            input,
            mean,
            rstd,
            ln_weight,
            ln_bias,
            linear_weight,
            sizes,
        )


# ANCHOR: layernorm_linear_custom_op
@extensibility.register("layernorm_linear")
struct LayerNormLinear:
    """The public forward op: eps is EPS, the sizes are parameters and are checked against the tensors."""

    @staticmethod
    def execute[
        target: StaticString,
        algorithm: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
        dtype: DType,
    ](
        output: OutputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        linear_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        ctx: DeviceContext,
    ) raises:
        expect_shape("output", output, batch_size, seq_len, output_dim)
        expect_shape("input", input, batch_size, seq_len, hidden_dim)
        expect_shape("ln_weight", ln_weight, hidden_dim)
        expect_shape("ln_bias", ln_bias, hidden_dim)
        expect_shape("linear_weight", linear_weight, output_dim, hidden_dim)
        expect_shape("linear_bias", linear_bias, output_dim)
        var sizes = checked_sizes(batch_size, seq_len, hidden_dim, output_dim)
        var launcher = DeviceLauncher(ctx)
        # Only a backward pass needs the statistics, and this op has none to hand them to.
        comptime accum = accum_type[dtype]
        run_forward[dtype, target, algorithm](
            output.unsafe_ptr(),
            launcher.workspace[accum]("mean", Int(sizes.rows())),
            launcher.workspace[accum]("rstd", Int(sizes.rows())),
            input.unsafe_ptr().as_imm(),
            ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(),
            linear_weight.unsafe_ptr().as_imm(),
            linear_bias.unsafe_ptr().as_imm(),
            sizes,
            EPS,
            launcher,
        )


# ANCHOR_END: layernorm_linear_custom_op


# ANCHOR: layernorm_linear_backward_custom_op
@extensibility.register("layernorm_linear_backward")
struct LayerNormLinearBackward:
    """The public backward op: all five gradients, from statistics that it computes again."""

    @staticmethod
    def execute[
        target: StaticString,
        batch_size: Int,
        seq_len: Int,
        hidden_dim: Int,
        output_dim: Int,
        dtype: DType,
        algorithm: StaticString = "fused",
    ](
        grad_input: OutputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        grad_ln_weight: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_ln_bias: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_weight: OutputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        grad_bias: OutputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        ctx: DeviceContext,
    ) raises:
        expect_shape("grad_input", grad_input, batch_size, seq_len, hidden_dim)
        expect_shape("grad_ln_weight", grad_ln_weight, hidden_dim)
        expect_shape("grad_ln_bias", grad_ln_bias, hidden_dim)
        expect_shape("grad_weight", grad_weight, output_dim, hidden_dim)
        expect_shape("grad_bias", grad_bias, output_dim)
        expect_shape("grad_output", grad_output, batch_size, seq_len, output_dim)
        expect_shape("input", input, batch_size, seq_len, hidden_dim)
        expect_shape("ln_weight", ln_weight, hidden_dim)
        expect_shape("ln_bias", ln_bias, hidden_dim)
        expect_shape("linear_weight", linear_weight, output_dim, hidden_dim)
        var sizes = checked_sizes(batch_size, seq_len, hidden_dim, output_dim)
        var launcher = DeviceLauncher(ctx)
        comptime accum = accum_type[dtype]
        var mean = launcher.workspace[accum]("mean", Int(sizes.rows()))
        var rstd = launcher.workspace[accum]("rstd", Int(sizes.rows()))
        run_row_statistics[dtype, target](mean, rstd, input.unsafe_ptr().as_imm(), sizes, EPS, launcher)
        run_backward[dtype, target, algorithm](
            grad_input.unsafe_ptr(),
            grad_ln_weight.unsafe_ptr(),
            grad_ln_bias.unsafe_ptr(),
            grad_weight.unsafe_ptr(),
            grad_bias.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            input.unsafe_ptr().as_imm(),
            mean.as_imm(),
            rstd.as_imm(),
            ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(),
            linear_weight.unsafe_ptr().as_imm(),
            sizes,
            launcher,
        )


# ANCHOR_END: layernorm_linear_backward_custom_op


@extensibility.register("layernorm_linear_train")
struct LayerNormLinearTrain:
    """The forward op for training: sizes at run time, written in place, and the statistics are outputs."""

    @staticmethod
    def execute[
        target: StaticString, algorithm: StaticString, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        mean: MutableInputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        rstd: MutableInputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        linear_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        eps: Float64,
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        var O = linear_weight.dim_size(0)
        expect_shape("output", output, B, S, O)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        expect_shape("ln_bias", ln_bias, H)
        expect_shape("linear_weight", linear_weight, O, H)
        expect_shape("linear_bias", linear_bias, O)
        var launcher = DeviceLauncher(ctx)
        run_forward[dtype, target, algorithm](
            output.unsafe_ptr(),
            mean.unsafe_ptr(),
            rstd.unsafe_ptr(),
            input.unsafe_ptr().as_imm(),
            ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(),
            linear_weight.unsafe_ptr().as_imm(),
            linear_bias.unsafe_ptr().as_imm(),
            checked_sizes(B, S, H, O),
            eps,
            launcher,
        )


@extensibility.register("layernorm_linear_train_backward")
struct LayerNormLinearTrainBackward:
    """The backward op for training: sizes at run time, written in place, from saved statistics."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, algorithm: StaticString = "fused"
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        grad_ln_weight: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_ln_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        grad_weight: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        grad_bias: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [O]
        grad_output: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, O]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        mean: InputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        rstd: InputTensor[dtype=accum_type[dtype], rank=2, static_spec=_],  # [B, S]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ln_bias: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        linear_weight: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [O, H]
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        var O = linear_weight.dim_size(0)
        expect_shape("grad_input", grad_input, B, S, H)
        expect_shape("grad_ln_weight", grad_ln_weight, H)
        expect_shape("grad_ln_bias", grad_ln_bias, H)
        expect_shape("grad_weight", grad_weight, O, H)
        expect_shape("grad_bias", grad_bias, O)
        expect_shape("grad_output", grad_output, B, S, O)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        expect_shape("ln_bias", ln_bias, H)
        expect_shape("linear_weight", linear_weight, O, H)
        var launcher = DeviceLauncher(ctx)
        run_backward[dtype, target, algorithm](
            grad_input.unsafe_ptr(),
            grad_ln_weight.unsafe_ptr(),
            grad_ln_bias.unsafe_ptr(),
            grad_weight.unsafe_ptr(),
            grad_bias.unsafe_ptr(),
            grad_output.unsafe_ptr().as_imm(),
            input.unsafe_ptr().as_imm(),
            mean.unsafe_ptr().as_imm(),
            rstd.unsafe_ptr().as_imm(),
            ln_weight.unsafe_ptr().as_imm(),
            ln_bias.unsafe_ptr().as_imm(),
            linear_weight.unsafe_ptr().as_imm(),
            checked_sizes(B, S, H, O),
            launcher,
        )


@extensibility.register("layernorm_linear_row_sums")
struct LayerNormLinearRowSums:
    """The row sums c1 and c2 alone, written in place, so that one kernel can be run and checked alone."""

    @staticmethod
    def execute[
        target: StaticString, accum: DType, dtype: DType
    ](
        row_sums: MutableInputTensor[dtype=accum, rank=2, static_spec=_],  # [B * S, 2]
        dln: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        input: InputTensor[dtype=dtype, rank=3, static_spec=_],  # [B, S, H]
        mean: InputTensor[dtype=accum, rank=2, static_spec=_],  # [B, S]
        rstd: InputTensor[dtype=accum, rank=2, static_spec=_],  # [B, S]
        ln_weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [H]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "row_sums, mean and rstd must have the accumulation dtype"
        var B = input.dim_size(0)
        var S = input.dim_size(1)
        var H = input.dim_size(2)
        expect_shape("row_sums", row_sums, B * S, 2)
        expect_shape("dln", dln, B, S, H)
        expect_shape("mean", mean, B, S)
        expect_shape("rstd", rstd, B, S)
        expect_shape("ln_weight", ln_weight, H)
        var sizes = checked_sizes(B, S, H, 1)
        comptime if target == "cpu":
            row_sums_cpu[dtype](
                rebind[MutPtr[accum_type[dtype]]](row_sums.unsafe_ptr()),
                dln.unsafe_ptr().as_imm(),
                input.unsafe_ptr().as_imm(),
                rebind[ImmPtr[accum_type[dtype]]](mean.unsafe_ptr().as_imm()),
                rebind[ImmPtr[accum_type[dtype]]](rstd.unsafe_ptr().as_imm()),
                ln_weight.unsafe_ptr().as_imm(),
                B * S,
                H,
            )
        else:
            var launcher = DeviceLauncher(ctx)
            launch_row_sums[dtype](
                launcher,
                rebind[MutPtr[accum_type[dtype]]](row_sums.unsafe_ptr()),
                dln.unsafe_ptr().as_imm(),
                input.unsafe_ptr().as_imm(),
                rebind[ImmPtr[accum_type[dtype]]](mean.unsafe_ptr().as_imm()),
                rebind[ImmPtr[accum_type[dtype]]](rstd.unsafe_ptr().as_imm()),
                ln_weight.unsafe_ptr().as_imm(),
                sizes,
            )
