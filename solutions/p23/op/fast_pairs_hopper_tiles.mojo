"""What `fast_pairs_hopper.mojo` and `fast_pairs_hopper_keys.mojo` share: copies, products and sums of tiles of pairs.

A tile lies in memory as `wgmma` wants it, of each box the high half then the low half: one copy brings it, and no
tensor map is needed. A product of 64 x 64 by 64 x 64 is twelve instructions: four for low high, four for high low,
then four for high high.
"""

from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import lane_id
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)

from .fast_hopper_tiles import BOX_BYTES, HALF, ROW_BYTES, Shared, multiply, settled
from .fast_pairs import HALF_TYPE, NUMBERS, SIDE, boxes_of
from .fast_pairs_products import mask_element
from .flash_tensors import FlashSizes
from .shared.common import ImmPtr, MutPtr

comptime PAIR_BYTES = 2 * BOX_BYTES
"""Both halves of a box."""
comptime STAGES = 2
comptime NUMBER_BYTES = NUMBERS * SIDE * 4
"""The numbers of a tile of queries."""


def tile_bytes[width: Int]() -> Int:
    """A tile of heads of up to `width` elements."""
    return boxes_of[width]() * PAIR_BYTES


def step_rows[width: Int]() -> Int:
    """Rows of the other side that a step takes: half a tile where a whole one would be too large;"""
    return SIDE if width <= 2 * SIDE else SIDE // 2


def step_bytes[width: Int]() -> Int:
    """these."""
    return tile_bytes[width]() * step_rows[width]() // SIDE


def later_stages[width: Int]() -> Int:
    """Stages, in a backward pass, of the rows that a step wants last."""
    return STAGES if width <= 2 * SIDE else 1


def blocks_together[width: Int]() -> Int:
    """Blocks that share a multiprocessor."""
    return 2 if width <= SIDE else 1


