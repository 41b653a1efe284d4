"""Tiles of 16-bit elements in shared memory, and their products with `mma.sync`.

A tile has rows of `width` elements in chunks of 16 bytes. Chunk c of row r is stored at c ^ (r % 8), so that
the eight rows that `ldmatrix` reads at a time are in different banks; rows start at multiples of eight
chunks. Accumulators are `mma` fragments, four float32 per lane for 16 x 8 elements: lane l holds element (l /
4, 2 (l % 4)) and the next one, then the two elements 8 rows below. Two neighbouring fragments, rounded, form
a left operand of the next product, so P and dS never leave registers.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import lane_id, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.memory import async_copy

from shared.common import ImmPtr, MutPtr

comptime SharedPtr[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED]
"""The address of a tile in shared memory."""
comptime Sums = SIMD[DType.float32, 4]
"""A lane's share of 16 x 8 accumulators."""
comptime HIDDEN = Float32.MIN
"""The score of a key that a query does not see: minus infinity."""
comptime CHUNK = 8
"""Elements in 16 bytes: one asynchronous copy, or one row of an `ldmatrix` matrix."""
comptime MAX_HEAD_DIM = 256
"""The widest tile: the largest head dimension."""
comptime SLAB = 64
"""Elements in eight chunks, the period of the swizzle."""


def row_pitch[width: Int]() -> Int:
    """Return the row pitch of a tile in elements."""
    return ceildiv(width, SLAB) * SLAB


# ---- From memory to shared memory ---------------------------------------------------------------------------


