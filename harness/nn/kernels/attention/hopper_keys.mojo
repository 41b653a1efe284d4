"""The gradients of key and value with `wgmma` and TMA, from the building blocks of `hopper.mojo`.

Scores are transposed, [keys, queries], so that P and dS are left operands in the layout in which a product
leaves them. The keys and values are left operands too. For heads of up to 64 elements they stay in registers,
because reading both operands of a product with 64 columns from shared memory takes all of its bandwidth. Two
small blocks share a multiprocessor: one multiplies while the other computes exponentials. For wider heads the
accumulators alone fill the registers.

There must be no branch between the products of a step. If there is one, NVIDIA's assembler up to release 13.0
reuses the registers of left operands that live across steps for P and dS, so every step but the first
multiplies wrong values; release 13.4 does not. So a separate kernel applies a causal mask, without a branch.
The steps that it affects come first, for all heads, in a separate loop; for wider heads the mask is applied
in all steps, because a second loop would need too many registers.

For heads above 128 elements the accumulators of one gradient alone fill the registers. Therefore two
warpgroups own the same keys: one computes P and the gradient of the value, and passes P to the other, which
computes dS and the gradient of the key.
"""

from std.math import ceildiv, exp2
from std.memory import AddressSpace
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix, wgmma_commit_group_sync, wgmma_fence_aligned, wgmma_wait_group_sync
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.sync import mbarrier_arrive, mbarrier_arrive_expect_tx_shared, mbarrier_init

from .hopper import registers
from .hopper_dropout import WORDS_BYTES, hide_word, drop, transposed_word, words_of_group
from .hopper_masks import (
    add_mask,
    count_arrivals,
    is_arriving_lane,
    box_bytes,
    count_mask_bytes,
    clear_rows,
    are_shared_keys_hidden,
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
    multiply,
    consumer_index,
    round_to_operands,
    scores_from_shared,
    bulk_load,
    tma_load_tile,
    fence_accumulators,
    fence_all_accumulators,
    count_group_heads,
    head_offset,
    store_sums,
    tile_descriptor,
    wait,
)
from .scores import LOG2_E, Strides
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, launch_dependent_grids, wait_on_dependent_grids

comptime NUMBERS_BYTES = 2 * BOX_SIZE * 4
"""Bytes per stage for the two numbers of each query: the shift of its scores, and delta."""
comptime P_EXCHANGE_BYTES = BOX_SIZE * BOX_SIZE * 4
"""Bytes of P for 64 keys and 64 queries."""


def key_stages[width: Int]() -> Int:
    """Return the stages of the pipeline. A stage is released one step late; if only one block fits on a
    multiprocessor, a third stage hides that, if there is room.
    """
    return 3 if BOX_SIZE < width <= 3 * BOX_SIZE else 2


def key_owners[width: Int, groups: Int]() -> Int:
    """Return the number of groups of 64 keys that a block owns: for wide heads the two warpgroups own the
    same keys.
    """
    return groups if width <= 2 * BOX_SIZE else groups // 2


def key_bytes[width: Int, groups: Int, has_mask: Bool, has_dropout: Bool]() -> Int:
    """Return the bytes of shared memory per block."""
    comptime stages = key_stages[width]()
    comptime owners = key_owners[width, groups]()
    comptime boxes = width // BOX_SIZE * 2 * (owners + stages) + (stages * owners if has_mask else 0)
    comptime p_buffer = 2 * P_EXCHANGE_BYTES if owners < groups else 0
    comptime words = owners * WORDS_BYTES if has_dropout else 0
    return boxes * BOX_BYTES + stages * (NUMBERS_BYTES + words) + p_buffer + 8 * (1 + 2 * stages)


@always_inline
def synchronize_pair():
    """Synchronize both warpgroups of a pair."""
    inlined_assembly["barrier.cta.sync 1, 256;", NoneType, constraints="~{memory}", has_side_effect=True]()


