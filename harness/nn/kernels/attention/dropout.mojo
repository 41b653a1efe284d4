"""Dropout for the kernels in `kernels.mojo`: the random numbers are generated again wherever probabilities
are recomputed.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) computes four random words
from a counter and a key, without state. 32 elements of the scores share four draws, 16 random bits per
element: of 32 queries, q and q + 1 and the queries 8, 16 and 24 after them; of 16 keys, k and k + 1 and the
keys 8 after them; q and k are even. Each of the sixteen words has one bit of every element's number, lowest
bit first, so 32 numbers are compared at a time with one instruction per word. In the fragments of the scores,
transposed or not, two lanes hold all 32 elements. `tests/nn/philox_draws.py` draws the same numbers in
PyTorch.
"""

from std.math import ceildiv
from std.sys import inlined_assembly
from max.gpu import lane_id
from max.gpu.primitives import warp

from .tiles import Sums
from shared.common import ImmPtr

comptime ROUNDS = 7
"""Rounds of Philox4x32: the fewest with which it passes the tests in its paper; FlashAttention-2 uses 7 too.
"""
comptime ONE = 65536
"""The number of distinct 16-bit values."""


@fieldwise_init
struct Draws(ImplicitlyCopyable):
    """The arguments of a launch with dropout."""

    @__allow_legacy_any_origin_fields
    var state: ImmPtr[DType.uint32]
    """Four words; the last one is not read."""
    var kept: Int32
    """Elements kept out of ONE, 0 to ONE - 1."""


@always_inline
def philox(counter: SIMD[DType.uint32, 4], key: SIMD[DType.uint32, 2]) -> SIMD[DType.uint32, 4]:
    """Return four random words."""
    var words = counter
    comptime for turn in range(ROUNDS):
        var first = words[0].cast[DType.uint64]() * 0xD2511F53
        var second = words[2].cast[DType.uint64]() * 0xCD9E8D57
        var key0 = key[0] + UInt32(turn * 0x9E3779B9 % 2**32)
        var key1 = key[1] + UInt32(turn * 0xBB67AE85 % 2**32)
        words[0] = (second >> 32).cast[DType.uint32]() ^ words[1] ^ key0
        words[2] = (first >> 32).cast[DType.uint32]() ^ words[3] ^ key1
        words[1] = second.cast[DType.uint32]()
        words[3] = first.cast[DType.uint32]()
    return words


@always_inline
def below(word: UInt32, digit: UInt32, so_far: UInt32) -> UInt32:
    """Update, for 32 numbers at a time, whether their digits so far are below the limit's; `word` has one
    digit of each number, `digit` is the limit's digit as all ones or 0.
    """
    return (~word & digit) | ((~word | digit) & so_far)


@always_inline
def bit_of(query: Int, key: Int) -> Int:
    """Return the bit of a word for one of 32 queries and one of 16 keys."""
    return query % 2 * 16 + query // 16 * 8 + key % 2 * 4 + query // 8 % 2 * 2 + key // 8


@always_inline
def here(word: UInt32) -> UInt32:
    """Hide from the compiler how a word was computed, so that it is computed here and only once."""
    return inlined_assembly["", UInt32, constraints="=r,0", has_side_effect=True](word)


