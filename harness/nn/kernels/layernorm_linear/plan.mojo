"""GEMM selection of LayerNorm + Linear, by estimated times on an H200.

The three products are Y = ln_out W^T, dln = dY W and dW = dY^T ln_out. The choice compares estimated times.
Their constants come from book/records/products.csv, which has the times of both implementations, and
branches.csv:

- This project's kernel for Hopper divides a product into tiles that multiprocessors compute in rounds
  (`plan_tiles`). Few tiles leave most of the GPU idle. Its spare warps also compute the column sums of dY,
  and dgamma and dbeta.
- cuBLAS, which PyTorch calls, divides the sums of a small product among blocks (split-K), and is slightly
  faster for the largest products.
- Rows that are not a multiple of 16 bytes prevent wide loads in both: cuBLAS drops to a fifth of its speed.
  This project's path copies operands to aligned rows; cuBLAS gets aligned rows if ln_out, W and the bias are
  padded (PADDED).

A loop of small eager calls is CPU-bound, and this project's launches take the least CPU time; a CUDA graph is
GPU-bound. So a captured call may get different products than an eager one. In a graph the backward pass may
also use two streams: one for dln and what depends on it, one for dW from its own ln_out. Each fills the
multiprocessors that the other leaves idle.
"""

from std.math import ceildiv

from common.gemm_hopper_launches import plan_tiles
from common.gemm_hopper_pipeline import BLOCK_M
from common.tensor_maps import has_aligned_width, aligned_pitch
from .small import suits_small_backward, suits_small_forward
from .tensors import Sizes

comptime MOJO = 0
"""GEMM selection: this project's kernel."""
comptime CUBLAS = 1
"""GEMM selection: cuBLAS."""
comptime PADDED = 2
"""GEMM selection: cuBLAS on copies with aligned rows."""

comptime MULTIPROCESSORS = 132
comptime STEP_US = 0.0023 * 1.15
"""Microseconds per step of one column of this project's product: the planned time, times the measured excess.
"""
comptime MIN_TILE_COLUMNS = 64
"""Minimum columns; with fewer, most of every tile is empty."""
comptime MAX_OVERLAPPED_ROWS = 8 * BLOCK_M * MULTIPROCESSORS
"""Rows above which memory traffic adds to the time if most of every tile is empty: more than eight rounds of
tiles.
"""
comptime MIN_NARROW_ROWS = 1 << 16
"""Minimum rows of fewer than MIN_TILE_COLUMNS columns for cuBLAS to compute both products in two streams."""
comptime MIN_LARGE_WORK = 1 << 37
"""Multiply-adds from which the GPU is at its power limit, and this project's product takes LARGE_COST times
as long.
"""
comptime LARGE_COST = 1.05
comptime MAX_SMALL_WORK = 1 << 15
"""Maximum multiply-adds for one launch to compute a whole pass (`small.mojo`)."""
comptime MIN_COPY_WORK = 1 << 16
"""Minimum multiply-adds for copies of unaligned rows to pay off."""
comptime MAX_SMALL_ROWS = 64
"""Maximum rows for the kernels for few rows: with more, adding columns row by row takes longer than a launch.
"""
comptime MAX_SMALL_ROWS_WORK = 1 << 24
"""Maximum multiply-adds of few unaligned rows for which cuBLAS takes less time than the copies for this
project's products.
"""
comptime LAUNCH_US = 3.0
"""Fixed overhead in microseconds of a cuBLAS product, and of an additional launch."""
comptime MOJO_LAUNCH_US = 1.0
"""Fixed overhead in microseconds of this project's product, which starts before the previous launch is done.
"""
comptime CUBLAS_RATE = 780e6
"""Floating-point operations per microsecond of cuBLAS."""
comptime BANDWIDTH = 3.6e6
"""Bytes per microsecond of a memory-bound product."""
comptime COPY_BANDWIDTH = 1.2e6
"""Bytes per microsecond of PyTorch's copy of unaligned rows."""
comptime MOJO_COPY_BANDWIDTH = 4e6
"""Bytes per microsecond of this project's copy."""
comptime ROW_KERNEL_US = 2.5
"""Fixed overhead of a row kernel in microseconds."""
comptime SUMS_US = 2.0
"""Microseconds to add the partial sums of several blocks."""
comptime STREAMS_TRAFFIC = 1.2
"""Factor on the memory traffic of row kernels that overlap products on two streams. STREAMS_US and
STREAMS_CUBLAS_US are the overheads in microseconds of two streams, and of a cuBLAS dW on one of them.
"""
comptime STREAMS_US = 4.0
comptime STREAMS_CUBLAS_US = 2.5
comptime STREAMS_GAIN = 0.98
"""Two streams are chosen if they take less than this fraction of the time of one."""
comptime MIN_BIAS_STREAM_ELEMENTS = 1 << 19
"""Minimum elements of dY for its column sums to get a third stream, if cuBLAS computes dln."""
comptime MAX_UNALIGNED_ELEMENTS = 1 << 19
"""Maximum elements of the input, and of a row, for the backward pass over unaligned rows to use two streams.
"""
comptime MAX_UNALIGNED_WIDTH = 1024
comptime MAX_UNALIGNED_ROWS = 512
"""Maximum rows and multiply-adds for those streams to use cuBLAS."""
comptime MAX_UNALIGNED_WORK = 1 << 25
comptime UNALIGNED_OUTPUT_COST = 1.15
"""Factor on the time of this project's product if it writes unaligned rows."""
comptime PADDED_GAIN = 0.9
"""cuBLAS on padded rows is chosen if it takes less than this fraction of this project's time."""
comptime CPU_BOUND_US = 350.0
"""GPU time of both passes, in microseconds, below which a loop of eager calls is CPU-bound."""


