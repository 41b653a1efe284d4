"""Operations on scores: visibility of keys, masking, row reductions.

Exponentials are to base 2: P = 2^(score * scale * log2(e) - lse * log2(e)) takes one multiply-add and one
exp2 instruction.
"""

from std.sys import inlined_assembly
from max.gpu import lane_id
from max.gpu.primitives import warp

from .tiles import HIDDEN, Sums
from .tensors import FlashSizes

comptime LOG2_E = Float32(1.4426950408889634)
comptime LN_2 = Float32(0.6931471805599453)
comptime Strides = SIMD[DType.int64, 4]
"""The strides of a tensor's batch, head and row, in elements; elements of a row are contiguous."""


@always_inline
def row_offset(head: Int, heads: Int32, strides: Strides, row: Int = 0) -> Int:
    """Return the offset of a row of a head; `head` counts across the batch."""
    return head // Int(heads) * Int(strides[0]) + head % Int(heads) * Int(strides[1]) + row * Int(strides[2])


@always_inline
def sees(s: Int, t: Int, sizes: FlashSizes) -> Bool:
    """Return whether query and key are in bounds and the key is not past the diagonal."""
    return s < Int(sizes.query_len) and t < Int(sizes.key_len) and t <= s + Int(sizes.diagonal)


@always_inline
def all_visible(s0: Int, s1: Int, t0: Int, t1: Int, sizes: FlashSizes) -> Bool:
    """Return whether each of the queries s0 ... s1 - 1 sees each of the keys t0 ... t1 - 1."""
    return s1 <= Int(sizes.query_len) and t1 <= Int(sizes.key_len) and t1 - 1 <= s0 + Int(sizes.diagonal)


@always_inline
def mark_unlikely():
    """Mark a branch as unlikely, so that the compiler does not turn its assignments into selects."""
    inlined_assembly["", NoneType, constraints="~{memory}", has_side_effect=True]()


@always_inline
def mask_hidden_keys[
    bands: Int, columns: Int, transposed: Bool = False
](mut values: Array[Sums, bands * columns], hidden: Float32, first: Int, start: Int, sizes: FlashSizes,):
    """Set to `hidden` a warp's scores of keys that a query does not see; rows are queries from `first` on,
    columns are keys from `start` on. If `transposed`, rows are keys and columns queries, and queries past the
    end are hidden too. Indices are 32-bit, so that a comparison is one instruction.
    """
    mark_unlikely()
    var column = Int32(start) + Int32(lane_id()) % 4 * 2
    comptime for half in range(2 * bands):
        var row = Int32(first) + Int32(half * 8) + Int32(lane_id()) // 4
        var begin = row - sizes.diagonal - column if transposed else Int32(0)
        var end = (sizes.query_len if transposed else min(sizes.key_len, row + sizes.diagonal + 1)) - column
        comptime for j in range(columns):
            comptime for side in range(2):
                comptime frag = half // 2 * columns + j
                comptime e = half % 2 * 2 + side
                comptime at = Int32(8 * j + side)
                var visible = at < end
                comptime if transposed:
                    visible = visible and at >= begin
                values[frag][e] = values[frag][e] if visible else hidden


@always_inline
def reduce_row(value: Float32, maximum: Bool) -> Float32:
    """Return the maximum or the sum over the four lanes that share a row."""
    var result = value
    comptime for distance in range(2):
        var other = warp.shuffle_xor(result, UInt32(1 << distance))
        result = max(result, other) if maximum else result + other
    return result


@always_inline
def drop[count: Int](mut weights: Array[Sums, count]):
    """Set marked (negative) weights to 0; NaN stays NaN."""
    comptime for frag in range(count):
        comptime for e in range(4):
            var weight = weights[frag][e]
            weights[frag][e] = 0 if weight < 0 else weight


@always_inline
def broadcast_rows[half: Int](numbers: Array[Float32, _]) -> Sums:
    """Return a lane's accumulators filled with one number per row."""
    return Sums(numbers[half], numbers[half], numbers[half + 1], numbers[half + 1])


@always_inline
def compute_score_gradients(weights: Sums, weight_grads: Sums, deltas: Sums) -> Sums:
    """Return the gradients of scores, P * (dP - delta), from the weights P and their gradients dP; dP counts
    as 0 for marked weights.
    """
    var score_grads = abs(weights)
    comptime for e in range(4):
        score_grads[e] *= (0 if weights[e] < 0 else weight_grads[e]) - deltas[e]
    return score_grads


@always_inline
def score_shift[masked: Bool](lse: Float32) -> Float32:
    """Return the shift that is subtracted from a row's base-2 scores: 0 for a row whose keys are all masked.
    """
    comptime if masked:
        return lse * LOG2_E if lse != HIDDEN else Float32(0)
    else:
        return lse * LOG2_E
