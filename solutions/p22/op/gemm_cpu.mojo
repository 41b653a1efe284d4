"""A matrix product for the CPU: C = sum over k of A[k, i] * B[k, j], vectorised, in parallel, in a fixed order.

Both operands are packed into panels just before they are used: a panel fits a cache and is laid out in the order in
which the innermost loop reads it (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
Packing costs little beside the product, and buys two freedoms: an operand may lie transposed, and it need not exist
at all, as long as an `Operand` can say what its elements are. So the LayerNorm output is never stored.

An element of C sums its k in panels of `PANEL_DEPTH`, one after the other, whoever computes it: the result is the
same to the last bit on any number of threads, and the error grows with the number of panels, not of terms.
"""

from std.math import align_up, ceildiv, fma
from std.memory.alloc import unsafe_alloc
from std.sys import prefetch, simd_width_of
from max.algorithm import sync_parallelize

from .common import ImmPtr, MutPtr, accum_type

comptime SLIVER_ROWS = 6 if simd_width_of[DType.float32]() == 8 else 12
"""Rows of the tile of C that lives in registers; two vectors wide, it fills 12 of AVX2's 16 registers, or 24 of
the 32 of AVX-512 and NEON."""
comptime BLOCK_ROWS = 192
"""Rows of a block of C: what one task computes at a time. Its panel of A stays in the second-level cache."""
comptime PANEL_DEPTH = 512
"""How many k a panel holds: more of them means fewer visits to C, and a larger panel."""
comptime SUPERBLOCK_ELEMENTS = 1 << 22
"""About how many elements of C are worked on at once; a panel of B is packed once for all of them."""


comptime sliver_columns[accum: DType] = 2 * simd_width_of[accum]()
"""Columns of the tile of C that lives in registers."""


def padded_columns[accum: DType](columns: Int) -> Int:
    """The distance between the rows of C: `columns`, rounded up to whole tiles."""
    return align_up(columns, sliver_columns[accum])


def superblock_rows[accum: DType](rows: Int, columns: Int) -> Int:
    """How many rows of C to compute at a time: whole blocks, about SUPERBLOCK_ELEMENTS of them."""
    var most = SUPERBLOCK_ELEMENTS // padded_columns[accum](columns) // BLOCK_ROWS * BLOCK_ROWS
    return min(align_up(rows, BLOCK_ROWS), max(BLOCK_ROWS, most))


trait Operand(ImplicitlyCopyable):
    """One operand of a product, by the index that is summed, k, and the one that stays, i."""

    comptime accum: DType
    """The type in which its elements are multiplied."""
    comptime along_k: Bool
    """Whether neighbours in memory differ in k; else they differ in i."""

    def load[width: Int](self, k: Int, i: Int) -> SIMD[Self.accum, width]:
        """The element [k, i] and its next `width - 1` neighbours in memory."""
        ...


struct Matrix[dtype: DType, transposed: Bool](Operand):
    """A matrix that lies in memory as [k, i], or, transposed, as [i, k]."""

    comptime accum = accum_type[Self.dtype]
    comptime along_k = Self.transposed

    var data: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    var stride: Int

    def __init__(out self, data: ImmPtr[Self.dtype], stride: Int):
        """A view of `data`, whose rows lie `stride` elements apart."""
        self.data = data.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.stride = stride

    @always_inline
    def load[width: Int](self, k: Int, i: Int) -> SIMD[Self.accum, width]:
        var index = i * self.stride + k if Self.along_k else k * self.stride + i
        return self.data.unsafe_load[width=width](index).cast[Self.accum]()


def product[
    A: Operand, B: Operand, //, accum: DType
](
    c: MutPtr[accum],  # [rows rounded up to whole blocks, padded_columns]
    a: A,
    b: B,
    first_row: Int,
    rows: Int,
    columns: Int,
    depth: Int,
):
    """Rows first_row, first_row + 1, ... of the product. What lies beyond `rows` and `columns` is overwritten too.
    """
    comptime width = sliver_columns[accum]
    var stride = padded_columns[accum](columns)
    var slivers = stride // width
    var panel = unsafe_alloc[Scalar[accum]](PANEL_DEPTH * stride, alignment=64).as_unsafe_any_origin()
    for first_k in range(0, max(depth, 1), PANEL_DEPTH):
        var count = min(PANEL_DEPTH, depth - first_k)

        def pack_columns(sliver: Int) {imm}:
            var first = sliver * width
            pack[accum, width](
                panel.unsafe_offset(first * count), b, first, min(width, columns - first), first_k, count
            )

        def multiply_block(block: Int) {imm}:
            var first = block * BLOCK_ROWS
            multiply_panel[accum](
                c.unsafe_offset(first * stride),
                panel.as_imm(),
                a,
                first_row + first,
                min(BLOCK_ROWS, rows - first),
                slivers,
                first_k,
                count,
            )

        sync_parallelize(pack_columns, slivers)
        sync_parallelize(multiply_block, ceildiv(rows, BLOCK_ROWS))
    panel.unsafe_free()


