"""The gradients of key and value with `mma.sync`: `kernels.mojo` with queries and keys swapped.

A block owns rows of keys and loops over tiles of queries. If the sums for a head's width do not fit in the
registers of a warp, two warps share the same keys (`in_pairs`).
"""

from std.math import ceildiv, exp2
from std.memory import AddressSpace
from std.sys import inlined_assembly
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group, external_memory

from .dropout import Dropout
from .masks import MaskTile, hidden_tile, is_one_row, hides_all
from .scores import (
    LOG2_E,
    Strides,
    all_visible,
    drop,
    hide_invisible,
    row_shift,
    compute_score_gradients,
    row_offset,
)
from .tiles import Lane, Own, SLAB, Sums, add_product, load_numbers, load_tile, row_pitch, store_rows
from .varlen import Sequence, slots
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr


def in_pairs[width: Int]() -> Bool:
    """Return whether the warps of `fast_key_value_kernel` work in pairs."""
    return width > 2 * SLAB


def passed_bytes[width: Int, rows: Int, part: Int]() -> Int:
    """Return the bytes of shared memory through which the first warp of each pair passes P, for `rows` keys
    and `part` queries.
    """
    return 4 * rows * part if in_pairs[width]() else 0


@always_inline
def sync_pair(pair: Int):
    """Wait until both warps of a pair have arrived."""
    inlined_assembly["barrier.cta.sync $0, 64;", NoneType, constraints="r,~{memory}", has_side_effect=True](
        Int32(pair + 1)
    )


