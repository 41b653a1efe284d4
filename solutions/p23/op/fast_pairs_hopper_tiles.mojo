"""What `fast_pairs_hopper.mojo` and `fast_pairs_hopper_keys.mojo` share: copies, products and sums of tiles of pairs.

A tile lies in memory as `wgmma` wants it, of each box the high half then the low half: one copy brings it, and no
tensor map is needed. A product of 64 x 64 by 64 x 64 is twelve instructions: four for low high, four for high low,
then four for high high.
"""

from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import lane_id
from max.gpu.compute.mma import WGMMADescriptor, wgmma_async
from max.gpu.host.nvidia.tma import TensorMapSwizzle

from .fast_hopper_tiles import BOX_BYTES, HALF, ROW_BYTES, Shared, multiply, settled, tile_descriptor
from .fast_pairs import HALF_TYPE, NUMBERS, SIDE, boxes_of
from .shared.common import ImmPtr, MutPtr

comptime PAIR_BYTES = 2 * BOX_BYTES
"""Both halves of a box."""
comptime STAGES = 2
comptime NUMBER_BYTES = NUMBERS * SIDE * 4
"""The numbers of a tile of queries."""


def tile_bytes[width: Int]() -> Int:
    """A tile of heads of up to `width` elements."""
    return boxes_of[width]() * PAIR_BYTES


def blocks_together[width: Int]() -> Int:
    """Blocks that share a multiprocessor."""
    return 2 if width <= SIDE else 1


comptime BoxSums[width: Int] = StaticTuple[HALF, boxes_of[width]()]
"""A lane's share of sums of 64 rows, box after box."""
comptime Fragments = StaticTuple[SIMD[HALF_TYPE, 8], SIDE // 16]
"""64 x 64 of float16 as left factor, in registers."""


# ---- Copies and products ------------------------------------------------------------------------------------


@always_inline
def send(target: Shared[UInt8], source: Int, bytes: Int, full: Shared[Int64]):
    """Sends for bytes from an address in global memory; both must be multiples of 16."""
    inlined_assembly[
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        NoneType,
        constraints="r,l,r,r,~{memory}",
        has_side_effect=True,
    ](Int32(Int(target)), Int64(source), Int32(bytes), Int32(Int(full)))


@always_inline
def send_tile[width: Int](target: Shared[UInt8], tiles: ImmPtr[HALF_TYPE], tile: Int, full: Shared[Int64]):
    """Sends for all of a tile."""
    comptime bytes = tile_bytes[width]()
    send(target, Int(tiles.unsafe_offset(tile * (bytes // 2))), bytes, full)


@always_inline
def along(half: Shared[UInt8]) -> WGMMADescriptor[HALF_TYPE]:
    """Half a tile whose rows run along the summands."""
    return WGMMADescriptor[HALF_TYPE].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
        half.unsafe_bitcast[Scalar[HALF_TYPE]]()
    )


@always_inline
def times_pair[width: Int](own: Shared[UInt8], other: Shared[UInt8]) -> HALF:
    """Enqueues own @ other^T of two tiles, the small products first."""
    var sums = HALF(0)
    comptime for term in range(3):
        comptime for box in range(boxes_of[width]()):
            var left = along(own.unsafe_offset(box * PAIR_BYTES + (BOX_BYTES if term == 0 else 0)))
            var right = along(other.unsafe_offset(box * PAIR_BYTES + (BOX_BYTES if term == 1 else 0)))
            comptime for k in range(min(SIDE, width - box * SIDE) // 16):
                sums = wgmma_async[
                    64,
                    64,
                    16,
                    a_type=HALF_TYPE,
                    b_type=HALF_TYPE,
                    layout_a="row",
                    layout_b="col",
                    scale_d=0 if term == 0 and box == 0 and k == 0 else 1,
                ](left + k * 32, right + k * 32, sums)
    return sums


@always_inline
def product_of_box[box: Int](high: Fragments, low: Fragments, tile: Shared[UInt8]) -> HALF:
    """Enqueues left @ right of a factor in registers and a box of a tile, the small products first."""
    var right_high = tile_descriptor(tile.unsafe_offset(box * PAIR_BYTES), BOX_BYTES // 16)
    var right_low = tile_descriptor(tile.unsafe_offset(box * PAIR_BYTES + BOX_BYTES), BOX_BYTES // 16)
    var sums = multiply[False, fresh=True](low[0], right_high, HALF(0))
    comptime for k in range(1, SIDE // 16):
        sums = multiply[False](low[k], right_high + Int64(k * ROW_BYTES), sums)
    comptime for k in range(SIDE // 16):
        sums = multiply[False](high[k], right_low + Int64(k * ROW_BYTES), sums)
    comptime for k in range(SIDE // 16):
        sums = multiply[False](high[k], right_high + Int64(k * ROW_BYTES), sums)
    return sums


@always_inline
def product_of_pairs[width: Int](high: Fragments, low: Fragments, right: Shared[UInt8]) -> BoxSums[width]:
    """`product_of_box`, for all of them."""
    var all = BoxSums[width]()
    comptime for box in range(boxes_of[width]()):
        all[box] = product_of_box[box](high, low, right)
    return all


@always_inline
def add_part(mut sums: HALF, part: HALF, before: StaticTuple[Float32, 2]):
    """Sums = sums * before + part, of what has arrived; `before` by row."""
    var here = part
    settled(here)
    comptime for i in range(32):
        sums[i] = sums[i] * before[i // 2 % 2] + here[i]


@always_inline
def add_scaled[width: Int](mut sums: BoxSums[width], part: BoxSums[width], factor: Float32):
    """Sums += part * factor, of what has arrived."""
    comptime for box in range(boxes_of[width]()):
        var whole = sums[box]
        var here = part[box]
        settled(here)
        comptime for i in range(32):
            whole[i] = here[i] * factor + whole[i]
        sums[box] = whole


@always_inline
def split(sums: HALF, mut high: Fragments, mut low: Fragments):
    """Sums as left factor."""
    comptime for k in range(SIDE // 16):
        var whole = sums.slice[8, offset=8 * k]()
        high[k] = whole.cast[HALF_TYPE]()
        low[k] = (whole - high[k].cast[DType.float32]()).cast[HALF_TYPE]()


@always_inline
def place_of(i: Int, first: Int) -> Int:
    """The row that a lane's sum number i belongs to, where its warp's rows begin at `first`."""
    return first + i // 2 % 2 * 8 + lane_id() // 4


@always_inline
def column_of(i: Int) -> Int:
    """The column that a lane's sum number i belongs to."""
    return i // 4 * 8 + lane_id() % 4 * 2 + i % 2


@always_inline
def store_pairs[
    width: Int
](
    target: MutPtr[DType.float32],
    sums: BoxSums[width],
    factors: StaticTuple[Float32, 2],
    first: Int,
    count: Int,
    d: Int,
):
    """Writes a warp's sums to rows `first` ... of a matrix [count, d], each row times its own factor."""
    var whole = d % 2 == 0 and Int(target) % 8 == 0
    comptime for half in range(2):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            comptime for j in range(width // 8):
                var column = j * 8 + lane_id() % 4 * 2
                comptime i = j % (SIDE // 8) * 4 + 2 * half
                var of_box = sums[j // (SIDE // 8)]
                var pair = SIMD[DType.float32, 2](of_box[i], of_box[i + 1]) * factors[half]
                if whole:
                    if column < d:
                        target.unsafe_store[alignment=8](row * d + column, pair)
                else:
                    comptime for e in range(2):
                        if column + e < d:
                            target[unsafe_offset=row * d + column + e] = pair[e]