def multiply_panel[
    A: Operand, //, accum: DType
](
    c: MutPtr[accum],  # [BLOCK_ROWS, slivers * width]
    panel: ImmPtr[accum],  # [slivers, count, width], of B
    a: A,
    first_row: Int,
    rows: Int,
    slivers: Int,
    first_k: Int,
    count: Int,
):
    """Adds the product over one panel of k to a block of C; the first panel overwrites it."""
    comptime width = sliver_columns[accum]
    var stride = slivers * width
    var block = unsafe_alloc[Scalar[accum]](BLOCK_ROWS * PANEL_DEPTH, alignment=64).as_unsafe_any_origin()
    for row in range(0, rows, SLIVER_ROWS):
        pack[accum, SLIVER_ROWS](
            block.unsafe_offset(row * count), a, first_row + row, min(SLIVER_ROWS, rows - row), first_k, count
        )
    # The block of A stays in the second-level cache, and a sliver of B is used for all of its rows.
    for sliver in range(slivers):
        for row in range(0, rows, SLIVER_ROWS):
            multiply_tile[accum](
                c.unsafe_offset(row * stride + sliver * width),
                stride,
                block.unsafe_offset(row * count).as_imm(),
                panel.unsafe_offset(sliver * count * width).as_imm(),
                count,
                first_k > 0,
            )
    block.unsafe_free()


@always_inline
def multiply_tile[
    accum: DType
](
    c: MutPtr[accum],  # [SLIVER_ROWS, width], rows `stride` apart
    stride: Int,
    a: ImmPtr[accum],  # [count, SLIVER_ROWS]
    b: ImmPtr[accum],  # [count, width]
    count: Int,
    add: Bool,
):
    """The innermost loop: a tile of C in registers, one outer product for each k."""
    comptime lanes = simd_width_of[accum]()
    comptime vectors = sliver_columns[accum] // lanes
    # C is needed after the loop; ask for it now.
    comptime for i in range(SLIVER_ROWS):
        comptime for v in range(vectors):
            prefetch(c.unsafe_offset(i * stride + v * lanes))
    var sums = Array[SIMD[accum, lanes], SLIVER_ROWS * vectors](fill=0)
    for k in range(count):
        var b_row = Array[SIMD[accum, lanes], vectors](fill=0)
        comptime for v in range(vectors):
            b_row[v] = b.unsafe_load[width=lanes]((k * vectors + v) * lanes)
        comptime for i in range(SLIVER_ROWS):
            var a_element = SIMD[accum, lanes](a[unsafe_offset=k * SLIVER_ROWS + i])
            comptime for v in range(vectors):
                sums[i * vectors + v] = fma(a_element, b_row[v], sums[i * vectors + v])
    comptime for i in range(SLIVER_ROWS):
        comptime for v in range(vectors):
            var tile = c.unsafe_offset(i * stride + v * lanes)
            var before = tile.unsafe_load[width=lanes](0) if add else SIMD[accum, lanes](0)
            tile.unsafe_store(0, before + sums[i * vectors + v])


def pack[
    O: Operand, //, accum: DType, width: Int
](sliver: MutPtr[accum], operand: O, first: Int, present: Int, first_k: Int, count: Int):
    """Lays out [first_k + k, first + i] of an operand as [count, width], with zeros where i is `present` or more.
    """

    @always_inline
    def copy[lanes: Int](k: Int, i: Int) {imm}:
        var elements = rebind[SIMD[accum, lanes]](operand.load[lanes](first_k + k, first + i))
        comptime if O.along_k:
            comptime for lane in range(lanes):
                sliver[unsafe_offset=(k + lane) * width + i] = elements[lane]
        else:
            sliver.unsafe_store(k * width + i, elements)

    comptime if O.along_k:
        comptime lanes = simd_width_of[accum]()
        for k in range(0, count - count % lanes, lanes):
            for i in range(present):
                copy[lanes](k, i)
        for k in range(count - count % lanes, count):
            for i in range(present):
                copy[1](k, i)
    else:
        # The largest vector that divides the width of a sliver of A as well as of B.
        comptime lanes = 4 if width % simd_width_of[accum]() != 0 else simd_width_of[accum]()
        comptime assert width % lanes == 0, "a sliver must be whole vectors wide"
        for k in range(count):
            for i in range(0, present - present % lanes, lanes):
                copy[lanes](k, i)
            for i in range(present - present % lanes, present):
                copy[1](k, i)
    for k in range(count if present < width else 0):
        for i in range(present, width):
            sliver[unsafe_offset=k * width + i] = 0