@fieldwise_init
struct Problem(Copyable, Movable):
    """The inputs of the GEMM selection."""

    var rows: Int
    var H: Int
    var O: Int
    var transposed: Bool
    """Whether W is stored as [H, O], which this project's products do not read."""
    var least_memory: Bool
    """Whether to minimize memory instead of time."""
    var captured: Bool
    """Whether a CUDA graph captures the call."""
    var split_float32: Bool
    """Whether float32 products may be computed as split float16."""

    def work(self) -> Int:
        """Return the multiply-adds of a product."""
        return self.rows * self.H * self.O


@fieldwise_init
struct Choice(Copyable, Movable):
    """The implementation of each product, and whether dW has its own stream in the backward pass."""

    var output: Int
    var dln: Int
    var dW: Int
    var two_streams: Bool

    @staticmethod
    def of(gemm: Int) -> Self:
        """Return the choice of one implementation for all three products."""
        return Self(gemm, gemm, gemm, False)


def choose[wgmma: Bool, dtype: DType, x_dtype: DType](p: Problem) -> Choice:
    """Choose products for x [rows, H] of `x_dtype` and W [O, H] in `dtype`, on a GPU with or without Hopper's
    `wgmma`.

    Without Hopper, and for float32 that may not be split, cuBLAS computes all products: no record shows this
    project's to be faster.
    """
    if not wgmma or p.transposed:
        return Choice.of(CUBLAS)
    comptime if dtype == DType.float32:
        return Choice.of(MOJO if p.split_float32 and p.H % 8 == 0 == p.O % 8 else CUBLAS)
    if has_aligned_width[dtype](p.H) and has_aligned_width[dtype](p.O):
        return choose_aligned(p)
    return choose_unaligned[dtype, x_dtype](p)


# ---- Aligned rows ------------------------------------------------------------------------------------------


def choose_aligned(p: Problem) -> Choice:
    """Choose the implementations with the lowest estimated time of each pass."""
    if p.work() <= MAX_SMALL_WORK:
        return Choice.of(MOJO)
    var mojo = mojo_cost(p.rows, p.O, p.H).time
    var output = CUBLAS if cublas_cost(p.rows, p.O, p.H).time < mojo else MOJO
    var one_stream = estimate_one_stream(p)
    var streams = estimate_best_streams(p)
    var two_streams = streams.time < STREAMS_GAIN * one_stream.time
    mojo += mojo_cost(p.rows, p.H, p.O).time + mojo_cost(p.O, p.H, p.rows, may_split=True).time
    if p.captured and two_streams:
        return Choice(output, streams.dln, streams.dW, True)
    if not p.captured and mojo < CPU_BOUND_US:
        return Choice.of(MOJO)
    return Choice(output, one_stream.dln, one_stream.dW, False)


@fieldwise_init
struct Estimate(Copyable, Movable):
    """A choice for the backward pass, and its estimated microseconds."""

    var dln: Int
    var dW: Int
    var time: Float64


