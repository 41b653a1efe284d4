"""Packed sequences of unequal lengths for the kernels in `kernels.mojo`: which sequence a block works on.

The sequences are concatenated in tensors [heads, total, d]. Offsets are the first row of each sequence and
the end of the last one: `count` + 1 numbers for the queries, then `count` + 1 for the keys. The host does not
read them, so the grid has enough blocks for any offsets: total // rows + count slots per head. Sequence i has
the slots from start // rows + i on: enough for its tiles, and at most one too many. A block with a slot past
the last tile does nothing.
"""

from std.math import ceildiv
from max.gpu import lane_id
from max.gpu.primitives import warp

from .tensors import FlashSizes
from shared.common import ImmPtr

comptime LANES = 32
"""Lanes of a warp; each reads one offset at a time."""
comptime PAST_END_ROW = 2**30
"""A row past the end of every sequence."""


def count_slots(total: Int, count: Int, rows: Int) -> Int:
    """Return the number of slots of a head."""
    return total // rows + count


@always_inline
def first_slot_of(start: Int, sequence: Int, rows: Int) -> Int:
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
    def from_slot[
        rows: Int, by_keys: Bool, dtype: DType
    ](mask: ImmPtr[dtype], slot: Int, mut sizes: FlashSizes) -> Self:
        """Return the sequence of a slot of `rows` keys or queries, from the offsets passed as the mask, and
        set `sizes` to those of the sequence.
        """
        var offsets = mask.unsafe_bitcast[Int32]()
        var count = Int(sizes.mask_block)
        var queries = Int(sizes.query_len)
        var keys = Int(sizes.key_len)
        var searched = offsets.unsafe_offset(count + 1 if by_keys else 0)
        var total = keys if by_keys else queries
        # Find the last sequence whose first slot is not after this slot, by a 32-ary search among `remaining`
        # sequences from `sequence` on.
        var sequence = 0
        var remaining = count
        while remaining > 1:
            var stride = ceildiv(remaining, LANES)
            var probe = Int(lane_id()) * stride
            var num_before = Int32(0)
            if probe < remaining:
                var start = clamp_offset(Int(searched[unsafe_offset=sequence + probe]), 0, total)
                num_before = 1 if first_slot_of(start, sequence + probe, rows) <= slot else 0
            comptime for distance in range(5):
                num_before += warp.shuffle_xor(num_before, UInt32(1 << distance))
            var skipped = max(Int(num_before) - 1, 0) * stride
            sequence += skipped
            remaining = min(stride, remaining - skipped)
        var first_query = clamp_offset(Int(offsets[unsafe_offset=sequence]), 0, queries)
        var first_key = clamp_offset(Int(offsets[unsafe_offset=count + 1 + sequence]), 0, keys)
        var end = clamp_offset(Int(offsets[unsafe_offset=sequence + 1]), first_query, queries)
        sizes.query_len = Int32(end - first_query)
        end = clamp_offset(Int(offsets[unsafe_offset=count + 2 + sequence]), first_key, keys)
        sizes.key_len = Int32(end - first_key)
        var first_slot = first_slot_of(first_key if by_keys else first_query, sequence, rows)
        # Slots before the first sequence have no rows of any sequence.
        return Self(
            first_query, first_key, (slot - first_slot) * rows if slot >= first_slot else PAST_END_ROW
        )


@always_inline
def clamp_offset(offset: Int, lowest: Int, highest: Int) -> Int:
    """Clamp an offset to [lowest, highest]."""
    return min(max(offset, lowest), highest)
