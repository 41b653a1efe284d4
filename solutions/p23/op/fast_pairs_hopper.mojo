"""The kernels of `fast_pairs_kernels.mojo` for Hopper: the forward pass and the gradient of the query.

`wgmma` multiplies, and whole tiles are copied in bulk. Who does what is as in `fast_hopper.mojo`: a thread of the
first warpgroup sends for tiles, the second warpgroup owns 64 rows and multiplies. Two blocks share a multiprocessor,
so that one computes exponentials while the other multiplies. Tiles of two boxes fill the shared memory of a
multiprocessor, and their sums the registers: one block is there, whose products take twice as long as the
exponentials between them.
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import wgmma_commit_group_sync, wgmma_fence_aligned, wgmma_wait_group_sync
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, mbarrier_arrive_expect_tx_shared, mbarrier_init

from .fast_hopper_dropout import drop, own_word, words_at, words_of
from .fast_hopper_tiles import GROUP, HALF, Shared, Turn, common, settled, wait, wait_together
from .fast_scores import LN_2, LOG2_E, all_seen, of_row, sees
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
from .fast_pairs_hopper_tiles import (
    STAGES,
    BoxSums,
    Fragments,
    Scores,
    add_part,
    add_product,
    blocks_together,
    column_of,
    later_stages,
    load_mask,
    place_of,
    product_of_box,
    send_step,
    send_tile,
    split,
    step_bytes,
    step_rows,
    store_pairs,
    tile_bytes,
    times_pair,
)
from .fast_tiles import HIDDEN
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr


def forward_bytes[width: Int]() -> Int:
    """Shared memory: own queries, stages of keys and values, and barriers."""
    return tile_bytes[width]() + 2 * STAGES * step_bytes[width]() + 8 * (1 + 4 * STAGES)


def query_bytes[width: Int]() -> Int:
    """Own tiles, stages of the two of the other side, and barriers;"""
    comptime stages = STAGES + later_stages[width]()
    return 2 * tile_bytes[width]() + stages * step_bytes[width]() + 8 * (1 + 2 * stages)


# ---- Forward ------------------------------------------------------------------------------------------------


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * GROUP)),
    `nvvm.minctasm`=SIMDLength(blocks_together[width]()),
)
def hopper_pairs_forward_kernel[
    width: Int, masked: Bool, dropped: Bool
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
    words: ImmPtr[DType.uint32],  # of `hopper_draws_kernel`, for the whole batch, read if `dropped`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    rescale: Float32,  # of probabilities that are kept, read if `dropped`
):
    """Output and lse. A block owns 64 queries and walks over the keys, 64 at a time, or 32.

    The scores of a step are multiplied while the product with the values of the step before is under way. `dropped`, some probabilities
    become 0, by the words of `fast_hopper_dropout.mojo`.
    """
    comptime bytes = step_bytes[width]()
    comptime rows = step_rows[width]()
    comptime of_tile = SIDE // rows
    comptime assert rows == SIDE or not dropped, "a word is of 64 keys"
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
    var first_step = (Int(tiles_before) + places.shared(sizes.shared_head(head))) * of_tile
    var s0 = own_tile * SIDE
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    # One step at least: a row that sees nothing is a row whose keys are all hidden.
    var steps = max(1, ceildiv(sizes.keys_seen(min(s0 + SIDE, S) - 1), rows))
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var keys = shared.unsafe_offset(tile_bytes[width]())
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
            mbarrier_arrive_expect_tx_shared(query_here, Int32(tile_bytes[width]()))
            send_tile[width](shared, tiles, places.query(head) + own_tile, query_here)
            var turn = Turn(0, 1)
            for step in range(steps):
                var stage = turn.stage
                wait(keys_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(keys_full.unsafe_offset(stage), Int32(bytes))
                send_step[width](
                    keys.unsafe_offset(stage * bytes),
                    key_tiles,
                    first_step + step,
                    keys_full.unsafe_offset(stage),
                )
                wait(values_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(values_full.unsafe_offset(stage), Int32(bytes))
                send_step[width](
                    values.unsafe_offset(stage * bytes),
                    value_tiles,
                    first_step + step,
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
    def weigh(
        mut scores: Scores[width],
        step: Int,
        key: Record,
        value: Record,
        biases: Scores[width],
        drawn: SIMD[DType.uint32, 1],
    ):
        var factor = score_factor(query, key, scale)
        var to_new = undo * inverse_power(value.undo)
        undo = value.undo
        comptime if masked:
            scores = biases.fma(LOG2_E, scores * factor)
            factor = 1
        if not all_seen(first, first + 1, step * rows, step * rows + rows, sizes):
            comptime for i in range(rows // 2):
                var seen = sees(place_of(i, first), step * rows + column_of(i), sizes)
                scores[i] = scores[i] if seen else HIDDEN
        comptime for half in range(2):
            var biggest = HIDDEN
            comptime for j in range(rows // 8):
                biggest = max(biggest, max(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]))
            var grown = max(largest[half], of_row(biggest, True) * factor)
            var shift = grown if grown > HIDDEN else Float32(0)
            var rescale = exp2(largest[half] - shift)
            rescales[half] = rescale * to_new
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(rows // 8):
                comptime for side in range(2):
                    var weight = exp2(scores[4 * j + 2 * half + side] * factor - shift)
                    scores[4 * j + 2 * half + side] = weight * WEIGHT
                    total += weight
            totals[half] = totals[half] * rescale + total
        comptime if dropped:
            drop(scores, drawn)

    var high = Fragments[width]()
    var low = Fragments[width]()

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
                var next = product_of_box[width, box + 1](high, low, tile)
                wgmma_commit_group_sync()
                add_part(whole, part, rescales)
                wgmma_wait_group_sync[0]()
                part = next
            else:
                add_part(whole, part, rescales)
            sums[box] = whole

    # Records, the mask, and what is drawn, are read before a step's products begin: the answer takes time.
    var key = Record(records, key_tile)
    var value = Record(records, value_tile)
    var own_kept = words_of(words, whole_head, s0, 0, sizes).unsafe_offset(own_word())
    var drawn = SIMD[DType.uint32, 1](0)
    var biases = Scores[width](0)
    comptime if masked:
        biases = load_mask[width](of_head, first, 0, sizes)
    comptime if dropped:
        drawn = words_at[1](own_kept, 0)
    wait_together(query_here, 0)
    wait_together(keys_full, 0)
    wgmma_fence_aligned()
    var scores = times_pair[width](common(shared), keys)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(scores)
    if leads:
        _ = mbarrier_arrive(keys_empty)
    weigh(scores, 0, key, value, biases, drawn)
    split[width](scores, high, low)
    var turn = Turn(1 % STAGES, 0)
    var before = Turn(0, 0)
    for step in range(1, steps):
        key = Record(records, key_tile + step // of_tile)
        value = Record(records, value_tile + step // of_tile)
        comptime if masked:
            biases = load_mask[width](of_head, first, step * rows, sizes)
        comptime if dropped:
            drawn = words_at[1](own_kept, step * rows)
        wait_together(keys_full.unsafe_offset(turn.stage), turn.parity)
        wgmma_fence_aligned()
        var next = times_pair[width](common(shared), common(keys.unsafe_offset(turn.stage * bytes)))
        wgmma_commit_group_sync()
        wait_together(values_full.unsafe_offset(before.stage), before.parity)
        wgmma_fence_aligned()
        var values_before = common(values.unsafe_offset(before.stage * bytes))
        var part = product_of_box[width, 0](high, low, values_before)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(next)
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        var earlier = rescales
        weigh(next, step, key, value, biases, drawn)
        wgmma_wait_group_sync[0]()
        add_boxes(part, values_before, earlier)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(before.stage))
        split[width](next, high, low)
        turn.step[STAGES]()
        before.step[STAGES]()
    wait_together(values_full.unsafe_offset(before.stage), before.parity)
    wgmma_fence_aligned()
    var values_before = values.unsafe_offset(before.stage * bytes)
    var part = product_of_box[width, 0](high, low, values_before)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    add_boxes(part, values_before, rescales)

    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var total = of_row(totals[half], False)
        factors[half] = undo / (total * WEIGHT) if total != 0 else 1
        comptime if dropped:
            factors[half] *= rescale
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
    width: Int, masked: Bool, dropped: Bool
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
    words: ImmPtr[DType.uint32],  # of `hopper_draws_kernel`, for the whole batch, read if `dropped`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    share: Float32,  # of probabilities that are kept, read if `dropped`,
    rescale: Float32,  # and what they are multiplied by
):
    """The gradient of the query. A block owns 64 queries and walks over the keys, 64 at a time, or 32."""
    comptime bytes = step_bytes[width]()
    comptime rows = step_rows[width]()
    comptime of_tile = SIDE // rows
    comptime later = later_stages[width]()
    comptime assert rows == SIDE or not dropped, "a word is of 64 keys"
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
    var first_step = (Int(tiles_before) + places.shared(sizes.shared_head(head))) * of_tile
    var s0 = own_tile * SIDE
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var steps = ceildiv(sizes.keys_seen(min(s0 + SIDE, S) - 1), rows)
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var own_grads = shared.unsafe_offset(tile_bytes[width]())
    var keys = shared.unsafe_offset(2 * tile_bytes[width]())
    var values = keys.unsafe_offset(STAGES * bytes)
    var own_here = values.unsafe_offset(later * bytes).unsafe_bitcast[Int64]()
    var keys_full = own_here.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(STAGES)
    var keys_empty = values_full.unsafe_offset(later)
    var values_empty = keys_empty.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * (STAGES + later)):
            mbarrier_init(own_here.unsafe_offset(i), 1)
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        comptime if width <= SIDE:
            warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * tile_bytes[width]()))
            send_tile[width](shared, tiles, places.query(head) + own_tile, own_here)
            send_tile[width](own_grads, tiles, places.grad_here(head) + own_tile, own_here)
            var turn = Turn(0, 1)
            var then = Turn(0, 1)
            for step in range(first_step, first_step + steps):
                var arrives = keys_full.unsafe_offset(turn.stage)
                wait(keys_empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(bytes))
                send_step[width](keys.unsafe_offset(turn.stage * bytes), key_tiles, step, arrives)
                arrives = values_full.unsafe_offset(then.stage)
                wait(values_empty.unsafe_offset(then.stage), then.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(bytes))
                send_step[width](values.unsafe_offset(then.stage * bytes), value_tiles, step, arrives)
                turn.step[STAGES]()
                then.step[later]()
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
        comptime if dropped:
            deltas[half] *= share
            factors[half] *= rescale
    var own_kept = words_of(words, whole_head, s0, 0, sizes).unsafe_offset(own_word())
    var sums = BoxSums[width](HALF(0))
    var turn = Turn(0, 0)
    var then = Turn(0, 0)
    wait_together(own_here, 0)
    for step in range(steps):
        var key = Record(records, key_tile + step // of_tile)
        var value = Record(records, value_tile + step // of_tile)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power) * WEIGHT
        var apart_factor = grad.undo * value.undo * down
        var undo = key.undo * (power / WEIGHT)
        var drawn = SIMD[DType.uint32, 1](0)
        comptime if dropped:
            drawn = words_at[1](own_kept, step * rows)
        wait_together(keys_full.unsafe_offset(turn.stage), turn.parity)
        var keys_here = common(keys.unsafe_offset(turn.stage * bytes))
        wgmma_fence_aligned()
        var weights = times_pair[width](common(shared), keys_here)
        wgmma_commit_group_sync()
        var biases = Scores[width](0)
        comptime if masked:
            biases = load_mask[width](of_head, first, step * rows, sizes)
        wait_together(values_full.unsafe_offset(then.stage), then.parity)
        wgmma_fence_aligned()
        var slopes = times_pair[width](common(own_grads), common(values.unsafe_offset(then.stage * bytes)))
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        comptime if masked:
            weights = biases.fma(LOG2_E, weights * factor)
            factor = 1
        comptime for i in range(rows // 2):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        if not all_seen(first, first + 1, step * rows, step * rows + rows, sizes):
            comptime for i in range(rows // 2):
                var seen = sees(place_of(i, first), step * rows + column_of(i), sizes)
                weights[i] = weights[i] if seen else 0
        wgmma_wait_group_sync[0]()
        settled(slopes)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(then.stage))
        comptime if dropped:
            drop(slopes, drawn)
        comptime for i in range(rows // 2):
            slopes[i] = weights[i] * (slopes[i] * apart_factor - deltas[i // 2 % 2] * down)
        var high = Fragments[width]()
        var low = Fragments[width]()
        split[width](slopes, high, low)
        add_product[width](sums, high, low, keys_here, undo)
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        turn.step[STAGES]()
        then.step[later]()
    store_pairs[width](grad_query.unsafe_offset(whole_head * S * d), sums, factors, first, S, d)