def estimate_one_stream(p: Problem) -> Estimate:
    """Return the fastest choice on one stream and its estimated time: dln, then the row kernel, then dW.
    This project's dW kernel also adds the partial sums.
    """
    var row_kernel = ROW_KERNEL_US + 8 * Float64(p.rows * p.H) / BANDWIDTH
    # Column sums of dY take two more launches for many rows, which read dY again; for fewer rows, another
    # launch computes them.
    var sums = 2 * Float64(p.rows * p.O) / BANDWIDTH + 2 * LAUNCH_US if p.rows > 1024 else 1.0
    sums += 0.0 if p.rows <= MAX_SMALL_ROWS else SUMS_US
    var mojo = mojo_cost(p.rows, p.H, p.O).time + row_kernel + SUMS_US
    var cublas = cublas_cost(p.rows, p.H, p.O).time + row_kernel + sums
    var mojo_dW = mojo_cost(p.O, p.H, p.rows, may_split=True).time
    var cublas_dW = cublas_cost(p.O, p.H, p.rows).time
    var best = Estimate(MOJO, MOJO, mojo + mojo_dW)
    if mojo + cublas_dW < best.time:
        best = Estimate(MOJO, CUBLAS, mojo + cublas_dW)
    if cublas + cublas_dW < best.time:
        best = Estimate(CUBLAS, CUBLAS, cublas + cublas_dW)
    return best^


def estimate_best_streams(p: Problem) -> Estimate:
    """Return the fastest choice on two streams and its estimated time. cuBLAS in both streams needs two
    workspaces, which only pays off for many narrow rows.
    """
    var best = estimate_two_streams(p, MOJO, MOJO)
    for dln, dW in [(MOJO, CUBLAS), (CUBLAS, MOJO), (CUBLAS, CUBLAS)]:
        if (dln == MOJO or dW == MOJO) or (p.H < MIN_TILE_COLUMNS and p.rows >= MIN_NARROW_ROWS):
            var estimate = estimate_two_streams(p, dln, dW)
            if estimate.time < best.time:
                best = estimate^
    return best^


def estimate_two_streams(p: Problem, dln: Int, dW: Int) -> Estimate:
    """Estimate the time on two streams: that of the longer stream, or the work of both if it fills the GPU.
    """
    var elements = Float64(p.rows * p.H)
    var separate_bias = dln == CUBLAS and p.rows * p.O >= MIN_BIAS_STREAM_ELEMENTS
    var dln_cost = mojo_cost(p.rows, p.H, p.O) if dln == MOJO else cublas_cost(p.rows, p.H, p.O)
    var dW_cost = mojo_cost(p.O, p.H, p.rows, may_split=True) if dW == MOJO else cublas_cost(p.O, p.H, p.rows)
    var sums_time = 0.0 if dln == CUBLAS and p.rows <= MAX_SMALL_ROWS else SUMS_US
    var first_stream = dln_cost.time + ROW_KERNEL_US + 6 * elements / BANDWIDTH + sums_time
    var cublas_time = STREAMS_CUBLAS_US if dW == CUBLAS else 0.0
    var second_stream = ROW_KERNEL_US + 4 * elements / BANDWIDTH + dW_cost.time + cublas_time
    var traffic = 10 * elements + (2 * Float64(p.rows * p.O) if separate_bias else 0.0)
    var all_work = (
        dln_cost.work + dW_cost.work + cublas_time + STREAMS_TRAFFIC * traffic / BANDWIDTH + STREAMS_US
    )
    return Estimate(
        dln, dW, max(first_stream, second_stream, all_work) + (LAUNCH_US / 2 if separate_bias else 0.0)
    )


@fieldwise_init
struct Cost(Copyable, Movable):
    """The cost of a product."""

    var time: Float64
    """Microseconds until it is done."""
    var work: Float64
    """Microseconds of the whole GPU; less than `time` if multiprocessors are idle."""


def mojo_cost(m: Int, n: Int, k: Int, may_split: Bool = False) -> Cost:
    """Return the cost of this project's product [m, n] with inner dimension k."""
    var plan = plan_tiles(m, n, k, may_split)
    var step = STEP_US * (LARGE_COST if m * n * k >= MIN_LARGE_WORK else 1.0)
    var memory_time = traffic_time(m, n, k) if n < MIN_TILE_COLUMNS and m > MAX_OVERLAPPED_ROWS else 0.0
    return Cost(
        MOJO_LAUNCH_US + memory_time + step * Float64(plan.cost),
        memory_time + step * Float64(plan.work) / MULTIPROCESSORS,
    )


