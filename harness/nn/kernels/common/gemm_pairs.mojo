"""Products of float32 matrices on Hopper's float16 tensor cores (sm_90a), with about the error of float32.

A matrix x is split into two float16 matrices, high = round(s x) and low = round(s x - high), where s is a
power of two that brings its largest element to at least 2^14. Together they keep 22 bits. The product of two
such matrices is

    high low + low high + high high

The omitted term, low low, is below the rounding error of float32. Tensor cores truncate when they accumulate;
over many terms that would cost more than a decimal digit. So they accumulate CHUNK_STEPS steps at a time, and
ordinary float32 additions sum the chunks. The truncation within a chunk is the largest remaining error.
Splitting: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the
FP32 theoretical peak performance", 2022.

If a factor contains an infinity or a NaN, simple loops compute the product instead, because low would turn
infinities into NaN.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.compute.mma import wgmma_wait_group_sync
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.primitives import block
from max.gpu.sync import mbarrier_arrive_expect_tx_shared, mbarrier_init
from std.memory import AddressSpace

from shared.common import ImmPtr, MutPtr, multiprocessors, launch_dependent_grids, wait_on_dependent_grids
from .gemm_hopper import load, multiply
from .gemm_hopper_launches import TILE_COST
from .gemm_hopper_pipeline import (
    BLOCK_K,
    BLOCK_M,
    BOX_BYTES,
    GROUP_THREADS,
    SHARED_BYTES,
    THREADS,
    Descriptor,
    Schedule,
    Shared,
    PipelineState,
    release,
    wait,
)
from .tensor_maps import tensor_map
from shared.launcher import Launcher

comptime TILE_WIDTHS = [128, 192]
"""Supported tile widths; wider tiles would not fit in registers, since a thread keeps two sums per element.
"""
comptime CHUNK_STEPS = 1
"""Steps of BLOCK_K terms that the tensor cores accumulate before a float32 addition."""
comptime LARGEST_EXPONENT = 14
"""The exponent of the largest element after scaling."""
comptime SPLIT_THREADS = 256
"""Threads per block of the two kernels that split a matrix."""
comptime SPLIT_BLOCKS = 4
"""Blocks per multiprocessor of the two kernels that split a matrix."""
comptime SPLIT_WIDTH = 8
"""Elements that a thread splits at a time."""
comptime EXPONENT_BITS = UInt32(0x7F800000)
"""The exponent bits of float32; all are set in an infinity or NaN."""


@fieldwise_init
struct SplitMatrix(Copyable, Movable):
    """A float32 matrix split into two float16 matrices. `scale` [2] holds the inverse of their scale, and 0
    if all elements are finite.
    """

    @__allow_legacy_any_origin_fields
    var high: ImmPtr[DType.float16]

    @__allow_legacy_any_origin_fields
    var low: ImmPtr[DType.float16]

    @__allow_legacy_any_origin_fields
    var scale: ImmPtr[DType.float32]


struct Pipeline[block_n: Int]:
    """The layout of shared memory for tiles of `block_n` columns; offsets in bytes. A stage holds both halves
    of the first factor's rows, then of the second's columns, BLOCK_K deep.
    """

    comptime A_BYTES = BLOCK_M * BLOCK_K * 2
    comptime B_BYTES = Self.block_n * BLOCK_K * 2
    comptime STAGE_BYTES = 2 * (Self.A_BYTES + Self.B_BYTES)
    comptime STAGES = SHARED_BYTES // Self.STAGE_BYTES
    comptime FULL = Self.STAGES * Self.STAGE_BYTES
    comptime EMPTY = Self.FULL + Self.STAGES * 8
    comptime BYTES = Self.EMPTY + Self.STAGES * 8


# ---- Splitting ----------------------------------------------------------------------------------------------


@__name("largest_elements")
def largest_elements(
    partials: MutPtr[
        DType.float32
    ],  # [2, blocks]: the largest finite |x|, and 1 if any element is not finite
    x: ImmPtr[DType.float32],  # [count], count a multiple of SPLIT_WIDTH
    count: Int64,
):
    """Compute the first stage of a matrix's scale: the maximum of each block's share."""
    wait_on_dependent_grids()
    launch_dependent_grids()
    var largest = Float32(0)
    var nonfinite = Float32(0)
    var first = (block_idx.x * SPLIT_THREADS + thread_idx.x) * SPLIT_WIDTH
    for i in range(first, Int(count), grid_dim.x * SPLIT_THREADS * SPLIT_WIDTH):
        var values = abs(x.unsafe_load[width=SPLIT_WIDTH, alignment=16](i))
        comptime for j in range(SPLIT_WIDTH):
            if bitcast[DType.uint32, 1](values[j]) < EXPONENT_BITS:
                largest = max(largest, values[j])
            else:
                nonfinite = 1
    largest = block.max[block_size=SPLIT_THREADS](largest)
    barrier()
    nonfinite = block.max[block_size=SPLIT_THREADS](nonfinite)
    if thread_idx.x == 0:
        partials[unsafe_offset=block_idx.x] = largest
        partials[unsafe_offset=grid_dim.x + block_idx.x] = nonfinite


@__name("split_float32")
def split_pairs(
    high: MutPtr[DType.float16],  # [count]
    low: MutPtr[DType.float16],  # [count]
    scale: MutPtr[DType.float32],  # [2]
    partials: ImmPtr[DType.float32],  # [2, blocks] of `largest_elements`, launched with as many blocks
    x: ImmPtr[DType.float32],  # [count]
    count: Int64,
):
    """Compute the scale in every block from the partial maxima, and split the block's share. low is 0 where
    high is not finite.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var largest = Float32(0)
    var nonfinite = Float32(0)
    for i in range(thread_idx.x, grid_dim.x, SPLIT_THREADS):
        largest = max(largest, partials[unsafe_offset=i])
        nonfinite = max(nonfinite, partials[unsafe_offset=grid_dim.x + i])
    largest = block.max[block_size=SPLIT_THREADS](largest)
    barrier()
    nonfinite = block.max[block_size=SPLIT_THREADS](nonfinite)
    var exponent = Int32(bitcast[DType.uint32, 1](largest) >> 23) - 127
    var shift = min(LARGEST_EXPONENT - exponent, Int32(126))
    if largest == 0:
        shift = 0
    var factor = bitcast[DType.float32, 1](UInt32(shift + 127) << 23)
    if block_idx.x == 0 and thread_idx.x == 0:
        scale[unsafe_offset=0] = bitcast[DType.float32, 1](UInt32(127 - shift) << 23)
        scale[unsafe_offset=1] = nonfinite
    var first = (block_idx.x * SPLIT_THREADS + thread_idx.x) * SPLIT_WIDTH
    for i in range(first, Int(count), grid_dim.x * SPLIT_THREADS * SPLIT_WIDTH):
        var scaled = x.unsafe_load[width=SPLIT_WIDTH, alignment=16](i) * factor
        var high_part = scaled.cast[DType.float16]()
        var remainder = scaled - high_part.cast[DType.float32]()
        comptime for j in range(SPLIT_WIDTH):
            if bitcast[DType.uint32, 1](abs(scaled[j])) >= EXPONENT_BITS:
                remainder[j] = 0
        high.unsafe_store[alignment=16](i, high_part)
        low.unsafe_store[alignment=16](i, remainder.cast[DType.float16]())


