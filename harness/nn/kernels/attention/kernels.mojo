"""Flash attention for 16-bit types with `mma.sync`: the forward pass, delta, and the gradient of the query.

A block owns `rows` rows of its output and loops over tiles of the other operand with two stages in shared
memory: one tile is multiplied while the next one is copied. A warp owns 16 * bands rows. P, and then dS, stay
in registers between products, so the gradient of the query needs one kernel and those of key and value
another (`keys.mojo`): seven products instead of five, but no exchange between blocks.

`masked` kernels support masks (`masks.mojo`; `mask_block` is 0 without a mask) and any scale; the others
support only a positive scale. `varlen` kernels read offsets instead of a mask; a block works on one of the
sequences between the offsets (`varlen.mojo`). `dropout` kernels set some probabilities to 0 (`dropout.mojo`);
the others do not read `state` and `keep_threshold`. `whole` kernels assume that every tile is full and every
query sees every key. Each kernel has code for only one kind of tile load, since a second would cost
registers.

Tensors are [B, N, S, d] with any strides, but each row starts at a multiple of 16 bytes; lse and delta are
[B, N, S] and contiguous.
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group, external_memory
from max.gpu.primitives import warp

from .dropout import Dropout
from .masks import MaskTile, VisibleTiles, is_tile_hidden, is_one_row
from .scores import (
    LN_2,
    LOG2_E,
    Strides,
    all_visible,
    drop,
    mask_hidden_keys,
    reduce_row,
    broadcast_rows,
    mark_unlikely,
    score_shift,
    compute_score_gradients,
    row_offset,
)
from .tiles import CHUNK, HIDDEN, Lane, LeftOperand, Sums, add_product, load_tile, row_pitch, store_rows
from .varlen import Sequence, count_slots
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr

comptime DELTA_THREADS = 256
"""Threads per block of the delta kernel."""
comptime DELTA_LANES = 8
"""Threads per row of the delta kernel."""


# ---- Forward ------------------------------------------------------------------------------------------------


@__name("attention_forward_mma")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(32 * warps)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def fast_forward_kernel[
    dtype: DType,
    masked: Bool,
    width: Int,
    bands: Int,
    warps: Int,
    step: Int,
    resident: Int,
    whole: Bool,
    varlen: Bool,
    dropout: Bool,
](
    output: MutPtr[dtype],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    mask: ImmPtr[dtype],  # [B, N, S, T] with its own strides, or the sequences' offsets
    output_strides: Strides,
    query_strides: Strides,
    key_strides: Strides,
    value_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    state: ImmPtr[DType.uint32],  # four words for the random numbers of dropout
    keep_threshold: Int32,  # an element is kept if its 16-bit random number is below it
):
    """Compute output and lse. A block owns 16 * bands * warps queries and loops over the keys, `step` at a
    time.

    Blocks with the last queries, which see the most keys under a causal mask, come first.
    """
    comptime rows = 16 * bands * warps
    comptime threads = 32 * warps
    comptime columns = step // 8
    comptime pitch = row_pitch[width]()
    comptime in_registers = width == 64
    var sizes = FlashSizes(packed)
    var all_queries = Int(sizes.query_len)
    var tiles = count_slots(all_queries, Int(sizes.mask_block), rows) if varlen else ceildiv(
        all_queries, rows
    )
    var head = block_idx.x // tiles
    var tile = tiles - 1 - block_idx.x % tiles
    var sequence = Sequence.whole()
    comptime if varlen:
        sequence = Sequence.from_slot[rows, False](mask, tile, sizes)
        if sequence.row >= Int(sizes.query_len):
            return
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var s0 = sequence.row if varlen else tile * rows
    var row0 = head * all_queries + sequence.first_query
    var Q = query.unsafe_offset(row_offset(head, sizes.query_heads, query_strides, sequence.first_query))
    var K = key.unsafe_offset(
        row_offset(sizes.shared_head(head), sizes.key_heads, key_strides, sequence.first_key)
    )
    var V = value.unsafe_offset(
        row_offset(sizes.shared_head(head), sizes.key_heads, value_strides, sequence.first_key)
    )
    var mask_tile = MaskTile[dtype, step](mask.unsafe_offset(sizes.head_mask_offset(head)), sizes)
    var visible = VisibleTiles[dtype, step](mask_tile.mask)
    var queries = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var stages = queries.unsafe_offset(rows * pitch)
    var masks = stages.unsafe_offset(4 * step * pitch)
    var lane = Lane[width]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.visible_keys(min(s0 + rows, S) - 1)

    @__parameter
    @always_inline
    def following(t: Int) -> Int:
        var next = t + step
        comptime if masked:
            if is_one_row(sizes):
                return visible.following(next, end, sizes)
            while next < end and is_tile_hidden[rows, step](mask, head, s0, next, sizes):
                next += step
        return next

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * step * pitch)
        load_tile[step, width, threads, whole](keys, K, t, T, Int(key_strides[2]), d)
        load_tile[step, width, threads, whole](
            keys.unsafe_offset(step * pitch), V, t, T, Int(value_strides[2]), d
        )
        comptime if masked:
            mask_tile.load[rows, threads](
                masks.unsafe_offset(stage * mask_tile.elements[rows]()), s0, t, sizes
            )
        async_copy_commit_group()

    load_tile[rows, width, threads, whole](queries, Q, s0, S, Int(query_strides[2]), d)
    var t0 = following(-step)
    fetch(t0, 0)
    comptime if in_registers:
        async_copy_wait_group(0)
        barrier()
    var left_operand = LeftOperand[dtype, bands, width, in_registers](
        queries.unsafe_offset(thread_idx.x // 32 * (16 * bands * pitch)), lane
    )
    # With a mask, scores are scaled before the maximum; without one the scale is positive and does not change
    # the order.
    var factor = LOG2_E if masked else scale * LOG2_E
    var draws = Dropout(state, keep_threshold, head)
    var sums = Array[Sums, bands * (width // 8)](fill=0)
    var largest = Array[Float32, 2 * bands](fill=HIDDEN)
    var totals = Array[Float32, 2 * bands](fill=0)
    var stage = 0
    while t0 < end:
        async_copy_wait_group(0)
        # All threads' copies of these tiles have arrived, and all threads are done with the previous step's
        # tiles.
        barrier()
        var next = following(t0)
        if next < end:
            fetch(next, 1 - stage)
        var keys = stages.unsafe_offset(stage * 2 * step * pitch)
        var scores = left_operand.multiply_transposed[columns](keys, Array[Sums, bands * columns](fill=0))
        comptime if masked:
            var stage_mask = masks.unsafe_offset(stage * mask_tile.elements[rows]())
            mask_tile.add[bands, columns](scores, scale, stage_mask, warp_rows, 0)
        comptime if not whole:
            if not all_visible(first, first + 1, t0, t0 + step, sizes):
                mask_hidden_keys[bands, columns](scores, HIDDEN, first, t0, sizes)
        comptime for half in range(2 * bands):
            comptime band = half // 2
            comptime e = half % 2 * 2
            var new_maximum = largest[half]
            comptime for j in range(columns):
                new_maximum = max(
                    new_maximum, max(scores[band * columns + j][e], scores[band * columns + j][e + 1])
                )
            new_maximum = reduce_row(new_maximum, True)
            # For a row that has seen no key yet, subtracting -inf would give NaN; subtracting 0 makes the
            # exponentials 0.
            var scaled_maximum = new_maximum * factor
            var shift = scaled_maximum if scaled_maximum > HIDDEN else Float32(0)
            var rescale = exp2(largest[half] * factor - shift)
            largest[half] = new_maximum
            var total = Float32(0)
            comptime for j in range(columns):
                comptime for side in range(2):
                    var weight = exp2(scores[band * columns + j][e + side] * factor - shift)
                    scores[band * columns + j][e + side] = weight
                    total += weight
            totals[half] = totals[half] * rescale + total
            # The maximum rarely grows after the first keys.
            if rescale != 1:
                mark_unlikely()
                comptime for j in range(width // 8):
                    sums[band * (width // 8) + j][e] *= rescale
                    sums[band * (width // 8) + j][e + 1] *= rescale
        comptime if dropout:
            draws.mark_dropped[bands, columns](scores, first, t0)
            drop[bands * columns](scores)
        add_product[bands, columns, width](sums, scores, keys.unsafe_offset(step * pitch), lane)
        stage = 1 - stage
        t0 = next

    var factors = Array[Float32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        var total = reduce_row(totals[half], False)
        # For a row that sees no key, total and sums are 0.
        factors[half] = 1 / total if total != 0 else 1
        comptime if dropout:
            factors[half] *= draws.rescale()
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=row0 + s] = (
                HIDDEN if total == 0 else (largest[half] * factor + log2(total)) * LN_2
            )
    store_rows[bands, width](
        output.unsafe_offset(row_offset(head, sizes.query_heads, output_strides, sequence.first_query)),
        sums,
        factors,
        first,
        S,
        Int(output_strides[2]),
        d,
    )


# ---- Backward -----------------------------------------------------------------------------------------------


@always_inline
def partial_delta[dtype: DType, //](grad_row: ImmPtr[dtype], output_row: ImmPtr[dtype], d: Int) -> Float32:
    """Return a lane's share of the dot product of two rows."""
    var sum = Float32(0)
    for i in range(thread_idx.x % DELTA_LANES * CHUNK, d, DELTA_LANES * CHUNK):
        var left = grad_row.unsafe_load[width=CHUNK, alignment=16](i).cast[DType.float32]()
        var right = output_row.unsafe_load[width=CHUNK, alignment=16](i).cast[DType.float32]()
        sum += (left * right).reduce_add()
    return sum


