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

from .kernels import DELTA_LANES, DELTA_THREADS, partial_delta, sum_lanes
from .scores import LN_2, LOG2_E, Strides, reduce_row, score_shift
from .masks import is_one_row
from .hopper_dropout import WORDS_BYTES, drop, lane_word_index, load_words, words_of_group
from .hopper_masks import (
    STEP_BYTES,
    Steps,
    add_mask,
    count_arrivals,
    is_arriving_lane,
    box_bytes,
    count_mask_bytes,
    read_next_step,
    read_first_step,
    tma_load_mask,
)
from .hopper_tiles import (
    BOX_BYTES,
    GROUP_THREADS,
    BoxSums,
    ROW_BYTES,
    BOX_SIZE,
    Shared,
    Sums,
    PipelineState,
    add_products,
    make_uniform,
    divmod32,
    multiply,
    consumer_index,
    round_to_operands,
    scores_from_shared,
    count_visible_keys,
    bulk_load,
    tma_load_tile,
    fence_accumulators,
    fence_all_accumulators,
    count_group_heads,
    head_offset,
    store_sums,
    alternate_groups,
    wait,
    wait_warp,
)
from .tiles import HIDDEN
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, launch_dependent_grids, wait_on_dependent_grids

# ---- Forward ------------------------------------------------------------------------------------------------

comptime FORWARD_STAGES = 2


def registers[groups: Int, resident: Int, has_mask: Bool = False]() -> Int:
    """Return the registers per thread of `groups` consumer warpgroups, with `resident` blocks per
    multiprocessor.
    """
    comptime if groups == 1 and resident == 1:
        # A block with two consumer warpgroups starts with this number per thread, and cannot request fewer.
        return 248
    comptime if has_mask:
        return 208 if resident == 2 else 224
    return 232 if resident == 2 else 240 if groups == 2 else 160


def producer_registers[has_mask: Bool]() -> Int:
    """Return the registers per thread of the producer warpgroup: more if it selects the steps by a mask."""
    return 48 if has_mask else 24


def forward_bytes[width: Int, groups: Int, keys: Int, has_mask: Bool]() -> Int:
    """Return the bytes of shared memory per block of the forward kernel."""
    comptime mask_boxes_bytes = FORWARD_STAGES * groups * keys // BOX_SIZE if has_mask else 0
    comptime boxes = width // BOX_SIZE * (groups + FORWARD_STAGES * 2 * keys // BOX_SIZE) + mask_boxes_bytes
    return boxes * BOX_BYTES + 8 * (1 + 4 * FORWARD_STAGES) + FORWARD_STAGES * STEP_BYTES


