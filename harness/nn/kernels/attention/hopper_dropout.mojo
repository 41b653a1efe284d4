"""Dropout for the `wgmma` kernels: one random bit per probability, drawn by a separate kernel before a pass.

A draw covers 32 queries (`dropout.mojo`) but a warp multiplies 16, so a separate kernel draws once per pass.
A word holds the bits of one lane for 16 queries and 64 keys, one byte per 16 keys in the order of
`byte_index`: bit 4 * side + 2 * half + behind is for query 8 * half + lane // 4 and key 8 * behind + lane % 4
* 2 + side, as in the accumulators. The words of 64 queries and 64 keys are contiguous, 512 bytes: sixteen
blocks of 8 x 8, each of which is transposed if the scores are.
"""

from std.math import ceildiv
from max.gpu import block_idx, lane_id, thread_idx
from max.gpu.primitives import warp

from .dropout import Dropout, update_less_than, make_opaque
from .hopper_tiles import GROUP_THREADS, BOX_SIZE, Shared, divmod32
from .tensors import FlashSizes, PackedSizes
from shared.common import ImmPtr, MutPtr, launch_dependent_grids, wait_on_dependent_grids

comptime WARP_LANES = 32
comptime WORDS = BOX_SIZE // 16 * WARP_LANES
"""Words for 64 queries and 64 keys."""
comptime WORDS_BYTES = WORDS * 4
comptime DRAW_THREADS = 128
comptime MAX_WORDS = 2**28
"""Maximum words: 1 GiB of workspace, which grows with the square of the sequence length."""


@always_inline
def boxes(sizes: FlashSizes) -> Int:
    """Return the number of groups of 64 queries in a head."""
    return ceildiv(Int(sizes.query_len), BOX_SIZE)


@always_inline
def tiles(sizes: FlashSizes) -> Int:
    """Return the number of groups of 64 keys in a head, rounded up to the forward pass's steps of 128 keys.
    """
    return ceildiv(Int(sizes.key_len), 2 * BOX_SIZE) * 2


def count_words(sizes: FlashSizes) -> Int:
    """Return the number of words for all heads."""
    return sizes.heads() * boxes(sizes) * tiles(sizes) * WORDS


