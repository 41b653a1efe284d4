"""A matrix product for the CPU: C = sum over k of A[k, i] * B[k, j], vectorised, in parallel, in a fixed order.

Both operands are packed before they are used: laid out in the order in which the innermost loop reads them, in
panels that fit a cache (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). Packing
costs little beside the product, and buys two freedoms: an operand may lie transposed, and it need not exist at all,
as long as an `Operand` can say what its elements are. So the LayerNorm output is never stored.

`pack_columns` packs B, for all; `multiply_block` computes a block of rows of C, whose caller decides what becomes of
it; `share_blocks` gives the blocks to the threads. An element of C adds up the sums of `RUN` neighbouring k, in their
order, whoever computes it: the result is the same to the last bit on any number of threads, and the error of a long
sum grows with the number of runs, not of terms.
"""

from std.atomic import Atomic
from std.math import align_up, ceildiv, fma, gcd
from std.memory.alloc import unsafe_alloc
from std.sys import num_logical_cores, prefetch, simd_width_of
from max.algorithm import sync_parallelize

from .common import ImmPtr, MutPtr, accum_type

comptime SLIVER_ROWS = 6 if simd_width_of[DType.float32]() == 8 else 12
"""Rows of the tile of C that lives in registers; two vectors wide, it fills 12 of AVX2's 16 registers, or 24 of
the 32 of AVX-512 and NEON."""
comptime sliver_columns[accum: DType] = 2 * simd_width_of[accum]()
"""Columns of the tile of C that lives in registers."""
comptime PANEL_DEPTH = 512
"""How many k a panel holds: more of them means fewer visits to C, and larger panels."""
comptime RUN = 128
"""How many terms are summed in registers before they are added to C."""
comptime BLOCK_ROWS = 192
"""The most rows in a block; their panel of A stays in the second-level cache."""
comptime BLOCK_ELEMENTS = 1 << 21
"""And about the most elements of C in it: a thread keeps one block."""
comptime FEWEST_ROWS = 2 * SLIVER_ROWS
"""The fewest; with fewer still, fetching the panels of B would cost more than using them."""
comptime BLOCKS = 16
"""How many blocks to make of few rows: enough for as many threads, whatever their number is."""
comptime GROUP = 4
"""Slivers of B that are packed together."""