struct Dropout(Copyable, Movable):
    """The random numbers for one head."""

    var key: SIMD[DType.uint32, 2]
    var head: UInt32
    """The index of the head, counted across the batch."""
    var call: UInt32
    """A number that distinguishes this call from others with the same key."""
    var kept: UInt32
    """An element is kept if its random number is below this limit."""
    var share: Float32
    """The fraction of elements kept."""

    @always_inline
    def __init__(out self, state: ImmPtr[DType.uint32], kept: Int32, head: Int):
        """Read the arguments, which are those of `Draws`."""
        self.key = SIMD[DType.uint32, 2](state[unsafe_offset=0], state[unsafe_offset=1])
        self.call = state[unsafe_offset=2]
        self.head = UInt32(head)
        self.kept = UInt32(kept)
        self.share = Float32(kept) / ONE

    @always_inline
    def rescale(self) -> Float32:
        """Return the factor for kept probabilities."""
        return 1 / self.share if self.share != 0 else 0

    @always_inline
    def digit(self, place: UInt32) -> UInt32:
        """Return digit `place` of the limit as all ones or 0."""
        return 0 - (self.kept >> place & 1)

    @always_inline
    def draw(
        self, query: UInt32, key: UInt32, number: UInt32, by: SIMD[DType.uint32, 2]
    ) -> SIMD[DType.uint32, 4]:
        """Return four words: digits 4 * `number` to 4 * `number` + 3 of the elements around a query and a
        key; `by` is the key for Philox.
        """
        var counter = SIMD[DType.uint32, 4](
            (key // 16 * 4 + key % 8 // 2) * 4 + number,
            query // 32 * 4 + query % 8 // 2,
            self.head,
            self.call,
        )
        return philox(counter, by)

    @always_inline
    def mark[
        bands: Int, columns: Int, transposed: Bool = False
    ](self, mut weights: Array[Sums, bands * columns], row: Int, column: Int):
        """Negate the weights to drop, for a warp's queries from `row` on and keys from `column` on; if
        `transposed`, for its keys from `row` on and queries from `column` on.
        """
        comptime queries = columns if transposed else 2 * bands  # groups of eight
        comptime keys = 2 * bands if transposed else columns
        comptime assert keys % 2 == 0 and (queries == 2 or queries % 4 == 0), "whole draws are used"
        var down = UInt32(lane_id()) // 4
        var right = UInt32(lane_id()) % 4 * 2
        var first_query = UInt32(column if transposed else row) + (right if transposed else down)
        var first_key = UInt32(row if transposed else column) + (down if transposed else right)
        # Two lanes share rows 2 * i and 2 * i + 1: the even lane draws the lower digits.
        var upper = down % 2
        var shift = upper * UInt32(4 if transposed else 16)
        comptime if queries == 2:
            # Only half of each draw is used: the first or the second 16 of 32 queries.
            shift += first_query // 16 % 2 * 8
        comptime for draw in range(keys // 2 * ceildiv(queries, 4)):
            comptime eight = draw // (keys // 2) * 4
            comptime pair = draw % (keys // 2) * 2
            # Whether these digits make a number less than the limit if its lower digits do not (`alone`), and
            # if they do (`carried`).
            var alone = UInt32(0)
            var carried = ~UInt32(0)
            # Without `here`, the keys of all rounds would stay in registers that the products need.
            var key = SIMD[DType.uint32, 2](here(self.key[0]), here(self.key[1]))
            comptime for number in range(2):
                var words = self.draw(
                    first_query + UInt32(eight * 8),
                    first_key + UInt32(pair * 8),
                    upper * 2 + UInt32(number),
                    key,
                )
                comptime for i in range(4):
                    var digit = self.digit(upper * 8 + UInt32(number * 4 + i))
                    alone = below(words[i], digit, alone)
                    carried = below(words[i], digit, carried)
            var other_alone = warp.shuffle_xor(alone, UInt32(4))
            var other_carried = warp.shuffle_xor(carried, UInt32(4))
            var kept = alone | carried & other_alone
            if upper == 0:
                kept = other_alone | other_carried & alone
            kept >>= shift
            comptime for at in range(min(queries, 4)):
                comptime for behind in range(2):
                    comptime for side in range(2):
                        comptime i = pair + behind if transposed else eight + at
                        comptime j = eight + at if transposed else pair + behind
                        comptime place = i // 2 * columns + j
                        comptime e = i % 2 * 2 + side
                        comptime bit = bit_of(
                            at * 8 + (side if transposed else 0), behind * 8 + (0 if transposed else side)
                        )
                        var weight = weights[place][e]
                        weights[place][e] = weight if kept & UInt32(1 << bit) != 0 else -weight
