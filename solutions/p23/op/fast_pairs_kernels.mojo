"""The flash kernels for float32 on tensor cores, by pairs of float16: forward, and a backward pass of two kernels.

The scheme is that of `fast_kernels.mojo`: a block owns rows and walks over tiles of the other side, two of which are in shared
memory; P and dS stay in registers and are split there. Tiles come as `fast_pairs.mojo` has made them, from heads of up to 64
elements. A mask is added to the scores, element by element. Each tile's products are summed apart, and the sums added in float32 with what undoes the scales.

Output, lse, delta and gradients are float32 and contiguous: [B, N, S, d], [B, G, T, d] and [B, N, S].
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group, external_memory

from .fast_kernels import LN_2, LOG2_E, all_seen, of_row, sees
from .fast_pairs import (
    HALF_TILE,
    HALF_TYPE,
    NUMBERS,
    PAIRS,
    SIDE,
    WEIGHT,
    Record,
    TileRows,
    inverse_power,
    load_pair_rows,
    place_of_block,
    score_factor,
    slope_power,
    take_turn,
)
from .fast_tiles import HIDDEN, Lane, Own, SharedPtr, Sums
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr

comptime WARPS = 4
comptime THREADS = 32 * WARPS
comptime PART = 32
"""Rows of the other side whose scores a warp holds at once."""
comptime COLUMNS = PART // 8
comptime OUTPUT_BANDS = 2
"""16 queries each that a warp owns of the output, and of the gradient of the query;"""
comptime OUTPUT_ROWS = 16 * OUTPUT_BANDS * WARPS
comptime KEY_ROWS = 16 * WARPS
"""Keys that a block owns of the gradients of key and value: a tile."""
comptime PART_TILE = 2 * PART * SIDE
"""Elements of both halves of so many rows."""


# ---- Products -----------------------------------------------------------------------------------------------


@always_inline
def add_three(
    mut sums: Sums,
    left_high: SIMD[HALF_TYPE, 8],
    left_low: SIMD[HALF_TYPE, 8],
    right_high: SIMD[HALF_TYPE, 4],
    right_low: SIMD[HALF_TYPE, 4],
):
    """Sums += left @ right, 16 x 16 by 16 x 8, the small products first."""
    var first = sums
    mma(first, left_low, right_high, sums)
    var second = first
    mma(second, left_high, right_low, first)
    mma(sums, left_high, right_high, second)


@always_inline
def times_rows[
    bands: Int, kept: Bool, //, columns: Int
](
    high: Own[HALF_TYPE, bands, SIDE, kept],
    low: Own[HALF_TYPE, bands, SIDE, kept],
    right: SharedPtr[HALF_TYPE],
    to_low: Int,
) -> Array[Sums, bands * columns]:
    """Own @ right^T: products of the own rows with 8 * columns rows, whose low half is `to_low` elements further.
    """
    var sums = Array[Sums, bands * columns](fill=0)
    comptime for k in range(SIDE // 16):
        var left_high = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        var left_low = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        comptime for band in range(bands):
            left_high[band] = high.fragment[band, k]()
            left_low[band] = low.fragment[band, k]()
        comptime for pair in range(columns // 2):
            var at = right.unsafe_offset(pair * 16 * SIDE + high.lane.across[k]())
            var right_high = ld_matrix[8](at)
            var right_low = ld_matrix[8](at.unsafe_offset(to_low))
            comptime for band in range(bands):
                comptime for side in range(2):
                    add_three(
                        sums[band * columns + 2 * pair + side],
                        left_high[band],
                        left_low[band],
                        right_high.slice[4, offset=4 * side](),
                        right_low.slice[4, offset=4 * side](),
                    )
    return sums^


@always_inline
def product[
    bands: Int, columns: Int
](left: Array[Sums, bands * columns], right: SharedPtr[HALF_TYPE], to_low: Int, lane: Lane[SIDE]) -> Array[
    Sums, bands * (SIDE // 8)
]:
    """Left @ right, of 8 * columns rows; left is split on the way."""
    var sums = Array[Sums, bands * (SIDE // 8)](fill=0)
    comptime for k in range(columns // 2):
        var left_high = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        var left_low = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        comptime for band in range(bands):
            comptime first = band * columns + 2 * k
            var whole = left[first].join(left[first + 1])
            left_high[band] = whole.cast[HALF_TYPE]()
            left_low[band] = (whole - left_high[band].cast[DType.float32]()).cast[HALF_TYPE]()
        comptime for pair in range(SIDE // 16):
            var at = right.unsafe_offset(k * 16 * SIDE + lane.down[pair]())
            var right_high = ld_matrix[8, transpose=True](at)
            var right_low = ld_matrix[8, transpose=True](at.unsafe_offset(to_low))
            comptime for band in range(bands):
                comptime for side in range(2):
                    add_three(
                        sums[band * (SIDE // 8) + 2 * pair + side],
                        left_high[band],
                        left_low[band],
                        right_high.slice[4, offset=4 * side](),
                        right_low.slice[4, offset=4 * side](),
                    )
    return sums^


@always_inline
def store_sums[
    bands: Int
](
    target: MutPtr[DType.float32],
    sums: Array[Sums, bands * (SIDE // 8)],
    factors: Array[Float32, 2 * bands],
    first: Int,
    count: Int,
    d: Int,
):
    """Writes a warp's sums to rows `first` ... of a matrix [count, d], each row times its own factor."""
    comptime for half in range(2 * bands):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            comptime for j in range(SIDE // 8):
                var column = j * 8 + lane_id() % 4 * 2
                var of_sums = sums[half // 2 * (SIDE // 8) + j]
                var pair = SIMD[DType.float32, 2](of_sums[half % 2 * 2], of_sums[half % 2 * 2 + 1])
                pair *= factors[half]
                if d == SIDE and Int(target) % 8 == 0:
                    target.unsafe_store[alignment=8](row * SIDE + column, pair)
                else:
                    comptime for e in range(2):
                        if column + e < d:
                            target[unsafe_offset=row * d + column + e] = pair[e]


@always_inline
def add_mask(
    product: Float32, factor: Float32, mask: ImmPtr[DType.float32], s: Int, t: Int, sizes: FlashSizes
) -> Float32:
    """The score to the base 2 of a query and a key with their element of the head's mask; past the end, that of the last.
    """
    var row = min(s, Int(sizes.query_len) - 1) * Int(sizes.mask_s)
    var column = min(t, Int(sizes.key_len) - 1) * Int(sizes.mask_t)
    return mask[unsafe_offset=row + column].fma(LOG2_E, product * factor)


# ---- Forward ------------------------------------------------------------------------------------------------

comptime PAIRS_FORWARD_ELEMENTS = 2 * OUTPUT_ROWS * SIDE + 4 * PART_TILE
"""Of float16, in shared memory: own queries, and two stages of keys and values."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_forward_kernel[
    masked: Bool
](
    output: MutPtr[DType.float32],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: ImmPtr[DType.float32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[DType.float32],  # [B or 1, N or 1, S or 1, T or 1], read if `masked`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """Output and lse. A block owns 128 queries and walks over the keys, 32 at a time."""
    comptime bands = OUTPUT_BANDS
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var blocks = ceildiv(S, OUTPUT_ROWS)
    var mine = place_of_block(block_idx.x, blocks, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var s0 = (blocks - 1 - mine[1]) * OUTPUT_ROWS
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var queries = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var stages = queries.unsafe_offset(2 * OUTPUT_ROWS * SIDE)
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.keys_seen(min(s0 + OUTPUT_ROWS, S) - 1)

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * PART_TILE)
        var at = t // SIDE * (2 * HALF_TILE) + t % SIDE * SIDE
        load_pair_rows[PART, THREADS](
            keys, PART * SIDE, key_tiles.unsafe_offset(shared_tile * (2 * HALF_TILE) + at)
        )
        load_pair_rows[PART, THREADS](
            keys.unsafe_offset(PART_TILE),
            PART * SIDE,
            value_tiles.unsafe_offset(shared_tile * (2 * HALF_TILE) + at),
        )
        async_copy_commit_group()

    load_own_rows(queries, tiles, places.query(head), s0, places.of_queries)
    fetch(0, 0)
    var own = queries.unsafe_offset(warp_rows * SIDE)
    var high = Own[HALF_TYPE, bands, SIDE, False](own, lane)
    var low = Own[HALF_TYPE, bands, SIDE, False](own.unsafe_offset(OUTPUT_ROWS * SIDE), lane)
    var query = Record(records, places.query(head) + min(first // SIDE, places.of_queries - 1))
    var sums = Array[Sums, bands * (SIDE // 8)](fill=0)
    var largest = Array[Float32, 2 * bands](fill=HIDDEN)
    var totals = Array[Float32, 2 * bands](fill=0)
    # What undoes the scale of the values that are in the sums.
    var undo = Float32(1)
    var stage = 0
    for t0 in range(0, end, PART):
        var key = Record(records, key_tile + t0 // SIDE)
        var value = Record(records, value_tile + t0 // SIDE)
        var factor = score_factor(query, key, scale)
        var to_new = undo * inverse_power(value.undo)
        undo = value.undo
        async_copy_wait_group(0)
        # Now everybody's share of these tiles is here, and nobody still reads those of the step before.
        barrier()
        if t0 + PART < end:
            fetch(t0 + PART, 1 - stage)
        var keys = stages.unsafe_offset(stage * 2 * PART_TILE)
        var scores = times_rows[COLUMNS](high, low, keys, PART * SIDE)
        comptime if masked:
            comptime for place in range(bands * COLUMNS):
                comptime for e in range(4):
                    var s = first + place // COLUMNS * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % COLUMNS * 8 + lane_id() % 4 * 2 + e % 2
                    scores[place][e] = add_mask(scores[place][e], factor, of_head, s, t, sizes)
            factor = 1
        if not all_seen(first, first + 1, t0, t0 + PART, sizes):
            comptime for place in range(bands * COLUMNS):
                comptime for e in range(4):
                    var s = first + place // COLUMNS * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % COLUMNS * 8 + lane_id() % 4 * 2 + e % 2
                    scores[place][e] = scores[place][e] if sees(s, t, sizes) else HIDDEN
        var rescales = Array[Float32, 2 * bands](fill=0)
        comptime for half in range(2 * bands):
            comptime band = half // 2
            comptime e = half % 2 * 2
            var biggest = HIDDEN
            comptime for j in range(COLUMNS):
                biggest = max(biggest, max(scores[band * COLUMNS + j][e], scores[band * COLUMNS + j][e + 1]))
            var grown = max(largest[half], of_row(biggest, True) * factor)
            # Less -inf, a row that has seen nothing yet would be NaN; less 0, its exponentials are 0.
            var shift = grown if grown > HIDDEN else Float32(0)
            rescales[half] = exp2(largest[half] - shift)
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(COLUMNS):
                comptime for side in range(2):
                    var weight = exp2(scores[band * COLUMNS + j][e + side] * factor - shift)
                    scores[band * COLUMNS + j][e + side] = weight * WEIGHT
                    total += weight
            totals[half] = totals[half] * rescales[half] + total
        var part = product[bands, COLUMNS](scores, keys.unsafe_offset(PART_TILE), PART * SIDE, lane)
        comptime for place in range(bands * (SIDE // 8)):
            comptime for e in range(4):
                comptime half = place // (SIDE // 8) * 2 + e // 2
                sums[place][e] = sums[place][e] * (rescales[half] * to_new) + part[place][e]
        stage = 1 - stage

    var factors = Array[Float32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        var total = of_row(totals[half], False)
        # A row that sees no key: total and sums are 0.
        factors[half] = undo / (total * WEIGHT) if total != 0 else 1
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=whole_head * S + s] = (
                HIDDEN if total == 0 else (largest[half] + log2(total)) * LN_2
            )
    store_sums[bands](output.unsafe_offset(whole_head * S * d), sums, factors, first, S, d)


@always_inline
def load_own_rows(
    target: SharedPtr[HALF_TYPE], tiles: ImmPtr[HALF_TYPE], head_tile: Int, s0: Int, of_head: Int
):
    """Copies the 128 rows from s0 on; where a head ends after 64 of them, those once more."""
    comptime for i in range(OUTPUT_ROWS // SIDE):
        var tile = head_tile + min(s0 // SIDE + i, of_head - 1)
        load_pair_rows[SIDE, THREADS](
            target.unsafe_offset(i * HALF_TILE),
            OUTPUT_ROWS * SIDE,
            tiles.unsafe_offset(tile * (2 * HALF_TILE)),
        )


# ---- Backward -----------------------------------------------------------------------------------------------

comptime PAIRS_QUERY_ELEMENTS = 4 * OUTPUT_ROWS * SIDE + 4 * PART_TILE
"""Of float16, in shared memory: own queries and gradients, and two stages of keys and values."""
comptime PAIRS_KEY_VALUE_ELEMENTS = 4 * HALF_TILE + 8 * HALF_TILE + 2 * 2 * NUMBERS * SIDE
"""Own keys and values, and two stages of queries and gradients, each with its numbers in float32."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_query_kernel[
    masked: Bool
](
    grad_query: MutPtr[DType.float32],  # [B, N, S, d]
    numbers: ImmPtr[DType.float32],  # [tiles of grad_output, 3, 64]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: ImmPtr[DType.float32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[DType.float32],  # [B or 1, N or 1, S or 1, T or 1], read if `masked`
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """The gradient of the query. A block owns 128 queries and walks over the keys, 32 at a time."""
    comptime bands = OUTPUT_BANDS
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var blocks = ceildiv(S, OUTPUT_ROWS)
    var mine = place_of_block(block_idx.x, blocks, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var s0 = (blocks - 1 - mine[1]) * OUTPUT_ROWS
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var queries = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var grads = queries.unsafe_offset(2 * OUTPUT_ROWS * SIDE)
    var stages = grads.unsafe_offset(2 * OUTPUT_ROWS * SIDE)
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.keys_seen(min(s0 + OUTPUT_ROWS, S) - 1)

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * PART_TILE)
        var at = t // SIDE * (2 * HALF_TILE) + t % SIDE * SIDE
        load_pair_rows[PART, THREADS](
            keys, PART * SIDE, key_tiles.unsafe_offset(shared_tile * (2 * HALF_TILE) + at)
        )
        load_pair_rows[PART, THREADS](
            keys.unsafe_offset(PART_TILE),
            PART * SIDE,
            value_tiles.unsafe_offset(shared_tile * (2 * HALF_TILE) + at),
        )
        async_copy_commit_group()

    load_own_rows(queries, tiles, places.query(head), s0, places.of_queries)
    load_own_rows(grads, tiles, places.grad_here(head), s0, places.of_queries)
    fetch(0, 0)
    var own = queries.unsafe_offset(warp_rows * SIDE)
    var own_grads = grads.unsafe_offset(warp_rows * SIDE)
    var query_high = Own[HALF_TYPE, bands, SIDE, False](own, lane)
    var query_low = Own[HALF_TYPE, bands, SIDE, False](own.unsafe_offset(OUTPUT_ROWS * SIDE), lane)
    var grad_high = Own[HALF_TYPE, bands, SIDE, False](own_grads, lane)
    var grad_low = Own[HALF_TYPE, bands, SIDE, False](own_grads.unsafe_offset(OUTPUT_ROWS * SIDE), lane)
    var own_tile = min(first // SIDE, places.of_queries - 1)
    var query = Record(records, places.query(head) + own_tile)
    var grad = Record(records, places.grad(head) + own_tile)
    var shifts = Array[Float32, 2 * bands](fill=0)
    var deltas = Array[Float32, 2 * bands](fill=0)
    var factors = Array[Float32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        var place = first % SIDE + half * 8 + lane_id() // 4
        var own_numbers = numbers.unsafe_offset(
            (head * places.of_queries + own_tile) * (NUMBERS * SIDE) + place
        )
        shifts[half] = own_numbers[unsafe_offset=0]
        deltas[half] = own_numbers[unsafe_offset=2 * SIDE]
        # Probabilities are not multiplied, what they are multiplied with is.
        factors[half] = own_numbers[unsafe_offset=SIDE] * (scale / WEIGHT)
    var sums = Array[Sums, bands * (SIDE // 8)](fill=0)
    var stage = 0
    for t0 in range(0, end, PART):
        var key = Record(records, key_tile + t0 // SIDE)
        var value = Record(records, value_tile + t0 // SIDE)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power) * WEIGHT
        var apart_factor = grad.undo * value.undo * down
        async_copy_wait_group(0)
        barrier()
        if t0 + PART < end:
            fetch(t0 + PART, 1 - stage)
        var keys = stages.unsafe_offset(stage * 2 * PART_TILE)
        var slopes = times_rows[COLUMNS](query_high, query_low, keys, PART * SIDE)
        comptime if masked:
            comptime for place in range(bands * COLUMNS):
                comptime for e in range(4):
                    var s = first + place // COLUMNS * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % COLUMNS * 8 + lane_id() % 4 * 2 + e % 2
                    slopes[place][e] = add_mask(slopes[place][e], factor, of_head, s, t, sizes)
            factor = 1
        if not all_seen(first, first + 1, t0, t0 + PART, sizes):
            comptime for place in range(bands * COLUMNS):
                comptime for e in range(4):
                    var s = first + place // COLUMNS * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % COLUMNS * 8 + lane_id() % 4 * 2 + e % 2
                    slopes[place][e] = slopes[place][e] if sees(s, t, sizes) else HIDDEN
        comptime for place in range(bands * COLUMNS):
            comptime for e in range(4):
                comptime half = place // COLUMNS * 2 + e // 2
                slopes[place][e] = exp2(slopes[place][e] * factor - shifts[half])
        var apart = times_rows[COLUMNS](grad_high, grad_low, keys.unsafe_offset(PART_TILE), PART * SIDE)
        comptime for place in range(bands * COLUMNS):
            comptime for e in range(4):
                comptime half = place // COLUMNS * 2 + e // 2
                slopes[place][e] *= apart[place][e] * apart_factor - deltas[half] * down
        var part = product[bands, COLUMNS](slopes, keys, PART * SIDE, lane)
        var undo = key.undo * (power / WEIGHT)
        comptime for place in range(bands * (SIDE // 8)):
            sums[place] = part[place].fma(undo, sums[place])
        stage = 1 - stage

    store_sums[bands](
        grad_query.unsafe_offset(whole_head * S * d),
        sums,
        factors,
        first,
        S,
        d,
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_key_value_kernel[
    masked: Bool
](
    grad_key: MutPtr[DType.float32],  # [B, G, T, d]
    grad_value: MutPtr[DType.float32],  # [B, G, T, d]
    numbers: ImmPtr[DType.float32],  # [tiles of grad_output, 3, 64]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, 2, 64, 64]
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
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var mine = place_of_block(block_idx.x, places.of_keys, sizes.shared_heads(), sizes)
    var shared_head = mine[0]
    var own_tile = mine[1]
    var t0 = own_tile * SIDE
    var head0 = shared_head * sizes.group()
    var keys = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var values = keys.unsafe_offset(2 * HALF_TILE)
    var stages = values.unsafe_offset(2 * HALF_TILE)
    var numbers_here = stages.unsafe_offset(8 * HALF_TILE).unsafe_bitcast[Float32]()
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * 16
    var first = t0 + warp_rows
    # The walk, in tiles: from the first that sees a key, of each head in turn.
    var start = sizes.first_query(t0) // SIDE
    var steps = sizes.group() * max(0, places.of_queries - start)

    @__parameter
    @always_inline
    def fetch(head: Int, tile: Int, stage: Int):
        var queries = stages.unsafe_offset(stage * 4 * HALF_TILE)
        load_pair_rows[SIDE, THREADS](
            queries, HALF_TILE, tiles.unsafe_offset((places.query(head) + tile) * (2 * HALF_TILE))
        )
        load_pair_rows[SIDE, THREADS](
            queries.unsafe_offset(2 * HALF_TILE),
            HALF_TILE,
            tiles.unsafe_offset((places.grad_here(head) + tile) * (2 * HALF_TILE)),
        )
        if thread_idx.x < NUMBERS * SIDE // 4:
            var source = numbers.unsafe_offset((head * places.of_queries + tile) * (NUMBERS * SIDE))
            async_copy[16](
                source.unsafe_offset(4 * thread_idx.x).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                numbers_here.unsafe_offset(stage * (NUMBERS * SIDE) + 4 * thread_idx.x),
            )
        async_copy_commit_group()

    load_pair_rows[SIDE, THREADS](
        keys,
        HALF_TILE,
        key_tiles.unsafe_offset(
            (Int(tiles_before) + places.shared(shared_head) + own_tile) * (2 * HALF_TILE)
        ),
    )
    load_pair_rows[SIDE, THREADS](
        values,
        HALF_TILE,
        value_tiles.unsafe_offset(
            (Int(tiles_before) + places.shared(shared_head) + own_tile) * (2 * HALF_TILE)
        ),
    )
    var key_high = Own[HALF_TYPE, 1, SIDE, False](keys.unsafe_offset(warp_rows * SIDE), lane)
    var key_low = Own[HALF_TYPE, 1, SIDE, False](keys.unsafe_offset(HALF_TILE + warp_rows * SIDE), lane)
    var value_high = Own[HALF_TYPE, 1, SIDE, False](values.unsafe_offset(warp_rows * SIDE), lane)
    var value_low = Own[HALF_TYPE, 1, SIDE, False](values.unsafe_offset(HALF_TILE + warp_rows * SIDE), lane)
    var key = Record(records, places.key(shared_head) + own_tile)
    var value = Record(records, places.value(shared_head) + own_tile)
    var key_sums = Array[Sums, SIDE // 8](fill=0)
    var value_sums = Array[Sums, SIDE // 8](fill=0)
    var head = head0
    var tile = start
    var stage = 0
    if steps > 0:
        fetch(head, tile, 0)
    for step in range(steps):
        var query = Record(records, places.query(head) + tile)
        var grad = Record(records, places.grad(head) + tile)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power)
        var apart_factor = grad.undo * value.undo * down
        var value_undo = grad.undo / WEIGHT
        var key_undo = query.undo * (power / WEIGHT)
        var s0 = tile * SIDE
        var of_head = mask.unsafe_offset(
            sizes.mask_of(Int(first_entry) * Int(sizes.query_heads) + head) if masked else 0
        )
        tile += 1
        if tile == places.of_queries:
            head += 1
            tile = start
        async_copy_wait_group(0)
        barrier()
        if step + 1 < steps:
            fetch(head, tile, 1 - stage)
        for inner in range(0, SIDE, PART):
            var s1 = s0 + inner
            var queries = stages.unsafe_offset(stage * 4 * HALF_TILE + inner * SIDE)
            var grads = queries.unsafe_offset(2 * HALF_TILE)
            var own_numbers = numbers_here.unsafe_offset(stage * (NUMBERS * SIDE) + inner + lane_id() % 4 * 2)
            var edge = not all_seen(s1, s1 + PART, first, first + 16, sizes)
            var weights = times_rows[COLUMNS](key_high, key_low, queries, HALF_TILE)
            var by = factor
            comptime if masked:
                comptime for place in range(COLUMNS):
                    comptime for e in range(4):
                        var t = first + e // 2 * 8 + lane_id() // 4
                        var s = s1 + place * 8 + lane_id() % 4 * 2 + e % 2
                        weights[place][e] = add_mask(weights[place][e], factor, of_head, s, t, sizes)
                by = 1
            comptime for place in range(COLUMNS):
                var shift = own_numbers.unsafe_load[width=2, alignment=8](place * 8)
                var weight = own_numbers.unsafe_load[width=2, alignment=8](SIDE + place * 8)
                comptime for e in range(4):
                    weights[place][e] = exp2(weights[place][e] * by - shift[e % 2]) * weight[e % 2]
            if edge:
                comptime for place in range(COLUMNS):
                    comptime for e in range(4):
                        var t = first + e // 2 * 8 + lane_id() // 4
                        var s = s1 + place * 8 + lane_id() % 4 * 2 + e % 2
                        weights[place][e] = weights[place][e] if sees(s, t, sizes) else 0
            var value_part = product[1, COLUMNS](weights, grads, HALF_TILE, lane)
            comptime for place in range(SIDE // 8):
                value_sums[place] = value_part[place].fma(value_undo, value_sums[place])
            var slopes = times_rows[COLUMNS](value_high, value_low, grads, HALF_TILE)
            comptime for place in range(COLUMNS):
                var pair = own_numbers.unsafe_load[width=2, alignment=8](2 * SIDE + place * 8)
                comptime for e in range(4):
                    slopes[place][e] = weights[place][e] * (
                        slopes[place][e] * apart_factor - pair[e % 2] * down
                    )
            var key_part = product[1, COLUMNS](slopes, queries, HALF_TILE, lane)
            comptime for place in range(SIDE // 8):
                key_sums[place] = key_part[place].fma(key_undo, key_sums[place])
        stage = 1 - stage
    # The gradients may take the memory of the own tiles, which some thread may still be copying where there was no step.
    async_copy_wait_group(0)
    barrier()

    var start_of_head = (Int(first_entry) * Int(sizes.key_heads) + shared_head) * T * d
    store_sums[1](grad_key.unsafe_offset(start_of_head), key_sums, Array[Float32, 2](fill=scale), first, T, d)
    store_sums[1](grad_value.unsafe_offset(start_of_head), value_sums, Array[Float32, 2](fill=1), first, T, d)
