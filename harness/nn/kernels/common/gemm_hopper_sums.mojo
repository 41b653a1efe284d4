"""Side work of `gemm_hopper.mojo`: sums computed by the warps of the producer group that the product does not
need.
"""

from max.gpu import block_idx, grid_dim, syncwarp, thread_idx
from max.gpu.sync import named_barrier

from shared.common import ImmPtr, MutPtr
from .gemm_hopper_pipeline import BLOCK_K, BOX_BYTES, Pipeline, Schedule, Shared, PipelineState, release, wait

comptime SUM_WARPS = 2
"""Warps of the producer group that sum the columns of A: warps 1 and 2."""
comptime ADD_WARPS = 3
"""Warps of the producer group that add slices: warps 1 to 3."""


@always_inline
def sum_columns[
    dtype: DType, block_n: Int, split: Bool
](
    schedule: Schedule[split],
    memory: Shared[UInt8],
    full: Shared[Int64],
    empty: Shared[Int64],
    partials: MutPtr[DType.float32],  # [2 * tile rows, k]
    half: Int,
    k: Int,
):
    """Sum the columns of A over the 64 rows of half `half` of each tile, from the tiles in shared memory.
    Called by one warp.

    Blocks in different tile columns load the same tiles of A, so each sums its share of the steps. Lane l
    owns columns 2 l and 2 l + 1 of a step's 64. Rows past the end are zeros.
    """
    comptime pipeline = Pipeline[block_n]
    var lane = thread_idx.x % 32
    var state = PipelineState[pipeline.STAGES](0, 0)
    for index in range(schedule.count()):
        var tile = schedule.piece(index).tile.copy()
        var partial_row = partials.unsafe_offset((tile.row // 64 + half) * k)
        var next = tile.column // block_n
        for step in range(schedule.steps):
            wait(full.unsafe_offset(state.stage), state.parity)
            if step == next:
                next += Int(schedule.tile_columns)
                var rows = memory.unsafe_offset(state.stage * pipeline.STAGE_BYTES + half * BOX_BYTES)
                var sums = SIMD[DType.float32, 2](0)
                for first in range(0, 64, 16):
                    comptime for i in range(16):
                        # The swizzle: the index of a 16-byte unit is XORed with the row's index.
                        var chunk = (lane // 4) ^ (i % 8)
                        var source = rows.unsafe_offset((first + i) * 128 + chunk * 16 + lane % 4 * 4)
                        var two = source.unsafe_bitcast[Scalar[dtype]]().unsafe_load[width=2, alignment=4]()
                        sums += two.cast[DType.float32]()
                var column = step * BLOCK_K + 2 * lane
                comptime for i in range(2):
                    if column + i < k:
                        partial_row[unsafe_offset=column + i] = sums[i]
            syncwarp()
            release(empty, state.stage, lane)
            state.advance()


@always_inline
def add_slices[
    dtype: DType
](
    sums: MutPtr[dtype],
    more_sums: MutPtr[dtype],
    partials: ImmPtr[DType.float32],  # [slices, columns]
    slices: Int,
    columns: Int,
    first_columns: Int,
    warp_sums: Shared[Float32],  # [ADD_WARPS, 32]
):
    """Add the slices of every column; write the first columns to `sums`, the others to `more_sums`.

    A block adds 32 columns at a time; each of three warps adds every third slice.
    """
    comptime unroll = 8
    var warp = thread_idx.x // 32 - 1
    var lane = thread_idx.x % 32
    for first in range(block_idx.x * 32, columns, grid_dim.x * 32):
        var column = first + lane
        var totals = SIMD[DType.float32, unroll](0)
        if column < columns:
            var source = partials.unsafe_offset(warp * columns + column)
            var remaining = (slices - warp + ADD_WARPS - 1) // ADD_WARPS
            while remaining >= unroll:
                comptime for i in range(unroll):
                    totals[i] += source[]
                    source = source.unsafe_offset(ADD_WARPS * columns)
                remaining -= unroll
            while remaining > 0:
                totals[0] += source[]
                source = source.unsafe_offset(ADD_WARPS * columns)
                remaining -= 1
        warp_sums[unsafe_offset=warp * 32 + lane] = totals.reduce_add()
        named_barrier[Int32(32 * ADD_WARPS)](3)
        if warp == 0 and column < columns:
            var total = Float32(0)
            comptime for i in range(ADD_WARPS):
                total += warp_sums[unsafe_offset=i * 32 + lane]
            if column < first_columns:
                sums[unsafe_offset=column] = total.cast[dtype]()
            else:
                more_sums[unsafe_offset=column - first_columns] = total.cast[dtype]()
        named_barrier[Int32(32 * ADD_WARPS)](3)
