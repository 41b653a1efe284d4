"""float32 tensors as pairs of float16, for the tensor cores: split into tiles, and the choice of who multiplies.

x is taken as high + low: high is s x rounded to float16, low what is left of s x, rounded too, with a power of two s that
brings the largest element of a tile to 2^14 and more. Together they keep 22 bits, of elements far below the largest too. A
product of two is made of three,

    low high + high low + high high

and what is left out, low low, is below the rounding of float32. Tensor cores cut off what does not fit their running sums,
so that every tile's products get sums of their own, which are added outside. Splitting: Ootomo and Yokota, "Recovering
single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022.

A tile is 64 rows of a head, in boxes of 64 elements of each: zeros fill what a head has less. It lies in memory as it will lie in
shared memory, box after box, of each the high half then the low half, chunks of 16 bytes swizzled. The tiles of all tensors are
counted in one row (`TileRows`), each with a record: what undoes its scale, and how large its rows are. From the records `choose_path_kernel` finds, on the device,
whether all of it is in the range that pairs are good for. Both paths are launched; the one that is not chosen does nothing.
"""

from std.math import ceildiv, exp2, sqrt
from std.memory import bitcast
from std.sys.info import _is_sm_9x_or_newer
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import async_copy
from max.gpu.primitives import warp
from std.memory import AddressSpace
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from .fast_scores import LOG2_E
from .fast_tiles import CHUNK, SharedPtr
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr, start_later_grids, wait_for_earlier_grids
from .shared.gemm_pairs import LARGEST_EXPONENT, MANY_BITS

comptime HALF_TYPE = DType.float16
comptime SIDE = 64
"""Rows of a tile, and elements of a box's rows."""
comptime WIDE_PAIRS = 2 * SIDE
"""The largest head dimension of the kernels for every GPU,"""
comptime WIDEST_PAIRS = 4 * SIDE
"""and of those for Hopper."""
comptime HALF_TILE = SIDE * SIDE
"""Elements of one half of a box."""
comptime SPLIT_THREADS = 256
"""Threads of a block that splits a tile; eight share a row,"""
comptime SPLIT_ROWS = SPLIT_THREADS // (SIDE // CHUNK)
"""which makes so many rows at once."""
comptime CHOOSE_THREADS = 1024
comptime CHOOSE_AHEAD = 4
"""Records that each of them asks for at once."""
comptime ENOUGH_IN_ORDER = 768
"""So many blocks, three rounds of a large GPU, are begun with their longest ones first: see `place_of_block`."""
comptime RECORD = 4
"""Numbers of a record: see `Record`."""
comptime SMALLEST = -45
comptime LARGEST = 30
"""Exponents between which the largest element of a tensor must be: products of what undoes the scales stay normal."""
comptime WIDEST_SCORE = Float32(16384)
"""The largest score, to the base 2, up to which pairs are taken. Far beyond, in float32 too, the rounding of a score moves its
exponential by more than float16's range allows for."""
comptime PAIRS = Int32(0)
"""The path of the tensor cores,"""
comptime PLAIN = Int32(1)
"""and that of the flash kernels."""
comptime WEIGHT = Float32(1 << LARGEST_EXPONENT)
"""What probabilities are multiplied by before they are split. Within the exponential it would cost digits of those near 1."""
comptime LOG2_E_REST = Float32(1.9259629911266175e-8)
"""What LOG2_E is short of."""
comptime NUMBERS = 3
"""Of a query in a backward pass: see `write_numbers`."""


# ---- Tiles and records --------------------------------------------------------------------------------------


