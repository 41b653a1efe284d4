"""Masks for the kernels in `kernels.mojo`: their tiles in shared memory, and the tiles of keys that a mask
hides.

A tile of a mask has queries as rows and keys as columns, with the same chunks and swizzle as all tiles.
`ldmatrix` reads 16 x 16 elements in the layout of a lane's accumulators, transposed if the scores are. If the
mask is one row for all queries, its tiles have one row.
"""

from std.math import ceildiv
from std.memory import AddressSpace, bitcast
from max.gpu import lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix
from max.gpu.memory import async_copy
from max.gpu.primitives import warp

from .tiles import CHUNK, SharedPtr, Sums
from .tensors import FlashSizes
from shared.common import ImmPtr

comptime LANES = 32
"""Lanes of a warp."""
comptime TILES_PER_LOAD = 4
comptime TILES_PER_CHECK = 16
"""Tiles of keys that a warp checks at a time."""


@always_inline
def is_one_row(sizes: FlashSizes) -> Bool:
    """Return whether all queries of a head share one row of the mask with one element per key. True without a
    mask, which counts as a row of zeros.
    """
    return sizes.mask_s == 0 and sizes.mask_block <= 1


@always_inline
def is_tile_hidden[
    dtype: DType, //, rows: Int, columns: Int
](mask: ImmPtr[dtype], head: Int, s0: Int, t0: Int, sizes: FlashSizes) -> Bool:
    """Return whether a block mask hides every key of a tile from every query, so that its products can be
    skipped.
    """
    var block = Int(sizes.mask_block)
    if block < 16:
        return False
    var head_mask = mask.unsafe_offset(sizes.head_mask_offset(head))
    for s in range(s0 // block, ceildiv(min(s0 + rows, Int(sizes.query_len)), block)):
        for t in range(t0 // block, ceildiv(min(t0 + columns, Int(sizes.key_len)), block)):
            var element = s * Int(sizes.mask_s) + t * Int(sizes.mask_t)
            if head_mask[unsafe_offset=element] != Scalar[dtype].MIN:
                return False
    return True


@always_inline
def swizzle_key[columns: Int](row: Int) -> Int:
    """Return the number with which a row's chunk indices are XORed, so that eight rows read at a time are in
    different banks.
    """
    comptime chunks = min(8, columns // CHUNK)
    return row // (8 // chunks) % chunks


@always_inline
def to_float32[dtype: DType, //](elements: SIMD[dtype, 8]) -> SIMD[DType.float32, 8]:
    """Convert to float32. A bfloat16 is the upper half of a float32, so one shift or one bitwise and converts
    it.
    """
    comptime if dtype == DType.bfloat16:
        var pairs = bitcast[DType.uint32, 4](elements)
        return bitcast[DType.float32, 8]((pairs << 16).interleave(pairs & 0xFFFF0000))
    else:
        return elements.cast[DType.float32]()


struct MaskTile[dtype: DType, columns: Int](Copyable, Movable):
    """Loads tiles of one head's mask, `columns` keys wide, and adds them to the scores."""

    @__allow_legacy_any_origin_fields
    var mask: ImmPtr[Self.dtype]
    var pitch: Int
    """The row pitch of a tile in elements; 0 if it has only one row."""
    var in_chunks: Bool
    """Whether the mask's rows can be copied 16 bytes at a time."""

    @always_inline
    def __init__(out self, mask: ImmPtr[Self.dtype], sizes: FlashSizes):
        """Store the address and layout of a head's mask."""
        self.mask = mask
        self.pitch = 0 if is_one_row(sizes) else Self.columns
        self.in_chunks = sizes.mask_block == 1 and sizes.mask_t == 1
        self.in_chunks = self.in_chunks and Int(mask) % 16 == 0 and sizes.mask_s % CHUNK == 0

    @always_inline
    def elements[rows: Int](self) -> Int:
        """Return the number of elements in a tile of `rows` rows."""
        return rows * self.pitch if self.pitch else Self.columns

    @always_inline
    def load[
        rows: Int, threads: Int
    ](self, target: SharedPtr[Self.dtype], s0: Int, t0: Int, sizes: FlashSizes):
        """Copy the mask for `rows` queries from s0 on and `columns` keys from t0 on; elements outside the
        mask are undefined.
        """
        comptime chunks = Self.columns // CHUNK
        comptime rows_per_pass = threads // chunks
        comptime assert rows_per_pass % 8 == 0, "a thread's chunk has the same swizzle in each of its rows"
        var count = rows if self.pitch else 1
        var S = Int(sizes.query_len)
        var T = Int(sizes.key_len)
        var row = thread_idx.x // chunks
        var t = t0 + thread_idx.x % chunks * CHUNK
        var target_chunk = target.unsafe_offset(self.chunk_of(row, thread_idx.x % chunks))
        var bytes = 2 * max(0, min(CHUNK, T - t))
        # Not unrolled, because the addresses would take registers that the products need.
        for below in range(row, count, rows_per_pass):
            var s = s0 + below
            var target_row = target_chunk.unsafe_offset((below - row) * Self.columns)
            if self.in_chunks:
                var exists = s < S and bytes > 0
                async_copy[16, fill=Scalar[Self.dtype](0)](
                    self.mask.unsafe_offset(
                        s * Int(sizes.mask_s) + t if exists else 0
                    ).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                    target_row,
                    Int32(bytes if exists else 0),
                )
                continue
            for e in range(CHUNK):
                if sizes.mask_block == 0:
                    target_row[unsafe_offset=e] = 0
                    continue
                var at = sizes.mask_offset(min(s, S - 1), min(t + e, T - 1))
                target_row[unsafe_offset=e] = self.mask[unsafe_offset=at]

    @staticmethod
    @always_inline
    def chunk_of(row: Int, chunk: Int) -> Int:
        """Return the offset of a row's chunk in a tile."""
        return row * Self.columns + (chunk ^ swizzle_key[Self.columns](row)) * CHUNK

    @always_inline
    def add[
        bands: Int, columns_per_band: Int, transposed: Bool = False
    ](
        self,
        mut scores: Array[Sums, bands * columns_per_band],
        scale: Float32,
        tile: SharedPtr[Self.dtype],
        row: Int,
        column: Int,
    ):
        """Scale products and add the mask. The warp's queries are the tile's rows from `row` on, its keys the
        tile's columns from `column` on. If `transposed`, the scores have keys as rows and queries as columns.
        """
        var lane = Int(lane_id())
        # This lane provides the address of this row and chunk of the four matrices.
        var below = lane % 8 + lane // 16 * 8 if transposed else lane % 16
        var right = lane // 8 % 2 if transposed else lane // 16
        var key = swizzle_key[Self.columns](below) if self.pitch else 0
        var start = tile.unsafe_offset((row + below) * self.pitch)
        comptime for band in range(bands):
            comptime for pair in range(columns_per_band // 2):
                comptime down = 16 * (pair if transposed else band)
                comptime along = 2 * (band if transposed else pair)
                var at = start.unsafe_offset(
                    down * self.pitch + ((column // CHUNK + along + right) ^ key) * CHUNK
                )
                var elements = to_float32(ld_matrix[8, transpose=transposed](at))
                comptime for side in range(2):
                    comptime target_chunk = band * columns_per_band + 2 * pair + side
                    scores[target_chunk] = scores[target_chunk].fma(
                        scale, elements.slice[4, offset=4 * side]()
                    )


@always_inline
def visible_tiles[
    dtype: DType, //, step: Int, count: Int
](mask: ImmPtr[dtype], t0: Int, sizes: FlashSizes) -> UInt32:
    """Return one bit for each of `count` tiles of `step` keys from t0 on: whether a one-row mask leaves any
    of its keys visible. All lanes of a warp must call it; the loads of four tiles overlap.
    """
    if sizes.mask_block == 0:
        return 0xFFFFFFFF
    var bits = UInt32(0)
    for first in range(0, count, TILES_PER_LOAD):
        comptime for i in range(min(count, TILES_PER_LOAD) * step // LANES):
            var t = t0 + first * step + i * LANES + lane_id()
            var element = mask[unsafe_offset=min(t, Int(sizes.key_len) - 1) * Int(sizes.mask_t)]
            var visible = t < Int(sizes.key_len) and element != Scalar[dtype].MIN
            bits |= (UInt32(1) if visible else 0) << UInt32(first + (i * LANES + lane_id()) // step)
    comptime for distance in range(5):
        bits |= warp.shuffle_xor(bits, UInt32(1 << distance))
    return bits


@always_inline
def are_keys_hidden[
    dtype: DType, //, count: Int
](mask: ImmPtr[dtype], head: Int, t0: Int, sizes: FlashSizes) -> Bool:
    """Return whether a head's one-row mask hides all of `count` keys from t0 on."""
    return visible_tiles[count, 1](mask.unsafe_offset(sizes.head_mask_offset(head)), t0, sizes) == 0


struct VisibleTiles[dtype: DType, step: Int](Copyable, Movable):
    """The tiles of `step` keys in which a one-row mask leaves a key visible. Each warp keeps its own bits,
    for many tiles at a time.
    """

    @__allow_legacy_any_origin_fields
    var mask: ImmPtr[Self.dtype]
    var bits: UInt32
    var first: Int
    """The first key of the lowest bit's tile."""

    @always_inline
    def __init__(out self, mask: ImmPtr[Self.dtype]):
        """Store the address of a head's mask without reading it."""
        self.mask = mask
        self.bits = 0
        self.first = -Self.step * TILES_PER_CHECK

    @always_inline
    def following(mut self, t: Int, end: Int, sizes: FlashSizes) -> Int:
        """Return the first key of the next tile with a visible key, from t on; t is a multiple of step.
        Return `end` or more if there is none.
        """
        var next = t
        while next < end:
            if next >= self.first + Self.step * TILES_PER_CHECK:
                self.first = next
                self.bits = visible_tiles[Self.step, TILES_PER_CHECK](self.mask, next, sizes)
            if (self.bits >> UInt32((next - self.first) // Self.step)) & 1:
                break
            next += Self.step
        return next