def draw_blocks(sizes: FlashSizes) -> Int:
    """Return the number of blocks of `hopper_draws_kernel`: one warp per 64 queries and 64 keys."""
    return ceildiv(count_words(sizes) // 4, DRAW_THREADS)


@always_inline
def byte_index(key_group: Int) -> Int:
    """Return the index of the byte for a group of 16 of the 64 keys."""
    return key_group % 2 * 2 + key_group // 2


@__name("attention_dropout_bits")
def hopper_draws_kernel(
    words: MutPtr[DType.uint32],  # [B, N, boxes of queries, tiles of keys, 4, 32]
    state: ImmPtr[DType.uint32],  # [4]
    keep_threshold: Int32,
    packed: PackedSizes,
):
    """Write the words of one pass, except those for keys that a causal mask hides from all queries of a
    group. The next grid starts early, and may read the results of the grids before this one.
    """
    var sizes = FlashSizes(packed)
    var unit = block_idx.x * (DRAW_THREADS // WARP_LANES) + thread_idx.x // WARP_LANES
    var rest, tile = divmod32(unit, tiles(sizes))
    var head, box = divmod32(rest, boxes(sizes))
    wait_on_dependent_grids()
    launch_dependent_grids()
    if head >= sizes.heads() or sizes.visible_keys(box * BOX_SIZE + BOX_SIZE - 1) <= tile * BOX_SIZE:
        return
    var lane = Int(lane_id())
    var draws = Dropout(state, keep_threshold, head)
    # Two lanes share rows 2 * i and 2 * i + 1: the even lane draws the first 32 keys of both rows, the odd
    # lane the others.
    var odd = lane // 4 % 2
    var lane_words = words_of_group(
        words.as_imm(), head, box * BOX_SIZE, tile * BOX_SIZE, sizes
    ).unsafe_mut_cast[True]()
    comptime for pair in range(2):
        var drawn = SIMD[DType.uint32, 2](0)
        comptime for key_group in range(2):
            comptime for number in range(4):
                var numbers = draws.draw(
                    UInt32(box * BOX_SIZE + pair * 32 + lane // 4),
                    UInt32(tile * BOX_SIZE + (odd * 2 + key_group) * 16 + lane % 4 * 2),
                    UInt32(number),
                    draws.key,
                )
                comptime for i in range(4):
                    drawn[key_group] = update_less_than(
                        numbers[i], draws.digit(UInt32(4 * number + i)), drawn[key_group]
                    )
        # The upper half of a draw is for the odd row.
        var own_shift = UInt32(odd * 16)
        var other_shift = 16 - own_shift
        var own_bits = drawn[0] >> own_shift & 0xFFFF | drawn[1] >> own_shift << 16
        var other = warp.shuffle_xor(
            drawn[0] >> other_shift & 0xFFFF | drawn[1] >> other_shift << 16, UInt32(4)
        )
        var first = other if odd == 1 else own_bits
        var second = own_bits if odd == 1 else other
        comptime EVEN_BYTES = UInt32(0x00FF00FF)
        lane_words[unsafe_offset=pair * 2 * WARP_LANES + lane] = (
            first & EVEN_BYTES | (second & EVEN_BYTES) << 8
        )
        lane_words[unsafe_offset=(pair * 2 + 1) * WARP_LANES + lane] = (
            first >> 8 & EVEN_BYTES | second & ~EVEN_BYTES
        )


@always_inline
def words_of_group(
    words: ImmPtr[DType.uint32], head: Int, s0: Int, t0: Int, sizes: FlashSizes
) -> ImmPtr[DType.uint32]:
    """Return the address of the words for the 64 queries around s0 and the 64 keys around t0; past the last
    query, that of the last group's words.
    """
    var box = head * boxes(sizes) + min(s0 // BOX_SIZE, boxes(sizes) - 1)
    return words.unsafe_offset((box * tiles(sizes) + t0 // BOX_SIZE) * WORDS)


@always_inline
def lane_word_index() -> Int:
    """Return the index of this lane's word of mask bits among the words of 64 queries."""
    return thread_idx.x % GROUP_THREADS


@always_inline
def load_words[count: Int](lane_words: ImmPtr[DType.uint32], t0: Int) -> SIMD[DType.uint32, count]:
    """Load this lane's words of mask bits for the keys from t0 on, one word per 64 keys; `lane_words` is the
    address of its first word.
    """
    var result = SIMD[DType.uint32, count](0)
    comptime for i in range(count):
        result[i] = lane_words[unsafe_offset=(t0 // BOX_SIZE + i) * WORDS]
    return result


@always_inline
def drop[
    width: SIMDLength, count: SIMDLength, //, transposed: Bool = False
](mut sums: SIMD[DType.float32, width], words: SIMD[DType.uint32, count]):
    """Set dropped weights to 0, for 16 queries and 64 keys per word; if `transposed`, `words` come from
    `transposed_word`.
    """
    comptime for i in range(Int(width)):
        comptime half = i // 2 % 2
        comptime j = i % 32 // 4
        comptime byte = j // 2 if transposed else byte_index(j // 2)
        comptime bit = 8 * byte + 4 * (i % 2) + (2 * (j % 2) + half if transposed else 2 * half + j % 2)
        sums[i] = sums[i] if words[i // 32] & UInt32(1 << bit) != 0 else 0


@always_inline
def hide_word(word: UInt32) -> UInt32:
    """Return the same word for a second `drop`, hidden from the assembler, which would otherwise keep every
    bit as a predicate and has only seven.
    """
    return warp.shuffle_xor(word, UInt32(0))


@always_inline
def transposed_word(words: Shared[UInt32]) -> UInt32:
    """Return a lane's word for transposed scores: for all 64 queries, and the 16 of 64 keys that its warp
    owns.

    One byte of each word belongs to the warp. These bytes of all four words are again sixteen blocks of 8 x
    8. Element (r, c) of a block is in lane 4 * r + c // 2, and is needed in lane 4 * c + r // 2.
    """
    var drawn = SIMD[DType.uint32, 4](0)
    comptime for strip in range(WORDS // WARP_LANES):
        drawn[strip] = words[unsafe_offset=strip * WARP_LANES + Int(lane_id())]
    return transposed_word(drawn)


@always_inline
def transposed_word(drawn: SIMD[DType.uint32, 4]) -> UInt32:
    """Return the same word from this lane's words for each 16 queries, which are already loaded."""
    var lane = Int(lane_id())
    var shift = UInt32(byte_index(thread_idx.x % GROUP_THREADS // WARP_LANES) * 8)
    var gathered = UInt32(0)
    comptime for strip in range(WORDS // WARP_LANES):
        gathered |= (drawn[strip] >> shift & 0xFF) << UInt32(8 * strip)
    var source = UInt32(lane % 4 * 8 + lane // 8)
    var side = UInt32(lane // 4 % 2 * 4)
    var even = warp.shuffle_idx(gathered, source) >> side & 0x0F0F0F0F
    var odd = warp.shuffle_idx(gathered, source + 4) >> side & 0x0F0F0F0F
    return make_opaque(even | odd << 4)