struct LeftOperand[dtype: DType, width: Int](Copyable, Movable):
    """The 64 rows of a tile that a warpgroup owns, as a left operand; held in registers if they are 64
    elements wide.
    """

    @__allow_legacy_any_origin_fields
    var tile: Shared[UInt8]
    var fragments: StaticTuple[SIMD[Self.dtype, 8], 4]

    @always_inline
    def __init__(out self, tile: Shared[UInt8]):
        """Read the rows from a tile that has arrived."""
        self.tile = tile
        self.fragments = StaticTuple[SIMD[Self.dtype, 8], 4]()
        comptime if Self.width == BOX_SIZE:
            var row = thread_idx.x % GROUP_THREADS // 32 * 16 + lane_id() % 16
            comptime for k in range(4):
                var chunk = (2 * k + lane_id() // 16) ^ (row % 8)
                self.fragments[k] = ld_matrix[8](
                    tile.unsafe_offset(row * ROW_BYTES + chunk * 16).unsafe_bitcast[Scalar[Self.dtype]]()
                )

    @always_inline
    def scores(self, other: Shared[UInt8]) -> BoxSums:
        """Return this operand @ other^T, 64 x 64."""
        comptime if Self.width == BOX_SIZE:
            var right = tile_descriptor(other, 1)
            var sums = multiply[True, fresh=True](self.fragments[0], right, BoxSums(0))
            comptime for k in range(1, 4):
                sums = multiply[True](self.fragments[k], right + Int64(2 * k), sums)
            return sums
        else:
            return rebind[BoxSums](scores_from_shared[Self.dtype, Self.width, BOX_SIZE](self.tile, other))


@always_inline
def apply_causal_mask(mut weights: BoxSums, s0: Int, first: Int, sizes: FlashSizes):
    """Set to 0 the weights of query-key pairs that a causal mask hides; queries begin at s0, a warp's keys at
    `first`.

    Queries and keys past the end need no check: weights of such queries are 0, and rows of such keys are not
    stored.
    """
    comptime for half in range(2):
        var key = Int32(first) + Int32(half * 8) + Int32(lane_id()) // 4
        var first_visible = key - sizes.diagonal - Int32(s0) - Int32(lane_id()) % 4 * 2
        comptime for j in range(8):
            comptime for side in range(2):
                comptime i = 4 * j + 2 * half + side
                weights[i] = weights[i] if Int32(8 * j + side) >= first_visible else 0


@__name("attention_key_value_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP_THREADS)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_key_value_kernel[
    dtype: DType, width: Int, groups: Int, resident: Int, masked: Bool, has_mask: Bool, has_dropout: Bool
](
    grad_key: MutPtr[dtype],  # [B, G, T, d]
    grad_value: MutPtr[dtype],  # [B, G, T, d]
    query_map: TMADescriptor,
    grad_map: TMADescriptor,
    key_map: TMADescriptor,
    value_map: TMADescriptor,
    mask_map: TMADescriptor,  # read only if biased
    mask: ImmPtr[dtype],  # likewise
    words: ImmPtr[DType.uint32],  # from `hopper_draws_kernel`, read only if dropped
    numbers: ImmPtr[DType.float32],  # [B, N, 2, padded S]
    grad_key_strides: Strides,
    grad_value_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    rescale: Float32,  # the factor for kept probabilities; 1 without dropout
):
    """Compute the gradients of key and value. A block owns 64 keys for each of its `key_owners` and loops
    over the queries of all heads that share them, 64 at a time. If `masked`, a query sees no key past the
    diagonal; if `has_mask`, a mask is added to the scores; if `has_dropout`, some probabilities were set to
    0.
    """
    comptime owners = key_owners[width, groups]()
    comptime paired = owners < groups
    comptime assert not paired or groups == 2, "a pair consists of the two warpgroups of a block"
    comptime ROWS = owners * BOX_SIZE
    comptime TILE_BYTES = width // BOX_SIZE * BOX_BYTES
    comptime MASK_STAGE_BYTES = owners * BOX_BYTES if has_mask else 0
    comptime STAGE_BYTES = 2 * TILE_BYTES + MASK_STAGE_BYTES
    comptime STAGES = key_stages[width]()
    comptime EXTRA_STAGE_BYTES = NUMBERS_BYTES + (owners * WORDS_BYTES if has_dropout else 0)
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var length = ceildiv(S, BOX_SIZE) * BOX_SIZE
    var head_in_batch = block_idx.y
    var batch = block_idx.z
    var shared_head = batch * Int(sizes.key_heads) + head_in_batch
    var t0 = block_idx.x * ROWS
    # Run at least one step per head: keys that no query sees are treated as masked for all queries.
    var start = min(sizes.first_query(t0), S - 1) // BOX_SIZE
    var steps = ceildiv(S, BOX_SIZE) - start
    # From this step on queries see all keys of the block; the steps before it come first, for all heads.
    var causal_steps = steps
    comptime if masked and width == BOX_SIZE:
        causal_steps = max(1, min(ceildiv(t0 + ROWS - 1 - Int(sizes.diagonal), BOX_SIZE) - start, steps))
    var group_heads = count_group_heads(sizes)
    comptime if has_mask:
        if are_shared_keys_hidden[ROWS](mask, shared_head * group_heads, group_heads, t0, sizes):
            var d = Int(sizes.head_dim)
            wait_on_dependent_grids()
            clear_rows(
                grad_key.unsafe_offset(head_offset(batch, head_in_batch, grad_key_strides)),
                t0,
                ROWS,
                T,
                Int(grad_key_strides[2]),
                d,
            )
            clear_rows(
                grad_value.unsafe_offset(head_offset(batch, head_in_batch, grad_value_strides)),
                t0,
                ROWS,
                T,
                Int(grad_value_strides[2]),
                d,
            )
            return
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var stages = shared.unsafe_offset(2 * owners * TILE_BYTES)
    var stage_numbers = stages.unsafe_offset(STAGES * STAGE_BYTES)
    var p_buffer = stage_numbers.unsafe_offset(STAGES * EXTRA_STAGE_BYTES)
    var operands_full = p_buffer.unsafe_offset(2 * P_EXCHANGE_BYTES if paired else 0).unsafe_bitcast[Int64]()
    var full = operands_full.unsafe_offset(1)
    var empty = full.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        mbarrier_init(operands_full, 1)
        comptime for i in range(STAGES):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), count_arrivals[has_mask or has_dropout](groups))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP_THREADS:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(operands_full, Int32(2 * owners * TILE_BYTES))
            comptime for group in range(owners):
                var at = shared.unsafe_offset(group * TILE_BYTES)
                tma_load_tile[width, BOX_SIZE](
                    at, key_map, operands_full, t0 + group * BOX_SIZE, head_in_batch, batch
                )
                tma_load_tile[width, BOX_SIZE](
                    at.unsafe_offset(owners * TILE_BYTES),
                    value_map,
                    operands_full,
                    t0 + group * BOX_SIZE,
                    head_in_batch,
                    batch,
                )
            var state = PipelineState(0, 1)

            @__parameter
            @always_inline
            def send(begin: Int, end: Int):
                for member in range(group_heads):
                    var head = head_in_batch * group_heads + member
                    var rows = numbers.unsafe_offset((shared_head * group_heads + member) * 2 * length)
                    for step in range(begin, end):
                        var tile = stages.unsafe_offset(state.stage * STAGE_BYTES)
                        var stage_row_numbers = stage_numbers.unsafe_offset(state.stage * EXTRA_STAGE_BYTES)
                        var stage_full = full.unsafe_offset(state.stage)
                        var bytes = 2 * TILE_BYTES + EXTRA_STAGE_BYTES
                        comptime if has_mask:
                            bytes += count_mask_bytes[1, owners](sizes)
                        wait(empty.unsafe_offset(state.stage), state.parity)
                        mbarrier_arrive_expect_tx_shared(stage_full, Int32(bytes))
                        tma_load_tile[width, BOX_SIZE](
                            tile, query_map, stage_full, step * BOX_SIZE, head, batch
                        )
                        tma_load_tile[width, BOX_SIZE](
                            tile.unsafe_offset(TILE_BYTES), grad_map, stage_full, step * BOX_SIZE, head, batch
                        )
                        comptime if has_mask:
                            var boxes = tile.unsafe_offset(2 * TILE_BYTES)
                            tma_load_mask[1, owners](
                                boxes, mask_map, stage_full, step * BOX_SIZE, t0, head, batch, sizes
                            )
                        bulk_load(
                            stage_row_numbers,
                            rows.unsafe_offset(step * BOX_SIZE),
                            Int32(NUMBERS_BYTES // 2),
                            stage_full,
                        )
                        bulk_load(
                            stage_row_numbers.unsafe_offset(NUMBERS_BYTES // 2),
                            rows.unsafe_offset(length + step * BOX_SIZE),
                            Int32(NUMBERS_BYTES // 2),
                            stage_full,
                        )
                        comptime if has_dropout:
                            comptime for owner in range(owners):
                                bulk_load(
                                    stage_row_numbers.unsafe_offset(NUMBERS_BYTES + owner * WORDS_BYTES),
                                    words_of_group(
                                        words,
                                        shared_head * group_heads + member,
                                        step * BOX_SIZE,
                                        t0 + owner * BOX_SIZE,
                                        sizes,
                                    ),
                                    Int32(WORDS_BYTES),
                                    stage_full,
                                )
                        state.step[STAGES]()

            # The tiles loaded so far do not depend on the previous grid, which computes the numbers.
            wait_on_dependent_grids()
            # The kernel for the gradient of the query reads no results of this kernel: once the numbers are
            # computed, its blocks may run on multiprocessors that become free.
            launch_dependent_grids()
            send(start, start + causal_steps)
            comptime if masked and width == BOX_SIZE:
                send(start + causal_steps, start + steps)
        return

    warpgroup_reg_alloc[registers[groups, resident]()]()
    var group = consumer_index[groups]()
    var computes_grad_key = paired and group == 1
    var owner = 0 if paired else group
    var first = t0 + owner * BOX_SIZE + thread_idx.x % GROUP_THREADS // 32 * 16
    var is_arriving = is_arriving_lane[has_mask or has_dropout]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if has_mask else scale * LOG2_E
    var mask_box_offset = 2 * TILE_BYTES + owner * box_bytes(sizes)
    var key_sums = Sums[width](fill=BoxSums(0))
    var value_sums = Sums[width](fill=BoxSums(0))
    var state = PipelineState(0, 0)
    var previous = -1
    wait(operands_full, 0)
    var key_operand = LeftOperand[dtype, width](shared.unsafe_offset(owner * TILE_BYTES))
    var value_operand = LeftOperand[dtype, width](shared.unsafe_offset((owners + owner) * TILE_BYTES))
    # Where this lane stores its part of P: 16 bytes per lane for each group of columns.
    var lane_p = p_buffer.unsafe_offset(thread_idx.x % GROUP_THREADS * 16).unsafe_bitcast[Float32]()
    var p_half = 0
    var operand_tile = make_uniform(
        shared.unsafe_offset((owners + owner if computes_grad_key else owner) * TILE_BYTES)
    )

    @__parameter
    @always_inline
    def compute_weights[causal: Bool](mut weights: BoxSums, stage_row_numbers: Shared[Float32], s0: Int):
        comptime for j in range(8):
            var shifts = stage_row_numbers.unsafe_load[width=2, alignment=8](j * 8)
            comptime for e in range(4):
                weights[4 * j + e] = exp2(weights[4 * j + e] * factor - shifts[e % 2])
        comptime if causal:
            apply_causal_mask(weights, s0, first, sizes)

    # There is not enough shared memory for both a mask and the P that one warpgroup passes to the other.
    comptime assert not (
        paired and (has_mask or has_dropout)
    ), "masks and dropout are for heads of up to 128 elements"

    @__parameter
    @always_inline
    def advance_pair[causal: Bool](s0: Int):
        wait(full.unsafe_offset(state.stage), state.parity)
        var queries = stages.unsafe_offset(state.stage * STAGE_BYTES)
        var grads = queries.unsafe_offset(TILE_BYTES)
        var stage_row_numbers = (
            stage_numbers.unsafe_offset(state.stage * EXTRA_STAGE_BYTES)
            .unsafe_bitcast[Float32]()
            .unsafe_offset(lane_id() % 4 * 2)
        )
        wgmma_fence_aligned()
        var products = rebind[BoxSums](
            scores_from_shared[dtype, width, BOX_SIZE](
                operand_tile, make_uniform(grads if computes_grad_key else queries)
            )
        )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        fence_accumulators(products)
        fence_all_accumulators[width](value_sums)
        if previous >= 0 and is_arriving:
            _ = mbarrier_arrive(empty.unsafe_offset(previous))
        var p_slot = lane_p.unsafe_offset(p_half * (P_EXCHANGE_BYTES // 4))
        if not computes_grad_key:
            compute_weights[causal](products, stage_row_numbers, s0)
            comptime for j in range(8):
                p_slot.unsafe_store[alignment=16](j * 4 * GROUP_THREADS, products.slice[4, offset=4 * j]())
        # One barrier is enough: the two halves of this memory alternate, and both warpgroups pass a barrier
        # before the first half is written again.
        synchronize_pair()
        if computes_grad_key:
            comptime for j in range(8):
                var weights = p_slot.unsafe_load[width=4, alignment=16](j * 4 * GROUP_THREADS)
                var deltas = stage_row_numbers.unsafe_load[width=2, alignment=8](BOX_SIZE + j * 8)
                comptime for e in range(4):
                    products[4 * j + e] = weights[e] * (products[4 * j + e] - deltas[e % 2])
        var left = round_to_operands[dtype, 4](products)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, make_uniform(queries if computes_grad_key else grads), value_sums)
        wgmma_commit_group_sync()
        p_half = 1 - p_half
        previous = state.stage
        state.step[STAGES]()

    @__parameter
    @always_inline
    def advance[causal: Bool](s0: Int):
        wait(full.unsafe_offset(state.stage), state.parity)
        var queries = stages.unsafe_offset(state.stage * STAGE_BYTES)
        var grads = queries.unsafe_offset(TILE_BYTES)
        var stage_row_numbers = (
            stage_numbers.unsafe_offset(state.stage * EXTRA_STAGE_BYTES)
            .unsafe_bitcast[Float32]()
            .unsafe_offset(lane_id() % 4 * 2)
        )
        wgmma_fence_aligned()
        var weights = key_operand.scores(queries)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var score_grads = value_operand.scores(grads)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        fence_accumulators(weights)
        # The products of the previous step are done too, so its stage may be refilled.
        if previous >= 0 and is_arriving:
            _ = mbarrier_arrive(empty.unsafe_offset(previous))
        comptime if has_mask:
            add_mask[dtype=dtype, transposed=True](
                weights, scale, queries.unsafe_offset(mask_box_offset), sizes
            )
        compute_weights[causal](weights, stage_row_numbers, s0)
        var kept_weights = weights
        var drawn = SIMD[DType.uint32, 1](0)
        comptime if has_dropout:
            drawn = transposed_word(
                stage_numbers.unsafe_offset(
                    state.stage * EXTRA_STAGE_BYTES + NUMBERS_BYTES + owner * WORDS_BYTES
                ).unsafe_bitcast[UInt32]()
            )
            drop[transposed=True](kept_weights, drawn)
        var left = round_to_operands[dtype, 4](kept_weights)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, grads, value_sums)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        fence_accumulators(score_grads)
        comptime if has_dropout:
            drop[transposed=True](score_grads, hide_word(drawn))
        comptime for j in range(8):
            var deltas = stage_row_numbers.unsafe_load[width=2, alignment=8](BOX_SIZE + j * 8)
            comptime for e in range(4):
                score_grads[4 * j + e] = weights[4 * j + e] * (score_grads[4 * j + e] - deltas[e % 2])
        var score_grad_operand = round_to_operands[dtype, 4](score_grads)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](score_grad_operand, queries, key_sums)
        wgmma_commit_group_sync()
        comptime if width > BOX_SIZE:
            # Free the registers of P.
            wgmma_wait_group_sync[1]()
        previous = state.stage
        state.step[STAGES]()

    @__parameter
    @always_inline
    def run_steps[causal: Bool](begin: Int, end: Int):
        var s0 = begin * BOX_SIZE
        var remaining = group_heads * (end - begin)
        while True:
            comptime if paired:
                advance_pair[causal](s0)
            else:
                advance[causal](s0)
            s0 += BOX_SIZE
            if s0 >= end * BOX_SIZE:
                s0 = begin * BOX_SIZE
            remaining -= 1
            if remaining == 0:
                break

    # There is always a first step: with a loop that might not run, the assembler would serialize the
    # products.
    run_steps[masked](start, start + causal_steps)
    comptime if masked and width == BOX_SIZE:
        if causal_steps < steps:
            run_steps[False](start + causal_steps, start + steps)
    wgmma_wait_group_sync[0]()
    fence_all_accumulators[width](key_sums)
    fence_all_accumulators[width](value_sums)
    comptime if paired:
        key_sums = value_sums  # in the warpgroup that computes the key's gradient
    if not paired or computes_grad_key:
        store_sums[width](
            grad_key.unsafe_offset(head_offset(batch, head_in_batch, grad_key_strides)),
            key_sums,
            StaticTuple[Float32, 2](scale * rescale, scale * rescale),
            first,
            T,
            Int(grad_key_strides[2]),
            Int(sizes.head_dim),
        )
    if not computes_grad_key:
        store_sums[width](
            grad_value.unsafe_offset(head_offset(batch, head_in_batch, grad_value_strides)),
            value_sums,
            StaticTuple[Float32, 2](rescale, rescale),
            first,
            T,
            Int(grad_value_strides[2]),
            Int(sizes.head_dim),
        )
