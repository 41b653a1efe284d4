"""Attention within a window of a grid, for the kernels of `fast_kernels.mojo`: a position sees those that are near it on the grid.

A window is one array of 32-bit words, which the kernels read and the host makes (`harness/nn/window.py`), once for all heads:

- for every block of positions, and past the last, where its list begins;
- the lists, an entry for every tile of TILE positions that any of the block's positions sees: the tile's number, then for each
  of the block's own tiles where the pattern of its pairs begins, 0 if there are none;
- the patterns, of which a grid has few: which positions of one tile see which of another. A word is a lane's share of 16 x 64
  scores, the lowest bit first; a pattern has the words of its first 16 rows, of the next 16, and so on.

"Sees" is symmetric, so that the kernel which walks over queries reads the same array.
"""

from max.gpu import lane_id, thread_idx

from .fast_tiles import HIDDEN, Sums
from .shared.common import ImmPtr

comptime TILE = 64
"""Positions in a tile."""
comptime GROUPS = TILE // 16
"""Sixteens of rows in a tile."""
comptime LANES = 32
"""Words of 16 rows of a pattern."""
comptime PAST = 2**30
"""Where there is no position any more."""


struct Window[rows: Int](Copyable, Movable):
    """The walk of a block of `rows` positions over the tiles that it needs."""

    comptime tiles = Self.rows // TILE
    comptime entry_words = 1 + Self.tiles

    @__allow_legacy_any_origin_fields
    var words: ImmPtr[DType.uint32]
    var entry: Int
    """Where the entry begins at which the walk is,"""
    var end: Int
    """where the list ends,"""
    var ahead: UInt32
    """and the tile of the entry after it: read a step early, because the answer takes time."""

    @always_inline
    def __init__[dtype: DType](out self, mask: ImmPtr[dtype]):
        """Nowhere: `enter` begins a walk."""
        self.words = mask.unsafe_bitcast[UInt32]()
        self.entry = 0
        self.end = 0
        self.ahead = 0

    @always_inline
    def enter(mut self, block: Int):
        """Goes before the first tile of a block."""
        self.entry = Int(self.words[unsafe_offset=block]) - Self.entry_words
        self.end = Int(self.words[unsafe_offset=block + 1])
        self.ahead = self.words[unsafe_offset=self.entry + Self.entry_words]

    # ANCHOR: following
    @always_inline
    def following(mut self) -> Int:
        """Goes to the next tile: where it begins, PAST if there is none."""
        var tile = self.ahead
        self.entry += Self.entry_words
        self.ahead = self.words[unsafe_offset=self.entry + Self.entry_words]
        return Int(tile) * TILE if self.entry < self.end else PAST

    # ANCHOR_END: following

    @always_inline
    def pattern(self, group: Int) -> Int:
        """Where the pattern begins of 16 of the block's rows, counted by 16, and the tile at which the walk is; 0 if there is none.
        """
        return Int(self.words[unsafe_offset=self.entry + 1 + group // GROUPS])

    # ANCHOR: seen
    @always_inline
    def seen[bands: Int](self) -> Array[UInt32, bands]:
        """The lane's words of its warp's pattern, one for each 16 rows; all are 0 where there is no pair."""
        var group = thread_idx.x // 32 * bands
        var pattern = self.pattern(group)
        var words = Array[UInt32, bands](fill=0)
        if pattern != 0:
            comptime for band in range(bands):
                var place = (group % GROUPS + band) * LANES + lane_id()
                words[band] = self.words[unsafe_offset=pattern + place]
        return words^

    # ANCHOR_END: seen

    @always_inline
    def needed[bands: Int](self) -> Bool:
        """Whether the warp's rows need the tile at which the walk is; a neighbour of theirs may need it alone.
        """
        return Self.tiles == 1 or self.pattern(thread_idx.x // 32 * bands) != 0


# ANCHOR: hide
@always_inline
def hide_far[
    bands: Int, columns: Int
](mut scores: Array[Sums, bands * columns], seen: Array[UInt32, bands], before: Int):
    """Makes the scores -inf of pairs that do not see each other, of `columns` columns after the first `before`.
    """
    comptime for band in range(bands):
        var bits = seen[band] >> UInt32(4 * before)
        comptime for column in range(columns):
            comptime for e in range(4):
                if bits & UInt32(1 << (4 * column + e)) == 0:
                    scores[band * columns + column][e] = HIDDEN


# ANCHOR_END: hide