comptime BoxSums[width: Int] = StaticTuple[HALF, boxes_of[width]()]
"""A lane's share of sums of 64 rows, box after box."""
comptime Scores[width: Int] = SIMD[DType.float32, step_rows[width]() // 2]
"""A lane's share of the scores of 64 rows and those of a step."""
comptime Fragments[width: Int] = StaticTuple[SIMD[HALF_TYPE, 8], step_rows[width]() // 16]
"""They as left factor, of float16, in registers."""


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
def send_step[width: Int](target: Shared[UInt8], tiles: ImmPtr[HALF_TYPE], step: Int, full: Shared[Int64]):
    """Sends for the rows of a step: a tile, or of each half of its boxes a part."""
    comptime rows = step_rows[width]()
    comptime if rows == SIDE:
        send_tile[width](target, tiles, step, full)
    else:
        comptime bytes = rows * ROW_BYTES
        var source = Int(tiles) + step * rows // SIDE * tile_bytes[width]() + step * rows % SIDE * ROW_BYTES
        comptime for half in range(2 * boxes_of[width]()):
            send(target.unsafe_offset(half * bytes), source + half * BOX_BYTES, bytes, full)


@always_inline
def descriptor(half: Shared[UInt8], leading: Int32, chunks: Int) -> Int64:
    """Half a box for `wgmma`, from so many chunks on. Only the lower 32 bits are computed with: that takes half of the registers.
    """
    var lower = ((Int32(Int(half)) & 0x3FFFF) >> 4 | leading << 16) + Int32(chunks)
    return Int64(lower) | (Int64(64) << 32) | (Int64(1) << 62)


@always_inline
def along(half: Shared[UInt8], chunks: Int) -> WGMMADescriptor[HALF_TYPE]:
    """Half a box whose rows run along the summands;"""
    return WGMMADescriptor[HALF_TYPE](descriptor(half, 1, chunks))


@always_inline
def across(half: Shared[UInt8], chunks: Int) -> Int64:
    """and one whose rows run across them."""
    return descriptor(half, Int32(BOX_BYTES // 16), chunks)


@always_inline
def times_pair[width: Int](own: Shared[UInt8], other: Shared[UInt8]) -> Scores[width]:
    """Enqueues own @ other^T of a tile and the rows of a step, two boxes after two, of these the small products first.
    """
    comptime rows = step_rows[width]()
    comptime bytes = rows * ROW_BYTES
    comptime boxes = boxes_of[width]()
    var sums = Scores[width](0)
    comptime for first in range(0, boxes, 2):
        comptime for term in range(3):
            comptime for box in range(first, min(first + 2, boxes)):
                var left = own.unsafe_offset(box * PAIR_BYTES + (BOX_BYTES if term == 0 else 0))
                var right = other.unsafe_offset(box * 2 * bytes + (bytes if term == 1 else 0))
                comptime for k in range(min(SIDE, width - box * SIDE) // 16):
                    sums = wgmma_async[
                        64,
                        rows,
                        16,
                        a_type=HALF_TYPE,
                        b_type=HALF_TYPE,
                        layout_a="row",
                        layout_b="col",
                        scale_d=0 if term == 0 and box == 0 and k == 0 else 1,
                    ](along(left, 2 * k), along(right, 2 * k), sums)
    return sums


@always_inline
def product_of_box[
    width: Int, box: Int
](high: Fragments[width], low: Fragments[width], right: Shared[UInt8]) -> HALF:
    """Enqueues left @ right of a factor in registers and a box of a step's rows, the small products first."""
    comptime rows = step_rows[width]()
    comptime bytes = rows * ROW_BYTES
    var right_high = right.unsafe_offset(box * 2 * bytes)
    var right_low = right_high.unsafe_offset(bytes)
    var sums = multiply[False, fresh=True](low[0], across(right_high, 0), HALF(0))
    comptime for k in range(1, rows // 16):
        sums = multiply[False](low[k], across(right_high, k * ROW_BYTES), sums)
    comptime for k in range(rows // 16):
        sums = multiply[False](high[k], across(right_low, k * ROW_BYTES), sums)
    comptime for k in range(rows // 16):
        sums = multiply[False](high[k], across(right_high, k * ROW_BYTES), sums)
    return sums


@always_inline
def add_part(mut sums: HALF, part: HALF, before: StaticTuple[Float32, 2]):
    """Sums = sums * before + part, of what has arrived; `before` by row."""
    var here = part
    settled(here)
    comptime for i in range(32):
        sums[i] = sums[i] * before[i // 2 % 2] + here[i]


@always_inline
def add_scaled(mut sums: HALF, part: HALF, factor: Float32):
    """Sums += part * factor, of what has arrived."""
    var here = part
    settled(here)
    comptime for i in range(32):
        sums[i] = here[i] * factor + sums[i]


@always_inline
def add_product[
    width: Int
](
    mut sums: BoxSums[width],
    high: Fragments[width],
    low: Fragments[width],
    right: Shared[UInt8],
    factor: Float32,
):
    """Sums += left @ right * factor. A box is multiplied while the one before it is added: all of them at once would want more
    registers than there are."""
    wgmma_fence_aligned()
    var part = product_of_box[width, 0](high, low, right)
    wgmma_commit_group_sync()
    comptime for box in range(boxes_of[width]()):
        var whole = sums[box]
        comptime if box + 1 < boxes_of[width]():
            wgmma_fence_aligned()
            var next = product_of_box[width, box + 1](high, low, right)
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[1]()
            add_scaled(whole, part, factor)
            part = next
        else:
            wgmma_wait_group_sync[0]()
            add_scaled(whole, part, factor)
        sums[box] = whole


@always_inline
def split[width: Int](sums: Scores[width], mut high: Fragments[width], mut low: Fragments[width]):
    """Sums as left factor."""
    comptime for k in range(step_rows[width]() // 16):
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
def load_mask[
    width: Int, transposed: Bool = False
](mask: ImmPtr[DType.float32], first: Int, start: Int, sizes: FlashSizes) -> Scores[width]:
    """A head's mask for a lane's scores: of a warp's queries from `first` on and the keys from `start` on; `transposed`, of its keys and
    those queries. It is asked for before a step's products are waited for: the answer takes time.

    The compiler does not know that the strides are the same in each step: else the offsets of all elements would stay in registers that
    products want.
    """
    var here = sizes.copy()
    here.mask_s = inlined_assembly["", Int32, constraints="=r,0", has_side_effect=True](sizes.mask_s)
    here.mask_t = inlined_assembly["", Int32, constraints="=r,0", has_side_effect=True](sizes.mask_t)
    var elements = Scores[width](0)
    comptime for i in range(step_rows[width]() // 2):
        var row = place_of(i, first)
        var column = start + column_of(i)
        comptime if transposed:
            elements[i] = mask_element(mask, column, row, here)
        else:
            elements[i] = mask_element(mask, row, column, here)
    return elements


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