def cublas_cost(m: Int, n: Int, k: Int) -> Cost:
    """Return the cost of cuBLAS with aligned rows; half of its store traffic is not overlapped."""
    var work = 2 * Float64(m * n * k) / CUBLAS_RATE + Float64(m * n) / BANDWIDTH
    return Cost(LAUNCH_US + max(work, traffic_time(m, n, k)), work)


def traffic_time(m: Int, n: Int, k: Int) -> Float64:
    """Return the microseconds for reading both operands and writing the product."""
    return 2 * Float64(m * k + k * n + m * n) / BANDWIDTH


# ---- Unaligned rows ----------------------------------------------------------------------------------------


def choose_unaligned[dtype: DType, x_dtype: DType](p: Problem) -> Choice:
    """Choose this project's products with the copies that they need; or cuBLAS if the first product has few
    tiles or long sums, or if all products take no longer than the copies.
    """
    var aligned_H = has_aligned_width[dtype](p.H)
    if p.least_memory:
        # cuBLAS would read unaligned operands, which takes longer. If only the rows that it writes are
        # unaligned, this project's product needs no copy either.
        return Choice(MOJO if aligned_H else CUBLAS, CUBLAS, CUBLAS, False)
    var work = p.work()
    if work < MIN_COPY_WORK:
        var sizes = Sizes(Int32(p.rows), 1, Int32(p.H), Int32(p.O))
        var output = MOJO if dtype == x_dtype and suits_small_forward(sizes) else CUBLAS
        var gradients = MOJO if dtype == x_dtype and suits_small_backward(sizes) else CUBLAS
        return Choice(output, gradients, gradients, False)
    var two_streams = p.captured and p.H <= MAX_UNALIGNED_WIDTH and p.rows * p.H <= MAX_UNALIGNED_ELEMENTS
    if p.rows <= MAX_SMALL_ROWS and work <= MAX_SMALL_ROWS_WORK:
        return Choice(CUBLAS, CUBLAS, CUBLAS, two_streams) if p.captured else Choice.of(MOJO)
    var padded_H = ceildiv(p.H, 8) * 8
    var padded_O = ceildiv(p.O, 8) * 8
    var mojo = mojo_cost(p.rows, p.O, p.H).time * (UNALIGNED_OUTPUT_COST if padded_O != p.O else 1.0)
    mojo += 4 * Float64(p.O * p.H) / MOJO_COPY_BANDWIDTH if not aligned_H else 0.0
    var cublas = cublas_cost(p.rows, padded_O, padded_H).time + copy_time(padded_O, padded_H)
    cublas += copy_time(p.rows, p.O) if padded_O != p.O else 0.0
    var output = PADDED if cublas < PADDED_GAIN * mojo else MOJO
    var backward = mojo_cost(p.rows, p.H, p.O).time + mojo_cost(p.O, p.H, p.rows, may_split=True).time
    if not p.captured and mojo + backward < CPU_BOUND_US:
        output = MOJO
    var use_cublas = two_streams and p.rows <= MAX_UNALIGNED_ROWS and work <= MAX_UNALIGNED_WORK
    var gradients = CUBLAS if use_cublas else MOJO
    return Choice(output, gradients, gradients, two_streams)


def copy_time(rows: Int, columns: Int) -> Float64:
    """Return the microseconds of PyTorch's copy of a matrix with unaligned rows."""
    return LAUNCH_US + 4 * Float64(rows * columns) / COPY_BANDWIDTH


# ---- The result for C++ ------------------------------------------------------------------------------------


def pack_choice[wgmma: Bool, dtype: DType, x_dtype: DType](p: Problem) -> Int:
    """Return the choice in the bits that `harness/nn/host/layernorm_linear.cpp` reads: two for each of
    output, dln and dW, one for two streams, and above them the elements that the memory of dW needs if it
    first holds a copy of W with aligned rows.
    """
    var choice = choose[wgmma, dtype, x_dtype](p)
    var dW_elements = 0
    comptime if wgmma and dtype.is_half_float():
        if not (p.least_memory or has_aligned_width[dtype](p.H)):
            dW_elements = p.O * aligned_pitch[dtype](p.H)
    return choice.output | choice.dln << 2 | choice.dW << 4 | Int(choice.two_streams) << 6 | dW_elements << 8