@always_inline
def load_tile[
    dtype: DType, //, rows: Int, width: Int, threads: Int, inside: Bool = False
](target: SharedPtr[dtype], source: ImmPtr[dtype], first: Int, count: Int, pitch: Int, d: Int):
    """Copy `rows` rows, starting at row `first`, of a matrix [count, d] whose rows are `pitch` elements
    apart.

    Elements outside the matrix become 0. If `inside`, the tile is inside the matrix and bounds are not
    checked.
    """
    comptime target_pitch = row_pitch[width]()
    # Wide tiles are copied in slabs, because the number of threads need not be a multiple of a row's chunks.
    comptime slab = width if width <= 2 * SLAB else SLAB
    comptime chunks = slab // CHUNK
    comptime rows_per_pass = threads // chunks
    comptime assert rows_per_pass % 8 == 0, "a thread's chunk has the same swizzle in each of its rows"
    comptime assert rows % rows_per_pass == 0, "every thread has equally many rows"
    var chunk = thread_idx.x % chunks
    var row = thread_idx.x // chunks
    var frag = target.unsafe_offset(row * target_pitch + (chunk ^ (row % 8)) * CHUNK)
    var start = (first + row) * pitch + chunk * CHUNK
    if inside or (first + rows <= count and d == target_pitch):
        comptime for slab_start in range(0, target_pitch, slab):
            comptime for i in range(rows // rows_per_pass):
                async_copy[16](
                    source.unsafe_offset(
                        start + i * rows_per_pass * pitch + slab_start
                    ).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                    frag.unsafe_offset(i * rows_per_pass * target_pitch + slab_start),
                )
        return
    comptime if inside:
        return
    comptime for slab_start in range(0, target_pitch, slab):
        var column = chunk * CHUNK + slab_start
        comptime for i in range(rows // rows_per_pass):
            var inside = first + row + i * rows_per_pass < count
            var at = start + i * rows_per_pass * pitch + slab_start
            comptime to = i * rows_per_pass * target_pitch + slab_start
            var exists = inside and column < d
            async_copy[16, fill=Scalar[dtype](0)](
                source.unsafe_offset(at if exists else 0).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                frag.unsafe_offset(to),
                Int32(16) if exists else 0,
            )


@always_inline
def load_numbers[
    count: Int, threads: Int
](
    target: SharedPtr[DType.float32],
    first: ImmPtr[DType.float32],
    second: ImmPtr[DType.float32],
    start: Int,
    end: Int,
):
    """Copy `count` numbers from `start` on of each of two arrays, one array after the other; numbers from
    `end` on become 0.
    """
    comptime for part in range(ceildiv(2 * count, threads)):
        var index = thread_idx.x + part * threads
        var source = first if index < count else second
        var at = start + index % count
        if 2 * count % threads == 0 or index < 2 * count:
            async_copy[4, fill=Float32(0)](
                source.unsafe_offset(at if at < end else start).unsafe_address_space_cast[
                    AddressSpace.GLOBAL
                ](),
                target.unsafe_offset(index),
                Int32(4) if at < end else 0,
            )


# ---- From shared memory to the tensor cores -----------------------------------------------------------------


struct Lane[width: Int](Copyable, Movable):
    """This lane's row addresses for `ldmatrix`, which loads four 8 x 8 matrices.

    `down` orders the matrices 16 rows down, then right, as for a left operand, or a right one stored
    transposed; `across` orders them two chunks right, then down, as for a right operand whose columns are the
    tile's rows.
    """

    var _down: StaticTuple[Int32, 4]
    var _across: StaticTuple[Int32, 4]

    @always_inline
    def __init__(out self):
        """Compute the addresses of this lane."""
        var lane = Int32(lane_id())
        var row = lane % 8
        self._down = StaticTuple[Int32, 4]()
        self._across = StaticTuple[Int32, 4]()
        comptime for pair in range(4):
            self._down[pair] = (
                lane % 16 * Int32(row_pitch[Self.width]()) + ((Int32(2 * pair) + lane // 16) ^ row) * CHUNK
            )
            self._across[pair] = (row + lane // 16 * 8) * Int32(row_pitch[Self.width]()) + (
                (Int32(2 * pair) + lane // 8 % 2) ^ row
            ) * CHUNK

    @always_inline
    def down[pair: Int](self) -> Int:
        """Return the offset for the chunks 2 pair and 2 pair + 1; the swizzle stays within eight chunks."""
        return Int(self._down[pair % 4]) + pair // 4 * 64

    @always_inline
    def across[pair: Int](self) -> Int:
        """Return the offset for the chunks 2 pair and 2 pair + 1."""
        return Int(self._across[pair % 4]) + pair // 4 * 64


struct LeftOperand[dtype: DType, bands: Int, width: Int, in_registers: Bool](Copyable, Movable):
    """The 16 * bands rows of a tile that a warp owns, as a left operand; loaded into registers once if
    `in_registers`.
    """

    @__allow_legacy_any_origin_fields
    var tile: SharedPtr[Self.dtype]
    var lane: Lane[Self.width]
    var _fragments: Array[SIMD[Self.dtype, 8], (Self.bands * Self.width // 16) if Self.in_registers else 1]

    @always_inline
    def __init__(out self, tile: SharedPtr[Self.dtype], lane: Lane[Self.width]):
        """Set the rows, which begin at `tile`; if `in_registers`, load them now, so they must have arrived.
        """
        self.tile = tile
        self.lane = lane.copy()
        self._fragments = Array[
            SIMD[Self.dtype, 8], (Self.bands * Self.width // 16) if Self.in_registers else 1
        ](fill=0)
        comptime if Self.in_registers:
            comptime for band in range(Self.bands):
                comptime for k in range(Self.width // 16):
                    self._fragments[band * (Self.width // 16) + k] = ld_matrix[8](
                        tile.unsafe_offset(band * 16 * row_pitch[Self.width]() + lane.down[k]())
                    )

    @always_inline
    def fragment[band: Int, k: Int](self) -> SIMD[Self.dtype, 8]:
        """Return the fragment of 16 rows and elements 16 k to 16 k + 15."""
        comptime if Self.in_registers:
            return self._fragments[band * (Self.width // 16) + k]
        else:
            return ld_matrix[8](
                self.tile.unsafe_offset(band * 16 * row_pitch[Self.width]() + self.lane.down[k]())
            )

    @always_inline
    def multiply_transposed[
        columns: Int
    ](
        self,
        right: SharedPtr[Self.dtype],
        initial: Array[Sums, Self.bands * columns],
    ) -> Array[
        Sums, Self.bands * columns
    ]:
        """Return initial + own @ right^T, where right has 8 * columns rows."""
        var sums = Array[Sums, Self.bands * columns](fill=0)
        comptime for frag in range(Self.bands * columns):
            sums[frag] = initial[frag]
        comptime for k in range(Self.width // 16):
            var left = Array[SIMD[Self.dtype, 8], Self.bands](fill=0)
            comptime for band in range(Self.bands):
                left[band] = self.fragment[band, k]()
            comptime for pair in range(columns // 2):
                var right_fragments = ld_matrix[8](
                    right.unsafe_offset(pair * 16 * row_pitch[Self.width]() + self.lane.across[k]())
                )
                comptime for band in range(Self.bands):
                    comptime for side in range(2):
                        comptime frag = band * columns + 2 * pair + side
                        var sum = sums[frag]
                        mma(sum, left[band], right_fragments.slice[4, offset=4 * side](), sums[frag])
                        sums[frag] = sum
        return sums^


@always_inline
def add_product[
    dtype: DType, //, bands: Int, columns: Int, width: Int
](
    mut sums: Array[Sums, bands * (width // 8)],
    left: Array[Sums, bands * columns],
    right: SharedPtr[dtype],
    lane: Lane[width],
):
    """Compute sums += left @ right, where right has 8 * columns rows; left is rounded to the tile's dtype."""
    comptime for k in range(columns // 2):
        var rounded = Array[SIMD[dtype, 8], bands](fill=0)
        comptime for band in range(bands):
            comptime first = band * columns + 2 * k
            rounded[band] = left[first].join(left[first + 1]).cast[dtype]()
        comptime for pair in range(width // 16):
            var right_fragments = ld_matrix[8, transpose=True](
                right.unsafe_offset(k * 16 * row_pitch[width]() + lane.down[pair]())
            )
            comptime for band in range(bands):
                comptime for side in range(2):
                    comptime frag = band * (width // 8) + 2 * pair + side
                    var sum = sums[frag]
                    mma(sum, rounded[band], right_fragments.slice[4, offset=4 * side](), sums[frag])
                    sums[frag] = sum


@always_inline
def store_rows[
    dtype: DType, //, bands: Int, width: Int
](
    target: MutPtr[dtype],
    sums: Array[Sums, bands * (width // 8)],
    factors: Array[Float32, 2 * bands],
    first: Int,
    count: Int,
    pitch: Int,
    d: Int,
):
    """Write a warp's sums to the rows from `first` on of a matrix [count, d], each row times its own
    factor.
    """
    comptime for half in range(2 * bands):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            comptime for j in range(width // 8):
                var column = j * 8 + lane_id() % 4 * 2
                var from_sums = sums[half // 2 * (width // 8) + j]
                var pair = SIMD[DType.float32, 2](from_sums[half % 2 * 2], from_sums[half % 2 * 2 + 1])
                var rounded = (pair * factors[half]).cast[dtype]()
                if j * 8 < d:
                    target.unsafe_store[alignment=4](row * pitch + column, rounded)