def block_rows(rows: Int, columns: Int) -> Int:
    """Rows of a block of C: whole tiles, and the same on every machine."""
    var most = min(BLOCK_ROWS, BLOCK_ELEMENTS // columns // SLIVER_ROWS * SLIVER_ROWS)
    var wanted = align_up(ceildiv(rows, BLOCKS), SLIVER_ROWS)
    return max(FEWEST_ROWS, min(wanted, most))


def padded_columns[accum: DType](columns: Int) -> Int:
    """The distance between the rows of C: `columns`, rounded up to whole tiles."""
    return align_up(columns, sliver_columns[accum])


def aligned_alloc[dtype: DType](count: Int) -> MutPtr[dtype]:
    """Uninitialised memory that starts on a cache line; to be freed by `unsafe_free`."""
    return unsafe_alloc[Scalar[dtype]](count, alignment=64).as_unsafe_any_origin()


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


def share_blocks[F: def(Int, Int) -> None, //](blocks: Int, body: F):
    """Calls body(block, worker) for every block; a thread that is done takes the next one.

    No two calls with the same `worker`, which is less than `workers(blocks)`, run at the same time.
    """
    var next = unsafe_alloc[Int64](1).as_unsafe_any_origin()
    next[] = 0

    def work(worker: Int) {imm}:
        var block = Int(Atomic[Int64].fetch_add(next, 1))
        while block < blocks:
            body(block, worker)
            block = Int(Atomic[Int64].fetch_add(next, 1))

    sync_parallelize(work, workers(blocks))
    next.unsafe_free()


def workers(blocks: Int) -> Int:
    """How many threads `share_blocks` uses at most."""
    return min(blocks, num_logical_cores())


def pack_columns[
    B: Operand, //, accum: DType
](
    panels: MutPtr[accum],  # [count, padded_columns], in panels of PANEL_DEPTH, these in slivers
    b: B,
    columns: Int,
    first_k: Int,
    count: Int,
):
    """Packs the rows first_k, ... of B for `multiply_block`."""
    comptime width = sliver_columns[accum]
    var stride = padded_columns[accum](columns)
    var groups = ceildiv(stride, GROUP * width)

    def pack_group(task: Int, worker: Int) {imm}:
        var k = task // groups * PANEL_DEPTH
        var depth = min(PANEL_DEPTH, count - k)
        var start = task % groups * GROUP * width
        for column in range(start, min(start + GROUP * width, stride), width):
            pack[accum, width](
                panels.unsafe_offset(k * stride + column * depth),
                b,
                column,
                min(width, columns - column),
                first_k + k,
                depth,
            )

    share_blocks(ceildiv(count, PANEL_DEPTH) * groups, pack_group)


def multiply_block[
    A: Operand, //, accum: DType
](
    c: MutPtr[accum],  # [rows rounded up to whole tiles, stride]
    stride: Int,
    a: A,
    panels: ImmPtr[accum],  # [count, stride], of B, by `pack_columns`
    packed: MutPtr[accum],  # [BLOCK_ROWS, PANEL_DEPTH], scratch for A
    first_row: Int,
    rows: Int,
    first_k: Int,
    count: Int,
    add: Bool,
):
    """The rows first_row, ... of the product over first_k, ..., which C becomes, or which is added to C."""
    comptime width = sliver_columns[accum]
    for k in range(0, count, PANEL_DEPTH):
        var depth = min(PANEL_DEPTH, count - k)
        for row in range(0, rows, SLIVER_ROWS):
            pack[accum, SLIVER_ROWS](
                packed.unsafe_offset(row * depth),
                a,
                first_row + row,
                min(SLIVER_ROWS, rows - row),
                first_k + k,
                depth,
            )
        # The panel of A stays in the second-level cache, and a sliver of B is used for all of its rows.
        for column in range(0, stride, width):
            for row in range(0, rows, SLIVER_ROWS):
                multiply_tile[accum](
                    c.unsafe_offset(row * stride + column),
                    stride,
                    packed.unsafe_offset(row * depth).as_imm(),
                    panels.unsafe_offset(k * stride + column * depth).as_imm(),
                    depth,
                    add or k > 0,
                )


@always_inline
def multiply_tile[
    accum: DType
](
    c: MutPtr[accum],  # [SLIVER_ROWS, width], rows `stride` apart
    stride: Int,
    a: ImmPtr[accum],  # [depth, SLIVER_ROWS]
    b: ImmPtr[accum],  # [depth, width]
    depth: Int,
    add: Bool,
):
    """The innermost loop: a tile of C in registers, one outer product for each k; C is overwritten, or added to.
    """
    comptime lanes = simd_width_of[accum]()
    comptime vectors = sliver_columns[accum] // lanes
    # C is needed after the loop; ask for it now.
    comptime for i in range(SLIVER_ROWS):
        comptime for v in range(vectors):
            prefetch(c.unsafe_offset(i * stride + v * lanes))
    for first in range(0, depth, RUN):
        var sums = Array[SIMD[accum, lanes], SLIVER_ROWS * vectors](fill=0)
        for k in range(first, min(first + RUN, depth)):
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
                var before = tile.unsafe_load[width=lanes](0) if add or first > 0 else SIMD[accum, lanes](0)
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
        # The widest vector of which a sliver, of A or of B, is made of whole ones.
        comptime lanes = gcd(width, simd_width_of[accum]())
        for k in range(count):
            for i in range(0, present - present % lanes, lanes):
                copy[lanes](k, i)
            for i in range(present - present % lanes, present):
                copy[1](k, i)
    for k in range(count if present < width else 0):
        for i in range(present, width):
            sliver[unsafe_offset=k * width + i] = 0
