"""The kernel of puzzle 28's steps 10 to 12: its blanks are functions in `fast.mojo`."""

from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group

from .fast import (
    SEPARATE_LAUNCHES,
    add_to_row_sums,
    load_bias_pair,
    copy_operand,
    load_matrices,
    multiply_with_mma,
)

from .parts import (
    BF16, BUFFERS, LANES, TENSOR_DEPTH, WARPS, BLOCK_COLUMNS, SharedTile, Sums, dynamic_shared_memory, store_results,
)  # fmt: skip
from .shared.common import ImmPtr, MutPtr


@always_inline
def load_fragments[
    row_blocks: Int, a_transposed: Bool, b_transposed: Bool, half: Int, k: Int
](
    mut left: Array[SIMD[BF16, 8], 2 * row_blocks],
    mut right: Array[SIMD[BF16, 8], 6],
    a: SharedTile,
    b: SharedTile,
    row: Int,
    column: Int,
):
    """Load the fragments of 16 elements of k: of a warp's rows of a, and of b, where one serves two `mma`."""
    var lane = thread_idx.x % LANES
    var first = lane // 8 % 2 * 8
    var second = lane // 16 * 8
    comptime for i in range(row_blocks):
        left[half * row_blocks + i] = load_matrices[a_transposed, 32 * row_blocks](
            a, row + 16 * i + first, k + second
        )
    comptime for j in range(3):
        right[half * 3 + j] = load_matrices[b_transposed, BLOCK_COLUMNS](
            b, column + 16 * j + second, k + first
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * LANES)), `nvvm.minctasm`=SIMDLength(2)
)
def product_kernel[
    step: Int,
    row_blocks: Int = 4,
    a_transposed: Bool = False,
    b_transposed: Bool = False,
    has_bias: Bool = False,
    has_sums: Bool = False,
](
    output: MutPtr[BF16],  # [height, width]
    a_sums: MutPtr[BF16],  # [height], if `has_sums`
    a: ImmPtr[BF16],  # [height, depth], or [depth, height] if `a_transposed`
    b: ImmPtr[BF16],  # [width, depth], or [depth, width] if `b_transposed`
    bias: ImmPtr[BF16],  # [width], if `has_bias`
    height: Int32,
    width: Int32,
    depth: Int32,
):
    """Compute `a @ b.T` on tensor cores, with copies as in step 9, BUFFERS tiles, all but one in flight."""
    comptime side = 32 * row_blocks
    var H = Int(height)
    var W = Int(width)
    var D = Int(depth)
    var lane = thread_idx.x % LANES
    var row = block_idx.y * side
    var column = block_idx.x * BLOCK_COLUMNS
    var a_tiles = dynamic_shared_memory()
    var b_tiles = a_tiles.unsafe_offset(BUFFERS * side * TENSOR_DEPTH)
    var totals = Array[Sums, 6 * row_blocks](fill=0)
    var row_sums = Array[Sums, row_blocks](fill=0)
    var warp_row = thread_idx.x // LANES // 2 * (16 * row_blocks)
    var warp_column = thread_idx.x // LANES % 2 * 48
    var adds_sums = block_idx.x == 0 and warp_column == 0
    comptime for tile in range(BUFFERS - 1):
        copy_operand[a_transposed, side](
            a_tiles.unsafe_offset(tile * side * TENSOR_DEPTH), a, row, tile * TENSOR_DEPTH, H, D
        )
        copy_operand[b_transposed, BLOCK_COLUMNS](
            b_tiles.unsafe_offset(tile * BLOCK_COLUMNS * TENSOR_DEPTH), b, column, tile * TENSOR_DEPTH, W, D
        )
        async_copy_commit_group()
    async_copy_wait_group(Int32(BUFFERS - 2))
    barrier()
    # The fragments of the next 16 elements are loaded before these are multiplied, also across the end of a tile.
    var left = Array[SIMD[BF16, 8], 2 * row_blocks](fill=0)
    var right = Array[SIMD[BF16, 8], 6](fill=0)
    comptime if step > 10:
        load_fragments[row_blocks, a_transposed, b_transposed, 0, 0](
            left, right, a_tiles, b_tiles, warp_row, warp_column
        )
    var current = 0
    var free_buffer = BUFFERS - 1
    for first in range(0, D, TENSOR_DEPTH):
        var next = first + (BUFFERS - 1) * TENSOR_DEPTH
        copy_operand[a_transposed, side](
            a_tiles.unsafe_offset(free_buffer * side * TENSOR_DEPTH), a, row, next, H, D
        )
        copy_operand[b_transposed, BLOCK_COLUMNS](
            b_tiles.unsafe_offset(free_buffer * BLOCK_COLUMNS * TENSOR_DEPTH), b, column, next, W, D
        )
        async_copy_commit_group()  # also an empty group, so that each step commits one
        var left_tile = a_tiles.unsafe_offset(current * side * TENSOR_DEPTH)
        var right_tile = b_tiles.unsafe_offset(current * BLOCK_COLUMNS * TENSOR_DEPTH)
        free_buffer = current
        current = current + 1 if current + 1 < BUFFERS else 0
        comptime if step == 10:
            multiply_with_mma(rebind[Array[Sums, 24]](totals), left_tile, right_tile)
            async_copy_wait_group(Int32(BUFFERS - 2))
            barrier()
        else:
            comptime for k in range(0, TENSOR_DEPTH, 16):
                comptime half = k // 16 % 2
                comptime if k + 16 == TENSOR_DEPTH:
                    async_copy_wait_group(Int32(BUFFERS - 2))
                    barrier()
                    var next_tile = (
                        current if first + TENSOR_DEPTH < D else free_buffer
                    )  # unused after the last tile
                    left_tile = a_tiles.unsafe_offset(next_tile * side * TENSOR_DEPTH)
                    right_tile = b_tiles.unsafe_offset(next_tile * BLOCK_COLUMNS * TENSOR_DEPTH)
                load_fragments[row_blocks, a_transposed, b_transposed, 1 - half, (k + 16) % TENSOR_DEPTH](
                    left, right, left_tile, right_tile, warp_row, warp_column
                )
                comptime if has_sums:
                    if adds_sums:
                        comptime for i in range(row_blocks):
                            add_to_row_sums(row_sums[i], left[half * row_blocks + i])
                comptime for j in range(3):
                    comptime for part in range(2 * row_blocks):
                        comptime block = part // 2 * 6 + 2 * j + part % 2
                        var pair = right[half * 3 + j].slice[4, offset=part % 2 * 4]()
                        var sums = totals[block]
                        mma(totals[block], left[half * row_blocks + part // 2], pair, sums)
    comptime if has_bias:
        comptime for j in range(6):
            var pair = load_bias_pair(bias, min(column + warp_column + 8 * j + lane % 4 * 2, W - 1), W)
            comptime for i in range(row_blocks):
                totals[6 * i + j] += pair.join(pair)
    if W % 4 == 0:
        store_results[row_blocks, True](
            output, totals, row + warp_row + lane // 4, column + warp_column, H, W
        )
    else:
        store_results[row_blocks, False](
            output, totals, row + warp_row + lane // 4, column + warp_column, H, W
        )
    comptime if has_sums and not SEPARATE_LAUNCHES:
        if adds_sums and lane % 4 == 0:
            comptime for part in range(2 * row_blocks):
                var result_row = row + warp_row + part * 8 + lane // 4
                if result_row < H:
                    a_sums[unsafe_offset=result_row] = row_sums[part // 2][part % 2 * 2].cast[BF16]()