def launch_split[
    L: Launcher, //
](mut launcher: L, x: ImmPtr[DType.float32], count: Int) raises -> SplitMatrix:
    """Launch two kernels that split a float32 matrix of `count` elements, a multiple of SPLIT_WIDTH, into
    workspace. No-op for an empty matrix.
    """
    var high = launcher.workspace[DType.float16]("high", count)
    var low = launcher.workspace[DType.float16]("low", count)
    var scale = launcher.workspace[DType.float32]("scale", 2)
    var blocks = min(SPLIT_BLOCKS * multiprocessors(), ceildiv(count, SPLIT_THREADS * SPLIT_WIDTH))
    var partials = launcher.workspace[DType.float32]("largest", 2 * blocks)
    if count == 0:
        return SplitMatrix(high.as_imm(), low.as_imm(), scale.as_imm())
    launcher.launch[largest_elements](
        "largest_elements",
        partials,
        x,
        Int64(count),
        grid_dim=Dim(blocks),
        block_dim=Dim(SPLIT_THREADS),
        early=True,
    )
    launcher.launch[split_pairs](
        "split_pairs",
        high,
        low,
        scale,
        partials.as_imm(),
        x,
        Int64(count),
        grid_dim=Dim(blocks),
        block_dim=Dim(SPLIT_THREADS),
        early=True,
    )
    return SplitMatrix(high.as_imm(), low.as_imm(), scale.as_imm())