@fieldwise_init
struct Place(Copyable, Movable):
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
    keep: Int32,  # elements kept out of 65,536
):
    """Compute the gradients of key and value. A block owns 16 * bands * owners keys and loops over the
    queries of all heads that share them, `step` at a time. Scores are transposed, [keys, queries], so P^T and
    dS^T are already in the layout of left operands.

    If the sums of one gradient fill a warp's registers, two warps own the same keys (`in_pairs`): one
    computes P and the gradient of the value, and passes P to the other, which computes dS and the gradient of
    the key.
    """
    comptime pairs = in_pairs[width]()
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
    var tiles = slots(all_keys, Int(sizes.mask_block), rows) if varlen else ceildiv(all_keys, rows)
    var shared_head = block_idx.x // tiles
    var tile_index = block_idx.x % tiles
    var sequence = Sequence.whole()
    comptime if varlen:
        sequence = Sequence.of_slot[rows, True](mask, tile_index, sizes)
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
    var makes_key = pairs and warp_index % 2 == 1
    # The buffer between the warps of a pair: a lane's P, 16 bytes at a time.
    var passed_p = numbers.unsafe_offset(4 * step + (owner * bands * columns * 32 + lane_id()) * 4)
    comptime numbers_and_p = 4 * step + passed_bytes[width, rows, part]() // 4
    var masks = numbers.unsafe_offset(numbers_and_p).unsafe_bitcast[Scalar[dtype]]()
    var lane = Lane[width]()
    var warp_rows = owner * (16 * bands)
    var first = t0 + warp_rows
    var start = sizes.first_query(t0) // step * step
    var members = sizes.group() if start < S else 0

    @__parameter
    @always_inline
    def following(place: Place) -> Place:
        var next = Place(place.member, place.s0 + step)
        while next.member < members:
            if next.s0 >= S:
                next = Place(next.member + 1, start)
                continue
            comptime if masked:
                var head = head0 + next.member
                if is_one_row(sizes):
                    if next.s0 == start and hides_all[rows](mask, head, t0, sizes):
                        next = Place(next.member + 1, start)
                        continue
                elif hidden_tile[step, rows](mask, head, next.s0, t0, sizes):
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
    var mask_tile = MaskTile[dtype, rows](mask.unsafe_offset(sizes.mask_of(head0)), sizes)

    @__parameter
    @always_inline
    def fetch(place: Place, stage: Int):
        var head = head0 + place.member
        if place.member != member:
            member = place.member
            Q = query.unsafe_offset(row_offset(head, sizes.query_heads, query_strides, sequence.first_query))
            dO = grad_output.unsafe_offset(
                row_offset(head, sizes.query_heads, grad_strides, sequence.first_query)
            )
            comptime if masked:
                mask_tile = MaskTile[dtype, rows](mask.unsafe_offset(sizes.mask_of(head)), sizes)
        var queries = stages.unsafe_offset(stage * 2 * tile)
        load_tile[step, width, threads, whole](queries, Q, place.s0, S, Int(query_strides[2]), d)
        load_tile[step, width, threads, whole](
            queries.unsafe_offset(tile), dO, place.s0, S, Int(grad_strides[2]), d
        )
        var row0 = head * all_queries + sequence.first_query
        load_numbers[step, threads](
            numbers.unsafe_offset(stage * 2 * step), lse, delta, row0 + place.s0, row0 + S
        )
        comptime if masked:
            mask_tile.load[step, threads](
                masks.unsafe_offset(stage * mask_tile.elements[step]()), place.s0, t0, sizes
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
    var own_keys = Own[dtype, bands, width, False](keys.unsafe_offset(owner * band_of_warp), lane)
    var own_values = Own[dtype, bands, width, False](values.unsafe_offset(owner * band_of_warp), lane)
    var own = Own[dtype, bands, width, False](own_values.tile if makes_key else own_keys.tile, lane)
    var factor = LOG2_E if masked else scale * LOG2_E
    var key_sums = Array[Sums, bands * (width // 8)](fill=0)
    var value_sums = Array[Sums, bands * (width // 8)](fill=0)
    var draws = Dropout(state, keep, head0)
    var place = following(Place(0, start - step))
    if place.member < members:
        fetch(place, 0)
    var stage = 0
    while place.member < members:
        async_copy_wait_group(0)
        barrier()
        var next = following(place)
        if next.member < members:
            fetch(next, 1 - stage)
        for inner in range(0, step, part):
            var s1 = place.s0 + inner
            var queries = stages.unsafe_offset(stage * 2 * tile + inner * pitch)
            var grads = queries.unsafe_offset(tile)
            var own_numbers = numbers.unsafe_offset(stage * 2 * step + inner + lane_id() % 4 * 2)

            @__parameter
            @always_inline
            def weigh(mut weights: Array[Sums, bands * columns]):
                comptime if masked:
                    var of_stage = masks.unsafe_offset(stage * mask_tile.elements[step]())
                    mask_tile.add[bands, columns, transposed=True](weights, scale, of_stage, inner, warp_rows)
                comptime for place in range(bands * columns):
                    var pair = own_numbers.unsafe_load[width=2, alignment=8](place % columns * 8)
                    comptime for e in range(4):
                        weights[place][e] = exp2(weights[place][e] * factor - row_shift[masked](pair[e % 2]))
                comptime if not whole:
                    if not all_visible(s1, s1 + part, first, first + 16 * bands, sizes):
                        hide_invisible[bands, columns, transposed=True](weights, 0, first, s1, sizes)

            comptime if pairs:
                var products = own.times_rows[columns](
                    grads if makes_key else queries, Array[Sums, bands * columns](fill=0)
                )
                if not makes_key:
                    weigh(products)
                    comptime for place in range(bands * columns):
                        passed_p.unsafe_store[alignment=16](place * 128, products[place])
                sync_pair(owner)
                if makes_key:
                    comptime for place in range(bands * columns):
                        var weights = passed_p.unsafe_load[width=4, alignment=16](place * 128)
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + place % columns * 8)
                        products[place] = weights * (
                            products[place] - Sums(pair[0], pair[1], pair[0], pair[1])
                        )
                add_product[bands, columns, width](
                    value_sums, products, queries if makes_key else grads, lane
                )
            else:
                var weights = own_keys.times_rows[columns](queries, Array[Sums, bands * columns](fill=0))
                weigh(weights)
                comptime if dropout:
                    draws.head = UInt32(head0 + place.member)
                    draws.mark[bands, columns, transposed=True](weights, first, s1)
                    var left = weights.copy()
                    drop[bands * columns](left)
                    add_product[bands, columns, width](value_sums, left, grads, lane)
                else:
                    add_product[bands, columns, width](value_sums, weights, grads, lane)
                var less_delta = Array[Sums, bands * columns](fill=0)
                comptime if not dropout:
                    comptime for place in range(bands * columns):
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + place % columns * 8)
                        less_delta[place] = Sums(-pair[0], -pair[1], -pair[0], -pair[1])
                var slopes = own_values.times_rows[columns](grads, less_delta)
                comptime for place in range(bands * columns):
                    comptime if dropout:
                        var pair = own_numbers.unsafe_load[width=2, alignment=8](step + place % columns * 8)
                        pair *= draws.share
                        slopes[place] = compute_score_gradients(
                            weights[place], slopes[place], Sums(pair[0], pair[1], pair[0], pair[1])
                        )
                    else:
                        slopes[place] *= weights[place]
                add_product[bands, columns, width](key_sums, slopes, queries, lane)
        stage = 1 - stage
        place = next^

    comptime if pairs:
        key_sums = value_sums.copy()  # in the warps that compute the key's gradient
    if not pairs or makes_key:
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
    if not makes_key:
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