struct TileRows(Copyable, Movable):
    """Where in the row of all tiles those of each tensor are: query's, key's, value's, then, in a backward pass,
    grad_output's."""

    var of_queries: Int
    """Tiles of a head of query,"""
    var of_keys: Int
    """and of key."""
    var _key: Int
    var _value: Int
    var _grad: Int

    @always_inline
    def __init__(out self, sizes: FlashSizes):
        """For these sizes."""
        self.of_queries = ceildiv(Int(sizes.query_len), SIDE)
        self.of_keys = ceildiv(Int(sizes.key_len), SIDE)
        self._key = sizes.heads() * self.of_queries
        self._value = self._key + sizes.shared_heads() * self.of_keys
        self._grad = self._value + sizes.shared_heads() * self.of_keys

    @always_inline
    def query(self, head: Int) -> Int:
        """The first tile of a head of query."""
        return head * self.of_queries

    @always_inline
    def key(self, shared_head: Int) -> Int:
        """The first tile of a head of key."""
        return self._key + shared_head * self.of_keys

    @always_inline
    def value(self, shared_head: Int) -> Int:
        """The first tile of a head of value."""
        return self._value + shared_head * self.of_keys

    @always_inline
    def grad(self, head: Int) -> Int:
        """The first tile of a head of grad_output; of head 0, how many tiles a forward pass has."""
        return self._grad + head * self.of_queries

    @always_inline
    def shared(self, shared_head: Int) -> Int:
        """Where among the tiles of key, or of value, those of a head are in memory;"""
        return shared_head * self.of_keys

    @always_inline
    def grad_here(self, head: Int) -> Int:
        """and where those of grad_output are, which follow query's."""
        return self._key + head * self.of_queries

    @always_inline
    def tensor(self, tile: Int) -> Int:
        """Whose a tile is: 0 for query's, 1 for key's, 2 for value's, 3 for grad_output's."""
        return Int(tile >= self._key) + Int(tile >= self._value) + Int(tile >= self._grad)


@fieldwise_init
struct Record(Copyable, Movable):
    """What is known of a tile."""

    var undo: Float32
    """The power of two that undoes its scale."""
    var norm: Float32
    """The largest Euclidean norm of a row."""
    var delta: Float32
    """The largest |delta| of its rows, of grad_output's tiles; else 0."""
    var largest: Float32
    """The largest |x|; infinite where something, or delta, is not finite."""

    @always_inline
    def __init__(out self, records: ImmPtr[DType.float32], tile: Int):
        """Reads one."""
        var numbers = records.unsafe_load[width=RECORD, alignment=16](tile * RECORD)
        self = Self(numbers[0], numbers[1], numbers[2], numbers[3])


@always_inline
def inverse_power(power: Float32) -> Float32:
    """1 / power, of a power of two."""
    return bitcast[DType.float32, 1](UInt32(254 << 23) - bitcast[DType.uint32, 1](power))


@always_inline
def power_below(x: Float32) -> Float32:
    """The largest power of two that is not above x > 0, within [2^-100, 2^100]."""
    var bits = bitcast[DType.uint32, 1](x) & MANY_BITS
    return bitcast[DType.float32, 1](min(max(bits, UInt32(27 << 23)), UInt32(227 << 23)))


@always_inline
def score_factor(own: Record, other: Record, scale: Float32) -> Float32:
    """What makes scores to the base 2 of the products of two tiles; never 0, which would make NaN of a hidden score.
    """
    return max(own.undo * other.undo * (scale * LOG2_E), Float32(1e-30))


@always_inline
def slope_power(grad: Record, value: Record) -> Float32:
    """A power of two below which |dP - delta| is within twice of, of all pairs of rows of two tiles (Cauchy and Schwarz).
    """
    return power_below(grad.norm * value.norm + grad.delta)


