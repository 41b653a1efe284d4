"""The kernels of `fast_pairs_kernels.mojo` for Hopper: `wgmma` for the products, and copies of whole tiles in bulk.

Who does what is as in `fast_hopper.mojo`: a thread of the first warpgroup sends for tiles, the second warpgroup owns 64 rows
and multiplies; two blocks share a multiprocessor, so that one computes exponentials while the other multiplies. A tile lies in
memory as `wgmma` wants it, of each box the high half then the low half: one copy brings it, and no tensor map is needed.

A product of 64 x 64 by 64 x 64 is twelve instructions: four for low high, four for high low, then four for high high.

Tiles of two boxes fill the shared memory of a multiprocessor, and their sums the registers: one block is there, whose products
take twice as long as the exponentials between them, and a warpgroup each makes the gradients of key and value.
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, mbarrier_arrive_expect_tx_shared, mbarrier_init

from .fast_hopper_tiles import (
    BOX_BYTES,
    GROUP,
    HALF,
    ROW_BYTES,
    Shared,
    Turn,
    multiply,
    settled,
    tile_descriptor,
    wait,
)
from .fast_kernels import LN_2, all_seen, of_row, sees
from .fast_pairs import (
    HALF_TYPE,
    NUMBERS,
    PAIRS,
    SIDE,
    WEIGHT,
    Record,
    TileRows,
    boxes_of,
    inverse_power,
    place_of_block,
    score_factor,
    slope_power,
    take_turn,
)
from .fast_pairs_kernels import add_mask
from .fast_tiles import HIDDEN
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr

comptime PAIR_BYTES = 2 * BOX_BYTES
"""Both halves of a box."""
comptime STAGES = 2
comptime NUMBER_BYTES = NUMBERS * SIDE * 4
"""The numbers of a tile of queries."""


def tile_bytes[width: Int]() -> Int:
    """A tile of heads of up to `width` elements."""
    return boxes_of[width]() * PAIR_BYTES


def forward_bytes[width: Int]() -> Int:
    """Shared memory: own queries, stages of keys and values, and barriers."""
    return (1 + 2 * STAGES) * tile_bytes[width]() + 8 * (1 + 4 * STAGES)


def query_bytes[width: Int]() -> Int:
    """Own tiles, stages of two tiles of the other side, and barriers;"""
    return (2 + 2 * STAGES) * tile_bytes[width]() + 8 * (1 + 2 * STAGES)


def key_value_bytes[width: Int]() -> Int:
    """and numbers of the queries."""
    return query_bytes[width]() + STAGES * NUMBER_BYTES


def blocks_together[width: Int]() -> Int:
    """Blocks that share a multiprocessor."""
    return 2 if width <= SIDE else 1


def gradient_groups[width: Int]() -> Int:
    """Warpgroups that make the gradients of key and value."""
    return 1 if width <= SIDE else 2


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


# ---- Forward ------------------------------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * GROUP)),
    `nvvm.minctasm`=SIMDLength(blocks_together[width]()),
)
def hopper_pairs_forward_kernel[
    width: Int, masked: Bool
](
    output: MutPtr[DType.float32],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, boxes, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, boxes, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, boxes, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: ImmPtr[DType.float32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[DType.float32],  # [B or 1, N or 1, S or 1, T or 1], read if `masked`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """Output and lse. A block owns 64 queries and walks over the keys, 64 at a time.

    The scores of a step are multiplied while the product with the values of the step before is under way.
    """
    comptime bytes = tile_bytes[width]()
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var mine = place_of_block(block_idx.x, places.of_queries, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var own_tile = places.of_queries - 1 - mine[1]
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var s0 = own_tile * SIDE
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    # One step at least: a row that sees nothing is a row whose keys are all hidden.
    var steps = max(1, ceildiv(sizes.keys_seen(min(s0 + SIDE, S) - 1), SIDE))
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var keys = shared.unsafe_offset(bytes)
    var values = keys.unsafe_offset(STAGES * bytes)
    var query_here = values.unsafe_offset(STAGES * bytes).unsafe_bitcast[Int64]()
    var keys_full = query_here.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(STAGES)
    var keys_empty = values_full.unsafe_offset(STAGES)
    var values_empty = keys_empty.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 4 * STAGES):
            mbarrier_init(query_here.unsafe_offset(i), 1)
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        comptime if width <= SIDE:
            warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(query_here, Int32(bytes))
            send_tile[width](shared, tiles, places.query(head) + own_tile, query_here)
            var turn = Turn(0, 1)
            for step in range(steps):
                var stage = turn.stage
                wait(keys_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(keys_full.unsafe_offset(stage), Int32(bytes))
                send_tile[width](
                    keys.unsafe_offset(stage * bytes),
                    key_tiles,
                    shared_tile + step,
                    keys_full.unsafe_offset(stage),
                )
                wait(values_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(values_full.unsafe_offset(stage), Int32(bytes))
                send_tile[width](
                    values.unsafe_offset(stage * bytes),
                    value_tiles,
                    shared_tile + step,
                    values_full.unsafe_offset(stage),
                )
                turn.step[STAGES]()
        return

    # With one block on a multiprocessor there are registers for everybody.
    comptime if width <= SIDE:
        warpgroup_reg_alloc[232]()
    var first = s0 + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var query = Record(records, places.query(head) + own_tile)
    var largest = StaticTuple[Float32, 2](HIDDEN, HIDDEN)
    var totals = StaticTuple[Float32, 2](0, 0)
    var rescales = StaticTuple[Float32, 2](0, 0)
    var sums = BoxSums[width](HALF(0))
    # What undoes the scale of the values that are in the sums.
    var undo = Float32(1)

    @__parameter
    @always_inline
    def weigh(mut scores: HALF, step: Int, key: Record, value: Record):
        var factor = score_factor(query, key, scale)
        var to_new = undo * inverse_power(value.undo)
        undo = value.undo
        comptime if masked:
            comptime for i in range(32):
                scores[i] = add_mask(
                    scores[i], factor, of_head, place_of(i, first), step * SIDE + column_of(i), sizes
                )
            factor = 1
        if not all_seen(first, first + 1, step * SIDE, step * SIDE + SIDE, sizes):
            comptime for i in range(32):
                var seen = sees(place_of(i, first), step * SIDE + column_of(i), sizes)
                scores[i] = scores[i] if seen else HIDDEN
        comptime for half in range(2):
            var biggest = HIDDEN
            comptime for j in range(SIDE // 8):
                biggest = max(biggest, max(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]))
            var grown = max(largest[half], of_row(biggest, True) * factor)
            var shift = grown if grown > HIDDEN else Float32(0)
            var rescale = exp2(largest[half] - shift)
            rescales[half] = rescale * to_new
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(SIDE // 8):
                comptime for side in range(2):
                    var weight = exp2(scores[4 * j + 2 * half + side] * factor - shift)
                    scores[4 * j + 2 * half + side] = weight * WEIGHT
                    total += weight
            totals[half] = totals[half] * rescale + total

    var high = Fragments()
    var low = Fragments()

    @__parameter
    @always_inline
    def add_boxes(first_box: HALF, tile: Shared[UInt8], rescales: StaticTuple[Float32, 2]):
        """Adds a step's product with the values, of which the first box has arrived; the others are multiplied here: all of them
        at once would want more registers than there are."""
        var part = first_box
        comptime for box in range(boxes_of[width]()):
            var whole = sums[box]
            comptime if box + 1 < boxes_of[width]():
                wgmma_fence_aligned()
                var next = product_of_box[box + 1](high, low, tile)
                wgmma_commit_group_sync()
                add_part(whole, part, rescales)
                wgmma_wait_group_sync[0]()
                part = next
            else:
                add_part(whole, part, rescales)
            sums[box] = whole

    # Records are read before a step's products begin: the answer takes time.
    var key = Record(records, key_tile)
    var value = Record(records, value_tile)
    wait(query_here, 0)
    wait(keys_full, 0)
    wgmma_fence_aligned()
    var scores = times_pair[width](shared, keys)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(scores)
    if leads:
        _ = mbarrier_arrive(keys_empty)
    weigh(scores, 0, key, value)
    split(scores, high, low)
    var turn = Turn(1 % STAGES, 0)
    var before = Turn(0, 0)
    for step in range(1, steps):
        key = Record(records, key_tile + step)
        value = Record(records, value_tile + step)
        wait(keys_full.unsafe_offset(turn.stage), turn.parity)
        wgmma_fence_aligned()
        var next = times_pair[width](shared, keys.unsafe_offset(turn.stage * bytes))
        wgmma_commit_group_sync()
        wait(values_full.unsafe_offset(before.stage), before.parity)
        wgmma_fence_aligned()
        var values_before = values.unsafe_offset(before.stage * bytes)
        var part = product_of_box[0](high, low, values_before)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(next)
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        var earlier = rescales
        weigh(next, step, key, value)
        wgmma_wait_group_sync[0]()
        add_boxes(part, values_before, earlier)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(before.stage))
        split(next, high, low)
        turn.step[STAGES]()
        before.step[STAGES]()
    wait(values_full.unsafe_offset(before.stage), before.parity)
    wgmma_fence_aligned()
    var values_before = values.unsafe_offset(before.stage * bytes)
    var part = product_of_box[0](high, low, values_before)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    add_boxes(part, values_before, rescales)

    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var total = of_row(totals[half], False)
        factors[half] = undo / (total * WEIGHT) if total != 0 else 1
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=whole_head * S + s] = (
                HIDDEN if total == 0 else (largest[half] + log2(total)) * LN_2
            )
    store_pairs[width](output.unsafe_offset(whole_head * S * d), sums, factors, first, S, d)


# ---- Backward -----------------------------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * GROUP)),
    `nvvm.minctasm`=SIMDLength(blocks_together[width]()),
)
def hopper_pairs_query_kernel[
    width: Int, masked: Bool
](
    grad_query: MutPtr[DType.float32],  # [B, N, S, d]
    numbers: ImmPtr[DType.float32],  # [tiles of grad_output, 3, 64]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, boxes, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, boxes, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, boxes, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: ImmPtr[DType.float32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[DType.float32],  # [B or 1, N or 1, S or 1, T or 1], read if `masked`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """The gradient of the query. A block owns 64 queries and walks over the keys, 64 at a time."""
    comptime bytes = tile_bytes[width]()
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var mine = place_of_block(block_idx.x, places.of_queries, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var own_tile = places.of_queries - 1 - mine[1]
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var s0 = own_tile * SIDE
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var steps = ceildiv(sizes.keys_seen(min(s0 + SIDE, S) - 1), SIDE)
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var own_grads = shared.unsafe_offset(bytes)
    var stages = shared.unsafe_offset(2 * bytes)
    var own_here = stages.unsafe_offset(2 * STAGES * bytes).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * STAGES):
            mbarrier_init(own_here.unsafe_offset(i), 1)
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        comptime if width <= SIDE:
            warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * bytes))
            send_tile[width](shared, tiles, places.query(head) + own_tile, own_here)
            send_tile[width](own_grads, tiles, places.grad_here(head) + own_tile, own_here)
            var turn = Turn(0, 1)
            for step in range(steps):
                var stage = stages.unsafe_offset(turn.stage * 2 * bytes)
                var arrives = full.unsafe_offset(turn.stage)
                wait(empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(2 * bytes))
                send_tile[width](stage, key_tiles, shared_tile + step, arrives)
                send_tile[width](stage.unsafe_offset(bytes), value_tiles, shared_tile + step, arrives)
                turn.step[STAGES]()
        return

    comptime if width <= SIDE:
        warpgroup_reg_alloc[232]()
    var warp_rows = thread_idx.x % GROUP // 32 * 16
    var first = s0 + warp_rows
    var leads = thread_idx.x % GROUP == 0
    var query = Record(records, places.query(head) + own_tile)
    var grad = Record(records, places.grad(head) + own_tile)
    var shifts = StaticTuple[Float32, 2](0, 0)
    var deltas = StaticTuple[Float32, 2](0, 0)
    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var own_numbers = numbers.unsafe_offset(
            (head * places.of_queries + own_tile) * (NUMBERS * SIDE) + place_of(2 * half, warp_rows)
        )
        shifts[half] = own_numbers[unsafe_offset=0]
        deltas[half] = own_numbers[unsafe_offset=2 * SIDE]
        # Probabilities are not multiplied, what they are multiplied with is.
        factors[half] = own_numbers[unsafe_offset=SIDE] * (scale / WEIGHT)
    var sums = BoxSums[width](HALF(0))
    var turn = Turn(0, 0)
    wait(own_here, 0)
    for step in range(steps):
        var key = Record(records, key_tile + step)
        var value = Record(records, value_tile + step)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power) * WEIGHT
        var apart_factor = grad.undo * value.undo * down
        var undo = key.undo * (power / WEIGHT)
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var keys = stages.unsafe_offset(turn.stage * 2 * bytes)
        wgmma_fence_aligned()
        var weights = times_pair[width](shared, keys)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var slopes = times_pair[width](own_grads, keys.unsafe_offset(bytes))
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        comptime if masked:
            comptime for i in range(32):
                weights[i] = add_mask(
                    weights[i], factor, of_head, place_of(i, first), step * SIDE + column_of(i), sizes
                )
            factor = 1
        comptime for i in range(32):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        if not all_seen(first, first + 1, step * SIDE, step * SIDE + SIDE, sizes):
            comptime for i in range(32):
                var seen = sees(place_of(i, first), step * SIDE + column_of(i), sizes)
                weights[i] = weights[i] if seen else 0
        wgmma_wait_group_sync[0]()
        settled(slopes)
        comptime for i in range(32):
            slopes[i] = weights[i] * (slopes[i] * apart_factor - deltas[i // 2 % 2] * down)
        var high = Fragments()
        var low = Fragments()
        split(slopes, high, low)
        wgmma_fence_aligned()
        var part = product_of_pairs[width](high, low, keys)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        if leads:
            _ = mbarrier_arrive(empty.unsafe_offset(turn.stage))
        add_scaled[width](sums, part, undo)
        turn.step[STAGES]()
    store_pairs[width](grad_query.unsafe_offset(whole_head * S * d), sums, factors, first, S, d)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((1 + gradient_groups[width]()) * GROUP)),
    `nvvm.minctasm`=SIMDLength(blocks_together[width]()),
)
def hopper_pairs_key_value_kernel[
    width: Int, masked: Bool
](
    grad_key: MutPtr[DType.float32],  # [B, G, T, d]
    grad_value: MutPtr[DType.float32],  # [B, G, T, d]
    numbers: ImmPtr[DType.float32],  # [tiles of grad_output, 3, 64]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, boxes, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, boxes, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, boxes, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: ImmPtr[DType.float32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[DType.float32],  # [B or 1, N or 1, S or 1, T or 1], read if `masked`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """The gradients of key and value. A block owns 64 keys and walks over the queries of every head that shares them, 64 at a
    time. Scores are transposed, [keys, queries]: so P^T and dS^T are left factors as they are."""
    comptime bytes = tile_bytes[width]()
    comptime groups = gradient_groups[width]()
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var mine = place_of_block(block_idx.x, places.of_keys, sizes.shared_heads(), sizes)
    var shared_head = mine[0]
    var own_tile = mine[1]
    var t0 = own_tile * SIDE
    var head0 = shared_head * sizes.group()
    # The walk, in tiles: from the first that sees a key, of each head in turn.
    var start = sizes.first_query(t0) // SIDE
    var of_head = max(0, places.of_queries - start)
    var steps = sizes.group() * of_head
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var own_values = shared.unsafe_offset(bytes)
    var stages = shared.unsafe_offset(2 * bytes)
    var numbers_here = stages.unsafe_offset(2 * STAGES * bytes)
    var own_here = numbers_here.unsafe_offset(STAGES * NUMBER_BYTES).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * STAGES):
            mbarrier_init(own_here.unsafe_offset(i), Int32(1 if i <= STAGES else groups))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * bytes))
            send_tile[width](
                shared, key_tiles, Int(tiles_before) + places.shared(shared_head) + own_tile, own_here
            )
            send_tile[width](
                own_values, value_tiles, Int(tiles_before) + places.shared(shared_head) + own_tile, own_here
            )
            var turn = Turn(0, 1)
            for step in range(steps):
                var head = head0 + step // of_head
                var tile = start + step % of_head
                var stage = stages.unsafe_offset(turn.stage * 2 * bytes)
                var arrives = full.unsafe_offset(turn.stage)
                wait(empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(2 * bytes + NUMBER_BYTES))
                send_tile[width](stage, tiles, places.query(head) + tile, arrives)
                send_tile[width](stage.unsafe_offset(bytes), tiles, places.grad_here(head) + tile, arrives)
                var source = numbers.unsafe_offset((head * places.of_queries + tile) * (NUMBERS * SIDE))
                send(
                    numbers_here.unsafe_offset(turn.stage * NUMBER_BYTES), Int(source), NUMBER_BYTES, arrives
                )
                turn.step[STAGES]()
        return

    warpgroup_reg_alloc[232 if groups == 1 else 240]()
    var first = t0 + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var key = Record(records, places.key(shared_head) + own_tile)
    var value = Record(records, places.value(shared_head) + own_tile)
    var start_of_head = (Int(first_entry) * Int(sizes.key_heads) + shared_head) * T * d
    wait(own_here, 0)

    @__parameter
    @always_inline
    def walk[with_key: Bool, with_value: Bool]():
        var key_sums = BoxSums[width](HALF(0))
        var value_sums = BoxSums[width](HALF(0))
        var turn = Turn(0, 0)
        var tile = Int32(start)
        var query_tile = Int32(places.query(head0) + start)
        var to_grad = Int32(places.grad(0) - places.query(0))
        var whole_head = Int(first_entry) * Int(sizes.query_heads) + head0
        var mask_here = sizes.mask_of(whole_head) if masked else 0
        for _ in range(steps):
            # Records are read where they are used: registers are short here.
            var factor = score_factor(Record(records, Int(query_tile)), key, scale)
            wait(full.unsafe_offset(turn.stage), turn.parity)
            var queries = stages.unsafe_offset(turn.stage * (2 * bytes))
            var grads = queries.unsafe_offset(bytes)
            var own_numbers = numbers_here.unsafe_offset(turn.stage * NUMBER_BYTES).unsafe_bitcast[Float32]()
            own_numbers = own_numbers.unsafe_offset(lane_id() % 4 * 2)
            wgmma_fence_aligned()
            var weights = times_pair[width](shared, queries)
            wgmma_commit_group_sync()
            var slopes = HALF(0)
            comptime if with_key:
                wgmma_fence_aligned()
                slopes = times_pair[width](own_values, grads)
                wgmma_commit_group_sync()
                wgmma_wait_group_sync[1]()
            else:
                wgmma_wait_group_sync[0]()
            settled(weights)
            var s0 = Int(tile) * SIDE
            comptime if masked:
                comptime for i in range(32):
                    weights[i] = add_mask(
                        weights[i],
                        factor,
                        mask.unsafe_offset(mask_here),
                        s0 + column_of(i),
                        place_of(i, first),
                        sizes,
                    )
                factor = 1
            comptime for j in range(SIDE // 8):
                var shift = own_numbers.unsafe_load[width=2, alignment=8](j * 8)
                var weight = own_numbers.unsafe_load[width=2, alignment=8](SIDE + j * 8)
                comptime for e in range(4):
                    weights[4 * j + e] = exp2(weights[4 * j + e] * factor - shift[e % 2]) * weight[e % 2]
            if not all_seen(s0, s0 + SIDE, first, first + 16, sizes):
                comptime for i in range(32):
                    var seen = sees(s0 + column_of(i), place_of(i, first), sizes)
                    weights[i] = weights[i] if seen else 0
            var high = Fragments()
            var low = Fragments()
            var grad = Record(records, Int(query_tile + to_grad))
            var value_part = BoxSums[width]()
            comptime if with_value:
                split(weights, high, low)
                wgmma_fence_aligned()
                value_part = product_of_pairs[width](high, low, grads)
                wgmma_commit_group_sync()
            comptime if with_key:
                wgmma_wait_group_sync[1 if with_value else 0]()
                settled(slopes)
                var power = slope_power(grad, value)
                var down = inverse_power(power)
                var apart_factor = grad.undo * value.undo * down
                comptime for j in range(SIDE // 8):
                    var delta = own_numbers.unsafe_load[width=2, alignment=8](2 * SIDE + j * 8) * down
                    comptime for e in range(4):
                        comptime i = 4 * j + e
                        slopes[i] = weights[i] * (slopes[i] * apart_factor - delta[e % 2])
                comptime if with_value:
                    wgmma_wait_group_sync[0]()
                    add_scaled[width](value_sums, value_part, grad.undo / WEIGHT)
                split(slopes, high, low)
                wgmma_fence_aligned()
                var key_part = product_of_pairs[width](high, low, queries)
                wgmma_commit_group_sync()
                wgmma_wait_group_sync[0]()
                var undo = Record(records, Int(query_tile)).undo * (power / WEIGHT)
                add_scaled[width](key_sums, key_part, undo)
            else:
                wgmma_wait_group_sync[0]()
                add_scaled[width](value_sums, value_part, grad.undo / WEIGHT)
            if leads:
                _ = mbarrier_arrive(empty.unsafe_offset(turn.stage))
            turn.step[STAGES]()
            tile += 1
            query_tile += 1
            if tile == Int32(places.of_queries):
                # On to the next head that shares the keys.
                tile = Int32(start)
                query_tile += Int32(start)
                comptime if masked:
                    whole_head += 1
                    mask_here = sizes.mask_of(whole_head)
        comptime if with_key:
            store_pairs[width](
                grad_key.unsafe_offset(start_of_head),
                key_sums,
                StaticTuple[Float32, 2](scale, scale),
                first,
                T,
                d,
            )
        comptime if with_value:
            store_pairs[width](
                grad_value.unsafe_offset(start_of_head),
                value_sums,
                StaticTuple[Float32, 2](1, 1),
                first,
                T,
                d,
            )

    comptime if groups == 1:
        walk[True, True]()
    else:
        if thread_idx.x < 2 * GROUP:
            walk[True, False]()
        else:
            walk[False, True]()
