"""The forward pass and the gradient of the query for Hopper: `wgmma` computes the products, and TMA loads
every tile.

The algorithm is the same as in `kernels.mojo`: a block owns rows and loops over the other operand, P and dS
stay in registers between products, and the backward pass is two kernels without atomics (the other one is in
`hopper_keys.mojo`). `hopper_tiles.mojo` explains the roles of the warps. Many small blocks are faster than a
few large ones; the backward kernels keep operands in registers, or in shared memory where its bandwidth
suffices. A separate loop handles the tiles that a causal mask does not affect: a branch inside a single loop
would keep the exponentials from overlapping the products.
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, syncwarp, thread_idx
from max.gpu.compute.mma import wgmma_commit_group_sync, wgmma_fence_aligned, wgmma_wait_group_sync
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, mbarrier_arrive_expect_tx_shared, mbarrier_init

from .kernels import DELTA_LANES, DELTA_THREADS, delta_share, sum_lanes
from .scores import LN_2, LOG2_E, Strides, reduce_row, row_shift
from .masks import is_one_row
from .hopper_dropout import WORDS_BYTES, drop, own_word, words_at, group_words
from .hopper_masks import (
    STEP_BYTES,
    Steps,
    add_mask,
    arrivals,
    arrives,
    box_bytes,
    count_mask_bytes,
    read_next_step,
    read_first_step,
    send_mask,
)
from .hopper_tiles import (
    BOX_BYTES,
    GROUP,
    HALF,
    ROW_BYTES,
    SIDE,
    Shared,
    Sums,
    Turn,
    add_products,
    common,
    divided,
    multiply,
    own_group,
    rounded,
    scores_from_shared,
    count_visible_keys,
    send_numbers,
    send_tile,
    settled,
    settled_sums,
    sharing,
    head_offset,
    store_sums,
    take_turn,
    wait,
    wait_together,
)
from .tiles import HIDDEN
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, start_later_grids, wait_for_earlier_grids

# ---- Forward ------------------------------------------------------------------------------------------------

comptime FORWARD_STAGES = 2


def registers[groups: Int, resident: Int, biased: Bool = False]() -> Int:
    """Return the registers per thread of `groups` consumer warpgroups, with `resident` blocks per
    multiprocessor.
    """
    comptime if groups == 1 and resident == 1:
        # A block with two consumer warpgroups starts with this number per thread, and cannot request fewer.
        return 248
    comptime if biased:
        return 208 if resident == 2 else 224
    return 232 if resident == 2 else 240 if groups == 2 else 160


def producer_registers[biased: Bool]() -> Int:
    """Return the registers per thread of the producer warpgroup: more if it selects the steps by a mask."""
    return 48 if biased else 24


def forward_bytes[width: Int, groups: Int, keys: Int, biased: Bool]() -> Int:
    """Return the bytes of shared memory per block of the forward kernel."""
    comptime of_mask = FORWARD_STAGES * groups * keys // SIDE if biased else 0
    comptime boxes = width // SIDE * (groups + FORWARD_STAGES * 2 * keys // SIDE) + of_mask
    return boxes * BOX_BYTES + 8 * (1 + 4 * FORWARD_STAGES) + FORWARD_STAGES * STEP_BYTES


@__name("attention_forward_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_forward_kernel[
    dtype: DType, width: Int, groups: Int, keys: Int, resident: Int, biased: Bool, dropped: Bool
](
    output: MutPtr[dtype],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    query_map: TMADescriptor,
    key_map: TMADescriptor,
    value_map: TMADescriptor,
    mask_map: TMADescriptor,  # read only if biased
    mask: ImmPtr[dtype],  # likewise
    words: ImmPtr[DType.uint32],  # from `hopper_draws_kernel`, read only if dropped
    output_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    rescale: Float32,  # the factor for kept probabilities; 1 without dropout
):
    """Compute output and lse. A block owns 64 queries per consumer warpgroup and loops over the keys, `keys`
    at a time. If `biased`, a mask is added to the scores; if `dropped`, some probabilities are set to 0.

    The scores of a step are computed while the previous step's product with the values is running.
    """
    comptime ROWS = groups * SIDE
    comptime MASK = groups * keys // SIDE * BOX_BYTES if biased else 0
    comptime OWN = width // SIDE * BOX_BYTES
    comptime TILE = width // SIDE * keys * ROW_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var own_head = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + own_head
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    # Run at least one step: a row that sees no key is treated as a row whose keys are all masked.
    var end = max(1, ceildiv(sizes.keys_seen(min(s0 + ROWS, S) - 1), keys)) * keys
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var key_tiles = shared.unsafe_offset(groups * OWN)
    var value_tiles = key_tiles.unsafe_offset(FORWARD_STAGES * TILE)
    var mask_boxes = value_tiles.unsafe_offset(FORWARD_STAGES * TILE)
    var query_here = mask_boxes.unsafe_offset(FORWARD_STAGES * MASK).unsafe_bitcast[Int64]()
    var keys_full = query_here.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(FORWARD_STAGES)
    var keys_empty = values_full.unsafe_offset(FORWARD_STAGES)
    var values_empty = keys_empty.unsafe_offset(FORWARD_STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * FORWARD_STAGES):
            mbarrier_init(query_here.unsafe_offset(i), 1)
        comptime for i in range(2 * FORWARD_STAGES):
            mbarrier_init(keys_empty.unsafe_offset(i), arrivals[biased](groups))
        fence_mbarrier_init()
    barrier()
    # The next grid waits for this whole grid before it reads the results.
    start_later_grids()

    var notes = values_empty.unsafe_offset(FORWARD_STAGES).unsafe_bitcast[Int32]()
    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[producer_registers[biased]()]()
        if thread_idx.x < (32 if biased else 1):
            var sends = thread_idx.x == 0
            var members = sharing(sizes)
            var shared_head = own_head if members == 1 else divided(own_head, members)[0]
            if sends:
                mbarrier_arrive_expect_tx_shared(query_here, Int32(groups * OWN))
                comptime for group in range(groups):
                    send_tile[width, SIDE](
                        shared.unsafe_offset(group * OWN),
                        query_map,
                        query_here,
                        s0 + group * SIDE,
                        own_head,
                        batch,
                    )
            var steps = Steps[dtype, keys, biased](mask, head, end, notes, sizes)
            var turn = Turn(0, 1)
            var t0 = steps.first(sizes)
            while t0 < end:
                var stage = turn.stage
                var following = steps.after(t0, sizes)
                if sends:
                    var keys_here = keys_full.unsafe_offset(stage)
                    var values_here = values_full.unsafe_offset(stage)
                    var bytes = TILE
                    comptime if biased:
                        bytes += count_mask_bytes[groups, keys // SIDE](sizes)
                    wait(keys_empty.unsafe_offset(stage), turn.parity)
                    steps.write_step(stage, t0, following)
                    mbarrier_arrive_expect_tx_shared(keys_here, Int32(bytes))
                    send_tile[width, keys](
                        key_tiles.unsafe_offset(stage * TILE), key_map, keys_here, t0, shared_head, batch
                    )
                    comptime if biased:
                        send_mask[groups, keys // SIDE](
                            mask_boxes.unsafe_offset(stage * MASK),
                            mask_map,
                            keys_here,
                            s0,
                            t0,
                            own_head,
                            batch,
                            sizes,
                        )
                    wait(values_empty.unsafe_offset(stage), turn.parity)
                    mbarrier_arrive_expect_tx_shared(values_here, Int32(TILE))
                    send_tile[width, keys](
                        value_tiles.unsafe_offset(stage * TILE),
                        value_map,
                        values_here,
                        t0,
                        shared_head,
                        batch,
                    )
                turn.step[FORWARD_STAGES]()
                t0 = following
        return

    warpgroup_reg_alloc[registers[groups, resident, biased]()]()
    var group = own_group[groups]()
    var own = common(shared.unsafe_offset(group * OWN))
    key_tiles = common(key_tiles)
    value_tiles = common(value_tiles)
    var own_mask = mask_boxes.unsafe_offset(group * (keys // SIDE) * box_bytes(sizes))
    if is_one_row(sizes):
        own_mask = mask_boxes
    var first = s0 + group * SIDE + thread_idx.x % GROUP // 32 * 16
    var own_kept = group_words(words, head, s0 + group * SIDE, 0, sizes).unsafe_offset(own_word())
    comptime if dropped:
        wait_for_earlier_grids()  # for the draws, whose grid has waited for everything read before this line
    var leads = arrives[biased]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if biased else scale * LOG2_E
    var bounds = count_visible_keys(first, sizes)
    # Not -inf, because -inf minus it must be -inf, not NaN. A smaller score would overflow when converted to
    # base 2.
    var lowest = Float32.MIN_FINITE / 2 / max(factor, 1)
    var largest = StaticTuple[Float32, 2](lowest, lowest)
    var totals = StaticTuple[Float32, 2](0, 0)
    var rescales = StaticTuple[Float32, 2](0, 0)
    var sums = Sums[width](fill=HALF(0))

    @__parameter
    @always_inline
    def weigh[width: SIMDLength, //, masked: Bool](mut scores: SIMD[DType.float32, width], t0: Int):
        comptime if masked:
            comptime for i in range(keys // 2):
                comptime column = Int32(i // 4 * 8 + i % 2)
                scores[i] = scores[i] if column < bounds[i // 2 % 2] - Int32(t0) else HIDDEN
        comptime for half in range(2):
            var grown = largest[half]
            comptime for j in range(keys // 8):
                grown = max(grown, max(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]))
            grown = reduce_row(grown, True)
            var shift = grown * factor
            # Subtract first: if both are `lowest`, a multiply-add would return its own rounding error instead
            # of 0.
            rescales[half] = exp2((largest[half] - grown) * factor)
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(keys // 8):
                comptime for side in range(2):
                    var weight = exp2(scores[4 * j + 2 * half + side] * factor - shift)
                    scores[4 * j + 2 * half + side] = weight
                    total += weight
            totals[half] = totals[half] * rescales[half] + total

    wait_together(query_here, 0)
    wait_together(keys_full, 0)
    var t0 = read_first_step[biased](notes)
    var following = read_next_step[keys, biased](notes, 0, t0)
    wgmma_fence_aligned()
    var scores = scores_from_shared[dtype, width, keys](own, key_tiles)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(scores)
    comptime if biased:
        add_mask[dtype=dtype](scores, scale, own_mask, sizes)
        syncwarp()  # every lane has read its part of the mask
    if leads:
        _ = mbarrier_arrive(keys_empty)
    # The warpgroup's first query sees the fewest keys; steps with keys that this query does not see come
    # last.
    var whole = min(end, sizes.keys_seen(s0 + group * SIDE) // keys * keys)
    if t0 < whole:
        weigh[False](scores, t0)
    else:
        weigh[True](scores, t0)
    # The draws are read one step ahead.
    var drawn = SIMD[DType.uint32, keys // SIDE](0)
    comptime if dropped:
        drop(scores, words_at[keys // SIDE](own_kept, t0))
        drawn = words_at[keys // SIDE](own_kept, min(following, end - keys))
    t0 = following
    var weights = rounded[dtype, keys // 16](scores)
    var turn = Turn(1 % FORWARD_STAGES, 0)
    var before = Turn(0, 0)
    comptime if groups == 2:
        if group == 1 and t0 < end:
            take_turn[arrive=True](0)

    @__parameter
    @always_inline
    def advance[masked: Bool]():
        wait_together(keys_full.unsafe_offset(turn.stage), turn.parity)
        var following = read_next_step[keys, biased](notes, turn.stage, t0)
        wait_together(values_full.unsafe_offset(before.stage), before.parity)
        comptime if groups == 2:
            take_turn[arrive=False](group)
        wgmma_fence_aligned()
        var next = scores_from_shared[dtype, width, keys](own, key_tiles.unsafe_offset(turn.stage * TILE))
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        add_products[dtype, keys // 16, width](weights, value_tiles.unsafe_offset(before.stage * TILE), sums)
        wgmma_commit_group_sync()
        comptime if groups == 2:
            if group == 0 or following < end:
                take_turn[arrive=True](1 - group)
        wgmma_wait_group_sync[1]()
        settled(next)
        comptime if biased:
            add_mask[dtype=dtype](next, scale, own_mask.unsafe_offset(turn.stage * MASK), sizes)
            syncwarp()
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        weigh[masked](next, t0)
        comptime if dropped:
            drop(next, drawn)
            drawn = words_at[keys // SIDE](own_kept, min(following, end - keys))
        wgmma_wait_group_sync[0]()
        settled_sums[width](sums)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(before.stage))
        comptime for half in range(width // SIDE):
            var scaled = sums[half]
            comptime for i in range(32):
                scaled[i] *= rescales[i // 2 % 2]
            sums[half] = scaled
        weights = rounded[dtype, keys // 16](next)
        turn.step[FORWARD_STAGES]()
        before.step[FORWARD_STAGES]()
        t0 = following

    while t0 < whole:
        advance[False]()
    while t0 < end:
        advance[True]()
    wait_together(values_full.unsafe_offset(before.stage), before.parity)
    wgmma_fence_aligned()
    add_products[dtype, keys // 16, width](weights, value_tiles.unsafe_offset(before.stage * TILE), sums)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled_sums[width](sums)

    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var total = reduce_row(totals[half], False)
        factors[half] = rescale / total if total != 0 else 1
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=head * S + s] = (
                HIDDEN if total == 0 else (largest[half] * factor + log2(total)) * LN_2
            )
    store_sums[width](
        output.unsafe_offset(head_offset(batch, own_head, output_strides)),
        sums,
        factors,
        first,
        S,
        Int(output_strides[2]),
        Int(sizes.head_dim),
    )


# ---- Backward -----------------------------------------------------------------------------------------------


def query_bytes[width: Int, groups: Int, stages: Int, biased: Bool, dropped: Bool]() -> Int:
    """Return the bytes of shared memory per block of the query's gradient kernel."""
    comptime of_mask = stages * groups if biased else 0
    comptime of_words = stages * groups * WORDS_BYTES if dropped else 0
    return (
        (width // SIDE * 2 * (groups + stages) + of_mask) * BOX_BYTES
        + of_words
        + 8 * (1 + 2 * stages)
        + stages * STEP_BYTES
    )


def padded(length: Int) -> Int:
    """Round a number of rows up to whole boxes."""
    return ceildiv(length, SIDE) * SIDE


@__name("attention_row_numbers")
def hopper_numbers_kernel[
    dtype: DType, behind_draws: Bool
](
    numbers: MutPtr[DType.float32],  # [B, N, 2, padded S]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S], read only if not from_output
    grad_output: ImmPtr[dtype],  # [B, N, S, d], read only if from_output
    output: ImmPtr[dtype],  # [B, N, S, d], likewise
    from_output: Int32,  # 0 or 1
    kept: Float32,  # the fraction of probabilities that dropout keeps
    grad_strides: Strides,
    output_strides: Strides,
    packed: PackedSizes,
):
    """Compute two numbers for each row, padded to whole boxes: the shift that is subtracted from its base-2
    scores, and `kept` times delta. Rows past the last query get a shift that makes P = 0. If `behind_draws`,
    the kernel overlaps `hopper_draws_kernel`, which has waited for everything that this kernel reads.
    """
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var index = block_idx.x * (DELTA_THREADS // DELTA_LANES) + thread_idx.x // DELTA_LANES
    var head, s = divided(index, length)
    # The next grid must not start earlier, because it reads results of the grids before this one.
    comptime if not behind_draws:
        wait_for_earlier_grids()
        start_later_grids()
    var batch, own_head = divided(head, Int(sizes.query_heads))
    var exists = head < sizes.heads() and s < S
    var sum = Float32(0)
    if exists and from_output != 0:
        sum = delta_share(
            grad_output.unsafe_offset(head_offset(batch, own_head, grad_strides) + s * Int(grad_strides[2])),
            output.unsafe_offset(head_offset(batch, own_head, output_strides) + s * Int(output_strides[2])),
            Int(sizes.head_dim),
        )
    sum = sum_lanes(sum)
    if head < sizes.heads() and thread_idx.x % DELTA_LANES == 0:
        var at = head * S + s
        if exists and from_output == 0:
            sum = delta[unsafe_offset=at]
        var shift = row_shift[True](lse[unsafe_offset=at]) if exists else -HIDDEN
        numbers[unsafe_offset=head * 2 * length + s] = shift
        numbers[unsafe_offset=(head * 2 + 1) * length + s] = sum * kept
    comptime if behind_draws:
        wait_for_earlier_grids()
        start_later_grids()


@__name("attention_query_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_query_kernel[
    dtype: DType, width: Int, groups: Int, stages: Int, resident: Int, biased: Bool, dropped: Bool
](
    grad_query: MutPtr[dtype],  # [B, N, S, d]
    query_map: TMADescriptor,
    grad_map: TMADescriptor,
    key_map: TMADescriptor,
    value_map: TMADescriptor,
    mask_map: TMADescriptor,  # read only if biased
    mask: ImmPtr[dtype],  # likewise
    words: ImmPtr[DType.uint32],  # from `hopper_draws_kernel`, read only if dropped
    numbers: ImmPtr[DType.float32],  # [B, N, 2, padded S]
    gradient_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    rescale: Float32,  # the factor for kept probabilities; 1 without dropout
):
    """Compute the gradient of the query. A block owns 64 queries per consumer warpgroup and loops over the
    keys, 64 at a time. If `biased`, a mask is added to the scores; if `dropped`, some probabilities were set
    to 0.
    """
    comptime ROWS = groups * SIDE
    comptime TILE = width // SIDE * BOX_BYTES
    comptime MASK = groups * BOX_BYTES if biased else 0
    comptime STAGE = 2 * TILE + MASK
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var own_head = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + own_head
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    var end = ceildiv(sizes.keys_seen(min(s0 + ROWS, S) - 1), SIDE) * SIDE
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var streamed = shared.unsafe_offset(2 * groups * TILE)
    comptime OF_WORDS = groups * WORDS_BYTES if dropped else 0
    var stage_words = streamed.unsafe_offset(stages * STAGE)
    var own_here = stage_words.unsafe_offset(stages * OF_WORDS).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(stages)
    if thread_idx.x == 0:
        mbarrier_init(own_here, 1)
        comptime for i in range(stages):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), arrivals[biased or dropped](groups))
        fence_mbarrier_init()
    barrier()

    var notes = empty.unsafe_offset(stages).unsafe_bitcast[Int32]()
    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[producer_registers[biased]()]()
        if thread_idx.x < (32 if biased else 1):
            var sends = thread_idx.x == 0
            var members = sharing(sizes)
            var shared_head = own_head if members == 1 else divided(own_head, members)[0]
            if sends:
                mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * groups * TILE))
                comptime for group in range(groups):
                    var row = s0 + group * SIDE
                    var at = shared.unsafe_offset(group * TILE)
                    send_tile[width, SIDE](at, query_map, own_here, row, own_head, batch)
                    send_tile[width, SIDE](
                        at.unsafe_offset(groups * TILE), grad_map, own_here, row, own_head, batch
                    )
            var steps = Steps[dtype, SIDE, biased](mask, head, end, notes, sizes)
            var turn = Turn(0, 1)
            var t0 = steps.first(sizes)
            while t0 < end:
                var following = steps.after(t0, sizes)
                if sends:
                    var tile = streamed.unsafe_offset(turn.stage * STAGE)
                    var here = full.unsafe_offset(turn.stage)
                    var bytes = 2 * TILE + OF_WORDS
                    comptime if biased:
                        bytes += count_mask_bytes[groups, 1](sizes)
                    wait(empty.unsafe_offset(turn.stage), turn.parity)
                    steps.write_step(turn.stage, t0, following)
                    mbarrier_arrive_expect_tx_shared(here, Int32(bytes))
                    send_tile[width, SIDE](tile, key_map, here, t0, shared_head, batch)
                    send_tile[width, SIDE](tile.unsafe_offset(TILE), value_map, here, t0, shared_head, batch)
                    comptime if biased:
                        var boxes = tile.unsafe_offset(2 * TILE)
                        send_mask[groups, 1](boxes, mask_map, here, s0, t0, own_head, batch, sizes)
                    comptime if dropped:
                        comptime for group in range(groups):
                            send_numbers(
                                stage_words.unsafe_offset(turn.stage * OF_WORDS + group * WORDS_BYTES),
                                group_words(words, head, s0 + group * SIDE, t0, sizes),
                                Int32(WORDS_BYTES),
                                here,
                            )
                turn.step[stages]()
                t0 = following
        return

    warpgroup_reg_alloc[registers[groups, resident, biased]()]()
    var group = own_group[groups]()
    var first = s0 + group * SIDE + thread_idx.x % GROUP // 32 * 16
    var leads = arrives[biased or dropped]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if biased else scale * LOG2_E
    var own_box = 2 * TILE + (0 if is_one_row(sizes) else group * BOX_BYTES)
    var bounds = count_visible_keys(first, sizes)
    var own_queries = shared.unsafe_offset(group * TILE)
    var own_grads = shared.unsafe_offset((groups + group) * TILE)
    var shifts = StaticTuple[Float32, 2](0, 0)
    var deltas = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var s = min(first + half * 8 + lane_id() // 4, S - 1)
        shifts[half] = numbers[unsafe_offset=head * 2 * length + s]
        deltas[half] = numbers[unsafe_offset=(head * 2 + 1) * length + s]
    var sums = Sums[width](fill=HALF(0))
    var turn = Turn(0, 0)
    var before = -1
    wait(own_here, 0)
    comptime if biased:
        wait(full, 0)
    var t0 = read_first_step[biased](notes)

    @__parameter
    @always_inline
    def advance[masked: Bool]():
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var keys = streamed.unsafe_offset(turn.stage * STAGE)
        var following = read_next_step[SIDE, biased](notes, turn.stage, t0)
        wgmma_fence_aligned()
        var weights = scores_from_shared[dtype, width, SIDE](own_queries, keys)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var slopes = scores_from_shared[dtype, width, SIDE](own_grads, keys.unsafe_offset(TILE))
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        # The product of the previous step is done too, so its stage may be refilled.
        if before >= 0 and leads:
            _ = mbarrier_arrive(empty.unsafe_offset(before))
        comptime if biased:
            add_mask[dtype=dtype](weights, scale, keys.unsafe_offset(own_box), sizes)
        comptime for i in range(32):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        comptime if masked:
            comptime for i in range(32):
                comptime column = Int32(i // 4 * 8 + i % 2)
                weights[i] = weights[i] if column < bounds[i // 2 % 2] - Int32(t0) else 0
        wgmma_wait_group_sync[0]()
        settled(slopes)
        comptime if dropped:
            var drawn = stage_words.unsafe_offset(turn.stage * OF_WORDS + group * WORDS_BYTES)
            var own = drawn.unsafe_bitcast[UInt32]()[unsafe_offset=own_word()]
            drop(slopes, SIMD[DType.uint32, 1](own))
        comptime for i in range(32):
            slopes[i] = weights[i] * (slopes[i] - deltas[i // 2 % 2])
        var left = rounded[dtype, 4](slopes)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, keys, sums)
        wgmma_commit_group_sync()
        before = turn.stage
        turn.step[stages]()
        t0 = following

    # The warpgroup's first query sees the fewest keys; steps with keys that this query does not see come
    # last.
    var whole = min(end, sizes.keys_seen(s0 + group * SIDE) // SIDE * SIDE)
    while t0 < whole:
        advance[False]()
    while t0 < end:
        advance[True]()
    wgmma_wait_group_sync[0]()
    settled_sums[width](sums)
    store_sums[width](
        grad_query.unsafe_offset(head_offset(batch, own_head, gradient_strides)),
        sums,
        StaticTuple[Float32, 2](scale * rescale, scale * rescale),
        first,
        S,
        Int(gradient_strides[2]),
        Int(sizes.head_dim),
    )
    # This kernel starts while the last blocks of the previous kernel are running, and must not finish before
    # them.
    wait_for_earlier_grids()
