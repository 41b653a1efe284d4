"""The kernel of puzzle 28's steps 10 to 12: its blanks are functions in `fast.mojo`."""

from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group

from .fast import SEPARATE, add_up, bias_pair, copy_part, load_parts, multiply_by_warps

from .parts import (
    BF16, BUFFERS, LANES, LONG, WARPS, WIDE, SharedTile, Sums, launched_shared_memory, store_results,
)  # fmt: skip
from .shared.common import ImmPtr, MutPtr


@always_inline
def load_fragments[
    high: Int, a_turned: Bool, b_turned: Bool, half: Int, k: Int
](
    mut left: Array[SIMD[BF16, 8], 2 * high],
    mut right: Array[SIMD[BF16, 8], 6],
    a: SharedTile,
    b: SharedTile,
    row: Int,
    column: Int,
):
    """Load 16 elements of a warp's rows of a, as `mma` takes them, and of b, where a fragment serves two `mma`.
    """
    var lane = thread_idx.x % LANES
    var first = lane // 8 % 2 * 8
    var second = lane // 16 * 8
    comptime for i in range(high):
        left[half * high + i] = load_parts[a_turned, 32 * high](a, row + 16 * i + first, k + second)
    comptime for j in range(3):
        right[half * 3 + j] = load_parts[b_turned, WIDE](b, column + 16 * j + second, k + first)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * LANES)), `nvvm.minctasm`=SIMDLength(2)
)
def product_kernel[
    step: Int,
    high: Int = 4,
    a_turned: Bool = False,
    b_turned: Bool = False,
    biased: Bool = False,
    summed: Bool = False,
](
    output: MutPtr[BF16],  # [height, width]
    a_sums: MutPtr[BF16],  # [height], if `summed`
    a: ImmPtr[BF16],  # [height, depth], or [depth, height] if `a_turned`
    b: ImmPtr[BF16],  # [width, depth], or [depth, width] if `b_turned`
    bias: ImmPtr[BF16],  # [width], if `biased`
    height: Int32,
    width: Int32,
    depth: Int32,
):
    """`a @ b.T` on tensor cores. Copies as in step 9, but with BUFFERS tiles, all but one of them in flight.
    """
    comptime side = 32 * high
    var H = Int(height)
    var W = Int(width)
    var D = Int(depth)
    var lane = thread_idx.x % LANES
    var row = block_idx.y * side
    var column = block_idx.x * WIDE
    var a_tiles = launched_shared_memory()
    var b_tiles = a_tiles.unsafe_offset(BUFFERS * side * LONG)
    var totals = Array[Sums, 6 * high](fill=0)
    var row_sums = Array[Sums, high](fill=0)
    var warp_row = thread_idx.x // LANES // 2 * (16 * high)
    var warp_column = thread_idx.x // LANES % 2 * 48
    var sums_rows = block_idx.x == 0 and warp_column == 0
    comptime for tile in range(BUFFERS - 1):
        copy_part[a_turned, side](a_tiles.unsafe_offset(tile * side * LONG), a, row, tile * LONG, H, D)
        copy_part[b_turned, WIDE](b_tiles.unsafe_offset(tile * WIDE * LONG), b, column, tile * LONG, W, D)
        async_copy_commit_group()
    async_copy_wait_group(Int32(BUFFERS - 2))
    barrier()
    # The fragments of the next 16 elements are loaded before these are multiplied, also across the end of a tile.
    var left = Array[SIMD[BF16, 8], 2 * high](fill=0)
    var right = Array[SIMD[BF16, 8], 6](fill=0)
    comptime if step > 10:
        load_fragments[high, a_turned, b_turned, 0, 0](left, right, a_tiles, b_tiles, warp_row, warp_column)
    var now = 0
    var free = BUFFERS - 1
    for first in range(0, D, LONG):
        var next = first + (BUFFERS - 1) * LONG
        copy_part[a_turned, side](a_tiles.unsafe_offset(free * side * LONG), a, row, next, H, D)
        copy_part[b_turned, WIDE](b_tiles.unsafe_offset(free * WIDE * LONG), b, column, next, W, D)
        async_copy_commit_group()  # an empty one too, so that all are counted
        var left_tile = a_tiles.unsafe_offset(now * side * LONG)
        var right_tile = b_tiles.unsafe_offset(now * WIDE * LONG)
        free = now
        now = now + 1 if now + 1 < BUFFERS else 0
        comptime if step == 10:
            multiply_by_warps(rebind[Array[Sums, 24]](totals), left_tile, right_tile)
            async_copy_wait_group(Int32(BUFFERS - 2))
            barrier()
        else:
            comptime for k in range(0, LONG, 16):
                comptime half = k // 16 % 2
                comptime if k + 16 == LONG:
                    async_copy_wait_group(Int32(BUFFERS - 2))
                    barrier()
                    var there = now if first + LONG < D else free  # after the last tile any will do
                    left_tile = a_tiles.unsafe_offset(there * side * LONG)
                    right_tile = b_tiles.unsafe_offset(there * WIDE * LONG)
                load_fragments[high, a_turned, b_turned, 1 - half, (k + 16) % LONG](
                    left, right, left_tile, right_tile, warp_row, warp_column
                )
                comptime if summed:
                    if sums_rows:
                        comptime for i in range(high):
                            add_up(row_sums[i], left[half * high + i])
                comptime for j in range(3):
                    comptime for place in range(2 * high):
                        comptime block = place // 2 * 6 + 2 * j + place % 2
                        var pair = right[half * 3 + j].slice[4, offset=place % 2 * 4]()
                        var sums = totals[block]
                        mma(totals[block], left[half * high + place // 2], pair, sums)
    comptime if biased:
        comptime for j in range(6):
            var pair = bias_pair(bias, min(column + warp_column + 8 * j + lane % 4 * 2, W - 1), W)
            comptime for i in range(high):
                totals[6 * i + j] += pair.join(pair)
    if W % 4 == 0:
        store_results[high, True](output, totals, row + warp_row + lane // 4, column + warp_column, H, W)
    else:
        store_results[high, False](output, totals, row + warp_row + lane // 4, column + warp_column, H, W)
    comptime if summed and not SEPARATE:
        if sums_rows and lane % 4 == 0:
            comptime for place in range(2 * high):
                var here = row + warp_row + place * 8 + lane // 4
                if here < H:
                    a_sums[unsafe_offset=here] = row_sums[place // 2][place % 2 * 2].cast[BF16]()
