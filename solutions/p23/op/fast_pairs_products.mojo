"""Products of pairs of float16 by mma.sync: of rows in shared memory, and of sums that stay in registers and are split on the way.

Three products make one (`fast_pairs.mojo`). Each box of the left side has sums of its own. Beside them what the kernels do with
sums: add a mask to scores, and store rows times their factors.
"""

from max.gpu import lane_id
from max.gpu.compute.mma import ld_matrix, mma

from .fast_pairs import HALF_TYPE, SIDE, boxes_of
from .fast_scores import LOG2_E
from .fast_tiles import Lane, SharedPtr, Sums
from .flash_tensors import FlashSizes
from .shared.common import ImmPtr, MutPtr


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
    width: Int, bands: Int, columns: Int, own_rows: Int, rows: Int
](own: SharedPtr[HALF_TYPE], right: SharedPtr[HALF_TYPE], lane: Lane[SIDE]) -> Array[Sums, bands * columns]:
    """Own @ right^T: products of own rows, among `own_rows`, with 8 * columns ones, among `rows`. Each box has sums of its own.
    """
    var all = Array[Sums, bands * columns](fill=0)
    comptime for box in range(boxes_of[width]()):
        var sums = Array[Sums, bands * columns](fill=0)
        comptime for k in range(min(SIDE, width - box * SIDE) // 16):
            var left_high = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
            var left_low = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
            comptime for band in range(bands):
                var at = own.unsafe_offset((2 * box * own_rows + band * 16) * SIDE + lane.down[k]())
                left_high[band] = ld_matrix[8](at)
                left_low[band] = ld_matrix[8](at.unsafe_offset(own_rows * SIDE))
            comptime for pair in range(columns // 2):
                var at = right.unsafe_offset((2 * box * rows + pair * 16) * SIDE + lane.across[k]())
                var right_high = ld_matrix[8](at)
                var right_low = ld_matrix[8](at.unsafe_offset(rows * SIDE))
                comptime for band in range(bands):
                    comptime for side in range(2):
                        add_three(
                            sums[band * columns + 2 * pair + side],
                            left_high[band],
                            left_low[band],
                            right_high.slice[4, offset=4 * side](),
                            right_low.slice[4, offset=4 * side](),
                        )
        comptime for place in range(bands * columns):
            all[place] = sums[place] if box == 0 else all[place] + sums[place]
    return all^


@always_inline
def product[
    width: Int, box: Int, bands: Int, columns: Int, rows: Int
](left: Array[Sums, bands * columns], right: SharedPtr[HALF_TYPE], lane: Lane[SIDE]) -> Array[
    Sums, bands * (SIDE // 8)
]:
    """Left @ right, of 8 * columns rows among `rows`, one box of them; left is split on the way."""
    var sums = Array[Sums, bands * (SIDE // 8)](fill=0)
    comptime for k in range(columns // 2):
        var left_high = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        var left_low = Array[SIMD[HALF_TYPE, 8], bands](fill=0)
        comptime for band in range(bands):
            comptime first = band * columns + 2 * k
            var whole = left[first].join(left[first + 1])
            left_high[band] = whole.cast[HALF_TYPE]()
            left_low[band] = (whole - left_high[band].cast[DType.float32]()).cast[HALF_TYPE]()
        comptime for pair in range(min(SIDE, width - box * SIDE) // 16):
            var at = right.unsafe_offset((2 * box * rows + k * 16) * SIDE + lane.down[pair]())
            var right_high = ld_matrix[8, transpose=True](at)
            var right_low = ld_matrix[8, transpose=True](at.unsafe_offset(rows * SIDE))
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
    width: Int, bands: Int
](
    target: MutPtr[DType.float32],
    sums: Array[Sums, boxes_of[width]() * bands * (SIDE // 8)],
    factors: Array[Float32, 2 * bands],
    first: Int,
    count: Int,
    d: Int,
):
    """Writes a warp's sums, box after box, to rows `first` ... of a matrix [count, d], each row times its own factor.
    """
    var whole = d % 2 == 0 and Int(target) % 8 == 0
    comptime for half in range(2 * bands):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            comptime for j in range(width // 8):
                var column = j * 8 + lane_id() % 4 * 2
                comptime box = j // (SIDE // 8)
                comptime place = (box * bands + half // 2) * (SIDE // 8) + j % (SIDE // 8)
                var of_sums = sums[place]
                var pair = SIMD[DType.float32, 2](of_sums[half % 2 * 2], of_sums[half % 2 * 2 + 1])
                pair *= factors[half]
                if whole:
                    if column < d:
                        target.unsafe_store[alignment=8](row * d + column, pair)
                else:
                    comptime for e in range(2):
                        if column + e < d:
                            target[unsafe_offset=row * d + column + e] = pair[e]


@always_inline
def mask_element(mask: ImmPtr[DType.float32], s: Int, t: Int, sizes: FlashSizes) -> Float32:
    """A head's element of a query and a key; past the end, that of the last. Compared in 32 bits, which takes half of the
    instructions.
    """
    var row = Int(min(Int32(s), sizes.query_len - 1)) * Int(sizes.mask_s)
    var column = Int(min(Int32(t), sizes.key_len - 1)) * Int(sizes.mask_t)
    return mask[unsafe_offset=row + column]


@always_inline
def add_mask(
    product: Float32, factor: Float32, mask: ImmPtr[DType.float32], s: Int, t: Int, sizes: FlashSizes
) -> Float32:
    """The score to the base 2 of a query and a key with their element of the head's mask."""
    return mask_element(mask, s, t, sizes).fma(LOG2_E, product * factor)
