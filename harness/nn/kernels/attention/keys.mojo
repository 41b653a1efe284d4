"""The gradients of key and value with `mma.sync`: `kernels.mojo` with queries and keys swapped.

A block owns rows of keys and loops over tiles of queries. If the sums for a head's width do not fit in the
registers of a warp, two warps share the same keys (`uses_warp_pairs`).
"""

from std.math import ceildiv, exp2
from std.memory import AddressSpace
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group, external_memory

from .dropout import Dropout
from .masks import MaskTile, is_tile_hidden, is_one_row, are_keys_hidden
from .scores import (
    LOG2_E,
    Strides,
    all_visible,
    drop,
    mask_hidden_keys,
    score_shift,
    compute_score_gradients,
    row_offset,
)
from .tiles import Lane, LeftOperand, SLAB, Sums, add_product, load_numbers, load_tile, row_pitch, store_rows
from .varlen import Sequence, count_slots
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr


def uses_warp_pairs[width: Int]() -> Bool:
    """Return whether the warps of `fast_key_value_kernel` work in pairs."""
    return width > 2 * SLAB


def p_exchange_bytes[width: Int, rows: Int, part: Int]() -> Int:
    """Return the bytes of shared memory through which the first warp of each pair passes P, for `rows` keys
    and `part` queries.
    """
    return 4 * rows * part if uses_warp_pairs[width]() else 0


@always_inline
def synchronize_pair(pair: Int):
    """Synchronize both warps of a pair."""
    inlined_assembly["barrier.cta.sync $0, 64;", NoneType, constraints="r,~{memory}", has_side_effect=True](
        Int32(pair + 1)
    )


@fieldwise_init
struct LoopPosition(Copyable, Movable):
    """The loop's position: queries from s0 on of one of the query heads that share the key's head."""

    var member: Int
    var s0: Int


