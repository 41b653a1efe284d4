"""The plain path of float32, for tensors that are no good for pairs of float16 (`fast_pairs.mojo` says which these are): the flash
kernels, and with dropout both passes in short, a warp for each row.

With dropout a call that comes here is rare twice over, so these kernels are short and not fast. What is drawn is what
`fast_dropout.mojo` draws, one element at a time.
"""

from std.math import exp, log
from max.gpu import block_idx, grid_dim, lane_id, thread_idx
from max.gpu.primitives import warp

from .attention import flash_forward_kernel, flash_key_value_kernel, flash_query_kernel
from .fast_dropout import Dropout, bit_of
from .fast_pairs import PLAIN, WIDE_PAIRS, take_turn
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr
from .tiles import probability, seen_score

comptime LANES = 32
comptime PLAIN_THREADS = 128
comptime WARPS = PLAIN_THREADS // LANES
comptime Row = SIMD[DType.float32, WIDE_PAIRS // LANES]
"""A lane's elements of a row: every 32nd."""


# ---- The flash kernels --------------------------------------------------------------------------------------


struct Starts(Copyable, Movable):
    """Where a part of the batch begins."""

    var rows: Int
    """Queries in front of it,"""
    var queries: Int
    """their elements,"""
    var keys: Int
    """those of the keys,"""
    var mask: Int
    """and of the mask."""

    @always_inline
    def __init__(out self, first_entry: Int32, packed: PackedSizes):
        """Of the part from an entry on."""
        var sizes = FlashSizes(packed)
        var d = Int(sizes.head_dim)
        self.rows = Int(first_entry) * Int(sizes.query_heads) * Int(sizes.query_len)
        self.queries = self.rows * d
        self.keys = Int(first_entry) * Int(sizes.key_heads) * Int(sizes.key_len) * d
        self.mask = Int(first_entry) * Int(sizes.mask_b)


def plain_forward_kernel(
    path: ImmPtr[DType.int32],
    first_entry: Int32,
    output: MutPtr[DType.float32],
    lse: MutPtr[DType.float32],
    query: ImmPtr[DType.float32],
    key: ImmPtr[DType.float32],
    value: ImmPtr[DType.float32],
    mask: ImmPtr[DType.float32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_forward_kernel`, where the plain path has been chosen."""
    take_turn()
    if path[unsafe_offset=0] == PLAIN:
        var at = Starts(first_entry, packed)
        flash_forward_kernel[DType.float32](
            output.unsafe_offset(at.queries),
            lse.unsafe_offset(at.rows),
            query.unsafe_offset(at.queries),
            key.unsafe_offset(at.keys),
            value.unsafe_offset(at.keys),
            mask.unsafe_offset(at.mask),
            packed,
            scale,
        )


def plain_query_kernel(
    path: ImmPtr[DType.int32],
    first_entry: Int32,
    grad_query: MutPtr[DType.float32],
    grad_output: ImmPtr[DType.float32],
    query: ImmPtr[DType.float32],
    key: ImmPtr[DType.float32],
    value: ImmPtr[DType.float32],
    lse: ImmPtr[DType.float32],
    delta: ImmPtr[DType.float32],
    mask: ImmPtr[DType.float32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_query_kernel`, where the plain path has been chosen."""
    take_turn()
    if path[unsafe_offset=0] == PLAIN:
        var at = Starts(first_entry, packed)
        flash_query_kernel[DType.float32](
            grad_query.unsafe_offset(at.queries),
            grad_output.unsafe_offset(at.queries),
            query.unsafe_offset(at.queries),
            key.unsafe_offset(at.keys),
            value.unsafe_offset(at.keys),
            lse.unsafe_offset(at.rows),
            delta.unsafe_offset(at.rows),
            mask.unsafe_offset(at.mask),
            packed,
            scale,
        )


def plain_key_value_kernel(
    path: ImmPtr[DType.int32],
    first_entry: Int32,
    grad_key: MutPtr[DType.float32],
    grad_value: MutPtr[DType.float32],
    grad_output: ImmPtr[DType.float32],
    query: ImmPtr[DType.float32],
    key: ImmPtr[DType.float32],
    value: ImmPtr[DType.float32],
    lse: ImmPtr[DType.float32],
    delta: ImmPtr[DType.float32],
    mask: ImmPtr[DType.float32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_key_value_kernel`, where the plain path has been chosen."""
    take_turn()
    if path[unsafe_offset=0] == PLAIN:
        var at = Starts(first_entry, packed)
        flash_key_value_kernel[DType.float32](
            grad_key.unsafe_offset(at.keys),
            grad_value.unsafe_offset(at.keys),
            grad_output.unsafe_offset(at.queries),
            query.unsafe_offset(at.queries),
            key.unsafe_offset(at.keys),
            value.unsafe_offset(at.keys),
            lse.unsafe_offset(at.rows),
            delta.unsafe_offset(at.rows),
            mask.unsafe_offset(at.mask),
            packed,
            scale,
        )


# ---- With dropout -------------------------------------------------------------------------------------------


@always_inline
def load_row(source: ImmPtr[DType.float32], row: Int, d: Int) -> Row:
    """A row of a matrix [rows, d]; 0 past its end."""
    var values = Row(0)
    comptime for i in range(WIDE_PAIRS // LANES):
        var column = i * LANES + Int(lane_id())
        if column < d:
            values[i] = source[unsafe_offset=row * d + column]
    return values


@always_inline
def store_row(target: MutPtr[DType.float32], row: Int, d: Int, values: Row):
    """Writes a row."""
    comptime for i in range(WIDE_PAIRS // LANES):
        var column = i * LANES + Int(lane_id())
        if column < d:
            target[unsafe_offset=row * d + column] = values[i]


@always_inline
def dot(left: Row, right: Row) -> Float32:
    """The product of two rows, in every lane."""
    var sum = (left * right).reduce_add()
    comptime for distance in range(5):
        sum += warp.shuffle_xor(sum, UInt32(1 << distance))
    return sum


@always_inline
def left_of(draws: Dropout, s: Int, t: Int) -> Float32:
    """What the probability of a query and a key is multiplied by: 0 if it is dropped."""
    var bit = UInt32(bit_of(s % 32, t % 16))
    var number = UInt32(0)
    comptime for draw in range(4):
        var words = draws.draw(UInt32(s), UInt32(t), UInt32(draw), draws.key)
        comptime for i in range(4):
            number |= (words[i] >> bit & 1) << UInt32(4 * draw + i)
    return draws.rescale() if number < draws.kept else 0


def plain_dropout_forward_kernel(
    path: ImmPtr[DType.int32],  # [1]
    first_entry: Int32,
    output: MutPtr[DType.float32],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    query: ImmPtr[DType.float32],  # [B, N, S, d]
    key: ImmPtr[DType.float32],  # [B, G, T, d]
    value: ImmPtr[DType.float32],  # [B, G, T, d]
    mask: ImmPtr[DType.float32],  # at its own strides
    state: ImmPtr[DType.uint32],  # of the draws, four words
    kept: Int32,  # of 65,536 elements
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """Output and lse, where the plain path has been chosen."""
    take_turn()
    if path[unsafe_offset=0] != PLAIN:
        return
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var d = Int(sizes.head_dim)
    var before = Int(first_entry) * Int(sizes.query_heads) * S
    for index in range(warp_of_grid(), sizes.heads() * S, grid_dim.x * WARPS):
        var row = before + index
        var s = row % S
        var head = row // S
        var draws = Dropout(state, kept, head)
        var own_mask = mask.unsafe_offset(sizes.mask_of(head))
        var keys = sizes.shared_head(head) * Int(sizes.key_len)
        var own = load_row(query, row, d)
        var largest = Float32.MIN
        var total = Float32(0)
        var sums = Row(0)
        for t in range(sizes.keys_seen(s)):
            var score = seen_score(scale * dot(own, load_row(key, keys + t, d)), own_mask, s, t, sizes)
            var grown = max(largest, score)
            var shift = grown if grown > Float32.MIN else Float32(0)
            var rescale = exp(largest - shift)
            var weight = exp(score - shift)
            total = total * rescale + weight
            sums = sums * rescale + load_row(value, keys + t, d) * (weight * left_of(draws, s, t))
            largest = grown
        store_row(output, row, d, sums / (Float32(1) if total == 0 else total))
        if lane_id() == 0:
            lse[unsafe_offset=row] = Float32.MIN if total == 0 else largest + log(total)


def plain_dropout_backward_kernel(
    path: ImmPtr[DType.int32],  # [1]
    first_entry: Int32,
    grad_query: MutPtr[DType.float32],  # [B, N, S, d]
    grad_key: MutPtr[DType.float32],  # [B, G, T, d]
    grad_value: MutPtr[DType.float32],  # [B, G, T, d]
    grad_output: ImmPtr[DType.float32],  # [B, N, S, d]
    query: ImmPtr[DType.float32],  # [B, N, S, d]
    key: ImmPtr[DType.float32],  # [B, G, T, d]
    value: ImmPtr[DType.float32],  # [B, G, T, d]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S]
    mask: ImmPtr[DType.float32],  # at its own strides
    state: ImmPtr[DType.uint32],  # of the draws, four words
    kept: Int32,  # of 65,536 elements
    packed: PackedSizes,  # of the part of the batch from the first entry on
    scale: Float32,
):
    """All gradients, where the plain path has been chosen: first the rows of the query's, then those of key's and value's.
    """
    take_turn()
    if path[unsafe_offset=0] != PLAIN:
        return
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)

    @__parameter
    @always_inline
    def slope_and_weight(row: Int, shared_row: Int) -> SIMD[DType.float32, 2]:
        # dS / scale, and what of P is left.
        var s = row % S
        var t = shared_row % T
        var head = row // S
        var own_mask = mask.unsafe_offset(sizes.mask_of(head))
        var product = dot(load_row(query, row, d), load_row(key, shared_row, d))
        var score = seen_score(scale * product, own_mask, s, t, sizes)
        var weight = probability(score, lse[unsafe_offset=row])
        var left = left_of(Dropout(state, kept, head), s, t)
        var of_weight = left * dot(load_row(grad_output, row, d), load_row(value, shared_row, d))
        return SIMD[DType.float32, 2](weight * (of_weight - delta[unsafe_offset=row]), weight * left)

    var rows = sizes.heads() * S
    for index in range(warp_of_grid(), rows + sizes.shared_heads() * T, grid_dim.x * WARPS):
        if index < rows:
            var row = Int(first_entry) * Int(sizes.query_heads) * S + index
            var keys = sizes.shared_head(row // S) * T
            var sums = Row(0)
            for t in range(sizes.keys_seen(row % S)):
                sums += load_row(key, keys + t, d) * slope_and_weight(row, keys + t)[0]
            store_row(grad_query, row, d, sums * scale)
        else:
            var row = Int(first_entry) * Int(sizes.key_heads) * T + index - rows
            var key_sums = Row(0)
            var value_sums = Row(0)
            for member in range(sizes.group()):
                var queries = (row // T * sizes.group() + member) * S
                for s in range(sizes.first_query(row % T), S):
                    var both = slope_and_weight(queries + s, row)
                    key_sums += load_row(query, queries + s, d) * both[0]
                    value_sums += load_row(grad_output, queries + s, d) * both[1]
            store_row(grad_key, row, d, key_sums * scale)
            store_row(grad_value, row, d, value_sums)


@always_inline
def warp_of_grid() -> Int:
    """Which of all warps this is."""
    return block_idx.x * WARPS + thread_idx.x // LANES