@__name("attention_forward_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP_THREADS)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_forward_kernel[
    dtype: DType, width: Int, groups: Int, keys: Int, resident: Int, has_mask: Bool, has_dropout: Bool
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
    at a time. If `has_mask`, a mask is added to the scores; if `has_dropout`, some probabilities are set to
    0.

    The scores of a step are computed while the previous step's product with the values is running.
    """
    comptime ROWS = groups * BOX_SIZE
    comptime MASK_STAGE_BYTES = groups * keys // BOX_SIZE * BOX_BYTES if has_mask else 0
    comptime QUERY_BYTES = width // BOX_SIZE * BOX_BYTES
    comptime TILE_BYTES = width // BOX_SIZE * keys * ROW_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var head_in_batch = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + head_in_batch
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    # Run at least one step: a row that sees no key is treated as a row whose keys are all masked.
    var end = max(1, ceildiv(sizes.visible_keys(min(s0 + ROWS, S) - 1), keys)) * keys
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var key_tiles = shared.unsafe_offset(groups * QUERY_BYTES)
    var value_tiles = key_tiles.unsafe_offset(FORWARD_STAGES * TILE_BYTES)
    var mask_boxes = value_tiles.unsafe_offset(FORWARD_STAGES * TILE_BYTES)
    var query_full = mask_boxes.unsafe_offset(FORWARD_STAGES * MASK_STAGE_BYTES).unsafe_bitcast[Int64]()
    var keys_full = query_full.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(FORWARD_STAGES)
    var keys_empty = values_full.unsafe_offset(FORWARD_STAGES)
    var values_empty = keys_empty.unsafe_offset(FORWARD_STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * FORWARD_STAGES):
            mbarrier_init(query_full.unsafe_offset(i), 1)
        comptime for i in range(2 * FORWARD_STAGES):
            mbarrier_init(keys_empty.unsafe_offset(i), count_arrivals[has_mask](groups))
        fence_mbarrier_init()
    barrier()
    # The next grid waits for this whole grid before it reads the results.
    launch_dependent_grids()

    var step_info = values_empty.unsafe_offset(FORWARD_STAGES).unsafe_bitcast[Int32]()
    if thread_idx.x < GROUP_THREADS:
        warpgroup_reg_dealloc[producer_registers[has_mask]()]()
        if thread_idx.x < (32 if has_mask else 1):
            var is_producer = thread_idx.x == 0
            var group_heads = count_group_heads(sizes)
            var shared_head = head_in_batch if group_heads == 1 else divmod32(head_in_batch, group_heads)[0]
            if is_producer:
                mbarrier_arrive_expect_tx_shared(query_full, Int32(groups * QUERY_BYTES))
                comptime for group in range(groups):
                    tma_load_tile[width, BOX_SIZE](
                        shared.unsafe_offset(group * QUERY_BYTES),
                        query_map,
                        query_full,
                        s0 + group * BOX_SIZE,
                        head_in_batch,
                        batch,
                    )
            var steps = Steps[dtype, keys, has_mask](mask, head, end, step_info, sizes)
            var state = PipelineState(0, 1)
            var t0 = steps.first(sizes)
            while t0 < end:
                var stage = state.stage
                var following = steps.after(t0, sizes)
                if is_producer:
                    var keys_barrier = keys_full.unsafe_offset(stage)
                    var values_barrier = values_full.unsafe_offset(stage)
                    var bytes = TILE_BYTES
                    comptime if has_mask:
                        bytes += count_mask_bytes[groups, keys // BOX_SIZE](sizes)
                    wait(keys_empty.unsafe_offset(stage), state.parity)
                    steps.write_step(stage, t0, following)
                    mbarrier_arrive_expect_tx_shared(keys_barrier, Int32(bytes))
                    tma_load_tile[width, keys](
                        key_tiles.unsafe_offset(stage * TILE_BYTES),
                        key_map,
                        keys_barrier,
                        t0,
                        shared_head,
                        batch,
                    )
                    comptime if has_mask:
                        tma_load_mask[groups, keys // BOX_SIZE](
                            mask_boxes.unsafe_offset(stage * MASK_STAGE_BYTES),
                            mask_map,
                            keys_barrier,
                            s0,
                            t0,
                            head_in_batch,
                            batch,
                            sizes,
                        )
                    wait(values_empty.unsafe_offset(stage), state.parity)
                    mbarrier_arrive_expect_tx_shared(values_barrier, Int32(TILE_BYTES))
                    tma_load_tile[width, keys](
                        value_tiles.unsafe_offset(stage * TILE_BYTES),
                        value_map,
                        values_barrier,
                        t0,
                        shared_head,
                        batch,
                    )
                state.step[FORWARD_STAGES]()
                t0 = following
        return

    warpgroup_reg_alloc[registers[groups, resident, has_mask]()]()
    var group = consumer_index[groups]()
    var group_queries = make_uniform(shared.unsafe_offset(group * QUERY_BYTES))
    key_tiles = make_uniform(key_tiles)
    value_tiles = make_uniform(value_tiles)
    var group_mask = mask_boxes.unsafe_offset(group * (keys // BOX_SIZE) * box_bytes(sizes))
    if is_one_row(sizes):
        group_mask = mask_boxes
    var first = s0 + group * BOX_SIZE + thread_idx.x % GROUP_THREADS // 32 * 16
    var lane_words = words_of_group(words, head, s0 + group * BOX_SIZE, 0, sizes).unsafe_offset(
        lane_word_index()
    )
    comptime if has_dropout:
        wait_on_dependent_grids()  # for the draws, whose grid has waited for everything read before this line
    var is_arriving = is_arriving_lane[has_mask]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if has_mask else scale * LOG2_E
    var bounds = count_visible_keys(first, sizes)
    # Not -inf, because -inf minus it must be -inf, not NaN. A smaller score would overflow when converted to
    # base 2.
    var lowest = Float32.MIN_FINITE / 2 / max(factor, 1)
    var largest = StaticTuple[Float32, 2](lowest, lowest)
    var totals = StaticTuple[Float32, 2](0, 0)
    var rescales = StaticTuple[Float32, 2](0, 0)
    var sums = Sums[width](fill=BoxSums(0))

    @__parameter
    @always_inline
    def compute_weights[width: SIMDLength, //, masked: Bool](mut scores: SIMD[DType.float32, width], t0: Int):
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

    wait_warp(query_full, 0)
    wait_warp(keys_full, 0)
    var t0 = read_first_step[has_mask](step_info)
    var following = read_next_step[keys, has_mask](step_info, 0, t0)
    wgmma_fence_aligned()
    var scores = scores_from_shared[dtype, width, keys](group_queries, key_tiles)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    fence_accumulators(scores)
    comptime if has_mask:
        add_mask[dtype=dtype](scores, scale, group_mask, sizes)
        syncwarp()  # every lane has read its part of the mask
    if is_arriving:
        _ = mbarrier_arrive(keys_empty)
    # The warpgroup's first query sees the fewest keys; steps with keys that this query does not see come
    # last.
    var whole = min(end, sizes.visible_keys(s0 + group * BOX_SIZE) // keys * keys)
    if t0 < whole:
        compute_weights[False](scores, t0)
    else:
        compute_weights[True](scores, t0)
    # The draws are read one step ahead.
    var drawn = SIMD[DType.uint32, keys // BOX_SIZE](0)
    comptime if has_dropout:
        drop(scores, load_words[keys // BOX_SIZE](lane_words, t0))
        drawn = load_words[keys // BOX_SIZE](lane_words, min(following, end - keys))
    t0 = following
    var weights = round_to_operands[dtype, keys // 16](scores)
    var state = PipelineState(1 % FORWARD_STAGES, 0)
    var previous = PipelineState(0, 0)
    comptime if groups == 2:
        if group == 1 and t0 < end:
            alternate_groups[arrive=True](0)

    @__parameter
    @always_inline
    def advance[masked: Bool]():
        wait_warp(keys_full.unsafe_offset(state.stage), state.parity)
        var following = read_next_step[keys, has_mask](step_info, state.stage, t0)
        wait_warp(values_full.unsafe_offset(previous.stage), previous.parity)
        comptime if groups == 2:
            alternate_groups[arrive=False](group)
        wgmma_fence_aligned()
        var next = scores_from_shared[dtype, width, keys](
            group_queries, key_tiles.unsafe_offset(state.stage * TILE_BYTES)
        )
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        add_products[dtype, keys // 16, width](
            weights, value_tiles.unsafe_offset(previous.stage * TILE_BYTES), sums
        )
        wgmma_commit_group_sync()
        comptime if groups == 2:
            if group == 0 or following < end:
                alternate_groups[arrive=True](1 - group)
        wgmma_wait_group_sync[1]()
        fence_accumulators(next)
        comptime if has_mask:
            add_mask[dtype=dtype](
                next, scale, group_mask.unsafe_offset(state.stage * MASK_STAGE_BYTES), sizes
            )
            syncwarp()
        if is_arriving:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(state.stage))
        compute_weights[masked](next, t0)
        comptime if has_dropout:
            drop(next, drawn)
            drawn = load_words[keys // BOX_SIZE](lane_words, min(following, end - keys))
        wgmma_wait_group_sync[0]()
        fence_all_accumulators[width](sums)
        if is_arriving:
            _ = mbarrier_arrive(values_empty.unsafe_offset(previous.stage))
        comptime for half in range(width // BOX_SIZE):
            var scaled = sums[half]
            comptime for i in range(32):
                scaled[i] *= rescales[i // 2 % 2]
            sums[half] = scaled
        weights = round_to_operands[dtype, keys // 16](next)
        state.step[FORWARD_STAGES]()
        previous.step[FORWARD_STAGES]()
        t0 = following

    while t0 < whole:
        advance[False]()
    while t0 < end:
        advance[True]()
    wait_warp(values_full.unsafe_offset(previous.stage), previous.parity)
    wgmma_fence_aligned()
    add_products[dtype, keys // 16, width](
        weights, value_tiles.unsafe_offset(previous.stage * TILE_BYTES), sums
    )
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    fence_all_accumulators[width](sums)

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
        output.unsafe_offset(head_offset(batch, head_in_batch, output_strides)),
        sums,
        factors,
        first,
        S,
        Int(output_strides[2]),
        Int(sizes.head_dim),
    )


# ---- Backward -----------------------------------------------------------------------------------------------


def query_bytes[width: Int, groups: Int, stages: Int, has_mask: Bool, has_dropout: Bool]() -> Int:
    """Return the bytes of shared memory per block of the query's gradient kernel."""
    comptime mask_boxes_bytes = stages * groups if has_mask else 0
    comptime of_words = stages * groups * WORDS_BYTES if has_dropout else 0
    return (
        (width // BOX_SIZE * 2 * (groups + stages) + mask_boxes_bytes) * BOX_BYTES
        + of_words
        + 8 * (1 + 2 * stages)
        + stages * STEP_BYTES
    )


def padded(length: Int) -> Int:
    """Round a number of rows up to whole boxes."""
    return ceildiv(length, BOX_SIZE) * BOX_SIZE


@__name("attention_row_numbers")
def hopper_numbers_kernel[
    dtype: DType, after_draws: Bool
](
    numbers: MutPtr[DType.float32],  # [B, N, 2, padded S]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S], read only if not from_output
    grad_output: ImmPtr[dtype],  # [B, N, S, d], read only if from_output
    output: ImmPtr[dtype],  # [B, N, S, d], likewise
    from_output: Int32,  # 0 or 1
    keep_fraction: Float32,  # the fraction of probabilities that dropout keeps
    grad_strides: Strides,
    output_strides: Strides,
    packed: PackedSizes,
):
    """Compute two numbers for each row, padded to whole boxes: the shift that is subtracted from its base-2
    scores, and `keep_fraction` times delta. Rows past the last query get a shift that makes P = 0. If
    `after_draws`, the kernel overlaps `hopper_draws_kernel`, which has waited for everything that this kernel
    reads.
    """
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, BOX_SIZE) * BOX_SIZE
    var index = block_idx.x * (DELTA_THREADS // DELTA_LANES) + thread_idx.x // DELTA_LANES
    var head, s = divmod32(index, length)
    # The next grid must not start earlier, because it reads results of the grids before this one.
    comptime if not after_draws:
        wait_on_dependent_grids()
        launch_dependent_grids()
    var batch, head_in_batch = divmod32(head, Int(sizes.query_heads))
    var exists = head < sizes.heads() and s < S
    var sum = Float32(0)
    if exists and from_output != 0:
        sum = partial_delta(
            grad_output.unsafe_offset(
                head_offset(batch, head_in_batch, grad_strides) + s * Int(grad_strides[2])
            ),
            output.unsafe_offset(
                head_offset(batch, head_in_batch, output_strides) + s * Int(output_strides[2])
            ),
            Int(sizes.head_dim),
        )
    sum = sum_lanes(sum)
    if head < sizes.heads() and thread_idx.x % DELTA_LANES == 0:
        var at = head * S + s
        if exists and from_output == 0:
            sum = delta[unsafe_offset=at]
        var shift = score_shift[True](lse[unsafe_offset=at]) if exists else -HIDDEN
        numbers[unsafe_offset=head * 2 * length + s] = shift
        numbers[unsafe_offset=(head * 2 + 1) * length + s] = sum * keep_fraction
    comptime if after_draws:
        wait_on_dependent_grids()
        launch_dependent_grids()


@__name("attention_query_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP_THREADS)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_query_kernel[
    dtype: DType, width: Int, groups: Int, stages: Int, resident: Int, has_mask: Bool, has_dropout: Bool
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
    keys, 64 at a time. If `has_mask`, a mask is added to the scores; if `has_dropout`, some probabilities
    were set to 0.
    """
    comptime ROWS = groups * BOX_SIZE
    comptime TILE_BYTES = width // BOX_SIZE * BOX_BYTES
    comptime MASK_STAGE_BYTES = groups * BOX_BYTES if has_mask else 0
    comptime STAGE_BYTES = 2 * TILE_BYTES + MASK_STAGE_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, BOX_SIZE) * BOX_SIZE
    var head_in_batch = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + head_in_batch
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    var end = ceildiv(sizes.visible_keys(min(s0 + ROWS, S) - 1), BOX_SIZE) * BOX_SIZE
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var streamed = shared.unsafe_offset(2 * groups * TILE_BYTES)
    comptime WORDS_STAGE_BYTES = groups * WORDS_BYTES if has_dropout else 0
    var stage_words = streamed.unsafe_offset(stages * STAGE_BYTES)
    var operands_full = stage_words.unsafe_offset(stages * WORDS_STAGE_BYTES).unsafe_bitcast[Int64]()
    var full = operands_full.unsafe_offset(1)
    var empty = full.unsafe_offset(stages)
    if thread_idx.x == 0:
        mbarrier_init(operands_full, 1)
        comptime for i in range(stages):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), count_arrivals[has_mask or has_dropout](groups))
        fence_mbarrier_init()
    barrier()

    var step_info = empty.unsafe_offset(stages).unsafe_bitcast[Int32]()
    if thread_idx.x < GROUP_THREADS:
        warpgroup_reg_dealloc[producer_registers[has_mask]()]()
        if thread_idx.x < (32 if has_mask else 1):
            var is_producer = thread_idx.x == 0
            var group_heads = count_group_heads(sizes)
            var shared_head = head_in_batch if group_heads == 1 else divmod32(head_in_batch, group_heads)[0]
            if is_producer:
                mbarrier_arrive_expect_tx_shared(operands_full, Int32(2 * groups * TILE_BYTES))
                comptime for group in range(groups):
                    var row = s0 + group * BOX_SIZE
                    var at = shared.unsafe_offset(group * TILE_BYTES)
                    tma_load_tile[width, BOX_SIZE](at, query_map, operands_full, row, head_in_batch, batch)
                    tma_load_tile[width, BOX_SIZE](
                        at.unsafe_offset(groups * TILE_BYTES),
                        grad_map,
                        operands_full,
                        row,
                        head_in_batch,
                        batch,
                    )
            var steps = Steps[dtype, BOX_SIZE, has_mask](mask, head, end, step_info, sizes)
            var state = PipelineState(0, 1)
            var t0 = steps.first(sizes)
            while t0 < end:
                var following = steps.after(t0, sizes)
                if is_producer:
                    var tile = streamed.unsafe_offset(state.stage * STAGE_BYTES)
                    var stage_full = full.unsafe_offset(state.stage)
                    var bytes = 2 * TILE_BYTES + WORDS_STAGE_BYTES
                    comptime if has_mask:
                        bytes += count_mask_bytes[groups, 1](sizes)
                    wait(empty.unsafe_offset(state.stage), state.parity)
                    steps.write_step(state.stage, t0, following)
                    mbarrier_arrive_expect_tx_shared(stage_full, Int32(bytes))
                    tma_load_tile[width, BOX_SIZE](tile, key_map, stage_full, t0, shared_head, batch)
                    tma_load_tile[width, BOX_SIZE](
                        tile.unsafe_offset(TILE_BYTES), value_map, stage_full, t0, shared_head, batch
                    )
                    comptime if has_mask:
                        var boxes = tile.unsafe_offset(2 * TILE_BYTES)
                        tma_load_mask[groups, 1](
                            boxes, mask_map, stage_full, s0, t0, head_in_batch, batch, sizes
                        )
                    comptime if has_dropout:
                        comptime for group in range(groups):
                            bulk_load(
                                stage_words.unsafe_offset(
                                    state.stage * WORDS_STAGE_BYTES + group * WORDS_BYTES
                                ),
                                words_of_group(words, head, s0 + group * BOX_SIZE, t0, sizes),
                                Int32(WORDS_BYTES),
                                stage_full,
                            )
                state.step[stages]()
                t0 = following
        return

    warpgroup_reg_alloc[registers[groups, resident, has_mask]()]()
    var group = consumer_index[groups]()
    var first = s0 + group * BOX_SIZE + thread_idx.x % GROUP_THREADS // 32 * 16
    var is_arriving = is_arriving_lane[has_mask or has_dropout]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if has_mask else scale * LOG2_E
    var mask_box_offset = 2 * TILE_BYTES + (0 if is_one_row(sizes) else group * BOX_BYTES)
    var bounds = count_visible_keys(first, sizes)
    var query_operand = shared.unsafe_offset(group * TILE_BYTES)
    var grad_operand = shared.unsafe_offset((groups + group) * TILE_BYTES)
    var shifts = StaticTuple[Float32, 2](0, 0)
    var deltas = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var s = min(first + half * 8 + lane_id() // 4, S - 1)
        shifts[half] = numbers[unsafe_offset=head * 2 * length + s]
        deltas[half] = numbers[unsafe_offset=(head * 2 + 1) * length + s]
    var sums = Sums[width](fill=BoxSums(0))
    var state = PipelineState(0, 0)
    var previous = -1
    wait(operands_full, 0)
    comptime if has_mask:
        wait(full, 0)
    var t0 = read_first_step[has_mask](step_info)

    @__parameter
    @always_inline
    def advance[masked: Bool]():
        wait(full.unsafe_offset(state.stage), state.parity)
        var keys = streamed.unsafe_offset(state.stage * STAGE_BYTES)
        var following = read_next_step[BOX_SIZE, has_mask](step_info, state.stage, t0)
        wgmma_fence_aligned()
        var weights = scores_from_shared[dtype, width, BOX_SIZE](query_operand, keys)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var score_grads = scores_from_shared[dtype, width, BOX_SIZE](
            grad_operand, keys.unsafe_offset(TILE_BYTES)
        )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        fence_accumulators(weights)
        # The product of the previous step is done too, so its stage may be refilled.
        if previous >= 0 and is_arriving:
            _ = mbarrier_arrive(empty.unsafe_offset(previous))
        comptime if has_mask:
            add_mask[dtype=dtype](weights, scale, keys.unsafe_offset(mask_box_offset), sizes)
        comptime for i in range(32):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        comptime if masked:
            comptime for i in range(32):
                comptime column = Int32(i // 4 * 8 + i % 2)
                weights[i] = weights[i] if column < bounds[i // 2 % 2] - Int32(t0) else 0
        wgmma_wait_group_sync[0]()
        fence_accumulators(score_grads)
        comptime if has_dropout:
            var drawn = stage_words.unsafe_offset(state.stage * WORDS_STAGE_BYTES + group * WORDS_BYTES)
            var mask_word = drawn.unsafe_bitcast[UInt32]()[unsafe_offset=lane_word_index()]
            drop(score_grads, SIMD[DType.uint32, 1](mask_word))
        comptime for i in range(32):
            score_grads[i] = weights[i] * (score_grads[i] - deltas[i // 2 % 2])
        var left = round_to_operands[dtype, 4](score_grads)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, keys, sums)
        wgmma_commit_group_sync()
        previous = state.stage
        state.step[stages]()
        t0 = following

    # The warpgroup's first query sees the fewest keys; steps with keys that this query does not see come
    # last.
    var whole = min(end, sizes.visible_keys(s0 + group * BOX_SIZE) // BOX_SIZE * BOX_SIZE)
    while t0 < whole:
        advance[False]()
    while t0 < end:
        advance[True]()
    wgmma_wait_group_sync[0]()
    fence_all_accumulators[width](sums)
    store_sums[width](
        grad_query.unsafe_offset(head_offset(batch, head_in_batch, gradient_strides)),
        sums,
        StaticTuple[Float32, 2](scale * rescale, scale * rescale),
        first,
        S,
        Int(gradient_strides[2]),
        Int(sizes.head_dim),
    )
    # This kernel starts while the last blocks of the previous kernel are running, and must not finish before
    # them.
    wait_on_dependent_grids()
