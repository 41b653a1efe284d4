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
comptime KEEP_ONE = 65536
"""The number of distinct 16-bit values."""


@fieldwise_init
struct DropoutArguments(ImplicitlyCopyable):
    """The arguments of a launch with dropout."""

    @__allow_legacy_any_origin_fields
    var state: ImmPtr[DType.uint32]
    """Four words; the last one is not read."""
    var keep_threshold: Int32
    """An element is kept if its 16-bit random number is below this limit."""


@always_inline
def philox(counter: SIMD[DType.uint32, 4], key: SIMD[DType.uint32, 2]) -> SIMD[DType.uint32, 4]:
    """Return four random words."""
    var words = counter
    comptime for round in range(ROUNDS):
        var first = words[0].cast[DType.uint64]() * 0xD2511F53
        var second = words[2].cast[DType.uint64]() * 0xCD9E8D57
        var key0 = key[0] + UInt32(round * 0x9E3779B9 % 2**32)
        var key1 = key[1] + UInt32(round * 0xBB67AE85 % 2**32)
        words[0] = (second >> 32).cast[DType.uint32]() ^ words[1] ^ key0
        words[2] = (first >> 32).cast[DType.uint32]() ^ words[3] ^ key1
        words[1] = second.cast[DType.uint32]()
        words[3] = first.cast[DType.uint32]()
    return words


@always_inline
def update_less_than(word: UInt32, digit: UInt32, less_so_far: UInt32) -> UInt32:
    """Update a bitwise comparison of 32 numbers with a limit by one binary digit, lowest digit first.

    Args:
        word: One digit of each number.
        digit: The limit's digit, as all ones or 0.
        less_so_far: Whether the lower digits of each number are below the limit's.
    """
    return (~word & digit) | ((~word | digit) & less_so_far)


@always_inline
def bit_index(query: Int, key: Int) -> Int:
    """Return the index of the bit for one of 32 queries and one of 16 keys."""
    return query % 2 * 16 + query // 16 * 8 + key % 2 * 4 + query // 8 % 2 * 2 + key // 8


@always_inline
def make_opaque(word: UInt32) -> UInt32:
    """Return the word through an opaque copy, so that the compiler computes it here and only once."""
    return inlined_assembly["", UInt32, constraints="=r,0", has_side_effect=True](word)


struct Dropout(Copyable, Movable):
    """The random numbers for one head."""

    var key: SIMD[DType.uint32, 2]
    var head: UInt32
    """The index of the head across the batch."""
    var call: UInt32
    """A number that distinguishes this call from others with the same key."""
    var keep_threshold: UInt32
    """An element is kept if its 16-bit random number is below this limit."""
    var keep_fraction: Float32
    """The fraction of elements kept."""

    @always_inline
    def __init__(out self, state: ImmPtr[DType.uint32], keep_threshold: Int32, head: Int):
        """Read the random state; see `DropoutArguments`."""
        self.key = SIMD[DType.uint32, 2](state[unsafe_offset=0], state[unsafe_offset=1])
        self.call = state[unsafe_offset=2]
        self.head = UInt32(head)
        self.keep_threshold = UInt32(keep_threshold)
        self.keep_fraction = Float32(keep_threshold) / KEEP_ONE

    @always_inline
    def rescale(self) -> Float32:
        """Return the factor for kept probabilities."""
        return 1 / self.keep_fraction if self.keep_fraction != 0 else 0

    @always_inline
    def digit(self, index: UInt32) -> UInt32:
        """Return digit `index` of the limit as all ones or 0."""
        return 0 - (self.keep_threshold >> index & 1)

    @always_inline
    def draw(
        self, query: UInt32, key: UInt32, number: UInt32, philox_key: SIMD[DType.uint32, 2]
    ) -> SIMD[DType.uint32, 4]:
        """Return four words: digits 4 * `number` to 4 * `number` + 3 of the elements around a query and a
        key; `philox_key` is the key for Philox.
        """
        var counter = SIMD[DType.uint32, 4](
            (key // 16 * 4 + key % 8 // 2) * 4 + number,
            query // 32 * 4 + query % 8 // 2,
            self.head,
            self.call,
        )
        return philox(counter, philox_key)

    @always_inline
    def mark_dropped[
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
            # Whether these digits make a number less than the limit if its lower digits do not
            # (`without_carry`), and if they do (`with_carry`).
            var without_carry = UInt32(0)
            var with_carry = ~UInt32(0)
            # Without `make_opaque`, the keys of all rounds would stay in registers that the products need.
            var key = SIMD[DType.uint32, 2](make_opaque(self.key[0]), make_opaque(self.key[1]))
            comptime for number in range(2):
                var words = self.draw(
                    first_query + UInt32(eight * 8),
                    first_key + UInt32(pair * 8),
                    upper * 2 + UInt32(number),
                    key,
                )
                comptime for i in range(4):
                    var digit = self.digit(upper * 8 + UInt32(number * 4 + i))
                    without_carry = update_less_than(words[i], digit, without_carry)
                    with_carry = update_less_than(words[i], digit, with_carry)
            var other_without_carry = warp.shuffle_xor(without_carry, UInt32(4))
            var other_with_carry = warp.shuffle_xor(with_carry, UInt32(4))
            var keep_bits = without_carry | with_carry & other_without_carry
            if upper == 0:
                keep_bits = other_without_carry | other_with_carry & without_carry
            keep_bits >>= shift
            comptime for at in range(min(queries, 4)):
                comptime for behind in range(2):
                    comptime for side in range(2):
                        comptime i = pair + behind if transposed else eight + at
                        comptime j = eight + at if transposed else pair + behind
                        comptime frag = i // 2 * columns + j
                        comptime e = i % 2 * 2 + side
                        comptime bit = bit_index(
                            at * 8 + (side if transposed else 0), behind * 8 + (0 if transposed else side)
                        )
                        var weight = weights[frag][e]
                        weights[frag][e] = weight if keep_bits & UInt32(1 << bit) != 0 else -weight
