"""Attention within a window of a grid, for the kernels of `fast_kernels.mojo`: a position sees those that are near it on the grid.

A window is one array of 32-bit words. First comes the place of every position, its row in the upper half of the word and its
column in the lower, and FAR for positions past the end, up to a multiple of ROWS. Behind them there is for every tile of TILE
positions a row of bits, one for each tile that it has to look at; the lowest bit of a word comes first. Both relations are
symmetric, so that the kernel which walks over queries reads the same array.

In FlashSizes `mask_block` is the radius, the largest distance along rows and along columns, and `mask_t` the words of a row of
bits.
"""

from std.bit import count_trailing_zeros
from std.math import ceildiv
from std.memory import AddressSpace
from max.gpu import lane_id, thread_idx
from max.gpu.memory import async_copy

from .fast_tiles import HIDDEN, SharedPtr, Sums
from .flash_tensors import FlashSizes
from .shared.common import ImmPtr

comptime TILE = 64
"""Positions in a tile."""
comptime ROWS = 128
"""What the number of places is a multiple of: the positions of the largest block."""
comptime FAR = UInt32(0x3FFF3FFF)
"""The place of a position that there is not. Rows, columns and radius are below 0x2000: nothing is near it."""
comptime GUARD = UInt32(0x40004000)
"""Above the coordinates: keeps the two halves of a difference apart, and is gone from a half below 0."""
comptime WORD = 32
"""Bits of a word."""


# ANCHOR: near
@always_inline
def near(one: UInt32, other: UInt32, sizes: FlashSizes) -> Bool:
    """Whether two places lie within the window of each other: neither difference, plus the radius, is below 0.
    """
    var reach = UInt32(sizes.mask_block) * UInt32(0x10001) + GUARD
    return (one + reach - other) & (other + reach - one) & GUARD == GUARD


# ANCHOR_END: near


@fieldwise_init
struct Window[tile: Int, rows: Int](Copyable, Movable):
    """The window as a block of `rows` positions reads it."""

    @__allow_legacy_any_origin_fields
    var places: ImmPtr[DType.uint32]
    """Of all positions."""

    @__allow_legacy_any_origin_fields
    var bits: ImmPtr[DType.uint32]
    """The block's first row of bits."""
    var count: Int
    """How many rows of bits the block has,"""
    var words: Int
    """of so many words."""

    @always_inline
    def __init__[dtype: DType](out self, mask: ImmPtr[dtype], first: Int, sizes: FlashSizes):
        """For the positions from `first` on."""
        comptime assert Self.rows % TILE == 0 and ROWS % Self.rows == 0, "a block owns whole tiles"
        var length = Int(sizes.query_len)
        self.places = mask.unsafe_bitcast[UInt32]()
        self.words = Int(sizes.mask_t)
        self.bits = self.places.unsafe_offset(ceildiv(length, ROWS) * ROWS + first // TILE * self.words)
        self.count = min(Self.rows, length - first + TILE - 1) // TILE

    @always_inline
    def word(self, index: Int) -> UInt32:
        """A word of what the block needs: of all its rows of bits."""
        var all = self.bits[unsafe_offset=index]
        comptime for row in range(1, Self.rows // TILE):
            if row < self.count:
                all |= self.bits[unsafe_offset=row * self.words + index]
        return all

    # ANCHOR: following
    @always_inline
    def following(self, position: Int) -> Int:
        """Where the first tile begins, from a tile's beginning on, that the block needs; past all of them if there is none.
        """
        comptime assert Self.tile == TILE, "the kernels go from tile to tile"
        var tile = position // TILE
        var index = tile // WORD
        if index >= self.words:
            return self.words * WORD * TILE
        var left = self.word(index) >> UInt32(tile % WORD) << UInt32(tile % WORD)
        while left == 0:
            index += 1
            if index >= self.words:
                return self.words * WORD * TILE
            left = self.word(index)
        return (index * WORD + Int(count_trailing_zeros(left))) * TILE

    # ANCHOR_END: following


@always_inline
def load_places[count: Int](target: SharedPtr[DType.uint32], places: ImmPtr[DType.uint32], first: Int):
    """Copies the places of `count` positions."""
    comptime together = 4
    if thread_idx.x < count // together:
        async_copy[16](
            places.unsafe_offset(first + thread_idx.x * together).unsafe_address_space_cast[
                AddressSpace.GLOBAL
            ](),
            target.unsafe_offset(thread_idx.x * together),
        )


@always_inline
def places_of[bands: Int](places: ImmPtr[DType.uint32], first: Int) -> Array[UInt32, 2 * bands]:
    """The places of a lane's rows, of those that its warp owns from `first` on."""
    var own = Array[UInt32, 2 * bands](fill=0)
    comptime for half in range(2 * bands):
        own[half] = places[unsafe_offset=first + half * 8 + lane_id() // 4]
    return own^


@always_inline
def hide_far[
    bands: Int, columns: Int
](
    mut scores: Array[Sums, bands * columns],
    own: Array[UInt32, 2 * bands],
    others: SharedPtr[DType.uint32],
    sizes: FlashSizes,
):
    """Makes the scores of pairs that are not near each other -inf: rows are the own places, columns the others.
    """
    comptime for column in range(columns):
        var pair = others.unsafe_load[width=2, alignment=8](column * 8 + lane_id() % 4 * 2)
        comptime for band in range(bands):
            comptime for e in range(4):
                comptime place = band * columns + column
                if not near(own[2 * band + e // 2], pair[e % 2], sizes):
                    scores[place][e] = HIDDEN