@always_inline
def place_of_block(index: Int, of_head: Int, heads: Int, sizes: FlashSizes) -> Tuple[Int, Int]:
    """The head of a block, and which of the head's `of_head` blocks it is; of these the first have the longest walks.

    One head after the other; but where queries do not see every key, the first blocks of many heads come before the second ones,
    so that the last ones to begin are short.
    """
    var together = max(1, ENOUGH_IN_ORDER // of_head) if sizes.keys_seen(0) < Int(sizes.key_len) else 1
    var first = index // (of_head * together) * together
    var here = min(together, heads - first)
    var rest = index - first * of_head
    return (first + rest % here, rest // here)


def boxes_of[width: Int]() -> Int:
    """Boxes of a tile of heads of up to `width` elements."""
    return ceildiv(width, SIDE)


@always_inline
def load_pair_rows[
    rows: Int, threads: Int, boxes: Int, here: Int = rows
](target: SharedPtr[HALF_TYPE], source: ImmPtr[HALF_TYPE]):
    """Copies rows of a tile, from where they begin in the first box's high half, to where they begin among `here` rows.
    """
    comptime for half in range(2 * boxes):
        comptime for i in range(rows * (SIDE // CHUNK) // threads):
            var at = (i * threads + thread_idx.x) * CHUNK
            async_copy[16](
                source.unsafe_offset(half * HALF_TILE + at).unsafe_address_space_cast[AddressSpace.GLOBAL](),
                target.unsafe_offset(half * here * SIDE + at),
            )


@always_inline
def take_turn():
    """Lets the next launch begin, where that is asked for, and waits until the one in front of this is done.
    """
    comptime if _is_sm_9x_or_newer():
        start_later_grids()
        wait_for_earlier_grids()


# ---- Splitting ----------------------------------------------------------------------------------------------


@always_inline
def largest_of_block[
    width: SIMDLength, //, threads: Int
](numbers: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """The largest of each number of a block's threads, in all of them."""
    var of_warps = stack_allocation[dtype=DType.float32, address_space=AddressSpace.SHARED, alignment=16](
        row_major[threads // 32, Int(width)]()
    ).ptr
    var largest = numbers
    comptime for i in range(Int(width)):
        comptime for distance in range(5):
            largest[i] = max(largest[i], warp.shuffle_xor(largest[i], UInt32(1 << distance)))
    if thread_idx.x % 32 == 0:
        of_warps.unsafe_store[alignment=16](thread_idx.x // 32 * Int(width), largest)
    barrier()
    comptime for i in range(threads // 32):
        largest = max(largest, of_warps.unsafe_load[width=width, alignment=16](i * Int(width)))
    return largest


@always_inline
def magnitude(x: Float32) -> Float32:
    """|x|, and infinity for what is not finite."""
    var size = abs(x)
    return size if bitcast[DType.uint32, 1](size) < MANY_BITS else Float32.MAX


@always_inline
def load_chunk[
    whole: Bool
](source: ImmPtr[DType.float32], row: Int, rows: Int, column: Int, d: Int) -> SIMD[DType.float32, CHUNK]:
    """Eight elements of a row of a matrix [rows, d], 0 outside of it. `whole`, where every row is made of aligned chunks: then there
    is no branch, so that a thread's loads are all on their way before it waits for the first.
    """
    var inside = row < rows and column < d
    var values = SIMD[DType.float32, CHUNK](0)
    comptime if whole:
        var chunk = source.unsafe_load[width=CHUNK, alignment=16](row * d + column if inside else 0)
        values = chunk if inside else values
    else:
        comptime for i in range(CHUNK):
            if inside and column + i < d:
                values[i] = source[unsafe_offset=row * d + column + i]
    return values


@always_inline
def load_chunks[
    boxes: Int, rows: Int
](source: ImmPtr[DType.float32], first: Int, length: Int, column: Int, d: Int) -> Array[
    SIMD[DType.float32, CHUNK], boxes * rows
]:
    """A thread's chunks of a tile, box after box: of each SPLIT_ROWS-th row from `first` on."""
    var values = Array[SIMD[DType.float32, CHUNK], boxes * rows](fill=0)
    if d % CHUNK == 0 and Int(source) % 16 == 0:
        comptime for at in range(boxes * rows):
            values[at] = load_chunk[True](
                source, first + at % rows * SPLIT_ROWS, length, column + at // rows * SIDE, d
            )
    else:
        comptime for at in range(boxes * rows):
            values[at] = load_chunk[False](
                source, first + at % rows * SPLIT_ROWS, length, column + at // rows * SIDE, d
            )
    return values^


@always_inline
def write_numbers(target: MutPtr[DType.float32], lse: Float32, delta: Float32):
    """What the backward kernels want of a query, 64 numbers apart: what is taken from its scores to the base 2, infinite for one
    that sees no key; what its probabilities are multiplied by; and delta.

    lse * log2(e) is rounded; 2 to what that takes away is in the factor.
    """
    var shift = lse * LOG2_E
    var rest = lse.fma(LOG2_E, -shift) + lse * LOG2_E_REST
    var finite = magnitude(lse) < Float32.MAX
    target[unsafe_offset=0] = shift if lse != Float32.MIN else Float32.MAX
    target[unsafe_offset=SIDE] = WEIGHT * exp2(-rest) if finite else WEIGHT
    target[unsafe_offset=2 * SIDE] = delta


def split_tiles_kernel[
    boxes: Int
](
    tiles: MutPtr[HALF_TYPE],  # [tiles of query and grad_output, boxes, 2, 64, 64], chunks swizzled
    key_tiles: MutPtr[HALF_TYPE],  # [tiles of key, boxes, 2, 64, 64]
    value_tiles: MutPtr[HALF_TYPE],  # [tiles of value, boxes, 2, 64, 64]
    tiles_before: Int32,  # of key, and of value, in front of those of the part
    records: MutPtr[DType.float32],  # [tiles, 4]
    numbers: MutPtr[DType.float32],  # [tiles of grad_output, 3, 64], written in a backward pass
    made_delta: MutPtr[DType.float32],  # [B, N, S], written if with_output
    query: ImmPtr[DType.float32],  # [B, N, S, d]
    key: ImmPtr[DType.float32],  # [B, G, T, d]
    value: ImmPtr[DType.float32],  # [B, G, T, d]
    grad_output: ImmPtr[DType.float32],  # [B, N, S, d], read in a backward pass
    lse: ImmPtr[DType.float32],  # [B, N, S], likewise
    delta: ImmPtr[DType.float32],  # [B, N, S], likewise, if not with_output
    output: ImmPtr[DType.float32],  # [B, N, S, d], which delta is made of if with_output
    with_output: Int32,
    behind_draws: Int32,  # 1 right behind `hopper_draws_kernel`, which has waited for all that this reads
    first_entry: Int32,
    packed: PackedSizes,  # of the part of the batch from the first entry on
):
    """Splits a tile of one of the tensors, and writes its record. Grid: the tiles."""
    if behind_draws == 0:
        take_turn()
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var d = Int(sizes.head_dim)
    var tile = block_idx.x
    var tensor = places.tensor(tile)
    var of_head = places.of_queries if tensor == 0 or tensor == 3 else places.of_keys
    var length = Int(sizes.query_len if tensor == 0 or tensor == 3 else sizes.key_len)
    var source = query
    var local = tile
    var target = tiles
    var here = tile
    if tensor == 1:
        source = key
        local -= places.key(0)
        target = key_tiles
        here = Int(tiles_before) + local
    elif tensor == 2:
        source = value
        local -= places.value(0)
        target = value_tiles
        here = Int(tiles_before) + local
    elif tensor == 3:
        source = grad_output
        local -= places.grad(0)
        here = places.grad_here(0) + local
    var heads = Int(sizes.query_heads if tensor == 0 or tensor == 3 else sizes.key_heads)
    var head = Int(first_entry) * heads + local // of_head
    var first = local % of_head * SIDE
    var column = thread_idx.x % (SIDE // CHUNK) * CHUNK
    var row = thread_idx.x // (SIDE // CHUNK)
    source = source.unsafe_offset(head * length * d)

    comptime of_box = SIDE // SPLIT_ROWS
    var values = load_chunks[boxes, of_box](source, first + row, length, column, d)
    var largest = Float32(0)
    var norm = Float32(0)
    var biggest_delta = Float32(0)
    comptime for i in range(of_box):
        var s = first + row + i * SPLIT_ROWS
        var squares = Float32(0)
        comptime for box in range(boxes):
            var chunk = values[box * of_box + i]
            comptime for j in range(CHUNK):
                largest = max(largest, magnitude(chunk[j]))
            squares += (chunk * chunk).reduce_add()
        comptime for distance in range(3):
            squares += warp.shuffle_xor(squares, UInt32(1 << distance))
        norm = max(norm, sqrt(squares))
        var row_delta = Float32(0)
        if tensor == 3 and with_output != 0:
            var outputs = load_chunks[boxes, 1](output.unsafe_offset(head * length * d), s, length, column, d)
            comptime for box in range(boxes):
                row_delta += (values[box * of_box + i] * outputs[box]).reduce_add()
            comptime for distance in range(3):
                row_delta += warp.shuffle_xor(row_delta, UInt32(1 << distance))
            # An infinite dO makes each dS of its row infinity minus infinity: NaN.
            row_delta += row_delta - row_delta
        if tensor == 3 and column == 0:
            var exists = s < length
            var row_lse = lse[unsafe_offset=head * length + s] if exists else Float32.MIN
            if exists:
                if with_output != 0:
                    made_delta[unsafe_offset=head * length + s] = row_delta
                else:
                    row_delta = delta[unsafe_offset=head * length + s]
            var place = local * (NUMBERS * SIDE) + row + i * SPLIT_ROWS
            write_numbers(numbers.unsafe_offset(place), row_lse, row_delta)
            biggest_delta = max(biggest_delta, magnitude(row_delta))
    var of_all = largest_of_block[SPLIT_THREADS](SIMD[DType.float32, 4](largest, norm, biggest_delta, 0))
    largest = of_all[0]
    norm = of_all[1]
    biggest_delta = of_all[2]
    if biggest_delta == Float32.MAX:
        largest = biggest_delta

    var exponent = Int32(bitcast[DType.uint32, 1](largest) >> 23) - 127
    var shift = Int32(LARGEST_EXPONENT) - min(max(exponent, Int32(SMALLEST)), Int32(LARGEST))
    var factor = bitcast[DType.float32, 1](UInt32(shift + 127) << 23)
    if thread_idx.x == 0:
        var record = SIMD[DType.float32, RECORD](inverse_power(factor), norm, biggest_delta, largest)
        records.unsafe_store[alignment=16](tile * RECORD, record)
    comptime for i in range(boxes * of_box):
        var r = row + i % of_box * SPLIT_ROWS
        var box = here * boxes + i // of_box
        var at = box * (2 * HALF_TILE) + r * SIDE + (column // CHUNK ^ r % 8) * CHUNK
        var scaled = values[i] * factor
        var high = scaled.cast[HALF_TYPE]()
        target.unsafe_store[alignment=16](at, high)
        var low = (scaled - high.cast[DType.float32]()).cast[HALF_TYPE]()
        target.unsafe_store[alignment=16](at + HALF_TILE, low)
    if behind_draws != 0:
        take_turn()


# ---- The choice ---------------------------------------------------------------------------------------------


def choose_path_kernel(
    path: MutPtr[DType.int32],  # [1]: PAIRS or PLAIN
    records: ImmPtr[DType.float32],  # [tiles, 4]
    count: Int64,  # tiles
    packed: PackedSizes,
    scale: Float32,
):
    """One block: pairs where each tensor is 0 or its largest element within bounds, and no score can be too large.
    """
    take_turn()
    var places = TileRows(FlashSizes(packed))
    # The largest elements of the four tensors, then the longest rows of query and key.
    var largest = SIMD[DType.float32, 8](0)
    for first in range(thread_idx.x, Int(count), CHOOSE_THREADS * CHOOSE_AHEAD):
        # The last record, read again, changes nothing.
        comptime for ahead in range(CHOOSE_AHEAD):
            var tile = min(first + ahead * CHOOSE_THREADS, Int(count) - 1)
            var record = Record(records, tile)
            var tensor = places.tensor(tile)
            comptime for i in range(4):
                largest[i] = max(largest[i], record.largest if tensor == i else Float32(0))
            comptime for i in range(2):
                largest[4 + i] = max(largest[4 + i], record.norm if tensor == i else Float32(0))
    var of_all = largest_of_block[CHOOSE_THREADS](largest)
    if thread_idx.x == 0:
        var fits = of_all[4] * of_all[5] * (scale * LOG2_E) <= WIDEST_SCORE
        comptime for i in range(4):
            var exponent = Int(bitcast[DType.uint32, 1](of_all[i]) >> 23) - 127
            fits = fits and (of_all[i] == 0 or SMALLEST <= exponent <= LARGEST)
        path[unsafe_offset=0] = PAIRS if fits else PLAIN
