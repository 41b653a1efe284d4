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
from .hopper_dropout import WORDS_BYTES, hide_word, drop, word_of_keys, group_words
from .hopper_masks import (
    add_mask,
    arrivals,
    arrives,
    box_bytes,
    count_mask_bytes,
    clear_rows,
    hides_keys,
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
    multiply,
    own_group,
    rounded,
    scores_from_shared,
    send_numbers,
    send_tile,
    settled,
    settled_sums,
    sharing,
    head_offset,
    store_sums,
    tile_descriptor,
    wait,
)
from .scores import LOG2_E, Strides
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, start_later_grids, wait_for_earlier_grids

comptime NUMBERS_BYTES = 2 * SIDE * 4
"""Bytes per stage for the two numbers of each query: the shift of its scores, and delta."""
comptime PASSED_BYTES = SIDE * SIDE * 4
"""Bytes of P for 64 keys and 64 queries."""


def key_stages[width: Int]() -> Int:
    """Return the stages of the pipeline. A stage is released one step late; if only one block fits on a
    multiprocessor, a third stage hides that, if there is room.
    """
    return 3 if SIDE < width <= 3 * SIDE else 2


def key_owners[width: Int, groups: Int]() -> Int:
    """Return the number of groups of 64 keys that a block owns: for wide heads the two warpgroups own the
    same keys.
    """
    return groups if width <= 2 * SIDE else groups // 2


def key_bytes[width: Int, groups: Int, biased: Bool, dropped: Bool]() -> Int:
    """Return the bytes of shared memory per block."""
    comptime stages = key_stages[width]()
    comptime owners = key_owners[width, groups]()
    comptime boxes = width // SIDE * 2 * (owners + stages) + (stages * owners if biased else 0)
    comptime passed_p = 2 * PASSED_BYTES if owners < groups else 0
    comptime words = owners * WORDS_BYTES if dropped else 0
    return boxes * BOX_BYTES + stages * (NUMBERS_BYTES + words) + passed_p + 8 * (1 + 2 * stages)


@always_inline
def sync_pair():
    """Wait until both warpgroups of a pair have arrived."""
    inlined_assembly["barrier.cta.sync 1, 256;", NoneType, constraints="~{memory}", has_side_effect=True]()


