"""The gradients of key and value from pairs of float16 by `wgmma`: `fast_pairs_hopper.mojo` with the sides swapped.

Of tiles of two boxes the sums of one gradient fill the registers of a warpgroup, so a warpgroup each makes the
gradient of the key and that of the value.
"""

from std.math import exp2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import wgmma_commit_group_sync, wgmma_fence_aligned, wgmma_wait_group_sync
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, mbarrier_arrive_expect_tx_shared, mbarrier_init

from .fast_hopper_tiles import GROUP, HALF, Turn, settled, wait
from .fast_scores import all_seen, sees
from .fast_pairs import (
    HALF_TYPE,
    NUMBERS,
    PAIRS,
    SIDE,
    WEIGHT,
    Record,
    TileRows,
    inverse_power,
    place_of_block,
    score_factor,
    slope_power,
    take_turn,
)
from .fast_pairs_hopper import query_bytes
from .fast_pairs_hopper_tiles import (
    NUMBER_BYTES,
    STAGES,
    BoxSums,
    Fragments,
    add_scaled,
    blocks_together,
    column_of,
    place_of,
    product_of_pairs,
    send,
    send_tile,
    split,
    store_pairs,
    tile_bytes,
    times_pair,
)
from .fast_pairs_kernels import add_mask
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr


def key_value_bytes[width: Int]() -> Int:
    """Own tiles, stages of two tiles of the other side with numbers of the queries, and barriers."""
    return query_bytes[width]() + STAGES * NUMBER_BYTES


def gradient_groups[width: Int]() -> Int:
    """Warpgroups that make the gradients of key and value."""
    return 1 if width <= SIDE else 2


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
