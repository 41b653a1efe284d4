"""Packed sequences of unequal lengths for the kernels in `kernels.mojo`: which sequence a block works on.

The sequences are concatenated in tensors [heads, total, d]. Offsets say where each begins and the last one
ends: `count` + 1 numbers for the queries, then `count` + 1 for the keys. The host does not read them, so the
grid has enough blocks for any offsets: total // rows + count slots per head. Sequence i has the slots from
start // rows + i on: enough for its tiles, and at most one too many. A block with a slot past the last tile
does nothing.
"""

from std.math import ceildiv
from max.gpu import lane_id
from max.gpu.primitives import warp

from .tensors import FlashSizes
from shared.common import ImmPtr

comptime LANES = 32
"""Lanes of a warp; each reads one offset at a time."""
comptime PAST = 2**30
"""A row past the end of every sequence."""


def slots(total: Int, count: Int, rows: Int) -> Int:
    """Return the number of slots of a head."""
    return total // rows + count


@always_inline
def slot_of(start: Int, sequence: Int, rows: Int) -> Int:
    """Return the first slot of a sequence that begins at row `start`."""
    return start // rows + sequence


@fieldwise_init
struct Sequence(Copyable, Movable):
    """The rows of a head that a block works on.

    Offsets are not trusted: they are clamped to the tensors.
    """

    var first_query: Int
    """The first row of the sequence's queries."""
    var first_key: Int
    """The first row of the sequence's keys."""
    var row: Int
    """The block's first row within the sequence; at or past the end if the block has no rows."""

    @staticmethod
    @always_inline
    def whole() -> Self:
        """Return the only sequence of a batch that is not packed."""
        return Self(0, 0, 0)

    @staticmethod
    @always_inline
    def of_slot[
        rows: Int, of_keys: Bool, dtype: DType
    ](mask: ImmPtr[dtype], slot: Int, mut sizes: FlashSizes) -> Self:
        """Return the sequence of a slot of `rows` keys or queries, from the offsets passed as the mask, and
        set `sizes` to those of the sequence.
        """
        var offsets = mask.unsafe_bitcast[Int32]()
        var count = Int(sizes.mask_block)
        var queries = Int(sizes.query_len)
        var keys = Int(sizes.key_len)
        var walked = offsets.unsafe_offset(count + 1 if of_keys else 0)
        var total = keys if of_keys else queries
        # Find the last sequence whose first slot is not after this slot, by a 32-ary search among `left`
        # sequences from `sequence` on.
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
        # Slots before the first sequence have no rows of any sequence.
        return Self(first_query, first_key, (slot - first_slot) * rows if slot >= first_slot else PAST)


@always_inline
def inside(offset: Int, least: Int, most: Int) -> Int:
    """Clamp an offset to [least, most]."""
    return min(max(offset, least), most)
