"""The flash kernels for float32 on tensor cores, by pairs of float16: forward, and a backward pass of two kernels.

The scheme is that of `fast_kernels.mojo`: a block owns rows and walks over tiles of the other side, two of which are in shared
memory; P and dS stay in registers and are split there. Tiles come as `fast_pairs.mojo` has made them, from heads of up to 128
elements. Of more than 64, in two boxes, a block takes fewer rows at once: so many registers and so much shared memory there are. A
mask is added to the scores, element by element. `dropped` kernels make some probabilities 0 (`fast_dropout.mojo`). Each tile's products are summed apart, and the sums added in float32 with what
undoes the scales.

Output, lse, delta and gradients are float32 and contiguous: [B, N, S, d], [B, G, T, d] and [B, N, S].
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group, external_memory

from .fast_dropout import Dropout
from .fast_scores import LN_2, all_seen, drop, of_row, sees, slopes_of
from .fast_pairs import (
    HALF_TILE,
    HALF_TYPE,
    NUMBERS,
    PAIRS,
    SIDE,
    WEIGHT,
    Record,
    TileRows,
    boxes_of,
    inverse_power,
    load_pair_rows,
    place_of_block,
    score_factor,
    slope_power,
    take_turn,
)
from .fast_pairs_products import add_mask, product, store_sums, times_rows
from .fast_tiles import HIDDEN, Lane, SharedPtr, Sums
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr

comptime WARPS = 4
comptime THREADS = 32 * WARPS
comptime PART = 32
"""Rows of the other side whose scores a warp holds at once,"""
comptime WIDE_PART = 16
"""and of heads of two boxes in a backward pass."""


def part_of[width: Int]() -> Int:
    """Rows of the other side that a backward pass takes at once."""
    return PART if width <= SIDE else WIDE_PART


def stage_rows[width: Int]() -> Int:
    """Queries of a stage of the kernel that makes the gradients of key and value."""
    return SIDE if width <= SIDE else WIDE_PART


def bands_of[width: Int]() -> Int:
    """16 queries each that a warp owns of the output, and of the gradient of the query;"""
    return 2 if width <= SIDE else 1


def output_rows[width: Int]() -> Int:
    """and a block."""
    return 16 * bands_of[width]() * WARPS


def of_rows[width: Int, rows: Int]() -> Int:
    """Elements of both halves of so many rows."""
    return 2 * boxes_of[width]() * rows * SIDE


# ---- Forward ------------------------------------------------------------------------------------------------


def forward_elements[width: Int]() -> Int:
    """Of float16, in shared memory: own queries, and two stages of keys and values."""
    return of_rows[width, output_rows[width]()]() + 4 * of_rows[width, PART]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_forward_kernel[
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
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    state: ImmPtr[DType.uint32],  # of the draws, four words, read if `dropped`
    kept: Int32,  # of 65,536 elements
):
    """Output and lse. A block owns 128 queries, or 64, and walks over the keys, 32 at a time."""
    comptime bands = bands_of[width]()
    comptime boxes = boxes_of[width]()
    comptime own_rows = output_rows[width]()
    comptime rows = PART
    comptime columns = rows // 8
    comptime tile = of_rows[width, rows]()
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var blocks = ceildiv(S, own_rows)
    var mine = place_of_block(block_idx.x, blocks, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var s0 = (blocks - 1 - mine[1]) * own_rows
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var queries = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var stages = queries.unsafe_offset(of_rows[width, own_rows]())
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.keys_seen(min(s0 + own_rows, S) - 1)

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * tile)
        var at = (shared_tile + t // SIDE) * (2 * boxes * HALF_TILE) + t % SIDE * SIDE
        load_pair_rows[rows, THREADS, boxes](keys, key_tiles.unsafe_offset(at))
        load_pair_rows[rows, THREADS, boxes](keys.unsafe_offset(tile), value_tiles.unsafe_offset(at))
        async_copy_commit_group()

    load_own_rows[width](queries, tiles, places.query(head), s0, places.of_queries)
    fetch(0, 0)
    var own = queries.unsafe_offset(warp_rows * SIDE)
    var query = Record(records, places.query(head) + min(first // SIDE, places.of_queries - 1))
    var draws = Dropout(state, kept, whole_head)
    var sums = Array[Sums, boxes * bands * (SIDE // 8)](fill=0)
    var largest = Array[Float32, 2 * bands](fill=HIDDEN)
    var totals = Array[Float32, 2 * bands](fill=0)
    # What undoes the scale of the values that are in the sums.
    var undo = Float32(1)
    var stage = 0
    for t0 in range(0, end, rows):
        var key = Record(records, key_tile + t0 // SIDE)
        var value = Record(records, value_tile + t0 // SIDE)
        var factor = score_factor(query, key, scale)
        var to_new = undo * inverse_power(value.undo)
        undo = value.undo
        async_copy_wait_group(0)
        # Now everybody's share of these tiles is here, and nobody still reads those of the step before.
        barrier()
        if t0 + rows < end:
            fetch(t0 + rows, 1 - stage)
        var keys = stages.unsafe_offset(stage * 2 * tile)
        var scores = times_rows[width, bands, columns, own_rows, rows](own, keys, lane)
        comptime if masked:
            comptime for place in range(bands * columns):
                comptime for e in range(4):
                    var s = first + place // columns * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % columns * 8 + lane_id() % 4 * 2 + e % 2
                    scores[place][e] = add_mask(scores[place][e], factor, of_head, s, t, sizes)
            factor = 1
        if not all_seen(first, first + 1, t0, t0 + rows, sizes):
            comptime for place in range(bands * columns):
                comptime for e in range(4):
                    var s = first + place // columns * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % columns * 8 + lane_id() % 4 * 2 + e % 2
                    scores[place][e] = scores[place][e] if sees(s, t, sizes) else HIDDEN
        var rescales = Array[Float32, 2 * bands](fill=0)
        comptime for half in range(2 * bands):
            comptime band = half // 2
            comptime e = half % 2 * 2
            var biggest = HIDDEN
            comptime for j in range(columns):
                biggest = max(biggest, max(scores[band * columns + j][e], scores[band * columns + j][e + 1]))
            var grown = max(largest[half], of_row(biggest, True) * factor)
            # Minus -inf, a row that has seen nothing yet would be NaN; minus 0, its exponentials are 0.
            var shift = grown if grown > HIDDEN else Float32(0)
            rescales[half] = exp2(largest[half] - shift)
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(columns):
                comptime for side in range(2):
                    var weight = exp2(scores[band * columns + j][e + side] * factor - shift)
                    scores[band * columns + j][e + side] = weight * WEIGHT
                    total += weight
            totals[half] = totals[half] * rescales[half] + total
        comptime if dropped:
            draws.mark[bands, columns](scores, first, t0)
            drop[bands * columns](scores)
        comptime for box in range(boxes):
            var part = product[width, box, bands, columns, rows](scores, keys.unsafe_offset(tile), lane)
            comptime for place in range(bands * (SIDE // 8)):
                comptime at = box * bands * (SIDE // 8) + place
                comptime for e in range(4):
                    comptime half = place // (SIDE // 8) * 2 + e // 2
                    sums[at][e] = sums[at][e] * (rescales[half] * to_new) + part[place][e]
        stage = 1 - stage

    var factors = Array[Float32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        var total = of_row(totals[half], False)
        # A row that sees no key: total and sums are 0.
        factors[half] = undo / (total * WEIGHT) if total != 0 else 1
        comptime if dropped:
            factors[half] *= draws.rescale()
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=whole_head * S + s] = (
                HIDDEN if total == 0 else (largest[half] + log2(total)) * LN_2
            )
    store_sums[width, bands](output.unsafe_offset(whole_head * S * d), sums, factors, first, S, d)


@always_inline
def load_own_rows[
    width: Int
](target: SharedPtr[HALF_TYPE], tiles: ImmPtr[HALF_TYPE], head_tile: Int, s0: Int, of_head: Int):
    """Copies a block's rows from s0 on; where a head ends after 64 of 128, those once more."""
    comptime boxes = boxes_of[width]()
    comptime rows = output_rows[width]()
    comptime for i in range(rows // SIDE):
        var tile = head_tile + min(s0 // SIDE + i, of_head - 1)
        load_pair_rows[SIDE, THREADS, boxes, rows](
            target.unsafe_offset(i * HALF_TILE), tiles.unsafe_offset(tile * (2 * boxes * HALF_TILE))
        )


# ---- Backward -----------------------------------------------------------------------------------------------


def query_elements[width: Int]() -> Int:
    """Of float16, in shared memory: own queries and gradients, and two stages of keys and values."""
    return 2 * of_rows[width, output_rows[width]()]() + 4 * of_rows[width, part_of[width]()]()


def key_value_elements[width: Int]() -> Int:
    """Own keys and values, and two stages of queries and gradients, each with its numbers in float32."""
    comptime rows = stage_rows[width]()
    return 2 * of_rows[width, SIDE]() + 2 * (2 * of_rows[width, rows]() + 2 * NUMBERS * rows)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_query_kernel[
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
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    state: ImmPtr[DType.uint32],  # of the draws, four words, read if `dropped`
    kept: Int32,  # of 65,536 elements
):
    """The gradient of the query. A block owns 128 queries and walks over the keys, 32 at a time; or 64, and 16 at a time.
    """
    comptime bands = bands_of[width]()
    comptime boxes = boxes_of[width]()
    comptime own_rows = output_rows[width]()
    comptime rows = part_of[width]()
    comptime columns = rows // 8
    comptime tile = of_rows[width, rows]()
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var blocks = ceildiv(S, own_rows)
    var mine = place_of_block(block_idx.x, blocks, sizes.heads(), sizes)
    var head = mine[0]
    var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
    var s0 = (blocks - 1 - mine[1]) * own_rows
    var shared_tile = Int(tiles_before) + places.shared(sizes.shared_head(head))
    var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
    var key_tile = places.key(sizes.shared_head(head))
    var value_tile = places.value(sizes.shared_head(head))
    var queries = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var grads = queries.unsafe_offset(of_rows[width, own_rows]())
    var stages = grads.unsafe_offset(of_rows[width, own_rows]())
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.keys_seen(min(s0 + own_rows, S) - 1)

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * tile)
        var at = (shared_tile + t // SIDE) * (2 * boxes * HALF_TILE) + t % SIDE * SIDE
        load_pair_rows[rows, THREADS, boxes](keys, key_tiles.unsafe_offset(at))
        load_pair_rows[rows, THREADS, boxes](keys.unsafe_offset(tile), value_tiles.unsafe_offset(at))
        async_copy_commit_group()

    load_own_rows[width](queries, tiles, places.query(head), s0, places.of_queries)
    load_own_rows[width](grads, tiles, places.grad_here(head), s0, places.of_queries)
    fetch(0, 0)
    var own = queries.unsafe_offset(warp_rows * SIDE)
    var own_grads = grads.unsafe_offset(warp_rows * SIDE)
    var own_tile = min(first // SIDE, places.of_queries - 1)
    var query = Record(records, places.query(head) + own_tile)
    var grad = Record(records, places.grad(head) + own_tile)
    var draws = Dropout(state, kept, whole_head)
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
        comptime if dropped:
            deltas[half] *= draws.share
            factors[half] *= draws.rescale()
    var sums = Array[Sums, boxes * bands * (SIDE // 8)](fill=0)
    var stage = 0
    for t0 in range(0, end, rows):
        var key = Record(records, key_tile + t0 // SIDE)
        var value = Record(records, value_tile + t0 // SIDE)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power) * WEIGHT
        var apart_factor = grad.undo * value.undo * down
        async_copy_wait_group(0)
        barrier()
        if t0 + rows < end:
            fetch(t0 + rows, 1 - stage)
        var keys = stages.unsafe_offset(stage * 2 * tile)
        var slopes = times_rows[width, bands, columns, own_rows, rows](own, keys, lane)
        comptime if masked:
            comptime for place in range(bands * columns):
                comptime for e in range(4):
                    var s = first + place // columns * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % columns * 8 + lane_id() % 4 * 2 + e % 2
                    slopes[place][e] = add_mask(slopes[place][e], factor, of_head, s, t, sizes)
            factor = 1
        if not all_seen(first, first + 1, t0, t0 + rows, sizes):
            comptime for place in range(bands * columns):
                comptime for e in range(4):
                    var s = first + place // columns * 16 + e // 2 * 8 + lane_id() // 4
                    var t = t0 + place % columns * 8 + lane_id() % 4 * 2 + e % 2
                    slopes[place][e] = slopes[place][e] if sees(s, t, sizes) else HIDDEN
        comptime for place in range(bands * columns):
            comptime for e in range(4):
                comptime half = place // columns * 2 + e // 2
                slopes[place][e] = exp2(slopes[place][e] * factor - shifts[half])
        comptime if dropped:
            draws.mark[bands, columns](slopes, first, t0)
        var apart = times_rows[width, bands, columns, own_rows, rows](
            own_grads, keys.unsafe_offset(tile), lane
        )
        comptime for place in range(bands * columns):
            comptime half = place // columns * 2
            comptime if dropped:
                var less = Sums(deltas[half], deltas[half], deltas[half + 1], deltas[half + 1])
                slopes[place] = slopes_of(slopes[place], apart[place] * apart_factor, less * down)
            else:
                comptime for e in range(4):
                    slopes[place][e] *= apart[place][e] * apart_factor - deltas[half + e // 2] * down
        var undo = key.undo * (power / WEIGHT)
        comptime for box in range(boxes):
            var part = product[width, box, bands, columns, rows](slopes, keys, lane)
            comptime for place in range(bands * (SIDE // 8)):
                comptime at = box * bands * (SIDE // 8) + place
                sums[at] = part[place].fma(undo, sums[at])
        stage = 1 - stage

    store_sums[width, bands](
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
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
    state: ImmPtr[DType.uint32],  # of the draws, four words, read if `dropped`
    kept: Int32,  # of 65,536 elements
):
    """The gradients of key and value. A block owns 64 keys and walks over the queries of every head that shares them, 64 at a
    time, or 16. Scores are transposed, [keys, queries]: so P^T and dS^T are left factors as they are."""
    comptime boxes = boxes_of[width]()
    comptime tile_elements = of_rows[width, SIDE]()
    comptime stage_size = stage_rows[width]()
    comptime stage_elements = of_rows[width, stage_size]()
    comptime stages_of_tile = SIDE // stage_size
    comptime rows = part_of[width]()
    comptime columns = rows // 8
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
    var values = keys.unsafe_offset(tile_elements)
    var stages = values.unsafe_offset(tile_elements)
    var numbers_here = stages.unsafe_offset(4 * stage_elements).unsafe_bitcast[Float32]()
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * 16
    var first = t0 + warp_rows
    # The walk, in stages: from the tile of the first that sees a key, of each head in turn.
    var start = sizes.first_query(t0) // SIDE * stages_of_tile
    var end = places.of_queries * stages_of_tile
    var steps = sizes.group() * max(0, end - start)

    @__parameter
    @always_inline
    def fetch(head: Int, step: Int, stage: Int):
        var tile = step // stages_of_tile
        var from_row = step % stages_of_tile * stage_size
        var queries = stages.unsafe_offset(stage * 2 * stage_elements)
        load_pair_rows[stage_size, THREADS, boxes](
            queries, tiles.unsafe_offset((places.query(head) + tile) * tile_elements + from_row * SIDE)
        )
        load_pair_rows[stage_size, THREADS, boxes](
            queries.unsafe_offset(stage_elements),
            tiles.unsafe_offset((places.grad_here(head) + tile) * tile_elements + from_row * SIDE),
        )
        comptime threads = stage_size // 4
        if thread_idx.x < NUMBERS * threads:
            var source = numbers.unsafe_offset(
                (head * places.of_queries + tile) * (NUMBERS * SIDE) + from_row
            )
            source = source.unsafe_offset(thread_idx.x // threads * SIDE + thread_idx.x % threads * 4)
            async_copy[16](
                source.unsafe_address_space_cast[AddressSpace.GLOBAL](),
                numbers_here.unsafe_offset(stage * (NUMBERS * stage_size) + 4 * thread_idx.x),
            )
        async_copy_commit_group()

    var mine_here = (Int(tiles_before) + places.shared(shared_head) + own_tile) * tile_elements
    load_pair_rows[SIDE, THREADS, boxes](keys, key_tiles.unsafe_offset(mine_here))
    load_pair_rows[SIDE, THREADS, boxes](values, value_tiles.unsafe_offset(mine_here))
    var own_keys = keys.unsafe_offset(warp_rows * SIDE)
    var own_values = values.unsafe_offset(warp_rows * SIDE)
    var key = Record(records, places.key(shared_head) + own_tile)
    var value = Record(records, places.value(shared_head) + own_tile)
    var draws = Dropout(state, kept, 0)
    var key_sums = Array[Sums, boxes * (SIDE // 8)](fill=0)
    var value_sums = Array[Sums, boxes * (SIDE // 8)](fill=0)
    var head = head0
    var next = start
    var stage = 0
    if steps > 0:
        fetch(head, next, 0)
    for step in range(steps):
        var tile = next // stages_of_tile
        var query = Record(records, places.query(head) + tile)
        var grad = Record(records, places.grad(head) + tile)
        var factor = score_factor(query, key, scale)
        var power = slope_power(grad, value)
        var down = inverse_power(power)
        var apart_factor = grad.undo * value.undo * down
        var value_undo = grad.undo / WEIGHT
        var key_undo = query.undo * (power / WEIGHT)
        var s0 = next * stage_size
        var whole_head = Int(first_entry) * Int(sizes.query_heads) + head
        var of_head = mask.unsafe_offset(sizes.mask_of(whole_head) if masked else 0)
        comptime if dropped:
            draws.head = UInt32(whole_head)
            down *= draws.share
        next += 1
        if next == end:
            head += 1
            next = start
        async_copy_wait_group(0)
        barrier()
        if step + 1 < steps:
            fetch(head, next, 1 - stage)
        for inner in range(0, stage_size, rows):
            var s1 = s0 + inner
            var queries = stages.unsafe_offset(stage * 2 * stage_elements + inner * SIDE)
            var grads = queries.unsafe_offset(stage_elements)
            var own_numbers = numbers_here.unsafe_offset(
                stage * (NUMBERS * stage_size) + inner + lane_id() % 4 * 2
            )
            var edge = not all_seen(s1, s1 + rows, first, first + 16, sizes)
            var weights = times_rows[width, 1, columns, SIDE, stage_size](own_keys, queries, lane)
            var by = factor
            comptime if masked:
                comptime for place in range(columns):
                    comptime for e in range(4):
                        var t = first + e // 2 * 8 + lane_id() // 4
                        var s = s1 + place * 8 + lane_id() % 4 * 2 + e % 2
                        weights[place][e] = add_mask(weights[place][e], factor, of_head, s, t, sizes)
                by = 1
            comptime for place in range(columns):
                var shift = own_numbers.unsafe_load[width=2, alignment=8](place * 8)
                var weight = own_numbers.unsafe_load[width=2, alignment=8](stage_size + place * 8)
                comptime for e in range(4):
                    weights[place][e] = exp2(weights[place][e] * by - shift[e % 2]) * weight[e % 2]
            if edge:
                comptime for place in range(columns):
                    comptime for e in range(4):
                        var t = first + e // 2 * 8 + lane_id() // 4
                        var s = s1 + place * 8 + lane_id() % 4 * 2 + e % 2
                        weights[place][e] = weights[place][e] if sees(s, t, sizes) else 0
            var left = weights.copy()
            comptime if dropped:
                draws.mark[1, columns, transposed=True](weights, first, s1)
                left = weights.copy()
                drop[columns](left)
            comptime for box in range(boxes):
                var part = product[width, box, 1, columns, stage_size](left, grads, lane)
                comptime for place in range(SIDE // 8):
                    comptime at = box * (SIDE // 8) + place
                    value_sums[at] = part[place].fma(value_undo, value_sums[at])
            var slopes = times_rows[width, 1, columns, SIDE, stage_size](own_values, grads, lane)
            comptime for place in range(columns):
                var pair = own_numbers.unsafe_load[width=2, alignment=8](2 * stage_size + place * 8)
                comptime if dropped:
                    pair *= down
                    slopes[place] = slopes_of(weights[place], slopes[place] * apart_factor, pair.join(pair))
                else:
                    comptime for e in range(4):
                        slopes[place][e] = weights[place][e] * (
                            slopes[place][e] * apart_factor - pair[e % 2] * down
                        )
            comptime for box in range(boxes):
                var part = product[width, box, 1, columns, stage_size](slopes, queries, lane)
                comptime for place in range(SIDE // 8):
                    comptime at = box * (SIDE // 8) + place
                    key_sums[at] = part[place].fma(key_undo, key_sums[at])
        stage = 1 - stage
    # The gradients may take the memory of the own tiles, which some thread may still be copying where there was no step.
    async_copy_wait_group(0)
    barrier()

    var start_of_head = (Int(first_entry) * Int(sizes.key_heads) + shared_head) * T * d
    var rescale = draws.rescale() if dropped else Float32(1)
    store_sums[width, 1](
        grad_key.unsafe_offset(start_of_head), key_sums, Array[Float32, 2](fill=scale * rescale), first, T, d
    )
    store_sums[width, 1](
        grad_value.unsafe_offset(start_of_head), value_sums, Array[Float32, 2](fill=rescale), first, T, d
    )