struct Own[dtype: DType, width: Int](Copyable, Movable):
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
        comptime if Self.width == SIDE:
            var row = thread_idx.x % GROUP // 32 * 16 + lane_id() % 16
            comptime for k in range(4):
                var chunk = (2 * k + lane_id() // 16) ^ (row % 8)
                self.fragments[k] = ld_matrix[8](
                    tile.unsafe_offset(row * ROW_BYTES + chunk * 16).unsafe_bitcast[Scalar[Self.dtype]]()
                )

    @always_inline
    def scores(self, other: Shared[UInt8]) -> HALF:
        """Return own @ other^T, 64 rows by 64 rows."""
        comptime if Self.width == SIDE:
            var right = tile_descriptor(other, 1)
            var sums = multiply[True, fresh=True](self.fragments[0], right, HALF(0))
            comptime for k in range(1, 4):
                sums = multiply[True](self.fragments[k], right + Int64(2 * k), sums)
            return sums
        else:
            return rebind[HALF](scores_from_shared[Self.dtype, Self.width, SIDE](self.tile, other))


@always_inline
def hide_earlier(mut weights: HALF, s0: Int, first: Int, sizes: FlashSizes):
    """Set to 0 the weights of query-key pairs that a causal mask hides; queries begin at s0, a warp's keys at
    `first`.

    Queries and keys past the end need no check: weights of such queries are 0, and rows of such keys are not
    stored.
    """
    comptime for half in range(2):
        var key = Int32(first) + Int32(half * 8) + Int32(lane_id()) // 4
        var seen_from = key - sizes.diagonal - Int32(s0) - Int32(lane_id()) % 4 * 2
        comptime for j in range(8):
            comptime for side in range(2):
                comptime i = 4 * j + 2 * half + side
                weights[i] = weights[i] if Int32(8 * j + side) >= seen_from else 0


@__name("attention_key_value_wgmma")
@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(mask_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_key_value_kernel[
    dtype: DType, width: Int, groups: Int, resident: Int, masked: Bool, biased: Bool, dropped: Bool
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
    diagonal; if `biased`, a mask is added to the scores; if `dropped`, some probabilities were set to 0.
    """
    comptime owners = key_owners[width, groups]()
    comptime paired = owners < groups
    comptime assert not paired or groups == 2, "a pair consists of the two warpgroups of a block"
    comptime ROWS = owners * SIDE
    comptime TILE = width // SIDE * BOX_BYTES
    comptime MASK = owners * BOX_BYTES if biased else 0
    comptime STAGE = 2 * TILE + MASK
    comptime STAGES = key_stages[width]()
    comptime OF_STAGE = NUMBERS_BYTES + (owners * WORDS_BYTES if dropped else 0)
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var length = ceildiv(S, SIDE) * SIDE
    var own_head = block_idx.y
    var batch = block_idx.z
    var shared_head = batch * Int(sizes.key_heads) + own_head
    var t0 = block_idx.x * ROWS
    # Run at least one step per head: keys that no query sees are treated as masked for all queries.
    var start = min(sizes.first_query(t0), S - 1) // SIDE
    var steps = ceildiv(S, SIDE) - start
    # From this step on queries see all keys of the block; the steps before it come first, for all heads.
    var hiding = steps
    comptime if masked and width == SIDE:
        hiding = max(1, min(ceildiv(t0 + ROWS - 1 - Int(sizes.diagonal), SIDE) - start, steps))
    var members = sharing(sizes)
    comptime if biased:
        if hides_keys[ROWS](mask, shared_head * members, members, t0, sizes):
            var d = Int(sizes.head_dim)
            wait_for_earlier_grids()
            clear_rows(
                grad_key.unsafe_offset(head_offset(batch, own_head, grad_key_strides)),
                t0,
                ROWS,
                T,
                Int(grad_key_strides[2]),
                d,
            )
            clear_rows(
                grad_value.unsafe_offset(head_offset(batch, own_head, grad_value_strides)),
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
    var stages = shared.unsafe_offset(2 * owners * TILE)
    var stage_numbers = stages.unsafe_offset(STAGES * STAGE)
    var passed_p = stage_numbers.unsafe_offset(STAGES * OF_STAGE)
    var own_here = passed_p.unsafe_offset(2 * PASSED_BYTES if paired else 0).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(STAGES)
    if thread_idx.x == 0:
        mbarrier_init(own_here, 1)
        comptime for i in range(STAGES):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), arrivals[biased or dropped](groups))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * owners * TILE))
            comptime for group in range(owners):
                var at = shared.unsafe_offset(group * TILE)
                send_tile[width, SIDE](at, key_map, own_here, t0 + group * SIDE, own_head, batch)
                send_tile[width, SIDE](
                    at.unsafe_offset(owners * TILE), value_map, own_here, t0 + group * SIDE, own_head, batch
                )
            var turn = Turn(0, 1)

            @__parameter
            @always_inline
            def send(begin: Int, end: Int):
                for member in range(members):
                    var head = own_head * members + member
                    var rows = numbers.unsafe_offset((shared_head * members + member) * 2 * length)
                    for step in range(begin, end):
                        var tile = stages.unsafe_offset(turn.stage * STAGE)
                        var own_numbers = stage_numbers.unsafe_offset(turn.stage * OF_STAGE)
                        var here = full.unsafe_offset(turn.stage)
                        var bytes = 2 * TILE + OF_STAGE
                        comptime if biased:
                            bytes += count_mask_bytes[1, owners](sizes)
                        wait(empty.unsafe_offset(turn.stage), turn.parity)
                        mbarrier_arrive_expect_tx_shared(here, Int32(bytes))
                        send_tile[width, SIDE](tile, query_map, here, step * SIDE, head, batch)
                        send_tile[width, SIDE](
                            tile.unsafe_offset(TILE), grad_map, here, step * SIDE, head, batch
                        )
                        comptime if biased:
                            var boxes = tile.unsafe_offset(2 * TILE)
                            send_mask[1, owners](boxes, mask_map, here, step * SIDE, t0, head, batch, sizes)
                        send_numbers(
                            own_numbers, rows.unsafe_offset(step * SIDE), Int32(NUMBERS_BYTES // 2), here
                        )
                        send_numbers(
                            own_numbers.unsafe_offset(NUMBERS_BYTES // 2),
                            rows.unsafe_offset(length + step * SIDE),
                            Int32(NUMBERS_BYTES // 2),
                            here,
                        )
                        comptime if dropped:
                            comptime for owner in range(owners):
                                send_numbers(
                                    own_numbers.unsafe_offset(NUMBERS_BYTES + owner * WORDS_BYTES),
                                    group_words(
                                        words,
                                        shared_head * members + member,
                                        step * SIDE,
                                        t0 + owner * SIDE,
                                        sizes,
                                    ),
                                    Int32(WORDS_BYTES),
                                    here,
                                )
                        turn.step[STAGES]()

            # The tiles loaded so far do not depend on the previous grid, which computes the numbers.
            wait_for_earlier_grids()
            # The kernel for the gradient of the query reads no results of this kernel: once the numbers are
            # computed, its blocks may run on multiprocessors that become free.
            start_later_grids()
            send(start, start + hiding)
            comptime if masked and width == SIDE:
                send(start + hiding, start + steps)
        return

    warpgroup_reg_alloc[registers[groups, resident]()]()
    var group = own_group[groups]()
    var makes_key = paired and group == 1
    var owner = 0 if paired else group
    var first = t0 + owner * SIDE + thread_idx.x % GROUP // 32 * 16
    var leads = arrives[biased or dropped]()
    # With a mask, scores are scaled before the exponential.
    var factor = LOG2_E if biased else scale * LOG2_E
    var own_box = 2 * TILE + owner * box_bytes(sizes)
    var key_sums = Sums[width](fill=HALF(0))
    var value_sums = Sums[width](fill=HALF(0))
    var turn = Turn(0, 0)
    var before = -1
    wait(own_here, 0)
    var own_keys = Own[dtype, width](shared.unsafe_offset(owner * TILE))
    var own_values = Own[dtype, width](shared.unsafe_offset((owners + owner) * TILE))
    # Where this lane stores its part of P: 16 bytes per lane for each group of columns.
    var own_p = passed_p.unsafe_offset(thread_idx.x % GROUP * 16).unsafe_bitcast[Float32]()
    var turn_p = 0
    var own_tile = common(shared.unsafe_offset((owners + owner if makes_key else owner) * TILE))

    @__parameter
    @always_inline
    def weigh[hides: Bool](mut weights: HALF, own_numbers: Shared[Float32], s0: Int):
        comptime for j in range(8):
            var shifts = own_numbers.unsafe_load[width=2, alignment=8](j * 8)
            comptime for e in range(4):
                weights[4 * j + e] = exp2(weights[4 * j + e] * factor - shifts[e % 2])
        comptime if hides:
            hide_earlier(weights, s0, first, sizes)

    # There is not enough shared memory for both a mask and the P that one warpgroup passes to the other.
    comptime assert not (
        paired and (biased or dropped)
    ), "masks and dropout are for heads of up to 128 elements"

    @__parameter
    @always_inline
    def advance_paired[hides: Bool](s0: Int):
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var queries = stages.unsafe_offset(turn.stage * STAGE)
        var grads = queries.unsafe_offset(TILE)
        var own_numbers = (
            stage_numbers.unsafe_offset(turn.stage * OF_STAGE)
            .unsafe_bitcast[Float32]()
            .unsafe_offset(lane_id() % 4 * 2)
        )
        wgmma_fence_aligned()
        var products = rebind[HALF](
            scores_from_shared[dtype, width, SIDE](own_tile, common(grads if makes_key else queries))
        )
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        settled(products)
        settled_sums[width](value_sums)
        if before >= 0 and leads:
            _ = mbarrier_arrive(empty.unsafe_offset(before))
        var here = own_p.unsafe_offset(turn_p * (PASSED_BYTES // 4))
        if not makes_key:
            weigh[hides](products, own_numbers, s0)
            comptime for j in range(8):
                here.unsafe_store[alignment=16](j * 4 * GROUP, products.slice[4, offset=4 * j]())
        # One barrier is enough: the two halves of this memory alternate, and both warpgroups pass a barrier
        # before the first half is written again.
        sync_pair()
        if makes_key:
            comptime for j in range(8):
                var weights = here.unsafe_load[width=4, alignment=16](j * 4 * GROUP)
                var deltas = own_numbers.unsafe_load[width=2, alignment=8](SIDE + j * 8)
                comptime for e in range(4):
                    products[4 * j + e] = weights[e] * (products[4 * j + e] - deltas[e % 2])
        var left = rounded[dtype, 4](products)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, common(queries if makes_key else grads), value_sums)
        wgmma_commit_group_sync()
        turn_p = 1 - turn_p
        before = turn.stage
        turn.step[STAGES]()

    @__parameter
    @always_inline
    def advance[hides: Bool](s0: Int):
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var queries = stages.unsafe_offset(turn.stage * STAGE)
        var grads = queries.unsafe_offset(TILE)
        var own_numbers = (
            stage_numbers.unsafe_offset(turn.stage * OF_STAGE)
            .unsafe_bitcast[Float32]()
            .unsafe_offset(lane_id() % 4 * 2)
        )
        wgmma_fence_aligned()
        var weights = own_keys.scores(queries)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var slopes = own_values.scores(grads)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        # The products of the previous step are done too, so its stage may be refilled.
        if before >= 0 and leads:
            _ = mbarrier_arrive(empty.unsafe_offset(before))
        comptime if biased:
            add_mask[dtype=dtype, transposed=True](weights, scale, queries.unsafe_offset(own_box), sizes)
        weigh[hides](weights, own_numbers, s0)
        var kept = weights
        var drawn = SIMD[DType.uint32, 1](0)
        comptime if dropped:
            drawn = word_of_keys(
                stage_numbers.unsafe_offset(
                    turn.stage * OF_STAGE + NUMBERS_BYTES + owner * WORDS_BYTES
                ).unsafe_bitcast[UInt32]()
            )
            drop[transposed=True](kept, drawn)
        var left = rounded[dtype, 4](kept)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, grads, value_sums)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(slopes)
        comptime if dropped:
            drop[transposed=True](slopes, hide_word(drawn))
        comptime for j in range(8):
            var deltas = own_numbers.unsafe_load[width=2, alignment=8](SIDE + j * 8)
            comptime for e in range(4):
                slopes[4 * j + e] = weights[4 * j + e] * (slopes[4 * j + e] - deltas[e % 2])
        var slope_left = rounded[dtype, 4](slopes)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](slope_left, queries, key_sums)
        wgmma_commit_group_sync()
        comptime if width > SIDE:
            # Free the registers of P.
            wgmma_wait_group_sync[1]()
        before = turn.stage
        turn.step[STAGES]()

    @__parameter
    @always_inline
    def walk[hides: Bool](begin: Int, end: Int):
        var s0 = begin * SIDE
        var left_over = members * (end - begin)
        while True:
            comptime if paired:
                advance_paired[hides](s0)
            else:
                advance[hides](s0)
            s0 += SIDE
            if s0 >= end * SIDE:
                s0 = begin * SIDE
            left_over -= 1
            if left_over == 0:
                break

    # There is always a first step: with a loop that might not run, the assembler would serialize the
    # products.
    walk[masked](start, start + hiding)
    comptime if masked and width == SIDE:
        if hiding < steps:
            walk[False](start + hiding, start + steps)
    wgmma_wait_group_sync[0]()
    settled_sums[width](key_sums)
    settled_sums[width](value_sums)
    comptime if paired:
        key_sums = value_sums  # in the warpgroup that computes the key's gradient
    if not paired or makes_key:
        store_sums[width](
            grad_key.unsafe_offset(head_offset(batch, own_head, grad_key_strides)),
            key_sums,
            StaticTuple[Float32, 2](scale * rescale, scale * rescale),
            first,
            T,
            Int(grad_key_strides[2]),
            Int(sizes.head_dim),
        )
    if not makes_key:
        store_sums[width](
            grad_value.unsafe_offset(head_offset(batch, own_head, grad_value_strides)),
            value_sums,
            StaticTuple[Float32, 2](rescale, rescale),
            first,
            T,
            Int(grad_value_strides[2]),
            Int(sizes.head_dim),
        )