@__name("attention_key_value_mma")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(32 * warps)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def fast_key_value_kernel[
    dtype: DType,
    masked: Bool,
    width: Int,
    bands: Int,
    warps: Int,
    step: Int,
    part: Int,
    resident: Int,
    whole: Bool,
    varlen: Bool,
    dropout: Bool,
](
    grad_key: MutPtr[dtype],  # [B, G, T, d]
    grad_value: MutPtr[dtype],  # [B, G, T, d]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S]
    mask: ImmPtr[dtype],  # [B, N, S, T] with its own strides, or the sequences' offsets
    grad_key_strides: Strides,
    grad_value_strides: Strides,
    grad_strides: Strides,
    query_strides: Strides,
    key_strides: Strides,
    value_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    state: ImmPtr[DType.uint32],  # four words for the random numbers of dropout
    keep_threshold: Int32,  # an element is kept if its 16-bit random number is below it
):
    """Compute the gradients of key and value. A block owns 16 * bands * owners keys and loops over the
    queries of all heads that share them, `step` at a time. Scores are transposed, [keys, queries], so P^T and
    dS^T are already in the layout of left operands.

    If the sums of one gradient fill a warp's registers, two warps own the same keys (`uses_warp_pairs`): one
    computes P and the gradient of the value, and passes P to the other, which computes dS and the gradient of
    the key.
    """
    comptime pairs = uses_warp_pairs[width]()
    comptime assert not pairs or part == step, "P is read before the next step overwrites it"
    comptime assert not pairs or not dropout, "the warp that computes the key's gradient draws nothing"
    comptime owners = warps // 2 if pairs else warps
    comptime rows = 16 * bands * owners
    comptime threads = 32 * warps
    comptime columns = part // 8
    comptime pitch = row_pitch[width]()
    comptime tile = step * pitch
    var sizes = FlashSizes(packed)
    var all_queries = Int(sizes.query_len)
    var all_keys = Int(sizes.key_len)
    var tiles = count_slots(all_keys, Int(sizes.mask_block), rows) if varlen else ceildiv(all_keys, rows)
    var shared_head = block_idx.x // tiles
    var tile_index = block_idx.x % tiles
    var sequence = Sequence.whole()
    comptime if varlen:
        sequence = Sequence.from_slot[rows, True](mask, tile_index, sizes)
        if sequence.row >= Int(sizes.key_len):
            return
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var t0 = sequence.row if varlen else tile_index * rows
    var head0 = shared_head * sizes.group()
    var keys = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var values = keys.unsafe_offset(rows * pitch)
    var stages = values.unsafe_offset(rows * pitch)
    # Per stage: lse, then delta.
    var numbers = stages.unsafe_offset(4 * tile).unsafe_bitcast[Float32]()
    var warp_index = thread_idx.x // 32
    var owner = warp_index // 2 if pairs else warp_index
    var computes_grad_key = pairs and warp_index % 2 == 1
    # The buffer between the warps of a pair: a lane's P, 16 bytes at a time.
    var p_buffer = numbers.unsafe_offset(4 * step + (owner * bands * columns * 32 + lane_id()) * 4)
    comptime numbers_and_p = 4 * step + p_exchange_bytes[width, rows, part]() // 4
    var masks = numbers.unsafe_offset(numbers_and_p).unsafe_bitcast[Scalar[dtype]]()
    var lane = Lane[width]()
    var warp_rows = owner * (16 * bands)
    var first = t0 + warp_rows
    var start = sizes.first_query(t0) // step * step
    var members = sizes.group() if start < S else 0

    @__parameter
    @always_inline
    def following(position: LoopPosition) -> LoopPosition:
        var next = LoopPosition(position.member, position.s0 + step)
        while next.member < members:
            if next.s0 >= S:
                next = LoopPosition(next.member + 1, start)
                continue
            comptime if masked:
                var head = head0 + next.member
                if is_one_row(sizes):
                    if next.s0 == start and are_keys_hidden[rows](mask, head, t0, sizes):
                        next = LoopPosition(next.member + 1, start)
                        continue
                elif is_tile_hidden[step, rows](mask, head, next.s0, t0, sizes):
                    next.s0 += step
                    continue
            break
        return next^

    # Recomputed only if the head changes, to avoid the division.
    var member = 0
    var Q = query.unsafe_offset(row_offset(head0, sizes.query_heads, query_strides, sequence.first_query))
    var dO = grad_output.unsafe_offset(
        row_offset(head0, sizes.query_heads, grad_strides, sequence.first_query)
    )
    var mask_tile = MaskTile[dtype, rows](mask.unsafe_offset(sizes.head_mask_offset(head0)), sizes)

    @__parameter
    @always_inline
    def fetch(position: LoopPosition, stage: Int):
        var head = head0 + position.member
        if position.member != member:
            member = position.member
            Q = query.unsafe_offset(row_offset(head, sizes.query_heads, query_strides, sequence.first_query))
            dO = grad_output.unsafe_offset(
                row_offset(head, sizes.query_heads, grad_strides, sequence.first_query)
            )
            comptime if masked:
                mask_tile = MaskTile[dtype, rows](mask.unsafe_offset(sizes.head_mask_offset(head)), sizes)
        var queries = stages.unsafe_offset(stage * 2 * tile)
        load_tile[step, width, threads, whole](queries, Q, position.s0, S, Int(query_strides[2]), d)
        load_tile[step, width, threads, whole](
            queries.unsafe_offset(tile), dO, position.s0, S, Int(grad_strides[2]), d
        )
        var row0 = head * all_queries + sequence.first_query
        load_numbers[step, threads](
            numbers.unsafe_offset(stage * 2 * step), lse, delta, row0 + position.s0, row0 + S
        )
        comptime if masked:
            mask_tile.load[step, threads](
                masks.unsafe_offset(stage * mask_tile.elements[step]()), position.s0, t0, sizes
            )
        async_copy_commit_group()

    load_tile[rows, width, threads, whole](
        keys,
        key.unsafe_offset(row_offset(shared_head, sizes.key_heads, key_strides, sequence.first_key)),
        t0,
        T,
        Int(key_strides[2]),
        d,
    )
    load_tile[rows, width, threads, whole](
        values,
        value.unsafe_offset(row_offset(shared_head, sizes.key_heads, value_strides, sequence.first_key)),
        t0,
        T,
        Int(value_strides[2]),
        d,
    )
    comptime band_of_warp = 16 * bands * pitch
    # The keys are not kept in registers, which the sums of two gradients fill.
    var key_operand = LeftOperand[dtype, bands, width, False](keys.unsafe_offset(owner * band_of_warp), lane)
    var value_operand = LeftOperand[dtype, bands, width, False](
        values.unsafe_offset(owner * band_of_warp), lane
    )
    var left_operand = LeftOperand[dtype, bands, width, False](
        value_operand.tile if computes_grad_key else key_operand.tile, lane
    )
    var factor = LOG2_E if masked else scale * LOG2_E
    var key_sums = Array[Sums, bands * (width // 8)](fill=0)
    var value_sums = Array[Sums, bands * (width // 8)](fill=0)
    var draws = Dropout(state, keep_threshold, head0)
    var position = following(LoopPosition(0, start - step))
    if position.member < members:
        fetch(position, 0)
    var stage = 0
    while position.member < members:
        async_copy_wait_group(0)
        barrier()
        var next = following(position)
        if next.member < members:
            fetch(next, 1 - stage)
        for inner in range(0, step, part):
            var s1 = position.s0 + inner
            var queries = stages.unsafe_offset(stage * 2 * tile + inner * pitch)
            var grads = queries.unsafe_offset(tile)
            var own_numbers = numbers.unsafe_offset(stage * 2 * step + inner + lane_id() % 4 * 2)

            @__parameter
            @always_inline
            def compute_weights(mut weights: Array[Sums, bands * columns]):
                comptime if masked:
                    var stage_mask = masks.unsafe_offset(stage * mask_tile.elements[step]())
                    mask_tile.add[bands, columns, transposed=True](
                        weights, scale, stage_mask, inner, warp_rows
                    )
                comptime for frag in range(bands * columns):
                    var pair = own_numbers.unsafe_load[width=2, alignment=8](frag % columns * 8)
                    comptime for e in range(4):
                        weights[frag][e] = exp2(weights[frag][e] * factor - score_shift[masked](pair[e % 2]))
                comptime if not whole:
                    if not all_visible(s1, s1 + part, first, first + 16 * bands, sizes):
                        mask_hidden_keys[bands, columns, transposed=True](weights, 0, first, s1, sizes)

            comptime if pairs:
                var products = left_operand.multiply_transposed[columns](
                    grads if computes_grad_key else queries, Array[Sums, bands * columns](fill=0)
                )
                if not computes_grad_key:
                    compute_weights(products)
                    comptime for frag in range(bands * columns):
                        p_buffer.unsafe_store[alignment=16](frag * 128, products[frag])
                synchronize_pair(owner)
                if computes_grad_key:
                    comptime for frag in range(bands * columns):
                        var weights = p_buffer.unsafe_load[width=4, alignment=16](frag * 128)
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + frag % columns * 8)
                        products[frag] = weights * (products[frag] - Sums(pair[0], pair[1], pair[0], pair[1]))
                add_product[bands, columns, width](
                    value_sums, products, queries if computes_grad_key else grads, lane
                )
            else:
                var weights = key_operand.multiply_transposed[columns](
                    queries, Array[Sums, bands * columns](fill=0)
                )
                compute_weights(weights)
                comptime if dropout:
                    draws.head = UInt32(head0 + position.member)
                    draws.mark_dropped[bands, columns, transposed=True](weights, first, s1)
                    var left = weights.copy()
                    drop[bands * columns](left)
                    add_product[bands, columns, width](value_sums, left, grads, lane)
                else:
                    add_product[bands, columns, width](value_sums, weights, grads, lane)
                var minus_delta = Array[Sums, bands * columns](fill=0)
                comptime if not dropout:
                    comptime for frag in range(bands * columns):
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + frag % columns * 8)
                        minus_delta[frag] = Sums(-pair[0], -pair[1], -pair[0], -pair[1])
                var score_grads = value_operand.multiply_transposed[columns](grads, minus_delta)
                comptime for frag in range(bands * columns):
                    comptime if dropout:
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + frag % columns * 8)
                        pair *= draws.keep_fraction
                        score_grads[frag] = compute_score_gradients(
                            weights[frag], score_grads[frag], Sums(pair[0], pair[1], pair[0], pair[1])
                        )
                    else:
                        score_grads[frag] *= weights[frag]
                add_product[bands, columns, width](key_sums, score_grads, queries, lane)
        stage = 1 - stage
        position = next^

    comptime if pairs:
        key_sums = value_sums.copy()  # in the warps that compute the key's gradient
    if not pairs or computes_grad_key:
        store_rows[bands, width](
            grad_key.unsafe_offset(
                row_offset(shared_head, sizes.key_heads, grad_key_strides, sequence.first_key)
            ),
            key_sums,
            Array[Float32, 2 * bands](fill=scale * draws.rescale() if dropout else scale),
            first,
            T,
            Int(grad_key_strides[2]),
            d,
        )
    if not computes_grad_key:
        store_rows[bands, width](
            grad_value.unsafe_offset(
                row_offset(shared_head, sizes.key_heads, grad_value_strides, sequence.first_key)
            ),
            value_sums,
            Array[Float32, 2 * bands](fill=draws.rescale() if dropout else Float32(1)),
            first,
            T,
            Int(grad_value_strides[2]),
            d,
        )