# ---- The product --------------------------------------------------------------------------------------------


@__name("gemm_split_float32")
@__llvm_arg_metadata(a_high_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(a_low_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_high_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(b_low_map, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def gemm_pairs_kernel[
    block_n: Int, operands: StaticString, with_bias: Bool
](
    a_high_map: TMADescriptor,
    a_low_map: TMADescriptor,
    b_high_map: TMADescriptor,
    b_low_map: TMADescriptor,
    c: MutPtr[DType.float32],  # [m, n]
    bias: ImmPtr[DType.float32],  # [n], read if with_bias
    a_high: ImmPtr[DType.float16],
    a_low: ImmPtr[DType.float16],
    a_scale: ImmPtr[DType.float32],  # [2]
    b_high: ImmPtr[DType.float16],
    b_low: ImmPtr[DType.float16],
    b_scale: ImmPtr[DType.float32],  # [2]
    m: Int32,
    n: Int32,
    k: Int32,
):
    """Compute C = A B from split matrices, plus the bias of each column if with_bias. Grid: at most one block
    per multiprocessor.

    A block's warps have the same roles as in `gemm_hopper_kernel`. A stage holds both halves of both factors,
    and a step computes three products.
    """
    comptime pipeline = Pipeline[block_n]
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var full = memory.unsafe_offset(pipeline.FULL).unsafe_bitcast[Int64]()
    var empty = memory.unsafe_offset(pipeline.EMPTY).unsafe_bitcast[Int64]()
    if thread_idx.x == 0:
        comptime for stage in range(pipeline.STAGES):
            mbarrier_init(full.unsafe_offset(stage), 1)
            mbarrier_init(empty.unsafe_offset(stage), 2)
        fence_mbarrier_init()
    barrier()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var a_factor = a_scale[unsafe_offset=0]
    var b_factor = b_scale[unsafe_offset=0]
    if a_scale[unsafe_offset=1] != 0 or b_scale[unsafe_offset=1] != 0:
        multiply_with_loops[operands, with_bias](
            c, bias, a_high, a_low, b_high, b_low, a_factor, b_factor, Int(m), Int(n), Int(k)
        )
        return

    var schedule = Schedule[False](m, n, k, block_n)
    if thread_idx.x < GROUP_THREADS:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            produce[block_n, operands](
                schedule,
                memory,
                full,
                empty,
                Pointer(to=a_high_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
                Pointer(to=a_low_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
                Pointer(to=b_high_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
                Pointer(to=b_low_map).unsafe_bitcast[NoneType]().as_unsafe_any_origin(),
            )
    else:
        warpgroup_reg_alloc[240]()
        consume[block_n, operands, with_bias](
            schedule, memory, full, empty, c, bias, a_factor, b_factor, Int(m), Int(n)
        )


@always_inline
def produce[
    block_n: Int, operands: StaticString
](
    schedule: Schedule[False],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    a_high_map: Descriptor,
    a_low_map: Descriptor,
    b_high_map: Descriptor,
    b_low_map: Descriptor,
):
    """Keep the pipeline full; see `gemm_hopper.mojo`."""
    comptime a_along_k = operands != "tn"
    comptime b_along_k = operands == "nt"
    comptime pipeline = Pipeline[block_n]
    var state = PipelineState[pipeline.STAGES](0, 1)
    for index in range(schedule.count()):
        var tile = schedule.piece(index).tile.copy()
        for step in range(schedule.steps):
            wait(empty.unsafe_offset(state.stage), state.parity)
            var full_barrier = full.unsafe_offset(state.stage)
            mbarrier_arrive_expect_tx_shared(full_barrier, Int32(pipeline.STAGE_BYTES))
            var stage = memory.unsafe_offset(state.stage * pipeline.STAGE_BYTES)
            var k = step * BLOCK_K
            load[a_along_k, BLOCK_M](stage, a_high_map, full_barrier, tile.row, k)
            load[a_along_k, BLOCK_M](
                stage.unsafe_offset(pipeline.A_BYTES), a_low_map, full_barrier, tile.row, k
            )
            var columns = stage.unsafe_offset(2 * pipeline.A_BYTES)
            load[b_along_k, block_n](columns, b_high_map, full_barrier, tile.column, k)
            load[b_along_k, block_n](
                columns.unsafe_offset(pipeline.B_BYTES), b_low_map, full_barrier, tile.column, k
            )
            state.advance()


@always_inline
def consume[
    block_n: Int, operands: StaticString, with_bias: Bool
](
    schedule: Schedule[False],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    c: MutPtr[DType.float32],
    bias: ImmPtr[DType.float32],
    a_factor: Float32,
    b_factor: Float32,
    m: Int,
    n: Int,
):
    """Compute and store 64 rows of every tile."""
    comptime pipeline = Pipeline[block_n]
    var consumer = thread_idx.x // GROUP_THREADS - 1
    var thread = thread_idx.x % GROUP_THREADS
    var lane = thread % 32
    var a_tiles = memory.unsafe_offset(consumer * BOX_BYTES)
    var b_tiles = memory.unsafe_offset(2 * pipeline.A_BYTES)
    var state = PipelineState[pipeline.STAGES](0, 0)
    for index in range(schedule.count()):
        var tile = schedule.piece(index).tile.copy()
        var totals = StaticTuple[Float32, block_n // 2](fill=0)
        var step = 0
        while step < schedule.steps:
            var last = min(step + CHUNK_STEPS, schedule.steps)
            wait(full.unsafe_offset(state.stage), state.parity)
            var sums = multiply_halves[block_n, operands, True](
                a_tiles, b_tiles, state.stage, StaticTuple[Float32, block_n // 2]()
            )
            var reading_stage = state.stage
            state.advance()
            for _ in range(step + 1, last):
                wait(full.unsafe_offset(state.stage), state.parity)
                sums = multiply_halves[block_n, operands, False](a_tiles, b_tiles, state.stage, sums)
                # Wait for all products but the three just issued.
                wgmma_wait_group_sync[3]()
                release(empty, reading_stage, thread)
                reading_stage = state.stage
                state.advance()
            wgmma_wait_group_sync[0]()
            release(empty, reading_stage, thread)
            comptime for i in range(block_n // 2):
                totals[i] = totals[i] + hide_register(sums[i])
            step = last

        # Thread t holds row r = 16 (t / 32) + t % 32 / 4 and row r + 8; in every 8 columns, columns 2 (t % 4)
        # and 2 (t % 4) + 1.
        var row = tile.row + consumer * 64 + thread // 32 * 16 + lane // 4
        comptime for group in range(block_n // 8):
            var column = tile.column + group * 8 + lane % 4 * 2
            if column < n:
                var two_biases = SIMD[DType.float32, 2](0)
                comptime if with_bias:
                    two_biases = bias.unsafe_load[width=2, alignment=8](column)
                comptime for half in range(2):
                    if row + 8 * half < m:
                        var two = SIMD[DType.float32, 2](
                            totals[4 * group + 2 * half], totals[4 * group + 2 * half + 1]
                        )
                        c.unsafe_store[alignment=8](
                            (row + 8 * half) * n + column, two * a_factor * b_factor + two_biases
                        )


@always_inline
def multiply_halves[
    block_n: Int, operands: StaticString, first: Bool
](
    a: Shared[UInt8],
    b: Shared[UInt8],
    stage: Int,
    sums: StaticTuple[Float32, block_n // 2],
) -> StaticTuple[
    Float32, block_n // 2
]:
    """Issue the three products of a step, smallest terms first."""
    comptime pipeline = Pipeline[block_n]
    var a_high = a.unsafe_offset(stage * pipeline.STAGE_BYTES)
    var b_high = b.unsafe_offset(stage * pipeline.STAGE_BYTES)
    var a_low = a_high.unsafe_offset(pipeline.A_BYTES)
    var b_low = b_high.unsafe_offset(pipeline.B_BYTES)
    var result = multiply[DType.float16, block_n, operands, first](a_low, b_high, sums)
    result = multiply[DType.float16, block_n, operands, False](a_high, b_low, result)
    return multiply[DType.float16, block_n, operands, False](a_high, b_high, result)


@always_inline
def hide_register(value: Float32) -> Float32:
    """Return the value through a register copy, which keeps the compiler from reading it before the last
    wait.
    """
    return inlined_assembly["", Float32, constraints="=f,0", has_side_effect=True](value)


@always_inline
def multiply_with_loops[
    operands: StaticString, with_bias: Bool
](
    c: MutPtr[DType.float32],
    bias: ImmPtr[DType.float32],
    a_high: ImmPtr[DType.float16],
    a_low: ImmPtr[DType.float16],
    b_high: ImmPtr[DType.float16],
    b_low: ImmPtr[DType.float16],
    a_factor: Float32,
    b_factor: Float32,
    m: Int,
    n: Int,
    k: Int,
):
    """Compute the product with simple loops, which propagate infinities and NaN as float32 arithmetic does.
    """
    var a_row = 1 if operands == "tn" else k
    var a_step = m if operands == "tn" else 1
    var b_column = k if operands == "nt" else 1
    var b_step = 1 if operands == "nt" else n
    for index in range(block_idx.x * block_dim.x + thread_idx.x, m * n, grid_dim.x * block_dim.x):
        var a = index // n * a_row
        var b = index % n * b_column
        var total = Float32(0)
        for _ in range(k):
            var x = (
                a_high[unsafe_offset=a].cast[DType.float32]() + a_low[unsafe_offset=a].cast[DType.float32]()
            )
            var y = (
                b_high[unsafe_offset=b].cast[DType.float32]() + b_low[unsafe_offset=b].cast[DType.float32]()
            )
            total = (x * a_factor).fma(y * b_factor, total)
            a += a_step
            b += b_step
        comptime if with_bias:
            total += bias[unsafe_offset=index % n]
        c[unsafe_offset=index] = total


def choose_tile_width(m: Int, n: Int, k: Int) -> Int:
    """Return the tile width that minimizes the work of the busiest block, estimated as in `plan_tiles` with
    three products per step.
    """
    var chosen = 0
    var lowest_cost = Int.MAX
    comptime for columns in TILE_WIDTHS:
        var rounds = ceildiv(ceildiv(m, BLOCK_M) * ceildiv(n, columns), multiprocessors())
        var cost = rounds * (3 * ceildiv(k, BLOCK_K) * columns + TILE_COST)
        if cost < lowest_cost:
            chosen = columns
            lowest_cost = cost
    return chosen


def launch_gemm_pairs[
    L: Launcher, //, operands: StaticString, with_bias: Bool
](
    mut launcher: L,
    name: StaticString,
    c: MutPtr[DType.float32],
    a: SplitMatrix,
    b: SplitMatrix,
    bias: ImmPtr[DType.float32],
    m: Int32,
    n: Int32,
    k: Int32,
) raises:
    """Launch c = a b, plus the bias of each column if with_bias; see `launch_gemm` for the operands."""
    var ctx = launcher.context()
    if not ctx:
        return
    comptime a_along_k = operands != "tn"
    comptime b_along_k = operands == "nt"
    comptime a_box = BLOCK_M if a_along_k else BLOCK_K
    var a_height, a_width = (Int(m), Int(k)) if a_along_k else (Int(k), Int(m))
    var b_height, b_width = (Int(n), Int(k)) if b_along_k else (Int(k), Int(n))
    var chosen = choose_tile_width(Int(m), Int(n), Int(k))
    comptime for block_n in TILE_WIDTHS:
        if chosen != block_n:
            continue
        comptime b_box = block_n if b_along_k else BLOCK_K
        var tiles = ceildiv(Int(m), BLOCK_M) * ceildiv(Int(n), block_n)
        launcher.launch[gemm_pairs_kernel[block_n, operands, with_bias]](
            name,
            tensor_map[DType.float16, a_box](ctx.value(), a.high, a_height, a_width),
            tensor_map[DType.float16, a_box](ctx.value(), a.low, a_height, a_width),
            tensor_map[DType.float16, b_box](ctx.value(), b.high, b_height, b_width),
            tensor_map[DType.float16, b_box](ctx.value(), b.low, b_height, b_width),
            c,
            bias,
            a.high,
            a.low,
            a.scale,
            b.high,
            b.low,
            b.scale,
            m,
            n,
            k,
            grid_dim=Dim(min(multiprocessors(), tiles)),
            block_dim=Dim(THREADS),
            shared_bytes=Pipeline[block_n].BYTES,
            early=True,
        )