@always_inline
def sum_lanes(partial: Float32) -> Float32:
    """Return the sum over the lanes that share a row of delta."""
    var sum = partial
    comptime for distance in range(3):
        sum += warp.shuffle_xor(sum, UInt32(1 << distance))
    return sum


@__name("attention_delta")
def fast_delta_kernel[
    dtype: DType
](
    delta: MutPtr[DType.float32],  # [B, N, S]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    output: ImmPtr[dtype],  # [B, N, S, d]
    grad_lse: ImmPtr[DType.float32],  # [B, N, S], read only if with_grad_lse
    with_grad_lse: Int32,  # 0 or 1
    grad_strides: Strides,
    output_strides: Strides,
    packed: PackedSizes,
):
    """Compute delta = rowsum(dO * O) - grad_lse. The gradient of lse enters through delta: the derivative of
    lse by a score is P, and dS = P * (dP - delta).
    """
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var row = block_idx.x * (DELTA_THREADS // DELTA_LANES) + thread_idx.x // DELTA_LANES
    var exists = row < sizes.heads() * S
    var head = row // S
    var dO = grad_output.unsafe_offset(
        row_offset(head, sizes.query_heads, grad_strides) + row % S * Int(grad_strides[2])
    )
    var O = output.unsafe_offset(
        row_offset(head, sizes.query_heads, output_strides) + row % S * Int(output_strides[2])
    )
    var sum = Float32(0)
    if exists:
        sum = partial_delta(dO, O, Int(sizes.head_dim))
    sum = sum_lanes(sum)
    if exists and thread_idx.x % DELTA_LANES == 0:
        if with_grad_lse != 0:
            sum -= grad_lse[unsafe_offset=row]
        delta[unsafe_offset=row] = sum


@__name("attention_query_mma")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(32 * warps)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def fast_query_kernel[
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
    grad_query: MutPtr[dtype],  # [B, N, S, d]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S]
    mask: ImmPtr[dtype],  # [B, N, S, T] with its own strides, or the sequences' offsets
    gradient_strides: Strides,
    grad_strides: Strides,
    query_strides: Strides,
    key_strides: Strides,
    value_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
    state: ImmPtr[DType.uint32],  # four words for the random numbers of dropout
    keep_threshold: Int32,  # an element is kept if its 16-bit random number is below it
):
    """Compute the gradient of the query. A block owns 16 * bands * warps queries and loops over the keys,
    `step` at a time.

    A step is computed in parts of `part` keys, so that scores and their gradients fit in registers.
    """
    comptime rows = 16 * bands * warps
    comptime threads = 32 * warps
    comptime columns = part // 8
    comptime pitch = row_pitch[width]()
    comptime in_registers = width == 64
    var sizes = FlashSizes(packed)
    var all_queries = Int(sizes.query_len)
    var tiles = count_slots(all_queries, Int(sizes.mask_block), rows) if varlen else ceildiv(
        all_queries, rows
    )
    var head = block_idx.x // tiles
    var tile = tiles - 1 - block_idx.x % tiles
    var sequence = Sequence.whole()
    comptime if varlen:
        sequence = Sequence.from_slot[rows, False](mask, tile, sizes)
        if sequence.row >= Int(sizes.query_len):
            return
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var s0 = sequence.row if varlen else tile * rows
    var row0 = head * all_queries + sequence.first_query
    var K = key.unsafe_offset(
        row_offset(sizes.shared_head(head), sizes.key_heads, key_strides, sequence.first_key)
    )
    var V = value.unsafe_offset(
        row_offset(sizes.shared_head(head), sizes.key_heads, value_strides, sequence.first_key)
    )
    var mask_tile = MaskTile[dtype, step](mask.unsafe_offset(sizes.head_mask_offset(head)), sizes)
    var visible = VisibleTiles[dtype, step](mask_tile.mask)
    var queries = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var grads = queries.unsafe_offset(rows * pitch)
    var stages = grads.unsafe_offset(rows * pitch)
    var masks = stages.unsafe_offset(4 * step * pitch)
    var lane = Lane[width]()
    var warp_rows = thread_idx.x // 32 * (16 * bands)
    var first = s0 + warp_rows
    var end = sizes.visible_keys(min(s0 + rows, S) - 1)

    @__parameter
    @always_inline
    def following(t: Int) -> Int:
        var next = t + step
        comptime if masked:
            if is_one_row(sizes):
                return visible.following(next, end, sizes)
            while next < end and is_tile_hidden[rows, step](mask, head, s0, next, sizes):
                next += step
        return next

    @__parameter
    @always_inline
    def fetch(t: Int, stage: Int):
        var keys = stages.unsafe_offset(stage * 2 * step * pitch)
        load_tile[step, width, threads, whole](keys, K, t, T, Int(key_strides[2]), d)
        load_tile[step, width, threads, whole](
            keys.unsafe_offset(step * pitch), V, t, T, Int(value_strides[2]), d
        )
        comptime if masked:
            mask_tile.load[rows, threads](
                masks.unsafe_offset(stage * mask_tile.elements[rows]()), s0, t, sizes
            )
        async_copy_commit_group()

    load_tile[rows, width, threads, whole](
        queries,
        query.unsafe_offset(row_offset(head, sizes.query_heads, query_strides, sequence.first_query)),
        s0,
        S,
        Int(query_strides[2]),
        d,
    )
    load_tile[rows, width, threads, whole](
        grads,
        grad_output.unsafe_offset(row_offset(head, sizes.query_heads, grad_strides, sequence.first_query)),
        s0,
        S,
        Int(grad_strides[2]),
        d,
    )
    var t0 = following(-step)
    fetch(t0, 0)
    comptime if in_registers:
        async_copy_wait_group(0)
        barrier()
    comptime band_of_warp = 16 * bands * pitch
    var query_operand = LeftOperand[dtype, bands, width, in_registers](
        queries.unsafe_offset(thread_idx.x // 32 * band_of_warp), lane
    )
    var grad_operand = LeftOperand[dtype, bands, width, in_registers](
        grads.unsafe_offset(thread_idx.x // 32 * band_of_warp), lane
    )
    var draws = Dropout(state, keep_threshold, head)
    var shifts = Array[Float32, 2 * bands](fill=0)
    var deltas = Array[Float32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        var row = row0 + min(first + half * 8 + lane_id() // 4, S - 1)
        shifts[half] = score_shift[True](lse[unsafe_offset=row])
        deltas[half] = delta[unsafe_offset=row]
        comptime if dropout:
            deltas[half] *= draws.keep_fraction
    var factor = LOG2_E if masked else scale * LOG2_E
    var sums = Array[Sums, bands * (width // 8)](fill=0)
    var stage = 0
    while t0 < end:
        async_copy_wait_group(0)
        barrier()
        var next = following(t0)
        if next < end:
            fetch(next, 1 - stage)
        for t1 in range(t0, t0 + step, part):
            var keys = stages.unsafe_offset((stage * 2 * step + t1 - t0) * pitch)
            var score_grads = query_operand.multiply_transposed[columns](
                keys, Array[Sums, bands * columns](fill=0)
            )
            comptime if masked:
                var stage_mask = masks.unsafe_offset(stage * mask_tile.elements[rows]())
                mask_tile.add[bands, columns](score_grads, scale, stage_mask, warp_rows, t1 - t0)
            comptime if not whole:
                if not all_visible(first, first + 1, t1, t1 + part, sizes):
                    mask_hidden_keys[bands, columns](score_grads, HIDDEN, first, t1, sizes)
            comptime for frag in range(bands * columns):
                comptime for e in range(4):
                    comptime half = frag // columns * 2 + e // 2
                    score_grads[frag][e] = exp2(score_grads[frag][e] * factor - shifts[half])
            var minus_delta = Array[Sums, bands * columns](fill=0)
            comptime if dropout:
                draws.mark_dropped[bands, columns](score_grads, first, t1)
            else:
                comptime for frag in range(bands * columns):
                    minus_delta[frag] = -broadcast_rows[frag // columns * 2](deltas)
            var minus_delta_dp = grad_operand.multiply_transposed[columns](
                keys.unsafe_offset(step * pitch), minus_delta
            )
            comptime for frag in range(bands * columns):
                comptime if dropout:
                    score_grads[frag] = compute_score_gradients(
                        score_grads[frag], minus_delta_dp[frag], broadcast_rows[frag // columns * 2](deltas)
                    )
                else:
                    score_grads[frag] *= minus_delta_dp[frag]
            add_product[bands, columns, width](sums, score_grads, keys, lane)
        stage = 1 - stage
        t0 = next

    store_rows[bands, width](
        grad_query.unsafe_offset(row_offset(head, sizes.query_heads, gradient_strides, sequence.first_query)),
        sums,
        Array[Float32, 2 * bands](fill=scale * draws.rescale() if dropout else scale),
        first,
        S,
        Int(gradient_strides[2]),
        d,
    )
