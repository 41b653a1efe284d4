"""Sequences of unequal lengths, one after another, for the kernels of `kernels.mojo`: which of them a block works on.

The sequences lie in one batch of tensors [heads, total, d]. Offsets say where each begins and the last ends: `count` + 1 numbers of
queries, then as many of keys. Nobody but the GPU has read them, so that the grid has blocks for whatever they may be:
total // rows + count slots for each head. Sequence i has those from start // rows + i on, which are enough for its tiles and one too many
at most; a slot past the last tile has nothing to do.
"""

from std.math import ceildiv
from max.gpu import lane_id
from max.gpu.primitives import warp

from .tensors import FlashSizes
from shared.common import ImmPtr

comptime LANES = 32
"""Of a warp, which read as many offsets at once."""
comptime PAST = 2**30
"""Where there is no row any more."""


def slots(total: Int, count: Int, rows: Int) -> Int:
    """How many blocks a head has."""
    return total // rows + count


@always_inline
def slot_of(start: Int, sequence: Int, rows: Int) -> Int:
    """The first slot of a sequence that begins at row `start`."""
    return start // rows + sequence


@fieldwise_init
struct Sequence(Copyable, Movable):
    """Which rows of a head a block works on.

    Offsets are taken as they are, and never for what lies outside of the tensors.
    """

    var first_query: Int
    """The row with which the sequence's queries begin,"""
    var first_key: Int
    """and its keys."""
    var row: Int
    """The block's first row, of the sequence; at or past the end there is none."""

    @staticmethod
    @always_inline
    def whole() -> Self:
        """The one sequence of a batch that is not made of several."""
        return Self(0, 0, 0)

    @staticmethod
    @always_inline
    def of_slot[
        rows: Int, of_keys: Bool, dtype: DType
    ](mask: ImmPtr[dtype], slot: Int, mut sizes: FlashSizes) -> Self:
        """That of a slot of `rows` keys or queries; the offsets lie where there would be a mask. The sizes become the sequence's.
        """
        var offsets = mask.unsafe_bitcast[Int32]()
        var count = Int(sizes.mask_block)
        var queries = Int(sizes.query_len)
        var keys = Int(sizes.key_len)
        var walked = offsets.unsafe_offset(count + 1 if of_keys else 0)
        var total = keys if of_keys else queries
        # The last sequence whose first slot is not after this one: of `left` from `sequence` on. Lanes ask for 32 at once.
        var sequence = 0
        var left = count
        while left > 1:
            var stride = ceildiv(left, LANES)
            var probe = Int(lane_id()) * stride
            var before = Int32(0)
            if probe < left:
                var start = inside(Int(walked[unsafe_offset=sequence + probe]), 0, total)
                before = 1 if slot_of(start, sequence + probe, rows) <= slot else 0
            comptime for distance in range(5):
                before += warp.shuffle_xor(before, UInt32(1 << distance))
            var passed = max(Int(before) - 1, 0) * stride
            sequence += passed
            left = min(stride, left - passed)
        var first_query = inside(Int(offsets[unsafe_offset=sequence]), 0, queries)
        var first_key = inside(Int(offsets[unsafe_offset=count + 1 + sequence]), 0, keys)
        var end = inside(Int(offsets[unsafe_offset=sequence + 1]), first_query, queries)
        sizes.query_len = Int32(end - first_query)
        end = inside(Int(offsets[unsafe_offset=count + 2 + sequence]), first_key, keys)
        sizes.key_len = Int32(end - first_key)
        var first_slot = slot_of(first_key if of_keys else first_query, sequence, rows)
        # Rows before the first sequence have slots too.
        return Self(first_query, first_key, (slot - first_slot) * rows if slot >= first_slot else PAST)


@always_inline
def inside(offset: Int, least: Int, most: Int) -> Int:
    """The offset, or the nearest end of what there is."""
    return min(max(offset, least), most)
