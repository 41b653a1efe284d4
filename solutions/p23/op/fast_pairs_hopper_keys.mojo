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

from .fast_hopper_dropout import LANES, again, drop, word_of_keys, words_of
from .fast_hopper_tiles import GROUP, HALF, Turn, common, settled, wait, wait_together
from .fast_scores import LOG2_E, all_seen, sees
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
    Scores,
    add_product,
    add_scaled,
    blocks_together,
    column_of,
    later_stages,
    load_mask,
    place_of,
    product_of_box,
    send,
    send_step,
    send_tile,
    split,
    step_bytes,
    step_rows,
    store_pairs,
    tile_bytes,
    times_pair,
)
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
    width: Int, masked: Bool, dropped: Bool
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
    words: ImmPtr[DType.uint32],  # of `hopper_draws_kernel`, for the whole batch, read if `dropped`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    share: Float32,  # of probabilities that are kept, read if `dropped`,
    rescale: Float32,  # and what they are multiplied by
):
    """The gradients of key and value. A block owns 64 keys and walks over the queries of every head that shares them, 64 at a
    time, or 32. Scores are transposed, [keys, queries]: so P^T and dS^T are left factors as they are."""
    comptime bytes = step_bytes[width]()
    comptime rows = step_rows[width]()
    comptime of_tile = SIDE // rows
    comptime later = later_stages[width]()
    comptime groups = gradient_groups[width]()
    comptime assert rows == SIDE or not dropped, "a word is of 64 keys"
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
    # The walk, in steps: from the first that sees a key, of each head in turn.
    var start = sizes.first_query(t0) // rows
    var of_head = max(0, places.of_queries * of_tile - start)
    var steps = sizes.group() * of_head
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var own_values = shared.unsafe_offset(tile_bytes[width]())
    var queries = shared.unsafe_offset(2 * tile_bytes[width]())
    var grads = queries.unsafe_offset(STAGES * bytes)
    var numbers_here = grads.unsafe_offset(later * bytes)
    var own_here = numbers_here.unsafe_offset(STAGES * NUMBER_BYTES).unsafe_bitcast[Int64]()
    var queries_full = own_here.unsafe_offset(1)
    var grads_full = queries_full.unsafe_offset(STAGES)
    var queries_empty = grads_full.unsafe_offset(later)
    var grads_empty = queries_empty.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * (STAGES + later)):
            mbarrier_init(own_here.unsafe_offset(i), Int32(1 if i <= STAGES + later else groups))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * tile_bytes[width]()))
            send_tile[width](
                shared, key_tiles, Int(tiles_before) + places.shared(shared_head) + own_tile, own_here
            )
            send_tile[width](
                own_values, value_tiles, Int(tiles_before) + places.shared(shared_head) + own_tile, own_here
            )
            var turn = Turn(0, 1)
            var then = Turn(0, 1)
            for step in range(steps):
                var head = head0 + step // of_head
                var place = start + step % of_head
                var arrives = queries_full.unsafe_offset(turn.stage)
                wait(queries_empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(bytes + NUMBER_BYTES))
                send_step[width](
                    queries.unsafe_offset(turn.stage * bytes),
                    tiles,
                    places.query(head) * of_tile + place,
                    arrives,
                )
                var source = numbers.unsafe_offset(
                    (head * places.of_queries + place // of_tile) * (NUMBERS * SIDE)
                )
                send(
                    numbers_here.unsafe_offset(turn.stage * NUMBER_BYTES), Int(source), NUMBER_BYTES, arrives
                )
                arrives = grads_full.unsafe_offset(then.stage)
                wait(grads_empty.unsafe_offset(then.stage), then.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(bytes))
                send_step[width](
                    grads.unsafe_offset(then.stage * bytes),
                    tiles,
                    places.grad_here(head) * of_tile + place,
                    arrives,
                )
                turn.step[STAGES]()
                then.step[later]()
        return

    warpgroup_reg_alloc[232 if groups == 1 else 240]()
    var first = t0 + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var key = Record(records, places.key(shared_head) + own_tile)
    var value = Record(records, places.value(shared_head) + own_tile)
    var start_of_head = (Int(first_entry) * Int(sizes.key_heads) + shared_head) * T * d
    wait_together(own_here, 0)

    @__parameter
    @always_inline
    def walk[with_key: Bool, with_value: Bool]():
        var key_sums = BoxSums[width](HALF(0))
        var value_sums = BoxSums[width](HALF(0))
        var turn = Turn(0, 0)
        var then = Turn(0, 0)
        var place = Int32(start)
        var query_tile = Int32(places.query(head0))
        var to_grad = Int32(places.grad(0) - places.query(0))
        var whole_head = Int(first_entry) * Int(sizes.query_heads) + head0
        var mask_here = sizes.mask_of(whole_head) if masked else 0
        for _ in range(steps):
            # Records are read where they are used: registers are short here.
            var tile = query_tile + place // Int32(of_tile)
            var factor = score_factor(Record(records, Int(tile)), key, scale)
            wait_together(queries_full.unsafe_offset(turn.stage), turn.parity)
            var queries_here = common(queries.unsafe_offset(turn.stage * bytes))
            var grads_here = common(grads.unsafe_offset(then.stage * bytes))
            var own_numbers = numbers_here.unsafe_offset(turn.stage * NUMBER_BYTES).unsafe_bitcast[Float32]()
            var s0 = Int(place) * rows
            own_numbers = own_numbers.unsafe_offset(s0 % SIDE + lane_id() % 4 * 2)
            var drawn = SIMD[DType.uint32, 4](0)
            comptime if dropped:
                var here = words_of(words, whole_head, s0, t0, sizes)
                comptime for strip in range(4):
                    drawn[strip] = here[unsafe_offset=strip * LANES + Int(lane_id())]
            wgmma_fence_aligned()
            var weights = times_pair[width](common(shared), queries_here)
            wgmma_commit_group_sync()
            var biases = Scores[width](0)
            comptime if masked:
                biases = load_mask[width, transposed=True](mask.unsafe_offset(mask_here), first, s0, sizes)
            var slopes = Scores[width](0)
            comptime if with_key:
                wait_together(grads_full.unsafe_offset(then.stage), then.parity)
                wgmma_fence_aligned()
                slopes = times_pair[width](common(own_values), grads_here)
                wgmma_commit_group_sync()
                wgmma_wait_group_sync[1]()
            else:
                wgmma_wait_group_sync[0]()
            settled(weights)
            comptime if masked:
                weights = biases.fma(LOG2_E, weights * factor)
                factor = 1
            comptime for j in range(rows // 8):
                var shift = own_numbers.unsafe_load[width=2, alignment=8](j * 8)
                var weight = own_numbers.unsafe_load[width=2, alignment=8](SIDE + j * 8)
                comptime for e in range(4):
                    weights[4 * j + e] = exp2(weights[4 * j + e] * factor - shift[e % 2]) * weight[e % 2]
            if not all_seen(s0, s0 + rows, first, first + 16, sizes):
                comptime for i in range(rows // 2):
                    var seen = sees(s0 + column_of(i), place_of(i, first), sizes)
                    weights[i] = weights[i] if seen else 0
            var kept = weights
            var word = SIMD[DType.uint32, 1](0)
            comptime if dropped:
                word = word_of_keys(drawn)
                drop[transposed=True](kept, word)
            var high = Fragments[width]()
            var low = Fragments[width]()
            var grad = Record(records, Int(tile + to_grad))
            var value_part = HALF(0)
            comptime if with_value:
                split[width](kept, high, low)
                comptime if with_key:
                    # Of one box, which is multiplied while dS is made.
                    wgmma_fence_aligned()
                    value_part = product_of_box[width, 0](high, low, grads_here)
                    wgmma_commit_group_sync()
                else:
                    wait_together(grads_full.unsafe_offset(then.stage), then.parity)
                    add_product[width](value_sums, high, low, grads_here, grad.undo / WEIGHT)
            comptime if with_key:
                wgmma_wait_group_sync[1 if with_value else 0]()
                settled(slopes)
                comptime if not with_value:
                    if leads:
                        _ = mbarrier_arrive(grads_empty.unsafe_offset(then.stage))
                var power = slope_power(grad, value)
                var down = inverse_power(power)
                var apart_factor = grad.undo * value.undo * down
                comptime if dropped:
                    drop[transposed=True](slopes, again(word))
                    down *= share
                comptime for j in range(rows // 8):
                    var delta = own_numbers.unsafe_load[width=2, alignment=8](2 * SIDE + j * 8) * down
                    comptime for e in range(4):
                        comptime i = 4 * j + e
                        slopes[i] = weights[i] * (slopes[i] * apart_factor - delta[e % 2])
                comptime if with_value:
                    wgmma_wait_group_sync[0]()
                    var whole = value_sums[0]
                    add_scaled(whole, value_part, grad.undo / WEIGHT)
                    value_sums[0] = whole
                split[width](slopes, high, low)
                var undo = Record(records, Int(tile)).undo * (power / WEIGHT)
                add_product[width](key_sums, high, low, queries_here, undo)
            if leads:
                _ = mbarrier_arrive(queries_empty.unsafe_offset(turn.stage))
                comptime if with_value:
                    _ = mbarrier_arrive(grads_empty.unsafe_offset(then.stage))
            turn.step[STAGES]()
            then.step[later]()
            place += 1
            if place == Int32(places.of_queries * of_tile):
                # On to the next head that shares the keys.
                place = Int32(start)
                query_tile += Int32(places.of_queries)
                whole_head += 1
                comptime if masked:
                    mask_here = sizes.mask_of(whole_head)
        var of_value = rescale if dropped else Float32(1)
        var of_key = scale * of_value
        comptime if with_key:
            store_pairs[width](
                grad_key.unsafe_offset(start_of_head),
                key_sums,
                StaticTuple[Float32, 2](of_key, of_key),
                first,
                T,
                d,
            )
        comptime if with_value:
            store_pairs[width](
                grad_value.unsafe_offset(start_of_head),
                value_sums,
                StaticTuple[Float32, 2](of_value, of_value),
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
